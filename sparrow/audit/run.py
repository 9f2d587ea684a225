"""Run an audit: sample with the engine under test and with a dense engine, rank all tokens with the
dense model, and run the tests on both sets of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sparrow.audit.statistics import COMMON, Tokens, Verdict, audit, cells_of_lists
from sparrow.engines.base import Engine, ListScorer, Ranker
from sparrow.errors import ConfigError, EngineError
from sparrow.rollout import Rollout, Sampling, Standing, TopLists, derived_seed

Logprobs = Literal["processed", "raw", "none"]
"""The kind of log-probs the engine reports. ``processed``: after temperature and truncation.
``raw``: at temperature 1, without truncation. ``none``: not comparable, or not reported.
"""


@dataclass(frozen=True)
class Audit:
    """An audit's verdict, and a summary of its samples."""

    verdict: Verdict
    sampling: Sampling
    prompts: int
    tokens: int  # tokens in the tested arm
    dense_tokens: int | None
    tested_counters: dict[str, Any]  # ``Counters.to_dict`` of the tested engine

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain JSON types."""
        return {
            **self.verdict.to_dict(),
            "sampling": asdict(self.sampling),
            "prompts": self.prompts,
            "tokens": self.tokens,
            "dense_tokens": self.dense_tokens,
            "counters": self.tested_counters,
        }


def run_audit(
    tested: Callable[[], Engine],
    dense: Callable[[], Engine] | None,
    ranker: Callable[[], AbstractContextManager[Ranker]],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    logprobs: Logprobs = "processed",
    level: float = 0.01,
    resolution: float = 0.05,
    listener: Callable[[str], None] = lambda _: None,
    prefills: bool = False,
) -> Audit:
    """Audit an engine. The two arms run one after the other, on the same prompts with different
    seeds.

    Args:
        tested: creates the engine to audit. Each engine is closed before the next engine or the
            ranker is created, so that all of them can use the same device.
        dense: creates the engine for dense decoding; None to skip the dense arm.
        ranker: creates the ranker.
        prompts: one prompt per response.
        listener: called with a description at the start of each pass.
        prefills: whether the ranker prefills prompts and responses with the dense engine. Then the
            dense arm runs first, so that a context that is too short for this is refused before
            anything is sampled.

    Raises ConfigError if sampling is greedy or the dense engine's context leaves no room for
    ``prefills``, or EngineError if a reported log-prob is NaN.
    """
    check(sampling)

    def sampled_densely() -> list[Rollout] | None:
        if dense is None:
            return None
        listener(f"sampling {len(prompts)} responses densely")
        other = replace(sampling, seed=derived_seed(sampling.seed, 1))
        return _sampled(dense, prompts, other, prefills)[0]

    theirs = sampled_densely() if prefills else None
    listener(f"sampling {len(prompts)} responses")
    rollouts, counters = _sampled(tested, prompts, sampling)
    if not prefills:
        theirs = sampled_densely()

    listener("ranking all tokens with the dense model")
    beside = None
    with ranker() as made:
        ours = tokens_of(rollouts, made.rank(rollouts, sampling, COMMON), logprobs)
        if theirs is not None:
            beside = tokens_of(theirs, made.rank(theirs, sampling, COMMON), logprobs)

    verdict = audit(ours, beside, level, resolution, sampling.seed)
    return Audit(
        verdict,
        sampling,
        len(prompts),
        len(ours),
        None if beside is None else len(beside),
        counters,
    )


def check(sampling: Sampling) -> None:
    """Raise ConfigError for greedy sampling, since there's no randomness to test."""
    if sampling.temperature <= 0:
        raise ConfigError(
            f"temperature is {sampling.temperature:g}, but greedy decoding leaves no "
            "distribution to test; compare the tokens with those from dense decoding, or "
            "sample at a temperature above 0"
        )


def _check_room(prompts: Sequence[Sequence[int]], sampling: Sampling, context: int) -> None:
    """Raise ConfigError unless each prompt and its longest response leave room for one more token,
    because vLLM cannot prefill without sampling a token.
    """
    sampling.check(prompts, context)
    longest = max(map(len, prompts))
    if longest + sampling.max_new_tokens == context:
        raise ConfigError(
            f"a prompt of {longest} tokens and max_new_tokens={sampling.max_new_tokens} fill the "
            f"dense engine's context of {context} (in vLLM, max_model_len), but the prefill that "
            "ranks them needs room for one more token; lower max_new_tokens by 1, or raise "
            "max_model_len"
        )


