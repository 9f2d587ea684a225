"""Test how a step's experience is collected: which parts a reward has, which groups are replaced,
and whether processes agree.
"""

import json
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.cli import main
from sparrow.errors import ConfigError
from sparrow.rollout import Rollout, Sampling, derived_seed
from sparrow.tasks import Mixture, Problem, build_tokenizer, load_task
from sparrow.train import learner
from sparrow.train.collect import Collector
from sparrow.train.config import RewardConfig, RolloutConfig, TrainConfig
from sparrow.train.ranks import Ranks
from sparrow.train.reward import overlong_penalty, reward_metrics, reward_parts
from tests.train.test_trainer import EarlyWords, make_trainer, metrics_of

# --- rewards ---


def test_the_overlong_penalty_matches_a_hand_calculation():
    # In DAPO, responses of up to 16384 of 20480 tokens have no penalty. Beyond that, the penalty
    # falls linearly, to -1 at the limit.
    lengths = (1, 16384, 17408, 18432, 20480)
    assert [overlong_penalty(n, 20480, 4096) for n in lengths] == [0, 0, -0.25, -0.5, -1]


def test_the_reward_is_the_sum_of_its_named_parts():
    assert reward_parts(1.0, True, 10, 10, RewardConfig()) == {"correct": 1.0}
    config = RewardConfig(format=0.1, overlong="penalty", overlong_window=4)
    assert reward_parts(0.0, True, 9, 10, config) == {
        "correct": 0.0,
        "format": 0.1,
        "overlong": -0.75,
    }
    assert reward_parts(1.0, False, 5, 10, config) == {
        "correct": 1.0,
        "format": 0.0,
        "overlong": 0.0,
    }
    assert (
        reward_parts(1.0, False, 9, 10, RewardConfig(overlong="penalty"))["overlong"] == -0.5
    )  # the default window is a fifth of 10 tokens


def test_reward_metrics_match_a_hand_calculation():
    rows = [
        ("math", {"correct": 1.0, "format": 0.5}),
        ("math", {"correct": 0.0, "format": 0.5}),
        ("code", {"correct": 0.0, "format": 0.0}),
    ]
    found = reward_metrics(rows)
    assert (found["mean"], found["std"]) == pytest.approx((2 / 3, np.std([1.5, 0.5, 0])))
    assert found["parts"] == pytest.approx({"correct": 1 / 3, "format": 1 / 3})
    assert found["sources"] == {"code": 0.0, "math": 1.0}
    assert set(reward_metrics([("math", {"correct": 1.0})])) == {"mean", "std"}


def test_invalid_reward_settings_raise_errors():
    for make, message in (
        (lambda: RewardConfig(format=-1), "reward.format is -1"),
        (
            lambda: TrainConfig(reward=RewardConfig(overlong_window=2000)),
            "overlong_window is 2000.*at most.*1024",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


# --- mixtures ---


@dataclass(frozen=True)
class Named:
    name: str

    def problem(self, index: int, seed: int = 0) -> Problem:
        return Problem(f"{self.name}-{seed}-{index}", "", float)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 99), st.integers(0, 5))
def test_a_mixture_draws_from_each_task_in_order_and_in_proportion_to_its_weight(
    weights, turns, seed
):
    mixture = Mixture([Named(str(i)) for i in range(len(weights))], weights)
    period = sum(weights)
    ids = [mixture.problem(turns * period + i, seed).id.split("-") for i in range(2 * period)]
    for i, weight in enumerate(weights):
        own = [int(index) for name, s, index in ids if name == str(i) and s == str(seed)]
        assert own == list(range(turns * weight, (turns + 2) * weight))


@pytest.mark.parametrize("weights", [(1,), (1, 0), (1, 0.5), ()])
def test_a_mixture_requires_one_integer_weight_per_task(weights):
    with pytest.raises(
        ConfigError, match="an integer weight of at least 1 for each task, got 2 tasks"
    ):
        Mixture([Named("a"), Named("b")], weights)


