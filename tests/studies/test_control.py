"""Test the control study on a small scale: its reward against hand calculations, its engine against
the reference, and an end-to-end run.
"""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB, tiny_model

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "studies/common", "studies/reasoner", "studies/text")
MODULES = ("common", "corpus", "task", "control", "control_summary", "control_figure", "train")
MODULES += ("graph_engine", "many_runs", "tables_text_training")
PROMPT = '''# file shop/stock.py
"""Stock."""
import math
from shop.prices import price_of, Currency

LIMIT = 12


class Stock:
    """What is there."""

    def __init__(self, items, owner):
        self.items = items
        self.owner = owner

    def total(self):'''
NAMES = ["Currency", "LIMIT", "Stock", "__init__", "items", "math", "owner", "price_of", "total"]


@pytest.fixture(scope="module")
def parts(study):
    """Return the parts of a response's reward."""
    return lambda response: study.task.reward_parts(
        PROMPT, study.task.bound_names(PROMPT), response
    )


# --- lines and units of the file ---


def test_strings_comments_and_numbers_do_not_count_as_code(study):
    text = 'x = f"a # b" + y2  # c\n"""Doc\nimport os\nend""" + z\n  # only\n)\nr\'\'\'a\'\'\'\nq = "it\'s"'
    lines = study.task.read_lines(text)
    assert [line.code for line in lines] == ['x = "" + y0', "", "", "+ z", "", "", "", 'q = ""']
    assert [line.in_string for line in lines] == [
        False,
        False,
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_units_are_statements_and_class_members(study):
    text = """import os
def f(
    x,
):
    if x:
        return 1
    else:
        return 2
@decorated
@twice
class A(
    B
):
    '''Doc.
no unit
'''
    field = [
        1,
    ]
    @property
    def p(self):
        return 1
    def q(self):
        return (
try:
    pass
except ValueError:
    pass"""
    lines = study.task.read_lines(text)
    assert [(unit.start, unit.stop) for unit in study.task.units(lines)] == [
        (0, 1),
        (1, 8),
        (8, 13),
        (13, 16),
        (16, 19),
        (19, 22),
        (22, 24),
        (24, 28),
    ]
    parsed = [
        study.task.parse([lines[i].text for i in unit]) is not None
        for unit in study.task.units(lines)
    ]
    assert parsed == [True, True, True, True, True, True, False, True]


def test_names_bound_by_the_prompt_are_found(study):
    assert study.task.bound_names(PROMPT) == NAMES


# --- the reward ---

GOOD = """
        return sum(price_of(item) for item in self.items)

    def rounded(self):
        if self.owner is None:
            raise ValueError("nobody")
        return math.floor(self.total())


def empty(owner):
    return Stock([], owner)
"""


@pytest.mark.parametrize(
    ("code", "shape"),
    [
        ('x = f("", y0)', 'x = x(", x)'),
        ("price_of(self.items[0])", "x(x.x(0)"),
        ("return [a, b, c, d]", "return (x, x)"),
        ("x = a + b * c - -d or not e", "x = x"),
        ("x = LIMIT", "x = x"),
        ("if a is None and b == c:", "if x = x:"),
        ("x = ((((LIMIT))))", "x = (x)"),
        ("for i in self.items:", "for x = x.x:"),
    ],
)
def test_line_shapes_match_a_handwritten_table(study, code, shape):
    assert study.task.shape(code) == shape


def test_the_reward_of_a_good_continuation_matches_a_hand_calculation(study, parts):
    found = parts(GOOD)
    lines = [line.strip().replace('"nobody"', '""') for line in GOOD.splitlines() if line.strip()]
    reading = [
        line
        for line in lines
        if any(f"{n}" in line for n in ("price_of", "self.owner", "math", "Stock"))
    ]
    assert [lines.index(line) for line in reading] == [0, 2, 4, 6]
    shapes = [
        "return x(x) for x = x.x)",
        "def x(x):",
        "if x.x = x:",
        'raise x(")',
        "return x.x()",
        "def x(x):",
        "return x(), x)",
    ]
    assert [study.task.shape(line) for line in lines] == shapes
    total, grounded = sum(map(len, shapes)), sum(len(shapes[i]) for i in (0, 2, 4, 6))
    assert found["valid"] == found["fresh"] == 1 and found["length"] == total / 160
    assert found["names"] == 6 and found["grounded"] == pytest.approx(grounded / total)
    assert found["reward"] == pytest.approx((grounded + 0.25 * (total - grounded)) / 160)


def test_repeated_lines_and_names_earn_no_additional_reward(parts):
    lines = ["\n        self.a = LIMIT", "\n        self.b = items", "\n        self.c = owner"]
    assert parts(lines[0] + "\n")["reward"] == len("x.x = x") / 160
    assert (
        parts("".join(lines[:2]) + "\n")["reward"]
        == parts("".join(lines) + "\n")["reward"]
        == 2 * len("x.x = x") / 160
    )
    read = ["\n        self.a = LIMIT", "\n        f(LIMIT)", "\n        return LIMIT"]
    assert (
        parts("".join(read) + "\n")["reward"] == (len("x.x = xx(x)") + 0.25 * len("return x")) / 160
    )


def test_code_that_uses_no_names_from_the_prompt_earns_at_most_a_quarter_of_the_reward(parts):
    kinds = (
        "if a:",
        "while a(b):",
        "for a in b(c):",
        "with a as b:",
        "for a in b.c(d, 0):",
        "while a.b(c, d.e):",
    )
    ends = (
        "return b",
        "raise c(d)",
        "yield b.c",
        "assert a(b)",
        "del a.b.c",
        "pass",
        "break",
        "b = c.d(e)",
        "a()[b]",
    )
    code = "\n        pass\n" + "".join(
        f"{k}\n    {e}\n" for k, e in zip(kinds * 9, ends * 6, strict=True)
    )
    varied = "".join(f"def f{'a' * i}(b):\n    {e}\n" for i, e in enumerate(ends))
    found = parts(code + varied)
    assert found["names"] == 0 and 0.1 < found["reward"] <= 0.25


def test_an_invalid_unit_loses_only_the_reward_of_its_own_lines(parts):
    bad = "\n\ndef broken(:\n    return LIMIT\n\n\ndef last():\n    return LIMIT\n"
    found, good = parts(GOOD + bad), parts(GOOD)
    lost = len("def x(:") + len("return x")
    kept = round(160 * found["length"]) - lost
    assert found["valid"] == pytest.approx(kept / (kept + lost)) and kept > 160 * good["length"]
    # At the end of a response, the same invalid unit is not counted, because it may be truncated.
    assert parts(GOOD + bad[: bad.index("\n\n\ndef last")] + "\n")["valid"] == 1


@pytest.mark.parametrize(
    "end",
    [
        "\n\ndef f():\n    x = Stock(",
        '\n\ndef f():\n    """Text\n    of many\n    lines',
        "\n\ncla",
    ],
)
def test_code_truncated_by_the_token_limit_is_not_penalised(parts, end):
    found = parts(GOOD + end)
    assert found["valid"] == 1 and found["reward"] >= parts(GOOD)["reward"] - 0.06


HACKS = {
    "nothing": "",
    "spaces": "\n\n    \n" * 50,
    "the same line": "\n        return price_of(self.items)"
    + "\n        price_of(self.items)" * 99
    + "\n",
    "copying the prompt": "\n        pass\n" + PROMPT + "\n        pass\n",
    "pass": "\n        pass" * 200 + "\n",
    "comments": "\n        # price_of(self.items, self.owner, LIMIT)" * 100 + "\n",
    "distinct comments": "".join(f"\n        # price_of(items, {i})" for i in range(100)) + "\n",
    "one giant string": '\n        return """'
    + "".join(f"\nprice_of(LIMIT, {i})" for i in range(100))
    + '\n"""\n',
    "an open string": '\n        """' + GOOD * 3,
    "strings in a list": "\n        return [\n"
    + "".join(f'    "LIMIT {i}",\n' for i in range(99))
    + "        ]\n",
    "numbered": "\n        return 0\n" + "".join(f"x = {i}\n" for i in range(200)),
    "numbered names": "\n        return 0\n" + "".join(f"x{i} = {i}\n" for i in range(200)),
    "numbered names read": "\n        return 0\n"
    + "".join(f"x{i} = LIMIT + {i}\n" for i in range(200)),
    "lettered": "\n        return 0\n"
    + "".join(f"{a}{b} = 1\n" for a in "abcdefgh" for b in "abcdefgh"),
    "no syntax": "\n        return (price_of LIMIT Stock math" + " owner items\nx" * 50 + "\n",
    "brackets": "\n        return " + "(" * 500,
    "text": "\n\nThe stock has items and an owner. LIMIT is the limit of Stock.\n" * 20,
    "null": "\n        return price_of(\0)\n",
}


# Attempts to exploit the reward: many lines with few names, many kinds of lines, or all names.
LETTERS = [a + b for a in "abcdefgh" for b in "abcdefgh"]
HACKS |= {
    name: "\n        return 0\n" + "".join(f"{line}\n" for line in lines)
    for name, lines in {
        "lettered names read": [f"{v} = LIMIT" for v in LETTERS],
        "every name by turns": [f"{v} = {n}" for v, n in zip(LETTERS, NAMES * 8, strict=False)],
        "every name in a list": [f"{v} = [{', '.join(NAMES)}]" for v in LETTERS],
        "bare names": NAMES * 20,
        "longer and longer": ["x = LIMIT" + " + LIMIT" * i for i in range(40)],
        "deeper and deeper": ["x = " + "LIMIT(" * i + "LIMIT" + ")" * i for i in range(40)],
        "more and more": [f"f({', '.join(LETTERS[:i])})" for i in range(1, 40)],
        "operators": [f"x = LIMIT {p} a {q} b {r} c" for p, q, r in product("+-*/%", repeat=3)],
        "words": [
            f"x = LIMIT {p} a {q} b {r} c"
            for p, q, r in product(("and", "or", "is", "in"), repeat=3)
        ],
        "brackets of two kinds": [
            f"x = {''.join(o)}LIMIT{''.join(')]'['(['.index(c)] for c in reversed(o))}"
            for o in product("([", repeat=6)
        ],
        "imports": [line for v in LETTERS for line in (f"import {v}", f"from {v} import {v}")],
        "long names": [f"{v * 20} = {v * 15}({v * 10})" for v in LETTERS],
    }.items()
}


@pytest.mark.parametrize("name", HACKS)
def test_reward_hacks_earn_little(parts, name):
    assert parts(HACKS[name][:2500])["reward"] < 0.16 < 0.4 < parts(GOOD)["reward"]


def test_names_that_were_already_used_earn_nothing_in_later_trivial_lines(parts):
    trivial = "".join(f"{v} = 1\n" for v in LETTERS)
    assert parts(GOOD + trivial)["reward"] < parts(GOOD)["reward"] + 0.02


def test_a_response_that_stops_early_earns_less(parts):
    some = parts(GOOD[: GOOD.index("def empty")])
    few = parts("\n        return price_of(self.items, math, LIMIT)\n")
    assert few["length"] < 0.5 and 0 < few["reward"] < some["reward"] < parts(GOOD)["reward"] < 0.5


def test_repetition_earns_less_than_the_code_it_displaces(parts):
    loops = (
        "\n        self.items = price_of(self.items)" * 40,
        "\n\n    def total(self):\n        return self.items" * 20,
    )
    for loop in loops:
        assert parts(loop + "\n")["reward"] < 0.15
    assert parts(GOOD + "".join(loops))["reward"] < parts(GOOD)["reward"] + 0.15


# --- problems ---


@pytest.fixture(scope="module")
def checkpoint(study, tmp_path_factory):
    """Save a tiny random model and problems made from this package's sources. Return the folder and
    the tokenizer.
    """
    folder = tmp_path_factory.mktemp("text")
    train, held = study.corpus.split(study.corpus.folders([ROOT / "sparrow"], ".py"), ["attention"])
    texts = list(study.corpus.texts(train, set()))[:30]
    tokenizer = study.corpus.train_tokenizer(texts, 400)
    tokenizer.save_pretrained(folder)
    tiny_model(vocab_size=400, eos_token_id=0).save_pretrained(folder)
    (folder / "card.json").write_text(json.dumps({"size": "tiny"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study.task, "FEWEST_NAMES", 3)
        counts = study.task.write_problems(folder, tokenizer, train, held, tokens=400)
    assert counts["train"] > 10 and counts["held_out"] > 2
    return folder, tokenizer


def test_problems_start_at_file_beginnings_and_depend_only_on_index_and_seed(study, checkpoint):
    folder, tokenizer = checkpoint
    task, other = study.task.Continue(folder), study.task.Continue(folder, "held_out")
    count = len(task.problems)
    for problem in [task.problem(i) for i in range(count)]:
        assert problem.prompt.startswith("# file ") and not problem.prompt.endswith("\n")
        assert 200 <= len(tokenizer(problem.prompt).input_ids) <= 400
        assert problem.verify("\n    pass\n") < 0.01
    assert len({task.problem(i, 1).id for i in range(count)}) == count
    assert [task.problem(i, 1).id for i in range(9)] == [
        study.task.Continue(folder).problem(i, 1).id for i in range(9)
    ]
    assert [task.problem(i, 1).id for i in range(9)] != [task.problem(i, 2).id for i in range(9)]
    assert [other.problem(i, 1).id for i in range(2)] == [
        "continue-held_out-0",
        "continue-held_out-1",
    ]
    assert all("attention" in p["prompt"].partition("\n")[0] for p in other.problems)


def test_checkpoint_without_a_tokenizer_config_raises_an_error(study, checkpoint, tmp_path):
    (tmp_path / study.task.FILE).write_bytes((checkpoint[0] / study.task.FILE).read_bytes())
    with pytest.raises(FileNotFoundError, match="tokenizer_config"):
        study.task.Continue(tmp_path).problem(0)


# --- the engine ---


@pytest.mark.parametrize("top_k", [(10**6,), (2, 4)])
def test_the_engine_matches_the_reference_beyond_one_span_of_the_cache(study, top_k):
    schedule = SparsitySchedule(top_k, bin_tokens=128, dense_layers=(0,))
    engine = study.graph_engine.GraphEngine(tiny_model(), schedule, [VOCAB], 2, 300, top_n=40)
    prompts = [np.random.default_rng(i).integers(0, VOCAB, 240 + 7 * i).tolist() for i in range(3)]
    rollouts = engine.generate(prompts, Sampling(30, 0.8, 64, seed=3))
    assert rollouts[0].top_ids.shape == (30, 40) and rollouts[0].top_ids.dtype == np.int32
    for rollout, scores in zip(rollouts, engine.score(rollouts, schedule, 0.8), strict=True):
        assert np.abs(rollout.logprobs - scores.logprobs).max() < 2e-4
        assert np.abs(rollout.top_logprobs - scores.top_logprobs).max() < 2e-4


# --- end to end ---


@pytest.mark.slow
def test_the_study_runs_end_to_end(study, checkpoint, tmp_path, monkeypatch):
    folder, _ = checkpoint
    options = study.control.Options(
        folder,
        tmp_path,
        steps=2,
        prompts=2,
        samples=2,
        held_out=3,
        held_out_every=2,
        calibration=24,
        budgets=(1, 2, 40),
        targets=(0.5, 0.93),
        token_budget=512,
        max_new_tokens=24,
        top_n=400,
    )
    monkeypatch.setattr(study.many_runs, "use_gpu", lambda index: torch.device("cpu"))
    study.many_runs.write_schedules(options, study.control.calibrate)
    tables = json.loads((tmp_path / "schedules.json").read_text())
    assert list(tables) == ["p50", "p93"] and tables["p50"] <= tables["p93"]
    started = {}
    for name in ("dense-0", "p50-0", "p93-0", "p93-1"):
        study.many_runs.run(options, study.control.train, name, 0, float("inf"))
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert [row.get("step") for row in rows] == [None, 0, 1, 2, None] and rows[-1] == {
            "ended": "done"
        }
        assert [row["step"] for row in rows if "held_out" in row] == [0, 2]
        assert (rows[2]["tail"][0] > 0.999) == (name == "dense-0")
    for name in ("auto90-0", "p50-none-0", "p50-distill-0"):
        study.many_runs.run(options, study.control.train, name, 0, float("inf"))
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert rows[-1] == {"ended": "done"} and len(rows) == 5, rows[-1]
        started[name] = rows
    assert (
        started["auto90-0"][0]["schedule"] == "auto90"
        and started["p50-none-0"][0]["correction"] == "none"
    )
    # The closed loop starts dense. A distilled actor has its own model, but both arms train the
    # policy in the same way.
    assert (
        started["auto90-0"][0]["top_k"] == ["all"]
        and started["p50-distill-0"][0]["actor"] == "distilled"
    )
    assert started["p50-distill-0"][2]["tail"] == started["p50-none-0"][2]["tail"]
    assert started["p50-distill-0"][3]["tail"] != started["p50-none-0"][3]["tail"]
    for name in started:
        (tmp_path / f"{name}.jsonl").unlink()
    study.many_runs.run(options, study.control.train, "dense-1", 0, 0.0)
    assert json.loads((tmp_path / "dense-1.jsonl").read_text().splitlines()[-1]) == {
        "ended": "time is over"
    }

    # The last line of a killed run is truncated. The run counts if it has all its steps, but not if
    # it has only one of two.
    lines = (
        (tmp_path / "p50-0.jsonl")
        .read_text()
        .replace('"seed": 0', '"seed": 1')
        .splitlines(keepends=True)
    )
    (tmp_path / "p50-1.jsonl").write_text("".join(lines[:4]) + lines[3][:20])
    (tmp_path / "p50-2.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    (tmp_path / "p50-3.jsonl").write_text("")

    monkeypatch.setattr(
        study.tables_text_training,
        "load",
        lambda name: study.common.read_result(tmp_path / f"{name}.json"),
    )
    study.control_summary.main(
        study.control_summary.Options((tmp_path,), folder, tmp_path / "text_control.json")
    )
    lines = study.tables_text_training.text_control().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["`dense`", "`p50`", "`p93`"]
    result = study.common.read_result(tmp_path / "text_control.json")
    rows = result["rows"]
    assert (
        result["model"] == {"size": "tiny"} and result["ranking"] == {}
    )  # two arms are too few for a ranking
    assert [row["seeds"] for row in rows] == [[0], [0, 1], [0, 1]] and rows[1][
        "reward_minus_dense"
    ][1:] == [None, None]


def made_up_run(arm, seed, reward, held_out):
    return {"arm": arm, "seed": seed, "reward": reward, "held_out": held_out}


def test_summary_numbers_match_a_hand_calculation(study):
    s = study.control_summary
    runs = [
        made_up_run("dense", 0, [0.0] * 5 + [0.4] * 5, [[0, 0.2], [5, 0.3], [10, 0.4]]),
        made_up_run("dense", 1, [0.0] * 5 + [0.6] * 5, [[0, 0.2], [5, 0.4], [10, 0.5]]),
        made_up_run("p75", 0, [0.0] * 5 + [0.3] * 5, [[0, 0.2], [10, 0.1]]),
        made_up_run("p75", 2, [0.0] * 10, [[0, 0.2], [10, 0.1]]),
    ]
    assert s.end_reward(runs[0]) == pytest.approx(0.4) and s.held_out_end(runs[0], 7) == 0.3
    # The standard deviation of 0.4 and 0.6, divided by the root of 2, is 0.1. t(0.975, 1) is
    # 12.706.
    assert s.over_seeds(map(s.end_reward, runs[:2])) == pytest.approx(
        [0.5, 0.5 - 1.2706, 0.5 + 1.2706], abs=1e-4
    )
    assert s.over_seeds([0.3]) == [0.3, None, None]
    # There is no dense run with seed 2.
    assert s.minus(runs[2:], "dense", runs, s.end_reward) == [pytest.approx(-0.1), None, None]
    assert s.minus(runs[3:], "dense", runs, s.end_reward) == [None, None, None]
    # The run is compared with p75's run of seed 0, over the five steps that both completed.
    corrected = made_up_run("p75-obrs", 0, [0.1] * 5, [[0, 0.2]])
    assert s.minus([corrected], "p75", [*runs, corrected], s.whole_reward) == [
        pytest.approx(0.1),
        None,
        None,
    ]


def test_ranking_and_figure_points_match_a_hand_calculation(study):
    # From one arm to the next, p5 and rewards rise, and held-out rewards fall. The dense arm is not
    # ranked.
    def run(arm, seed, p5, reward, held_out):
        tail = dict.fromkeys(("p1", "p5", "p10", "mean"), [p5] * 2)
        measured = {**tail, "kl": [1 - p5] * 2, "actor": ""}
        return made_up_run(arm, seed, [reward] * 10, [[0, 0.2], [10, held_out]]) | measured

    runs = [run("dense", seed, 1.0, 0.5, 0.5) for seed in (0, 1)]
    arms = [(f"p{i}", seed, 0.1 * i + 0.01 * seed) for i in range(4) for seed in (0, 1)]
    runs += [run(arm, seed, 0.5 + x, 0.1 + x, 0.6 - x) for arm, seed, x in arms]
    runs.append(run("p9", 7, 0.99, 0.0, 1.0))  # a seed without a dense run
    ranking = study.control_summary.ranking(runs, study.control_summary.whole_reward)
    assert set(ranking) == {"p1", "p5", "p10", "mean", "KL"} and all(
        rho[0] == 1 for rho in ranking.values()
    )
    ranking = study.control_summary.ranking(runs, study.control_summary.held_out_end)
    assert all(rho[0] == -1 and rho[1] <= -1 for rho in ranking.values())
    points = study.control_figure.shares(runs, study.control_summary.end_reward)
    assert np.array(points) == pytest.approx(np.array([[0.5 + x, 0.2 + 2 * x] for _, _, x in arms]))


def test_arm_names_are_parsed(study):
    described = study.control.described
    assert described("dense", "icepop") == ("dense", None, False, "icepop")
    assert described("p80-sparse_rl", "token_tis") == ("p80", None, False, "sparse_rl")
    assert described("p80-distill", "token_tis") == ("p80", None, True, "token_tis")
    assert described("auto98", "token_tis") == ("auto98", 0.98, False, "token_tis")
    with pytest.raises(ValueError, match="no arm 'q80'"):
        described("q80", "token_tis")
