"""The command line: one thin function per subcommand, generated from dataclasses. Heavy imports live inside."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import tyro
from pydantic import Field

from sparrow import __version__, files
from sparrow.errors import ConfigError, SparrowError
from sparrow.mode import Mode
from sparrow.schedule import SparsitySchedule
from sparrow.settings import Count, CountOrZero, NotNegative, Positive, Probability, Seed, Settings, Share
from sparrow.train.config import DecodingOptions, TrainConfig

if TYPE_CHECKING:
    from sparrow.engines.base import Engine, Scorer
    from sparrow.mode import Decoding


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a model with GRPO on sparse rollouts. --config FILE takes any of these settings from a TOML file."""

    # A Hugging Face causal language model, by name or path; "reasoner" is the small one that comes with Sparrow.
    model: str = "reasoner"
    task: str | None = None  # A synthetic task with its options, such as trace:lines=24.
    # In place of a task: files of questions and answers, or known datasets with their options, such as
    # gsm8k:path=train.jsonl. Several are mixed, each drawn from as often as its option weight says (1).
    dataset: tuple[str, ...] = ()
    # What the actor may read: dense, fixed:PAGES, a published table such as qwen3-4b-0.86, or a JSON file. auto starts
    # dense and follows the measured p5 so that it holds tau; auto:SCHEDULE starts from any of these, in its layout.
    # With --rollout.mode lossless there is none.
    schedule: str = "dense"
    # What generates the rollouts: hf, vllm, vllm with options (vllm:gpu_memory_utilization=0.5), or http://host:port,
    # several of them with commas between.
    engine: str = "hf"


@dataclass(frozen=True)
class Demo(Settings):
    """Train the bundled reasoner on a CPU in about five minutes: sparse rollouts, dense policy, rising reward."""

    run_dir: str = "runs/demo"  # Where the run goes; must not exist yet.
    seed: Seed = 0  # Seeds the problems and the samples.
    steps: Count = 12  # Training steps.
    # lossy: under the schedule that comes with the reasoner. lossless: drafts read what that schedule says.
    mode: Mode = "lossy"


@dataclass(frozen=True, kw_only=True)
class Sampled(Settings):
    """What measuring, calibrating and evaluating have in common: a model and responses sampled from it."""

    model: str = "reasoner"  # A Hugging Face causal language model, by name or path.
    max_new_tokens: Count = 1024  # Responses are cut at this many tokens.
    precision: Literal["fp32", "bf16"] = "fp32"  # Weights are loaded, and forward passes run, in this precision.
    # What samples: hf, vllm, vllm with options (vllm:gpu_memory_utilization=0.5), or http://host:port.
    engine: str = "hf"
    seed: Seed = 0  # Seeds the samples.


@dataclass(frozen=True, kw_only=True)
class FromPrompts(Sampled):
    """What measuring and calibrating have in common."""

    # Prompts to sample from: a .jsonl file with a "prompt" field, or a text file with one prompt a line.
    prompts: str | None = None
    task: str | None = None  # Take the prompts from a synthetic task instead, such as trace:lines=24.
    # Softmax temperature of actor and policy alike; a greedy actor (0) has no acceptance rate.
    temperature: Positive = 1.0
    count: Count = 64  # Responses to sample; prompts are repeated as needed.
    # Length of the actor's lists of most likely tokens, which bound the acceptance rate; flat distributions need more.
    top_n: Count = 20


@dataclass(frozen=True, kw_only=True)
class Measure(DecodingOptions, FromPrompts):
    """Measure how far a model's sparse actor is from its dense policy, with error bars; or how lossless drafts fare."""

    # dense, fixed:PAGES, a published table such as qwen3-4b-0.86, or a JSON file; none with --mode lossless.
    schedule: str | None = None
    tau: Probability = 0.86  # The 5th percentile to compare with.
    out: str | None = None  # Write the whole report to this JSON file.


@dataclass(frozen=True, kw_only=True)
class Calibrate(FromPrompts):
    """Find the cheapest schedule whose p5 holds a target with confidence, in every length bin."""

    # The schedule, a JSON file; OUT.work/ beside it keeps what was measured, so that a second call goes on from it.
    out: str
    target: Probability = 0.86  # What the lower end of p5's 95 % interval must reach.
    # Top-k pages to try first, at every length; no bin gets fewer than the smallest.
    budgets: Annotated[tuple[CountOrZero, ...], Field(min_length=1)] = (5, 13, 29, 61, 125, 253, 509)
    # Passes after those, at most: each tries the next budget of every length bin that is not settled.
    refine: CountOrZero = 3
    # Rounds that sample under the schedule found so far and search again; only the last takes all prompts.
    on_policy: CountOrZero = 2
    # A schedule to take page size, bin width and dense layers from; if it is sparse, the first responses' too.
    layout: str = "dense"


