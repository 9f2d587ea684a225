"""Code shared by studies of many training runs: sharing GPUs between runs, calibrating schedules,
and logging every run.

A run's log is ``OUT/NAME.jsonl``. Its first line contains the run's settings, its second line the
policy's held-out score before training, and its last line the reason why the run ended. In between,
there is one line per step. Runs that already have a log are skipped, so a study can be spread over
several calls. Torch is imported late, in each run's own process, once it has selected its GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

PERCENTILES = (1, 5, 10)
HELD_OUT = 10**9
"""First seed for held-out problems, which no run trains on."""
ENOUGH = 0.65
"""A run cut off by the deadline still counts if it completed about this fraction of its steps."""


def run_study(
    options: Any,
    arms: Iterable[str],
    train: Callable[..., None],
    calibrate: Callable[..., dict[str, list[int]]],
    is_calibrated: Callable[[str], bool],
) -> None:
    """Calibrate schedules if necessary, then keep all slots on all GPUs busy until all runs are
    done or time is up.

    Args:
        options: has ``out``, ``runs``, ``seeds``, ``seconds`` and ``slots``, as described in the
            studies.
        train: performs a run; called with the options, the run's arm and seed, the device, the
            deadline and the path of its log.
        calibrate: makes the tables in ``OUT/schedules.json``; called with the options and the
            device.
        is_calibrated: returns whether an arm follows one of these tables.
    """
    deadline = time.time() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.runs or tuple(f"{arm}-{seed}" for seed in options.seeds for arm in arms)
    jobs = [name for name in names if not (options.out / f"{name}.jsonl").exists()]
    needed = not schedules(options).exists() and any(
        is_calibrated(name.rpartition("-")[0]) for name in jobs
    )
    first = partial(write_schedules, options, calibrate) if needed else None
    side_by_side(jobs, options.slots, deadline, partial(run, options, train), first)


def schedules(options: Any) -> Path:
    """Return the path to the calibrated tables."""
    return options.out / "schedules.json"


def write_schedules(options: Any, calibrate: Callable[..., dict[str, list[int]]]) -> None:
    tables = calibrate(options, use_gpu(0))
    schedules(options).write_text(json.dumps(tables), encoding="utf-8")


def run(options: Any, train: Callable[..., None], name: str, gpu: int, deadline: float) -> None:
    """Perform the run ARM-SEED in this process."""
    arm, _, seed = name.rpartition("-")
    device, path = use_gpu(gpu), options.out / f"{name}.jsonl"
    logged(path, lambda: train(options, arm, int(seed), device, deadline, path))


def side_by_side(
    names: Sequence[str],
    slots: Sequence[int],
    deadline: float,
    run: Callable[[str, int, float], None],
    first: Callable[[], None] | None = None,
) -> None:
    """Keep all slots on all GPUs busy until all runs are done or time is up.

    Args:
        names: the runs, in order.
        slots: concurrent runs on each GPU, or on the CPU if there is no GPU.
        deadline: when to stop (a ``time.time`` value); a run starts only if it is expected to get
            far enough by then.
        run: called in a separate process with the run's name, its GPU and the deadline; must be
            picklable.
        first: called once before any run, also in a separate process; must be picklable.

    Raises RuntimeError if ``first`` failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["graph_engine", "sparrow.train.trainer", "sparrow.rewards"])
    jobs = list(names)
    if first:
        before = context.Process(target=first)
        before.start()
        before.join()
        if before.exitcode:
            raise RuntimeError(
                f"the preparation failed with exit code {before.exitcode}, so no run was started; see its error"
            )
    free_gpus = [
        gpu for turn in range(max(slots)) for gpu, count in enumerate(slots) if turn < count
    ]
    running: list[tuple[Any, int, float]] = []
    # duration of the longest run so far, to avoid starting runs that wouldn't get far enough
    took = 0.0
    while (jobs and time.time() + ENOUGH * took < deadline) or running:
        for process, gpu, began in [r for r in running if not r[0].is_alive()]:
            running.remove((process, gpu, began))
            free_gpus.append(gpu)
            took = max(took, time.time() - began)
        while jobs and free_gpus and time.time() + ENOUGH * took < deadline:
            gpu = free_gpus.pop(0)
            process = context.Process(target=run, args=(jobs.pop(0), gpu, deadline))
            process.start()
            running.append((process, gpu, time.time()))
        time.sleep(0.2)


