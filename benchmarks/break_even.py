"""Measure what a cycle costs with each drafter: the cycle time divided by the time of a dense step
in stock vLLM.

    python benchmarks/break_even.py --shape qwen3-1.7b    # writes results/break_even_qwen3-1.7b.json
    python benchmarks/break_even.py --shape qwen3-8b --drafters sparse dspark --points 32x4096 8x15000

The ratio equals the tokens per cycle that a drafter needs to break even. The drafters are stock
vLLM's (n-gram, EAGLE-3, DSpark, DFlash, a small draft model) and the sparse actor. Nothing is
downloaded: models and drafters have published shapes and random weights. vLLM's synthetic rejection
sampler has acceptance rates of zero, so it rejects every draft, and each cycle yields one token.
The cycle time includes drafting and verification.

Each drafter's engine runs in its own process, which times all points. A point is a number of
sequences and the cached tokens of each; points that don't fit in the cache are skipped. States are
set up without prefill, as in ``benchmarks/rollout.py``. While one engine runs, the next one's
process imports vLLM and waits. With ``--together``, several engines start side by side, and then
measure one after another.

A run starts with dense decoding, and ratios only compare times from the same run. ``--deadline``
ends a run early. The JSON file is written after each engine. Running again with the same file adds
the drafters that no earlier run finished, and measures dense decoding again.

By default, vLLM uses its V2 model runner, and falls back to V1 for drafters that V2 doesn't
support. ``runner`` says which one was used. ``none_v1`` is dense decoding with the V1 runner.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    SIZES,
    add_cache_size,
    cache_size,
    earlier_runs,
    machine,
    parse_point,
    parser,
    qwen3,
    save,
    write,
)
from processes import EngineProcess, add_together, in_turn, told_to_start, wait_for_turn

POINTS = (
    (32, 15_000),
    (64, 4_096),
    (8, 15_000),
    (8, 30_000),
    (32, 4_096),
    (8, 4_096),
    (64, 1_024),
    (32, 1_024),
    (8, 1_024),
    (64, 15_000),
    (32, 30_000),
    (64, 30_000),
)
"""The number of sequences, and the cached tokens per sequence. The most important points come
first.
"""
SPARE = 256  # extra cached tokens that a sequence may need
STEPS = 24
SECONDS = 0.25
"""A point is timed for at least ``STEPS`` cycles and at least ``SECONDS``."""

DRAFT_PAGES = 61
SPARSE_DRAFTS = (6, 12)
GUESSES = 3
GUESSED_DRAFTS = 12
"""When the sparse actor judges guesses: guesses per pass, and drafts per cycle."""
DRAFT_SHAPE = "qwen3-0.6b"
DRAFT_WORDS = 32_000  # vocabulary size of published EAGLE-3 heads
BLOCK_LAYERS = 5
MASK_TOKEN = 151_669
LIKE_THE_MODEL = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)
"""Config fields that a drafter's layers share with the model's."""


def like(shape: str, **further: Any) -> dict[str, Any]:
    """Return the config of a drafter whose layers are dense and as wide as the model's."""
    model = qwen3(shape).to_dict()
    return {name: model[name] for name in LIKE_THE_MODEL} | {"dtype": "bfloat16"} | further


def eagle3(shape: str) -> dict[str, Any]:
    """Return the config of a one-layer drafter whose output layer covers part of the vocabulary."""
    return like(
        shape,
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        num_hidden_layers=1,
        draft_vocab_size=DRAFT_WORDS,
        tie_word_embeddings=False,
    )


def block(shape: str, architecture: str, size: int, **further: Any) -> dict[str, Any]:
    """Return the config of a five-layer drafter. It reads hidden states from five layers of the
    model, and drafts a block of tokens in one pass.
    """
    layers = SIZES[shape][2]
    read = [round(1 + i * (layers - 4) / (BLOCK_LAYERS - 1)) for i in range(BLOCK_LAYERS)]
    return like(
        shape,
        architectures=[architecture],
        model_type="qwen3",
        num_hidden_layers=BLOCK_LAYERS,
        block_size=size,
        target_layer_ids=read,
        num_target_layers=layers,
        mask_token_id=MASK_TOKEN,
        tie_word_embeddings=False,
        **further,
    )


def dspark(shape: str) -> dict[str, Any]:
    """Return the config of a block drafter with a Markov head of rank 256."""
    return block(shape, "Qwen3DSparkModel", 7, markov_rank=256)


def dflash(shape: str) -> dict[str, Any]:
    """Return the config of a block drafter that predicts its tokens independently of each other."""
    made = block(shape, "DFlashDraftModel", 16)
    named = ("target_layer_ids", "mask_token_id")
    return made | {"dflash_config": {name: made[name] for name in named}}


def draft_model(shape: str) -> dict[str, Any]:
    """Return the config of a small model of the same family, which serves as a drafter."""
    return {**qwen3(DRAFT_SHAPE, dtype="bfloat16").to_dict()}


