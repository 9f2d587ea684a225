"""Test TRL's trainer with sparse rollouts: the patched parts of TRL, what is recorded and measured,
and a real run on a CPU.
"""

import inspect
import json
import os
import pickle
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparrow.decoding import Decoding
from sparrow.engines.base import Counters
from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError, EngineError
from sparrow.integrations.metrics import counter_metrics
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from sparrow.vllm import config
from tests.conftest import tiny_model

pytestmark = pytest.mark.slow

trl = pytest.importorskip("trl")
adapter = pytest.importorskip("sparrow.integrations.trl")
ROOT = Path(__file__).parents[2]


# --- the patched parts ---


def test_trl_has_the_supported_version():
    assert trl.__version__.startswith("1.16.")


def test_patched_parts_of_trl_are_unchanged():
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    assert list(inspect.signature(VLLMGeneration.generate).parameters) == [
        "self",
        "prompts",
        "images",
        "num_generations",
        "profiler",
    ]
    made = inspect.signature(VLLMGeneration.__init__).parameters
    assert {"logprobs", "max_completion_length", "mode"} <= set(made)
    assert {"base_url", "session"} <= set(VLLMClient.__init__.__code__.co_names)
    for name, parameters in (
        ("compute_loss", ["self", "model", "inputs"]),
        ("log", ["self", "logs"]),
    ):
        assert (
            list(inspect.signature(getattr(trl.GRPOTrainer, name)).parameters)[: len(parameters)]
            == parameters
        )
    for attribute in ("vllm_generation", "vllm_mode", "temperature", "use_vllm"):
        assert attribute in trl.GRPOTrainer.__init__.__code__.co_names


# --- recording ---


class Generation:
    """A stand-in for ``VLLMGeneration`` that returns three responses of two tokens. The first token
    of the second response is not in its list.
    """

    max_completion_length = 2
    logprobs = 0

    def generate(self, prompts, images, num_generations, profiler=None):
        self.asked = self.logprobs
        responses = [[5, 6], [9, 6], [5, 7]]
        if not self.logprobs:
            return (
                prompts,
                responses,
                [[[-1.0], [-1.0]]] * 3,
                [[[t] for t in ts] for ts in responses],
            )
        lists = [[-0.5, -1.0], [-0.4, -1.5]]
        ids = [[7, 5], [6, 8]]
        return (
            prompts,
            responses,
            [lists, [[-0.5, -1.0, -7.0], lists[1]], [lists[0], [-0.4, -1.5]]],
            [ids, [[7, 5, 9], ids[1]], [ids[0], [6, 7]]],
        )


def sparse_only():
    return nullcontext(False)


def test_prompts_of_the_first_batch_are_also_sampled_densely():
    """Dense sampling ends before the rollout starts, and TRL receives the rollout's responses."""
    inner, told = Generation(), []

    @contextmanager
    def densely():
        told.append("dense")
        yield not generation.dense
        told.append("sparse")

    real = inner.generate
    inner.generate = lambda *a: (told.append("generate"), real(*a))[1]
    generation = adapter.Recording(inner, 2, 2, lambda: True, densely)
    assert generation.generate([[1], [2, 2], [3]], None, 1)[1] == [[5, 6], [9, 6], [5, 7]]
    assert told == ["dense", "generate", "sparse", "generate"]
    assert [len(generation.dense), len(generation.recorded)] == [2, 2]
    generation.recorded = []
    generation.generate([[1], [2, 2], [3]], None, 1)
    assert told[4:] == ["dense", "sparse", "generate"] and len(generation.dense) == 2


def test_trl_receives_log_probs_of_sampled_tokens_and_the_adapter_keeps_top_lists():
    inner = Generation()
    generation = adapter.Recording(inner, 2, 2, lambda: True, sparse_only)
    prompts = [[1], [2, 2], [3]]
    _, _, logprobs, ids = generation.generate(prompts, None, 1)
    assert inner.asked == 2 and inner.logprobs == 0
    assert ids == [[[5], [6]], [[9], [6]], [[5], [7]]]
    assert logprobs == [[[-1.0], [-0.4]], [[-7.0], [-0.4]], [[-1.0], [-1.5]]]
    first, last = generation.recorded  # two of the three prompts, evenly spaced
    assert (first.prompt_ids, last.prompt_ids) == ([1], [3])
    assert first.response_ids.tolist() == [5, 6] and last.response_ids.tolist() == [5, 7]
    assert last.top_ids.tolist() == [[7, 5], [6, 7]] and last.top_logprobs.dtype == np.float32
    np.testing.assert_array_equal(first.logprobs, np.float32([-1.0, -0.4]))
    # A sampled token that is not among the n most likely tokens is not listed.
    generation.recorded = []
    adapter.Recording.__init__(generation, inner, 2, 3, lambda: True, sparse_only)
    generation.generate(prompts, None, 1)
    assert generation.recorded[1].top_ids.tolist() == [[7, 5], [6, 8]]
    assert generation.recorded[1].logprobs.tolist() == pytest.approx([-7.0, -0.4])


