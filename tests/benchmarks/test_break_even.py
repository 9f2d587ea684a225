"""Test the script that times each drafter's cycle, and the table made from its results."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHAPES = ("qwen3-1.7b", "qwen3-8b", "qwen3-30b-a3b")


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("break_even"), importlib.import_module("tables_drafters")


def point(batch, length, drafts, ms):
    return {"drafts": drafts, "batch": batch, "length": length, "ms": ms}


def engine(*points, finished=True, runner="V2"):
    return {"runner": runner, "points": list(points), "finished": finished}


DENSE = engine(point(32, 15_000, 0, 10.0), point(8, 1_024, 0, 2.0))
RESULT = {
    "shape": "qwen3-1.7b",
    "machine": "NVIDIA H100 80GB HBM3",
    "runs": [
        {
            "vllm": "0.33.0",
            "gpu": "NVIDIA H100 80GB HBM3",
            "engines": {
                "none": DENSE,
                "sparse": engine(point(32, 15_000, 6, 26.0), point(32, 15_000, 12, 43.0)),
                "dspark": engine(point(32, 15_000, 7, 13.0), finished=False),
            },
        },
        {
            "vllm": "0.33.0",
            "gpu": "NVIDIA H100 80GB HBM3",
            "engines": {
                "none": engine(point(32, 15_000, 0, 20.0)),
                "dspark": engine(point(32, 15_000, 7, 30.0)),
                "none_v1": engine(point(32, 15_000, 0, 22.0), runner="V1"),
            },
        },
    ],
}


def test_points_beyond_the_cache_or_the_context_are_skipped(scripts):
    script, _ = scripts
    points = [(2, 1000), (2, 1001), (1, 3000), (1, 8000)]
    room = 2 * (1000 + script.SPARE)
    assert script.fitting(points, room, 8000) == [(2, 1000)]
    assert script.fitting(points, 100_000, 3000 + script.SPARE) == points[:3]


def test_drafter_whose_run_was_cut_short_does_not_count_as_finished(scripts):
    script, _ = scripts
    first = {"runs": RESULT["runs"][:1]}
    assert script.finished(first) == {"none"}
    assert script.finished(RESULT) == {"none", "dspark", "none_v1"}


def test_drafter_counts_as_finished_once_all_its_cases_have_been_timed(scripts):
    script, _ = scripts
    every = every_case(script)
    assert script.finished(every) == set(script.DRAFTERS)
    points = every["runs"][0]["engines"]["sparse"]["points"]
    every["runs"][0]["engines"]["sparse"]["points"] = [row for row in points if "alone" not in row]
    assert script.finished(every) == set(script.DRAFTERS) - {"sparse"}


def test_engine_for_which_no_point_fits_counts_as_finished(scripts):
    script, _ = scripts
    assert script.finished({"runs": [{"engines": {"sparse": engine()}}]}) == {"sparse"}


def test_graph_sizes_cover_drafting_and_verification(scripts):
    script, _ = scripts
    assert script.graph_sizes("none", [8, 32]) == [8, 32]
    # Each of the 8 sequences has one token, a block of 7 tokens, or 7 drafts and the token before
    # them.
    assert script.graph_sizes("dspark", [8]) == [8, 56, 64]
    assert {8 * 7, 8 * 13} <= set(script.graph_sizes("sparse", [8]))


@pytest.mark.parametrize("shape", SHAPES)
def test_drafters_read_only_layers_that_the_model_has(scripts, shape):
    script, _ = scripts
    config = script.dflash(shape)
    layers = config["num_target_layers"]
    read = config["dflash_config"]["target_layer_ids"]
    assert read == sorted(set(read)) and read[0] > 0 and read[-1] == layers - 3
    assert config["hidden_size"] == script.qwen3(shape).hidden_size


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["eagle3", "dspark", "ngram", "dflash", "draft_model"])
def test_vllm_accepts_a_drafter_and_rejects_all_its_drafts(scripts, shape, name, tmp_path):
    arguments = pytest.importorskip("vllm.engine.arg_utils")
    config = pytest.importorskip("vllm.config")
    script, _ = scripts
    script.qwen3(shape, dtype="bfloat16").save_pretrained(tmp_path)
    rival = script.RIVALS[name]
    asked = rival.speculative_config(shape, tmp_path / "drafter")
    engine = arguments.EngineArgs(str(tmp_path), skip_tokenizer_init=True, load_format="dummy")
    made = config.SpeculativeConfig(
        target_model_config=engine.create_model_config(),
        target_parallel_config=config.ParallelConfig(),
        **asked,
    )
    assert (made.method, made.num_speculative_tokens) == (rival.method, rival.drafts)
    assert made.synthetic_acceptance_rates == [0.0] * rival.drafts
    if rival.config is not None:
        assert made.draft_model_config.hf_config.num_hidden_layers in (1, 5, 28)


class Children:
    """A stand-in for engine processes, each of which measures one point and takes ``seconds``."""

    def __init__(self, clock, seconds, failing=()):
        self.clock, self.seconds, self.failing = clock, seconds, failing
        self.measured = []
        self.ended = []
        self.events = []

    def __call__(self, arguments, drafter, folder):
        made = Child()
        made.all, made.drafter = self, drafter
        return made


class Child:
    def start(self, until):
        self.all.events.append(f"start {self.drafter}")

    def wait_until_ready(self, until):
        pass

    def measure(self, until):
        self.all.clock[0] += self.all.seconds
        self.all.measured.append(self.drafter)
        self.all.events.append(f"measure {self.drafter}")
        if self.drafter in self.all.failing:
            return {"points": [], "finished": False, "failed": "ValueError: what"}
        cases = importlib.import_module("break_even").cases_of(self.drafter)
        return engine(*({**case, "batch": 32, "length": 15_000, "ms": 10.0} for case in cases))

    def end(self):
        self.all.ended.append(self.drafter)


@pytest.fixture
def run(scripts, tmp_path, monkeypatch):
    """Return a function that runs the script with stand-in processes, and returns these processes
    and the contents of the result file.
    """
    pytest.importorskip("vllm.version")
    script, _ = scripts

    def measured(drafters, seconds=10.0, deadline=1000.0, failing=(), together=1):
        clock = [0.0]
        children = Children(clock, seconds, failing)
        monkeypatch.setattr(script, "Child", children)
        monkeypatch.setattr(script.time, "time", lambda: clock[0])
        out = tmp_path / "found.json"
        arguments = script.argparse.Namespace(
            shape="qwen3-1.7b",
            drafters=drafters,
            points=script.POINTS,
            deadline=deadline,
            out=out,
            together=together,
        )
        script.measure(arguments)
        return children, importlib.import_module("common").read_result(out)

    return measured


def test_resumed_run_measures_dense_decoding_again(run):
    drafters = ("none", "sparse", "eagle3", "dspark")
    children, result = run(drafters, seconds=40.0, deadline=100.0)
    assert children.measured == ["none", "sparse"] and children.ended == ["eagle3"]

    children, result = run(drafters)
    assert children.measured == ["none", "eagle3", "dspark"]
    assert [list(run["engines"]) for run in result["runs"]] == [
        ["none", "sparse"],
        ["none", "eagle3", "dspark"],
    ]

    children, again = run(drafters)
    assert children.measured == [] and again == result


def test_failed_engine_is_recorded_and_measured_again_by_the_next_run(run):
    _, result = run(("eagle3", "dspark"), failing=("eagle3",))
    engines = result["runs"][0]["engines"]
    assert engines["eagle3"]["failed"] == "ValueError: what" and engines["dspark"]["finished"]
    assert run(("eagle3", "dspark"))[0].measured == ["none", "eagle3"]


def test_engines_that_start_together_measure_one_after_another(run):
    children, _ = run(("none", "eagle3", "dspark"), together=2)
    together = ["start none", "start eagle3", "measure none", "measure eagle3"]
    assert children.events == [*together, "start dspark", "measure dspark"]


def test_ratios_compare_engines_of_the_same_run(scripts):
    _, tables = scripts
    rows = {(row["drafter"], row["drafts"], row["batch"]): row for row in tables.ratios(RESULT)}
    assert rows["sparse", 6, 32]["break_even"] == 2.6
    assert rows["sparse", 12, 32]["break_even"] == 4.3
    # This ratio is from the second run, because the first one was cut short.
    assert rows["dspark", 7, 32]["break_even"] == 1.5
    assert rows["none_v1", 0, 32]["break_even"] == 1.1
    assert not any(drafter == "none" for drafter, _, _ in rows)


def rows_of(table):
    """Return the cells of a table's rows, without empty ones at the end, and any other line as a
    row of one cell.
    """
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


def test_table_has_a_row_for_each_drafter_and_a_column_for_each_point(
    scripts, tmp_path, monkeypatch
):
    _, tables = scripts
    (tmp_path / "break_even_qwen3-1.7b.json").write_text(json.dumps(RESULT))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    title, _, head, _, *rows = rows_of(tables.break_even())
    assert title == ["**1.7B, H100**"]
    assert head == ["drafter", "drafts", "8 x 1,024", "32 x 15,000"]
    assert rows == [
        ["none: ms of a step", "0", "2.00", "10.00 to 20.00"],
        ["DSpark", "7", "", "1.50"],
        ["sparse actor", "6", "", "2.60"],
        ["sparse actor", "12", "", "4.30"],
        ["none, V1 model runner", "0", "", "1.10"],
    ]


def test_each_shape_has_a_table_with_its_own_points(scripts, tmp_path, monkeypatch):
    _, tables = scripts
    larger = {
        "shape": "qwen3-8b",
        "runs": [
            {
                "gpu": "NVIDIA H200",
                "engines": {
                    "none": engine(point(16, 15_000, 0, 10.0)),
                    "eagle3": engine(point(16, 15_000, 3, 12.0)),
                },
            }
        ],
    }
    (tmp_path / "break_even_qwen3-1.7b.json").write_text(json.dumps(RESULT))
    (tmp_path / "break_even_qwen3-8b.json").write_text(json.dumps(larger))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert rows_of(tables.break_even())[-6:] == [
        ["**8B, H200**"],
        [""],
        ["drafter", "drafts", "16 x 15,000"],
        ["---", "---", "---"],
        ["none: ms of a step", "0", "10.00"],
        ["EAGLE-3", "3", "1.20"],
    ]
    assert rows_of(tables.speed())[-1] == ["EAGLE-3", "3", "2.40 to 3.32", "2.0x to 2.8x"]


def every_case(script):
    """Return a result in which each drafter's cases were timed at two points."""
    engines = {}
    for drafter in script.DRAFTERS:
        points = [
            {**case, "batch": batch, "length": length, "ms": 10.0 + case["drafts"]}
            for batch, length in ((8, 1_024), (32, 15_000))
            for case in script.cases_of(drafter)
        ]
        engines[drafter] = engine(*points, runner="V1" if drafter == "ngram" else "V2")
    return {**RESULT, "runs": [{**RESULT["runs"][0], "engines": engines}]}


