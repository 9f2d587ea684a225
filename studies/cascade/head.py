"""Train a head on a policy's samples, and measure how well it guesses, both as the first stage of a
cascade and alone.

    python studies/cascade/head.py SAMPLES.npz --out benchmarks/results/cascade_head.json

SAMPLES.npz comes from ``samples.py``. The last ``held_out`` prompts of each kind are used for
measurements, and all others for training. ``eagle.py`` describes the head. Its loss is the KL
divergence at the temperature at which a text was sampled. Training covers prompts and responses.

First stage: the head guesses its most likely token at each place. Guesses are kept up to the first
one that differs from the sampled token. As ``history.py`` explains, this assumes that drafts follow
the policy itself. The hidden states that the head reads also come from the policy; in an engine,
they would come from the sparse pass. The head is compared with ``history``, which looks guesses up
in the prompt and the response, and with ``both``, where one pass verifies the guesses of the head
and of history as two branches. ``mixed`` is vLLM's setting ``guess_lookup_min``: history guesses
where at least so many tokens repeat, and the head elsewhere.

Alone: the policy verifies m drafts of the head. They are drawn from the head's distribution q and
accepted with probability min(1, p / q). Given that a token x was emitted, it was an accepted draft
with probability min(p(x), q(x)) / p(x). So the probability that a cycle starts at a token can be
computed from the sampled text, without drawing any drafts. The number of tokens per cycle is the
number of all tokens divided by the sum of these probabilities. For ``most_likely``, drafts are the
head's most likely tokens instead of drawn ones.

``acceptance`` lists the mean of sum_v min(p(v), q(v)) for the first draft of a cycle, the second
draft, and so on, assuming that all drafts before it were accepted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from eagle import Head, Reading, logprobs, losses, outputs, read, save
from history import Group, History, Ints, groups, kept_guesses, passes, ratio, same_start
from numpy.typing import NDArray
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import common

Floats = NDArray[np.float64]
FIRST_STAGES = ("history", "head", "both")
LONGEST = 8  # tokens of the longest suffix that history looks up
SHORTEST = 1
LOOKUP_MIN = (1, 2, 3, 4, 6, 8)  # how many tokens must repeat for history to guess


@dataclass(frozen=True)
class Options:
    """Settings of training and of the measurements."""

    samples: Annotated[Path, tyro.conf.Positional]  # The .npz file of `samples.py`.
    out: Path  # The JSON file of results.
    model: str = "smollm2"  # The policy, a Llama model: a path or a name.
    held_out: int = 8  # Prompts of each kind to hold out and measure on.
    guesses: tuple[int, ...] = (3, 7)  # Guesses before each pass, and drafts of the head alone.
    drafts: int = 12  # Tokens per cycle of the cascade.
    edges: tuple[int, ...] = (0, 256, 512, 1024, 2048)  # Bins of positions, in tokens.
    steps: int = 5  # Steps in training: the first, and those that read the head's own output.
    decay: float = 0.8  # Weight of a step's loss relative to the step before.
    slots: int = 128  # Places of a sequence that count in its loss, drawn anew for each epoch.
    epochs: int = 3
    sequences: int = 2  # Sequences per update.
    learning_rate: float = 2e-3
    seed: int = 0
    save: Path | None = None  # The folder for an EAGLE-3 checkpoint that vLLM can load.


@dataclass(frozen=True)
class Measured:
    """How well the head predicts one response of n tokens, with up to m drafts per cycle. All
    arrays are ``[m, n]``. In row i, every token is taken to be draft i of a cycle, counting from 0.
    """

    overlap: Floats  # sum_v min(p(v), q(v))
    accepted: Floats  # probability that the token was an accepted draft
    is_guessed: NDArray[np.bool_]  # whether the head's most likely token is this one


def divided(found: Sequence[Group], held_out: int) -> tuple[list[Group], list[Group]]:
    """Divide groups into those for training and those whose prompts are held out.

    Raises ValueError if a kind has no prompts left for training.
    """
    kinds: dict[str, list[tuple[int, ...]]] = {}
    for group in found:
        prompts = kinds.setdefault(group.kind, [])
        if tuple(group.prompt) not in prompts:
            prompts.append(tuple(group.prompt))
    for kind, prompts in kinds.items():
        if len(prompts) <= held_out:
            raise ValueError(
                f"holding out {held_out} of {len(prompts)} prompts for {kind} leaves none for "
                "training; hold out fewer with --held-out, or sample more with samples.py --prompts"
            )
    away = {(kind, ids) for kind, prompts in kinds.items() for ids in prompts[-held_out:]}
    sides: tuple[list[Group], list[Group]] = ([], [])
    for group in found:
        sides[(group.kind, tuple(group.prompt)) in away].append(group)
    return sides


def train(
    policy: PreTrainedModel, texts: Sequence[tuple[list[int], float]], options: Options
) -> tuple[Head, dict[str, Any]]:
    """Train a head on texts and the temperatures they were sampled at.

    Returns: The head, and a record: the number of texts and tokens, seconds, and the loss of each
    step in the first and the last tenth of the updates, in nats.
    """
    began = common.clock()
    head = Head(policy)
    readings = [(read(policy, tokens), temperature) for tokens, temperature in texts]
    read_at = common.clock()
    order = torch.Generator().manual_seed(options.seed)
    weights = torch.tensor([options.decay**step for step in range(options.steps)])
    batches = [
        batch
        for _ in range(options.epochs)
        for batch in torch.randperm(len(readings), generator=order).split(options.sequences)
    ]
    optimizer = torch.optim.AdamW(head.parameters(), options.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, total_steps=len(batches), pct_start=0.1
    )
    history = []
    for number, batch in enumerate(batches):
        total = torch.zeros(options.steps)
        for reading, temperature in (readings[place] for place in batch):
            count = len(reading.tokens_N) - 1
            slots = torch.randperm(count, generator=order)[: options.slots].to(policy.device)
            loss = losses(head, policy, reading, temperature, options.steps, slots)
            (loss @ weights.to(loss.device) / len(batch)).backward()
            total += loss.detach().cpu() / len(batch)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        history.append(total)
        if number % 10 == 0:
            nats = ", ".join(f"{x:.2f}" for x in total.tolist())
            print(f"update {number} of {len(batches)}: loss {nats}", flush=True)

    tenth = max(1, len(history) // 10)
    return head, {
        "texts": len(texts),
        "tokens": sum(len(tokens) for tokens, _ in texts),
        "updates": len(batches),
        "reading_seconds": read_at - began,
        "seconds": common.clock() - read_at,
        "first_loss": torch.stack(history[:tenth]).mean(0).tolist(),
        "last_loss": torch.stack(history[-tenth:]).mean(0).tolist(),
    }


@torch.no_grad()
def measure(
    head: Head, policy: PreTrainedModel, reading: Reading, begin: int, temperature: float, most: int
) -> Measured:
    """Compare the head with the policy on the tokens of a response, which begins at ``begin``."""
    token = reading.tokens_N[begin:]
    p = logprobs(policy, reading.last_NW[begin - 1 : -1], temperature).exp()
    p_token = p.gather(1, token[:, None])[:, 0]
    rows = []
    for output in outputs(head, policy, reading, most):
        q = logprobs(policy, output[begin - 2 : -1], temperature).exp()
        q_token = q.gather(1, token[:, None])[:, 0]
        accepted = (q_token / p_token).clamp(max=1)
        rows.append((torch.minimum(p, q).sum(1), accepted, q.argmax(1) == token))
    overlap, accepted, is_guessed = (
        torch.stack(each).cpu().numpy() for each in zip(*rows, strict=True)
    )
    return Measured(overlap.astype(float), accepted.astype(float), is_guessed)


def kept_by_head(is_guessed: NDArray[np.bool_]) -> Ints:
    """Return how many guesses would be kept at each of n positions, ``[n]``.

    Row i of ``is_guessed`` ``[m, n]`` tells which tokens would be right as guess i.
    """
    most, length = is_guessed.shape
    kept = np.zeros(length, np.int64)
    for place in range(length):
        while (
            kept[place] < most
            and place + kept[place] < length
            and is_guessed[kept[place], place + kept[place]]
        ):
            kept[place] += 1
    return kept


def kept_by_mix(
    prompt: Sequence[int], response: Sequence[int], by_head: Ints, most: int, least: int
) -> Ints:
    """Return how many of up to ``most`` guesses would be kept at each position, if history guesses
    where ``least`` or more tokens repeat, and the head, with the given results, elsewhere.
    """
    history = History(LONGEST, least)
    number = history.add(prompt)
    kept = by_head.copy()
    for place, token in enumerate(response):
        if guessed := history.guess(number, most):
            kept[place] = same_start(guessed, response[place : place + most])
        history.extend(number, token)
    return kept


def starts(accepted: Floats) -> Floats:
    """Return the probability that a cycle starts at each token of a response, ``[n]``. Row i of
    ``accepted`` ``[m, n]`` has the probability that each token was accepted as draft i. The first
    cycle starts at token 0.

    A cycle yields its accepted drafts and one more token.
    """
    most, length = accepted.shape
    start = np.zeros(length + most + 1)
    start[0] = 1
    for place in range(length):
        reached = start[place]
        for draft in range(min(most, length - place)):
            kept = accepted[draft, place + draft]
            start[place + draft + 1] += reached * (1 - kept)
            reached *= kept
        start[place + most + 1] += reached
    return start[:length]


def first_stage_rows(
    cell: Sequence[Group], measured: Sequence[Sequence[Measured]], options: Options
) -> list[dict[str, Any]]:
    """Return a row for each number of guesses. A row has the drafts per pass for each first stage,
    and the tokens per cycle of the head alone.
    """
    most = max(options.guesses)
    tokens = [sum(map(len, group.responses)) for group in cell]
    mixes = {f"mixed {least}": least for least in LOOKUP_MIN}
    kept: dict[str, list[list[Ints]]] = {name: [] for name in (*FIRST_STAGES, *mixes)}
    for group, each in zip(cell, measured, strict=True):
        head = [kept_by_head(one.is_guessed) for one in each]
        history = [
            kept_guesses(group.prompt, [response], [], most, LONGEST, SHORTEST)[0]
            for response in group.responses
        ]
        kept["head"].append(head)
        kept["history"].append(history)
        kept["both"].append([np.maximum(*pair) for pair in zip(head, history, strict=True)])
        for name, least in mixes.items():
            kept[name].append(
                [
                    kept_by_mix(group.prompt, response, by_head, most, least)
                    for response, by_head in zip(group.responses, head, strict=True)
                ]
            )

    rows = []
    for guesses in options.guesses:
        row: dict[str, Any] = {"guesses": guesses}
        for name in kept:
            made = [
                sum(sum(passes(one, guesses, options.drafts)) for one in responses)
                for responses in kept[name]
            ]
            row[name] = ratio(tokens, made)
        for name, chance in (("drawn", "accepted"), ("most_likely", "is_guessed")):
            cycles = [
                sum(starts(getattr(one, chance)[:guesses]).sum() for one in each)
                for each in measured
            ]
            row[name] = ratio(tokens, cycles)
        rows.append(row)
    return rows


def position_rows(
    cell: Sequence[Group], measured: Sequence[Sequence[Measured]], options: Options
) -> Iterator[dict[str, Any]]:
    """Yield the tokens per cycle of the head alone in each position bin, leaving out empty bins.
    Drafts are drawn. Positions include the prompt.
    """
    for low, high in zip(options.edges, options.edges[1:], strict=False):
        row: dict[str, Any] = {"from": low, "to": high}
        for guesses in options.guesses:
            tokens = []
            cycles = []
            for group, each in zip(cell, measured, strict=True):
                begin = len(group.prompt)
                window = slice(max(low - begin, 0), max(high - begin, 0))
                started = [starts(one.accepted[:guesses])[window] for one in each]
                if sum(map(len, started)):
                    tokens.append(sum(map(len, started)))
                    cycles.append(sum(one.sum() for one in started))
            if tokens:
                row |= {"prompts": len(tokens), "tokens": sum(tokens)}
                row[str(guesses)] = ratio(tokens, cycles)
        if "tokens" in row:
            yield row


def main(options: Options) -> dict[str, Any]:
    """Train, measure on held-out prompts, and write the results.

    Raises the same errors as ``divided``.
    """
    from sparrow.cli.loading import load_model

    policy, _ = load_model(options.model, "bf16")
    policy.requires_grad_(False)
    learned, held_out = divided(list(groups(options.samples)), options.held_out)
    texts = [
        (group.prompt + response, group.temperature)
        for group in learned
        for response in group.responses
    ]
    head, training = train(policy, texts, options)
    if options.save is not None:
        save(head, policy, options.save)

    settings = asdict(options)
    del settings["samples"], settings["out"], settings["save"]
    result: dict[str, Any] = {"settings": settings, "training": training, "cells": []}
    cells: dict[tuple[str, float], list[Group]] = {}
    for group in held_out:
        cells.setdefault((group.kind, group.temperature), []).append(group)
    for (kind, temperature), cell in cells.items():
        began = time.monotonic()
        measured = [
            [
                measure(
                    head,
                    policy,
                    read(policy, group.prompt + response),
                    len(group.prompt),
                    temperature,
                    max(options.guesses),
                )
                for response in group.responses
            ]
            for group in cell
        ]
        tokens = [sum(map(len, group.responses)) for group in cell]
        every = np.concatenate([one.overlap for each in measured for one in each], 1)
        result["cells"].append(
            {
                "kind": kind,
                "temperature": temperature,
                "prompts": len(cell),
                "tokens": sum(tokens),
                "nats": ratio([group.nats for group in cell], tokens),
                "acceptance": every.mean(1).tolist(),
                "rows": first_stage_rows(cell, measured, options),
                "positions": list(position_rows(cell, measured, options)),
            }
        )
        common.save(options.out, result)
        print(f"{kind} at {temperature}: {time.monotonic() - began:.0f} s", flush=True)
    return result


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
