"""Test rows whose tokens are not contiguous, and masks that are not equivalent to padding. A row
must either give the same results as it does alone without padding, or raise an error. Page selection
is tested elsewhere.
"""

import inspect

import peft
import pytest
import torch
from packaging.version import Version
from peft import PromptTuningConfig, TaskType, get_peft_model
from transformers import StaticCache

from sparrow.errors import ConfigError
from sparrow.model.actor import set_schedule, teacher_forced
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB, tiny_model

SPARSE = SparsitySchedule(top_k=(1, 2), bin_tokens=48, page_size=4, dense_layers=(0,))
TURNS = [(29, 17), (13, 31), (40, 5)]  # tokens in the first and second turn of each row
STEPS = 8


@pytest.fixture
def model():
    model = tiny_model()
    set_schedule(model, SPARSE)
    return model


def tokens(*shape, seed=0):
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def laid(rows, width, side):
    """Return ids and mask ``[B, width]``, with all rows padded on the right or on the left."""
    ids, mask = (
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.zeros(len(rows), width, dtype=torch.long),
    )
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "left" else slice(width - len(row), width)
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def decode(model, ids, mask, answers, static=False):
    """Process ``ids`` in one pass, then decode one step per column of ``answers``. Return log-probs
    ``[B, STEPS, V]``.
    """
    options = {}
    if static:
        options["past_key_values"] = StaticCache(
            config=model.config, max_cache_len=ids.shape[1] + STEPS + 3
        )
    found = []
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **options
        )
        for t in range(STEPS):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            out = model(
                input_ids=answers[:, t : t + 1],
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=out.past_key_values,
                use_cache=True,
            )
            found.append(out.logits[:, -1].log_softmax(-1))
    return torch.stack(found, 1)


def alone(model, rows, answers):
    return torch.cat(
        [
            decode(model, row[None], torch.ones_like(row[None]), answers[i : i + 1])
            for i, row in enumerate(rows)
        ]
    )


def arrangements():
    """Return the same rows padded in several ways, as {name: (rows, ids, mask)}."""
    first = [tokens(a, seed=i) for i, (a, _) in enumerate(TURNS)]
    second = [tokens(b, seed=9 + i) for i, (_, b) in enumerate(TURNS)]
    rows = [torch.cat(turns) for turns in zip(first, second, strict=True)]
    left, right = laid(rows, 50, "right"), laid(rows, 50, "left")
    chat = [
        torch.cat(parts, 1)
        for parts in zip(laid(first, 40, "right"), laid(second, 31, "right"), strict=True)
    ]
    holes = [torch.zeros(len(rows), 101, dtype=torch.long) for _ in range(2)]
    for i, row in enumerate(rows):
        place = (
            torch.randperm(101, generator=torch.Generator().manual_seed(i))[: len(row)]
            .sort()
            .values
        )
        holes[0][i, place], holes[1][i, place] = row, 1
    return {
        "left padding": (rows, *left),
        "right padding": (rows, *right),
        "chat turns": (rows, *chat),
        "holes": (rows, *holes),
    }


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["left padding", "right padding", "chat turns", "holes"])
def test_padded_rows_decode_as_they_would_alone(model, name, static):
    rows, ids, mask = arrangements()[name]
    answers = tokens(len(rows), STEPS, seed=5)
    expected = alone(model, rows, answers)
    set_schedule(model, SparsitySchedule.dense())
    assert (alone(model, rows, answers) - expected).abs().max() > 0.05, (
        "the test needs a schedule that changes the output"
    )
    set_schedule(model, SPARSE)
    torch.testing.assert_close(
        decode(model, ids, mask, answers, static), expected, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("name", ["left padding", "right padding", "chat turns", "holes"])
def test_teacher_forcing_gives_padded_rows_the_same_outputs_and_gradients_as_single_rows(
    model, name
):
    rows, ids, mask = arrangements()[name]
    prompt = [11, 20, 30]
    expected = []
    for row, n in zip(rows, prompt, strict=True):
        with teacher_forced(model, [n]):
            expected.append(model(input_ids=row[None]).logits[0].log_softmax(-1))
    with teacher_forced(model, prompt):
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).logits
    found = [out[i][mask[i].bool()].log_softmax(-1) for i in range(len(rows))]
    gradients = []
    for kind in (expected, found):
        torch.testing.assert_close(torch.cat(kind), torch.cat(expected), rtol=0, atol=1e-4)
        model.zero_grad()
        torch.cat(kind)[:, 7].mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[0].norm()


def test_padding_only_row_does_not_affect_other_rows(model):
    rows, ids, mask = arrangements()["holes"]
    answers = tokens(4, STEPS, seed=5)
    expected = alone(model, rows, answers)
    ids, mask = torch.cat([ids, ids[:1]]), torch.cat([mask, torch.zeros_like(mask[:1])])
    torch.testing.assert_close(decode(model, ids, mask, answers)[:3], expected, rtol=0, atol=1e-4)


