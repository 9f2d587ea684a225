"""Test the self-check of an engine in lossless mode; ``test_lossless.py`` runs this file in its own
process.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.vllm import lossless_cases as cases  # isort: skip  before vLLM is imported

from sparrow.errors import ConfigError
from sparrow.vllm.lossless import sparse_drafter
from sparrow.vllm.runtime import layers_of
from sparrow.vllm.selfcheck import engine as engine_check
from sparrow.vllm.selfcheck import layers as layer_checks
from sparrow.vllm.selfcheck import names
from sparrow.vllm.selfcheck import steps as step_checks
from tests.vllm import tiny_vllm as tiny
from tests.vllm.test_selfcheck import check, double_queries, log_of, moved


@pytest.fixture(scope="module")
def llm(old_and_new):
    with pytest.MonkeyPatch.context() as patch:
        said = log_of(patch)
        decoding = cases.lossless(4, adapt=True, pages=4)
        with cases.engine(old_and_new[0], decoding, checks_itself=True) as made:
            made.said = said
            yield made


@pytest.fixture
def worker(llm):
    return llm.llm_engine.model_executor.driver_worker.worker


def test_an_engine_checks_itself_at_start_without_leaving_state_behind(llm, worker):
    assert sum("self-check passed" in line for line in llm.said) == 1
    assert set(cases.counters(llm).values()) == {0}
    for layer in layers_of(worker.vllm_config):
        assert not layer_checks.bytes_of(layer).any()


def test_the_self_check_compares_drafts_and_verification_over_a_cycle(worker, monkeypatch):
    rows = []
    stock = step_checks.distance

    def distance(found, expected):
        rows.append((len(found), stock(found, expected)))
        return rows[-1][1]

    monkeypatch.setattr(step_checks, "distance", distance)
    check(worker)
    (drafts, first), (verified, second) = rows
    assert drafts in (1, 2, 3, 4) and verified == 1
    assert 0 < first < 1e-4 and second < 1e-4


def test_drafts_that_differ_from_verification_fail_the_self_check(worker, monkeypatch):
    double_queries(monkeypatch)
    with pytest.raises(
        ConfigError,
        match="log-probs of drafts that keep every page differ from those of a dense pass",
    ):
        check(worker)


def test_capturing_graphs_records_the_cache_and_a_new_cache_clears_the_record(worker, monkeypatch):
    """There are no CUDA graphs here, so no sizes are captured."""
    speculator = worker.model_runner.speculator
    drafter = speculator.drafter
    assert drafter.captured_over == {}
    capture = nullcontext(SimpleNamespace(stream=None))
    monkeypatch.setattr(sparse_drafter, "graph_capture", lambda device: capture)
    monkeypatch.setattr(worker.vllm_config.compilation_config, "cudagraph_capture_sizes", [])
    drafter.capture()
    assert drafter.captured_over == drafter.addresses() != {}
    drafter.set_cache(speculator.runtime, speculator.block_tables)
    assert drafter.captured_over == {}


def test_graph_captured_over_a_replaced_cache_fails_the_self_check(worker, monkeypatch):
    """A captured step cannot report its cache, so the cache is recorded during the capture."""
    drafter = worker.model_runner.speculator.drafter
    monkeypatch.setattr(drafter, "captured_over", drafter.addresses())
    engine_check.check_addresses(drafter)
    layer = layers_of(worker.vllm_config)[1]
    with monkeypatch.context() as patch:
        patch.setattr(layer, "kv_cache", moved(layer.kv_cache))
        with pytest.raises(
            ConfigError, match=r"the KV cache of .*layers\.1\..* has moved in memory since"
        ):
            check(worker)
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "_blocks_SM", drafter._blocks_SM.clone())
        with pytest.raises(ConfigError, match="the block table has moved in memory since"):
            check(worker)


def test_vllm_sampler_without_a_required_parameter_fails_the_self_check(worker, monkeypatch):
    from vllm.v1.worker.gpu.sample import gumbel

    from sparrow.vllm import patches

    needed = patches.needed("lossless", on_cpu=True)
    names.check_names(needed, is_lossless=True, on_cpu=True, has_adapters=True)
    monkeypatch.setattr(gumbel, "gumbel_sample", lambda logits, heat, logits_cache: None)
    with pytest.raises(
        ConfigError, match="gumbel:gumbel_sample has no parameter 'expanded_idx_mapping'"
    ):
        names.check_names(needed, is_lossless=True, on_cpu=True, has_adapters=True)


@tiny.CACHE_IN_8_BITS
def test_a_cache_scale_that_differs_from_vllms_fails_the_self_check(old_and_new):
    decoding = cases.lossless(2, pages=4)
    with cases.engine(old_and_new[0], decoding, kv_cache_dtype="fp8") as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        check(worker)
        layers_of(worker.vllm_config)[1].impl.fp8_scales.values.k.mul_(2)
        with pytest.raises(ConfigError, match=r"layers\.1\..* with every page kept\), but "):
            check(worker)
