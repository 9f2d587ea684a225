"""Collects one step's experience: draws problems, samples and judges responses, replaces groups that teach nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparrow.engines.base import Engine
from sparrow.errors import ConfigError, PromptError
from sparrow.rollout import Rollout, Sampling, derived_seed
from sparrow.tasks import Problem, Task
from sparrow.tasks.base import draw
from sparrow.tasks.verify import stated, verify_all
from sparrow.train.config import TrainConfig
from sparrow.train.experience import Experience, Group
from sparrow.train.ranks import Ranks
from sparrow.train.reward import reward_parts


@dataclass(frozen=True)
class Collector:
    """Collects the experience of a run's steps; every process gets all of a step's experience."""

    config: TrainConfig
    tokenizer: PreTrainedTokenizerBase
    task: Task
    engine: Engine
    ranks: Ranks

    def collect(self, cursor: int) -> Experience:
        """The experience of one step, on the problems from index ``cursor`` on.

        Groups whose rewards are all equal have no advantage; in up to ``resample`` rounds they are replaced by groups
        of further problems (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2).

        Raises RewardError: a verifier failed. TaskError: the task gave no problem. ConfigError: the engine cannot take
        a prompt.
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
        """``count`` responses to the problems of the first step, not judged, sampled with seeds that no step uses."""
        config, rollout = self.config, self.config.rollout
        problems = [draw(self.task, i, config.seed) for i in range(min(count, rollout.prompts))]
        prompts = [self.tokenizer(p.prompt, add_special_tokens=False).input_ids for p in problems]

        def respond(rows: Sequence[int]) -> list[Rollout]:
            seeds = [derived_seed(config.seed, row % len(prompts), rollout.samples + row) for row in rows]
            sampling = Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_n, seeds=seeds)
            chosen = [row % len(prompts) for row in rows]
            return self._generate([problems[i] for i in chosen], [prompts[i] for i in chosen], sampling)

        return self.ranks.spread("ceiling", count, respond)

    def _generate(
        self, problems: Sequence[Problem], prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[Rollout]:
        if not prompts:
            return []
        try:
            return self.engine.generate(prompts, sampling)
        except PromptError as error:
            raise ConfigError(f"problem {problems[error.index].id!r} {error.reason}") from error

    def _sample(self, indices: range) -> list[Group]:
        """The groups of the problems with these indices. The responses to one prompt are spread over the processes,
        because they are often of similar length."""
        config, rollout = self.config, self.config.rollout
        n, limit = rollout.samples, rollout.max_new_tokens
        problems = [draw(self.task, i, config.seed) for i in indices]
        prompts = [self.tokenizer(p.prompt, add_special_tokens=False).input_ids for p in problems]

        def sample(rows: Sequence[int]) -> list[tuple[Rollout, dict[str, float]]]:
            if not rows:
                return []
            # A response's seed does not depend on the process that samples it, nor on the rest of the batch.
            seeds = [derived_seed(config.seed, indices[row // n], row % n) for row in rows]
            sampling = Sampling(limit, rollout.temperature, rollout.top_n, seeds=seeds)
            row_problems = [problems[row // n] for row in rows]
            rollouts = self._generate(row_problems, [prompts[row // n] for row in rows], sampling)
            return list(zip(rollouts, self._verify(row_problems, rollouts), strict=True))

        responses = self.ranks.spread("rollout", n * len(prompts), sample)
        return [
            Group(problem, list(rollouts), list(parts))
            for i, problem in enumerate(problems)
            for rollouts, parts in [zip(*responses[i * n : (i + 1) * n], strict=True)]
        ]

    def _verify(self, problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        """The parts of every response's reward."""
        limit, config = self.config.rollout.max_new_tokens, self.config.reward
        texts = [str(self.tokenizer.decode(r.response_ids, skip_special_tokens=True)) for r in rollouts]
        correct = verify_all(problems, texts, config.time_limit)
        answered = map(stated, problems, texts)
        return [reward_parts(c, s, len(r), limit, config) for c, s, r in zip(correct, answered, rollouts, strict=True)]
