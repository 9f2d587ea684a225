"""Test hybrid models in lossy mode, in a real vLLM on a CPU."""

import copy

import numpy as np
import pytest

pytest.importorskip("vllm.version")

import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)
from vllm import SamplingParams

import tests.vllm.gated_delta  # noqa: F401  float32, for close comparisons
from sparrow.decoding import Decoding
from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm.stock import StockEngine
from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.rollout import Sampling
from sparrow.vllm import runtime
from sparrow.vllm.selfcheck import layers as layer_checks
from tests.conftest import SMALL
from tests.model import test_hybrid as hybrid
from tests.vllm import tiny_vllm as tiny

RAGGED = tiny.prompts(481, 33, 250, 300)  # the first one's last token is prefilled alone
GREEDY = Sampling(max_new_tokens=40, temperature=0.0, top_n=0)
BLOCK = 160
"""Size of the blocks that vLLM chooses, in tokens, so that a state fits into a block."""
TIGHT = dict(num_gpu_blocks_override=14, max_model_len=576, enable_prefix_caching=False)
UNCACHED = dict(enable_prefix_caching=False)
"""What vLLM's Mamba kernels on CPUs need."""

MAMBA = dict(SMALL, hidden_size=128, num_key_value_heads=2, attn_implementation="eager")
STATE = dict(mamba_n_heads=4, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=16)
OTHERS = {
    "attention and Mamba in every layer": (
        FalconH1ForCausalLM,
        FalconH1Config(**MAMBA | STATE, head_dim=32, mamba_d_ssm=256, pad_token_id=0),
        [1, 2, 3],
    ),
    "attention or Mamba": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **MAMBA | STATE,
            layer_types=["mamba", "attention"] * 2,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=96,
            pad_token_id=0,
        ),
        [1, 3],
    ),
    "attention, Mamba or neither": (
        NemotronHForCausalLM,
        NemotronHConfig(
            **MAMBA,
            hybrid_override_pattern="M*-M",
            head_dim=32,
            mamba_num_heads=4,
            mamba_head_dim=64,
            n_groups=1,
            ssm_state_size=16,
            pad_token_id=0,
        ),
        [1],
    ),
}


def build(layer_types=hybrid.ALTERNATING):
    state = dict(linear_key_head_dim=64, linear_value_head_dim=64)
    layers = dict(num_hidden_layers=len(layer_types))
    return hybrid.build("qwen3_next", layer_types, hidden_size=64, head_dim=32, **layers, **state)


def build_other(kind, folder, seed=0):
    model_class, config, _ = OTHERS[kind]
    torch.manual_seed(seed)
    model = model_class(copy.deepcopy(config))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = build()
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def stock(made):
    return greedy_of_stock(made[0])


def greedy_of_stock(folder, **options):
    """Return greedy rollouts of vLLM without Sparrow."""
    engine = StockEngine(str(folder), skip_tokenizer_init=True, **{**tiny.OPTIONS, **options})
    rollouts = engine.generate(RAGGED, GREEDY)
    engine.close()
    return rollouts


def layers_of(engine):
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    return runtime.layers_of(worker.vllm_config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [dict(enable_prefix_caching=True), dict(max_num_batched_tokens=96, max_num_seqs=4)],
    ids=["prefix-caching", "chunked-prefill"],
)
def test_attention_layers_match_stock_vllm_and_transformers(made, stock, options):
    reference = HFEngine(made[1], tiny.SMALL, eos_ids=[])
    with tiny.engine(made[0], tiny.UNBOUNDED, **options) as sparrow:
        described = sparrow.describe()
        assert described["sparse_layers"] == [1, 3] and described["dense_layers"] == []
        assert {layer.kv_cache.shape[2] for layer in layers_of(sparrow)} == {BLOCK}
        for schedule in (tiny.UNBOUNDED, tiny.SMALL):
            sparrow.set_schedule(schedule)
            for _ in range(2):  # the second pass reads the prefix cache, if enabled
                rollouts = sparrow.generate(RAGGED, GREEDY)
                scores = reference.score(rollouts, schedule, 1.0)
                assert tiny.logprob_gap(rollouts, scores) < 3e-4
                assert tiny.same_tokens(rollouts, stock) == schedule.is_dense
                cached = np.concatenate([len(p) + np.arange(1, 40) for p in RAGGED])
                counters = sparrow.counters()
                assert counters.tokens_held == 2 * cached.sum()
                assert counters.tokens_read == 2 * schedule.tokens_read(cached).sum()
        dense = reference.score(rollouts, tiny.UNBOUNDED, 1.0)
        assert tiny.logprob_gap(rollouts, dense) > 0.1  # the schedule makes a difference
        if "enable_prefix_caching" in options:
            [again] = sparrow.llm.generate(
                {"prompt_token_ids": RAGGED[0]},
                SamplingParams(max_tokens=1, detokenize=False),
                use_tqdm=False,
            )
            assert again.num_cached_tokens == len(RAGGED[0]) // BLOCK * BLOCK


