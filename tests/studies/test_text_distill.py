"""Test the study of DistillSparse on natural text, with a tiny random model whose output changes if
pages are skipped.
"""

import json
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import VOCAB, tiny_model

LOSSES = ("forward", "reverse", "overlap")
MODULES = ("common", "distill", "task", "tables_text")
PROMPT, TOKENS, TRAIN, HELD_OUT = 64, 64, 48, 4
OPTIONS = {
    "prompt": PROMPT,
    "tokens": TOKENS,
    "train": TRAIN,
    "held-out": HELD_OUT,
    "calibration": 4,
    "pages": (1, 2),
    "target": 0.9,
    "update": 2,
    "measure-at": (8, TRAIN),
    "drafts": (2, 4),
    "cycles": 2,
    "top-n": VOCAB,
    "learning-rates": 3e-3,
}


def command(folder, *more, **changed):
    """Return the study's options. ``changed`` overrides ``OPTIONS``."""
    flags = [
        "--samples",
        str(folder / "samples.npz"),
        "--out",
        str(folder / "text_distill.json"),
        *more,
    ]
    for name, value in (OPTIONS | changed).items():
        flags += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return [str(folder), "--dense-layers", *flags]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create a checkpoint and random responses. The held-out responses are the same as the training
    responses, because nothing learned from random responses generalises.
    """
    out = tmp_path_factory.mktemp("checkpoint")
    tiny_model(max_position_embeddings=256).save_pretrained(out)
    (out / "card.json").write_text(json.dumps({"parameters": 1000, "held_out_loss": 4.5}))
    rng = np.random.default_rng(0)
    two = rng.integers(VOCAB, size=(2, PROMPT + TOKENS), dtype=np.uint16)
    np.savez(
        out / "samples.npz",
        train=np.tile(two, (TRAIN // 2, 1)),
        held_out=np.tile(two, (HELD_OUT // 2, 1)),
    )
    return out


@pytest.fixture(scope="module")
def result(study, folder):
    return study.distill.main(command(folder))


def test_losses_match_a_hand_calculation(study):
    p = torch.tensor([[0.5, 0.3, 0.2], [0.7, 0.2, 0.1]], dtype=torch.float64).log()
    q = torch.tensor([[0.2, 0.2, 0.6], [0.7, 0.2, 0.1]], dtype=torch.float64).log()
    forward = 0.5 * np.log(2.5) + 0.3 * np.log(1.5) + 0.2 * np.log(1 / 3)
    reverse = 0.2 * np.log(0.4) + 0.2 * np.log(2 / 3) + 0.6 * np.log(3)
    for name, value in (("forward", forward), ("reverse", reverse), ("overlap", 0.4)):
        assert study.distill.LOSSES[name](p, q).tolist() == pytest.approx([value, 0], abs=1e-6)


def test_gain_compares_the_same_responses_before_and_after(study):
    rng = np.random.default_rng(0)
    before = rng.random((10, 50)) * np.linspace(0.2, 0.8, 10)[:, None]
    found = study.distill.gain(before, before + 0.1)
    assert found["mean"] == pytest.approx([0.1] * 3) and found["p5"] == pytest.approx([0.1] * 3)
    estimate, low, high = study.distill.gain(before, before**2)["p5"]
    assert low <= estimate <= high < 0
    assert estimate == pytest.approx(
        np.percentile(before**2, 5) - np.percentile(before, 5), abs=1e-4
    )


@pytest.mark.slow
def test_every_loss_brings_the_actor_closer_to_the_policy(result):
    rows = {(row["loss"], row["responses"]): row for row in result["rows"]}
    assert list(rows) == [("none", 0), *((loss, n) for loss in LOSSES for n in (8, TRAIN))]
    before = rows["none", 0]
    for loss in LOSSES:
        early, late = rows[loss, 8], rows[loss, TRAIN]
        assert late["training_loss"] < 0.7 * early["training_loss"]
        for name in ("mean", "p5"):
            assert 0.03 < early["gain"][name][0] < late["gain"][name][0] - 0.05
            risen = late["held_out"][name][0] - before["held_out"][name][0]
            assert late["gain"][name][0] == pytest.approx(risen, abs=2e-4)
        assert late["on_its_own"]["mean"] != before["on_its_own"]["mean"]
        assert late["drafting"]["mean"] != before["drafting"]["mean"] and "drafting" not in early


def test_calibration_picks_the_schedule_with_p5_closest_to_the_target(result):
    nearest = min(result["calibration"], key=lambda row: abs(row["p5"] - 0.9))
    assert [row["pages"] for row in result["calibration"]] == [1, 2]
    assert result["schedule"]["top_k"] == [nearest["pages"]]


def test_finished_losses_are_not_retrained_and_changed_settings_raise_an_error(
    study, folder, result, monkeypatch
):
    def refuse(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(study.distill, "trained", refuse)
    again = study.distill.main(command(folder))
    assert again["rows"] == result["rows"]
    with pytest.raises(ValueError, match="made with different settings"):
        study.distill.main(command(folder, rank=4))
    with pytest.raises(ValueError, match=r"contains arrays with the shapes .*; pass a new file"):
        study.distill.main(command(folder, train=TRAIN + 1))


def test_an_actor_that_reads_all_pages_matches_the_policy(study, folder):
    given = {k.replace("-", "_"): v for k, v in OPTIONS.items()} | {
        "pages": (20,),
        "calibration": 2,
    }
    paths = {"checkpoint": folder, "samples": folder / "samples.npz"}
    all_read = study.distill.Study(
        Namespace(**given, **paths, dense_layers=[], batch=2, sampled_together=4)
    )
    assert all_read.calibrate()[0]["p5"] == pytest.approx(1, abs=1e-5)
    drafted = all_read.drafting({})
    assert drafted["mean"][0] == 1 and drafted["tokens_a_cycle"][4] == [5.0, 5.0]


def test_responses_are_dense_samples_that_continue_the_prompts(
    study, folder, tmp_path, monkeypatch
):
    def tokenized(texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[int(text) % VOCAB] * 4 + [5] * (PROMPT - 1) for text in texts]}

    monkeypatch.setattr(study.distill.AutoTokenizer, "from_pretrained", lambda path: tokenized)
    monkeypatch.setattr(
        study.distill,
        "Continue",
        lambda path, kind: SimpleNamespace(
            problem=lambda i, seed: SimpleNamespace(prompt=str(i + 50 * seed))
        ),
    )
    for name in ("config.json", "model.safetensors", "card.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    small = {"train": 4, "held-out": 2, "measure-at": (4,), "calibration": 2}
    study.distill.main(command(tmp_path, "--losses", "overlap", **small))
    with np.load(tmp_path / "samples.npz") as file:
        train, held_out = file["train"], file["held_out"]
    assert train.shape == (4, PROMPT + TOKENS) and train[:, 0].tolist() == [0, 1, 2, 3]
    assert held_out[:, 0].tolist() == [50, 51] and (held_out[:, 1:PROMPT] == 5).all()
    assert (
        len(np.unique(train[:, PROMPT:], axis=0)) == 4
    )  # the model sampled each one with different random numbers


def test_table_has_one_line_per_result(study, folder, result, monkeypatch):
    monkeypatch.setattr(
        study.tables_text, "load", lambda name: study.common.read_result(folder / f"{name}.json")
    )
    lines = study.tables_text.text_distill().splitlines()
    assert len(lines) == 2 + len(result["rows"])
    assert lines[2].startswith("| no adapter |  | 0 |") and lines[4].startswith(
        f"| forward KL | 0.003 | {TRAIN} |"
    )
    assert f"{TRAIN} training responses" in study.tables_text.text_distill_setting()
