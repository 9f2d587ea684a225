"""Lossless mode inside a vLLM worker: the model drafts for itself, reading a few pages; a dense
pass verifies.

One cycle of a batch is up to ``draft_tokens`` sparse decode steps and one dense pass over the
drafts and the token before them. vLLM runs that pass, samples from it and checks the drafts as for
any draft model. Weights and KV cache are the policy's own: drafts write their keys and values where
the next tokens belong, and the dense pass writes them again. So what stays in the cache is dense,
and what comes out follows the dense distribution exactly (arXiv 2211.17192, 2302.01318).

Shapes: B sequences of the batch, R rows of a CUDA graph (B or more), S sequences the worker can
hold, k drafts, M blocks of the longest sequence, V vocabulary.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from sparrow.errors import ConfigError
from sparrow.vllm import config, lossless, selfcheck, versions
from sparrow.vllm.backend import Step
from sparrow.vllm.draft_weights import DraftWeights, drafting
from sparrow.vllm.meter import Meter, Metered, Tally
from sparrow.vllm.runtime import Runtime, find

DRAFT_NOISE = 0x5DEECE66D
"""Some versions of vLLM draw a draft and the token that replaces it after rejection from the same
noise. There, drafts get seeds of their own: if the two are not independent, the result does not
follow the dense distribution. With ``drafter_invariant`` nothing replaces a draft, and the noise is
the same on purpose (``sparrow.vllm.verify``)."""


@triton.jit
def _set_up(
    row,
    held,
    position,
    length,
    slots_R,
    top_k_R,
    top_k_at_length,
    blocks_SM,
    stride,
    TOKENS: tl.constexpr,
):
    """Write the slots and the page counts of a draft step; rows of length 0 have no slot."""
    block = tl.load(
        blocks_SM + row * stride + position // TOKENS, mask=held & (length > 0), other=0
    ).to(tl.int64)
    slot = tl.where(length > 0, block * TOKENS + position % TOKENS, -1)
    tl.store(slots_R + row, slot, mask=held)
    tl.store(top_k_R + row, tl.load(top_k_at_length + length, mask=held, other=0), mask=held)


@triton.jit(do_not_specialize=["B"])
def _begin_kernel(
    index_B,
    length_B,
    sampled_B,
    rejected_B,
    newest_S,
    prefilling_B,
    heat_S,
    seed_S,
    own_index_R,
    ids_R,
    positions_R,
    lengths_R,
    own_heat_S,
    own_seed_S,
    step,
    counts,
    slots_R,
    top_k_R,
    top_k_at_length,
    blocks_SM,
    B,
    S,
    limit,
    stride,
    PREFILL: tl.constexpr,
    NOISE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Set up the first draft step and count the pass before it: see ``propose`` and
    ``Runtime.count_pass``.
    """
    row = tl.arange(0, ROWS)
    inside = row < B
    index = tl.load(index_B + row, mask=inside, other=0).to(tl.int64)
    sampled = tl.load(sampled_B + row, mask=inside, other=0).to(tl.int64)
    rejected = tl.load(rejected_B + row, mask=inside, other=0).to(tl.int64)
    length = tl.load(length_B + row, mask=inside, other=0).to(tl.int64)
    cached = length - rejected
    newest = tl.load(newest_S + index, mask=inside, other=0)
    drafts = inside & (sampled > 0) & (cached < limit)
    held = row < S
    position, own_length = tl.where(drafts, cached, 0), tl.where(drafts, cached + 1, 0)
    tl.store(own_index_R + row, tl.where(drafts, index, -1), mask=held)
    tl.store(ids_R + row, tl.where(drafts, newest, 0), mask=held)
    tl.store(positions_R + row, position, mask=held)
    tl.store(lengths_R + row, own_length, mask=held)
    _set_up(
        row,
        held,
        position,
        own_length,
        slots_R,
        top_k_R,
        top_k_at_length,
        blocks_SM,
        stride,
        TOKENS,
    )
    tl.store(own_heat_S + row, tl.load(heat_S + row, mask=held), mask=held)
    tl.store(own_seed_S + row, tl.load(seed_S + row, mask=held) ^ NOISE, mask=held)
    tl.store(step, 0)
    if PREFILL:
        sampled = tl.where(tl.load(prefilling_B + row, mask=inside, other=0) != 0, 0, sampled)
    decodes = sampled > 0
    tl.store(counts, tl.load(counts) + tl.sum(tl.where(decodes, length, 0), 0))
    tl.store(
        counts + 1, tl.load(counts + 1) + tl.sum(sampled * cached - sampled * (sampled - 1) // 2, 0)
    )
    tl.store(counts + 2, tl.load(counts + 2) + tl.sum(sampled, 0))
    tl.store(counts + 3, tl.load(counts + 3) + tl.sum(decodes.to(tl.int64), 0))


@triton.jit
def _advance_kernel(
    drawn_R,
    drafts_SK,
    ids_R,
    positions_R,
    lengths_R,
    step,
    decoded,
    slots_R,
    top_k_R,
    top_k_at_length,
    blocks_SM,
    R,
    K,
    limit,
    stride,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Store the tokens that a draft step sampled, count the step, and set up the next one, all in
    one kernel: a draft step is so short that each further kernel shows.

    ``decoded`` counts rows by length, see ``Runtime``. No token comes after the context's last, at
    ``limit``.
    """
    row = tl.arange(0, ROWS)
    held = row < R
    drawn = tl.load(drawn_R + row, mask=held, other=0)
    length = tl.load(lengths_R + row, mask=held, other=0)
    position = tl.minimum(tl.load(positions_R + row, mask=held, other=0) + 1, limit - 1)
    now = tl.load(step)
    tl.store(drafts_SK + row * K + now, drawn, mask=held)
    tl.atomic_add(decoded + length, 1, mask=held & (length > 0), sem="relaxed")
    length = tl.where((length > 0) & (length < limit), length + 1, 0)
    tl.store(ids_R + row, drawn, mask=held)
    tl.store(positions_R + row, position, mask=held)
    tl.store(lengths_R + row, length, mask=held)
    tl.debug_barrier()  # all warps have read the step
    tl.store(step, (now + 1) % K)  # warm-up before captures runs more than k steps
    _set_up(
        row, held, position, length, slots_R, top_k_R, top_k_at_length, blocks_SM, stride, TOKENS
    )


class SparseSpeculator(DraftModelSpeculator):
    """Drafts with the sparse actor; vLLM's model runner knows it as the speculator of a draft
    model.

    ``num_drafts`` is how many tokens the next call of ``propose`` drafts, 0 for plain dense
    decoding, and ``budget`` which of ``Runtime.budgets`` they read. ``is_idle`` says that the
    present step neither verifies drafts nor makes any.
    """

    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    runtime: Runtime
    model: Any
    draft_logits: Any  # float [S, k, V]

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        decoding = config.requested(vllm_config)
        assert decoding is not None and self.draft_logits is not None
        self.num_drafts, self.budget, self.is_idle = self.num_speculative_steps, 0, False
        self._invariant = decoding.drafter_invariant
        self._copies_weights = decoding.draft_weights == "fp8"
        self.draft_weights: DraftWeights | None = None
        self._vllm_separates_noise = versions.drafts_have_own_noise()
        self._logits_argument = versions.draft_logits_argument()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.captured_over: dict[str, int] = {}  # see ``selfcheck.addresses``
        self._captures = False
        self._step_index = torch.zeros((), dtype=torch.int64, device=device)
        self._sampler_arguments: dict[str, Any] = {
            self._logits_argument: self.draft_logits,
            f"{self._logits_argument}_col": self._step_index,
            **({"is_drafting": not self._invariant} if self._vllm_separates_noise else {}),
        }
        self.idx_mapping.fill_(-1)
        self._slots_R = torch.full((self.max_num_reqs,), -1, dtype=torch.int64, device=device)
        # Allocated now, so that vLLM counts it when it measures how much memory is left.
        self._metered_logits: Tensor | None = None
        if decoding.meter_schedule is not None:
            S, _, V = self.draft_logits.shape
            self._metered_logits = self.draft_logits.new_zeros(S + 1, V)

    # No second model and no second cache.

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        return target_model

    def load_model(self, target_model: Any) -> None:
        """Keep the target; if the speculator named layers of its own, vLLM would give drafts a
        second cache.

        Raises UnsupportedModel: a model that no fp8 copy can be made of, if one was asked for.
        """
        self.model = target_model
        # Made here, vLLM counts its memory with that of the model, and treats it in sleep as it
        # does the weights.
        self.draft_weights = DraftWeights(target_model) if self._copies_weights else None
        self.draft_attn_layer_names: set[str] = set()

    def set_attn(self, model_state: Any, kv_cache_config: Any, block_tables: Any, *_: Any) -> None:
        """Note where vLLM keeps the blocks of each sequence, and forget an earlier cache.

        vLLM initialises its cache more than once: from 0.32 on, it first measures the memory of
        CUDA graphs over a small cache, which it frees. A graph that was captured over that cache
        would read and write freed memory.

        Raises ConfigError: layers with caches of different kinds.
        """
        self._graphs.clear()
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ConfigError(
                f"lossless mode needs one kind of KV cache, this model has {len(kv_cache_config.kv_cache_groups)}; "
                "use mode 'lossy' or start vLLM without Sparrow"
            )
        runtime = find(self.vllm_config)
        assert runtime is not None
        self.runtime = runtime
        self.block_tables = block_tables
        drafts = [
            Tally(runtime.schedule.bin_tokens, self.max_model_len, self.device)
            for _ in runtime.budgets
        ]
        self.budget = runtime.base_budget
        runtime.meter = Meter(
            drafts, self.budget, self._logits_argument == "logits_cache", self._metered(runtime)
        )
        runtime.draft_bytes = sum(
            x.nbytes for x in (self.draft_logits, self._metered_logits) if x is not None
        )
        runtime.draft_weights = self.draft_weights
        self.draft_logits.sparrow = runtime  # where verification finds it
        # Where kernels may see smaller blocks than the scheduler, vLLM has both sizes; this is the
        # kernels'.
        self._block_tokens = getattr(block_tables, "kernel_block_sizes", block_tables.block_sizes)[
            0
        ]
        # vLLM pads its table to more blocks than a sequence may have, and than kernels have a
        # workspace for.
        self._blocks_SM = block_tables.input_block_tables[0][
            :, : -(-self.max_model_len // self._block_tokens)
        ]
        self.attn_groups: list[Any] = []
        self.layer_names = list(
            get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]
        )

    def _metered(self, runtime: Runtime) -> Metered | None:
        """The schedule that is measured beside the drafts, if one was asked for.

        Raises ConfigError: a schedule whose steps would need another cache.
        """
        schedule = runtime.decoding.meter_schedule
        if schedule is None:
            return None
        runtime.check_metered(schedule)
        assert self._metered_logits is not None
        return Metered(
            schedule,
            runtime.decoding.meter_every,
            runtime.page_table(schedule).to(self.device),
            self._metered_logits,
            Tally(schedule.bin_tokens, self.max_model_len, self.device),
        )

    # One draft step, as a CUDA graph for each number of rows.

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self._captures = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL

    def capture(self) -> None:
        """Record a draft step for every number of rows that vLLM captures, the largest first."""
        if not self._captures:
            return
        self.captured_over = selfcheck.addresses(self)
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes
        with graph_capture(device=self.device) as context:
            for rows in sorted({min(size, self.max_num_reqs) for size in sizes}, reverse=True):
                self._draft(rows)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph, pool=current_platform.get_global_graph_pool(), stream=context.stream
                ):
                    self._draft(rows)
                self._graphs[rows] = graph
        self._step_index.zero_()

    def begin_step(self, scheduled: Any) -> None:
        """Note how many tokens to draft after a step, what they read, and whether it verifies or
        makes any drafts.

        Args:
            scheduled: vLLM's ``SchedulerOutput`` of the step.
        """
        self.num_drafts = scheduled.num_spec_tokens_to_schedule
        self.budget = getattr(scheduled, lossless.BUDGET, self.budget)
        self.is_idle = not (self.num_drafts or scheduled.scheduled_spec_decode_tokens)

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
        model.

        Args: input_batch: vLLM's batch, with lengths that count the rejected tokens too.
            num_sampled, num_rejected: tokens of each sequence, ``[B]``; a chunk of a prompt samples
            none. last_sampled: the newest token of each sequence the worker holds, ``[S]``, not in
            the cache yet. temperature, seeds: those of each sequence the worker holds, ``[S]``.

        Returns:
            ``[B, k]`` int64, meaningful in its first ``num_drafts`` columns.
        """
        B = input_batch.num_reqs
        drafts = self.num_drafts
        if (
            dummy_run
        ):  # a draft step takes less memory than the passes that vLLM tries out before it
            return self.draft_tokens[:B]
        prefilling = input_batch.is_prefilling_np[:B]
        is_prefilling = (
            torch.from_numpy(prefilling).to(self.device, non_blocking=True)
            if prefilling.any()
            else None
        )
        if drafts:
            self.runtime.use_budget(self.budget)
        buffers, S = self.input_buffers, self.max_num_reqs
        _begin_kernel[(1,)](
            input_batch.idx_mapping,
            input_batch.seq_lens,
            num_sampled,
            num_rejected,
            last_sampled.view(-1),
            is_prefilling,
            temperature,
            seeds,
            self.idx_mapping,
            buffers.input_ids,
            buffers.positions,
            buffers.seq_lens,
            self.temperature,
            self.seeds,
            self._step_index,
            self.runtime.count_pass(drafts),
            self._slots_R,
            self.runtime.top_k,
            self.runtime.top_k_at_length,
            self._blocks_SM,
            B,
            S,
            self.max_model_len,
            self._blocks_SM.stride(0),
            PREFILL=is_prefilling is not None,
            NOISE=0 if self._invariant or self._vllm_separates_noise else DRAFT_NOISE,
            ROWS=triton.next_power_of_2(S),
            TOKENS=self._block_tokens,
            num_warps=4,
        )
        if drafts and self.draft_weights is not None:
            self.draft_weights.renew()
        metered = self.runtime.meter.metered
        if drafts and metered is not None and metered.begin_cycle(self.idx_mapping):
            self._measure(metered, B)
        rows = min((size for size in self._graphs if size >= B), default=0)
        for _step in range(drafts):
            if rows:
                self._graphs[rows].replay()
            else:
                self._draft(B)
        return self.draft_tokens[:B]

    def _measure(self, metered: Metered, rows: int) -> None:
        """One step under another schedule, before the first draft step, which writes to the same
        place again.
        """
        step = self._step(rows)._replace(may_reuse_plan=False, has_page_counts=False)
        assert step.everything is not None
        dense = step._replace(top_k=step.everything)
        with self.runtime.uncounted(metered.table):
            logits_RV = self._logits(
                step,
                {
                    name: SimpleNamespace(
                        sparrow=dense if index in metered.schedule.dense_layers else step
                    )
                    for name in self.layer_names
                    for index in [extract_layer_index(name)]
                },
            )
        metered.take(logits_RV, self.idx_mapping[:rows])

    def _step(self, rows: int) -> Step:
        """What the layers are told about a sparse step of ``rows`` rows."""
        return Step(
            rows=rows,
            lengths=self.input_buffers.seq_lens[:rows],
            top_k=self.runtime.begin_step(rows, None),
            block_table=self._blocks_SM[:rows],
            prefills=(),
            everything=self.runtime.everything(rows),
            has_page_counts=True,
        )

    def _logits(self, step: Step, metadata: dict[str, Any]) -> Tensor:
        """The model's logits after the tokens in the input buffers, ``[R, V]``; writes these
        tokens' KV entries.
        """
        rows, buffers = step.rows, self.input_buffers
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=rows,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(self.layer_names, self._slots_R[:rows]),
            batch_descriptor=BatchDescriptor(num_tokens=rows),
        ):
            self.runtime.is_drafting = True
            try:
                hidden = self.model(
                    input_ids=buffers.input_ids[:rows], positions=buffers.positions[:rows]
                )
            finally:
                self.runtime.is_drafting = False
        return self.model.compute_logits(hidden)

    def _draft(self, rows: int) -> None:
        """One draft step of ``rows`` rows, which also sets up the next step's inputs; this is what
        a graph holds.
        """
        buffers, runtime = self.input_buffers, self.runtime
        step = self._step(rows)
        with drafting():
            logits_RV = self._logits(
                step, dict.fromkeys(self.layer_names, SimpleNamespace(sparrow=step))
            )
        drawn_R = gumbel_sample(
            logits_RV,
            self.idx_mapping[:rows],
            self.temperature,
            self.seeds,
            buffers.positions[:rows],
            apply_temperature=True,
            use_fp64=self.use_fp64_gumbel,
            **self._sampler_arguments,
        )
        _advance_kernel[(1,)](
            drawn_R,
            self.draft_tokens,
            buffers.input_ids,
            buffers.positions,
            buffers.seq_lens,
            self._step_index,
            runtime.decoded,
            self._slots_R,
            runtime.top_k,
            runtime.top_k_at_length,
            self._blocks_SM,
            rows,
            self.num_speculative_steps,
            self.max_model_len,
            self._blocks_SM.stride(0),
            ROWS=triton.next_power_of_2(rows),
            TOKENS=self._block_tokens,
            num_warps=4,
        )
