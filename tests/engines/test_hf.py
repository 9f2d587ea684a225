"""Test the transformers engine. Its sparse decoding must match teacher forcing, and unsupported
models and settings must raise errors.
"""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM

from sparrow.decoding import Decoding
from sparrow.engines import hf
from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError, PromptError, UnsupportedModel
from sparrow.model.actor import set_schedule, teacher_forced
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB, tiny_model

LENGTHS = [173, 64, 9, 130]
STEPS = 40


def prompts(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator) for n in lengths]


def left_padded(rows):
    longest = max(len(r) for r in rows)
    ids, mask = (
        torch.zeros(len(rows), longest, dtype=torch.long),
        torch.zeros(len(rows), longest, dtype=torch.long),
    )
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
    return ids, mask


def greedy(model, ids, mask, **kwargs):
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=STEPS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1).log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_budget_of_all_pages_matches_dense_generation(architecture, cache):
    ids, mask = left_padded(prompts())
    model = tiny_model(architecture)
    dense_tokens, dense_logp = greedy(model, ids, mask, cache_implementation=cache)
    set_schedule(model, SparsitySchedule.dense())
    tokens, logp = greedy(model, ids, mask, cache_implementation=cache)
    assert next(m.sparrow for m in model.modules() if hasattr(m, "sparrow")).sparse_calls == 2 * (
        STEPS - 1
    )
    assert torch.equal(tokens, dense_tokens)
    assert (logp - dense_logp).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("pages", [0, 2, 5])
def test_teacher_forcing_matches_decoding_step_by_step(architecture, pages):
    rows = prompts()
    ids, mask = left_padded(rows)
    model = tiny_model(architecture)
    dense_logp = greedy(model, ids, mask)[1]
    schedule = SparsitySchedule(top_k=(pages, pages + 1), bin_tokens=144, dense_layers=(0,))
    set_schedule(model, schedule)
    tokens, stepwise = greedy(model, ids, mask)
    assert (stepwise - dense_logp).abs().max() > 0.05, (
        "the test needs a schedule that changes the output"
    )
    full, full_mask = torch.cat([ids, tokens], 1), torch.cat([mask, torch.ones_like(tokens)], 1)
    with torch.no_grad(), teacher_forced(model, [len(r) for r in rows]):
        positions = (full_mask.cumsum(1) - 1).clamp(min=0)
        forced = model(input_ids=full, attention_mask=full_mask, position_ids=positions).logits
    forced = forced[:, ids.shape[1] - 1 : -1].log_softmax(-1)
    assert (forced - stepwise).abs().max() < 1e-4
    for i, row in enumerate(rows):  # each row alone, without padding
        with torch.no_grad(), teacher_forced(model, [len(row)]):
            alone = (
                model(input_ids=torch.cat([row, tokens[i]])[None])
                .logits[0, len(row) - 1 : -1]
                .log_softmax(-1)
            )
        assert (alone - stepwise[i]).abs().max() < 1e-4


UNEVEN = SparsitySchedule.fixed(
    2, dense_layers=(0,), head_budgets=((1, 1), (0, 3), (1.5, 0.5), (0.5, 0.5))
)


@pytest.mark.slow
def test_engine_applies_budgets_per_layer_and_kv_head():
    model = tiny_model()
    engine = HFEngine(model, UNEVEN, eos_ids=[])
    rows = [p.tolist() for p in prompts()]
    rollouts = engine.generate(rows, Sampling(max_new_tokens=30, temperature=0.8, top_n=5, seed=3))
    counters = engine.counters()
    # The sparse layers keep 0 and 6, 3 and 1, and 1 and 1 pages by score, and always three more.
    held = np.concatenate([np.arange(len(row) + 1, len(row) + 30) for row in rows])
    read = sum(np.minimum(held, 16 * pages) for pages in (3, 9, 6, 4, 4, 4)) / 2 + held
    assert (
        counters.tokens_held == 4 * held.sum() and abs(counters.tokens_read - read.sum()) <= 29 / 2
    )  # each step rounds by at most 1/2

    def gap(budgets):
        scores = engine.score(rollouts, UNEVEN.replace(head_budgets=budgets), 0.8)
        return max(
            np.abs(s.logprobs - r.logprobs).max() for s, r in zip(scores, rollouts, strict=True)
        )

    assert gap(UNEVEN.head_budgets) < 1e-4
    assert min(gap(()), gap(tuple(row[::-1] for row in UNEVEN.head_budgets))) > 0.05


