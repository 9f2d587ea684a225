"""Guesses from history, the first stage of a cascade. The guess is that a sequence will repeat
tokens of its prompt, of its response so far, or of other responses to the same prompt.

The sparse actor checks guesses (see ``sparrow.model.speculative``), so a wrong guess only costs
time.

Shapes: B sequences, R streams of tokens per sequence, S tokens of a stream, m guesses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

LONGEST = 8
"""Maximum length, in tokens, of a suffix that is looked up."""
SHORTEST = 1
"""Minimum length, in tokens, of a suffix that is looked up."""


def guess(
    streams_BRS: Tensor,
    length_BR: Tensor,
    most: int,
    longest: int = LONGEST,
    shortest: int = SHORTEST,
) -> Tensor:
    """Guess how the first stream of each sequence continues, int64 ``[B, most]``.

    The end of the first stream is looked up in all streams, and the tokens that followed it there
    are the guess. The longest suffix that is found is used, up to ``longest`` tokens. If it occurs
    more than once, its latest occurrence in the first stream is used or, if there is none, its
    latest occurrence in any stream. Where there is no guess, because fewer than ``shortest`` tokens
    were found or fewer than ``most`` tokens followed, the result contains token 0.

    Args:
        streams_BRS: int64 tokens; a sequence's first stream is the sequence itself.
        length_BR: number of tokens in each stream, int64.
        most: number of tokens to guess.
        longest, shortest: maximum and minimum length of a suffix that is looked up, in tokens.
    """
    R, S = streams_BRS.shape[1:]
    device = streams_BRS.device
    place_S = torch.arange(S, device=device)
    is_same_BRS = torch.ones_like(streams_BRS, dtype=torch.bool)
    # how many tokens before each place are the same as at the end of the first stream
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
    first = torch.arange(most, device=device)
    is_known_Bm = (rank_B1 >= 0) & (best_B1 % S + first < length_BR.gather(1, best_B1 // S))
    at_Bm = (best_B1 + first).clamp(max=R * S - 1)
    return streams_BRS.flatten(1).gather(1, at_Bm).masked_fill(~is_known_Bm, 0)


class History:
    """The tokens of a batch, in which guesses are looked up.

    Args:
        streams: the tokens of each sequence so far.
        groups: the group of each sequence; guesses for a sequence are looked up in all sequences of
            its group. The tokens of such sequences must be drawn with different random numbers.
        room: number of tokens by which a sequence may grow.
        guess_tokens: number of tokens per guess (m).
        device: device of the tokens.
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

    def guesses(self, rows: Tensor) -> Tensor:
        """Guess how these sequences continue, int64 ``[len(rows), m]``."""
        streams = self._streams_BR[rows]
        width = int(self.length_B.max())
        return guess(self.tokens_BS[:, :width][streams], self.length_B[streams], self.guess_tokens)

    def extend(self, rows: Tensor, tokens: Tensor, count: Tensor) -> None:
        """Append to each of these sequences the first ``count`` ``[len(rows)]`` of its ``tokens``
        ``[len(rows), T]``.
        """
        is_new = torch.arange(tokens.shape[1], device=tokens.device) < count[:, None]
        i, t = is_new.nonzero(as_tuple=True)
        self.tokens_BS[rows[i], self.length_B[rows[i]] + t] = tokens[i, t]
        self.length_B[rows] += count

    def forget(self, rows: Tensor, tokens: Tensor) -> None:
        """Drop the newest tokens of these sequences; ``tokens`` ``[len(rows)]`` says how many."""
        self.length_B[rows] -= tokens
