"""Tables for runs through vLLM, on several GPUs and in other trainers."""

from __future__ import annotations

import numpy as np
from common import Row, load, table
from tables_speed import PHASES


def equalities() -> str:
    """Tabulate log-prob errors relative to the float32 truth, for vLLM and for transformers in the
    same 16-bit dtype.
    """
    files = {
        "bfloat16": "vllm_equal_bf16",
        "bfloat16, tensor parallel 2": "vllm_equal_bf16_tp2",
        "float16": "vllm_equal_fp16",
        "bfloat16, Qwen3-Next": "vllm_equal_hybrid",
        "bfloat16, Qwen3-Next, tensor parallel 2": "vllm_equal_hybrid_tp2",
        "bfloat16, EXAONE 4": "vllm_equal_windowed",
    }
    names = {
        "unbounded": "unbounded",
        "sparse": "4 to 16 pages",
        "chunked prefill": "4 to 16 pages, prefill in chunks of 256",
        "compiled": "4 to 16 pages, vLLM's torch.compile",
    }
    rows = []
    for kind, file in files.items():
        result = load(file)
        for name in (n for n in names if n in result):
            pairs = (result[name][side] for side in ("missed", "yardstick"))
            rows.append(
                [
                    f"{kind}, {names[name]}",
                    *(f"{pair['mean']:.4f} / {pair['p99']:.3f}" for pair in pairs),
                ]
            )
    return table(["mean / p99 of the difference", "Sparrow in vLLM", "reference error"], rows)


def scaling() -> str:
    """Tabulate the scaled sparse step on one, two and four GPUs. Steps on several GPUs are compared
    with a step on one GPU.
    """
    names = {
        "one": ("earlier, one GPU", "one"),
        "ddp": ("earlier, two, DDP", "one"),
        "sparse": ("one GPU", "sparse"),
        "ddp2": ("two, DDP", "sparse"),
        "fsdp2": ("two, FSDP2", "sparse"),
        "ddp4": ("four, DDP", "sparse"),
        "fsdp2_4": ("four, FSDP2", "sparse"),
    }
    rows = []
    for name, (title, reference) in names.items():
        result, baseline = load(f"grpo_step_{name}"), load(f"grpo_step_{reference}")["seconds"]
        run, n = result["seconds"], result["gpus"]
        pairs = [
            *((baseline[phase], run[phase]) for phase in PHASES),
            (sum(baseline.values()), sum(run.values())),
        ]
        rows.append([title, *(f"{b:.1f}" + f" ({a / n / b:.0%})" * (n > 1) for a, b in pairs)])
    return table(
        ["seconds (efficiency)", "rollout", "log-probs", "update", "sync", "whole step"], rows
    )


def training() -> str:
    rows = []
    names = {
        "sparse": "sparse, 8 to 28 pages of 8",
        "unbounded": "unbounded",
        "distilled": "sparse, DistillSparse",
    }
    for run, result in load("vllm_train").items():
        cells, of = [], result["summary"]
        for key, form in (
            ("reward", ".2f"),
            ("p5_mean", ".4f"),
            ("acceptance", ".5f"),
            ("kl", ".1e"),
        ):
            change = f"{of[f'{key} change']:+{form}} ± {of[f'{key} change error']:{form}}"
            cells.append(f"{of[f'{key} first']:{form}} → {of[f'{key} last']:{form}} ({change})")
        rows.append(
            [names[run], len(result["steps"]["step"]), *cells, f"{of['read_fraction last']:.0%}"]
        )
    return table(
        ["actor", "steps", "reward", "p5, mean of bins", "mean acceptance", "KL", "KV read"], rows
    )


def same_run() -> str:
    names = {
        "one": "one GPU",
        "again": "one GPU, different batches",
        "seed": "one GPU, different seed",
        "ddp": "two GPUs, DDP",
        "fsdp2": "two GPUs, FSDP2",
        "ddp4": "four GPUs, DDP",
        "fsdp2_4": "four GPUs, FSDP2",
    }
    formats = {
        "reward": ".3f",
        "entropy": ".4f",
        "p5_mean": ".4f",
        "acceptance": ".5f",
        "kl": ".1e",
    }
    runs = {run: result["steps"] for run, result in load("same_run").items() if run in names}
    rows = []
    for run, name in names.items():
        cells = []
        for key, form in formats.items():
            values, one_gpu = (np.array(runs[r][key]) for r in (run, "one"))
            off = "" if run == "one" else f" ({np.sqrt(((values - one_gpu) ** 2).mean()):.1e})"
            cells.append(f"{values.mean():{form}}{off}")
        rows.append([name, len(runs[run]["step"]), *cells])
    return table(
        ["run", "steps", "reward", "entropy", "p5, mean of bins", "mean acceptance", "KL"], rows
    )


def failures() -> str:
    """Tabulate runs that lost a process or their server."""
    results = load("same_run")
    lost = {"a process under DDP": "killed", "a process under FSDP2": "killed_fsdp2"}
    runs = [
        (name, results[run]["stopped"], str(len(results[run]["resumed"]["steps"]["step"])))
        for name, run in lost.items()
    ]
    runs.append(("the vLLM server", results["server"], ""))
    rows = [
        [name, len(run["steps"]["step"]), f"{run['seconds']:.1f}", run["exit"], after]
        for name, run, after in runs
    ]
    head = [
        "killed",
        "steps before the kill",
        "seconds until the run ended",
        "exit code",
        "steps after `--resume`",
    ]
    return table(head, rows)


def trainers() -> str:
    """Summarise TRL's and verl's logs in a table."""
    logs = {
        "TRL, vLLM colocated": load("trl_grpo")["log"],
        "TRL, vLLM server": load("trl_grpo_server")["log"],
        "verl": load("verl_grpo")["log"],
    }
    rows = []
    for name, logged in logs.items():

        def values(*keys: str, logged: list[Row] = logged) -> list[float]:
            return [row[key] for row in logged for key in keys if key in row]

        reward, p5 = values("reward", "critic/score/mean"), values("sparrow/p5")
        acceptance, floor = values("sparrow/acceptance_mean"), values("sparrow/sampled/p5_floor")
        rows.append(
            [
                name,
                len(reward),
                f"{np.mean(reward[:5]):.2f} → {np.mean(reward[-5:]):.2f}",
                f"{p5[0]:.3f} → {p5[-1]:.3f} ({len(p5)})",
                f"{np.mean(acceptance):.4f}",
                f"{np.mean(floor):.2f}" if floor else "",
                f"{np.median(values('step_time', 'timing_s/step')):.1f}",
            ]
        )
    head = [
        "trainer",
        "steps",
        "reward, first and last five",
        "p5, first and last (times measured)",
        "mean acceptance",
    ]
    return table([*head, "floor under p5, mean", "s per step, median"], rows)


TABLES = {
    "equalities": equalities,
    "training": training,
    "same run": same_run,
    "scaling": scaling,
    "failures": failures,
    "trainers": trainers,
}
