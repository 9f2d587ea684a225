"""Test position bins against hand calculations."""

import pytest

from sparrow.mismatch import split_by_bin


def test_tokens_are_split_by_bin():
    found = split_by_bin([2000, 0, 4000, 1999, 3999])
    assert [(index, tokens.tolist()) for index, tokens in found] == [
        (0, [1, 3]),
        (1, [0, 4]),
        (2, [2]),
    ]
    assert [index for index, _ in split_by_bin([9, 20, 0], bin_tokens=10)] == [0, 2]
    assert split_by_bin([]) == []


@pytest.mark.parametrize(
    ("position", "bin_tokens", "message"),
    [
        ([-1, 3], 10, "lowest position is -1"),
        ([0.5], 10, "dtype float64"),
        ([0], 0, "bin_tokens is 0"),
    ],
)
def test_splitting_by_bin_rejects_invalid_input(position, bin_tokens, message):
    with pytest.raises(ValueError, match=message):
        split_by_bin(position, bin_tokens)
