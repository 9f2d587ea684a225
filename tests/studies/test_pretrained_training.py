"""Test the study that trains a pretrained model: what the tasks' graders accept, which commands the
arms run, and the arithmetic of the summary.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparrow.cli.entry import parse
from sparrow.cli.loading import load_task_spec

FOLDERS = (
    "benchmarks",
    "studies/common",
    "studies/reasoner",
    "studies/text",
    "studies/pretrained",
)
MODULES = (
    "common",
    "pretrained_figure",
    "tables_pretrained",
    "training_arms",
    "training_base",
    "training_summary",
    "training_tasks",
    "warm_start",
)
REQUIRED = ("tyro",)
STORY = [
    "The old king walked slowly through his silent garden.",
    "Nobody in town had ever seen a king without a crown!",
    "Was it true that a king could be so very lonely?",
    "Every morning, birds sang songs about the wise king.",
]


def test_story_reward_counts_distinct_sentences_with_the_word(study):
    reward = study.training_tasks.story_reward
    assert reward("king", 8, " ".join(STORY)) == 0.5
    assert reward("king", 4, " ".join(STORY)) == reward("king", 2, " ".join(STORY)) == 1
    assert reward("king", 8, " ".join([*STORY, "It had rained for days and days."])) == 0.5


@pytest.mark.parametrize(
    "response",
    [
        "",
        "king " * 500,
        "king. " * 500,
        f"{STORY[0]} " * 50,
        "Write a very long story about a king",
        " ".join(f"The old king walked slowly through his silent house {i}." for i in range(50)),
    ],
)
def test_repetitive_stories_and_text_without_sentences_earn_almost_nothing(study, response):
    assert study.training_tasks.story_reward("king", 8, response) <= 1 / 8


def test_repeated_sentences_lower_the_reward(study):
    repeated = " ".join([*STORY, STORY[0], STORY[1]])
    assert study.training_tasks.story_reward("king", 4, repeated) == 0.5


def test_ledger_rewards_only_correct_answers(study):
    task = study.training_tasks.Ledger(entries=30, asked=6)
    problem = task.problem(3)
    solution = problem.solution.splitlines()
    assert problem == task.problem(3) or problem.prompt == task.problem(3).prompt
    assert problem.verify(problem.solution) == problem.verify(problem.solution + "\n\n") == 1
    assert problem.verify("\n".join(solution[:3])) == 0.5
    wrong = [f"{line.partition(':')[0]}: lamps, Atlantis" for line in solution]
    for response in ("", problem.prompt, "\n".join(wrong), solution[0].partition(":")[2]):
        assert problem.verify(response) == 0
    # only the first line about a person counts, and more lines lower the reward
    assert problem.verify("\n".join([*wrong, *solution])) == 0
    assert problem.verify("\n".join([*solution, *wrong])) == 0.5


def test_task_settings_have_not_changed(study):
    tasks = {name: setting.task for name, setting in study.training_tasks.SETTINGS.items()}
    assert tasks == {
        "story": "training_tasks:Story:sentences=16",
        "ledger": "training_tasks:Ledger:entries=320,asked=16",
    }
    story = load_task_spec(tasks["story"]).problem(0)
    ledger = load_task_spec(tasks["ledger"]).problem(0)
    assert story.rendered and ledger.rendered and ledger.solution.count("\n") == 15
    assert len(ledger.prompt) > 10000


def test_command_of_every_arm_is_valid(study, tmp_path):
    options = study.training_arms.Options("story", tmp_path)
    for arm in study.training_arms.ARMS:
        command = parse(study.training_arms.train_arguments(options, f"{arm}-1"))
        assert command.seed == 1 and command.distill.enabled == (arm == "p80-distill")
        assert command.rollout.max_new_tokens == 2048 and command.bin_tokens == 512
    for name, target in study.training_arms.TARGETS.items():
        assert parse(study.training_arms.calibrate_arguments(options, name)).target == target
    with pytest.raises(ValueError, match="no arm 'p85'; choose one of dense"):
        study.training_arms.actor(options, "p85")


def test_finished_runs_and_runs_without_a_checkpoint_are_skipped(study, tmp_path):
    options = study.training_arms.Options("story", tmp_path)
    for folder in ("dense-0/model", "dense-1", "dense-2/checkpoints/step-4"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("dense-1", "dense-2"):
        Path(tmp_path, name, "metrics.jsonl").write_text("{}\n")
    names = [f"dense-{seed}" for seed in range(4)]
    assert study.training_arms.left(options, names) == ["dense-2", "dense-3"]


def test_the_expected_reward_is_the_mean_probability_of_a_line(study):
    logprob = torch.tensor([0.5, 0.5, 1.0, 0.1, 1.0]).log()
    is_break = torch.tensor([False, False, True, False, False])
    assert study.warm_start.expected_reward(logprob, is_break) == pytest.approx((0.25 + 0.1) / 2)


def test_the_spread_within_groups_is_averaged_over_problems(study):
    found = study.training_base.spread([[0.0, 1.0], [0.5, 0.5]])
    assert found["mean"][0] == 0.5 and found["within_group_std"] == 0.25


def run_directory(folder, rewards, p5, **more):
    bins = [{"start": 0, "end": 512, "n_tokens": 100, "lower_bound": p5, "ceiling": 0.99}]
    bins[0] |= {"interval_low": p5 - 0.1, "interval_high": p5 + 0.1}
    bins.append({**bins[0], "start": 512, "end": 1024, "n_tokens": 9, "lower_bound": 0.1})
    rows = [
        {
            "step": i,
            "reward": {"mean": reward},
            "response": {"mean": 100.0},
            "seconds": {"rollout": 2.0, "score": 1.0},
            "kv": {"read_fraction": 0.5},
            "mismatch": {"bins": bins},
            **more,
        }
        for i, reward in enumerate(rewards, 1)
    ]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = {"story": {"mean": {"value": rewards[-1], "low": 0.0, "high": 1.0}}}
    (folder / "evaluations.jsonl").write_text(json.dumps({"step": 0, "eval": scores}) + "\n")


def test_the_summary_matches_a_hand_calculation(study, tmp_path):
    with pytest.raises(ValueError, match="has finished a step"):
        study.training_summary.finished(tmp_path)
    run_directory(tmp_path / "dense-0", [0.1, 0.2, 0.6], 0.99)
    run_directory(tmp_path / "dense-1", [0.3, 0.4], 0.99)
    run_directory(tmp_path / "p80-distill-0", [0.2, 0.4], 0.8)
    found = study.training_summary.summary(study.training_summary.finished(tmp_path))
    dense, distilled = found["rows"]
    assert [run["arm"] for run in found["runs"]] == ["dense", "dense", "p80-distill"]
    assert dense["steps"] == [3, 2] and dense["minutes"] == [0.1, 0.1]
    assert dense["reward_minus_dense"] is None
    # over the two steps that all runs completed
    assert found["compared_steps"] == 2 and dense["reward"] == [0.15, 0.35]
    assert distilled["reward_minus_dense"] == [0.15, None, None]
    assert distilled["held_out_start"] == 0.4
    (only,) = found["runs"][0]["bins"]  # the other one has less than a tenth as many tokens
    assert only["p5"] == [0.99] * 3 and only["last"] == [0.99, 0.89, 1.09]
    assert only["ceiling"] == [0.99, None, None]
    assert found["runs"][0]["read_by_step"] == [0.5] * 3


@pytest.mark.parametrize("name", ["story", "story_long", "ledger", "clock", "clock_lossy"])
def test_the_rows_of_committed_summaries_follow_from_their_runs(study, name):
    committed = study.common.load(f"pretrained_training_{name}")
    found = study.training_summary.summary(committed["runs"])
    assert found == {key: committed[key] for key in ("compared_steps", "rows", "runs")}


@pytest.mark.parametrize("is_clock", [False, True])
def test_an_earlier_summarys_runs_are_kept_unless_they_were_repeated(study, tmp_path, is_clock):
    timed = {"seconds": {"rollout": 2.0, "update": 1.0}}
    timed["response"] = {"mean": 100.0, "tokens": 800.0}

    def summarised(folder, is_clock, **runs):
        """Summarise runs, which are given as their rewards."""
        (tmp_path / folder).mkdir()
        for name, rewards in runs.items():
            run_directory(tmp_path / folder / name.replace("_", "-"), rewards, 0.9, **timed)
        out = tmp_path / f"{folder}.json"
        earlier = tmp_path / "old.json"
        study.training_summary.main(
            study.training_summary.Options(
                runs=tmp_path / folder,
                out=out,
                clock=is_clock,
                earlier=earlier if earlier.exists() else None,
            )
        )
        return study.common.read_result(out)

    rewards = {"dense_0": [0.1] * 4, "dense_1": [0.2] * 5, "p86_0": [0.3] * 6}
    whole = summarised("whole", is_clock, **rewards)
    summarised("old", is_clock, dense_0=[0.1] * 4, p86_0=[0.9] * 7)
    found = summarised("new", is_clock, dense_1=[0.2] * 5, p86_0=[0.3] * 6)
    assert found == whole and found["compared_steps"] == 4
    assert [row["seeds"] for row in found["rows"]] == [[0, 1], [0]]
    kind = "with" if is_clock else "without"
    with pytest.raises(ValueError, match=rf"old\.json was written {kind} --clock; .*{kind} it"):
        summarised("mixed", not is_clock, dense_2=[0.1] * 4)


def test_runs_of_another_machine_are_not_added_to_a_summary(study, tmp_path):
    run_directory(tmp_path / "dense-0", [0.1], 0.9)
    earlier = study.training_summary.Options(tmp_path, tmp_path / "old.json", trained_on="A")
    study.training_summary.main(earlier)
    later = replace(earlier, out=tmp_path / "new.json", earlier=earlier.out, trained_on="B")
    message = (
        r"old\.json were performed on A, but the new ones on B; summarise them without --earlier"
    )
    with pytest.raises(ValueError, match=message):
        study.training_summary.main(later)
    assert not later.out.exists()

    study.training_summary.main(replace(later, trained_on="A"))
    assert study.common.read_result(later.out)["machine"] == "A"


def test_a_drafting_runs_acceptance_and_a_schedules_calibrated_p5_are_read(study, tmp_path):
    drafts = {"accepted": 9, "drafted": 10, "tokens_per_cycle": 8.123}
    run_directory(tmp_path / "lossless-0", [0.1, 0.2], 0.99, drafts=drafts)
    found = study.training_summary.read(tmp_path / "lossless-0")
    assert found["accepted"] == 0.9 and found["tokens_per_cycle"] == 8.12
    assert "calibrated" not in found["bins"][0]

    run_directory(tmp_path / "p80-0", [0.1, 0.2], 0.8)
    measured = {"start": 0, "p5": 0.81234, "lower": 0.8, "upper": 0.82, "borrowed": False}
    for is_borrowed in (False, True):
        bins = [{**measured, "borrowed": is_borrowed}]
        config = {"schedule": {"provenance": {"bins": bins}}}
        (tmp_path / "p80-0/config.json").write_text(json.dumps(config))
        found = study.training_summary.read(tmp_path / "p80-0")
        assert "accepted" not in found
        assert found["bins"][0].get("calibrated") == (None if is_borrowed else [0.812, 0.8, 0.82])


def test_difference_from_dense_is_between_equal_seeds(study):
    def run(arm, seed, reward):
        return {"arm": arm, "seed": seed, "reward": [reward]}

    runs = [run("dense", 0, 0.2), run("dense", 1, 0.6), run("p80", 0, 0.1), run("p80", 1, 0.3)]
    # Two pairs differ by -0.1 and -0.3: a paired t-interval with one degree of freedom.
    low = -0.2 - 12.7062 * 0.1
    high = -0.2 + 12.7062 * 0.1
    found = study.training_summary.minus_dense([*runs, run("p86", 2, 0.9)], 1)
    assert found == {"p80": [-0.2, pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3)]}
    # A third dense run shares no seed with p80, so it changes nothing.
    assert study.training_summary.minus_dense([*runs, run("dense", 2, 0.9)], 1) == found
    assert study.training_summary.minus_dense(runs[2:], 1) == {}


def test_training_tables_show_every_seed(study, monkeypatch):
    tables = study.tables_pretrained
    rows = [{"arm": "dense", "reward_minus_dense": None}, {"arm": "p80"}]
    rows[1]["reward_minus_dense"] = [-0.25, -0.3, -0.2]
    runs = []
    for row, p5 in zip(rows, (0.9, 0.7), strict=True):
        row |= {"seeds": [0], "steps": [5], "reward": [p5 - 0.4]}
        series = [p5, p5, p5, p5 - 0.1, p5 - 0.2]
        last = [p5 - 0.2, p5 - 0.25, p5 - 0.15]
        bins = [{"start": 0, "end": 512, "p5": series, "last": last}]
        measured = {"read": 0.5, "held_out": [[10, 0.3, 0.2, 0.4]], "bins": bins}
        runs.append({"arm": row["arm"], "seed": 0, **measured})
    runs[1]["bins"][0]["calibrated"] = [0.72, 0.7, 0.74]
    result = {"compared_steps": 4, "rows": rows, "runs": runs}
    monkeypatch.setattr(tables, "load", lambda name: result)
    *_, dense, p80 = tables.training("story").splitlines()
    assert dense == "| dense | 5 | 50% |  | 0.500 |  |  | 0.30 |  |"
    assert p80 == "| p80 | 5 | 50% |  | 0.300 | -0.200 | -0.250 [-0.300, -0.200] | 0.30 |  |"
    assert tables.training_p5("story").splitlines()[2:] == [
        "| dense | all seeds | 0.900 / 0.867 / 0.800 |",
        "| p80 | calibration | 0.720 [0.700, 0.740] |",
        "| p80 | seed 0 | 0.700 / 0.667 / 0.600 / 0.500 [0.450, 0.550] |",
    ]


def test_p5_table_shows_a_schedule_once_and_only_lengths_of_all_runs(study, monkeypatch):
    def run(arm, seed, p5, starts, **more):
        series = {"p5": [p5] * 3, "last": [p5, p5 - 0.1, p5 + 0.1], **more}
        bins = [{"start": start, "end": start + 512, **series} for start in starts]
        return {"arm": arm, "seed": seed, "bins": bins}

    found = {"calibrated": [0.72, 0.7, 0.74]}
    runs = [
        run("dense", 0, 0.85, [2560]),
        run("dense", 1, 0.94, [2560]),
        run("dense", 2, 0.94, [2560]),
        run("lossless", 0, 0.8, [2560]),
        run("lossless", 1, 0.9, [2560]),
        run("auto80", 0, 0.8, [2560]),
        run("p70", 0, 0.7, [2560, 3072], **found),
        run("p70-distill", 0, 0.6, [2560], **found),
        run("p70-distill", 1, 0.5, [2560], **found),
    ]
    for each in runs:  # a length that was missing in a step
        each["bins"].append({"start": 4096, "end": 4608, "p5": [0.9, None, 0.9]})
    arms = dict.fromkeys(each["arm"] for each in runs)
    result = {"compared_steps": 3, "rows": [{"arm": arm} for arm in arms], "runs": runs}
    monkeypatch.setattr(study.tables_pretrained, "load", {"pretrained_training_x": result}.get)
    assert study.tables_pretrained.training_p5("x").splitlines() == [
        "| rollouts | runs | 2,560 to 3,072 |",
        "| --- | --- | --- |",
        # a t-interval with two degrees of freedom: 4.303 times a standard error of 0.03
        "| dense | all seeds | 0.910 / 0.910 [0.781, 1.039] / 0.850 |",
        "| lossless | all seeds | 0.850 / 0.800, 0.900 / 0.800 |",
        "| auto80 | seed 0 | 0.800 / 0.800 / 0.800 / 0.800 [0.700, 0.900] |",
        "| p70 | calibration | 0.720 [0.700, 0.740] |",
        "| p70 | seed 0 | 0.700 / 0.700 / 0.700 / 0.700 [0.600, 0.800] |",
        "| p70-distill | seed 0 | 0.600 / 0.600 / 0.600 / 0.600 [0.500, 0.700] |",
        "| p70-distill | seed 1 | 0.500 / 0.500 / 0.500 / 0.500 [0.400, 0.600] |",
    ]


def test_p5_table_shows_a_runs_last_step_only_if_it_was_measured(study, monkeypatch):
    def run(seed, p5, last):
        bins = [{"start": 0, "end": 512, "p5": p5, "last": last}]
        return {"arm": "p86", "seed": seed, "bins": bins}

    runs = [
        run(0, [0.8, 0.9, 0.7], [0.7, 0.6, 0.8]),
        run(1, [0.8, 0.9, 0.7], [0.7, None, None]),
        run(2, [0.8, 0.9, 0.6, None], [0.6, 0.5, 0.7]),  # from the step before the last one
        run(3, [0.8, 0.9, 0.6, None], [None, None, None]),
    ]
    result = {"compared_steps": 2, "rows": [{"arm": "p86"}], "runs": runs}
    monkeypatch.setattr(study.tables_pretrained, "load", {"pretrained_training_x": result}.get)
    assert study.tables_pretrained.training_p5("x").splitlines()[2:] == [
        "| p86 | seed 0 | 0.850 / 0.850 / 0.800 / 0.700 [0.600, 0.800] |",
        "| p86 | seed 1 | 0.850 / 0.850 / 0.800 / 0.700 |",
        "| p86 | seed 2 | 0.850 / 0.850 / 0.800 |",
        "| p86 | seed 3 | 0.850 / 0.850 / 0.800 |",
    ]


def timed_run(arm, clock, **more):
    """Return a run as in the clock summary. Its reward rises by 0.02 per step."""
    reward = [round(0.02 * i, 2) for i in range(len(clock))]
    times = {"seconds": {"step": [10.04, 8.0, 12.0], "rollout": 6.0, "update": 3.0, "other": 1.0}}
    speeds = {"rollout_tokens_per_s": 1000, "seconds_per_1000_tokens": 0.2}
    series = {"reward": reward, "clock": clock, "tokens_per_response": 1234}
    return {"arm": arm, "seed": 3, **series, **times, **speeds, **more}


def test_the_clock_summary_times_the_steps_after_the_first_three(study, tmp_path):
    summary = study.training_summary
    run_directory(tmp_path / "dense-3", [0.1] * 3, 0.99)
    with pytest.raises(ValueError, match="dense-3 has no step after the first 3; let it run"):
        summary.times(tmp_path / "dense-3")

    rows = [
        {
            "step": i,
            "response": {"mean": 100.0 * i, "tokens": 1000.0 * i},
            "seconds": {"rollout": rollout, "score": 1.0, "update": 2.0, "sync": 0.5},
        }
        for i, rollout in enumerate((90.0, 90.0, 90.0, 2.0, 4.0, 12.0), 1)
    ]
    path = tmp_path / "dense-3/metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = summary.times(tmp_path / "dense-3")
    # steps of 5.5, 7.5 and 15.5 seconds, with 4,000, 5,000 and 6,000 tokens
    assert found["seconds"] == {
        "step": [7.5, 5.9, 13.9],
        "rollout": 4.0,
        "update": 2.0,
        "other": 1.5,
    }
    assert found["tokens_per_response"] == 500
    assert found["rollout_tokens_per_s"] == round(15_000 / 18)
    assert found["seconds_per_1000_tokens"] == round(28.5 / 15, 4)
    assert found["timed"] == {"seconds": [5.5, 7.5, 15.5], "tokens": [4000, 5000, 6000]}

    shorter = summary.times(tmp_path / "dense-3", limit=5)
    assert shorter["timed"] == {"seconds": [5.5, 7.5], "tokens": [4000, 5000]}
    assert shorter["seconds_per_1000_tokens"] == round(13 / 9, 4)


def test_only_the_clock_summary_has_times_and_only_the_other_has_lengths(
    study, tmp_path, monkeypatch, capsys
):
    for arm in ("dense", "p86"):
        run_directory(
            tmp_path / f"{arm}-3",
            [0.1] * 4,
            0.9,
            response={"mean": 100.0, "tokens": 800.0},
            seconds={"rollout": 2.0, "update": 1.0},
        )
    for is_clock in (False, True):
        out = tmp_path / f"{is_clock}.json"
        study.training_summary.main(
            study.training_summary.Options(runs=tmp_path, out=out, clock=is_clock)
        )
        runs = study.common.read_result(out)["runs"]
        assert [run["arm"] for run in runs] == ["dense", "p86"]
        assert all(run["clock"] == [3, 6, 9, 12] for run in runs)
        for name in ("bins", "tokens", "read_by_step"):
            assert all((name in run) != is_clock for run in runs)
        for name in ("seconds", "rollout_tokens_per_s", "seconds_per_1000_tokens"):
            assert all((name in run) == is_clock for run in runs)
    assert "| p86 | 1 | 4 |" in capsys.readouterr().out


@pytest.mark.parametrize("is_clock", [False, True])
def test_a_summary_of_the_first_steps_leaves_out_everything_after_them(study, tmp_path, is_clock):
    run_directory(
        tmp_path / "dense-3",
        [0.1, 0.2, 0.3, 0.4, 0.9],
        0.9,
        response={"mean": 100.0, "tokens": 800.0},
        seconds={"rollout": 2.0, "update": 1.0},
    )
    scores = {"story": {"mean": {"value": 0.5, "low": 0.4, "high": 0.6}}}
    evaluations = [{"step": step, "eval": scores} for step in (0, 4, 5)]
    path = tmp_path / "dense-3/evaluations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    out = tmp_path / "first.json"
    study.training_summary.main(
        study.training_summary.Options(runs=tmp_path, out=out, clock=is_clock, steps=4)
    )
    (run,) = study.common.read_result(out)["runs"]
    assert run["reward"] == [0.1, 0.2, 0.3, 0.4]
    assert run["clock"] == [3, 6, 9, 12]
    assert [step for step, *_ in run["held_out"]] == [0, 4]
    if is_clock:
        assert run["timed"] == {"seconds": [3.0], "tokens": [800]}


def test_the_lossy_clock_table_compares_each_step_with_the_dense_one(study, monkeypatch):
    tables = study.tables_pretrained
    dense = timed_run("dense", [10, 20, 30], read=1.0)
    dense["timed"] = {"seconds": [8.0, 10.0], "tokens": [800, 1000]}
    sparse = timed_run("p80", [10, 20, 30], read=0.456)
    # steps twice and four times as fast; per token twice and once
    sparse["timed"] = {"seconds": [4.0, 2.5], "tokens": [800, 250]}
    monkeypatch.setattr(tables, "load", lambda name: {"runs": [dense, sparse]})
    _, _, *rows = tables.training_clock_lossy().splitlines()
    # geometric means, and t-intervals with one degree of freedom: 2 ** (12.706 / 2) around them
    assert rows == [
        "| dense | 100% | 10.0 | 6.0 | 3.0 | 1.0 | 1234 |  | 0.200 |  |",
        "| p80 | 46% | 10.0 | 6.0 | 3.0 | 1.0 | 1234 | 2.83 [0.03, 231.22] | 0.200 "
        "| 1.41 [0.02, 115.61] |",
    ]


def test_the_clock_table_compares_arms_by_the_clock(study, monkeypatch):
    tables = study.tables_pretrained
    slow = timed_run("dense", [30 * i for i in range(1, 21)])
    fast = timed_run("lossless", [20 * i for i in range(1, 41)], rollout_tokens_per_s=1500)
    fast["seconds_per_1000_tokens"] = 0.16
    runs = [slow, fast]
    monkeypatch.setattr(tables, "load", lambda name: {"runs": runs})
    head, _, *rows = tables.training_clock().splitlines()
    assert head.endswith("| mean reward of the last 10 steps within 10.0 minutes |")
    times = "10.0 | 6.0 | 3.0 | 1.0 | 1234"
    # in ten minutes, the slow run makes 20 steps, and the fast one 30
    assert rows == [
        f"| dense | 20 | {times} | 1000 |  | 0.200 |  | 0.290 |",
        f"| lossless | 40 | {times} | 1500 | 1.50 | 0.160 | 1.25 | 0.490 |",
    ]

    # With seed 4, dense steps take twice as long, at half the rate of tokens. The lossless run is
    # as fast as with seed 3, so its gains are twice as large. It ends after five minutes, in which
    # the dense run makes five steps.
    slow_times = {"step": [20.0, 15.0, 25.0], "rollout": 12.0, "update": 6.0, "other": 2.0}
    slower = timed_run("dense", [60 * i for i in range(1, 21)], seconds=slow_times)
    slower |= {"seed": 4, "rollout_tokens_per_s": 500, "seconds_per_1000_tokens": 0.4}
    shorter = timed_run("lossless", [20 * i for i in range(1, 16)], rollout_tokens_per_s=1500)
    shorter |= {"seed": 4, "tokens_per_response": 1500, "seconds_per_1000_tokens": 0.16}
    runs = [slow, slower, fast, shorter]
    head, _, *rows = tables.training_clock().splitlines()
    assert head.endswith("| mean reward of the last 10 steps within 10.0 and 5.0 minutes |")
    # t-intervals with one degree of freedom: factors of 2 ** (12.706 / 2) around geometric means
    assert rows == [
        "| dense | 20, 20 | 10.0, 20.0 | 6.0, 12.0 | 3.0, 6.0 | 1.0, 2.0 | 1234, 1234 "
        "| 1000, 500 |  | 0.200, 0.400 |  | 0.290, 0.040 |",
        "| lossless | 40, 15 | 10.0, 10.0 | 6.0, 6.0 | 3.0, 3.0 | 1.0, 1.0 | 1234, 1500 "
        "| 1500, 1500 | 2.12 [0.03, 173.41] | 0.160, 0.160 | 1.77 [0.02, 144.51] | 0.490, 0.190 |",
    ]


def test_figure_shows_all_runs_of_an_arm_and_their_mean_in_one_color(study):
    figure = study.pretrained_figure
    _, ax = figure.plt.subplots()
    runs = [{"arm": arm, "reward": [0.1, 0.2, 0.3, 0.4, 0.5]} for arm in ("dense", "p80", "p80")]
    runs[2]["reward"] = [0.5] * 6
    figure.draw_rewards(ax, runs)
    dense, dense_mean, one, other, mean = ax.lines
    assert dense.get_color() == dense_mean.get_color() != one.get_color()
    assert one.get_color() == other.get_color() == mean.get_color()
    assert mean.get_xydata().tolist() == [[3, pytest.approx(0.4)]]  # over five steps of both runs
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["dense (1 seed)", "p80 (2 seeds)"]


def test_figure_shows_rewards_by_the_clock_in_the_colors_of_the_other_panel(
    study, tmp_path, monkeypatch
):
    figure = study.pretrained_figure
    _, ax = figure.plt.subplots()
    runs = [timed_run(arm, [60 * i for i in range(1, 7)]) for arm in ("dense", "p86")]
    figure.draw_clock(ax, runs)
    assert len(set(figure.STYLES.values())) == len(figure.STYLES)
    colors = [figure.STYLES[arm][0] for arm in ("dense", "dense", "p86", "p86")]
    assert [line.get_color() for line in ax.lines] == colors
    thin, smooth, *_ = (line.get_xydata().tolist() for line in ax.lines)
    assert thin[1] == [2, 0.02] and len(thin) == 6
    assert smooth == [[3, pytest.approx(0.04)], [4, pytest.approx(0.06)]]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["dense (1 seed)", "p86 (1 seed)"]

    # Two seeds: the second run's steps take twice as long. Smoothed, the first lasts from minute 3
    # to 10, and the second from minute 6 on.
    runs = [timed_run("p86", [seconds * i for i in range(1, 13)]) for seconds in (60, 120)]
    _, ax = figure.plt.subplots()
    figure.draw_clock(ax, runs)
    one, other, mean = (line.get_xydata() for line in ax.lines)
    assert one[-1].tolist() == [12, 0.22] and other[-1].tolist() == [24, 0.22]
    # At x minutes, the runs' rewards are 0.02 (x - 1) and 0.02 (x / 2 - 1).
    assert mean[:, 0] == pytest.approx([6, 7, 8, 9, 10])
    assert mean[:, 1] == pytest.approx(0.015 * mean[:, 0] - 0.02)

    load = figure.load
    monkeypatch.setattr(
        figure,
        "load",
        lambda name: {"runs": runs} if name == "pretrained_training_clock" else load(name),
    )
    monkeypatch.setattr(figure, "PATH", tmp_path / "figure.png")
    figure.main()
    assert figure.PATH.stat().st_size > 10_000
