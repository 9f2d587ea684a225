"""Test models with sliding-window layers in lossy mode, in a real vLLM on a CPU."""

import contextlib
import copy

import numpy as np
import pytest

pytest.importorskip("vllm.version")

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cohere2Config,
    Cohere2ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Olmo3Config,
    Olmo3ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sparrow.attention import PageLayout, reference
from sparrow.decoding import Decoding
from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm.stock import StockEngine
from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.rollout import Sampling
from tests.conftest import SMALL
from tests.vllm import tiny_vllm as tiny

RAGGED = tiny.prompts(481, 33, 250, 300)  # the first one's last token is prefilled alone
GREEDY = Sampling(max_new_tokens=40, temperature=0.0, top_n=0)
EVEN = tiny.prompts(250, 250, 250, 250)
LONG = Sampling(max_new_tokens=160, temperature=0.0, top_n=0)
FEW_BLOCKS = {"Olmo 3": 70, "Gemma 3": 80}
"""Numbers of blocks that hold the prompts ``EVEN``, but not all of their ``LONG`` responses."""
TIGHT = dict(max_model_len=448, max_num_batched_tokens=96, enable_prefix_caching=False)
ONE_GROUP = dict(disable_hybrid_kv_cache_manager=True)
WINDOWED = dict(
    SMALL, num_key_value_heads=2, head_dim=32, sliding_window=50, pad_token_id=0, eos_token_id=None
)


def layer_types(windows, repeats):
    return (["sliding_attention"] * windows + ["full_attention"]) * repeats


KINDS = {
    "Olmo 3": (
        Olmo3ForCausalLM,
        Olmo3Config(**{**WINDOWED, "num_hidden_layers": 8}, layer_types=layer_types(3, 2)),
    ),
    "Gemma 3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **{**WINDOWED, "num_hidden_layers": 6, "head_dim": 256},
            layer_types=layer_types(5, 1),
            query_pre_attn_scalar=256,
        ),
    ),
    "Cohere 2": (Cohere2ForCausalLM, Cohere2Config(**WINDOWED, layer_types=layer_types(1, 2))),
    "EXAONE 4": (Exaone4ForCausalLM, Exaone4Config(**WINDOWED, layer_types=layer_types(1, 2))),
}
FULL_LAYERS = {"Olmo 3": [3, 7], "Gemma 3": [5], "Cohere 2": [1, 3], "EXAONE 4": [1, 3]}


def build(kind, folder, seed=0):
    model_class, config = KINDS[kind]
    torch.manual_seed(seed)
    model = model_class(copy.deepcopy(config)).eval()  # a reference changes its model's config
    model.save_pretrained(folder)
    return model


def greedy_of_stock(folder, prompts=RAGGED, sampling=GREEDY):
    """Return greedy rollouts of vLLM without Sparrow."""
    engine = StockEngine(str(folder), skip_tokenizer_init=True, **tiny.OPTIONS)
    rollouts = engine.generate(prompts, sampling)
    engine.close()
    return rollouts