def test_only_the_first_generation_of_a_rollout_is_recorded():
    """Processes differ in how often they generate after tool calls, but must all run the same
    number of forward passes.
    """
    inner = Generation()
    generation = adapter.Recording(inner, 2, 2, lambda: True, sparse_only)
    generation.generate([[1], [2, 2], [3]], None, 3)
    assert inner.asked == 2 and len(generation.recorded) == 2
    continued = generation.generate([[1, 5, 6, 4]], [["an image from a tool"]], 1)
    assert inner.asked == 0 and continued[2] == [[[-1.0], [-1.0]]] * 3
    assert [rollout.prompt_ids for rollout in generation.recorded] == [[1], [3]]
    generation.recorded = []  # as compute_loss does
    generation.generate([[1], [2, 2], [3]], None, 3)
    assert inner.asked == 2 and len(generation.recorded) == 2


def test_no_top_lists_are_requested_between_measurements():
    inner = Generation()
    generation = adapter.Recording(inner, 2, 2, lambda: False, sparse_only)
    assert generation.generate([[1], [2], [3]], None, 1)[2] == [[[-1.0], [-1.0]]] * 3
    assert inner.asked == 0 and generation.recorded == [] and generation.max_completion_length == 2


def test_prompts_with_images_raise_an_error():
    generation = adapter.Recording(Generation(), 2, 2, lambda: True, sparse_only)
    with pytest.raises(ConfigError, match="cannot be measured for prompts with images"):
        generation.generate([[1]], [["an image"]], 1)


def test_policy_log_probs_match_those_of_a_dense_engine(monkeypatch):
    monkeypatch.setattr(adapter, "CHUNK_TOKENS", 5)
    model = tiny_model()
    engine = HFEngine(model, SparsitySchedule.dense(dense_layers=(0,)), eos_ids=[])
    rollouts = engine.generate(
        [[1, 2, 3], [4] * 20], Sampling(max_new_tokens=12, temperature=0.7, top_n=6)
    )
    wanted = engine.score(rollouts, SparsitySchedule.dense(dense_layers=(0,)), 0.7)
    for rollout, scores in zip(rollouts, wanted, strict=True):
        found = adapter.policy_top_logprobs(model, rollout, 0.7, torch.device("cpu"))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, scores.top_logprobs, atol=5e-5)


# --- when to measure ---


def measured_steps(steps, every=10):
    """Return the steps whose rollouts are measured if TRL generates in ``steps``."""
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), measure_every=every, _measured_at=float("-inf")
    )
    measured = []
    for step in steps:
        trainer.state = SimpleNamespace(global_step=step)
        if adapter.SparseGRPOTrainer._is_measured(trainer):
            measured.append(step)
    return measured


@pytest.mark.parametrize(
    "generated, measured",
    [
        (range(31), [0, 10, 20, 30]),
        (range(0, 40, 3), [0, 12, 24, 36]),
        (range(25, 60, 2), [25, 35, 45, 55]),  # resumed
        ([0, 0, 4, 4, 8, 8, 12, 12, 16], [0, 0, 12, 12]),  # several rollouts per step
        ([*range(15), *range(12)], [0, 10, 0, 10]),  # trained twice
    ],
)
def test_measurements_are_due_whichever_steps_generate(generated, measured):
    assert measured_steps(generated) == measured


def test_evaluations_are_neither_measured_nor_counted_as_measurements():
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        state=SimpleNamespace(global_step=0),
        measure_every=10,
        _measured_at=float("-inf"),
    )
    assert not adapter.SparseGRPOTrainer._is_measured(trainer)
    trainer.model.training = True
    assert adapter.SparseGRPOTrainer._is_measured(trainer)


@pytest.mark.parametrize("every", [0, -1])
def test_measuring_more_than_once_per_step_is_refused_before_loading(monkeypatch, every):
    monkeypatch.setattr(adapter.GRPOTrainer, "__init__", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=f"measure_every is {every}, expected at least 1"):
        adapter.SparseGRPOTrainer("model", print, measure_every=every)


