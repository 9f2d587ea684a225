"""Audit several arms of an engine against dense decoding, with many seeds each.

An arm is one way to decode. Each arm has its own process, in which one engine samples all seeds and
shuts down. Transformers then ranks the tokens. Every seed is tested as in ``sparrow audit``, on the
bundled reasoner.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common import parser
from vllm_versions import AUDITED

if TYPE_CHECKING:
    from sparrow.audit.statistics import Tokens
    from sparrow.rollout import Sampling

TASK = "trace:lines=24"
SEEDS = 10
COUNT = 768  # responses per seed
NEW_TOKENS = 128
LEVEL = 0.01
Arms = Mapping[str, str]
"""Maps the name of each arm to the name of the dense arm it is compared with."""


@dataclass(frozen=True)
class Sampled:
    """An arm's samples."""

    seeds: list[Tokens]
    drafts: dict[str, int]  # drafted and accepted tokens; empty if there were no drafts


def command_line(about: str, name: str, kind: str, arms: Arms) -> argparse.ArgumentParser:
    """Return a script's command line.

    Args:
        name: name of the JSON file.
        kind: name of the option for choosing arms, e.g. "drafters".
    """
    options = parser(about, name)
    options.add_argument(f"--{kind}", nargs="+", choices=arms, default=tuple(arms))
    options.add_argument("--seeds", type=int, default=SEEDS)
    options.add_argument("--count", type=int, default=COUNT, help="responses per seed")
    options.add_argument("--options", default=AUDITED, help="vLLM options for every engine")
    return options


def separate(folder: str, arm: str) -> None:
    """Give this process its own files and port, to avoid clashes with engines starting at the same
    time.
    """
    os.environ["VLLM_CACHE_ROOT"] = f"{folder}/{arm.replace(' ', '-')}/cache"
    os.environ.pop("VLLM_PORT", None)


def loaded(spec: str, precision: Any, count: int) -> tuple[Any, Any, list[list[int]]]:
    """Load the reasoner and its tokenizer, and return them with prompts for an engine.

    Args:
        spec: the engine, in the format of ``sparrow audit --engine``.
    """
    from sparrow.cli import loading

    model, tokenizer = loading.load_model("reasoner", precision)
    room = loading.prompt_room(loading.context_of(model), spec, NEW_TOKENS)
    task = loading.load_problems(TASK, (), tokenizer, room)
    texts = loading.draw_prompts(task, count, 0)
    return model, tokenizer, loading.encode_prompts(texts, count, tokenizer, room)


def samplings(arms: Arms, arm: str, seeds: int, temperature: float = 1.0) -> list[Sampling]:
    """Return the sampling settings for each seed of an arm. Every arm, dense or not, uses its own
    seeds, so the tokens of different arms are independent.
    """
    from sparrow.rollout import Sampling

    first = SEEDS * [*arms, *arms.values()].index(arm)
    return [Sampling(NEW_TOKENS, temperature, top_n=0, seed=first + seed) for seed in range(seeds)]


def audited(
    arms: Arms, chosen: Sequence[str], sample: Callable[..., Sampled], *arguments: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Sample the chosen arms and their dense counterparts at the same time, and yield each chosen
    arm with its verdicts.

    Args:
        sample: called with an arm's name and ``arguments``, in a new process.
    """
    names = dict.fromkeys(name for arm in chosen for name in (arm, arms[arm]))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(names), spawn) as pool:
        futures = {name: pool.submit(sample, name, *arguments) for name in names}
        for arm in chosen:
            tested = futures[arm].result()
            dense = futures[arms[arm]].result()
            pairs = zip(tested.seeds, dense.seeds, strict=True)
            rows = [judged(seed, *pair) for seed, pair in enumerate(pairs)]
            exact = sum(row["status"] == "exact" for row in rows)
            print(f"{arm}: {exact} of {len(rows)} exact, {tested.drafts}", flush=True)
            yield arm, {"exact": exact, "drafts": tested.drafts, "seeds": rows}


def judged(seed: int, tested: Tokens, dense: Tokens) -> dict[str, Any]:
    """Return a seed's verdict, its smallest p-value, and the bias that the test could have
    detected.
    """
    from sparrow.audit.statistics import audit

    verdict = audit(tested, dense, LEVEL, seed=seed)
    return {
        "seed": seed,
        "status": verdict.status,
        "p": min(finding.corrected for finding in verdict.findings),
        "detectable share of tokens": verdict.detectable,
        "tokens": len(tested),
        "reasons": list(verdict.reasons),
    }