def test_rows_with_virtual_tokens_before_padding_decode_as_they_would_alone(model):
    """Virtual tokens precede the padding, so every padded row has a gap. peft counts the gap in its
    positions.
    """
    torch.manual_seed(3)
    rows = [tokens(a, seed=i) for i, (a, _) in enumerate(TURNS)]
    ids, mask = laid(rows, 40, "right")
    peft_model = get_peft_model(
        model, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=6)
    ).eval()
    generated = []
    names_it_cache = "cache" in inspect.signature(type(model).forward).parameters
    if names_it_cache and Version(peft.__version__) <= Version("0.21.2"):
        # This version of peft prepends its virtual tokens in every pass without
        # ``past_key_values``.
        set_schedule(peft_model, SPARSE)
        with pytest.raises(
            ConfigError, match="generate computes 7 tokens in one pass after its prompt"
        ):
            peft_model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=STEPS, pad_token_id=0
            )
        return
    for schedule in (SPARSE, SparsitySchedule.dense()):
        set_schedule(peft_model, schedule)
        out = peft_model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=STEPS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        generated.append((out.sequences[:, -STEPS:], torch.stack(out.logits, 1)))
    (answers, found), (_, dense) = generated
    assert (found - dense).abs().max() > 0.05, "the test needs a schedule that changes the output"
    set_schedule(peft_model, SPARSE)
    virtual = peft_model.get_prompt(batch_size=1)
    for i, row in enumerate(rows):
        hole = 40 - len(row)
        columns = torch.cat([torch.arange(6), torch.arange(6 + hole, 46)])[None]
        with torch.no_grad():
            embedded = torch.cat([virtual, model.get_input_embeddings()(row)[None]], 1)
            out = model(inputs_embeds=embedded, position_ids=columns, use_cache=True)
            expected = [out.logits[0, -1]]
            for t in range(STEPS - 1):
                out = model(
                    input_ids=answers[i : i + 1, t : t + 1],
                    position_ids=torch.tensor([[46 + t]]),
                    past_key_values=out.past_key_values,
                    use_cache=True,
                )
                expected.append(out.logits[0, -1])
        torch.testing.assert_close(found[i], torch.stack(expected), rtol=0, atol=1e-4)


# --- masks ---


def causal(rows):
    """Return the causal mask, bool ``[B, 1, T, T]``, for a 2D mask of real tokens."""
    T = rows.shape[1]
    return (rows.bool()[:, None] & torch.ones(T, T, dtype=torch.bool).tril())[:, None]


def additive(mask, low):
    return torch.zeros(mask.shape).masked_fill(~mask, low)


@pytest.mark.parametrize("low", [float("-inf"), torch.finfo(torch.float32).min])
def test_teacher_forcing_treats_a_four_dimensional_float_mask_as_padding(model, low):
    _, ids, mask = arrangements()["holes"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    seen = causal(mask)
    with torch.no_grad(), teacher_forced(model, [11, 20, 30]):
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        found = model(
            input_ids=ids, attention_mask=additive(seen, low), position_ids=positions
        ).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-4)


def test_decoding_treats_a_four_dimensional_float_mask_as_padding(model):
    _, ids, mask = arrangements()["left padding"]
    with torch.no_grad():
        found = []
        for four in (False, True):
            out = model(
                input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
            )
            step = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            four_mask = additive(step.bool()[:, None, None], torch.finfo(torch.float32).min)
            found.append(
                model(
                    input_ids=ids[:, -1:],
                    attention_mask=four_mask if four else step,
                    position_ids=step.sum(1, keepdim=True) - 1,
                    past_key_values=out.past_key_values,
                ).logits
            )
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)


def test_mask_that_biases_scores_raises_an_error(model):
    ids = tokens(2, 20)
    bias = additive(causal(torch.ones_like(ids)), float("-inf")) + torch.linspace(-1, 0, 20)
    message = r"the attention mask adds a bias to the scores of tokens"
    with pytest.raises(ConfigError, match=message), teacher_forced(model, [4, 4]):
        model(input_ids=ids, attention_mask=bias)
    cache = model(input_ids=ids[:, :19]).past_key_values
    with pytest.raises(ConfigError, match=message):
        model(input_ids=ids[:, 19:], attention_mask=bias[:, :, -1:], past_key_values=cache)


def test_mask_that_differs_between_heads_raises_an_error(model):
    ids = tokens(2, 20)
    mask = causal(torch.ones_like(ids)).repeat(1, 4, 1, 1)
    with (
        pytest.raises(ConfigError, match=r"of shape \(2, 4, 20, 20\) differs between heads"),
        teacher_forced(model, [4, 4]),
    ):
        model(input_ids=ids, attention_mask=mask)


def test_packed_sequences_raise_an_error_with_the_remedy(model):
    ids = tokens(1, 30)
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
    message = (
        r"no packed sequences.*column 12 of row 0 does not attend to exactly.*a row of its own"
    )
    with pytest.raises(ConfigError, match=message), teacher_forced(model, [4]):
        model(input_ids=ids, position_ids=positions, use_cache=False)
    block = torch.block_diag(torch.ones(12, 12), torch.ones(18, 18)).bool().tril()[None, None]
    for mask in (block, additive(block, float("-inf"))):
        with pytest.raises(ConfigError, match=message), teacher_forced(model, [4]):
            model(input_ids=ids, position_ids=positions, attention_mask=mask)
    # Dense training still accepts packed sequences.
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    parts = [model(input_ids=part).logits for part in ids.split([12, 18], 1)]
    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=0, atol=1e-4)


def test_cache_during_teacher_forcing_raises_an_error(model):
    ids = tokens(1, 20)
    cache = model(input_ids=ids[:, :12]).past_key_values
    with (
        pytest.raises(
            ConfigError, match="8 tokens and 20 keys; call the model with use_cache=False"
        ),
        teacher_forced(model, [4]),
    ):
        model(input_ids=ids[:, 12:], past_key_values=cache)