# --- what is logged ---


def test_worker_counters_are_logged_as_ratios():
    assert counter_metrics(Counters(0, 0)) == {}
    assert counter_metrics(Counters(1, 4) + Counters(3, 4)) == {"sparrow/tokens_read": 0.5}
    lossy = Counters(1, 4, rows=4, dense_rows=1)
    assert counter_metrics(lossy) == {"sparrow/tokens_read": 0.25, "sparrow/dense_tokens": 0.25}
    of_drafts = DraftAcceptance.of([0.5, 0.5, 1.0], [0, 1, 7], bin_tokens=4)
    metrics = counter_metrics(Counters(1, 4, drafted=8, accepted=6, cycles=2, acceptance=of_drafts))
    p5 = {"": 0.5, "/0-4": 0.5, "/4-8": 1.0}  # the meter's buckets are 0.001 wide
    for at, value in p5.items():
        assert metrics.pop(f"sparrow/drafts/p5{at}") == pytest.approx(value, abs=1e-3)
    assert metrics == {
        "sparrow/tokens_read": 0.25,
        "sparrow/drafts/drafted": 8,
        "sparrow/drafts/accepted": 0.75,
        "sparrow/drafts/tokens_per_cycle": 4.0,
        "sparrow/drafts/acceptance": pytest.approx(2 / 3),
    }


@pytest.mark.parametrize(
    "mode, per_engine, drafted", [("server", 1, 8), ("colocate", 1, 32), ("colocate", 2, 16)]
)
def test_drafts_are_counted_once_per_engine(monkeypatch, mode, per_engine, drafted):
    """Each of the four processes counts the same tokens."""
    counts = Counters(1, 4, drafted=8, accepted=6, cycles=2)
    monkeypatch.setattr(adapter, "tally", lambda described, rpc: counts)
    monkeypatch.setattr(adapter, "gather_object", lambda objects: objects * 4)
    trainer = SimpleNamespace(
        vllm_mode=mode,
        vllm_generation=SimpleNamespace(tensor_parallel_size=per_engine),
        _described=None,
        _rpc=None,
    )
    assert adapter.SparseGRPOTrainer._counted(trainer)["sparrow/drafts/drafted"] == drafted


def served(client, is_main=True):
    """Return a trainer with a vLLM server, on the main process or another one."""
    trainer = object.__new__(adapter.SparseGRPOTrainer)
    trainer.vllm_mode = "server"
    trainer.accelerator = SimpleNamespace(is_main_process=is_main)
    trainer.vllm_generation = SimpleNamespace(vllm_client=client if is_main else None)
    return trainer


def test_server_without_sparrow_raises_an_error():
    refusal = SimpleNamespace(status_code=400, text="Call to collective_rpc method failed: x")
    client = SimpleNamespace(
        base_url="http://h:1", session=SimpleNamespace(post=lambda *a, **k: refusal)
    )
    trainer = served(client)
    with pytest.raises(
        ConfigError, match=r"http://h:1 refused sparrow_describe \(400: .*start it with Sparrow and"
    ):
        trainer._rpc("sparrow_describe")


def unreachable(*args, **kwargs):
    raise ConnectionError("connection refused")


def proxy_page(*args, **kwargs):
    return SimpleNamespace(status_code=200, text="<html>", json=lambda: json.loads("<html>"))


@pytest.mark.parametrize(
    "post, error, match",
    [
        (lambda *a, **k: SimpleNamespace(status_code=500, text="no"), EngineError, "refused drop"),
        (unreachable, EngineError, r"no vLLM server answers at http://h:1 \(connection refused\)"),
        (
            proxy_page,
            EngineError,
            r"answer of http://h:1 to drop is not a vLLM server's \(<html>\)",
        ),
    ],
)
def test_refusal_of_a_server_is_raised_on_every_process(monkeypatch, post, error, match):
    """The main process, which asks the server, sends its error to the others."""
    sent = []

    def gather(objects):
        sent.extend(pickle.loads(pickle.dumps(objects)))
        return list(sent)

    monkeypatch.setattr(adapter, "gather_object", gather)
    client = SimpleNamespace(base_url="http://h:1", session=SimpleNamespace(post=post))
    for is_main in (True, False):
        with pytest.raises(error, match=match):
            served(client, is_main)._rpc("drop")
    assert len(sent) == 1


