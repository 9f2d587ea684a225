"""How long the tree is: lines of Python and CUDA (of 120 characters) by folder, at any revision.

    python benchmarks/count_lines.py                # the working tree's files
    python benchmarks/count_lines.py a553f48 HEAD   # commits, side by side

For each folder: all lines, then lines of code, which are neither blank nor comments nor docstrings. New modules that
were added after commit a553f48 are counted separately, so that the rest can be compared with that commit.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, table

WIDTH = 120
KINDS = (".py", ".cu", ".cuh")
TOPS = ("sparrow", "benchmarks", "recipes", "studies", "tests")
SINCE = {
    "lossless mode": r"sparrow/(mode|cost_lossless|model/speculative|mismatch/drafts"
    r"|vllm/(lossless|speculator|scheduler|adapt|meter|verify))\.py",
    "caches and weights in 8 bits": r"sparrow/(attention/int8|vllm/(kv_cache|fp8|draft_weights))\.py",
    "mode auto": r"sparrow/(dial|train/dialing)\.py",
    "tau relative to the ceiling": r"sparrow/mismatch/(tau|ceiling)\.py",
    "budgets by head": r"sparrow/(head_budgets|model/unread)\.py",
    "settings and locks": r"sparrow/(settings|files)\.py",
    "the sandbox's new limits": r"sparrow/rewards/sandbox/(cgroup|walls|limits|files|inside/(confine|watch|wire))\.py",
}
"""Paths of the added modules, by subject."""


def sources(revision: str | None) -> Iterator[tuple[str, str]]:
    """Path and text of every source file of a commit, or of the working tree."""
    if revision is None:
        listed = subprocess.run(["git", "ls-files", *TOPS], cwd=ROOT, check=True, capture_output=True, text=True)
        for name in listed.stdout.splitlines():
            if name.endswith(KINDS) and (ROOT / name).exists():
                yield name, (ROOT / name).read_text(encoding="utf-8")
        return
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(KINDS) and member.name.startswith(TOPS):
                file = archive.extractfile(member)
                assert file is not None
                yield member.name, file.read().decode()


def code_lines(name: str, text: str) -> int:
    """How many lines hold code; docstrings and comments do not count."""
    if not name.endswith(".py"):
        without = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
        return sum(bool(re.sub(r"//.*", "", line).strip()) for line in without.splitlines())
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):  # docstrings, those of module constants too
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def folder_of(name: str) -> str:
    """The top two folders of a path in the package, the top folder of any other."""
    parts = Path(name).parts[:-1]
    return "/".join(parts[:2] if parts[0] == "sparrow" else parts[:1])


def count(revision: str | None) -> Counter[tuple[str, str]]:
    """Lines by folder and kind; added modules are listed under their subject, not their folder."""
    tally: Counter[tuple[str, str]] = Counter()
    for name, text in sources(revision):
        added = next((what for what, path in SINCE.items() if re.fullmatch(path, name)), None)
        where = f"sparrow: {added}" if added else folder_of(name)
        groups = [where, "sparrow, in all" if name.startswith("sparrow/") else "", "added" if added else ""]
        for group in filter(None, groups):
            tally[group, "lines"] += len(text.splitlines())
            tally[group, "code"] += code_lines(name, text)
        tally[f"wider than {WIDTH}", "lines"] += sum(len(line) > WIDTH for line in text.splitlines())
    for kind in ("lines", "code"):
        tally["sparrow, without what was added", kind] = tally["sparrow, in all", kind] - tally.pop(("added", kind), 0)
        scripts = (tally[top, kind] for top in ("benchmarks", "recipes", "studies"))
        tally["benchmarks, recipes and studies", kind] = sum(scripts)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", default=[None], help="commits; the working tree if none is given")
    revisions: list[str | None] = parser.parse_args().revisions
    counts = [count(revision) for revision in revisions]
    groups = sorted({group for counter in counts for group, _ in counter})
    rows = [[g, *(f"{n[g, 'lines']:,} ({n[g, 'code']:,})" if n[g, "lines"] else "" for n in counts)] for g in groups]
    print(table(["lines (of code)", *(revision or "working tree" for revision in revisions)], rows), end="")


if __name__ == "__main__":
    main()
