"""Rollouts sampled once, scored under many schedules, and stored on disk.

Shapes: T response tokens, n entries of the actor's top-n list.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sparrow import files
from sparrow.engines.base import Engine, Scorer
from sparrow.engines.measure import sample
from sparrow.errors import ConfigError
from sparrow.mismatch import engine_noise, with_noise
from sparrow.mismatch.tokens import TokenAcceptance, token_acceptance
from sparrow.rollout import Rollout, Sampling, Scores, split
from sparrow.schedule import SparsitySchedule


class Trajectories:
    """Rollouts sampled once and scored under many schedules by teacher forcing.

    The target applies to the sampler's p5, but the scorer rounds differently from the sampler.
    Under the schedule that generated the rollouts, the difference between the two can be measured
    at every token. To simulate the sampler under other schedules, including the dense one, the
    difference is added to the scorer's log-probs as noise.

    Everything is stored in ``folder``, so an interrupted calibration picks up where it left off.

    Args:
        engine: samples the responses.
        scorer: scores the responses, with the same weights as ``engine``.
        prompts: one prompt per response.
        sampling: how responses are sampled.
        folder: where rollouts and scores are stored. Existing files are reused if prompts,
            sampling, ``behaviour`` and ``made_by`` are the same.
        behaviour: the schedule to sample under; dense by default.
        made_by: identifies the weights and the engine, as plain JSON types; needed if the folder
            may be shared with other weights or engines.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        folder: Path,
        behaviour: SparsitySchedule | None = None,
        made_by: Mapping[str, Any] | None = None,
    ) -> None:
        self._scorer = scorer
        self._temperature = sampling.temperature
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._behaviour = behaviour = behaviour or SparsitySchedule.dense()
        prompts = [list(map(int, prompt)) for prompt in prompts]
        self._name = _digest(
            prompts, asdict(sampling), behaviour.to_dict() | {"provenance": None}, made_by
        )
        path = folder / f"rollouts-{self._name}.npz"
        if path.exists():
            engine.sleep()  # so that the scorer can use the device memory, as after ``sample``
        else:
            _save_rollouts(path, sample(engine, prompts, sampling, behaviour))
        self.rollouts = _load_rollouts(path)
        self._dense = self._top_logprobs(SparsitySchedule.dense())
        scored = None if engine is scorer else self._top_logprobs(behaviour)
        self._noise = scored and [
            engine_noise(r.top_logprobs, q) for r, q in zip(self.rollouts, scored, strict=True)
        ]

    def acceptance(self, schedule: SparsitySchedule | None = None) -> list[TokenAcceptance]:
        """Compute the actor's acceptance rates against the dense model, under ``schedule`` or, by
        default, the schedule that generated the rollouts.
        """
        sparse: list[Any] = (
            self._top_logprobs(schedule) if schedule else [None] * len(self.rollouts)
        )
        if schedule and self._noise:
            sparse = [with_noise(q, noise) for q, noise in zip(sparse, self._noise, strict=True)]
        rows = zip(self.rollouts, self._dense, sparse, strict=True)
        return [
            token_acceptance(rollout, p, schedule or self._behaviour, q) for rollout, p, q in rows
        ]

    def ceiling(self) -> list[TokenAcceptance]:
        """Compute the acceptance of dense rollouts. It falls short of 1 because of sampler noise,
        and because the lists don't cover all tokens.
        """
        sampled = self._dense
        if self._noise:
            sampled = [
                with_noise(p, noise) for p, noise in zip(self._dense, self._noise, strict=True)
            ]
        rows = zip(self.rollouts, self._dense, sampled, strict=True)
        return [token_acceptance(rollout, p, self._behaviour, q) for rollout, p, q in rows]

    def _top_logprobs(self, schedule: SparsitySchedule) -> list[np.ndarray]:
        path = (
            self._folder
            / f"scores-{_digest(self._name, schedule.to_dict() | {'provenance': None})}.npy"
        )
        if not path.exists():
            scores: list[Scores] = self._scorer.score(self.rollouts, schedule, self._temperature)
            with files.replacing(path) as file:
                np.save(file, np.concatenate([s.top_logprobs for s in scores]))
        with _reading(path):
            flat = np.load(path)
        return split(flat, [len(r) for r in self.rollouts])


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


_ARRAYS = ("response_ids", "logprobs", "top_ids", "top_logprobs")


def _save_rollouts(path: Path, rollouts: Sequence[Rollout]) -> None:
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(r, name) for r in rollouts]) for name in _ARRAYS
    }
    arrays["prompt_ids"] = np.concatenate([np.asarray(r.prompt_ids, np.int64) for r in rollouts])
    arrays["prompt_lengths"] = np.array([len(r.prompt_ids) for r in rollouts])
    arrays["lengths"] = np.array([len(r) for r in rollouts])
    arrays["finish_reasons"] = np.array([r.finish_reason for r in rollouts])
    with files.replacing(path) as file:
        np.savez(file, **arrays)


def _load_rollouts(path: Path) -> list[Rollout]:
    with _reading(path), np.load(path) as file:
        prompts = split(file["prompt_ids"], file["prompt_lengths"])
        columns = [split(file[name], file["lengths"]) for name in _ARRAYS]
        reasons = file["finish_reasons"].tolist()
    rows = zip(prompts, *columns, reasons, strict=True)
    return [Rollout(prompt.tolist(), *parts) for prompt, *parts in rows]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn any error into a ConfigError, because numpy raises errors of many types if a file is
    damaged.
    """
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"cannot read {path}, which may be damaged ({type(error).__name__}); delete it, and "
            "run the same command again"
        ) from error
