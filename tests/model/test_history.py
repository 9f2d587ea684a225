"""Test that history guesses the tokens that followed an earlier occurrence of the longest suffix."""

import random

import pytest
import torch

from sparrow.model.history import History, guess


def guessed(*streams, most=2, longest=8, shortest=1):
    """Guess how the first stream continues. The other streams are its siblings."""
    width = max(map(len, streams))
    padded = torch.tensor([[[*s, *[99] * (width - len(s))] for s in streams]])
    return guess(padded, torch.tensor([list(map(len, streams))]), most, longest, shortest)[
        0
    ].tolist()


def test_longest_suffix_takes_precedence_over_a_more_recent_one():
    stream = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    assert guessed(stream) == [4, 9], "1 2 3 has occurred only at the start"
    assert guessed(stream, longest=2) == [5, 1], "2 3 was followed by 5 the last time"


def test_suffix_that_has_not_occurred_yields_no_guess():
    assert guessed([1, 2, 3]) == [0, 0]
    assert guessed([7, 1, 8, 1], shortest=2) == [0, 0], "1 has occurred, but 8 1 has not"
    assert guessed([5]) == [0, 0]


def test_guesses_come_from_the_same_response_before_its_siblings():
    assert guessed([1, 2], [1, 2, 3, 4]) == [3, 4]
    assert guessed([1, 2], [7, 1, 2, 3], [1, 2, 5, 6]) == [3, 0], (
        "the most recent occurrence counts"
    )
    assert guessed([1, 7, 1], [3, 3, 1, 8, 1]) == [7, 1], (
        "its own occurrence takes precedence over a later one"
    )
    assert guessed([3, 1, 2], [1, 2, 6], [9, 3, 1, 2, 5]) == [5, 0], (
        "the longest match has three tokens"
    )


@pytest.mark.parametrize("period", range(1, 8))
def test_text_with_a_short_period_is_continued_past_its_end(period):
    text = [9, *([*range(1, period + 1)] * 20)][: 12 + period]
    expected = [*text, *[0] * 6]
    for i in range(len(text), len(expected)):
        expected[i] = expected[i - period]
    assert guessed(text, most=6) == expected[len(text) :]


def test_guesses_repeat_from_the_match_to_the_end():
    assert guessed([7, 1, 8, 1], most=5) == [8, 1, 8, 1, 8]
    assert guessed([4, 5, 5], most=3) == [5, 5, 5], "the match is one token before the end"
    assert guessed([3, 1, 2], [9, 3, 1, 2, 5], most=3) == [5, 0, 0], "siblings do not repeat"


def by_hand(streams, most, longest, shortest):
    """Look up a suffix one token at a time."""
    own = streams[0]
    best, found = (0, False, -1), []
    for i, stream in enumerate(streams):
        for place in range(1, len(stream)):
            agreeing = 0
            while (
                agreeing < min(longest, place, len(own))
                and stream[place - 1 - agreeing] == own[len(own) - 1 - agreeing]
            ):
                agreeing += 1
            if agreeing >= shortest and (agreeing, i == 0, place) > best:
                following = stream[place:] * (most if i == 0 else 1)
                best = (agreeing, i == 0, place)
                found = following[:most]
    return [*found, *[0] * (most - len(found))]


@pytest.mark.parametrize(("longest", "shortest"), [(8, 1), (3, 2), (1, 1), (4, 3)])
def test_guesses_in_random_streams_match_a_naive_search(longest, shortest):
    generator = random.Random(longest)
    for _ in range(100):
        streams = [
            [generator.randrange(1, 4) for _ in range(generator.randrange(1, 20))]
            for _ in range(generator.randrange(1, 4))
        ]
        expected = by_hand(streams, 3, longest, shortest)
        found = guessed(*streams, most=3, longest=longest, shortest=shortest)
        assert found == expected, streams


def test_history_rows_can_grow_and_shrink():
    history = History([[1, 2, 3], [1, 2], [4, 1, 2]], ["a", "a", "b"], 4, 2, torch.device("cpu"))
    rows = torch.tensor([1, 2])
    assert history.guesses(rows, history.length_B).tolist() == [[3, 0], [0, 0]], (
        "the third response belongs to another group"
    )
    history.extend(rows, torch.tensor([[5, 6], [1, 9]]), torch.tensor([2, 1]))
    assert history.length_B.tolist() == [3, 4, 4]
    assert history.guesses(torch.tensor([2, 0]), history.length_B).tolist() == [[2, 1], [0, 0]]
    history.forget(rows, torch.tensor([1, 1]))
    history.extend(torch.tensor([0]), torch.tensor([[1, 2]]), torch.tensor([2]))
    assert history.guesses(torch.tensor([0]), history.length_B).tolist() == [[3, 1]], (
        "its own tokens take precedence"
    )
    assert history.guesses(torch.tensor([1]), history.length_B).tolist() == [[0, 0]], (
        "5 is new, and 6 has been removed"
    )


def test_guesses_ignore_what_other_sequences_have_not_committed():
    history = History([[1, 2], [1, 2]], ["a", "a"], 4, 2, torch.device("cpu"))
    committed = history.length_B.clone()
    rows = torch.tensor([0, 1])
    history.extend(rows, torch.tensor([[7, 1, 2], [8, 1, 2]]), torch.tensor([3, 3]))
    assert history.guesses(rows, committed).tolist() == [[7, 1], [8, 1]], "its own drafts do count"
    history.extend(rows[:1], torch.tensor([[8]]), torch.tensor([1]))
    assert history.guesses(rows[:1], committed).tolist() == [[0, 0]]
    assert history.guesses(rows[:1], history.length_B).tolist() == [[1, 2]]
