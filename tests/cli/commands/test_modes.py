"""Test how commands interpret ``mode``, and which settings they refuse."""

import io
import json
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace

import pytest

from sparrow.cli import loading, main
from sparrow.cli.commands.demo import Demo
from sparrow.cli.commands.measure import Measure
from sparrow.cli.commands.train import Train
from sparrow.decoding import DRAFT_SCHEDULE, DRAFT_TOKENS, LOSSLESS_SETTINGS, Decoding
from sparrow.decoding_options import DecodingOptions
from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError
from sparrow.report import summary_rows, write_report
from sparrow.schedule import SparsitySchedule
from sparrow.train.config import (
    DistillConfig,
    GuardConfig,
    RolloutConfig,
    TrainConfig,
)
from tests.conftest import fails


@pytest.mark.parametrize(
    ("options", "schedule", "expected"),
    [
        ({}, "dense", Decoding.load("dense")),
        ({}, None, Decoding.load("dense")),
        ({}, "fixed:9", Decoding.load("fixed:9")),
        ({"mode": "dense"}, "dense", Decoding.load("dense")),
        ({"mode": "lossless"}, "dense", Decoding.lossless()),
        (
            {"mode": "lossless", "draft_tokens": 4},
            None,
            Decoding("lossless", DRAFT_SCHEDULE, draft_tokens=4),
        ),
        (
            {"mode": "lossless", "draft_schedule": "fixed:9", "adapt_draft_tokens": False},
            None,
            Decoding("lossless", SparsitySchedule.fixed(9), adapt_draft_tokens=False),
        ),
        (
            {"mode": "lossless", "meter_schedule": "fixed:9", "meter_every": 4},
            None,
            Decoding(
                "lossless", DRAFT_SCHEDULE, meter_schedule=SparsitySchedule.fixed(9), meter_every=4
            ),
        ),
        (
            {"mode": "lossless", "draft_weights": "fp8"},
            None,
            Decoding.lossless(draft_weights="fp8"),
        ),
    ],
)
def test_mode_and_schedule_together_determine_decoding(options, schedule, expected):
    assert DecodingOptions(**options).decoding(schedule) == expected


@pytest.mark.parametrize(
    ("options", "schedule", "message"),
    [
        (
            {"mode": "lossless"},
            "auto",
            r"schedule is 'auto', but mode lossless has no p5.*leave schedule out",
        ),
        (
            {"mode": "lossless"},
            "qwen3-4b-0.86",
            r"samples follow the dense policy.*set draft_schedule",
        ),
        (
            {},
            "auto",
            r"schedule is 'auto', but only the command sparrow train can adjust schedules; set a fixed schedule",
        ),
        (
            {"mode": "lossy"},
            "auto:fixed:9",
            r"schedule is 'auto:fixed:9', but only the command sparrow train",
        ),
        ({"mode": "dense"}, "fixed:9", r"'fixed:9', but mode is 'dense'.*leave out one of them"),
        ({"mode": "lossy"}, None, r"mode is 'lossy', which needs a schedule.*or use mode lossless"),
        ({"mode": "lossy"}, "dense", r"mode is 'lossy', which needs a schedule"),
        (
            {"mode": "auto"},
            "fixed:9",
            r"mode is 'auto', but must be dense, lossless or lossy, because only sparrow train",
        ),
        (
            {"meter_schedule": "fixed:1"},
            "fixed:9",
            r"meter_schedule is 'fixed:1', but must be left out unless mode is",
        ),
        (
            {"draft_tokens": 4},
            "fixed:9",
            r"draft_tokens is 4, but must be left out unless mode is lossless",
        ),
        (
            {"draft_weights": "fp8"},
            "fixed:9",
            r"draft_weights is 'fp8', but must be left out unless mode is lossless",
        ),
        (
            {"mode": "lossy", "draft_schedule": "fixed:1"},
            "fixed:9",
            r"draft_schedule is 'fixed:1', but must be left out",
        ),
    ],
)
def test_contradictory_settings_raise_an_error_with_the_remedy(options, schedule, message):
    with pytest.raises(ConfigError, match=message):
        DecodingOptions(**options).decoding(schedule)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adapt_draft_budget", True),
        ("adapt_draft_tokens", False),
        ("guess_head", "h"),
        ("guess_lookup_min", 2),
        ("drafter_invariant", True),
        ("draft_weights", "fp8"),
        ("meter_schedule", "fixed:9"),
        ("meter_every", 8),
    ],
)
def test_auto_mode_refuses_settings_that_it_would_ignore(name, value):
    with pytest.raises(
        ConfigError, match=f"{name} is {value!r}, but must be left out unless mode is lossless"
    ):
        RolloutConfig(mode="auto", guess_tokens=3, **{name: value}).decoding("fixed:9")


