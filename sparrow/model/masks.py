"""Work out which columns hold each row's tokens, from the attention mask that transformers passes
to every layer.

A row's tokens aren't always contiguous: padding between chat turns, or to the right of a prompt,
leaves gaps. Pages are counted in tokens, so gaps are closed before page selection and reopened
afterwards.

Shapes: B sequences, T query tokens, S cached tokens, X heads or some other dimension, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.attention.pages import tokens_at
from sparrow.errors import ConfigError


@dataclass(frozen=True)
class Rows:
    """The columns that hold each row's tokens."""

    start_B: Tensor  # each row's first column, int64
    length_B: Tensor  # tokens per row, int64
    # int64, the columns of each row's tokens in order, followed by all other columns; None if the
    # tokens are already contiguous
    order_BS: Tensor | None = None

    def close(self, x_BXSD: Tensor) -> Tensor:
        """Close the gaps in ``x``, so that each row's tokens are contiguous from ``start_B`` on."""
        return x_BXSD if self.order_BS is None else _take(x_BXSD, self.order_BS)

    def reopen(self, x_BXSD: Tensor) -> Tensor:
        """Undo ``close``."""
        return x_BXSD if self.order_BS is None else _take(x_BXSD, self.order_BS.argsort(-1))


def decoding(mask: Tensor | None, key: Tensor) -> Rows:
    """Find the columns of ``key`` that each row's newest token sees in a decode step.

    Raises ConfigError if the mask differs between heads or adds a bias to the scores.
    """
    if mask is None:
        return _all_columns(key)
    return _rows(_seen(mask, key)[:, -1])


def forced(mask: Tensor | None, query: Tensor, key: Tensor) -> Rows:
    """Find the columns of whole sequences, for teacher forcing.

    Raises ConfigError if there aren't as many queries as keys, or the mask isn't a plain causal
    mask over each row's own tokens.
    """
    if query.shape[2] != key.shape[2]:
        raise ConfigError(
            "teacher_forced computes whole sequences in one pass, but a pass had "
            f"{query.shape[2]} tokens and {key.shape[2]} keys; call "
            "the model with use_cache=False and without past_key_values"
        )
    if mask is None:
        return _all_columns(key)
    seen_BTS = _seen(mask, key)
    real_BS = seen_BTS.diagonal(dim1=-2, dim2=-1)
    causal_BTS = real_BS[:, None] & torch.ones_like(seen_BTS[0]).tril()
    other = (seen_BTS != causal_BTS) & real_BS[:, :, None]
    if bool(other.any()):
        b, t = other.any(-1).nonzero()[0].tolist()
        raise ConfigError(
            "teacher_forced requires plain causal attention (no packed sequences or custom "
            f"masks), but the token in column {t} of row {b} does not attend to exactly the "
            "tokens up to its own position; put every sequence in a row of its own, and pass "
            "an attention_mask [B, T] that marks the padding"
        )
    return _rows(real_BS)


def _seen(mask: Tensor, key: Tensor) -> Tensor:
    """Return which columns each query sees, bool ``[B, T, S]``."""
    if mask.shape[1] != 1:
        raise ConfigError(
            f"the attention mask of shape {tuple(mask.shape)} differs between heads, but Sparrow "
            "selects pages among the same tokens for all heads; pass a mask [B, T] or [B, 1, T, S]"
        )
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((hidden | (mask == 0)).all()):
            raise ConfigError(
                "the attention mask adds a bias to the scores of tokens, which page selection "
                "would ignore; pass a boolean mask, or a float mask that contains only 0 and the "
                "lowest number"
            )
        mask = ~hidden
    return mask[:, 0].expand(key.shape[0], -1, -1)


def _all_columns(key: Tensor) -> Rows:
    B = key.shape[0]
    S = key.shape[2]
    return Rows(
        start_B=torch.zeros(B, dtype=torch.long, device=key.device),
        length_B=torch.full((B,), S, device=key.device),
    )


def _rows(real_BS: Tensor) -> Rows:
    first_B = real_BS.int().argmax(-1)
    length_B = real_BS.sum(-1)
    last_B = real_BS.shape[1] - 1 - real_BS.flip(-1).int().argmax(-1)
    side_by_side_B = (last_B - first_B + 1 == length_B) | (length_B == 0)
    if bool(side_by_side_B.all()):
        return Rows(first_B, length_B)
    order_BS = (~real_BS).int().argsort(stable=True, dim=-1)
    return Rows(torch.zeros_like(first_B), length_B, order_BS)


def _take(x_BXSD: Tensor, column_BS: Tensor) -> Tensor:
    return tokens_at(x_BXSD, column_BS[:, None].expand(-1, x_BXSD.shape[1], -1))
