"""Time decode steps and whole traces of long responses in vLLM on one GPU, stock and with Sparrow.

    python benchmarks/rollout.py --shape qwen3-1.7b --variant stock \\
        --out results/rollout_qwen3-1.7b_stock.json
    python benchmarks/rollout.py --shape qwen3-1.7b --variant sparse \\
        --out results/rollout_qwen3-1.7b_sparse.json

``benchmarks/tables.py`` makes the tables in docs/performance.md from the files. Models are random,
so nothing is downloaded.

A trace consists of 240 prompts of 256 tokens (as many as AIME24 with 8 samples each; ``--requests``
changes the number). Response lengths follow a fixed log-normal distribution with a mean of 14,268,
cut at 32,768. vLLM serves requests in order of arrival. At most ``slots`` requests run at a time,
as many as fit in the KV cache without preemption. Therefore, the requests in each step and their
lengths can be computed beforehand: they depend neither on the variant nor on step times.

Running the whole trace would take hours. Instead, its steps are divided into equal strata, and the
middle step of each stratum is set up in vLLM (with its requests at their lengths, and with vLLM's
own scheduler, CUDA graphs and sampler) and timed. The estimated time of the trace is the mean of
these times multiplied by the number of steps, plus the measured delays from prefilling new
requests. ``validate`` runs a shorter trace from beginning to end and compares its time with its
estimate. It generates only 1/64 of each response, namely the part that ends at the response's
middle.

States are set up without prefill: vLLM's own KV connector for decode benchmarks reports that a
request's cache already exists. The whole cache is filled once with random normal data, including
landmarks computed from it, so the actor selects scattered pages. Both variants use this connector,
``torch.compile`` (vLLM's default), and full CUDA graphs for decoding.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import SHAPES, parser, qwen3, read_result, write
from rollout_trace import CUTOFF, PROMPT, SLOTS, middle, most_cached, responses, simulate, states

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector
from vllm.sampling_params import RequestOutputKind

from sparrow import SparsitySchedule
from sparrow.decoding import Decoding
from sparrow.engines.vllm import VLLMEngine
from sparrow.vllm import config as plugin_config
from sparrow.vllm import plugin
from sparrow.vllm.selfcheck import engine as selfcheck

CONTEXT = CUTOFF + PROMPT + 256
SETTLE, TIMED = 4, 16
"""Warm-up steps and timed steps per measurement. The times of short steps vary, because they depend
on the host. So 16 times as many short steps are timed.
"""
SHORT = 100_000
"""Steps with at most this many cached tokens are short."""
POINTS = {
    "qwen3-1.7b": [
        (64, 15000),
        (32, 30000),
        (64, 1024),
        (64, 4096),
        (8, 30000),
        (8, 1024),
        (1, 1024),
    ],
    "qwen3-4b": [(48, 15000), (24, 30000), (48, 1024)],
    "qwen3-8b": [(48, 15000), (24, 30000), (48, 1024)],
    "qwen3-14b": [(32, 15000), (16, 30000), (32, 1024)],
}
"""Decode steps with equal-length sequences: the batch size, and the cached tokens per sequence."""
LOGPROBS: dict[str, int | None] = {"none": None, "sampled": 0, "top 20": 20}
OUR_SCHEDULES = ("dense", "published")
MEMORY = 0.93  # vLLM's gpu_memory_utilization
# scale of 2^-5 for random int8 keys and values, which puts 127 at four standard deviations
INT8_EXPONENT = 122


class Connector(DecodeBenchConnector):
    """vLLM's connector for decode benchmarks, with two changes: prompts of up to ``PROMPT`` tokens
    are prefilled, and the cache and its landmarks are filled once instead of for every request.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._layers = vllm_config.compilation_config.static_forward_context

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.num_prompt_tokens <= PROMPT:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator(next(iter(kv_caches.values())).device).manual_seed(0)
        for name, cache in kv_caches.items():
            layer = self._layers[name]
            has_landmarks = getattr(layer.impl, "has_landmarks", False)
            for begin in range(0, len(cache), 4096):
                some = cache[begin : begin + 4096]
                dtype = torch.bfloat16 if cache.itemsize == 1 else cache.dtype
                values = torch.randn(
                    some.shape, generator=generator, device=cache.device, dtype=dtype
                )
                some.copy_(_stored(values, cache.dtype))
                if has_landmarks:
                    keys, _, marks, scales = layer.impl.cache_views(layer, cache)
                    pages = keys[begin : begin + 4096].unflatten(2, (marks.shape[1], -1)).float()
                    if cache.dtype == torch.int8:
                        scales.k[begin : begin + 4096] = scales.v[begin : begin + 4096] = (
                            INT8_EXPONENT
                        )
                        pages *= 2.0 ** (INT8_EXPONENT - 127)
                    marks[begin : begin + 4096] = pages.mean(3).transpose(1, 2).to(marks.dtype)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass


def _stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return keys and values as stored in a ``dtype`` cache; uint8 stands for e4m3."""
    if dtype == torch.int8:
        return (values * 2.0 ** (127 - INT8_EXPONENT)).round().clamp(-127, 127).to(dtype)
    return values.to(torch.float8_e4m3fn).view(dtype) if dtype == torch.uint8 else values


class Bench:
    """One vLLM engine, stock or with Sparrow.

    Args:
        slots: maximum number of concurrent sequences, if more than in the shape's points.
        schedule: lossy mode's schedule; by default, the one published for the shape.
        config: model config fields that differ from the shape's.
        more: vLLM options.
    """

    def __init__(
        self,
        shape: str,
        variant: str,
        folder: str,
        memory: float = MEMORY,
        lossless: Decoding | None = None,
        slots: int = 0,
        schedule: SparsitySchedule | None = None,
        config: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.served = 0  # requests so far, used to make request ids
        batches = [batch for batch, _ in POINTS.get(shape, ())]
        self.shape = shape
        self.slots = max(slots, SLOTS.get(shape, 0), *batches)
        qwen3(shape, dtype="bfloat16", **(config or {})).save_pretrained(folder)
        options: dict[str, Any] = dict(
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=CONTEXT,
            max_num_seqs=self.slots,
            gpu_memory_utilization=memory,
            enable_prefix_caching=False,
            enable_sleep_mode=False,
            logprobs_mode="processed_logprobs",
            max_logprobs=-1,
            disable_log_stats=False,
            compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"},
            kv_transfer_config={
                "kv_connector": "Connector",
                "kv_connector_module_path": "rollout",
                "kv_role": "kv_both",
            },
            **more,
        )
        self.engine: VLLMEngine | None = None
        # Sparrow refuses connectors without landmarks, but this connector creates landmarks. The
        # self-check is skipped because the connector doesn't learn about the self-check's steps.
        patch.object(plugin_config, "check_supported").start()
        patch.object(selfcheck, "check_engine").start()
        if variant == "stock":
            self.llm = LLM(folder, attention_backend="FLASH_ATTN", **options)
        elif lossless is not None:
            plugin.register()
            rates = [0.95 ** (i + 1) for i in range(lossless.draft_tokens)]
            synthetic = {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": rates,
            }
            additional = {"sparrow": lossless.to_dict()}
            self.llm = LLM(
                folder, additional_config=additional, speculative_config=synthetic, **options
            )
        else:
            self.published = schedule or SparsitySchedule.preset(shape)
            self.engine = VLLMEngine(folder, self.published, **options)
            self.llm = self.engine.llm
        self.llm.apply_model(randomise)
        self.vllm_config = self.llm.llm_engine.vllm_config

    @property
    def kv_tokens(self) -> int:
        """Return how many tokens fit in the KV cache."""
        cache = self.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    @property
    def schedules(self) -> Sequence[str]:
        return ("stock",) if self.engine is None else OUR_SCHEDULES

    def use(self, schedule: str) -> None:
        if self.engine is not None:
            dense = SparsitySchedule.dense(dense_layers=self.published.dense_layers)
            self.engine.rpc(
                "sparrow_set_schedule",
                (self.published if schedule == "published" else dense).to_json(),
            )

    def start(
        self,
        prompts: Iterable[int],
        responses: Iterable[int],
        logprobs: int | None,
        only_final: bool = False,
    ) -> None:
        """Queue requests with prompts and responses of these lengths, using the trainer engine's
        sampling settings.
        """
        tokens = [i % 150_000 for i in range(CONTEXT)]
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            parameters = SamplingParams(
                max_tokens=int(response),
                temperature=1.0,
                logprobs=logprobs,
                seed=i,
                detokenize=False,
                flat_logprobs=True,
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY
                if only_final
                else RequestOutputKind.CUMULATIVE,
            )
            self.served += 1
            request = {"prompt_token_ids": tokens[: int(prompt)]}
            self.llm.llm_engine.add_request(str(self.served), request, parameters)

    def finish(self) -> list[float]:
        """Run until all requests have finished, and return each step's seconds."""
        engine, seconds, last = self.llm.llm_engine, [], time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        return seconds

    def step(self, lengths: Sequence[int] | np.ndarray, logprobs: int | None) -> dict[str, float]:
        """Time decode steps of requests with ``lengths`` cached tokens, and return the median and
        percentiles in ms.
        """
        timed = TIMED if sum(lengths) > SHORT else 16 * TIMED
        half = SETTLE + timed // 2
        self.start(
            [max(PROMPT + 1, n - half) for n in lengths], [half + timed] * len(lengths), logprobs
        )
        ms = 1e3 * np.array(self.finish()[SETTLE : SETTLE + timed])
        low, middle, high = np.percentile(ms, [10, 50, 90])
        return {
            "ms": float(middle),
            "p10": float(low),
            "p90": float(high),
            "mean": float(ms.mean()),
            "steps": timed,
        }

    def join(self, lengths: np.ndarray, logprobs: int | None) -> float:
        """Return how long a new request's prefill delays the running requests, in ms."""
        lengths, total = lengths[: self.slots - 4], []
        for joining in (0, 4):
            self.start(np.maximum(lengths, PROMPT + 1), [40] * len(lengths), logprobs)
            engine, seconds = self.llm.llm_engine, []
            for i in range(28):
                if joining and i in (8, 12, 16, 20):
                    self.start([PROMPT], [18], logprobs)
                began = time.perf_counter()
                engine.step()
                seconds.append(time.perf_counter() - began)
            self.finish()
            total.append(sum(seconds[8:]))
        return (total[1] - total[0]) / 4 * 1e3


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Initialise the weights as for training, because vLLM's dummy weights are so small that
    activations would be pure noise.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.fill_(1.0)
        elif (
            weight.element_size() > 1 and "scale" not in name
        ):  # quantised weights keep their dummy values, which their scales fit
            weight.normal_(0.0, 0.02, generator=generator)


