"""The cascade: tokens are guessed, the sparse actor judges the guesses and drafts tokens, and the
policy verifies the drafts. ``sparrow.model.speculative`` is the reference.

A sparse pass reads T tokens per row: the newest token and T - 1 guesses, from history or from a
head (``guesses.GuessSource``). It produces between 1 and T drafts per row, so rows advance at
different rates. The draft length fixes the number of passes, and each pass is a CUDA graph, so the
host never waits for the device. If a row ends up with fewer than K drafts, guesses fill the rest.
Verification stays exact, because it treats a guess as drawn from a distribution q with all its mass
on that token. A cycle may also have no pass at all, and use the guesses as its drafts. This is
speculation without a sparse actor: n-gram speculation if history guesses, or EAGLE-3 if a head
guesses.

A pass writes its keys and values to the slots of the next tokens. In a cycle's last passes, some
tokens may fall outside the blocks vLLM has reserved. Their keys and values go to vLLM's null block,
and they produce no drafts.

Shapes: B batch size, R CUDA graph rows (B or more), S the worker's maximum number of sequences, T
tokens per pass, K drafts per cycle, V vocabulary.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils import triton

from sparrow.decoding import Decoding
from sparrow.vllm.backend import Step
from sparrow.vllm.lossless import cascade_kernels as kernels
from sparrow.vllm.lossless.draft_weights import DraftWeights, drafting
from sparrow.vllm.lossless.drafter import Pass
from sparrow.vllm.lossless.guesses import CycleProgress, GuessSource, SparsePass
from sparrow.vllm.lossless.head import HeadSource
from sparrow.vllm.lossless.history import HistorySource
from sparrow.vllm.lossless.mixed import MixedSource
from sparrow.vllm.lossless.plan import DraftPlan
from sparrow.vllm.lossless.setup import draft_choices, drafts_alone, passes_of
from sparrow.vllm.lossless.sparse_drafter import Inputs, SparseDrafter, replay
from sparrow.vllm.runtime import Runtime


class CascadeDrafter(SparseDrafter):
    """A ``SparseDrafter`` whose passes read the newest token and guesses."""

    def __init__(self, decoding: Decoding, speculator: Any) -> None:
        super().__init__(decoding, speculator)
        device = speculator.device
        S = speculator.max_num_reqs
        self.tokens = decoding.guess_tokens + 1  # T
        self._cycle = CycleProgress(S, device)
        self.source = _source(decoding, speculator, self._cycle)
        self._may_guess_alone = decoding.adapt_draft_tokens
        self._alone_graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by number of rows
        self._cached_R = torch.zeros(S, dtype=torch.int64, device=device)
        self._slots_R = torch.full((S * self.tokens,), -1, dtype=torch.int64, device=device)
        self._index_RT = torch.full_like(self._slots_R, -1)
        self._place_RT = torch.zeros_like(self._slots_R)
        self.drawn_S = torch.zeros(S, dtype=torch.int64, device=device)

    def load(self, model: Any, weights: DraftWeights | None = None) -> None:
        """See ``SparseDrafter``."""
        super().load(model, weights)
        self.source.load(model)

    def set_cache(self, runtime: Runtime, block_tables: Any) -> None:
        """See ``Drafter``."""
        super().set_cache(runtime, block_tables)
        self._alone_graphs.clear()
        self.source.set_cache(runtime, self._blocks_SM, self._block_tokens)

    def addresses(self) -> dict[str, int]:
        """See ``Drafter``."""
        return {**super().addresses(), **self.source.addresses()}

    def _capture_on(self, stream: torch.cuda.Stream) -> None:
        super()._capture_on(stream)
        if self._may_guess_alone:
            self._capture(self.source.guess_alone, stream, self._alone_graphs)

    def read(self, after: Pass, drafts: int) -> None:
        """See ``Drafter``."""
        self.source.read(after, drafts)

    def _inputs(self) -> Inputs:
        # state at the start of the cycle; each pass computes its inputs from it
        return Inputs(self._cycle.newest_R, self._cached_R, self._cycle.length_R)

    def _run(self, plan: DraftPlan, B: int) -> None:
        """Run the passes set up by ``propose``, if any, and fill up the drafts with guesses."""
        vllm = self._vllm
        drafts = plan.tokens
        drafts_stride = vllm.draft_tokens.stride(0)
        kernels.begin_kernel[(B,)](
            self._cycle.length_R,
            self._cycle.made_R,
            self._blocks_SM,
            self._blocks_SM.stride(0),
            self._blocks_SM.shape[1],
            drafts,
            self._cycle.drafts,
            TOKENS=self._block_tokens,
        )
        self.source.begin(B)
        if plan.alone:
            replay(self.source.guess_alone, self._alone_graphs, 1, B)
        else:
            self._renew_weights()
            self._replay(passes_of(drafts), B)
            self.source.fill(B)
        logits_SKV = self.logits
        V = logits_SKV.shape[2]
        kernels.fill_kernel[(B,)](
            vllm.idx_mapping,
            self._cycle.made_R,
            self.source.guesses_RG,
            self.source.guesses_RG.stride(0),
            vllm.draft_tokens,
            drafts_stride,
            self.drawn_S,
            self._runtime.passes.count_drafts(drafts, with_guesses=True, alone=plan.alone),
            drafts,
            KP=triton.next_power_of_2(vllm.num_speculative_steps),
        )
        kernels.one_hot_kernel[(B * drafts, triton.cdiv(V, kernels.AT_ONCE))](
            vllm.idx_mapping,
            self._cycle.made_R,
            vllm.draft_tokens,
            drafts_stride,
            logits_SKV,
            logits_SKV.stride(0),
            logits_SKV.stride(1),
            drafts,
            V,
            BLOCK=kernels.AT_ONCE,
        )

    def _step(self, rows: int) -> Step:
        return super()._step(rows)._replace(tokens=self.tokens)

    def _draft(self, rows: int) -> None:
        """Guess tokens, and run one sparse pass over ``rows`` rows. CUDA graphs capture this
        function.
        """
        vllm = self._vllm
        cycle = self._cycle
        runtime: Runtime = self._runtime
        buffers = vllm.input_buffers
        T = self.tokens
        TP = triton.next_power_of_2(T)
        self.source.guess(rows)
        kernels.set_up_kernel[(rows,)](
            vllm.idx_mapping,
            cycle.newest_R,
            cycle.length_R,
            cycle.made_R,
            vllm.draft_tokens,
            vllm.draft_tokens.stride(0),
            self.source.guesses_RG,
            self.source.guesses_RG.stride(0),
            buffers.input_ids,
            buffers.positions,
            self._slots_R,
            self._index_RT,
            self._place_RT,
            buffers.seq_lens,
            runtime.pages.top_k,
            runtime.pages.at_length,
            self._blocks_SM,
            self._blocks_SM.stride(0),
            vllm.max_model_len,
            cycle.drafts,
            T=T,
            TP=TP,
            TOKENS=self._block_tokens,
            num_warps=1,
        )
        step = self._step(rows)
        with drafting():
            logits_TV, states = self._pass(
                step, dict.fromkeys(self._layer_names, SimpleNamespace(sparrow=step))
            )
        positions = buffers.positions[: rows * T]
        drawn_T = self._sample(
            logits_TV, self._index_RT[: rows * T], positions, self._place_RT[: rows * T]
        )
        kernels.advance_kernel[(rows,)](
            drawn_T,
            buffers.input_ids,
            buffers.seq_lens,
            cycle.length_R,
            cycle.made_R,
            cycle.kept_R,
            vllm.draft_tokens,
            vllm.draft_tokens.stride(0),
            runtime.rows.at_length,
            cycle.drafts,
            T=T,
            TP=TP,
            num_warps=1,
        )
        self.source.follow(
            rows, SparsePass(step, positions, self._slots_R[: rows * T], drawn_T, states)
        )


def _source(decoding: Decoding, speculator: Any, cycle: CycleProgress) -> GuessSource:
    """Create the source of guesses for these settings."""
    tokens = decoding.guess_tokens
    guesses = max(tokens, speculator.num_speculative_steps)
    if decoding.guess_head is None:
        return HistorySource(speculator, cycle, guesses)
    alone = drafts_alone(draft_choices(decoding))
    head = HeadSource(speculator, cycle, tokens, alone, guesses)
    if not decoding.lookup_min:
        return head
    history = HistorySource(speculator, cycle, guesses)
    return MixedSource(history, head, decoding.lookup_min)


class StagedDrafter:
    """A ``Drafter`` that uses guesses only in cycles whose plan asks for guesses, with or without
    sparse passes. In other cycles, it behaves like ``SparseDrafter``.
    """

    def __init__(self, decoding: Decoding, speculator: Any) -> None:
        self._plain = SparseDrafter(decoding, speculator)
        self._guessing = CascadeDrafter(decoding, speculator)
        self._vllm = speculator
        self.logits: Tensor = speculator.draft_logits
        self.drawn_S: Tensor | None = self._guessing.drawn_S
        self.captured_over: dict[str, int] = {}

    def load(self, model: Any) -> None:
        """See ``Drafter``."""
        self._plain.load(model)
        self._guessing.load(model, self._plain.weights)

    def set_cache(self, runtime: Runtime, block_tables: Any) -> None:
        """See ``Drafter``."""
        self._runtime = runtime
        self._plain.set_cache(runtime, block_tables)
        self._guessing.set_cache(runtime, block_tables)  # last, because its meter reads ``drawn_S``
        self.captured_over = {}

    def addresses(self) -> dict[str, int]:
        """See ``Drafter``."""
        return {**self._plain.addresses(), **self._guessing.addresses()}

    def capture(self) -> None:
        """See ``Drafter``."""
        self._plain.capture()
        self._guessing.capture()
        self.captured_over = self.addresses()

    def read(self, after: Pass, drafts: int) -> None:
        """See ``Drafter``."""
        self._guessing.read(after, drafts)

    def propose(self, plan: DraftPlan, after: Pass) -> Tensor:
        """See ``Drafter``."""
        if plan.tokens:
            self._runtime.drafting.has_guesses = plan.guesses
        if plan.guesses:
            return self._guessing.propose(plan, after)
        drafts = self._plain.propose(plan, after)
        if plan.tokens:
            kernels.count_drawn_kernel[(after.batch.num_reqs,)](
                self._vllm.idx_mapping,
                self.drawn_S,
                self._runtime.passes.count_drafts(plan.tokens, with_guesses=False),
                plan.tokens,
            )
        return drafts
