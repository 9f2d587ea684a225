"""Train the small reasoner for Sparrow's demo and tests from scratch, within minutes on one GPU.

A Qwen3 with fewer than a million parameters learns to trace short programs
(``sparrow.tasks.Trace``) from demonstrations with some miscalculated results. As a result, it makes
mistakes at temperature 1, which leaves something for reinforcement learning to improve. With greedy
decoding, it makes none. Its output depends on values it wrote much earlier, so it fails if
attention reads too few pages.

    python studies/reasoner/train_reasoner.py --out runs/reasoner

Writes the checkpoint with its tokenizer, and ``training.json`` with settings, losses and
evaluation.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import json
import logging
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sparrow.engines.hf import HFEngine, teacher_forced
from sparrow.model.scoring import Batch
from sparrow.rollout import Rollout, Sampling
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import Trace, build_tokenizer

log = logging.getLogger("train_reasoner")

TRAIN_SEED, TEST_SEED = 0, 1
IGNORED = 255  # larger than any token id, and fits in uint8


@dataclass(frozen=True)
class Config:
    """Settings of a training run. The defaults produced the bundled checkpoint.

    Attributes:
        out: folder for the checkpoint and the report.
        shortest, longest: program lengths to train on, in lines.
        examples: programs per length, sampled with replacement.
        slip: probability that a line of a demonstration is miscalculated.
        steps: optimizer steps.
        batch_tokens: padded tokens per step.
        learning_rate: peak learning rate, reached after ``warmup`` steps and decayed linearly to
            zero over the last third of the steps.
        hidden, layers, heads, kv_heads, head_dim: model shape; the MLP is three times as wide as
            ``hidden``.
        rope_theta: base of the rotary embedding; if it is large, some dimensions can match content
            at any distance.
        test_lines: program lengths to evaluate.
        test_programs: programs per length.
        budget_lines: program length for the evaluation of sparse budgets, which takes longer than
            training; None skips it.
        seed: seed of the initialisation and of the order of examples.
    """

    out: Path
    shortest: int = 4
    longest: int = 36
    examples: int = 5000
    slip: float = 0.04
    steps: int = 2546
    batch_tokens: int = 25_000
    learning_rate: float = 3e-3
    warmup: int = 100
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1e6
    test_lines: tuple[int, ...] = (8, 16, 24, 32)
    test_programs: int = 256
    budget_lines: int | None = 32
    seed: int = 0


def main(config: Config) -> None:
    """Train and evaluate the model, and save everything."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = build_tokenizer()
    began = time.perf_counter()
    data = make_data(config, device)
    log.info(
        "data: %d programs in %.0f s", config.examples * len(data), time.perf_counter() - began
    )
    model = build_model(config, tokenizer).to(device)
    curve = train(model, data, config)
    seconds = time.perf_counter() - began
    report = {
        "config": {**asdict(config), "out": config.out.name},
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tokenizer),
        "train_seconds": round(seconds),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "curve": curve,
        **evaluate(model, tokenizer, config),
    }
    config.out.mkdir(parents=True, exist_ok=True)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(config.out)
    tokenizer.save_pretrained(config.out)
    (config.out / "training.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


def build_model(config: Config, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build a new model, initialised from ``config.seed``."""
    torch.manual_seed(config.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden,
            intermediate_size=3 * config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_data(config: Config, device: torch.device) -> dict[int, tuple[Tensor, Tensor]]:
    """Return input ids and labels by number of lines, uint8 ``[examples, T]``. Prompts and padding
    have no labels.
    """
    lengths = range(config.shortest, config.longest + 1)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        encoded = pool.map(_encode, [(config, lines) for lines in lengths])
        return {
            lines: (torch.from_numpy(ids).to(device), torch.from_numpy(labels).to(device))
            for lines, (ids, labels) in zip(lengths, encoded, strict=True)
        }


def _encode(job: tuple[Config, int]) -> tuple[np.ndarray, np.ndarray]:
    config, lines = job
    task, tokenizer = Trace(lines, config.slip), build_tokenizer()
    problems = [task.problem(i, TRAIN_SEED) for i in range(config.examples)]
    prompts = tokenizer([p.prompt for p in problems])["input_ids"]
    solutions = tokenizer([f"{p.solution}{tokenizer.eos_token}" for p in problems])["input_ids"]
    width = max(len(p) + len(s) for p, s in zip(prompts, solutions, strict=True))
    ids = np.full((len(problems), width), tokenizer.pad_token_id, dtype=np.uint8)
    labels = np.full((len(problems), width), IGNORED, dtype=np.uint8)
    for i, (prompt, solution) in enumerate(zip(prompts, solutions, strict=True)):
        ids[i, : len(prompt) + len(solution)] = prompt + solution
        labels[i, len(prompt) : len(prompt) + len(solution)] = solution
    return ids, labels


def train(
    model: Qwen3ForCausalLM, data: dict[int, tuple[Tensor, Tensor]], config: Config
) -> list[dict[str, float]]:
    """Train the model in place on next-token prediction, and return the loss curve. Program length
    grows over the first third of the steps.
    """
    device = model.device
    rng = random.Random(config.seed)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    # With orthogonalised updates, the model learns to look up values several times faster than
    # with just Adam.
    optimizers = [
        torch.optim.Muon(
            matrices, lr=config.learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    curve = []
    began = time.perf_counter()
    model.train()
    for step in range(config.steps):
        progress = step / config.steps
        grown = config.shortest + (config.longest - config.shortest) * min(1.0, 0.1 + 3 * progress)
        ids, labels = data[rng.randint(config.shortest, int(grown))]
        rows = torch.randint(
            len(ids), (max(1, config.batch_tokens // ids.shape[1]),), device=device
        )
        x, y = ids[rows].long(), labels[rows].long()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=x[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(
            logits.float().flatten(0, 1), y[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * min(
                    1.0, (step + 1) / config.warmup, 3 * (1 - progress)
                )
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0 or step == config.steps - 1:
            seconds = round(time.perf_counter() - began, 1)
            curve.append({"step": step, "seconds": seconds, "loss": round(loss.item(), 4)})
            log.info("step %(step)d  %(seconds).0f s  loss %(loss).4f", curve[-1])
    return curve


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, config: Config
) -> dict[str, Any]:
    """Evaluate sampled and greedy accuracy by length. Also evaluate acceptance, agreement and
    accuracy by sparse budget.
    """
    dense = SparsitySchedule.dense(dense_layers=tuple(range(config.layers)))
    engine = HFEngine(
        model,
        dense,
        [tokenizer.eos_token_id],
        batch_size=len(config.test_lines) * config.test_programs,
    )
    report: dict[str, Any] = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        rewards = solve(engine, tokenizer, config, config.test_lines, temperature)[1]
        report[f"accuracy_{name}"] = {
            lines: round(float(r.mean()), 4) for lines, r in rewards.items()
        }
        log.info("accuracy %s: %s", name, report[f"accuracy_{name}"])
    report["budgets"] = []
    if config.budget_lines is None:
        return report
    rollouts, _ = solve(engine, tokenizer, config, (config.budget_lines,), 1.0)
    report["response_tokens"] = round(float(np.mean([len(r) for r in rollouts])), 1)
    for schedule in budgets(config.layers):
        engine.set_schedule(schedule)
        _, rewards = solve(engine, tokenizer, config, (config.budget_lines,), 1.0)
        budget = {
            "page_size": schedule.page_size,
            "dense_layers": schedule.dense_layers,
            "top_k": schedule.top_k[0],
            "tokens": int(schedule.tokens_read(2**20)),
            **acceptance_report(model, rollouts),
            "accuracy_sampled": round(float(rewards[config.budget_lines].mean()), 4),
        }
        report["budgets"].append(budget)
        log.info("budget %s", budget)
    return report


def budgets(layers: int) -> list[SparsitySchedule]:
    """Return the fixed budgets to evaluate."""
    return [
        SparsitySchedule.fixed(top_k, page_size=page_size, dense_layers=tuple(range(dense)))
        for page_size, table in (
            (16, (0, 1, 2, 4, 6, 8, 12, 16)),
            (4, (0, 4, 8, 12, 16, 24, 32, 48)),
        )
        for dense in (1, 2)
        if dense < layers
        for top_k in table
    ]


def solve(
    engine: HFEngine,
    tokenizer: PreTrainedTokenizerFast,
    config: Config,
    lengths: tuple[int, ...],
    temperature: float,
) -> tuple[list[Rollout], dict[int, np.ndarray]]:
    """Sample one response to each test program, with all lengths in one batch, and return the
    rollouts and the rewards by length.
    """
    problems = {
        lines: [Trace(lines).problem(i, TEST_SEED) for i in range(config.test_programs)]
        for lines in lengths
    }
    prompts = tokenizer([p.prompt for group in problems.values() for p in group])["input_ids"]
    sampling = Sampling(max_new_tokens=18 * max(lengths), temperature=temperature, top_n=0)
    rollouts = engine.generate(prompts, sampling)
    texts = iter(tokenizer.batch_decode([r.response_ids for r in rollouts]))
    rewards = {
        lines: np.array([p.verify(next(texts)) for p in group]) for lines, group in problems.items()
    }
    return rollouts, rewards


@torch.no_grad()
def acceptance_report(model: Qwen3ForCausalLM, rollouts: list[Rollout]) -> dict[str, Any]:
    """Measure the acceptance of responses under the model's schedule at temperature 1, over the
    full vocabulary.
    """
    alphas, agreements, quarters = [], [], []
    for begin in range(0, len(rollouts), 64):
        some = rollouts[begin : begin + 64]
        batch = Batch.of(some, model.device)
        rows, columns = batch.response_index()
        dense = (
            model(input_ids=batch.input_ids, use_cache=False).logits[rows, columns - 1].softmax(-1)
        )
        with teacher_forced(model, batch.prompt_lengths):
            sparse = (
                model(input_ids=batch.input_ids, use_cache=False)
                .logits[rows, columns - 1]
                .softmax(-1)
            )
        alphas.append(torch.minimum(dense, sparse).sum(-1).cpu().numpy())
        agreements.append((dense.argmax(-1) == sparse.argmax(-1)).cpu().numpy())
        quarters.append(
            (4 * (columns - batch.prompt_lengths[rows]) // batch.response_lengths[rows])
            .cpu()
            .numpy()
        )
    alpha, quarter = np.concatenate(alphas), np.concatenate(quarters)
    return {
        "mean": round(float(alpha.mean()), 4),
        "p5": round(float(np.percentile(alpha, 5)), 4),
        "p1": round(float(np.percentile(alpha, 1)), 4),
        "p5_by_quarter": [round(float(np.percentile(alpha[quarter == i], 5)), 4) for i in range(4)],
        "agreement": round(float(np.concatenate(agreements).mean()), 4),
    }


if __name__ == "__main__":
    import tyro

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    main(tyro.cli(Config, description=__doc__))
