"""Find out which pages the sparse actor should read: rank selectors, page sizes, layers and reuse
by p5 at equal bytes.

    python studies/reasoner/page_selectors.py    # writes benchmarks/results/selectors_reasoner.json
    python studies/reasoner/page_selectors.py --show benchmarks/results/selectors_reasoner.json
    python studies/reasoner/page_selectors.py --model M --lines 60 --count 96 --tokens 160 256 --dense-layers 0 1

Dense trajectories for the ``trace`` task are sampled once, and every variant is measured in a
teacher-forced pass over them. Acceptance is exact, because it's computed over the full vocabulary.
Bytes are counted per sparse layer in KV tokens, the size of one token's key and value. They cover
kept pages and landmarks (half a KV token per page for a mean key, one for a minimum and a maximum).
At every length, a variant reads as many pages as its bytes allow, and a sequence that fits is read
in full. Variants live here rather than in the package; a clear winner may move there.

Shapes: B sequences, T tokens, H query heads, K kv heads, G = H / K, D head dim, P page size, N
pages, R resamples.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from sparrow import SparsitySchedule
from sparrow.attention.pages import PageLayout, select_pages
from sparrow.engines.hf import HFEngine
from sparrow.mismatch import weighted_percentile
from sparrow.model.scoring import Batch, micro_batches
from sparrow.rollout import Rollout, Sampling
from sparrow.schedule import ALL_PAGES

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from common import REASONER, device, parser, read_result, save, table, tracing

RESAMPLES, SEED = 400, 7
TOKEN_BUDGET = 65_536  # padded tokens per forward pass

# --- selectors: scores [B, K, T, N] of whole pages, and landmark sizes relative to a key ---


@dataclass
class Scored:
    """A selector's input: queries by group, keys by page, and the softmax scale."""

    q_BKGTD: Tensor
    k_BKNPD: Tensor
    scale: float
    whole_TN: Tensor  # which pages are complete at each query

    def logits(self) -> Tensor:
        """Return each head's logits with the mean keys, ``[B, K, G, T, N]``."""
        return self.scale * torch.einsum("bkgtd,bknd->bkgtn", self.q_BKGTD, self.k_BKNPD.mean(-2))

    def squares(self, variance_BKND: Tensor) -> Tensor:
        """Return the variance of each head's logits within a page, assuming uncorrelated key
        dimensions.
        """
        return self.scale**2 * torch.einsum("bkgtd,bknd->bkgtn", self.q_BKGTD**2, variance_BKND)

    def softmax(self, logits_BKGTN: Tensor) -> Tensor:
        """Return each head's softmax over complete pages."""
        return logits_BKGTN.masked_fill(~self.whole_TN, float("-inf")).softmax(-1).nan_to_num()


def bounds(s: Scored) -> Tensor:
    upper = torch.einsum("bkgtd,bknd->bkgtn", s.q_BKGTD.clamp(min=0), s.k_BKNPD.amax(-2))
    return upper + torch.einsum("bkgtd,bknd->bkgtn", s.q_BKGTD.clamp(max=0), s.k_BKNPD.amin(-2))


def by_dimension(s: Scored) -> Tensor:
    return s.logits() + s.squares(s.k_BKNPD.var(-2, correction=0)) / 2


def by_radius(s: Scored) -> Tensor:
    variance_BKN1 = s.k_BKNPD.var(-2, correction=0).mean(-1, keepdim=True)
    return (
        s.logits()
        + s.squares(variance_BKN1.expand(*variance_BKN1.shape[:-1], s.q_BKGTD.shape[-1])) / 2
    )


def true_mass(s: Scored) -> Tensor:
    """Return the log of each page's true attention mass, which can't be computed from landmarks."""
    logits = s.scale * torch.einsum("bkgtd,bknpd->bkgtnp", s.q_BKGTD, s.k_BKNPD)
    return logits.logsumexp(-1)