@dataclass(frozen=True)
class Rival:
    """One of stock vLLM's drafters."""

    method: str
    drafts: int
    config: Callable[[str], dict[str, Any]] | None = None  # of its checkpoint, if it has one
    sampling: str = "probabilistic"  # how it samples drafts, at temperature 1

    def speculative_config(self, shape: str, folder: Path) -> dict[str, Any]:
        """Write the drafter's checkpoint (just a config), and return vLLM's options for it."""
        asked: dict[str, Any] = {
            "method": self.method,
            "num_speculative_tokens": self.drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.0] * self.drafts,
        }
        if self.config is None:
            return asked | {"prompt_lookup_max": 4}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config(shape)))
        return asked | {"model": str(folder), "draft_sample_method": self.sampling}


RIVALS = {
    "eagle3": Rival("eagle3", 3, eagle3, sampling="greedy"),
    "dspark": Rival("dspark", 7, dspark),
    "ngram": Rival("ngram", 4),
    "dflash": Rival("dflash", 15, dflash),
    "draft_model": Rival("draft_model", 4, draft_model),
}
DRAFTERS = ("none", "sparse", *RIVALS, "none_v1")
"""The drafters, most important first. Their engines run in this order."""


def drafts_of(drafter: str) -> tuple[int, ...]:
    """Return the draft lengths to time for a drafter, in order."""
    if drafter == "sparse":
        return SPARSE_DRAFTS
    return (RIVALS[drafter].drafts if drafter in RIVALS else 0,)


def cases_of(drafter: str) -> list[dict[str, Any]]:
    """Return the cases to time for a drafter, in order. Every case has a draft length. If the
    sparse actor judges guesses, the case also has the number of guesses per pass. The sparse
    actor's last case is ``alone``: guesses from history are the drafts, without sparse passes.
    """
    cases: list[dict[str, Any]] = [{"drafts": drafts} for drafts in drafts_of(drafter)]
    if drafter == "sparse":
        cases.append({"drafts": GUESSED_DRAFTS, "guesses": GUESSES})
        cases.append({"drafts": SPARSE_DRAFTS[0], "alone": True})
    return cases


def choice_of(case: Mapping[str, Any]) -> Any:
    """Return how lossless mode drafts in a case, as a choice of its scheduler."""
    from sparrow.vllm.lossless.plan import Guessed

    if "guesses" in case or "alone" in case:
        return Guessed(case["drafts"], alone=case.get("alone", False))
    return case["drafts"]


def graph_sizes(drafter: str, batches: Sequence[int]) -> list[int]:
    """Return the batch sizes, in tokens, that need CUDA graphs. Both drafting (token by token or in
    a block) and verification have such sizes.
    """
    per_sequence = {1, *(k + 1 for k in drafts_of(drafter))}
    if drafter in ("dspark", "dflash"):
        per_sequence.add(RIVALS[drafter].drafts)
    return sorted({batch * tokens for batch in batches for tokens in per_sequence})


def fitting(
    points: Sequence[tuple[int, int]], kv_tokens: int, context: int
) -> list[tuple[int, int]]:
    """Return the points that fit in the engine's cache and the model's context, both in tokens."""
    return [
        (batch, length)
        for batch, length in points
        if batch * (length + SPARE) <= kv_tokens and length + SPARE <= context
    ]


def start(
    shape: str, drafter: str, folder: Path, batches: Sequence[int], cache_gib: float | None
) -> Any:
    """Start a drafter's engine. Engines that share ``folder`` also share compiled code, since
    vLLM's cache of compiled code depends on the model's path.
    """
    from lossless import runner
    from rollout import Bench

    from sparrow import SparsitySchedule
    from sparrow.decoding import Decoding

    options: dict[str, Any] = {
        "slots": max(batches),
        "cudagraph_capture_sizes": graph_sizes(drafter, batches),
        **cache_size(cache_gib),
    }
    if drafter == "sparse":
        # The draft lengths to choose from are 0, a third, two thirds and all of ``draft_tokens``.
        decoding = Decoding.lossless(
            SparsitySchedule.fixed(DRAFT_PAGES, dense_layers=()),
            draft_tokens=3 * SPARSE_DRAFTS[0],
            guess_tokens=GUESSES,
        )
        bench = Bench(shape, "lossless", str(folder), lossless=decoding, **options)
        runner(bench).rejection_sampler.synthetic_conditional_rates.fill_(0.0)
        return bench
    if drafter in RIVALS:
        options["speculative_config"] = RIVALS[drafter].speculative_config(shape, folder / drafter)
    if drafter == "eagle3":
        # vLLM sets ``has_own_lm_head`` if a checkpoint has an output layer. This checkpoint has
        # none. Unless we set it, the drafter uses the model's output layer, which has a larger
        # vocabulary.
        from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

        Eagle3LlamaForCausalLM.has_own_lm_head = True

    bench = Bench(shape, "stock", str(folder), **options)
    if drafter == "eagle3":
        words = runner(bench).speculator.model.lm_head.weight.shape[0]
        assert words == DRAFT_WORDS, f"EAGLE-3 multiplies with {words} words"
    return bench


