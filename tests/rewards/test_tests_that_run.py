# ruff: noqa: E501  (each program is on one line)
"""Test that a program passes only if a test has called it. Test functions that are never called are
run, and a test that executes nothing does not pass.
"""

import json

import pytest

from sparrow.errors import ConfigError
from sparrow.rewards import CodeVerifier, Limits
from sparrow.tasks.dataset import DatasetTask
from sparrow.tasks.formats import FORMATS

RIGHT = "def add(a, b): return a + b"
WRONG = "def add(a, b): return a - b"
PROMPT = 'def add(a, b):\n """The sum."""\n'
PROSE = "The answer is to add the two numbers."

NOTHING = {
    "empty": "",
    "a comment": "# assert add(1, 2) == 3",
    "a docstring": '"""assert add(1, 2) == 3"""',
    "only imports": "import math\nfrom typing import List",
    "a check that nobody can call": "def check(candidate):\n assert candidate(1, 2) == 3",
    "a helper that is never called": "def verify_it():\n assert add(1, 2) == 3",
    "a test case without tests": "import unittest\nclass T(unittest.TestCase):\n def setUp(self): self.x = add(1, 2)",
    "asserts of constants": "assert 1 + 1 == 2",
}

WAITING = {
    "a test function": "def test_add():\n assert add(1, 2) == 3",
    "a test function with a docstring": "def test_add():\n 'adds'\n assert add(1, 2) == 3",
    "an asynchronous test function": "async def test_add():\n assert add(1, 2) == 3",
    "a test case": "import unittest\nclass TestAdd(unittest.TestCase):\n def test_add(self): self.assertEqual(add(1, 2), 3)",
    "a test case with sub-tests": "import unittest\nclass TestAdd(unittest.TestCase):\n def test_add(self):\n  for n in (0, 2):\n   with self.subTest(n=n): self.assertEqual(add(1, n), 1 + n)",
    "a test case with a fixture": "from unittest import TestCase\nclass Add(TestCase):\n @classmethod\n def setUpClass(cls): cls.two = 2\n def setUp(self): self.three = 3\n def test_add(self): self.assertEqual(add(1, self.two), self.three)",
    "unittest's main": "import unittest\nclass T(unittest.TestCase):\n def test_add(self): assert add(1, 2) == 3\nif __name__ == '__main__':\n unittest.main()",
    "pytest's main": "import pytest, sys\ndef test_add(): assert add(1, 2) == 3\nif __name__ == '__main__':\n sys.exit(pytest.main([__file__]) if '__file__' in globals() else pytest.main())",
    "a runner whose result nobody looks at": "import unittest, io\nclass T(unittest.TestCase):\n def test_add(self): self.assertEqual(add(1, 2), 3)\nunittest.TextTestRunner(io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
    "asserts of the main module": "if __name__ == '__main__':\n assert add(1, 2) == 3",
    "pytest's classes": "class TestAdd:\n def setup_method(self): self.two = 2\n def test_add(self): assert add(1, self.two) == 3",
    "the second of two tests": "def test_one(): assert add(0, 0) == 0\ndef test_two(): assert add(1, 2) == 3",
    "a test that the file calls itself": "def test_add(a, b, c):\n assert add(a, b) == c\ntest_add(1, 2, 3)",
}


@pytest.fixture(scope="module")
def verifier():
    return CodeVerifier(Limits(cpu_s=2, wall_s=6.0, program_s=60))


@pytest.mark.parametrize("name", NOTHING)
def test_tests_that_execute_nothing_do_not_pass(verifier, name):
    for program in (RIGHT, PROSE):
        judgement = verifier.judge(program, {"test": NOTHING[name]})
        assert judgement.verdicts == ("error",), judgement
    assert "no test has called the program" in verifier.judge(RIGHT, {"test": NOTHING[name]}).detail


def test_a_test_that_ignores_its_candidate_does_not_pass(verifier):
    tests = {"test": "def check(candidate): assert True", "entry_point": "add"}
    assert verifier.judge(RIGHT, tests).verdicts == ("error",)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITING)
def test_uncalled_test_functions_are_run(verifier, name):
    judgement = verifier.judge(RIGHT, {"test": WAITING[name]})
    assert judgement.passed, judgement.detail
    assert verifier.judge(WRONG, {"test": WAITING[name]}).verdicts == ("wrong",)
    assert verifier.judge(PROSE, {"test": WAITING[name]}).verdicts == ("error",)


def test_a_test_is_run_only_once(verifier):
    """A second run would see the changes that the first one made to the program."""
    test = "def test_count():\n assert count() == 1\ntest_count()"
    assert verifier.judge(
        "N = []\ndef count():\n N.append(0)\n return len(N)", {"test": test}
    ).passed