def _sampled(
    make: Callable[[], Engine],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    prefills: bool = False,
) -> tuple[list[Rollout], dict[str, Any]]:
    with closing(make()) as engine:
        if prefills:
            made: Any = engine  # stock vLLM
            _check_room(prompts, sampling, made.context)
        return engine.generate(prompts, sampling), engine.counters().to_dict()


class ListRanker(Ranker):
    """Ranks tokens with lists of the ``length`` most likely tokens. The lists may be too short; see
    ``cells_of_lists``.
    """

    def __init__(self, scorer: ListScorer, length: int) -> None:
        self._scorer = scorer
        self._length = length

    def rank(
        self, rollouts: Sequence[Rollout], sampling: Sampling, common: float
    ) -> list[Standing]:
        """Like ``Ranker.rank``, with nan for values that can't be computed from the lists.

        Raises ConfigError if the lists are useless at this temperature and top-k.
        """
        if sampling.top_k is None and sampling.temperature != 1:
            raise ConfigError(
                f"temperature is {sampling.temperature:g}, but the probabilities of listed "
                "tokens are known only at temperature 1; set top_k to at most "
                f"{self._length}, sample at temperature 1, or score with transformers "
                "(--scorer hf)"
            )
        if sampling.top_k is not None and sampling.top_k > self._length:
            raise ConfigError(
                f"top_k is {sampling.top_k}, but the lists contain only {self._length} tokens; "
                "request longer lists (--lists), or score with transformers "
                "(--scorer hf)"
            )
        lists = self._scorer.top_lists(rollouts, self._length)
        return [
            self._standing(rollout, found, sampling, common)
            for rollout, found in zip(rollouts, lists, strict=True)
        ]

    def _standing(
        self, rollout: Rollout, found: TopLists, sampling: Sampling, common: float
    ) -> Standing:
        is_token = found.top_ids == np.asarray(rollout.response_ids)[:, None]
        index = np.where(is_token.any(1), is_token.argmax(1), -1)
        cells = cells_of_lists(
            found.top_logprobs.astype(np.float64),
            index,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            common,
        )
        lost = np.where(cells.known, 0.0, np.nan)
        raw = found.logprobs.astype(np.float64)
        if sampling.temperature == 1 and not sampling.truncated:
            logprobs = raw  # ``cells.p`` counts all unlisted tokens
        else:
            unlikely = np.full(len(raw), -np.inf)
            logprobs = np.log(cells.p, out=unlikely, where=cells.p > 0) + lost
        return Standing(
            before=cells.before + lost,
            p=cells.p + lost,
            entropy=cells.entropy + lost,
            common=cells.common,
            is_common=cells.is_common,
            logprobs=logprobs,
            raw_logprobs=raw,
        )

    def close(self) -> None:
        """Close the scorer."""
        self._scorer.close()


def tokens_of(
    rollouts: Sequence[Rollout], standings: Sequence[Standing], logprobs: Logprobs = "processed"
) -> Tokens:
    """Concatenate the tokens of all rollouts.

    Raises EngineError if a reported log-prob is NaN.
    """
    assert logprobs in get_args(Logprobs), logprobs

    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(each, name) for each in standings])

    reported = None
    scored = None
    if logprobs != "none":
        reported = np.concatenate([r.logprobs for r in rollouts]).astype(np.float64)
        if np.isnan(reported).any():
            raise EngineError(
                f"the engine reported NaN for {int(np.isnan(reported).sum())} log-probs; "
                "fix the engine, or audit without log-probs (--logprobs none)"
            )
        scored = joined("logprobs" if logprobs == "processed" else "raw_logprobs")

    known = [r.cycle_place for r in rollouts if r.cycle_place is not None]
    lengths = [len(r) for r in rollouts]
    return Tokens(
        before=joined("before"),
        p=joined("p"),
        entropy=joined("entropy"),
        sequence=np.repeat(np.arange(len(rollouts)), lengths),
        place=np.concatenate(known) if len(known) == len(rollouts) else None,
        token=np.concatenate([r.response_ids for r in rollouts]),
        context=_contexts(rollouts),
        common=joined("common"),
        is_common=joined("is_common"),
        reported=reported,
        scored=scored,
    )


def _contexts(rollouts: Sequence[Rollout]) -> NDArray[np.int64]:
    """Number each token's context. Positions preceded by the same tokens get the same number."""
    numbers: dict[Any, int] = {}
    found = []
    for rollout in rollouts:
        before = numbers.setdefault(tuple(map(int, rollout.prompt_ids)), len(numbers))
        for token in rollout.response_ids.tolist():
            found.append(before)
            before = numbers.setdefault((before, token, "response"), len(numbers))
    return np.array(found, dtype=np.int64)
