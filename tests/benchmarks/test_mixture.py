"""Test the script that times a mixture of experts in all modes, and the tables made from its
results.
"""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("mixture"), importlib.import_module("tables_mixture")


def test_reducing_experts_and_layers_changes_only_the_corresponding_fields(scripts):
    script, _ = scripts
    whole = script.qwen3("qwen3-30b-a3b").to_dict()
    cut = script.qwen3("qwen3-30b-a3b", **script.changes(32, 2)).to_dict()
    differing = {name for name in whole if whole[name] != cut[name]}
    assert differing <= {"num_local_experts", "num_experts", "num_hidden_layers", "layer_types"}
    kept = script.qwen3("qwen3-30b-a3b", **script.changes(32, 2))
    assert (kept.num_experts, kept.num_experts_per_tok, kept.num_hidden_layers) == (32, 8, 2)
    assert script.changes(None, None) == {}


def test_graph_sizes_cover_every_batch_and_number_of_drafts(scripts):
    script, _ = scripts
    assert script.graph_sizes([20, 40], (0, 4)) == [20, 40, 100, 200]


def test_default_trace_and_points_fit_on_an_h200_together_with_the_weights(scripts):
    from sparrow.cost import MACHINES, SHAPES

    script, _ = scripts
    shape, machine = SHAPES["qwen3-30b-a3b"], MACHINES["h200"]
    weights = (shape.weights + shape.embedding) * shape.weight_bytes
    landmark_share = 1 / 16 / 2  # one key per page of 16 tokens, in addition to keys and values
    token = shape.kv_width * shape.kv_bytes * (1 + landmark_share)
    room = (0.85 * machine.memory_bytes - weights) / token
    described, _ = script.traced(script.SLOTS, script.STATES)
    assert described["peak"] < room
    assert all(batch * length < room for batch, length in script.POINTS)


class Child:
    """A stand-in for an engine's process."""

    def __init__(self, arguments, mode):
        self.mode = mode

    def start(self, until):
        pass

    def wait_until_ready(self, until):
        pass

    def measure(self, until):
        if self.mode == "lossy":
            return {"points": [], "finished": False, "failed": "ValueError: what"}
        return {"points": [{"drafts": 0, "batch": 2, "length": 9}], "trace": [], "finished": True}

    def end(self):
        pass


def test_each_invocation_appends_a_run_with_the_model_size_and_weights(
    scripts, tmp_path, monkeypatch
):
    pytest.importorskip("vllm.version")
    script, _ = scripts
    monkeypatch.setattr(script, "Child", Child)
    out = tmp_path / "found.json"
    for experts in (None, 32):
        arguments = script.argparse.Namespace(
            shape="qwen3-30b-a3b",
            experts=experts,
            layers=None,
            quantization="fp8_per_block" if experts else None,
            modes=script.MODES,
            deadline=1000.0,
            out=out,
        )
        script.measure(arguments)
    whole, cut = importlib.import_module("common").read_result(out)["runs"]
    assert (whole["experts"], cut["experts"]) == (128, 32)
    assert whole["layers"] == cut["layers"] == 48
    assert (whole["quantization"], cut["quantization"]) == (None, "fp8_per_block")
    assert list(whole["engines"]) == ["stock", "lossless", "lossy"]
    assert whole["engines"]["lossy"]["failed"] == "ValueError: what"
    assert whole["engines"]["lossless"]["finished"]


def test_child_process_receives_the_arguments_of_its_parent(scripts, tmp_path, monkeypatch):
    script, _ = scripts
    commands = []
    monkeypatch.setattr(
        script.EngineProcess, "__init__", lambda self, command, *files: commands.append(command)
    )
    arguments = script.argparse.Namespace(
        shape="qwen3-30b-a3b",
        points=((40, 15_000), (8, 1_024)),
        parts=("points",),
        slots=40,
        states=8,
        memory=0.9,
        experts=32,
        layers=None,
        quantization="fp8_per_block",
        out=tmp_path / "found.json",
    )
    script.Child(arguments, "lossless")
    (command,) = commands
    given = " ".join(command)
    assert given.startswith("mixture.py --shape qwen3-30b-a3b --child lossless")
    assert "--points 40x15000 8x1024 --parts points --slots 40" in given
    assert "--experts 32 --quantization fp8_per_block" in given and "--layers" not in given


def point(drafts, tokens_per_s, **more):
    return {"drafts": drafts, "batch": 40, "length": 15_000, "tokens_per_s": tokens_per_s, **more}


def engine(*points, steps_ms=(), **more):
    trace = [{"ms_per_token": ms, "drafts": 4} for ms in steps_ms]
    rollout = {"steps": 1000, "slots": 40}
    return {"points": points, "trace": trace, "rollout": rollout, "finished": True, **more}


RUN = {
    "gpu": "NVIDIA H200",
    "vllm": "0.33.0",
    "experts": 128,
    "layers": 48,
    "engines": {
        "stock": engine(point(0, 1000.0), steps_ms=(20.0, 40.0)),
        "lossless": engine(
            point(0, 990.0),
            point(4, 1300.0),
            point(8, 1250.0),
            point("adapt", 1200.0, settled={"tokens_per_s": 1290.0}),
            steps_ms=(15.0, 25.0),
        ),
        "lossy": engine(point(0, 1500.0), steps_ms=(10.0,), finished=False),
    },
}


@pytest.fixture
def tables(scripts, tmp_path, monkeypatch):
    monkeypatch.setattr(scripts[1], "RESULTS", tmp_path)
    result = {"shape": "qwen3-30b-a3b", "runs": [RUN]}
    (tmp_path / "mixture_qwen3-30b-a3b.json").write_text(json.dumps(result))
    return scripts[1]


def cells(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines()]


def test_speedups_are_relative_to_stock_vllm_in_the_same_run(tables):
    head, _, row = cells(tables.speed())
    found = dict(zip(head, row, strict=True))
    assert found["kept"] == "128 experts, 48 layers"
    assert (found["lossy"], found["lossless, no drafts"]) == ("1.50x", "0.99x")
    assert found["fixed number of drafts"] == "4: 1.30x, 8: 1.25x"
    assert (found["chosen, first 4 s"], found["after"]) == ("1.20x", "1.29x")


def test_quantised_weights_are_named_and_not_predicted(tables):
    run = RUN | {"schedule": "qwen3-4b", "draft pages": 61, "acceptance": 0.95}
    quantised = run | {"quantization": "fp8_per_block"}
    result = {"shape": "qwen3-30b-a3b", "runs": [run, quantised]}
    (tables.RESULTS / "mixture_qwen3-30b-a3b.json").write_text(json.dumps(result))
    _, _, *rows = cells(tables.speed())
    assert [row[1] for row in rows] == [
        "128 experts, 48 layers",
        "128 experts, 48 layers, weights in fp8_per_block",
    ]
    _, _, *predictions = cells(tables.predicted())
    assert len(predictions) == 1


def test_time_of_a_trace_that_was_cut_short_is_left_blank(tables):
    _, _, row = cells(tables.rollout())
    assert row[4:] == ["40", "30 s", "20 s", "**1.50x**", "", "", "4"]


def test_tables_without_results_are_marked_as_unmeasured(scripts, tmp_path, monkeypatch):
    tables = scripts[1]
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert {table() for table in tables.TABLES.values()} == {tables.UNMEASURED}