def measure(arguments: argparse.Namespace) -> None:
    out, parts = Path(arguments.out), arguments.parts.split(",")
    out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    result: dict[str, Any] = read_result(out) if out.exists() else {}

    def save(**more: Any) -> None:
        result.update(more)
        write(out, result)
        print(f"{time.monotonic() - began:6.1f} s  {json.dumps(more)[-160:]}", flush=True)

    shape, slots = arguments.shape, SLOTS[arguments.shape]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, arguments.variant, folder)
        block = bench.vllm_config.cache_config.block_size
        import vllm

        save(
            device=torch.cuda.get_device_name(),
            vllm=vllm.__version__,
            torch=torch.__version__,
            shape=shape,
            variant=arguments.variant,
            slots=slots,
            kv_tokens=bench.kv_tokens,
            settings={
                "max_num_seqs": bench.slots,
                "gpu_memory_utilization": MEMORY,
                "compilation_mode": int(bench.vllm_config.compilation_config.mode),
            },
        )
        for prefilled in (1, 8):  # compile the remaining kernels
            bench.start([PROMPT] * prefilled, [4] * prefilled, 20)
            bench.finish()
        bench.step([1024] * 8, 20)
        if "points" in parts:
            rows = []
            for batch, length in POINTS[shape]:
                for schedule in bench.schedules:
                    bench.use(schedule)
                    for label in LOGPROBS:
                        if label != "none" and (schedule == "dense" or length == 4096):
                            continue
                        timed = bench.step([length] * batch, LOGPROBS[label])
                        rows.append(
                            dict(
                                batch=batch,
                                length=length,
                                schedule=schedule,
                                logprobs=label,
                                **timed,
                            )
                        )
                        save(points=rows)
        bench.use(bench.schedules[-1])
        for requests in arguments.requests if "trace" in parts else ():
            tokens = responses(requests)
            spans = simulate([PROMPT] * requests, tokens, slots)
            longest = most_cached(spans)
            assert longest + slots * block < bench.kv_tokens, (
                f"{longest} tokens do not fit in the KV cache, so requests would be preempted; use fewer slots"
            )
            chosen, rows = states(spans, arguments.states), []
            trace: dict[str, Any] = dict(
                requests=requests,
                prompt=PROMPT,
                tokens=sum(tokens),
                longest=max(tokens),
                steps=sum(steps for steps, _, _ in spans),
                peak_tokens=longest,
                states=rows,
            )
            for step, lengths in chosen:
                row: dict[str, Any] = dict(step=step, batch=len(lengths), tokens=int(lengths.sum()))
                for label in ("none", "top 20"):
                    row[label] = bench.step(lengths, LOGPROBS[label])
                rows.append(row)
                save(traces=result.get("traces", {}) | {str(requests): trace})
            if requests == arguments.requests[0]:
                save(
                    join_ms=[bench.join(lengths, LOGPROBS["top 20"]) for _, lengths in chosen[1::5]]
                )
        if "validate" in parts:
            early, last = middle(responses(min(arguments.requests)))
            spans = simulate(early, last, slots)
            step_ms = [
                bench.step(lengths, LOGPROBS["top 20"])["ms"]
                for _, lengths in states(spans, arguments.states)
            ]
            steps = sum(s for s, _, _ in spans)
            bench.start(early, last, LOGPROBS["top 20"])
            took = bench.finish()
            save(
                validation=dict(
                    requests=len(last),
                    tokens=sum(last),
                    steps=steps,
                    steps_run=len(took),
                    seconds=sum(took),
                    estimate=steps * statistics.mean(step_ms) / 1e3,
                )
            )
        if "profile" in parts:
            for schedule in bench.schedules:
                bench.use(schedule)
                batch, length = POINTS[shape][0]
                save(**{f"profile {schedule}": profile(bench, batch, length)})