class Reference:
    """Log-probs of a transformers model whose full-attention layers select pages after the prompt.
    Its window layers run transformers' own attention.
    """

    def __init__(self, model, schedule):
        self.model = model
        self.schedule = schedule
        self.layout = PageLayout(**schedule.page_layout)
        self.prompt_tokens = 0
        if model.config.model_type == "cohere2":  # vLLM's windows are one token longer
            model.config.sliding_window = WINDOWED["sliding_window"] + 1
        AttentionInterface.register("pages_after_prompt", self._attend)
        AttentionMaskInterface.register("pages_after_prompt", sdpa_mask)
        model.set_attn_implementation("pages_after_prompt")

    def _attend(self, module, query, key, value, mask, scaling=None, **kwargs):
        output, _ = sdpa_attention_forward(
            module, query, key, value, mask, scaling=scaling, **kwargs
        )
        kind = self.model.config.layer_types[module.layer_idx]
        length_B = torch.arange(self.prompt_tokens, query.shape[2]) + 1
        if kind == "full_attention" and module.layer_idx not in self.schedule.dense_layers:
            rows = len(length_B)
            decoded_BHTD = reference.decode_several(
                query[0, :, self.prompt_tokens :].transpose(0, 1)[:, :, None],
                key.expand(rows, -1, -1, -1),
                value.expand(rows, -1, -1, -1),
                None,
                length_B,
                torch.from_numpy(self.schedule.pages(length_B.numpy())).long(),
                self.layout,
                scaling,
                None,
            )
            output[0, self.prompt_tokens :] = decoded_BHTD[:, :, 0]
        return output, None

    @torch.no_grad()
    def gap(self, rollouts):
        """Return the largest difference from these rollouts' log-probs."""
        gaps = []
        for rollout in rollouts:
            self.prompt_tokens = len(rollout.prompt_ids)
            ids = torch.tensor([*rollout.prompt_ids, *rollout.response_ids])
            logits = self.model(ids[None, :-1], use_cache=False).logits[0]
            sampled = ids[self.prompt_tokens :]
            logprobs = logits[self.prompt_tokens - 1 :].log_softmax(-1)
            logprobs = logprobs.gather(1, sampled[:, None])[:, 0].numpy()
            gaps.append(np.abs(logprobs - rollout.logprobs).max())
        return max(gaps)


def block_groups(engine):
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    return worker.model_runner.kv_cache_config.kv_cache_groups


@pytest.fixture(scope="module", params=["Olmo 3", "Gemma 3"])
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = build(request.param, folder)
    return request.param, folder, model, greedy_of_stock(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(enable_prefix_caching=True),
        dict(max_num_batched_tokens=96, max_num_seqs=4),
        dict(enable_prefix_caching=True, **ONE_GROUP),
    ],
    ids=["prefix-caching", "chunked-prefill", "one-block-group"],
)
def test_full_layers_select_pages_and_window_layers_stay_vllms_own(made, options):
    kind, folder, model, stock = made
    full = FULL_LAYERS[kind]
    with tiny.engine(folder, tiny.UNBOUNDED, **options) as sparrow:
        described = sparrow.describe()
        assert described["sparse_layers"] == full and described["dense_layers"] == []
        assert (len(block_groups(sparrow)) == 1) == ("disable_hybrid_kv_cache_manager" in options)
        for schedule in (tiny.UNBOUNDED, tiny.SMALL):
            sparrow.set_schedule(schedule)
            expected = Reference(model, schedule)
            for _ in range(2):  # the second pass reads the prefix cache, if enabled
                rollouts = sparrow.generate(RAGGED, GREEDY)
                assert expected.gap(rollouts) < 3e-4
                assert not schedule.is_dense or tiny.same_tokens(rollouts, stock)
                cached = np.concatenate([len(p) + np.arange(1, 40) for p in RAGGED])
                counters = sparrow.counters()
                assert counters.tokens_held == len(full) * cached.sum()
                assert counters.tokens_read == len(full) * schedule.tokens_read(cached).sum()
        # the schedule makes a difference
        assert Reference(model, tiny.UNBOUNDED).gap(rollouts) > 0.01


@pytest.mark.slow
def test_preempted_sequences_with_windows_match_stock_vllm(made):
    kind, folder, _, _ = made
    expected = greedy_of_stock(folder, EVEN, LONG)
    few = dict(TIGHT, num_gpu_blocks_override=FEW_BLOCKS[kind])
    with tiny.engine(folder, tiny.UNBOUNDED, **few) as sparrow:
        assert tiny.same_tokens(sparrow.generate(EVEN, LONG), expected)
        assert sparrow.counters().preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Cohere 2", "EXAONE 4"])
def test_other_windowed_models_match_stock_vllm_if_every_page_is_kept(tmp_path, kind):
    model = build(kind, tmp_path)
    expected = greedy_of_stock(tmp_path)
    with tiny.engine(tmp_path, tiny.UNBOUNDED) as sparrow:
        assert sparrow.describe()["sparse_layers"] == FULL_LAYERS[kind]
        assert tiny.same_tokens(sparrow.generate(RAGGED, GREEDY), expected)
        sparrow.set_schedule(tiny.SMALL)
        assert Reference(model, tiny.SMALL).gap(sparrow.generate(RAGGED, GREEDY)) < 3e-4


