"""Test the command line end to end on a tiny checkpoint: its output, its files and its errors."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import get_args

import pytest
from transformers import AutoTokenizer

from sparrow import __version__
from sparrow.cli.commands.demo import Demo
from sparrow.cli.entry import COMMANDS, main
from sparrow.cli.loading import parse_spec
from sparrow.schedule import SparsitySchedule
from tests.conftest import ROOT, fails

COMMANDS_THAT_SAMPLE = ("train", "measure", "calibrate", "eval")
SMALL = ["--rollout.prompts", "2", "--rollout.samples", "2", "--rollout.max-new-tokens", "8"]


def test_run_configured_by_toml_and_overrides_can_be_reported_and_resumed(
    checkpoint, tmp_path, capsys
):
    config = tmp_path / "run.toml"
    run = tmp_path / "run"
    config.write_text(
        f'model = "{checkpoint}"\ntask = "trace:lines=4"\nschedule = "fixed:1"\nsteps = 1\nrun_dir = "{run}"\n'
        "resume = false\n"
        "[rollout]\nprompts = 2\nsamples = 2\nmax_new_tokens = 8\n"
        "[optimizer]\nlearning_rate = 1e-3\ngradient_checkpointing = true\n[correction]\nband = [0.5, 2]\n"
    )
    main(
        [
            "train",
            "--config",
            str(config),
            "--optimizer.learning-rate",
            "2e-3",
            "--trackers",
            "tensorboard",
        ]
    )
    assert "reward" in capsys.readouterr().out
    saved = json.loads((run / "config.json").read_text())
    assert (
        saved["train"]["optimizer"]["learning_rate"] == 2e-3
        and saved["train"]["rollout"]["samples"] == 2
    )
    assert saved["train"]["optimizer"]["gradient_checkpointing"] and saved["train"]["correction"][
        "band"
    ] == [0.5, 2]
    assert saved["schedule"]["top_k"] == [1]
    assert list(run.rglob("events.out.tfevents*"))
    main(["train", "--config", str(config), "--steps", "2", "--resume"])
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    main(["report", str(run)])
    page = Path("".join(capsys.readouterr().out.split("wrote ")[-1].split()))
    assert page.exists() and "<html" in page.read_text()


def test_measure_prints_and_saves_the_report(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # wide enough not to wrap headings
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": " ba = 7\\n ku = 5\\n"}\n{"prompt": " ba = 3\\n"}\n')
    out = tmp_path / "report.json"
    arguments = [
        "--model",
        checkpoint,
        "--prompts",
        str(prompts),
        "--count",
        "6",
        "--max-new-tokens",
        "20",
    ]
    main(["measure", "--schedule", "dense", *arguments, "--out", str(out)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "share of the KV cache read: 100.0%" in printed
    assert "samples of the dense policy, 6 responses" in printed
    assert re.search(
        r"log-probs of the sampled tokens differ from the policy's by \d(e-\d+)?", printed
    )
    # Dense samples follow the policy by definition. Top lists cannot prove this, so the report
    # gives no verdict at all.
    assert not any(
        word in printed for word in ("sparse actor", "tau", "ceiling", "undecided", "narrow")
    )
    dense = json.loads(out.read_text())
    assert dense["n_sequences"] == 6 and dense["mean"] > 0.8
    assert dense["bins"][0]["upper_bound"] == pytest.approx(1, abs=1e-5)
    main(
        [
            "measure",
            "--schedule",
            "fixed:0",
            *arguments,
            "--max-new-tokens",
            "120",
            "--out",
            str(out),
        ]
    )
    few = "the smallest bin has 6 responses; intervals from fewer than 20 are too narrow"
    printed = capsys.readouterr()
    assert few in printed.out
    *_, early, _, late = printed.err.splitlines()
    assert early == f"wrote {out}; the ceiling is still to come" and late == f"wrote {out}"
    tables = " ".join(printed.out.split())
    for interval in ("p5", "ceiling", "relative p5"):
        assert f"95 % interval of {interval}" in tables
    sparse = json.loads(out.read_text())
    assert sparse["bins"][0]["upper_bound"] < 0.999
    made_by = sparse["provenance"]
    assert SparsitySchedule.from_dict(made_by.pop("schedule")) == SparsitySchedule.fixed(0)
    assert made_by == {
        "model": checkpoint,
        "engine": "hf",
        "precision": "fp32",
        "prompts": str(prompts),
        "mode": "lossy",
        "temperature": 1.0,
        "max_new_tokens": 120,
        "seed": 0,
        "tau": 0.86,
        "relative_tau": None,
        "date": date.today().isoformat(),
        "version": __version__,
    }


@pytest.fixture
def passes(monkeypatch):
    """Record the list lengths of each sampling pass, and whether the pass was dense."""
    from sparrow.engines.hf import HFEngine

    made: list[tuple[int, bool]] = []
    generate = HFEngine.generate

    def counted(self, prompts, sampling):
        made.append((sampling.top_n, self.schedule.is_dense))
        return generate(self, prompts, sampling)

    monkeypatch.setattr(HFEngine, "generate", counted)
    return made


SAMPLED = [*("--task", "trace:lines=24"), *("--count", "4"), *("--max-new-tokens", "24")]


@pytest.mark.slow
def test_exact_measurement_needs_only_one_sampling_pass(checkpoint, tmp_path, passes, capsys):
    out = tmp_path / "report.json"
    sampled = ["--model", checkpoint, *SAMPLED, "--tau", "0.99", "--out", str(out)]
    main(["measure", "--mode", "lossless", "--draft-schedule", "fixed:0", *sampled])
    assert passes == [(20, False)]
    printed = " ".join(capsys.readouterr().out.split())
    assert "exact acceptance of" in printed and "sparse actor" not in printed
    assert not any(word in printed for word in ("tau", "ceiling", "undecided"))
    counted = json.loads(out.read_text())["drafts"]
    assert counted["accepted"] + counted["cycles"] <= 4 * 24, (
        "counts of several passes were added up"
    )
    passes.clear()
    main(["measure", "--schedule", "dense", *sampled])
    assert passes == [(20, True)]


@pytest.mark.slow
def test_reported_counters_cover_only_the_last_sampling_pass(
    checkpoint, tmp_path, passes, monkeypatch
):
    from sparrow.engines.base import Counters

    kept: list[Counters] = []
    to_dict = Counters.to_dict
    monkeypatch.setattr(Counters, "to_dict", lambda self: kept.append(self) or to_dict(self))
    sampled = ["measure", "--model", checkpoint, *SAMPLED, "--schedule", "fixed:0", "--tau", "0.6"]
    main(sampled)
    lengths = [top_n for top_n, is_dense in passes if not is_dense]
    assert lengths[:2] == [20, 80], "the test needs lists that are lengthened"
    after_several = kept[-1].tokens_held

    main([*sampled, "--top-n", str(lengths[-1])])
    assert after_several == kept[-1].tokens_held, "counts of earlier passes were included"


@pytest.mark.slow
def test_sparse_samples_are_saved_before_the_ceiling_is_measured(
    checkpoint, tmp_path, monkeypatch, capsys
):
    from sparrow.engines import measure

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure_ceiling", interrupt)
    out = tmp_path / "report.json"
    arguments = ["--model", checkpoint, *SAMPLED, "--schedule", "fixed:0", "--top-n", "20"]
    with pytest.raises(SystemExit) as stopped:
        main(["measure", *arguments, "--out", str(out)])
    printed = capsys.readouterr()
    assert stopped.value.code == 130
    assert f"wrote {out}; the ceiling is still to come\n" in printed.err
    assert "p5 between" in " ".join(printed.out.split())
    kept = json.loads(out.read_text())
    assert kept["n_sequences"] == 4 and kept["bins"][0]["ceiling"] is None


@pytest.fixture
def sent_by(checkpoint, tmp_path, monkeypatch):
    """Return a function that runs a command on a dataset of four questions and returns the first
    ids sent to the engine.
    """
    from sparrow.engines.hf import HFEngine

    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    shutil.copytree(checkpoint, model)
    rows = [{"question": f"trace {name}", "answer": "7"} for name in ("ba", "du", "ku", "mi")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sent: list[tuple[int, ...]] = []

    def stop(self, prompts, sampling):
        sent[:] = [tuple(prompt) for prompt in prompts]
        raise KeyboardInterrupt

    monkeypatch.setattr(HFEngine, "generate", stop)
    small = ["--rollout.prompts", "4", "--rollout.samples", "2", "--rollout.max-new-tokens", "8"]
    sampled = ["--count", "20", "--max-new-tokens", "8"]
    plain = "template={question}"  # the tokenizer lacks the words of the default template
    dataset = ["--dataset", f"qa:path={data},{plain}"]
    arguments = {
        "train": [*dataset, *small, "--run-dir", str(tmp_path / "run")],
        "measure": [*dataset, "--schedule", "fixed:1", *sampled],
        "audit": [*dataset, *sampled],
        "calibrate": [*dataset, "--out", str(tmp_path / "s.json"), *sampled],
        "eval": [
            *("--benchmark", f"qa:path={data},{plain}", "--out", str(tmp_path / "eval")),
            *("--k", "1", "--max-new-tokens", "8"),
        ],
    }

    def call(command: str, *more: str) -> list[tuple[int, ...]]:
        with pytest.raises(SystemExit):
            main([command, "--model", str(model), "--seed", "3", *arguments[command], *more])
        return list(sent)

    call.model = model
    return call


def test_every_command_sends_the_same_prompts_for_a_dataset(sent_by):
    (sent_by.model / "chat_template.jinja").write_text("ask:{{ messages[0].content }}\nanswer:")
    sent = {command: sent_by(command) for command in COMMANDS_THAT_SAMPLE}
    each = list(dict.fromkeys(sent["train"]))
    assert sent["calibrate"] == sent["measure"]
    assert sent["measure"][:4] == each
    assert len(sent["measure"]) == 20
    assert sorted(sent["eval"]) == sorted(each) and len(each) == 4
    dressed = AutoTokenizer.from_pretrained(sent_by.model).decode(sent["measure"][0])
    assert dressed.endswith("\nanswer:")


def add_bos(folder: Path) -> None:
    """Make the tokenizer in the folder begin every text with BOS."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    bos = next(t["id"] for t in tokenizer["added_tokens"] if t["content"] == "<bos>")
    special = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [bos], "tokens": ["<bos>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("command", [*COMMANDS_THAT_SAMPLE, "audit"])
def test_prompts_of_a_base_model_are_tokenized_with_bos(sent_by, command):
    add_bos(sent_by.model)
    tokenizer = AutoTokenizer.from_pretrained(sent_by.model)
    questions = [f"trace {name}" for name in ("ba", "du", "ku", "mi")]
    own = {tuple(tokenizer(question).input_ids) for question in questions}
    assert all(ids[0] == tokenizer.bos_token_id for ids in own)
    assert set(sent_by(command)) == own


@pytest.mark.parametrize("command", ["measure", "calibrate", "audit"])
def test_prompts_from_a_file_are_tokenized_with_bos(sent_by, tmp_path, command):
    add_bos(sent_by.model)
    tokenizer = AutoTokenizer.from_pretrained(sent_by.model)
    prompts = [" ba = 7", " ku"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    sent = sent_by(command, "--prompts", str(tmp_path / "prompts.txt"), "--dataset")
    own = {tuple(tokenizer(prompt).input_ids) for prompt in prompts}
    assert set(sent) == own and all(ids[0] == tokenizer.bos_token_id for ids in own)


@pytest.mark.parametrize("command", COMMANDS_THAT_SAMPLE)
def test_task_prompts_begin_with_bos(sent_by, command):
    add_bos(sent_by.model)
    tokenizer = AutoTokenizer.from_pretrained(sent_by.model)
    option = "--benchmark" if command == "eval" else "--task"
    more = ["--limit", "2"] if command == "eval" else ["--dataset"]
    sent = sent_by(command, option, "trace:lines=2", *more)
    assert sent
    for ids in sent:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert list(ids) == tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id


CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}answer:{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} now{% endif %}"
)


