"""Compare Sparrow in a real vLLM on a CPU with stock vLLM, with transformers, and with itself under
every kind of scheduling.
"""

import errno
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm.version")

import torch
from vllm import LLM, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput

from sparrow import SparsitySchedule
from sparrow.cli import main
from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm.engine import rollout_of
from sparrow.engines.vllm.stock import StockEngine
from sparrow.errors import ConfigError, EngineError, ProcessLost, PromptError, UnsupportedModel
from sparrow.rollout import Sampling
from sparrow.vllm import control
from tests.conftest import VOCAB
from tests.vllm import tiny_vllm as tiny
from tests.vllm.tiny_vllm import (
    SMALL,
    UNBOUNDED,
    checkpoint,
    engine,
    logprob_gap,
    prompts,
    same_tokens,
)

RAGGED = prompts(300, 17, 150, 511, 64, 33)
TIGHT = dict(num_gpu_blocks_override=36, max_model_len=576, enable_prefix_caching=False)
GREEDY = Sampling(max_new_tokens=48, temperature=0.0, top_n=5)
SAMPLED = Sampling(max_new_tokens=48, temperature=0.8, top_n=5, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    checkpoint(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return tiny.tiny_model()


@pytest.fixture(scope="module")
def stock(folder):
    """Return greedy tokens and log-probs of vLLM without Sparrow."""
    llm = LLM(model=str(folder), skip_tokenizer_init=True, **tiny.OPTIONS)
    with pytest.raises(ConfigError, match="started without a Sparrow schedule"):
        llm.collective_rpc("sparrow_describe")
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in RAGGED],
        SamplingParams(temperature=0.0, max_tokens=48, logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    completions = [output.outputs[0] for output in outputs]
    return [
        (
            list(c.token_ids),
            [at[token].logprob for token, at in zip(c.token_ids, c.logprobs, strict=True)],
        )
        for c in completions
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(max_num_batched_tokens=96, max_num_seqs=4),  # chunked prefill
        TIGHT,  # too few blocks for all sequences
    ],
    ids=["prefix-caching", "chunked-prefill", "preemption"],
)
def test_unlimited_budget_matches_stock_vllm(folder, stock, options):
    with engine(folder, UNBOUNDED, **options) as sparrow:
        for _ in range(2):  # the second pass reads the prefix cache, if enabled
            rollouts = sparrow.generate(RAGGED, GREEDY)
            counters = sparrow.counters()
            assert [r.response_ids.tolist() for r in rollouts] == [tokens for tokens, _ in stock]
            gap = max(
                np.abs(r.logprobs - lps).max() for r, (_, lps) in zip(rollouts, stock, strict=True)
            )
            assert gap < 1e-5
            assert counters.tokens_read == counters.tokens_held > 0
            assert (counters.preemptions > 0) == (options == TIGHT)


def test_small_budgets_match_transformers_even_if_the_schedule_changes(folder, model):
    wider = SMALL.replace(top_k=(5, 9))
    reference = HFEngine(model, SMALL, eos_ids=[])
    with engine(folder) as sparrow:
        assert sparrow.describe()["backend"] == "sparrow.vllm.cpu.CpuImpl"
        assert sparrow.describe()["kernels"] == "reference"
        assert sparrow.describe()["sparse_layers"] == [1, 2, 3] and sparrow.describe()[
            "dense_layers"
        ] == [0]
        for schedule in (SMALL, wider, SparsitySchedule.dense(), SMALL):
            sparrow.set_schedule(schedule)
            rollouts = sparrow.generate(RAGGED, SAMPLED)
            assert (
                logprob_gap(rollouts, reference.score(rollouts, schedule, SAMPLED.temperature))
                < 1e-4
            )
            # The tokens read depend only on the lengths: every response token except the first is a
            # decode step.
            cached = np.concatenate(
                [
                    np.arange(len(p) + 1, len(p) + len(r))
                    for p, r in zip(RAGGED, rollouts, strict=True)
                ]
            )
            counters = sparrow.counters()
            assert counters.tokens_held == 4 * cached.sum()
            assert counters.tokens_read == cached.sum() + 3 * schedule.tokens_read(cached).sum()
        dense = reference.score(rollouts, UNBOUNDED, SAMPLED.temperature)
        assert logprob_gap(rollouts, dense) > 0.1  # the schedule makes a difference
        with pytest.raises(ConfigError, match="start a new engine"):
            sparrow.set_schedule(SMALL.replace(recent_pages=3))


def test_steps_that_read_every_page_use_vllm_attention(folder, model):
    schedule = SparsitySchedule.fixed(3, dense_layers=(0,))  # everything up to 6 pages of 16 tokens
    asked = prompts(20, 40, 70)
    with engine(folder, schedule) as sparrow:
        sparrow.rpc("sparrow_counters")
        rollouts = sparrow.generate(asked, SAMPLED)
        (counts,) = sparrow.rpc("sparrow_counters")
    # The longest sequence has 71 tokens at its first decode step, and 96 at its 26th.
    assert counts["dense_steps"] == 26
    cached = np.concatenate([len(p) + np.arange(1, 48) for p in asked])
    assert counts["rows"] == len(cached) and counts["dense_rows_short"] == (cached <= 96).sum()
    # Later steps select pages by the landmarks that the dense steps wrote.
    scores = HFEngine(model, schedule, eos_ids=[]).score(rollouts, schedule, SAMPLED.temperature)
    assert logprob_gap(rollouts, scores) < 1e-4


def test_each_layer_and_kv_head_has_its_own_budget(folder, model):
    uneven = SMALL.replace(top_k=(4, 8), head_budgets=((1, 1), (0, 3), (1.5, 0.5), (0.5, 0.5)))
    wider = uneven.replace(top_k=(6, 12))
    reference = HFEngine(model, uneven, eos_ids=[])
    with engine(folder, uneven) as sparrow:
        assert sparrow.describe()["schedule"]["head_budgets"] == uneven.to_dict()["head_budgets"]
        for schedule in (uneven, wider):
            sparrow.set_schedule(schedule)
            rollouts = sparrow.generate(RAGGED, SAMPLED)
            assert (
                logprob_gap(rollouts, reference.score(rollouts, schedule, SAMPLED.temperature))
                < 1e-4
            )
            cached = np.concatenate(
                [
                    np.arange(len(p) + 1, len(p) + len(r))
                    for p, r in zip(RAGGED, rollouts, strict=True)
                ]
            )
            assert sparrow.counters().tokens_read == int(
                cached.sum() + 3 * schedule.tokens_read(cached).sum()
            )
        others = ((), tuple(row[::-1] for row in uneven.head_budgets))
        for budgets in others:  # budgets make a difference
            scores = reference.score(
                rollouts, wider.replace(head_budgets=budgets), SAMPLED.temperature
            )
            assert logprob_gap(rollouts, scores) > 0.1
        with pytest.raises(ConfigError, match="start a new engine"):
            sparrow.set_schedule(SMALL)


def test_rollouts_contain_the_log_probs_of_sampled_tokens(folder, model):
    with engine(folder) as sparrow:
        first, again = sparrow.generate(RAGGED, SAMPLED), sparrow.generate(RAGGED, SAMPLED)
        other = sparrow.generate(
            RAGGED, Sampling(max_new_tokens=48, temperature=0.8, top_n=0, seed=4)
        )
        alone = sparrow.generate(RAGGED[:1], SAMPLED)
        with pytest.raises(ConfigError, match="prompt 1 has 1000 tokens"):
            sparrow.generate([[1], [1] * 1000], GREEDY)
        sparrow.sleep()
        sparrow.wake()
    assert same_tokens(first, again) and logprob_gap(first, again) < 1e-5
    assert same_tokens(first[:1], alone)  # a request's seed does not depend on its batch
    assert not same_tokens(first, other) and other[0].top_ids.shape == (48, 0)
    scores = HFEngine(model, SMALL, eos_ids=[]).score(first, SMALL, SAMPLED.temperature)
    for rollout, score in zip(first, scores, strict=True):
        assert rollout.finish_reason == "length" and len(rollout) == 48
        assert (np.diff(rollout.top_logprobs, axis=1) <= 0).all()
        assert np.abs(rollout.top_logprobs - score.top_logprobs).max() < 1e-4
        listed = rollout.top_ids == rollout.response_ids[:, None]
        assert np.array_equal(rollout.top_logprobs[listed], rollout.logprobs[listed.any(1)])


def test_lists_longer_than_the_vocabulary_contain_every_token(folder, model):
    asked = replace(GREEDY, max_new_tokens=4, top_n=100_000)
    with engine(folder) as sparrow:
        [rollout] = sparrow.generate(RAGGED[:1], asked)
    [expected] = HFEngine(model, SMALL, eos_ids=[]).generate(RAGGED[:1], asked)
    assert rollout.top_ids.shape == expected.top_ids.shape == (4, VOCAB)
    assert (np.sort(rollout.top_ids) == np.arange(VOCAB)).all()
    assert np.abs(rollout.top_logprobs - expected.top_logprobs).max() < 1e-4


def test_lists_longer_than_the_engine_allows_and_unknown_tokens_are_refused(folder):
    with engine(folder, max_logprobs=3) as sparrow:
        with pytest.raises(ConfigError, match=r"top_n is 5, .* at most 3 tokens; lower top_n"):
            sparrow.generate(RAGGED[:1], GREEDY)
        [rollout] = sparrow.generate(RAGGED[:1], replace(GREEDY, top_n=3))
        with pytest.raises(PromptError, match=rf"has the token id {VOCAB}, but the model's"):
            sparrow.generate([[1, VOCAB]], replace(GREEDY, top_n=3))
    assert rollout.top_ids.shape == (48, 3)


def test_response_ends_with_an_eos_token(tmp_path):
    model = checkpoint(tmp_path, eos_token_id=7)
    model.generation_config.eos_token_id = [7, 8]
    model.generation_config.save_pretrained(tmp_path)
    with engine(tmp_path) as sparrow:
        rollouts = sparrow.generate(prompts(*[40] * 8), Sampling(max_new_tokens=256, seed=1))
    stopped = [r for r in rollouts if r.finish_reason == "stop"]
    assert stopped and all(r.response_ids[-1] in (7, 8) for r in stopped)
    assert not any(np.isin(r.response_ids[:-1], (7, 8)).any() for r in rollouts)


def test_scheduling_does_not_change_sparse_rollouts(folder):
    with engine(folder, enable_prefix_caching=False) as sparrow:
        expected = sparrow.generate(RAGGED, GREEDY)
    with engine(folder, max_num_batched_tokens=96, max_num_seqs=4) as sparrow:
        chunked = sparrow.generate(RAGGED, GREEDY)
        cached = sparrow.generate(RAGGED, GREEDY)
    for rollouts in (chunked, cached):
        assert same_tokens(rollouts, expected) and logprob_gap(rollouts, expected) < 1e-5


def test_preemption_is_counted_and_does_not_change_recorded_tokens(folder, model):
    with engine(folder, **TIGHT) as sparrow:
        rollouts = sparrow.generate(RAGGED, SAMPLED)
        assert sparrow.counters().preemptions > 0
    with engine(folder, enable_prefix_caching=False) as sparrow:
        undisturbed = sparrow.generate(RAGGED, SAMPLED)
        assert sparrow.counters().preemptions == 0
    # The latest request is preempted first, and the first one is never preempted. Preempted
    # requests keep their sampled tokens.
    assert (
        same_tokens(rollouts[:1], undisturbed[:1])
        and logprob_gap(rollouts[:1], undisturbed[:1]) < 1e-5
    )
    for a, b in zip(rollouts, undisturbed, strict=True):
        agree = int(np.cumprod(a.response_ids == b.response_ids).sum())
        assert agree >= 8 and len(a) == len(b) == len(a.logprobs)
        assert np.abs(a.logprobs[:8] - b.logprobs[:8]).max() < 1e-5


def test_interrupted_rollout_leaves_no_unfinished_requests(folder, monkeypatch):
    with engine(folder) as vllm:
        expected = vllm.generate(RAGGED[:2], GREEDY)
        core, steps = vllm.llm.llm_engine, []
        step = core.step

        def interrupted():
            steps.append(core.get_num_unfinished_requests())
            if len(steps) == 5:
                raise KeyboardInterrupt
            return step()

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(core, "step", interrupted)
            vllm.generate(RAGGED, GREEDY)
        assert steps == [6] * 5 and not core.has_unfinished_requests()
        again = vllm.generate(RAGGED[:2], GREEDY)
    assert [list(r.response_ids) for r in again] == [list(r.response_ids) for r in expected]


def test_last_token_of_a_prompt_counts_as_prefill_even_if_scheduled_alone(folder):
    prompt = prompts(257)
    with engine(folder) as sparrow:
        expected = sparrow.generate(prompt, GREEDY)
        sparrow.llm.reset_prefix_cache()
        sparrow.generate([prompt[0][:256]], Sampling(max_new_tokens=1))
        sparrow.rpc("sparrow_counters")
        # 256 tokens are cached, so the last token of the prompt forms a batch of one query token.
        rollouts = sparrow.generate(prompt, GREEDY)
        assert sparrow.rpc("sparrow_counters")[0]["dense_rows_prefill"] == 1
    assert same_tokens(rollouts, expected) and logprob_gap(rollouts, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_engine_with_updated_weights_behaves_like_a_new_engine(tmp_path, tied):
    old = checkpoint(tmp_path / "old", tie_word_embeddings=tied)
    new = checkpoint(tmp_path / "new", tie_word_embeddings=tied, seed=1)
    assert ("lm_head.weight" in dict(new.named_parameters())) != tied
    with engine(tmp_path / "new") as fresh:
        expected = fresh.generate(RAGGED, SAMPLED)
    with engine(tmp_path / "old") as sparrow:
        before = sparrow.generate(RAGGED, SAMPLED)
        sparrow.update_weights(new.named_parameters())
        after = sparrow.generate(RAGGED, SAMPLED)
        assert not same_tokens(before, expected)
        assert same_tokens(after, expected) and logprob_gap(after, expected) < 1e-5
        # Restore the weights as if the engine ran in a different process.
        sparrow._in_process = False
        sparrow.update_weights(old.named_parameters())
        assert logprob_gap(sparrow.generate(RAGGED, SAMPLED), before) < 1e-5
        with pytest.raises(ConfigError, match="Hugging Face name"):
            sparrow.update_weights([("model.layers.9.mlp.down_proj.weight", torch.zeros(64, 96))])
        with pytest.raises(ConfigError, match=r"named 'visual' in \w+; the last"):  # not all names
            sparrow.update_weights([("visual.weight", torch.zeros(64, 96))])


def test_failed_weight_update_says_which_weights_the_model_has(folder, tmp_path):
    new = {name: p.detach() for name, p in tiny.tiny_model(seed=1).named_parameters()}
    norms = [name for name in new if "norm" in name]
    garbage = tmp_path / "garbage.safetensors"
    garbage.write_bytes(b"not weights" * 10)
    with engine(folder) as sparrow:
        before = sparrow.generate(RAGGED, GREEDY)
        unread = {tmp_path: "", garbage: "header", tmp_path / "none": os.strerror(errno.ENOENT)}
        for path, reason in unread.items():
            with pytest.raises(
                ConfigError,
                match=rf"read weights from '{path}' \(.*{reason}.*nothing was loaded from it; pass",
            ):
                sparrow.rpc("sparrow_load_weights", str(path))
        read_before = iter(new.items())
        list(read_before)
        with pytest.raises(ConfigError, match="no weights to load; pass pairs"):
            sparrow.update_weights(read_before)
        assert same_tokens(sparrow.generate(RAGGED, GREEDY), before)

        def cut_off():
            yield norms[0], new[norms[0]]
            raise OSError("disk error")

        for weights, reason in [
            ([*new.items(), ("nonsense", torch.zeros(3))], "nonsense.*last weight .* 'nonsense'"),
            ([*new.items(), (norms[-1], torch.zeros(3))], rf"AssertionError.*3.*64.*{norms[-1]}'"),
            (cut_off(), rf"OSError: disk error; the last weight read was '{norms[0]}'"),
        ]:
            with pytest.raises(
                ConfigError, match=f"{reason}.*mixture of old and new ones; load all weights again"
            ):
                sparrow.update_weights(weights)

        def lost():
            yield norms[0], new[norms[0]]
            raise ProcessLost("a process died")

        with pytest.raises(ProcessLost):
            sparrow.update_weights(lost())
        sparrow.update_weights(tiny.tiny_model().named_parameters())
        assert same_tokens(sparrow.generate(RAGGED, GREEDY), before)


def test_failed_update_of_quantised_weights_requires_a_new_engine():
    """vLLM would mix the layers that it has begun to reload with the next update."""

    def reload_weights(weights_iterator):
        list(weights_iterator)

    model = SimpleNamespace(
        modules=list, packed_modules_mapping={"gate_up_proj": ["gate_proj", "up_proj"]}
    )
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(quant_config=object()),
        model_runner=SimpleNamespace(model=model, reload_weights=reload_weights),
    )
    with pytest.raises(
        ConfigError, match=r"quantised together .* was 'mlp.up_proj.weight'\).*; start a new engine"
    ):
        control.sparrow_load_weights(worker, [("mlp.up_proj.weight", torch.zeros(2))])


@pytest.mark.slow
def test_lora_adapters_give_the_same_results_as_merged_weights(tmp_path):
    peft = pytest.importorskip("peft")
    from vllm.lora.request import LoRARequest

    model = checkpoint(tmp_path / "base")
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"])
    )
    torch.manual_seed(0)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tuned.save_pretrained(tmp_path / "adapter")
    parameters = SamplingParams(temperature=0.0, max_tokens=32, detokenize=False)
    request = [{"prompt_token_ids": p} for p in RAGGED]
    with engine(tmp_path / "base", enable_lora=True, max_lora_rank=8) as sparrow:
        base = sparrow.llm.generate(request, parameters, use_tqdm=False)
        adapter = LoRARequest("tuned", 1, str(tmp_path / "adapter"))
        adapted = sparrow.llm.generate(request, parameters, lora_request=adapter, use_tqdm=False)
    merged = tuned.merge_and_unload()
    with engine(tmp_path / "base") as sparrow:
        sparrow.update_weights(merged.named_parameters())
        rollouts = sparrow.generate(RAGGED, Sampling(max_new_tokens=32, temperature=0.0))
    assert [list(o.outputs[0].token_ids) for o in adapted] == [
        r.response_ids.tolist() for r in rollouts
    ]
    assert [o.outputs[0].token_ids for o in adapted] != [o.outputs[0].token_ids for o in base]


