"""Test which models can be routed through sparse attention, and that rejected models are left
unchanged.
"""

import copy
import pickle

import pytest
import torch
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Cohere2Config,
    Cohere2ForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MoshiConfig,
    MoshiForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.model.actor import set_schedule, teacher_forced
from sparrow.schedule import SparsitySchedule
from tests.conftest import SMALL, VOCAB, tiny_model

TINY = {**SMALL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
IDS = torch.arange(3, 43)[None]
SPARSE = SparsitySchedule.fixed(0, page_size=4, bin_tokens=4, dense_layers=())


def build(model_class, config_class, **changes):
    torch.manual_seed(0)
    return model_class(config_class(**{**TINY, "num_key_value_heads": 2, **changes})).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def decoded(model):
    with torch.no_grad():
        cache = model(input_ids=IDS[:, :30], use_cache=True).past_key_values
        return torch.cat(
            [
                model(input_ids=IDS[:, t : t + 1], past_key_values=cache, use_cache=True).logits
                for t in range(30, 40)
            ],
            1,
        )


# --- rejected models are left unchanged ---


@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [(NemotronForCausalLM, NemotronConfig), (StableLmForCausalLM, StableLmConfig)],
)
def test_rejected_model_is_unchanged_and_rejected_again(model_class, config_class):
    model = build(model_class, config_class)
    config, before, attributes = model.config, logits(model), set(vars(model))
    for _ in range(2):
        with pytest.raises(
            UnsupportedModel, match=rf"{model_class.__name__} does not route layers \[0, 1\]"
        ):
            set_schedule(model, SPARSE)
        assert (
            model.config is config
            and config._attn_implementation == "sdpa"
            and set(vars(model)) == attributes
        )
        assert not any(hasattr(m, "sparrow") for m in model.modules())
        assert torch.equal(logits(model), before)
        torch.testing.assert_close(decoded(model), before[:, 30:], rtol=0, atol=1e-4)


def test_model_rejected_by_the_engine_is_left_unrouted():
    model = build(
        Gemma2ForCausalLM,
        Gemma2Config,
        layer_types=["full_attention"] * 2,
        attn_logit_softcapping=None,
        final_logit_softcapping=1.0,
        attn_implementation="eager",
    )
    with pytest.raises(UnsupportedModel, match="changes its logits after the output embedding"):
        HFEngine(model, SPARSE, eos_ids=[])
    assert model.config._attn_implementation == "eager"
    assert not any(hasattr(m, "sparrow") for m in model.modules())


def test_routing_preserves_training_modes_and_hooks():
    model = tiny_model().train()
    model.model.layers[1].eval()
    hooks = len(model.model._forward_pre_hooks)
    set_schedule(model, SPARSE)
    assert (
        model.training
        and model.model.layers[0].training
        and not model.model.layers[1].self_attn.training
    )
    assert (
        len(model.model._forward_pre_hooks) == hooks
        and not model.model.layers[0].self_attn._forward_hooks
    )


