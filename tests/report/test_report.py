"""Test the report on a run: how the log is read, and what tables, figures and the token view show.

Shapes: S steps, N length bins.
"""

import json
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from sparrow.cli import main
from sparrow.errors import ConfigError
from sparrow.mismatch import BinMismatch, Tau, mismatch_report
from sparrow.mismatch.tail import between
from sparrow.report import (
    RunLog,
    curves,
    draw_measurement,
    figures,
    page,
    responses,
    summary_rows,
    theme,
    write_report,
)
from sparrow.report.curves import PANELS, UNSMOOTHED_STEPS
from sparrow.report.summary import (
    DENSE,
    OWN_SAMPLES,
    bin_name,
    describe_schedule,
    result_rows,
    setup_rows,
)
from sparrow.report.theme import LEVELS
from sparrow.run import LoggedResponse
from sparrow.schedule import ALL_PAGES, SparsitySchedule

pytestmark = pytest.mark.filterwarnings("error")

SCHEDULE = SparsitySchedule(top_k=(2, 6), bin_tokens=100, page_size=10, dense_layers=(0,))
FIGURES = [
    "Reward",
    "Response length",
    "Responses that ended by themselves",
    "Prompts whose rewards are all equal",
    "p5 of acceptance by length",
    "p5 by length at the last step",
    "Distribution of acceptance",
    "Entropy",
    "Loss",
    "Gradient norm",
    "Clipped tokens",
    "Effective sample size",
    "Tokens clipped, tokens masked, sequences dropped",
    "KL(actor ‖ policy)",
    "Rollout throughput",
    "Time by phase",
    "Share of the KV cache read",
    "What a sparse layer reads",
]
BAD = "<script>alert(1)</script>"


def mismatch(seed: int, bins: int = 3, responses: int = 6) -> dict:
    """Return a report in the trainer's format, with most tokens near 1, a Beta tail, and a last bin
    that only one response reaches.
    """
    rng = np.random.default_rng(seed)
    lengths = [100 * bins - 20] + [100 * (i % max(bins - 1, 1)) + 80 for i in range(responses - 1)]
    position = np.concatenate([np.arange(n) for n in lengths])
    in_tail = rng.random(position.size) < 0.3
    alpha = np.where(
        in_tail, rng.beta(6, 1, position.size), 1 - rng.exponential(1e-5, position.size)
    )
    sequence = np.repeat(np.arange(responses), lengths)
    return mismatch_report(
        alpha, np.minimum(alpha + 0.01, 1), position, sequence, bin_tokens=100
    ).to_dict()


def step_row(step: int, **changes) -> dict:
    row = {
        "step": step,
        "reward": {"mean": step / 10, "std": 0.1},
        "response": {"mean": 150.0, "max": 280.0, "tokens": 100.0 * step, "ended_fraction": 1.0},
        "correction": {
            "ess_token": 0.9,
            "ess_sequence": 0.8,
            "ess_sequence_ratio": 0.5,
            "clipped_fraction": 0.02,
            "masked_fraction": 0.1 if step == 1 else 0.0,
            "dropped_sequence_fraction": 0.0,
            "kl_k1": 0.01,
            "kl_k3": 0.02,
        },
        "kv": {
            "read_fraction": 0.5,
            "tokens_read": 300 * step,
            "tokens_held": 1000 * step,
            "preemptions": 0,
        },
        "seconds": {"rollout": 3.0, "score": 0.5, "update": 1.5},
        "schedule": {"top_k": [2, 6]},
        "entropy": 1 / step,
        "loss": {
            "loss": -0.1,
            "grad_norm": 0.3,
            "clip_low_fraction": 0.01,
            "clip_high_fraction": 0.02,
        },
        "advantage": {"zero_variance_fraction": 0.25},
    }
    return row | ({"mismatch": mismatch(step)} if "mismatch" not in changes else {}) | changes


def rollout_row(step: int, tokens: list[str], acceptance: list[float | None], **changes) -> dict:
    row = {"problem": "p", "prompt": "q", "reward": 0.5, "finish_reason": "stop"}
    return {"step": step, "tokens": tokens, "acceptance": acceptance, **row, **changes}


