"""Test audits of several arms, each compared with dense decoding."""

import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sparrow.audit.statistics import Tokens

ARMS = {"one": "dense", "two": "dense", "three": "other"}


@pytest.fixture
def audits(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("audits")


def test_no_two_arms_share_a_seed(audits):
    names = [*ARMS, "dense", "other"]
    seeds = [each.seed for name in names for each in audits.samplings(ARMS, name, audits.SEEDS)]
    assert len(set(seeds)) == len(names) * audits.SEEDS


def test_concurrently_started_engines_use_separate_files_and_ports(audits, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", "shared")
    monkeypatch.setenv("VLLM_PORT", "8000")
    audits.separate("folder", "data parallel")
    assert audits.os.environ["VLLM_CACHE_ROOT"] == "folder/data-parallel/cache"
    assert "VLLM_PORT" not in audits.os.environ


def samples(audits, arm, seeds):
    """Sample from a distribution over three tokens, except that the arm ``three`` draws the first
    token too often.
    """
    p = np.array([0.5, 0.3, 0.2])
    drawn = []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, *arm.encode()])
        chances = [0.7, 0.2, 0.1] if arm == "three" else p
        token = rng.choice(3, 4000, p=chances)
        drawn.append(
            Tokens(
                before=(p.cumsum() - p)[token],
                p=p[token],
                entropy=np.full(4000, -(p * np.log(p)).sum()),
                sequence=np.repeat(np.arange(400), 10),
            )
        )
    return audits.Sampled(drawn, {"drafted": 9} if arm in ARMS else {})


def test_each_seed_of_an_arm_is_compared_with_dense_decoding(audits, monkeypatch):
    # threads instead of processes
    monkeypatch.setattr(audits, "ProcessPoolExecutor", lambda n, spawn: ThreadPoolExecutor(n))
    started = []

    def sample(arm, seeds):
        started.append(arm)
        return samples(audits, arm, seeds)

    found = dict(audits.audited(ARMS, ["one", "two", "three"], sample, 2))
    assert sorted(started) == ["dense", "one", "other", "three", "two"]
    assert [found[arm]["exact"] for arm in ("one", "two", "three")] == [2, 2, 0]
    assert [row["seed"] for row in found["three"]["seeds"]] == [0, 1]
    assert found["one"]["drafts"] == {"drafted": 9} and found["three"]["seeds"][0]["tokens"] == 4000


@pytest.mark.parametrize("arm", ["history", "head", "mixed"])
def test_arms_with_guesses_guess_in_every_cycle(audits, tmp_path, arm):
    drafters = importlib.import_module("audit_drafters")
    decoding = drafters.decoding_of(arm, tmp_path / arm)
    assert decoding.guess_tokens == drafters.GUESSES and not decoding.adapt_draft_tokens
    has_head = arm != "history"
    assert decoding.guess_head == (str(tmp_path / arm) if has_head else None)
    assert decoding.lookup_min == (drafters.LOOKUP_MIN if arm == "mixed" else 0)
    assert (tmp_path / arm / "model.safetensors").exists() == has_head