def test_only_one_of_two_models_that_share_a_config_is_routed():
    one = tiny_model()
    other = Qwen3ForCausalLM(one.config).eval()
    assert other.config is one.config
    before, dense = decoded(other), decoded(one)
    set_schedule(one, SPARSE)
    assert one.config is not other.config and other.config._attn_implementation == "sdpa"
    assert torch.equal(decoded(other), before)
    assert (decoded(one) - dense).abs().max() > 0.05
    set_schedule(other, SparsitySchedule.dense())
    torch.testing.assert_close(decoded(other), before, rtol=0, atol=1e-4)
    assert (decoded(one) - dense).abs().max() > 0.05


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_of_a_model_has_a_separate_schedule(copied):
    model = tiny_model()
    set_schedule(model, SPARSE)
    twin = copied(model)
    sparse = decoded(model)
    set_schedule(twin, SparsitySchedule.dense())
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert torch.equal(decoded(model), sparse)
    out = twin.generate(
        input_ids=IDS,
        max_new_tokens=2,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert not out.logits[0].any(), "generate must use the copy"


# --- a check pass, compared with the model's own attention ---


def test_model_with_attention_sinks_is_rejected():
    model = build(
        GptOssForCausalLM,
        GptOssConfig,
        layer_types=["full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
    )
    with pytest.raises(UnsupportedModel, match=r"GptOssAttention passes attention sinks \(s_aux\)"):
        set_schedule(model, SPARSE)
    assert model.config._attn_implementation == "eager"


def test_model_with_soft_capped_attention_is_rejected():
    model = build(
        Gemma2ForCausalLM,
        Gemma2Config,
        layer_types=["full_attention"] * 2,
        attn_implementation="eager",
    )
    with pytest.raises(UnsupportedModel, match=r"Gemma2Attention passes a soft cap \(softcap\)"):
        set_schedule(model, SPARSE)


def test_check_pass_detects_attention_to_later_tokens():
    torch.manual_seed(0)
    model = BertLMHeadModel(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
        )
    )
    with pytest.raises(
        UnsupportedModel,
        match=r"BertLMHeadModel does not compute causal attention.*layer",
    ):
        set_schedule(model, SPARSE)


def test_check_pass_detects_custom_changes_to_attention(monkeypatch):
    from transformers.models.llama import modeling_llama

    def louder(module, query, key, value, attention_mask, **kwargs):
        out, weights = eager(module, query, key, value, attention_mask, **kwargs)
        return out * 1.1, weights

    eager = modeling_llama.eager_attention_forward
    model = build(LlamaForCausalLM, LlamaConfig, attn_implementation="eager")
    set_schedule(copy.deepcopy(model), SPARSE)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", louder)
    with pytest.raises(
        UnsupportedModel, match=r"LlamaForCausalLM does not compute causal attention.*in layer 0"
    ):
        set_schedule(model, SPARSE)


def test_check_pass_does_not_round_to_tf32_if_the_program_allows_it():
    model = build(LlamaForCausalLM, LlamaConfig)
    matmul = torch.backends.cuda.matmul
    seen = []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(matmul.fp32_precision))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        set_schedule(model, SPARSE)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(seen) > 1 and set(seen) == {"ieee"}


def test_model_with_two_attention_modules_per_layer_is_rejected():
    model = build(DiffLlamaForCausalLM, DiffLlamaConfig)
    with pytest.raises(
        UnsupportedModel, match="DiffLlamaForCausalLM computes attention 2 times in layer 0"
    ):
        set_schedule(model, SPARSE)


def test_model_whose_mask_differs_between_heads_is_rejected():
    model = build(DogeForCausalLM, DogeConfig, keep_window_size=16)
    with pytest.raises(
        UnsupportedModel,
        match=r"DogeForCausalLM.*mask of shape \(1, 4, 8, 8\) differs between heads",
    ):
        set_schedule(model, SPARSE)


# --- settings suggested by errors ---


def advised(build_with):
    """If an error suggests a setting, load the model with it. The model must then be accepted, and
    must give the original output if all pages are kept. Return the error message.
    """
    model = build_with({})
    original = decoded(model)
    with pytest.raises(UnsupportedModel) as refusal:
        set_schedule(model, SPARSE)
    sentence = str(refusal.value)
    if "or load this model with" not in sentence:
        return sentence
    change = (
        {"layer_types": ["full_attention"] * 2}
        if "layer_types" in sentence
        else {"sliding_window": None}
    )
    model = build_with(change)
    set_schedule(model, SparsitySchedule.dense(page_size=4, dense_layers=()))
    torch.testing.assert_close(decoded(model), original, rtol=0, atol=1e-4)
    return sentence


def test_setting_suggested_for_models_with_sliding_windows_works():
    windows = ["sliding_attention"] * 2
    cases = [
        (MistralForCausalLM, MistralConfig, {"sliding_window": 64}, "sliding_window=None"),
        (
            Qwen2ForCausalLM,
            Qwen2Config,
            {"sliding_window": 64, "use_sliding_window": True, "layer_types": windows},
            "layer_types",
        ),
    ]
    for model_class, config_class, options, setting in cases:
        sentence = advised(
            lambda change, c=model_class, g=config_class, o=options: build(c, g, **{**o, **change})
        )
        assert "(window 64)" in sentence and f"load this model with {setting}" in sentence


