r"""Formats of public datasets: where to find the datasets, and how to read their rows.

A format turns a row into a ``Question`` and names the kind of verifier that its answers need:

- ``math``: the answer is text;
- ``code``: the answer is a mapping of tests; see ``sparrow.rewards.sandbox.judge``.
"""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import pickle
import re
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

BOXED = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
PYTHON = (
    "{question}\n\nPlease reason step by step, and end "
    "with the whole program in one ```python code block."
)
READS = "The program reads standard input and writes standard output."
IMPORTS = "".join(
    f"import {name}\nfrom {name} import *\n"
    for name in (
        "string",
        "re",
        "collections",
        "heapq",
        "bisect",
        "copy",
        "math",
        "random",
        "itertools",
        "functools",
        "operator",
        "typing",
        "builtins",
    )
)
"""Imports that programming sites provide for solutions written as functions. Such solutions use
``List`` or ``deque`` as if they were built in.
"""

_BUILTIN_DEFINED = re.compile(
    rf"^def ({'|'.join(name for name in dir(builtins) if name.islower())})\(", re.MULTILINE
)
_RETURNS = re.compile(r"->\s*(.+?)\s*:\s*(?:#.*)?$", re.MULTILINE)
_LISTS = re.compile(r"\b(?:list|tuple)\b", re.IGNORECASE)
_PLAIN_TYPES = re.compile(
    r"(?:\b(?:int|float|str|bool|None|list|tuple)\b|[\[\], .'\"|])+", re.IGNORECASE
)
_DAPO_HEAD = re.compile(r"\ASolve the following math problem step by step\..*?\n\n", re.DOTALL)
_DAPO_TAIL = re.compile(r'\n\nRemember to put your answer on its own line after "Answer:"\.?\s*\Z')


@dataclass(frozen=True)
class Question:
    """A question from a dataset row."""

    text: str  # the question as the model receives it
    # what the verifier needs to judge a response: text for mathematics, tests for code; None if the
    # answer is only in the solution
    answer: Any
    solution: str | None = None  # a reference response, if the dataset has one


@dataclass(frozen=True)
class Format:
    """Where to find a dataset, and how to read its rows."""

    hub: str | None  # name on the Hugging Face hub; None if only local files are supported
    # reads a row's question, or returns None if the row is known to be unusable; raises KeyError or
    # ValueError if something is missing
    read: Callable[[Row], Question | None]
    kind: str = "math"  # kind of verifier the answers need, ``math`` or ``code``
    template: str = BOXED  # the default prompt; ``{question}`` stands for the question
    config: str | None = None  # the dataset's configuration on the hub
    split: str = "train"  # the default split
    # file name patterns in the hub repository, if the dataset can't be loaded by name; ``{split}``
    # stands for the split
    files: tuple[str, ...] = ()


def text_of(row: Row, *names: str) -> str:
    """Return the text of the first non-empty field among ``names``, ignoring case in field names.
    A list with a single text or number counts as this one, as in OlympiadBench's answers.

    Raises KeyError if all of the fields are missing or empty. Raises ValueError if the field is
    another container, such as a list of messages.
    """
    fields = {key.lower(): value for key, value in row.items()}
    for name in names:
        value = fields.get(name)
        if isinstance(value, list | tuple) and len(value) == 1:
            [value] = value if isinstance(value[0], str | int | float) else [value]
        if isinstance(value, Collection) and not isinstance(value, str):
            if not len(value):
                continue
            raise ValueError(
                f"its {name} is a {type(value).__name__}, expected text; replace messages with "
                "the text of the question, and several answers with one"
            )
        if value is not None and str(value).strip():
            return str(value).strip()
    raise KeyError(" or ".join(names))


def question_answer(row: Row) -> Question:
    r"""Read a question and its final answer from two fields.

    If there is no answer field, the answer is taken from the solution's ``\boxed{...}``. Most
    datasets have this form, including AIME, AMC, MATH, MATH-500, DeepScaleR and Polaris.
    """
    question = text_of(row, "question", "problem", "prompt")
    try:
        solution = text_of(row, "solution")
    except (KeyError, ValueError):  # missing, or several solutions
        solution = None
    try:
        return Question(question, text_of(row, "answer", "final_answer"), solution)
    except KeyError:
        if solution is None:
            raise
        return Question(question, None, solution)


def gsm8k(row: Row) -> Question:
    """Read a row of GSM8K. The answer is a worked solution ending in ``#### n``."""
    solution = text_of(row, "answer")
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise ValueError("its answer does not end in '#### n'")
    return Question(text_of(row, "question"), answer.strip().replace(",", ""), solution)


