"""Evaluate the dense policy during training, just like ``sparrow eval``, and pick the best step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparrow.engines.base import Engine
from sparrow.evaluation.benchmark import judge, sample
from sparrow.evaluation.scores import mean_at_k, pass_at_k
from sparrow.rollout import Sampling
from sparrow.run.directory import Row
from sparrow.tasks import Problem
from sparrow.train.config import TrainConfig
from sparrow.train.ranks import Ranks

# benchmark name, as logged -> its problems
Benchmarks = Mapping[str, Sequence[Problem]]


@dataclass(frozen=True)
class Evaluator:
    """Samples and scores a run's benchmarks. Every process gets all the scores."""

    config: TrainConfig
    tokenizer: PreTrainedTokenizerBase
    benchmarks: Benchmarks
    engine: Engine
    ranks: Ranks

    def due(self, step: int) -> bool:
        """Return whether to evaluate the policy after ``step`` steps."""
        every = self.config.eval.every
        return every is not None and (step % every == 0 or step == self.config.steps)

    def scores(self) -> dict[str, dict[str, Any]]:
        """Score every benchmark with the engine's current weights. The scores are listed in
        docs/run-directory.md.

        A response's seed depends only on its problem and sample number, so ``sparrow eval`` with
        the run's seed uses the same seeds.

        Raises RewardError if a verifier failed. Raises ConfigError if the engine cannot use a
        prompt.
        """
        return {name: self._score(problems) for name, problems in self.benchmarks.items()}

    def _score(self, problems: Sequence[Problem]) -> dict[str, Any]:
        config = self.config.eval
        seed = self.config.seed
        sampling = Sampling(
            config.max_new_tokens or self.config.rollout.max_new_tokens,
            config.temperature,
            top_n=0,
            seed=seed,
            top_k=config.top_k,
            top_p=config.top_p,
        )

        def respond(rows: Sequence[int]) -> list[tuple[float, int, bool]]:
            asked = [divmod(row, config.k) for row in rows]
            rollouts = sample(self.engine, self.tokenizer, problems, asked, sampling)
            time_limit = self.config.reward.time_limit
            answered = [problems[i] for i, _ in asked]
            _, rewards = judge(self.tokenizer, answered, rollouts, time_limit)
            return [
                (reward, len(rollout), rollout.finish_reason == "stop")
                for reward, rollout in zip(rewards, rollouts, strict=True)
            ]

        scored = self.ranks.spread("eval", len(problems) * config.k, respond)
        rewards, tokens, ended = (
            np.array(column, float).reshape(-1, config.k) for column in zip(*scored, strict=True)
        )
        return {
            "mean": asdict(mean_at_k(rewards)),
            "pass": asdict(pass_at_k(rewards, config.k)),
            "problems": len(problems),
            "k": config.k,
            "tokens": tokens.mean(),
            "ended_fraction": ended.mean(),
        }


def best_step(evaluations: Sequence[Row]) -> int | None:
    """Return the step with the best mean@k, averaged over benchmarks; the earliest if several tie.
    Return None if nothing was evaluated.
    """

    def mean(row: Row) -> Any:
        return np.mean([scores["mean"]["value"] for scores in row["eval"].values()])

    means = {row["step"]: mean(row) for row in evaluations}
    return max(means, key=lambda step: (means[step], -step), default=None)
