"""Test verl's trainer with sparse or lossless rollouts: where the adapter plugs in, and what it
measures through verl's own classes and Ray.
"""

import asyncio
import importlib.util
import inspect
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparrow.engines.base import Counters
from sparrow.errors import ConfigError
from sparrow.mismatch import Ceiling
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.mismatch.tokens import TokenAcceptance
from sparrow.schedule import ALL_PAGES, SparsitySchedule

verl = pytest.importorskip("verl")
ray = pytest.importorskip("ray")
adapter = pytest.importorskip("sparrow.integrations.verl")

SCHEDULE = SparsitySchedule.fixed(4, bin_tokens=32, dense_layers=(0,))
ASKED = {"steps": 2, "lines": 8, "prompts": 4}
LAYERS = {"sparse_layers": [1, 2], "dense_layers": [0]}


def configuration(**rollout):
    return {
        "algorithm": {"rollout_correction": {"bypass_mode": False}},
        "actor_rollout_ref": {
            "rollout": {"calculate_log_probs": True, "temperature": 1.0, **rollout}
        },
        "trainer": {"v1": {"sparrow": {"probe_every": 5}}},
    }


# --- the patched parts ---


def test_verl_has_the_supported_version():
    assert verl.__version__ == "0.9.1"


def test_patched_parts_of_verl_are_unchanged():
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.workers.rollout.llm_server import LLMServerManager

    assert get_trainer_cls("sparrow") is adapter.SparsePPOTrainer and issubclass(
        adapter.SparsePPOTrainer, PPOTrainerSync
    )
    assert list(inspect.signature(PPOTrainerSync._compute_old_log_prob).parameters) == [
        "self",
        "batch",
        "metrics",
    ]
    assert "_compute_old_log_prob(batch, metrics=metrics)" in inspect.getsource(
        PPOTrainerSync._step_once
    )
    for hook in (PPOTrainerSync.on_init_end, PPOTrainerSync.on_sample_end):
        assert list(inspect.signature(hook).parameters) == ["self"]
    assert LLMServerManager.get_replicas
    server = Path(verl.__file__).parent / "workers/rollout/vllm_rollout/vllm_async_server.py"
    source = server.read_text()
    assert "self.engine = engine_client" in source
    assert "self._server_port, self._server_task = await run_uvicorn(" in source


@pytest.fixture(scope="module")
def recipe():
    path = Path(__file__).parents[2] / "recipes" / "verl" / "grpo.py"
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_file_location("verl_grpo", path)
    )
    module.__spec__.loader.exec_module(module)
    return module


def compose(overrides):
    """Compose verl's own configuration."""
    import hydra

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return hydra.compose("ppo_trainer", overrides=overrides)


@pytest.fixture(scope="module")
def composed(recipe):
    """Compose verl's own configuration with the settings of the recipe."""
    return compose(recipe.overrides(Path("/data"), mode="lossy", gpus=1, **ASKED))


@pytest.mark.parametrize("mode", ["dense", "lossless", "lossy"])
def test_verl_accepts_the_recipe_settings_for_two_gpus(recipe, mode):
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config = compose(recipe.overrides(Path("/data"), mode=mode, gpus=2, **ASKED))
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert config.trainer.n_gpus_per_node == 2
    assert config.trainer.v1.trainer_mode == ("sync" if mode == "dense" else "sparrow")
    if mode != "dense":
        assert adapter.requested(OmegaConf.to_container(config, resolve=True)).mode == mode


def test_recipe_sums_drafts_over_all_steps(recipe):
    rows = [{"data": {"sparrow/drafts/drafted": 3}}, {"data": {}}, {"data": {"sparrow/p5": 0.9}}]
    assert recipe.drafted(rows) == 3
    assert recipe.drafted(rows[1:]) == 0


def test_verl_treats_the_adapter_as_its_synchronous_trainer(composed):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.utils.config import validate_config

    assert composed.trainer.v1.trainer_mode == "sparrow"
    validate_config(composed, need_reference_policy(composed), need_critic(composed))
    trainer = adapter.SparsePPOTrainer(composed.copy())
    assert trainer.trainer_mode == "sync" and type(trainer.replay_buffer) is ReplayBuffer


