"""Test the start-up self-check in real vLLM engines on a CPU. Each test breaks one thing that the
self-check must detect. ``selfcheck_cases.py`` covers lossless mode.
"""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from sparrow.errors import ConfigError
from sparrow.vllm import versions
from sparrow.vllm.runtime import layers_of
from sparrow.vllm.selfcheck import engine as engine_check
from sparrow.vllm.selfcheck import layers as layer_checks
from sparrow.vllm.selfcheck import names
from sparrow.vllm.selfcheck import steps as step_checks
from tests.vllm import tiny_vllm as tiny

vllm = pytest.importorskip("vllm")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def worker_of(sparrow):
    return sparrow.llm.llm_engine.model_executor.driver_worker.worker


def check(worker):
    runtime = layers_of(worker.vllm_config)[0].impl.runtime
    engine_check.check_engine(worker, runtime)
    runtime.begin_serving()


def double_queries(monkeypatch):
    """Make decode steps attend with doubled queries, which only the check of full steps can
    detect.
    """
    from sparrow.vllm import backend

    monkeypatch.setattr(layer_checks, "check_layers", lambda *_: 0.0)
    stock = backend.attention.paged_decode

    def decode(query, *arguments, **options):
        return stock(query * 2, *arguments, **options)

    monkeypatch.setattr(backend.attention, "paged_decode", decode)


def log_of(monkeypatch):
    """Record Sparrow's messages in vLLM's log from this point on."""
    from vllm import logger

    said, init = [], logger.init_logger
    ours = SimpleNamespace(info=said.append, warning=said.append)
    monkeypatch.setattr(
        logger, "init_logger", lambda name: ours if name == "vllm.sparrow" else init(name)
    )
    return said


@pytest.fixture(scope="module", params=["float32", "int8", "fp8"])
def sparrow(request, folder):
    cache = {"float32": {}, "int8": {"kv_cache_dtype": "int8_per_token_head"}}
    if request.param != "float32" and tiny.CACHE_IN_8_BITS.args[0]:
        pytest.skip(tiny.CACHE_IN_8_BITS.kwargs["reason"])
    options = cache.get(request.param, {"kv_cache_dtype": "fp8"})
    with pytest.MonkeyPatch.context() as patch:
        said = log_of(patch)
        with tiny.engine(folder, **options) as made:
            made.said = said
            yield made


@pytest.fixture
def worker(sparrow):
    return worker_of(sparrow)


# --- engines without defects ---


@pytest.mark.slow
def test_an_engine_logs_its_self_check_at_start(sparrow):
    [line] = [line for line in sparrow.said if "self-check" in line]
    assert f"with vLLM {vllm.__version__} and torch {torch.__version__}" in line
    assert "known to be exact on GPUs: vLLM 0.26, 0.28, 0.29, " in line


@pytest.mark.slow
def test_the_self_check_leaves_no_state_behind(sparrow, worker):
    check(worker)
    for layer in layers_of(worker.vllm_config):
        assert not layer_checks.bytes_of(layer).any()
    assert set(sparrow.rpc("sparrow_counters")[0].values()) == {0}
    assert "compute_logits" not in vars(worker.model_runner.model)


# --- engines with defects ---


@pytest.mark.slow
def test_landmarks_in_the_wrong_block_fail_the_self_check(worker, monkeypatch):
    from sparrow.vllm import backend

    stock = backend.attention.update_landmarks

    def one_block_off(layers, slot_mapping_T, **options):
        stock(layers, slot_mapping_T - layers.keys.shape[2], **options)

    monkeypatch.setattr(backend.attention, "update_landmarks", one_block_off)
    with pytest.raises(
        ConfigError, match=r"self-check failed in vLLM .*layers\.\d.* the best pages kept\), but "
    ):
        check(worker)


@pytest.mark.slow
def test_a_wrong_score_scale_fails_the_self_check(worker, monkeypatch):
    for layer in layers_of(worker.vllm_config):
        impl = layer.impl
        monkeypatch.setattr(impl, "forward", rescaled(impl, impl.scale * 1.1))
    with pytest.raises(ConfigError, match=r"every page kept\), .* accounts for at most 0\.0001;"):
        check(worker)


def rescaled(impl, scale):
    """Return a version of ``impl.forward`` that uses a different scale."""
    stock, right = impl.forward, impl.scale

    def forward(*arguments):
        impl.scale = scale
        try:
            return stock(*arguments)
        finally:
            impl.scale = right

    return forward