@pytest.mark.parametrize("command", [*COMMANDS_THAT_SAMPLE, "audit"])
def test_chat_prompts_match_apply_chat_template(sent_by, command, tmp_path):
    add_bos(sent_by.model)
    template = tmp_path / "other.jinja"
    template.write_text("ask:{{ messages[-1].content }}\nprogram:")
    (sent_by.model / "chat_template.jinja").write_text(CHAT)
    tokenizer = AutoTokenizer.from_pretrained(sent_by.model)
    system = {"role": "system", "content": "walk"}
    for settings, first, arguments in (
        ([], [], {}),
        (["--chat.arguments", "enable_thinking=false"], [], {"enable_thinking": False}),
        (["--chat.arguments", "enable_thinking=true"], [], {"enable_thinking": True}),
        (["--chat.system", "walk"], [system], {}),
        (["--chat.template", str(template)], [], {"chat_template": template.read_text()}),
    ):
        own = {
            tuple(
                tokenizer.apply_chat_template(
                    [*first, {"role": "user", "content": f"trace {name}"}],
                    add_generation_prompt=True,
                    return_dict=False,
                    **arguments,
                )
            )
            for name in ("ba", "du", "ku", "mi")
        }
        assert set(sent_by(command, *settings)) == own, settings


@pytest.mark.parametrize("command", COMMANDS_THAT_SAMPLE)
def test_chat_settings_are_refused_if_prompts_are_sent_unchanged(
    checkpoint, tmp_path, capsys, command
):
    option = "--benchmark" if command == "eval" else "--task"
    where = {"eval": ["--out", str(tmp_path / "e")], "calibrate": ["--out", str(tmp_path / "s")]}
    arguments = [command, "--model", checkpoint, option, "trace:lines=2", "--chat.system", "walk"]
    schedule = ["--schedule", "fixed:1"] if command == "measure" else []
    if command == "train":
        length = ["--rollout.max-new-tokens", "8", "--run-dir", str(tmp_path / "run")]
    else:
        length = ["--max-new-tokens", "8"]
    reason = fails(capsys, *arguments, *where.get(command, []), *schedule, *length)
    assert "the chat settings apply to" in reason and "trace:lines=2" in reason


