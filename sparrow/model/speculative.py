"""Lossless decoding in plain torch, the reference for fast engines. The sparse actor drafts, and
its dense policy verifies.

There are two methods. The first is speculative sampling (Leviathan et al., arXiv 2211.17192; Chen
et al., arXiv 2302.01318), with the same model as drafter and verifier. A draft v is drawn from the
actor's distribution q and accepted with probability min(1, p(v) / q(v)), where p is the policy's
distribution. If the draft is rejected, a token is drawn from max(p - q, 0), normalised. The
resulting token is distributed as p, whatever q is. The probability that a draft is accepted, sum_v
min(p(v), q(v)), is the acceptance rate that Sparrow measures.

In the second method, the policy draws every token itself, with the same random number as the draft
at its position, and drafts are accepted up to the first difference (Daliri et al., arXiv
2408.07978). The tokens are then those of dense decoding with the same random numbers, whatever is
drafted. The probability that a draft is accepted is lower than the acceptance rate a; with Gumbel
noise, as in vLLM, it is at least a / (2 - a).

With guesses, drafting and verification become the later stages of a cascade. First, m tokens are
guessed from history (``sparrow.model.history``). The actor then reads all of them in one sparse
pass, and drafts at least one token and at most m + 1. Finally, the policy verifies the drafts. At
each place of the pass, a token is drawn from the actor's distribution q, and the guess at that
place is kept if it equals the token. A guess g is thus kept with probability q(g), and otherwise
replaced by a token from q without g, as in rejection sampling. Drafts therefore follow q, whatever
is guessed. Verification uses the q of this pass.

A pass selects pages by the query of its first token alone. If the selection depended on guesses, q
would depend on the very tokens that it decides about. If guesses were then drawn at random and
accepted with the probability of speculative sampling, verification could not know the distribution
of the drafts.

Shapes: B sequences, T query tokens, S columns of the cache, k drafts per cycle, m guesses per pass,
V vocabulary.
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
from sparrow.model.actor import dense_steps, steps_of_several
from sparrow.model.history import History


@dataclass(frozen=True)
class Shape:
    """The temperature and the truncation that turn logits ``[..., V]`` into the distribution to
    sample from. Actor and policy use the same shape.
    """

    temperature: float = 1.0  # 0 means greedy; log-probs are then computed at temperature 1
    # number of most likely tokens to keep; tokens that tie with the last of them are kept as well
    top_k: int | None = None
    # nucleus: keep the smallest set of the remaining tokens that has at least this mass
    top_p: float = 1.0

    def distribution(self, logits: Tensor) -> Tensor:
        """Compute the float64 probabilities to sample from. At temperature 0, the most likely token
        has all the mass.

        Raises TrainingDiverged if logits are NaN or infinite. (Some logits may be -inf, but not
        all.)
        """
        if not torch.isfinite(logits.amax(-1)).all():  # ``amax`` propagates NaN
            raise TrainingDiverged(
                "the model's logits are not finite, so no token can be sampled; return to weights "
                "with finite logits, or use precision fp32 if the logits overflow"
            )
        if self.temperature == 0:
            return one_hot(logits.argmax(-1), logits.shape[-1]).double()
        return self.log_probs(logits).double().exp()

    def log_probs(self, logits: Tensor) -> Tensor:
        """Compute float32 log-probs of the tokens that are kept; other tokens get -inf."""
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
    """The tokens that a model has read of ``B`` sequences.

    The tokens of row b are in cache columns ``start[b]`` onwards; earlier columns are padding.
    ``start`` is int64 ``[B]``.
    """

    def __init__(self, model: PreTrainedModel, start: Tensor) -> None:
        self.model = model
        self.start = start
        self.cache = DynamicCache(config=model.config)
        self._last_position = model.config.get_text_config().max_position_embeddings - 1
        # transformers 5.24 renamed this argument, and warns about the old name.
        named = "cache" in inspect.signature(model.forward).parameters
        self._cache_name = "cache" if named else "past_key_values"

    @property
    def lengths(self) -> Tensor:
        """Number of cached tokens in each row, int64 ``[B]``."""
        return self.cache.get_seq_length() - self.start

    def read(self, ids_BT: Tensor, logits_to_keep: int = 0) -> Tensor:
        """Append tokens to the cache, and return the logits ``[B, T, V]`` after each token or, if
        ``logits_to_keep`` is set, after the last few tokens.
        """
        columns = torch.arange(self.cache.get_seq_length() + ids_BT.shape[1], device=ids_BT.device)
        real_BS = columns >= self.start[:, None]
        positions = columns[-ids_BT.shape[1] :] - self.start[:, None]
        out = self.model(
            input_ids=ids_BT,
            attention_mask=real_BS.long() if self.start.any() else None,
            # A row may read drafts beyond the model's last position; the logits of these drafts are
            # not used.
            position_ids=positions.clamp(min=0, max=self._last_position),
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{self._cache_name: self.cache},
        )
        return out.logits

    def forget(self, tokens: int) -> None:
        """Drop the newest ``tokens`` columns of all rows."""
        if tokens:  # before transformers 5.15, ``crop(0)`` dropped everything
            self.cache.crop(-tokens)

    def keep(self, lengths_B: Tensor) -> None:
        """Drop all but the oldest ``lengths_B`` tokens of each row, and shift rows so that they end
        in the same column.
        """
        dropped_B = self.lengths - lengths_B
        if (dropped_B == dropped_B[0]).all():
            return self.forget(int(dropped_B[0]))
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
        """Keep only these rows."""
        layers: list[Any] = self.cache.layers
        for layer in layers:
            if hasattr(layer, "keys"):
                layer.batch_select_indices(rows)
            else:  # the layer has only a recurrent state, whose rows transformers can reorder
                layer.reorder_cache(rows)
        self.start = self.start[rows]


@dataclass(frozen=True)
class Cycle:
    """The result of one draft-verify cycle. A row's entries beyond its ``count`` are undefined."""

    tokens: Tensor  # int64 [B, k + 1], the accepted drafts and one more token
    count: Tensor  # int64 [B], number of tokens in each row: accepted drafts + 1
    # float32 [B, k + 1, V], the dense policy's log-probs at the position of each of these tokens
    log_p: Tensor
    # float32 [B, k], the probability sum_v min(p(v), q(v)) that a draft is accepted. It is nan if
    # the row did not draft, and after the first rejected draft, because later drafts follow a token
    # that is not part of the result
    acceptance: Tensor
    # bool [B, k], true for drafts drawn at the first token of a sparse pass; without guesses, these
    # are all drafts
    opens_pass: Tensor


