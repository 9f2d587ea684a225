"""Test whether calibration meets its target, whether its shortcut changes p5, and whether the tail
follows a Beta distribution.

    python studies/reasoner/calibration.py table     # `sparrow calibrate` for three targets and seeds, then rollouts
    python studies/reasoner/calibration.py shortcut  # scoring the same responses, or sampling new ones, at each budget
    python studies/reasoner/calibration.py tail      # goodness of fit of the published Beta tail, with intervals

All parts use the bundled reasoner, with pages of 4 tokens and length bins of 64 tokens, and run on
any device. They write benchmarks/results/calibration_*.json, and reuse any samples already in
``--folder``.

Shapes: T tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from sparrow import SparsitySchedule
from sparrow.calibrate.trajectories import Trajectories
from sparrow.cli import main as sparrow
from sparrow.cli.loading import draw_prompts, encode_prompts
from sparrow.engines.hf import HFEngine, eos_ids, load_model
from sparrow.engines.measure import measure
from sparrow.mismatch import (
    BinMismatch,
    percentile_by_bin_interval,
    sequence_bootstrap,
    weighted_mean,
)
from sparrow.mismatch.tokens import TokenAcceptance, flatten, pool
from sparrow.rollout import Sampling
from sparrow.schedule import ALL_PAGES
from sparrow.tasks import Trace

sys.path.extend(
    str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "studies/common")
)
from beta_tail import beta_tail_fit, weighted_beta_ks
from common import (
    REASONER,
    RESULTS,
    Column,
    Row,
    clock,
    declared,
    device,
    load,
    machine,
    parser,
    save,
    table,
    tracing,
)

LAYOUT = SparsitySchedule.dense(page_size=4, bin_tokens=64, dense_layers=(0,))
LINES, COUNT = 36, 512  # lines per program, responses per measurement
TARGETS, SEEDS, ON_POLICY = (0.86, 0.90, 0.94), (0, 1, 2), (0, 2)
FEWEST = 20  # minimum number of sequences in a bin
TRIALS = (4, 8, 16, 32, 64)  # budgets passed on the command line
BUDGETS = (8, 12, 16, 24, 32, 48)
RESAMPLES = 200


# --- does calibration meet its target? ---


def calibrated(folder: Path) -> None:
    """Calibrate with the actual command, then measure the resulting schedule on other problems with
    other seeds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layout = folder / "layout.json"
    layout.write_text(LAYOUT.to_json())
    common = [
        "--model",
        "reasoner",
        "--task",
        f"trace:lines={LINES}",
        "--max-new-tokens",
        "480",
        "--count",
        str(COUNT),
    ]
    runs = []
    for target in TARGETS:
        for seed in SEEDS:
            schedule = folder / f"{target}-{seed}.json"
            for rounds in ON_POLICY:
                record = folder / f"run-{target}-{seed}-{rounds}.json"
                if not record.exists():
                    sparrow(
                        [
                            "calibrate",
                            "--out",
                            str(schedule),
                            "--layout",
                            str(layout),
                            "--target",
                            str(target),
                            "--budgets",
                            *map(str, TRIALS),
                            "--on-policy",
                            str(rounds),
                            "--seed",
                            str(seed),
                            *common,
                        ]
                    )
                    found = SparsitySchedule.load(schedule)
                    bins = judge(found, sampled_anew(found, 1000 + seed), target)
                    what = {
                        "machine": machine(),
                        "target": target,
                        "seed": seed,
                        "on_policy": rounds,
                        "passes_of_last_round": len(found.provenance["curves"]),
                    }
                    record.write_text(json.dumps({**what, "bins": bins}))
                runs.append(json.loads(record.read_text()))
    save(
        RESULTS / "calibration_table.json",
        {"machine": runs[0]["machine"], "count": COUNT, "runs": runs},
    )