SELECTORS: dict[str, tuple[Callable[[Scored], Tensor], float]] = {
    "mean key": (lambda s: s.logits().mean(2), 1),
    "mean key, best head": (lambda s: s.logits().amax(2), 1),
    "mean key, log-sum-exp of heads": (lambda s: s.logits().logsumexp(2), 1),
    "mean key, softmax, group sum": (lambda s: s.softmax(s.logits()).sum(2), 1),
    "mean key, softmax, best head": (lambda s: s.softmax(s.logits()).amax(2), 1),
    "Quest, best head": (lambda s: bounds(s).amax(2), 2),
    "Quest, group mean": (lambda s: bounds(s).mean(2), 2),
    "mean key + radius": (lambda s: by_radius(s).mean(2), 1 + 1 / 64),
    "mean key + radius, best head": (lambda s: by_radius(s).amax(2), 1 + 1 / 64),
    "mean key + radius, log-sum-exp of heads": (lambda s: by_radius(s).logsumexp(2), 1 + 1 / 64),
    "mean key + radius, softmax, group sum": (lambda s: s.softmax(by_radius(s)).sum(2), 1 + 1 / 64),
    "mean key + variance, softmax, group sum": (lambda s: s.softmax(by_dimension(s)).sum(2), 2),
    "true mass (not realisable)": (lambda s: s.softmax(true_mass(s)).sum(2), 1),
    "newest pages": (
        lambda s: torch.arange(s.k_BKNPD.shape[2], device=s.q_BKGTD.device).float(),
        0,
    ),
}


# --- a variant of the actor ---


@dataclass(frozen=True)
class Variant:
    """One way to spend a given number of bytes.

    Attributes:
        tokens: KV tokens read per layer, averaged over the layers.
        dense: layers that read everything. If ``dense_counts``, their bytes count, so the other
            layers read less.
        weights: the sparse layers' relative shares of the bytes.
        every: steps between two selections.
        leaders: pairs of a layer and the layer it takes its scores from.
    """

    label: str
    tokens: int
    selector: str = "mean key"
    page_size: int = 4
    dense: tuple[int, ...] = ()
    dense_counts: bool = True
    weights: tuple[float, ...] | None = None
    every: int = 1
    leaders: tuple[tuple[int, int], ...] = ()
    sink_pages: int = 1
    recent_pages: int = 2


