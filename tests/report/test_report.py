"""The report of a run: what is read back, the numbers of its tables, the figures, and the token view.

Shapes: S steps, N length bins.
"""

import base64
import json
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from math import inf, isnan, nan
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from sparrow.errors import ConfigError
from sparrow.mismatch import BetaTail, BinMismatch, mismatch_report
from sparrow.report import RunLog, figures, page, summary_rows, theme, write_report
from sparrow.report.summary import bin_name, describe_schedule, result_rows, setup_rows
from sparrow.report.theme import LEVEL_COLORS, LEVEL_INKS, LEVELS
from sparrow.run import LoggedResponse
from sparrow.schedule import ALL_PAGES, SparsitySchedule

pytestmark = pytest.mark.filterwarnings("error")

SCHEDULE = SparsitySchedule(top_k=(2, 6), bin_tokens=100, page_size=10, dense_layers=(0,))
FIGURES = ["reward", "cost", "tail", "acceptance", "correction", "schedule"]
BAD = "<script>alert(1)</script>"


def mismatch(seed: int, bins: int = 3, responses: int = 6) -> dict:
    """A report in the trainer's own format: most tokens near 1, a Beta tail, the last bin reached by one response."""
    rng = np.random.default_rng(seed)
    lengths = [100 * bins - 20] + [100 * (i % max(bins - 1, 1)) + 80 for i in range(responses - 1)]
    position = np.concatenate([np.arange(n) for n in lengths])
    in_tail = rng.random(position.size) < 0.3
    alpha = np.where(in_tail, rng.beta(6, 1, position.size), 1 - rng.exponential(1e-5, position.size))
    sequence = np.repeat(np.arange(responses), lengths)
    return mismatch_report(alpha, np.minimum(alpha + 0.01, 1), position, sequence, bin_tokens=100).to_dict()


def step_row(step: int, **changes) -> dict:
    row = {
        "step": step,
        "reward": {"mean": step / 10, "std": 0.1},
        "response": {"mean": 150.0, "max": 280.0, "tokens": 100.0 * step, "ended_fraction": 1.0},
        "correction": {
            "ess_token": 0.9, "ess_sequence": 0.8, "ess_sequence_ratio": 0.5, "clipped_fraction": 0.02,
            "masked_fraction": 0.1 if step == 1 else 0.0, "dropped_sequence_fraction": 0.0,
            "kl_k1": 0.01, "kl_k3": 0.02,
        },
        "kv": {"read_fraction": 0.5, "tokens_read": 300 * step, "tokens_held": 1000 * step, "preemptions": 0},
        "seconds": {"rollout": 3.0, "score": 0.5, "update": 1.5},
        "schedule": {"top_k": [2, 6]},
    }  # fmt: skip
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


def log_of(*rows, rollouts=(), schedules=None) -> RunLog:
    """A log in memory; ``rows`` are metrics."""
    train = {"tau": 0.86, "steps": 9}
    rollouts = tuple(LoggedResponse(**row) for row in rollouts)
    return RunLog(Path("run"), train, rows, rollouts, schedules or tuple(SCHEDULE for _ in rows))


def bin_row(n: int, p5, low=None, high=None, upper=None, n_sequences=4) -> dict:
    values = {"mean": p5, "lower_bound": p5, "interval_low": low, "interval_high": high, "upper_bound": upper or p5}
    return {"bin": n, "start": 100 * n, "end": 100 * (n + 1), "n_tokens": 50, "n_sequences": n_sequences, **values}


def bins_only(*bins) -> dict:
    return mismatch(0) | {"bins": list(bins)}


STEP = step_row(1)


