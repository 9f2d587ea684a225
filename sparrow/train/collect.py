"""Collect a step's experience: draw problems, sample and judge responses, and replace groups with
all-equal rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparrow.engines.base import Engine
from sparrow.evaluation.benchmark import judge, respond
from sparrow.rollout import Rollout, Sampling, derived_seed
from sparrow.tasks import Problem, Task
from sparrow.tasks.base import draw
from sparrow.tasks.verify import stated
from sparrow.train.config import TrainConfig
from sparrow.train.experience import Experience, Group
from sparrow.train.ranks import Ranks
from sparrow.train.reward import reward_parts


@dataclass(frozen=True)
class Collector:
    """Collects experience, one training step at a time. The processes share the work, and each gets
    the full result.
    """

    config: TrainConfig
    tokenizer: PreTrainedTokenizerBase
    task: Task
    engine: Engine
    ranks: Ranks

    def collect(self, cursor: int) -> Experience:
        """Collect one step's experience, drawing problems from index ``cursor`` on.

        A group with all-equal rewards has zero advantages and teaches nothing. Such groups are
        replaced with groups for new problems, in up to ``resample`` rounds (dynamic sampling: DAPO,
        arXiv 2503.14476, section 3.2).

        Raises RewardError if a verifier failed. Raises TaskError if the task did not return a
        problem. Raises ConfigError if the engine cannot use a prompt.
        """
        rollout = self.config.rollout
        groups = drawn = self._sample(range(cursor, cursor + rollout.prompts))
        cursor += rollout.prompts
        for _ in range(rollout.resample):
            zero_variance = [i for i, group in enumerate(groups) if not np.ptp(group.rewards)]
            if not zero_variance:
                break
            fresh = self._sample(range(cursor, cursor + len(zero_variance)))
            cursor += len(zero_variance)
            drawn = drawn + fresh
            replacements = dict(zip(zero_variance, fresh, strict=True))
            groups = [replacements.get(i, group) for i, group in enumerate(groups)]
        return Experience.join(groups, drawn, cursor)

    def sample(self, count: int) -> list[Rollout]:
        """Sample ``count`` responses to the first step's problems, without judging them. The seeds
        of these responses are never used in training.
        """
        config = self.config
        rollout = self.config.rollout
        problems = self.draw(range(min(count, rollout.prompts)))

        def sample(rows: Sequence[int]) -> list[Rollout]:
            seeds = [
                derived_seed(config.seed, row % len(problems), rollout.samples + row)
                for row in rows
            ]
            return self._respond([problems[row % len(problems)] for row in rows], seeds)

        return self.ranks.spread("ceiling", count, sample)

    def draw(self, indices: range) -> list[Problem]:
        """Draw the problems in ``indices``. Each process draws all of them.

        Raises TaskError in every process if the task failed in one.
        """
        problems: list[Problem] = []
        seed = self.config.seed
        # Problems may hold functions, so they can't be sent to other processes.
        self.ranks.gather(
            "draw", lambda: problems.extend(draw(self.task, i, seed) for i in indices)
        )
        return problems

    def _respond(self, problems: Sequence[Problem], seeds: Sequence[int]) -> list[Rollout]:
        rollout = self.config.rollout
        sampling = Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_n, seeds=seeds)
        return respond(self.engine, self.tokenizer, problems, sampling)

    def _sample(self, indices: range) -> list[Group]:
        """Sample and judge a group of responses to each problem in ``indices``.

        Responses to the same prompt tend to be similarly long, so they are spread over the
        processes to balance the load.
        """
        config = self.config
        n = self.config.rollout.samples
        problems = self.draw(indices)

        def sample(rows: Sequence[int]) -> list[tuple[Rollout, dict[str, float]]]:
            # A response's seed must not depend on which process samples it or what else is in the
            # batch.
            seeds = [derived_seed(config.seed, indices[row // n], row % n) for row in rows]
            asked = [problems[row // n] for row in rows]
            rollouts = self._respond(asked, seeds)
            return list(zip(rollouts, self._verify(asked, rollouts), strict=True))

        responses = self.ranks.spread("rollout", n * len(problems), sample)
        return [
            Group(problem, list(rollouts), list(parts))
            for i, problem in enumerate(problems)
            for rollouts, parts in [zip(*responses[i * n : (i + 1) * n], strict=True)]
        ]

    def _verify(
        self, problems: Sequence[Problem], rollouts: Sequence[Rollout]
    ) -> list[dict[str, float]]:
        """Judge every response, and compute its reward parts by name."""
        limit = self.config.rollout.max_new_tokens
        config = self.config.reward
        texts, correct = judge(self.tokenizer, problems, rollouts, config.time_limit)
        answered = map(stated, problems, texts)
        return [
            reward_parts(c, s, len(r), limit, config)
            for c, s, r in zip(correct, answered, rollouts, strict=True)
        ]
