"""Guesses by a trained head: vLLM's EAGLE-3 model (Li et al., arXiv 2503.01840).

In its slot for token n, the head reads the embedding of token n + 1 and some of the policy's hidden
states at token n, and predicts token n + 2. For each further guess, it reads its own output in
place of the hidden states. The head has its own KV cache, which uses the same slots and block
tables as the policy's cache.

After each dense pass, the head reads the pass's hidden states, as in vLLM. After each sparse pass,
it reads the sparse actor's hidden states at the newest token and at the guesses that became drafts.
The next dense pass overwrites the slots of these tokens. In dense passes, the head runs vLLM's own
attention. In a cycle, the head runs Sparrow's kernels and reads everything. One CUDA graph can then
hold a sparse pass and the head's steps.

Shapes: B batch size, R CUDA graph rows (B or more), S the worker's maximum number of sequences, T
tokens per pass, G guesses per row, W the head's hidden size.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context

from sparrow.vllm.backend import Step
from sparrow.vllm.lossless import cascade_kernels as kernels
from sparrow.vllm.lossless.drafter import Pass
from sparrow.vllm.lossless.guesses import CycleProgress, GuessSource, SparsePass
from sparrow.vllm.runtime import Runtime


class HeadSource(GuessSource):
    """A source whose guesses are the head's most likely tokens.

    Args:
        speculator: vLLM's speculator.
        cycle: the state of the cycle's rows.
        guess_tokens: guesses per pass, T - 1.
        alone: guesses per cycle without passes.
        guesses: G, the number of guesses. Guesses that the head does not make are 0.
    """

    _head: Any
    _runtime: Runtime

    def __init__(
        self, speculator: Any, cycle: CycleProgress, guess_tokens: int, alone: int, guesses: int
    ) -> None:
        self._vllm = speculator
        self._cycle = cycle
        self._guess_tokens = guess_tokens
        self._alone = alone
        S = speculator.max_num_reqs
        device = speculator.device
        self.guesses_RG = torch.zeros(S, guesses, dtype=torch.int64, device=device)
        # what the head's next step reads in place of hidden states
        self._output_RW = torch.zeros(
            S, speculator.hidden_size, dtype=speculator.dtype, device=device
        )
        self._ids_R = torch.zeros(S, dtype=torch.int32, device=device)
        self._positions_R = torch.zeros(S, dtype=torch.int64, device=device)
        self._slots_R = torch.full((S,), -1, dtype=torch.int64, device=device)
        self._lengths_R = torch.zeros(S, dtype=torch.int32, device=device)

    def load(self, model: Any) -> None:
        """See ``GuessSource``. The head becomes the speculator's model, as vLLM expects."""
        from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

        self._head = self._vllm.model = load_eagle_model(model, self._vllm.vllm_config)

    def set_cache(self, runtime: Runtime, blocks_SM: Tensor, block_tokens: int) -> None:
        """See ``GuessSource``."""
        self._runtime = runtime
        self._blocks_SM = blocks_SM
        self._block_tokens = block_tokens
        self._layers = sorted(self._vllm.draft_attn_layer_names)

    def addresses(self) -> dict[str, int]:
        """See ``GuessSource``."""
        layers = self._vllm.vllm_config.compilation_config.static_forward_context
        caches = {
            f"the head's KV cache of {name}": layers[name].kv_cache.data_ptr()
            for name in self._layers
        }
        return {**caches, "the guesses of the head": self.guesses_RG.data_ptr()}

    def read(self, after: Pass, drafts: int) -> None:
        """See ``GuessSource``. Slots of rejected drafts are written too, but then overwritten."""
        batch = after.batch
        B = batch.num_reqs
        index_B = batch.idx_mapping[:B]
        last_B = batch.query_start_loc[1 : B + 1].long() - 1 - after.rejected_B[:B]
        ids = batch.input_ids.roll(-1)
        ids[last_B] = torch.where(
            after.sampled_B[:B] > 0, after.newest_S[index_B], after.next_prompt_S[index_B]
        ).to(ids.dtype)
        states = self._combined(after.states)
        tokens = len(states)
        hidden, output = self._run(
            ids[:tokens], batch.positions[:tokens], states, after.metadata, after.slots
        )
        if drafts:
            self.guesses_RG[:B, 0] = self._most_likely(hidden[last_B])
            self._output_RW[:B] = output[last_B]

    def guess(self, rows: int) -> None:
        """See ``GuessSource``. The first guess was already made by ``read`` or ``follow``."""
        self._guess(rows, self._guess_tokens)

    def guess_alone(self, rows: int) -> None:
        """See ``GuessSource``. The first guess was already made by ``read``.

        As in ``fill``, old guesses must be cleared. The head's steps also write guesses for rows
        that are too long to take part. Those guesses are not for the rows' next tokens, and must be
        cleared too.
        """
        later_RG = self.guesses_RG[:rows, 1:]
        later_RG.zero_()
        self._lengths_R[:rows] = 0
        self._guess(rows, self._alone)
        later_RG *= self._lengths_R[:rows, None] > 0

    def _guess(self, rows: int, count: int) -> None:
        """Continue each row's first guess, so that there are ``count`` guesses."""
        ids = self._ids_R[:rows]
        positions = self._positions_R[:rows]
        output = self._output_RW[:rows]
        G = self.guesses_RG.shape[1]
        everything = self._runtime.pages.everything(rows)
        step = Step(
            rows=rows,
            lengths=self._lengths_R[:rows],
            top_k=everything,
            block_table=self._blocks_SM[:rows],
            prefills=(),
            everything=everything,
            has_page_counts=True,
        )
        for number in range(1, count):
            kernels.head_step_kernel[(rows,)](
                self._cycle.length_R,
                self._cycle.made_R,
                self._cycle.drafts,
                self.guesses_RG,
                G,
                number,
                self._ids_R,
                self._positions_R,
                self._slots_R,
                self._lengths_R,
                self._blocks_SM,
                self._blocks_SM.stride(0),
                self._vllm.max_model_len,
                T=count + 1,
                TOKENS=self._block_tokens,
            )
            hidden, next_output = self._draft(ids, positions, output, step, self._slots_R[:rows])
            self.guesses_RG[:rows, number] = self._most_likely(hidden)
            output.copy_(next_output)

    def follow(self, rows: int, sparse: SparsePass) -> None:
        """See ``GuessSource``."""
        T = sparse.step.tokens
        device = self.guesses_RG.device
        kept_R1 = self._cycle.kept_R[:rows, None]
        is_draft_RT = torch.arange(T, device=device) < kept_R1
        ids_RT = torch.where(is_draft_RT, sparse.drawn_RT.view(rows, T), 0).int()
        hidden, output = self._draft(
            ids_RT.flatten(),
            sparse.position_RT,
            self._combined(sparse.states),
            sparse.step,
            sparse.slot_RT,
        )
        last_R = torch.arange(rows, device=device) * T + (kept_R1[:, 0] - 1).clamp(min=0)
        took_part = kept_R1 > 0
        guess_R1 = self._most_likely(hidden[last_R])[:, None]
        first_R1 = self.guesses_RG[:rows, :1]
        first_R1.copy_(torch.where(took_part, guess_R1, first_R1))
        output_RW = self._output_RW[:rows]
        output_RW.copy_(torch.where(took_part, output[last_R], output_RW))

    def fill(self, B: int) -> None:
        """See ``GuessSource``. Only the first guess continues the row's drafts. Computing more
        guesses would cost more time than it would save.

        The other guesses must be cleared. If a row took part in none of the cycle's passes, its
        other guesses may depend on rejected drafts. The random numbers of rejected drafts are used
        again for later tokens.
        """
        self.guesses_RG[:B, 1:] = 0

    def _draft(
        self, ids: Tensor, positions: Tensor, states: Tensor, step: Step, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the head in a cycle, with Sparrow's kernels."""
        self._runtime.drafting.is_running = True
        try:
            return self._run(
                ids,
                positions,
                states,
                dict.fromkeys(self._layers, SimpleNamespace(sparrow=step)),
                dict.fromkeys(self._layers, slots),
            )
        finally:
            self._runtime.drafting.is_running = False

    def _run(
        self, ids: Tensor, positions: Tensor, states: Tensor, metadata: Any, slots: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the head, and return its hidden states for the output layer and for its next step."""
        tokens = len(ids)
        with set_forward_context(
            metadata,
            self._vllm.vllm_config,
            num_tokens=tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=slots,
            batch_descriptor=BatchDescriptor(num_tokens=tokens),
        ):
            hidden, output = self._head(
                input_ids=ids, positions=positions, hidden_states=states, inputs_embeds=None
            )
        return hidden, output

    def _combined(self, states: list[Tensor]) -> Tensor:
        combined: Tensor = self._head.combine_hidden_states(torch.cat(states, dim=-1))
        return combined

    def _most_likely(self, hidden: Tensor) -> Tensor:
        token: Tensor = self._head.compute_logits(hidden).argmax(-1)
        return token
