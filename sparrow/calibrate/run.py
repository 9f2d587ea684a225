"""Search for a schedule that keeps p5 above a target, using an engine's own samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow import _moved
from sparrow.calibrate.search import MIN_SEQUENCES, Acceptance, Calibration, calibrate
from sparrow.calibrate.trajectories import Trajectories
from sparrow.engines.base import Engine, Scorer
from sparrow.engines.measure import lengthened
from sparrow.errors import ConfigError
from sparrow.mismatch import BinMismatch, Tau
from sparrow.mismatch.tokens import TokenAcceptance, flatten, pool
from sparrow.rollout import Sampling
from sparrow.schedule import ALL_PAGES, SparsitySchedule

if not TYPE_CHECKING:
    __getattr__ = _moved.attributes_of(__name__)

log = logging.getLogger(__name__)

PILOT = 24  # minimum number of responses per round


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
    """Run ``sparrow.calibrate.calibrate`` on trajectories that ``engine`` samples once per round
    and ``scorer`` scores.

    Acceptance is lower on the actor's own samples, so each ``on_policy`` round samples under the
    schedule found so far and continues the search from there. The last round uses all prompts, and
    earlier rounds a tenth of them.

    Args:
        engine, scorer, prompts, sampling, folder, made_by: see ``Trajectories``.
        budgets: top-k values to try at every length in the first search. No bin ever gets fewer
            pages than the smallest of these values.
        target, refine, provenance, relative: see ``sparrow.calibrate.calibrate``.
        layout: page size, bins, dense layers and head budgets. The first round samples under it. If
            it's dense and more rounds follow, the first round saves time by sampling under the
            largest of ``budgets`` instead.
        on_policy: number of rounds after the first; with 0, there is a single search, on responses
            sampled under ``layout``.
        lengthen: whether to resample with longer top-n lists if even dense rollouts need them.
        listener: called with the pass name at the start of every pass.

    Raises ConfigError if there are too few prompts for a confidence interval for p5, or if there
    are on-policy rounds but no passes to refine their first schedule. Also raises ConfigError if no
    budget meets the target in any length bin, or if the lists of ``sampling.top_n`` tokens are too
    short to show that a budget meets the target.
    """
    if len(prompts) < MIN_SEQUENCES:
        raise ConfigError(
            f"{len(prompts)} responses are too few for a confidence interval for p5, which needs "
            f"at least {MIN_SEQUENCES}; raise count"
        )
    if on_policy and not refine:
        raise ConfigError(
            f"on_policy is {on_policy}, but refine is 0 and on-policy rounds start from a refined "
            "schedule; raise refine, or set on_policy to 0"
        )
    fewest = min(budgets)
    tau = Tau(target, relative)
    # tails that the last rollouts would have had with dense sampling
    ceiling: tuple[BinMismatch, ...] = ()

    def search(
        number: int, behaviour: SparsitySchedule, trials: Sequence[SparsitySchedule]
    ) -> Calibration:
        nonlocal ceiling, sampling
        some = prompts if number == on_policy else prompts[: max(PILOT, len(prompts) // 10)]
        longer: Sampling | None = sampling
        while longer:
            sampling = longer
            seed = longer.seed + number
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
                f"round {number}: scoring with {' to '.join(map(str, pages[:1] + pages[1:][-1:]))} "
                "pages"
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
            f"no budget up to {max(budgets)} pages reaches {tau.statistic} {target:g} in any "
            f"length bin: the best lower limit {'of p5 ' if relative else ''}was {best:.3f}; try "
            "larger budgets, sample more responses, or lower the target"
        )
    return calibration


def _not_shown(dense: Sequence[BinMismatch], tau: Tau, top_n: int, one_program: bool) -> str | None:
    """Say at which lengths not even dense rollouts can be shown to reach ``tau``, or return None if
    there are no such lengths. ``dense`` is the tail of dense rollouts.
    """
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
        f"the lists of {top_n} tokens cover only {b.lower_bound:.3f} of the probability at the 5th "
        "percentile"
        if one_program
        else f"dense rollouts have p5 {b.lower_bound:.3f} with this engine and its lists of "
        f"{top_n} tokens"
    )
    return (
        f"at lengths {b.start}-{b.end} {why}, so no budget can be shown to reach p5 {tau.value:g} "
        "there; sample with longer lists (--top-n), or lower the target"
    )
