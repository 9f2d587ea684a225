"""Test the shapes of models in which some layers have a sliding window: their configs, the bytes
that a step reads, and the sequences that fit in memory.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparrow import SparsitySchedule
from sparrow.cost import (
    MACHINES,
    MEMORY_FRACTION,
    SHAPES,
    Machine,
    ModelShape,
    Overheads,
    cluster,
    decode_step,
    drafters,
    kv_capacity,
    predict,
    response_lengths,
    sequences_held,
    simulate_rollout,
    train_seconds,
)
from sparrow.errors import ConfigError, UnsupportedModel

H200 = MACHINES["h200"]
FREE = Overheads()
FULL = "full_attention"
SLIDING = "sliding_attention"
# Layers 0, 1 and 2 have a window of 100 tokens. A token takes 4 bytes per layer.
TINY = ModelShape("tiny", 4, 2, 1, 1, 1000, window_layers=(0, 1, 2), window=100)
FULL_TINY = ModelShape("full", 4, 2, 1, 1, 1000)
SMALL = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
    sliding_window=32,
)
PUBLISHED = {
    "olmo-3-7b": dict(
        model_type="olmo3",
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=100_278,
        sliding_window=4096,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
    ),
    "olmo-3-32b": dict(
        model_type="olmo3",
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=100_278,
        sliding_window=4096,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
    ),
    "gemma-3-27b": dict(
        model_type="gemma3_text",
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        vocab_size=262_208,
        sliding_window=1024,
        max_position_embeddings=131_072,
    ),
}


def machine(layer_tokens: int) -> Machine:
    """Return a machine that has room for so many tokens of TINY's cache, added up over layers."""
    return Machine("m", 1e4, 1e4, 1e9, (2000 + 4 * layer_tokens + 1) / MEMORY_FRACTION)


def parameters(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


# --- configs ---


@pytest.mark.parametrize("name", PUBLISHED)
def test_built_in_shapes_match_the_published_configs_and_transformers(name):
    sizes = PUBLISHED[name]
    kind = sizes["model_type"]
    config = AutoConfig.for_model(**sizes)
    shape = ModelShape.from_config(config.to_dict())
    assert shape == ModelShape.from_config(sizes)
    assert replace(shape, name=SHAPES[name].name) == SHAPES[name]
    assert shape.weights + shape.embedding == parameters(config)
    windows = [i for i, kind in enumerate(config.layer_types) if kind == SLIDING]
    assert shape.window_layers == tuple(windows)
    assert (shape.embedding == 0) == (kind == "gemma3_text")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["olmo3", "gemma3_text", "cohere2", "qwen2", "qwen3", "mistral"])
def test_parameter_counts_of_models_with_windows_match_transformers(kind, bias):
    sizes = SMALL | dict(layer_types=[SLIDING, FULL, SLIDING, FULL])
    if bias and kind not in ("qwen2", "mistral"):
        sizes["attention_bias"] = True
    if kind == "gemma3_text":
        sizes["head_dim"] = 24
    if kind.startswith("qwen"):
        sizes["use_sliding_window"] = True
    config = AutoConfig.for_model(kind, **sizes)
    plain = config.to_dict() | {"layer_types": sizes["layer_types"]}
    shape = ModelShape.from_config(plain)
    assert shape.weights + shape.embedding == parameters(config)
    assert (shape.window_layers, shape.window, shape.full_layers) == ((0, 2), 32, 2)
    assert shape.is_hybrid


def test_qwen_config_without_layer_types_has_windows_from_max_window_layers_on():
    sizes = SMALL | dict(model_type="qwen2", use_sliding_window=True, max_window_layers=3)
    assert ModelShape.from_config(sizes).window_layers == (3,)
    unused = sizes | dict(max_window_layers=4)
    assert ModelShape.from_config(unused).window == 0


