"""Test that a run can be resumed only with the problems it began with."""

import json

import pytest

from sparrow.errors import ConfigError
from sparrow.tasks import Mixture, Trace, load_dataset_task
from sparrow.tasks.base import draw
from sparrow.tasks.dataset import fingerprint
from tests.train.test_trainer import make_trainer

ROWS = [{"question": f"trace {name}", "answer": "7"} for name in ("ba", "du", "ku", "mi", "to")]


def seven(response: str, answer: str) -> float:
    return float(answer in response)


def task_of(tmp_path, rows, name="rows"):
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset_task(
        "qa", {"math": seven}, path=path, template="{question}", max_tokens=900, tokens=len
    )


CHANGED = {
    "one row more": [*ROWS, {"question": "trace vu", "answer": "7"}],
    "one row less": ROWS[:-1],
    "another order": ROWS[::-1],
    "another question": [{"question": "trace zu", "answer": "7"}, *ROWS[1:]],
    "another answer": [{**ROWS[0], "answer": "8"}, *ROWS[1:]],
}


def test_any_change_in_the_training_data_is_detected_on_resume(tmp_path):
    make_trainer(tmp_path / "run", steps=1, task=task_of(tmp_path, ROWS)).train()
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["data"]
    assert recorded["train"]["problems"] == 5
    for what, rows in CHANGED.items():
        with pytest.raises(
            ConfigError, match="cannot continue with different problems: the data set"
        ):
            make_trainer(tmp_path / "run", steps=2, task=task_of(tmp_path, rows), resume=True)
        assert fingerprint(task_of(tmp_path, rows)) != fingerprint(task_of(tmp_path, ROWS)), what
    # Dropped rows do not matter.
    same = [*ROWS, ROWS[0], {"question": "trace ba" * 200, "answer": "7"}]
    made = make_trainer(tmp_path / "run", steps=2, task=task_of(tmp_path, same), resume=True)
    assert made.step == 1
    made.run_dir.release()


def test_a_changed_benchmark_is_detected_on_resume(tmp_path):
    from sparrow.train.config import EvalConfig

    held = [draw(Trace(2), i, 1) for i in range(3)]
    settings = {"eval": EvalConfig(every=1, benchmark=("trace",), limit=3)}
    make_trainer(tmp_path, steps=1, benchmarks={"trace": held[:2]}, **settings).train()
    with pytest.raises(ConfigError, match="different problems: trace: problems was 2 and is now 3"):
        make_trainer(tmp_path, steps=2, benchmarks={"trace": held}, resume=True, **settings)


def test_a_run_without_a_recorded_fingerprint_can_be_resumed(tmp_path):
    make_trainer(tmp_path / "run", steps=1, task=task_of(tmp_path, ROWS)).train()
    config = tmp_path / "run" / "config.json"
    record = json.loads(config.read_text())
    del record["data"]
    config.write_text(json.dumps(record))
    more = task_of(tmp_path, CHANGED["one row more"])
    made = make_trainer(tmp_path / "run", steps=2, task=more, resume=True)
    assert made.step == 1
    made.run_dir.release()


def test_a_mixtures_fingerprint_contains_each_tasks_fingerprint(tmp_path):
    one, other = task_of(tmp_path, ROWS[:2], "one"), task_of(tmp_path, ROWS[2:], "other")
    assert fingerprint(Mixture([one, other], [1, 1])) == [fingerprint(one), fingerprint(other)]
    assert fingerprint(Trace(2)) is None
