# ruff: noqa: E501  (each program is on one line)
"""Test objects that are passed between the tests and the program. Honest objects are judged as in a
single process, and the program's objects never decide a comparison. An object that cannot be passed
results in the verdict error, not wrong.
"""

import json

import pytest

from sparrow.rewards import CodeVerifier, Limits
from sparrow.tasks.formats import FORMATS

NODE = "class Node:\n def __init__(self, val, next=None): self.val, self.next = val, next\n"
TREE = "class Tree:\n def __init__(self, val, left=None, right=None): self.val, self.left, self.right = val, left, right\n"
VECTOR = "class V:\n def __init__(self, x): self.x = x\n def __add__(self, o): return V(self.x + o.x)\n def __len__(self): return 3\n def __getitem__(self, i): return [self.x, 2, 3][i]\n"

# name -> test code, a correct program, and a wrong program
HONEST = {
    "named tuple": (
        "assert f() == (1, 2) and f().x == 1 and f()[1] == 2 and isinstance(f(), tuple) and len(f()) == 2",
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 3)",
    ),
    "NamedTuple in a list": (
        "assert f() == [(1, 'a')] and f()[0].name == 'a' and sorted(f()) == f()",
        "from typing import NamedTuple\nclass P(NamedTuple):\n x: int\n name: str\ndef f(): return [P(1, 'a')]",
        "from typing import NamedTuple\nclass P(NamedTuple):\n x: int\n name: str\ndef f(): return [P(1, 'b')]",
    ),
    "named tuple created by the test": (
        "p = P(3, 4)\nassert norm(p) == 5 and p._fields if hasattr(p, '_fields') else norm(p) == 5 and isinstance(p, P)",
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef norm(p): return (p.x ** 2 + p.y ** 2) ** 0.5",
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef norm(p): return p.x + p.y",
    ),
    "named tuple of the standard library": (
        "assert f('http://a/b').netloc == 'a'",
        "from urllib.parse import urlparse\ndef f(u): return urlparse(u)",
        "def f(u): return u",
    ),
    "subclass of list": (
        "assert f() == [1, 2] and len(f()) == 2 and f() + [3] == [1, 2, 3] and isinstance(f(), list)",
        "class L(list): pass\ndef f(): return L([1, 2])",
        "class L(list): pass\ndef f(): return L([2, 1])",
    ),
    "subclass of list with methods": (
        "s = Stack()\ns.push(1)\ns.push(2)\nassert s == [1, 2] and len(s) == 2\ns.append(3)\nassert s.top() == 3\nassert total(s) == 6",
        "class Stack(list):\n def push(self, x): self.append(x)\n def top(self): return self[-1]\ndef total(s): return sum(s)",
        "class Stack(list):\n def push(self, x): self.insert(0, x)\n def top(self): return self[-1]\ndef total(s): return sum(s)",
    ),
    "subclass of list changed by a function": (
        "s = L([3, 1, 2])\norder(s)\nassert s == [1, 2, 3]",
        "class L(list): pass\ndef order(s): s.sort()",
        "class L(list): pass\ndef order(s): sorted(s)",
    ),
    "subclass of dict and set": (
        "assert f() == ({'a': 1}, {1, 2}) and f()[0]['a'] == 1 and 'a' in f()[0]",
        "class D(dict): pass\nclass S(set): pass\ndef f(): return D(a=1), S({1, 2})",
        "class D(dict): pass\nclass S(set): pass\ndef f(): return D(a=2), S({1, 2})",
    ),
    "reversing a linked list of the tests' objects": (
        NODE
        + "head = Node(1, Node(2, Node(3)))\nhead = reverse(head)\nout = []\nwhile head:\n out.append(head.val)\n head = head.next\nassert out == [3, 2, 1]",
        "def reverse(head):\n prev = None\n while head:\n  head.next, prev, head = prev, head, head.next\n return prev",
        "def reverse(head): return head",
    ),
    "inverting a tree of the tests' objects in place": (
        TREE
        + "root = Tree(1, Tree(2), Tree(3))\ninvert(root)\nassert root.left.val == 3 and root.right.val == 2",
        "def invert(t):\n if t is None: return\n t.left, t.right = t.right, t.left\n invert(t.left); invert(t.right)",
        "def invert(t): return t",
    ),
    "children in a list attribute of the tests' objects": (
        "class N:\n def __init__(self, *c): self.c = list(c)\nroot = N(N(), N(N()))\nn = root.c\nflip(root)\nassert len(root.c[0].c) == 1 and root.c is n",
        "def flip(n):\n n.c.reverse()\n for m in n.c: flip(m)",
        "def flip(n): n.c[:1]",
    ),
    "deleting an attribute": (
        "class N: pass\nn = N()\nn.a = 1\nstrip(n)\nassert not hasattr(n, 'a')",
        "def strip(n): del n.a",
        "def strip(n): n.a = None",
    ),
    "attributes that the tests set": (
        NODE.replace("class Node", "class Unused")
        + "a, b = Node(1), Node(2)\na.next = b\nassert total(a) == 3",
        NODE + "def total(n): return n.val + (total(n.next) if n.next else 0)",
        NODE + "def total(n): return n.val",
    ),
    "len, index and sum of the program's own objects": (
        "v = V(1) + V(4)\nassert v.x == 5 and len(v) == 3 and v[0] == 5 and v[2] == 3",
        VECTOR,
        VECTOR.replace("self.x + o.x", "self.x"),
    ),
    "setting and deleting items": (
        "m = M()\nm['a'] = 1\nm['b'] = 2\ndel m['a']\nassert len(m) == 1 and m['b'] == 2",
        "class M:\n def __init__(self): self.d = {}\n def __setitem__(self, k, v): self.d[k] = v\n def __getitem__(self, k): return self.d[k]\n def __delitem__(self, k): del self.d[k]\n def __len__(self): return len(self.d)",
        "class M:\n def __init__(self): self.d = {}\n def __setitem__(self, k, v): self.d[k] = 0\n def __getitem__(self, k): return self.d[k]\n def __delitem__(self, k): del self.d[k]\n def __len__(self): return len(self.d)",
    ),
    "rows of the program's own matrix": (
        "m = M()\nm[0][1] = 5\nassert m[0] == [0, 5] and m.sum() == 5",
        "class M:\n def __init__(self): self.r = [[0, 0], [0, 0]]\n def __getitem__(self, i): return self.r[i]\n def sum(self): return sum(map(sum, self.r))",
        "class M:\n def __init__(self): self.r = [[0, 0], [0, 0]]\n def __getitem__(self, i): return self.r[i]\n def sum(self): return 0",
    ),
    "iteration over the program's own object": (
        "b = Bag()\nb.add(2)\nb.add(3)\nassert list(b) == [2, 3] and sum(b) == 5 and len(b) == 2 and 3 in b",
        "class Bag:\n def __init__(self): self.x = []\n def add(self, v): self.x.append(v)\n def __iter__(self): return iter(self.x)\n def __len__(self): return len(self.x)",
        "class Bag:\n def __init__(self): self.x = []\n def add(self, v): self.x = [v]\n def __iter__(self): return iter(self.x)\n def __len__(self): return len(self.x)",
    ),
    "context manager of the program": (
        "with Log('a') as log:\n log.say('b')\nassert log.lines == ['a', 'b', 'end']",
        "class Log:\n def __init__(self, n): self.lines = [n]\n def say(self, x): self.lines.append(x)\n def __enter__(self): return self\n def __exit__(self, *a): self.lines.append('end')",
        "class Log:\n def __init__(self, n): self.lines = [n]\n def say(self, x): self.lines.append(x)\n def __enter__(self): return self\n def __exit__(self, *a): pass",
    ),
    "isinstance with the program's classes": (
        "assert isinstance(make('dog'), Dog) and isinstance(make('dog'), Animal) and not isinstance(make('cat'), Dog) and issubclass(Dog, Animal) and not isinstance(3, Dog)",
        "class Animal: pass\nclass Dog(Animal): pass\nclass Cat(Animal): pass\ndef make(n): return Dog() if n == 'dog' else Cat()",
        "class Animal: pass\nclass Dog(Animal): pass\nclass Cat(Animal): pass\ndef make(n): return Cat()",
    ),
    "str and bool of the program's own objects": (
        "assert str(P(1)) == 'P1' and f'{P(2)}' == 'P2' and repr(P(1)) == '<1>' and not P(0) and P(1) and int(P(3)) == 3 and abs(P(-2)) == 2",
        "class P:\n def __init__(self, x): self.x = x\n def __str__(self): return f'P{self.x}'\n def __repr__(self): return f'<{self.x}>'\n def __bool__(self): return self.x != 0\n def __int__(self): return self.x\n def __abs__(self): return abs(self.x)",
        "class P:\n def __init__(self, x): self.x = x\n def __str__(self): return f'P{self.x}'\n def __repr__(self): return f'<{self.x}>'\n def __int__(self): return self.x\n def __abs__(self): return abs(self.x)",
    ),
    "next on an infinite generator": (
        "g = count()\nassert [next(g) for _ in range(4)] == [0, 1, 2, 3]\nfrom itertools import islice\nassert list(islice(g, 5)) == [4, 5, 6, 7, 8]\nfor x in g:\n if x > 100: break\nassert x == 101",
        "def count():\n n = 0\n while True:\n  yield n\n  n += 1",
        "def count():\n n = 0\n while True:\n  yield n\n  n += 2",
    ),
    "infinite iterator of the tests": (
        "import itertools\nassert first(itertools.count(5), 3) == [5, 6, 7]",
        "def first(it, n): return [next(it) for _ in range(n)]",
        "def first(it, n): return [next(it) for _ in range(n + 1)]",
    ),
    "generator that raises after a few items": (
        "got = []\ntry:\n for x in g(): got.append(x)\n assert False\nexcept ValueError: pass\nassert got == [1, 2, 3]",
        "def g():\n yield from (1, 2, 3)\n raise ValueError",
        "def g():\n yield from (1, 2)\n raise ValueError",
    ),
    "values sent to a generator": (
        "g = echo()\nassert next(g) == 0 and g.send(5) == 10 and g.send(7) == 14",
        "def echo():\n x = yield 0\n while True: x = yield 2 * x",
        "def echo():\n x = yield 0\n while True: x = yield x",
    ),
}


