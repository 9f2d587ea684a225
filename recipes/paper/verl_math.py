"""Write math problems in verl's format, and provide Sparrow's verifier as verl's reward function,
for verl.yaml.

    python recipes/paper/verl_math.py --dataset polaris --out data/polaris.parquet
    python recipes/paper/verl_math.py --dataset aime24 --out data/aime24.parquet

``--dataset`` takes a known dataset name, as in ``sparrow train``, optionally with path=FILE. verl
applies the chat template.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import datasets

from sparrow.cli.loading import load_problems
from sparrow.rewards import verify_math


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """verl's reward function: return 1.0 if a response's final answer is correct."""
    return verify_math(solution_str, ground_truth)


def rows(dataset: str) -> list[dict[str, Any]]:
    """Return the problems in ``dataset`` as rows for verl, in order."""
    task: Any = load_problems(None, (dataset,), None)
    return [
        {
            "data_source": problem.source,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "reward_model": {"style": "rule", "ground_truth": problem.verify.keywords["answer"]},
        }
        for problem in task
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="polaris")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    problems = rows(arguments.dataset)
    datasets.Dataset.from_list(problems).to_parquet(arguments.out)
    print(f"wrote {len(problems)} problems to {arguments.out}")


if __name__ == "__main__":
    main()