@pytest.mark.slow
def test_a_wrong_cache_scale_fails_the_self_check(sparrow, worker, monkeypatch):
    from sparrow.attention import CacheScales
    from sparrow.vllm import backend

    if worker.model_runner.vllm_config.cache_config.cache_dtype == "auto":
        pytest.skip("a cache in the model's dtype has no scales")
    stock = backend.attention.paged_decode

    def decode(*arguments, cache_scales, **options):
        wrong = CacheScales(cache_scales.k.contiguous(), cache_scales.v + 1)
        return stock(*arguments, cache_scales=wrong, **options)

    monkeypatch.setattr(backend.attention, "paged_decode", decode)
    with pytest.raises(ConfigError, match=r"cache: .*, with every page kept\), but "):
        check(worker)


@pytest.mark.slow
def test_storing_tokens_in_another_block_fails_the_self_check(worker, monkeypatch):
    from sparrow.vllm.cpu import CpuImpl

    stock = CpuImpl.do_kv_cache_update

    def twice(self, layer, key, value, kv_cache, slots):
        stock(self, layer, key, value, kv_cache, slots)
        stock(self, layer, key, value, kv_cache, slots - 32)

    monkeypatch.setattr(CpuImpl, "do_kv_cache_update", twice)
    with pytest.raises(ConfigError, match=r"layers\.\d.* stores tokens or landmarks outside"):
        check(worker)


def moved(cache):
    """Return a copy of this cache at a different place in memory."""
    storage = cache.untyped_storage().clone()
    return cache.new_empty(0).set_(storage, cache.storage_offset(), cache.shape, cache.stride())


@pytest.mark.slow
def test_views_of_a_replaced_cache_fail_the_self_check(worker, monkeypatch):
    check(worker)
    for layer in layers_of(worker.vllm_config):
        monkeypatch.setattr(layer, "kv_cache", moved(layer.kv_cache))
    with pytest.raises(ConfigError, match=r"with the best pages kept\), but "):
        check(worker)


@pytest.mark.slow
def test_decode_steps_that_differ_from_a_dense_pass_fail_the_self_check(worker, monkeypatch):
    double_queries(monkeypatch)
    with pytest.raises(
        ConfigError,
        match=r"log-probs of a decode step that keeps every page differ .* accounts for at most 0\.001;",
    ):
        check(worker)


# --- names ---


@pytest.mark.parametrize("name", ["split_decodes_and_prefills", "gone"])
def test_renamed_vllm_parameter_raises_an_error_before_memory_is_allocated(
    name, folder, monkeypatch
):
    from vllm.v1.attention.backends import utils
    from vllm.v1.worker import cpu_worker  # noqa: F401  before the name is replaced

    if name == "gone":
        monkeypatch.delattr(utils, "split_decodes_and_prefills")
        message = "utils:split_decodes_and_prefills is missing "
    else:
        monkeypatch.setattr(utils, name, lambda common_attn_metadata, threshold: None)
        message = "utils:split_decodes_and_prefills has no parameter 'decode_threshold'; install "
    with pytest.raises(ConfigError, match=message), tiny.engine(folder):
        pass


def test_required_names_are_looked_up_in_classes_dataclasses_and_functions():
    names.check_name("vllm.v1.core.sched.output:SchedulerOutput", ("finished_req_ids",))
    names.check_name("vllm.v1.worker.worker_base:WorkerBase.compile_or_warm_up_model")
    with pytest.raises(ConfigError, match="SchedulerOutput has no parameter 'renamed'"):
        names.check_name("vllm.v1.core.sched.output:SchedulerOutput", ("renamed",))
    with pytest.raises(ConfigError, match="no_such_module:name is missing"):
        names.check_name("vllm.no_such_module:name")


# --- what is compared ---


def test_the_distance_is_relative_to_the_spread_of_log_probs():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5000, generator=generator)
    other = logits + 0.01 * torch.randn(3, 5000, generator=generator)
    assert step_checks.distance(logits + 7, logits) < 1e-6
    assert step_checks.distance(other, logits) == pytest.approx(0.01, rel=0.05)
    assert step_checks.distance(3 * other, 3 * logits) == pytest.approx(0.01, rel=0.1)
    logits[0, 0] = -torch.inf
    assert step_checks.distance(other, logits) == torch.inf
    assert not step_checks.distance(torch.full_like(other, torch.nan), other) <= 1


# --- tested versions ---


def test_versions_listed_as_exact_match_the_recorded_results(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    common, found = importlib.import_module("common"), {}
    for path in (common.RESULTS / "vllm_versions").glob("*.json"):
        result = common.read_result(path)
        if "lossless" in result and result["lossless"]["graphs"]["within twice the yardstick"]:
            major, minor = Version(result["vllm"]).release[:2]
            torches = Version(result["torch"]).release[:2]
            found[f"{major}.{minor}"] = "{}.{}".format(*torches)
    assert dict(sorted(found.items())) == versions.PROVEN


def test_untested_vllm_version_is_accepted(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.41.0")
    versions.check(on_cpu=False)
    assert "vLLM 0.41.0 and torch" in versions.known()
