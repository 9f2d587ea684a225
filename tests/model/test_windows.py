"""Test models that mix sliding-window and full-attention layers. Full-attention layers select
pages, and window layers compute the model's own attention.
"""

import numpy as np
import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sparrow.attention import PageLayout
from sparrow.calibrate import head_budgets
from sparrow.decoding import Decoding
from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.model.actor import (
    keep_attention,
    set_schedule,
    sparse_calls,
    steps_of_several,
    teacher_forced,
)
from sparrow.model.unread import unread
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.conftest import SMALL, VOCAB
from tests.model.test_types import check

WINDOW = 8
MIXED = ["sliding_attention", "full_attention"] * 2
SHAPE = {
    **SMALL,
    "hidden_size": 32,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": MIXED,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # otherwise, greedy responses repeat one token
}
KINDS = {
    "olmo3": (Olmo3ForCausalLM, Olmo3Config, {}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {}),
    "cohere2": (Cohere2ForCausalLM, Cohere2Config, {}),
    "exaone4": (Exaone4ForCausalLM, Exaone4Config, {}),
    "ministral": (MinistralForCausalLM, MinistralConfig, {}),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"use_sliding_window": True, "max_window_layers": 2, "layer_types": None},
    ),
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Layer 0 has a window, so keeping it dense changes nothing.
SPARSE = SparsitySchedule.fixed(
    1, page_size=4, sink_pages=1, recent_pages=1, bin_tokens=4, dense_layers=(0,)
)
EVERY_PAGE = SparsitySchedule.dense(page_size=4, dense_layers=())
PROMPT = 40


def build(kind, **changes):
    model_class, config_class, own = KINDS[kind]
    torch.manual_seed(0)
    return model_class(config_class(**{**SHAPE, **own, **changes})).eval()


def tokens(*shape, seed=0):
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **options):
    given = {
        "max_new_tokens": 24,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        **options,
    }
    return model.generate(input_ids=ids, **given)[:, ids.shape[1] :]


def differ(found, others):
    """Return the largest difference between the log-probs of two sets of responses."""
    return max(abs(a.logprobs - b.logprobs).max() for a, b in zip(found, others, strict=True))


# --- decoding and teacher forcing ---


@pytest.mark.parametrize("kind", KINDS)
def test_full_attention_layers_decode_like_the_eager_reference(kind):
    assert check(build(kind), kind), "the test needs sparsity to change the output"


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("kind", ["olmo3", "gemma3"])
def test_generation_with_every_page_gives_the_dense_tokens(kind, options):
    model = build(kind)
    ids = tokens(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    expected = generate(model, ids, attention_mask=mask, **options)
    set_schedule(model, EVERY_PAGE)
    assert torch.equal(generate(model, ids, attention_mask=mask, **options), expected)
    assert sparse_calls(model) == 2 * 23, "two of the four layers have full attention"
    set_schedule(model, SPARSE)
    assert not torch.equal(generate(model, ids, attention_mask=mask, **options), expected)


def test_steps_of_several_tokens_match_teacher_forcing():
    model = build("olmo3")
    set_schedule(model, SPARSE)
    ids = tokens(2, PROMPT + 12)
    with torch.no_grad():
        with teacher_forced(model, [PROMPT] * 2, tokens=3):
            forced = model(input_ids=ids, use_cache=False).logits[:, PROMPT:]
        cache = model(input_ids=ids[:, :PROMPT], use_cache=True).past_key_values
        with steps_of_several(model):
            steps = [
                model(input_ids=ids[:, t : t + 3], past_key_values=cache, use_cache=True).logits
                for t in range(PROMPT, PROMPT + 12, 3)
            ]
    torch.testing.assert_close(torch.cat(steps, 1), forced, rtol=0, atol=1e-4)


def test_gradients_reach_every_layer_and_survive_checkpointing():
    def gradients(**options):
        model = build("olmo3").train()
        if options:
            model.gradient_checkpointing_enable({"use_reentrant": False, **options})
        set_schedule(model, SPARSE)
        with teacher_forced(model, [PROMPT] * 2):
            logits = model(input_ids=tokens(2, PROMPT + 20), use_cache=False).logits
        logits[:, PROMPT:].logsumexp(-1).sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain = gradients()
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    for name, gradient in gradients(context_fn=keep_attention).items():
        torch.testing.assert_close(gradient, plain[name], msg=name)


def test_text_config_inside_a_multimodal_config_may_mix_windows():
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {name: value for name, value in SHAPE.items() if name != "attn_implementation"}
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text,
            vision_config=vision,
            image_token_index=2,
            boi_token_index=0,
            eoi_token_index=1,
        )
    ).eval()
    engine = HFEngine(model, SPARSE, eos_ids=[])
    rollouts = engine.generate(tokens(2, PROMPT).tolist(), Sampling(20, top_n=5))
    assert differ(engine.score(rollouts, SPARSE, 1.0), rollouts) < 1e-4
    assert differ(engine.score(rollouts, EVERY_PAGE, 1.0), rollouts) > 0.1


