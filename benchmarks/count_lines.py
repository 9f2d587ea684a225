"""How long the tree is: lines of Python and CUDA (of 120 characters) by folder, in one commit or
several.

    python benchmarks/count_lines.py                # HEAD
    python benchmarks/count_lines.py a553f48 HEAD   # side by side

For each folder: all lines; in brackets lines of code, which are neither blank nor comments nor
docstrings; then, of all lines of the package, those that commits after a553f48 have added. git says
which commit a line is from (``git blame``, moved lines too); of several that are from one line, one
is old. Commits that ``.git-blame-ignore-revs`` lists have moved, cut or reworded what was there: a
line of theirs is as old as the line it stands for, and not added where it stands for none.
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
FIRST = "a553f48"
IGNORED = ".git-blame-ignore-revs"
PACKAGES = ("sparrow/rewards/sandbox",)
"""Packages of their own inside the package."""


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def sources(revision: str) -> Iterator[tuple[str, str]]:
    """Path and text of every source file of a commit."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", revision))) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(KINDS) and member.name.startswith(TOPS):
                file = archive.extractfile(member)
                assert file is not None
                yield member.name, file.read().decode()


def added_lines(revision: str, name: str, after: set[str], origins: set[str]) -> int:
    """How many lines of a file the commits ``after`` have added.

    Of several lines that git finds to be from one line of the first commit, the first is old and
    the others are copies; ``origins`` are the lines found so far, in other files too. A blank line
    is as old as the line after it, as all of them are alike.
    """
    options = ["-s", "-l", "-f", "-n", "-w", "-M", "-C", "-C", "--ignore-revs-file", IGNORED]
    blamed = git("blame", *options, f"{FIRST}..{revision}", "--", name).decode()
    lines = [line.partition(")") for line in blamed.splitlines()]
    is_new = []
    for place, _, text in lines:
        origin = " ".join(place.split()[:3])  # commit, file and line in it
        is_new.append(origin.split()[0] in after or origin in origins)
        if text.strip():
            origins.add(origin)
    for i in reversed(range(len(lines) - 1)):
        if not lines[i][2].strip():
            is_new[i] = is_new[i + 1]
    return sum(is_new)


def code_lines(name: str, text: str) -> int:
    """How many lines hold code; docstrings and comments do not count."""
    if not name.endswith(".py"):
        without = re.sub(
            r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL
        )
        return sum(bool(re.sub(r"//.*", "", line).strip()) for line in without.splitlines())
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):  # docstrings, those of module constants too
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            held.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def folder_of(name: str) -> str:
    """The top two folders of a path in the package, or that of a package in it; the top folder of
    any other.
    """
    parts = Path(name).parts[:-1]
    within = next((package for package in PACKAGES if name.startswith(f"{package}/")), None)
    return within or "/".join(parts[:2] if parts[0] == "sparrow" else parts[:1])


def count(revision: str) -> Counter[tuple[str, str]]:
    """Lines by folder and kind: all ``lines``, those of ``code``, and those ``added``."""
    tally: Counter[tuple[str, str]] = Counter()
    ignored = {line.split()[0] for line in (ROOT / IGNORED).read_text().splitlines()}
    after = {*git("rev-list", f"{FIRST}..{revision}").decode().split()} - ignored
    origins: set[str] = set()
    for name, text in sources(revision):
        groups = [folder_of(name)]
        numbers = {"lines": len(text.splitlines()), "code": code_lines(name, text)}
        if name.startswith("sparrow/"):
            numbers["added"] = added_lines(revision, name, after, origins) if after else 0
            groups += [
                "sparrow, in all",
                *([] if groups[0] in PACKAGES else ["sparrow, but for packages in it"]),
            ]
        elif not name.startswith("tests/"):
            groups.append("benchmarks, recipes and studies")
        for group in groups:
            for kind, number in numbers.items():
                tally[group, kind] += number
        tally[f"wider than {WIDTH}", "lines"] += sum(
            len(line) > WIDTH for line in text.splitlines()
        )
    return tally


def cell(tally: Counter[tuple[str, str]], group: str) -> str:
    """The three numbers of a folder; without ``added``, the lines that are left."""
    lines, code, added = (tally[group, kind] for kind in ("lines", "code", "added"))
    if not lines:
        return ""
    return f"{lines:,} ({code:,})" + (
        f"; {added:,} added, {lines - added:,} without" if added else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revisions", nargs="*", default=["HEAD"], help="commits, HEAD by default")
    revisions: list[str] = parser.parse_args().revisions
    counts = [count(revision) for revision in revisions]
    groups = sorted({group for counter in counts for group, _ in counter})
    rows = [[group, *(cell(counter, group) for counter in counts)] for group in groups]
    print(table(["lines (of code)", *revisions], rows), end="")


if __name__ == "__main__":
    main()