@dataclass(frozen=True)
class Drafts:
    """Drafted tokens; entries beyond the number of drafts of a row are undefined."""

    tokens: Tensor  # int64 [B, k]
    q_BkV: Tensor  # float64, the distributions that the drafts were drawn from
    opens_pass: Tensor  # bool [B, k], see ``Cycle``


@torch.no_grad()
def speculate(
    sequences: CachedSequences,
    newest: Tensor,
    drafts: Tensor,
    shape: Shape,
    uniform: Tensor,
    drafter_invariant: bool = False,
    history: tuple[History, Tensor] | None = None,
) -> Cycle:
    """Draft and verify once. Afterwards, ``sequences`` contains the policy's keys and values of all
    tokens except the last.

    Args:
        sequences: sequences of a model that ``set_schedule`` was called on; the schedule determines
            what drafts read.
        newest: int64 ``[B]``, the newest token of each row, which is not cached yet.
        drafts: int64 ``[B]``, the number of tokens that each row drafts, possibly 0.
        shape: the temperature and truncation with which drafts and samples are drawn.
        uniform: float64 ``[3, B, k + 1]`` in [0, 1). For each position in the cycle, these are the
            random numbers for drawing drafts, accepting drafts, and drawing the last token.
        drafter_invariant: whether drafts and all tokens are drawn with the last of these three
            numbers.
        history: the history in which guesses are looked up, and the rows of these sequences in it,
            int64 ``[B]``. The last token of each of these rows must be ``newest``. None to draft
            without guesses.
    """
    draft_uniform = uniform[2] if drafter_invariant else uniform[0]
    drafted = draft(sequences, newest, drafts, shape, draft_uniform, history)

    # Verification reads the drafts again, so that the cache ends up with the policy's keys and
    # values.
    ids_BT = torch.cat([newest[:, None], drafted.tokens], 1)
    # without this context, a single token would be read sparsely
    with dense_steps(sequences.model):
        dense_logits = sequences.read(ids_BT).float()

    p_BTV = shape.distribution(dense_logits)
    q_BkV = drafted.q_BkV if drafts.any() else p_BTV[:, :0]
    judge = verify_by_drawing if drafter_invariant else verify
    tokens, accepted, acceptance = judge(p_BTV, q_BkV, drafted.tokens, drafts, uniform[1:])
    sequences.keep(sequences.lengths - ids_BT.shape[1] + accepted + 1)
    return Cycle(
        tokens, accepted + 1, shape.log_probs(dense_logits), acceptance, drafted.opens_pass
    )