def test_each_drafter_and_draft_length_has_a_row_and_a_line_of_its_own(
    scripts, tmp_path, monkeypatch
):
    plt = pytest.importorskip("matplotlib.pyplot")
    script, tables = scripts
    result = every_case(script)
    (tmp_path / "break_even_qwen3-1.7b.json").write_text(json.dumps(result))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    named = [(row[0], row[1]) for row in rows_of(tables.break_even())[4:]]
    timed = sum(len(script.cases_of(drafter)) for drafter in script.DRAFTERS)
    assert len(set(named)) == len(named) == timed
    assert ("n-gram (V1 model runner)", "4") in named and ("DSpark", "7") in named

    figure = importlib.import_module("break_even_figure")
    monkeypatch.setattr(plt, "close", lambda drawn: None)
    figure.draw([result], tmp_path / "all.png")
    drawn = plt.gcf()
    monkeypatch.undo()
    (legend,) = drawn.legends
    labels = [text.get_text() for text in legend.get_texts()]
    lines = [line for line in drawn.axes[0].lines if line.get_label() in labels]
    looks = {(line.get_marker(), line.get_color()) for line in lines}
    plt.close(drawn)
    assert len(set(labels)) == len(labels) == len(looks) == timed - 2  # without the dense arms


def test_speed_is_the_known_tokens_per_cycle_divided_by_the_break_even_point(
    scripts, tmp_path, monkeypatch
):
    _, tables = scripts
    (tmp_path / "break_even_qwen3-1.7b.json").write_text(json.dumps(RESULT))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = rows_of(tables.speed())[4:]
    # DSpark yields 2.33 to 6.2 tokens, and breaks even at 1.5. The text model's drafts are accepted
    # with a probability of 0.945, so 6 drafts yield (1 - 0.945^7) / 0.055 = 5.9 tokens.
    assert lines[0] == ["DSpark", "7", "2.33 to 6.20", "", "1.6x to 4.1x"]
    assert [line[:2] for line in lines[1:]] == [["sparse actor", "6"], ["sparse actor", "12"]]
    assert float(lines[1][2]) == pytest.approx((1 - 0.945**7) / 0.055, abs=0.02)
    assert lines[1][4] == "2.3x"