def profile(bench: Bench, batch: int, length: int) -> dict[str, Any]:
    """Profile decode steps with top-20 log-probs. Return the total kernel time per step in us and,
    for the 25 slowest kernels, time and launches per step.
    """
    steps = 10
    bench.start([length] * batch, [SETTLE + steps + 6] * batch, 20)
    for _ in range(SETTLE):
        bench.llm.llm_engine.step()
    _, kernels = recorded(bench, steps)
    bench.finish()
    table = [
        {
            "kernel": r.key[:110],
            "us": round(r.self_device_time_total / steps, 1),
            "launches": r.count / steps,
        }
        for r in kernels[:25]
    ]
    busy = sum(r.self_device_time_total for r in kernels) / steps
    return {"batch": batch, "length": length, "kernels_us": round(busy, 1), "top": table}


def recorded(bench: Bench, steps: int) -> tuple[Any, list[Any]]:
    """Profile steps of the running requests with torch. Return all recorded calls, and the kernels
    among them, slowest first.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiled:
        for _ in range(steps):
            bench.llm.llm_engine.step()
        torch.cuda.synchronize()
    calls = profiled.key_averages()
    kernels = (call for call in calls if call.device_type == torch.autograd.DeviceType.CUDA)
    return calls, sorted(kernels, key=lambda call: -call.self_device_time_total)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", choices=SHAPES, required=True)
    options.add_argument("--variant", choices=["stock", "sparse"], required=True)
    options.add_argument(
        "--parts",
        default="points,trace,validate",
        help="parts to run, separated by commas: points, trace, validate, profile",
    )
    options.add_argument(
        "--states", type=int, default=16, help="number of strata to divide the trace into"
    )
    options.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[240, 1024],
        help="number of requests in each trace",
    )
    options.add_argument(
        "--out",
        required=True,
        help="the JSON file to write; results that it contains for other parts are kept",
    )
    measure(options.parse_args())


if __name__ == "__main__":
    main()
