"""DistillSparse on the small reasoner under GRPO: what an adapter does to the tail of a cheap schedule.

A cheap schedule has a p5 of about 0.80 on what the untrained model's actor samples under it, a dearer one 0.87. For
several seeds the same GRPO run is done with and without distillation under the cheap one:

- ``none``: no adapter;
- ``full``: PPO and KL on every position;
- ``kl``: KL alone;
- ``worst``: PPO and KL on the worst-aligned quarter of the positions;
- ``switch``: as ``full``, but from the dearer schedule on, moving to the cheap one once its p5 surely holds 0.86.

At the end, actor and policy answer held-out problems, the actor with its adapter and without: the policy grows surer
while it trains, which raises p5 by itself, and only the difference is the adapter's.

    python recipes/distill_study.py --folder runs/distill --engine vllm --processes 16   # 4 GPUs, about five minutes
    python recipes/distill_study.py --folder runs/distill --processes 0                  # only gather what is there
"""

from __future__ import annotations

import copy
import json
import os
import platform
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

import sparrow
from sparrow.schedule import ALL_PAGES, SparsitySchedule
from sparrow.train.config import DistillConfig, LossConfig, OptimizerConfig, RolloutConfig, TrainConfig

ARMS = {
    "none": DistillConfig(),
    "full": DistillConfig(enabled=True),
    "kl": DistillConfig(enabled=True, policy_loss=False),
    "worst": DistillConfig(enabled=True, positions=0.25),
    "switch": DistillConfig(enabled=True, step_down_every=1),
}
TAU = 0.86
REASONER = Path(sparrow.__file__).parent / "reasoner"
DENSE = SparsitySchedule(top_k=(ALL_PAGES,), bin_tokens=64, page_size=8, dense_layers=(0,))
CHEAP, DEAR = DENSE.replace(top_k=(4, 4, 4, 5)), DENSE.replace(top_k=(5, 5, 5, 7, 8, 9))
HELD_OUT = 10**9
VLLM = {
    "dtype": "bfloat16", "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, "max_model_len": 1024,
    "max_num_seqs": 256, "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 4 << 30,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What to run."""

    folder: Path = Path("runs/distill")
    """Where the runs go; those that are finished are used as they are."""

    out: Path = Path("benchmarks/results/distill.json")
    """The JSON file of results."""

    arms: tuple[str, ...] = tuple(ARMS)
    """Which runs, of none, full, kl, worst, switch."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of each run."""

    steps: int = 30
    """GRPO steps."""

    prompts: int = 32
    """Prompts a step, 8 samples each."""

    learning_rate: float = 1e-3
    """Of the adapter."""

    policy_learning_rate: float = 1e-4
    """Of the policy."""

    held_out: int = 256
    """Problems to measure on."""

    lines: int = 24
    """Length of the programs."""

    engine: Literal["hf", "vllm"] = "hf"
    """What generates in the training runs."""

    processes: int = 8
    """Runs at a time; 0 only gathers results."""

    run: str | None = None
    """Do one run, such as full-0, in this process; used by the recipe itself."""


def device_of_model() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(options: Options) -> tuple[Any, Any, Any]:
    """Model, tokenizer and task."""
    from sparrow.engines.hf import load_model
    from sparrow.tasks import load_task

    model, tokenizer = load_model(str(REASONER), "fp32", device_of_model())
    return model, tokenizer, load_task("trace", lines=options.lines)


def hf_engine(model: Any, tokenizer: Any, schedule: SparsitySchedule) -> Any:
    from sparrow.engines.hf import HFEngine, eos_ids

    # A decode step on a GPU takes as long for one sequence as for many.
    return HFEngine(model, schedule, eos_ids(model, tokenizer), batch_size=1024, token_budget=131072)


def actor_engine(options: Options, model: Any, tokenizer: Any, schedule: SparsitySchedule) -> Any:
    """The engine of a run, with weights of its own."""
    if options.engine == "hf":
        return hf_engine(copy.deepcopy(model), tokenizer, schedule)
    from sparrow.engines.vllm import VLLMEngine

    class Awake(VLLMEngine):
        """Keeps its memory: vLLM would mistake what other runs on the GPU take for a sleep that freed nothing."""

        def sleep(self) -> None:
            pass

        def wake(self) -> None:
            pass

    return Awake(str(REASONER), schedule, enable_sleep_mode=False, **VLLM)


def cheap_path(options: Options) -> Path:
    return options.folder / "cheap.json"


class HeldOut:
    """Measures an engine on held-out problems: mismatch by length bin, and reward."""

    def __init__(self, options: Options, policy: Any, tokenizer: Any, task: Any, seed: int) -> None:
        from sparrow.engines.base import Sampling

        self._problems = [task.problem(i, HELD_OUT) for i in range(options.held_out)]
        self._prompts = [tokenizer(p.prompt).input_ids for p in self._problems]
        self._policy, self._tokenizer = policy, tokenizer
        self._sampling = Sampling(12 * options.lines, seed=seed)

    def __call__(self, engine: Any, schedule: SparsitySchedule) -> dict[str, Any]:
        from sparrow.measure import pool, token_acceptance

        engine.set_schedule(schedule)
        rollouts = engine.generate(self._prompts, self._sampling)
        scores = self._policy.score(rollouts, SparsitySchedule.dense(), 1.0)
        found = pool([token_acceptance(r, s.top_logprobs, schedule) for r, s in zip(rollouts, scores, strict=True)], 64)
        texts = self._tokenizer.batch_decode([r.response_ids for r in rollouts], skip_special_tokens=True)
        reward = np.mean([p.verify(text) for p, text in zip(self._problems, texts, strict=True)])
        return {"bins": bins_of(found.to_dict()), "mean": found.mean, "reward": float(reward)}


def bins_of(report: dict[str, Any]) -> list[list[float]]:
    """Per length bin: start, end, p5, the ends of its interval, responses."""
    keys = ("start", "end", "lower_bound", "interval_low", "interval_high", "n_sequences")
    return [[b[key] for key in keys] for b in report["bins"]]


def run_one(options: Options, name: str) -> None:
    """One training run with the measurements before and after it."""
    import torch

    from sparrow.train.trainer import Trainer

    torch.set_num_threads(1)
    arm, seed = name.split("-")[0], int(name.split("-")[1])
    distill = replace(ARMS[arm], learning_rate=options.learning_rate)
    schedule = CHEAP
    if arm == "switch":
        distill, schedule = replace(distill, step_down=(str(cheap_path(options)),)), DEAR
    model, tokenizer, task = load(options)
    began = time.perf_counter()
    config = TrainConfig(
        run_dir=str(options.folder / name),
        steps=options.steps,
        seed=seed,
        save_every=options.steps,
        tau=TAU,
        logged_rollouts=0,
        rollout=RolloutConfig(prompts=options.prompts, samples=8, max_new_tokens=12 * options.lines),
        optimizer=OptimizerConfig(options.policy_learning_rate, warmup_steps=5, token_budget=32768),
        loss=LossConfig(normalization="dapo"),
        distill=distill,
    )
    engine = actor_engine(options, model, tokenizer, schedule)
    measure = HeldOut(options, hf_engine(model, tokenizer, DENSE), tokenizer, task, seed)
    result: dict[str, Any] = {"dense at the start": measure(engine, DENSE), "start": measure(engine, CHEAP)}
    engine.set_schedule(schedule)
    under: list[SparsitySchedule] = []

    def listener(event: str, metrics: dict[str, Any]) -> None:
        if event == "step":
            under.append(trainer.schedule)

    trainer = Trainer(config, model, tokenizer, task, engine, schedule, listener)
    trainer.train()
    result["seconds"] = time.perf_counter() - began
    if trainer.distiller:
        result["with"] = measure(engine, CHEAP)
        engine.update_weights(iter(trainer.distiller.policy_weights().items()))
    result |= {"without": measure(engine, CHEAP), "dense": measure(engine, DENSE)}
    if arm == "switch":
        result["moved_at"] = next((i for i, found in enumerate(under, 1) if found.top_k == CHEAP.top_k), None)
    (options.folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


def start(options: Options, names: list[str]) -> None:
    """All runs, each in a process of its own, spread over the GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    turn, starting = count(), threading.Lock()

    def one(name: str) -> None:
        environment = dict(os.environ)
        with starting:
            time.sleep(1)  # an engine takes stock of free memory as it starts
        if gpus:
            gpu = next(turn) % gpus
            environment["CUDA_VISIBLE_DEVICES"] = visible[gpu] if len(visible) == gpus else str(gpu)
        flags = [
            f"--{k.replace('_', '-')}={v}"
            for k, v in asdict(options).items()
            if isinstance(v, int | float | Path | str)
        ]
        with open(options.folder / f"{name}.log", "w", encoding="utf-8") as log:
            command = [sys.executable, __file__, *flags, "--run", name]
            code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
        print(f"{name}: {'done' if code == 0 else f'failed, see {log.name}'}", flush=True)

    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(one, names))


def gather(options: Options, names: list[str]) -> dict[str, Any]:
    """What the runs have recorded so far."""
    runs: dict[str, Any] = {}
    for name in names:
        path = options.folder / name / "metrics.jsonl"
        if not path.exists():
            continue
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        final = options.folder / f"{name}.json"
        tails = [reached(row["mismatch"]["bins"]) for row in rows]
        runs[name] = {
            "steps": len(rows),
            "reward": [round(row["reward"]["mean"], 4) for row in rows],
            "entropy": [round(row["entropy"], 4) for row in rows],
            "kl": [round(row["distill"]["kl"], 5) for row in rows if "distill" in row],
            "lowest_p5": [round(min(b["lower_bound"] for b in tail), 4) for tail in tails],
            "lowest_p5_low": [round(min(b["interval_low"] for b in tail), 4) for tail in tails],
            "kv_read_fraction": [round(row["kv"]["read_fraction"], 4) for row in rows],
            "seconds": {k: round(float(np.median([r["seconds"][k] for r in rows])), 2) for k in rows[0]["seconds"]},
            **(json.loads(final.read_text(encoding="utf-8")) if final.exists() else {}),
        }
    return runs


def main(options: Options) -> None:
    """Run what is missing, then write the table."""
    if options.run:
        return run_one(options, options.run)
    options.folder.mkdir(parents=True, exist_ok=True)
    names = [f"{arm}-{seed}" for seed in options.seeds for arm in options.arms]
    if options.processes:
        cheap_path(options).write_text(CHEAP.to_json(), encoding="utf-8")
        start(options, [name for name in names if not (options.folder / f"{name}.json").exists()])
    result = {
        "machine": {"device": device_name(), "python": platform.python_version()},
        "options": {**asdict(options), "folder": options.folder.name, "out": options.out.name, "run": None},
        "schedules": {"cheap": CHEAP.to_dict(), "dear": DEAR.to_dict()},
        "runs": gather(options, names),
    }
    options.out.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    print(tables(result))


def reached(bins: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bins that at least half as many responses reach as any."""
    return [b for b in bins if 2 * b["n_sequences"] >= max(b["n_sequences"] for b in bins)]


def tables(result: dict[str, Any]) -> str:
    """The finished runs in Markdown: p5 by length before and after, then what became of the rewards."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for name, run in result["runs"].items():
        if "without" in run:
            arms.setdefault(name.split("-")[0], []).append(run)
    every = [run for runs in arms.values() for run in runs]
    half = result["options"]["held_out"] / 2
    bins = [b[0] for b in every[0]["start"]["bins"] if b[5] >= half] if every else []
    lines = [
        f"| run, measured | {' | '.join(f'{b}-{b + 64}' for b in bins)} | mean acceptance |",
        "|---" * (len(bins) + 2) + "|",
    ]
    rows = [("untrained", [run["start"] for run in arms.get("none", [])])]
    rows += [
        (f"{arm}, {kind} the adapter" if arm != "none" else arm, [run[kind] for run in runs])
        for arm, runs in arms.items()
        for kind in ("without", "with")
        if kind in runs[0]
    ]
    for label, found in (row for row in rows if row[1]):
        cells = []
        for begin in bins:
            of_bin = np.mean([next((b[2:5] for b in f["bins"] if b[0] == begin), [np.nan] * 3) for f in found], axis=0)
            cells.append("{:.3f} [{:.3f}, {:.3f}]".format(*of_bin))
        lines.append(f"| {label} | {' | '.join(cells)} | {np.mean([f['mean'] for f in found]):.4f} |")
    lines += [
        "",
        "| run | reward, first and last 10 steps | held out: actor | held out: policy | p5 holds at step |",
        "|---" * 5 + "|",
    ]
    for arm, runs in arms.items():
        first, last = ([np.mean(run["reward"][part]) for run in runs] for part in (slice(10), slice(-10, None)))
        actor = [run["with" if arm != "none" else "without"]["reward"] for run in runs]
        started, policy = ([run[key]["reward"] for run in runs] for key in ("start", "dense"))
        dense = [run["dense at the start"]["reward"] for run in runs]
        holds = [run.get("moved_at") or first_holding(run["lowest_p5_low"]) for run in runs]
        pairs = ((first, last), (started, actor), (dense, policy))
        cells = [f"{np.mean(a):.3f} → {np.mean(b):.3f} ({', '.join(f'{x:.3f}' for x in b)})" for a, b in pairs]
        lines.append(f"| {arm} | {' | '.join(cells)} | {', '.join(str(h or 'never') for h in holds)} |")
    return "\n".join(lines)


def first_holding(low: list[float], patience: int = 3) -> int | None:
    """The first step from which the lowest bin's interval holds tau for ``patience`` steps in a row."""
    holding = [all(x >= TAU for x in low[i : i + patience]) for i in range(len(low) - patience + 1)]
    return holding.index(True) + 1 if any(holding) else None


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
