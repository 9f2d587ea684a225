"""Time the shipped decode kernels of two source trees in turn on one GPU, to show how a change
affects each row.

    git archive a553f48 | tar -x -C old/ && python benchmarks/side_by_side.py old/

Each tree times the rows of ``decode_kernels.py`` with its own package and its own benchmark. The
old and the new tree alternate, in separate processes. A row's time is its best median over all
processes and over ``BATCHES`` batches per process. One batch isn't enough: with few sequences, a
kernel may be slower on one batch than on the next, even with the same shape and the same caches.
Rows that only one tree has are listed but not compared. The exit status is 1 if a row is more than
2 % slower than before (25 % if only Triton supports its shape).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
MOST, MOST_TRITON = 1.02, 1.25
BATCHES = 4


def measure(with_triton: bool) -> dict[str, float]:
    """Time every row with the tree that comes first on the path. Return microseconds per layer.
    Rows that only Triton supports are optional.
    """
    import torch

    # Older trees call the module ``kernels``. Don't look that name up first, because transformers
    # looks for a package of the same name.
    kernels = import_module("decode_kernels" if find_spec("decode_kernels") else "kernels")
    torch.manual_seed(0)
    times: dict[str, float] = {}

    def note(row: str, us: float) -> None:
        times[row] = min(us, times.get(row, us))

    def time_row(
        row: str, pool: Any, B: int, L: int, G: int, k: int, every_page: bool = False
    ) -> None:
        for _ in range(BATCHES):
            case = kernels.Case(pool, B, L, G, k)
            note(
                row,
                case.time(None, "step", torch.full_like(case.top_k, 2**30) if every_page else None)[
                    "us"
                ],
            )

    pool = kernels.Pool(kernels.TOKENS, kernels.LAYERS)
    for B, L, G, k in kernels.CASES:
        time_row(f"{B} x {L}, group {G}, {k} pages", pool, B, L, G, k)
    for B, L in kernels.DENSE:
        time_row(f"{B} x {L}, all pages", pool, B, L, 2, 0, every_page=True)
    for _ in range(BATCHES):
        # ``ragged`` prints fractions of a read limit, which isn't measured here.
        with redirect_stdout(StringIO()):
            rows = kernels.ragged(pool, 1.0)
        for row in rows:
            note(f"uneven, {row['shape']}, step {row['step']}: {row['B']} rows", row["us"])
    del pool
    B, L, G, k = kernels.CASES[3]
    for D, dtype, P in kernels.SHAPES:
        by = "CUDA" if P == 16 and D in (64, 128) and dtype == torch.bfloat16 else "Triton"
        if by == "Triton" and not with_triton:
            continue
        pool = kernels.Pool(kernels.TOKENS, kernels.LAYERS, D, dtype, P)
        time_row(f"{by}, head dim {D}, pages of {P}, {dtype}", pool, B, L, G, k * 16 // P)
        del pool
    return times


def slower(old: dict[str, float], new: dict[str, float]) -> list[str]:
    """Return the rows that got slower than allowed."""
    both = [row for row in old if row in new]
    return [
        row
        for row in both
        if new[row] > old[row] * (MOST_TRITON if row.startswith("Triton") else MOST)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "old", type=Path, help="the folder with the source tree to compare this one with"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of turns per tree")
    parser.add_argument("--out", type=Path, help="the JSON file to write the measurements to")
    parser.add_argument(
        "--cuda", action="store_true", help="leave out rows that only Triton supports"
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        args.measure.write_text(json.dumps(measure(with_triton=not args.cuda)))
        return
    best: dict[Path, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for tree in [args.old.resolve(), HERE] * args.rounds:
            output = Path(folder) / "times.json"
            path = os.pathsep.join(map(str, (tree, tree / "benchmarks")))
            command = [sys.executable, __file__, str(args.old), "--measure", str(output)]
            command += ["--cuda"] * args.cuda
            subprocess.run(
                command, env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}, check=True
            )
            times = json.loads(output.read_text())
            best[tree] = {row: min(us, best.get(tree, times)[row]) for row, us in times.items()}
    old, new = best[args.old.resolve()], best[HERE]
    failed = slower(old, new)
    rows = {row: [old[row], new[row]] for row in old if row in new}
    left_out = sorted(old.keys() ^ new.keys())
    if args.out:
        from common import save

        save(args.out, {"rounds": args.rounds, "left_out": left_out, "us": rows})
    for row, (before, now) in rows.items():
        print(
            f"{row:60} {before:8.1f} {now:8.1f} us  {now / before:.3f}{'  SLOWER' * (row in failed)}"
        )
    for row in left_out:
        print(f"{row:60} left out: only one tree has it")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
