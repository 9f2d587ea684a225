"""Lossless decoding in plain torch, the reference for fast engines: the sparse actor drafts, its
dense policy verifies.

Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318) with one
model on both sides: a draft v is drawn from the actor's q and kept with probability min(1, p(v) /
q(v)) under the policy's p; if it is rejected, a token is drawn from max(p - q, 0), normalised. The
result is distributed as p, whatever q is, and the chance that a draft is kept, sum_v min(p(v),
q(v)), is the acceptance rate that Sparrow measures.

Or the policy draws every token itself, with the random number that drew the draft, and drafts are
kept up to the first that differs (Daliri et al., arXiv 2408.07978). The tokens are then those of
dense decoding with the same numbers, whatever is drafted; a draft is kept with a lower probability
than a, the acceptance rate, but with Gumbel noise, as in vLLM, with a / (2 - a) at least.

Shapes: B sequences, T query tokens, S columns of the cache, k drafts of a cycle, V vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import DynamicCache, PreTrainedModel

from sparrow.attention.pages import tokens_at
from sparrow.errors import TrainingDiverged
from sparrow.model.actor import dense_steps


@dataclass(frozen=True)
class Shape:
    """Changes to the softmax over logits ``[..., V]`` before it is sampled from; the same for actor
    and policy.
    """

    temperature: float = 1.0  # 0 is greedy; log-probs are then those at 1
    # keep this many of the likeliest tokens, and any as likely as the last of them
    top_k: int | None = None
    # of those, keep the fewest that hold this share of the mass, likeliest first
    top_p: float = 1.0

    def distribution(self, logits: Tensor) -> Tensor:
        """Float64 probabilities to sample from; at temperature 0 the likeliest token has all the
        mass.

        Raises TrainingDiverged: logits are NaN or infinite (some may be -inf, but not all).
        """
        if not torch.isfinite(logits.amax(-1)).all():  # a maximum passes NaN on
            raise TrainingDiverged(
                "the model's logits are not finite, so no token can be sampled; go back to weights "
                "that are finite, or use precision fp32 if they overflow"
            )
        if self.temperature == 0:
            return one_hot(logits.argmax(-1), logits.shape[-1]).double()
        return self.log_probs(logits).double().exp()

    def log_probs(self, logits: Tensor) -> Tensor:
        """Float32 log-probs of the tokens that are kept, -inf for the others."""
        scaled = logits.float() / (self.temperature or 1.0)
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        if self.top_p < 1:
            mass, token = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
            beyond = mass.cumsum(-1) - mass >= self.top_p
            left_out = torch.zeros_like(beyond).scatter(-1, token, beyond)
            scaled = scaled.masked_fill(left_out, -torch.inf)
        return scaled.log_softmax(-1)


class CachedSequences:
    """The tokens that a model has read of ``B`` sequences: those of row b are in the cache's
    columns from ``start[b]`` on.

    Columns before that are padding. ``start`` is int64 ``[B]``.
    """

    def __init__(self, model: PreTrainedModel, start: Tensor) -> None:
        self.model = model
        self.start = start
        self.cache = DynamicCache(config=model.config)
        self._last_position = model.config.get_text_config().max_position_embeddings - 1
        # Its name since transformers 5.24, which warns of the former one.
        named = "cache" in inspect.signature(model.forward).parameters
        self._cache_name = "cache" if named else "past_key_values"

    @property
    def lengths(self) -> Tensor:
        """Cached tokens of each row, int64 ``[B]``."""
        return self.cache.get_seq_length() - self.start

    def read(self, ids_BT: Tensor, logits_to_keep: int = 0) -> Tensor:
        """Append tokens to the cache; returns the logits ``[B, T, V]`` after each of them, or after
        the last few.
        """
        columns = torch.arange(self.cache.get_seq_length() + ids_BT.shape[1], device=ids_BT.device)
        real_BS = columns >= self.start[:, None]
        positions = columns[-ids_BT.shape[1] :] - self.start[:, None]
        out = self.model(
            input_ids=ids_BT,
            attention_mask=real_BS.long() if self.start.any() else None,
            # A row may read drafts past its own end, but nobody looks at those.
            position_ids=positions.clamp(min=0, max=self._last_position),
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{self._cache_name: self.cache},
        )
        return out.logits

    def forget(self, tokens: int) -> None:
        """Drop the newest ``tokens`` columns of all rows."""
        if tokens:  # before transformers 5.15, ``crop(0)`` drops everything
            self.cache.crop(-tokens)

    def keep(self, lengths_B: Tensor) -> None:
        """Drop all but the oldest ``lengths_B`` tokens of each row, and move the rows so that they
        end together.
        """
        width = int(lengths_B.max())
        start = width - lengths_B
        column = torch.arange(width, device=start.device)
        source_BS = (column + (self.start - start)[:, None]).clamp(min=0)

        def moved(x_BKSD: Tensor) -> Tensor:
            return tokens_at(x_BKSD, source_BS[:, None].expand(-1, x_BKSD.shape[1], -1))

        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.keys = moved(layer.keys)
            layer.values = moved(layer.values)
        self.start = start

    def select(self, rows: Tensor) -> None:
        """Keep these rows only."""
        layers: list[Any] = self.cache.layers
        for layer in layers:
            if hasattr(layer, "keys"):
                layer.batch_select_indices(rows)
            else:  # a layer with only a state, in which transformers can reorder rows
                layer.reorder_cache(rows)
        self.start = self.start[rows]


@dataclass(frozen=True)
class Cycle:
    """The result of one draft-verify cycle. A row's entries beyond its ``count`` mean nothing."""

    tokens: Tensor  # int64 [B, k + 1], the accepted drafts and one token more
    count: Tensor  # int64 [B], tokens of each row: accepted drafts + 1
    log_p: Tensor  # float32 [B, k + 1, V], the dense policy's log-probs at each of them
    # float32 [B, k], the chance sum_v min(p(v), q(v)) that a draft is accepted; nan where the row
    # did not draft, and after the first rejected draft: those follow tokens that the policy did not
    # write
    acceptance: Tensor


