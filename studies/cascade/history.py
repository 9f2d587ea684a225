"""Simulate, on sampled responses, how many tokens a sparse pass would yield with guesses from
*history*, the first stage of a cascade.

    python studies/cascade/history.py SAMPLES.npz --out benchmarks/results/cascade_history.json

SAMPLES.npz comes from ``samples.py``. At each position of a response, the script looks up the
longest suffix of ``shortest`` to ``longest`` tokens that has occurred before. The guess is the m
tokens after its most recent occurrence; occurrences in the response itself take precedence. Three
histories are compared:

- ``own``: the prompt and the response itself;
- ``siblings``: also the concurrent responses to the same prompt, each up to the same length;
- ``epoch``: also complete responses to the prompt from an earlier epoch.

Half of a prompt's samples stand in for the earlier epoch, so that epoch has the same policy. The
other half are simulated with all three histories, so any differences come only from the history.

Guesses are kept up to the first one that differs from the sampled token. If drafts follow the
policy itself (q = p), this is exact: rejection sampling keeps the guess g with probability q(g),
and otherwise draws from q without g. Drawing x from q and keeping g if x = g has the same
distribution. So each response is a sample of the cascade, and the mean over responses is an
unbiased estimate. In reality, the drafter is the sparse actor, whose q differs from p. Guesses are
then compared with tokens drawn from q, and when the policy rejects a draft, the drafts after it are
lost and a new cycle begins. If acceptance is close to 1, both effects barely change the tokens per
pass. The simulation doesn't cover how many drafts the policy keeps; that's an argument of
``speed``.

A cycle ends after ``drafts`` tokens, even if its last pass would yield more. The tokens per pass
are the number of all tokens divided by the number of all passes, so a cycle takes ``drafts`` /
(tokens per pass) passes on average. A batch that waits for its slowest row takes more passes.
``slowest`` is the expected number of passes in such a batch: the maximum over ``rows`` cycles,
drawn at random from all cycles.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from common import write

HISTORIES = ("own", "siblings", "epoch")
RESAMPLES = 2000
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Options:
    """What to simulate."""

    samples: Annotated[Path, tyro.conf.Positional]  # The .npz file of `samples.py`.
    out: Path  # The JSON file of results.
    guesses: tuple[int, ...] = (3, 7)  # Guesses before each pass.
    drafts: int = 12  # Tokens per cycle.
    longest: int = 8  # Maximum length in tokens of the suffixes to look up.
    shortest: int = 1  # Minimum length in tokens of these suffixes.
    rows: int = 32  # Rows in a batch that waits for its slowest row.
    parts: Path | None = None  # A JSON file of measured times; README.md has the format.


@dataclass(frozen=True)
class Group:
    """A prompt and its sampled responses."""

    kind: str
    temperature: float
    prompt: list[int]
    responses: list[list[int]]
    nats: float  # sum of -log p over the responses' tokens


class History:
    """Token streams, with an index of short runs. For each run, the index has the place where
    another token last followed it.

    Args:
        longest, shortest: maximum and minimum length of the indexed runs, in tokens.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._followed: dict[tuple[int, ...], tuple[int, int]] = {}
        self._streams: list[list[int]] = []
        self._own: list[dict[tuple[int, ...], tuple[int, int]]] = []  # for each stream

    def add(self, tokens: Sequence[int]) -> int:
        """Add a stream to the index, and return its number."""
        self._streams.append([])
        self._own.append({})
        number = len(self._streams) - 1
        for token in tokens:
            self.extend(number, token)
        return number

    def extend(self, number: int, token: int, visible: bool = True) -> None:
        """Append a token to a stream. If ``visible`` is false, look-ups from other streams don't
        find this occurrence; they find the latest visible one instead.
        """
        stream = self._streams[number]
        end = len(stream)
        for length in range(self._shortest, min(self._longest, end) + 1):
            run = tuple(stream[end - length :])
            self._own[number][run] = (number, end)
            if visible:
                self._followed[run] = (number, end)
        stream.append(token)

    def guess(self, number: int, most: int) -> list[int]:
        """Find the longest indexed suffix of a stream, and return up to ``most`` tokens after its
        most recent occurrence. Occurrences in the stream itself take precedence. Return no tokens
        if no suffix is indexed.
        """
        stream = self._streams[number]
        end = len(stream)
        found: tuple[int, int] | None = None
        for length in range(self._shortest, min(self._longest, end) + 1):
            run = tuple(stream[end - length :])
            place = self._own[number].get(run) or self._followed.get(run)
            if place is None:  # if a suffix hasn't occurred, no longer one has either
                break
            found = place
        if found is None:
            return []
        other, at = found
        return self._streams[other][at : at + most]


