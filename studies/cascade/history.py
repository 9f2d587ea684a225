"""How many tokens a sparse pass would yield if *history* guessed them: the first stage of a
cascade, simulated on sampled responses.

    python studies/cascade/history.py SAMPLES.npz --out benchmarks/results/cascade_history.json

SAMPLES.npz is what ``samples.py`` writes. At each place the longest suffix of what a response has
generated, of ``longest`` down to ``shortest`` tokens, is looked up in what was generated before, and
the m tokens that followed its most recent occurrence, in the response itself if there is one, are
the guess. Three histories are compared:

- ``own``: the prompt and the response itself;
- ``siblings``: also the responses of the group that run at the same time, each as far as this one;
- ``epoch``: also complete responses to the prompt from an earlier epoch.

Half of a group's samples play the earlier epoch, whose policy is thus the same; the other half run
and are simulated in all three histories, so that differences are history's alone.

A guessed token is kept while it equals the sampled one. With drafts that follow the policy itself
(q = p) this is no approximation: rejection sampling keeps the guess g with probability q(g) and
otherwise draws from q without g, which is the law of drawing x from q and keeping g if x = g. Each
response is thus a draw of the cascade's own process, and the mean over responses an unbiased
estimate of its expectation. With the sparse actor as q, drafts follow q and not p, so guesses meet
q's tokens; the policy then rejects some drafts, the tokens drafted after the first of them are
lost, and the next cycle begins there. Both change tokens per pass as far as q differs from p, which
is little where its acceptance is near 1; how many drafts the policy keeps is an argument of
``speed`` and not simulated.

A cycle ends at ``drafts`` tokens, and with it the pass that reaches them, however much was guessed.
Tokens per pass are all tokens over all passes, so a cycle takes ``drafts`` over tokens per pass on
average. A batch that waits for its slowest row takes more: ``slowest`` is the mean, over batches of
``rows`` cycles drawn from all, of the passes of the slowest.
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
    guesses: tuple[int, ...] = (3, 7)  # Tokens guessed for a pass.
    drafts: int = 12  # Tokens of a cycle.
    longest: int = 8  # Tokens of the longest suffix that is looked up.
    shortest: int = 1  # Tokens of the shortest one.
    rows: int = 32  # Rows of a batch that waits for its slowest.
    parts: Path | None = None  # A JSON file of measured times, which README.md describes.


@dataclass(frozen=True)
class Group:
    """A prompt and its sampled responses."""

    kind: str
    temperature: float
    prompt: list[int]
    responses: list[list[int]]
    nats: float  # -log p of the responses' tokens, summed


class History:
    """Streams of tokens, and where each short run of theirs was last followed by a token.

    Args:
        longest, shortest: tokens of the runs that are remembered.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._followed: dict[tuple[int, ...], tuple[int, int]] = {}
        self._streams: list[list[int]] = []
        self._own: list[dict[tuple[int, ...], tuple[int, int]]] = []  # of each stream

    def add(self, tokens: Sequence[int]) -> int:
        """Remember a stream; return its number."""
        self._streams.append([])
        self._own.append({})
        number = len(self._streams) - 1
        for token in tokens:
            self.extend(number, token)
        return number

    def extend(self, number: int, token: int, visible: bool = True) -> None:
        """Append a token to a stream. If it is not ``visible``, no run is remembered to be followed
        by it in other streams: an older stream has remembered the same.
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
        """Up to ``most`` tokens that followed the most recent occurrence of a stream's longest
        remembered suffix, in the stream itself if it occurs there; none if it has no remembered
        suffix.
        """
        stream = self._streams[number]
        end = len(stream)
        found: tuple[int, int] | None = None
        for length in range(self._shortest, min(self._longest, end) + 1):
            run = tuple(stream[end - length :])
            place = self._own[number].get(run) or self._followed.get(run)
            if place is None:  # where a suffix has not occurred, no longer one has
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
    """How many of up to ``most`` guessed tokens a response would keep, at each of its places.

    Args:
        prompt: token ids of the prompt.
        running: responses that are generated at the same time, one token of each per step. Each
            sees the others' tokens of earlier steps; of several at one step, the last one's is the
            most recent.
        earlier: complete responses, older than the prompt's own tokens.

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
    """How many tokens two sequences have in common from their start on."""
    count = 0
    for mine, other in zip(guessed, sampled, strict=False):
        if mine != other:
            break
        count += 1
    return count


def passes(kept: Ints, guesses: int, drafts: int) -> list[int]:
    """Sparse passes of each cycle of a response, the last of which may be cut short by its end.

    Args:
        kept: guessed tokens that would be kept at each place, without bound or up to more than
            ``guesses``.
        guesses: tokens guessed for a pass, which yields those kept and one more.
        drafts: tokens of a cycle.
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
    """The mean of the greatest of ``rows`` counts, drawn independently from ``counts``."""
    values, often = np.unique(np.asarray(counts), return_counts=True)
    at_most = (often.cumsum() / often.sum()) ** rows
    return float((values * np.diff(at_most, prepend=0.0)).sum())


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """The ratio of two sums over prompts, and its 95 % interval from resampling whole prompts."""
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
    """Speed over dense decoding of a cascade whose parts were measured.

    A cycle takes drafts / tokens_per_pass passes of guess_ms + sparse_ms, and verify_ms for the
    dense pass; it yields tokens_per_cycle tokens, each of which takes dense_ms without drafts. No
    ceiling is taken: tokens per pass are counted inside cycles, so the quotient is the mean of
    whole passes.
    """
    cycle_ms = drafts / tokens_per_pass * (guess_ms + sparse_ms) + verify_ms
    return tokens_per_cycle * dense_ms / cycle_ms


def groups(path: Path) -> Iterator[Group]:
    """The groups of a file of samples, in its order."""
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
    """What the running half of a group keeps of its guesses, with one of ``HISTORIES``."""
    half = len(group.responses) // 2
    running = group.responses[half:]
    earlier = group.responses[:half] if history == "epoch" else []
    together = [[response] for response in running] if history == "own" else [running]
    bounds = (max(options.guesses), options.longest, options.shortest)
    return [
        kept for runs in together for kept in kept_guesses(group.prompt, runs, earlier, *bounds)
    ]


def cell_rows(cell: Sequence[Group], options: Options) -> list[dict[str, Any]]:
    """Tokens per pass for the groups of one kind and temperature, by history and guess.

    Raises ValueError: no response fills a cycle.
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
                    f"no response of {cell[0].kind} has the {options.drafts} tokens of a cycle; "
                    "sample longer ones or ask for fewer with --drafts"
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
    """Simulate every history on every kind and temperature, and write the result.

    Raises ValueError: a group has fewer than four responses, so no half of it has siblings.
    """
    cells: dict[tuple[str, float], list[Group]] = {}
    for group in groups(options.samples):
        if len(group.responses) < 4:
            raise ValueError(
                f"a prompt of {group.kind} has {len(group.responses)} responses, and at least 4 "
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
