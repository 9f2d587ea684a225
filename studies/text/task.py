"""Continue a Python file: a verifiable task with long natural responses.

A prompt is the beginning of a source file, up to the end of a line. The response continues it, and
is judged without being run. The file's lines are grouped into *units*. A unit is a top-level
statement or a member of a top-level class; the prompt's last unit may continue in the response. A
line of code earns its length, counting each name as one character, if

- its unit parses (a bad unit costs only its own lines; if the token limit cut off the last unit,
  only the lines before the cut need to parse),
- the same line hasn't occurred before in the prompt or the response (ignoring numbers and string
  contents), and at most one earlier line of the response is similar, i.e. the same except for names
  and operators,
- it reads a name that the prompt defines, imports or assigns, and that at most one earlier line has
  read. Lines that read no such name earn a quarter of their length, and together at most a quarter
  of the reward.

Comments, docstrings, and lines with only brackets don't count as code. The reward is the sum of
what the lines earn, divided by the length of a full response, and at most 1. So every good line
counts, starting with the first, and bad lines only take up space. A response with few lines,
repeated lines, trivial lines or plain text earns little.
"""

from __future__ import annotations

import ast
import json
import keyword
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import corpus
from transformers import PreTrainedTokenizerBase

from sparrow.tasks import Problem

PROMPT_TOKENS = 512
TRAIN, HELD_OUT = 1024, 128
"""Number of training problems and of held-out problems."""
FEWEST_NAMES, REST = 12, 2000
"""A prompt binds at least this many names, and at least this many characters follow it in its file.
"""
FILE = "problems.json"

# The reward weights were chosen on dense samples of the trained model, and fixed before any run of
# the study.
FULL = 160
"""Length of a full response, in characters of ``shape``. A 512-token response that's all code is
longer.
"""
OTHER = 0.25
"""A line that reads none of the prompt's names earns this fraction of its length. Such lines can
earn at most this fraction of the reward. They are valid code, but don't need a long context.
"""
ALIKE = 2
"""How many lines of the same shape can earn something. The model tends to write lists of lines that
differ only in a name; this limit hardly affects other code.
"""
READS = 2
"""How many lines can earn something by reading the same name from the prompt. The number is limited
because using a name again doesn't take another look at the prompt.
"""
LONGEST = 40
"""The part of a line beyond this length earns nothing."""

_PIECE = re.compile(
    r"""\#.* | (?:\b[rbfuRBFU]{1,2})? (?: (?P<open>\"{3}|'{3}) | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' )""",
    re.VERBOSE,
)
_GOES_ON = re.compile(r"[)\]}]|(else|elif|except|finally)\b")
_MEMBER = re.compile(r"@|(async\s+def|def|class)\b")
_CUT = 12
"""Maximum number of lines to drop from the last unit to make it parse, not counting the last line
and a truncated string.
"""
_REPEAT = re.compile(r"(.+?)\1+")
_NAME = re.compile(r"[^\W\d]\w*")
_KEYWORDS = {*keyword.kwlist} - {"True", "False", "None"}
_OPERATOR = re.compile(r"\s*(?:(?:[-+*/%@&|^<>=!~]|\b(?:and|or|not|is|in)\b)\s*)+")
_BRACKETS = str.maketrans("[{]}", "(())")
_LONG = 160
"""Only this many characters of a line count towards its shape."""
_COMMON = {"self", "cls", "args", "kwargs", "_"}

# Ignore invalid escapes in the model's code, but keep the warnings of other modules.
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")


@dataclass(frozen=True)
class Line:
    """A line of a source file."""

    text: str
    # the line without indentation, comments and string contents, with 0 for all numbers; empty if
    # that leaves no letters
    code: str
    in_string: bool  # whether it begins inside a multi-line string
    opens: int  # opening brackets minus closing brackets


def read_lines(text: str) -> list[Line]:
    """Return the lines of a source file, whether or not it parses."""
    lines, quote = [], ""
    for raw in text.split("\n"):
        pieces, at, in_string = [], 0, bool(quote)
        while at < len(raw):
            if quote:
                end = raw.find(quote, at)
                at, quote = (end + 3, "") if end >= 0 else (len(raw), quote)
                continue
            found = _PIECE.search(raw, at)
            pieces.append(raw[at : found.start() if found else None])
            if not found or found[0].startswith("#"):
                break
            at, quote = found.end(), found["open"] or ""
            pieces.append('""')
        code = re.sub(r"\d+", "0", "".join(pieces)).strip()
        opens = sum(code.count(c) for c in "([{") - sum(code.count(c) for c in ")]}")
        lines.append(Line(raw, code if re.search(r"[^\W\d_]", code) else "", in_string, opens))
    return lines