def test_a_unittest_row_in_humaneval_format_is_run(verifier):
    row = {"prompt": PROMPT, "entry_point": "add", "test": WAITING["unittest's main"]}
    question = FORMATS["humaneval"].read(row)
    assert verifier.judge(RIGHT, question.answer).passed
    for program in (WRONG, PROSE):
        assert not verifier.judge(program, question.answer).passed


def test_tests_that_require_pytest_fixtures_result_in_an_error_verdict(verifier):
    judgement = verifier.judge(RIGHT, {"test": "def test_add(tmp_path): assert add(1, 2) == 3"})
    assert judgement.verdicts == ("error",)
    assert (
        "nothing calls test_add, and only pytest could supply its arguments (tmp_path)"
        in judgement.detail
    )


@pytest.mark.parametrize("program", [PROSE, "raise ValueError('no')", "def f(x: return"])
def test_a_program_that_cannot_be_loaded_fails_tests_that_expect_an_exception(verifier, program):
    tests = (
        "import pytest\nwith pytest.raises((ValueError, SyntaxError)): f(-1)",
        "try:\n f(-1)\nexcept Exception: pass",
    )
    for test in tests:
        assert not verifier.judge(program, {"test": test}).passed


@pytest.mark.parametrize(
    "assertion",
    [
        "np.allclose(f(), 2.5)",
        "np.allclose(2.5, f())",
        "np.allclose(a=f(), b=2.5)",
        "np.isclose(f(), 2.5).all()",
        "np.array_equiv(f(), 2.5)",
        "np.testing.assert_allclose(f(), 2.5) is None",
        "np.testing.assert_array_equal(f(), 2.5) is None",
        "np.testing.assert_array_almost_equal(f(), 2.5) is None",
        "np.testing.assert_array_less(f(), 2.6) is None",
        "np.testing.assert_equal(f(), np.array(2.5)) is None",
    ],
)
def test_an_empty_result_is_not_close_to_a_number(verifier, assertion):
    test = f"import numpy as np\nassert {assertion}"
    for empty in ("[]", "()", "[[]]", "__import__('numpy').zeros(0)"):
        judgement = verifier.judge(f"def f(): return {empty}", {"test": test})
        assert judgement.verdicts == ("wrong",), (empty, judgement)
    assert verifier.judge("def f(): return 2.5", {"test": test}).passed


def test_an_empty_result_is_close_to_an_empty_result(verifier):
    test = "import numpy as np\nassert np.allclose(f(), []) and np.isclose(f(), []).size == 0"
    assert verifier.judge("def f(): return []", {"test": test}).passed
    assert not verifier.judge("def f(): return [1.0]", {"test": test}).passed


@pytest.mark.parametrize(
    ("format", "test"),
    [
        *(("mbpp", test) for test in [*list(NOTHING.values())[1:-1], "assert add(1,"]),
        *(("humaneval", test) for test in [*list(NOTHING.values())[1:4], "assert add(1,"]),
        ("humaneval", NOTHING["a test case without tests"]),
    ],
)
def test_loading_a_row_whose_tests_execute_nothing_raises_an_error(format, test):
    row = {"text": "Add.", "test_list": ["assert add(1, 2) == 3"], "code": RIGHT, "test": test}
    if format == "humaneval":
        row |= {"prompt": PROMPT, "entry_point": "add"}
    with pytest.raises(ConfigError, match="row 1 of the dataset cannot be used: its tests"):
        DatasetTask(format, [row], FORMATS[format], {"code": lambda response, answer: 0.0})


def test_loading_an_empty_humaneval_test_raises_an_error():
    row = {"prompt": PROMPT, "entry_point": "add", "test": " \n"}
    with pytest.raises(ConfigError, match="row 1 of the dataset has no test"):
        DatasetTask("h", [row], FORMATS["humaneval"], {"code": lambda response, answer: 0.0})


def test_an_mbpp_check_receives_the_entry_point_of_its_row(verifier):
    row = {"text": "Add.", "test_list": ["assert add(1, 2) == 3"], "entry_point": "add"}
    row["test"] = NOTHING["a check that nobody can call"]
    answer = FORMATS["mbpp"].read(row).answer
    assert verifier.judge(RIGHT, answer).passed and not verifier.judge(WRONG, answer).passed


def test_rows_with_common_kinds_of_tests_are_accepted():
    for test in WAITING.values():
        row = {"text": "Add.", "test_list": ["-"], "test": test}
        assert FORMATS["mbpp"].read(row).answer["test"] == test


def test_answers_can_be_converted_to_json():
    row = {"text": "Add.", "test_list": ["assert add(1, 2) == 3"]}
    assert json.loads(json.dumps(FORMATS["mbpp"].read(row).answer))["test"] == row["test_list"][0]