def test_every_command_rejects_prompts_that_the_tokenizer_cannot_represent(
    sent_by, tmp_path, capsys
):
    strange = tmp_path / "strange.jsonl"
    strange.write_text('{"question": "Wie viel ist zwei plus zwei?", "answer": "4"}\n')
    for command in COMMANDS_THAT_SAMPLE:
        option = "--benchmark" if command == "eval" else "--dataset"
        assert sent_by(command, option, str(strange)) == []
        assert (
            "the tokenizer cannot encode 99% of the prompts' characters" in capsys.readouterr().err
        )


def test_top_lists_grow_until_the_verdict_is_decided(checkpoint, tmp_path, capsys):
    arguments = [
        "measure",
        "--schedule",
        "fixed:9",  # keeps every page at these lengths
        "--model",
        checkpoint,
        "--task",
        "trace:lines=2",
        "--count",
        "8",
    ]
    arguments += ["--max-new-tokens", "20", "--tau", "0.95"]
    main([*arguments, "--top-n", "1"])
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "whether p5 of acceptance reaches 0.95 is unknown at lengths 0-2000, because with the actor's "
        "lists of 1 tokens" in said
    )
    assert "1.000; use longer lists (--top-n)" in said and " undecided" in said
    assert re.search(r"p5 between .* 0\.\d+ and 1\.000 ", said)
    for lists in (["--top-n", "151"], []):  # without --top-n, lists are as long as needed
        main([*arguments, *lists])
        said = " ".join(capsys.readouterr().out.split())
        assert "is unknown" not in said and " holds" in said


