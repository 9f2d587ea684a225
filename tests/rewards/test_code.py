"""Test that programs are judged correctly by each kind of unit test, and cannot influence their
verdicts.
"""

import json
import pickle
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from sparrow.rewards import CodeVerifier, Limits, extract_code, sandbox, verify_code
from sparrow.rewards.sandbox import judge as judge_module
from sparrow.tasks.dataset import load_dataset_task

DATA = Path(__file__).parents[1] / "data"
LIMITS = Limits(cpu_s=1, wall_s=4.0, program_s=60, memory_bytes=512 << 20)
ADD = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
CHECK = {
    "setup": "def shift(x): return x + 1",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(shift(1), 2) == 4\n",
    "entry_point": "add",
}
ASSERTS = {
    "setup": "import math",
    "test": "assert add(1, 2) == 3\nassert math.isclose(add(0.1, 0.2), 0.3)",
}


@pytest.fixture(scope="module")
def verifier():
    return CodeVerifier(LIMITS)


def judge(verifier, code, tests, **options):
    judgement = verifier.judge(code, tests, **options)
    return judgement.verdicts, judgement.detail


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("First:\n```python\na\n```\nthen\n```python\nb\n```\nDone.", "b\n"),
        ("```python\na\n```\nIt prints\n```\n1\n```", "a\n"),
        ("```\na\n```\n```bash\npip\n```", "pip\n"),
        ("```py\na\n```", "a\n"),
        ("  ```python\n  a\n  ```", "a\n"),
        (
            "- so:\n    ```python\n    def f():\n        return 1\n    ```",
            "def f():\n    return 1\n",
        ),
        ("- ```python\n  if x:\n      y\n  ```\nIt is done.", "if x:\n    y\n"),
        ("12. ~~~python\n    a\n    ~~~\n13. Words.", "a\n"),
        ("\t```python\n\tif x:\n\t\ty\n\t```", "if x:\n\ty\n"),
        ("~~~python\na\n```\nb\n~~~\nDone.", "a\n```\nb\n"),
        ("~~~\na\n~~~", "a\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("```python\nprint(1)```", "print(1)\n"),
        ("```python\nx = 1\nprint(x)```\nIt prints\n```\n1\n```", "x = 1\nprint(x)\n"),
        ('```python\ns = """\nuse ```x```\n"""\n```', 's = """\nuse ```x```\n"""\n'),
        ("```python\nx = 1  # not ```\n```", "x = 1  # not ```\n"),
        ('```python\ns = """\n\n    ```\n"""\n```', 's = """\n\n    ```\n"""\n'),
        ("Use ```x``` as in\n```python\na\n```", "a\n"),
        ("```x``` is short for\n```python\na\n```", "a\n"),
        ("First\n```python\na\n```\nand then, cut off:\n```python\nb\nc", "b\nc\n"),
        ("```python\na\n```\nA stray fence:\n```", "a\n"),
        ("```python\na\n```\nA stray fence:\n```\nand words", "a\n"),
        ("```python", None),
        ("The program is\n\n    a = 1\n\n    print(a)\n\nwhich prints 1.", "a = 1\n\nprint(a)\n"),
        ("The program is\n\n\tif x:\n\t\ty", "if x:\n\ty\n"),
        ("Words\n    that only hang.", None),
        ("One:\n\n    a\n\nTwo:\n\n    b\n", "b\n"),
        ("```python title=x\na\n```", "a\n"),
        ("<think>\n```python\nold\n```\n</think>\nNo program.", None),
        ("<think>\n```python\nold\n```\n</think>\n```python\nnew\n```", "new\n"),
        ("[THINK]\n```python\nold\n```\n[/THINK]\n```\nnew\n```", "new\n"),
        ("◁think▷\n```python\nold\n```\n◁/think▷\nNo program.", None),
        ("<think>\n```python\ncut off mid-thinking\n```\n", None),
        ("```python\nold\n```\n</think>\n```\nnew\n```", "new\n"),
        ("```python\nx = '''\n    ```inside\n'''\n", "x = '''\n    ```inside\n'''\n"),
        ("```python\nprint(1)", "print(1)\n"),
        ("print(1)", None),
    ],
)
def test_the_program_is_extracted_from_a_response(response, code):
    assert extract_code(response) == code


