"""Lossless decoding in plain torch, as a reference for fast engines. The sparse actor drafts, and
its dense policy verifies.

There are two methods. The first is speculative sampling (Leviathan et al., arXiv 2211.17192; Chen
et al., arXiv 2302.01318), with the same model as drafter and verifier. A draft v is drawn from the
actor's distribution q and accepted with probability min(1, p(v) / q(v)), where p is the policy's
distribution. A rejected draft is replaced by a token drawn from max(p - q, 0), normalised. Either
way, the token is distributed as p, whatever q is. A draft is accepted with probability sum_v
min(p(v), q(v)), which is the acceptance rate that Sparrow measures.

In the second method, the policy draws every token itself, using the same random numbers as the
drafts, and drafts are accepted up to the first mismatch (Daliri et al., arXiv 2408.07978). The
tokens are then the ones dense decoding would draw with those random numbers, whatever was drafted.
Fewer drafts get accepted. If a is the acceptance rate in the first method, a draft is now accepted
with a probability below a. With Gumbel noise, as in vLLM, this probability is at least a / (2 - a).

With guesses, there's a cascade. First, m tokens are guessed from history
(``sparrow.model.history``). The actor then reads all of them in one sparse pass and drafts between
1 and m + 1 tokens, which the policy finally verifies. At each position of the pass, a token is
drawn from the actor's distribution q, and the guess is kept if it matches. So a guess g is kept
with probability q(g), and otherwise replaced by a token drawn from q without g, as in rejection
sampling. Drafts therefore follow q, no matter what was guessed. Verification uses the q of this
pass.

Only the query of a pass's first token selects pages. If the guesses also selected pages, q would
depend on the tokens that it accepts or rejects. If, in addition, the guesses were drawn at random
and accepted as in speculative sampling, verification couldn't know the distribution of the drafts.

Shapes: B sequences, T query tokens, S cache columns, k drafts per cycle, m guesses per pass, V
vocabulary.
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
from sparrow.model.state import layer_kinds


@dataclass(frozen=True)
class Shape:
    """The temperature, top-k and top-p that turn logits ``[..., V]`` into the distribution to
    sample from. The actor and the policy use the same ones.
    """

    temperature: float = 1.0  # 0 means greedy, with log-probs at temperature 1
    # keep this many of the most likely tokens, plus any that tie with the last of them
    top_k: int | None = None
    # nucleus: of the tokens kept by top-k, keep the smallest set with at least this mass
    top_p: float = 1.0

    def distribution(self, logits: Tensor) -> Tensor:
        """Compute the float64 probabilities to sample from. At temperature 0, the most likely token
        gets all the mass.

        Raises TrainingDiverged if logits are NaN or infinite. (-inf is fine, as long as not all of
        them are -inf.)
        """
        if not torch.isfinite(logits.amax(-1)).all():  # ``amax`` propagates NaN
            raise TrainingDiverged(
                "the model's logits are not finite, so no token can be sampled; go back to "
                "weights with finite logits, or use precision fp32 if the logits overflow"
            )
        if self.temperature == 0:
            return one_hot(logits.argmax(-1), logits.shape[-1]).double()
        return self.log_probs(logits).double().exp()

    def log_probs(self, logits: Tensor) -> Tensor:
        """Compute float32 log-probs. Tokens cut by top-k or top-p get -inf."""
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
    """``B`` sequences in a model's KV cache.

    Row b's tokens are in cache columns ``start[b]`` onwards; anything before is padding. ``start``
    is int64 ``[B]``.
    """

    def __init__(self, model: PreTrainedModel, start: Tensor) -> None:
        self.model = model
        self.start = start
        # A cache that drops what has left the window can't be rolled back past a draft.
        windowed = "sliding_attention" in layer_kinds(model.config.get_text_config())
        self.cache = DynamicCache(config=None if windowed else model.config)
        self._last_position = model.config.get_text_config().max_position_embeddings - 1
        # transformers 5.24 renamed this argument, and warns about the old name.
        named = "cache" in inspect.signature(model.forward).parameters
        self._cache_name = "cache" if named else "past_key_values"

    @property
    def lengths(self) -> Tensor:
        """Cached tokens per row, int64 ``[B]``."""
        return self.cache.get_seq_length() - self.start

    def read(self, ids_BT: Tensor, logits_to_keep: int = 0) -> Tensor:
        """Append tokens to the cache, and return the logits after each token, ``[B, T, V]``. If
        ``logits_to_keep`` isn't 0, return only the logits after the last ``logits_to_keep`` tokens.
        """
        columns = torch.arange(self.cache.get_seq_length() + ids_BT.shape[1], device=ids_BT.device)
        real_BS = columns >= self.start[:, None]
        positions = columns[-ids_BT.shape[1] :] - self.start[:, None]
        out = self.model(
            input_ids=ids_BT,
            attention_mask=real_BS.long() if self.start.any() else None,
            # Drafts may run past the model's last position; their logits aren't used.
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
        """Trim each row to its oldest ``lengths_B`` tokens, and shift rows so that they all end in
        the same column.
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
            else:  # only a recurrent state, which transformers can reorder
                layer.reorder_cache(rows)
        self.start = self.start[rows]


