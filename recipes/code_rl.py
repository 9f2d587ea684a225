"""Code RL end to end on a CPU: a tiny model writes programs, a sandbox runs them, and GRPO raises
the reward.

Each prompt asks for a chain of sums, differences and products, and the response is a Python program
that reads a number and prints the result. The script first pretrains a model, in about a minute, on
demonstrations with mistakes in them, so the model's programs often fail their tests. `sparrow
train` then trains it with sparse rollouts.

    python recipes/code_rl.py                    # 20 steps, minutes; writes benchmarks/results/code_rl.json
    python recipes/code_rl.py --steps 2 --pretraining 50 --folder runs/try --out try.json

The folder must not exist yet. Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import json
import platform
import random
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sparrow.cli import main as sparrow
from sparrow.rewards.sandbox import choose_isolation
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import load_dataset_task

SIGNS = {" add": " +", " subtract": " -", " multiply by": " *"}
HEAD, TAIL = "```python\nx = int(input())", "\nprint(x)\n```"
PAD, EOS, UNK = SPECIAL = ("<pad>", "<eos>", "<unk>")
HOW_RUN = "\n\nThe program reads standard input and writes standard output."
PIECES = (
    HEAD,
    TAIL,
    HOW_RUN,
    "\nx = x",
    "take a number",
    *SIGNS,
    *SIGNS.values(),
    *(f" {n}" for n in range(1, 10)),
)
INPUTS = (0, 7, -12)


@dataclass(frozen=True)
class Options:
    """What to run."""

    folder: Path = Path("runs/code_rl")  # Folder for the model, the problems and the run.
    out: Path = Path("benchmarks/results/code_rl.json")  # JSON file for the results.
    steps: int = 20  # Training steps.
    prompts: int = 8  # Prompts per step.
    samples: int = 8  # Programs per prompt.
    learning_rate: float = 5e-4  # Learning rate of GRPO.
    lengths: tuple[int, int] = (2, 4)  # Minimum and maximum number of operations in a program.
    mistakes: float = 0.25  # Probability that a demonstration gets an operation wrong.
    pretraining: int = 500  # Batches of demonstrations for pretraining.
    held_out: int = 24  # Problems to evaluate on before and after training, with 4 programs each.
    seed: int = 0  # Seeds everything.


def question(rng: random.Random, options: Options) -> tuple[str, str, list[str]]:
    """Return a question, a demonstration with some operations wrong, and the correct output for
    each input.
    """
    asked, program, values = "take a number", HEAD, list(INPUTS)
    for _ in range(rng.randint(*options.lengths)):
        word, n = rng.choice(list(SIGNS)), rng.randint(1, 9)
        values = [
            v + n if word == " add" else v - n if word == " subtract" else v * n for v in values
        ]
        wrong = rng.random() < options.mistakes
        written = (
            (rng.choice(list(SIGNS.values())), rng.randint(1, 9)) if wrong else (SIGNS[word], n)
        )
        asked += f"{word} {n}"
        program += "\nx = x{} {}".format(*written)
    return asked, program + TAIL, [str(v) for v in values]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token for each piece that questions and programs are made of. Any
    other text becomes the unknown token.
    """
    tokenizer = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate((*SPECIAL, *PIECES))}, unk_token=UNK)
    )
    longest_first = sorted(PIECES, key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join(map(re.escape, longest_first))), "isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


