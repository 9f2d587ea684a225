"""Test which outputs and values count as equal to the expected ones; ``tests/rewards/test_code.py``
judges whole programs.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.rewards.sandbox.judge import same_output, same_value


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("42\n", "42", True),
        ("42 \n\n", "42\n", True),
        ("1 2\n3", "1 2\n3\n", True),
        ("1  2", "1 2", True),
        ("1\n2", "1 2", False),
        ("1 2", "1\n2", False),
        ("", "0", False),
        ("", "\n", True),
        ("42\n\n7", "42\n7", False),
        ("yes", "YES", False),
        ("042", "42", True),
        ("42.0", "42", True),
        ("42.0000001", "42", False),
        ("10000000000000001", "10000000000000000", False),
        ("0.333", "0.3333", False),
        ("0.3333333", "0.333333333", True),
        ("1e-7", "0.0", True),
        ("1000000.4", "1000000.0", True),
        ("1000002", "1000000.0", False),
        ("nan", "0.5", False),
        ("1e999999999", "1", False),
        ("a 1.50", "a 1.5", True),
        ("b 1.5", "a 1.5", False),
        ("True", "1", False),
        ("-0", "0", True),
        ("1000.0", "1000", True),
        ("-1e-7", "-0.0000001", True),
        ("1.5E3", "1500.0", True),
        ("0.00000000125", "1.25e-09", True),
    ],
)
def test_same_output_distinguishes_equal_and_different_outputs(actual, expected, same):
    assert same_output(actual, expected) is same


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ("11", "0011"),
        ("7", "007"),
        ("0", "00"),
        ("7", "+7"),
        ("1", "01.0"),
        ("100000", "1e5"),
        ("1200000", "12e5"),
        ("8.5", "08.50"),
    ],
)
def test_expected_words_that_are_not_plain_numbers_are_compared_as_text(actual, expected):
    assert not same_output(actual, expected) and same_output(expected, expected)


@pytest.mark.parametrize("actual", ["1e3", "1E3", "10e2", "1000.0e0", "\u0661000", "1_000"])
def test_integers_in_scientific_or_non_ascii_notation_are_rejected(actual):
    assert not same_output(actual, "1000")


@given(st.text())
def test_an_output_equals_itself(text):
    assert same_output(text, text) and same_output(text + "\n", text)


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        (3, 3, True),
        (3, 4, False),
        (3.0, 3, True),
        (3.1, 3, False),
        (3, 3.0, True),
        (True, 1, True),
        ("3", 3, False),
        ((1, 2), [1, 2], True),
        ([1, (2, 3)], [1, [2, 3]], True),
        ([1], [1, 2], False),
        ({1}, [1], False),
        (None, None, True),
        (None, 0, False),
        (True, 1.0000001, False),
        ([[1], 2], [[1], [2]], False),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a"}, {"1": "b"}, False),
        ({1: "a", 2: "b"}, {"1": "a"}, False),
        (float("nan"), 0.5, False),
        ([], {}, False),
        ("", None, False),
        (10**400, 0.5, False),
        ({"a": {1: (2,)}}, {"a": {"1": [2]}}, True),
        ({"a": 1}, ["a"], False),
    ],
)
def test_same_value_distinguishes_equal_and_different_values(actual, expected, same):
    assert same_value(actual, expected) is same
