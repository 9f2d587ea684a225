"""The cascade: tokens are guessed from history, the sparse actor judges the guesses and drafts
tokens, and the policy verifies the drafts. ``sparrow.model.speculative`` is the reference.

A sparse pass reads T tokens per row: the newest token and T - 1 guesses. It produces between 1 and
T drafts per row, so rows advance at different rates. The draft length fixes the number of passes,
and each pass is a CUDA graph, so the host never waits for the device. If a row ends up with fewer
than K drafts, guesses fill the rest. Verification treats a guess as drawn from a distribution q
with all its mass on that token, so it stays exact.

A row's history is the sequence's own tokens: its prompt, its verified response, and the drafts made
so far in this cycle. A pass writes its keys and values to the slots of the next tokens. In a
cycle's last passes, some tokens may fall outside the blocks vLLM has reserved. Their keys and
values go to vLLM's null block, and they produce no drafts.

Shapes: B batch size, R CUDA graph rows (B or more), S the worker's maximum number of sequences, T
tokens per pass, K drafts per cycle, N tokens of the longest sequence, V vocabulary.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils import triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from sparrow.decoding import Decoding
from sparrow.vllm.backend import Step
from sparrow.vllm.lossless import cascade_kernels as kernels
from sparrow.vllm.lossless.drafter import Pass
from sparrow.vllm.lossless.plan import DraftPlan
from sparrow.vllm.lossless.setup import passes_of
from sparrow.vllm.lossless.sparse_drafter import Inputs, SparseDrafter
from sparrow.vllm.runtime import Runtime

AT_ONCE = 4096
"""How many history tokens, or logits, a Triton program handles at a time."""


class CascadeDrafter(SparseDrafter):
    """A ``SparseDrafter`` whose passes read the newest token and guesses from history.

    During a cycle, it tracks for each row the number of tokens at the start of the cycle, the
    number of drafts made so far, and the history.
    """

    def __init__(self, decoding: Decoding, speculator: Any) -> None:
        super().__init__(decoding, speculator)
        device = speculator.device
        S = speculator.max_num_reqs
        self.tokens = decoding.guess_tokens + 1  # T
        N = speculator.max_model_len + speculator.num_speculative_steps
        self._history_RN = torch.zeros(S, N, dtype=torch.int32, device=device)
        self._newest_R = torch.zeros(S, dtype=torch.int32, device=device)
        self._cached_R = torch.zeros(S, dtype=torch.int64, device=device)
        self._length_R = torch.zeros(S, dtype=torch.int32, device=device)
        self._made_R = torch.zeros(S, dtype=torch.int32, device=device)
        self._wanted = torch.zeros((), dtype=torch.int32, device=device)
        self._slots_R = torch.full((S * self.tokens,), -1, dtype=torch.int64, device=device)
        self._index_RT = torch.full_like(self._slots_R, -1)
        self._place_RT = torch.zeros_like(self._slots_R)
        self.drawn_S = torch.zeros(S, dtype=torch.int64, device=device)
        # Each token has its own draft index here; without guesses, all rows share one.
        self._sampler_arguments[f"{self._logits_argument}_col"] = self._place_RT

    def addresses(self) -> dict[str, int]:
        """See ``Drafter``."""
        return {**super().addresses(), "the history of guesses": self._history_RN.data_ptr()}

    def _inputs(self) -> Inputs:
        # state at the start of the cycle; each pass computes its inputs from it
        return Inputs(self._newest_R, self._cached_R, self._length_R)

    def _run(self, drafts: int, B: int) -> None:
        """Run the passes set up by ``propose``, and fill up the drafts with guesses."""
        vllm = self._vllm
        drafts_stride = vllm.draft_tokens.stride(0)
        tokens_SN: Tensor = vllm.tokens_SN
        kernels.begin_history_kernel[(B, triton.cdiv(vllm.max_model_len, AT_ONCE))](
            vllm.idx_mapping,
            self._newest_R,
            self._length_R,
            self._made_R,
            tokens_SN,
            tokens_SN.stride(0),
            self._history_RN,
            self._history_RN.stride(0),
            self._blocks_SM,
            self._blocks_SM.stride(0),
            self._blocks_SM.shape[1],
            drafts,
            self._wanted,
            TOKENS=self._block_tokens,
            BLOCK=AT_ONCE,
        )
        self._replay(passes_of(drafts), B)
        logits_SKV = self.logits
        V = logits_SKV.shape[2]
        kernels.fill_kernel[(B,)](
            vllm.idx_mapping,
            self._length_R,
            self._made_R,
            self._history_RN,
            self._history_RN.stride(0),
            vllm.draft_tokens,
            drafts_stride,
            self.drawn_S,
            self._runtime.count_drafts(drafts, with_guesses=True),
            drafts,
            KP=triton.next_power_of_2(vllm.num_speculative_steps),
            BLOCK=AT_ONCE,
            num_warps=8,
        )
        kernels.one_hot_kernel[(B * drafts, triton.cdiv(V, AT_ONCE))](
            vllm.idx_mapping,
            self._made_R,
            vllm.draft_tokens,
            drafts_stride,
            logits_SKV,
            logits_SKV.stride(0),
            logits_SKV.stride(1),
            drafts,
            V,
            BLOCK=AT_ONCE,
        )

    def _step(self, rows: int) -> Step:
        return super()._step(rows)._replace(tokens=self.tokens)

    def _draft(self, rows: int) -> None:
        """Run one sparse pass over ``rows`` rows. CUDA graphs capture this function."""
        vllm = self._vllm
        runtime: Runtime = self._runtime
        buffers = vllm.input_buffers
        T = self.tokens
        TP = triton.next_power_of_2(T)
        kernels.guess_kernel[(rows,)](
            vllm.idx_mapping,
            self._length_R,
            self._made_R,
            self._history_RN,
            self._history_RN.stride(0),
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
            self._wanted,
            T=T,
            TP=TP,
            TOKENS=self._block_tokens,
            BLOCK=AT_ONCE,
            num_warps=8,
        )
        step = self._step(rows)
        logits_TV = self._logits(
            step, dict.fromkeys(self._layer_names, SimpleNamespace(sparrow=step))
        )
        places = self._place_RT[: rows * T]
        drawn_T = gumbel_sample(
            logits_TV,
            self._index_RT[: rows * T],
            vllm.temperature,
            vllm.seeds,
            buffers.positions[: rows * T],
            apply_temperature=True,
            use_fp64=vllm.use_fp64_gumbel,
            **{**self._sampler_arguments, f"{self._logits_argument}_col": places},
        )
        kernels.advance_kernel[(rows,)](
            drawn_T,
            buffers.input_ids,
            buffers.seq_lens,
            self._length_R,
            self._made_R,
            self._history_RN,
            self._history_RN.stride(0),
            vllm.draft_tokens,
            vllm.draft_tokens.stride(0),
            runtime.rows.at_length,
            self._wanted,
            T=T,
            TP=TP,
            num_warps=1,
        )


class StagedDrafter:
    """A ``Drafter`` that drafts with or without guesses in each cycle, as planned. Without guesses,
    it behaves like ``SparseDrafter``.
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
        self._guessing.load(model)

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
                self._runtime.count_drafts(plan.tokens, with_guesses=False),
                plan.tokens,
            )
        return drafts
