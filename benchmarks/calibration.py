"""Does calibration hold its target, does its shortcut cost anything, and does the tail look like a Beta distribution?

    python benchmarks/calibration.py table     # three targets x three seeds by `sparrow calibrate`, then fresh rollouts
    python benchmarks/calibration.py shortcut  # trajectories once, against sampling anew at every budget
    python benchmarks/calibration.py tail      # goodness of fit of the published Beta tail, with intervals

All run on the bundled reasoner (the last two on any model of the task ``trace``), with pages of 4 tokens and length
bins of 64, on whatever device is there. Results go to benchmarks/results/calibration_*.json; what --folder already
holds is not sampled again.

Shapes: T tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import REASONER, RESULTS, machine, save
from scipy import stats

from sparrow import SparsitySchedule
from sparrow.cli import main as sparrow
from sparrow.engines.hf import HFEngine, eos_ids, load_model
from sparrow.loading import draw_prompts, encode_prompts
from sparrow.measure import TokenAcceptance, Trajectories, flatten, measure, pool
from sparrow.mismatch import (
    BinMismatch,
    beta_tail_fit,
    percentile_by_bin_interval,
    sequence_bootstrap,
    weighted_beta_ks,
    weighted_mean,
)
from sparrow.rollout import Sampling
from sparrow.schedule import ALL_PAGES
from sparrow.tasks import Trace

LAYOUT = SparsitySchedule.dense(page_size=4, bin_tokens=64, dense_layers=(0,))
LINES = 36
FEWEST = 20  # sequences that a bin needs to be counted
TRIALS = (4, 8, 16, 32, 64)  # budgets passed to the command
BUDGETS = (8, 12, 16, 24, 32, 48)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def write(name: str, result: dict[str, Any]) -> None:
    save(RESULTS / f"calibration_{name}.json", result)


# --- does it hold its target? ---


def table(arguments: argparse.Namespace) -> None:
    """Calibrate with the command itself, then measure other problems with other seeds under the schedule it finds."""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    layout = arguments.folder / "layout.json"
    layout.write_text(LAYOUT.to_json())
    common = ["--model", "reasoner", "--task", f"trace:lines={LINES}", "--max-new-tokens", "480"]
    common += ["--count", str(arguments.count)]
    runs = []
    for target in arguments.targets:
        for seed in arguments.seeds:
            schedule = arguments.folder / f"{target}-{seed}.json"
            for rounds in arguments.on_policy:
                record = arguments.folder / f"run-{target}-{seed}-{rounds}.json"
                if not record.exists():
                    sparrow(
                        ["calibrate", "--out", str(schedule), "--layout", str(layout), "--target", str(target),
                         "--budgets", *map(str, TRIALS), "--on-policy", str(rounds),
                         "--seed", str(seed), *common]
                    )  # fmt: skip
                    calibrated = SparsitySchedule.load(schedule)
                    bins = judge(calibrated, sampled_anew(calibrated, arguments.count, 1000 + seed), target)
                    what = {"machine": machine(), "target": target, "seed": seed, "on_policy": rounds,
                            "passes_of_last_round": len(calibrated.provenance["curves"])}  # fmt: skip
                    record.write_text(json.dumps({**what, "bins": bins}))
                runs.append(json.loads(record.read_text()))
    summary = [tally([r for r in runs if r["on_policy"] == n], n) for n in arguments.on_policy]
    for row in summary:
        print(row)
    write("table", {"machine": runs[0]["machine"], "count": arguments.count, "summary": summary, "runs": runs})


def sampled_anew(schedule: SparsitySchedule, count: int, seed: int) -> list[TokenAcceptance]:
    """What ``sparrow measure`` measures, token by token."""
    model, tokenizer = load_model(str(REASONER), "fp32", DEVICE)
    prompts = encode_prompts(draw_prompts(Trace(LINES), count, seed), count, tokenizer, room=1024)
    engine = HFEngine(model, schedule, eos_ids(model, tokenizer))
    return measure(engine, engine, prompts, Sampling(480, seed=seed), schedule)


def judge(schedule: SparsitySchedule, fresh: Sequence[TokenAcceptance], target: float) -> list[dict[str, Any]]:
    """Each bin of the calibration that enough fresh responses reach: its p5, and whether a shorter bin set its pages.

    The ``parts`` of a row are the schedule's own bins that lie in it: start, tokens and p5.
    """
    alpha, _, position, sequence = flatten(fresh)
    rows: list[dict[str, Any]] = []
    before = None
    for b in schedule.provenance["bins"]:
        inside = (position >= b["start"]) & (position < b["end"])
        if len(np.unique(sequence[inside])) < FEWEST:
            continue
        (p5,) = percentile_by_bin_interval(alpha[inside], 0 * position[inside], sequence[inside])
        parts = percentile_by_bin_interval(alpha[inside], position[inside], sequence[inside], schedule.bin_tokens)
        rows.append(
            {"start": b["start"], "end": b["end"], "top_k": "all" if b["top_k"] >= ALL_PAGES else b["top_k"],
             "p5": p5.estimate, "low": p5.lower, "high": p5.upper, "n_sequences": p5.n_sequences,
             "over_target": p5.estimate - target, "held_up": b["top_k"] == before,
             "parts": [[part.start, part.n_tokens, part.estimate] for part in parts]}
        )  # fmt: skip
        before = b["top_k"]
    return rows


def tally(runs: Sequence[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """How many bins are within 0.02 of the target, how many lie above and below, and the extremes."""
    bins = [b for r in runs for b in r["bins"]]
    over = np.array([b["over_target"] for b in bins])
    return {
        "on_policy": rounds,
        "bins": len(bins),
        "within_0.02": int((np.abs(over) <= 0.02).sum()),
        "above_0.02": int((over > 0.02).sum()),
        "above_0.02_held_up_by_a_shorter_bin": sum(b["held_up"] and b["over_target"] > 0.02 for b in bins),
        "below_0.02": int((over < -0.02).sum()),
        "share_within": float((np.abs(over) <= 0.02).mean()),
        "lowest": float(over.min()),
        "highest": float(over.max()),
    }


# --- does the shortcut cost anything? ---


def measured(arguments: argparse.Namespace) -> tuple[Callable[..., Trajectories], Callable[[], float]]:
    """A model's trajectories by schedule and seed, and a clock that waits for the device."""
    model, tokenizer = load_model(str(arguments.model), "fp32", DEVICE)
    engine = HFEngine(model, LAYOUT, eos_ids(model, tokenizer), batch_size=256)
    problems = [Trace(arguments.lines).problem(i, arguments.seed) for i in range(arguments.count)]
    prompts = [tokenizer(p.prompt, add_special_tokens=False).input_ids for p in problems]
    vocabulary = model.config.vocab_size  # every token is listed, so acceptance is exact and not a bound

    def trajectories(behaviour: SparsitySchedule, seed: int) -> Trajectories:
        sampling = Sampling(14 * arguments.lines, top_n=vocabulary, seed=seed)
        return Trajectories(engine, engine, prompts, sampling, arguments.folder, behaviour)

    def clock() -> float:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    return trajectories, clock