@dataclass(frozen=True)
class Cycle:
    """Result of one draft-verify cycle. A row's entries past its ``count`` are undefined."""

    tokens: Tensor  # int64 [B, k + 1], the accepted drafts and one more token
    count: Tensor  # int64 [B], tokens per row: accepted drafts + 1
    # float32 [B, k + 1, V], the dense policy's log-probs at each token's position
    log_p: Tensor
    # float32 [B, k], the acceptance rate sum_v min(p(v), q(v)) at each draft. An entry is nan if
    # the row didn't draft that token. Entries after a row's first rejected draft are also nan,
    # because those drafts follow a token that was thrown away.
    acceptance: Tensor
    # bool [B, k], true for drafts drawn at the first token of a sparse pass; without guesses, this
    # is every draft
    opens_pass: Tensor


@dataclass(frozen=True)
class Drafts:
    """Drafted tokens. Entries past a row's last draft are undefined."""

    tokens: Tensor  # int64 [B, k]
    q_BkV: Tensor  # float64, the distributions the drafts were drawn from
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
    """Draft and verify once. Afterwards, ``sequences`` has the policy's keys and values for all
    tokens but the last.

    Args:
        sequences: sequences of a model that ``set_schedule`` was called on; drafts follow its
            schedule.
        newest: int64 ``[B]``, each row's newest token, which isn't cached yet.
        drafts: int64 ``[B]``, how many tokens each row drafts; may be 0.
        shape: temperature and truncation for drawing drafts and samples.
        uniform: random numbers in [0, 1) for each position in the cycle, float64 ``[3, B, k + 1]``.
            The first set is for drawing drafts, the second for accepting drafts, and the third for
            drawing the last token.
        drafter_invariant: whether to draw drafts and all tokens with the third set of random
            numbers.
        history: the history to look up guesses in, and the sequences' rows in the history, int64
            ``[B]``. Each row must end with its sequence's ``newest`` token. If None, the actor
            drafts without guesses.
    """
    draft_uniform = uniform[2] if drafter_invariant else uniform[0]
    drafted = draft(sequences, newest, drafts, shape, draft_uniform, history)

    # Verification rereads the drafts, so that the cache ends up with the policy's keys and values.
    ids_BT = torch.cat([newest[:, None], drafted.tokens], 1)
    # Otherwise, a single token would be read sparsely.
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
    """Draft with the sparse actor, leaving ``sequences`` and ``history`` as they were. For the
    arguments, see ``speculate``.

    Passes repeat until every row has its drafts; rows that finish early are carried along. At the
    end, all drafts are dropped from the history, even those that verification will accept. The
    random numbers of a rejected draft and later drafts are used again for other tokens, so guesses
    must not depend on these numbers. Therefore, a row never guesses from another row's drafts.
    """
    B = len(newest)
    k = int(drafts.max())
    row = torch.arange(B, device=newest.device)
    lengths = sequences.lengths
    made = torch.zeros_like(drafts)
    tokens_Bk = newest.new_zeros(B, k)
    opens_Bk = torch.zeros_like(tokens_Bk, dtype=torch.bool)
    q_BkV = uniform.new_zeros(B, k, 0)
    before = None if history is None else history[0].length_B.clone()
    while (made < drafts).any():
        guess_Bm = newest.new_zeros(B, 0)
        if history is not None and before is not None:
            guess_Bm = history[0].guesses(history[1], others_up_to=before)
        with steps_of_several(sequences.model):
            logits = sequences.read(torch.cat([newest[:, None], guess_Bm], 1)).float()
        q_BTV = shape.distribution(logits)
        place_BT = made[:, None] + torch.arange(q_BTV.shape[1], device=made.device)
        drawn_BT, kept = draw_along(q_BTV, guess_Bm, uniform.gather(1, place_BT.clamp(max=k - 1)))

        count = torch.minimum(kept + 1, drafts - made)
        b, t = (place_BT < (made + count)[:, None]).nonzero(as_tuple=True)
        if not made.any():  # the vocabulary size isn't known before this
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
    """Draw a token from each distribution, ``[B, T]``. Also return the number of guesses before the
    first one that differs from the drawn token, ``[B]``.
    """
    B, T, V = q_BTV.shape
    drawn_BT = draw(q_BTV.reshape(B * T, V), uniform_BT.reshape(B * T)).view(B, T)
    is_kept_Bm = drawn_BT[:, : guess_Bm.shape[1]] == guess_Bm
    return drawn_BT, is_kept_Bm.long().cumprod(1).sum(1)