def test_failure_to_empty_a_servers_prefix_cache_is_raised_on_every_process(monkeypatch):
    sent = []

    def gather(objects):
        sent.extend(objects)
        return sent[-1:]

    def reset_prefix_cache():
        raise Exception("Request failed: 500")

    answer = SimpleNamespace(status_code=200, json=lambda: {"results": []})
    client = SimpleNamespace(
        base_url="http://h:1",
        session=SimpleNamespace(post=lambda *a, **k: answer),
        reset_prefix_cache=reset_prefix_cache,
    )
    monkeypatch.setattr(adapter, "gather_object", gather)
    with pytest.raises(EngineError, match=r"http://h:1 did not empty its .* \(Request failed: 500"):
        served(client).set_schedule(SparsitySchedule.fixed(3))
    with pytest.raises(EngineError, match="did not empty its prefix cache"):
        served(client, is_main=False)._on_main(None)


@pytest.mark.parametrize("runs, wanted", [("lossy", "lossless"), ("lossless", "fixed:9")])
def test_server_in_a_different_mode_raises_an_error(monkeypatch, runs, wanted):
    def init(self, *args, **kwargs):
        self.use_vllm, self.vllm_generation = True, None

    described = [{"mode": runs, "schedule": SparsitySchedule.fixed(9).to_dict()}]
    monkeypatch.setattr(adapter.GRPOTrainer, "__init__", init)
    monkeypatch.setattr(adapter.SparseGRPOTrainer, "_rpc", lambda self, method: described)
    with pytest.raises(
        ConfigError, match=f"runs in mode '{runs}', not '(lossless|lossy)', and cannot change its"
    ):
        adapter.SparseGRPOTrainer(schedule=wanted)


def test_server_with_other_lossless_settings_raises_an_error(monkeypatch):
    def init(self, *args, **kwargs):
        self.use_vllm = True
        self.vllm_generation = None
        self.vllm_mode = "server"

    theirs = Decoding.lossless("fixed:9", draft_tokens=2)
    described = [{"mode": "lossless", "draft_tokens": 2, "schedule": theirs.schedule.to_dict()}]
    monkeypatch.setattr(adapter.GRPOTrainer, "__init__", init)
    monkeypatch.setattr(adapter.SparseGRPOTrainer, "_rpc", lambda self, method: described)
    monkeypatch.setattr(adapter.SparseGRPOTrainer, "_counted", lambda self: {})
    with pytest.raises(
        ConfigError, match="TRL's vLLM server has draft_tokens 2, not 8, and cannot change it"
    ):
        adapter.SparseGRPOTrainer(schedule={"mode": "lossless", "draft_tokens": 8})
    kept = adapter.SparseGRPOTrainer(schedule="lossless")
    assert kept.schedule == theirs.schedule  # because none is given
    adapter.SparseGRPOTrainer(schedule={"mode": "lossless", "draft_tokens": 2})


@pytest.mark.parametrize("fails", [False, True])
def test_environment_sets_the_mode_only_while_vllm_starts(monkeypatch, fails):
    monkeypatch.delenv("SPARROW_MODE", raising=False)
    monkeypatch.setenv("SPARROW_SCHEDULE", "fixed:3")  # the user's own setting
    asked = []

    def init(self, *args, **kwargs):
        asked.append(config.from_environment())
        self.use_vllm, self.vllm_generation = not fails, None

    described = [{"mode": "lossy", "schedule": SparsitySchedule.fixed(9).to_dict()}]
    monkeypatch.setattr(adapter.GRPOTrainer, "__init__", init)
    monkeypatch.setattr(adapter.SparseGRPOTrainer, "_rpc", lambda self, method: described)
    monkeypatch.setattr(adapter.SparseGRPOTrainer, "_counted", lambda self: {})
    with pytest.raises(ConfigError, match="use_vllm=True") if fails else nullcontext():
        adapter.SparseGRPOTrainer(schedule="fixed:9")
    assert asked == [Decoding.lossy("fixed:9")]
    assert config.from_environment() == Decoding.lossy("fixed:3")


@pytest.mark.parametrize(
    "setting",
    [
        {"top_p": 0.9},
        {"top_k": 50},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"vllm_structured_outputs_regex": "a+"},
        {"generation_kwargs": {"top_p": 0.9}},
        {"generation_kwargs": {"presence_penalty": 1.0}},
        {"generation_kwargs": {"logit_bias": {3: 1.0}}},
        {"generation_kwargs": {"temperature": 0.5}},
    ],
)
def test_sampling_options_that_bias_the_ratios_are_refused_before_loading(
    tmp_path, monkeypatch, setting
):
    monkeypatch.setattr(adapter.GRPOTrainer, "__init__", lambda *a, **k: pytest.fail("loaded"))
    [name] = setting.get("generation_kwargs", {}) or ["_".join([*setting]).removeprefix("vllm_")]
    made = trl.GRPOConfig(
        output_dir=str(tmp_path), use_vllm=True, use_cpu=True, bf16=False, **setting
    )
    with pytest.raises(ConfigError, match=name.removesuffix("_regex")):
        adapter.SparseGRPOTrainer("model", print, args=made, schedule="fixed:9")
    with pytest.raises(ConfigError, match=name.removesuffix("_regex")):
        adapter.SparseGRPOTrainer("model", print, made, schedule="lossless")


