"""Test the probability that two distributions draw the same token with shared Gumbel noise, and the
statistics based on it.
"""

import json

import numpy as np
import pytest
import torch

from tests.conftest import VOCAB, tiny_model

MODULES = ("common", "acceptance", "shared_noise", "tables_text")


def distributions(seed: int, rows: int, vocab: int) -> torch.Tensor:
    """Return distributions ``[rows, vocab]``, some sharp and some flat. A fifth of the tokens have
    probability zero.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * torch.linspace(0.1, 4, rows)[:, None]
    return logits.masked_fill(
        torch.rand(rows, vocab, generator=generator) < 0.2, float("-inf")
    ).softmax(-1)


@pytest.mark.parametrize(
    ("p", "q", "chance"),
    [
        ((0.5, 0.5), (1.0, 0.0), 1 / 2),  # q always draws the first token, and p half the time
        (
            (0.5, 0.5, 0.0),
            (0.0, 0.5, 0.5),
            1 / 3,
        ),  # the noise of the middle token must be the smallest of three
        ((0.0, 1.0), (1.0, 0.0), 0.0),
        ((0.2, 0.5, 0.3), (0.2, 0.5, 0.3), 1.0),
        (
            (0.5, 0.3, 0.2),
            (0.2, 0.3, 0.5),
            1 / (1 + 1.5 + 2.5) + 1 / (1 + 5 / 3 + 5 / 3) + 1 / (1 + 1.5 + 2.5),
        ),
    ],
)
def test_same_token_probability_matches_a_hand_calculation(study, p, q, chance):
    p, q = torch.tensor(p), torch.tensor(q)
    assert float(study.shared_noise.shared_noise(p, q)) == pytest.approx(chance, abs=1e-7)
    assert float(study.shared_noise.shared_noise(q, p)) == pytest.approx(chance, abs=1e-7)


def test_same_token_probability_matches_a_simulation(study):
    p, q, draws = distributions(0, 12, 9), distributions(1, 12, 9), 100_000
    noise = -torch.empty(draws, 1, 9).exponential_(generator=torch.Generator().manual_seed(2)).log()
    share = ((p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)).double().mean(0)
    error = (share * (1 - share) / draws).sqrt() + 1e-5
    chance = study.shared_noise.shared_noise(p, q)
    assert ((share - chance).abs() < 4.5 * error).all() and (chance > 0.1).sum() >= 4


def test_same_token_probability_lies_within_its_theoretical_bounds(study):
    p, q = distributions(3, 500, 50), distributions(4, 500, 50)
    q[:250] = 0.97 * p[:250] + 0.03 * q[:250]
    a, chance = study.shared_noise.chances(p, q)
    assert (chance <= a + 1e-6).all() and (chance >= a / (2 - a) - 1e-6).all()
    assert (chance < a - 1e-3).any() and (chance > a / (2 - a) + 1e-3).any()


def test_tokens_per_cycle_and_ratios_match_a_hand_calculation(study):
    rejection = [[[1.0, 0.5]], [[0.5, 0.5]]]
    shared = [[[0.8, 0.5]], [[0.4, 0.5]]]
    found = study.shared_noise.compared(np.array([rejection, shared]), [1, 2])
    kept, cycle = found["kept"], found["tokens_a_cycle"][2]
    assert [kept[name][0] for name in ("rejection", "shared noise", "ratio")] == [0.625, 0.55, 0.88]
    assert kept["at least"] == pytest.approx((1 + 3 * (0.5 / 1.5)) / 4, abs=1e-4)
    assert cycle["rejection"] == [
        2.125,
        1.75,
        2.5,
    ]  # with two texts, the extremes are resamples that contain only one of them
    assert cycle["shared noise"] == [1.9, 1.6, 2.2]
    assert cycle["ratio"] == pytest.approx([1.9 / 2.125, 2.2 / 2.5, 1.6 / 1.75], abs=1e-4)
    assert found["tokens_a_cycle"][1]["rejection"][0] == 1.75


def test_script_writes_the_file_that_the_table_reads(study, tmp_path, monkeypatch):
    context, path = 512, tmp_path / "text_shared_noise.json"
    tiny_model(max_position_embeddings=context).save_pretrained(tmp_path)
    (tmp_path / "card.json").write_text(json.dumps({"context": context}))
    np.save(
        tmp_path / "held_out.npy",
        np.random.default_rng(0).integers(0, VOCAB, 3 * context).astype(np.uint16),
    )
    counts = [
        "--texts",
        "3",
        "--cycles",
        "2",
        "--drafts",
        "2",
        "4",
        "--budgets",
        "64",
        str(context + 64),
    ]
    study.shared_noise.main([str(tmp_path), "--out", str(path), *counts])
    sparse, everything = study.common.read_result(path)["rows"]
    kept = sparse["kept"]
    assert kept["at least"] < kept["shared noise"][0] < kept["rejection"][0] < 0.95
    assert sparse["tokens_a_cycle"]["4"]["ratio"][0] < sparse["tokens_a_cycle"]["2"]["ratio"][0] < 1
    assert (
        everything["kept"]["shared noise"] == [1, 1, 1]
        and everything["tokens_a_cycle"]["4"]["ratio"][0] == 1
    )

    monkeypatch.setattr(
        study.tables_text, "load", lambda name: study.common.read_result(tmp_path / f"{name}.json")
    )
    lines = study.tables_text.text_shared_noise().splitlines()
    assert (
        len(lines) == 2 + 2
        and lines[0].count("|") == lines[-1].count("|") == 7
        and "5.00" in lines[-1]
    )