def pretrain(
    tokenizer: PreTrainedTokenizerFast, prompts: dict[str, str], options: Options
) -> Qwen3ForCausalLM:
    """Train a new model on ``options.pretraining`` batches of demonstrations.

    Args:
        prompts: the rendered prompts, each with its demonstration.
    """
    torch.manual_seed(options.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    examples = [
        (tokenizer(p).input_ids, [*tokenizer(r).input_ids, tokenizer.eos_token_id])
        for p, r in prompts.items()
    ]
    width = max(len(p) + len(r) for p, r in examples)
    ids_BT = torch.full((len(examples), width), tokenizer.pad_token_id)
    labels_BT = torch.full((len(examples), width), -100)
    for i, (prompt, response) in enumerate(examples):
        ids_BT[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        labels_BT[i, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for batch in range(options.pretraining):
        rows = torch.randint(len(examples), (64,))
        logits = model(input_ids=ids_BT[rows, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels_BT[rows, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(
            1.0, (batch + 1) / 50, 2 * (1 - batch / options.pretraining)
        )
        optimizer.step()
        optimizer.zero_grad()
    print(f"pretraining: loss {loss.item():.3f}", flush=True)
    return model


def write_rows(path: Path, seed: int, count: int, options: Options) -> list[str]:
    """Write problems in TACO's format, and return their demonstrations."""
    rng = random.Random(f"{path.stem}/{seed}")
    problems = {asked: rest for asked, *rest in (question(rng, options) for _ in range(count))}
    rows = [
        {
            "question": asked,
            "input_output": json.dumps({"inputs": [f"{i}\n" for i in INPUTS], "outputs": outputs}),
        }
        for asked, (_, outputs) in problems.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [program for program, _ in problems.values()]


def main(options: Options) -> None:
    """Generate problems, pretrain a model, train it with GRPO, and save its rewards before and
    after.
    """
    began = time.perf_counter()
    options.folder.mkdir(parents=True)
    shown, train, held_out = (
        options.folder / f"{name}.jsonl" for name in ("shown", "train", "held_out")
    )
    programs = write_rows(shown, options.seed, 20_000, options)
    write_rows(train, options.seed, options.steps * options.prompts + 100, options)
    write_rows(held_out, options.seed, 100, options)
    task = load_dataset_task("taco", {"code": float}, path=shown, template="{question}")
    tokenizer = build_tokenizer()
    model = pretrain(tokenizer, dict(zip((p.prompt for p in task), programs, strict=True)), options)
    start = options.folder / "start"
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    made_s = time.perf_counter() - began
    schedule = options.folder / "schedule.json"
    sparse = SparsitySchedule(top_k=(2,), bin_tokens=32, page_size=4, dense_layers=(0,))
    schedule.write_text(sparse.to_json(), encoding="utf-8")
    limit = str(4 * options.lengths[1] + 8)
    run = options.folder / "run"
    common = ["--schedule", str(schedule), "--seed", str(options.seed)]
    data = "taco:path={},template={{question}}"
    sparrow(
        [
            "train",
            "--model",
            str(start),
            "--dataset",
            data.format(train),
            "--run-dir",
            str(run),
            *common,
            "--steps",
            str(options.steps),
            "--save-every",
            str(options.steps),
            "--reward.format",
            "0.1",
            "--rollout.prompts",
            str(options.prompts),
            "--rollout.samples",
            str(options.samples),
            "--rollout.max-new-tokens",
            limit,
            "--optimizer.learning-rate",
            str(options.learning_rate),
            "--loss.normalization",
            "dapo",
        ]
    )
    rows = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    scores = {}
    for name, folder in (("before", start), ("after", run / "model")):
        out = options.folder / f"eval-{name}"
        sparrow(
            [
                "eval",
                "--benchmark",
                data.format(held_out),
                "--model",
                str(folder),
                "--out",
                str(out),
                *common,
                "--k",
                "4",
                "--limit",
                str(options.held_out),
                "--max-new-tokens",
                limit,
            ]
        )
        for path in sorted(out.glob("*.jsonl")):
            rewards = [
                json.loads(line)["reward"] for line in path.read_text(encoding="utf-8").splitlines()
            ]
            scores[f"{name}, {'dense' if path.name.startswith('dense-') else 'sparse'}"] = round(
                float(np.mean(rewards)), 4
            )
    settings = {**asdict(options), "folder": options.folder.name, "out": options.out.name}
    result = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        },
        "isolation": choose_isolation(),
        "options": settings,
        "parameters": sum(p.numel() for p in model.parameters()),
        "passed": [round(row["reward"]["parts"]["correct"], 4) for row in rows],
        "kv_read_fraction": [round(row["kv"]["read_fraction"], 4) for row in rows],
        "held_out": scores,
        "seconds": {
            "model": round(made_s),
            "training": round(sum(sum(row["seconds"].values()) for row in rows)),
        },
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