def test_head_budgets_for_a_different_model_raise_an_error():
    with pytest.raises(
        ConfigError, match="for 4 layers with 2 kv heads, but the model has 4 layers with 4"
    ):
        HFEngine(tiny_model("llama-mha"), UNEVEN, eos_ids=[])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(adapt_draft_budget=True), r"adapt_draft_budget is True, but .*; leave adapt_draft_b"),
        (dict(draft_weights="fp8"), r"draft_weights is 'fp8', but .*; leave draft_weights out, or"),
        (dict(guess_tokens=3, guess_head="h"), r"guess_head is 'h', but .*; leave guess_head out"),
        (dict(meter_schedule="fixed:2"), r"meter_schedule is Spars.*, but .*; leave meter_sched"),
        (dict(adapt_draft_budget=False), None),
    ],
)
def test_settings_that_only_vllm_supports_are_refused(asked, message):
    decoding = Decoding.lossless("fixed:2", **asked)
    with pytest.raises(ConfigError, match=f"^{message}") if message else nullcontext():
        HFEngine(tiny_model(), decoding, eos_ids=[])


@pytest.mark.slow
def test_padding_and_a_static_cache_do_not_change_the_output():
    rows = prompts()
    ids, mask = left_padded(rows)
    model = tiny_model()
    set_schedule(model, SparsitySchedule.fixed(3, dense_layers=(0,)))
    tokens, logp = greedy(model, ids, mask)
    static_tokens, static_logp = greedy(model, ids, mask, cache_implementation="static")
    assert torch.equal(tokens, static_tokens) and (logp - static_logp).abs().max() < 1e-4
    for i, row in enumerate(rows):
        alone_tokens, alone_logp = greedy(
            model, row[None], torch.ones(1, len(row), dtype=torch.long)
        )
        assert (
            torch.equal(alone_tokens[0], tokens[i]) and (alone_logp[0] - logp[i]).abs().max() < 1e-4
        )


def test_training_and_prefill_are_dense_by_default():
    ids = torch.stack(prompts([80, 80]))
    model = tiny_model()
    dense = model(input_ids=ids).logits
    set_schedule(model, SparsitySchedule.fixed(0))
    assert torch.equal(model(input_ids=ids).logits, dense)


def test_gradients_with_checkpointing_are_correct_outside_the_teacher_forced_context():
    ids = torch.stack(prompts([120, 120]))
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        set_schedule(model, SparsitySchedule.fixed(1, dense_layers=(0,)))
        if checkpointing:
            model.gradient_checkpointing_enable()
        with teacher_forced(model, [40, 60]):
            loss = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[:, :, 5].mean()
        loss.backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    dense = tiny_model().train()
    dense(input_ids=ids).logits.log_softmax(-1)[:, :, 5].mean().backward()
    dense_gradient = torch.cat([p.grad.flatten() for p in dense.parameters() if p.grad is not None])
    assert torch.allclose(gradients[0], gradients[1], atol=1e-7)
    assert (gradients[0] - dense_gradient).norm() > 0.01 * dense_gradient.norm()


@pytest.mark.parametrize("decoded, sizes", [(2**19, [5]), (60, [2, 2, 1]), (1, [1] * 5)])
def test_decoding_batch_size_is_limited_by_the_total_number_of_tokens(decoded, sizes, monkeypatch):
    engine = HFEngine(tiny_model(), SparsitySchedule.fixed(2), eos_ids=[])
    seen, decode = [], engine._decode
    monkeypatch.setattr(hf, "DECODE_TOKENS", decoded)
    monkeypatch.setattr(
        engine, "_decode", lambda rows, *rest: seen.append(len(rows)) or decode(rows, *rest)
    )
    rollouts = engine.generate([[3] * n for n in (20, 5, 20, 5, 5)], Sampling(max_new_tokens=4))
    assert seen == sizes and [len(r.prompt_ids) for r in rollouts] == [20, 5, 20, 5, 5]


@pytest.mark.parametrize(("verified", "sizes"), [(1, [3, 2]), (4, [1] * 5)])
def test_decoding_batch_size_is_limited_by_the_number_of_logits(verified, sizes, monkeypatch):
    decoding = Decoding.lossy(SparsitySchedule.fixed(2))
    if verified > 1:
        decoding = Decoding.lossless(SparsitySchedule.fixed(2), draft_tokens=verified - 1)
    engine = HFEngine(tiny_model(), decoding, eos_ids=[])
    seen, decode = [], engine._decode
    monkeypatch.setattr(hf, "DECODE_LOGITS", 3 * VOCAB)
    monkeypatch.setattr(
        engine, "_decode", lambda rows, *rest: seen.append(len(rows)) or decode(rows, *rest)
    )
    engine.generate([[3] * 5] * 5, Sampling(max_new_tokens=4))
    assert seen == sizes