def test_tables_are_empty_without_results(scripts, tmp_path, monkeypatch):
    _, tables = scripts
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.break_even() == tables.crossover() == tables.speed() == tables.accuracy() == ""


def test_drawing_the_figure_is_deterministic(scripts, tmp_path):
    pytest.importorskip("matplotlib")
    figure = importlib.import_module("break_even_figure")
    figure.draw([RESULT, RESULT], tmp_path / "first.png")
    figure.draw([RESULT, RESULT], tmp_path / "second.png")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


def test_points_of_the_figure_are_in_order_with_more_space_between_batch_sizes(scripts):
    pytest.importorskip("matplotlib")
    figure = importlib.import_module("break_even_figure")
    row = {"break_even": 1.0}
    drawn = {
        ("eagle3", 3): {(8, 4_096): row, (32, 1_024): row},
        ("dspark", 7): {(8, 1_024): row, (8, 4_096): row},
    }
    assert figure.places(drawn) == {
        (8, 1_024): 0,
        (8, 4_096): 1,
        (32, 1_024): 2 + figure.BETWEEN,
    }


def test_predictions_are_compared_with_measurements_for_long_and_short_steps(
    scripts, tmp_path, monkeypatch
):
    _, tables = scripts
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables.cost, "break_even", lambda *_: 1.5)
    monkeypatch.setattr(tables.cost, "sparse_break_even", lambda *_: 2.6)
    engines = (
        {
            "none": DENSE,
            "dspark": engine(point(32, 15_000, 7, 20.0), point(8, 1_024, 7, 2.0)),
            "sparse": engine(point(32, 15_000, 6, 20.0)),
        },
        {
            "none": engine(point(32, 15_000, 0, 11.0), point(8, 1_024, 0, 3.0)),
            "eagle3": engine(point(32, 15_000, 3, 22.0), point(8, 1_024, 3, 6.0)),
            "ngram": engine(point(32, 15_000, 4, 12.0)),
        },
    )
    runs = [{**RESULT["runs"][0], "engines": of} for of in engines]
    path = tmp_path / "break_even_qwen3-1.7b.json"
    path.write_text(json.dumps({**RESULT, "runs": runs}))
    dense, *rows = (row[1:] for row in rows_of(tables.accuracy())[2:])
    # The cost model has no n-gram drafter. DSpark's short cycle was as fast as its step.
    assert rows == [
        ["EAGLE-3, 3 drafts", "0.75", "0.75"],
        ["DSpark, 7 drafts", "0.75", "1.50"],
        ["sparse actor, 6 drafts", "1.30"],  # it has no short cycle
    ]
    # Dense steps took 10 and 11 ms, or 2 and 3 ms.
    for cell, quotient in zip(dense[1:], (1.1, 1.5), strict=True):
        low, high = map(float, cell.split(" to "))
        assert high / low == pytest.approx(quotient, rel=0.02)