@pytest.mark.parametrize(
    "flood",
    [
        "```\n" * 100_001,
        "    \n" * 100_000,
        "    a\n\nb\n\n" * 50_000,
        "`" * 300_000 + "a```",
        "```python\n" * 100_001,
        "`" * 500_000,
        "\n" * 500_000,
        "1. " * 200_000 + "```",
    ],
)
def test_many_code_fences_are_parsed_in_linear_time(flood):
    start = time.process_time()
    extract_code(flood)
    assert time.process_time() - start < 5


def test_programs_are_judged_by_their_standard_output(verifier):
    tests = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7", "11\n"]}
    good = "a, b = map(int, input().split())\nprint(a + b)"
    assert judge(verifier, good, tests) == (("pass",) * 3, "")
    once = "print(3)"
    assert judge(verifier, once, tests) == (
        ("pass", "wrong"),
        r"for '3 4\n' expected '7', got '3\n'",
    )
    assert judge(verifier, once, tests, stop_early=False)[0] == ("pass", "wrong", "wrong")
    assert judge(verifier, "1/0", tests) == (("error",), "ZeroDivisionError: division by zero")
    assert judge(verifier, "print(", tests)[1].startswith("SyntaxError: '(' was never closed")
    assert judge(verifier, good + "\nraise SystemExit(3)", tests) == (("error",), "exit status 3")
    assert judge(verifier, good + "\nraise SystemExit(0)", tests)[0] == ("pass",) * 3
    assert judge(verifier, "while True: pass", tests)[0] == ("timeout",)
    assert judge(verifier, "import time; time.sleep(60)", tests) == (
        ("timeout",),
        f"stopped after running and sleeping for {LIMITS.wall_s:g} s",
    )
    assert judge(verifier, "bytearray(1 << 40)", tests) == (("memory",), "MemoryError")


def test_a_failed_test_does_not_affect_the_next_test(verifier):
    tests = {"inputs": ["0", "1"], "outputs": ["0", "1"]}
    for bad in (
        "while True: pass",
        "import os; os._exit(9)",
        "open('left', 'w'); raise ValueError",
    ):
        program = f"n = input()\nif n == '0':\n exec({bad!r})\nprint(n)"
        assert judge(verifier, program, tests, stop_early=False)[0][1] == "pass"
        call = {"fn_name": "f", "inputs": [["0"], ["1"]], "outputs": ["0", "1"]}
        program = f"def f(n):\n if n == '0':\n  exec({bad!r})\n return n"
        assert judge(verifier, program, call, stop_early=False)[0][1] == "pass"


def test_programs_are_judged_by_function_calls(verifier):
    assert judge(verifier, "def add(a, b): return a + b", ADD) == (("pass", "pass"), "")
    method = "class Solution:\n    def add(self, a: List[int], b: int) -> int: return a + b"
    assert judge(verifier, method, {**ADD, "prelude": "from typing import *"})[0] == (
        "pass",
        "pass",
    )
    assert judge(verifier, method, ADD) == (("error",), "NameError: name 'List' is not defined")
    assert judge(verifier, "def add(a, b): return a", ADD) == (
        ("wrong",),
        "add(*[1, 2]) is 1, expected 3",
    )
    assert (
        judge(verifier, "def plus(a, b): return a", ADD)[1]
        == "NameError: the program defines no function 'add'"
    )
    assert judge(verifier, "def add(a, b): print('noise'); return a + b", ADD)[0] == (
        "pass",
        "pass",
    )
    assert judge(verifier, "def add(a, b): raise KeyError(a)", ADD) == (("error",), "KeyError: 1")
    assert judge(verifier, "def add(a, b):\n while True: pass", ADD) == (
        ("timeout",),
        "stopped at a time limit",
    )
    assert judge(verifier, "import time\ndef add(a, b): time.sleep(99)", ADD) == (
        ("timeout",),
        "stopped at a time limit",
    )
    assert judge(verifier, "def add(a, b): return [0] * 10**12", ADD) == (
        ("memory",),
        "MemoryError",
    )
    assert judge(verifier, "def add(a, b): return object()", ADD)[0] == ("error",)
    assert judge(verifier, "def add(a, b): return 10**5000", ADD)[0] == ("error",)
    deep = "def add(a, b):\n x = 3\n for _ in range(10**5): x = [x]\n return x"
    assert judge(verifier, deep, ADD)[0] == ("error",)