# --- engine and calibration ---


def test_rollouts_match_their_teacher_forced_scores_and_count_full_attention_layers():
    engine = HFEngine(build("olmo3"), SPARSE, eos_ids=[7, 8, 9])
    prompts = [tokens(n, seed=n).tolist() for n in (40, 33, 25)]
    rollouts = engine.generate(prompts, Sampling(40, top_n=5, seed=4))
    assert len({len(rollout) for rollout in rollouts}) > 1, "responses must end at different times"
    counters = engine.counters()
    held = sum(
        len(p) + t + 1 for p, r in zip(prompts, rollouts, strict=True) for t in range(len(r) - 1)
    )
    assert counters.tokens_held == 2 * held and counters.read_fraction < 0.6
    assert differ(engine.score(rollouts, SPARSE, 1.0), rollouts) < 1e-4
    assert differ(engine.score(rollouts, SparsitySchedule.dense(), 1.0), rollouts) > 0.1


@pytest.mark.parametrize("guess_tokens", [0, 2])
def test_lossless_responses_past_the_window_are_the_dense_ones(guess_tokens):
    prompts = [tokens(n, seed=n).tolist() for n in (20, 33)]
    drafting = Decoding.lossless(SPARSE, draft_tokens=4, guess_tokens=guess_tokens)
    dense, lossless = (
        HFEngine(build("gemma3"), each, eos_ids=[]).generate(prompts, Sampling(30, 0.0, top_n=5))
        for each in (SparsitySchedule.dense(), drafting)
    )
    assert all(
        np.array_equal(a.response_ids, b.response_ids) for a, b in zip(dense, lossless, strict=True)
    )
    assert differ(dense, lossless) < 1e-4


def test_unread_mass_covers_full_attention_layers_only():
    model = build("olmo3")
    set_schedule(model, SPARSE)
    found = unread(model, tokens(60), torch.tensor([50, 59]), PageLayout(4), (2, 20))
    assert found.shape == (2, 2, 2)
    assert found[..., 0].min() > 0.05 and found[..., 1].abs().max() < 1e-5


def test_head_budgets_are_refused(tmp_path):
    model = build("olmo3")
    message = r"Olmo3ForCausalLM has layers without full attention, but .* head_budgets"
    with pytest.raises(ConfigError, match=message):
        set_schedule(model, SPARSE.replace(head_budgets=((1, 1),) * 4))
    engine = HFEngine(model, SPARSE, eos_ids=[])
    with pytest.raises(ConfigError, match=message):
        head_budgets.find(
            engine, [[3, 4, 5]], Sampling(4), tmp_path, SPARSE.replace(top_k=(16,)), "heads", 16
        )


# --- refused models ---


def test_window_in_a_layer_that_the_config_calls_full_attention_is_refused():
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SHAPE))  # has a window in every layer
    with pytest.raises(
        UnsupportedModel, match="MistralAttention has a sliding window of 8 tokens in layer 1"
    ):
        set_schedule(model, SPARSE)


@pytest.mark.parametrize(
    ("model_class", "config_class", "options", "cause"),
    [
        (
            Olmo3ForCausalLM,
            Olmo3Config,
            {"layer_types": ["sliding_attention"] * 4},
            r"sliding_attention \(window 8\)",
        ),
        (
            Llama4ForCausalLM,
            Llama4TextConfig,
            {
                "layer_types": ["chunked_attention", "full_attention"] * 2,
                "attention_chunk_size": 8,
                "intermediate_size_mlp": 48,
                **EXPERTS,
            },
            r"layers of the kind chunked_attention \(window 8\)",
        ),
        (GptOssForCausalLM, GptOssConfig, EXPERTS, r"attention sinks \(s_aux\)"),
        (Gemma2ForCausalLM, Gemma2Config, {}, r"a soft cap \(softcap\)"),
    ],
    ids=["every layer", "llama4", "gpt-oss", "gemma2"],
)
def test_models_with_other_kinds_of_attention_are_refused(
    model_class, config_class, options, cause
):
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHAPE, "attn_implementation": "eager", **options}))
    with pytest.raises(UnsupportedModel, match=rf"^[^;]*{cause}[^;]*; choose a model [^;]*$"):
        set_schedule(model, SPARSE)
