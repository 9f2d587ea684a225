"""Fit the constants of a lossless cycle to every point of ``benchmarks/lossless.py`` that is in ``benchmarks/results``.

    python benchmarks/fit_lossless.py

Prints the fitted constants, those of ``sparrow.cost_lossless``, and the errors of the latter by shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import RESULTS, load, table

from sparrow.cost import MACHINES
from sparrow.cost_lossless import CYCLE_H200, cycle_seconds, fit_cycles

H200 = MACHINES["h200"]


def measured() -> list[dict[str, Any]]:
    """Cycles on an H200 with a fixed number of drafts and a cache in 16 bits; how many are accepted changes no time."""
    points = []
    for path in sorted(RESULTS.glob("lossless_*.json")):
        result = load(path.stem)
        in_16_bits = "kv_cache_dtype" not in result.get("settings", {})
        if result.get("variant") == "lossless" and "H200" in result["device"] and in_16_bits:
            decoding = result["decoding"]
            stored = decoding["draft_schedule"].get("landmark_dtype", "auto")
            for point in result.get("points", ()):
                if isinstance(point["drafts"], int) and point["drafts"]:
                    what = {"shape": result["shape"], "landmark_dtype": stored}
                    points.append({**what, "draft_weights": decoding.get("draft_weights", "auto"), **point})
    return points


def errors(cycles: list[dict[str, Any]]) -> list[float]:
    """Relative errors of the shipped constants."""
    return [cycle_seconds(cycle, H200, CYCLE_H200) / (cycle["ms"] / 1e3) - 1 for cycle in cycles]


def fitted() -> str:
    """Errors of the shipped constants by shape, then those of a fit without that shape."""
    rows = []
    everything = measured()
    cycles = [cycle for cycle in everything if cycle["draft_weights"] == "auto"]
    in_fp8 = [cycle for cycle in everything if cycle["draft_weights"] == "fp8"]
    for shape in sorted({cycle["shape"] for cycle in cycles}):
        own = [cycle for cycle in cycles if cycle["shape"] == shape]
        others = fit_cycles([cycle for cycle in cycles if cycle["shape"] != shape], H200)
        left_out = [cycle_seconds(cycle, H200, others) / (cycle["ms"] / 1e3) - 1 for cycle in own]
        off = errors(own)
        cells = [f"{np.abs(off).mean():.1%}", f"{max(off, key=abs):+.1%}", f"{max(left_out, key=abs):+.1%}"]
        rows.append([shape, len(own), *cells])
    off = errors(in_fp8)  # of one shape, so none can be left out
    name = f"{in_fp8[0]['shape']}, drafts with weights in fp8"
    rows.append([name, len(in_fp8), f"{np.abs(off).mean():.1%}", f"{max(off, key=abs):+.1%}", ""])
    return table(["shape", "cycles", "mean size of the error", "largest", "largest, shape left out of the fit"], rows)


if __name__ == "__main__":
    print(fit_cycles(measured(), H200), CYCLE_H200, sep="\n")
    print(fitted())
