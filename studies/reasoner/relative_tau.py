"""Test whether different pairs of engines need the same number of pages to reach the same tau, both
for an absolute tau and for one relative to the ceiling.

    python studies/reasoner/relative_tau.py  # on a CPU; a few minutes on two cores

The model is the bundled reasoner, with pages of 4 tokens and length bins of 64 tokens. vLLM samples
in bfloat16, densely and under each budget, with lists of the full vocabulary. Transformers scores
these responses in float32, both densely and in a teacher-forced pass under the budget they were
sampled with. So five actors are compared with one policy on the same tokens: transformers, vLLM,
transformers with two levels of noise, and transformers with lists of only ``SHORT`` tokens. The
noise is normal and independent for every logit of every token, and just large enough to give dense
responses a p5 of 0.95 or 0.90. With the short lists, the ceiling is low for a different reason.

Shapes: T tokens, R resamples of prompts (the first is what was measured), B prompts, V vocabulary.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparrow import SparsitySchedule
from sparrow.engines.hf import HFEngine
from sparrow.mismatch import acceptance, relative_p5, split_by_bin, weighted_percentile
from sparrow.rollout import Rollout, Sampling

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from common import REASONER, load, parser, save, table, tracing

LAYOUT = SparsitySchedule.dense(page_size=4, bin_tokens=64, dense_layers=(0,))
ALWAYS = LAYOUT.sink_pages + LAYOUT.recent_pages
BUDGETS = (6, 8, 11, 16, 23, 32)
TAUS = (0.86, 0.90, 0.94)
CEILINGS = (0.95, 0.90)
SHORT = 6
LINES, COUNT, RESAMPLES, SEED = 24, 48, 200, 0  # COUNT responses per budget
CPU = torch.device("cpu")
FEWEST = 20  # minimum number of sequences in a bin
OWN, VLLM = "transformers float32, both", "vLLM bfloat16, transformers float32"

Logprobs = dict[int | None, np.ndarray]  # by budget (None is dense), [T, V]


def sampled() -> tuple[dict[int | None, list[Rollout]], int]:
    """Sample responses by budget, with lists of the full vocabulary. Return them and the vocabulary
    size.
    """
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from sparrow.engines.vllm import VLLMEngine

    model, _, prompts = tracing(REASONER, LINES, COUNT, SEED, CPU)
    vocabulary = model.config.vocab_size
    sampling = Sampling(14 * LINES, top_n=vocabulary, seed=SEED)
    engine = VLLMEngine(
        str(REASONER),
        LAYOUT.replace(top_k=(BUDGETS[0],)),
        dtype="bfloat16",
        enforce_eager=True,
        kv_cache_memory_bytes=256 * 2**20,
        block_size=32,
        max_model_len=1024,
        max_num_batched_tokens=16384,
    )
    rollouts = {}
    for budget in (None, *BUDGETS):
        engine.set_schedule(LAYOUT if budget is None else LAYOUT.replace(top_k=(budget,)))
        rollouts[budget] = engine.generate(prompts, sampling)
        print("sampled", budget, sum(map(len, rollouts[budget])), flush=True)
    engine.close()
    return rollouts, vocabulary


def main() -> None:
    out = parser(__doc__, "relative_tau").parse_args().out
    save(out, compare(*sampled()))


def compare(rollouts: dict[int | None, list[Rollout]], V: int) -> dict[str, Any]:
    """Compare the actors on responses by budget, with lists of all ``V`` tokens, and return the
    results.
    """
    model, ends, _ = tracing(REASONER, LINES, COUNT, SEED, CPU)
    scorer = HFEngine(model, LAYOUT, ends)
    policy, actor, vllm, place, owner = {}, {}, {}, {}, {}
    for budget, some in rollouts.items():
        vllm[budget] = np.concatenate([in_order(r.top_ids, r.top_logprobs) for r in some])
        every = [
            replace(r, top_ids=np.tile(np.arange(V, dtype=np.int32), (len(r), 1))) for r in some
        ]
        for logprobs, schedule in (
            (policy, LAYOUT),
            (actor, LAYOUT if budget is None else LAYOUT.replace(top_k=(budget,))),
        ):
            logprobs[budget] = np.concatenate(
                [s.top_logprobs for s in scorer.score(every, schedule, 1.0)]
            )
        place[budget] = np.concatenate(
            [LAYOUT.page_end(len(r.prompt_ids) + np.arange(len(r))) for r in some]
        )
        owner[budget] = np.repeat(np.arange(len(some)), [len(r) for r in some])
        print("scored", budget, flush=True)
    bins = [
        b
        for b, _ in split_by_bin(place[None], LAYOUT.bin_tokens)
        if min(len(np.unique(owner[k][place[k] // LAYOUT.bin_tokens == b])) for k in place)
        >= FEWEST
    ]
    draws = np.random.default_rng(SEED).multinomial(COUNT, np.full(COUNT, 1 / COUNT), RESAMPLES)
    weights_RB = np.concatenate([np.ones((1, COUNT)), draws])

    def tails(alpha: dict[int | None, np.ndarray]) -> dict[int | None, np.ndarray]:
        """Return p5 by budget, [R, bins]. Within a resample, each prompt has the same weight at
        every budget.
        """
        by_budget = {}
        for k, values in alpha.items():
            inside = [place[k] // LAYOUT.bin_tokens == b for b in bins]
            by_budget[k] = np.stack([p5(values[at], owner[k][at], weights_RB) for at in inside], 1)
        return by_budget

    def with_noise(
        scale: float, budgets: Sequence[int | None], seed: int
    ) -> dict[int | None, np.ndarray]:
        drawn = np.random.default_rng(seed)
        return {k: accepted(policy[k], noisy(actor[k], scale, drawn)) for k in budgets}

    pairs = {
        OWN: {k: accepted(policy[k], actor[k]) for k in place},
        VLLM: {k: accepted(policy[k], vllm[k]) for k in place},
    }
    scales = {}
    for ceiling in CEILINGS:
        low, high = 0.0, 2.0
        for _ in range(12):
            scale = (low + high) / 2
            dense = with_noise(scale, [None], 1)[None]
            mean = np.mean(
                [np.percentile(dense[place[None] // LAYOUT.bin_tokens == b], 5) for b in bins]
            )
            low, high = (scale, high) if mean > ceiling else (low, scale)
        name = f"noise that gives dense p5 {ceiling:.2f}"
        pairs[name], scales[name] = with_noise(scale, list(place), 2), scale
    pairs[f"transformers float32, lists of {SHORT}"] = {
        k: accepted(policy[k], actor[k], SHORT) for k in place
    }
    p5_by_pair = {name: tails(alpha) for name, alpha in pairs.items()}
    own = {
        scale: {tau: pages(p5_by_pair[OWN], tau, scale) for tau in TAUS}
        for scale in ("relative", "absolute")
    }
    rows = []
    for name, p5s in p5_by_pair.items():
        row: dict[str, Any] = {
            "pair": name,
            "noise": scales.get(name),
            "ceiling": spans(p5s[None].T),
            "p5": {str(k): p5s[k][0].tolist() for k in BUDGETS},
            "relative_p5": {
                str(k): on_scale(p5s[k], p5s[None], "relative")[0].tolist() for k in BUDGETS
            },
        }
        for scale in ("relative", "absolute"):
            row[scale] = {}
            for tau in TAUS:
                needed = pages(p5s, tau, scale)
                with np.errstate(
                    invalid="ignore"
                ):  # inf / inf if no budget meets tau for either pair
                    ratio = needed / own[scale][tau]
                mean = np.where(np.isinf(ratio).any(1), np.inf, ratio.mean(1))
                row[scale][str(tau)] = {
                    "pages": finite(needed[0]),
                    "of_own": finite(ratio[0]),
                    "mean_of_own": spans(mean[None])[0],
                }
        rows.append(row)
    lengths = [[b * LAYOUT.bin_tokens, (b + 1) * LAYOUT.bin_tokens] for b in bins]
    return {
        "count": COUNT,
        "lines": LINES,
        "bins": lengths,
        "budgets": BUDGETS,
        "taus": TAUS,
        "always": ALWAYS,
        "tokens": {str(k): len(x) for k, x in place.items()},
        "pairs": rows,
    }


def in_order(ids_Tn: np.ndarray, logprobs_Tn: np.ndarray) -> np.ndarray:
    """Sort the log-probs of complete lists by token id."""
    ordered = np.full(logprobs_Tn.shape, -np.inf, np.float32)
    np.put_along_axis(ordered, ids_Tn.astype(np.int64), logprobs_Tn, 1)
    return ordered


def accepted(policy_TV: np.ndarray, actor_TV: np.ndarray, top_n: int | None = None) -> np.ndarray:
    """Return acceptance, [T]. If ``top_n`` is given, return a lower bound from the actor's top
    ``top_n`` tokens instead.
    """
    p, q = np.exp(policy_TV.astype(np.float64)), np.exp(actor_TV.astype(np.float64))
    if top_n is None:
        return acceptance(p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True))
    best = np.argpartition(-q, top_n, axis=1)[:, :top_n]
    return np.minimum(np.take_along_axis(p, best, 1), np.take_along_axis(q, best, 1)).sum(1)


def noisy(logprobs_TV: np.ndarray, scale: float, rng: np.random.Generator) -> np.ndarray:
    moved = np.maximum(logprobs_TV, -60) + scale * rng.standard_normal(logprobs_TV.shape)
    return moved - np.logaddexp.reduce(moved, axis=1, keepdims=True)


p5 = partial(weighted_percentile, percentile=5)


def on_scale(p5_RN: np.ndarray, ceiling_RN: np.ndarray, scale: str) -> np.ndarray:
    return np.vectorize(relative_p5)(p5_RN, ceiling_RN) if scale == "relative" else p5_RN


def pages(p5s: dict[int | None, np.ndarray], tau: float, scale: str) -> np.ndarray:
    """Return the smallest number of pages that meets tau, [R, bins], including the pages that are
    always read. It is infinite if no budget meets tau.

    Between the largest budget that misses tau and the next one, p5 is interpolated linearly in the
    logarithm of the pages.
    """
    read = np.array(BUDGETS) + ALWAYS
    p5_KRN = np.stack([on_scale(p5s[k], p5s[None], scale) for k in BUDGETS])
    needed = np.full(p5_KRN.shape[1:], float(read[0]))
    for i in range(len(read)):
        fails = p5_KRN[i] < tau
        if i + 1 == len(read):
            needed[fails] = np.inf
            break
        below, above = p5_KRN[i], np.maximum(p5_KRN[i + 1], tau)
        share = np.where(fails, (tau - below) / np.where(fails, above - below, 1), 0)
        needed = np.where(fails, read[i] * (read[i + 1] / read[i]) ** share, needed)
    return needed


def spans(values_XR: np.ndarray) -> list[list[float | None]]:
    """Return each row's measured value and the ends of its 95 % interval; None means infinite."""
    ends = np.quantile(values_XR[:, 1:], [0.025, 0.975], axis=1, method="nearest")
    return [finite(np.array([x[0], *end])) for x, end in zip(values_XR, ends.T, strict=True)]