@pytest.mark.slow
def test_programs_are_judged_by_assertions(verifier):
    good = "def add(a, b): return a + b"
    for tests in (CHECK, ASSERTS):
        assert judge(verifier, good, tests) == (("pass",), "")
        assert judge(verifier, "def add(a, b): return 3", tests)[0] == ("wrong",)
        assert judge(verifier, "def add(a, b): return 1 / 0", tests) == (
            ("error",),
            "ZeroDivisionError: division by zero",
        )
        assert judge(verifier, "def add(a, b):\n while True: pass", tests)[0] == ("timeout",)
        assert judge(verifier, "def add(a, b): return bytearray(10**12)", tests) == (
            ("memory",),
            "MemoryError",
        )
    assert (
        judge(verifier, good, {"test": "assert ad(1) == 2"})[1]
        == "NameError: the program defines no function 'ad'"
    )
    assert (
        judge(verifier, good, {"test": "assert add(1, 2) == 3\nraise OSError('x')"})[1]
        == "in the tests: OSError: x"
    )
    assert judge(verifier, good, {"test": "assert add(1,"})[1].startswith(
        "in the tests: SyntaxError"
    )
    slow = CodeVerifier(Limits(cpu_s=1, wall_s=1.0, program_s=2))
    assert judge(slow, good, {"test": "while True: add(1, 2)"})[0] == ("timeout",)
    assert judge(slow, good, {"test": "import time; time.sleep(99)"}) == (
        ("timeout",),
        "the tests did not finish within 2 s",
    )


def test_results_keep_their_types_in_assertions(verifier):
    program = "def f(kind): return {'t': (1, [2]), 's': {1, 2}, 'd': {1: (2,)}, 'b': b'x', 'n': None, 'g': 1.5}[kind]"
    tests = """
assert f('t') == (1, [2]) and f('t') != [1, [2]]
assert f('s') == {2, 1} and f('d') == {1: (2,)} and f('b') == b'x' and f('n') is None and f(kind='g') == 1.5
"""
    assert judge(verifier, program, {"test": tests}) == (("pass",), "")


FORGERIES = {
    "equals everything": """
class E(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(*a): return E(99)
""",
    "equals everything, not a number": "class E:\n def __eq__(s, o): return True\ndef add(*a): return E()",
    "ends early with 0": "import sys; sys.exit(0)",
    "ends at once": "import os; os._exit(0)",
    "ends in the call": "import os\ndef add(*a): os._exit(0)",
    "raises SystemExit in the call": "def add(*a): raise SystemExit(0)",
    "raises AssertionError's opposite": "def add(*a): raise BaseException('pass')",
    "patches assert away": "import builtins\nbuiltins.AssertionError = OSError\ndef add(*a): return 99",
    "patches isclose": "import math\nmath.isclose = lambda *a: True\ndef add(*a): return 99",
    "closes the channel": "import os\nos.closerange(0, 99)\ndef add(*a): return 99",
    "says pass on every channel": """
import os, struct
def add(*a):
    for said in ({"verdict": "pass", "detail": ""}, {"value": 3}, {"outcome": "ok"}):
        text = __import__("json").dumps(said).encode()
        for fd in range(99):
            try: os.write(fd, struct.pack(">II", len(text), 0) + text)
            except OSError: pass
    return 99
""",
    "says pass before it is asked": """
import os, struct
text = b'{"verdict": "pass", "detail": ""}'
for fd in range(99):
    try: os.write(fd, struct.pack(">II", len(text), 0) + text)
    except OSError: pass
def add(*a): return 99
""",
    "claims an endless reply": """
import os
def add(*a):
    for fd in range(3, 99):
        try: os.write(fd, b"\\xff" * 8)
        except OSError: pass
""",
    "replaces the runner's functions": """
import sys
for module in list(sys.modules.values()):
    for name in ("pack", "unpack", "serve", "judge", "describe"):
        if hasattr(module, name):
            setattr(module, name, lambda *a: 3)
def add(*a): return 99
""",
    "looks for the tests": """
import gc, sys
def add(*a):
    found = [o for o in gc.get_objects() if isinstance(o, dict) and ("test" in o or "outputs" in o)]
    frame = sys._getframe()
    while frame:
        found += [v for k, v in frame.f_locals.items() if k in ("test", "tests", "expected", "outputs")]
        frame = frame.f_back
    return found[0] if found else 99
""",
    "answers by stack": "import sys\ndef add(*a): return sys._getframe(1).f_locals.get('expected', 99)",
}


