"""Continue a Python file: a verifiable task with long natural responses.

A prompt is the beginning of a source file, up to the end of a line. The response continues it, and
is judged without running it. Lines of the file are grouped into *units*: a statement at indentation
0, or a member of a class there; the prompt's last unit goes on in the response. A line of code
earns its length, in which names are of one character, if

- its unit parses (one bad unit costs its own lines only; of the last unit, which the limit may have
  cut off, the lines up to the cut count, if they parse),
- it did not come before, in the prompt or the response (numbers and what is in strings make no
  difference), and not more than one line of the response is alike: the same but for names and
  operators,
- it reads a name that the prompt binds, that is defines, imports or assigns, and that two lines
  before it have not read already. Lines that read none earn a quarter of their length, and together
  a quarter of the reward at most.

Comments, docstrings and brackets alone on a line do not count as code. The reward is what the lines
earn over the length of a full response, at most 1. What lines earn is added, so every good line
counts, starting with the first. Bad lines only take up space. A response with few lines, repeated
lines, trivial lines or plain text therefore earns little.
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
"""Problems to train on, and held-out ones."""
FEWEST_NAMES, REST = 12, 2000
"""Names that a prompt binds, and characters that the file goes on for after it, both at least."""
FILE = "problems.json"

# The reward's weights. They were chosen on the trained model's dense samples and fixed before any
# run of the study.
FULL = 160
"""Characters of code, as ``shape`` has it, that earn the whole reward: 512 tokens of code
throughout hold more.
"""
OTHER = 0.25
"""Code that reads none of the prompt's names earns a quarter, and a quarter of the reward at most:
it shows that the response is code still, and needs no long context."""
ALIKE = 2
"""Lines of one shape that earn something, because the model falls into lists of lines that differ
in a name only. Of the samples' other code this leaves nearly all."""
READS = 2
"""Lines that one name of the prompt pays for: one that is used again and again needs no further
look at the prompt.
"""
LONGEST = 40
"""A line counts as no longer than this."""

_PIECE = re.compile(
    r"""\#.* | (?:\b[rbfuRBFU]{1,2})? (?: (?P<open>\"{3}|'{3}) | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' )""",
    re.VERBOSE,
)
_GOES_ON = re.compile(r"[)\]}]|(else|elif|except|finally)\b")
_MEMBER = re.compile(r"@|(async\s+def|def|class)\b")
_CUT = 12
"""The most lines, beside the last one and a string that is cut off, left out of the last unit to
make it parse.
"""
_REPEAT = re.compile(r"(.+?)\1+")
_NAME = re.compile(r"[^\W\d]\w*")
_KEYWORDS = {*keyword.kwlist} - {"True", "False", "None"}
_OPERATOR = re.compile(r"\s*(?:(?:[-+*/%@&|^<>=!~]|\b(?:and|or|not|is|in)\b)\s*)+")
_BRACKETS = str.maketrans("[{]}", "(())")
_LONG = 160
"""Characters of a line that are looked at for repetition."""
_COMMON = {"self", "cls", "args", "kwargs", "_"}

# Invalid escapes in what a model writes are no concern of ours; other modules' warnings stay as
# they are.
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")


@dataclass(frozen=True)
class Line:
    """A line of a source file."""

    text: str
    # without indentation, comments and what is in strings, numbers as 0; empty if no letter is left
    code: str
    in_string: bool  # it begins inside a string of several lines
    opens: int  # brackets opened minus those closed


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
    """Return the line numbers of each unit, in order; lines before the first unit
    belong to none.
    """
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
            # A bracket that was left open by mistake ends where a definition begins.
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
    """Return the syntax tree of a unit, whose first line is number 2; None if it does not parse.

    The head of a class, whose members are separate units, needs no body; nor does anything if
    ``unfinished``.
    """
    code = [text for text in texts if text.strip()]
    if not code:
        return ast.Module([], [])
    # Members of a class are indented: the line before the first has them be a block.
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
    """Return the names that a source file defines, imports or assigns, attributes included, sorted;
    very common names are left out.
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
    """Return ``Line.code`` without the differences between similar lines: every name is an x,
    operators and brackets are of one kind each, and direct repetitions are merged, so ``total +=
    a[i, j]`` is ``x = x(x, x)``.
    """
    form = _NAME.sub(lambda found: found[0] if found[0] in _KEYWORDS else "x", code[:_LONG])
    return _REPEAT.sub(r"\1", _OPERATOR.sub(" = ", form.translate(_BRACKETS)))


def reward_parts(prompt: str, names: Iterable[str], response: str) -> dict[str, float]:
    """Return the reward of a continuation and its parts. Lengths are in characters of the lines'
    ``shape``.

    ``length``: of the code over that of a full response; ``valid``: its share in units that parse;
    ``fresh``: the share of that which is new and not too often alike; ``grounded``: the share of
    that for which the prompt's names pay; ``names``: how many of them do; the middle three in [0,
    1], like ``reward``.
    """
    *lines, cut = read_lines(prompt + response)  # the last line may be truncated
    end, known = len(lines), set(names)
    while end and cut.in_string:  # so may a string that began before it
        end, cut = end - 1, lines[end - 1]
    first = prompt.count("\n") + 1  # the prompt's last line is the beginning of the first
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
    """Return the reward alone, in [0, 1]."""
    return reward_parts(prompt, names, response)["reward"]


def _names_read(tree: ast.Module, first: int) -> dict[int, set[str]]:
    """Return names and attributes read, by line number; the lines of the tree begin at
    ``first``.
    """
    read: dict[int, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = node.id if isinstance(node, ast.Name) else node.attr
            read.setdefault(first + node.lineno - 2, set()).add(name)
    return read


def prompt_of(text: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> str | None:
    """Return the beginning of a file, up to the end of a line between statements, without the line
    break, because a token may contain a line break and the spaces after it. The length is half
    of ``tokens`` to ``tokens``; None if there is no such place.
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
    """Return the first ``count`` problems from ``texts``: prompts with the names that they bind."""
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
    """Make the problems of a checkpoint once, and write them beside it; return the number of each
    kind.

    Training problems use at most two files per folder, so that they come from many packages.
    """
    seen: set[int] = set()
    held_texts = list(corpus.texts(held, seen))  # all of them: a copy of one is not trained on
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
    """The task, over the problems of a checkpoint: each once an epoch, in an order that the seed
    gives.

    Raises FileNotFoundError: the checkpoint has no problems, or does not say which tokenizer it
    has; transformers would take Qwen's, which splits text at other places than in training.
    ValueError: there are no problems of this kind.
    """

    checkpoint: Path
    kind: str = "train"  # or held_out, which are always in the same order

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