def verify(
    p_BTV: Tensor, q_BkV: Tensor, draft_Bk: Tensor, drafts: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify drafts by rejection sampling. Returns the tokens ``[B, k + 1]``, the number of
    accepted drafts ``[B]`` and the acceptance ``[B, k]``, as in ``Cycle``.

    The policy's distributions are float64 ``[B, k + 1, V]``, the actor's are float64 ``[B, k, V]``.
    ``uniform`` is ``[2, B, k + 1]``: ``uniform[0]`` is for accepting drafts, ``uniform[1]`` for
    drawing the last token.
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
    """Like ``verify``, but the policy draws every token with ``uniform[1]``, the random numbers
    that the drafts were drawn with.
    """
    tokens_BT, same = draw_along(p_BTV, draft_Bk, uniform[1, :, : p_BTV.shape[1]])
    accepted = torch.minimum(same, drafts)
    return tokens_BT, accepted, _examined(p_BTV, q_BkV, drafts, accepted)


def _examined(p_BTV: Tensor, q_BkV: Tensor, drafts: Tensor, accepted: Tensor) -> Tensor:
    """Compute the acceptance of drafts up to and including the first rejected one, float32
    ``[B, k]``. Later entries are nan.
    """
    place_k = torch.arange(q_BkV.shape[1], device=drafts.device)
    examined_Bk = (place_k <= accepted[:, None]) & (place_k < drafts[:, None])
    acceptance_Bk = torch.minimum(p_BTV[:, :-1], q_BkV).sum(-1).clamp(max=1).float()
    return acceptance_Bk.masked_fill(~examined_Bk, torch.nan)


def accepts(p: Tensor, q: Tensor, draft: Tensor, uniform: Tensor) -> Tensor:
    """Decide which drafts ``[...]`` to accept. They were drawn from q ``[..., V]``, and each is
    accepted with probability min(1, p / q).
    """
    p_draft = p.gather(-1, draft[..., None])[..., 0]
    q_draft = q.gather(-1, draft[..., None])[..., 0]
    return uniform * q_draft < p_draft


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Compute the unnormalised distribution for replacing a rejected draft: max(p - q, 0), or p if
    max(p - q, 0) rounds to zero everywhere.
    """
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def draw(mass: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token per row, ``[B]``, by inverting the CDF at ``uniform`` ``[B]``. A token's
    probability is proportional to its ``mass`` ``[B, V]``.
    """
    below = mass.cumsum(-1)
    return torch.searchsorted(below, uniform[:, None] * below[:, -1:], right=True)[:, 0]