def test_cost_accepts_a_shape_name_or_a_config(checkpoint, capsys):
    main(["cost", "--model", "qwen3-4b", "--schedule", "qwen3-4b-0.86"])
    printed = capsys.readouterr().out
    assert (
        "lossy speed-up" in printed
        and "lossless speed-up" in printed
        and "Both pay off (2.47x lossy" in printed
    )
    main(
        [
            "cost",
            "--model",
            checkpoint,
            "--schedule",
            "fixed:1",
            "--median",
            "300",
            "--cutoff",
            "600",
        ]
    )
    assert "Neither pays off" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    unknown = fails(capsys, "cost", "--model", "no/such", "--schedule", "fixed:1")
    assert "cannot load the config of 'no/such'" in unknown
    assert "; the built-in models are qwen3-1.7b, " in unknown


def test_cost_rejects_sequences_longer_than_the_context(capsys):
    command = ["cost", "--model", "qwen3-4b", "--schedule", "fixed:9", "--responses", "8"]
    main([*command, "--prompt", "8192", "--cutoff", "32768"])  # 40,960 tokens, the whole context
    refused = fails(capsys, *command, "--prompt", "8193", "--cutoff", "32768")
    assert "a prompt of 8,193 tokens and a response of 32,768 (cutoff) do not fit" in refused
    assert "the 40,960-token context of qwen3-4b; lower cutoff or prompt" in refused