def kept_guesses(
    prompt: Sequence[int],
    running: Sequence[Sequence[int]],
    earlier: Sequence[Sequence[int]],
    most: int,
    longest: int,
    shortest: int,
) -> list[Ints]:
    """Count how many of up to ``most`` guesses would be kept at each position of each response.

    Args:
        prompt: token ids of the prompt.
        running: responses that are being generated concurrently, one token each per step. Each one
            sees the tokens the others generated in earlier steps. Within a step, the last
            response's token counts as the most recent.
        earlier: complete responses, which count as older than the prompt.

    Returns: For each running response, an array of its length.
    """
    history = History(longest, shortest)
    for response in earlier:
        history.add([*prompt, *response])
    history.add(prompt)

    numbers = []
    for _ in running:
        number = history.add(())
        for token in prompt:
            history.extend(number, token, visible=False)
        numbers.append(number)

    kept = [np.zeros(len(response), np.int64) for response in running]
    for step in range(max(map(len, running), default=0)):
        live = [row for row, response in enumerate(running) if step < len(response)]
        for row in live:
            guessed = history.guess(numbers[row], most)
            sampled = running[row][step : step + most]
            kept[row][step] = same_start(guessed, sampled)
        for row in live:
            history.extend(numbers[row], running[row][step])
    return kept