@dataclass(frozen=True, kw_only=True)
class Eval(DecodingOptions, Sampled):
    """Evaluate a model: mean@k, pass@k and majority@k with intervals, dense and sparse side by side, or in one mode."""

    # Tasks (trace:lines=24) or datasets (aime24, gsm8k:path=test.jsonl).
    benchmark: Annotated[tuple[str, ...], Field(min_length=1)]
    out: str  # Folder for the samples; a second call goes on from those it finds there.
    # A function of your own that judges in place of the datasets' verifiers, module:function.
    reward: str | None = None
    # Evaluate the sparse actor under this schedule too, beside the dense model; with --mode lossy, that alone.
    schedule: str | None = None
    temperature: NotNegative = 1.0  # Sampling temperature; 0 is greedy.
    k: Count = 16  # Responses per problem.
    limit: Count = 64  # Problems per benchmark; a task has as many as are asked for.


@dataclass(frozen=True)
class Cost(Settings):
    """Predict what each mode buys on a named GPU: rollout and step time, dense, lossy under a schedule, lossless."""

    model: str  # qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b; or a model by hub name, or its config.json.
    schedule: str  # fixed:PAGES, a published table such as qwen3-4b-0.86, or a JSON file.
    gpu: Literal["a100", "h100", "h200", "b200"] = "h200"  # The machine.
    gpus: Count = 1  # How many of them; more than one are planned as a whole: memory, and a step split into its phases.
    tensor_parallel: Count = 1  # GPUs of one engine.
    responses: Count = 240  # Responses of a rollout, over all GPUs.
    samples: Count = 8  # Responses to one prompt.
    examples: Count | None = None  # Prompts of the whole run, to tell its hours on several GPUs.
    median: Positive = 14000  # Median response length in tokens; lengths are log-normal.
    cutoff: Count = 32768  # Longest response in tokens.
    prompt: Count = 256  # Prompt length in tokens.
    max_batch: Count = 256  # Sequences decoded together at most.
    # Lossless: mean acceptance of drafts that read 1,024 tokens, as sparrow measure --mode lossless finds it; for other
    # budgets the rejected share is taken to fall as their power -0.7.
    acceptance: Probability = 0.94
    # Share of a dense step's time that is rollout, where it is known; unset: training is priced by its FLOPs.
    rollout_share: Share | None = None


