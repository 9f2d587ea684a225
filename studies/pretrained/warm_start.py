"""Teach SmolLM2-135M-Instruct a task with worked examples, until it can do part of it.

    python studies/pretrained/warm_start.py ledger --out runs/warm

Training ends when the expected reward on held-out problems reaches ``--target``, which leaves
something for reinforcement learning to improve. The expected reward is computed from the
probabilities of the solution's lines, each given that the lines before it are right. After
training, ``OUT`` contains the model, its tokenizer, and ``card.json`` with the steps, the seconds
and the curve.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torch.nn import functional as F
from training_tasks import SETTINGS
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparrow.cli.loading import HELD_OUT, load_model, load_task_spec
from sparrow.tasks import Problem
from sparrow.train.pretrained import save_model, save_tokenizer


@dataclass(frozen=True)
class Options:
    """The model and task to train."""

    task: tyro.conf.Positional[str]  # A task of training_tasks.SETTINGS whose problems are solved.
    out: Path  # Folder for the model.
    model: str = "smollm2"
    target: float = 0.3  # Expected reward at which training ends.
    seconds: float = 90  # Seconds after which training ends in any case.
    batch: int = 16  # Examples per step.
    learning_rate: float = 3e-4  # Learning rate of AdamW, reached after ten steps.
    held_out: int = 16  # Number of held-out problems.
    every: int = 5  # Steps between evaluations.
    spec: str | None = None  # Instead of the task's own options, for trials.


def solution_logprobs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problem: Problem
) -> tuple[Tensor, Tensor]:
    """Return the tokens of a problem's solution, including the end token, and their log-probs. Both
    are ``[T]``.
    """
    prompt = tokenizer(problem.prompt, add_special_tokens=False).input_ids
    solution = tokenizer(problem.solution, add_special_tokens=False).input_ids
    solution.append(tokenizer.eos_token_id)
    ids = torch.tensor([prompt + solution], device=model.device)
    is_cuda = model.device.type == "cuda"
    with torch.autocast(model.device.type, torch.bfloat16, enabled=is_cuda):
        logits = model(ids[:, :-1], logits_to_keep=len(solution)).logits[0]
    target = ids[0, len(prompt) :]
    return target, -F.cross_entropy(logits.float(), target, reduction="none")


def expected_reward(logprob: Tensor, is_break: Tensor) -> float:
    """Return the mean probability of the lines of a solution.

    Args:
        logprob: log-probs of the tokens ``[T]``.
        is_break: whether a token is a line break, bool ``[T]``; it belongs to the line it ends.
    """
    line = is_break.cumsum(0) - is_break.long()
    total = torch.zeros(int(line[-1]) + 1, device=logprob.device).index_add_(0, line, logprob)
    return float(total.exp().mean())


def main(options: Options) -> None:
    """Train, and write the model."""
    model, tokenizer = load_model(options.model)
    task = load_task_spec(options.spec or SETTINGS[options.task].task)
    held_out = [task.problem(i, HELD_OUT) for i in range(options.held_out)]
    (line_break,) = tokenizer("\n", add_special_tokens=False).input_ids
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.0)

    @torch.no_grad()
    def evaluate() -> float:
        rewards = []
        for problem in held_out:
            ids, logprob = solution_logprobs(model, tokenizer, problem)
            rewards.append(expected_reward(logprob, ids == line_break))
        return sum(rewards) / len(rewards)

    began = time.monotonic()
    step = 0
    curve = [[0, evaluate()]]
    while curve[-1][1] < options.target and time.monotonic() - began < options.seconds:
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1, (step + 1) / 10)
        for i in range(step * options.batch, (step + 1) * options.batch):
            _, logprob = solution_logprobs(model, tokenizer, task.problem(i, seed=HELD_OUT + 1))
            (-logprob.mean() / options.batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % options.every == 0:
            curve.append([step, evaluate()])
            print(f"step {step}: expected reward {curve[-1][1]:.3f}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    save_model(model, model.state_dict(), options.out)
    save_tokenizer(tokenizer, options.out)
    seconds = round(time.monotonic() - began, 1)
    card = {"steps": step, "batch": options.batch, "seconds": seconds, "expected_reward": curve}
    (options.out / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
