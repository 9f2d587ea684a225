"""Test the shapes of mixtures and hybrids: their parameter counts, and the bytes a pass reads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from sparrow import SparsitySchedule
from sparrow.cost import (
    MACHINES,
    SHAPES,
    VLLM_H200,
    Experts,
    ModelShape,
    Overheads,
    decode_step,
    drafters,
)
from sparrow.cost.lossless import CYCLE_H200, CycleOverheads, DraftSetup, lossless_step, verify_s
from sparrow.errors import ConfigError, UnsupportedModel

H200 = MACHINES["h200"]
NOTHING = Overheads()
SMALL = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
)
QWEN3 = SMALL | dict(head_dim=16, moe_intermediate_size=32, num_experts=6, num_experts_per_tok=2)
GLM = SMALL | dict(head_dim=16, moe_intermediate_size=32, n_routed_experts=6, n_shared_experts=1)
A3B = Qwen3MoeConfig(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    tie_word_embeddings=False,
)
TINY = ModelShape(
    "tiny", 2, 4, 2, 16, weights=1000, experts=Experts(layers=2, count=4, per_token=1, weights=100)
)


def parameters(config):
    with torch.device("meta"):
        return dict(AutoModelForCausalLM.from_config(config).named_parameters())


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(**QWEN3),
        Qwen3MoeConfig(**QWEN3, decoder_sparse_step=2, mlp_only_layers=[3]),
        Qwen3MoeConfig(**QWEN3, attention_bias=True, tie_word_embeddings=True),
        MixtralConfig(**SMALL, num_local_experts=6, sliding_window=None),
        Glm4MoeConfig(**GLM, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True),
        Glm4MoeConfig(**GLM, first_k_dense_replace=2, use_qk_norm=False, attention_bias=False),
        A3B,
    ],
)
def test_parameter_counts_of_a_mixture_match_transformers(config):
    made = parameters(config)
    shape = ModelShape.from_config(config.to_dict())
    routed = [p for name, p in made.items() if ".experts." in name]
    assert shape.weights + shape.embedding == sum(p.numel() for p in made.values())
    assert shape.experts.layers * shape.experts.count * shape.experts.weights == sum(
        p.numel() for p in routed
    )


def test_built_in_mixture_matches_its_config():
    found = ModelShape.from_config(A3B.to_dict() | {"max_position_embeddings": 40960})
    named = SHAPES["qwen3-30b-a3b"]
    assert found == replace(named, name=found.name)
    assert found.active_weights == pytest.approx(3.04e9, rel=0.01)


def test_parameter_counts_of_the_built_in_hybrid_match_transformers():
    config = Qwen3NextConfig()
    made = parameters(config)
    shape = SHAPES["qwen3-next-80b-a3b"]
    routed = sum(p.numel() for name, p in made.items() if ".experts." in name)
    assert shape.weights + shape.embedding == sum(p.numel() for p in made.values())
    assert shape.experts.layers * shape.experts.count * shape.experts.weights == routed
    linear = [i for i, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    assert shape.linear_layers == tuple(linear) and shape.kv_layers == 12
    assert shape.kv_width * 2 == 12 * 2 * 2 * 256 * 2


def test_config_with_num_experts_instead_of_num_local_experts_is_accepted():
    config = Qwen3MoeConfig(**QWEN3).to_dict()
    config["num_experts"] = config.pop("num_local_experts")
    assert ModelShape.from_config(config).experts.count == 6


def test_mixture_config_without_an_expert_count_raises_an_error():
    config = Qwen3MoeConfig(**QWEN3).to_dict()
    del config["num_local_experts"]
    with pytest.raises(ConfigError, match="no 'num_experts'"):
        ModelShape.from_config(config)


def test_unsupported_mixture_type_raises_an_error():
    with pytest.raises(UnsupportedModel, match="'deepseek_v3'"):
        ModelShape.from_config({**A3B.to_dict(), "model_type": "deepseek_v3"})


@pytest.mark.parametrize(("tokens", "read"), [(1, 400), (2, 200 + 800 * 7 / 16), (10**6, 1000)])
def test_pass_reads_the_experts_to_which_its_tokens_are_routed(tokens, read):
    """With one token, three quarters of the experts' 800 parameters are unused. With two tokens,
    9 / 16 of them are unused.
    """
    assert TINY.weights_read(tokens) == pytest.approx(read)
    assert TINY.active_weights == 400


def test_dense_model_reads_all_its_weights():
    shape = SHAPES["qwen3-4b"]
    assert shape.weights_read(1) == shape.active_weights == shape.weights


def test_decode_step_reads_the_experts_of_its_batch():
    one, many = (decode_step(TINY, H200, [50] * rows, overheads=NOTHING) for rows in (1, 2))
    assert one.weight_bytes == 2 * 400
    assert many.weight_bytes == 2 * 550


def test_verification_reads_the_experts_of_all_its_tokens():
    """For one sequence with one draft, the draft step reads 400 parameters, verifying two tokens
    reads 550, and a cycle yields 1.5 tokens.
    """
    drafting = DraftSetup(1, SparsitySchedule.fixed(1, dense_layers=()), 0.5)
    cycle = lossless_step(TINY, H200, [50], drafting, NOTHING, CycleOverheads(0.0, 1.0))
    assert cycle.weight_bytes == pytest.approx(2 * (400 + 550) / 1.5)
    reads = 2 * (400 + 550) / H200.read_bytes_s
    computes = 2 * 400 / H200.flops
    assert cycle.weight_s == pytest.approx((reads + computes) / 1.5)


def test_fp8_draft_weights_are_refused_for_a_mixture():
    drafting = DraftSetup(1, SparsitySchedule.fixed(1), 0.5, "fp8")
    with pytest.raises(ConfigError, match="not available for mixtures of experts such as tiny"):
        lossless_step(TINY, H200, [50], drafting)


def test_hybrid_caches_only_attention_layers_and_reads_and_writes_its_states():
    hybrid = ModelShape("hybrid", 4, 4, 2, 16, 1000, linear_layers=(0, 1, 2), state_bytes=500)
    plain = ModelShape("plain", 1, 4, 2, 16, 1000)
    length = np.array([1000, 2000])
    schedule = SparsitySchedule.fixed(10, dense_layers=())
    ours, theirs = (
        decode_step(shape, H200, length, schedule, NOTHING) for shape in (hybrid, plain)
    )
    assert ours.kv_bytes == theirs.kv_bytes + 2 * 500 * len(length)
    assert ours.landmark_bytes == theirs.landmark_bytes


@pytest.mark.parametrize("layers", [(4,), (-1,), (0, 0), (2,)])
def test_linear_layers_must_be_different_layers_without_a_window(layers):
    with pytest.raises(ConfigError, match="linear_layers of hybrid must be different layers in"):
        ModelShape(
            "hybrid", 4, 4, 2, 16, 1000, linear_layers=layers, window_layers=(2,), window=100
        )


def test_dense_layers_of_a_schedule_only_count_if_their_attention_is_not_linear():
    """In Qwen3-Next, layers 0 and 1 are linear, and layer 3 has full attention."""
    hybrid = SHAPES["qwen3-next-80b-a3b"]
    linear, none, full = (
        decode_step(hybrid, H200, [30_000], SparsitySchedule.fixed(10, dense_layers=layers))
        for layers in ((0, 1), (), (3,))
    )
    assert linear == none
    assert full.landmark_bytes == pytest.approx(11 / 12 * none.landmark_bytes)
    assert full.kv_bytes > none.kv_bytes


def test_mixture_makes_verification_slower_but_not_drafting():
    mixture = SHAPES["qwen3-30b-a3b"]
    dense = replace(mixture, weights=mixture.active_weights, experts=None)
    eagle = drafters.TRAINED[0]
    lengths = [15_000] * 4
    plain = VLLM_H200.without_lists

    def drafting_s(shape):
        """Return how many seconds of a cycle are spent on drafting."""
        step_s = decode_step(shape, H200, lengths, None, plain).seconds
        further_s = verify_s(shape, H200, 4, 4 * eagle.drafts, VLLM_H200, CYCLE_H200)
        return drafters.break_even(shape, H200, lengths, eagle) * step_s - step_s - further_s

    assert drafting_s(mixture) == pytest.approx(drafting_s(dense), rel=1e-6)
    assert drafting_s(mixture) > 0
    assert drafters.break_even(mixture, H200, lengths, eagle) > 1.5
    assert drafters.break_even(dense, H200, lengths, eagle) < 1.5


def test_dense_layers_beyond_the_last_layer_do_not_count():
    assert ModelShape("one layer", 1, 4, 2, 16, 1000).sparse_layers((0, 1)) == 0
