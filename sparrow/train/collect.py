"""One step's experience: problems drawn, responses sampled and verified, groups that teach nothing replaced.

All decisions that several processes must share are made on gathered counts, so they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from sparrow.engines.base import Engine, Rollout, Sampling
from sparrow.tasks import Problem, Task
from sparrow.train.config import TrainConfig
from sparrow.train.experience import Experience, Group, verify
from sparrow.train.reward import reward_parts

VERIFYING = 64
"""Responses verified at a time. Verifiers that need processors wait for their own pools, so one bad program holds up
itself only."""


def derived_seed(*entropy: int) -> int:
    """A seed for each tuple of numbers."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


class Collector:
    """Samples this process's share of every step.

    Args:
        config: of the whole run.
        tokenizer: encodes prompts and decodes responses.
        task: where problems come from.
        engine: the sparse actor.
        accelerator: says which process this is.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        engine: Engine,
        accelerator: Accelerator,
    ) -> None:
        self._config, self._tokenizer, self._task, self._engine = config, tokenizer, task, engine
        self._rank, self._world = accelerator.process_index, accelerator.num_processes

    def collect(self, step: int, cursor: int) -> Experience:
        """The experience of ``step``, of problems from ``cursor`` on.

        Groups whose rewards are all equal have no advantage; for ``resample`` rounds they are replaced by groups of
        further problems (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2).

        Raises:
            RewardError: a verifier that failed.
        """
        rollout = self._config.rollout
        groups = drawn = self._sample(range(cursor + self._rank, cursor + rollout.prompts, self._world), step)
        cursor += rollout.prompts
        for extra in range(1, rollout.resample + 1):
            level = [i for i, group in enumerate(groups) if not np.ptp(group.rewards)]
            counts = gather_object([len(level)])
            if not sum(counts):
                break
            first = cursor + sum(counts[: self._rank])
            fresh = self._sample(range(first, first + len(level)), step, extra)
            cursor += sum(counts)
            drawn = drawn + fresh
            replaced = dict(zip(level, fresh, strict=True))
            groups = [replaced.get(i, group) for i, group in enumerate(groups)]
        return Experience.join(groups, drawn, cursor)

    def _sample(self, indices: Sequence[int], *entropy: int) -> list[Group]:
        """Groups of the problems with these indices; ``entropy`` tells this call from others of the run."""
        if not indices:
            return []
        config, rollout = self._config, self._config.rollout
        problems = [self._task.problem(i, config.seed) for i in indices]
        prompts = [self._tokenizer(p.prompt, add_special_tokens=False).input_ids for p in problems]
        seed = derived_seed(config.seed, entropy[0], self._rank, *entropy[1:])
        sampling = Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_n, seed)
        rollouts = self._engine.generate([p for p in prompts for _ in range(rollout.samples)], sampling)
        texts = [self._text(r) for r in rollouts]
        parts = self._verify([p for p in problems for _ in range(rollout.samples)], rollouts, texts)
        baselines: list[float | None] = [None] * len(problems)
        if config.advantage == "remax":
            greedy = self._engine.generate(prompts, Sampling(rollout.max_new_tokens, 0.0, 0))
            verified = self._verify(problems, greedy, [self._text(r) for r in greedy])
            baselines = [sum(p.values()) for p in verified]
        return [
            Group(problem, rollouts[rows], texts[rows], parts[rows], baselines[i])
            for i, problem in enumerate(problems)
            for rows in [slice(i * rollout.samples, (i + 1) * rollout.samples)]
        ]

    def _verify(
        self, problems: Sequence[Problem], rollouts: Sequence[Rollout], texts: Sequence[str]
    ) -> list[dict[str, float]]:
        """The parts of every response's reward."""
        limit, config = self._config.rollout.max_new_tokens, self._config.reward
        with ThreadPoolExecutor(VERIFYING) as threads:
            correct = list(threads.map(verify, problems, texts))
        stated = [
            p.extract is not None and p.extract(text) is not None for p, text in zip(problems, texts, strict=True)
        ]
        rows = zip(correct, stated, rollouts, strict=True)
        return [reward_parts(c, s, len(r), limit, config) for c, s, r in rows]

    def _text(self, rollout: Rollout) -> str:
        return str(self._tokenizer.decode(rollout.response_ids, skip_special_tokens=True))
