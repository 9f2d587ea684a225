"""Test that lists stored as arrays have the same contents as vLLM's own lists, but take a tenth of
the memory.
"""

import tracemalloc
from dataclasses import fields

import numpy as np
import pytest

pytest.importorskip("vllm.version")

from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from sparrow.vllm import patches

STEPS = (1, 3, 2)  # tokens that arrive in one step, as with speculative decoding


def processor(num_logprobs: int) -> LogprobsProcessor:
    return LogprobsProcessor(None, FlatLogprobs(), None, 0.0, num_logprobs, None)


def steps(width: int, counts=STEPS):
    rng = np.random.default_rng(0)
    for count in counts:
        ids = rng.integers(300, 150_000, (count, width)).astype(np.int32)
        logprobs = rng.standard_normal((count, width)).astype(np.float32)
        yield LogprobsLists(ids, logprobs, rng.integers(1, 5000, count))


@pytest.fixture
def update(monkeypatch):
    """Return vLLM's own method and its replacement."""
    (patch,) = patches.LISTS
    owner, name, stock = patch.find()
    monkeypatch.setattr(owner, name, getattr(stock, "__wrapped__", stock))
    stock = getattr(owner, name)
    return stock, patch.replace(stock)


@pytest.mark.parametrize(("asked", "width"), [(4, 5), (4, 8), (0, 1), (-1, 6)])
def test_compact_lists_have_the_same_contents_as_stock_lists(update, asked, width):
    stock, ours = (processor(asked) for _ in update)
    for each in steps(width):
        update[0](stock, each)
        update[1](ours, each)
    assert len(ours.logprobs) == sum(STEPS)
    for field in fields(FlatLogprobs):
        assert list(getattr(ours.logprobs, field.name)) == getattr(stock.logprobs, field.name), (
            field.name
        )
    assert list(ours.logprobs) == list(stock.logprobs) and ours.logprobs[2] == stock.logprobs[2]
    for part in (slice(-2, None), slice(1, 3), slice(6, None)):
        assert list(ours.logprobs[part]) == list(stock.logprobs[part])
    assert ours.cumulative_logprob == pytest.approx(stock.cumulative_logprob)


def test_lists_with_decoded_text_are_not_compacted(update):
    class Tokenizer:
        def decode(self, ids):
            return "a"

        def convert_ids_to_tokens(self, ids, skip_special_tokens=False):
            return ["a"] * len(ids)

    text, plain = processor(2), LogprobsProcessor(None, [], None, 0.0, 2, None)
    text.tokenizer = Tokenizer()
    (only,) = steps(3, counts=[1])
    update[1](text, only)
    update[1](plain, only)
    assert text.logprobs.decoded_tokens == ["a", "a", "a"] and type(text.logprobs) is FlatLogprobs
    assert len(plain.logprobs) == 1 and set(plain.logprobs[0]) == set(
        only.logprob_token_ids[0].tolist()
    )


def test_compact_lists_use_a_tenth_of_the_memory(update):
    taken = []
    for each in update:
        held = processor(20)
        tracemalloc.start()
        for step in steps(21, counts=[1] * 500):
            each(held, step)
        taken.append(tracemalloc.get_traced_memory()[0] / 500)
        tracemalloc.stop()
    assert taken[1] < taken[0] / 8 < 250, taken