class Page(HTMLParser):
    """Tables as rows of cell texts, figures by id, token spans by response, and every tag's attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.figures: dict[str, dict[str, str]] = {}
        self.responses: list[list[tuple[dict, str]]] = []
        self.stack: list[str] = []
        self.text = ""
        self.table = self.figure = ""
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
        elif tag == "figure":
            self.figure = found["id"]
            self.figures[self.figure] = {}
        elif tag == "img":
            self.figures[self.figure] = {"image": found["src"], "alt": found["alt"]}
        elif tag == "div" and found.get("class") == "tokens":
            self.responses.append([])
        elif tag == "span" and self.stack[-1:] == ["tokens"]:
            self.responses[-1].append((found, ""))
        if tag not in ("meta", "img"):
            self.stack.append("tokens" if found.get("class") == "tokens" else tag)

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
        rollout_row(step, TOKENS, ACCEPTANCE, problem=f"{BAD}-{step}-{i}", prompt=f"a < b\n{BAD}", reward=i + 0.25)
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


def test_series_bins_and_tail_are_read_as_written(run):
    log = RunLog.load(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert log.steps.tolist() == list(range(1, 9))
    assert log.series("correction", "kl_k3").tolist() == [0.02] * 8
    assert np.isnan(log.series("correction", "no_such")).all()
    assert [b.n_tokens for b in log.bins()] == [b["n_tokens"] for b in rows[-1]["mismatch"]["bins"]]
    tail_SN = log.tail_by_step()
    assert tail_SN.tolist() == [[b["lower_bound"] for b in row["mismatch"]["bins"]] for row in rows]
    assert isnan(log.bins()[2].interval_low), "one response reaches the last bin, whose interval is null"
    assert log.beta_tail() == BetaTail(**rows[-1]["mismatch"]["beta_tail"])


def test_a_bin_that_a_step_did_not_reach_is_nan():
    log = log_of(step_row(1, mismatch=bins_only(bin_row(0, 0.9))), step_row(2, mismatch=bins_only(bin_row(2, 0.7))))
    np.testing.assert_array_equal(log.tail_by_step(), [[0.9, nan, nan], [nan, nan, 0.7]])


def test_only_the_first_and_the_last_step_keep_their_rollouts(run):
    assert [row.step for row in RunLog.load(run).rollouts] == [1, 1, 8, 8]


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
def test_a_half_written_last_line_is_left_out(tmp_path, name):
    rows = [step_row(1), step_row(2)]
    path = write_run(tmp_path, rows, [rollout_row(step, ["a"], [0.5]) for step in (1, 2)])
    whole = (path / name).read_text()
    for kept in (whole[:-40], whole + '{"step": 3, "rew', whole + "{"):
        (path / name).write_text(kept)
        log = RunLog.load(path)
        found = log.steps.tolist() if name == "metrics.jsonl" else [row.step for row in log.rollouts]
        assert found == ([1] if kept == whole[:-40] else [1, 2])
    (path / name).write_text(whole[:-1])
    assert len(RunLog.load(path).metrics) == 2, "a last line that only lacks its end of line is whole"


def test_a_damaged_line_is_refused(tmp_path):
    path = write_run(tmp_path, [step_row(1)])
    text = (path / "metrics.jsonl").read_text()
    for damage, message in (("{oops\n", "line 1 of .*metrics.jsonl is not valid JSON"), ("[1]\n", "holds a list"),
                            ('{"loss": 1}\n', "line 1 of .* names no step"),
                            ('{"step": 1}\n', "step 1 of .*metrics.jsonl lacks 'correction'")):  # fmt: skip
        (path / "metrics.jsonl").write_text(damage + text)
        with pytest.raises(ConfigError, match=message):
            RunLog.load(path)


def test_an_empty_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no finished step"):
        write_report(write_run(tmp_path, []))
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="no finished step"):
        summary_rows(tmp_path)
    assert not (tmp_path / "report").exists()


def test_a_schedule_that_moved_is_described_with_its_start(tmp_path):
    start, now = step_row(1), step_row(2, schedule={"top_k": [9, "all"]})
    assert dict(setup_rows(RunLog.load(write_run(tmp_path, [start, now])))) == {
        "schedule": "top 9 to all by length + 3 pages of 10 tokens, dense in layer 0; "
        "at the start top 2 to 6 by length + 3 pages of 10 tokens, dense in layer 0"
    }


def test_a_configuration_of_something_else_is_refused(tmp_path):
    path = write_run(tmp_path, [step_row(1)])
    (path / "config.json").write_text('{"train": {}}')
    with pytest.raises(ConfigError, match="has no 'schedule', so sparrow train did not write it"):
        RunLog.load(path)


# Numbers


def test_summary_rows_by_hand(tmp_path):
    # Tokens: 100 + ... + 800 = 3600, of which a tenth of the first 100 was masked: 3590 / 3600 = 99.72 %.
    bins = bins_only(bin_row(0, 0.9, 0.88, 0.93), bin_row(1, 0.8, 0.75, 0.85, 0.855), bin_row(2, 0.5, upper=0.9))
    rows = [step_row(step, mismatch=bins) for step in range(1, 9)]
    assert summary_rows(write_run(tmp_path, rows)) == [
        ("steps", "8 of 8"),
        ("reward", "0.150 → 0.750 (mean of the first and last 2 steps)"),
        ("response tokens", "3,600"),
        ("tokens kept", "99.72 %"),
        ("KV read", "30 %"),
        ("p5 at 0-100 tokens", "0.900 [0.880, 0.930], holds tau 0.86"),
        ("p5 at 100-200 tokens", "0.800 [0.750, 0.850], below tau 0.86"),
        ("p5 at 200-300 tokens", "0.500, undecided against tau 0.86 (upper bound 0.900)"),
    ]


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (3, 1), (8, 2), (20, 5), (1000, 10)])
def test_first_and_last_average_a_quarter_up_to_ten(steps, count):
    values = np.arange(steps, dtype=float)
    expected = ((count - 1) / 2, steps - 1 - (count - 1) / 2, count)
    assert log_of(step_row(1)).first_and_last(values) == expected


@pytest.mark.parametrize(
    ("p5", "low", "high", "upper", "expected"),
    [
        (0.90, 0.86, 0.95, 0.99, "holds"),
        (0.90, 0.859, 0.95, 0.99, "undecided"),
        (0.80, 0.70, 0.859, 0.859, "below"),
        (0.80, 0.70, 0.86, 0.80, "undecided"),
        (0.80, 0.70, 0.85, 0.87, "undecided"),
        (0.85, 0.87, 0.90, 0.85, "undecided"),  # a bootstrap interval need not hold the estimate
        (0.90, nan, nan, 0.95, "undecided"),
        (0.80, nan, nan, nan, "undecided"),
        (nan, nan, nan, nan, "undecided"),
    ],
)
def test_verdict(p5, low, high, upper, expected):
    assert BinMismatch(0, 0, 100, 50, 4, p5, p5, low, high, upper).verdict(0.86) == expected


def test_names():
    assert [bin_name(0, 2000), bin_name(32, 64), bin_name(500, 1000)] == ["0-2K", "32-64", "500-1000"]
    assert describe_schedule(SparsitySchedule.dense()) == "dense"
    assert describe_schedule(SparsitySchedule.preset("qwen3-4b")) == (
        "qwen3-4b-0.86: top 29 to 509 by length + 3 pages of 16 tokens, dense in layers 0, 1"
    )


# The page


@pytest.mark.slow
def test_every_figure_is_shown(parsed, report):
    assert list(parsed.figures) == FIGURES
    for name, found in parsed.figures.items():
        kind, _, data = found["image"].partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True) == (report.parent / f"{name}.png").read_bytes()
        assert len(found["alt"]) > 40
        pixels = matplotlib.image.imread(report.parent / f"{name}.png")[..., :3]
        assert pixels.shape[0] > 300 and pixels.shape[1] > 900
        assert 0.01 < (pixels < 0.9).any(-1).mean() < 0.7, f"{name} is blank or full"


def test_the_page_needs_no_other_file_and_runs_no_script(parsed, report):
    assert report.name == "index.html"
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in parsed.tags}
    urls = [v for _, found in parsed.tags for k, v in found.items() if k in ("src", "href", "data", "style")]
    assert urls and all(url.startswith("data:") for url in urls)
    assert not any(k.startswith("on") for _, found in parsed.tags for k in found)
    html = report.read_text(encoding="utf-8")
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style


def test_tables_hold_the_recorded_numbers(parsed, run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    table = dict(parsed.tables["run"])
    assert table["model"] == BAD and table["dataset"] == "gsm8k, math" and "engine" not in table
    assert table["steps"] == "8 of 20"
    rewards = [row["reward"]["mean"] for row in rows]
    assert table["reward"].startswith(f"{np.mean(rewards[:2]):.3f} → {np.mean(rewards[-2:]):.3f} ")
    assert table["response tokens"] == f"{sum(row['response']['tokens'] for row in rows):,.0f}" == "3,600"
    assert table["KV read"] == "30 %"
    for cells, b in zip(parsed.tables["tail"][1:], rows[-1]["mismatch"]["bins"], strict=True):
        assert cells[0] == f"{b['start']}-{b['end']}"
        assert cells[1:4] == [f"{b['n_tokens']:,}", str(b["n_sequences"]), f"{b['lower_bound']:.3f}"]
        known = b["interval_low"] is not None
        assert cells[4] == (f"[{b['interval_low']:.3f}, {b['interval_high']:.3f}]" if known else "one response")
        assert cells[5] == f"{b['upper_bound']:.3f}"
        assert cells[6] in ("holds", "below", "undecided")


def test_every_token_is_shown_with_its_acceptance(parsed):
    assert len(parsed.responses) == 4, "two responses of step 1 and of step 8"
    for spans in parsed.responses:
        assert [text for _, text in spans] == TOKENS
        assert [found["class"] for found, _ in spans] == LEVEL
        assert [found["title"] for found, _ in spans[:3]] == ["1.0000", "0.9990", "0.9989"]
        assert spans[-1][0]["title"] == "not measured"
    steps = [found for tag, found in parsed.tags if tag == "details" and found.get("class") == "step"]
    assert ["open" in found for found in steps] == [False, True]
    for part in ("Step 1: 2 responses", "Step 8: 2 responses", f"{BAD}-8-1", "reward 1.25", f"a < b\n{BAD}", "< 0.3"):
        assert part in parsed.text
    assert "lowest 0.000" in parsed.text and "10 tokens" in parsed.text


@pytest.mark.slow
@given(st.lists(st.tuples(st.text(), st.floats(0, 1)), min_size=1, max_size=20))
def test_any_text_survives(tokens):
    texts, rates = zip(*tokens, strict=True)
    row = rollout_row(1, list(texts), list(rates), problem=texts[0], prompt=texts[-1])
    (spans,) = Page(page.html_page(log_of(STEP, rollouts=(row,)), {})).responses
    assert [text for _, text in spans] == list(texts)
    for (found, _), rate in zip(spans, rates, strict=True):
        level = int(found["class"][1])
        assert LEVELS[level] <= rate < (LEVELS[level - 1] if level else inf)


def test_a_long_response_loses_its_middle(monkeypatch):
    monkeypatch.setattr(page, "MOST_TOKENS", 20)
    rows = [rollout_row(1, [f" {i}" for i in range(30)], [0.5] * 30), rollout_row(1, ["a"] * 10, [0.5] * 10)]
    long, short = Page(page.html_page(log_of(step_row(1), rollouts=tuple(rows)), {})).responses
    assert [text for _, text in long] == [*(f" {i}" for i in range(5)), "20 tokens are not shown",
                                          *(f" {i}" for i in range(25, 30))]  # fmt: skip
    assert len(short) == 10


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_colour_scale_is_read_by_lightness_alone():
    for one, other in pairwise(map(luminance, LEVEL_COLORS)):
        assert other < one, "each lower level lies further from the page"
    for ink, background in zip(LEVEL_INKS, LEVEL_COLORS, strict=True):
        assert contrast(ink, background) >= 4.5
    for color in (theme.INK, theme.MUTED, theme.ABOVE, theme.BELOW):
        assert contrast(color, theme.CARD) >= 4.5


# Figures


def drawn(draw, log) -> Figure:
    figure = Figure()
    draw(figure, log)
    return figure


def test_tail_figure_draws_the_recorded_intervals():
    bins = bins_only(bin_row(0, 0.9, 0.88, 0.93, 0.95), bin_row(1, 0.8, 0.81, 0.85), bin_row(2, 0.5, n_sequences=1))
    left, right = drawn(figures.draw_tail, log_of(step_row(1, mismatch=bins), step_row(2, mismatch=bins))).axes
    assert [line.get_ydata().tolist() for line in left.lines[:3]] == [[0.9] * 2, [0.8] * 2, [0.5] * 2]
    assert left.lines[3].get_ydata() == [0.86, 0.86]
    segments = [c.get_segments()[0].tolist() for c in right.collections[:2]]
    assert segments == [[[0, 0.88], [0, 0.93]], [[1, 0.81], [1, 0.85]]]
    points = [line for line in right.lines if line.get_marker() == "o"]
    dots = [(point.get_xdata()[0], point.get_ydata()[0], point.get_color()) for point in points]
    assert dots == [(0, 0.9, theme.ABOVE), (1, 0.8, theme.BELOW), (2, 0.5, theme.MUTED)]


def test_long_runs_show_a_rolling_mean_of_every_bin():
    bins = [bin_row(n, 0.9 - n / 50) for n in range(20)]
    log = log_of(*(step_row(step, mismatch=bins_only(*bins[: 20 - step % 2])) for step in range(1, 71)))
    lines = drawn(figures.draw_tail, log).axes[0].lines
    raw, smooth = lines[:40:2], lines[1:40:2]
    np.testing.assert_array_equal([line.get_ydata() for line in raw], log.tail_by_step().T)
    np.testing.assert_allclose(
        [line.get_ydata() for line in smooth], np.repeat([[0.9 - n / 50] for n in range(20)], 70, 1)
    )
    assert (
        len({line.get_color() if isinstance(line.get_color(), str) else tuple(line.get_color()) for line in raw}) == 20
    )


def test_beta_shares_by_hand():
    # Uniform on [0, 0.5], a fifth of all tokens: 0.08 in [0, 0.2], 0.12 in [0.2, 0.5], none above.
    uniform = BetaTail(a=1, b=1, ks=0.01, n=20, fraction_in_tail=0.2, cut=0.5)
    np.testing.assert_allclose(figures._beta_shares(uniform, np.array([0, 0.2, 0.5, 1])), [0.08, 0.12, 0], atol=1e-12)


def test_acceptance_figure_overlays_the_fit():
    log = log_of(*(step_row(step) for step in (1, 2)))
    left, right = drawn(figures.draw_acceptance, log).axes
    for ax, name in ((left, "histogram"), (right, "log_histogram")):
        last, first, beta = (patch.get_data().values for patch in ax.patches)
        counts = np.array(log.histogram(name).counts)
        np.testing.assert_allclose(last, counts / counts.sum())
        assert first.sum() == pytest.approx(1)
        assert beta.sum() == pytest.approx(log.beta_tail().fraction_in_tail)
        assert ax.get_yscale() == "log"
    # The fit follows the tail but for sampling noise, and leaves out the mass at 1: on the left the last bin, on the
    # right the seven bins of distance below 0.001.
    for ax, tail in ((left, slice(25, 49)), (right, slice(7, None))):
        last, _, beta = (patch.get_data().values for patch in ax.patches)
        assert np.abs(beta - last)[tail].max() < 0.02
    np.testing.assert_allclose(beta[:7], 0, atol=1e-6)


def test_rolling_mean_by_hand():
    values = np.array([1, 2, nan, 4, 9])
    np.testing.assert_allclose(figures._rolling_mean(values, 3), [1.5, 1.5, 3, 6.5, 6.5])
    assert np.isnan(figures._rolling_mean(np.full(4, nan), 3)).all()


def test_schedule_figure_by_hand():
    log = log_of(step_row(1), step_row(2), schedules=(SCHEDULE.replace(top_k=(2,)), SCHEDULE))
    pages, share = drawn(figures.draw_schedule, log).axes
    whole, now, start = (dict(zip(*line.get_data(), strict=True)) for line in pages.lines)
    assert (whole[200], now[200], start[200]) == (20, 9, 5)  # top_k + sink 1 + recent 2
    assert dict(zip(*share.lines[0].get_data(), strict=True))[200] == 45
    assert dict(zip(*share.lines[0].get_data(), strict=True))[30] == 100


def test_a_schedule_that_moved_is_drawn_by_step_and_alarms_are_counted():
    tables = ((2, 6, ALL_PAGES), (4, 6, ALL_PAGES), (4, 6, ALL_PAGES))
    rows = [step_row(i + 1, guard={"steps_below": i, "alarm": i > 1}) for i in range(3)]
    log = log_of(*rows, schedules=tuple(SCHEDULE.replace(top_k=table) for table in tables))
    assert figures.plots(log) == [*FIGURES, "pages"]
    (ax,) = drawn(figures.draw_pages, log).axes
    read = {line.get_label(): line.get_ydata() for line in ax.lines}
    # 90 tokens, of which (2 + 3) and (4 + 3) pages of 10 are read; 190 tokens, (6 + 3) pages.
    assert read["0-100"] == pytest.approx([500 / 9, 700 / 9, 700 / 9])
    assert read["100-200"] == pytest.approx([9000 / 190] * 3)
    assert ("guard", "acceptance too low, at 1 of 3 steps, first at step 3") in result_rows(log)
    still = log_of(step_row(1), step_row(2))
    assert "pages" not in figures.plots(still)


def test_a_lossless_run_tells_how_it_drafted():
    def drafts(drafted, accepted, cycles, mean):
        bins = [{"start": 0, "end": 2000, "drafts": 9, "mean": mean, "p5": 0.5}]
        return {"drafted": drafted, "accepted": accepted, "cycles": cycles, "bins": bins}

    log = log_of(step_row(1), step_row(2, drafts=drafts(80, 30, 10, 0.7)), step_row(3, drafts=drafts(80, 50, 10, 0.9)))
    rows = dict(result_rows(log))
    assert rows["drafts per token"] == "1.60" and rows["tokens per cycle"] == "5.00"
    assert rows["drafts accepted at 0-2K tokens"] == "0.900, p5 0.500"
    assert not any("draft" in name for name in dict(result_rows(log_of(step_row(1)))))
    log.train["rollout"] = {"mode": "lossless"}
    assert dict(setup_rows(log)) == {"mode": "lossless", "drafts read": describe_schedule(SCHEDULE)}


def test_a_figure_is_the_same_each_time():
    log = log_of(step_row(1))
    plot = figures.plots(log)[0]
    assert figures.render(plot, log) == figures.render(plot, log)


# Edges


@pytest.mark.slow
def test_one_step_with_nothing_to_resample(tmp_path):
    bins = bins_only(bin_row(0, 0.4, n_sequences=1), bin_row(1, None, n_sequences=1))
    row = step_row(7, reward={"mean": nan}, mismatch=bins | {"beta_tail": None})
    path = write_run(tmp_path / "run", [row], [rollout_row(7, [], [])])
    parsed = Page(write_report(path, tmp_path / "out").read_text(encoding="utf-8"))
    assert list(parsed.figures) == FIGURES and (tmp_path / "out" / "tail.png").exists()
    assert not (path / "report").exists()
    assert dict(parsed.tables["run"])["reward"] == "n/a (one step)"
    assert [row[3:5] for row in parsed.tables["tail"][1:]] == [["0.400", "one response"], ["n/a", "one response"]]
    assert parsed.responses == [[]] and "Step 7: 1 response" in parsed.text


def test_half_a_character_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "plots", lambda log: {})
    path = write_run(tmp_path, [step_row(1)], [rollout_row(1, ["a\ud800b"], [0.5])])
    assert Page(write_report(path).read_text(encoding="utf-8")).responses[0][0][1] == "a?b"


def test_importing_loads_neither_torch_nor_matplotlib():
    code = "import sys, sparrow.report; print(sorted({'torch', 'matplotlib', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
