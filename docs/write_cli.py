"""Generate the tables of options in docs/cli.md from the output of ``sparrow COMMAND --help``.

    python docs/write_cli.py

With ``--check``, the script only checks that the page is up to date. Tables go between the comments
``<!-- options: COMMAND -->`` and ``<!-- end -->``; the text around them is written by hand.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "cli.md"


def help_text(command: str) -> str:
    """Return the help of a command, wrapped at 80 columns."""
    from sparrow.cli import main

    before, printed = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "80"  # on a wider terminal, the help has several columns
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([command, "--help"])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return printed.getvalue()


def table(command: str) -> str:
    """Return a command's options as a Markdown table, section by section."""
    rows: list[list[str]] = []  # an option's name ("" for a section), then the words of its help
    for line in help_text(command).partition("\n\n")[2].splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if not indent or not text or text.startswith("---"):
            continue
        if indent == 1:
            rows.append([""])  # a section begins
        elif indent > 2:
            rows[-1].append(text)
        elif text.startswith("-") or re.match(r"[A-Z]+ {2,}", text):
            name, _, about = text.partition("  ")
            rows.append([name, about.strip()] if about else [name])
        elif rows[-1][0] and len(rows[-1]) == 1:
            rows[-1][0] += f" {text}"  # an option's name that takes two lines
        else:
            rows[-1].append(text)  # what a section is about
    lines = ["| option | what it is |", "|---|---|"]
    for name, *words in rows:
        about = " ".join(filter(None, words)).replace("|", "\\|")
        if name.startswith("-h"):
            continue
        if name:
            option = ", ".join(f"`{part}`" for part in re.sub(r"\s+", " ", name).split(", "))
            lines.append(f"| {option.replace('|', chr(92) + '|')} | {about} |")
        elif about:
            lines.append(f"| | **{about}** |")
    return "\n".join(lines)


def written(page: str) -> str:
    """Return the page with every table regenerated."""
    return re.sub(
        r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{table(found[2])}\n{found[3]}",
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(written(page), encoding="utf-8")
    elif written(page) != page:
        sys.exit("docs/cli.md is out of date; run python docs/write_cli.py")