def sampled_anew(schedule: SparsitySchedule, seed: int) -> list[TokenAcceptance]:
    """Measure acceptance on new responses, as in ``sparrow measure``, and return it per token."""
    model, tokenizer = load_model(str(REASONER), "fp32", device())
    prompts = encode_prompts(draw_prompts(Trace(LINES), COUNT, seed), COUNT, tokenizer, room=1024)
    engine = HFEngine(model, schedule, eos_ids(model, tokenizer))
    return measure(engine, engine, prompts, Sampling(480, seed=seed), schedule)


def judge(
    schedule: SparsitySchedule, fresh: Sequence[TokenAcceptance], target: float
) -> list[dict[str, Any]]:
    """Return a row for each calibration bin that enough new responses reach. A row has p5, and
    whether a bin of shorter lengths set the page count.

    A row's ``parts`` list the schedule's own bins within the calibration bin: start, tokens and p5.
    """
    alpha, _, position, sequence = flatten(fresh)
    rows: list[dict[str, Any]] = []
    before = None
    for b in schedule.provenance["bins"]:
        inside = (position >= b["start"]) & (position < b["end"])
        if len(np.unique(sequence[inside])) < FEWEST:
            continue
        (p5,) = percentile_by_bin_interval(alpha[inside], 0 * position[inside], sequence[inside])
        parts = percentile_by_bin_interval(
            alpha[inside], position[inside], sequence[inside], schedule.bin_tokens
        )
        rows.append(
            {
                "start": b["start"],
                "end": b["end"],
                "top_k": "all" if b["top_k"] >= ALL_PAGES else b["top_k"],
                "p5": p5.estimate,
                "low": p5.lower,
                "high": p5.upper,
                "n_sequences": p5.n_sequences,
                "over_target": p5.estimate - target,
                "held_up": b["top_k"] == before,
                "parts": [[part.start, part.n_tokens, part.estimate] for part in parts],
            }
        )
        before = b["top_k"]
    return rows


# --- does the shortcut cost anything? ---


def measured(folder: Path) -> Callable[[SparsitySchedule, int], Trajectories]:
    """Return a function that samples the reasoner's trajectories for a given schedule and seed."""
    model, ends, prompts = tracing(REASONER, LINES, COUNT, 0, device())
    engine = HFEngine(model, LAYOUT, ends, batch_size=256)
    vocabulary = (
        model.config.vocab_size
    )  # with full-vocabulary lists, acceptance is exact rather than bounded

    def trajectories(behaviour: SparsitySchedule, seed: int) -> Trajectories:
        sampling = Sampling(14 * LINES, top_n=vocabulary, seed=seed)
        return Trajectories(engine, engine, prompts, sampling, folder, behaviour)

    return trajectories


def shortcut(folder: Path) -> None:
    """Save p5 by bin at each budget, for dense trajectories scored under the budget and for the
    actor's own rollouts.
    """
    trajectories = measured(folder)
    began = clock()
    dense = trajectories(LAYOUT, 0)
    once, rows = clock() - began, []
    for top_k in BUDGETS:
        schedule = LAYOUT.replace(top_k=(top_k,))
        began = clock()
        forced = dense.acceptance(schedule)
        scored = clock()
        own = trajectories(schedule, 1)
        sampled = own.acceptance()
        seconds = {"teacher_forced": scored - began, "sampled": clock() - scored}
        again = own.acceptance(schedule)  # a teacher-forced pass over the same rollouts must agree
        apart = max(np.abs(a.lower - b.lower).max() for a, b in zip(sampled, again, strict=True))
        rows.append(
            {
                "top_k": top_k,
                "seconds": seconds,
                "identity": float(apart),
                "bins": compare(forced, sampled),
            }
        )
        print(
            top_k,
            seconds,
            f"identity {apart:.1e}",
            [round(b["drift"], 4) for b in rows[-1]["bins"]],
            flush=True,
        )
    save(
        RESULTS / "calibration_shortcut.json",
        {"count": COUNT, "seconds_dense_sampling": once, "budgets": rows},
    )