def time_points(arguments: argparse.Namespace, drafter: str, until: float) -> None:
    """Time a drafter's points in this process, writing the results after each point. Stop once
    ``time.time`` reaches ``until``.
    """
    from lossless import abandon, begin, hold, timed
    from rollout import CONTEXT, PROMPT

    began = time.monotonic()
    points = arguments.points
    out = arguments.out
    rows: list[dict[str, Any]] = []
    batches = [batch for batch, _ in points]
    bench = start(arguments.shape, drafter, out.parent, batches, arguments.cache_gib)
    for prefilled in (1, 8):  # compile the remaining kernels
        bench.start([PROMPT] * prefilled, [4] * prefilled, None)
        bench.finish()

    fit = fitting(points, bench.kv_tokens, CONTEXT)
    found: dict[str, Any] = {
        "runner": "V2" if bench.vllm_config.use_v2_model_runner else "V1",
        "kv_tokens": bench.kv_tokens,
        "start_s": time.monotonic() - began,
        "points": rows,
        "finished": False,
    }
    wait_for_turn()
    for batch, length in fit:
        for case in cases_of(drafter):
            if time.time() > until:
                return
            if drafter == "sparse":
                hold(bench, choice_of(case))
            lengths = [length] * batch
            begin(bench, lengths)
            cycle = timed(bench, lengths, STEPS, SECONDS)
            abandon(bench, batch)
            assert cycle["tokens_per_cycle"] < 1.1, f"drafts were accepted: {cycle}"
            rows.append({**case, "batch": batch, "length": length, **cycle})
            write(out, found)
            print(f"{time.monotonic() - began:6.1f} s  {json.dumps(rows[-1])}", flush=True)
    found["finished"] = True
    write(out, found)


class Child(EngineProcess):
    """The process running a drafter's engine."""

    def __init__(self, arguments: argparse.Namespace, drafter: str, folder: Path) -> None:
        written = folder / f"{drafter}.json"
        log = arguments.out.with_name(f"{arguments.out.stem}_{drafter}.log")
        environment = dict(os.environ)
        if drafter == "none_v1":
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        again = [Path(__file__).name, "--shape", arguments.shape, "--child", drafter]
        again += ["--points", *(f"{batch}x{length}" for batch, length in arguments.points)]
        if arguments.cache_gib is not None:
            again += ["--cache-gib", str(arguments.cache_gib)]
        super().__init__([*again, "--out", str(written)], written, log, environment)


def finished(result: Mapping[str, Any]) -> set[str]:
    """Return the drafters for which at least one run timed every case at every point that fits."""
    return {
        drafter
        for run in result["runs"]
        for drafter, engine in run["engines"].items()
        if engine["finished"] and has_all_cases(drafter, engine)
    }


def has_all_cases(drafter: str, engine: Mapping[str, Any]) -> bool:
    """Return whether an engine's rows cover every case of a drafter. If no point fits, there are no
    rows to cover.
    """
    timed = timed_in(engine)
    return not timed or all(case in timed for case in cases_of(drafter))


def timed_in(engine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the case of each of an engine's rows."""
    names = ("drafts", "guesses", "alone")
    return [{name: row[name] for name in names if name in row} for row in engine["points"]]


def measure(arguments: argparse.Namespace) -> None:
    import vllm

    out, result = earlier_runs(arguments.out, "break_even", arguments.shape)
    arguments.out = out
    done = finished(result)
    wanted = [name for name in arguments.drafters if name not in done and name != "none"]
    if not wanted and "none" in done:
        print(f"{out} already has results for all of these drafters")
        return
    engines: dict[str, Any] = {}
    result["runs"].append({"gpu": machine(), "vllm": vllm.__version__, "engines": engines})
    until = time.time() + arguments.deadline
    with tempfile.TemporaryDirectory() as folder:
        children = in_turn(
            ["none", *wanted],
            lambda name: Child(arguments, name, Path(folder)),
            until,
            arguments.together,
        )
        for drafter, found in children:
            engines[drafter] = found
            save(out, result)


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--shape", choices=[shape for shape in SIZES if shape != DRAFT_SHAPE], required=True
    )
    options.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    options.add_argument(
        "--points",
        nargs="+",
        type=parse_point,
        default=POINTS,
        help="sequences x tokens, such as 32x15000",
    )
    add_cache_size(options)
    add_together(options, "--cache-gib")
    options.add_argument(
        "--deadline", type=float, default=3600.0, help="time limit for the whole run, in seconds"
    )
    options.add_argument(
        "--out",
        type=Path,
        help="the JSON file to add the run to, results/break_even_SHAPE.json by default",
    )
    options.add_argument("--child", choices=DRAFTERS, help=argparse.SUPPRESS)
    arguments = options.parse_args()

    if arguments.child is None:
        measure(arguments)
        return
    time_points(arguments, arguments.child, told_to_start())


if __name__ == "__main__":
    main()
