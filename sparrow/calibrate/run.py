"""Measures the mismatch of an engine's actor on its rollouts, and finds a schedule that keeps p5
above a target.

Shapes: T response tokens, n entries of the actor's top-n list.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparrow.calibrate.search import MIN_SEQUENCES, Acceptance, Calibration, calibrate
from sparrow.engines.base import Engine, Scorer
from sparrow.errors import ConfigError
from sparrow.mismatch import BinMismatch, Ceiling, Tau, engine_noise, with_noise
from sparrow.mismatch.ceiling import CEILING_RESPONSES
from sparrow.mismatch.tokens import TokenAcceptance, flatten, left_open, pool, token_acceptance
from sparrow.rollout import Rollout, Sampling, Scores, split
from sparrow.schedule import ALL_PAGES, SparsitySchedule

log = logging.getLogger(__name__)

PILOT = 24  # the fewest responses that a round samples
SHORTEST_LISTS, LONGEST_LISTS, LENGTHEN = 20, 1280, 4
"""Lengths of the actor's lists of tokens where none is given: the first, the longest, and the
factor by which lists grow as long as they leave open whether the target is met."""


def lengthened(sampling: Sampling, bins: Sequence[BinMismatch], p5: float) -> Sampling | None:
    """The same sampling with longer lists of tokens; None if the present lists show for all
    ``bins`` whether the tail reaches ``p5``, or if they already have the greatest length."""
    top_n = min(sampling.top_n * LENGTHEN, LONGEST_LISTS)
    if top_n <= sampling.top_n or not left_open(
        bins, Tau(p5, relative=False), sampling.top_n, "--top-n"
    ):
        return None
    log.warning(
        "lists of %d tokens leave open whether p5 reaches %g; sampling again with %d",
        sampling.top_n,
        p5,
        top_n,
    )
    return replace(sampling, top_n=top_n)


class Comparison(NamedTuple):
    """Samples of an actor beside the dense model."""

    acceptances: list[TokenAcceptance]  # of each response
    off_policy: np.ndarray  # float64 [T], |log p - log q| of all sampled tokens, end to end


def compare(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    schedule: SparsitySchedule,
) -> Comparison:
    """Sample with the engine's actor under ``schedule`` and compare with the dense model, token by
    token; the engine's counters are of these samples alone.

    Args: engine, scorer: both with the same weights; may be one object, as ``HFEngine`` is both.
        prompts: token ids. sampling: how responses are sampled; its lists of ``top_n`` tokens bound
        the acceptance rate. schedule: what the actor may read.
    """
    engine.counters()  # forget what was sampled before
    rollouts = _sample(engine, prompts, sampling, schedule)
    policy = scorer.score(rollouts, SparsitySchedule.dense(), sampling.temperature)
    pairs = list(zip(rollouts, policy, strict=True))
    off_policy = [np.abs(p.logprobs.astype(np.float64) - r.logprobs) for r, p in pairs]
    acceptances = [token_acceptance(r, p.top_logprobs, schedule) for r, p in pairs]
    return Comparison(acceptances, np.concatenate(off_policy))


def measure(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    schedule: SparsitySchedule,
) -> list[TokenAcceptance]:
    """The acceptance of each response of ``compare``."""
    return compare(engine, scorer, prompts, sampling, schedule).acceptances


def measure_ceiling(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    schedule: SparsitySchedule,
) -> Ceiling:
    """The p5 of dense rollouts with the same engine, scorer and lists, in the length bins of
    ``schedule``.

    Arguments as in ``measure``; at most ``CEILING_RESPONSES`` prompts, spread evenly over all, are
    sampled.
    """
    chosen = (
        np.linspace(0, len(prompts) - 1, min(CEILING_RESPONSES, len(prompts))).round().astype(int)
    )
    dense = schedule.replace(top_k=(ALL_PAGES,))
    ceiling = Ceiling()
    ceiling.measure(
        pool(
            measure(engine, scorer, [prompts[i] for i in chosen], sampling, dense),
            schedule.bin_tokens,
            sampling.seed,
        )
    )
    return ceiling


def _sample(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, schedule: SparsitySchedule
) -> list[Rollout]:
    """Rollouts under ``schedule``; the engine is awake only meanwhile, so that the scorer fits on
    its device.
    """
    engine.wake()
    engine.set_schedule(schedule)
    rollouts = engine.generate(prompts, sampling)
    engine.sleep()
    return rollouts


def calibrate_engine(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    folder: Path,
    *,
    budgets: Sequence[int],
    target: float,
    layout: SparsitySchedule,
    refine: int,
    on_policy: int,
    provenance: Mapping[str, Any],
    relative: bool = False,
    lengthen: bool = False,
    made_by: Mapping[str, Any] | None = None,
    listener: Callable[[str], None] = lambda phase: None,
) -> Calibration:
    """``sparrow.calibrate.calibrate`` for the model of an engine and a scorer, on trajectories
    sampled once a round.

    Each of the ``on_policy`` rounds samples under the schedule found so far, as the actor's own
    tokens are harder for it, and searches again from there; the last round takes all prompts,
    earlier ones a tenth.

    Args: engine, scorer, prompts, sampling, folder, made_by: see ``Trajectories``. budgets: top-k
        values that the first search tries at every length; no bin ever gets fewer than the
        smallest. target, refine, provenance, relative: see ``sparrow.calibrate.calibrate``. layout:
        gives page size, bins, dense layers and budgets of heads. The first round samples under it;
        but if it is
            dense and more rounds follow, the first samples under the largest of ``budgets``, at a
            fraction of the time.
        on_policy: rounds after the first; 0 searches once, on trajectories of ``layout``.
        lengthen: whether responses are sampled again with longer lists where those of dense
        rollouts are too short.
        listener: called at the start of every pass with its name.

    Raises ConfigError: fewer prompts than an interval of p5 needs; rounds on policy without a pass
    to refine what they start from; or no budget holds the target in any length bin, or the lists of
    ``sampling.top_n`` tokens are too short to show that one does.
    """
    if len(prompts) < MIN_SEQUENCES:
        raise ConfigError(
            f"{len(prompts)} responses give no interval of p5, at least {MIN_SEQUENCES} are needed; raise count"
        )
    if on_policy and not refine:
        raise ConfigError(
            "rounds on policy need a pass to refine what they start from; raise refine, or on_policy=0"
        )
    fewest, tau = min(budgets), Tau(target, relative)
    ceiling: tuple[BinMismatch, ...] = ()  # of the last rollouts, had they been dense

    def search(
        number: int, behaviour: SparsitySchedule, trials: Sequence[SparsitySchedule]
    ) -> Calibration:
        nonlocal ceiling, sampling
        some = prompts if number == on_policy else prompts[: max(PILOT, len(prompts) // 10)]
        longer: Sampling | None = sampling
        while longer:
            sampling, seed = longer, longer.seed + number
            listener(f"round {number}: sampling {len(some)} responses")
            trajectories = Trajectories(
                engine, scorer, some, replace(sampling, seed=seed), folder, behaviour, made_by
            )
            best = trajectories.ceiling()
            dense = pool(best, layout.bin_tokens)
            longer = lengthened(sampling, dense.bins, target) if lengthen else None
        ceiling = dense.bins

        def tokens(responses: Sequence[TokenAcceptance]) -> Acceptance:
            lower, _, position, sequence = flatten(responses)
            return Acceptance(lower, position, sequence)

        def scored(schedule: SparsitySchedule) -> Acceptance:
            pages = sorted({k for k in schedule.top_k if k < ALL_PAGES})
            listener(
                f"round {number}: scoring with {' to '.join(map(str, pages[:1] + pages[1:][-1:]))} pages"
            )
            return tokens(trajectories.acceptance(None if schedule == behaviour else schedule))

        sampled = {"sampled_under": behaviour.to_dict()["top_k"]}
        return calibrate(
            scored,
            trials,
            target,
            fewest,
            refine,
            seed=seed,
            provenance={**provenance, **sampled},
            ceiling=tokens(best),
            relative=relative,
        )

    trials = [layout.replace(top_k=(k,)) for k in sorted(set(budgets))]
    calibration = search(0, trials[-1] if layout.is_dense and on_policy else layout, trials)
    for number in range(1, on_policy + 1):
        if not calibration.schedule.is_dense:
            calibration = search(number, calibration.schedule, [calibration.schedule])
    if reason := _not_shown(ceiling, tau, sampling.top_n, engine is scorer):
        if calibration.schedule.is_dense:
            raise ConfigError(reason)
        log.warning("%s", reason)
    if calibration.schedule.is_dense:
        best = max(tail.lower for tails in calibration.curves.values() for tail in tails)
        raise ConfigError(
            f"no budget up to {max(budgets)} pages holds {tau.statistic} {target:g} in any length bin: the best lower "
            f"limit {'of p5 ' if relative else ''}was {best:.3f}; try larger budgets, sample more responses, or lower "
            "the target"
        )
    return calibration


def _not_shown(dense: Sequence[BinMismatch], tau: Tau, top_n: int, one_program: bool) -> str | None:
    """A sentence on lengths where no budget can be shown to hold ``tau``, because not even dense
    rollouts, with the tail ``dense``, hold it; None if there are none."""
    if tau.relative:
        bins = (
            replace(
                b, ceiling=b.lower_bound, ceiling_low=b.interval_low, ceiling_high=b.interval_high
            )
            for b in dense
        )
        return tau.out_of_reach(bins)
    b = min(dense, key=lambda b: b.lower_bound)
    if b.lower_bound >= tau.value:
        return None
    why = (
        f"the lists of {top_n} tokens hold {b.lower_bound:.3f} of the probability at the 5th percentile"
        if one_program
        else f"dense rollouts have p5 {b.lower_bound:.3f} with this engine and its lists of {top_n} tokens"
    )
    return (
        f"at lengths {b.start}-{b.end} {why}, so no budget can be shown to hold p5 {tau.value:g} there; sample with "
        "longer ones (--top-n), or lower the target"
    )


class Trajectories:
    """Rollouts sampled once, to be scored under many schedules by teacher-forced passes.

    The scorer's numerics differ from the sampler's, and p5 has to hold for the sampler. So the
    sampler's noise, known at every token under the schedule that was sampled under, is added to the
    log-probs of all schedules, also dense.

    Everything is kept in ``folder``, so an interrupted calibration continues where it stopped.

    Args: engine, scorer: both with the same weights. prompts, sampling: what is sampled, and how.
        folder: where rollouts and scores are kept; those already there for the same prompts,
        sampling and ``made_by``
            are reused.
        behaviour: the schedule to sample under; dense by default.
        made_by: which weights and engine these are, in JSON types; needed where a folder may be
        used with others.
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
        self._scorer, self._temperature, self._folder = scorer, sampling.temperature, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._behaviour = behaviour = behaviour or SparsitySchedule.dense()
        prompts = [list(map(int, prompt)) for prompt in prompts]
        self._name = _digest(
            prompts, asdict(sampling), behaviour.to_dict() | {"provenance": None}, made_by
        )
        path = folder / f"rollouts-{self._name}.npz"
        if not path.exists():
            _save_rollouts(path, _sample(engine, prompts, sampling, behaviour))
        self.rollouts = _load_rollouts(path)
        self._dense = self._top_logprobs(SparsitySchedule.dense())
        scored = None if engine is scorer else self._top_logprobs(behaviour)
        self._noise = scored and [
            engine_noise(r.top_logprobs, q) for r, q in zip(self.rollouts, scored, strict=True)
        ]

    def acceptance(self, schedule: SparsitySchedule | None = None) -> list[TokenAcceptance]:
        """Acceptance between the dense model and its actor under ``schedule``; by default, the one
        sampled under.
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
        """Acceptance of dense rollouts; below 1 because of what the lists leave out and of the
        sampler's noise.
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
            partial = path.with_suffix(".partial.npy")
            np.save(partial, np.concatenate([s.top_logprobs for s in scores]))
            partial.replace(path)
        return split(np.load(path), [len(r) for r in self.rollouts])


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
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **arrays)
    partial.replace(path)


def _load_rollouts(path: Path) -> list[Rollout]:
    with np.load(path) as file:
        prompts = split(file["prompt_ids"], file["prompt_lengths"])
        columns = [split(file[name], file["lengths"]) for name in _ARRAYS]
        reasons = file["finish_reasons"].tolist()
    rows = zip(prompts, *columns, reasons, strict=True)
    return [Rollout(prompt.tolist(), *parts) for prompt, *parts in rows]