def units(lines: Sequence[Line]) -> list[range]:
    """Return each unit's line numbers, in order. Lines before the first unit belong to no unit."""
    starts: list[int] = []
    depth, member, in_class, decorated = 0, -1, False, False
    for i, line in enumerate(lines):
        stripped = line.text.lstrip()
        if (
            stripped
            and not stripped.startswith("#")
            and not line.in_string
            and not _GOES_ON.match(stripped)
        ):
            indent = len(line.text) - len(stripped)
            if in_class and member < 0 and indent and depth <= 0:
                member = indent
            # A definition ends any bracket left open by mistake.
            begins = indent == 0 or (
                indent == member and (depth <= 0 or bool(_MEMBER.match(stripped)))
            )
            if begins:
                if not (decorated and indent in (0, member)):
                    starts.append(i)
                depth, decorated = 0, stripped.startswith("@")
                if indent == 0:
                    member, in_class = -1, stripped.startswith("class ")
        depth += line.opens
    return [range(a, b) for a, b in pairwise([*starts, len(lines)])]


def parse(texts: Sequence[str], unfinished: bool = False) -> ast.Module | None:
    """Return a unit's syntax tree, or None if the unit doesn't parse. Its first line has number 2.

    A class head may lack a body, because members are separate units. If ``unfinished``, other
    statements may lack one too.
    """
    code = [text for text in texts if text.strip()]
    if not code:
        return ast.Module([], [])
    # Members of a class are indented, so the line before them must open a block.
    source = "\n".join(["if 1:" if code[0][0] in " \t" else "", *texts])
    tree = _tree(source)
    if tree is None and (unfinished or any(text.lstrip().startswith("class ") for text in code)):
        indent = len(code[-1]) - len(code[-1].lstrip()) + 1
        tree = _tree(f"{source}\n{' ' * indent}pass\n")
    return tree


def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def bound_names(text: str) -> list[str]:
    """Return the sorted names that a source file defines, imports or assigns, including attributes,
    but leaving out very common ones.
    """
    lines, names = read_lines(text), set()
    for unit in units(lines):
        for node in ast.walk(
            parse([lines[i].text for i in unit], unfinished=True) or ast.Module([], [])
        ):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return sorted(name for name in names if len(name) > 1 and name not in _COMMON)


@lru_cache(maxsize=1 << 16)
def shape(code: str) -> str:
    """Reduce ``Line.code`` to a form shared by similar lines: all names become x, all operators and
    brackets become the same, and consecutive repetitions are merged. For example, ``total += a[i,
    j]`` becomes ``x = x(x, x)``.
    """
    form = _NAME.sub(lambda found: found[0] if found[0] in _KEYWORDS else "x", code[:_LONG])
    return _REPEAT.sub(r"\1", _OPERATOR.sub(" = ", form.translate(_BRACKETS)))


def reward_parts(prompt: str, names: Iterable[str], response: str) -> dict[str, float]:
    """Return the reward of a continuation, with its parts. Lengths are in characters of the lines'
    ``shape``.

    ``length`` is the length of the code relative to a full response; ``valid`` is the fraction of
    it in units that parse; ``fresh`` is the fraction of valid code that is neither repeated nor
    similar to too many other lines; ``grounded`` is the fraction of fresh code that reads names
    from the prompt; and ``names`` is how many of these names there are. ``reward``, ``valid``,
    ``fresh`` and ``grounded`` are in [0, 1].
    """
    *lines, cut = read_lines(prompt + response)  # drop the last line, which may be truncated
    end, known = len(lines), set(names)
    while end and cut.in_string:  # drop the rest of a truncated string
        end, cut = end - 1, lines[end - 1]
    first = prompt.count("\n") + 1  # the first whole line of the response
    spans, seen = units(lines), {line.code for line in lines[:first]}
    total = valid = fresh = grounded = 0
    shapes: Counter[str] = Counter()
    paid: Counter[str] = Counter()
    for span in spans:
        if span.stop <= first:
            continue
        stops = range(end, max(first, end - _CUT), -1) if span is spans[-1] else [span.stop]
        trees = ((stop, parse([lines[i].text for i in range(span.start, stop)])) for stop in stops)
        stop, tree = next((pair for pair in trees if pair[1] is not None), (span.stop, None))
        if tree is None and span is spans[-1]:
            continue  # cut off
        read = _names_read(tree, span.start) if tree else {}
        for i in range(max(first, span.start), stop):
            code = lines[i].code
            form = shape(code)
            length = min(len(form), LONGEST)
            total += length
            if not code or tree is None:
                continue
            valid += length
            if code in seen or shapes[form] == ALIKE:
                continue
            seen.add(code)
            shapes[form] += 1
            fresh += length
            if paying := [name for name in read.get(i, set()) & known if paid[name] < READS]:
                grounded += length
                paid.update(paying)
    earned = grounded + OTHER * min(fresh - grounded, FULL)
    return {
        "reward": min(1.0, earned / FULL),
        "length": total / FULL,
        "valid": valid / max(1, total),
        "fresh": fresh / max(1, valid),
        "grounded": grounded / max(1, fresh),
        "names": len(paid),
    }


