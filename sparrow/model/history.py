"""Guess upcoming tokens from history. This is the first stage of a cascade. Guesses are right where
a sequence repeats something from its prompt, its response so far, or other responses to the same
prompt.

The sparse actor checks every guess (see ``sparrow.model.speculative``), so a wrong one only costs
time.

Shapes: B sequences, R token streams per sequence, S tokens per stream, m guesses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from sparrow.decoding import LONGEST_LOOKUP

SHORTEST = 1
"""Shortest suffix to look up, in tokens."""


def guess(
    streams_BRS: Tensor,
    length_BR: Tensor,
    most: int,
    longest: int = LONGEST_LOOKUP,
    shortest: int = SHORTEST,
) -> Tensor:
    """Guess how the first stream of each sequence continues, int64 ``[B, most]``.

    The function looks for places in all streams that match the end of the first stream, and guesses
    the tokens that followed the match. The longest match wins, up to ``longest`` tokens. Among
    matches of the same length, the latest match in the first stream wins. If the first stream has
    no such match, the latest match in any stream wins.

    If fewer than ``most`` tokens follow a match in the first stream, the guesses repeat these
    tokens. This continues a text whose period is shorter than ``most``. Positions without a guess
    get token 0. This happens if no match has at least ``shortest`` tokens, or if fewer than
    ``most`` tokens follow a match in another stream.

    Args:
        streams_BRS: int64 tokens; a sequence's first stream is the sequence itself.
        length_BR: number of tokens in each stream, int64.
        most: number of tokens to guess.
        longest, shortest: longest and shortest suffix to look up, in tokens.
    """
    R, S = streams_BRS.shape[1:]
    device = streams_BRS.device
    place_S = torch.arange(S, device=device)
    is_same_BRS = torch.ones_like(streams_BRS, dtype=torch.bool)
    # how many of the tokens right before each place match the end of the first stream
    agreeing_BRS = torch.zeros_like(streams_BRS)
    for back in range(1, min(longest, S) + 1):
        at_B = length_BR[:, 0] - back
        token_B = streams_BRS[:, 0].gather(1, at_B.clamp(min=0)[:, None])[:, 0]
        is_inside_BS = (at_B >= 0)[:, None] & (place_S >= back)
        agrees_BRS = streams_BRS.roll(back, 2) == token_B[:, None, None]
        is_same_BRS = is_same_BRS & agrees_BRS & is_inside_BS[:, None]
        agreeing_BRS = agreeing_BRS + is_same_BRS

    is_found_BRS = (agreeing_BRS >= shortest) & (place_S < length_BR[..., None])
    is_own_R1 = (torch.arange(R, device=device) == 0)[:, None]
    rank_BRS = (2 * agreeing_BRS + is_own_R1) * S + place_S
    rank_BRS = torch.where(is_found_BRS, rank_BRS, -1)
    rank_B1, best_B1 = rank_BRS.flatten(1).max(1, keepdim=True)
    following_B1 = length_BR.gather(1, best_B1 // S) - best_B1 % S
    after_m = torch.arange(most, device=device)
    is_known_Bm = (rank_B1 >= 0) & ((best_B1 < S) | (after_m < following_B1))
    at_Bm = best_B1 + after_m % following_B1.clamp(min=1)
    return streams_BRS.flatten(1).gather(1, at_Bm).masked_fill(~is_known_Bm, 0)


class History:
    """The tokens of a batch, kept for looking up guesses.

    Args:
        streams: each sequence's tokens so far.
        groups: each sequence's group. Guesses are looked up in all sequences of the group. These
            sequences must be sampled with different random numbers.
        room: the maximum number of tokens to append to a sequence.
        guess_tokens: tokens per guess (m).
        device: the device to keep the tokens on.
    """

    def __init__(
        self,
        streams: Sequence[Sequence[int]],
        groups: Sequence[Hashable],
        room: int,
        guess_tokens: int,
        device: torch.device,
    ) -> None:
        width = max(map(len, streams)) + room
        rows = [[*stream, *[0] * (width - len(stream))] for stream in streams]
        self.guess_tokens = guess_tokens
        self.tokens_BS = torch.tensor(rows, device=device)
        self.length_B = torch.tensor([len(stream) for stream in streams], device=device)

        members: dict[Hashable, list[int]] = {}
        for b, group in enumerate(groups):
            members.setdefault(group, []).append(b)
        most = max(map(len, members.values()))
        looked_up = []
        for b, group in enumerate(groups):
            others = [other for other in members[group] if other != b]
            looked_up.append([b, *others, *[b] * (most - 1 - len(others))])
        self._streams_BR = torch.tensor(looked_up, device=device)

    def guesses(self, rows: Tensor, others_up_to: Tensor) -> Tensor:
        """Guess how these sequences continue, int64 ``[len(rows), m]``.

        Of the other sequences in the group, only the first ``others_up_to`` tokens, int64 ``[B]``,
        are looked up.
        """
        streams = self._streams_BR[rows]
        width = int(self.length_B.max())
        length_BR = torch.cat([self.length_B[streams[:, :1]], others_up_to[streams[:, 1:]]], 1)
        return guess(self.tokens_BS[:, :width][streams], length_BR, self.guess_tokens)

    def extend(self, rows: Tensor, tokens: Tensor, count: Tensor) -> None:
        """Append to each of these sequences the first ``count`` of its ``tokens``. ``count`` is
        ``[len(rows)]``, and ``tokens`` is ``[len(rows), T]``.
        """
        is_new = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
        i, t = is_new.nonzero(as_tuple=True)
        self.tokens_BS[rows[i], self.length_B[rows[i]] + t] = tokens[i, t]
        self.length_B[rows] += count

    def forget(self, rows: Tensor, tokens: Tensor) -> None:
        """Drop the newest tokens of these sequences; ``tokens`` ``[len(rows)]`` says how many."""
        self.length_B[rows] -= tokens