class Actor:
    """A variant applied to one batch, shared by all attention layers of the model."""

    def __init__(self, variant: Variant, layers: int, prompt_B: Tensor, length_B: Tensor) -> None:
        self.variant, self.layers, self.prompt_B, self.length_B = (
            variant,
            layers,
            prompt_B,
            length_B,
        )
        self.scores: dict[int, Tensor] = {}
        self.read = 0.0  # KV tokens, summed over response tokens and layers
        self.held = 0.0  # what a dense actor would read

    def attend(
        self, layer: int, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float
    ) -> Tensor:
        v, T, device = self.variant, k_BKTD.shape[2], k_BKTD.device
        position_T = torch.arange(T, device=device)
        decoded_BT = (position_T >= self.prompt_B[:, None]) & (position_T < self.length_B[:, None])
        held = float((decoded_BT * (position_T + 1)).sum())
        if v.dense_counts or layer not in v.dense:
            self.held += held
        if layer in v.dense:
            self.read += held * v.dense_counts
            return F.scaled_dot_product_attention(
                q_BHTD, k_BKTD, v_BKTD, is_causal=True, scale=scale, enable_gqa=True
            )
        P, N, K = v.page_size, -(-T // v.page_size), k_BKTD.shape[1]
        q_BKGTD = q_BHTD.unflatten(1, (K, -1))
        k_BKNPD = F.pad(k_BKTD, (0, 0, 0, N * P - T)).unflatten(2, (N, P))
        lead = dict(v.leaders).get(layer, layer)
        if lead == layer:
            seen_BT = position_T.expand(len(q_BHTD), -1)
            if v.every > 1:  # scores from the last step that selected
                since_BT = (position_T - self.prompt_B[:, None]).clamp(min=0)
                seen_BT = position_T - since_BT % v.every
            whole_TN = (torch.arange(N, device=device) + 1) * P <= (position_T + 1)[:, None]
            score, _ = SELECTORS[v.selector]
            scores = score(Scored(q_BKGTD, k_BKNPD, scale, whole_TN))
            scores = scores.expand(len(q_BHTD), K, T, N).masked_fill(~whole_TN, float("-inf"))
            self.scores[layer] = scores.gather(2, seen_BT[:, None, :, None].expand(-1, K, -1, N))
        landmark = SELECTORS[v.selector][1] / 2 / v.every if lead == layer else 0.0
        length_T = position_T + 1
        pages_T = -(-length_T // P)
        tokens_T = self._tokens(layer, length_T)
        keep_T = ((tokens_T - landmark * pages_T) / P).floor().long()
        top_k_T = (keep_T - v.sink_pages - v.recent_pages).clamp(min=0)
        whole_T = tokens_T >= length_T
        top_k_T = torch.where(whole_T, ALL_PAGES, top_k_T)
        layout = PageLayout(P, v.sink_pages, v.recent_pages)
        # Ties go to the earlier page. Pages that were still incomplete when scores were computed
        # come last.
        ranked = self.scores[lead].clamp(min=torch.finfo(torch.float32).min)
        keep = select_pages(
            ranked, length_T.expand(len(q_BHTD), -1), top_k_T.expand(len(q_BHTD), -1), layout
        )
        kept_T = (top_k_T + v.sink_pages + v.recent_pages).clamp(max=pages_T)
        tokens_T = torch.minimum(kept_T * P, length_T)
        landmarks_T = torch.where(kept_T < pages_T, landmark * pages_T, 0.0)
        self.read += float((decoded_BT * (tokens_T + landmarks_T)).sum())
        keep = keep | (position_T < self.prompt_B[:, None])[:, None, :, None]
        mask = keep.repeat_interleave(P, -1)[..., :T] & (position_T <= position_T[:, None])
        mask = mask.repeat_interleave(q_BHTD.shape[1] // K, 1)
        return F.scaled_dot_product_attention(
            q_BHTD, k_BKTD, v_BKTD, attn_mask=mask, scale=scale, enable_gqa=True
        )

    def _tokens(self, layer: int, length_T: Tensor) -> Tensor | float:
        """Return how many KV tokens a layer may read at each length."""
        sparse = [i for i in range(self.layers) if i not in self.variant.dense]
        weights = self.variant.weights or (1.0,) * self.layers
        left_T = self.variant.tokens * self.layers - length_T * len(self.variant.dense)
        if not self.variant.dense_counts:
            left_T = self.variant.tokens * len(sparse)
        return left_T * weights[layer] / sum(weights[i] for i in sparse)


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
) -> Any:
    """Implement transformers' attention interface for whole sequences padded on the right."""
    out = module.actor.attend(module.layer_idx, query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("selectors", attention)
AttentionMaskInterface.register("selectors", sdpa_mask)


class Bench:
    """A model and its dense trajectories. ``acceptance`` scores them under a variant."""

    def __init__(self, model: Path, lines: int, count: int) -> None:
        self.device = device()
        self.model, ends, prompts = tracing(model, lines, count, SEED, self.device)
        self.layers = self.model.config.num_hidden_layers
        engine = HFEngine(self.model, SparsitySchedule.dense(dense_layers=()), ends, 256)
        self.rollouts = engine.generate(prompts, Sampling(16 * lines, top_n=0, seed=SEED))
        self.groups = micro_batches(
            [len(r.prompt_ids) + len(r) for r in self.rollouts], TOKEN_BUDGET
        )
        self.model.set_attn_implementation("selectors")
        everything = Variant("dense", 0, dense=tuple(range(self.layers)))
        self.dense = [probabilities for probabilities, _ in self._passes(everything)]
        lengths = [len(self.rollouts[i]) for group in self.groups for i in group]
        self.owner = np.repeat(np.arange(len(lengths)), lengths)
        draws = np.random.default_rng(0).multinomial(
            len(lengths), np.full(len(lengths), 1 / len(lengths)), RESAMPLES
        )
        self.weights_RB = np.concatenate([np.ones((1, len(lengths))), draws])
        self.mean_length = float(np.mean([len(r.prompt_ids) + len(r) for r in self.rollouts]))

    @torch.no_grad()
    def _passes(self, variant: Variant) -> Iterator[tuple[Tensor, Actor]]:
        """Yield each group's probabilities at every response token, ``[tokens, V]``, and the actor
        that computed them.
        """
        for group in self.groups:
            some: list[Rollout] = [self.rollouts[i] for i in group]
            batch = Batch.of(some, self.device)
            # The first response token is sampled after the dense prefill, so the query of the last
            # prompt token is dense.
            actor = Actor(
                variant,
                self.layers,
                batch.prompt_lengths,
                batch.prompt_lengths + batch.response_lengths,
            )
            for module in self.model.modules():
                if hasattr(module, "layer_idx"):
                    module.actor = actor
            rows, columns = batch.response_index()
            logits = self.model(input_ids=batch.input_ids, use_cache=False).logits[
                rows, columns - 1
            ]
            yield logits.softmax(-1), actor

    def acceptance(self, variant: Variant) -> tuple[np.ndarray, dict[str, float]]:
        """Return the acceptance of every response token ``[T]``, and the KV tokens read per layer
        and step.
        """
        alphas, read, held, steps = [], 0.0, 0.0, 0
        counted = self.layers - (0 if variant.dense_counts else len(variant.dense))
        for p, (q, actor) in zip(self.dense, self._passes(variant), strict=True):
            alphas.append(torch.minimum(p, q).sum(-1).clamp(0, 1).cpu().numpy().astype(np.float64))
            read, held, steps = read + actor.read, held + actor.held, steps + len(p) * counted
        return np.concatenate(alphas), {"tokens_read": read / steps, "share_read": read / held}

    def p5(self, alpha: np.ndarray) -> np.ndarray:
        """Return the 5th percentile of ``alpha`` and of each resample, ``[1 + R]``."""
        return weighted_percentile(alpha, self.owner, self.weights_RB)


# --- the variants ---


def variants(
    layers: int, tokens: Sequence[int], dense: tuple[int, ...]
) -> Iterator[tuple[str, list[Variant]]]:
    """Yield sections with their variants. All variants in a section read the same number of bytes,
    and are compared with the first one.
    """
    for b in tokens:
        for P in (16, 8, 4):
            yield (
                f"selectors, pages of {P}, {b} tokens",
                [Variant(name, b, name, P, dense, dense_counts=False) for name in SELECTORS],
            )
        sizes = [
            Variant(f"pages of {P}", b, page_size=P, dense=dense, dense_counts=False)
            for P in (16, 8, 4)
        ]
        wide = [
            replace(v, label=f"{v.label}, newest 32 tokens", recent_pages=32 // v.page_size)
            for v in sizes[1:]
        ]
        yield f"page sizes, {b} tokens", [*sizes, *wide]
        for P in (16, 4):
            uniform = Variant("all layers alike", b, page_size=P)
            single = [replace(uniform, label=f"layer {i} dense", dense=(i,)) for i in range(layers)]
            pairs = [
                replace(uniform, label=f"layers {i} and {j} dense", dense=(i, j))
                for i, j in ((0, 1), (0, layers - 1), (layers - 2, layers - 1))
            ]
            weighted = [
                replace(
                    uniform,
                    label=f"layer {i} {name} the others",
                    weights=(*(1.0,) * i, share, *(1.0,) * (layers - i - 1)),
                )
                for name, share in (("twice", 2.0), ("half", 0.5))
                for i in range(layers)
            ]
            yield f"layers, pages of {P}, {b} tokens", [uniform, *single, *pairs, *weighted]
        sparse = [i for i in range(layers) if i not in dense]
        for P in (16, 4):
            fresh = Variant(
                "selected in every layer and step", b, page_size=P, dense=dense, dense_counts=False
            )
            stale = [replace(fresh, label=f"every {n} steps", every=n) for n in (2, 4, 8, 16)]
            shared = [
                replace(
                    fresh,
                    label="the first sparse layer's",
                    leaders=tuple((i, sparse[0]) for i in sparse),
                ),
                replace(
                    fresh,
                    label="pairs of layers",
                    leaders=tuple((i, sparse[n - n % 2]) for n, i in enumerate(sparse)),
                ),
            ]
            yield f"reuse, pages of {P}, {b} tokens", [fresh, *stale, *shared[: len(sparse)]]


def run(arguments: argparse.Namespace) -> None:
    bench = Bench(arguments.model, arguments.lines, arguments.count)
    result: dict[str, Any] = {
        "model": arguments.model.name,
        "layers": bench.layers,
        "lines": arguments.lines,
        "responses": arguments.count,
        "response_tokens": int(bench.owner.size),
        "mean_length": bench.mean_length,
        "dense_layers": arguments.dense_layers,
        "sections": {},
    }
    known: dict[Variant, tuple[np.ndarray, dict[str, float]]] = {}
    began = time.monotonic()
    for section, group in variants(bench.layers, arguments.tokens, tuple(arguments.dense_layers)):
        rows, base = [], None
        for variant in group:
            key = replace(variant, label="")
            if key not in known:
                alpha, cost = bench.acceptance(variant)
                known[key] = (bench.p5(alpha), {"mean": float(alpha.mean()), **cost})
            p5, rest = known[key]
            base = p5 if base is None else base
            rows.append(
                {
                    "label": variant.label,
                    "p5": p5[0],
                    "over_first": p5[0] - base[0],
                    "over_first_interval": np.quantile(p5[1:] - base[1:], [0.025, 0.975]).tolist(),
                    **rest,
                }
            )
        result["sections"][section] = rows
        save(arguments.out, result)
        print(f"{time.monotonic() - began:6.1f} s  {section}", flush=True)
    show(result)


def show(result: dict[str, Any]) -> None:
    """Return Markdown tables, best variants first. A variant that goes over its bytes is marked."""
    for section, rows in result["sections"].items():
        b = int(section.split(", ")[-1].split()[0])
        lines = []
        for r in [rows[0], *sorted(rows[1:], key=lambda r: -r["p5"])]:
            over = "{:+.3f} [{:+.3f}, {:+.3f}]".format(r["over_first"], *r["over_first_interval"])
            mark = " (more than its share)" if r["tokens_read"] > 1.03 * b else ""
            lines.append(
                [
                    r["label"],
                    f"{r['p5']:.3f}",
                    over,
                    f"{r['mean']:.4f}",
                    f"{r['tokens_read']:.0f}{mark}",
                ]
            )
        print(
            f"\n{section}\n\n{table(['', 'p5', 'against the first', 'mean', 'tokens read'], lines)}",
            end="",
        )


def main() -> None:
    options = parser(__doc__, "selectors_reasoner")
    options.add_argument(
        "--model", type=Path, default=REASONER, help="folder of a model trained on the task trace"
    )
    options.add_argument("--lines", type=int, default=36)
    options.add_argument("--count", type=int, default=256)
    options.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[96, 128, 192],
        help="budgets in KV tokens per layer",
    )
    options.add_argument(
        "--dense-layers",
        type=int,
        nargs="*",
        default=[0],
        help="dense layers for selectors, page sizes and reuse",
    )
    options.add_argument("--show", type=Path, help="only print the tables for an existing result")
    arguments = options.parse_args()
    if arguments.show:
        show(read_result(arguments.show))
    else:
        run(arguments)


if __name__ == "__main__":
    main()
