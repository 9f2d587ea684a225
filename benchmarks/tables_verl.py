"""The table of verl's two-GPU runs, dense, lossless and lossy, from ``recipes/verl/grpo.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
from common import RESULTS, Row, read_result, table

MODES = ("dense", "lossless", "lossy")


def results() -> list[Row]:
    """Return one result per mode that was run."""
    paths = [RESULTS / f"verl_two_gpus_{mode}.json" for mode in MODES]
    return [read_result(path) for path in paths if path.exists()]


def values(result: Row, name: str) -> list[float]:
    """Return a metric's values, in order of the steps that logged it."""
    return [step[name] for step in result["log"] if name in step]


def drafts(result: Row) -> list[Any]:
    """Return the fraction of drafts accepted and the tokens per cycle, over all steps."""
    drafted, accepted, per_cycle = (
        np.array(values(result, f"sparrow/drafts/{name}"))
        for name in ("drafted", "accepted", "tokens_per_cycle")
    )
    if not len(drafted):
        return ["", ""]
    kept = drafted * accepted
    cycles = kept / (per_cycle - 1)
    return [f"{kept.sum() / drafted.sum():.1%}", f"{1 + kept.sum() / cycles.sum():.2f}"]


def verl() -> str:
    """Tabulate each run's reward, time and drafts."""
    rows = []
    for result in results():
        reward = values(result, "critic/score/mean")
        rows.append(
            [
                result["mode"],
                len(reward),
                f"{np.mean(reward[:5]):.2f} → {np.mean(reward[-5:]):.2f}",
                f"{np.mean(reward):.3f}",
                f"{np.median(values(result, 'timing_s/step')):.1f}",
                f"{np.median(values(result, 'timing_s/gen')):.2f}",
                *drafts(result),
            ]
        )
    head = ["rollouts", "steps", "reward, first and last five", "mean reward"]
    times = ["s per step, median", "s of generation, median"]
    return table([*head, *times, "drafts accepted", "tokens per cycle"], rows)


TABLES = {"verl": verl} if results() else {}