def dapo_math(row: Row) -> Question:
    """Read a row of DAPO-Math-17k, dropping the instructions around the problem."""
    messages = row.get("prompt")
    if not messages or not (content := messages[0].get("content")):
        raise KeyError("prompt")
    text = _DAPO_TAIL.sub("", _DAPO_HEAD.sub("", content)).strip()
    return Question(text, text_of(row.get("reward_model") or {}, "ground_truth"))


def _with_starter(question: str, starter: str | None, reads: bool) -> str:
    if starter and starter.strip():
        return f"{question}\n\nComplete this code:\n```python\n{starter.strip()}\n```"
    return f"{question}\n\n{READS}" if reads else question


def _taco_results(outputs: list[Any], starter: str) -> dict[str, Any]:
    """Read the expected results of calls.

    Many TACO rows wrap each result in a list of length one, without saying so. A return type in the
    starter code shows whether the row's results are wrapped. Without a return type, both forms are
    accepted.
    """
    if not all(isinstance(output, list) and len(output) == 1 for output in outputs):
        return {"outputs": outputs}
    bare = [output[0] for output in outputs]
    returned = _RETURNS.search(starter)
    if returned is None or not _PLAIN_TYPES.fullmatch(returned[1]):
        return {"outputs": bare, "alternatives": [outputs]}
    levels = len(_LISTS.findall(returned[1]))
    return {"outputs": bare if max(map(_depth, outputs)) > levels else outputs}


def _depth(value: Any) -> int:
    """Return how deeply lists are nested."""
    if not isinstance(value, list):
        return 0
    return 1 + max(map(_depth, value), default=0)


def taco(row: Row) -> Question | None:
    """Read a row of TACO. Its ``input_output`` is JSON with inputs, outputs and, in some rows,
    ``fn_name``. Rows without tests are skipped.
    """
    question = text_of(row, "question")
    try:
        tests = json.loads(row.get("input_output") or "{}")
    except ValueError:  # broken JSON, or an integer too long for Python to parse
        return None
    name = tests.get("fn_name")
    inputs = tests.get("inputs")
    outputs = tests.get("outputs")
    if not inputs or not outputs or len(inputs) != len(outputs):
        return None

    answer: dict[str, Any]
    if name:
        answer = {"fn_name": name, "inputs": inputs, "prelude": IMPORTS}
        answer |= _taco_results(outputs, row.get("starter_code") or "")
        question = f"{question}\n\nThe function is called {name}."
    else:
        answer = {"inputs": list(map(_lines, inputs)), "outputs": list(map(_lines, outputs))}

    text = _with_starter(question, row.get("starter_code"), reads=not name)
    solutions = row.get("solutions") or []
    if isinstance(solutions, str):
        solutions = json.loads(solutions)
    return Question(text, answer, f"```python\n{solutions[0]}\n```" if solutions else None)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


class _TextUnpickler(pickle.Unpickler):
    """An unpickler that reads plain text and refuses anything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(
            f"its private tests contain the Python object {module}.{name}, expected text only"
        )


def _livecodebench_tests(cases: str) -> list[dict[str, str]]:
    if not cases.lstrip().startswith("["):
        cases = _TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(cases)))).load()
    return json.loads(cases)


def livecodebench(row: Row) -> Question:
    """Read a row of LiveCodeBench. Its public tests are JSON. Its private tests are JSON, or a
    compressed and base64-encoded pickle of JSON.
    """
    question = text_of(row, "question_content")
    try:
        cases = [
            *_livecodebench_tests(row["public_test_cases"]),
            *_livecodebench_tests(row["private_test_cases"]),
        ]
        name = json.loads(row.get("metadata") or "{}").get("func_name")
    except (zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"its private tests cannot be unpacked ({error})") from error
    if not cases:
        raise ValueError("it has no tests")

    answer: dict[str, Any] = {"prelude": IMPORTS}
    if name:
        answer["fn_name"] = name
        answer["inputs"] = [list(map(json.loads, case["input"].splitlines())) for case in cases]
        answer["outputs"] = [json.loads(case["output"]) for case in cases]
    else:
        answer["inputs"] = [case["input"] for case in cases]
        answer["outputs"] = [case["output"] for case in cases]
    return Question(_with_starter(question, row.get("starter_code"), reads=not name), answer)


def _executed(test: str, candidate: bool) -> str:
    """Check that test code actually does something, and return it.

    The code must have a statement that runs, a test function or a test class. If the tests take a
    ``candidate``, a ``check`` function is also enough.

    Raises ValueError if the test code does not compile. Also raises ValueError if the test code
    does nothing, because every program would then pass.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # such as warnings about the escape \d
            body = ast.parse(test).body
    except SyntaxError as error:
        raise ValueError(f"its tests do not compile ({error.msg}, line {error.lineno})") from error

    for statement in body:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(ast.Constant()):
                continue
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name.startswith("test") or (candidate and name == "check"):
                    return test
            case ast.ClassDef(body=members, bases=bases):
                inherited = {ast.unparse(base).rpartition(".")[2] for base in bases}
                names = [getattr(member, "name", "") for member in members]
                if any(name.startswith("test") for name in names) or inherited - {"TestCase"}:
                    return test
            case _:
                return test
    raise ValueError(
        "its tests execute nothing; they need an assertion, a call, a function test_... or a "
        "TestCase" + ("" if candidate else ", or an entry_point for their check")
    )


