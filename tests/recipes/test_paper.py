"""Test that every command in docs/paper.md passes a dry run, and that small versions of the paper's
runs work.
"""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import parquet

from sparrow.cli.entry import main, parse
from sparrow.cli.loading import load_problems
from sparrow.cost import MACHINES, SHAPES, cluster
from sparrow.schedule import SparsitySchedule
from sparrow.tasks.formats import FORMATS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
BLOCKS = [block.replace("\\\n", " ") for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)]
HUB = ROOT / "tests" / "data" / "hub"  # five rows of every data set, with the original columns
MODELS = ("1.7B", "4B", "8B", "14B")


def recipe(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / "paper" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(start: str) -> list[list[str]]:
    """Return the arguments of every command on the page that begins with ``start``. Shell variables
    are expanded.
    """
    found, variables = [], {}
    for line in "\n".join(BLOCKS).splitlines():
        if assigned := re.fullmatch(r'([A-Z]+)="(.*)"', line):
            variables[assigned[1]] = assigned[2]
        elif line.startswith(start + " "):
            filled = re.sub(r"\$([A-Z]+)", lambda name: variables[name[1]], line)
            found.append(shlex.split(filled, comments=True)[len(start.split()) :])
    return found


def local(name: str) -> str:
    """Return a data set spec that reads five of the rows from a local file."""
    name = name.partition(":")[0]
    return f"{name}:path={HUB / name.replace('-', '_').replace('+', '_plus')}.jsonl"


@pytest.fixture(scope="module")
def small_pages(tmp_path_factory) -> str:
    """Return a schedule that leaves out pages even for short texts."""
    path = tmp_path_factory.mktemp("schedule") / "small.json"
    schedule = SparsitySchedule(
        (0,), bin_tokens=512, page_size=4, sink_pages=1, recent_pages=1, dense_layers=(0,)
    )
    path.write_text(schedule.to_json())
    return str(path)


def shrunk(command: list[str], checkpoint: str, small_pages: str, *own: str) -> list[str]:
    """Scale down a command from the page: use a tiny model, a tiny schedule, and five rows of each
    data set.
    """
    parts = [part for part in command if part not in ("Qwen/Qwen3-4B", "Qwen/Qwen3-1.7B")]
    model = parts.index("--model") + 1
    if parts[model : model + 1] and not parts[model].startswith("--"):
        del parts[model]
    parts.insert(model, checkpoint)
    for i, part in enumerate(parts):
        if parts[i - 1] == "--schedule":
            parts[i] = small_pages
        if part in FORMATS and "=" not in part:
            parts[i] = local(part)
    return [*parts, *own]


def for_model(command: list[str], model: str) -> list[str]:
    return [
        re.sub("(?i)4b", model.lower(), arg) if "-4b-" in arg else arg.replace("-4B", f"-{model}")
        for arg in command
    ]


RUNS = [
    for_model(command, model)
    for command in commands("train")
    for model in (MODELS if "Qwen/Qwen3-4B" in command else MODELS[:1])
    if not (model == "14B" and "qwen3-4b-0.80" in command)  # there is no such schedule
]


@pytest.fixture
def priced_at_once(monkeypatch):
    """Only check whether a run fits, because simulating its duration takes seconds per command."""

    def fit(
        shape, gpus, responses, schedule, prompt, max_batch, token_budget, colocated, **options
    ):
        options.pop("acceptance")
        memory = cluster.fit(
            shape, gpus, prompt + int(responses.max()), token_budget, colocated, **options
        )
        return cluster.Plan(memory, cluster.Step(1, 1, 1, 1, 1), None)

    monkeypatch.setattr(cluster, "plan", fit)


def test_recipe_lists_the_training_runs_of_every_model():
    assert len(RUNS) == 4 * len(MODELS) - 1 + 3
    assert {run[run.index("--schedule") + 1] for run in RUNS if "--schedule" in run} == {
        *(f"qwen3-{m.lower()}-0.86" for m in MODELS),
        *(f"qwen3-{m.lower()}-0.80" for m in MODELS[:3]),
    }
    assert sum("lossless" in run for run in RUNS) == len(MODELS) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", RUNS, ids=lambda run: run[run.index("--run-dir") + 1] + run[run.index("--model") + 1]
)
def test_every_training_run_passes_a_dry_run(run, tmp_path, monkeypatch, priced_at_once, capsys):
    monkeypatch.chdir(ROOT)
    (name,) = parse(["train", *run]).dataset
    (held_out,) = parse(["train", *run]).eval.benchmark
    own = [
        "--dataset",
        local(name),
        "--eval.benchmark",
        local(held_out),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    main(["train", *run, *own, "--dry-run", "h200:gpus=8"])
    printed = capsys.readouterr().out
    assert "engine, GiB per GPU" in printed and f"{held_out}: 5 problems x" in printed
    is_distilled = any("distill" in argument for argument in run)
    assert ("checked when the run starts" in printed) == is_distilled


def test_dry_run_detects_that_a_run_does_not_fit_on_the_machine(
    tmp_path, monkeypatch, priced_at_once, capsys
):
    monkeypatch.chdir(ROOT)
    own = [
        "--dataset",
        local("polaris"),
        "--eval.benchmark",
        local("aime24"),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    with pytest.raises(SystemExit):
        main(["train", *RUNS[3], *own, "--dry-run", "h100:gpus=4"])
    assert "training Qwen3-14B on 4 H100 needs" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_small_version_of_the_run_trains_end_to_end(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (small,) = commands("sparrow train")
    main(["train", *small, "--run-dir", str(tmp_path / "run")])
    steps = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(steps) == 2 and all(step["response"]["tokens"] > 0 for step in steps)
    assert (tmp_path / "run" / "adapter").is_dir() and (
        tmp_path / "run" / "model" / "config.json"
    ).exists()


@pytest.mark.slow
@pytest.mark.parametrize("run", commands("train"), ids=lambda run: run[run.index("--run-dir") + 1])
def test_small_version_of_each_training_run_works_on_five_rows(
    run, reading_checkpoint, small_pages, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    (name,) = parse(["train", *run]).dataset
    small = shrunk(
        run,
        reading_checkpoint,
        small_pages,
        "--engine",
        "hf",
        "--dataset",
        local(name),
        "--steps",
        "1",
        "--optimizer.precision",
        "fp32",
        "--rollout.prompts",
        "3",
        "--rollout.samples",
        "2",
        "--rollout.max-new-tokens",
        "12",
        "--run-dir",
        str(tmp_path / "run"),
        "--eval.every",
        "1",
        "--eval.benchmark",
        *map(local, parse(["train", *run]).eval.benchmark),
    )
    if "lossless" in small:
        small += ["--rollout.draft-schedule", small_pages]
    main(["train", *small])
    (step,) = (
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    )
    assert step["response"]["tokens"] >= 6 and (tmp_path / "run" / "model" / "config.json").exists()
    evaluated = [
        json.loads(line)
        for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in evaluated] == [0, 1] and (
        tmp_path / "run" / "exports" / "best"
    ).is_dir()
    assert ("drafts" in step) == ("lossless" in run) and ("distill" in step) == any(
        "distill" in arg for arg in run
    )
    sparse = "--schedule" in run
    assert (step["kv"]["read_fraction"] < 1) == (sparse or "lossless" in run)


@pytest.mark.slow
@pytest.mark.parametrize("command", commands("sparrow eval"), ids=lambda c: c[-1])
def test_small_version_of_each_evaluation_works_on_five_rows_of_each_benchmark(
    command, reading_checkpoint, small_pages, tmp_path
):
    assert parse(["eval", *command]).max_new_tokens in (16000, 36864)
    benchmarks = [part for part in command if part in FORMATS]
    small = shrunk(
        command,
        reading_checkpoint,
        small_pages,
        "--engine",
        "hf",
        "--precision",
        "fp32",
        "--k",
        "2",
        "--max-new-tokens",
        "8",
        "--out",
        str(tmp_path / "out"),
    )
    main(["eval", *small])
    table = (tmp_path / "out" / "results.md").read_text().splitlines()[2:]
    assert [line.split("|")[1].strip().partition(":")[0] for line in table] == benchmarks
    assert all(line.split("|")[3].strip() == "5" for line in table)


@pytest.mark.slow
def test_small_version_of_the_calibration_works_on_five_rows(
    peaked_checkpoint, small_pages, tmp_path
):
    (command,) = commands("sparrow calibrate")
    assert parse(["calibrate", *command]).max_new_tokens == 36864
    small = shrunk(
        command,
        peaked_checkpoint,
        small_pages,
        "--engine",
        "hf",
        "--precision",
        "fp32",
        "--count",
        "24",
        "--max-new-tokens",
        "24",
        "--top-n",
        "160",
        "--layout",
        small_pages,
        "--out",
        str(tmp_path / "schedule.json"),
    )
    main(["calibrate", *small])
    assert json.loads((tmp_path / "schedule.json").read_text())["bin_tokens"] == 512


@pytest.mark.parametrize(
    "command", commands("python recipes/paper/verl_math.py"), ids=lambda c: c[1]
)
def test_verl_data_files_can_be_written_from_five_rows(command, tmp_path):
    dataset, out = command[command.index("--dataset") + 1], tmp_path / "data" / "rows.parquet"
    recipe("verl_math").main(["--dataset", local(dataset), "--out", str(out)])
    rows = parquet.read_table(out).to_pylist()
    assert len(rows) == 5 and {row["data_source"] for row in rows} == {dataset}


def test_taco_is_filtered_as_in_code_r1(tmp_path, capsys):
    first, second, third, fourth, called = (
        json.loads(line) for line in (HUB / "taco.jsonl").read_text().splitlines()
    )
    second["question"] += (
        " The numbers of the second line stand on one line, with one space between each of them."
    )
    wrong = {**second, "input_output": json.dumps({"inputs": ["3\n5 1 9\n"], "outputs": ["9\n"]})}
    later = {**third, "solutions": json.dumps(["print(0)", *json.loads(third["solutions"])])}
    rows = [
        {**first, "source": "leetcode"},
        wrong,
        later,
        {**fourth, "question": fourth["question"] + "\n![pole](a.png)"},
        {**called, "question": called["question"][:99]},
        {**first, "input_output": "{}"},
        fourth,
    ]
    (tmp_path / "taco.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "data" / "taco.parquet"
    recipe("taco").main(["--path", str(tmp_path / "taco.jsonl"), "--out", str(out)])
    assert [row["question"] for row in parquet.read_table(out).to_pylist()] == [
        third["question"],
        fourth["question"],
    ]
    assert set(capsys.readouterr().out.splitlines()) == {
        "left out 1 rows without tests",
        "left out 1 rows from a badly formatted source",
        "left out 1 rows with an image",
        "left out 1 rows with too short a question",
        "left out 1 rows where none of the first 8 solutions passes",
        f"2 of 7 problems written to {out}",
    }
    kept: Any = load_problems(None, [f"taco:path={out}"], None)
    assert [problem.verify(problem.solution) for problem in kept] == [
        0.0,
        1.0,
    ]  # the first of its solutions is wrong


def test_verl_config_matches_the_settings_of_the_sparrow_trainer(monkeypatch):
    monkeypatch.chdir(ROOT)
    verl = yaml.safe_load((ROOT / "recipes" / "paper" / "verl.yaml").read_text())
    ours = parse(["train", "--model", "qwen3-14b", "--config", "recipes/paper/math.toml"])
    rollout, actor = verl["actor_rollout_ref"]["rollout"], verl["actor_rollout_ref"]["actor"]
    assert (
        verl["data"]["train_batch_size"] == ours.rollout.prompts
        and rollout["n"] == ours.rollout.samples
    )
    assert verl["data"]["max_response_length"] == ours.rollout.max_new_tokens
    assert float(actor["optim"]["lr"]) == ours.optimizer.learning_rate
    assert actor["optim"]["weight_decay"] == ours.optimizer.weight_decay
    assert actor["ppo_max_token_len_per_gpu"] == ours.optimizer.token_budget
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"]) == (
        ours.loss.clip_low,
        ours.loss.clip_high,
    )
    assert verl["algorithm"]["rollout_correction"]["rollout_is_threshold"] == ours.correction.cap
    gpus = cluster.Cluster(
        MACHINES["h200"], verl["trainer"]["nnodes"] * verl["trainer"]["n_gpus_per_node"]
    )
    memory = cluster.fit(
        SHAPES["qwen3-14b"], gpus, 40960, 40960, engine_share=rollout["gpu_memory_utilization"]
    )
    assert gpus.gpus == 32 and memory.full_responses >= 8


def test_verl_recipe_uses_sparrow_prompts_and_verifier():
    verl = recipe("verl_math")
    rows = verl.rows(local("polaris"))
    answer = rows[0]["reward_model"]["ground_truth"]
    assert rows[0]["data_source"] == "polaris" and rows[0]["prompt"][0]["content"].endswith(
        "within \\boxed{}."
    )
    assert verl.score("polaris", f"so \\boxed{{{answer}}}", answer) == 1.0
    assert verl.score("polaris", "so \\boxed{-17}", answer) == 0.0


def test_predicted_hours_match_the_cost_model():
    predicted = recipe("predicted")
    published = json.loads((ROOT / "benchmarks" / "results" / "paper_runs.json").read_text())
    assert [(run["run"], run["model"], run["gpus"]) for run in published] == predicted.RUNS
    found = predicted.predicted(*predicted.RUNS[-1])
    for part in ("hours", "step_s", "rollout_s", "training_gib", "full_responses", "mean_length"):
        assert found[part] == pytest.approx(published[-1][part], rel=1e-6)
    hours = next(run["hours"]["dense"] for run in published if run["gpus"] == 32)
    assert 0.7 * 190 < hours < 1.3 * 190  # the published dense 14B epoch


@pytest.mark.slow
def test_script_for_table_2_measures_every_mode_on_the_same_prompts(
    reading_checkpoint, tmp_path, capsys
):
    out = tmp_path / "table2.json"
    recipe("table2").main(
        [
            "--model",
            reading_checkpoint,
            "--schedule",
            "fixed:1",
            "--engine",
            "hf",
            "--precision",
            "fp32",
            "--samples",
            "2",
            "--benchmark",
            local("aime24"),
            "--max-new-tokens",
            "24",
            "--out",
            str(out),
        ]
    )
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["responses"] == 10 and set(result["modes"]) == {"dense", "lossy", "lossless"}
    assert all(mode["tokens"] > 0 and mode["seconds"] > 0 for mode in result["modes"].values())
    recipe("table2").main(["--table", str(out)])
    assert (
        printed == capsys.readouterr().out
        and "| (fixed:1)" not in printed
        and "(fixed:1) |" in printed
    )
