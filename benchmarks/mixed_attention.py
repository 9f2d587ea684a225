"""Measure the decoding speed of lossy mode, relative to stock vLLM, for models in which only some
layers have full attention.

    python benchmarks/mixed_attention.py --shape qwen3-next    # mixed_attention_qwen3-next.json
    python benchmarks/mixed_attention.py --shape olmo3-7b

``qwen3-next`` is Qwen3-Next-80B-A3B with fewer layers, so that two copies fit on one GPU. The other
sizes are unchanged, and as in the whole model, three of four layers have linear attention.
``olmo3-7b`` is Olmo-3-7B, in which three of four layers have a window of 4,096 tokens. Weights are
random, so nothing is downloaded.

Both engines, stock vLLM and lossy mode, stay on the same GPU, each in its own process. A point is a
number of sequences and the length of their prompts, which are random tokens. At each point, both
engines prefill the same prompts and decode until every sequence has begun. From then on they take
turns. A turn is 4 untimed steps and then 32 timed ones, while the other engine waits. In every step
of a turn, every sequence must get exactly one token, so both engines' sequences grow at the same
rate. A round is one turn of each engine, and the first round warms up and isn't kept. The engine
that goes first alternates, because a turn can differ in speed after the same engine's turn and
after the other's. So in two consecutive rounds, each engine has had both kinds of turn, and the
tables average over such pairs.

Lossy mode keeps 61 pages of 16 tokens by score in layers with full attention, as in other
benchmarks of speed, so it reads 1,024 tokens there. The other layers run vLLM's own attention in
both engines.

Both engines have the same settings, which the JSON file records. Decode steps run in CUDA graphs.
``torch.compile``, vLLM's default, is only used with ``--compile``, because it takes minutes.

The file is written after each point. A point that is not expected to end before the deadline is
skipped, and listed in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import never_slower
import numpy as np
from cascade import DRAFT_PAGES
from common import RESULTS, ROOT, parse_point, parser, save
from never_slower import Engines

from sparrow.cost import SHAPES as COST_SHAPES
from sparrow.cost import ModelShape

ARMS = ("stock", "lossy")
ROUNDS = 13
"""Rounds per point: one that warms up, and then pairs."""
SETTLE = 4
"""Untimed steps at the start of a turn, because vLLM has already begun the first one at the end of
the turn before.
"""
STEPS = 32
"""Timed steps per turn, after those."""
BATCHED_TOKENS = 8192
CACHE_MARGIN = 1.15
"""Room in the KV cache for landmarks and partly filled blocks."""
BLOCK = 2048
"""An upper bound on the tokens per block of vLLM's KV cache. In hybrids, a block of keys and values
is as large as a state.
"""
PERIOD = 4
"""Every fourth layer has full attention."""


class Point(NamedTuple):
    """A number of sequences, and the length of their prompts in tokens."""

    sequences: int
    prompt: int

    def __str__(self) -> str:
        return f"{self.sequences}x{self.prompt}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """Read a point from the command line; see ``common.parse_point``."""
        return cls(*parse_point(text))

    @property
    def new(self) -> int:
        """The most tokens that a sequence may get: one per step, even while others prefill."""
        prefill = -(-self.sequences * self.prompt // (BATCHED_TOKENS - self.sequences))
        return prefill + self.sequences + (ROUNDS + 1) * (SETTLE + STEPS)


class Shape(NamedTuple):
    """A model to measure.

    Attributes:
        published: its name in the cost model.
        config: makes its transformers config with a given number of layers.
        layers: the default number of layers.
        points: the default points. The KV caches of two engines fit on an H200.
        options: more vLLM options.
    """

    published: str
    config: Callable[[int], Any]
    layers: int
    points: tuple[Point, ...]
    options: Mapping[str, Any]


def layer_types(other: str, layers: int) -> list[str]:
    """Return every layer's type, which is ``other`` for all but every fourth layer."""
    return [*[other] * (PERIOD - 1), "full_attention"] * (layers // PERIOD)


def qwen3_next(layers: int) -> Any:
    """Return Qwen3-Next-80B-A3B's config with fewer layers. No token ends a response."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        num_hidden_layers=layers,
        layer_types=layer_types("linear_attention", layers),
        max_position_embeddings=262_144,
        architectures=["Qwen3NextForCausalLM"],
        dtype="bfloat16",
    )


def olmo3(layers: int) -> Any:
    """Return Olmo-3-7B's config. No token ends a response."""
    from transformers import Olmo3Config

    return Olmo3Config(
        vocab_size=100_278,
        num_hidden_layers=layers,
        layer_types=layer_types("sliding_attention", layers),
        sliding_window=4096,
        max_position_embeddings=65_536,
        architectures=["Olmo3ForCausalLM"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        dtype="bfloat16",
    )


SHAPES = {
    "qwen3-next": Shape(
        "qwen3-next-80b-a3b",
        qwen3_next,
        12,
        (Point(64, 15_000), Point(64, 4096), Point(32, 15_000), Point(32, 30_000)),
        # On Hopper GPUs, vLLM's default is FlashInfer, a separate package.
        {"gdn_prefill_backend": "triton"},
    ),
    "olmo3-7b": Shape("olmo-3-7b", olmo3, 32, (Point(8, 15_000), Point(4, 60_000)), {}),
}


def cost_shape(shape: str, layers: int) -> ModelShape:
    """Return the cost model's description of a shape that has its first ``layers`` layers."""
    whole = COST_SHAPES[SHAPES[shape].published]
    share = layers / whole.layers
    experts = whole.experts
    return replace(
        whole,
        layers=layers,
        weights=round(share * (whole.weights - whole.output)) + whole.output,
        experts=experts and replace(experts, layers=round(share * experts.layers)),
        linear_layers=tuple(i for i in whole.linear_layers if i < layers),
        window_layers=tuple(i for i in whole.window_layers if i < layers),
        state_bytes=share * whole.state_bytes,
    )


def cache_bytes(model: ModelShape, points: Sequence[Point]) -> int:
    """Return the KV cache size in bytes for the largest point."""

    def needed(point: Point) -> float:
        lengths = [point.prompt + point.new + BLOCK] * point.sequences
        tokens = int(model.cached_tokens(lengths).sum())
        # Layers with a window also hold the tokens that are being prefilled, and partly filled
        # blocks.
        tokens += len(model.window_layers) * (BATCHED_TOKENS + 32 * point.sequences)
        states = 2 * model.state_bytes * point.sequences
        return tokens * model.layer_width * model.kv_bytes + states

    return int(CACHE_MARGIN * max(map(needed, points)))


# --- in an engine's process ---


class Batch:
    """Sequences that an engine decodes together.

    Args:
        engine: vLLM's ``LLMEngine``.
        prompts: one list of token ids per sequence.
        new: the largest number of tokens that a sequence may get.
    """

    def __init__(self, engine: Any, prompts: Sequence[Sequence[int]], new: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine = engine
        self._lengths = {str(i): len(prompt) for i, prompt in enumerate(prompts)}
        for name, prompt in zip(self._lengths, prompts, strict=True):
            parameters = SamplingParams(
                temperature=1.0,
                max_tokens=new,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(name, {"prompt_token_ids": prompt}, parameters)

    def begin(self) -> None:
        """Run until every sequence has got a token."""
        begun: set[str] = set()
        while len(begun) < len(self._lengths):
            begun |= self._step().keys()

    def decode(self) -> dict[str, float]:
        """Run one turn. Return the seconds of its timed steps, their number, and the mean number of
        cached tokens per sequence in the middle of these.

        Raises RuntimeError if a step doesn't give every sequence one token.
        """
        ends: list[float] = []
        while len(ends) < SETTLE + STEPS:
            made = self._step()
            if not made:
                continue  # vLLM has begun the next step first
            ends.append(time.perf_counter())
            if len(made) < len(self._lengths) or set(made.values()) != {1}:
                raise RuntimeError(
                    f"a step gave {len(made)} of {len(self._lengths)} sequences "
                    f"{sum(made.values())} tokens, but must give each one token"
                )
        return {
            "seconds": ends[-1] - ends[SETTLE - 1],
            "steps": STEPS,
            "length": sum(self._lengths.values()) / len(self._lengths) - STEPS / 2,
        }

    def end(self) -> None:
        """Abort all sequences."""
        self._engine.abort_request(list(self._lengths))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _step(self) -> dict[str, int]:
        """Run a step, and return how many tokens each sequence got.

        Raises RuntimeError if a sequence has ended.
        """
        made = {}
        for output in self._engine.step():
            if output.finished:
                raise RuntimeError(
                    f"sequence {output.request_id} ended before the measurement did; the KV cache "
                    "may be too small for all sequences"
                )
            made[output.request_id] = len(output.outputs[0].token_ids)
        for name, tokens in made.items():
            self._lengths[name] += tokens
        return made


_batch: Batch
"""The sequences that this process's engine is decoding."""


def start(name: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start an engine in this process. Return what ``never_slower.start`` returns, and the settings
    that vLLM chose.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that this process can time steps
    if name != "stock":
        from sparrow.vllm import plugin

        plugin.register()
    started = never_slower.start(name, folder, ROOT, options)
    from rollout import randomise

    llm = never_slower.engine()
    llm.apply_model(randomise)
    config = llm.llm_engine.vllm_config
    started["chosen"] = {
        "kv_cache_blocks": config.cache_config.num_gpu_blocks,
        "block_tokens": config.cache_config.block_size,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "compilation_mode": int(config.compilation_config.mode),
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
    }
    return started


def begin(point: Point, seed: Sequence[int], vocabulary: int) -> dict[str, Any]:
    """Prefill a point's prompts, and return the seconds."""
    global _batch
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (point.sequences, point.prompt))
    began = time.perf_counter()
    _batch = Batch(never_slower.engine().llm_engine, tokens.tolist(), point.new)
    _batch.begin()
    return {"seconds": time.perf_counter() - began}


def turn() -> dict[str, Any]:
    """Run one turn, and leave the device idle."""
    from common import clock

    found = _batch.decode()
    clock()
    return found


def counters() -> dict[str, Any]:
    """Return lossy mode's counts since the last call."""
    return dict(never_slower.engine().collective_rpc("sparrow_counters")[0])


def end() -> dict[str, Any]:
    """Abort the point's sequences."""
    _batch.end()
    return {}


# --- in the benchmark's process ---


def measured(engines: Engines, point: Point, vocabulary: int) -> dict[str, Any]:
    """Measure a point, and return it as a row for the file. ``ms`` has each arm's ms per step, one
    number per round. ``decode_s`` is the seconds that all turns took.
    """
    prefilled = engines.call(begin, dict.fromkeys(ARMS, (point, tuple(point), vocabulary)))
    began = time.perf_counter()
    ms: dict[str, list[float]] = {arm: [] for arm in ARMS}
    lengths = []
    for number in range(ROUNDS):
        if number == 1:
            engines.call(counters, {"lossy": ()})
        for arm in ARMS if number % 2 else ARMS[::-1]:
            found = engines.call(turn, {arm: ()})[arm]
            if number > 0:  # the first round warms up
                ms[arm].append(1e3 * found["seconds"] / found["steps"])
                lengths.append(found["length"])
    decode_s = time.perf_counter() - began
    counts = engines.call(counters, {"lossy": ()})["lossy"]
    engines.call(end, dict.fromkeys(ARMS, ()))
    return {
        "sequences": point.sequences,
        "prompt": point.prompt,
        "length": sum(lengths) / len(lengths),
        "prefill_s": {arm: found["seconds"] for arm, found in prefilled.items()},
        "decode_s": decode_s,
        "ms": ms,
        "counts": counts,
    }


def expected_seconds(rows: Sequence[Mapping[str, Any]], point: Point) -> float:
    """Return how long a point is expected to take, from the rows of earlier points: the most
    seconds that prefill took per token of the prompts, for this point's prompts, and the most that
    all turns took, whose number doesn't depend on the point. Without earlier points, return 0.
    """
    if not rows:
        return 0.0
    per_token = max(
        max(row["prefill_s"].values()) / (row["sequences"] * row["prompt"]) for row in rows
    )
    decode_s: float = max(row["decode_s"] for row in rows)
    return per_token * point.sequences * point.prompt + decode_s


def vllm_options(
    shape: str, layers: int, points: Sequence[Point], folder: str, compiles: bool
) -> dict[str, Any]:
    """Return the ``LLM`` arguments of both engines."""
    batches = sorted({point.sequences for point in points})
    graphs: dict[str, Any] = {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": batches,
    }
    if not compiles:
        graphs["mode"] = 0
    return {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": max(point.prompt + point.new for point in points),
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": BATCHED_TOKENS,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": cache_bytes(cost_shape(shape, layers), points),
        # This much memory has to be free at the start. The cache size is set above.
        "gpu_memory_utilization": 0.05,
        "compilation_config": graphs,
        **SHAPES[shape].options,
    }


def measure(given: argparse.Namespace) -> None:
    began = time.perf_counter()
    model = SHAPES[given.shape].config(given.layers)
    engines = Engines(ARMS, False)
    with tempfile.TemporaryDirectory() as temporary:
        folder = f"{temporary}/{given.shape}"
        model.save_pretrained(folder)
        shared = vllm_options(given.shape, given.layers, given.points, folder, given.compile)
        schedule = f"fixed:{given.pages}"
        arguments = {
            arm: (arm, temporary, shared | never_slower.engine_options(arm, schedule))
            for arm in ARMS
        }
        started = engines.call(start, arguments)
        about = started["stock"]
        result = {
            "shape": given.shape,
            "model": SHAPES[given.shape].published,
            "layers": given.layers,
            "vllm": about["vllm"],
            "weights": "random",
            "schedule": schedule,
            "options": {name: shared[name] for name in shared if name != "model"},
            "chosen": {arm: each["chosen"] for arm, each in started.items()},
            "start_s": {arm: each["start_s"] for arm, each in started.items()},
            "skipped": list[str](),
            "points": list[dict[str, Any]](),
        }
        print(json.dumps(result), flush=True)
        for point in given.points:
            left = given.deadline - (time.perf_counter() - began)
            if left < expected_seconds(result["points"], point):
                result["skipped"].append(str(point))
                save(given.out, result)
                print(f"skipped for lack of time: {point}", flush=True)
                continue
            before = time.perf_counter()
            row = measured(engines, point, model.vocab_size)
            spent = time.perf_counter() - before
            result["points"].append(row)
            save(given.out, result)
            medians = ", ".join(f"{arm} {median(row['ms'][arm]):.2f} ms" for arm in ARMS)
            print(f"{spent:.0f} s  {point}  {medians}", flush=True)
        engines.close()


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--shape", choices=SHAPES, default="qwen3-next")
    asked.add_argument("--layers", type=int, help=f"number of layers, a multiple of {PERIOD}")
    asked.add_argument(
        "--points",
        type=Point.parse,
        nargs="+",
        help="points to measure, as SEQUENCESxTOKENS, such as 64x4096",
    )
    asked.add_argument(
        "--pages", type=int, default=DRAFT_PAGES, help="pages that lossy mode keeps by score"
    )
    asked.add_argument("--compile", action="store_true", help="use torch.compile in both engines")
    asked.add_argument(
        "--deadline", type=float, default=270.0, help="time limit for the whole run, in seconds"
    )
    asked.add_argument(
        "--out",
        type=Path,
        help="the JSON file to write, results/mixed_attention_SHAPE.json by default",
    )
    given = asked.parse_args()
    shape = SHAPES[given.shape]
    given.layers = given.layers or shape.layers
    if given.layers % PERIOD:
        asked.error(f"--layers must be a multiple of {PERIOD}, got {given.layers}")
    given.points = given.points or shape.points
    given.out = given.out or RESULTS / f"mixed_attention_{given.shape}.json"
    measure(given)


if __name__ == "__main__":
    main()
