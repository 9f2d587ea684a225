"""``sparrow train --dry-run MACHINE``: check a run and predict its memory and time without loading
the model.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparrow.decoding import Decoding
from sparrow.engines.registry import parse_engine
from sparrow.errors import ConfigError, SparrowError
from sparrow.settings import Count, Positive, Probability, Settings, parse_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sparrow.cli.commands.train_options import TrainOptions
    from sparrow.cost import ModelShape
    from sparrow.cost.cluster import Cluster

PROMPT = 256  # assumed tokens per prompt; a dry run does not tokenize prompts
TYPICAL = 0.43  # default ratio of the median response length to the cutoff: 14,000 / 32,768
Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Target(Settings):
    """The machine to predict for, and values that a dry run has to assume."""

    gpu: Literal["a100", "h100", "h200", "b200"]
    gpus: Count = 1
    median: Positive | None = None  # response length in tokens
    acceptance: Probability = 0.94  # acceptance of lossless drafts that read 1,024 tokens


def dry_run(command: TrainOptions) -> None:
    """Check a run and print predictions. Only the data is loaded, and nothing is written.

    Raises ConfigError if the run would fail; the message has one sentence for each problem.
    """
    from sparrow.cli.commands.cost import find_shape, is_known
    from sparrow.cli.loading import (
        load_benchmarks,
        load_problems,
        model_path,
        prompt_room,
    )
    from sparrow.cli.terminal import print_rows
    from sparrow.cost import MACHINES
    from sparrow.cost.cluster import Cluster
    from sparrow.run import RunDir
    from sparrow.train.trackers import check_trackers

    name, options = parse_spec(command.dry_run or "")
    try:
        target = Target(name, **options)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"dry_run is {command.dry_run!r}, expected a GPU with options, "
            "such as h200:gpus=8,median=9000"
        ) from error
    # Raise early for an unknown engine, or every later check would report it again.
    parse_engine(command.engine)
    problems: list[str] = []
    rows: Rows = []

    @contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except SparrowError as error:
            if str(error) not in problems:  # the same limit may stop training and evaluation
                problems.append(str(error))

    decoding = Decoding.lossy("dense")
    shape = None
    room = None
    cluster = None
    with noting():
        decoding = command.rollout.decoding(command.schedule)
    with noting():
        command.chat.read_template()
    with noting():
        check_trackers(command.trackers)
    with noting():
        RunDir(command.run_dir, command.resume).check_files()
    with noting():
        shape = find_shape(model_path(command.model))
        rows.append(
            ("model", f"{shape.name}, {(shape.weights + shape.embedding) / 1e9:.2f}B parameters")
        )
        decoding.schedule.check_model(shape.layers, shape.kv_heads)
        room = prompt_room(shape.context, command.engine, command.rollout.max_new_tokens)
        rows.append(
            (
                "context",
                f"{command.rollout.max_new_tokens:,} tokens for the response, {room:,} left "
                "for the prompt",
            )
        )
    if is_known(command.model):  # only the model's shape is known, not the names of its layers
        if command.lora.r is not None or command.distill.enabled:
            rows.append(("LoRA", "rank and layers are checked when the run starts"))
    else:
        with noting():
            command.check_loras()
    with noting():
        task: Any = load_problems(
            command.task, command.dataset, None, room, command.reward.function, command.chat
        )
        size = (
            f"{len(task):,} problems"
            if hasattr(task, "__len__")
            else "an endless stream of problems"
        )
        rows.append(
            (
                "data",
                f"{command.task or ' '.join(command.dataset)}: {size}; prompts were not tokenized",
            )
        )
    with noting():
        if shape is not None:
            limit = command.eval.max_new_tokens or command.rollout.max_new_tokens
            held = load_benchmarks(
                command.eval.benchmark,
                command.eval.limit,
                None,
                prompt_room(shape.context, command.engine, limit),
                command.reward.function,
            )
            rows += [
                (
                    "evaluation",
                    f"{name}: {len(asked)} problems x {command.eval.k}; the time for this is "
                    "not predicted",
                )
                for name, asked in held.items()
            ]
    with noting():
        cluster = Cluster(MACHINES[target.gpu], target.gpus)
        _check_launch(command, cluster)
    if shape is not None and cluster is not None:
        with noting():
            rows += _predicted(command, target, decoding, shape, cluster)
    print_rows(f"dry run of {command.run_dir} on {target.gpus} {target.gpu.upper()}", rows)
    if problems:
        raise ConfigError("\n".join(problems))


def _check_launch(command: TrainOptions, cluster: Cluster) -> None:
    """Check the machine, the engine and the precision.

    Raises ConfigError if this trainer can't run on the machine, or there are no predictions for the
    engine or precision.
    """
    if cluster.gpus > cluster.host:
        raise ConfigError(
            f"{cluster.gpus} GPUs need several machines, but this trainer runs on one machine "
            f"with at most {cluster.host} GPUs; use verl, with Sparrow for its rollouts"
        )
    if not parse_engine(command.engine).kind.predicted:
        raise ConfigError(
            f"engine is {command.engine!r}, which a dry run cannot predict; "
            "use vllm, as in engine='vllm:gpu_memory_utilization=0.8'"
        )
    if command.optimizer.precision == "fp32":
        raise ConfigError(
            "optimizer.precision is 'fp32', which a dry run cannot predict; set it to bf16"
        )


def _predicted(
    command: TrainOptions, target: Target, decoding: Decoding, shape: ModelShape, cluster: Cluster
) -> Rows:
    """Predict memory, step times and hours for the whole run.

    Raises ConfigError if the run does not fit in memory.
    """
    from sparrow.cost import cluster as planning
    from sparrow.cost import response_lengths

    rollout = command.rollout
    optimizer = command.optimizer
    engine = parse_engine(command.engine)
    options = engine.options
    share = options.get("gpu_memory_utilization", planning.VLLM_SHARE)
    cutoff = rollout.max_new_tokens
    lengths = response_lengths(
        target.median or TYPICAL * cutoff, cutoff, rollout.prompts * rollout.samples
    )
    plan = planning.plan(
        shape,
        cluster,
        lengths,
        decoding.schedule if decoding.mode == "lossy" else None,
        PROMPT,
        options.get("max_num_seqs", 256),
        optimizer.token_budget,
        engine.kind.colocated,
        recompute=optimizer.gradient_checkpointing,
        engine_share=share,
        acceptance=target.acceptance if decoding.is_lossless else None,
    )
    batch = (
        f"{rollout.prompts} prompts x {rollout.samples} responses of {lengths.mean():,.0f} tokens "
        "on average"
    )
    run = f"{command.steps:,} steps, {command.steps * rollout.prompts:,} prompts"
    return [("a step has", batch), *planning.rows(plan, command.steps), ("the run has", run)]