@pytest.mark.parametrize("kind", ["olmo3", "gemma3_text", "cohere2", "qwen3", "mistral"])
def test_windows_in_every_layer_are_refused(kind):
    config = SMALL | dict(model_type=kind, head_dim=16, layer_types=[SLIDING] * 4)
    with pytest.raises(UnsupportedModel, match=r"windows only in some layers .*windowed=True"):
        ModelShape.from_config(config)


def test_windows_are_refused_where_transformers_would_ignore_them():
    config = SMALL | dict(model_type="llama", layer_types=[SLIDING, FULL] * 2)
    with pytest.raises(UnsupportedModel, match="windowed=True"):
        ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [SLIDING, FULL]}, "'layer_types' must be .* for each of 4 layers"),
        ({"layer_types": [SLIDING, FULL, FULL, "chunked_attention"]}, "'layer_types' must be"),
        ({"sliding_window": None}, "'sliding_window' is None"),
        ({"sliding_window": 0}, "'sliding_window' is 0"),
    ],
)
def test_invalid_layer_types_and_windows_raise_an_error(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config(SMALL | {"model_type": "olmo3"} | change)


def test_gemma_config_without_a_head_dim_raises_an_error():
    with pytest.raises(ConfigError, match="no 'head_dim'"):
        ModelShape.from_config(SMALL | {"model_type": "gemma3_text"})


@pytest.mark.parametrize(
    "fields",
    [
        dict(window_layers=(0,)),
        dict(window=100),
        dict(window_layers=(0, 0), window=100),
        dict(window_layers=(4,), window=100),
        dict(window_layers=(0,), window=-1),
    ],
)
def test_shape_with_an_invalid_window_raises_an_error(fields):
    with pytest.raises(ConfigError, match="window_layers of tiny must be different layers"):
        ModelShape("tiny", 4, 2, 1, 1, 1000, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        dict(window_layers=(0, 1, 2, 3), window=100),
        dict(window_layers=(0, 1), window=100, linear_layers=(2, 3)),
        dict(linear_layers=(0, 1, 2, 3)),
    ],
)
def test_shape_without_full_attention_raises_an_error(fields):
    with pytest.raises(ConfigError, match="no layer of tiny has full attention"):
        ModelShape("tiny", 4, 2, 1, 1, 1000, **fields)


# --- steps ---


def test_step_bytes_match_a_hand_calculation():
    """Keep 4 pages of 16. The first sequence is longer than the window, the second is not."""
    dense = decode_step(TINY, H200, [300, 80])
    assert dense.kv_bytes == 4 * ((300 + 80) + 3 * (100 + 80))
    schedule = SparsitySchedule.fixed(1, dense_layers=())
    sparse = decode_step(TINY, H200, [300, 80], schedule)
    assert sparse.kv_bytes == 4 * ((64 + 64) + 3 * (100 + 80))
    assert sparse.landmark_bytes == 2 * (19 + 5)
    assert sparse.weight_bytes == dense.weight_bytes == 2000


def test_dense_layers_of_a_schedule_only_count_if_they_have_full_attention():
    one, two = (SparsitySchedule.fixed(1, dense_layers=layers) for layers in ((0, 1), (0, 3)))
    assert decode_step(TINY, H200, [300], one).kv_bytes == 4 * (64 + 3 * 100)
    assert decode_step(TINY, H200, [300], two) == decode_step(TINY, H200, [300])


def test_sequences_within_the_window_cost_as_much_as_with_full_attention():
    lengths = [100, 7]
    assert decode_step(TINY, H200, lengths) == decode_step(FULL_TINY, H200, lengths)


def test_trained_drafter_has_no_window():
    drafter = drafters.TrainedDrafter("one layer", 1, 1, 1, 0.0)
    slow = machine(10**6)
    dense, full = (
        decode_step(shape, slow, [300], None, FREE).seconds for shape in (TINY, FULL_TINY)
    )
    passes = (
        (drafters.break_even(shape, slow, [300], drafter, FREE) - 1) * seconds
        for shape, seconds in ((TINY, dense), (FULL_TINY, full))
    )
    assert next(passes) == pytest.approx(next(passes))


