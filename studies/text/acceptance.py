"""Measure the acceptance of drafts and of the lossy actor on held-out text at temperature 1, by
budget and length.

    python studies/text/acceptance.py CHECKPOINT --out benchmarks/results/text_acceptance.json

*Lossless* rows are for the drafts of whole cycles, which read a dense cache (``drafts.py``), at
positions spread over each text. *Lossy* rows are for the same positions, but the actor reads the
cache that its own sparse steps have written since the prompt
(``sparrow.model.actor.teacher_forced``). In both cases, the tokens are the text's own, and the
actor is compared with the dense policy in float32. The budget covers all tokens that a sparse layer
reads, including the sink and recent pages.

Shapes: as in ``drafts.py``; S texts in all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import drafts
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from train import windows
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparrow.mismatch import plain, sequence_bootstrap, weighted_mean, weighted_percentile
from sparrow.model import actor
from sparrow.schedule import LandmarkDtype, SparsitySchedule

sys.path.extend(
    str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "studies/common")
)
from beta_tail import beta_tail_fit, weighted_beta_ks
from common import parser, save
from repeated_heads import repeat_kv_heads

Floats = NDArray[np.float64]


def study_parser(about: str, texts: int, cycles: int) -> argparse.ArgumentParser:
    """Return a command line with ``Study``'s arguments and the given defaults."""
    made = parser(about)
    made.add_argument("checkpoint", type=Path)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--texts", type=int, default=texts)
    made.add_argument("--cycles", type=int, default=cycles, help="cycles per text")
    return made