def test_auto_schedule_starts_from_the_named_schedule():
    assert RolloutConfig().decoding("auto") == Decoding.load("dense")
    assert RolloutConfig(mode="lossy").decoding("auto:fixed:9") == Decoding.load("fixed:9")


def test_every_setting_of_lossless_mode_is_a_command_line_option():
    options = [option.name for option in fields(DecodingOptions) if option.name != "mode"]
    assert options == list(LOSSLESS_SETTINGS)


def test_auto_mode_uses_the_same_schedule_for_drafts_and_unverified_steps():
    found = RolloutConfig(mode="auto", draft_tokens=4).decoding("fixed:9")
    assert found == Decoding("auto", SparsitySchedule.fixed(9), draft_tokens=4)
    assert found.with_schedule(SparsitySchedule.fixed(2)) == Decoding(
        "auto", SparsitySchedule.fixed(2), draft_tokens=4
    )
    for schedule in ("dense", None, "auto", "auto:fixed:9"):
        with pytest.raises(
            ConfigError, match="mode auto needs a schedule for drafts and unverified steps"
        ):
            RolloutConfig(mode="auto").decoding(schedule)
    with pytest.raises(
        ConfigError, match="draft_schedule is 'fixed:1', but must be left out with mode auto"
    ):
        RolloutConfig(mode="auto", draft_schedule="fixed:1").decoding("fixed:9")


@pytest.mark.parametrize("engine", ["vllm", "vllm:max_num_seqs=4", "http://localhost:8000"])
def test_auto_mode_is_refused_if_verification_cannot_stop_mid_response(
    engine, checkpoint, tmp_path, capsys
):
    message = fails(
        capsys,
        "train",
        "--model",
        checkpoint,
        "--task",
        "trace:lines=4",
        "--run-dir",
        str(tmp_path / "no"),
        "--schedule",
        "fixed:1",
        "--rollout.mode",
        "auto",
        "--tau",
        "0.9",
        "--engine",
        engine,
        code=2,
    )
    assert (
        f"engine is '{engine}', but mode 'auto' works only" in message
        and "vLLM verifies either all of a response" in message
    )
    with pytest.raises(ConfigError, match="mode 'auto' works only in sparrow train with engine hf"):
        Decoding.load(Decoding("auto", SparsitySchedule.fixed(1)))


def test_settings_incompatible_with_lossless_rollouts_are_refused():
    with pytest.raises(ConfigError, match=r"tau is None, but must be set in rollout\.mode auto"):
        TrainConfig(rollout=RolloutConfig(mode="auto"))
    assert TrainConfig(rollout=RolloutConfig(mode="auto"), relative_tau=0.98).tau is None
    lossless = RolloutConfig(mode="lossless")
    with pytest.raises(
        ConfigError, match=r"distill\.enabled is True, but must be off with lossless rollouts"
    ):
        TrainConfig(rollout=lossless, distill=DistillConfig(enabled=True))
    with pytest.raises(
        ConfigError,
        match=r"guard\.action is 'raise', but must be warn or stop with lossless rollouts",
    ):
        TrainConfig(rollout=lossless, guard=GuardConfig(action="raise"))
    with pytest.raises(ConfigError, match=r"rollout\.mode is 'fast', but"):
        RolloutConfig(mode="fast")


def test_lossless_run_trains_on_samples_from_the_dense_policy(checkpoint, tmp_path, capsys):
    run = tmp_path / "run"
    sampled = ["--rollout.prompts", "2", "--rollout.samples", "2", "--rollout.max-new-tokens", "24"]
    main(
        [
            "train",
            "--model",
            checkpoint,
            "--task",
            "trace:lines=24",
            "--run-dir",
            str(run),
            "--steps",
            "2",
            *sampled,
            "--rollout.mode",
            "lossless",
            "--rollout.draft-schedule",
            "fixed:0",
            "--rollout.draft-tokens",
            "3",
        ]
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "drafts per token" in printed
        and "tokens per cycle" in printed
        and "drafts accepted at 0-2K" in printed
    )
    saved = json.loads((run / "config.json").read_text())
    assert saved["train"]["rollout"]["mode"] == "lossless" and saved["schedule"]["top_k"] == [0]
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        drafts = row["drafts"]
        assert 0 < drafts["accepted"] < drafts["drafted"] and drafts["cycles"] > 0
        assert drafts["acceptance"] < 0.999, "the test needs some rejected drafts"
        # Engine and trainer agree on all log-probs of the training samples, so there is nothing to
        # correct.
        assert abs(row["correction"]["kl_k3"]) < 1e-8 and row["correction"]["ess_token"] > 1 - 1e-6
        assert all(b["upper_bound"] > 1 - 1e-5 for b in row["mismatch"]["bins"])
    message = fails(
        capsys,
        "train",
        "--model",
        checkpoint,
        "--task",
        "trace:lines=4",
        "--schedule",
        "auto",
        "--rollout.mode",
        "lossless",
        "--run-dir",
        str(tmp_path / "no"),
    )
    assert "has no p5 by which to adjust the pages" in message and not (tmp_path / "no").exists()