def test_engines_that_share_a_model_keep_their_own_schedules():
    model, sampling = tiny_model(), Sampling(max_new_tokens=8, seed=3)
    asked = [list(map(int, ids)) for ids in prompts([173, 64])]

    def sampled(engine):
        return [r.response_ids.tolist() for r in engine.generate(asked, sampling)]

    few = HFEngine(model, SparsitySchedule.fixed(0, dense_layers=()), eos_ids=[])
    expected = sampled(few)
    dense = HFEngine(model, SparsitySchedule.dense(dense_layers=()), eos_ids=[])
    other = sampled(dense)
    assert other != expected
    assert sampled(few) == expected and sampled(dense) == other
    few.close()
    assert sampled(dense) == other


def test_a_token_that_the_model_does_not_have_is_refused():
    engine = HFEngine(tiny_model(), SparsitySchedule.fixed(2), eos_ids=[])
    vocabulary = engine.model.config.vocab_size
    with pytest.raises(PromptError, match=f"token id {vocabulary}, .* from 0 to {vocabulary - 1};"):
        engine.generate([[3], [3, vocabulary]], Sampling(max_new_tokens=4))


@pytest.mark.slow
def test_recorded_log_probs_match_those_from_scoring():
    model = tiny_model()
    schedule = SparsitySchedule.fixed(2, dense_layers=(0,))
    engine = HFEngine(model, schedule, eos_ids=[7], batch_size=3)
    rows = [p.tolist() for p in prompts()]
    sampling = Sampling(max_new_tokens=50, temperature=0.8, top_n=5, seed=3)
    rollouts = engine.generate(rows, sampling)
    again = engine.generate(rows, sampling)
    other = engine.generate(rows, Sampling(max_new_tokens=50, temperature=0.8, top_n=5, seed=4))
    assert [r.response_ids.tolist() for r in rollouts] == [r.response_ids.tolist() for r in again]
    assert [r.response_ids.tolist() for r in rollouts] != [r.response_ids.tolist() for r in other]
    sparse = engine.score(rollouts, schedule, 0.8)
    dense = engine.score(rollouts, SparsitySchedule.dense(), 0.8)
    for rollout, s, d in zip(rollouts, sparse, dense, strict=True):
        stopped = rollout.finish_reason == "stop"
        assert (rollout.response_ids[-1] == 7) == stopped and (7 not in rollout.response_ids[:-1])
        assert stopped or len(rollout) == 50
        np.testing.assert_allclose(s.logprobs, rollout.logprobs, atol=1e-4)
        np.testing.assert_allclose(s.top_logprobs, rollout.top_logprobs, atol=1e-4)
        ids = torch.tensor([list(rollout.prompt_ids) + rollout.response_ids.tolist()])
        logp = (
            (model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / 0.8)
            .log_softmax(-1)
            .detach()
        )
        np.testing.assert_allclose(
            d.logprobs, logp.gather(1, ids[0, len(rollout.prompt_ids) :, None])[:, 0], atol=1e-4
        )
        np.testing.assert_allclose(d.entropy, -(logp.exp() * logp).sum(-1), atol=1e-4)
    assert (
        max(np.abs(d.logprobs - r.logprobs).max() for d, r in zip(dense, rollouts, strict=True))
        > 0.05
    )


def test_sampling_restores_the_training_mode_of_every_module():
    model = tiny_model().train()
    model.model.layers[1].eval()
    training = [module.training for module in model.modules()]
    HFEngine(model, SparsitySchedule.fixed(2), eos_ids=[]).generate(
        [[1, 2, 3]], Sampling(max_new_tokens=2)
    )
    assert [module.training for module in model.modules()] == training


def test_counters_match_the_schedule():
    schedule = SparsitySchedule.fixed(1, dense_layers=(0,))
    engine = HFEngine(tiny_model(), schedule, eos_ids=[])
    engine.generate([prompts([100])[0].tolist()], Sampling(max_new_tokens=3))
    # Two decode steps, at 101 and 102 cached tokens; 3 of 4 layers read 4 pages of 16.
    counters = engine.counters()
    assert counters.tokens_held == 4 * (101 + 102)
    assert counters.tokens_read == 1 * (101 + 102) + 3 * (64 + 64)
    assert (counters.rows, counters.dense_rows) == (2, 0)
    assert engine.counters().tokens_held == 0