def finite(values: np.ndarray) -> list[float | None]:
    return [round(float(x), 4) if np.isfinite(x) else None for x in values]


# --- tables ---


def relative_tau() -> str:
    result = load("relative_tau")
    rows = []
    for pair in result["pairs"]:
        ceiling = shown_range([c[0] for c in pair["ceiling"]])
        for tau in result["taus"]:
            cells = []
            for scale in ("relative", "absolute"):
                needed = pair[scale][str(tau)]
                mean, low, high = needed["mean_of_own"]
                open_end = (
                    "" if mean is None else " [open]"
                )  # no budget meets tau in some resamples
                interval = open_end if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
                pages = " ".join("none" if x is None else f"{x:.0f}" for x in needed["pages"])
                cells += [pages, ("" if mean is None else f"{mean:.2f}") + interval]
            rows.append([pair["pair"], ceiling, f"{tau:g}", *cells])
    head = [
        "pair",
        "ceiling",
        "tau",
        "relative: pages by bin",
        "ratio to the first pair",
        "absolute: pages by bin",
        "ratio to the first pair",
    ]
    return table(head, rows)


def relative_tau_summary() -> str:
    result = load("relative_tau")
    rows = []
    for pair in result["pairs"][1:]:
        counts = []
        for scale in ("relative", "absolute"):
            ratios = [x for needed in pair[scale].values() for x in needed["of_own"]]
            within = sum(x is not None and abs(x - 1) <= 0.1 for x in ratios)
            never = sum(x is None for x in ratios)
            worst = max(
                (x for x in ratios if x is not None), key=lambda x: abs(x - 1), default=None
            )
            cell = f"{within} of {len(ratios)}"
            counts += [cell, "" if worst is None else f"{worst:.2f}", never]
        rows.append([pair["pair"], *counts])
    head = [
        f"{scale}: {what}"
        for scale in ("relative", "absolute")
        for what in ("within 10 %", "largest deviation", "no budget suffices")
    ]
    return table(["pair", *head], rows)


def relative_laws() -> str:
    """Tabulate how far p5 is from the noise-free p5, over all bins and budgets. Compare p5 as
    measured with three ways of removing the effect of the ceiling.
    """
    pairs = load("relative_tau")["pairs"]
    laws: dict[str, Callable[[float, float], float]] = {
        "squares add": relative_p5,
        "acceptance rates multiply": lambda p5, c: p5 / c,
        "losses add": lambda p5, c: 1 - (c - p5),
        "as measured": lambda p5, c: p5,
    }
    rows = []
    for pair in pairs[1:]:
        cells = []
        for law in laws.values():
            off = [
                law(p5, c[0]) - own
                for budget, row in pair["p5"].items()
                for p5, c, own in zip(row, pair["ceiling"], pairs[0]["p5"][budget], strict=True)
            ]
            cells.append(f"{statistics.mean(off):+.3f}, {max(off, key=abs):+.3f}")
        rows.append([pair["pair"], *cells])
    return table(["pair", *(f"{law}: mean and largest error" for law in laws)], rows)


def shown_range(values: list[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"


TABLES = {
    "relative tau": relative_tau,
    "relative tau summary": relative_tau_summary,
    "relative laws": relative_laws,
}


if __name__ == "__main__":
    main()
