"""An engine for many small runs: a whole decode step of a small Qwen3, including sampling, is one
CUDA graph.

A million-parameter model spends nearly all of a decode step launching kernels. Replayed as a graph,
the step takes only a fraction of a millisecond. To keep all shapes fixed, attention reads the whole
cache through a mask, which costs a GPU almost nothing with a few hundred tokens. For longer
contexts, there is a graph for each multiple of ``SPAN`` columns, so that attention doesn't read
much further than the longest sequence. For comparison, the engine can also act as three other kinds
of actor.

Eviction: tokens that have recently received little attention are dropped from the cache for good.
As in SnapKV (arXiv 2404.14469), a token's value is the attention it got from the latest queries,
initially those at the end of the prompt. As in H2O (arXiv 2306.14048), values are updated during
decoding, here with exponential decay. Each kv head keeps as many tokens as the schedule would read,
always including the sink and recent pages.

The dial: sequences are decoded densely up to a given length, and sparsely beyond it. Samples of
lossless decoding follow the dense model, so no actual drafts are needed. Instead, a teacher-forced
sparse pass over some of the dense samples measures the acceptance that drafts would have had. In
this pass, the history is sparse as well; with real drafts, it is dense.

Noise: at some positions, the uniform distribution is mixed in.

Shapes: B sequences, T prompt tokens, S cached tokens, H query heads, K kv heads, G = H / K, D head
dim, P page size, N = S / P pages, V vocabulary, n top tokens. Row b's sequence is columns 0 ..
length - 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

from sparrow.engines.base import Counters
from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError
from sparrow.mismatch import acceptance_bounds
from sparrow.model.actor import teacher_forced
from sparrow.model.scoring import Batch
from sparrow.rollout import Rollout, Sampling, Verification, split
from sparrow.schedule import ALL_PAGES, SparsitySchedule

WINDOW = 16
"""For eviction, attention values decay with this time constant, in queries."""
SPAN = 256
"""Attention reads a multiple of this many columns of the cache."""
MEASURED_EVERY = 4
"""With the dial, draft acceptance is measured on one response in this many."""


class GraphEngine(HFEngine):
    """An ``HFEngine`` for a Qwen3 that decodes with one CUDA graph per step. On a CPU, the same
    step runs eagerly.

    Args:
        model, schedule, eos_ids: as for ``HFEngine``; the page layout and dense layers stay those
            of ``schedule``.
        batch_size: number of sequences in every decode step; smaller batches are padded.
        max_length: maximum number of cached tokens per sequence, including the prompt.
        evict: evict tokens instead of selecting pages.
        noise: the fraction of positions where the uniform distribution is mixed in, and its weight.
        top_n: maximum length of the top lists returned by ``generate``.
        token_budget: maximum number of padded tokens to score in one pass.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        schedule: SparsitySchedule,
        eos_ids: Sequence[int],
        batch_size: int,
        max_length: int,
        evict: bool = False,
        noise: tuple[float, float] = (0.0, 0.0),
        top_n: int = 20,
        token_budget: int = 65_536,
    ) -> None:
        config, device, P = model.config, model.device, schedule.page_size
        self.evict, self.noise = evict, noise
        self.top_n = min(top_n, config.vocab_size)
        self.max_length = S = -(-max_length // P) * P
        B, K, D, layers = (
            batch_size,
            config.num_key_value_heads,
            config.head_dim,
            config.num_hidden_layers,
        )
        self._layout = schedule
        self._keys = torch.zeros(layers, B, K, S, D, device=device)
        self._values = torch.zeros_like(self._keys)
        self._landmarks = torch.zeros(layers, B, K, S // P, D, device=device)
        self._alive = torch.zeros(layers, B, K, S, dtype=torch.bool, device=device)
        self._worth = torch.zeros(layers, B, K, S, device=device)
        self._cos, self._sin = (
            x[0] for x in model.model.rotary_emb(self._keys, torch.arange(S, device=device)[None])
        )
        self._top_k = torch.zeros(S + 1, dtype=torch.long, device=device)
        self._step = torch.zeros((), dtype=torch.long, device=device)
        self._position = torch.zeros(B, dtype=torch.long, device=device)
        self._prompt = torch.zeros(B, dtype=torch.long, device=device)
        self._token = torch.zeros(B, dtype=torch.long, device=device)
        self._temperature = torch.ones((), device=device)
        self._draws = torch.zeros(S, B, device=device)
        self._uniform_weight = torch.zeros(S, B, device=device)
        self._tokens = torch.zeros(S, B, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(S, B, device=device)
        self._best_ids = torch.zeros(S, B, self.top_n, dtype=torch.int32, device=device)
        self._best = torch.zeros(S, B, self.top_n, device=device)
        # by the number of columns attention reads
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._dense_below: float | None = None
        super().__init__(model, schedule, eos_ids, batch_size, token_budget)
        self.set_schedule(schedule)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Set the page counts; see ``Engine.set_schedule``.

        Raises ConfigError if the schedule has per-head budgets, which this engine doesn't support.
        """
        if schedule.head_budgets:
            raise ConfigError(
                "GraphEngine keeps the same number of pages in all kv heads; use a schedule "
                "without head_budgets"
            )
        super().set_schedule(schedule)
        self._fill_table()

    def verify_up_to(self, length: float) -> None:
        """See ``PartVerifier.verify_up_to``."""
        self._dense_below = length
        self._fill_table()

    def _fill_table(self) -> None:
        length = np.arange(self.max_length + 1)
        pages = self.schedule.pages(length)
        if self._dense_below is not None:
            pages = np.where(self.schedule.page_end(length) < self._dense_below, ALL_PAGES, pages)
        self._top_k.copy_(torch.from_numpy(pages))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See ``Engine.generate``. After ``verify_up_to``, rollouts also record what was verified."""
        rollouts = super().generate(prompts, sampling)
        if self._dense_below is None:
            return rollouts
        counts = [self._verified(r, self._dense_below) for r in rollouts]
        acceptance = [np.full(n, np.nan, np.float32) for n in counts]
        some = [i for i in range(0, len(rollouts), MEASURED_EVERY) if counts[i]]
        cut = [_first_tokens(rollouts[i], counts[i]) for i in some]
        for i, r, top in zip(
            some, cut, self._sparse_top(cut, sampling.temperature) if cut else (), strict=True
        ):
            acceptance[i] = acceptance_bounds(r.top_ids, r.top_logprobs, top).lower.astype(
                np.float32
            )
        return [
            replace(r, verification=Verification(len(x), x))
            for r, x in zip(rollouts, acceptance, strict=True)
        ]

    def _verified(self, rollout: Rollout, up_to: float) -> int:
        length = len(rollout.prompt_ids) + np.arange(len(rollout))
        verified = self.schedule.page_end(length) < up_to
        verified[0] = True  # the last token of the prompt is processed densely
        return int(verified.sum())

    def _sparse_top(self, rollouts: Sequence[Rollout], temperature: float) -> list[np.ndarray]:
        """Return the log-probs of each response's top tokens in a sparse pass, float32 ``[T, n]``."""
        batch = Batch.of(rollouts, self.model.device, with_top=True)
        # The reference is fast enough at these lengths, and needs no compiler.
        with (
            self._inference(),
            teacher_forced(self.model, batch.prompt_lengths, self.schedule, "reference"),
        ):
            scores = self._scorer(batch, temperature)
        return split(scores.top_logprobs.cpu().numpy(), [len(r) for r in rollouts])

    @torch.no_grad()
    def _decode(
        self, prompts: list[Sequence[int]], sampling: Sampling, seeds: list[int]
    ) -> list[Rollout]:
        count, steps, device = len(prompts), sampling.max_new_tokens, self._keys.device
        filled = [*prompts, *[prompts[-1]] * (self.batch_size - count)]
        lengths = torch.tensor([len(p) for p in filled], device=device)
        ids = torch.zeros(len(filled), int(lengths.max()), dtype=torch.long)
        for b, prompt in enumerate(filled):
            ids[b, : len(prompt)] = torch.tensor(prompt)
        assert ids.shape[1] + steps <= self.max_length, "max_length is too short for these prompts"
        ids = ids.to(device)
        self._prefill(ids, lengths)
        # The last prompt token's step writes the same keys again, densely, and samples the first
        # token.
        self._token.copy_(ids.gather(1, lengths[:, None] - 1)[:, 0])
        self._position.copy_(lengths - 1)
        self._prompt.copy_(lengths)
        self._step.zero_()
        self._temperature.fill_(sampling.temperature)
        generator = torch.Generator(device).manual_seed(seeds[0])
        self._draws.copy_(torch.rand(self._draws.shape, generator=generator, device=device))
        share, weight = self.noise
        noisy = torch.rand(self._draws.shape, generator=generator, device=device) < share
        self._uniform_weight.copy_(noisy * weight)
        longest, span = int(lengths.max()), math.lcm(SPAN, self._layout.page_size)
        for t in range(steps):
            columns = -(-(longest + t) // span) * span
            self._advance(self.max_length if self.evict else min(self.max_length, columns))
            if t % 16 == 15:
                self._wait()
                if torch.isin(self._tokens[: t + 1], self._eos).any(0).all():
                    break
        self._wait()
        n = min(sampling.top_n, self.top_n)
        tokens, logprobs, best_ids, best = (
            x[: t + 1, :count]
            .transpose(0, 1)
            .clone()
            .cpu()
            .numpy()  # makes copies, because the next batch overwrites the buffers
            for x in (self._tokens, self._logprobs, self._best_ids[..., :n], self._best[..., :n])
        )
        ended = np.isin(tokens, self._eos.cpu().numpy())
        stopped = ended.any(1)
        length = np.where(stopped, ended.argmax(1) + 1, t + 1)
        self._count_read(prompts, length)
        return [
            Rollout(
                prompts[b],
                tokens[b, :m],
                logprobs[b, :m],
                best_ids[b, :m],
                best[b, :m],
                "stop" if stopped[b] else "length",
            )
            for b, m in enumerate(length.tolist())
        ]

    def _count_read(self, prompts: Sequence[Sequence[int]], length: np.ndarray) -> None:
        """Count what decode steps read; there is one step per response token except the first."""
        cached = np.concatenate(
            [np.arange(len(p) + 1, len(p) + n) for p, n in zip(prompts, length, strict=True)]
        )
        layers, dense = self.model.config.num_hidden_layers, len(set(self.schedule.dense_layers))
        read = dense * cached.sum() + (layers - dense) * self.schedule.tokens_read(cached).sum()
        self._counters += Counters(int(read), layers * int(cached.sum()))

    def _wait(self) -> None:
        """Wait for the device without hogging a core that another run could use."""
        if self._keys.is_cuda:
            event = torch.cuda.Event()
            event.record()
            while not event.query():
                time.sleep(1e-3)

    def _advance(self, span: int) -> None:
        """Run one decode step, as a CUDA graph if graphs are in use. Attention reads the first
        ``span`` columns.
        """
        if not self._keys.is_cuda:
            return self._decode_step(span)
        if span not in self._graphs:
            self._graphs[span] = self._capture(span)
        self._graphs[span].replay()

    def _capture(self, span: int) -> torch.cuda.CUDAGraph:
        state = [self._step, self._position, self._token, self._alive, self._worth]
        before = [x.clone() for x in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decode_step(span)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._decode_step(span)
        # The next step overwrites whatever the warm-up wrote to the cache.
        for x, saved in zip(state, before, strict=True):
            x.copy_(saved)
        return graph

    def _prefill(self, ids_BT: Tensor, lengths_B: Tensor) -> None:
        """Compute the prompts' keys and values densely. For eviction, also compute the attention of
        their last queries.
        """
        T, P = ids_BT.shape[1], self._layout.page_size
        position = torch.arange(T, device=ids_BT.device)
        hidden = self.model.model.embed_tokens(ids_BT)
        inside_BS = torch.arange(self.max_length, device=ids_BT.device) < lengths_B[:, None]
        late_BT = (position >= lengths_B[:, None] - WINDOW) & inside_BS[:, :T]
        for i, layer in enumerate(self.model.model.layers):
            q, k, v = self._project(layer, hidden, self._cos[:T], self._sin[:T])
            self._keys[i, :, :, :T], self._values[i, :, :, :T] = k, v
            if self.evict:
                weights_BKGTT = self._weights(q, k, position <= position[:, None])
                out_BHTD = (weights_BKGTT @ v[:, :, None]).flatten(1, 2)
                self._worth[i].zero_()
                self._worth[i, :, :, :T] = (weights_BKGTT.mean(2) * late_BT[:, None, :, None]).sum(
                    2
                )
                self._alive[i] = inside_BS[:, None]
            else:
                group = q.shape[1] // k.shape[1]
                k, v = (x.repeat_interleave(group, 1) for x in (k, v))
                out_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = self._after(layer, hidden, out_BHTD)
        self._landmarks.copy_(self._keys.unflatten(3, (-1, P)).mean(4))

    def _decode_step(self, span: int | None = None) -> None:
        """Decode one token for every row, with inputs and outputs in fixed buffers.

        Attention reads the first ``span`` columns. With eviction, it reads all columns, to keep
        track of every column's value.
        """
        B, P, span = self.batch_size, self._layout.page_size, span or self.max_length
        row, position_B = torch.arange(B, device=self._keys.device), self._position
        column = torch.arange(span, device=self._keys.device)
        length_B = position_B + 1
        hidden = self.model.model.embed_tokens(self._token)[:, None]
        cos, sin = self._cos[position_B][:, None, None], self._sin[position_B][:, None, None]
        inside_B1S = (column < length_B[:, None])[:, None]
        in_prompt_B11 = (position_B < self._prompt)[:, None, None]
        for i, layer in enumerate(self.model.model.layers):
            q, k, v = self._project(layer, hidden, cos, sin)
            self._keys[i][row, :, position_B] = k[:, :, 0]
            self._values[i][row, :, position_B] = v[:, :, 0]
            keys_BKSD, values_BKSD = self._keys[i, :, :, :span], self._values[i, :, :, :span]
            sparse = i not in self._layout.dense_layers
            seen_BKS = inside_B1S
            if sparse and self.evict:
                self._alive[i][row, :, position_B] = torch.ones_like(
                    k[:, :, 0, 0], dtype=torch.bool
                )
                self._worth[i][row, :, position_B] = torch.zeros_like(k[:, :, 0, 0])
                seen_BKS = (self._evicted(i, length_B) | in_prompt_B11) & inside_B1S
            elif sparse:
                # Only the current page has changed since the previous step.
                page_B = position_B // P
                self._landmarks[i][row, :, page_B] = (
                    self._keys[i].unflatten(2, (-1, P))[row, :, page_B].mean(2)
                )
                seen_BKS = self._selected(q, self._landmarks[i, :, :, : span // P], length_B)
                seen_BKS = (seen_BKS | in_prompt_B11) & inside_B1S
            weights_BKGTS = self._weights(q, keys_BKSD, seen_BKS[:, :, None, None])
            if sparse and self.evict:
                self._worth[i].mul_(1 - 1 / WINDOW).add_(weights_BKGTS.mean(2)[:, :, 0])
            out_BHD = (weights_BKGTS[:, :, :, 0] @ values_BKSD).flatten(1, 2)
            hidden = self._after(layer, hidden, out_BHD[:, :, None])
        logits = self.model.lm_head(_norm(self.model.model.norm, hidden[:, 0]))
        log_q = (logits / self._temperature).log_softmax(-1)
        if self.noise[0]:
            weight_B1 = self._uniform_weight.index_select(0, self._step[None])[0][:, None]
            q = log_q.exp()
            log_q = torch.lerp(q, torch.full_like(q, 1 / q.shape[-1]), weight_B1).log()
        # Sample by inverting the cumulative distribution. Rounding can push a draw past its last
        # value, hence the clamp.
        below = log_q.exp().cumsum(-1) < self._draws.index_select(0, self._step[None])[0][:, None]
        token = below.sum(-1).clamp(max=log_q.shape[-1] - 1)
        best = log_q.topk(self.top_n, dim=-1)
        now = self._step[None]
        self._tokens.index_copy_(0, now, token[None])
        self._logprobs.index_copy_(0, now, log_q.gather(-1, token[:, None])[:, 0][None])
        self._best_ids.index_copy_(0, now, best.indices[None].int())
        self._best.index_copy_(0, now, best.values[None])
        self._token.copy_(token)
        self._position.add_(1).clamp_(max=self.max_length - 1)
        self._step.add_(1)

    def _project(
        self, layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values ``[B, heads, T, D]`` after the rotary embedding."""
        attention, x = layer.self_attn, _norm(layer.input_layernorm, hidden)
        shape = (*x.shape[:2], -1, attention.head_dim)
        q = _norm(attention.q_norm, attention.q_proj(x).view(shape)).transpose(1, 2)
        k = _norm(attention.k_norm, attention.k_proj(x).view(shape)).transpose(1, 2)
        return (
            _rotate(q, cos, sin),
            _rotate(k, cos, sin),
            attention.v_proj(x).view(shape).transpose(1, 2),
        )

    def _after(self, layer: Any, hidden: Tensor, out_BHTD: Tensor) -> Tensor:
        hidden = hidden + layer.self_attn.o_proj(out_BHTD.transpose(1, 2).flatten(2))
        return hidden + layer.mlp(_norm(layer.post_attention_layernorm, hidden))

    def _weights(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        """Return attention weights ``[B, K, G, T, S]`` over the columns in ``seen``."""
        B, H, T, D = q.shape
        K = k.shape[1]
        # Treat the group's queries as rows of one product, to avoid repeating the keys.
        logits = (q.reshape(B, K, H // K * T, D) @ k.transpose(-1, -2)).view(
            B, K, H // K, T, -1
        ) * D**-0.5
        return logits.masked_fill(~seen, float("-inf")).softmax(-1)

    def _selected(self, q: Tensor, marks_BKND: Tensor, length_B: Tensor) -> Tensor:
        """Return which tokens are in selected pages, bool ``[B, K, S]``, as defined in
        ``sparrow.attention.pages``.
        """
        layout, P = self._layout, self._layout.page_size
        B, K, N, D = marks_BKND.shape
        scores = (q.view(B, K, -1, D).mean(2)[:, :, None] * marks_BKND).sum(-1)
        page, pages_B1 = torch.arange(N, device=q.device), ((length_B + P - 1) // P)[:, None]
        always = (page < layout.sink_pages) | (page >= pages_B1 - layout.recent_pages)
        ranked = ((page < pages_B1) & ~always)[:, None]
        scores = scores.masked_fill(~ranked, float("-inf"))
        top_k = self._top_k[length_B].clamp(max=N)[:, None, None].expand(-1, K, 1)
        least = scores.sort(dim=-1, descending=True).values.gather(-1, (top_k - 1).clamp(min=0))
        keep = always[:, None] | (ranked & (scores >= least) & (top_k > 0))
        return keep.repeat_interleave(P, dim=-1)

    def _evicted(self, i: int, length_B: Tensor) -> Tensor:
        """Evict the least valuable tokens over budget, and return which ones remain, bool ``[B, K,
        S]``.
        """
        layout, P = self._layout, self._layout.page_size
        column, end_B1 = (
            torch.arange(self.max_length, device=length_B.device),
            ((length_B + P - 1) // P * P)[:, None],
        )
        always = (column < layout.sink_pages * P) | (column >= end_B1 - layout.recent_pages * P)
        worth = (
            self._worth[i]
            .masked_fill(always[:, None], float("inf"))
            .masked_fill(~self._alive[i], float("-inf"))
        )
        budget_B = (self._top_k[length_B] + layout.sink_pages + layout.recent_pages) * P
        self._alive[i].logical_and_(_rank(worth) < budget_B[:, None, None])
        return self._alive[i]

    def _check_sparse(self, calls_before: int, decode_steps: int) -> None:
        raise NotImplementedError("GraphEngine does not run HFEngine's decode loop")


def _first_tokens(rollout: Rollout, count: int) -> Rollout:
    names = ("response_ids", "logprobs", "top_ids", "top_logprobs")
    return replace(rollout, **{name: getattr(rollout, name)[:count] for name in names})


def _norm(module: Any, x: Tensor) -> Tensor:
    """Compute Qwen3's RMS norm with fewer kernels."""
    return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _rank(values: Tensor) -> Tensor:
    """Rank values along the last axis. The largest has rank 0, and ties are ranked from left to
    right.
    """
    return values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], -1) * sin