def test_bad_input_is_reported_in_one_sentence(checkpoint, tmp_path, capsys):
    base = ["--model", checkpoint, "--run-dir", str(tmp_path / "run"), *SMALL]
    task = ["--task", "trace:lines=4"]
    assert "no schedule 'qwen9-0.86'" in fails(
        capsys, "train", *base, *task, "--schedule", "qwen9-0.86"
    )
    shrinking = tmp_path / "shrinking.json"
    shrinking.write_text('{"top_k": [5, 3]}')
    assert "must not shrink" in fails(capsys, "train", *base, *task, "--schedule", str(shrinking))
    assert "keeps layer 7 dense, but the model has 4 layers" in fails(
        capsys, "train", *base, *task, "--schedule", _schedule(tmp_path, dense_layers=[7])
    )
    assert "cannot load model '/nowhere'" in fails(capsys, "train", "--model", "/nowhere", *task)
    assert "no task 'juggle'" in fails(capsys, "train", *base, "--task", "juggle")
    unknown = fails(capsys, "train", *base, "--task", "trace:rows=3")
    assert "does not accept the options" in unknown and "; its options are lines, " in unknown
    assert "pass --task NAME, or --dataset NAME or FILE" in fails(capsys, "train", *base)
    assert "do not fit in the model's context of 1024" in fails(
        capsys, "train", *base, "--task", "trace:lines=200"
    )
    config = tmp_path / "typo.toml"
    config.write_text("learning_rat = 1\n")
    assert "--learning-rat" in fails(
        capsys, "train", "--model", "reasoner", "--config", str(config), code=2
    )
    config.write_text("dataset 7\n")
    assert "is not valid TOML" in fails(
        capsys, "train", "--model", "reasoner", "--config", str(config)
    )
    assert "cannot read the configuration" in fails(capsys, "train", "--config", str(tmp_path))
    assert "--config needs a TOML file" in fails(capsys, "train", "--config")
    config.write_text("[correction]\ncap = -1\n")
    refused = fails(capsys, "train", "--model", "reasoner", "--config", str(config), code=2)
    assert refused.endswith("correction.cap is -1.0, but must be greater than 0")
    config.write_text("[loss]\nnormalization = 'mean'\n")
    assert "invalid choice 'mean'" in fails(
        capsys, "train", "--model", "reasoner", "--config", str(config), code=2
    )
    config.write_text(
        f'dataset = "qa:path={tmp_path}/none.jsonl"\nmodel = "{checkpoint}"\nrun_dir = "{tmp_path}/run"\n'
        "rollout.max_new_tokens = 8\n"
    )
    assert "no dataset file" in fails(
        capsys, "train", "--model", "reasoner", "--config", str(config)
    )
    assert fails(capsys, "train", *base, *task, "--rollout.temperature", "-1", code=2) == (
        "sparrow: rollout.temperature is -1.0, but must be greater than 0"
    )
    assert (
        "no such file"
        in fails(
            capsys,
            "measure",
            "--model",
            "reasoner",
            "--schedule",
            "dense",
            "--prompts",
            "/nowhere.txt",
        ).lower()
    )