@dataclass(frozen=True)
class Report(Settings):
    """Draw a run as figures and one self-contained HTML page, or a calibrated schedule as a figure."""

    path: Annotated[Path, tyro.conf.Positional]  # A run directory, or a schedule from sparrow calibrate.


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``sparrow``; exits with 1 and one sentence on a SparrowError or OSError, with 130 on Ctrl-C."""
    # Idle OpenMP threads must not spin: on a CPU shared with anything else that costs several times the work itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    command: Any = None
    try:
        command = _parse(list(sys.argv[1:] if argv is None else argv))
        COMMANDS[type(command)](command)
    except SparrowError as error:
        _stop(error, code=1)
    except BrokenPipeError:  # whoever read the output has seen enough; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _stop(f"{where}{error.strerror or error}; make room, or choose another path", code=1)
    except KeyboardInterrupt:
        _stop(_interrupted(command), code=130)


def _interrupted(command: object) -> str:
    """What is left of an interrupted command, and how to go on."""
    if isinstance(command, Train | Demo):
        if not any(Path(command.run_dir, "checkpoints").glob("step-*")):
            return f"interrupted before the first checkpoint; remove {command.run_dir} to start again"
        return f"interrupted; 'sparrow train --resume --run-dir {command.run_dir}' goes on from the last checkpoint"
    if isinstance(command, Calibrate | Eval):
        return "interrupted; the same command goes on from what is done"
    return "interrupted"


def _stop(reason: object, code: int) -> NoReturn:
    from sparrow.terminal import complain

    complain(str(reason))
    sys.exit(code)


def _parse(argv: list[str]) -> Any:
    """Arguments to one of the dataclasses; ``--config FILE`` stands for the options that the TOML file has."""
    if argv[:1] == ["--version"]:
        print(f"sparrow {__version__}")
        sys.exit(0)
    argv = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    if "--config" in argv:
        at = argv.index("--config")
        if at + 1 == len(argv):
            raise ConfigError("--config needs a TOML file with the settings of 'sparrow train'")
        # First, so that options on the command line win.
        argv = [*argv[:1], *_read_config(Path(argv[at + 1])), *argv[1:at], *argv[at + 2 :]]
        if "--config" in argv:
            raise ConfigError("--config stands there twice; give one TOML file")
    if argv[:1] == ["train"] and [a for a in argv if a in ("--resume", "--no-resume")][-1:] == ["--resume"]:
        argv = ["train", *_read_recorded(argv), *argv[1:]]
    try:
        return tyro.cli(
            Demo | Train | Measure | Calibrate | Eval | Cost | Report,
            args=argv,
            prog="sparrow",
            description="RL rollouts with sparse attention, fast, without breaking the training. --version prints the "
            "version; --tyro-print-completion SHELL prints completions for bash, zsh or tcsh.",
            config=(tyro.conf.ConsolidateSubcommandArgs,),
        )
    except ConfigError as error:  # an option out of range
        _stop(error, code=2)


def _options(table: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Nested settings as they stand on a command line."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _options(value, f"{section}{key}.")
            continue
        flag = f"--{section}{'no-' if value is False else ''}{key.replace('_', '-')}"
        if isinstance(value, bool):
            yield flag
        elif isinstance(value, list):
            yield from (flag, *map(str, value))
        else:
            yield f"{flag}={value}"  # a value may begin with dashes


def _read_config(path: Path) -> list[str]:
    try:
        return list(_options(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error


def _read_recorded(argv: Sequence[str]) -> list[str]:
    """The settings of the run that is resumed, as it recorded them: what the command line leaves out is as it was."""
    from sparrow.run import RunConfig

    run_dir = TrainConfig.run_dir
    for argument, following in itertools.zip_longest(argv, argv[1:]):
        name, equals, value = argument.partition("=")
        if name in ("--run-dir", "--run_dir") and (equals or following):
            run_dir = value if equals else following
    return list(_options(_known(RunConfig.load(Path(run_dir)).train, Train)))


def _known(recorded: Mapping[str, Any], settings: type) -> dict[str, Any]:
    """The recorded settings that still exist and were set; an older Sparrow may have had others."""
    found = {}
    for setting in fields(settings):
        value = recorded.get(setting.name)
        if isinstance(value, dict):
            value = _known(value, type(setting.default))
        if setting.name not in ("run_dir", "resume") and value not in (None, [], {}):
            found[setting.name] = value
    return found


def demo(command: Demo) -> None:
    folder, steps = resources.files("sparrow") / "reasoner", str(command.steps)
    table = f"{folder}/demo_schedule.json"
    how = {
        "dense": ["--rollout.mode", "dense"],
        "lossy": ["--schedule", table],
        "lossless": ["--rollout.mode", "lossless", "--rollout.draft-schedule", table, "--rollout.draft-tokens", "4"],
    }
    settings = ["--config", f"{folder}/demo.toml", *how[command.mode]]
    length = ["--seed", str(command.seed), "--steps", steps, "--save-every", steps]
    train(_parse(["train", *settings, *length, "--run-dir", command.run_dir]))


def train(command: Train) -> None:
    from accelerate import PartialState

    from sparrow.loading import load_model, load_problems, prompt_room
    from sparrow.report import summary_rows
    from sparrow.terminal import Progress, print_rows, say, status
    from sparrow.train.trackers import check_trackers
    from sparrow.train.trainer import Trainer

    check_trackers(command.trackers)
    decoding = command.rollout.decoding(command.schedule)
    closed_loop = re.match(r"auto(:|$)", command.schedule) is not None
    files.check_folder(command.run_dir)
    # Schedulers, and launchers whose other process died, end a run this way: as good a reason to save as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Every process takes its shards from weights it has loaded itself; transformers would leave all but one's empty.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    main_process = PartialState().is_main_process
    with status(f"loading {command.model}", main_process) as shown:
        model, tokenizer = load_model(command.model)
        room = prompt_room(model, command.engine, command.rollout.max_new_tokens)
        shown.update(f"reading {command.task or ', '.join(command.dataset)}")
        task = load_problems(command.task, command.dataset, tokenizer, room, command.reward.function)
        shown.update(f"starting the engine {command.engine}")
        engine = _start_engine(command, model, tokenizer, decoding)
    with Progress(command.steps, shown=main_process) as progress:
        try:
            Trainer(command, model, tokenizer, task, engine, decoding.schedule, progress, closed_loop).train()
        finally:
            engine.close()
    PartialState().destroy_process_group()
    if main_process:
        print_rows(f"run {command.run_dir}", summary_rows(command.run_dir))
        say(f"figures: sparrow report {command.run_dir}")


def _start_engine(command: Train, model: Any, tokenizer: Any, decoding: Decoding) -> Engine:
    from sparrow.loading import load_engine
    from sparrow.train.ranks import asked_to_shard

    # A distilled actor has weights of its own, and sharded ones need all processes; otherwise they are shared.
    own = command.distill.enabled or asked_to_shard()
    actor = copy.deepcopy(model) if own and command.engine == "hf" else model
    return load_engine(command.engine, command.model, actor, tokenizer, decoding, command.optimizer.precision)


def measure(command: Measure) -> None:
    from sparrow.measure import left_open, measure, pool
    from sparrow.rollout import Sampling
    from sparrow.terminal import print_drafts, print_mismatch, say, status

    if command.schedule is None and command.mode in (None, "lossy"):
        raise ConfigError("say what to measure: give --schedule, or --mode lossless (how drafts fare), or --mode dense")
    decoding = command.decoding(command.schedule)
    schedule = decoding.schedule
    if command.out:
        files.check_file(command.out)
    engine, scorer, prompts = _load_sampler(command, decoding)
    sampling = Sampling(command.max_new_tokens, command.temperature, command.top_n, seed=command.seed)
    with status(f"sampling and scoring {len(prompts)} responses"):
        found = pool(measure(engine, scorer, prompts, sampling, schedule), schedule.bin_tokens, command.seed)
    counters = engine.counters()
    engine.close()
    drafts = counters.to_dict().get("drafts")
    print_mismatch(found, command.tau, counters.read_fraction)
    if drafts:
        print_drafts(drafts)
    if note := left_open(found.bins, command.tau, command.top_n, "--top-n"):
        say(note)
    if command.out:
        report = found.to_dict() | ({"drafts": drafts} if drafts else {})
        files.write_text(Path(command.out), json.dumps(report, indent=1))


def calibrate(command: Calibrate) -> None:
    from datetime import date

    from sparrow.measure import calibrate_engine
    from sparrow.mode import Decoding
    from sparrow.rollout import Sampling
    from sparrow.terminal import CalibrationProgress, print_calibration

    layout = SparsitySchedule.load(command.layout)
    out = files.check_file(command.out)
    work = files.check_folder(out.with_name(out.name + ".work"))
    engine, scorer, prompts = _load_sampler(command, Decoding.lossy(layout))
    source = {"model": command.model, "prompts": command.prompts or command.task, "temperature": command.temperature}
    with CalibrationProgress() as progress:
        found = calibrate_engine(
            engine,
            scorer,
            prompts,
            Sampling(command.max_new_tokens, command.temperature, command.top_n, seed=command.seed),
            work,
            budgets=command.budgets,
            target=command.target,
            layout=layout,
            refine=command.refine,
            on_policy=command.on_policy,
            provenance={**source, "date": date.today().isoformat(), "version": __version__},
            listener=progress,
        )
    engine.close()
    print_calibration(found, command.target, out)
    files.write_text(out, found.schedule.to_json())


def evaluate(command: Eval) -> None:
    from sparrow.benchmark import markdown_table, run_benchmark, weights_digest
    from sparrow.loading import load_benchmark, load_engine, load_model, prompt_room
    from sparrow.rollout import Sampling
    from sparrow.terminal import say, status

    decoding = command.decoding(command.schedule)
    schedules = {command.schedule or decoding.mode: decoding.schedule}
    if command.mode is None:
        schedules = {"dense": SparsitySchedule.dense(), **schedules}
        decoding = decoding.with_schedule(schedules["dense"])
    folder = files.check_folder(command.out)
    sampling = Sampling(command.max_new_tokens, command.temperature, top_n=0, seed=command.seed)
    results = []
    with status(f"loading {command.model}") as shown:
        model, tokenizer = load_model(command.model, command.precision)
        room = prompt_room(model, command.engine, command.max_new_tokens)
        benchmarks = {
            name: load_benchmark(name, command.limit, tokenizer, room, command.reward) for name in command.benchmark
        }
        shown.update(f"starting the engine {command.engine}")
        engine = load_engine(command.engine, command.model, model, tokenizer, decoding, command.precision)
        made_by = {
            "model": command.model, "weights": weights_digest(model), "engine": command.engine,
            "precision": command.precision, "reward": command.reward,
        }  # fmt: skip
        for name, problems in benchmarks.items():
            for label, schedule in schedules.items():
                shown.update(f"{name}, {label}")
                engine.set_schedule(schedule)
                source: dict[str, Any] = {**made_by, "schedule": {**schedule.to_dict(), "provenance": None}}
                if decoding.mode == "lossless":
                    source |= {"draft_tokens": decoding.draft_tokens, "adapt": decoding.adapt_draft_tokens}
                results.append(
                    run_benchmark(engine, tokenizer, problems, sampling, command.k, folder, name, label, source)
                )
    engine.close()
    table = markdown_table(results)
    say(table)
    files.write_text(folder / "results.md", table)


def cost(command: Cost) -> None:
    from sparrow import cluster
    from sparrow import cost as one_gpu
    from sparrow.cost import MACHINES, SHAPES, ModelShape
    from sparrow.cost_lossless import predict_lossless
    from sparrow.cost_lossless import rows as lossless_rows
    from sparrow.terminal import print_rows

    if command.model in SHAPES:
        shape = SHAPES[command.model]
    elif Path(command.model).exists():
        shape = ModelShape.from_config(command.model)
    else:
        from sparrow.engines.hf import load_config

        shape = ModelShape.from_config(load_config(command.model))
    lengths = one_gpu.response_lengths(command.median, command.cutoff, command.responses)
    schedule, machine = SparsitySchedule.load(command.schedule), MACHINES[command.gpu]
    batching = (command.prompt, command.max_batch)
    if command.gpus > 1:
        gpus = cluster.Cluster(machine, command.gpus, command.tensor_parallel)
        whole = cluster.plan(shape, gpus, lengths, schedule, *batching)
        steps = None if command.examples is None else command.examples * command.samples // command.responses
        rows = cluster.rows(whole, steps)
    else:
        share = command.rollout_share
        lossy = one_gpu.predict(shape, machine, lengths, schedule, *batching, rollout_share=share)
        lossless = predict_lossless(shape, machine, lengths, lossy.dense, command.acceptance, *batching)
        rows = lossless_rows(lossy, lossless)
    machines = f"{command.gpus} {command.gpu.upper()}"
    responses = f"{command.responses} responses of {lengths.mean():,.0f} tokens"
    print_rows(f"{command.model} on {machines}, {responses}, {command.schedule}", rows)


def report(command: Report) -> None:
    from sparrow.report import draw_calibration, write_report
    from sparrow.terminal import say

    drawn = draw_calibration(command.path) if command.path.is_file() else write_report(command.path)
    say(f"wrote {drawn}")


def _load_sampler(command: FromPrompts, decoding: Decoding) -> tuple[Engine, Scorer, list[list[int]]]:
    """An engine that samples as the command says, transformers to score, and the prompts as token ids."""
    from sparrow.loading import encode_prompts, load_engine, load_model, load_scorer, prompt_room, read_prompts
    from sparrow.terminal import status

    named = read_prompts(command.prompts, command.task, command.count, command.seed)
    with status(f"loading {command.model}") as shown:
        model, tokenizer = load_model(command.model, command.precision)
        room = prompt_room(model, command.engine, command.max_new_tokens)
        prompts = encode_prompts(named, command.count, tokenizer, room)
        loaded = model, tokenizer, decoding, command.precision
        scorer = load_scorer(*loaded)
        shown.update(f"starting the engine {command.engine}")
        engine = scorer if command.engine == "hf" else load_engine(command.engine, command.model, *loaded)
    return engine, scorer, prompts


COMMANDS: dict[type, Callable[[Any], None]] = {
    Demo: demo,
    Train: train,
    Measure: measure,
    Calibrate: calibrate,
    Eval: evaluate,
    Cost: cost,
    Report: report,
}


if __name__ == "__main__":
    main()