@pytest.fixture(scope="module")
def verifier():
    return CodeVerifier(Limits(cpu_s=2, wall_s=6.0, program_s=60))


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_honest_objects_are_judged_as_in_a_single_process(verifier, name):
    test, right, wrong = HONEST[name]
    exec(f"{right}\n{test}", {"__name__": "here"})
    judgement = verifier.judge(right, {"test": test})
    assert judgement.passed, judgement.detail
    assert not verifier.judge(wrong, {"test": test}).passed
    assert not verifier.judge("", {"test": test}).passed


def test_setup_code_may_use_classes_defined_by_the_program(verifier):
    row = {
        "text": "Height of a tree.",
        "test_setup_code": "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(4)",
        "test_list": ["assert height(root) == 3"],
    }
    tests = FORMATS["mbpp"].read(row).answer
    node = "class Node:\n def __init__(self, data):\n  self.data = data\n  self.left = None\n"
    right = node + "def height(n): return 0 if n is None else 1 + height(n.left)"
    judgement = verifier.judge(right, tests)
    assert judgement.passed, judgement.detail
    assert verifier.judge(right.replace("1 + ", "2 + "), tests).verdicts == ("wrong",)


REFUSED = {
    "equality that the program's class defines": (
        "assert P(1) == P(1)",
        "class P:\n def __init__(self, x): self.x = x\n def __eq__(self, o): return self.x == o.x",
    ),
    "order that the program's class defines": (
        "assert V(1) < V(2)",
        "class V:\n def __init__(self, x): self.x = x\n def __lt__(self, o): return self.x < o.x",
    ),
    "a set of objects that are equal by value": (
        "assert len({P(1), P(1)}) == 1",
        "class P:\n def __init__(self, x): self.x = x\n def __eq__(self, o): return self.x == o.x\n def __hash__(self): return 1",
    ),
    "arithmetic with a number": (
        "assert (V(2) * 3).x == 6",
        "class V:\n def __init__(self, x): self.x = x\n def __mul__(self, k): return V(self.x * k)",
    ),
    "a list whose class has its own equality": (
        "assert f() == [1]",
        "class L(list):\n def __eq__(self, o): return list(self) == list(o)\ndef f(): return L([1])",
    ),
    "a result that cannot be passed": ("assert f() is not None", "def f(): return object()"),
    "an argument that cannot be passed": (
        "assert f(object()) == 1",
        "def f(x): return 1",
    ),
    "a swallowed exception": (
        "with quiet():\n raise ValueError\nassert quiet",
        "class quiet:\n def __enter__(self): return self\n def __exit__(self, *a): return True",
    ),
    "the class of a member of a numeric enumeration": (
        "assert isinstance(f(), C)",
        "import enum\nclass C(enum.IntEnum): A = 1\ndef f(): return C.A",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_objects_that_cannot_be_transferred_cause_an_error_verdict(verifier, name):
    test, program = REFUSED[name]
    exec(f"{program}\n{test}", {"__name__": "here"})
    judgement = verifier.judge(program, {"test": test})
    assert judgement.verdicts == ("error",)
    assert judgement.detail.startswith("cannot be judged: "), judgement


LIES = """
class E:
    def __eq__(s, o): return True
    def __ne__(s, o): return False
    def __lt__(s, o): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __sub__(s, o): return 0
    __rsub__ = __add__ = __radd__ = __mod__ = __xor__ = __floordiv__ = __truediv__ = __sub__
    def __abs__(s): return 0
    def __bool__(s): return True
    def __hash__(s): return hash(12)
    def __len__(s): return 1
    def __iter__(s): return iter(())
    def __instancecheck__(s, o): return True
    def __enter__(s): return s
    def __exit__(s, *a): return True
    __class__ = int
    def __reduce__(s): return (eval, ('1',))
    def __reduce_ex__(s, n): return (int, (12,))
    def __getattr__(s, n): return s
    def __call__(s, *a, **k): return s
"""
LYING_LIST = """
class {name}({base}):
    def __eq__(s, o): return True
    def __ne__(s, o): return False
    def __len__(s): return {length}
    def __iter__(s): return iter(())
    def __contains__(s, o): return True
    def __getitem__(s, i): return [] if isinstance(i, slice) else 12
    def __lt__(s, o): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __hash__(s): return 0
    def __reduce__(s): return (list, ([12],))
"""

NUMBER_TESTS = [
    "assert f(5) == 12",
    "assert not f(5) != 12",
    "assert 12 == f(5)",
    "assert f(5) in (12,)",
    "assert f(5) in {12: 1}",
    "assert 12 in f(5)",
    "assert 12 in [f(5)]",
    "assert abs(f(5) - 12) < 1e-6",
    "assert abs(12 - f(5)) < 1e-6",
    "assert not (f(5) - 12)",
    "assert f(5) % 12 == 0",
    "assert f(5) ^ 12 == 0",
    "assert f(5) >= 12 and f(5) <= 12",
    "assert isinstance(f(5), int) and f(5) == 12",
    "assert (f(5), 1) == (12, 1)",
    "assert [f(5)] == [12]",
    "assert {12: f(5)} == {12: 12}",
    "import math\nassert math.isclose(f(5), 12)",
    "import numpy as np\nassert np.allclose(f(5), 12)",
    "import numpy as np\nassert np.isclose(f(5), 12).all()",
    "import numpy as np\nassert (np.array(f(5)) == 12).all() and np.array(f(5)).size",
    "import numpy as np\nassert np.array_equal([f(5)], [12])",
    "import numpy as np\nnp.testing.assert_allclose(f(5), 12)",
    "import unittest\nunittest.TestCase().assertEqual(f(5), 12)",
    "import unittest\nunittest.TestCase().assertAlmostEqual(f(5), 12)",
    "import unittest\nunittest.TestCase().assertIn(f(5), [12])",
    "import pytest\nassert f(5) == pytest.approx(12)",
    "with f(5) as x:\n assert x == 12",
    "with f(5):\n assert 1 == 2",
    "import unittest\nclass T(unittest.TestCase):\n def test(self): self.assertEqual(f(5), 12)",
    "try:\n assert f(5) == 12\nexcept Exception: raise",
    "import copy\nassert copy.deepcopy(f(5)) == 12",
    "import pickle\nassert pickle.loads(pickle.dumps(f(5))) == 12",
    "assert f(5) == f(5) + 0 == 12",
    "assert f(5).value == 12",
    "assert str(f(5)) == '12'",
]
LIST_TESTS = [
    "assert f([2, 1]) == [1, 2]",
    "assert list(f([2, 1])) == [1, 2]",
    "assert tuple(f([2, 1])) == (1, 2)",
    "out = f([2, 1])\nassert len(out) == 2 and all(a <= b for a, b in zip(out, out[1:])) and out[0] == 1",
    "out = f([2, 1])\nassert len(out) == 2 and all(x == y for x, y in zip(out, [1, 2]))",
    "out = f([2, 1])\nfor x, y in zip(out, [1, 2], strict=True): assert x == y",
    "assert [*f([2, 1])] == [1, 2]",
    "import numpy as np\nassert np.allclose(f([2, 1]), [1, 2])",
    "import numpy as np\nassert np.array_equal(f([2, 1]), [1, 2])",
    "import unittest\nunittest.TestCase().assertListEqual(f([2, 1]), [1, 2])",
    "import unittest\nunittest.TestCase().assertCountEqual(f([2, 1]), [1, 2])",
    "assert sorted(f([2, 1])) == [1, 2]",
    "assert set(f([2, 1])) == {1, 2}",
    "from collections import Counter\nassert Counter(f([2, 1])) == Counter([1, 2])",
]


@pytest.mark.slow
@pytest.mark.parametrize("test", NUMBER_TESTS)
def test_an_object_that_overrides_every_comparison_does_not_equal_a_number(verifier, test):
    programs = [
        LIES + "def f(x): return E()",
        LIES.replace("class E:", "class E(int):").replace("    __class__ = int\n", "")
        + "def f(x): return E(99)",
        LIES.replace("class E:", "class E(tuple):") + "def f(x): return E((99,))",
        LIES + "class f(E):\n def __init__(s, x): pass",
        LIES + "f = E()",
    ]
    for program in programs:
        judgement = verifier.judge(program, {"test": test})
        assert not judgement.passed, (program, judgement)


@pytest.mark.slow
@pytest.mark.parametrize("test", LIST_TESTS)
def test_a_container_that_overrides_comparisons_does_not_equal_a_list(verifier, test):
    for base, content in (("list", "[9]"), ("tuple", "[9]"), ("object", ""), ("dict", "")):
        lying = LYING_LIST.format(name="E", base=base, length=2)
        program = f"{lying}\ndef f(x): return E({content})"
        judgement = verifier.judge(program, {"test": test})
        assert not judgement.passed, (base, judgement)


STEALING = {
    "answers differently every time": (
        "from collections import Counter\nout = f([2, 1])\nprev = 0\nfor x in out:\n assert x >= prev\n prev = x\nassert Counter(out) == Counter([2, 1])",
        "class E:\n n = 0\n def __init__(s, x): s.x = x\n def __iter__(s):\n  s.n += 1\n  return iter([1, 9] if s.n == 1 else s.x)\ndef f(x): return E(x)",
    ),
    "answers an index differently from iteration": (
        "from collections import Counter\nout = f([2, 1])\nassert all(out[i] <= out[i + 1] for i in range(len(out) - 1)) and Counter(out) == Counter([2, 1])",
        "class E:\n def __init__(s, x): s.x = x\n def __iter__(s): return iter(s.x)\n def __len__(s): return len(s.x)\n def __getitem__(s, i): return i\ndef f(x): return E(x)",
    ),
    "answers an index differently every time": (
        "out = f([2, 1])\nassert out[0] <= out[1] and sorted([out[0], out[1]]) == [1, 2]",
        "class E:\n n = 0\n def __init__(s, x): s.x = x\n def __getitem__(s, i):\n  s.n += 1\n  return i if s.n < 3 else s.x[i]\ndef f(x): return E(x)",
    ),
    "is shorter than its reported length": (
        "out = f([2, 1])\nassert len(out) == 2\nfor x, y in zip(out, [1, 2]): assert x == y",
        "class E:\n def __len__(s): return 2\n def __iter__(s): return iter(())\ndef f(x): return E()",
    ),
    "swallows the failure of the tests": (
        "with f() as x:\n assert x.value == 12",
        "class E:\n value = 0\n def __enter__(s): return s\n def __exit__(s, *a): return True\ndef f(): return E()",
    ),
    "raises an exception and swallows it": (
        "with f() as x:\n assert x.get() == 12",
        "class E:\n def get(s): raise ValueError\n def __enter__(s): return s\n def __exit__(s, *a): return True\ndef f(): return E()",
    ),
    "replaces a method of the tests' object": (
        "class N:\n def __init__(self): self.val = 1\n def ok(self): return self.val == 12\nn = N()\nf(n)\nassert n.ok()",
        "def f(n): n.ok = lambda: True",
    ),
    "replaces a method of the tests' class": (
        "class N:\n def ok(self): return False\nf(N)\nassert N().ok()",
        "def f(N): N.ok = lambda self: True",
    ),
    "sets a private attribute of the tests' object": (
        "class N:\n def __init__(self): self._ok = False\nn = N()\nf(n)\nassert n._ok",
        "def f(n): n._ok = True",
    ),
    "changes the class of the tests' object": (
        "class A:\n ok = False\nn = A()\nf(n, type('B', (A,), {'ok': True}))\nassert n.ok",
        "def f(n, B): n.__class__ = B",
    ),
    "sets a global of the tests through a function": (
        "EXPECTED = 12\ndef g(): return EXPECTED\nassert f(g) == EXPECTED and EXPECTED == 12",
        "def f(g):\n g._exchange.ask({'set': [0, '__globals__', 3]})\n return 3",
    ),
    "requests an operation on an object that it was not given": (
        "EXPECTED = [12]\ndef g(): return 1\nassert f(g) == EXPECTED",
        "def f(g): return g._exchange.ask({'operation': ['repr', [{'yours': 'EXPECTED'}]]})",
    ),
    "changes an argument that is not a container": (
        "def g(): return 1\nassert f(g) == 12",
        "def f(g): return g._exchange.ask({'alter': [0, 'content', None, [12]]})",
    ),
    "reads an iterator by a number that it was not given": (
        "SECRET = iter([12])\nassert f(iter([1])) == next(SECRET)",
        "def f(it): return it._exchange.ask({'next': [-1, 5]})[0][0]",
    ),
    "refuses everything": (
        "try:\n f()\n assert False\nexcept Exception: pass",
        "class E: pass\nimport sys\ndef f(): return object()",
    ),
    "should raise but returns an object that cannot be passed": (
        "import pytest\nwith pytest.raises(TypeError): f()",
        "def f(): return object()",
    ),
    "should raise when a number is added but does not": (
        "import pytest\nwith pytest.raises(TypeError): V(1) + 5",
        "class V:\n def __init__(s, x): pass\n def __add__(s, o): return s",
    ),
    "is an iterator that neither ends nor yields anything": (
        "assert list(f()) == [1]",
        "def f():\n class I:\n  def __iter__(s): return s\n  def __next__(s):\n   while True: pass\n return I()",
    ),
    "claims to be the tests' object": (
        "class N:\n def __init__(self, v): self.v = v\nassert f(N(12)) == N",
        "def f(n): return n",
    ),
    "forges a proxy whose value equals everything": (
        "assert f() == [12]",
        "import sys\ndef f():\n r = sys.modules['inside.remote']\n l = r.LikeList([99])\n l._remote, l._known = r.Remote(None, 0), None\n return l",
    ),
    "claims that its copy has another base class": (
        "assert f(len) == 12",
        "def f(g):\n import sys\n e = sys.modules['inside.exchange']\n e.pack = lambda v, o=None: {'like': [0, 'list', [12]]}\n return 99",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEALING)
def test_hostile_objects_cannot_force_a_pass(verifier, name):
    test, program = STEALING[name]
    judgement = verifier.judge(program, {"test": test})
    assert not judgement.passed, judgement


def taco(outputs, starter):
    tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": outputs}
    row = {"question": "?", "input_output": json.dumps(tests), "starter_code": starter}
    return FORMATS["taco"].read(row).answer


@pytest.mark.parametrize(
    ("outputs", "starter", "right", "wrong"),
    [
        (
            [[2], [3]],
            "",
            ["x + 1", "[x + 1]"],
            ["x", "[x]", "[[x + 1]]", "x + 1 if x == 1 else [3]"],
        ),
        ([[2], [3]], "def f(x):\n\t", ["x + 1", "[x + 1]"], ["x", "[x]"]),
        ([[2], [3]], "def f(x: int) -> List[int]:", ["[x + 1]"], ["x + 1"]),
        ([[2], [3]], "class Solution:\n    def f(self, x) -> int:", ["x + 1"], ["[x + 1]"]),
        ([[[2]], [[3]]], "def f(x) -> list[int]:", ["[x + 1]"], ["x + 1", "[[x + 1]]"]),
        ([[2, 2], [3]], "", ["[x + 1] * (3 - x)"], ["x + 1"]),
    ],
)
def test_a_result_in_a_one_element_list_is_unwrapped_if_the_row_allows_it(
    verifier, outputs, starter, right, wrong
):
    tests = taco(outputs, starter)
    for result in right:
        judgement = verifier.judge(f"def f(x): return {result}", tests)
        assert judgement.passed, (result, judgement)
    for result in wrong:
        assert not verifier.judge(f"def f(x): return {result}", tests).passed, result
