# ruff: noqa: E501  (each program is on one line)
"""Test that honest test code of every kind judges programs as it would in a single process, and
that builtins do not count as the program's functions.
"""

import ast
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

from sparrow.rewards import CodeVerifier, Limits, verify_code
from sparrow.rewards.sandbox.judge import same_output, same_value
from sparrow.tasks.dataset import load_dataset_task

DATA = Path(__file__).parents[1] / "data"
LIMITS = Limits(cpu_s=2, wall_s=6.0, program_s=60)

# name -> test code, a correct program, and a wrong program
CASES = {
    "function named like a builtin": (
        "assert sum([1, 2]) == 3",
        "def sum(x): return x[0] + x[1]",
        "def sum(x): return 4",
    ),
    "function named like a builtin with a different meaning": (
        "assert sum(10, 15) == 6",
        "def sum(a, b): return 6",
        "def sum(a, b): return 25",
    ),
    "method named like a builtin": (
        "assert max([1, 5]) == 5",
        "class Solution:\n def max(s, x): return x[1]",
        "pass",
    ),
    "builtins applied to the program's results": (
        "assert sorted(set(f([2, 1, 2]))) == [1, 2] and len(f([])) == 0 and abs(f([1])[0] - 1) < 1e-6",
        "def f(x): return x",
        "def f(x): return [0]\ndef sorted(x): return [1, 2]\ndef len(x): return 0\ndef abs(x): return 0",
    ),
    "Decimal result": (
        "from decimal import Decimal\nassert f('1.10') == Decimal('1.10') and str(f('1.10')) == '1.10'",
        "from decimal import Decimal\ndef f(x): return Decimal(x)",
        "def f(x): return float(x)",
    ),
    "Decimal argument": (
        "from decimal import Decimal\nassert f(Decimal('0.1')) == Decimal('0.3')",
        "def f(x): return x + x + x",
        "def f(x): return float(x) * 3",
    ),
    "Fraction": (
        "from fractions import Fraction\nassert f(Fraction(1, 3)) == Fraction(2, 3) and f(Fraction(1, 2)).denominator == 1",
        "def f(x): return x + x",
        "def f(x): return float(x) * 2",
    ),
    "date": (
        "import datetime\nassert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)",
        "from datetime import timedelta\ndef f(d): return d + timedelta(days=1)",
        "def f(d): return d",
    ),
    "datetime and timedelta": (
        "from datetime import datetime, timedelta\nassert f(datetime(2024, 1, 1, 12), datetime(2024, 1, 1)) == timedelta(hours=12)",
        "def f(a, b): return a - b",
        "def f(a, b): return b - a",
    ),
    "array argument": (
        "import numpy as np\nassert f(np.array([[1, 2], [3, 4]])) == 10",
        "def f(a): return int(a.sum())",
        "def f(a): return int(a.shape[0])",
    ),
    "array result": (
        "import numpy as np\nassert np.allclose(f([1, 2]), np.array([2.0, 4.0])) and f([1, 2]).shape == (2,)",
        "import numpy as np\ndef f(x): return np.array(x) * 2.0",
        "import numpy as np\ndef f(x): return np.array(x) * 2.1",
    ),
    "array changed in place": (
        "import numpy as np\na = np.zeros(3)\nfill(a)\nassert (a == 7).all()",
        "def fill(a): a[:] = 7",
        "def fill(a): a = a + 7",
    ),
    "lambda argument": (
        "assert apply(lambda x: x * 2, [1, 2]) == [2, 4]",
        "def apply(f, xs): return [f(x) for x in xs]",
        "def apply(f, xs): return xs",
    ),
    "builtin function argument": (
        "assert apply(len, ['a', 'bcd']) == [1, 3] and apply(str.upper, ['a']) == ['A']",
        "def apply(f, xs): return [f(x) for x in xs]",
        "def apply(f, xs): return xs",
    ),
    "stateful function of the tests": (
        "seen = []\ndef note(x):\n    seen.append(x)\n    return len(seen)\nassert visit([3, 4], note) == 2 and seen == [3, 4]",
        "def visit(xs, f):\n for x in xs: n = f(x)\n return n",
        "def visit(xs, f): return 2",
    ),
    "function of the program passed back to it": (
        "assert twice(inc, 1) == 3",
        "def inc(x): return x + 1\ndef twice(f, x): return f(f(x))",
        "def inc(x): return x + 1\ndef twice(f, x): return f(x)",
    ),
    "function as a result": (
        "add3 = adder(3)\nassert add3(4) == 7 and adder(1)(1) == 2",
        "def adder(n): return lambda x: x + n",
        "def adder(n): return lambda x: x",
    ),
    "type argument": (
        "assert of_type([1, 'a', 2], int) == [1, 2] and of_type([1, 'a'], str) == ['a']",
        "def of_type(xs, t): return [x for x in xs if isinstance(x, t)]",
        "def of_type(xs, t): return xs",
    ),
    "deque argument": (
        "from collections import deque\nq = deque([1, 2, 3])\nassert rotate(q) == deque([2, 3, 1])",
        "def rotate(q):\n q.append(q.popleft())\n return q",
        "def rotate(q): return list(q)[1:] + [q[0]]",
    ),
    "Counter and OrderedDict": (
        "from collections import Counter, OrderedDict\nassert top(Counter('abb')) == 'b' and first(OrderedDict(a=1)) == 'a'",
        "def top(c): return c.most_common(1)[0][0]\ndef first(d): return d.popitem(last=False)[0]",
        "def top(c): return 'a'\ndef first(d): return 'a'",
    ),
    "expected exception": (
        "try:\n    root(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative'",
        "def root(x):\n if x < 0: raise ValueError('negative')",
        "def root(x):\n if x < 0: raise TypeError('negative')",
    ),
    "expected exception of a derived class": (
        "ok = False\ntry:\n    get({}, 'k')\nexcept LookupError:\n    ok = True\nassert ok",
        "def get(d, k): return d[k]",
        "def get(d, k): return None",
    ),
    "expected exception that is not raised": (
        "import contextlib\nraised = True\nwith contextlib.suppress(ZeroDivisionError):\n    div(1, 0)\n    raised = False\nassert raised",
        "def div(a, b): return a / b",
        "def div(a, b): return 0",
    ),
    "exception raised by a callback": (
        "def bad(x): raise KeyError(x)\nassert safe(bad, 1) == 'none'",
        "def safe(f, x):\n try: return f(x)\n except KeyError: return 'none'",
        "def safe(f, x): return f(x)",
    ),
    "list changed in place": (
        "xs = [3, 1, 2]\nassert sort(xs) is None and xs == [1, 2, 3]",
        "def sort(x): x.sort()",
        "def sort(x): sorted(x)",
    ),
    "nested list changed in place": (
        "m = [[1, 2], [3, 4]]\nrow = m[0]\ntranspose(m)\nassert m == [[1, 3], [2, 4]] and row == [1, 3]",
        "def transpose(m): m[0][1], m[1][0] = m[1][0], m[0][1]",
        "def transpose(m): m = [list(r) for r in zip(*m)]",
    ),
    "dict and set changed in place": (
        "d, s = {'a': 1}, {1, 2}\nadd(d, s)\nassert d == {'a': 1, 'b': 2} and s == {1, 2, 3}",
        "def add(d, s):\n d['b'] = 2\n s.add(3)",
        "def add(d, s): return {**d, 'b': 2}, s | {3}",
    ),
    "argument left unchanged": (
        "xs = [3, 1, 2]\nassert ordered(xs) == [1, 2, 3] and xs == [3, 1, 2]",
        "def ordered(x): return sorted(x)",
        "def ordered(x):\n x.sort()\n return x",
    ),
    "module constant": (
        "assert LIMIT == 100 and NAMES['a'] == 1",
        "LIMIT = 100\nNAMES = {'a': 1}",
        "LIMIT = 101\nNAMES = {'a': 1}",
    ),
    "module variable that a call changes": (
        "bump()\nbump()\nassert COUNT == 2",
        "COUNT = 0\ndef bump():\n global COUNT\n COUNT += 1",
        "COUNT = 0\ndef bump():\n global COUNT\n COUNT = 1",
    ),
    "captured print": (
        "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    greet('Ann')\nassert out.getvalue() == 'Hi Ann\\n'",
        "def greet(n): print('Hi', n)",
        "def greet(n): print('Hi,', n)",
    ),
    "captured print through sys.stdout": (
        "import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\ncount(2)\ntext, sys.stdout = sys.stdout.getvalue(), old\nassert text.split() == ['1', '2']",
        "def count(n):\n for i in range(n): print(i + 1)",
        "def count(n):\n for i in range(n): print(i)",
    ),
    "generator as a result": (
        "it = evens()\nassert next(it) == 0 and list(it) == [2, 4]",
        "def evens(): yield from (0, 2, 4)",
        "def evens(): return [0, 2, 4]",
    ),
    "range as a result": (
        "assert f(3) == range(3)",
        "def f(n): return range(n)",
        "def f(n): return list(range(n))",
    ),
    "object of the program's own class": (
        "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and s.size == 1",
        "class Stack:\n def __init__(self): self.x = []\n def push(self, v): self.x.append(v)\n"
        " def pop(self): return self.x.pop()\n @property\n def size(self): return len(self.x)",
        "class Stack:\n def __init__(self): self.x = []\n def push(self, v): self.x.append(v)\n"
        " def pop(self): return self.x.pop(0)\n @property\n def size(self): return len(self.x)",
    ),
    "objects passed back to the program": (
        "pairs = [Pair(5, 24), Pair(1, 2)]\nassert longest(pairs) == 19",
        "class Pair:\n def __init__(self, a, b): self.a, self.b = a, b\ndef longest(ps): return max(p.b - p.a for p in ps)",
        "class Pair:\n def __init__(self, a, b): self.a, self.b = a, b\ndef longest(ps): return min(p.b - p.a for p in ps)",
    ),
    "member of the program's own enumeration": (
        "assert color(0) == Color.RED and color(1) != Color.RED",
        "import enum\nclass Color(enum.Enum): RED, BLUE = 0, 1\ndef color(n): return Color(n)",
        "import enum\nclass Color(enum.Enum): RED, BLUE = 0, 1\ndef color(n): return Color.RED",
    ),
    "member of a string enumeration": (
        "assert color() == 'red'",
        "import enum\nclass Color(str, enum.Enum): RED = 'red'\ndef color(): return Color.RED",
        "import enum\nclass Color(str, enum.Enum): RED = 'Color.RED'\ndef color(): return Color.RED",
    ),
    "subclass with its own conversions": (
        "assert f() == 3",
        "class N(int): pass\ndef f(): return N(3)",
        "class N(int):\n def __int__(self): return 3\n def __index__(self): return 3\ndef f(): return N(4)",
    ),
    "assertions of unittest": (
        "import unittest\nt = unittest.TestCase()\nt.assertEqual(f(1), 2)\nt.assertRaises(ValueError, f, None)",
        "def f(x):\n if x is None: raise ValueError\n return x + 1",
        "def f(x): return x + 1",
    ),
    "pytest.raises": (
        "import pytest\nwith pytest.raises(ValueError, match='empty'):\n    head([])\nassert head([1]) == 1",
        "def head(x):\n if not x: raise ValueError('empty list')\n return x[0]",
        "def head(x): return x[0]",
    ),
    "keyword arguments": (
        "assert f(b=2, a=1) == 1",
        "def f(a, b): return b - a",
        "def f(a, b): return a - b",
    ),
    "name that the tests define later": (
        "value = f(2)\nf2 = f\ndef g(x): return f2(x)\nassert g(3) == 9 and value == 4",
        "def f(x): return x * x",
        "def f(x): return x + x",
    ),
}