def draft(
    sequences: CachedSequences,
    newest: Tensor,
    drafts: Tensor,
    shape: Shape,
    uniform: Tensor,
    history: tuple[History, Tensor] | None = None,
) -> Drafts:
    """Draft with the sparse actor, and leave ``sequences`` and ``history`` as they were; see
    ``speculate``.

    Passes are repeated until every row has its drafts; rows that are already complete still take
    part in the remaining passes. At the end, the drafted tokens are dropped from the history, even
    those that are accepted later. If a draft is rejected, the random numbers that drew it will draw
    other tokens, and a guess must not depend on those numbers.
    """
    B = len(newest)
    k = int(drafts.max())
    row = torch.arange(B, device=newest.device)
    lengths = sequences.lengths
    made = torch.zeros_like(drafts)
    tokens_Bk = newest.new_zeros(B, k)
    opens_Bk = torch.zeros_like(tokens_Bk, dtype=torch.bool)
    q_BkV = uniform.new_zeros(B, k, 0)
    while (made < drafts).any():
        guess_Bm = newest.new_zeros(B, 0) if history is None else history[0].guesses(history[1])
        with steps_of_several(sequences.model):
            logits = sequences.read(torch.cat([newest[:, None], guess_Bm], 1)).float()
        q_BTV = shape.distribution(logits)
        place_BT = made[:, None] + torch.arange(q_BTV.shape[1], device=made.device)
        drawn_BT, kept = draw_along(q_BTV, guess_Bm, uniform.gather(1, place_BT.clamp(max=k - 1)))

        count = torch.minimum(kept + 1, drafts - made)
        b, t = (place_BT < (made + count)[:, None]).nonzero(as_tuple=True)
        if not made.any():  # the size of the vocabulary is not known earlier
            q_BkV = q_BTV.new_zeros(B, k, q_BTV.shape[2])
        q_BkV[b, made[b] + t] = q_BTV[b, t]
        tokens_Bk[b, made[b] + t] = drawn_BT[b, t]
        opens_Bk[b[t == 0], made[b[t == 0]]] = True
        made = made + count
        newest = torch.where(count > 0, drawn_BT[row, (count - 1).clamp(min=0)], newest)
        sequences.keep(lengths + made)
        if history is not None:
            history[0].extend(history[1], drawn_BT, count)

    sequences.keep(lengths)
    if history is not None:
        history[0].forget(history[1], made)
    return Drafts(tokens_Bk, q_BkV, opens_Bk)


def draw_along(q_BTV: Tensor, guess_Bm: Tensor, uniform_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token from each distribution, ``[B, T]``. Also return how many guesses come before the
    first one that differs from the token drawn in its place, ``[B]``.
    """
    B, T, V = q_BTV.shape
    drawn_BT = draw(q_BTV.reshape(B * T, V), uniform_BT.reshape(B * T)).view(B, T)
    is_kept_Bm = drawn_BT[:, : guess_Bm.shape[1]] == guess_Bm
    return drawn_BT, is_kept_Bm.long().cumprod(1).sum(1)


def verify(
    p_BTV: Tensor, q_BkV: Tensor, draft_Bk: Tensor, drafts: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify drafts by rejection sampling. Return the tokens ``[B, k + 1]``, the number of accepted
    drafts ``[B]``, and the acceptance ``[B, k]``.

    ``Cycle`` describes these results. The policy's distributions are float64 ``[B, k + 1, V]``, and
    the actor's are float64 ``[B, k, V]``. ``uniform`` is ``[2, B, k + 1]``: drafts are accepted
    with the random numbers in ``uniform[0]``, and the last token is drawn with those in
    ``uniform[1]``.
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
    """Verify drafts as in ``verify``, except that the policy draws every token with ``uniform[1]``.
    Drafts were drawn with the same random numbers.
    """
    tokens_BT, same = draw_along(p_BTV, draft_Bk, uniform[1, :, : p_BTV.shape[1]])
    accepted = torch.minimum(same, drafts)
    return tokens_BT, accepted, _examined(p_BTV, q_BkV, drafts, accepted)


def _examined(p_BTV: Tensor, q_BkV: Tensor, drafts: Tensor, accepted: Tensor) -> Tensor:
    """Compute the acceptance of drafts up to and including the first rejected draft; later entries
    are nan. Return float32 ``[B, k]``.
    """
    place_k = torch.arange(q_BkV.shape[1], device=drafts.device)
    examined_Bk = (place_k <= accepted[:, None]) & (place_k < drafts[:, None])
    acceptance_Bk = torch.minimum(p_BTV[:, :-1], q_BkV).sum(-1).clamp(max=1).float()
    return acceptance_Bk.masked_fill(~examined_Bk, torch.nan)


def accepts(p: Tensor, q: Tensor, draft: Tensor, uniform: Tensor) -> Tensor:
    """Decide which drafts ``[...]`` to accept. Each was drawn from q ``[..., V]``, and is accepted
    with probability min(1, p / q).
    """
    p_draft = p.gather(-1, draft[..., None])[..., 0]
    q_draft = q.gather(-1, draft[..., None])[..., 0]
    return uniform * q_draft < p_draft


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Compute the unnormalised distribution of the token that replaces a rejected draft: max(p - q,
    0), or p if rounding makes this zero everywhere.
    """
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def draw(mass: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token for each row, ``[B]``, with probability proportional to ``mass`` ``[B, V]``, by
    inverting the cumulative distribution at ``uniform`` ``[B]``.
    """
    below = mass.cumsum(-1)
    return torch.searchsorted(below, uniform[:, None] * below[:, -1:], right=True)[:, 0]