def test_draft_lengths_that_the_cost_model_does_not_cover_are_not_predicted(scripts):
    _, tables = scripts
    setting = tables.MODEL_SHAPES["qwen3-1.7b"], tables.MACHINES["h200"], tables.lengths((8, 1_024))
    assert tables.prediction(("eagle3", 3), *setting) > 1
    assert tables.prediction(("eagle3", 5), *setting) is None


def test_crossover_is_the_break_even_point_times_the_sparse_actors_speed(
    scripts, tmp_path, monkeypatch
):
    _, tables = scripts
    (tmp_path / "break_even_qwen3-1.7b.json").write_text(json.dumps(RESULT))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = rows_of(tables.crossover())
    # The sparse actor was only timed at one of the points.
    assert lines[0] == ["shape, GPU", "drafter", "drafts", "32 x 15,000"]
    # With 6 drafts, the sparse actor yields 5.94 tokens at a break-even point of 2.6, so it is 2.29
    # times as fast as dense decoding. With 12 drafts, it is slower. DSpark breaks even at 1.5.
    assert lines[2:] == [["1.7B, H100", "DSpark", "7", "3.4"]]


def test_drafter_that_would_need_more_tokens_than_it_drafts_never_beats_the_sparse_actor(
    scripts, tmp_path, monkeypatch
):
    script, tables = scripts
    result = every_case(script)
    engines = result["runs"][0]["engines"]
    for row in engines["eagle3"]["points"]:
        row["ms"] = 30.0  # three dense steps; the sparse actor is 4.3 times as fast as dense
    (tmp_path / "break_even_qwen3-1.7b.json").write_text(json.dumps(result))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = rows_of(tables.crossover())
    assert lines[2][1:] == ["EAGLE-3", "3", "never", "never"]


def test_yield_with_guesses_spans_all_measured_points_of_all_shapes(scripts, tmp_path, monkeypatch):
    script, tables = scripts
    (tmp_path / "break_even_qwen3-1.7b.json").write_text(json.dumps(every_case(script)))
    for shape, found in (("qwen3-1.7b", (6.6, 7.0)), ("qwen3-8b", (7.7,))):
        points = [
            {"batch": 24, "length": 15_000, "guesses": 3, "drafts": 12, "tokens_per_cycle": tokens}
            for tokens in found
        ]
        cascade = {"runs": [{"engines": {"lossless": {"points": points}}}]}
        (tmp_path / f"cascade_{shape}.json").write_text(json.dumps(cascade))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (found,) = [line for line in rows_of(tables.speed()) if "guesses per pass" in line[0]]
    # A cycle takes 2.2 dense steps.
    assert found[1:] == ["12", "6.60 to 7.70", "3.0x to 3.5x", "3.0x to 3.5x"]
