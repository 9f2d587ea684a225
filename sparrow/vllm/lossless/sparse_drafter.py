"""The sparse actor as a drafter: the policy's own model, reading only a few pages of its KV cache.

A draft step is a single CUDA graph that also sets up the next step. The step writes its token's
keys and values to the slot that the token will have if it is accepted. The dense pass later
overwrites these entries.

Shapes: B batch size, R CUDA graph rows (B or more), S the worker's maximum number of sequences, k
drafts, M blocks of the longest sequence, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

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

from sparrow.decoding import Decoding
from sparrow.schedule import SparsitySchedule
from sparrow.vllm import versions
from sparrow.vllm.backend import Step
from sparrow.vllm.lossless.adapters import DraftAdapters
from sparrow.vllm.lossless.draft_weights import DraftWeights, drafting
from sparrow.vllm.lossless.drafter import Pass
from sparrow.vllm.lossless.meter import Meter, Metered, Tally
from sparrow.vllm.lossless.plan import DraftPlan
from sparrow.vllm.runtime import Runtime, layers_of

DRAFT_NOISE = 0x5DEECE66D
"""XORed into the draft seeds on vLLM versions that would otherwise reuse a rejected draft's noise
for the token that replaces the draft. Samples follow the dense distribution only if the two draws
are independent. With ``drafter_invariant``, the noise is the same on purpose, since drafts are
never replaced (see ``sparrow.vllm.lossless.verify``).
"""


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
    """Write a draft step's slots and page counts. Rows of length 0 get no slot."""
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
    temperature_S,
    seed_S,
    own_index_R,
    ids_R,
    positions_R,
    lengths_R,
    own_temperature_S,
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
    """Set up the first draft step, and count the dense pass before it (see ``propose`` and
    ``DensePasses.count``).
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
    position = tl.where(drafts, cached, 0)
    own_length = tl.where(drafts, cached + 1, 0)
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
    tl.store(own_temperature_S + row, tl.load(temperature_S + row, mask=held), mask=held)
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
    """Store the tokens sampled in a draft step, count the step, and set up the next one. All of
    this is one kernel, because draft steps are so short that every extra launch would slow them
    down noticeably.

    ``decoded`` counts rows by length (see ``DecodedRows``). ``limit`` is the context length in
    tokens.
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
    tl.debug_barrier()  # all warps must have read ``step`` before it changes
    # This wraps around at K, because the warm-up before capture runs more than K steps.
    tl.store(step, (now + 1) % K)
    _set_up(
        row, held, position, length, slots_R, top_k_R, top_k_at_length, blocks_SM, stride, TOKENS
    )


class Inputs(NamedTuple):
    """The buffers where ``propose`` puts each row's newest token."""

    ids: Tensor
    positions: Tensor
    lengths: Tensor  # tokens in the row, including the newest; 0 if it drafts nothing


