"""Table 2 of the paper: tokens per second of whole rollouts on AIME24 x 8, dense, lossy and
lossless.

    python recipes/paper/table2.py --model Qwen/Qwen3-4B --schedule qwen3-4b-0.86 --out table2-4b.json
    python recipes/paper/table2.py --table table2-*.json

Each mode has its own engine, on one GPU unless ``--engine`` says otherwise (the paper used four).
All modes use the same 240 prompts and seeds. A short rollout warms up the engine. Responses end
where the model ends them, so lossy and dense responses differ in length; that's why the table
compares tokens per second rather than seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparrow.cli.loading import context_of, load_benchmark, load_engine, load_model, prompt_room
from sparrow.decoding import Decoding
from sparrow.rollout import Sampling
from sparrow.tasks.prompts import encode

PROBLEMS = 30
SHORT = 64  # tokens per response in the warm-up rollout


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a rollout in every mode, and return its tokens, seconds and mean response length."""
    model, tokenizer = load_model(arguments.model, arguments.precision)
    room = prompt_room(context_of(model), arguments.engine, arguments.max_new_tokens)
    problems = load_benchmark(arguments.benchmark, PROBLEMS, tokenizer, room)
    prompts = [encode(tokenizer, problem.prompt, problem.rendered) for problem in problems]
    prompts = [prompt for prompt in prompts for _ in range(arguments.samples)]
    sampling = Sampling(arguments.max_new_tokens, 1.0, top_n=0, seed=0)
    modes = {"dense": Decoding.lossy("dense"), "lossy": Decoding.lossy(arguments.schedule)}
    results = {}
    for name, decoding in (modes | {"lossless": Decoding.lossless()}).items():
        engine = load_engine(
            arguments.engine, arguments.model, model, tokenizer, decoding, arguments.precision
        )
        engine.generate(
            prompts, replace(sampling, max_new_tokens=min(SHORT, sampling.max_new_tokens))
        )
        started = time.perf_counter()
        rollouts = engine.generate(prompts, sampling)
        seconds = time.perf_counter() - started
        engine.close()
        tokens = sum(map(len, rollouts))
        results[name] = {
            "tokens": tokens,
            "seconds": seconds,
            "mean_length": tokens / len(rollouts),
        }
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "table")}
    return {**settings, "responses": len(prompts), "modes": results}


def table(results: list[dict[str, Any]]) -> str:
    """Format the results as in the paper, plus two columns for lossless mode."""
    lines = [
        "| Model | Dense t. (tokens/s) | Sparse t. (tokens/s) | Rollout Speedup | Lossless t. (tokens/s) | Speedup |",
        "| :--- | :---: | :---: | :---: | :---: | :---: |",
    ]
    for result in results:
        dense, lossy, lossless = (
            result["modes"][name]["tokens"] / result["modes"][name]["seconds"]
            for name in ("dense", "lossy", "lossless")
        )
        cells = [
            f"{dense:.0f}",
            f"{lossy:.0f}",
            f"{lossy / dense:.2f}x",
            f"{lossless:.0f}",
            f"{lossless / dense:.2f}x",
        ]
        lines.append(f"| {result['model']} ({result['schedule']}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--schedule")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument(
        "--benchmark",
        default="aime24",
        help="benchmark to sample, in the form that sparrow eval accepts, such as "
        "aime24:path=aime24.jsonl",
    )
    parser.add_argument("--samples", type=int, default=8, help="responses per problem")
    parser.add_argument("--max-new-tokens", type=int, default=32768)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--table", type=Path, nargs="+", help="only print these results, without measuring anything"
    )
    arguments = parser.parse_args(argv)
    if arguments.table:
        return print(table([json.loads(path.read_text()) for path in arguments.table]))
    if not (arguments.model and arguments.schedule and arguments.out):
        parser.error("measuring requires --model, --schedule and --out; pass all three")
    result = measured(arguments)
    arguments.out.write_text(json.dumps(result, indent=1))
    print(table([result]))


if __name__ == "__main__":
    main()
