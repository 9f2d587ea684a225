"""A batch's growing responses. Tokens are added one by one, or cycle by cycle.

Shapes: B sequences, T response tokens, n top-n list entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.model.speculative import Cycle
from sparrow.rollout import Rollout, Sampling, Verification


class Responses:
    """A batch's growing responses; T is the maximum response length."""

    def __init__(self, B: int, sampling: Sampling, vocabulary: int, eos: Tensor) -> None:
        T = sampling.max_new_tokens
        n = min(sampling.top_n, vocabulary)
        self.eos = eos
        self.tokens = torch.zeros(B, T, dtype=torch.long)
        self.logprobs = torch.zeros(B, T)
        self.top_ids = torch.zeros(B, T, n, dtype=torch.int32)
        self.top_logprobs = torch.zeros(B, T, n)
        self.acceptance = torch.full((B, T), torch.nan)
        self.cycle_place = torch.full((B, T), -1)
        self.length = torch.zeros(B, dtype=torch.long)
        self.stopped = torch.zeros(B, dtype=torch.bool)
        # int64 [B], the number of tokens to verify at the start of each response; None unless the
        # mode is auto
        self.verified: Tensor | None = None

    def open(self, limit_B: Tensor) -> Tensor:
        """Return the indices of responses that have neither ended nor reached their limit."""
        return (~self.stopped & (self.length < limit_B)).nonzero()[:, 0]

    def contexts(self, prompts: list[Sequence[int]], rows: Tensor) -> list[list[int]]:
        """For each of the responses ``rows``, return the tokens of the prompt and the response so
        far.
        """
        return [[*prompts[b], *self.tokens[b, : self.length[b]].tolist()] for b in rows.tolist()]

    def append(
        self, rows: Tensor, cycle: Cycle, limit_B: Tensor, drafts: Tensor | None = None
    ) -> Tensor:
        """Append a cycle's tokens to the responses ``rows``. Tokens past the end of a response are
        dropped. Return indices into ``rows`` for the responses that continue.

        ``drafts``, int64, counts the tokens that each row drafted. The token of a row without
        drafts gets a ``cycle_place`` of -1.
        """
        n = self.top_logprobs.shape[2]
        tokens = cycle.tokens.cpu()
        count = cycle.count.cpu()
        position = torch.arange(tokens.shape[1])
        ends = torch.isin(tokens, self.eos) & (position < count[:, None])
        stopped = ends.any(1)
        count = torch.where(stopped, ends.int().argmax(1) + 1, count)

        b, i = (position < count[:, None]).nonzero(as_tuple=True)
        target = rows[b], self.length[rows[b]] + i
        log_p = cycle.log_p[b.to(cycle.log_p.device), i.to(cycle.log_p.device)]
        best = log_p.topk(n, dim=-1)

        self.tokens[target] = tokens[b, i]
        if drafts is not None:
            self.cycle_place[target] = torch.where(drafts.cpu()[b] > 0, i, -1)
        self.logprobs[target] = log_p.cpu().gather(-1, tokens[b, i][:, None])[:, 0]
        self.top_ids[target] = best.indices.int().cpu()
        self.top_logprobs[target] = best.values.cpu()
        alpha = torch.cat([cycle.acceptance.cpu(), torch.full((len(rows), 1), torch.nan)], 1)
        self.acceptance[target] = alpha[b, i]
        self.length[rows] += count
        self.stopped[rows] = stopped
        return (~stopped & (self.length < limit_B)[rows]).nonzero()[:, 0].to(cycle.count.device)

    def rollouts(self, prompts: list[Sequence[int]]) -> list[Rollout]:
        return [
            Rollout(
                prompt_ids=prompts[b],
                response_ids=self.tokens[b, :n].numpy(),
                logprobs=self.logprobs[b, :n].numpy(),
                top_ids=self.top_ids[b, :n].numpy(),
                top_logprobs=self.top_logprobs[b, :n].numpy(),
                finish_reason="stop" if self.stopped[b] else "length",
                verification=self._verification(b, n),
                cycle_place=self.cycle_place[b, :n].numpy(),
            )
            for b, n in enumerate(self.length.tolist())
        ]

    def _verification(self, b: int, length: int) -> Verification | None:
        if self.verified is None:
            return None
        # The first token after a prefill is also sampled from the policy.
        tokens = min(length, int(self.verified[b]) + 1)
        return Verification(tokens, self.acceptance[b, :tokens].numpy())