@pytest.fixture
def measured_with(monkeypatch, capsys):
    """Return how ``sparrow measure`` would decode losslessly with these options."""
    given = []

    def load_sampler(self, decoding):
        given.append(decoding)
        raise ConfigError("seen")

    def asked(*options):
        command = ["measure", "--mode", "lossless", "--model", "m", "--task", "trace", *options]
        assert "seen" in fails(capsys, *command)
        return given[-1]

    monkeypatch.setattr(Measure, "load_sampler", load_sampler)
    return asked


@pytest.mark.parametrize(
    ("asked", "adapts"), [((), False), (("--adapt-draft-budget", "True"), True)]
)
def test_measurement_uses_a_fixed_draft_schedule(asked, adapts, measured_with):
    """With an adaptive draft schedule, the measured acceptance would mix several schedules."""
    assert (len(measured_with(*asked).draft_budgets) > 1) is adapts


@pytest.mark.parametrize(("guesses", "adapts"), [("0", True), ("3", False)])
def test_measurement_checks_all_guesses_with_sparse_passes(guesses, adapts, measured_with):
    """An adaptive number of drafts includes guesses alone, whose acceptance is not measured."""
    assert measured_with("--guess-tokens", guesses).adapt_draft_tokens is adapts


def test_settings_for_vllm_do_not_reach_the_scorer(monkeypatch):
    """The scorer is a transformers engine, which would refuse them."""
    command = Measure(model="m", task="trace", engine="vllm")
    decoding = Decoding.lossless("fixed:2", draft_weights="fp8")
    started = []
    monkeypatch.setattr(Measure, "load_prompts", lambda self: (None, None, []))
    monkeypatch.setattr(loading, "load_scorer", lambda *asked: started.append(asked[2]))
    monkeypatch.setattr(
        loading, "load_engine", lambda *asked: started.append(asked[4]) or io.StringIO()
    )
    with command.load_sampler(decoding):
        assert started == [Decoding.lossy("fixed:2"), decoding]


@pytest.mark.parametrize("options", [[], ["--draft-schedule", "fixed:61"]])
def test_measurement_uses_a_servers_own_draft_schedule_unless_one_is_given(
    monkeypatch, capsys, options
):
    own = SparsitySchedule.fixed(9)
    used = []

    @contextmanager
    def load_sampler(self, decoding):
        yield SimpleNamespace(schedule=own), None, []

    def compare(engine, scorer, prompts, sampling, schedule):
        used.append(schedule)
        raise ConfigError("seen")

    monkeypatch.setattr(Measure, "load_sampler", load_sampler)
    monkeypatch.setattr("sparrow.engines.measure.compare", compare)
    command = ["measure", "--mode", "lossless", "--model", "m", "--task", "trace", *options]
    assert "seen" in fails(capsys, *command)
    assert used == [SparsitySchedule.fixed(61) if options else own]


def test_measurement_in_lossless_mode_reports_the_acceptance_of_drafts(
    checkpoint, tmp_path, capsys
):
    out = tmp_path / "report.json"
    sampled = [
        "--model",
        checkpoint,
        "--task",
        "trace:lines=24",
        "--count",
        "4",
        "--max-new-tokens",
        "40",
    ]
    main(
        [
            "measure",
            "--mode",
            "lossless",
            "--draft-schedule",
            "fixed:0",
            *sampled,
            "--out",
            str(out),
        ]
    )
    printed = capsys.readouterr().out
    assert "exact acceptance of" in printed and "tokens per cycle" in printed
    found = json.loads(out.read_text())
    assert found["bins"][0]["upper_bound"] > 1 - 1e-5, "samples must follow the dense policy"
    assert found["drafts"]["bins"][0]["mean"] < 0.999
    assert "nothing to measure; pass --schedule" in fails(capsys, "measure", *sampled)