@pytest.fixture(scope="module")
def verifier():
    return CodeVerifier(LIMITS)


@pytest.mark.parametrize("name", CASES)
def test_programs_are_judged_correctly_by_honest_tests(verifier, name):
    test, right, wrong = CASES[name]
    judgement = verifier.judge(right, {"test": test})
    assert judgement.passed, judgement.detail
    for program in (wrong, ""):
        assert not verifier.judge(program, {"test": test}).passed


def test_the_table_contains_at_least_forty_cases():
    assert len(CASES) >= 40


@pytest.mark.parametrize(
    ("tests", "prelude"),
    [
        ({"test": "assert sum([1, 2]) == 3"}, ""),
        ({"test": "def check(f): assert f([1, 2]) == 3", "entry_point": "sum"}, ""),
        ({"fn_name": "sum", "inputs": [[[1, 2]]], "outputs": [3]}, ""),
        ({"fn_name": "sum", "inputs": [[[1, 2]]], "outputs": [3]}, "from builtins import *"),
        ({"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, "from math import *"),
        ({"test": "assert gcd(4, 6) == 2", "setup": ""}, "from math import gcd"),
    ],
)
def test_builtins_and_prelude_functions_do_not_count_as_defined_by_the_program(
    verifier, tests, prelude
):
    judgement = verifier.judge("", {**tests, "prelude": prelude})
    assert (
        judgement.verdicts == ("error",) and "the program defines no function" in judgement.detail
    )


def test_functions_imported_by_the_program_count_as_defined_by_the_program(verifier):
    tests = {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2], "prelude": "from math import *"}
    assert verifier.judge("from math import gcd", tests).passed


def test_tests_that_name_only_builtins_must_specify_the_entry_point(verifier):
    tests = {"test": "assert abs(sum([1, 2]) - 3) < 1e-6"}
    program = "def sum(x): return x[0] + x[1]"
    judgement = verifier.judge(program, tests)
    assert (
        judgement.detail
        == "in the tests: ValueError: the tests call abs, sum; set 'entry_point' to the one that the program defines"
    )
    assert verifier.judge(program, {**tests, "entry_point": "sum"}).passed
    forged = "def sum(x): return 99\ndef abs(x): return 0"
    assert verifier.judge(forged, {**tests, "entry_point": "sum"}).verdicts == ("wrong",)


def test_mbpp_specifies_the_entry_point_if_it_is_a_builtin(tmp_path):
    row = '{"text": "Sum of common divisors.", "code": "def sum(a, b):\\n  return 6", "test_list": ["assert sum(10, 15) == 6"]}'
    (tmp_path / "rows.jsonl").write_text(row)
    (problem,) = load_dataset_task(
        "mbpp", {"code": partial(verify_code, limits=LIMITS)}, path=tmp_path / "rows.jsonl"
    )
    assert problem.verify.keywords["answer"]["entry_point"] == "sum"
    assert problem.verify(problem.solution) == 1.0 and problem.verify("```python\n\n```") == 0.0


HOSTILE = {
    "reads the tests' globals through a function": "def apply(f, xs): return f.__globals__",
    "asks for a private attribute": (
        "import gc\ndef apply(f, xs):\n"
        " return f._exchange.ask({'attribute': [0, '__globals__']}).get('EXPECTED')"
    ),
    "asks for a function that the tests do not have": "def apply(f, xs): return f._exchange.ask({'call': 'check', 'args': [], 'kwargs': {'dict': []}})",
    "calls a function by a number that it was not given": "def apply(f, xs): return f._exchange.call(7, (), {})",
    "sends a verdict instead of an answer": "def apply(f, xs): return f._exchange.ask({'verdict': 'pass', 'detail': ''})",
    "raises the tests' own exception": "def apply(f, xs): raise AssertionError('pass')",
    "calls something that is not a function": (
        "def apply(f, xs): f._exchange._channel.send({'value': {'named': ['builtins', 'NotImplemented']}})"
    ),
    "reports a change to an object that it was not given": (
        "def apply(f, xs):\n"
        " f._exchange._channel.send({'value': [2, 3], 'changed': [['nothing', 1]]})\n"
    ),
    "calls a module's function that is not shared": (
        "def apply(f, xs): f._exchange._channel.send({'value': {'named': ['os', 'getcwd']}})"
    ),
    "calls something that a shared module imported": (
        "def apply(f, xs): f._exchange._channel.send({'value': {'named': ['collections', '_sys.exit']}})"
    ),
    "returns an object that equals everything": "class E:\n def __eq__(s, o): return True\ndef apply(f, xs): return E()",
    "calls back endlessly": "def apply(f, xs):\n while True: f(1)",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_callbacks_cannot_force_a_pass(verifier, name):
    tests = {"test": "EXPECTED = [3, 4]\nassert apply(lambda x: x + 1, [2, 3]) == EXPECTED"}
    limited = CodeVerifier(Limits(cpu_s=1, wall_s=1.0, program_s=3)) if "end" in name else verifier
    judgement = limited.judge(HOSTILE[name], tests)
    assert judgement.verdicts[0] in ("wrong", "error", "timeout"), judgement


class Mutate(ast.NodeTransformer):
    """An AST transformer that changes the n-th comparison, operator, constant or result of a
    program.
    """

    SWAPS: ClassVar = {
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Add,
        ast.And: ast.Or,
        ast.Or: ast.And,
    }

    def __init__(self, place: int) -> None:
        self.left, self.done = place, False

    def _here(self) -> bool:
        self.left -= 1
        self.done |= self.left == -1
        return self.left == -1

    def visit_Compare(self, node):
        if type(node.ops[0]) in self.SWAPS and self._here():
            node.ops[0] = self.SWAPS[type(node.ops[0])]()
        return self.generic_visit(node)

    def visit_BinOp(self, node):
        if type(node.op) in self.SWAPS and self._here():
            node.op = self.SWAPS[type(node.op)]()
        return self.generic_visit(node)

    visit_BoolOp = visit_BinOp

    def visit_Constant(self, node):
        if type(node.value) is int and self._here():
            node.value += 1
        return node

    def visit_Return(self, node):
        nothing = node.value is None or (
            isinstance(node.value, ast.Constant) and node.value.value is None
        )
        if not nothing and self._here():
            node.value = ast.Constant(None)
        return self.generic_visit(node)


def mutants(code):
    for place in range(40):
        change = Mutate(place)
        mutant = ast.unparse(change.visit(ast.parse(code)))
        if not change.done:
            return
        yield mutant


# A mutant may loop forever. Its processor time is limited, because a busy machine doesn't use it up.
PYTHON = ["sh", "-c", 'ulimit -t 5; exec "$@"', "sh", sys.executable, "-c"]


def natively(code, tests):
    """Return whether the tests pass in a single, unisolated process. Isolated verdicts must agree
    with this.
    """
    if "inputs" in tests:
        return all(
            _output(code, tests, *pair)
            for pair in zip(tests["inputs"], tests["outputs"], strict=True)
        )
    call = (
        f"check({tests['entry_point']})"
        if tests.get("entry_point") and "def check" in tests["test"]
        else ""
    )
    script = "\n".join(
        [tests.get("setup") or "", tests.get("prelude") or "", code, tests["test"], call]
    )
    return not subprocess.run([*PYTHON, script], capture_output=True, timeout=300).returncode


def _output(code, tests, given, expected):
    script = f"{tests.get('prelude') or ''}\n{code}\n"
    if name := tests.get("fn_name"):
        script += f"\nimport json\nprint(json.dumps({name}(*json.loads(input()))))"
        given = json.dumps(given)
    run = subprocess.run(
        [*PYTHON, script], capture_output=True, timeout=300, input=given, text=True
    )
    if run.returncode:
        return False
    return (
        same_value(json.loads(run.stdout), expected) if name else same_output(run.stdout, expected)
    )


@pytest.mark.parametrize(
    ("name", "number", "not_told"),
    [
        ("humaneval", 19, ["if distance <= threshold:", "beginning_of_suffix += 2"]),
        ("humaneval+", 5, ["if distance <= threshold:"]),
        ("mbpp", 9, []),
        ("mbpp+", 1, []),
        ("taco", 8, []),
    ],
)
def test_mutants_are_judged_as_in_a_single_process(verifier, name, number, not_told):
    """Every mutant must fail, unless it also passes in a single process because the tests cannot
    detect it.
    """
    path = DATA / f"{name.replace('+', '_plus')}.jsonl"
    pairs = []
    for problem in load_dataset_task(name, {"code": verify_code}, path=path):
        code, tests = (
            problem.solution.partition("\n")[2].rpartition("```")[0],
            problem.verify.keywords["answer"],
        )
        assert verifier.judge(code, tests).passed and natively(code, tests), problem.id
        pairs += [(mutant, tests) for mutant in mutants(code)]
    with ThreadPoolExecutor(2) as pool:
        ours = list(pool.map(lambda pair: verifier.judge(*pair).passed, pairs))
        theirs = list(pool.map(lambda pair: natively(*pair), pairs))
    assert ours == theirs and len(ours) == number
    passed = [mutant for (mutant, _), verdict in zip(pairs, ours, strict=True) if verdict]
    assert len(passed) == len(not_told) and all(map(str.__contains__, passed, not_told)), passed
    assert ours.count(False) > 0.6 * len(ours), f"{name}: {ours.count(False)} of {len(ours)}"


def test_correct_programs_also_pass_in_a_single_process(verifier):
    """The correct programs above must also pass in a single process, which shows that their tests
    are honest.
    """
    with ThreadPoolExecutor(2) as pool:
        rights = list(pool.map(lambda case: natively(case[1], {"test": case[0]}), CASES.values()))
    assert [name for name, right in zip(CASES, rights, strict=True) if not right] == []
