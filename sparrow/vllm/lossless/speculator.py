"""Lossless mode inside a vLLM worker: a drafter proposes tokens, and a dense pass verifies them.

Each cycle makes up to ``draft_tokens`` drafts, then runs a dense pass over the drafts and the token
before them. vLLM runs this pass, samples from its logits, and verifies the drafts just as it would
for any draft model. The sparse actor drafts with the policy's own weights and KV cache. It writes
its drafts' keys and values to the slots of the next tokens, and the dense pass overwrites them. The
final cache is therefore dense, and samples follow the dense distribution exactly (arXiv 2211.17192,
2302.01318).

Shapes: B batch size, S the worker's maximum number of sequences, k drafts, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from sparrow.decoding import Decoding
from sparrow.errors import ConfigError
from sparrow.vllm import config
from sparrow.vllm.lossless import plan, verify
from sparrow.vllm.lossless.cascade import CascadeDrafter, StagedDrafter
from sparrow.vllm.lossless.drafter import Drafter, Pass
from sparrow.vllm.lossless.plan import DraftPlan
from sparrow.vllm.lossless.sparse_drafter import SparseDrafter
from sparrow.vllm.runtime import Runtime, find


class SparseSpeculator(DraftModelSpeculator):
    """A speculator that drafts with the sparse actor. To vLLM's model runner, it looks like a draft
    model's speculator.

    ``plan`` is the plan for the next call to ``propose``. ``is_idle`` is true if the current step
    neither verifies nor produces drafts, and no head has to read the step. ``reads_history`` is
    true if the drafter may look up guesses in history. In that case, ``tokens_SN`` holds every
    sequence's tokens, int32 ``[S, N]``, and vLLM updates it before calling ``propose``.
    """

    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    runtime: Runtime
    model: Any
    draft_logits: Any  # float [S, k, V]
    tokens_SN: Tensor

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        decoding = config.requested_lossless(vllm_config)
        assert decoding is not None and self.draft_logits is not None
        guesses = decoding.guess_tokens > 0
        self.has_head = decoding.guess_head is not None
        self.reads_history = guesses and (not self.has_head or decoding.lookup_min > 0)
        self.plan = DraftPlan(self.num_speculative_steps, budget=0, guesses=guesses)
        self.is_idle = False
        self.drafter = _drafter(decoding, self)
        self._captures = False

    # Without a head, there is no second model and no second cache.

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        return target_model

    def load_model(self, target_model: Any) -> None:
        """Draft with the target model. Only a head's attention layers are listed as the
        speculator's, because vLLM allocates a cache for every listed layer.

        Raises UnsupportedModel if the drafter does not support the model.
        """
        self.model = target_model
        before = self._attention_layers()
        self.drafter.load(target_model)
        after = self._attention_layers()
        self.draft_attn_layer_names = set(after) - set(before)
        for name in self.draft_attn_layer_names:
            after[name].is_draft_layer = True

    def _attention_layers(self) -> dict[str, Any]:
        kind: Any = AttentionLayerBase
        return dict(get_layers_from_vllm_config(self.vllm_config, kind))

    def set_attn(self, model_state: Any, kv_cache_config: Any, block_tables: Any, *_: Any) -> None:
        """Store vLLM's block tables, and discard anything tied to an earlier cache.

        vLLM initialises its cache more than once: from 0.32 on, it first measures CUDA graph memory
        with a small temporary cache. A graph captured with that cache would read and write freed
        memory.

        Raises ConfigError if the layers have different kinds of cache, or if a setting does not
        work with this cache.
        """
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ConfigError(
                "lossless mode needs a model with one kind of KV cache, but this model has "
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
        """Set the plan for the drafts after this step, and record whether the step involves drafts
        at all.

        Args:
            scheduled: vLLM's ``SchedulerOutput`` of the step.
        """
        self.plan = plan.drafts_after(scheduled, self.plan)
        self.is_idle = not (
            self.plan.tokens or scheduled.scheduled_spec_decode_tokens or self.has_head
        )

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
        """Draft the next tokens of each sequence. vLLM calls this after each forward pass. See
        ``Drafter.propose`` for the result and ``Pass`` for the arguments.
        """
        B = input_batch.num_reqs
        prefilling = input_batch.is_prefilling_np[:B]
        is_prefilling = None
        if prefilling.any():
            is_prefilling = torch.from_numpy(prefilling).to(self.device, non_blocking=True)
        after = Pass(
            batch=input_batch,
            is_prefilling_B=is_prefilling,
            sampled_B=num_sampled,
            rejected_B=num_rejected,
            newest_S=last_sampled.view(-1),
            next_prompt_S=next_prefill_tokens[0],
            temperature_S=temperature,
            seed_S=seeds,
            states=aux_hidden_states or [],
            metadata=attn_metadata,
            slots=slot_mappings,
        )
        self.drafter.read(after, self.plan.tokens)
        # Dummy runs measure peak memory. They need no drafts, because a draft step takes less
        # memory than the pass before it.
        if dummy_run:
            return self.draft_tokens[:B]
        return self.drafter.propose(self.plan, after)


def _drafter(decoding: Decoding, speculator: SparseSpeculator) -> Drafter:
    """Create the right drafter for these settings."""
    if not decoding.guess_tokens:
        return SparseDrafter(decoding, speculator)
    if not decoding.adapt_draft_tokens:
        return CascadeDrafter(decoding, speculator)
    return StagedDrafter(decoding, speculator)