def write_run(path, rows, rollouts=(), **train):
    path.mkdir(parents=True, exist_ok=True)
    config = {"train": {"tau": 0.86, "steps": len(rows), **train}, "schedule": SCHEDULE.to_dict()}
    (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if rollouts:
        (path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    return path


def log_of(*rows, schedules=None) -> RunLog:
    """Build a log in memory from rows of metrics."""
    train = {"tau": 0.86, "steps": 9}
    return RunLog(Path("run"), train, rows, schedules or tuple(SCHEDULE for _ in rows))


@pytest.mark.slow
def test_evaluations_are_plotted_from_step_zero_and_listed_in_a_table(tmp_path):
    def score(value):
        return {
            "mean": {"value": value, "low": value - 0.1, "high": value + 0.1},
            "tokens": 100 * value,
        }

    run = write_run(tmp_path, [step_row(1), step_row(2), step_row(3)], steps=3)
    rows = [
        {"step": step, "eval": {"aime24": score(value)}}
        for step, value in ((0, 0.25), (2, 0.5), (3, 0.375))
    ]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = RunLog.load(run)
    panel = PANELS["Evaluation"][0]
    assert log.evaluated.tolist() == [0, 2, 3] and panel.series(log)["aime24"].tolist() == [
        25.0,
        50.0,
        37.5,
    ]
    ax = Figure().add_subplot()
    panel.draw(ax, [log])
    assert ax.lines[0].get_xydata().tolist() == [[0, 25.0], [2, 50.0], [3, 37.5]]
    told = dict(result_rows(log))["evaluation, aime24"]
    assert told == "0.375 [0.275, 0.475] after step 3, best 0.500 after step 2"
    drawn = write_report(run).read_text()
    assert (
        drawn.index("<h3>Reward")
        < drawn.index("<h3>Benchmarks, mean@k")
        < drawn.index("<h3>Entropy")
    )
    (run / "evaluations.jsonl").unlink()
    assert "Benchmarks, mean@k" not in write_report(run).read_text()


def bin_row(n: int, p5, low=None, high=None, upper=None, upper_high=None, n_sequences=4) -> dict:
    values = {
        "mean": p5,
        "lower_bound": p5,
        "interval_low": low,
        "interval_high": high,
        "upper_bound": upper or p5,
        "upper_bound_high": upper_high or high,
    }
    return {
        "bin": n,
        "start": 100 * n,
        "end": 100 * (n + 1),
        "n_tokens": 50,
        "n_sequences": n_sequences,
        **values,
    }


def bins_only(*bins) -> dict:
    return mismatch(0) | {"bins": list(bins)}


STEP = step_row(1)


class Page(HTMLParser):
    """Parse a page into its tables (rows of cell texts), the text of its figures by id, the token
    spans of each response, and the attributes of every tag.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.figures: dict[str, str] = {}
        self.responses: list[list[tuple[dict, str]]] = []
        self.stack: list[str] = []
        self.text = ""
        self.table = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append((tag, found))
        if tag == "table":
            self.table = found["id"]
            self.tables[self.table] = []
        elif tag == "tr":
            self.tables[self.table].append([])
        elif tag in ("td", "th"):
            self.tables[self.table][-1].append("")
        elif tag == "img":
            title, _, meaning = found["alt"].partition(". ")
            self.figures[title] = meaning
        elif tag == "div" and found.get("class") == "text tokens":
            self.responses.append([])
        elif tag == "span" and self.stack[-1:] == ["tokens"]:
            self.responses[-1].append((found, ""))
        if tag not in ("meta", "img"):
            self.stack.append("tokens" if found.get("class") == "text tokens" else tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() in (tag, "tokens")

    def handle_data(self, data):
        self.text += data
        if "tokens" in self.stack and self.stack[-1] == "span":
            attributes, text = self.responses[-1][-1]
            self.responses[-1][-1] = (attributes, text + data)
        elif "td" in self.stack or "th" in self.stack:
            self.tables[self.table][-1][-1] += data


TOKENS = ["So", " x", " <", BAD, " &amp;", "\n\n", " \\frac", "\n", " ünï", '"</div>']
ACCEPTANCE = [1.0, 0.999, 0.9989, 0.95, 0.86, 0.7, 0.3, 0.2999, 0.0, None]
LEVEL = ["a0", "a0", "a1", "a3", "a4", "a5 n", "a6", "a7 n", "a7", "none"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    rows = [step_row(step) for step in range(1, 9)]
    rollouts = [
        rollout_row(
            step,
            TOKENS,
            ACCEPTANCE,
            problem=f"{BAD}-{step}-{i}",
            prompt=f"a < b\n{BAD}",
            reward=i + 0.25,
        )
        for step in range(1, 9)
        for i in range(2)
    ]
    train = {"steps": 20, "model": BAD, "task": None, "dataset": ["gsm8k", "math"]}
    return write_run(tmp_path_factory.mktemp("runs") / "a<b", rows, rollouts, **train)


@pytest.fixture(scope="module")
def report(run):
    return write_report(run)


@pytest.fixture(scope="module")
def parsed(report) -> Page:
    return Page(report.read_text(encoding="utf-8"))


# Reading a run


def test_recorded_series_bins_and_tails_are_read_back_unchanged(run):
    log = RunLog.load(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert log.steps.tolist() == list(range(1, 9))
    assert log.series("correction", "kl_k3").tolist() == [0.02] * 8
    assert np.isnan(log.series("correction", "no_such")).all()
    assert [b.n_tokens for b in log.bins()] == [b["n_tokens"] for b in rows[-1]["mismatch"]["bins"]]
    tail_SN = log.tail_by_step()
    assert tail_SN.tolist() == [[b["lower_bound"] for b in row["mismatch"]["bins"]] for row in rows]
    assert isnan(log.bins()[2].interval_low), (
        "only one response reaches the last bin, so it has no interval"
    )


def test_bin_that_no_response_reaches_is_nan():
    log = log_of(
        step_row(1, mismatch=bins_only(bin_row(0, 0.9))),
        step_row(2, mismatch=bins_only(bin_row(2, 0.7))),
    )
    np.testing.assert_array_equal(log.tail_by_step(), [[0.9, nan, nan], [nan, nan, 0.7]])


def test_responses_of_any_step_can_be_read(run):
    assert [row.step for row in RunLog.load(run).responses([3, 8])] == [3, 3, 8, 8]


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
def test_partly_written_last_line_is_ignored(tmp_path, name):
    rows = [step_row(1), step_row(2)]
    path = write_run(tmp_path, rows, [rollout_row(step, ["a"], [0.5]) for step in (1, 2)])
    whole = (path / name).read_text()
    for kept in (whole[:-40], whole + '{"step": 3, "rew', whole + "{"):
        (path / name).write_text(kept)
        log = RunLog.load(path)
        found = (
            log.steps.tolist()
            if name == "metrics.jsonl"
            else [row.step for row in log.responses([1, 2, 3])]
        )
        assert found == ([1] if kept == whole[:-40] else [1, 2])
    (path / name).write_text(whole[:-1])
    assert len(RunLog.load(path).metrics) == 2, "a last line without a line break is still complete"


def test_damaged_line_raises_an_error(tmp_path):
    path = write_run(tmp_path, [step_row(1)])
    text = (path / "metrics.jsonl").read_text()
    for damage, message in (
        ("{oops\n", "line 1 of .*metrics.jsonl is not valid JSON"),
        ("[1]\n", "contains a value of type list"),
        ('{"loss": 1}\n', "line 1 of .* has no step"),
        ('{"step": 1}\n', "step 1 of .*metrics.jsonl has no 'correction'"),
    ):
        (path / "metrics.jsonl").write_text(damage + text)
        with pytest.raises(ConfigError, match=message):
            RunLog.load(path)


def test_error_about_a_damaged_configuration_says_to_restore_it(tmp_path):
    path = write_run(tmp_path, [step_row(1)])
    for damage in ("", "[1]"):
        (path / "config.json").write_text(damage)
        with pytest.raises(ConfigError, match=r"config\.json .*; restore it from a copy$"):
            RunLog.load(path)


def test_empty_run_raises_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no finished step"):
        write_report(write_run(tmp_path, []))
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="no finished step"):
        summary_rows(tmp_path)
    assert not (tmp_path / "report").exists()


def test_report_describes_both_the_initial_and_the_changed_schedule(tmp_path):
    start, now = step_row(1), step_row(2, schedule={"top_k": [9, "all"]})
    assert dict(setup_rows(RunLog.load(write_run(tmp_path, [start, now])))) == {
        "schedule": "top 9 to all by length + 3 pages of 10 tokens, dense in layer 0; "
        "at the start top 2 to 6 by length + 3 pages of 10 tokens, dense in layer 0"
    }


def test_configuration_not_written_by_sparrow_train_raises_an_error(tmp_path):
    path = write_run(tmp_path, [step_row(1)])
    (path / "config.json").write_text('{"train": {}}')
    with pytest.raises(ConfigError, match="has no 'schedule', so sparrow train did not write it"):
        RunLog.load(path)


# Numbers


def test_summary_rows_match_a_hand_calculation(tmp_path):
    # There are 100 + ... + 800 = 3600 tokens. A tenth of the first 100 was masked, which leaves
    # 3590 / 3600 = 99.72 %.
    bins = bins_only(
        bin_row(0, 0.9, 0.88, 0.93),
        bin_row(1, 0.8, 0.75, 0.85, 0.84, 0.855),
        bin_row(2, 0.5, upper=0.9),
    )
    rows = [step_row(step, mismatch=bins) for step in range(1, 9)]
    assert summary_rows(write_run(tmp_path, rows)) == [
        ("steps", "8 of 8"),
        ("reward", "0.150 → 0.750 (mean of the first and last 2 steps)"),
        ("response tokens", "3,600"),
        ("tokens in the loss", "99.72 %, others masked by the correction"),
        ("KV read", "30 %"),
        ("p5 at 0-100 tokens", "0.900 [0.880, 0.930], holds tau 0.86"),
        ("p5 at 100-200 tokens", "between 0.800 and 0.840 [0.750, 0.855], below tau 0.86"),
        ("p5 at 200-300 tokens", "between 0.500 and 0.900, undecided against tau 0.86"),
    ]


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (3, 1), (8, 2), (20, 5), (1000, 10)])
def test_first_and_last_values_average_a_quarter_of_the_steps_up_to_ten(steps, count):
    values = np.arange(steps, dtype=float)
    expected = ((count - 1) / 2, steps - 1 - (count - 1) / 2, count)
    assert log_of(step_row(1)).first_and_last(values) == expected


@pytest.mark.parametrize(
    ("p5", "low", "upper", "upper_high", "expected"),
    [
        (0.90, 0.86, 0.99, 0.99, "holds"),
        (0.90, 0.859, 0.99, 0.99, "undecided"),
        (0.80, 0.70, 0.80, 0.859, "below"),
        (0.80, 0.70, 0.80, 0.86, "undecided"),
        (0.80, 0.70, 0.87, 0.88, "undecided"),
        # a bootstrap interval need not contain the estimate
        (0.85, 0.87, 0.85, 0.90, "undecided"),
        (0.80, 0.70, 0.87, 0.85, "undecided"),
        (0.90, nan, 0.95, nan, "undecided"),
        (0.80, nan, 0.80, nan, "undecided"),
        (nan, nan, nan, nan, "undecided"),
    ],
)
def test_verdict_depends_on_both_bounds_and_their_intervals(p5, low, upper, upper_high, expected):
    b = BinMismatch(0, 0, 100, 50, 4, p5, p5, low, 0.85, upper, upper_bound_high=upper_high)
    assert b.verdict(0.86) == expected


def test_runs_logged_without_the_upper_bounds_interval_are_below_only_if_the_bounds_agree():
    rows = [bin_row(0, 0.8, 0.75, 0.85), bin_row(1, 0.9, 0.88, 0.93), bin_row(2, 0.8, 0.75, 0.85)]
    for row in rows:
        del row["upper_bound_high"]
    rows[2]["upper_bound"] = 0.82
    old = log_of(step_row(1, mismatch=bins_only(*rows))).bins()
    assert [b.verdict(0.86) for b in old] == ["below", "holds", "undecided"]
    assert [b.interval_end for b in old] == [0.85, 0.93, 0.85]


def test_schedule_cannot_be_reported_together_with_a_run_or_steps(tmp_path, capsys):
    (tmp_path / "schedule.json").write_text(SCHEDULE.to_json())
    for more in (["x"], ["--steps", "3"]):
        with pytest.raises(SystemExit):
            main(["report", str(tmp_path / "schedule.json"), *more])
        assert "so it cannot be compared and has no steps; pass it alone" in " ".join(
            capsys.readouterr().err.split()
        )


def test_measurement_can_be_plotted_from_its_file(tmp_path, monkeypatch, capsys):
    """Measured values are plotted, and an unknown value (nan) leaves a gap."""
    acceptance = np.linspace(0.5, 1, 80)
    measured = mismatch_report(
        acceptance, acceptance, np.arange(80), np.repeat([0, 1, 2, 2], 20), bin_tokens=40
    )
    path = tmp_path / "tail.json"
    path.write_text(json.dumps(measured.to_dict()))
    lines = []
    plot = Axes.plot

    def spy(axes, x, y, *args, **style):
        lines.append((style["label"], list(y)))
        return plot(axes, x, y, *args, **style)

    monkeypatch.setattr(Axes, "plot", spy)
    main(["report", str(path)])
    assert "tail.png" in capsys.readouterr().out
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    first, second = measured.bins
    assert isnan(second.interval_low)  # from one sequence
    assert lines == [
        ("mean", [first.mean, second.mean]),
        ("p5, 95 % interval", [first.lower_bound, second.lower_bound]),
    ]


def measurement(**more) -> dict:
    """Return a report on two bins, as ``sparrow measure`` would write it."""
    acceptance = np.linspace(0.5, 1, 80)
    position, sequence = np.arange(80), np.arange(80) % 4
    return (
        mismatch_report(acceptance, acceptance, position, sequence, bin_tokens=40).to_dict() | more
    )


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Return a function that draws a measurement and returns the figure."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **how: saved.append(figure))

    def drawn_figure(report: dict) -> Figure:
        draw_measurement(report, tmp_path / "tail.png")
        return saved.pop()

    return drawn_figure


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("lossy", "top 8 + 3 pages of 16 tokens, dense in layers 0, 1"),
        ("lossless", "lossless with drafts by top 8 + 3 pages of 16 tokens, dense in layers 0, 1"),
    ],
)
def test_title_of_a_measurement_names_the_model_and_how_it_decoded(mode, how, draw):
    schedule = SparsitySchedule.fixed(8).to_dict()
    made_by = {
        "model": "m",
        "mode": mode,
        "schedule": schedule,
        "temperature": 0.7,
        "tau": 0.86,
        "relative_tau": None,
    }
    measured = measurement(provenance=made_by)
    assert draw(measured).get_suptitle() == f"m, {how}, temperature 0.7"
    del measured["provenance"]  # as in older files
    assert draw(measured).get_suptitle() == ""


def levels(figure: Figure) -> dict[str, list[float]]:
    """Return the heights of the horizontal lines in the left panel, by label."""
    lines = [x for x in figure.axes[0].collections if isinstance(x, LineCollection)]
    return {
        x.get_label(): [segment[0][1] for segment in x.get_segments()]
        for x in lines
        if not x.get_label().startswith("_")
    }


def test_plot_of_a_measurement_shows_tau_and_the_ceiling(draw):
    measured = measurement(dense_up_to=0)
    for b, ceiling in zip(measured["bins"], (0.95, 0.9), strict=True):
        b["ceiling"] = ceiling
    figure = draw(measured)
    assert levels(figure) == {"ceiling": [0.95, 0.9], "tau 0.86": [0.86, 0.86]}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "ceiling",
        "tau 0.86",
        "mean",
        "p5, 95 % interval",
    ]
    assert figure.legends[0].get_title().get_text() == (
        "the smallest bin has 4 responses; intervals from fewer than 20 are too narrow"
    )
    assert [ax.get_title() for ax in figure.axes] == [
        "by length",
        "all lengths, 80 tokens, 4 responses",
    ]
    schedule = SparsitySchedule.fixed(8).to_dict()
    made_by = {"model": "m", "mode": "lossy", "schedule": schedule, "temperature": 1.0}
    for target, label, heights in (
        ({"tau": 0.9, "relative_tau": None}, "tau 0.9", [0.9, 0.9]),
        (
            {"tau": None, "relative_tau": 0.9},
            "relative tau 0.9",
            [Tau(0.9, relative=True).level(c) for c in (0.95, 0.9)],
        ),
    ):
        assert levels(draw(measured | {"provenance": made_by | target}))[label] == heights
    assert list(levels(draw(measured | {"dense_up_to": None}))) == ["ceiling"]


def test_bins_and_schedules_have_readable_names():
    assert [bin_name(0, 2000), bin_name(32, 64), bin_name(500, 1000)] == [
        "0-2K",
        "32-64",
        "500-1000",
    ]
    assert describe_schedule(SparsitySchedule.dense()) == "dense"
    assert describe_schedule(SparsitySchedule.preset("qwen3-4b")) == (
        "qwen3-4b-0.86: top 29 to 509 by length + 3 pages of 16 tokens, dense in layers 0, 1"
    )
    uneven = SparsitySchedule((4,), dense_layers=(), head_budgets=((0.5, 1.5),))
    assert (
        describe_schedule(uneven)
        == "top 4 + 3 pages of 16 tokens, divided unevenly among layers and kv heads"
    )


# The page


@pytest.mark.slow
def test_page_shows_every_figure(parsed):
    assert list(parsed.figures) == FIGURES
    assert parsed.figures["p5 of acceptance by length"].startswith(
        "5th percentile of the acceptance rate"
    )


def test_page_is_self_contained_and_has_no_scripts(parsed, report):
    assert report.name == "index.html" and list(report.parent.iterdir()) == [report]
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in parsed.tags}
    urls = [
        v
        for _, found in parsed.tags
        for k, v in found.items()
        if k in ("src", "href", "xlink:href", "data")
    ]
    assert urls and all(url.startswith("data:image/svg+xml;base64,") for url in urls)
    assert not any(k.startswith("on") for _, found in parsed.tags for k in found)
    html = report.read_text(encoding="utf-8")
    assert html.count("<style") == 1
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    ids = [found["id"] for _, found in parsed.tags if "id" in found]
    assert len(ids) == len(set(ids))


def test_tables_contain_the_recorded_numbers(parsed, run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    table = dict(parsed.tables["run"])
    assert table["model"] == BAD and table["dataset"] == "gsm8k, math" and "engine" not in table
    assert table["steps"] == "8 of 20"
    rewards = [row["reward"]["mean"] for row in rows]
    assert table["reward"].startswith(f"{np.mean(rewards[:2]):.3f} → {np.mean(rewards[-2:]):.3f} ")
    assert (
        table["response tokens"]
        == f"{sum(row['response']['tokens'] for row in rows):,.0f}"
        == "3,600"
    )
    assert table["KV read"] == "30 %"
    heads, *cells_by_bin = parsed.tables["bins"]
    assert heads == [
        "length",
        "p5",
        "against tau 0.86",
        "95 % interval",
        "ceiling",
        "relative p5",
        "tokens",
        "responses",
    ]
    for cells, b in zip(cells_by_bin, rows[-1]["mismatch"]["bins"], strict=True):
        known = b["interval_low"] is not None
        p5 = between(b["lower_bound"], b["upper_bound"])
        assert cells[:2] == [f"{b['start']}-{b['end']}", p5] and p5.startswith("between 0.")
        assert cells[2] in ("holds", "below", "undecided")
        assert cells[3] == (
            f"[{b['interval_low']:.3f}, {b['upper_bound_high']:.3f}]" if known else "one response"
        )
        assert cells[4:6] == ["n/a", "n/a"]
        assert cells[6:] == [f"{b['n_tokens']:,}", str(b["n_sequences"])]


def test_every_token_is_coloured_and_labelled_by_its_acceptance(parsed):
    assert len(parsed.responses) == 16, "there are eight steps with two responses each"
    for spans in parsed.responses:
        assert [text for _, text in spans] == TOKENS
        assert [found["class"] for found, _ in spans] == LEVEL
        assert [found["title"] for found, _ in spans[:3]] == ["1.0000", "0.9990", "0.9989"]
        assert spans[-1][0]["title"] == "not measured"
    for part in (
        "Step 1: 2 responses",
        "Step 8: 2 responses",
        f"{BAD}-8-1",
        "reward 1.25",
        f"a < b\n{BAD}",
        "< 0.3",
    ):
        assert part in parsed.text
    assert "lowest 0.000" in parsed.text and "10 tokens" in parsed.text


@pytest.mark.slow
def test_expected_answer_is_shown_beside_a_response(tmp_path):
    known, unknown = rollout_row(1, ["a"], [0.5], answer="<7>"), rollout_row(1, ["b"], [0.5])
    parsed = Page(
        write_report(write_run(tmp_path, [step_row(1)], [known, unknown])).read_text(
            encoding="utf-8"
        )
    )
    assert parsed.text.count("Expected answer:") == 1 and "Expected answer: <7>" in parsed.text


def test_long_run_shows_the_responses_of_selected_steps(tmp_path):
    rows = [step_row(step) for step in range(1, 101)]
    path = write_run(
        tmp_path / "run", rows, [rollout_row(step, [f"{step}"], [0.5]) for step in range(1, 101)]
    )
    log = RunLog.load(path)
    some = responses.steps_to_show([log], ())
    assert (
        len(some) == responses.MOST_STEPS
        and (some[0], some[-1]) == (1, 100)
        and set(np.diff(some)) == {2, 3}
    )
    assert responses.steps_to_show([log], (57, 3)) == [3, 57]
    with pytest.raises(
        ConfigError, match="step 101 is not in the log, which contains steps 1 to 100"
    ):
        responses.steps_to_show([log], (3, 101))
    assert [r.spans[0][2] for some in responses.show([log], [57], [""]).values() for r in some] == [
        "57"
    ]


@pytest.mark.slow
@settings(deadline=None)  # rendering full pages is slow
@given(st.lists(st.tuples(st.text(), st.floats(0, 1)), min_size=1, max_size=20))
def test_any_text_is_shown_unchanged(
    parsed, tokens
):  # a page has already been rendered, so the template is compiled
    texts, rates = zip(*tokens, strict=True)
    shown = responses._shown(
        "", LoggedResponse(1, texts[0], texts[-1], texts, rates, 0.5, "stop"), 1000
    )
    (spans,) = Page(page.html_page([log_of(STEP)], {}, {1: [shown]})).responses
    assert [text for _, text in spans] == list(texts)
    for (found, _), rate in zip(spans, rates, strict=True):
        level = int(found["class"][1])
        assert LEVELS[level] <= rate < (LEVELS[level - 1] if level else inf)


def test_middle_of_a_long_response_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "MOST_TOKENS", 20)
    rows = [
        rollout_row(1, [f" {i}" for i in range(30)], [0.5] * 30),
        rollout_row(1, ["a"] * 10, [0.5] * 10),
    ]
    log = RunLog.load(write_run(tmp_path, [step_row(1)], rows))
    long, short = responses.show([log], [1], [""])[1]
    assert [text for *_, text in long.spans] == [
        *(f" {i}" for i in range(5)),
        "20 tokens are not shown",
        *(f" {i}" for i in range(25, 30)),
    ]
    assert len(short.spans) == 10


def luminance(color: str) -> float:
    """Compute the relative luminance as defined in WCAG 2."""
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_levels_of_the_colour_scale_differ_in_lightness():
    for one, other in pairwise(map(luminance, theme.LEVEL_COLORS)):
        assert other < one, "each lower level must have more contrast with the page"
    for ink, background in zip(theme.LEVEL_INKS, theme.LEVEL_COLORS, strict=True):
        assert contrast(ink, background) >= 4.5
    for color in (theme.INK, theme.MUTED, theme.ABOVE, theme.BELOW):
        assert contrast(color, "#ffffff") >= 4.5
    bins = theme.bin_colors(8)
    assert all(luminance(other) < luminance(one) for one, other in pairwise(bins)), (
        "longer is darker"
    )
    assert all(contrast(color, "#ffffff") >= 3 for color in [*bins, *theme.SERIES])


# Figures


def drawn(draw, *logs, **options):
    ax = Figure().subplots()
    draw(ax, logs=logs, **options)
    return ax


def test_tail_figures_plot_the_recorded_intervals():
    bins = bins_only(
        bin_row(0, 0.9, 0.88, 0.93, 0.95),
        bin_row(1, 0.8, 0.81, 0.85),
        bin_row(2, 0.5, n_sequences=1),
    )
    log = log_of(step_row(1, mismatch=bins), step_row(2, mismatch=bins))
    by_step, last = drawn(figures.draw_tail, log, log=log), drawn(figures.draw_last_tail, log)
    assert [line.get_ydata().tolist() for line in by_step.lines[:3]] == [
        [0.9] * 2,
        [0.8] * 2,
        [0.5] * 2,
    ]
    assert by_step.lines[3].get_ydata() == [0.86, 0.86]
    drawn_bars = [
        c.get_segments()[0].tolist() for c in last.collections if c.get_linewidth() == [4]
    ]
    assert drawn_bars[:2] == [[[0, 0.88], [0, 0.93]], [[1, 0.81], [1, 0.85]]]
    points = [line for line in last.lines if line.get_marker() == "o"]
    dots = [(point.get_xdata()[0], point.get_ydata()[0]) for point in points]
    assert dots == [(0, 0.9), (1, 0.8), (2, 0.5)]


def test_bin_has_the_same_colour_in_every_figure():
    row = step_row(1, mismatch=bins_only(*(bin_row(n, 0.9 - n / 50) for n in range(1, 6))))
    log = log_of(row, {**row, "step": 2}, schedules=(SCHEDULE, SCHEDULE.replace(top_k=(3,))))
    colors = {
        f"{100 * n}-{100 * n + 100}": color for n, color in enumerate(theme.bin_colors(6)) if n
    }
    for draw in (figures.draw_tail, figures.draw_pages):
        lines = drawn(draw, log, log=log).lines[:5]
        assert {line.get_label(): line.get_color() for line in lines} == colors and len(
            set(colors.values())
        ) == 5


@pytest.mark.slow
def test_ceiling_is_shown_beside_p5_if_logged(tmp_path):
    measured = {"ceiling": 0.97, "ceiling_low": 0.96, "ceiling_high": 0.98}
    bins = bins_only({**bin_row(0, 0.9, 0.88, 0.93), **measured}, bin_row(1, 0.8))
    log = log_of(step_row(1, mismatch=bins))
    ax = drawn(figures.draw_last_tail, log)
    lines = [c for c in ax.collections if isinstance(c, LineCollection)]
    assert [[-0.2, 0.97], [0.2, 0.97]] in [
        path.tolist() for c in lines for path in c.get_segments()
    ]
    parsed = Page(
        write_report(write_run(tmp_path / "with", [step_row(1, mismatch=bins)])).read_text(
            encoding="utf-8"
        )
    )
    assert [
        row[parsed.tables["bins"][0].index("ceiling")] for row in parsed.tables["bins"][1:]
    ] == ["0.970", "n/a"]
    assert "p5 of dense rollouts" in parsed.figures["p5 by length at the last step"]


def test_figures_of_long_runs_show_a_rolling_mean_of_every_bin():
    bins = [bin_row(n, 0.9 - n / 50) for n in range(20)]
    log = log_of(
        *(step_row(step, mismatch=bins_only(*bins[: 20 - step % 2])) for step in range(1, 71))
    )
    assert len(log.metrics) > UNSMOOTHED_STEPS
    lines = drawn(figures.draw_tail, log, log=log).lines
    raw, smooth = lines[:40:2], lines[1:40:2]
    np.testing.assert_array_equal([line.get_ydata() for line in raw], log.tail_by_step().T)
    np.testing.assert_allclose(
        [line.get_ydata() for line in smooth], np.repeat([[0.9 - n / 50] for n in range(20)], 70, 1)
    )
    assert len({line.get_color() for line in raw}) == 20


def test_curves_plot_the_recorded_numbers():
    log = log_of(*(step_row(step) for step in range(1, 5)))
    expected = {
        "Entropy": [1, 1 / 2, 1 / 3, 1 / 4],
        "Gradient norm": [0.3] * 4,
        "Loss": [-0.1] * 4,
        "Rollout throughput": [100 / 3, 200 / 3, 100, 400 / 3],
        "Share of the KV cache read": [50] * 4,
        "Prompts whose rewards are all equal": [25] * 4,
        "Responses that ended by themselves": [100] * 4,
    }
    panels = {panel.title: panel for some in PANELS.values() for panel in some}
    for name, values in expected.items():
        (line,) = drawn(panels[name].draw, log).lines
        assert line.get_ydata() == pytest.approx(values), name
        assert line.get_xdata().tolist() == [1, 2, 3, 4]
    assert not panels["Tokens per cycle"].recorded([log])


@pytest.mark.slow
def test_two_runs_are_shown_on_one_page(run, tmp_path):
    other = write_run(
        tmp_path / "other",
        [step_row(step, entropy=0.7) for step in (1, 2, 3)],
        [rollout_row(3, ["x"], [0.5], problem=f"{BAD}-3-1")],
        steps=3,
    )
    logs = [RunLog.load(run), RunLog.load(other)]
    panels = {panel.title: panel for some in PANELS.values() for panel in some}
    one, two = drawn(panels["Entropy"].draw, *logs).lines
    assert one.get_ydata()[0] == 1 and two.get_ydata().tolist() == [0.7] * 3
    assert (one.get_linestyle(), two.get_linestyle()) == ("-", "--")
    mean_a, longest_a, mean_b, longest_b = drawn(panels["Response length"].draw, *logs).lines
    assert (
        mean_a.get_color() == mean_b.get_color() != longest_a.get_color() == longest_b.get_color()
    )
    left, right = (drawn(figures.draw_tail, *logs, log=log) for log in logs)
    assert left.get_ylim() == right.get_ylim()
    path = write_report(run, other)
    assert path == run / "report" / "against-other.html"
    parsed = Page(path.read_text(encoding="utf-8"))
    tails = {f"p5 of acceptance by length, run {name}" for name in "AB"}
    assert tails <= set(parsed.figures) and {"bins", "bins-1"} <= set(parsed.tables)
    assert parsed.tables["run"][0] == ["", "A: a<b", "B: other"]
    assert "at step 8, run A" in parsed.text and "at step 3, run B" in parsed.text
    assert ["steps", "8 of 20", "3 of 3"] in parsed.tables["run"]
    articles = parsed.text[parsed.text.index("Step 3: 3 responses") : parsed.text.index("Step 4:")]
    order = [
        articles.index(f"A {BAD}-3-0"),
        articles.index(f"A {BAD}-3-1"),
        articles.index(f"B {BAD}-3-1"),
    ]
    assert order == sorted(order), "responses to the same problem must be adjacent"


def test_legend_includes_a_series_that_only_one_run_has():
    def rewards(*sources):
        return log_of(
            step_row(1, reward={"mean": 0.5, "std": 0.1, "sources": dict.fromkeys(sources, 0.5)})
        )

    panel, one, two = PANELS["Reward and responses"][0], rewards(), rewards("gsm8k", "taco")
    assert drawn(panel.draw, one).get_legend() is None
    for logs in ([one, two], [two, one]):
        ax = drawn(panel.draw, *logs)
        named = {text.get_text().partition(",")[0] for text in ax.get_legend().get_texts()}
        assert (
            named == {"all responses", "gsm8k", "taco"}
            and len({line.get_color() for line in ax.lines}) == 3
        )


@pytest.mark.parametrize("steps", [3, 40, UNSMOOTHED_STEPS + 40])
def test_two_runs_have_different_markers_and_dashes(steps):
    log = log_of(*(step_row(i) for i in range(1, steps + 1)))
    for panel in PANELS["Reward and responses"]:
        ax = drawn(panel.draw, log, log)
        shown = [line for line in ax.lines if not line.get_label().startswith("_")]
        first = [line for line in shown if line.get_label().endswith("run A")]
        second = [line for line in shown if line.get_label().endswith("run B")]
        assert len(first) == len(second) > 0
        for one, other in zip(first, second, strict=True):
            assert one.get_color() == other.get_color()
            assert {one.get_marker(), other.get_marker()} == {"o", "D"}
            assert one.get_linestyle() == "-" and other.get_linestyle() != "-"
            assert other.get_markerfacecolor() == "none" != one.get_markerfacecolor()
            assert steps / other.get_markevery() <= 12
        assert ax.get_legend().handlelength >= 3  # long enough that dashes are visible


def test_labels_are_unambiguous():
    """A label must not be just "all" or "level". It must name the thing counted or compared, as in
    "all responses".
    """
    labels = {
        label
        for panels in PANELS.values()
        for panel in panels
        for _, label in panel.recorded([log_of(step_row(1), step_row(2))])
    }
    assert not labels & {"all", "level"} and "all responses" in labels
    explained = {panel.title: panel.meaning for panel in PANELS["Reward and responses"]}
    assert "teach nothing" in explained["Prompts whose rewards are all equal"]
    assert "mean over the responses" in explained["Reward"]


def test_wide_tables_have_a_scroll_hint_on_phones(parsed, report):
    text = report.read_text(encoding="utf-8")
    style, _, body = text.partition("</style>")
    tables = body.count('class="numbers"')
    assert tables and body.count('<p class="hint">') == tables
    assert ".hint { display: none;" in style
    assert "@media (max-width: 48rem) { .hint { display: block; } }" in style


def test_page_supports_dark_mode(report):
    style = report.read_text(encoding="utf-8").partition("</style>")[0]
    dark = style.partition("@media (prefers-color-scheme: dark)")[2]
    assert '<meta name="color-scheme" content="light dark">' in style
    assert "background: var(--page)" in style and "color: var(--ink)" in style
    for name, color in theme.DARK.items():
        assert f"--{name}: {color};" in dark and f"--{name}: " in style.partition("@media")[0]
    assert "figure img { filter: invert(1)" in dark
    for name in ("ink", "muted", "above", "below"):
        assert contrast(theme.DARK[name], theme.DARK["page"]) >= 4.5


def test_runs_with_different_length_bins_are_not_compared(run, tmp_path):
    wide = write_run(tmp_path, [step_row(1, mismatch=mismatch(1) | {"bin_tokens": 200})])
    with pytest.raises(
        ConfigError,
        match=r"length bins differ .*100 tokens in .* and 200 tokens in.*make one report per run",
    ):
        write_report(run, wide)


@pytest.mark.parametrize("count", [0, 3])
def test_a_report_on_any_other_number_of_runs_is_refused(run, count):
    with pytest.raises(ConfigError, match=f"a report shows one or two runs, got {count}"):
        write_report(*[run] * count)


def test_rolling_mean_matches_a_hand_calculation():
    values = np.array([1, 2, nan, 4, 9])
    np.testing.assert_allclose(curves._rolling_mean(values, 3), [1.5, 1.5, 3, 6.5, 6.5])
    assert np.isnan(curves._rolling_mean(np.full(4, nan), 3)).all()


def test_schedule_figure_matches_a_hand_calculation():
    log = log_of(step_row(1), step_row(2), schedules=(SCHEDULE.replace(top_k=(2,)), SCHEDULE))
    start, now = (
        dict(zip(*line.get_data(), strict=True)) for line in drawn(figures.draw_schedule, log).lines
    )
    assert (now[200], start[200]) == (45, 25)  # top_k + sink 1 + recent 2 of 20 pages
    assert now[30] == 100


def test_schedule_figure_labels_both_runs_if_they_start_under_the_same_schedule():
    narrow, wide = (SCHEDULE.replace(top_k=(pages,)) for pages in (2, 6))
    rows = step_row(1), step_row(2)
    moved = log_of(*rows, schedules=(narrow, wide))
    fixed = log_of(*rows, schedules=(narrow, narrow))
    lines = drawn(figures.draw_schedule, moved, fixed).lines
    assert [line.get_label() for line in lines] == [
        "at the start, run A",
        "at the last step, run A",
        "at the last step, run B",
    ]
    start, _, other = lines
    assert start.get_ydata().tolist() == other.get_ydata().tolist()
    assert (start.get_linestyle(), other.get_linestyle()) == ("-", "--")
    assert start.get_color() != other.get_color()


def test_changed_schedule_is_plotted_by_step_and_alarms_are_counted():
    tables = ((2, 6, ALL_PAGES), (4, 6, ALL_PAGES), (4, 6, ALL_PAGES))
    rows = [step_row(i + 1, guard={"steps_below": i, "alarm": i > 1}) for i in range(3)]
    log = log_of(*rows, schedules=tuple(SCHEDULE.replace(top_k=table) for table in tables))
    names = [figure.title for figure in figures.figures([log])["Schedule"]]
    assert names == ["What a sparse layer reads", "Schedule by step"]
    read = [line.get_ydata() for line in drawn(figures.draw_pages, log, log=log).lines]
    # With 90 tokens, 2 + 3 and then 4 + 3 pages of 10 tokens are read. With 190 tokens, 6 + 3 pages
    # are read.
    assert read[0] == pytest.approx([500 / 9, 700 / 9, 700 / 9])
    assert read[1] == pytest.approx([9000 / 190] * 3)
    # If length bins are wider than the schedule's bins, the start and end of a length bin may lie
    # in different bins of the schedule.
    wide = [b | {"bin": 0, "start": 0, "end": 200} for b in mismatch(0)["bins"][:1]]
    rows = [row | {"mismatch": mismatch(0) | {"bins": wide, "bin_tokens": 200}} for row in rows]
    wider = log_of(*rows, schedules=log.schedules)
    (only,) = drawn(figures.draw_pages, wider, log=wider).lines
    assert only.get_ydata() == pytest.approx(read[1])
    assert ("guard", "acceptance too low, at 1 of 3 steps, first at step 3") in result_rows(log)
    still = log_of(step_row(1), step_row(2))
    assert [figure.title for figure in figures.figures([still])["Schedule"]] == names[:1]


def test_lossless_run_reports_its_drafts():
    def drafts(drafted, accepted, cycles, mean):
        bins = [{"start": 0, "end": 2000, "drafts": 9, "mean": mean, "p5": 0.5}]
        metered = {
            "acceptance": mean / 2,
            "p5": 0.1,
            "bins": [bins[0] | {"mean": mean / 2, "p5": 0.1}],
        }
        return {
            "drafted": drafted,
            "accepted": accepted,
            "cycles": cycles,
            "bins": bins,
            "metered": metered,
        }

    log = log_of(
        step_row(1),
        step_row(2, drafts=drafts(80, 30, 10, 0.7)),
        step_row(3, drafts=drafts(80, 50, 10, 0.9)),
    )
    rows = dict(result_rows(log))
    assert rows["drafts per token"] == "1.60" and rows["tokens per cycle"] == "5.00"
    assert rows["drafts accepted at 0-2K tokens"] == "0.900, p5 0.500"
    assert rows["metered at 0-2K tokens"] == "0.450, p5 0.100"
    assert not any("draft" in name for name in dict(result_rows(log_of(step_row(1)))))
    log.train["rollout"] = {"mode": "lossless"}
    assert dict(setup_rows(log)) == {"mode": "lossless", "drafts read": describe_schedule(SCHEDULE)}


# What is known about acceptance


def bounded(step: int, **changes) -> dict:
    """Return a step whose top-n lists are too short to determine p5. Even dense samples could have
    a lower bound as low as this.
    """
    bins = bins_only(bin_row(0, 0.6, 0.55, 0.65, 0.99), bin_row(1, 0.7, 0.6, 0.75, 0.999))
    return step_row(step, mismatch=bins, **changes)


RESPONSE = rollout_row(1, ["a", "b", "c"], [0.9, 0.4, None], acceptance_upper=[1.0, 0.7, None])
MODES = {
    "dense": {"schedule": {"top_k": ["all"]}, "dense_up_to": None},
    "lossless": {
        "dense_up_to": None,
        "drafts": {
            **{"drafted": 9, "accepted": 8, "cycles": 1, "tokens_per_cycle": 9.0},
            **{"acceptance": 0.9, "p5": 0.8},
        },
    },
    "lossy": {"dense_up_to": 0},
}


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """Return a function that writes a run in a given mode. The function returns the run's page,
    without figures, and its log.
    """
    monkeypatch.setattr(page, "figures", lambda logs: {})

    def made(mode: str, **changes) -> tuple[Page, RunLog]:
        train = {"rollout": {"mode": mode}, "model": "m", "schedule": "fixed:2"}
        row = bounded(1, **{**MODES[mode], **changes})
        run = write_run(tmp_path / mode, [row], [RESPONSE], **train)
        return Page(write_report(run).read_text(encoding="utf-8")), RunLog.load(run)

    return made


def titles(log: RunLog) -> set[str]:
    return {figure.title for some in figures.figures([log]).values() for figure in some}


def test_samples_of_the_dense_policy_are_neither_coloured_nor_compared_with_tau(page_of, tmp_path):
    shown = {
        "dense": {"Share of the KV cache read"},
        "lossless": {"Tokens per cycle", "Acceptance of drafts"},
    }
    for mode, expected in shown.items():
        found, log = page_of(mode)
        assert [attributes["class"] for attributes, _ in found.responses[0]] == ["none"] * 3
        assert "bins" not in found.tables and "tau" not in found.text
        assert not any("p5" in name or "Distribution" in name for name in titles(log))
        assert expected <= titles(log)
        assert "none is coloured" in found.text and "mean acceptance" not in found.text
        setup = dict(found.tables["run"])
        assert setup["mode"] == {"dense": DENSE[1], "lossless": "lossless"}[mode]
        assert not any("p5 at" in name for name, _ in summary_rows(tmp_path / mode))


def test_dense_run_from_an_older_version_is_recognised_by_its_schedule(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "figures", lambda logs: {})
    older = rollout_row(1, ["a", "b"], [0.9, 0.4])
    run = write_run(tmp_path / "r", [bounded(1, schedule={"top_k": ["all"]})], [older])
    found = Page(write_report(run).read_text(encoding="utf-8"))
    assert [attributes["class"] for attributes, _ in found.responses[0]] == ["none"] * 2
    assert ["mode", DENSE[1]] in found.tables["run"] and "bins" not in found.tables


def test_sparse_actor_acceptance_is_shown_with_its_bounds(page_of):
    found, log = page_of("lossy")
    assert [row[:3] for row in found.tables["bins"][1:]] == [
        ["0-100", "between 0.600 and 0.990", "undecided"],
        ["100-200", "between 0.700 and 0.999", "undecided"],
    ]
    assert [(a["class"], a["title"]) for a, _ in found.responses[0]] == [
        ("a0", "between 0.9000 and 1.0000"),
        ("a5", "between 0.4000 and 0.7000"),
        ("none", "not measured"),
    ]
    assert "mean acceptance between 0.650 and 0.850" in found.text
    assert "lowest between 0.400 and 0.700" in found.text
    shaded = drawn(figures.draw_tail, log, log=log).collections
    ends = [area.get_datalim(area.axes.transData).intervaly.tolist() for area in shaded]
    assert ends == [[0.6, 0.99], [0.7, 0.999]]


def test_no_mismatch_is_shown_for_lengths_that_are_read_in_full_or_verified(page_of, tmp_path):
    found, log = page_of("lossy", dense_up_to=100)
    assert [row[0] for row in found.tables["bins"][1:]] == ["100-200"]
    assert dict(summary_rows(tmp_path / "lossy"))["p5 at 0-100 tokens"] == OWN_SAMPLES
    np.testing.assert_array_equal(log.tail_by_step(), [[nan, 0.7]])
    np.testing.assert_array_equal(log.upper_tail_by_step(), [[nan, 0.999]])
    (dots, *_) = drawn(figures.draw_last_tail, log).lines
    assert dots.get_xydata().tolist() == [[1, 0.7]]
    all_short, log = page_of("lossy", dense_up_to=200)
    assert "bins" not in all_short.tables
    assert not any("p5" in name for name in titles(log))


def test_dense_lengths_of_older_runs_are_inferred_from_their_settings():
    def up_to(schedule, train=(), **changes):
        log = log_of(step_row(1, **changes), schedules=(schedule,))
        log.train.update(train)
        return log.dense_up_to()

    wide = SCHEDULE.replace(top_k=(7, 7))
    assert up_to(SCHEDULE) == 0 and up_to(wide) == 100 and up_to(SparsitySchedule.dense()) == inf
    assert up_to(SCHEDULE, {"rollout": {"mode": "lossless"}}) == inf
    assert up_to(wide, {"distill": {"enabled": True}}) == 0
    assert up_to(SCHEDULE, dial={"verified_up_to": None}) == inf
    assert up_to(SCHEDULE, dial={"verified_up_to": 200}) == 200


def test_auto_schedule_counts_as_sparse_even_while_it_reads_everything(tmp_path):
    row = bounded(1, **MODES["dense"])
    log = RunLog.load(write_run(tmp_path, [row], schedule="auto"))
    assert log.is_sparse and dict(setup_rows(log)) == {
        "schedule": "auto: dense until p5 allows fewer pages"
    }
    assert dict(summary_rows(tmp_path))["p5 at 0-100 tokens"] == OWN_SAMPLES


# Edge cases


@pytest.mark.slow
def test_run_of_one_step_is_reported_without_intervals(tmp_path):
    bins = bins_only(bin_row(0, 0.4, n_sequences=1), bin_row(1, None, n_sequences=1))
    row = step_row(7, reward={"mean": nan}, mismatch=bins | {"beta_tail": None})
    path = write_run(tmp_path / "run", [row], [rollout_row(7, [], [])])
    parsed = Page(write_report(path, out=tmp_path / "out").read_text(encoding="utf-8"))
    assert set(parsed.figures) == set(FIGURES) - {"Reward"}
    assert not (path / "report").exists()
    assert ["reward", "n/a (one step)"] in parsed.tables["run"]
    assert [(row[1], row[3]) for row in parsed.tables["bins"][1:]] == [
        ("0.400", "one response"),
        ("n/a", "one response"),
    ]
    assert parsed.responses == [[]] and "Step 7: 1 response" in parsed.text


def test_lone_surrogate_is_replaced_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "figures", lambda logs: {})
    path = write_run(tmp_path, [step_row(1)], [rollout_row(1, ["a\ud800b"], [0.5])])
    assert Page(write_report(path).read_text(encoding="utf-8")).responses[0][0][1] == "a?b"


def test_importing_the_report_package_loads_neither_torch_nor_matplotlib():
    code = "import sys, sparrow.report; print(sorted({'torch', 'matplotlib', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