def test_sampling_options_that_keep_the_full_softmax_are_accepted(tmp_path):
    made = trl.GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        top_k=0,
        min_p=0.0,
        generation_kwargs={"stop": ["\n"], "top_k": -1},
    )
    adapter._check_sampling(made)


# --- a real run ---


def trained(out, *command):
    """Run TRL in its own process, and return what it wrote to ``out``."""
    environment = os.environ | dict(
        PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        TORCHDYNAMO_DISABLE="1",
        VLLM_USE_AOT_COMPILE="0",
        HF_HUB_OFFLINE="1",
    )
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_stock_trl_trains_on_sparse_rollouts_and_logs_the_acceptance_tail(tmp_path):
    pytest.importorskip("vllm")
    schedule, out = tmp_path / "schedule.json", tmp_path / "run.json"
    schedule.write_text(
        SparsitySchedule.fixed(4, page_size=8, bin_tokens=64, dense_layers=(0,)).to_json()
    )
    run = trained(
        out,
        ROOT / "recipes" / "trl_grpo.py",
        "--schedule",
        schedule,
        "--steps",
        "2",
        "--lines",
        "12",
        "--batch",
        "8",
        "--out",
        out,
    )
    assert run["schedule"]["top_k"] == [4] and run["mode"] == "colocate"
    first, second = (step for step in run["log"] if "loss" in step)
    for step in (first, second):
        assert 0.3 < step["sparrow/tokens_read"] < 0.8
        assert (
            step["sparrow/p5"] < 0.97 and step["sparrow/p5"] < step["sparrow/acceptance_mean"] < 1
        )
        assert step["sparrow/sequences"] == 8
        assert step["sparrow/p5/64-128"] > 0.95 > step["sparrow/p5/128-192"] == step["sparrow/p5"]
        assert (
            step["sparrow/p5/128-192/low"]
            <= step["sparrow/p5/128-192"]
            <= step["sparrow/p5/128-192/high"]
        )
        # TRL still receives the log-probs of the sampled tokens, so its importance ratios, which
        # are truncated at 2 here, have a mean of about 1.
        assert 0.9 < step["sampling/importance_sampling_ratio/mean"] < 1.1
        # The ceiling is below 1 only because vLLM computes in bfloat16.
        assert (
            0.98 < step["sparrow/p5/128-192/ceiling/low"] <= step["sparrow/p5/128-192/ceiling"] < 1
        )
        assert step["sparrow/p5/128-192"] < step["sparrow/p5/128-192/relative"] < 0.97


def test_stock_trl_trains_on_lossless_rollouts(tmp_path):
    """Some drafts are rejected, but the log-probs match the dense policy's before and after a
    weight update.
    """
    pytest.importorskip("vllm")
    run = trained(
        tmp_path / "run.json", "-m", "tests.integrations.lossless_in_trl", tmp_path / "run.json"
    )
    assert run["describe"]["mode"] == "lossless" and run["moved"] > 1e-4
    assert run["of a plain engine"] == "stock"
    assert run["counts"]["tokens_read"] < 0.8 * run["counts"]["tokens_held"]
    assert 0 < run["counts"]["accepted"] < run["counts"]["drafted"]
    assert run["tokens"] > 64 and run["gap"] < 1e-4
    steps = [step for step in run["log"] if "loss" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["grad_norm"] > 0 and step["reward_std"] > 0
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
        # Only the mass outside the lists keeps the ceiling below 1.
        assert step["sparrow/p5/64-128/ceiling"] > 0.999 and step["sparrow/sequences"] == 8
        assert "sparrow/p5" not in step, "samples follow the policy, so there is no mismatch to log"
        assert step["sparrow/tokens_read"] < 0.8
        assert (
            step["sparrow/drafts/p5"]
            < step["sparrow/drafts/accepted"]
            < step["sparrow/drafts/acceptance"]
            < 1
        )
        assert 1.5 < step["sparrow/drafts/tokens_per_cycle"] < 5
