"""What a checkpoint's dense samples earn on the task ``task.py``, to look at before the reward is frozen.

    python studies/text/sample.py runs/text --out samples.json

By temperature: the reward's mean and spread, within the responses to a prompt and overall, its parts, lengths, the
share that ends by itself, p5 of acceptance had few pages been read, and some responses in full.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from task import Continue

from sparrow.engines.hf import eos_ids, load_model
from sparrow.measure import token_acceptance
from sparrow.rollout import Rollout, Sampling
from sparrow.schedule import SparsitySchedule

sys.path.append(str(Path(__file__).parents[1] / "common"))
from graph_engine import GraphEngine


@dataclass(frozen=True)
class Options:
    """What to sample."""

    checkpoint: tyro.conf.Positional[Path]  # Folder that train.py wrote.
    out: Path = Path("samples.json")  # Where the result goes.
    kind: str = "train"  # Problems: train or held_out.
    problems: int = 64  # Their number, the first ones of the stream 0.
    samples: int = 8  # Responses to each.
    batch: int = 256  # Responses decoded together.
    max_new_tokens: int = 512  # Responses are cut at this many tokens.
    temperatures: tuple[float, ...] = (0.6, 0.8, 1.0)  # Sampling temperatures.
    top_n: int = 256  # Length of the recorded lists that bound the acceptance rate.
    budgets: tuple[int, ...] = (4, 8, 16, 32)  # Pages kept by score, of which acceptance is measured.
    measured: int = 32  # Responses that it is measured on.
    texts: int = 16  # Responses in the result, to different problems first.


def describe(options: Options, engine: GraphEngine, tokenizer: Any, temperature: float) -> dict[str, Any]:
    """One temperature's samples."""
    task = Continue(options.checkpoint, options.kind)
    problems = [task.problem(i) for i in range(options.problems) for _ in range(options.samples)]
    prompts = [tokenizer(p.prompt, add_special_tokens=False).input_ids for p in problems]
    engine.set_schedule(engine.schedule.replace(top_k=SparsitySchedule.dense().top_k))
    began = time.monotonic()
    rollouts = engine.generate(prompts, Sampling(options.max_new_tokens, temperature, options.top_n))
    sampled = time.monotonic()
    texts = [str(tokenizer.decode(r.response_ids, skip_special_tokens=True)) for r in rollouts]
    parts = [p.verify.func.parts(*p.verify.args, text) for p, text in zip(problems, texts, strict=True)]
    verified = time.monotonic()
    rewards = np.array([part["reward"] for part in parts]).reshape(-1, options.samples)
    tokens = np.array([len(r) for r in rollouts])
    order = sorted(range(len(texts)), key=lambda i: (i % options.samples, i))
    return {
        "temperature": temperature,
        "reward": float(rewards.mean()),
        "std": float(rewards.std()),
        "std_in_groups": float(rewards.std(1).mean()),
        "std_of_groups": float(rewards.mean(1).std()),
        "parts": {name: float(np.mean([part[name] for part in parts])) for name in parts[0]},
        "percentiles": np.percentile(rewards, (5, 25, 50, 75, 95)).round(4).tolist(),
        "tokens": float(tokens.mean()),
        "ended": float(np.mean([r.finish_reason == "stop" for r in rollouts])),
        "acceptance": acceptance(options, engine, [rollouts[i] for i in order[: options.measured]], temperature),
        "sampling_s": round(sampled - began, 1),
        "verifying_s": round(verified - sampled, 1),
        "texts": [
            {"id": problems[i].id, "prompt": problems[i].prompt, "response": texts[i], "tokens": len(rollouts[i])}
            | {name: round(value, 4) for name, value in parts[i].items()}
            for i in order[: options.texts]
        ],
    }


def acceptance(
    options: Options, engine: GraphEngine, rollouts: list[Rollout], temperature: float
) -> list[dict[str, Any]]:
    """Mean and p5 of the acceptance that a lossy actor would have had on dense samples; first of all the dense model's
    own, below 1 by what the lists leave out."""
    policy = engine.score(rollouts, SparsitySchedule.dense(), temperature)
    rows = []
    for pages in (None, *options.budgets):
        schedule = engine.schedule if pages is None else engine.schedule.replace(top_k=(pages,))
        actor = policy if pages is None else engine.score(rollouts, schedule, temperature)
        lower = np.concatenate(
            [
                token_acceptance(r, p.top_logprobs, schedule, a.top_logprobs).lower
                for r, p, a in zip(rollouts, policy, actor, strict=True)
            ]
        )
        rows.append({"pages": pages, "mean": float(lower.mean()), "p5": float(np.percentile(lower, 5))})
    return rows


def main(options: Options) -> None:
    """Sample at every temperature, and write the result after each."""
    from control import LAYOUT, longest

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(str(options.checkpoint), "fp32", device)
    most = longest(Continue(options.checkpoint, options.kind), tokenizer, options.max_new_tokens)
    layout = SparsitySchedule.dense(**LAYOUT)
    engine = GraphEngine(model, layout, eos_ids(model, tokenizer), options.batch, most, top_n=options.top_n)
    result: dict[str, Any] = {"options": json.loads(json.dumps(vars(options), default=str)), "temperatures": []}
    for temperature in options.temperatures:
        found = describe(options, engine, tokenizer, temperature)
        result["temperatures"].append(found)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: value for name, value in found.items() if name != "texts"}), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
