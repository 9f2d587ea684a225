"""Compute a causal language model's log-probs of given tokens, in chunks, so that the logits of all
tokens are never in memory at once.

Shapes: B sequences, T tokens in the longest sequence, M response tokens in the whole batch
(concatenated), n entries per top-n list, V vocabulary, C hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from sparrow.errors import UnsupportedModel
from sparrow.rollout import Rollout


@dataclass(frozen=True)
class Batch:
    """Prompts and their responses, right-padded. A causal model doesn't need a mask for right
    padding.
    """

    input_ids: Tensor  # int64 [B, T]
    prompt_lengths: Tensor  # int64 [B]
    response_lengths: Tensor  # int64 [B], at least 1
    # int64 [M, n], extra tokens to score at each response position, if any
    top_ids: Tensor | None = None

    @classmethod
    def build(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[np.ndarray],
        top_ids: Sequence[np.ndarray] | None = None,
        device: torch.device | str = "cpu",
    ) -> Batch:
        if not all(map(len, prompts)):
            raise ValueError(
                "a prompt has no tokens, so the first token of its response cannot be scored; pass "
                "prompts of at least one token"
            )
        rows = [
            np.concatenate([np.asarray(p, dtype=np.int64), r])
            for p, r in zip(prompts, responses, strict=True)
        ]
        input_ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for i, row in enumerate(rows):
            input_ids[i, : len(row)] = row

        top = None
        if top_ids is not None:
            top = torch.from_numpy(np.concatenate(top_ids).astype(np.int64)).to(device)
        return cls(
            torch.from_numpy(input_ids).to(device),
            torch.tensor([len(p) for p in prompts], device=device),
            torch.tensor([len(r) for r in responses], device=device),
            top,
        )

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], device: torch.device, with_top: bool = False) -> Batch:
        """Build a batch from ``rollouts``. If ``with_top`` is true, their top-n tokens are scored
        as well.
        """
        top_ids = [r.top_ids for r in rollouts] if with_top else None
        return cls.build(
            [r.prompt_ids for r in rollouts], [r.response_ids for r in rollouts], top_ids, device
        )

    def response_index(self) -> tuple[Tensor, Tensor]:
        """Return the row and column, int64 ``[M]``, of every response token."""
        column = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        start = self.prompt_lengths[:, None]
        rows, columns = (
            (column >= start) & (column < start + self.response_lengths[:, None])
        ).nonzero(as_tuple=True)
        return rows, columns


class TokenScores(NamedTuple):
    """Token scores, all float32: ``logprobs`` ``[M]``, ``top_logprobs`` ``[M, n]`` (None if the
    batch has no ``top_ids``) and ``entropy`` ``[M]`` (None if gradients are enabled).
    """

    logprobs: Tensor
    top_logprobs: Tensor | None
    entropy: Tensor | None


class TokenScorer(nn.Module):
    """Wraps a causal language model so that its forward pass returns log-probs of response tokens.

    Pass this module to ``accelerator.prepare``, so that data-parallel wrappers see every forward
    pass.

    Raises UnsupportedModel if the logits aren't finite, or the model changes them after the output
    embedding (with a soft cap, for example).
    """

    def __init__(self, model: PreTrainedModel, chunk_tokens: int = 4096) -> None:
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens
        self._check_head()

    def forward(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """Score ``batch``, with logits divided by ``temperature`` (0 counts as 1)."""
        hidden = self.model.get_decoder()(
            input_ids=batch.input_ids, use_cache=False
        ).last_hidden_state
        rows, columns = batch.response_index()
        top_ids = batch.top_ids
        hidden_MC = hidden[rows, columns - 1]
        target_M = batch.input_ids[rows, columns]

        score: Any = self._head
        if torch.is_grad_enabled():
            # Don't keep a chunk's logits; the backward pass recomputes them.
            score = partial(checkpoint, self._head, use_reentrant=False)
        pieces = []
        for i in range(0, len(target_M), self.chunk_tokens):
            now = slice(i, i + self.chunk_tokens)
            top = top_ids[now] if top_ids is not None else None
            pieces.append(score(hidden_MC[now], target_M[now], top, temperature))

        logprobs, tops, entropy = zip(*pieces, strict=True)
        top_logprobs = torch.cat(tops) if top_ids is not None else None
        return TokenScores(
            torch.cat(logprobs),
            top_logprobs,
            None if torch.is_grad_enabled() else torch.cat(entropy),
        )

    def over_logits(
        self, batch: Batch, function: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Apply ``function`` to the logits of a few response tokens at a time, and concatenate the
        results. ``function`` gets float32 logits ``[N, V]`` and the target tokens ``[N]``.
        """
        hidden = self.model.get_decoder()(
            input_ids=batch.input_ids, use_cache=False
        ).last_hidden_state
        rows, columns = batch.response_index()
        head = self.model.get_output_embeddings()
        few = max(self.chunk_tokens // 8, 1)  # ``function`` needs several [N, V] tensors
        chunks = zip(
            rows.split(few),
            columns.split(few),
            batch.input_ids[rows, columns].split(few),
            strict=True,
        )
        pieces = [
            function(head(hidden[row, column - 1]).float(), target)
            for row, column, target in chunks
        ]
        return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))

    def _head(
        self, hidden: Tensor, target: Tensor, top: Tensor | None, temperature: float
    ) -> tuple[Tensor | None, ...]:
        logits = self.model.get_output_embeddings()(hidden).float()
        log_p = (logits / temperature if temperature not in (0, 1) else logits).log_softmax(-1)
        entropy = None
        if not torch.is_grad_enabled():
            # CPU autocast would compute this in bfloat16.
            with torch.autocast(logits.device.type, enabled=False):
                entropy = -torch.linalg.vecdot(log_p.exp(), log_p)
        wanted = target[:, None]
        if top is not None:
            wanted = torch.cat([wanted, top], -1)
        gathered = log_p.gather(-1, wanted)
        return gathered[:, 0], gathered[:, 1:], entropy

    def _check_head(self) -> None:
        # One token isn't enough: id 0 is often padding with a zero embedding, so its logits are
        # zero with or without a cap.
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.arange(8, device=next(self.model.parameters()).device)[None] % vocabulary
        with evaluating(self.model):  # with dropout, the two passes would differ
            direct = self.model(input_ids=ids, use_cache=False).logits
            hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            ours = self.model.get_output_embeddings()(hidden)
        if not torch.isfinite(ours).all():
            raise UnsupportedModel(
                f"the logits of {type(self.model).__name__} are not finite, because its weights "
                f"are damaged or the logits overflow in {ours.dtype}; load different weights, or "
                "use a different precision"
            )
        if not torch.allclose(direct.float(), ours.float(), rtol=1e-3, atol=1e-3):
            raise UnsupportedModel(
                f"{type(self.model).__name__} changes its logits after the "
                "output embedding (for example, with a soft cap or a scale), but Sparrow's "
                "chunked log-probs would ignore this change; choose a model without it"
            )


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Group sequences into micro-batches of at most ``token_budget`` tokens, including padding.
    Return the indices of the sequences in each micro-batch.

    The longest sequences come first, so that memory use peaks early. A sequence over the budget
    gets a micro-batch of its own.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= token_budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable gradients and dropout inside the context, then restore every module's mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
