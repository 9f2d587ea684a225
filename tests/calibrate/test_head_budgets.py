"""Test budgets by layer and kv head. The order in which pages are allocated is compared with hand
calculations, and the command runs on a small model.
"""

import numpy as np
import pytest

from sparrow.calibrate import head_budgets
from sparrow.cli import main
from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB, tiny_model

LAYOUT = SparsitySchedule((16,), bin_tokens=64, page_size=2, dense_layers=(1,))


def test_greedy_allocation_matches_a_hand_calculation():
    missed = np.array([[0.9, 0.5, 0.4, 0.39], [0.3, 0.1, 0.0, 0.0], [0.8, 0.79, 0.78, 0.77]])
    assert head_budgets.greedy(missed, 3).tolist() == [1, 1, 1]
    # The next two pages reduce the missed mass by 0.4 and 0.2, and the two after that by 0.1 each.
    assert head_budgets.greedy(missed, 5).tolist() == [2, 2, 1]
    assert head_budgets.greedy(missed, 7).tolist() == [3, 3, 1]
    assert head_budgets.greedy(np.zeros((3, 4)), 7).tolist() == [3, 2, 2]  # no gain for any head


def test_layers_are_weighted_by_their_loss_of_acceptance():
    half = 0.5 ** np.arange(8)
    missed = np.array([[0.3, 0.2], [0.1, 0.1], [0.2, 0.9], [0.02, 0.01]])[..., None] * half
    weights = head_budgets.weights(missed, np.array([0.01, 0.01, 0.01, 0.2]), at=2)
    assert weights == pytest.approx(
        np.array([0.01, 0.01, 0.01, 0.2]) / (np.array([0.25, 0.1, 0.55, 0.015]) / 2)
    )
    by_head = head_budgets.divided(missed, weights, "heads", 3)
    by_layer = head_budgets.divided(missed, weights, "layers", 3)
    assert by_head.sum() == by_layer.sum() == 24 and by_head.min() >= 1
    assert (
        by_head.argmax() == 6
        and by_layer[:, 0].argmax() == 3
        and (by_layer[:, 0] == by_layer[:, 1]).all()
    )
    alike = head_budgets.divided(missed, np.ones(4), "heads", 3)
    assert alike.argmax() == 5  # with equal weights, only the missed mass counts


def some_prompts(count=6):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, 80 + i).tolist() for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["layers", "heads"])
def test_layer_with_the_largest_loss_gets_the_largest_budget(by, tmp_path):
    engine = HFEngine(tiny_model(), LAYOUT, eos_ids=[])
    said = []
    found = head_budgets.find(
        engine,
        some_prompts(),
        Sampling(20, top_n=VOCAB, seed=1),
        tmp_path,
        LAYOUT,
        by,
        16,
        listener=said.append,
    )
    assert found.replace(head_budgets=()) == LAYOUT and found.sparse_budget_units.mean() == 256
    lost, layers = found.provenance["head_budgets"]["lost"], np.array(found.head_budgets)
    assert len(lost) == 3 and (layers[1] == 1).all() and len(said) == 6
    assert layers[[0, 2, 3]].mean(1).argmax() == np.argmax(lost)
    assert (layers[:, 0] == layers[:, 1]).all() == (by == "layers") and len(np.unique(layers)) > 2


@pytest.mark.slow
def test_head_budgets_that_lower_p5_are_rejected(tmp_path, monkeypatch):
    engine = HFEngine(tiny_model(), LAYOUT, eos_ids=[])
    monkeypatch.setattr(head_budgets, "divided", lambda *_: np.array([[1, 31], [31, 1], [31, 1]]))
    with pytest.raises(
        ConfigError,
        match=r"with 16 pages kept by score, p5 is 0\.\d+ without head_budgets and 0\.\d+ with the head",
    ):
        head_budgets.find(
            engine, some_prompts(), Sampling(20, top_n=VOCAB, seed=1), tmp_path, LAYOUT, "heads", 16
        )


def test_settings_that_cannot_yield_head_budgets_raise_an_error(tmp_path):
    engine = HFEngine(tiny_model(), LAYOUT, eos_ids=[])

    def find(layout, top_k=16, tokens=2):
        head_budgets.find(
            engine, some_prompts(1), Sampling(tokens), tmp_path, layout, "heads", top_k
        )

    with pytest.raises(
        ConfigError,
        match=r"at least 16 pages .* got 15 pages and a layout with 3 sparse layers and no head_budgets",
    ):
        find(LAYOUT, 15)
    with pytest.raises(ConfigError, match="with 3 sparse layers and head_budgets"):
        find(LAYOUT.replace(head_budgets=((1, 1),) * 4))
    with pytest.raises(ConfigError, match="0 sparse layers"):
        find(LAYOUT.replace(dense_layers=(0, 1, 2, 3)))
    with pytest.raises(
        ConfigError,
        match="not drop when a single layer keeps only 512 pages by score",
    ):
        find(LAYOUT, 512)


def test_head_budgets_require_the_transformers_engine(checkpoint, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(
            [
                "calibrate",
                "--model",
                checkpoint,
                "--task",
                "trace:lines=2",
                "--out",
                str(tmp_path / "out.json"),
                "--head-budgets",
                "heads",
                "--engine",
                "vllm",
            ]
        )
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "head_budgets needs engine hf, got 'vllm', which cannot change budgets while it runs"
        in said
    )
