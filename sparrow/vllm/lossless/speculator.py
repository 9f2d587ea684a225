"""Lossless mode inside a vLLM worker: a drafter proposes, a dense pass verifies.

One cycle of a batch is up to ``draft_tokens`` drafts and one dense pass over them and the token
before them. vLLM runs that pass, samples from it and checks the drafts as for any draft model. The
sparse actor drafts with the policy's own weights and KV cache: drafts write their keys and values
where the next tokens belong, and the dense pass overwrites them. The cache therefore ends up dense,
and samples follow the dense distribution exactly (arXiv 2211.17192, 2302.01318).

Shapes: B sequences of the batch, S sequences the worker can hold, k drafts, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from sparrow.errors import ConfigError
from sparrow.vllm import config
from sparrow.vllm.lossless import plan, verify
from sparrow.vllm.lossless.drafter import Drafter, Pass
from sparrow.vllm.lossless.plan import DraftPlan
from sparrow.vllm.lossless.sparse_drafter import SparseDrafter
from sparrow.vllm.runtime import Runtime, find


class SparseSpeculator(DraftModelSpeculator):
    """Drafts with the sparse actor; to vLLM's model runner it is the speculator of a draft model.

    ``plan`` says what the next call of ``propose`` drafts. ``is_idle`` is true if the present step
    neither verifies drafts nor makes any.
    """

    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    runtime: Runtime
    model: Any
    draft_logits: Any  # float [S, k, V]

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        decoding = config.requested_lossless(vllm_config)
        assert decoding is not None and self.draft_logits is not None
        self.plan = DraftPlan(self.num_speculative_steps, budget=0)
        self.is_idle = False
        self.drafter: Drafter = SparseDrafter(decoding, self)
        self._captures = False

    # No second model and no second cache.

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        return target_model

    def load_model(self, target_model: Any) -> None:
        """Keep the target model. The speculator names no attention layers, or vLLM would give
        drafts a second cache.

        Raises UnsupportedModel: a model that the drafter cannot draft with.
        """
        self.model = target_model
        self.drafter.load(target_model)
        self.draft_attn_layer_names: set[str] = set()

    def set_attn(self, model_state: Any, kv_cache_config: Any, block_tables: Any, *_: Any) -> None:
        """Note where vLLM keeps the blocks of each sequence, and forget an earlier cache.

        vLLM initialises its cache more than once: from 0.32 on, it first measures the memory of
        CUDA graphs over a small cache, which it frees. A graph that was captured over that cache
        would read and write freed memory.

        Raises ConfigError: layers with caches of different kinds, or a setting that this cache does
        not allow.
        """
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ConfigError(
                "lossless mode needs one kind of KV cache, this model has "
                f"{len(kv_cache_config.kv_cache_groups)}; "
                "use mode 'lossy' or start vLLM without Sparrow"
            )
        runtime = find(self.vllm_config)
        assert runtime is not None
        self.runtime = runtime
        self.block_tables = block_tables
        self.attn_groups: list[Any] = []
        self.plan = self.plan._replace(budget=runtime.pages.base_budget)
        self.drafter.set_cache(runtime, block_tables)
        verify.register(self.drafter.logits, runtime)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self._captures = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL

    def capture(self) -> None:
        if self._captures:
            self.drafter.capture()

    def begin_step(self, scheduled: Any) -> None:
        """Note what to draft after a step, and whether it verifies or makes any drafts.

        Args:
            scheduled: vLLM's ``SchedulerOutput`` of the step.
        """
        self.plan = plan.drafts_after(scheduled, self.plan)
        self.is_idle = not (self.plan.tokens or scheduled.scheduled_spec_decode_tokens)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        *_: Any,
        dummy_run: bool = False,
        **__: Any,
    ) -> Tensor:
        """Draft what comes after the tokens just sampled; called by vLLM after each pass over the
        model. See ``Drafter.propose``, and ``Pass`` for the arguments.
        """
        B = input_batch.num_reqs
        # A draft step takes less memory than the passes that vLLM has tried out before it.
        if dummy_run:
            return self.draft_tokens[:B]
        prefilling = input_batch.is_prefilling_np[:B]
        is_prefilling = None
        if prefilling.any():
            is_prefilling = torch.from_numpy(prefilling).to(self.device, non_blocking=True)
        after = Pass(
            input_batch,
            is_prefilling,
            num_sampled,
            num_rejected,
            last_sampled.view(-1),
            temperature,
            seeds,
        )
        return self.drafter.propose(self.plan, after)
