"""Test hybrid models: their full-attention layers are sparse, and their linear layers are
unchanged. Anything that Sparrow does not support in a hybrid model raises an error that names it.
"""

import pytest
import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from sparrow.decoding import Decoding
from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.model.actor import set_schedule
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.conftest import SMALL, VOCAB
from tests.model.test_types import check

LINEAR = dict(
    num_key_value_heads=2,
    head_dim=16,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    pad_token_id=0,
)
MOE = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
)
KINDS = {
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, MOE),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {}),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, MOE),
}
ALTERNATING = ["linear_attention", "full_attention"] * 2
SPARSE = SparsitySchedule(
    (0,), bin_tokens=512, page_size=4, sink_pages=1, recent_pages=1, dense_layers=(0, 1)
)


def build(kind: str, layer_types: list[str] | None = ALTERNATING, **changes):
    model_class, config_class, own = KINDS[kind]
    torch.manual_seed(0)
    shape = {**SMALL, "hidden_size": 32, **LINEAR, **own, "layer_types": layer_types, **changes}
    return model_class(config_class(**shape)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_hybrid_attention_layers_decode_like_the_eager_reference(kind):
    assert check(build(kind), kind), "the test needs sparsity to change the output"


def test_hybrid_rollouts_match_their_teacher_forced_scores():
    # As in the published model, one layer in four has full attention. Linear layers sum in a
    # different order in single steps than in chunks. With larger weights, float32 results would
    # therefore differ by more than the bound.
    model = build("qwen3_next", None, initializer_range=0.2)
    number = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (n,), generator=number).tolist() for n in (40, 33, 25)]
    engine = HFEngine(model, SPARSE, eos_ids=[7, 8, 9])
    rollouts = engine.generate(prompts, Sampling(40, top_n=5, seed=4))
    assert len({len(rollout) for rollout in rollouts}) > 1, (
        "the test needs responses that end at different times"
    )
    counters = engine.counters()
    held = sum(
        len(p) + t + 1 for p, r in zip(prompts, rollouts, strict=True) for t in range(len(r) - 1)
    )
    assert (
        counters.tokens_held == held and counters.read_fraction < 0.9
    )  # of the only layer with a KV cache
    for schedule, same in ((SPARSE, True), (SparsitySchedule.dense(), False)):
        scores = engine.score(rollouts, schedule, 1.0)
        apart = max(
            abs(s.logprobs - r.logprobs).max() for s, r in zip(scores, rollouts, strict=True)
        )
        assert (apart < 1e-4) == same


def test_unsupported_hybrid_features_raise_an_error():
    with pytest.raises(
        UnsupportedModel,
        match="Qwen3NextForCausalLM has linear-attention layers, whose state cannot be restored",
    ):
        HFEngine(build("qwen3_next"), Decoding.lossless(), eos_ids=[])
    with pytest.raises(
        UnsupportedModel,
        match=r"Qwen3_5ForCausalLM has layers of the kind linear_attention.*; choose",
    ):
        set_schedule(build("qwen3_5", ["linear_attention"] * 4), SPARSE)
    with pytest.raises(
        ConfigError,
        match=r"Qwen3_5ForCausalLM has layers without full attention, but .* head_budgets",
    ):
        set_schedule(build("qwen3_5"), SPARSE.replace(head_budgets=((1, 1),) * 4))
    other = build("qwen3_5")
    other.config.model_type = "another_hybrid"
    with pytest.raises(UnsupportedModel, match=r"layers of the kind linear_attention.*; choose"):
        set_schedule(other, SPARSE)