# --- requested settings ---


def test_schedule_in_the_vllm_settings_overrides_the_environment(monkeypatch):
    monkeypatch.delenv("SPARROW_SCHEDULE", raising=False)
    given = {"vllm": {"additional_config": {"sparrow": SCHEDULE.to_dict()}}}
    assert adapter.requested(configuration(engine_kwargs=given)).schedule == SCHEDULE
    monkeypatch.setenv("SPARROW_SCHEDULE", "fixed:9")
    assert adapter.requested(configuration()).schedule.top_k == (9,)
    assert adapter.requested(configuration(engine_kwargs=given)).schedule == SCHEDULE


def test_settings_that_prevent_measuring_the_mismatch_raise_an_error(monkeypatch):
    monkeypatch.delenv("SPARROW_SCHEDULE", raising=False)
    with pytest.raises(ConfigError, match=r"Sparrow has no schedule; set .*additional_config"):
        adapter.requested(configuration())
    with pytest.raises(ConfigError, match="calculate_log_probs=True"):
        adapter.requested(configuration(calculate_log_probs=False))
    with pytest.raises(ConfigError, match=r"temperature=0\.7; leave trainer"):
        adapter.requested(configuration(temperature=0.7))
    bypassed = configuration() | {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
    with pytest.raises(ConfigError, match="bypass_mode=False"):
        adapter.requested(bypassed)


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}])
def test_sampling_options_that_bias_the_ratios_are_refused(setting):
    [(name, value)] = setting.items()
    with pytest.raises(ConfigError, match=rf"actor_rollout_ref.rollout.{name} is {value}"):
        adapter.requested(configuration(**setting))


# --- measurements ---


def test_unsampled_tokens_count_toward_length_but_not_acceptance():
    mask = torch.tensor([1, 1, 0, 0, 1])
    q = torch.log(torch.tensor([0.5, 0.5, 1.0, 1.0, 0.8]))
    p = torch.log(torch.tensor([0.5, 0.25, 0.1, 0.1, 0.4]))
    metrics = adapter.sampled_metrics(SCHEDULE, [torch.zeros(29)], [mask], [q], [p])
    assert metrics["sparrow/sampled/acceptance_mean"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    # With pages of 16 tokens, the positions 29 and 30 are rounded up to 32, and 33 to 48. All three
    # are in the second bin of 32 tokens.
    assert (
        metrics["sparrow/sampled/p5_floor/32-64"]
        == metrics["sparrow/sampled/p5_floor"]
        == pytest.approx(0.5)
    )
    assert (
        not any(math.isnan(value) for value in metrics.values())
        and "sparrow/sampled/p5_floor/32-64/low" not in metrics
    )


def test_probe_runs_at_its_configured_interval(composed, monkeypatch):
    """A probe runs after a step's weight update, uses the step's prompts, and is logged with the
    step's metrics.
    """
    asked, logged = [], {}

    def probe(urls, prompts, schedule, max_new_tokens):
        asked.append((urls, prompts, schedule, max_new_tokens))
        at = 96 + np.arange(4)  # long enough that the schedule no longer reads everything
        return [TokenAcceptance(np.full(4, x), np.ones(4), at) for x in (0.5, 0.9)]

    monkeypatch.setattr(adapter, "probe", probe)
    monkeypatch.setattr(
        adapter, "push_schedule", lambda replicas, schedule: asked.append((replicas, schedule))
    )
    trainer = adapter.SparsePPOTrainer(composed.copy())
    trainer._counted = lambda: asked.append("counted")
    trainer.schedule, trainer._prompts, trainer.timing_raw = SCHEDULE, [[1, 2], [3]], {}
    trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda step: asked.append(step))
    trainer.llm_server_manager = SimpleNamespace(
        get_addresses=lambda: ["10.0.0.1:8000"], get_replicas=lambda: "all"
    )
    trainer.logger = SimpleNamespace(log=lambda data, step: logged.update({step: data}))
    for trainer.global_steps in (4, 5):
        trainer.on_step_end()
    asks = (["http://10.0.0.1:8000"], [[1, 2], [3]], SCHEDULE, 96)
    # The first probe decodes densely to measure the ceiling. The second decodes as the run does.
    assert asked == [
        4,
        5,
        ("all", SCHEDULE.replace(top_k=(ALL_PAGES,))),
        asks,
        ("all", SCHEDULE),
        asks,
        "counted",  # so that the next step counts only its own rollout
    ]
    assert logged[5]["sparrow/p5/96-128/ceiling"] == 0.5
    trainer.global_steps = 10
    trainer.on_step_end()
    assert asked[7:] == [10, asks, "counted"] and logged.pop(10)["sparrow/p5/96-128/ceiling"] == 0.5
    assert (
        list(logged) == [5]
        and logged[5]["sparrow/p5"] == 0.5
        and logged[5]["sparrow/acceptance_mean"] == 0.7
    )
    assert trainer.report.n_sequences == 2

    # Samples of lossless rollouts follow the dense policy, so there is no mismatch to measure.
    asked.clear()
    trainer._is_lossless, trainer._ceiling, trainer.global_steps = True, Ceiling(), 15
    trainer.on_step_end()
    assert asked == [15, asks, "counted"] and logged[15]["sparrow/p5/96-128/ceiling"] == 0.5
    assert "sparrow/p5" not in logged[15]