def shortcut(arguments: argparse.Namespace) -> None:
    """p5 by bin at each budget: dense trajectories scored under it, and the actor's own rollouts."""
    trajectories, clock = measured(arguments)
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
        again = own.acceptance(schedule)  # teacher-forcing the actor's own rollouts must give the same numbers
        apart = max(np.abs(a.lower - b.lower).max() for a, b in zip(sampled, again, strict=True))
        rows.append({"top_k": top_k, "seconds": seconds, "identity": float(apart), "bins": compare(forced, sampled)})
        print(top_k, seconds, f"identity {apart:.1e}", [round(b["drift"], 4) for b in rows[-1]["bins"]], flush=True)
    result = {"model": arguments.model.name, "count": arguments.count, "seconds_dense_sampling": once, "budgets": rows}
    write(f"shortcut{arguments.suffix}", result)


def compare(forced: Sequence[TokenAcceptance], sampled: Sequence[TokenAcceptance]) -> list[dict[str, Any]]:
    """Both p5 by bin with their intervals, and the drift: sampled minus teacher-forced."""

    def plain(b: BinMismatch) -> dict[str, float]:
        return {"p5": b.lower_bound, "low": b.interval_low, "high": b.interval_high}

    both = zip(pool(forced, LAYOUT.bin_tokens).bins, pool(sampled, LAYOUT.bin_tokens).bins, strict=False)
    return [
        {"start": a.start, "teacher_forced": plain(a), "sampled": plain(b), "drift": b.lower_bound - a.lower_bound,
         "overlap": a.interval_low <= b.interval_high and b.interval_low <= a.interval_high}
        for a, b in both if min(a.n_sequences, b.n_sequences) >= FEWEST
    ]  # fmt: skip