@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        (Cohere2ForCausalLM, Cohere2Config, {}),
        (Exaone4ForCausalLM, Exaone4Config, {}),
        (Gemma3ForCausalLM, Gemma3TextConfig, {"head_dim": 16}),
        (
            AfmoeForCausalLM,
            AfmoeConfig,
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        ),
    ],
    ids=["cohere2", "exaone4", "gemma3", "afmoe"],
)
def test_suggested_settings_never_change_the_output(model_class, config_class, options):
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention"] * 2}
    model = build(model_class, config_class, **options, **windows)
    original = decoded(model)
    with pytest.raises(UnsupportedModel, match=r"window 64.*choose a model") as refusal:
        set_schedule(model, SPARSE)
    assert "load this model with" not in str(refusal.value)
    assert torch.equal(decoded(model), original)
    full = {**windows, "layer_types": ["full_attention"] * 2}
    changed = build(model_class, config_class, **options, **full)
    changed.load_state_dict(model.state_dict())
    assert (decoded(changed) - original).abs().max() > 0.01 * original.abs().max()


def test_no_setting_is_suggested_if_none_helps():
    sentence = advised(
        lambda change: build(MoshiForCausalLM, MoshiConfig, sliding_window=64, **change)
    )
    assert sentence.endswith("choose a model with full attention in every layer")
    options = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attn_implementation": "eager",
        "sliding_window": 64,
    }
    assert "sinks" in advised(
        lambda change: build(GptOssForCausalLM, GptOssConfig, **{**options, **change})
    )


def test_model_whose_sliding_window_contradicts_its_layer_types_is_rejected():
    model = build(
        MistralForCausalLM, MistralConfig, sliding_window=64, layer_types=["full_attention"] * 2
    )
    with pytest.raises(
        UnsupportedModel,
        match="MistralAttention has a sliding window of 64 tokens in layer 0",
    ):
        set_schedule(model, SPARSE)


# --- invalid schedules and prompt lengths ---


@pytest.mark.parametrize("schedule", ["dense", None, {"top_k": [1]}])
def test_schedule_of_the_wrong_type_raises_an_error_with_the_remedy(schedule):
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"not a SparsitySchedule; use SparsitySchedule\.load"):
        set_schedule(model, schedule)
    set_schedule(model, SPARSE)
    if schedule is not None:
        with (
            pytest.raises(ConfigError, match=r"not a SparsitySchedule; use SparsitySchedule\.load"),
            teacher_forced(model, [1], schedule),
        ):
            pass


def test_teacher_forcing_rejects_a_schedule_that_does_not_match_the_model():
    model = tiny_model()
    set_schedule(model, SPARSE)
    with (
        pytest.raises(ConfigError, match="keeps layer 9 dense, but the model has 4 layers"),
        teacher_forced(model, [1], SPARSE.replace(dense_layers=(9,))),
    ):
        pass


@pytest.mark.parametrize(
    "lengths", [[-1, 3], [2.5, 3.0], torch.tensor([2.0, 3.0]), [True, False], 3, [[1], [2]]]
)
def test_prompt_lengths_must_be_one_integer_per_row(lengths):
    model = tiny_model()
    set_schedule(model, SPARSE)
    with (
        pytest.raises(
            ConfigError,
            match="prompt_lengths must contain an integer of at least 0 for each row, got ",
        ),
        teacher_forced(model, lengths),
    ):
        model(input_ids=IDS.expand(2, -1))


def test_prompt_lengths_that_do_not_match_the_rows_raise_an_error():
    model = tiny_model()
    set_schedule(model, SPARSE)
    for lengths, message in [
        ([3], "got 1 prompt lengths for a pass over 2 sequences"),
        ([3, 3, 3], "got 3 prompt lengths for a pass over 2 sequences"),
        ([3, 41], "row 1 has 40 tokens, but prompt_lengths specifies 41 prompt tokens"),
    ]:
        with pytest.raises(ConfigError, match=message), teacher_forced(model, lengths):
            model(input_ids=IDS.expand(2, -1))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :10] = 0
    with (
        pytest.raises(
            ConfigError, match="row 1 has 30 tokens, but prompt_lengths specifies 31 prompt"
        ),
        teacher_forced(model, [40, 31]),
    ):
        model(input_ids=IDS.expand(2, -1), attention_mask=mask)
    with teacher_forced(model, [40, 30]):  # a row may consist only of its prompt
        forced = model(input_ids=IDS.expand(2, -1), attention_mask=mask).logits
    dense = model(input_ids=IDS.expand(2, -1), attention_mask=mask).logits
    torch.testing.assert_close(forced[mask.bool()], dense[mask.bool()], rtol=0, atol=1e-4)