def humaneval(row: Row) -> Question:
    """Read a row of HumanEval or HumanEval+: a function to complete, and ``check(candidate)``."""
    prompt = row.get("prompt")
    entry_point = text_of(row, "entry_point")
    if not prompt:
        raise KeyError("prompt")
    # The prompt's imports and helpers are available to both the program and the tests.
    answer = {
        "prelude": prompt,
        "setup": prompt,
        "test": _executed(text_of(row, "test"), candidate=True),
        "entry_point": entry_point,
    }
    body = row.get("canonical_solution")
    solution = f"```python\n{prompt}{body}\n```" if body else None
    return Question(f"Complete this function:\n```python\n{prompt.strip()}\n```", answer, solution)


def mbpp(row: Row) -> Question:
    """Read a row of MBPP, of its sanitized version, or of MBPP+. The question is a single sentence.
    The prompt also shows the assertions in ``test_list``, as is usual for these datasets.
    """
    question = text_of(row, "text", "prompt")
    assertions = row.get("test_list")
    if not assertions:
        raise KeyError("test_list")
    setup = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""])
    test = row.get("test") or "\n".join(assertions)
    entry_point = row.get("entry_point")
    answer = {"setup": setup, "test": _executed(test, candidate=bool(entry_point))}
    code = row.get("code")
    if entry_point:
        answer["entry_point"] = entry_point
    # Row 126 asks for a function ``sum``, which its test could not tell from Python's own.
    elif match := _BUILTIN_DEFINED.search(code or ""):
        answer["entry_point"] = match[1]
    text = f"{question}\n\nIt must satisfy:\n```python\n{chr(10).join(assertions)}\n```"
    return Question(text, answer, f"```python\n{code}\n```" if code else None)


FORMATS: dict[str, Format] = {
    "qa": Format(None, question_answer),
    # training
    "gsm8k": Format("openai/gsm8k", gsm8k, config="main"),
    "math": Format("DigitalLearningGmbH/MATH-lighteval", question_answer),
    "deepscaler": Format("agentica-org/DeepScaleR-Preview-Dataset", question_answer),
    "polaris": Format("POLARIS-Project/Polaris-Dataset-53K", question_answer),
    "dapo-math": Format("BytedTsinghua-SIA/DAPO-Math-17k", dapo_math),
    "taco": Format("BAAI/TACO", taco, "code", PYTHON, files=("ALL/{split}-*.parquet",)),
    # evaluation
    "aime24": Format("math-ai/aime24", question_answer, split="test"),
    "aime25": Format("math-ai/aime25", question_answer, split="test"),
    "aime26": Format("math-ai/aime26", question_answer, split="test"),
    "amc23": Format("math-ai/amc23", question_answer, split="test"),
    "amc22-24": Format("scottgeng00/amc_22-24", question_answer, split="test"),
    "math500": Format("HuggingFaceH4/MATH-500", question_answer, split="test"),
    "livecodebench": Format(
        "livecodebench/code_generation_lite",
        livecodebench,
        "code",
        PYTHON,
        split="test",
        files=("{split}*.jsonl",),
    ),
    "humaneval": Format("openai/openai_humaneval", humaneval, "code", PYTHON, split="test"),
    "humaneval+": Format("evalplus/humanevalplus", humaneval, "code", PYTHON, split="test"),
    "mbpp": Format(
        "google-research-datasets/mbpp", mbpp, "code", PYTHON, config="sanitized", split="test"
    ),
    "mbpp+": Format("evalplus/mbppplus", mbpp, "code", PYTHON, split="test"),
}