@pytest.mark.parametrize(("mode", "kinds"), [("auto", [ADD, CHECK, ASSERTS]), ("session", [CHECK])])
@pytest.mark.parametrize("name", FORGERIES)
def test_a_verdict_cannot_be_forged(name, mode, kinds):
    verifier = CodeVerifier(LIMITS, mode)
    for tests in kinds:
        judgement = verifier.judge(FORGERIES[name], tests)
        assert not judgement.passed and judgement.verdicts[0] in ("wrong", "error", "timeout"), (
            judgement
        )


def test_programs_do_not_inherit_the_imports_and_globals_of_the_harness(verifier):
    """The harness's ``from __future__`` imports and globals do not affect the program. The
    program's own ``from __future__`` imports take effect.
    """
    program = "def f(x: int): pass\nprint(f.__annotations__['x'] is int, sorted(k for k in globals() if k[0] != '_'))"
    assert verifier.judge(program, {"inputs": [""], "outputs": ["True ['f']"]}).passed
    program = "from __future__ import annotations\ndef f(x: Unknown): return x"
    assert verifier.judge(
        program, {"fn_name": "f", "inputs": [[1]], "outputs": [1], "prelude": "import math"}
    ).passed


@pytest.mark.slow
def test_a_programs_total_time_is_limited():
    verifier = CodeVerifier(Limits(cpu_s=1, wall_s=1.0, program_s=2))
    tests = {"inputs": ["x"] * 50, "outputs": ["x"] * 50}
    judgement = verifier.judge(
        "import time; time.sleep(0.5); print(input())", tests, stop_early=False
    )
    *before, last = judgement.verdicts
    assert set(before) == {"pass"} and last == "timeout"
    assert len(before) < 9
    assert re.fullmatch(r"the first \d tests took more than 2 s", judgement.detail)
    assert judgement.wall_s < 20 and not judgement.passed


@pytest.mark.parametrize(
    ("spent_s", "left_s"),
    [
        (0.0, 2.0),  # the test reached its own limit
        (1.5, 0.0),  # the test used up the program's remaining time
    ],
)
def test_program_runs_out_of_time_only_at_its_total_limit(spent_s, left_s):
    run = judge_module._Run("", "", Limits(wall_s=1.0, program_s=2), "bwrap", spent_s)
    with pytest.raises(sandbox.ChildTimeoutError), run._time(1.0):
        raise sandbox.ChildTimeoutError
    assert run.limits.program_s - run.spent_s == left_s


@pytest.mark.parametrize("workers", [0, -1])
def test_a_verifier_needs_at_least_one_worker(workers):
    with pytest.raises(ValueError, match=f"need workers >= 1, got workers={workers}"):
        CodeVerifier(workers=workers)


def test_an_empty_list_of_tests_does_not_pass(verifier):
    assert not verifier.judge("", {"inputs": [], "outputs": []}).passed


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({}, "tests need 'test', or both 'inputs' and 'outputs'"),
        ({"outputs": []}, "tests need 'test', or both 'inputs' and 'outputs'"),
        ({"inputs": ["x"], "outputs": []}, "got 0 outputs for 1 inputs; correct the tests"),
        ({**ADD, "alternatives": [[3]]}, "got 1 outputs for 2 inputs; correct the tests"),
    ],
)
def test_malformed_tests_raise_an_error_instead_of_failing_every_program(verifier, tests, message):
    with pytest.raises(ValueError, match=message):
        verifier.judge("def add(a, b): return a + b", tests)


def test_the_reward_is_one_for_a_correct_program_and_zero_otherwise():
    tests = {"inputs": ["1"], "outputs": ["1"]}
    assert verify_code("So:\n```python\nprint(input())\n```", tests) == 1.0
    assert verify_code("So:\n```python\nprint(2)\n```", tests) == 0.0
    assert verify_code("print(input())", tests) == 0.0
    verify = pickle.loads(pickle.dumps(partial(verify_code, answer=tests, limits=LIMITS)))
    assert verify("```python\nprint(input())\n```") == 1.0