def _schedule(folder: Path, **fields) -> str:
    path = folder / "schedule.json"
    path.write_text(json.dumps({"top_k": [1], **fields}))
    return str(path)


def test_cost_accepts_the_bundled_reasoner(capsys):
    main(
        [
            "cost",
            "--model",
            "reasoner",
            "--schedule",
            "fixed:2",
            "--median",
            "200",
            "--cutoff",
            "400",
        ]
    )
    assert "Neither pays off" in capsys.readouterr().out


def test_count_below_the_minimum_is_refused_before_sampling(capsys, tmp_path):
    options = [
        "--model",
        "reasoner",
        "--task",
        "trace:lines=2",
        "--count",
        "19",
        "--out",
        str(tmp_path / "out.json"),
    ]
    assert "count is 19, but must be at least 20, because p5 has no confidence interval" in fails(
        capsys, "calibrate", *options, code=2
    )
    assert not list(tmp_path.rglob("rollouts-*"))


def test_help_is_fast_and_imports_no_heavy_packages():
    code = (
        "import sys, time; start = time.process_time()\nfrom sparrow.cli import main\n"
        "try: main(['train', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'triton', 'vllm', 'scipy', 'matplotlib', 'datasets', 'rich'}\n"
        "heavy &= set(sys.modules)\nassert not heavy, heavy\nsys.stderr.write(str(time.process_time() - start))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--rollout.temperature" in done.stdout and float(done.stderr) < 5


def test_interrupt_during_imports_prints_no_traceback():
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'tyro': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from sparrow.cli import main\nmain(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == "sparrow: interrupted\n"


@pytest.mark.parametrize("command", ["train", "measure", "calibrate", "eval"])
def test_missing_model_is_reported_in_one_sentence(command, capsys):
    assert fails(capsys, command, "--seed", "1") == (
        f"sparrow: sparrow {command} needs --model NAME or PATH; "
        "--model reasoner is the small model that comes with Sparrow"
    )


def test_recorded_reward_rises_within_the_steps_of_the_demo(monkeypatch):
    """The recorded runs are longer than the demo but use the same seeds, so their first steps are
    the demo's steps.
    """
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for run in importlib.import_module("common").load("demo")["runs"]:
        reward = run["reward"][: Demo.steps]
        assert len(reward) == Demo.steps <= 8 and sum(reward[-2:]) - sum(reward[:2]) > 2 * 0.1


def test_every_command_is_defined_in_a_module_of_the_same_name():
    names = {command.__name__: command.__module__ for command in get_args(COMMANDS)}
    assert len(names) == 9 and names == {
        name: f"sparrow.cli.commands.{name.lower()}" for name in names
    }


def test_engine_options_can_be_given_as_json():
    spec = 'vllm:compilation_config={"mode": 0, "cudagraph_mode": "FULL"},max_model_len=1024,attention_backend=CUSTOM'
    config = {"mode": 0, "cudagraph_mode": "FULL"}
    assert parse_spec(spec) == (
        "vllm",
        {"compilation_config": config, "max_model_len": 1024, "attention_backend": "CUSTOM"},
    )
    assert parse_spec("hf") == ("hf", {})


@pytest.mark.parametrize(("command", "status"), [("audit", 2), ("measure", None)])
def test_crashes_are_not_verdicts(monkeypatch, capsys, command, status):
    """``audit`` exits with 1 if an engine is biased, and so does Python after a traceback."""

    def crash(arguments):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("sparrow.cli.entry.parse", crash)
    with pytest.raises(SystemExit if status else ZeroDivisionError) as ended:
        main([command])
    if status:
        assert ended.value.code == status
        assert "ZeroDivisionError: a bug" in capsys.readouterr().err
