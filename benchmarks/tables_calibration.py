"""Tables of docs/calibration.md, and the teacher-forced kernels'."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from common import Column, Row, declared, load, table

from sparrow.mismatch import relative_p5


def calibration() -> str:
    runs = load("calibration_table")["runs"]
    ends = sorted({b["end"] for run in runs for b in run["bins"]})
    alike: dict[str, list[Row]] = {}
    for run in runs:
        rounds = {0: "none", 2: "two (default)"}[run["on_policy"]]
        alike.setdefault(f"{run['target']:.2f}, {rounds}", []).append(run)
    rows = []
    for what, same in sorted(alike.items()):
        cells = [[b["over_target"] for run in same for b in run["bins"] if b["end"] == end] for end in ends]
        rows.append([what, *(" ".join(f"{x:+.3f}" for x in cell) for cell in cells)])
    return table(["target, rounds on policy", *(f"up to {end}" for end in ends)], rows)


def calibration_summary() -> str:
    names = {0: "no round on policy", 2: "two rounds"}
    rows = []
    for row in load("calibration_table")["summary"]:
        counts = (row[name] for name in ("above_0.02", "above_0.02_held_up_by_a_shorter_bin", "below_0.02"))
        within = f"{row['within_0.02']} of {row['bins']}, {row['share_within']:.0%}"
        rows.append([names[row["on_policy"]], within, *counts, f"{row['lowest']:+.3f}", f"{row['highest']:+.3f}"])
    head = ["", "within 0.02 of the target", "above by more", "of these held up by a shorter bin", "below by more"]
    return table([*head, "lowest", "highest"], rows)


def shortcut() -> str:
    rows = []
    for row in load("calibration_shortcut")["budgets"]:
        bins = [b for b in row["bins"] if b["start"] >= 192]
        drifts, seconds = [b["drift"] for b in bins], row["seconds"]
        spans = [[b[way]["p5"] for b in bins] for way in ("teacher_forced", "sampled")]
        rows.append(
            [row["top_k"], *(f"{min(p5):.3f} to {max(p5):.3f}" for p5 in spans),
             f"{statistics.mean(drifts):+.3f}, {min(drifts):+.3f}", f"{sum(b['overlap'] for b in bins)} of {len(bins)}",
             f"{seconds['teacher_forced']:.1f}, {seconds['sampled']:.1f}"]
        )  # fmt: skip
    head = ["top-k pages", "p5 by bin, dense responses", "p5 by bin, its own", "own less dense: mean, worst bin",
            "intervals overlap", "seconds: teacher-forced, sampled"]  # fmt: skip
    return table(head, rows)


def beta_tail() -> str:
    cells: dict[str, Column] = {
        "top-k pages": "{top_k}", 
        "tokens below 0.999": "{fraction_in_tail:.1%} [{fraction_interval[0]:.1%}, {fraction_interval[1]:.1%}]",
        "fit": "Beta({a:.2f}, {b:.2f})",
        "KS, 95 % interval": "{ks:.3f} [{ks_interval[0]:.3f}, {ks_interval[1]:.3f}]",
        "95th percentile of KS, were it true": "{ks_if_beta_95:.3f}",
        "variance, measured and fitted": "{variance_measured:.3f}, {variance_fitted:.3f}",
        "p5, measured and fitted": "{p5_measured:.3f}, {p5_fitted:.3f}",
    }  # fmt: skip
    return declared(load("calibration_tail")["budgets"], cells)


def relative_tau() -> str:
    result = load("relative_tau")
    rows = []
    for pair in result["pairs"]:
        ceiling = _range([c[0] for c in pair["ceiling"]])
        for tau in result["taus"]:
            cells = []
            for scale in ("relative", "absolute"):
                needed = pair[scale][str(tau)]
                mean, low, high = needed["mean_of_own"]
                open_end = "" if mean is None else " [open]"  # in some resamples no budget holds tau
                interval = open_end if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
                pages = " ".join("none" if x is None else f"{x:.0f}" for x in needed["pages"])
                cells += [pages, ("" if mean is None else f"{mean:.2f}") + interval]
            rows.append([pair["pair"], ceiling, f"{tau:g}", *cells])
    head = ["pair", "ceiling", "tau", "relative: pages by bin", "times those of the first pair",
            "absolute: pages by bin", "times those of the first pair"]  # fmt: skip
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
            worst = max((x for x in ratios if x is not None), key=lambda x: abs(x - 1), default=None)
            cell = f"{within} of {len(ratios)}"
            counts += [cell, "" if worst is None else f"{worst:.2f}", never]
        rows.append([pair["pair"], *counts])
    head = [f"{scale}: {what}" for scale in ("relative", "absolute")
            for what in ("within 10 %", "furthest off", "no budget")]  # fmt: skip
    return table(["pair", *head], rows)


def relative_laws() -> str:
    """How far p5 is from p5 without noise once the ceiling is taken out in three ways, over all bins and budgets."""
    pairs = load("relative_tau")["pairs"]
    laws: dict[str, Callable[[float, float], float]] = {
        "in squares": relative_p5, "acceptances multiply": lambda p5, c: p5 / c,
        "losses add": lambda p5, c: 1 - (c - p5), "as measured": lambda p5, c: p5,
    }  # fmt: skip
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
    return table(["pair", *(f"{law}: mean, furthest off" for law in laws)], rows)


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"


def calibration_cost() -> str:
    result = load("calibration_cost")
    whole, dense = result["sampling_18_budgets_s"], result["scoring_18_budgets_s"]
    published = "sampling at each of 18 budgets from 512 to 16,384 tokens, as published"
    rows = [[published, f"{whole:,.0f}", f"({dense:,.0f}, not counted)", f"{whole:,.0f}", ""]]
    for way in result["ways"]:
        scored = f"{way['scoring_s']:,.0f} ({way['sequences_scored']:,} sequences)"
        total = f"{way['sampling_s'] + way['scoring_s']:,.0f}"
        rows.append([way["label"], f"{way['sampling_s']:,.0f}", scored, total, f"{way['times_less']:.1f}x"])
    return table(["", "sampling, s", "scoring, s", "in all, s", "less by"], rows)


def scoring_passes() -> str:
    rows = []
    for number, row in enumerate(load("calibration_search")["rounds"]):
        passes = [f"{_span(p['top_k'])}: {statistics.mean(p['sequence_s']):.2f}" for p in row["passes"]]
        rows.append([number, _span(row["sampled_under"]), "; ".join(passes)])
    return table(["round", "sampled with", "pages of each pass, and its seconds a sequence"], rows)


def _span(top_k: list[Any]) -> str:
    """The pages of a schedule, except for lengths that were not measured."""
    pages = [k for k in top_k if k != "all"] or top_k
    return f"{pages[0]}" if len(pages) == 1 else f"{pages[0]} to {pages[-1]}"


def teacher_forced() -> str:
    rows = []
    for case in load("teacher_forced")["cases"]:
        for way in ("forward", "backward"):
            dense = [metrics[f"{way}_ms"] for metrics in case["dense"].values()]
            cells = []
            for metrics in case["sparse"].values():
                ms = metrics[f"{way}_ms"]
                cells.append(f"{ms:.1f} ({', '.join(f'{other / ms:.2f}x' for other in dense)})")
            what = f"{case['T']:,}, {case['G']}, {case['top_k']}"
            rows.append([what, way, *(f"{ms:.1f}" for ms in dense), *cells])
        read = (f"{metrics['read']:.1f}" for metrics in case["sparse"].values())
        rows.append([what, "pages read per page kept", "", "", *read])
    return table(["tokens, group, top-k", "", *case["dense"], *case["sparse"]], rows)


TABLES = {
    "calibration": calibration,
    "calibration summary": calibration_summary,
    "shortcut": shortcut,
    "beta tail": beta_tail,
    "relative tau": relative_tau,
    "relative tau summary": relative_tau_summary,
    "relative laws": relative_laws,
    "calibration cost": calibration_cost,
    "scoring passes": scoring_passes,
    "teacher-forced": teacher_forced,
}