@pytest.mark.slow
def test_preempted_sequences_match_stock_vllm(made, stock):
    with tiny.engine(made[0], tiny.UNBOUNDED, **TIGHT) as sparrow:
        assert tiny.same_tokens(sparrow.generate(RAGGED, GREEDY), stock)
        assert sparrow.counters().preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_other_hybrids_match_stock_vllm_if_every_page_is_kept(tmp_path, kind):
    build_other(kind, tmp_path)
    expected = greedy_of_stock(tmp_path, **UNCACHED)
    with tiny.engine(tmp_path, tiny.UNBOUNDED, **UNCACHED) as sparrow:
        assert sparrow.describe()["sparse_layers"] == OTHERS[kind][2]
        assert tiny.same_tokens(sparrow.generate(RAGGED, GREEDY), expected)
        sparrow.set_schedule(tiny.SMALL)
        assert not tiny.same_tokens(sparrow.generate(RAGGED, GREEDY), expected)


@pytest.mark.slow
def test_bytes_that_states_left_in_a_block_are_not_read_as_landmarks(made):
    with tiny.engine(made[0]) as sparrow:
        for layer in layers_of(sparrow):
            layer_checks.bytes_of(layer).fill_(255)  # NaN in every dtype
        rollouts = sparrow.generate(RAGGED, GREEDY)
    scores = HFEngine(made[1], tiny.SMALL, eos_ids=[]).score(rollouts, tiny.SMALL, 1.0)
    assert tiny.logprob_gap(rollouts, scores) < 3e-4


@pytest.mark.slow
def test_hybrid_with_updated_weights_behaves_like_a_new_engine(tmp_path):
    kind = "attention or Mamba"
    build_other(kind, tmp_path / "old")
    new = build_other(kind, tmp_path / "new", seed=1)
    with tiny.engine(tmp_path / "new", **UNCACHED) as fresh:
        expected = fresh.generate(RAGGED, GREEDY)
    with tiny.engine(tmp_path / "old", **UNCACHED) as sparrow:
        assert not tiny.same_tokens(sparrow.generate(RAGGED, GREEDY), expected)
        sparrow.update_weights(new.named_parameters())
        assert tiny.same_tokens(sparrow.generate(RAGGED, GREEDY), expected)


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM packs convolutions only on such CPUs"
)
def test_weight_update_is_refused_if_vllm_has_packed_the_convolutions(made):
    with (
        tiny.engine(made[0], dtype="bfloat16") as sparrow,
        pytest.raises(ConfigError, match=r"packed the weights of the model's convolutions"),
    ):
        sparrow.update_weights(made[1].named_parameters())


@pytest.mark.slow
def test_lossless_mode_refuses_a_hybrid_model(made):
    with (
        pytest.raises(ConfigError, match=r"Qwen3NextForCausalLM has a state .* mode 'lossless'"),
        tiny.engine(made[0], Decoding.lossless(tiny.SMALL)),
    ):
        pass


@pytest.mark.slow
def test_one_block_group_may_hold_more_attention_layers_than_there_are_others(tmp_path):
    model = build(["full_attention", "linear_attention"] * 3 + ["full_attention"])
    model.save_pretrained(tmp_path)
    with tiny.engine(tmp_path) as sparrow:
        assert sparrow.describe()["dense_layers"] == [0]
        assert sparrow.describe()["sparse_layers"] == [2, 4, 6]
        rollouts = sparrow.generate(RAGGED, GREEDY)
    scores = HFEngine(model, tiny.SMALL, eos_ids=[]).score(rollouts, tiny.SMALL, 1.0)
    assert tiny.logprob_gap(rollouts, scores) < 3e-4


@pytest.mark.slow
def test_attention_layers_in_several_block_groups_are_refused(tmp_path):
    build(["linear_attention", *["full_attention"] * 3]).save_pretrained(tmp_path)
    with (
        pytest.raises(
            UnsupportedModel, match=r"3 layers with full attention into groups of 1, each"
        ),
        tiny.engine(tmp_path),
    ):
        pass
