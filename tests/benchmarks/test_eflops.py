"""Compare the paper's formulas with hand calculations, with the cost model's bytes and FLOPs, and
with the paper's ideal speed-ups.
"""

import importlib
from pathlib import Path

import numpy as np
import pytest

from sparrow.cost import MACHINES, SHAPES, Machine, decode_step
from sparrow.schedule import SparsitySchedule

H200 = MACHINES["h200"]
PUBLISHED = {name: SHAPES[name] for name in ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")}
"""The shapes for which the paper gives ideal speed-ups."""


@pytest.fixture(scope="module")
def eflops():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("eflops")


def paper_intensity(machine: Machine) -> float:
    """Return a machine's FLOPs per byte as Kinetics counts them. Its FLOPs are the peak "with
    sparsity", which gives 562.5 for the B200.
    """
    return 2 * machine.flops / machine.hbm_bytes_s


def test_eflops_match_a_hand_calculation(eflops):
    common = dict(P_w=10, N=2, L_in=3, L_out=4, D=5, r=6)
    # 2*10*2*4 = 160; 6*(2*3+4)*4*2*5 = 2400; 2*3*4*5 + 2*16*5 = 280 bytes.
    assert eflops.dense_eflops(**common, I=0) == 160 + 2400
    assert eflops.dense_eflops(**common, I=7) == 160 + 2400 + 7 * 280
    # Attention: 160 + 2*6*2*5*2*4 = 960, 2*2*5*2*4 = 160 bytes. Scoring: 2*2*3*5*4 = 240,
    # 6*2*5*16/4 = 240, 2*3*5*4 = 120 and 2*5*16/4 = 40 bytes.
    assert eflops.sparse_eflops(**common, I=0, b=2, P=2) == 160 + 960 + 240 + 240
    assert eflops.sparse_eflops(**common, I=7, b=2, P=2) == 1600 + 7 * (160 + 120 + 40)


def test_eflops_match_the_cost_model_if_d_covers_keys_and_values(eflops):
    shape, L, budget, P = SHAPES["qwen3-4b"], 4096, 512, 16
    common = (0, 1, 0, L, shape.kv_width, shape.heads / shape.kv_heads)
    compute = eflops.dense_eflops(*common, 0)
    memory = eflops.dense_eflops(*common, 1) - compute
    steps = np.arange(1, L + 1)
    assert memory == pytest.approx(
        sum(decode_step(shape, H200, t).kv_bytes for t in steps), rel=1 / L
    )
    assert compute == pytest.approx(
        4 * shape.layers * shape.heads * shape.head_dim * steps.sum(), rel=1 / L
    )

    schedule = SparsitySchedule.fixed(budget // P - 3, dense_layers=())
    far = [decode_step(shape, H200, t, schedule) for t in range(budget + 1, L + 1)]
    near = (
        budget * shape.kv_width * 2 * budget,
        2 * shape.kv_width * budget**2 / (4 * P),
    )  # every step reads the whole budget, even at the start
    sparse_memory = eflops.sparse_eflops(*common, 1, budget, P) - eflops.sparse_eflops(
        *common, 0, budget, P
    )
    counted = sum(step.kv_bytes + step.landmark_bytes for step in far) + sum(near)
    assert sparse_memory == pytest.approx(counted, rel=2e-3)


def test_formulas_reproduce_only_some_published_ideal_speedups(eflops):
    # D is kv_width, and I is 412 FLOPs per byte. Responses have 40,000 tokens, because the tables
    # end there. Scoring is included, and there is no prompt.
    intensity = paper_intensity(H200)
    assert intensity == pytest.approx(412.3, abs=0.1)
    assert paper_intensity(MACHINES["b200"]) == 562.5
    found = {
        n: eflops.ideal_speedup(s, SparsitySchedule.preset(n), intensity, 40_000)
        for n, s in PUBLISHED.items()
    }
    assert found["qwen3-1.7b"] == pytest.approx(5.2, rel=0.03)
    assert found["qwen3-14b"] == pytest.approx(2.7, rel=0.03)
    # The published 3.5 for the 8B model follows from the 0.87 table, which the authors also
    # released. The 0.86 table gives a fifth more.
    lenient = eflops.ideal_speedup(
        SHAPES["qwen3-8b"], SparsitySchedule.preset("qwen3-8b", 0.87), intensity, 40_000
    )
    assert lenient == pytest.approx(3.5, rel=0.03)
    assert found["qwen3-8b"] == pytest.approx(4.20, abs=0.01)
    # No cutoff gives the published 5.1 for the 4B model. Even the speed-up of attention alone,
    # without weights or scoring, is smaller.
    assert found["qwen3-4b"] == pytest.approx(4.11, abs=0.01)
    t = np.arange(1, 40_001)
    attention_alone = np.cumsum(t) / np.cumsum(SparsitySchedule.preset("qwen3-4b").tokens_read(t))
    assert attention_alone.max() == pytest.approx(5.06, abs=0.01)


def test_no_cutoff_reproduces_all_four_published_speedups_without_scoring_cost(eflops):
    def miss(response):
        found = []
        for name, shape in PUBLISHED.items():
            b = SparsitySchedule.preset(name).tokens_read(np.arange(1, response + 1)).mean()
            group, intensity = shape.heads / shape.kv_heads, H200.flops / H200.hbm_bytes_s
            common = (shape.weights, 1, 0, response, shape.kv_width, group, intensity)
            found.append(eflops.dense_eflops(*common) / eflops.sparse_eflops(*common, b, np.inf))
        return np.abs(np.log(np.array(found) / [5.2, 5.1, 3.5, 2.7])).max()

    misses = {response: miss(response) for response in range(20_000, 40_001, 2000)}
    assert min(misses, key=lambda response: misses[response]) == 28_000
    assert misses[28_000] == pytest.approx(0.153, abs=0.005)