class Study:
    """A checkpoint and its held-out texts, with the cycles in which drafts are measured.

    Attributes:
        card: the model's card, written by ``train.py``.
        context: tokens per text.
        ids: token ids of the texts ``[S, T]``.
        start: first positions of the cycles ``[S, R]``.
        position: positions of their drafts ``[S, R, W]``.
        edges: length bin edges.
    """

    def __init__(
        self, checkpoint: Path, texts: int, cycles: int, drafted: int, context: int | None = None
    ) -> None:
        self.checkpoint, self.began = checkpoint, time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.card = json.loads((checkpoint / "card.json").read_text())
        self.context = context = context or self.card["context"]
        self.ids = windows(np.load(checkpoint / "held_out.npy"), texts, context).to(self.device)
        self.start = starts(texts, cycles, context, drafted).to(self.device)
        self.position = (
            (self.start[..., None] + torch.arange(drafted, device=self.device)).cpu().numpy()
        )
        self.edges = [context // 8, *(context * quarter // 4 for quarter in (1, 2, 3, 4))]

    def load(self, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
        repeat_kv_heads()
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=dtype, **options)
        return model.to(self.device).eval()

    def measured(
        self, measure: Callable[[Tensor, Tensor], Sequence[Tensor]], batch: int
    ) -> list[Floats]:
        """Call ``measure`` on the ids and starts of ``batch`` texts at a time, and concatenate the
        results ``[B, R, W]`` over all texts.
        """
        parts = [
            measure(*some)
            for some in zip(self.ids.split(batch), self.start.split(batch), strict=True)
        ]
        return [torch.cat(of).double().clamp(0, 1).cpu().numpy() for of in zip(*parts, strict=True)]

    def summary(self, alpha: Floats, ks: Sequence[int] = ()) -> dict[str, Any]:
        """Compute statistics of acceptance ``[S, R, W]``, overall, by step and by length bin."""
        return summary(alpha, self.position, self.edges, ks)

    def save(self, arguments: argparse.Namespace, **results: Any) -> dict[str, Any]:
        """Save results to ``arguments.out``, with the model, the settings and the time taken."""
        settings = {k: v for k, v in vars(arguments).items() if k not in ("checkpoint", "out")}
        seconds = round(time.monotonic() - self.began, 1)
        result = plain({"model": self.card, "seconds": seconds, "settings": settings, **results})
        save(arguments.out, result)
        return result


def schedule(
    budget: int,
    dense_layers: Sequence[int] = (),
    page_size: int = 16,
    landmark_dtype: LandmarkDtype = "auto",
) -> SparsitySchedule:
    """Return a schedule that reads ``budget`` tokens at every length in all layers except
    ``dense_layers``.
    """
    layout = SparsitySchedule.dense(page_size=page_size)
    pages = budget // page_size - layout.sink_pages - layout.recent_pages
    options = dict[str, Any](
        page_size=page_size, dense_layers=tuple(dense_layers), landmark_dtype=landmark_dtype
    )
    return SparsitySchedule.fixed(pages, **options)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Compute ``sparrow.mismatch.acceptance`` on the device, as 1 - total variation, which is
    exactly 1 for equal distributions.
    """
    return 1 - (p - q).clamp(min=0).sum(-1)


def starts(texts: int, cycles: int, context: int, drafted: int) -> Tensor:
    """Return the first positions of cycles, ``[S, R]``. The cycles of all texts together are spread
    evenly from an eighth of the context to its end.
    """
    share = (torch.arange(cycles) + (torch.arange(texts)[:, None] + 0.5) / texts) / cycles
    return context // 8 + (share * (context - drafted - context // 8)).long()


Case = tuple[SparsitySchedule, int]  # the schedule, and how many steps share a selection


def lossless(
    model: PreTrainedModel,
    ids: Tensor,
    start: Tensor,
    drafted: int,
    cases: Sequence[Case],
    compare: Callable[[Tensor, Tensor], Tensor] = acceptance,
) -> tuple[Tensor, list[Tensor]]:
    """Return the dense distributions at the cycles' drafts, ``[B, R, W, V]``, and each case's
    acceptance, ``[B, R, W]``.

    Args:
        compare: what to compute from the policy's and the drafter's distributions ``[B, R, V]``
            instead of acceptance.
    """
    dense = SparsitySchedule.dense(page_size=cases[0][0].page_size, dense_layers=())
    make = partial(
        drafts.Cycles, drafts.DenseCache.of(model, ids, drafts.layout_of(dense)), start, drafted
    )
    p = torch.stack(list(drafts.draft(model, ids, make(dense))), dim=2)
    alphas = []
    for case in cases:
        steps = drafts.draft(model, ids, make(*case))
        alphas.append(
            torch.stack([compare(p[:, :, step], q) for step, q in enumerate(steps)], dim=-1)
        )
    return p, alphas


@torch.no_grad()
def distributions(model: PreTrainedModel, ids: Tensor, start: Tensor, drafted: int) -> Tensor:
    """Return the model's next-token distributions at the cycles' drafts, ``[B, R, W, V]``."""
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    position = start[..., None] + torch.arange(drafted, device=ids.device)
    hidden = hidden[torch.arange(len(ids), device=ids.device)[:, None, None], position]
    return model.get_output_embeddings()(hidden).float().softmax(-1)


def lossy(
    model: PreTrainedModel,
    ids: Tensor,
    start: Tensor,
    p: Tensor,
    prompt: int,
    kept: SparsitySchedule,
    **options: Any,
) -> Tensor:
    """Return a lossy actor's acceptance ``[B, R, W]`` at the same positions. The actor wrote all
    but the first ``prompt`` tokens of the cache in its own sparse steps.
    """
    with actor.teacher_forced(model, [prompt] * len(ids), kept, **options):
        return acceptance(p, distributions(model, ids, start, p.shape[2]))


def tokens_of_cycles(alpha: Floats, k: int) -> Floats:
    """Return the expected number of tokens ``[...]`` of each cycle with ``k`` drafts, from the
    acceptance of its consecutive drafts ``[..., W]``.
    """
    return 1 + alpha[..., :k].cumprod(-1).sum(-1)


def tokens_a_cycle(alpha: Floats, k: int) -> tuple[float, float]:
    """Return two estimates of the tokens per cycle with ``k`` drafts: one from the acceptance of
    consecutive drafts ``[..., W]``, and one that uses the mean acceptance for all drafts.
    """
    mean = float(alpha.mean())
    geometric = k + 1.0 if mean == 1 else (1 - mean ** (k + 1)) / (1 - mean)
    return float(tokens_of_cycles(alpha, k).mean()), geometric


TAIL_BINS = 8
"""Number of equal position bins for correlating p5 with position."""
FITS = 200
"""Number of resamples for the interval of a KS distance. The fit is repeated on each resample."""


def correlations(
    alpha: Floats, position: NDArray[np.int64], text: NDArray[np.int64]
) -> dict[str, tuple[float, float, float]]:
    """Return Pearson's correlation with position, for the acceptance of tokens and for the p5 of
    bins.

    All arguments have shape ``[T]``. The 95 % intervals come from resampling whole texts. The
    correlation for bins is left out if any bin has no token of some text.
    """
    edges = np.linspace(position.min(), position.max() + 1, TAIL_BINS + 1)
    inside = [(position >= low) & (position < high) for low, high in pairwise(edges)]
    middle = (edges[1:] + edges[:-1]) / 2
    at = position - position.mean()

    def of_tokens(values: Floats, owner: NDArray[np.int64], weights: Floats) -> Floats:
        means = {
            name: weighted_mean(x, owner, weights)
            for name, x in {
                "a": values,
                "x": at,
                "ax": values * at,
                "aa": values**2,
                "xx": at**2,
            }.items()
        }
        covariance = means["ax"] - means["a"] * means["x"]
        return covariance / np.sqrt(
            (means["aa"] - means["a"] ** 2) * (means["xx"] - means["x"] ** 2)
        )

    def of_tails(values: Floats, owner: NDArray[np.int64], weights: Floats) -> Floats:
        tails = np.stack(
            [weighted_percentile(values[where], owner[where], weights) for where in inside], axis=-1
        )
        tails -= tails.mean(-1, keepdims=True)
        x = middle - middle.mean()
        with np.errstate(invalid="ignore"):  # undefined if all tails are equal
            return (tails @ x) / np.sqrt((tails**2).sum(-1) * (x**2).sum())

    statistics = {"tokens": of_tokens}
    if all(len(np.unique(text[where])) == len(np.unique(text)) for where in inside):
        statistics["p5 of bins"] = of_tails
    return {name: sequence_bootstrap(alpha, text, of)[:3] for name, of in statistics.items()}


def shape(alpha: Floats, position: NDArray[np.int64]) -> dict[str, Any]:
    """Test two of the paper's claims on acceptance ``[S, R, W]``: that it falls with length, and
    that its tail follows a Beta distribution.

    The KS distance from this distribution and the fraction of tokens in the tail get 95 %
    intervals.
    """
    text = np.broadcast_to(np.arange(len(alpha))[:, None, None], alpha.shape).ravel()
    if alpha.min() == 1:
        return {}  # everything was read, so there is no tail to fit
    tokens, tail = alpha.ravel(), None
    if fit := beta_tail_fit(tokens):
        intervals = {
            "ks_interval": sequence_bootstrap(tokens, text, weighted_beta_ks, resamples=FITS)[1:3],
            "fraction_interval": sequence_bootstrap(tokens <= fit.cut, text, weighted_mean)[1:3],
        }
        tail = {
            "a": fit.a,
            "b": fit.b,
            "ks": fit.ks,
            "n": fit.n,
            "variance": fit.variance,
            **intervals,
        }
    return {"correlation": correlations(tokens, position.ravel(), text), "beta_tail": tail}


def mean_and_p5(alpha: Floats, text: NDArray[np.int64]) -> dict[str, list[float]]:
    """Return the mean and p5 of acceptance ``[T]``, each with the ends of a 95 % interval from
    resampling whole texts.
    """
    statistics = {"mean": weighted_mean, "p5": weighted_percentile}
    return {name: list(sequence_bootstrap(alpha, text, of)[:3]) for name, of in statistics.items()}


def gain(before: Floats, after: Floats) -> dict[str, list[float]]:
    """Return how much the mean and p5 of acceptance ``[S, ...]`` increase on the same texts, with
    95 % intervals.

    Each resample draws whole texts, and uses the same texts before and after.
    """
    owner = np.repeat(np.arange(len(before)), before[0].size)
    old, new = before.ravel(), after.ravel()

    def rise(statistic: Any, _: Floats, text: NDArray[np.int64], weights: Floats) -> Floats:
        return statistic(new, text, weights) - statistic(old, text, weights)

    found = {}
    for name, statistic in (("mean", weighted_mean), ("p5", weighted_percentile)):
        interval = sequence_bootstrap(old, owner, partial(rise, statistic))
        found[name] = [round(x, 4) for x in interval[:3]]
    return found


def summary(
    alpha: Floats, position: NDArray[np.int64], edges: Sequence[int], ks: Sequence[int]
) -> dict[str, Any]:
    """Compute statistics of acceptance ``[S, R, W]`` at ``position``, overall, by cycle step, and
    by length bin.

    The first estimate of the tokens per cycle (``tokens_a_cycle``) has a 95 % interval from
    resampling whole texts, ``tokens_a_cycle_interval``.
    """
    text = np.broadcast_to(np.arange(len(alpha))[:, None, None], alpha.shape)

    def of(where: NDArray[np.bool_]) -> dict[str, Any]:
        whole = where[..., 0]
        chosen, cycles = alpha[where], alpha[whole]
        measured = {
            name: [round(x, 4) for x in interval]
            for name, interval in mean_and_p5(chosen, text[where]).items()
        }
        expected = {k: [round(x, 3) for x in tokens_a_cycle(cycles, k)] for k in ks}
        limits = {}
        for k in ks:
            tokens = tokens_of_cycles(cycles, k)
            _, low, high, *_ = sequence_bootstrap(tokens, text[whole][:, 0], weighted_mean)
            limits[k] = [round(low, 3), round(high, 3)]
        return {
            "n": len(chosen),
            **measured,
            "tokens_a_cycle": expected,
            "tokens_a_cycle_interval": limits,
        }

    everywhere = of(np.ones(alpha.shape, bool))
    bins = []
    for low, high in pairwise(edges):
        where = (position >= low) & (position < high)
        if where[..., 0].any():
            bins.append({"start": low, "end": high, **of(where)})
    return {**everywhere, "by_step": alpha.mean((0, 1)).round(4).tolist(), "bins": bins}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = study_parser(__doc__, 32, 24)
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[128, 256, 384, 512, 768, 1024, 1536, 2048, 3072]
    )
    parser.add_argument(
        "--reuse",
        type=int,
        nargs="+",
        default=[2, 4, 8],
        help="numbers of steps for which to reuse a selection, in addition to 1",
    )
    parser.add_argument("--reuse-budgets", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument(
        "--dense-layers",
        type=int,
        nargs="*",
        default=[0, 1],
        help="dense layers; every budget is measured with and without them",
    )
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8, 12])
    parser.add_argument(
        "--prompt",
        type=int,
        default=128,
        help="number of tokens at the start that a lossy actor prefills densely",
    )
    parser.add_argument("--batch", type=int, default=4, help="number of texts to process at a time")
    parser.add_argument(
        "--implementation",
        choices=("triton", "reference"),
        help="implementation of the lossy actor's attention",
    )
    args = parser.parse_args(argv)

    drafted = max(args.drafts)
    study = Study(args.checkpoint, args.texts, args.cycles, drafted)
    drafter, history = study.load(attn_implementation=drafts.NAME), study.load()
    actor.set_schedule(history, SparsitySchedule.dense(dense_layers=()))

    layers = [(), tuple(args.dense_layers)] if args.dense_layers else [()]
    budgets = [(budget, schedule(budget, dense)) for dense in layers for budget in args.budgets]
    cases = [
        (b, kept, r)
        for r in (1, *args.reuse)
        for b, kept in budgets
        if r == 1 or b in args.reuse_budgets
    ]

    def measure(ids: Tensor, start: Tensor) -> list[Tensor]:
        p, alphas = lossless(drafter, ids, start, drafted, [case[1:] for case in cases])
        forced = partial(
            lossy, history, ids, start, p, args.prompt, implementation=args.implementation
        )
        return [*alphas, *(forced(kept) for _, kept in budgets)]

    every = [*(("lossless", *case) for case in cases), *(("lossy", *case, 1) for case in budgets)]
    rows = []
    for (mode, budget, kept, reuse), values in zip(
        every, study.measured(measure, args.batch), strict=True
    ):
        measured = study.summary(values, args.drafts if mode == "lossless" else ())
        what = {
            "mode": mode,
            "budget": budget,
            "top_k": kept.top_k[0],
            "dense_layers": list(kept.dense_layers),
        }
        if reuse == 1:
            measured |= shape(values, study.position)
        rows.append({**what, "reuse": reuse, **measured})
        print(
            f"{mode} {budget} dense layers {kept.dense_layers} reuse {reuse}: mean {measured['mean'][0]} "
            f"p5 {measured['p5'][0]} tokens per cycle {measured['tokens_a_cycle']}",
            flush=True,
        )
    return study.save(args, rows=rows)


if __name__ == "__main__":
    main()