def test_evaluation_in_lossless_mode_samples_the_same_tokens_as_dense_decoding(
    checkpoint, tmp_path, monkeypatch
):
    sampled = {}
    generate = HFEngine.generate

    def kept(engine, prompts, sampling):
        found = generate(engine, prompts, sampling)
        sampled.setdefault(engine.decoding.mode, []).extend(r.response_ids.tolist() for r in found)
        return found

    monkeypatch.setattr(HFEngine, "generate", kept)
    tables = {}
    for mode, options in {
        "dense": ["--mode", "dense"],
        "lossless": ["--mode", "lossless", "--draft-schedule", "fixed:0"],
        "lossy": ["--mode", "lossy", "--schedule", "fixed:0"],
    }.items():
        main(
            [
                "eval",
                "--model",
                checkpoint,
                "--benchmark",
                "trace:lines=24",
                "--limit",
                "3",
                "--k",
                "1",
                "--temperature",
                "0",
                "--max-new-tokens",
                "24",
                "--out",
                str(tmp_path / mode),
                *options,
            ]
        )
        tables[mode] = (tmp_path / mode / "results.md").read_text()
    assert (
        len(sampled["dense"]) == 3 and sampled["lossless"] == sampled["dense"] != sampled["lossy"]
    )
    labels = {"dense": "dense", "lossless": "lossless", "lossy": "fixed:0"}
    for mode, table in tables.items():
        assert [name for name in labels.values() if f"| {name} |" in table] == [labels[mode]]


@pytest.mark.parametrize("mode", ["dense", "lossy", "lossless"])
def test_demo_runs_in_every_mode(mode, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # away from a demo's run directory
    commands = []
    monkeypatch.setattr(Train, "run", lambda command: commands.append(command))
    monkeypatch.setattr(Demo, "compare", lambda command: None)
    main(["demo", "--mode", mode])
    decoding = commands[0].rollout.decoding(commands[0].schedule)
    assert decoding.mode == mode
    assert decoding.schedule.is_dense == (mode == "dense")
    assert decoding.draft_tokens == (4 if mode == "lossless" else DRAFT_TOKENS)


def test_vllm_engines_receive_the_decoding_settings(monkeypatch, checkpoint):
    from sparrow.engines.vllm import engine, server

    told = []
    monkeypatch.setattr(
        engine, "VLLMEngine", lambda model, decoding, **options: told.append(decoding)
    )
    monkeypatch.setattr(server, "VLLMServer", lambda url, decoding, controls: told.append(decoding))
    for spec in ("vllm", "http://localhost:1"):
        loading.load_engine(spec, checkpoint, None, None, Decoding.lossless(draft_tokens=4), "fp32")
    assert told == [Decoding.lossless(draft_tokens=4)] * 2
    with pytest.raises(ConfigError, match=r"is set by precision \(fp32\); leave dtype out"):
        loading.load_engine(
            "vllm:dtype=bfloat16", checkpoint, None, None, Decoding.lossless(), "fp32"
        )


def test_auto_mode_run_reports_which_lengths_are_unverified_and_why(checkpoint, tmp_path):
    run = tmp_path / "run"
    schedule = SparsitySchedule((0,), bin_tokens=64, page_size=8, dense_layers=(0,)).to_json()
    main(
        [
            "train",
            "--model",
            checkpoint,
            "--task",
            "trace:lines=24",
            "--run-dir",
            str(run),
            "--steps",
            "2",
            "--rollout.prompts",
            "2",
            "--rollout.samples",
            "4",
            "--rollout.max-new-tokens",
            "24",
            "--rollout.top-n",
            "200",
            "--tau",
            "0.5",
            "--rollout.mode",
            "auto",
            "--schedule",
            schedule,
            "--rollout.draft-tokens",
            "3",
        ]
    )
    rows = [json.loads(line)["dial"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["verified_up_to"] is None and rows[0]["unverified_fraction"] == 0
    # A model with few layers gains nothing on an H200, however good its acceptance tail is.
    assert {b["mode"] for b in rows[0]["bins"]} == {"lossless"} and all(
        b["speedup"] < 1.01 for b in rows[0]["bins"]
    )
    said = dict(summary_rows(run))
    assert (
        said["unverified"] == "0 %, at the last step 0 %"
        and said["predicted gain"] == "1.00x over lossless"
    )
    why = [value for name, value in said.items() if name.startswith("dial at ")]
    assert len(why) == len(rows[1]["bins"]) and all(value.startswith("lossless; ") for value in why)
    report = write_report(run).read_text(encoding="utf-8")
    assert why[0].split("; ")[1].split("'")[0] in report and "1.00x over lossless" in report