# --- memory ---


def test_window_layers_cache_at_most_their_window():
    assert TINY.cached_tokens([50, 100, 300]).tolist() == [200, 400, 300 + 3 * 100]


@pytest.mark.parametrize(("room", "longest"), [(200, 50), (399, 99), (403, 103), (1000, 700)])
def test_capacity_is_the_longest_sequence_that_fits(room, longest):
    assert kv_capacity(TINY, machine(room)) == longest
    assert TINY.cached_tokens(longest) <= room < TINY.cached_tokens(longest + 1)


def test_number_of_sequences_that_fit_depends_on_their_length():
    assert sequences_held(TINY, machine(1300), 300) == 2
    assert sequences_held(TINY, machine(1300), 50) == 6
    assert sequences_held(FULL_TINY, machine(1300), 300) == 1


def test_rollout_fills_the_memory_that_windows_leave_free():
    """Two responses of 301 tokens need 2 x (301 + 300) at the end. With full attention in every
    layer, they need 2 x 4 x 301, so one is preempted.
    """
    responses = [300, 300]
    room = machine(2 * (301 + 300))
    both = simulate_rollout(TINY, room, responses, prompt=1, overheads=FREE)
    assert (both.preemptions, both.mean_batch) == (0, 2.0)
    preempted = simulate_rollout(
        TINY, machine(2 * (301 + 300) - 1), responses, prompt=1, overheads=FREE
    )
    assert preempted.preemptions == 1
    with pytest.raises(ConfigError, match="which has room for 300"):
        simulate_rollout(FULL_TINY, room, responses, prompt=1, overheads=FREE)


def test_cluster_counts_responses_and_bytes_of_the_cache_with_windows():
    shape = SHAPES["olmo-3-7b"]
    found = cluster.fit(shape, cluster.Cluster(H200, 8), 32_768)
    per_response = 2 * 32 * 128 * 2 * (8 * 32_768 + 24 * 4096)
    assert found.full_responses == found.kv // per_response
    assert found.full_responses == 17
    full = replace(shape, window_layers=(), window=0)
    assert cluster.fit(full, cluster.Cluster(H200, 8), 32_768).full_responses == 5


def test_training_computes_attention_within_the_window_only():
    """A sequence of 300 tokens has 2 x 300 x 100 - 100^2 (doubled) pairs in a layer with a window."""
    forward = 2 * 1000 * 300 + 2 * 2 * 1 * (300**2 + 3 * (2 * 300 * 100 - 100**2))
    assert train_seconds(TINY, H200, [300])[0] == pytest.approx(forward / (0.24 * H200.flops))


# --- shapes without windows ---


@pytest.mark.parametrize(
    ("name", "dense", "sparse", "train", "preemptions", "capacity"),
    [
        ("qwen3-4b", 1072.868793094831, 552.9865726278855, 464.1843745897786, 130, 1_053_745),
        ("qwen3-30b-a3b", 1174.8909526604082, 823.2052425186072, 469.5185788312798, 133, 1_041_277),
        (
            "qwen3-next-80b-a3b",
            2392.1329186291646,
            2300.397783364579,
            297.78433881346143,
            806,
            165_901,
        ),
    ],
)
def test_predictions_without_windows_are_unchanged(
    name, dense, sparse, train, preemptions, capacity
):
    machine = MACHINES["b200"]
    responses = response_lengths(14_000, 32_768, 240)
    found = predict(SHAPES[name], machine, responses, SparsitySchedule.fixed(253))
    seconds = [found.dense.seconds, found.sparse.seconds, found.train_s]
    assert seconds == pytest.approx([dense, sparse, train], rel=1e-12)
    assert found.dense.preemptions == preemptions
    assert kv_capacity(SHAPES[name], machine) == capacity