def compare(
    forced: Sequence[TokenAcceptance], sampled: Sequence[TokenAcceptance]
) -> list[dict[str, Any]]:
    """Return both p5 values by bin, with their intervals, and the drift (sampled minus
    teacher-forced).
    """

    def plain(b: BinMismatch) -> dict[str, float]:
        return {"p5": b.lower_bound, "low": b.interval_low, "high": b.interval_high}

    both = zip(
        pool(forced, LAYOUT.bin_tokens).bins, pool(sampled, LAYOUT.bin_tokens).bins, strict=False
    )
    return [
        {
            "start": a.start,
            "teacher_forced": plain(a),
            "sampled": plain(b),
            "drift": b.lower_bound - a.lower_bound,
            "overlap": a.interval_low <= b.interval_high and b.interval_low <= a.interval_high,
        }
        for a, b in both
        if min(a.n_sequences, b.n_sequences) >= FEWEST
    ]


# --- is the tail a Beta distribution? ---


def tail(folder: Path) -> None:
    """Save the tail's KS distance from the fitted Beta distribution at each budget, and the
    distance expected by chance alone. Intervals come from resampling sequences.
    """
    trajectories = measured(folder)
    dense, rows = trajectories(LAYOUT, 0), []
    rng = np.random.default_rng(0)
    for top_k in BUDGETS:
        responses = dense.acceptance(LAYOUT.replace(top_k=(top_k,)))
        alpha, _, _, owner = flatten(responses)
        fit = beta_tail_fit(alpha)
        assert fit is not None
        ks = sequence_bootstrap(alpha, owner, weighted_beta_ks, resamples=RESAMPLES)
        fraction = sequence_bootstrap(alpha <= fit.cut, owner, weighted_mean)
        # Draw samples of the same size from the fitted Beta distribution, with independent tokens,
        # and refit them.
        ideal = [
            beta_tail_fit(
                np.minimum(stats.beta.rvs(fit.a, fit.b, size=fit.n, random_state=rng), 1) * fit.cut
            )
            for _ in range(RESAMPLES)
        ]
        in_tail = alpha[alpha <= fit.cut]
        rows.append(
            {
                "top_k": top_k,
                "tokens": fit.n,
                "fraction_in_tail": fit.fraction_in_tail,
                "fraction_interval": fraction[1:3],
                "a": fit.a,
                "b": fit.b,
                "ks": fit.ks,
                "ks_interval": ks[1:3],
                "ks_if_beta_95": float(np.quantile([f.ks for f in ideal], 0.95)),
                "variance_fitted": fit.variance,
                "variance_measured": float(in_tail.var()),
                "p5_fitted": float(fitted_percentile(fit, alpha)),
                "p5_measured": float(np.percentile(alpha, 5)),
            }
        )
        print(rows[-1], flush=True)
    save(RESULTS / "calibration_tail.json", {"count": COUNT, "budgets": rows})


def fitted_percentile(fit: Any, alpha: np.ndarray) -> float:
    """Return what the 5th percentile of all tokens would be if the tail followed the fitted Beta
    distribution.
    """
    if fit.fraction_in_tail <= 0.05:
        return float(np.percentile(alpha, 5))  # above the tail
    return fit.cut * float(stats.beta.ppf(0.05 / fit.fraction_in_tail, fit.a, fit.b))


# --- tables ---


def calibration() -> str:
    """Tabulate p5 minus the target by bin, for every seed."""
    runs = load("calibration_table")["runs"]
    ends = sorted({b["end"] for run in runs for b in run["bins"]})
    alike: dict[str, list[Row]] = {}
    for run in runs:
        rounds = {0: "none", 2: "two (default)"}[run["on_policy"]]
        alike.setdefault(f"{run['target']:.2f}, {rounds}", []).append(run)
    rows = []
    for what, same in sorted(alike.items()):
        cells = [
            [b["over_target"] for run in same for b in run["bins"] if b["end"] == end]
            for end in ends
        ]
        rows.append([what, *(" ".join(f"{x:+.3f}" for x in cell) for cell in cells)])
    return table(["target, on-policy rounds", *(f"up to {end}" for end in ends)], rows)


