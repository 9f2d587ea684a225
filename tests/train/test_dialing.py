"""Test how the dial divides a step's tokens into drafts, verified and unverified tokens, and what
is logged.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from sparrow.decoding import Decoding
from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError
from sparrow.mismatch import Ceiling, Tau
from sparrow.mismatch.tokens import TokenAcceptance, token_acceptance
from sparrow.rollout import Rollout, Sampling, Verification
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import build_tokenizer
from sparrow.train import dialing
from sparrow.train.config import OptimizerConfig, RolloutConfig, TrainConfig
from sparrow.train.corrections import compute_correction
from sparrow.train.dial import Dial
from sparrow.train.experience import pad
from sparrow.train.trainer import Trainer
from tests.conftest import VOCAB, tiny_model
from tests.train.test_trainer import EarlyWords, metrics_of

SCHEDULE = SparsitySchedule(top_k=(0, 1), bin_tokens=16, page_size=4, dense_layers=(0,))


def rollout(prompt, tokens, verified, alpha):
    ids, top = np.arange(tokens), np.zeros((tokens, 1))
    verification = Verification(verified, np.array(alpha, np.float32))
    return Rollout([1] * prompt, ids, top[:, 0], top.astype(np.int32), top, "stop", verification)


def test_verified_and_unverified_tokens_are_separated():
    rollouts = [rollout(10, 4, 2, [np.nan, 0.5]), rollout(30, 2, 2, [0.25, 0.75])]
    acceptances = [
        TokenAcceptance(
            x := np.linspace(0.1, 0.4, len(r)),
            x,
            SCHEDULE.page_end(len(r.prompt_ids) + np.arange(len(r))),
        )
        for r in rollouts
    ]
    assert [a.lower.tolist() for a in dialing.verified(rollouts, acceptances)] == [
        [0.1, 0.2],
        [0.1, 0.4],
    ]
    assert [a.lower.tolist() for a in dialing.unverified(rollouts, acceptances)] == [
        [pytest.approx(0.3), 0.4],
        [],
    ]
    drafted = dialing.drafted(rollouts, SCHEDULE)
    assert [a.lower.tolist() for a in drafted] == [[0.5], [0.25, 0.75]]
    assert [a.position.tolist() for a in drafted] == [
        [12],
        [32, 32],
    ]  # at 11, 30 and 31 cached tokens


def test_the_dials_metrics_match_a_hand_calculation():
    """Twelve responses of 32 tokens begin at length 16. The dial is at 32, so the first half of
    each response is verified.
    """
    dial = Dial(Tau(0.9), lambda length, acceptance: (2.0, 1.0))
    dial.load({"verified_up_to": 32, "waits": [], "failures": []})
    rollouts = [rollout(16, 32, 16, np.full(16, 0.95)) for _ in range(12)]
    alpha = np.repeat([1.0, 0.92], 16)
    acceptances = [TokenAcceptance(alpha, alpha, 16 + np.arange(32))] * 12
    said = dialing.turn(dial, rollouts, acceptances, SCHEDULE, Ceiling(), 0)
    assert said["verified_up_to"] == 32 and said["unverified_fraction"] == 0.5
    assert [(b["start"], b["mode"], b["p5"], b["verdict"]) for b in said["bins"]] == [
        (16, "lossless", pytest.approx(0.95), "ready"),
        (32, "lossy", 0.92, "holds"),
    ]
    assert said["speedup"] == pytest.approx((2 + 2) / (2 + 1))
    assert dial.verified_up_to == 16
    json.dumps(said)


def trainer(run_dir, dial, steps=4, resume=False):
    tokenizer = build_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), initializer_range=0.1)
    engine = HFEngine(
        model, Decoding("auto", SCHEDULE, draft_tokens=4), eos_ids=[tokenizer.eos_token_id]
    )
    config = TrainConfig(
        run_dir=str(run_dir),
        steps=steps,
        save_every=1,
        seed=5,
        resume=resume,
        tau=0.1,
        rollout=RolloutConfig(mode="auto", prompts=4, samples=4, max_new_tokens=24, top_n=200),
        optimizer=OptimizerConfig(learning_rate=3e-3, token_budget=200),
    )
    return Trainer(config, model, tokenizer, EarlyWords(), engine, SCHEDULE, dial=dial)


def cheap(tau=0.1):
    return Dial(Tau(tau), lambda length, acceptance: (2.0, 1.0))


@pytest.mark.slow
def test_a_run_in_auto_mode_resumes_exactly(tmp_path):
    trainer(tmp_path / "whole", cheap()).train()
    whole = metrics_of(tmp_path / "whole")
    ends = [row["dial"]["verified_up_to"] for row in whole]
    assert (
        ends[0] is None and ends[1] < float("inf") and whole[0]["dial"]["unverified_fraction"] == 0
    )
    assert whole[-1]["dial"]["unverified_fraction"] > whole[1]["dial"]["unverified_fraction"] > 0.05
    assert whole[0]["mismatch"]["mean"] > 0.999 > whole[-1]["mismatch"]["mean"]
    trainer(tmp_path / "cut", cheap(), steps=2).train()
    trainer(tmp_path / "cut", cheap(), resume=True).train()
    cut = metrics_of(tmp_path / "cut")
    assert [row["dial"] for row in cut] == [row["dial"] for row in whole]
    assert [row["reward"] for row in cut] == [row["reward"] for row in whole]


def test_engine_that_cannot_stop_verifying_mid_response_raises_an_error(tmp_path):
    class Server:
        pass

    made = TrainConfig(run_dir=str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"Server verifies either all of a response or none.*use mode lossless or lossy",
    ):
        Trainer(
            made, tiny_model(), build_tokenizer(), EarlyWords(), Server(), SCHEDULE, dial=cheap()
        )


@pytest.mark.slow
def test_a_run_that_never_meets_tau_stays_lossless(tmp_path):
    trainer(tmp_path, cheap(0.9999), steps=2).train()
    rows = metrics_of(tmp_path)
    assert all(row["dial"]["unverified_fraction"] == 0 and row["drafts"]["drafted"] for row in rows)
    assert {b["verdict"] for b in rows[-1]["dial"]["bins"]} <= {"waits", "unknown"}


def test_the_correction_does_not_change_verified_tokens():
    model = tiny_model()
    engine = HFEngine(model, Decoding("auto", SCHEDULE, draft_tokens=3), eos_ids=[])
    engine.verify_up_to(48)
    prompts = [np.random.default_rng(i).integers(1, VOCAB, 24).tolist() for i in range(4)]
    rollouts = engine.generate(prompts, Sampling(40, top_n=VOCAB))
    dense = engine.score(rollouts, SparsitySchedule.dense(), 1.0)
    mask = pad([np.ones(len(r), bool) for r in rollouts])
    config = replace(TrainConfig().correction, cap=10.0)
    found = compute_correction(
        config, pad([s.logprobs for s in dense]), pad([r.logprobs for r in rollouts]), mask
    )
    exact = rollouts[0].verification.tokens
    assert {r.verification.tokens for r in rollouts} == {exact} and 20 < exact < 24
    assert (found.weight_BT[:, :exact] - 1).abs().max() < 1e-3
    assert (found.weight_BT[:, exact:] - 1).abs().mean() > 0.05
    # According to the trainer, verified tokens differ only by the engine's rounding, and unverified
    # tokens differ more.
    alpha = [
        token_acceptance(r, s.top_logprobs, SCHEDULE) for r, s in zip(rollouts, dense, strict=True)
    ]
    assert min(a.lower.min() for a in dialing.verified(rollouts, alpha)) > 0.9999
    assert np.mean([a.lower.mean() for a in dialing.unverified(rollouts, alpha)]) < 0.99