def test_the_schedule_is_restored_if_a_replica_cannot_decode_densely(composed, monkeypatch):
    pushed = []

    def push_schedule(replicas, schedule):
        pushed.append(schedule)
        if schedule.is_dense:
            raise RuntimeError("the second of two replicas is gone")

    monkeypatch.setattr(adapter, "push_schedule", push_schedule)
    trainer = adapter.SparsePPOTrainer(composed.copy())
    trainer.schedule = SCHEDULE
    trainer.llm_server_manager = SimpleNamespace(get_replicas=lambda: "all")
    with pytest.raises(RuntimeError, match="is gone"):
        trainer._measure_ceiling()
    assert pushed == [SCHEDULE.reading_everything(), SCHEDULE]


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def replica(answers=()):
    """Create a stand-in for ``vLLMReplica``. As in verl, its server raises the workers' errors but
    returns no results. The workers reply with ``answers[method]``.
    """

    class Engine:
        async def collective_rpc(self, method):
            await asyncio.sleep(0.03)
            if method not in answers:
                raise RuntimeError("this vLLM engine decodes densely")
            return answers[method]

    class Server:
        def __init__(self):
            self.heard = []
            self.engine = Engine()

        async def launch_server(self):
            self._server_task = asyncio.current_task()

        async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            if "13" in args[0]:
                raise RuntimeError("this vLLM engine decodes densely")
            self.heard.append((method, *args))

        async def clear_kv_cache(self):
            self.heard.append("cleared")

        def told(self):
            return self.heard

    server = ray.remote(Server).remote()
    ray.get(server.launch_server.remote())
    return SimpleNamespace(servers=[server])


def test_every_replica_receives_the_schedule_and_clears_its_prefix_cache(cluster):
    replicas = [replica(), replica()]
    adapter.push_schedule(replicas, SCHEDULE)
    for told in replicas:
        heard = ray.get(told.servers[0].told.remote())
        assert heard == [("sparrow_set_schedule", SCHEDULE.to_json()), "cleared"]
    with pytest.raises(ConfigError, match=r"refused the schedule.*decodes densely"):
        adapter.push_schedule(replicas, SparsitySchedule.fixed(13))


def worker(**counts):
    """Return the reply of a worker in a lossless replica."""
    counted = {"tokens_read": 10, "tokens_held": 40, "drafted": 8, "accepted": 6, "emitted": 8}
    return {
        "sparrow_describe": [{"mode": "lossless", **LAYERS}],
        "sparrow_counters": [counted | counts],
        "sparrow_acceptance": [{"acceptance": DraftAcceptance.empty().to_dict()}],
    }


