"""Test generation with transformers and with compiled models: what counts as prefill or as a decode
step, and which calls raise errors.
"""

import copy

import pytest
import torch
from transformers import CompileConfig, GenerationConfig

from sparrow.errors import ConfigError
from sparrow.model.actor import dense_steps, set_schedule, sparse_calls, teacher_forced
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB, tiny_model

SPARSE = SparsitySchedule(top_k=(0, 1), bin_tokens=48, page_size=4, dense_layers=(0,))
STEPS = 12
LAYERS = 2  # compilers are slow


@pytest.fixture
def model():
    model = tiny_model(num_hidden_layers=LAYERS)
    set_schedule(model, SPARSE)
    return model


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    monkeypatch.delenv(
        "TORCHDYNAMO_DISABLE", raising=False
    )  # vLLM's tests switch compilation off for the whole process
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(*shape, seed=0):
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **options):
    out = model.generate(
        input_ids=ids,
        **{
            "max_new_tokens": STEPS,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
            "return_dict_in_generate": True,
            "output_logits": True,
            **options,
        },
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1).log_softmax(-1)


def forced(model, ids, answers, prompt, schedule=None):
    """Return log-probs ``[B, STEPS, V]`` from one teacher-forced pass."""
    with torch.no_grad(), teacher_forced(model, prompt, schedule):
        out = model(input_ids=torch.cat([ids, answers], 1), use_cache=False).logits
    return out[:, ids.shape[1] - 1 : -1].log_softmax(-1)


# --- prefill in chunks ---


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 11])
def test_chunked_prefill_is_dense_up_to_the_last_prompt_token(model, chunk, cache):
    ids = tokens(2, 43)  # 43 = 6 x 7 + 1 = 14 x 3 + 1
    whole_tokens, whole = generate(model, ids)
    calls = sparse_calls(model)
    found_tokens, found = generate(model, ids, prefill_chunk_size=chunk, cache_implementation=cache)
    assert sparse_calls(model) - calls == (STEPS - 1) * (LAYERS - 1)
    assert torch.equal(found_tokens, whole_tokens)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)
    torch.testing.assert_close(found, forced(model, ids, found_tokens, [43, 43]), rtol=0, atol=1e-4)


def test_single_prompt_token_after_a_cached_prefix_counts_as_prefill(model):
    ids = tokens(1, 43)
    cache = model(input_ids=ids[:, :42], use_cache=True).past_key_values
    answers, found = generate(model, ids, past_key_values=cache)
    torch.testing.assert_close(found, forced(model, ids, answers, [43]), rtol=0, atol=1e-4)


def test_custom_decoding_loop_can_mark_steps_as_prefill(model):
    ids = tokens(1, 43)
    with torch.no_grad():
        dense = model(input_ids=ids).logits[:, -1]
        cache = model(input_ids=ids[:, :42], use_cache=True).past_key_values
        step = model(input_ids=ids[:, 42:], past_key_values=copy.deepcopy(cache)).logits[:, -1]
        with dense_steps(model):
            last = model(input_ids=ids[:, 42:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(last, dense, rtol=0, atol=1e-4)
    assert (step - dense).abs().max() > 0.05, (
        "outside dense_steps, the token must be decoded sparsely"
    )


def test_decoding_stays_sparse_after_a_failed_generation(model):
    def broken(ids, scores):
        raise RuntimeError("stop here")

    ids = tokens(1, 43)
    with pytest.raises(RuntimeError, match="stop here"):
        generate(model, ids, logits_processor=[broken])
    calls = sparse_calls(model)
    cache = model(input_ids=ids[:, :42], use_cache=True).past_key_values
    model(input_ids=ids[:, 42:], past_key_values=cache)
    assert sparse_calls(model) - calls == LAYERS - 1


# --- options that would make decoding dense ---


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens verifies several tokens"),
        ({"assistant_model": "model"}, "assistant_model verifies several tokens"),
        ({"use_cache": False}, "use_cache=False computes the whole sequence"),
        (
            {"generation_config": GenerationConfig(use_cache=False)},
            "use_cache=False computes the whole sequence",
        ),
        (
            {"generation_config": GenerationConfig(prompt_lookup_num_tokens=2)},
            "prompt_lookup_num_tokens verifies",
        ),
    ],
)
def test_generation_options_that_would_mix_dense_and_sparse_steps_raise_an_error(
    model, options, named
):
    options = {
        k: tiny_model(seed=1, num_hidden_layers=LAYERS) if v == "model" else v
        for k, v in options.items()
    }
    ids = tokens(1, 43)
    with pytest.raises(ConfigError, match=f"generate with {named}.*SparsitySchedule.dense"):
        generate(model, ids, **options)
    if config := options.get("generation_config"):
        plain = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
        with pytest.raises(ConfigError, match=named):
            model.generate(ids, config, **plain)
        model.generation_config = config
        with pytest.raises(ConfigError, match=named):
            model.generate(ids, **plain)
        return
    expected, _ = generate(tiny_model(num_hidden_layers=LAYERS), ids)
    set_schedule(model, SparsitySchedule.dense())
    assert torch.equal(generate(model, ids, **options)[0], expected)