class SparseDrafter:
    """A ``Drafter`` that runs the policy's own decode steps under the draft schedule.

    Args:
        decoding: the lossless mode settings.
        speculator: vLLM's speculator. Its buffers hold the inputs and the drafts, and CUDA graphs
            refer to them by address.
    """

    _model: Any
    _runtime: Runtime
    drawn_S: Tensor | None = None

    def __init__(self, decoding: Decoding, speculator: Any) -> None:
        device = speculator.device
        self.logits: Tensor = speculator.draft_logits
        self._vllm = speculator
        self._invariant = decoding.drafter_invariant
        self._copies_weights = decoding.draft_weights == "fp8"
        self.weights: DraftWeights | None = None
        self._vllm_separates_noise = versions.drafts_have_own_noise()
        self._logits_argument = versions.draft_logits_argument()
        self._adapters: DraftAdapters | None = None
        # keyed by whether any sequence has a LoRA adapter, then by the number of rows
        self._graphs: dict[bool, dict[int, torch.cuda.CUDAGraph]] = defaultdict(dict)
        self.captured_over: dict[str, int] = {}
        self._step_index = torch.zeros((), dtype=torch.int64, device=device)
        speculator.idx_mapping.fill_(-1)
        self._slots_R = torch.full((speculator.max_num_reqs,), -1, dtype=torch.int64, device=device)
        # Allocated here so that vLLM accounts for it when measuring free memory.
        self._metered_logits: Tensor | None = None
        if decoding.meter_schedule is not None:
            S, _, V = self.logits.shape
            self._metered_logits = self.logits.new_zeros(S + 1, V)

    def load(self, model: Any, weights: DraftWeights | None = None) -> None:
        """Draft with this model.

        Args:
            weights: the model's fp8 copy, if another drafter has already made it.

        Raises UnsupportedModel if ``draft_weights`` is "fp8" but no layer can have an fp8 copy.
        """
        self._model = model
        self.weights = weights
        if self._copies_weights and weights is None:
            # Copied here so that vLLM counts the copy as model memory, and treats it like the
            # weights in sleep mode.
            self.weights = DraftWeights(model)
        if self._vllm.vllm_config.lora_config is not None:
            self._adapters = DraftAdapters(model.lora_manager, self._vllm.max_num_reqs)

    def set_cache(self, runtime: Runtime, block_tables: Any) -> None:
        """Store vLLM's block tables, and discard anything tied to an earlier cache.

        Raises ConfigError if ``meter_schedule`` does not work with this cache.
        """
        self._graphs.clear()
        self.captured_over = {}
        self._runtime = runtime
        runtime.drafting.meter = self._meter(runtime)
        runtime.drafting.logits_bytes = sum(
            x.nbytes for x in (self.logits, self._metered_logits) if x is not None
        )
        runtime.drafting.weights = self.weights
        # the kernels' block sizes, which may be smaller than the scheduler's
        sizes = getattr(block_tables, "kernel_block_sizes", block_tables.block_sizes)
        self._block_tokens = sizes[0]
        # vLLM pads the table to more blocks than a sequence can have. Cut off the padding, because
        # the kernels' workspace has no room for it.
        most_blocks = -(-self._vllm.max_model_len // self._block_tokens)
        self._blocks_SM = block_tables.input_block_tables[0][:, :most_blocks]
        layers = get_layers_from_vllm_config(self._vllm.vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]
        self._layer_names = [
            name for name in layers if name not in self._vllm.draft_attn_layer_names
        ]

    def _meter(self, runtime: Runtime) -> Meter:
        drafts = [self._tally(runtime.schedule) for _ in runtime.budgets]
        has_raw_logits = self._logits_argument == "logits_cache"
        return Meter(
            drafts,
            runtime.pages.base_budget,
            has_raw_logits,
            self._metered(runtime),
            self.drawn_S,
        )

    def _metered(self, runtime: Runtime) -> Metered | None:
        """Prepare to measure ``meter_schedule``. Return None if it is not set."""
        schedule = runtime.decoding.meter_schedule
        if schedule is None:
            return None
        runtime.check_metered(schedule)
        assert self._metered_logits is not None
        return Metered(
            schedule,
            runtime.decoding.meter_cycles,
            runtime.pages.of(schedule).to(self._vllm.device),
            self._metered_logits,
            self._tally(schedule),
        )

    def _tally(self, schedule: SparsitySchedule) -> Tally:
        return Tally(schedule, self._vllm.max_model_len, self._vllm.device)

    def addresses(self) -> dict[str, int]:
        """See ``Drafter``."""
        pages = self._runtime.pages
        tensors = {
            f"the KV cache of {layer.layer_name}": layer.kv_cache
            for layer in layers_of(self._vllm.vllm_config)
        }
        tensors["the block table"] = self._blocks_SM
        tensors["the page counts by length"] = pages.at_length
        tensors["the page counts of a step"] = pages.top_k
        tensors["the tensor of draft logits"] = self.logits
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def capture(self) -> None:
        """Capture a draft step for each of vLLM's capture sizes, largest first."""
        self.captured_over = self.addresses()
        with graph_capture(device=self._vllm.device) as context:
            self._capture_on(context.stream)
        self._step_index.zero_()

    def _capture_on(self, stream: torch.cuda.Stream) -> None:
        """Capture everything that runs in CUDA graphs. Graphs captured on the same stream share
        their memory.
        """
        if self._adapters is None:
            self._capture(self._draft, stream, self._graphs[False])
            return
        for with_adapters in (True, False):
            with self._adapters.captured(with_adapters):
                self._capture(self._draft, stream, self._graphs[with_adapters])

    def _capture(
        self,
        run: Callable[[int], None],
        stream: torch.cuda.Stream,
        graphs: dict[int, torch.cuda.CUDAGraph],
    ) -> None:
        """Capture ``run(rows)`` for each of vLLM's capture sizes."""
        sizes = self._vllm.vllm_config.compilation_config.cudagraph_capture_sizes
        most = self._vllm.max_num_reqs
        for rows in sorted({min(size, most) for size in sizes}, reverse=True):
            run(rows)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=current_platform.get_global_graph_pool(), stream=stream
            ):
                run(rows)
            graphs[rows] = graph

    def read(self, after: Pass, drafts: int) -> None:
        """See ``Drafter``."""

    def propose(self, plan: DraftPlan, after: Pass) -> Tensor:
        """See ``Drafter``."""
        vllm = self._vllm
        B = after.batch.num_reqs
        S = vllm.max_num_reqs
        drafts = plan.tokens
        if drafts:
            self._runtime.use_budget(plan.budget)
        inputs = self._inputs()
        _begin_kernel[(1,)](
            after.batch.idx_mapping,
            after.batch.seq_lens,
            after.sampled_B,
            after.rejected_B,
            after.newest_S,
            after.is_prefilling_B,
            after.temperature_S,
            after.seed_S,
            vllm.idx_mapping,
            inputs.ids,
            inputs.positions,
            inputs.lengths,
            vllm.temperature,
            vllm.seeds,
            self._step_index,
            self._runtime.passes.count(drafts),
            self._slots_R,
            self._runtime.pages.top_k,
            self._runtime.pages.at_length,
            self._blocks_SM,
            B,
            S,
            vllm.max_model_len,
            self._blocks_SM.stride(0),
            PREFILL=after.is_prefilling_B is not None,
            NOISE=0 if self._invariant or self._vllm_separates_noise else DRAFT_NOISE,
            ROWS=triton.next_power_of_2(S),
            TOKENS=self._block_tokens,
            num_warps=4,
        )
        if drafts:
            with self._of_each_sequence():
                self._run(plan, B)
        return vllm.draft_tokens[:B]

    def _of_each_sequence(self) -> AbstractContextManager[None]:
        return nullcontext() if self._adapters is None else self._adapters.by_sequence()

    def _inputs(self) -> Inputs:
        buffers = self._vllm.input_buffers
        return Inputs(buffers.input_ids, buffers.positions, buffers.seq_lens)

    def _run(self, plan: DraftPlan, B: int) -> None:
        """Run the draft steps set up by ``propose``."""
        self._renew_weights()
        metered = self._runtime.drafting.meter.metered
        if metered is not None and metered.begin_cycle(self._vllm.idx_mapping):
            self._measure(metered, B)
        self._replay(plan.tokens, B)

    def _renew_weights(self) -> None:
        if self.weights is not None:
            self.weights.renew()

    def _replay(self, steps: int, B: int) -> None:
        """Run this many draft steps."""
        graphs = self._graphs[self._adapters is not None and self._adapters.are_used]
        replay(self._draft, graphs, steps, B)

    def _measure(self, metered: Metered, rows: int) -> None:
        """Before the first draft step, run one step under the metered schedule. The draft step then
        overwrites the cache entries of that step.
        """
        step = self._step(rows)._replace(may_reuse_plan=False, has_page_counts=False)
        assert step.everything is not None
        dense = step._replace(top_k=step.everything)

        def step_of(layer: str) -> Step:
            is_dense = extract_layer_index(layer) in metered.schedule.dense_layers
            return dense if is_dense else step

        metadata = {name: SimpleNamespace(sparrow=step_of(name)) for name in self._layer_names}
        with self._runtime.uncounted(metered.table):
            logits_RV = self._logits(step, metadata)
        metered.take(logits_RV, self._vllm.idx_mapping[:rows])

    def _step(self, rows: int) -> Step:
        """Build the metadata that the layers receive for a sparse step with this many rows."""
        return Step(
            rows=rows,
            lengths=self._vllm.input_buffers.seq_lens[:rows],
            top_k=self._runtime.begin_step(rows, None),
            block_table=self._blocks_SM[:rows],
            prefills=(),
            everything=self._runtime.pages.everything(rows),
            has_page_counts=True,
        )

    def _logits(self, step: Step, metadata: dict[str, Any]) -> Tensor:
        """Run the model as ``_pass`` does, and return its logits."""
        return self._pass(step, metadata)[0]

    def _pass(self, step: Step, metadata: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        """Run the model on the tokens in the input buffers. Return its logits, one row per token,
        and the hidden states that a head reads, if any. This also writes the tokens' KV entries.
        """
        tokens = step.rows * step.tokens
        buffers = self._vllm.input_buffers
        with set_forward_context(
            metadata,
            self._vllm.vllm_config,
            num_tokens=tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(self._layer_names, self._slots_R[:tokens]),
            batch_descriptor=BatchDescriptor(num_tokens=tokens),
        ):
            self._runtime.drafting.is_running = True
            try:
                hidden = self._model(
                    input_ids=buffers.input_ids[:tokens], positions=buffers.positions[:tokens]
                )
            finally:
                self._runtime.drafting.is_running = False
        states: list[Tensor] = []
        if isinstance(hidden, tuple):
            hidden, states = hidden
        return self._model.compute_logits(hidden), states

    def _draft(self, rows: int) -> None:
        """Run one draft step with ``rows`` rows, and set up the inputs for the next one. CUDA
        graphs capture this function.
        """
        buffers = self._vllm.input_buffers
        runtime = self._runtime
        step = self._step(rows)
        with drafting():
            logits_RV = self._logits(
                step, dict.fromkeys(self._layer_names, SimpleNamespace(sparrow=step))
            )
        drawn_R = self._sample(
            logits_RV, self._vllm.idx_mapping[:rows], buffers.positions[:rows], self._step_index
        )
        _advance_kernel[(1,)](
            drawn_R,
            self._vllm.draft_tokens,
            buffers.input_ids,
            buffers.positions,
            buffers.seq_lens,
            self._step_index,
            runtime.rows.at_length,
            self._slots_R,
            runtime.pages.top_k,
            runtime.pages.at_length,
            self._blocks_SM,
            rows,
            self._vllm.num_speculative_steps,
            self._vllm.max_model_len,
            self._blocks_SM.stride(0),
            ROWS=triton.next_power_of_2(rows),
            TOKENS=self._block_tokens,
            num_warps=4,
        )

    def _sample(
        self, logits_TV: Tensor, index_T: Tensor, position_T: Tensor, place: Tensor
    ) -> Tensor:
        """Draw a token from each row of logits, int64 ``[T]``, and store the logits for
        verification.

        Args:
            index_T: for each row, the index of its sequence in the worker, or -1 if its token
                cannot become a draft.
            position_T: the position of each row's input token.
            place: which of the cycle's drafts the token is, counting from 0: a scalar for all rows,
                or ``[T]``.
        """
        arguments: dict[str, Any] = {
            self._logits_argument: self.logits,
            f"{self._logits_argument}_col": place,
        }
        if self._vllm_separates_noise:
            arguments["is_drafting"] = not self._invariant
        drawn_T: Tensor = gumbel_sample(
            logits_TV,
            index_T,
            self._vllm.temperature,
            self._vllm.seeds,
            position_T,
            apply_temperature=True,
            use_fp64=self._vllm.use_fp64_gumbel,
            **arguments,
        )
        return drawn_T


def replay(
    run: Callable[[int], None], graphs: dict[int, torch.cuda.CUDAGraph], times: int, B: int
) -> None:
    """Call ``run(B)`` this many times. If a CUDA graph of ``run`` was captured for at least B rows,
    replay the graph instead.
    """
    rows = min((size for size in graphs if size >= B), default=0)
    for _time in range(times):
        if rows:
            graphs[rows].replay()
        else:
            run(B)