@pytest.mark.slow
def test_windowed_model_with_updated_weights_behaves_like_a_new_engine(tmp_path):
    build("Gemma 3", tmp_path / "old")
    new = build("Gemma 3", tmp_path / "new", seed=1)
    with tiny.engine(tmp_path / "new") as fresh:
        expected = fresh.generate(RAGGED, GREEDY)
    with tiny.engine(tmp_path / "old") as sparrow:
        assert tiny.logprob_gap(sparrow.generate(RAGGED, GREEDY), expected) > 0.01
        sparrow.update_weights(new.named_parameters())
        assert tiny.logprob_gap(sparrow.generate(RAGGED, GREEDY), expected) < 1e-5


@pytest.mark.slow
def test_trainers_models_still_work_if_vllm_runs_their_class(tmp_path):
    """vLLM runs Olmo 3 with transformers' class, and adds compilation to the class."""
    policy = HFEngine(build("Olmo 3", tmp_path), tiny.UNBOUNDED, eos_ids=[])
    stock = greedy_of_stock(tmp_path)
    assert tiny.logprob_gap(stock, policy.score(stock, tiny.UNBOUNDED, 1.0)) < 3e-4
    before = build("Olmo 3", tmp_path / "new", seed=1)
    learner = HFEngine(before, tiny.SMALL, eos_ids=[])
    for _ in range(2):
        with tiny.engine(tmp_path) as sparrow:
            sparrow.update_weights(before.named_parameters())
            rollouts = sparrow.generate(RAGGED, GREEDY)
            after = build("Olmo 3", tmp_path / "again", seed=1)
            for scorer in (learner, HFEngine(after, tiny.SMALL, eos_ids=[])):
                scores = scorer.score(rollouts, tiny.SMALL, 1.0)
                assert tiny.logprob_gap(rollouts, scores) < 3e-4
            dense = learner.score(rollouts, tiny.UNBOUNDED, 1.0)
            assert tiny.logprob_gap(rollouts, dense) > 0.01


def starting(folder, decoding=tiny.SMALL, **options):
    with contextlib.ExitStack() as stack:
        stack.enter_context(tiny.engine(folder, decoding, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "decoding, options, message",
    [
        (Decoding.lossless(tiny.SMALL), {}, "mode 'lossless', because .* set mode 'lossy'"),
        (tiny.SMALL, dict(prefix_match_unit=16), "prefix_match_unit=16"),
    ],
    ids=["lossless", "prefix_match_unit"],
)
def test_settings_that_do_not_work_with_windows_are_refused(tmp_path, decoding, options, message):
    build("Cohere 2", tmp_path)
    with pytest.raises(ConfigError, match=f"has a sliding window in some layers, .*{message}"):
        starting(tmp_path, decoding, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds, message",
    [
        (["sliding_attention"] * 4, "has a sliding window of 50 tokens in every layer"),
        (
            ["sliding_attention", *["full_attention"] * 3],
            "3 layers with full attention into groups of 1, .*disable_hybrid_kv_cache_manager=True",
        ),
    ],
    ids=["windows-everywhere", "several-full-groups"],
)
def test_models_without_exactly_one_full_group_are_refused(tmp_path, kinds, message):
    config = Cohere2Config(**WINDOWED, layer_types=kinds)
    Cohere2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        starting(tmp_path)


@pytest.mark.slow
def test_one_block_group_serves_any_mix_of_windows_and_full_attention(tmp_path):
    torch.manual_seed(0)
    kinds = ["sliding_attention", *["full_attention"] * 3]
    model = Cohere2ForCausalLM(Cohere2Config(**WINDOWED, layer_types=kinds)).eval()
    model.save_pretrained(tmp_path)
    with tiny.engine(tmp_path, **ONE_GROUP) as sparrow:
        assert sparrow.describe()["sparse_layers"] == [1, 2, 3]
        assert Reference(model, tiny.SMALL).gap(sparrow.generate(RAGGED, GREEDY)) < 3e-4