def test_pass_over_several_tokens_after_the_prompt_raises_an_error(model, monkeypatch):
    """Without the error, such a pass would silently be dense."""
    prepare = model.prepare_inputs_for_generation

    def last_token_twice(*args, **kwargs):
        inputs = prepare(*args, **kwargs)
        if inputs["input_ids"].shape[1] == 1:
            inputs["input_ids"] = inputs["input_ids"].repeat(1, 2)
            inputs["position_ids"] = inputs["attention_mask"] = None
        return inputs

    monkeypatch.setattr(model, "prepare_inputs_for_generation", last_token_twice)
    with pytest.raises(
        ConfigError,
        match=r"generate computes 2 tokens in one pass after its prompt.*dense\(\) first",
    ):
        generate(model, tokens(1, 43))
    set_schedule(model, SparsitySchedule.dense())
    generate(model, tokens(1, 43))
    monkeypatch.undo()
    set_schedule(model, SPARSE)
    model(
        input_ids=tokens(1, 3),
        past_key_values=model(input_ids=tokens(1, 43), use_cache=True).past_key_values,
    )
    generate(model, tokens(1, 43))


# --- compiled models ---


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
def test_compiled_model_is_sparse_during_teacher_forcing_and_dense_afterwards(model, how):
    ids, answers = tokens(1, 30), tokens(1, STEPS, seed=4)
    expected = forced(model, ids, answers, [30])
    whole = torch.cat([ids, answers], 1)
    with torch.no_grad():
        dense = model(input_ids=whole, use_cache=False).logits
        compiled = model
        if how == "torch.compile":
            compiled = torch.compile(model, backend="eager")
        else:
            model.compile(backend="eager")
        for _ in range(2):
            after = compiled(input_ids=whole, use_cache=False).logits
            torch.testing.assert_close(after, dense, rtol=0, atol=1e-4)
            with teacher_forced(compiled, [30]) as forcing:
                found = compiled(input_ids=whole, use_cache=False).logits[:, 29:-1].log_softmax(-1)
            assert sorted(forcing.layers) == [0, 1]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
            assert (found - dense[:, 29:-1].log_softmax(-1)).abs().max() > 0.05


def test_model_compiled_for_dynamic_shapes_keeps_its_dense_layers_dense(model):
    ids, answers = tokens(1, 30), tokens(1, STEPS, seed=4)
    expected = forced(model, ids, answers, [30])
    none_dense = forced(model, ids, answers, [30], SPARSE.replace(dense_layers=()))
    assert (none_dense - expected).abs().max() > 0.05
    found = forced(torch.compile(model, backend="eager", dynamic=True), ids, answers, [30])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_leaving_a_context_without_a_teacher_forced_pass_raises_an_error(model):
    twin = copy.deepcopy(model)
    with (
        pytest.raises(ConfigError, match=r"no pass through layers \[0, 1\] was teacher-forced"),
        teacher_forced(model, [4]),
    ):
        twin(input_ids=tokens(1, 20))


@pytest.mark.slow
def test_generation_with_a_static_cache_compiles_once_and_counts_every_step(model):
    """The backend only counts graphs, so compilation can also be requested on a CPU."""
    graphs, seen = [], []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    ids = tokens(2, 43)
    expected_tokens, expected = generate(model, ids, cache_implementation="static")
    options = CompileConfig(backend=count, mode=None)
    options._compile_all_devices = True
    for steps in (4, STEPS):
        calls = sparse_calls(model)
        found_tokens, found = generate(
            model, ids, cache_implementation="static", compile_config=options, max_new_tokens=steps
        )
        seen.append(len(graphs))
        assert sparse_calls(model) - calls == (steps - 1) * (LAYERS - 1)
        assert torch.equal(found_tokens, expected_tokens[:, :steps])
        torch.testing.assert_close(found, expected[:, :steps], rtol=0, atol=1e-4)
    assert seen[0] > 0 and seen[1] == seen[0], "later steps must not compile again"