def use_gpu(index: int) -> Any:
    """Select this process's device; must be called before anything initialises CUDA."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = given.split(",")[index] if given else str(index)
    import torch

    torch.set_num_threads(1)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def logged(path: Path, train: Callable[[], None]) -> None:
    """Run ``train``, which writes to ``path``, and record why it ended in the log's last line."""
    try:
        train()
        ended = "done"
    except TimeoutError:
        ended = "time is over"
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
        path.with_suffix(".error.txt").write_text(traceback.format_exc(), encoding="utf-8")
    write(path, {"ended": ended})


def plain_options(options: Any) -> dict[str, Any]:
    """Return a study's options as plain JSON types."""
    return json.loads(json.dumps(asdict(options), default=str))


def mean_reward(engine: Any, tokenizer: Any, problems: Sequence[Any], sampling: Any) -> float:
    """Return the mean reward of ``engine``'s responses to problems, and reset the engine's
    counters.
    """
    prompts = tokenizer([p.prompt for p in problems], add_special_tokens=False)["input_ids"]
    rollouts = engine.generate(prompts, sampling)
    engine.counters()  # reset, since these tokens don't belong to training
    texts = tokenizer.batch_decode([r.response_ids for r in rollouts], skip_special_tokens=True)
    return float(np.mean([p.verify(text) for p, text in zip(problems, texts, strict=True)]))