@torch.no_grad()
def speculate(
    sequences: CachedSequences,
    newest: Tensor,
    drafts: Tensor,
    shape: Shape,
    uniform: Tensor,
    drafter_invariant: bool = False,
) -> Cycle:
    """Draft and verify once; afterwards ``sequences`` hold the policy's keys and values of all
    tokens but the last.

    Args:
        sequences: of a model that ``set_schedule`` was called on; drafts read what that schedule
            says.
        newest: int64 ``[B]``, the token of each row that is not cached yet.
        drafts: int64 ``[B]``, how many tokens each row drafts, 0 included.
        shape: of the distributions that drafts and samples are drawn from.
        uniform: float64 ``[3, B, k + 1]`` in [0, 1): for each place in the cycle, the numbers that
            draw drafts, accept them, and draw the last token.
        drafter_invariant: draw drafts and all tokens with the last of these numbers.
    """
    ids = [newest]
    logits = []
    draft_uniform = uniform[2] if drafter_invariant else uniform[0]
    for i in range(int(drafts.max())):
        logits.append(sequences.read(ids[-1][:, None]).float())
        ids.append(draw(shape.distribution(logits[-1][:, 0]), draft_uniform[:, i]))

    # Verification reads the drafts again, so that the cache gets the policy's keys and values.
    sequences.forget(len(logits))
    ids_BT = torch.stack(ids, 1)
    with dense_steps(sequences.model):  # one token alone would be read sparsely
        dense_logits = sequences.read(ids_BT).float()

    q_BkV = shape.distribution(torch.cat([*logits, dense_logits[:, :0]], 1))
    p_BTV = shape.distribution(dense_logits)
    judge = verify_by_drawing if drafter_invariant else verify
    tokens, accepted, acceptance = judge(p_BTV, q_BkV, ids_BT[:, 1:], drafts, uniform[1:])
    sequences.keep(sequences.lengths - ids_BT.shape[1] + accepted + 1)
    return Cycle(tokens, accepted + 1, shape.log_probs(dense_logits), acceptance)