# --- is the tail a Beta distribution? ---


def tail(arguments: argparse.Namespace) -> None:
    """KS distance of the fitted Beta tail at each budget, resampled by sequence; and what chance alone would give."""
    trajectories, _ = measured(arguments)
    dense, rows = trajectories(LAYOUT, 0), []
    rng = np.random.default_rng(0)
    for top_k in BUDGETS:
        responses = dense.acceptance(LAYOUT.replace(top_k=(top_k,)))
        alpha, _, _, owner = flatten(responses)
        fit = beta_tail_fit(alpha)
        assert fit is not None
        ks = sequence_bootstrap(alpha, owner, weighted_beta_ks, resamples=arguments.resamples)
        fraction = sequence_bootstrap(alpha <= fit.cut, owner, weighted_mean)
        # If the fitted Beta were the truth and tokens independent, refits of equally large samples would give this.
        ideal = [beta_tail_fit(np.minimum(stats.beta.rvs(fit.a, fit.b, size=fit.n, random_state=rng), 1) * fit.cut)
                 for _ in range(arguments.resamples)]  # fmt: skip
        in_tail = alpha[alpha <= fit.cut]
        rows.append(
            {"top_k": top_k, "tokens": fit.n, "fraction_in_tail": fit.fraction_in_tail,
             "fraction_interval": fraction[1:3], "a": fit.a, "b": fit.b, "ks": fit.ks, "ks_interval": ks[1:3],
             "ks_if_beta_95": float(np.quantile([f.ks for f in ideal], 0.95)),
             "variance_fitted": fit.variance, "variance_measured": float(in_tail.var()),
             "p5_fitted": float(fitted_percentile(fit, alpha)), "p5_measured": float(np.percentile(alpha, 5))}
        )  # fmt: skip
        print(rows[-1], flush=True)
    write(f"tail{arguments.suffix}", {"model": arguments.model.name, "count": arguments.count, "budgets": rows})


def fitted_percentile(fit: Any, alpha: np.ndarray) -> float:
    """The 5th percentile of all tokens if the tail were the fitted Beta."""
    if fit.fraction_in_tail <= 0.05:
        return float(np.percentile(alpha, 5))  # lies above the tail
    return fit.cut * float(stats.beta.ppf(0.05 / fit.fraction_in_tail, fit.a, fit.b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"table": table, "shortcut": shortcut, "tail": tail}
    parser.add_argument("what", choices=commands)
    parser.add_argument("--folder", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--count", type=int, default=512, help="responses sampled each time")
    parser.add_argument("--targets", type=float, nargs="+", default=[0.86, 0.90, 0.94])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--on-policy", type=int, nargs="+", default=[0, 2], help="rounds, each a row of the table")
    parser.add_argument("--model", type=Path, default=REASONER, help="of shortcut and tail")
    parser.add_argument("--lines", type=int, default=LINES, help="program length, of shortcut and tail")
    parser.add_argument("--suffix", default="", help="added to the name of the result, for another model's")
    parser.add_argument("--seed", type=int, default=0, help="of the problems of shortcut and tail")
    parser.add_argument("--resamples", type=int, default=200)
    arguments = parser.parse_args()
    commands[arguments.what](arguments)


if __name__ == "__main__":
    main()
