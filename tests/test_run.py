"""The run directory: what is written is what is read, and who may write."""

import json

import pytest

from sparrow.errors import ConfigError
from sparrow.run import LoggedResponse, RunConfig, RunDir, RunLog, TrainerState
from sparrow.run.directory import RECORDED
from sparrow.schedule import SparsitySchedule

SCHEDULE = SparsitySchedule((2, 6), bin_tokens=100, page_size=10, dense_layers=(0,), provenance={"preset": "x"})


def test_what_is_written_is_read_back(tmp_path):
    RunConfig({"tau": 0.9, "steps": 3}, SCHEDULE).save(tmp_path)
    made = RunDir(tmp_path, resume=False)
    responses = [LoggedResponse(step, "p", "q", [" a", "b"], [0.5, None], 0.25, "stop") for step in (1, 2, 3)]
    for response in responses:
        row = {name: {} for name in RECORDED} | {"step": response.step, "schedule": {"top_k": [response.step, "all"]}}
        made.append_step(row, [response, response])
    log = RunLog.load(tmp_path)
    assert log.train == {"tau": 0.9, "steps": 3} and log.steps.tolist() == [1, 2, 3]
    assert log.rollouts == (responses[0],) * 2 + (responses[2],) * 2
    assert log.schedules[1] == SCHEDULE.replace(top_k=(2, 2**30))
    state = TrainerState(3, 17, SCHEDULE, {"calm": [1]})
    state.save(tmp_path)
    assert TrainerState.load(tmp_path) == state and TrainerState.load(tmp_path).schedule.provenance == {"preset": "x"}


def test_a_step_that_lacks_what_readers_need_is_not_written(tmp_path):
    with pytest.raises(AssertionError, match="step 1 lacks"):
        RunDir(tmp_path, resume=False).append_step({"step": 1, "reward": {}}, [])
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_response_without_a_field_is_refused_by_its_line(tmp_path):
    RunConfig({"tau": 0.9}, SCHEDULE).save(tmp_path)
    row = {name: {} for name in RECORDED} | {"step": 1, "schedule": {}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1, "problem": "p", "prompt": "q"}\n')
    with pytest.raises(ConfigError, match=r"line 1 of .*rollouts\.jsonl has no 'tokens'; restore"):
        RunLog.load(tmp_path)
