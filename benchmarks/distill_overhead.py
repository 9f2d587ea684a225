"""Measure how much time DistillSparse adds to the dense policy update. The script runs the
trainer's own code on a full-size model with random weights.

    python benchmarks/distill_overhead.py               # writes benchmarks/results/distill_overhead.json

Runs on one GPU with Qwen3-1.7B's shape, float32 weights under bfloat16 autocast, gradient
checkpointing, and the published 0.86 schedule. A dense update is everything from the corrections to
the optimiser step. "added" is the adapter's update time, including its own optimiser step, divided
by the dense update time in the same round (median and range).

The cost of sparse attention depends on ``read``: how many pages a tile of 32 neighbouring positions
reads, divided by how many a single position keeps. Two kinds of text are timed: "random" tokens,
where neighbours keep different pages (the worst case), and "runs" of equal tokens, long enough for
a ``read`` of about 3, as with the trained reasoner (docs/LOG.md).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from common import REASONER, clock, device, parser, qwen3, save
from transformers import AutoTokenizer, Qwen3ForCausalLM

from sparrow import SparsitySchedule
from sparrow.attention.triton.forced import Call, Selection
from sparrow.rollout import Rollout
from sparrow.tasks import Problem
from sparrow.train.config import DistillConfig, OptimizerConfig, RolloutConfig, TrainConfig
from sparrow.train.distill import Distiller
from sparrow.train.experience import Experience, Group
from sparrow.train.trainer import Trainer

PROMPT, TOP_N = 256, 20
TOKENS, RESPONSES, ROUNDS = 16_384, 4, 2
"""Tokens per sequence (prompt and response), responses per update, and how often to time each
update.
"""
EVERYTHING = DistillConfig(enabled=True, responses=1.0)
VARIANTS = {
    "everything": EVERYTHING,
    "kl_alone": replace(EVERYTHING, policy_loss=False),
    "half_of_the_responses": replace(EVERYTHING, responses=0.5),
    "a_quarter_of_the_responses": replace(EVERYTHING, responses=0.25),
}
TEXTS = {"random": 1, "runs": 12}
"""How many equal tokens each kind of text has in a row."""
PROBLEM = Problem("random", "", lambda text: 0.0)


class Task:
    """The trainer checks that its tokenizer can read the first problems of a task."""

    def problem(self, index: int, seed: int = 0) -> Problem:
        return PROBLEM


def experience(run: int) -> Experience:
    """Return random responses in which every token occurs ``run`` times in a row. The tokens in
    their top-n lists are all equally unlikely.
    """
    rng = np.random.default_rng(0)
    T = TOKENS - PROMPT
    rollouts = [
        Rollout(
            rng.integers(1000, 100_000, PROMPT).tolist(),
            rng.integers(1000, 100_000, -(-T // run)).repeat(run)[:T],
            np.full(T, -11.9, dtype=np.float32),
            np.stack([rng.permutation(TOP_N) for _ in range(T)]).astype(np.int32),
            np.full((T, TOP_N), -11.9, dtype=np.float32),
            "length",
        )
        for _ in range(RESPONSES)
    ]
    parts = [{"correct": float(i % 2)} for i in range(RESPONSES)]
    groups = [Group(PROBLEM, rollouts, parts)]
    return Experience.join(groups, groups, 1)


def make_trainer(folder: str) -> Trainer:
    torch.manual_seed(0)
    with device():
        model = Qwen3ForCausalLM(qwen3("qwen3-1.7b")).float()
    config = TrainConfig(
        run_dir=folder,
        rollout=RolloutConfig(prompts=1, max_new_tokens=TOKENS),
        optimizer=OptimizerConfig(
            token_budget=TOKENS, gradient_checkpointing=True, precision="bf16"
        ),
        distill=EVERYTHING,
    )
    schedule = SparsitySchedule.preset("qwen3-1.7b", target=0.86)
    tokenizer = AutoTokenizer.from_pretrained(str(REASONER))
    unused = cast(Any, None)  # this script doesn't sample
    return Trainer(config, model, tokenizer, Task(), unused, schedule)


def seconds(work: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """Return how long ``work`` takes in seconds, and its peak memory in GiB."""
    torch.cuda.reset_peak_memory_stats()
    begin = clock()
    work(*arguments)
    return clock() - begin, torch.cuda.max_memory_allocated() / 2**30


@torch.no_grad()
def read(distiller: Distiller, step: Experience) -> float:
    """Return ``read`` for one response: the pages a tile reads, divided by the pages one of its
    positions keeps on average. The result is a mean over the sparse layers.
    """
    ratios = []
    select = Call.select

    def watched(self: Call, *arguments: Any) -> Selection:
        selection = select(self, *arguments)
        kept = sum(
            int(((selection.masks >> bit) & 1).sum())
            for bit in range(8 * selection.masks.element_size())
        )
        ratios.append(int(selection.counts.sum()) * self.BT / kept)
        return selection

    with mock.patch.object(Call, "select", watched):
        distiller.actor_logprobs(step, [0])
    return statistics.mean(ratios)


def measure(trainer: Trainer, out: Path) -> None:
    """Time the dense update and all variants on every kind of text, saving the results after each
    round.
    """
    learner = trainer.learner
    distiller, learner.distiller = learner.distiller, None
    assert distiller is not None
    results: dict[str, Any] = {"tokens": TOKENS, "responses": RESPONSES}
    for text, run in TEXTS.items():
        step = experience(run)
        assessment = learner.assess(step, trainer.schedule)[0]
        advantages_B = torch.tensor([1.0, -1.0]).repeat(RESPONSES)[:RESPONSES]
        pages = read(distiller, step)
        learner.update(step, assessment, 0)  # compile
        update = assessment, advantages_B, assessment.mask_BT  # all tokens train
        distiller.update(step, *update)
        rounds: list[dict[str, tuple[float, float]]] = []
        for _ in range(ROUNDS):
            times = {"dense_update": seconds(learner.update, step, assessment, 0)}
            for name, config in VARIANTS.items():
                distiller.config = replace(distiller.config, distill=config)
                times[name] = seconds(distiller.update, step, *update)
            rounds.append(times)
            results[text] = {"read": pages} | {name: summary(rounds, name) for name in times}
            save(out, results)


def summary(rounds: list[dict[str, tuple[float, float]]], name: str) -> dict[str, Any]:
    """Return an update's seconds in each round, its peak memory, and its time relative to the dense
    update of the same round.
    """
    added = [times[name][0] / times["dense_update"][0] for times in rounds]
    return {
        "seconds": [times[name][0] for times in rounds],
        "peak_gib": max(times[name][1] for times in rounds),
        "added": statistics.median(added),
        "added_range": [min(added), max(added)],
    }


def main() -> None:
    out = parser(__doc__, "distill_overhead").parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        measure(make_trainer(folder), out)
    print(out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