def calibration_summary() -> str:
    """Tabulate how many bins are within 0.02 of the target, how many are above and below that
    range, and the extremes.
    """
    rows = []
    for rounds, name in {0: "no on-policy rounds", 2: "two on-policy rounds"}.items():
        bins = [
            b
            for run in load("calibration_table")["runs"]
            if run["on_policy"] == rounds
            for b in run["bins"]
        ]
        over = np.array([b["over_target"] for b in bins])
        within, above = int((np.abs(over) <= 0.02).sum()), int((over > 0.02).sum())
        held_up = sum(b["held_up"] and b["over_target"] > 0.02 for b in bins)
        cells = [
            f"{within} of {len(bins)}, {within / len(bins):.0%}",
            above,
            held_up,
            int((over < -0.02).sum()),
        ]
        rows.append([name, *cells, f"{over.min():+.3f}", f"{over.max():+.3f}"])
    head = [
        "calibration",
        "within 0.02 of the target",
        "more than 0.02 above",
        "of these, forced by a shorter bin",
        "more than 0.02 below",
    ]
    return table([*head, "lowest", "highest"], rows)


def shortcut_cost() -> str:
    rows = []
    for row in load("calibration_shortcut")["budgets"]:
        bins = [b for b in row["bins"] if b["start"] >= 192]
        drifts, seconds = [b["drift"] for b in bins], row["seconds"]
        spans = [[b[way]["p5"] for b in bins] for way in ("teacher_forced", "sampled")]
        rows.append(
            [
                row["top_k"],
                *(f"{min(p5):.3f} to {max(p5):.3f}" for p5 in spans),
                f"{statistics.mean(drifts):+.3f}, {min(drifts):+.3f}",
                f"{sum(b['overlap'] for b in bins)} of {len(bins)}",
                f"{seconds['teacher_forced']:.1f}, {seconds['sampled']:.1f}",
            ]
        )
    head = [
        "top-k pages",
        "p5 by bin, dense responses",
        "p5 by bin, own responses",
        "own minus dense responses: mean, worst bin",
        "intervals overlap",
        "seconds: teacher-forced, sampled",
    ]
    return table(head, rows)


def beta_tail() -> str:
    cells: dict[str, Column] = {
        "top-k pages": "{top_k}",
        "tokens below 0.999": "{fraction_in_tail:.1%} [{fraction_interval[0]:.1%}, {fraction_interval[1]:.1%}]",
        "fit": "Beta({a:.2f}, {b:.2f})",
        "KS, 95 % interval": "{ks:.3f} [{ks_interval[0]:.3f}, {ks_interval[1]:.3f}]",
        "95th percentile of KS if the claim were true": "{ks_if_beta_95:.3f}",
        "variance, measured and fitted": "{variance_measured:.3f}, {variance_fitted:.3f}",
        "p5, measured and fitted": "{p5_measured:.3f}, {p5_fitted:.3f}",
    }
    return declared(load("calibration_tail")["budgets"], cells)


TABLES = {
    "calibration": calibration,
    "calibration summary": calibration_summary,
    "shortcut": shortcut_cost,
    "beta tail": beta_tail,
}


def main() -> None:
    commands = {"table": calibrated, "shortcut": shortcut, "tail": tail}
    options = parser(__doc__)
    options.add_argument("what", choices=commands)
    options.add_argument("--folder", type=Path, default=Path("runs/calibration"))
    arguments = options.parse_args()
    commands[arguments.what](arguments.folder)


if __name__ == "__main__":
    main()