@pytest.mark.slow
def test_two_tensor_parallel_workers_match_a_single_worker(tmp_path, folder, monkeypatch):
    other = tiny.tiny_model(seed=1)
    results = []
    monkeypatch.setenv("PYTHONPATH", tiny.discoverable(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "plugin")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for size in (1, 2):
        with engine(folder, tensor_parallel_size=size) as sparrow:
            first = sparrow.generate(RAGGED, SAMPLED)
            counters = sparrow.counters()
            sparrow.update_weights(other.named_parameters())
            sparrow.set_schedule(SMALL.replace(top_k=(3, 8)))
            results.append((first, counters, sparrow.generate(RAGGED, SAMPLED)))
    (one, counted, updated), (two, counted_too, updated_too) = results
    assert same_tokens(one, two) and logprob_gap(one, two) < 1e-4
    assert same_tokens(updated, updated_too) and logprob_gap(updated, updated_too) < 1e-4
    assert counted == counted_too and not same_tokens(one, updated)


def test_page_sizes_of_8_and_32_match_transformers(folder, model):
    for page_size in (8, 32):
        schedule = SMALL.replace(page_size=page_size, top_k=(1, 2, 3), sink_pages=2, recent_pages=1)
        with engine(folder, schedule) as sparrow:
            rollouts = sparrow.generate(RAGGED, SAMPLED)
        scores = HFEngine(model, schedule, eos_ids=[]).score(
            rollouts, schedule, SAMPLED.temperature
        )
        assert logprob_gap(rollouts, scores) < 1e-4
    with (
        pytest.raises(ConfigError, match="block_size to a multiple of 64"),
        engine(folder, SMALL.replace(page_size=64)),
    ):
        pass


def test_eight_bit_landmarks_select_the_same_pages_as_in_transformers(folder, model):
    schedule = SMALL.replace(landmark_dtype="fp8_e4m3")
    with engine(folder, schedule) as sparrow:
        assert sparrow.describe()["schedule"]["landmark_dtype"] == "fp8_e4m3"
        rollouts = sparrow.generate(RAGGED, SAMPLED)
        with pytest.raises(
            ConfigError, match=r"started with \{'landmark_dtype': 'fp8_e4m3'\}.*start a new engine"
        ):
            sparrow.set_schedule(SMALL)
    scoring = HFEngine(model, schedule, eos_ids=[])
    assert logprob_gap(rollouts, scoring.score(rollouts, schedule, SAMPLED.temperature)) < 1e-4
    assert (
        logprob_gap(rollouts, scoring.score(rollouts, SMALL, SAMPLED.temperature)) > 1e-2
    )  # different pages are chosen


def test_engine_can_be_configured_only_by_environment_variables(folder, monkeypatch):
    monkeypatch.setenv("SPARROW_SCHEDULE", SMALL.to_json())
    llm = LLM(model=str(folder), skip_tokenizer_init=True, **tiny.OPTIONS)
    [described] = llm.collective_rpc("sparrow_describe")
    llm.llm_engine.engine_core.shutdown()
    assert SparsitySchedule.from_dict(described["schedule"]) == SMALL


@pytest.mark.slow
def test_engine_keeps_its_mode_if_the_environment_changes(folder, stock, monkeypatch):
    """The environment variable that requested the first engine's mode is removed while the engine
    runs.
    """
    monkeypatch.setenv("SPARROW_SCHEDULE", SMALL.to_json())
    sparse = LLM(model=str(folder), skip_tokenizer_init=True, **tiny.OPTIONS)
    monkeypatch.delenv("SPARROW_SCHEDULE")
    wider = SMALL.replace(top_k=(5, 9))
    sparse.collective_rpc("sparrow_set_schedule", args=(wider.to_json(),))
    [described] = sparse.collective_rpc("sparrow_describe")
    assert SparsitySchedule.from_dict(described["schedule"]) == wider

    plain = LLM(model=str(folder), skip_tokenizer_init=True, **tiny.OPTIONS)
    with pytest.raises(ConfigError, match="started without a Sparrow schedule"):
        plain.collective_rpc("sparrow_describe")
    layers = plain.llm_engine.vllm_config.compilation_config.static_forward_context
    assert {type(layer.impl).__module__ for layer in layers.values()} == {
        "vllm.v1.attention.backends.cpu_attn"
    }
    runner = plain.llm_engine.model_executor.driver_worker.worker.model_runner
    multiplies = runner.model.model.layers[0].mlp.down_proj.cpu_linear
    assert multiplies is not torch.nn.functional.linear
    outputs = plain.generate(
        [{"prompt_token_ids": p} for p in RAGGED],
        SamplingParams(temperature=0.0, max_tokens=48, logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    assert [list(o.outputs[0].token_ids) for o in outputs] == [tokens for tokens, _ in stock]
    for llm in (sparse, plain):
        llm.llm_engine.engine_core.shutdown()


def test_engine_does_not_change_the_environment(folder, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    before = dict(os.environ)
    with engine(folder):
        assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    with pytest.raises(ConfigError), engine(folder, SMALL.replace(dense_layers=(9,))):
        pass
    changed = {name for name, value in os.environ.items() if before.get(name) != value}
    assert not {name for name in changed if name.startswith(("SPARROW", "VLLM_ENABLE"))}


def test_stock_engine_ignores_sparrow_environment_variables(folder, stock, monkeypatch):
    """Here, the environment requests sparse decoding from every vLLM engine."""
    monkeypatch.setenv("SPARROW_SCHEDULE", SMALL.to_json())
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    plain = StockEngine(str(folder), skip_tokenizer_init=True, **tiny.OPTIONS)
    assert os.environ["SPARROW_SCHEDULE"] == SMALL.to_json()
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ

    with pytest.raises(ConfigError, match="started without a Sparrow schedule"):
        plain.llm.collective_rpc("sparrow_describe")
    rollouts = plain.generate(RAGGED, Sampling(48, temperature=0.0, top_n=0))
    plain.close()
    assert [r.response_ids.tolist() for r in rollouts] == [tokens for tokens, _ in stock]


@pytest.mark.slow
def test_trainer_runs_unchanged_on_vllm(tmp_path):
    options = "enforce_eager=true,kv_cache_memory_bytes=67108864,block_size=32,max_model_len=512"
    arguments = [
        "train",
        "--model",
        "reasoner",
        "--run-dir",
        str(tmp_path),
        "--steps",
        "2",
        "--task",
        "trace:lines=12",
        "--schedule",
        "fixed:2",
        "--engine",
        f"vllm:{options}",
        "--rollout.prompts",
        "2",
        "--rollout.samples",
        "2",
        "--rollout.max-new-tokens",
        "96",
    ]
    main(arguments)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["mismatch"]["n_tokens"] > 0 for step in steps)


@pytest.mark.slow
def test_unsupported_models_and_options_raise_an_error(tmp_path, folder, monkeypatch):
    checkpoint(tmp_path / "mistral", name="mistral-mqa", sliding_window=64)
    with (
        pytest.raises(UnsupportedModel, match="sliding window of 64"),
        engine(tmp_path / "mistral"),
    ):
        pass
    speculative = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)
    with (
        pytest.raises(ConfigError, match="speculative decoding \\(ngram\\)"),
        engine(folder, speculative_config=speculative),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="kv_cache_dtype='fp8_e5m2'"),
        engine(folder, kv_cache_dtype="fp8_e5m2"),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="layer 4 dense, but the model has 4"),
        engine(folder, SMALL.replace(dense_layers=(4,))),
    ):
        pass
    assert not torch.distributed.is_initialized()  # vLLM left no process group


def test_different_backend_under_the_same_name_is_detected(folder):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.attention.selector import _cached_get_attn_backend

    from sparrow.vllm import plugin

    slot = AttentionBackendEnum.CPU_ATTN
    register_backend(slot, "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend")
    _cached_get_attn_backend.cache_clear()
    try:
        with pytest.raises(
            UnsupportedModel, match=r"runs vllm\.v1\.attention.*CPUAttentionBackend.*VLLM_PLUGINS"
        ):
            tiny.VLLMEngine(str(folder), SMALL, **tiny.OPTIONS)
    finally:
        slot.clear_override()
        plugin.register()
        _cached_get_attn_backend.cache_clear()


def test_response_aborted_before_its_first_token_is_reported():
    aborted = CompletionOutput(0, "", [], None, FlatLogprobs(), finish_reason="abort")
    with pytest.raises(EngineError, match="vLLM ended a response after 0 tokens with 'abort'"):
        rollout_of([1, 2], aborted, 5)