def verify(
    p_BTV: Tensor, q_BkV: Tensor, draft_Bk: Tensor, drafts: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rejection sampling; returns tokens ``[B, k + 1]``, how many of them are accepted drafts
    ``[B]``, and acceptance ``[B, k]``.

    See ``Cycle``; the policy's distributions are float64 ``[B, k + 1, V]``, the actor's ``[B, k,
    V]``. The first of ``uniform``, ``[2, B, k + 1]``, accepts drafts, the second draws the last
    token.
    """
    B, k = draft_Bk.shape
    place_k = torch.arange(k, device=drafts.device)
    row = torch.arange(B, device=drafts.device)
    accepted_Bk = accepts(p_BTV[:, :k], q_BkV, draft_Bk, uniform[0, :, :k])
    kept_Bk = accepted_Bk & (place_k < drafts[:, None])
    accepted = kept_Bk.long().cumprod(1).sum(1)

    p_BV = p_BTV[row, accepted]
    q_BV = torch.cat([q_BkV, torch.zeros_like(p_BTV[:, :1])], 1)[row, accepted]
    was_rejected = (accepted < drafts)[:, None]
    mass_BV = torch.where(was_rejected, residual(p_BV, q_BV), p_BV)
    last = draw(mass_BV, uniform[1, row, accepted])
    tokens = torch.cat([draft_Bk, last[:, None]], 1).scatter(1, accepted[:, None], last[:, None])
    return tokens, accepted, _examined(p_BTV, q_BkV, drafts, accepted)


def verify_by_drawing(
    p_BTV: Tensor, q_BkV: Tensor, draft_Bk: Tensor, drafts: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``verify``, but the policy draws every token, with the second of ``uniform``, which drew
    the drafts too.
    """
    B, T, V = p_BTV.shape
    tokens_BT = draw(p_BTV.reshape(B * T, V), uniform[1, :, :T].reshape(B * T)).view(B, T)
    place_k = torch.arange(T - 1, device=drafts.device)
    kept_Bk = (tokens_BT[:, :-1] == draft_Bk) & (place_k < drafts[:, None])
    accepted = kept_Bk.long().cumprod(1).sum(1)
    return tokens_BT, accepted, _examined(p_BTV, q_BkV, drafts, accepted)


def _examined(p_BTV: Tensor, q_BkV: Tensor, drafts: Tensor, accepted: Tensor) -> Tensor:
    """The acceptance of drafts up to the first rejected one, nan elsewhere, float32 ``[B, k]``."""
    place_k = torch.arange(q_BkV.shape[1], device=drafts.device)
    examined_Bk = (place_k <= accepted[:, None]) & (place_k < drafts[:, None])
    acceptance_Bk = torch.minimum(p_BTV[:, :-1], q_BkV).sum(-1).clamp(max=1).float()
    return acceptance_Bk.masked_fill(~examined_Bk, torch.nan)


def accepts(p: Tensor, q: Tensor, draft: Tensor, uniform: Tensor) -> Tensor:
    """Accept drafts ``[...]``, drawn from q ``[..., V]``, each with probability min(1, p / q)."""
    p_draft = p.gather(-1, draft[..., None])[..., 0]
    q_draft = q.gather(-1, draft[..., None])[..., 0]
    return uniform * q_draft < p_draft


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The mass to replace a rejected draft from: max(p - q, 0), not normalised here; p where
    rounding leaves none.
    """
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def draw(mass: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token for each row, ``[B]``, with probability in proportion to ``mass`` ``[B, V]``:
    the inverse of the distribution function at ``uniform`` ``[B]``."""
    below = mass.cumsum(-1)
    return torch.searchsorted(below, uniform[:, None] * below[:, -1:], right=True)[:, 0]