def test_no_more_programs_run_at_once_than_there_are_workers(monkeypatch):
    running, most, lock = 0, 0, threading.Lock()

    class Counted(sandbox.Sandbox):
        def __init__(self, *args):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            super().__init__(*args)

        def close(self):
            nonlocal running
            super().close()
            with lock:
                running -= 1

    monkeypatch.setattr(judge_module, "Sandbox", Counted)
    verifier = CodeVerifier(LIMITS, workers=2)
    programs = [
        "print(input())",
        "while True: pass",
        "1/0",
        "print(7)",
        "print(input())",
        "import os; os._exit(0)",
    ]
    responses = [f"```python\n{program}\n```" for program in programs]
    results = {}

    def run(name):
        with ThreadPoolExecutor(6) as pool:
            results[name] = list(
                pool.map(verifier, responses, [{"inputs": [name], "outputs": [name]}] * 6)
            )

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": [1, 0, 0, 0, 1, 0], "b": [1, 0, 0, 0, 1, 0]}
    assert most == 2 and running == 0


@pytest.mark.parametrize("folder", ["", "hub"])
@pytest.mark.parametrize("name", ["humaneval", "humaneval+", "mbpp", "mbpp+", "taco"])
def test_reference_solutions_pass_and_broken_solutions_do_not(name, folder):
    path = DATA / folder / f"{name.replace('+', '_plus')}.jsonl"
    problems = list(
        load_dataset_task(name, {"code": partial(verify_code, limits=LIMITS)}, path=path)
    )
    assert problems
    for problem in problems:
        assert problem.verify(problem.solution) == 1.0, problem.id
        broken = re.sub(
            r"\b(return|print)\b\(?",
            lambda m: m[0] + "(" * (m[0] == "print") + "0 and ",
            problem.solution,
        )
        assert problem.verify(broken) == 0.0, problem.id


def test_livecodebench_rows_are_judged_correctly():
    task = load_dataset_task(
        "livecodebench",
        {"code": partial(verify_code, limits=LIMITS)},
        path=DATA / "livecodebench.jsonl",
    )
    double, pair, mean = task
    assert double.prompt.startswith("You are given T") and "reads standard input" in double.prompt
    assert (
        "```python\nclass Solution:\n    def pairWithSum" in pair.prompt
        and "standard input" not in pair.prompt
    )
    assert [len(p.verify.keywords["answer"]["inputs"]) for p in task] == [3, 3, 2]
    assert (
        double.verify("```python\nfor _ in range(int(input())): print(int(input()) * 2)\n```")
        == 1.0
    )
    assert (
        double.verify("```python\nfor _ in range(int(input())): print(int(input()) + 1)\n```")
        == 0.0
    )
    solution = """```python
class Solution:
    def pairWithSum(self, nums: List[int], target: int) -> List[int]:
        return next((i, j) for i, j in combinations(range(len(nums)), 2) if nums[i] + nums[j] == target)
```"""
    assert pair.verify(solution) == 1.0
    assert pair.verify(solution.replace("(i, j) for", "(j, i) for")) == 0.0
    assert (
        mean.verify("```python\nx = [*map(int, input().split())]\nprint(sum(x) / len(x))\n```")
        == 1.0
    )


def test_livecodebench_rows_from_the_hub_are_judged_by_public_and_private_tests():
    verifiers = {"code": partial(verify_code, limits=LIMITS)}
    *written, method = load_dataset_task(
        "livecodebench", verifiers, path=DATA / "hub" / "livecodebench.jsonl"
    )
    taco = list(load_dataset_task("taco", verifiers, path=DATA / "hub" / "taco.jsonl"))
    assert [
        problem.verify(same.solution) for problem, same in zip(written, taco, strict=False)
    ] == [1.0] * 4
    assert [problem.verify(taco[0].solution) for problem in written] == [1.0, 0.0, 0.0, 0.0]
    loop = "for i in range(len(nums)) for j in range(i) if nums[i] + nums[j] == target"
    head = "class Solution:\n    def pairWithSum(self, nums, target):\n"
    program = f"```python\n{head}        return next((j, i) {loop})\n```"
    assert method.verify(program) == 1.0
    assert method.verify(program.replace("(j, i) for", "(0, 1) for")) == 0.0


def test_unit_tests_can_be_converted_to_json():
    for name in ("humaneval", "mbpp", "taco", "livecodebench"):
        for problem in load_dataset_task(name, {"code": verify_code}, path=DATA / f"{name}.jsonl"):
            tests = problem.verify.keywords["answer"]
            assert json.loads(json.dumps(tests)) == tests