def write(path: Path, row: dict[str, Any]) -> None:
    """Append a line."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def calibrated(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Any,
    layout: Any,
    targets: Sequence[float],
    budgets: Sequence[int],
) -> dict[str, list[int]]:
    """Return the cheapest table for each p5 target, by name (such as ``p86``). All tables are
    calibrated on the same dense trajectories.

    Responses longer than the trajectories have failed anyway. Beyond the last bin, they read as
    many pages as in that bin.

    Raises ConfigError if no budget meets a target.
    """
    from sparrow.calibrate import Acceptance, calibrate
    from sparrow.calibrate.trajectories import Trajectories
    from sparrow.errors import ConfigError
    from sparrow.mismatch.tokens import flatten
    from sparrow.schedule import SparsitySchedule

    measured: dict[SparsitySchedule, Acceptance] = {}
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        trajectories = Trajectories(engine, engine, prompts, sampling, Path(folder), layout)

        def measure(schedule: SparsitySchedule) -> Acceptance:
            if schedule not in measured:
                lower, _, position, sequence = flatten(trajectories.acceptance(schedule))
                measured[schedule] = Acceptance(lower, position, sequence)
            return measured[schedule]

        trials = [layout.replace(top_k=(k,)) for k in sorted(set(budgets))]
        for target in targets:
            schedule = calibrate(measure, trials, target, min(budgets), refine=2).schedule
            if schedule.is_dense:
                raise ConfigError(
                    f"no budget up to {max(budgets)} pages reaches a p5 of {target:g}; try larger ones"
                )
            tables[f"p{100 * target:.0f}"] = list(schedule.top_k[:-1])
    return tables


def train_logged(
    path: Path,
    start: dict[str, Any],
    held_out: Callable[[], float],
    every: int,
    deadline: float,
    *trainer: Any,
    closed_loop: bool = False,
    dial: Any = None,
    after: Callable[[Any], None] = lambda trainer: None,
    judge_cut_off: bool = False,
) -> None:
    """Train, and write the log: ``start``, then the steps.

    Args:
        held_out: measures the policy's held-out score; called at the start, after every ``every``
            steps and at the end.
        deadline: no step begins after this time (a ``time.time`` value).
        trainer: config, model, tokenizer, task, engine and schedule; passed to ``Trainer``, like
            the next two arguments.
        after: called with the trainer after each step, once its log has been written.
        judge_cut_off: whether to measure the held-out score if the deadline ends the run.

    Raises TimeoutError if the deadline has passed, or TrainingDiverged as in ``Trainer``; the
    policy is evaluated before the error is raised.
    """
    from sparrow.errors import TrainingDiverged
    from sparrow.mismatch import split_by_bin
    from sparrow.train.trainer import Trainer

    tail: dict[str, Any] = {}

    def listener(event: str, metrics: dict[str, Any]) -> None:
        if event != "step":
            return
        step = metrics["step"]
        is_over = time.time() > deadline
        evaluate = step % every == 0 or step == runner.config.steps or (is_over and judge_cut_off)
        write(
            path,
            condensed(metrics, tail) | ({"held_out": {"policy": held_out()}} if evaluate else {}),
        )
        after(runner)
        if is_over:
            raise TimeoutError

    def recorded(experience: Any, schedule: Any) -> Any:
        """Return the learner's assessment, and also record acceptance ``PERCENTILES``, overall and
        per length bin.
        """
        result = assess(experience, schedule)
        lower = np.concatenate([a.lower for a in result[0].acceptances])
        # the length used by the schedule, as in ``token_acceptance``
        cached = [len(r.prompt_ids) + np.arange(len(r)) for r in experience.rollouts]
        position = schedule.page_end(np.concatenate(cached))
        bins = [(b, lower[tokens]) for b, tokens in split_by_bin(position, schedule.bin_tokens)]
        tail["all"] = np.percentile(lower, PERCENTILES).tolist()
        tail["bins"] = [[b, x.size, x.mean(), *np.percentile(x, PERCENTILES)] for b, x in bins]
        return result

    runner = Trainer(*trainer, listener, closed_loop, dial)
    assess, runner.learner.assess = runner.learner.assess, recorded
    write(path, start)
    write(path, {"step": 0, "held_out": {"policy": held_out()}})
    try:
        runner.train()
    except TrainingDiverged:
        write(path, {"step": runner.step, "held_out": {"policy": held_out()}})
        raise


def condensed(metrics: dict[str, Any], tail: dict[str, Any]) -> dict[str, Any]:
    """Return the step metrics that a study needs, and the recorded percentiles."""
    return {
        "step": metrics["step"],
        "reward": metrics["reward"]["mean"],
        "length": metrics["response"]["mean"],
        "ended": metrics["response"]["ended_fraction"],
        "entropy": metrics["entropy"],
        "mean": metrics["mismatch"]["mean"],
        "tail": _rounded(tail["all"]),
        "bins": _rounded(tail["bins"]),
        "p5_interval": _rounded(
            [
                [b["bin"], b["lower_bound"], b["interval_low"], b["interval_high"]]
                for b in metrics["mismatch"]["bins"]
            ]
        ),
        "kl": metrics["correction"]["kl_k3"],
        "ess": metrics["correction"]["ess_token"],
        "grad_norm": metrics["loss"]["grad_norm"],
        "read": metrics["kv"]["read_fraction"],
        "top_k": metrics["schedule"]["top_k"],
        "seconds": _rounded(list(metrics["seconds"].values()), 2),
        **(
            {"tokens_per_cycle": round(metrics["drafts"]["tokens_per_cycle"], 3)}
            if "drafts" in metrics
            else {}
        ),
        **({"dial": metrics["dial"]} if "dial" in metrics else {}),
    }


def _rounded(values: Any, digits: int = 4) -> Any:
    if isinstance(values, float):
        return round(values, digits)
    return [_rounded(v, digits) for v in values] if isinstance(values, Iterable) else values