def reward(prompt: str, names: Iterable[str], response: str) -> float:
    """Return just the reward, in [0, 1]."""
    return reward_parts(prompt, names, response)["reward"]


def _names_read(tree: ast.Module, first: int) -> dict[int, set[str]]:
    """Return the names and attributes read, by line number. ``first`` is the unit's first line
    number.
    """
    read: dict[int, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = node.id if isinstance(node, ast.Name) else node.attr
            read.setdefault(first + node.lineno - 2, set()).add(name)
    return read


def prompt_of(text: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> str | None:
    """Return the beginning of a file, with between ``tokens`` / 2 and ``tokens`` tokens, or None.

    It ends after a complete statement and without a line break, because a token may combine a line
    break with the spaces after it.
    """
    encoding = tokenizer.backend_tokenizer.encode(text[: 6 * tokens])
    if len(encoding.offsets) <= tokens:
        return None
    least, end = encoding.offsets[tokens // 2][0], encoding.offsets[tokens][0]
    while (end := text.rfind("\n", least, end)) > 0:
        lines = read_lines(text[:end])
        last = lines[-1]
        spans = units(lines)
        whole = last.code and not last.in_string and spans
        if whole and parse([lines[i].text for i in spans[-1]], unfinished=True) is not None:
            return text[:end]
    return None


def make_problems(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    count: int,
    tokens: int = PROMPT_TOKENS,
) -> list[dict[str, Any]]:
    """Make the first ``count`` problems from ``texts``. A problem is a prompt and the names it
    binds.
    """
    problems: list[dict[str, Any]] = []
    for text in texts:
        if len(problems) == count:
            break
        prompt = prompt_of(text, tokenizer, tokens)
        if (
            prompt
            and len(text) - len(prompt) >= REST
            and len(names := bound_names(prompt)) >= FEWEST_NAMES
        ):
            problems.append({"prompt": prompt, "names": names})
    return problems


def write_problems(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[list[Path]],
    held: Sequence[list[Path]],
    tokens: int = PROMPT_TOKENS,
) -> dict[str, int]:
    """Make a checkpoint's problems, write them to its folder, and return how many there are of each
    kind.

    Training problems use at most two files per folder, so that they come from many packages.
    """
    seen: set[int] = set()
    held_texts = list(corpus.texts(held, seen))  # all of them, so that no copy ends up in training
    random.Random(0).shuffle(held_texts)
    problems = {
        "held_out": make_problems(tokenizer, held_texts, HELD_OUT, tokens),
        "train": make_problems(
            tokenizer, corpus.texts([files[:2] for files in train], seen), TRAIN, tokens
        ),
    }
    (folder / FILE).write_text(json.dumps(problems, indent=0) + "\n", encoding="utf-8")
    return {kind: len(some) for kind, some in problems.items()}


@dataclass(frozen=True)
class Continue:
    """The task, using the problems stored with a checkpoint. An epoch contains each problem once,
    in an order that depends on the seed.

    Raises FileNotFoundError if the checkpoint has no problems or doesn't specify its tokenizer, and
    ValueError if there are no problems of this kind. Without a specified tokenizer, transformers
    would use Qwen's, which splits text differently.
    """

    checkpoint: Path
    kind: str = "train"  # or held_out, which has a fixed order

    @cached_property
    def problems(self) -> list[dict[str, Any]]:
        if not (self.checkpoint / "tokenizer_config.json").exists():
            raise FileNotFoundError(
                f"{self.checkpoint} has no tokenizer_config.json; train.py writes one"
            )
        found = json.loads((self.checkpoint / FILE).read_text(encoding="utf-8"))[self.kind]
        if not found:
            raise ValueError(f"{self.checkpoint / FILE} has no problems of the kind {self.kind}")
        return found

    def problem(self, index: int, seed: int = 0) -> Problem:
        """Return problem ``index`` of the stream ``seed``."""
        epoch, place = divmod(index, len(self.problems))
        number = (
            place if self.kind == "held_out" else _order(len(self.problems), seed, epoch)[place]
        )
        prompt, names = (self.problems[number][key] for key in ("prompt", "names"))
        verify = partial(reward, prompt, tuple(names))
        return Problem(f"continue-{self.kind}-{number}", prompt, verify, source="continue")


@lru_cache(maxsize=64)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"continue/{seed}/{epoch}").shuffle(order)
    return order
