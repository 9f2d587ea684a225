"""Time a rollout of many short responses with top-20 lists, where the GPU waits for the host in
every step.

    git archive a553f48 | tar -x -C old/ && python benchmarks/short_responses.py --before old/

The rollout has 256 prompts of 64 tokens with 1,024 new tokens each, and random weights. Stock vLLM
and Sparrow's engine return the same lists. They run in separate processes and take turns; the best
time of each variant counts. ``--before`` adds the engine from an earlier source tree. In the
command above, the earlier engine still returns lists of Python objects. Sparrow decodes under the
published 0.86 schedule, which keeps nearly every page at this length. *host* is the time per token
that vLLM's scheduler, its output processor and the reading of the lists take. It is measured in a
separate rollout. On a CPU, the model is smaller and the responses are shorter, so only *host* tells
you anything about a GPU.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import ROOT, parser, qwen3, save

REQUESTS, PROMPT, TOP_N = 256, 64, 20
SCHEDULER, OUTPUT, READING = "scheduler", "output processor", "reading lists"


def measure(variant: str, tree: Path) -> dict[str, float]:
    """Measure one variant in this process, with Sparrow imported from the source tree ``tree``.
    Return tokens per second and the host's microseconds per token.
    """
    sys.path.insert(0, str(tree))
    # Sparrow's engine registers the plugin itself, and stock vLLM must not load any.
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PLUGINS="",
    )
    import numpy as np
    import torch

    on_gpu = torch.cuda.is_available()
    tokens, dtype = (1024, "bfloat16") if on_gpu else (96, "float32")
    smaller, options = (
        dict[str, Any](),
        dict[str, Any](
            load_format="dummy",
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=PROMPT + tokens,
            max_num_seqs=REQUESTS,
            enable_prefix_caching=False,
            max_logprobs=-1,
            logprobs_mode="processed_logprobs",
        ),
    )
    if not on_gpu:
        smaller = dict(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
        )
        options |= dict(
            enforce_eager=True,
            kv_cache_memory_bytes=2**28,
            block_size=32,
            max_num_batched_tokens=REQUESTS * PROMPT,
        )
    shape = qwen3("qwen3-1.7b", dtype=dtype, **smaller)
    prompts = np.random.default_rng(0).integers(0, shape.vocab_size, (REQUESTS, PROMPT)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        run = (stock if variant == "stock" else ours)(folder, options, prompts, tokens)
        run()
        begun = time.perf_counter()
        run()
        took = time.perf_counter() - begun
        host = watch_host()
        run()
    total = REQUESTS * tokens
    return {
        "tokens/s": total / took,
        **{f"{name}, us": 1e6 * spent / total for name, spent in host.items()},
    }


def stock(folder: str, options: dict[str, Any], prompts: list[list[int]], tokens: int) -> Any:
    """Start stock vLLM. Return a function that runs the rollout and converts the lists to arrays,
    like a trainer would.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(folder, **options)
    parameters = SamplingParams(
        max_tokens=tokens,
        temperature=1.0,
        logprobs=TOP_N,
        seed=0,
        detokenize=False,
        flat_logprobs=True,
        ignore_eos=True,
    )

    def run() -> None:
        for output in llm.generate(
            [{"prompt_token_ids": each} for each in prompts], parameters, use_tqdm=False
        ):
            Lists.read(output.outputs[0].logprobs)

    return run


class Lists:
    """Converts stock vLLM's lists like a trainer would. It's a class so that ``watch_host`` can
    time it.
    """

    @staticmethod
    def read(lists: Any) -> Any:
        """Return the token ids and log-probs from a response's lists."""
        import numpy as np

        return np.asarray(lists.token_ids, dtype=np.int32), np.asarray(
            lists.logprobs, dtype=np.float32
        )


def ours(folder: str, options: dict[str, Any], prompts: list[list[int]], tokens: int) -> Any:
    """Start Sparrow's engine, and return a function that runs the rollout."""
    from sparrow import SparsitySchedule
    from sparrow.engines.vllm.engine import (
        Sampling,
        VLLMEngine,
    )  # earlier trees have it in this module too

    engine = VLLMEngine(
        folder,
        SparsitySchedule.preset("qwen3-1.7b", target=0.86).replace(dense_layers=(0,)),
        **options,
    )
    sampling = Sampling(max_new_tokens=tokens, temperature=1.0, top_n=TOP_N, seed=0)
    return lambda: engine.generate(prompts, sampling)


def watch_host() -> dict[str, float]:
    """Start timing each part of the host's work. Return a dictionary that adds up the seconds."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import OutputProcessor

    import sparrow.engines.vllm.engine as engine

    spent = dict.fromkeys((SCHEDULER, OUTPUT, READING), 0.0)

    def watched(owner: Any, name: str, part: str) -> None:
        stock = getattr(owner, name)

        @functools.wraps(stock)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return stock(*args, **kwargs)
            finally:
                spent[part] += time.perf_counter() - begun

        setattr(owner, name, timed)

    watched(Scheduler, "schedule", SCHEDULER)
    watched(Scheduler, "update_from_output", SCHEDULER)
    assert "schedule" not in vars(AsyncScheduler), (
        "AsyncScheduler overrides schedule, so its time would be counted twice"
    )
    watched(OutputProcessor, "process_outputs", OUTPUT)
    watched(
        engine, "rollout_of" if hasattr(engine, "rollout_of") else "_rollout", READING
    )  # its former name
    watched(Lists, "read", READING)
    return spent


def main() -> None:
    options = parser(__doc__, "short_responses")
    options.add_argument(
        "--before",
        type=Path,
        metavar="TREE",
        help="folder with an earlier source tree to measure too",
    )
    options.add_argument("--rounds", type=int, default=2, help="number of turns per variant")
    arguments = options.parse_args()
    trees = {"stock": ROOT, "now": ROOT}
    if arguments.before:
        trees["before"] = arguments.before.resolve()
    best: dict[str, dict[str, float]] = {}
    for variant, tree in [*trees.items()] * arguments.rounds:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            metrics = alone.submit(measure, variant, tree).result()
        if variant not in best or metrics["tokens/s"] > best[variant]["tokens/s"]:
            best[variant] = metrics
        print(
            f"{variant:8}",
            ", ".join(f"{name} {value:,.1f}" for name, value in metrics.items()),
            flush=True,
        )
    save(arguments.out, {"rounds": arguments.rounds, "variants": best})


if __name__ == "__main__":
    main()