def test_all_tokens_count_as_dense_if_no_layer_is_sparse():
    schedule = SparsitySchedule.fixed(1, dense_layers=(0, 1, 2, 3))
    engine = HFEngine(tiny_model(), schedule, eos_ids=[])
    engine.generate([prompts([100])[0].tolist()], Sampling(max_new_tokens=3))
    counters = engine.counters()
    assert counters.tokens_read == counters.tokens_held
    assert counters.dense_rows == counters.rows == 2


def test_update_weights_copies_by_name_and_rejects_unknown_names():
    engine = HFEngine(tiny_model(seed=0), SparsitySchedule.fixed(2), eos_ids=[])
    other = tiny_model(seed=1)
    engine.update_weights(other.named_parameters())
    ids = torch.stack(prompts([30]))
    assert torch.equal(engine.model(input_ids=ids).logits, other(input_ids=ids).logits)
    with pytest.raises(ConfigError, match=r"nonsense.*no such parameter"):
        engine.update_weights([("nonsense", torch.zeros(2))])


def test_unsupported_models_raise_an_error_with_the_cause():
    with pytest.raises(UnsupportedModel, match=r"MistralForCausalLM.*sliding_attention.*64"):
        small = dict(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=9,
        )
        set_schedule(
            MistralForCausalLM(MistralConfig(**small, num_key_value_heads=1, sliding_window=64)),
            SparsitySchedule.fixed(1),
        )
    with pytest.raises(UnsupportedModel, match=r"BloomForCausalLM does not route layers \[0, 1\]"):
        set_schedule(
            BloomForCausalLM(BloomConfig(n_layer=2, n_head=2, hidden_size=32, vocab_size=9)),
            SparsitySchedule.fixed(1),
        )
    with pytest.raises(ConfigError, match=r"keeps layer 9 dense, but the model has 4 layers"):
        set_schedule(tiny_model(), SparsitySchedule.fixed(1, dense_layers=(9,)))
    model = tiny_model()
    model.set_attn_implementation("sparrow")
    with pytest.raises(ConfigError, match="has no schedule"):
        model.generate(
            input_ids=torch.ones(1, 8, dtype=torch.long), max_new_tokens=2, do_sample=False
        )
    engine = HFEngine(tiny_model(), SparsitySchedule.fixed(1), eos_ids=[])
    with pytest.raises(ConfigError, match=r"prompt 1 has 1000 tokens.*context of 1024"):
        engine.generate([[1], [1] * 1000], Sampling(max_new_tokens=100))


@pytest.mark.parametrize(
    "wrong",
    [
        dict(temperature=-1.0),
        dict(temperature=float("nan")),
        dict(temperature=float("inf")),
        dict(top_k=0),
        dict(top_p=0.0),
        dict(top_p=1.5),
    ],
)
def test_settings_that_leave_nothing_to_sample_from_raise_an_error(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}, but must be"):
        Sampling(max_new_tokens=2, **wrong)


def test_changed_attention_implementation_is_detected_and_can_be_restored():
    model = tiny_model()
    set_schedule(model, SparsitySchedule.fixed(0))
    model.set_attn_implementation("sdpa")
    with (
        pytest.raises(ConfigError, match="teacher_forced needs a model prepared"),
        teacher_forced(model, [4]),
    ):
        pass
    set_schedule(model, SparsitySchedule.fixed(0))
    ids = torch.stack(prompts([90]))
    dense = model(input_ids=ids).logits
    with teacher_forced(model, [4]) as forcing:
        assert (model(input_ids=ids).logits - dense).abs().max() > 0.01
    assert forcing.implementation == "reference", "on a CPU, the reference must be used"


@pytest.mark.parametrize("loaded_with", ["sdpa", "eager"])
def test_closing_an_engine_restores_its_model(loaded_with):
    model = tiny_model()
    model.set_attn_implementation(loaded_with)
    ids, mask = left_padded(prompts([173, 64]))
    before, _ = greedy(model, ids, mask)
    engine = HFEngine(model, SparsitySchedule.fixed(1, dense_layers=()), eos_ids=[])
    sparse, _ = greedy(model, ids, mask)
    assert not torch.equal(sparse, before)
    engine.close()
    assert torch.equal(greedy(model, ids, mask)[0], before)
    assert model.config._attn_implementation == loaded_with
    assert not any("sparrow" in vars(module) for module in model.modules())
    engine.close()  # closing it again changes nothing

    # The schedule set by the user is restored.
    set_schedule(model, SparsitySchedule.fixed(1, dense_layers=()))
    HFEngine(model, SparsitySchedule.dense(), eos_ids=[]).close()
    assert torch.equal(greedy(model, ids, mask)[0], sparse)