@pytest.mark.slow
def test_the_command_line_can_train_on_math_and_code_together(reading_checkpoint, tmp_path, capsys):
    (tmp_path / "sums.jsonl").write_text(
        "".join(
            json.dumps({"question": f"{i} + 1 ?", "answer": str(i + 1)}) + "\n" for i in range(8)
        )
    )
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]})
    rows = [{"question": f"echo {i} times", "input_output": tests} for i in range(8)]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = [
        "--rollout.prompts",
        "3",
        "--rollout.samples",
        "2",
        "--rollout.max-new-tokens",
        "8",
        "--steps",
        "1",
    ]
    command = [
        "train",
        "--model",
        reading_checkpoint,
        "--run-dir",
        str(tmp_path / "run"),
        *sizes,
        "--dataset",
    ]
    main(
        [
            *command,
            str(tmp_path / "sums.jsonl"),
            f"taco:path={tmp_path / 'code.jsonl'},weight=2",
            "--reward.format",
            "0.5",
        ]
    )
    (row,) = metrics_of(tmp_path / "run")
    assert row["reward"]["sources"] == {"sums": 0.0, "taco": 0.0} and row["reward"]["parts"] == {
        "correct": 0.0,
        "format": 0.0,
    }
    main(["report", str(tmp_path / "run")])
    assert "reward, taco" in (tmp_path / "run" / "report" / "index.html").read_text()
    with pytest.raises(SystemExit):
        wrong = f"taco:path={tmp_path / 'code.jsonl'},weight=0.5"
        main([*command, str(tmp_path / "sums.jsonl"), wrong, "--run-dir", str(tmp_path / "other")])
    assert "weight is 0.5, but must be a valid integer" in " ".join(capsys.readouterr().err.split())


def test_bundled_tasks_extract_the_stated_answer():
    problem = load_task("trace", lines=4).problem(0)
    assert (
        problem.extract(problem.solution) == problem.solution[-1]
        and problem.extract("answer: none") is None
    )
    assert problem.source == "trace"


# --- resampling ---


class Digits:
    """A task whose problem i asks for i. All responses to every third problem fail."""

    def problem(self, index: int, seed: int = 0) -> Problem:
        return Problem(
            str(index), f" {index % 10}", lambda text: 0.0 if index % 3 == 0 else float("+" in text)
        )


class Signs:
    """An engine that answers plus to even samples of a prompt and minus to odd ones. It recognises
    samples by their seeds.
    """

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def generate(self, prompts, sampling: Sampling) -> list[Rollout]:
        self.seeds += sampling.seeds
        ids = build_tokenizer()(" + -").input_ids
        odd = {derived_seed(0, i, 1) for i in range(20)}
        one, none = np.zeros(1, np.float32), np.zeros((1, 0))
        return [
            Rollout(p, np.array([ids[s in odd]]), one, none.astype(np.int32), none, "stop")
            for p, s in zip(prompts, sampling.seeds, strict=True)
        ]


class Threads(Ranks):
    """Processes simulated by threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list) -> None:
        self.rank, self.count, self.seconds = rank, len(slots), {}
        self._barrier, self._slots = barrier, slots

    def gather(self, phase, work):
        self._slots[self.rank] = work()
        self._barrier.wait(300)
        found = list(self._slots)
        self._barrier.wait(300)
        return found


def collected(ranks: int, prompts=8, resample=2, cursor=0):
    """Return what each process collects, and the processes' engines."""
    barrier, slots, found, engines = (
        threading.Barrier(ranks),
        [None] * ranks,
        [None] * ranks,
        [Signs() for _ in range(ranks)],
    )

    def process(rank: int) -> None:
        config = TrainConfig(
            rollout=RolloutConfig(prompts=prompts, samples=2, max_new_tokens=4, resample=resample)
        )
        place = Threads(rank, barrier, slots)
        found[rank] = Collector(config, build_tokenizer(), Digits(), engines[rank], place).collect(
            cursor
        )

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, engines


def test_groups_with_equal_rewards_are_replaced_until_none_is_left():
    (one,), (engine,) = collected(1)
    # Of problems 0 to 7, problems 0, 3 and 6 have equal rewards, so problems 8, 9 and 10 replace
    # them. Problem 9 has equal rewards too, and problem 11 replaces it.
    assert [p.id for p in one.problems[::2]] == ["8", "1", "2", "11", "4", "5", "10", "7"]
    assert one.cursor == 12 and [g.problem.id for g in one.drawn] == [str(i) for i in range(12)]
    assert one.rewards.tolist() == [1.0, 0.0] * 8 and one.groups.tolist() == [
        i for i in range(8) for _ in "ab"
    ]
    assert len(set(engine.seeds)) == len(engine.seeds) == 24, (
        "every response must have its own seed"
    )
    (bounded,), _ = collected(1, resample=1)
    assert [p.id for p in bounded.problems[6:8]] == ["9", "9"] and bounded.cursor == 11, (
        "groups that remain after the last round must be kept"
    )
    (plain,), _ = collected(1, resample=0, cursor=6)
    assert [p.id for p in plain.problems[::2]] == [
        str(i) for i in range(6, 14)
    ] and plain.cursor == 14