def same_start(guessed: Sequence[int], sampled: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    count = 0
    for mine, other in zip(guessed, sampled, strict=False):
        if mine != other:
            break
        count += 1
    return count


def passes(kept: Ints, guesses: int, drafts: int) -> list[int]:
    """Return the number of sparse passes in each cycle of a response. The last cycle may be cut
    short by the end of the response.

    Args:
        kept: how many guesses would be kept at each position; may exceed ``guesses``.
        guesses: guesses before each pass. A pass yields the kept guesses and one more token.
        drafts: tokens per cycle.
    """
    counts = []
    for begin in range(0, len(kept), drafts):
        end = min(begin + drafts, len(kept))
        at = begin
        count = 0
        while at < end:
            at += min(int(kept[at]), guesses) + 1
            count += 1
        counts.append(count)
    return counts


def slowest(counts: Sequence[int], rows: int) -> float:
    """Return the expected maximum of ``rows`` independent draws from ``counts``."""
    values, often = np.unique(np.asarray(counts), return_counts=True)
    at_most = (often.cumsum() / often.sum()) ** rows
    return float((values * np.diff(at_most, prepend=0.0)).sum())


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Return the ratio of two sums over prompts, with a 95 % interval from resampling whole
    prompts.
    """
    pairs = np.array([numerator, denominator], float)
    count = pairs.shape[1]
    draws = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    sums = pairs[:, draws].sum(-1)
    estimate = float(pairs[0].sum() / pairs[1].sum())
    return [estimate, *np.percentile(sums[0] / sums[1], [2.5, 97.5]).tolist()]


def speed(
    tokens_per_pass: float,
    *,
    tokens_per_cycle: float,
    drafts: int,
    guess_ms: float,
    sparse_ms: float,
    verify_ms: float,
    dense_ms: float,
) -> float:
    """Return a cascade's speed relative to dense decoding, from the measured times of its parts.

    A cycle has drafts / tokens_per_pass passes of guess_ms + sparse_ms each, and one dense pass of
    verify_ms. It yields tokens_per_cycle tokens, which take dense_ms each without drafts. The
    number of passes is not rounded up: tokens per pass are counted within cycles, so the quotient
    is already the mean number of whole passes.
    """
    cycle_ms = drafts / tokens_per_pass * (guess_ms + sparse_ms) + verify_ms
    return tokens_per_cycle * dense_ms / cycle_ms


def groups(path: Path) -> Iterator[Group]:
    """Read the groups in a file of samples, in file order."""
    with np.load(path) as file:
        names = [name.removesuffix("/prompt") for name in file.files if name.endswith("/prompt")]
        for name in names:
            kind, temperature, _ = name.split("/")
            responses: list[list[int]] = []
            nats = 0.0
            while f"{name}/{len(responses)}" in file.files:
                key = f"{name}/{len(responses)}"
                responses.append(file[key].tolist())
                nats -= float(file[f"{key}/logprobs"].astype(np.float64).sum())
            yield Group(kind, float(temperature), file[f"{name}/prompt"].tolist(), responses, nats)


def simulated(group: Group, history: str, options: Options) -> list[Ints]:
    """Return how many guesses are kept in a group's running half, using one of ``HISTORIES``."""
    half = len(group.responses) // 2
    running = group.responses[half:]
    earlier = group.responses[:half] if history == "epoch" else []
    together = [[response] for response in running] if history == "own" else [running]
    bounds = (max(options.guesses), options.longest, options.shortest)
    return [
        kept for runs in together for kept in kept_guesses(group.prompt, runs, earlier, *bounds)
    ]


def cell_rows(cell: Sequence[Group], options: Options) -> list[dict[str, Any]]:
    """Return the tokens per pass by history and number of guesses, for groups of the same kind and
    temperature.

    Raises ValueError if no response is as long as a cycle.
    """
    tokens = [sum(map(len, group.responses)) for group in cell]
    shared = {
        "kind": cell[0].kind,
        "temperature": cell[0].temperature,
        "prompts": len(cell),
        "tokens": sum(tokens),
        "nats": ratio([group.nats for group in cell], tokens),
    }
    rows = []
    for history in HISTORIES:
        kept = [simulated(group, history, options) for group in cell]
        lengths = [sum(map(len, responses)) for responses in kept]
        for guesses in options.guesses:
            counts = [
                [passes(response, guesses, options.drafts) for response in responses]
                for responses in kept
            ]
            whole = [
                count
                for responses, cycles in zip(kept, counts, strict=True)
                for response, of in zip(responses, cycles, strict=True)
                for count in of[: len(response) // options.drafts]
            ]
            if not whole:
                raise ValueError(
                    f"no response of {cell[0].kind} is as long as a cycle of {options.drafts} "
                    "tokens; sample longer responses, or shorten cycles with --drafts"
                )
            made = [sum(map(sum, cycles)) for cycles in counts]
            rows.append(
                {
                    **shared,
                    "history": history,
                    "guesses": guesses,
                    "tokens_per_pass": ratio(lengths, made),
                    "slowest": slowest(whole, options.rows),
                }
            )
    return rows


def main(options: Options) -> dict[str, Any]:
    """Simulate every history for every kind and temperature, and write the results.

    Raises ValueError if a group has fewer than four responses, which leaves half of it without
    siblings.
    """
    cells: dict[tuple[str, float], list[Group]] = {}
    for group in groups(options.samples):
        if len(group.responses) < 4:
            raise ValueError(
                f"a prompt of {group.kind} has {len(group.responses)} responses, but at least 4 "
                "are needed; sample more with samples.py --samples"
            )
        cells.setdefault((group.kind, group.temperature), []).append(group)

    settings = asdict(options)
    del settings["samples"], settings["out"], settings["parts"]
    result: dict[str, Any] = {"settings": settings, "parts": [], "rows": []}
    if options.parts is not None:
        result["parts"] = json.loads(options.parts.read_text(encoding="utf-8"))
    for (kind, temperature), cell in cells.items():
        rows = cell_rows(cell, options)
        best = max(row["tokens_per_pass"][0] for row in rows)
        print(f"{kind} at {temperature}: up to {best:.2f} tokens per pass", flush=True)
        result["rows"] += rows
        write(options.out, result)
    return result


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