def test_kernels_requested_by_name_are_used():
    pytest.importorskip("triton")
    model = tiny_model(head_dim=16)
    set_schedule(model, SparsitySchedule.fixed(0))
    with (
        pytest.raises(ValueError, match="the Triton kernels need a GPU"),
        teacher_forced(model, [4], implementation="triton"),
    ):
        model(input_ids=torch.stack(prompts([9])))


def test_engine_detects_that_sparse_attention_did_not_run():
    engine = HFEngine(tiny_model(), SparsitySchedule.fixed(1), eos_ids=[])
    engine.model.set_attn_implementation("sdpa")
    with pytest.raises(
        UnsupportedModel,
        match=r"made 0 sparse attention calls in 4 decode steps, expected 8; .*'sdpa'",
    ):
        engine.generate([[1, 2, 3]], Sampling(max_new_tokens=5))


AUTO = SparsitySchedule(top_k=(1,), bin_tokens=32, page_size=8, dense_layers=(0,))


@pytest.mark.slow
def test_auto_mode_is_lossless_until_verification_is_limited():
    rows = [p.tolist() for p in prompts()]
    sampling = Sampling(STEPS, seed=3)
    lossless = HFEngine(
        tiny_model(), Decoding.lossless(AUTO, draft_tokens=3), eos_ids=[7]
    ).generate(rows, sampling)
    found = HFEngine(tiny_model(), Decoding("auto", AUTO, draft_tokens=3), eos_ids=[7]).generate(
        rows, sampling
    )
    for a, b in zip(found, lossless, strict=True):
        assert np.array_equal(a.response_ids, b.response_ids) and np.array_equal(
            a.logprobs, b.logprobs
        )
        assert b.verification is None and a.verification.tokens == len(a) == len(
            a.verification.acceptance
        )
        alpha = a.verification.acceptance
        assert np.isnan(alpha[0]) and 0.5 < np.isfinite(alpha).mean() < 1 and np.nanmax(alpha) <= 1


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_auto_mode_is_exact_up_to_the_verified_length_and_sparse_afterwards(temperature):
    engine = HFEngine(
        tiny_model(), Decoding("auto", AUTO, draft_tokens=3), eos_ids=[7], batch_size=3
    )
    engine.verify_up_to(96)
    rows = [p.tolist() for p in prompts([9, 60, 70, 130])]
    rollouts = engine.generate(rows, Sampling(STEPS, temperature, VOCAB, seed=3))
    counted = engine.counters()
    assert counted.cycles and counted.acceptance.drafts == sum(
        int(np.isfinite(r.verification.acceptance).sum()) for r in rollouts
    )
    dense = engine.score(rollouts, SparsitySchedule.dense(), temperature)
    # A page that ends at 96 belongs to the next bin. Prefill yields one more token, which the policy
    # samples, too.
    ends = [min(len(r), max(0, 89 - len(p)) + 1) for p, r in zip(rows, rollouts, strict=True)]
    assert [r.verification.tokens for r in rollouts] == ends and ends[3] == 1
    for r, scores, end in zip(rollouts, dense, ends, strict=True):
        apart = np.abs(r.top_logprobs - scores.top_logprobs).max(1)
        assert apart[:end].max() < 2e-4
        # Later tokens are those of a lossy actor whose dense prompt consists of all verified
        # tokens.
        if end < len(r):
            assert apart[end:].max() > 0.01
            names = ("response_ids", "logprobs", "top_ids", "top_logprobs")
            rest = {name: getattr(r, name)[end - 1 :] for name in names}
            tail = replace(
                r, prompt_ids=[*r.prompt_ids, *r.response_ids[: end - 1].tolist()], **rest
            )
            forced = engine.score([tail], AUTO, temperature)[0]
            assert np.abs(tail.top_logprobs - forced.top_logprobs).max() < 2e-4


def test_only_auto_mode_supports_a_limit_on_verification():
    engine = HFEngine(tiny_model(), Decoding.lossless(AUTO), eos_ids=[7])
    with pytest.raises(
        ConfigError, match=r"only in mode 'auto', but .* started in mode 'lossless'"
    ):
        engine.verify_up_to(64)