@pytest.mark.parametrize("ranks", [2, 5])
def test_every_process_gets_the_same_batch_as_a_single_process(ranks):
    found, engines = collected(ranks)
    (alone,), (engine,) = collected(1)
    for one in found:
        assert one.cursor == alone.cursor and one.rewards.tolist() == alone.rewards.tolist()
        assert [p.id for p in one.problems] == [p.id for p in alone.problems]
        assert [g.problem.id for g in one.drawn] == [g.problem.id for g in alone.drawn]
    assert sorted(seed for e in engines for seed in e.seeds) == sorted(engine.seeds), (
        "together, the processes must sample what a single process samples"
    )
    assert max(len(e.seeds) for e in engines) <= min(len(e.seeds) for e in engines) + 3


def test_verifiers_run_concurrently():
    meeting = threading.Barrier(16)

    class Meeting:
        def problem(self, index: int, seed: int = 0) -> Problem:
            return Problem(str(index), " 1", lambda text: float(meeting.wait(300) >= 0))

    config = TrainConfig(rollout=RolloutConfig(prompts=8, samples=2, max_new_tokens=4))
    place = Threads(0, threading.Barrier(1), [None])
    assert (
        Collector(config, build_tokenizer(), Meeting(), Signs(), place).collect(0).rewards.tolist()
        == [1.0] * 16
    )


# --- in the trainer ---

RESAMPLED = dict(
    rollout=RolloutConfig(prompts=4, samples=2, max_new_tokens=12, top_n=8, resample=2),
    reward=RewardConfig(overlong="penalty", overlong_window=6),
)


class Sparse(EarlyWords):
    """A task in which half of the problems cannot be solved."""

    def problem(self, index: int, seed: int = 0) -> Problem:
        problem = super().problem(index, seed)
        return problem if index % 2 else Problem(problem.id, problem.prompt, lambda text: 0.0)


@pytest.mark.slow
def test_a_run_that_resamples_groups_resumes_exactly(tmp_path):
    # Without a penalty, all rewards of an unsolvable problem would be equal.
    changes = {**RESAMPLED, "reward": RewardConfig(overlong="mask")}
    make_trainer(tmp_path / "whole", steps=3, task=Sparse(), **changes).train()
    make_trainer(tmp_path / "parts", steps=2, task=Sparse(), **changes).train()
    torch.manual_seed(99)
    make_trainer(tmp_path / "parts", steps=3, task=Sparse(), resume=True, **changes).train()
    rows = metrics_of(tmp_path / "whole")
    assert metrics_of(tmp_path / "parts") == rows
    assert all(row["reward"]["prompts"] > 4 for row in rows)
    drawn = [
        json.loads(line)["problem"]
        for line in Path(tmp_path / "whole", "rollouts.jsonl").read_text().splitlines()
    ]
    assert len(set(drawn)) == len(drawn), "no problem may be drawn twice"


def test_a_run_with_a_penalty_logs_the_parts_of_its_reward(tmp_path):
    make_trainer(tmp_path, steps=1, **RESAMPLED).train()
    reward = metrics_of(tmp_path)[0]["reward"]
    assert (
        reward["mean"] == pytest.approx(sum(reward["parts"].values()))
        and -1 <= reward["parts"]["overlong"] < 0
    )


@pytest.mark.slow
def test_truncated_responses_do_not_contribute_to_the_loss(tmp_path, monkeypatch):
    seen = []
    whole = learner.policy_loss

    def spy(logp_BT, old_BT, advantages_B, mask_BT, *rest):
        seen.extend(zip(advantages_B.tolist(), mask_BT.sum(1).tolist(), strict=True))
        return whole(logp_BT, old_BT, advantages_B, mask_BT, *rest)

    monkeypatch.setattr(learner, "policy_loss", spy)
    rollout = RolloutConfig(prompts=8, samples=8, max_new_tokens=24, top_n=8)
    make_trainer(tmp_path / "keep", steps=1, rollout=rollout).train()
    keep, seen = seen, []
    make_trainer(
        tmp_path / "mask", steps=1, rollout=rollout, reward=RewardConfig(overlong="mask")
    ).train()
    assert [advantage for advantage, _ in keep] == [advantage for advantage, _ in seen]
    # This assumes that no response ends on its own after exactly 24 tokens.
    assert [length if length < 24 else 0 for _, length in keep] == [length for _, length in seen]
    assert 0 < sum(length > 0 for _, length in seen) < 64 and any(
        a for a, length in keep if length == 24
    )
