"""Test a mixture of experts in lossy mode, in a real vLLM on a CPU."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.version")

import torch

from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm.stock import StockEngine
from sparrow.errors import ConfigError
from sparrow.rollout import Sampling
from sparrow.vllm import control
from tests.vllm import tiny_vllm as tiny

RAGGED = tiny.prompts(300, 17, 150, 33)
GREEDY = Sampling(max_new_tokens=32, temperature=0.0, top_n=0)
SAMPLED = Sampling(max_new_tokens=32, temperature=0.8, top_n=0, seed=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, tiny.checkpoint(folder, name="qwen3-mixture")


@pytest.fixture(scope="module")
def stock(made):
    """Return greedy rollouts of vLLM without Sparrow."""
    engine = StockEngine(str(made[0]), skip_tokenizer_init=True, **tiny.OPTIONS)
    rollouts = engine.generate(RAGGED, GREEDY)
    engine.close()
    return rollouts


@pytest.fixture(scope="module")
def sparrow(made, stock):
    with tiny.engine(made[0], tiny.UNBOUNDED) as engine:
        yield engine


@pytest.mark.slow
def test_unlimited_budget_matches_stock_vllm(stock, sparrow):
    assert tiny.same_tokens(sparrow.generate(RAGGED, GREEDY), stock)


@pytest.mark.slow
def test_small_budgets_match_transformers(made, sparrow):
    sparrow.set_schedule(tiny.SMALL)
    rollouts = sparrow.generate(RAGGED, SAMPLED)
    reference = HFEngine(made[1], tiny.SMALL, eos_ids=[])
    sparse, dense = (
        tiny.logprob_gap(rollouts, reference.score(rollouts, schedule, 0.8))
        for schedule in (tiny.SMALL, tiny.UNBOUNDED)
    )
    assert sparse < 1e-4
    assert dense > 0.1  # the schedule made a difference


@pytest.mark.slow
def test_weight_update_is_refused_if_the_kernel_rearranges_the_weights(made, sparrow):
    """vLLM's kernel for CPUs stores experts in blocks."""
    with pytest.raises(ConfigError, match=r"CPU kernel has rearranged .* new weights cannot"):
        sparrow.update_weights(made[1].named_parameters())


class Experts(torch.nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.quant_method = SimpleNamespace(unquantized_backend=backend)


@pytest.mark.parametrize("name, is_refused", [("TRITON", False), ("FLASHINFER_CUTLASS", True)])
def test_weight_update_requires_a_kernel_with_the_vllm_expert_layout(name, is_refused):
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    loaded = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Experts(UnquantizedMoeBackend[name]))
    model.load_weights = loaded.extend
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(quant_config=None), model_runner=SimpleNamespace(model=model)
    )
    if is_refused:
        with pytest.raises(ConfigError, match=r"FlashInfer CUTLASS kernel .* moe_backend='triton'"):
            control.sparrow_load_weights(worker, [("a", 1)])
        assert not loaded
    else:
        control.sparrow_load_weights(worker, [("a", 1)])
        assert loaded == [("a", 1)]