def trainer_of(composed, replicas):
    trainer = adapter.SparsePPOTrainer(composed.copy())
    trainer.llm_server_manager = SimpleNamespace(get_replicas=lambda: replicas)
    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None)
    trainer.curr_step_profile = False
    trainer._is_lossless = True
    trainer._described = adapter.call(replicas, "sparrow_describe")
    return trainer


def test_counters_of_all_replicas_are_summed_before_the_replicas_sleep(cluster, composed):
    trainer = trainer_of(composed, [replica(worker()), replica(worker(drafted=12, emitted=10))])
    trainer.on_sample_end()
    assert trainer._counts == Counters(20, 80, drafted=20, accepted=12, cycles=6)


def test_lossless_run_stops_if_no_token_was_verified(cluster, composed):
    trainer = trainer_of(composed, [replica(worker(drafted=0, accepted=0, emitted=0))])
    with pytest.raises(ConfigError, match="without verifying any token"):
        trainer.on_sample_end()


def test_replica_in_a_different_mode_raises_an_error(cluster):
    with pytest.raises(ConfigError, match=r"refused sparrow_describe: .*decodes densely"):
        adapter.call([replica(worker()), replica()], "sparrow_describe")
    described = adapter.call([replica(worker())], "sparrow_describe")
    adapter.check_mode(described, "lossless")
    with pytest.raises(ConfigError, match="decodes in mode 'lossless', not 'lossy'"):
        adapter.check_mode(described, "lossy")


def test_real_verl_step_is_measured_through_the_transfer_queue(cluster, composed):
    """Run the real ``PPOTrainerSync._compute_old_log_prob`` with only the policy's worker replaced."""
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    tq.init(
        OmegaConf.create(
            {
                "backend": {
                    "storage_backend": "SimpleStorage",
                    "SimpleStorage": {"num_data_storage_units": 1},
                }
            }
        )
    )
    rng = np.random.default_rng(0)
    lengths, prompt_lengths = [40, 25, 31], [20, 33, 27]

    def nested(rows):
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    actor = [torch.from_numpy(np.log(rng.uniform(0.3, 1.0, n))).float() for n in lengths]
    policy = [torch.from_numpy(np.log(rng.uniform(0.2, 1.0, n))).float() for n in lengths]
    keys = [f"r{i}" for i in range(3)]
    rows = TensorDict(
        {
            "prompts": nested([torch.ones(n, dtype=torch.long) for n in prompt_lengths]),
            "responses": nested([torch.ones(n, dtype=torch.long) for n in lengths]),
            "response_mask": nested([torch.ones(n, dtype=torch.long) for n in lengths]),
            "rollout_log_probs": nested(actor),
        },
        batch_size=3,
    )
    tags = [{}, {"is_padding": True}, {}]
    batch = tq.kv_batch_put(keys=keys, partition_id="train", fields=rows, tags=tags)

    def compute_log_prob(batch):
        # in the format of the engine's output: one value per prompt and response token, shifted
        # left by one
        rows = zip(prompt_lengths, policy, strict=True)
        whole = [torch.cat([torch.zeros(n - 1), row, torch.zeros(1)]) for n, row in rows]
        fields = TensorDict({"log_probs": nested(whole), "entropy": nested(whole)}, batch_size=3)
        return tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=fields)

    trainer = adapter.SparsePPOTrainer(composed.copy())
    trainer.schedule = SCHEDULE
    trainer._sequences = 1
    trainer._counts = Counters(1, 4, drafted=8, accepted=6, cycles=2)
    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=compute_log_prob)
    metrics = {}
    trainer._compute_old_log_prob(batch, metrics)
    assert trainer._prompts == [[1] * 20]
    assert "training/rollout_probs_diff_mean" in metrics  # verl's own
    real = [0, 2]
    wanted = adapter.sampled_metrics(
        SCHEDULE,
        [torch.ones(prompt_lengths[i]) for i in real],
        [torch.ones(lengths[i]) for i in real],
        [actor[i] for i in real],
        [policy[i] for i in real],
    )
    assert len(wanted) == 3 * 2 + 2
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    assert metrics["sparrow/tokens_read"] == 0.25
    assert metrics["sparrow/drafts/tokens_per_cycle"] == 4.0
    tq.close()
