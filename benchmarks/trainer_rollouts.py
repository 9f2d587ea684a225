"""Check the rollouts that other trainers' own classes generate, in stock vLLM and in both modes,
before and after an update of the weights.

    python benchmarks/trainer_rollouts.py skyrl    # also: trl, prime-rl, openrlhf

Install the trainer without its dependencies, but with the vLLM version it pins and the packages it
imports. The trainer's own class starts vLLM, generates and loads new weights; Sparrow is switched
on as described in docs/integrations.md. Every mode runs in its own process, with the same tiny
random Qwen3. The exit status is 0 if

- lossless: drafts were proposed and accepted, and greedy tokens equal stock vLLM's except for ties,
- lossy: fewer tokens were read than the cache contained,

both before and after the update. On a GPU, lossless mode runs with CUDA graphs. On a CPU, leave
``lossless`` out of ``--modes``, because stock vLLM doesn't support it there. OpenRLHF's weights are
not updated on a CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, ROOT, free_port, machine, parser, write
from numpy.typing import ArrayLike

MODES = ("stock", "lossless", "lossy")
WEIGHTS = ("before", "after")
"""The two checkpoints; the trainer loads the second one into the running engine."""
SCHEDULE = {
    "top_k": [4],
    "page_size": 16,
    "bin_tokens": 4096,
    "sink_pages": 1,
    "recent_pages": 1,
    "dense_layers": [],
}
VOCAB = 512
LENGTHS = (120, 200, 260, 310, 350, 390)
TOKENS = 40
CONTEXT = 1024
TIE = 0.05
"""Tied tokens have logits at most this many standard deviations below the largest."""
LIMIT_S = 300
CUDA = torch.cuda.is_available()
DTYPE = "bfloat16" if CUDA else "float32"
CACHE_BYTES = 2**30
MEMORY = 0.1
"""The fraction of GPU memory that must be free when an engine starts."""
Batch = list[list[int]]


class TRL:
    """Uses a colocated ``VLLMGeneration``. It has no field for vLLM arguments, so Sparrow is
    switched on through environment variables, and CUDA graphs can't be switched off. Engines start
    one after another, because vLLM measures how much memory is free.
    """

    packages = ("trl", "accelerate")
    at_once = False
    updates_on_cpu = True

    @staticmethod
    def variables(mode: str) -> dict[str, str]:
        return environment(mode)

    def __init__(self, folder: Path, mode: str) -> None:
        from accelerate import Accelerator
        from transformers import AutoTokenizer
        from trl.generation.vllm_generation import VLLMGeneration

        accelerator = Accelerator()
        self.rollouts = VLLMGeneration(
            load(folder, DTYPE).to(accelerator.device),
            accelerator,
            AutoTokenizer.from_pretrained(folder),
            gpu_memory_utilization=3 * MEMORY,
            max_model_length=CONTEXT,
            max_num_seqs=len(LENGTHS),
            temperature=0.0,
            max_completion_length=TOKENS,
            generation_kwargs={"ignore_eos": True},
        )

    async def start(self) -> None:
        """No-op: vLLM has already been started in this process."""

    async def call(self, method: str) -> Any:
        return self.rollouts.llm.collective_rpc(method)[0]

    async def generate(self, prompts: Batch) -> Batch:
        return [list(tokens) for tokens in self.rollouts.generate(prompts, None, 1)[1]]

    async def update(self, folder: Path) -> None:
        self.rollouts.model.load_state_dict(load(folder, DTYPE).state_dict())
        self.rollouts.sync_weights()


class SkyRL:
    """Uses ``VLLMServerActor`` outside a Ray actor, and ``RemoteInferenceClient``. Weights go
    through SkyRL's ``delta`` backend, because NCCL would need a second GPU.
    """

    packages = ("skyrl", "ray")
    at_once = True
    updates_on_cpu = True

    @staticmethod
    def variables(mode: str) -> dict[str, str]:
        return {}

    def __init__(self, folder: Path, mode: str) -> None:
        from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
        from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor
        from skyrl.train.config import SkyRLTrainConfig

        engine = "generator.inference_engine."
        options = engine_options(mode)
        if not CUDA:  # otherwise, SkyRL would pick vLLM's GPU worker
            options["worker_cls"] = "vllm.v1.worker.cpu_worker.CPUWorker"
        self.config = SkyRLTrainConfig.from_cli_overrides(
            {
                "trainer.policy.model.path": str(folder),
                "trainer.placement.colocate_all": False,
                engine + "model_dtype": DTYPE,
                engine + "gpu_memory_utilization": MEMORY,
                engine + "max_num_seqs": 16,
                engine + "enforce_eager": options.pop("enforce_eager"),
                engine + "weight_sync_backend": "delta",
                engine + "delta_weight_sync": {"sync_dir": str(folder.parent / f"sync-{mode}")},
                engine + "engine_init_kwargs": options,
            }
        )
        self.server = VLLMServerActor(
            build_vllm_cli_args(self.config),
            start_port=free_port(),
            distributed_executor_backend="mp",
            enable_ray_prometheus_stats=False,
        )
        self.folder = folder

    async def start(self) -> None:
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
            RemoteInferenceClient,
        )
        from transformers import AutoTokenizer

        self.url = (await self.server.start()).url
        self.client = RemoteInferenceClient(
            proxy_url=self.url,
            server_urls=[self.url],
            data_parallel_size=1,
            model_name=str(self.folder),
            tokenizer=AutoTokenizer.from_pretrained(self.folder),
        )

    async def call(self, method: str) -> Any:
        answer = await asyncio.to_thread(post, self.url + "/collective_rpc", {"method": method})
        return answer["results"][0]

    async def generate(self, prompts: Batch) -> Batch:
        outputs = await self.client.generate(
            {"prompt_token_ids": prompts, "sampling_params": greedy()}
        )
        return outputs["response_ids"]

    async def update(self, folder: Path) -> None:
        from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
        from skyrl.backends.skyrl_train.weight_sync.weight_senders import build_trainer_engine

        model = load(folder, DTYPE)

        def send() -> None:
            sender = build_trainer_engine(
                ie_cfg=self.config.generator.inference_engine,
                colocate_all=False,
                rank=0,
                inference_world_size=1,
                source_factory=lambda dtype, backend: FsdpWeightSource(model, dtype),
                draft_source_factory=lambda dtype: FsdpWeightSource(model, dtype),
                server_urls=[self.url],
                data_parallel_size=1,
                base_model_path=str(self.folder),
            )
            sender.send_weights()

        await asyncio.to_thread(send)


class PrimeRL:
    """Uses ``inference_local`` to start prime-rl's server without a router. Weights go through the
    server's ``filesystem`` backend.
    """

    packages = ("prime-rl",)
    at_once = True
    updates_on_cpu = True

    @staticmethod
    def variables(mode: str) -> dict[str, str]:
        return {}

    def __init__(self, folder: Path, mode: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.folder = folder
        options = engine_options(mode)
        variables = environment(mode)
        del options["additional_config"], options["attention_backend"]  # set by variables instead
        if mode == "lossless":
            variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        settings = {
            "server": {"host": "127.0.0.1", "port": port},
            "router": None,
            "model": {
                "name": str(folder),
                "dtype": DTYPE,
                "max_model_len": CONTEXT,
                "enforce_eager": options.pop("enforce_eager"),
            },
            "gpu_memory_utilization": MEMORY,
            "enable_fp32_lm_head": CUDA,  # only supported on GPUs
            "env_vars": variables,
            "vllm_extra": options,
        }
        self.server = multiprocessing.get_context("spawn").Process(target=serve, args=(settings,))

    async def start(self) -> None:
        self.server.start()
        while True:
            with contextlib.suppress(urllib.error.URLError):
                return await asyncio.to_thread(post, self.url + "/health", None)
            if not self.server.is_alive():
                raise RuntimeError("prime-rl's server exited while starting; see its log above")
            await asyncio.sleep(1)

    async def call(self, method: str) -> Any:
        return (await asyncio.to_thread(post, f"{self.url}/sparrow/{method}", {}))[0]

    async def generate(self, prompts: Batch) -> Batch:
        async def one(prompt: list[int]) -> list[int]:
            body = {
                "model": str(self.folder),
                "token_ids": prompt,
                "sampling_params": greedy(),
            }
            answer = await asyncio.to_thread(post, self.url + "/inference/v1/generate", body)
            return answer["choices"][0]["token_ids"]

        return await asyncio.gather(*(one(prompt) for prompt in prompts))

    async def update(self, folder: Path) -> None:
        for path, body in (
            ("/pause", {}),
            ("/update_weights", {"weight_dir": str(folder)}),
            ("/resume", {}),
        ):
            await asyncio.to_thread(post, self.url + path, body)


class OpenRLHF:
    """Uses ``RolloutRayActor`` outside Ray. OpenRLHF doesn't pass user settings to vLLM, so Sparrow
    is switched on through environment variables. Weights are sent through CUDA IPC handles, as when
    training and rollouts share GPUs.
    """

    packages = ("openrlhf", "ray")
    at_once = True
    updates_on_cpu = False

    @staticmethod
    def variables(mode: str) -> dict[str, str]:
        return environment(mode) | ({"VLLM_USE_V2_MODEL_RUNNER": "1"} if mode == "lossless" else {})

    def __init__(self, folder: Path, mode: str) -> None:
        from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

        self.actor_class = RolloutRayActor.__ray_metadata__.modified_class
        self.actor = self.actor_class.__new__(self.actor_class)
        self.options = engine_options(mode) | {
            "model": str(folder),
            "dtype": DTYPE,
            "seed": 1,
            "worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
            "distributed_executor_backend": "uni",
            "enable_prefix_caching": False,
            "gpu_memory_utilization": MEMORY,
        }
        del self.options["additional_config"], self.options["attention_backend"]

    async def start(self) -> None:
        await self.actor_class.__init__(self.actor, num_gpus=1, **self.options)

    async def call(self, method: str) -> Any:
        return (await self.actor.llm.collective_rpc(method))[0]

    async def generate(self, prompts: Batch) -> Batch:
        from vllm import SamplingParams

        settings = SamplingParams(**greedy())
        outputs = await asyncio.gather(*(self.actor.generate(p, settings) for p in prompts))
        return [list(output.outputs[0].token_ids) for output in outputs]

    async def update(self, folder: Path) -> None:
        from openrlhf.trainer.ray.utils import get_physical_gpu_id
        from torch.multiprocessing.reductions import reduce_tensor

        for name, weight in load(folder, DTYPE).cuda().named_parameters():
            handles = {get_physical_gpu_id(): reduce_tensor(weight.detach())}
            await self.actor.update_weight_cuda_ipc(name, weight.dtype, weight.shape, handles)
        await self.actor.reset_prefix_cache()


TRAINERS: dict[str, Any] = {"trl": TRL, "skyrl": SkyRL, "prime-rl": PrimeRL, "openrlhf": OpenRLHF}


def serve(settings: dict[str, Any]) -> None:
    """Run prime-rl's server in this process, with an extra route for calling methods of vLLM's
    workers.
    """
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.entrypoints.inference import inference_local
    from prime_rl.inference.server import setup_vllm_env

    config = InferenceConfig(**settings)
    os.environ.update(config.env_vars)  # read by vLLM, which is imported below
    setup_vllm_env(config)
    from prime_rl.inference.vllm.server import engine_client, router
    from starlette.responses import JSONResponse

    async def answer(request: Any) -> JSONResponse:
        method = request.path_params["method"]
        return JSONResponse(await engine_client(request).collective_rpc(method))

    router.add_route("/sparrow/{method}", answer, methods=["POST"])
    inference_local(config)


def environment(mode: str) -> dict[str, str]:
    """Return the environment variables that select a mode for all vLLM engines of a process."""
    if mode == "stock":
        return {}
    chosen = {"SPARROW_MODE": "lossless"} if mode == "lossless" else {}
    return chosen | {"SPARROW_SCHEDULE": json.dumps(SCHEDULE)}


def engine_options(mode: str) -> dict[str, Any]:
    """Return the engine options that make vLLM decode in this mode."""
    sparrow = {
        "stock": {},
        "lossless": {"sparrow": {"mode": "lossless", "draft_schedule": SCHEDULE}},
        "lossy": {"sparrow": SCHEDULE},
    }
    return {
        "additional_config": sparrow[mode],
        "attention_backend": "CUSTOM" if CUDA and mode == "lossy" else None,
        "enforce_eager": not CUDA or mode != "lossless",
        "max_model_len": CONTEXT,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "max_num_seqs": 16,
    }


def greedy() -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}


def post(url: str, body: Any) -> Any:
    """Post JSON to a server, or send a GET request if ``body`` is None, and return the response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url} returned HTTP {error.code}: {error.read().decode()}") from error


def prompts(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, length).tolist() for length in LENGTHS]


def make_model(folder: Path, seed: int) -> None:
    """Write a random Qwen3 with head dim 128, and a tokenizer that uses numbers as words. The
    model's attention is so uniform that many drafts are accepted.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            initializer_range=0.05,
            eos_token_id=0,
            bos_token_id=None,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
    model.to(getattr(torch, DTYPE)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="0", eos_token="0", pad_token="0"
    ).save_pretrained(folder)


def load(folder: Path, dtype: str) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Return the first position where two responses differ, or None if they are equal."""
    if list(expected) == list(found):
        return None
    pairs = zip(expected, found, strict=False)
    ends = min(len(expected), len(found))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), ends)


def tied(logits: ArrayLike, first: int, second: int) -> bool:
    """Return whether two tokens are both so close to the maximum that rounding decides which one
    greedy decoding picks.
    """
    values = np.asarray(logits, dtype=np.float64)
    return bool(min(values[first], values[second]) >= values.max() - TIE * values.std())


def checkpoints(trainer: str) -> tuple[str, ...]:
    """Return the checkpoints to test: both, or only the first if weights can't be updated."""
    return WEIGHTS if CUDA or TRAINERS[trainer].updates_on_cpu else WEIGHTS[:1]


def compare(folder: Path, asked: Batch, expected: Batch, found: Batch) -> dict[str, int]:
    """Count the greedy responses that equal the expected ones, those that first differ at a tie,
    and those that are wrong. Also count the tokens compared.
    """
    model = load(folder, "float32")
    result = {"equal": 0, "differ at a tie": 0, "wrong": 0, "tokens compared": 0}
    for prompt, wanted, response in zip(asked, expected, found, strict=True):
        at = first_difference(wanted, response)
        if at is None:
            result["equal"] += 1
            result["tokens compared"] += len(wanted)
            continue
        result["tokens compared"] += at + 1
        is_tie = False
        if at < min(len(wanted), len(response)):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + wanted[:at]])).logits[0, -1].numpy()
            is_tie = tied(logits, wanted[at], response[at])
        result["differ at a tie" if is_tie else "wrong"] += 1
    return result


def failures(mode: str, counts: Mapping[str, int], against_stock: Mapping[str, int]) -> list[str]:
    """List everything wrong with a mode's counters and responses."""
    cases = {
        "lossless": (
            (not counts.get("drafted"), "no drafts were proposed"),
            (not counts.get("accepted"), "no drafts were accepted"),
            (against_stock["wrong"] > 0, "responses differ from those of stock vLLM"),
        ),
        "lossy": (
            (not counts.get("tokens_held"), "nothing was decoded by Sparrow"),
            (
                counts.get("tokens_read", 0) >= counts.get("tokens_held", 0),
                "as many tokens were read as were held",
            ),
        ),
    }
    return [words for is_so, words in cases.get(mode, ()) if is_so]


async def roll_out(trainer: str, mode: str, folder: Path) -> None:
    """Generate responses with a trainer's engine, using the first weights and then the second, and
    write the responses and counters to ``MODE.json``.
    """
    import vllm

    started = time.monotonic()
    engine = TRAINERS[trainer](folder / WEIGHTS[0], mode)
    await engine.start()
    packages = (*TRAINERS[trainer].packages, "torch", "transformers")
    versions = {"vllm": vllm.__version__, "python": platform.python_version()}
    found: dict[str, Any] = {
        "seconds to start": round(time.monotonic() - started, 1),
        "versions": versions | {name: importlib.metadata.version(name) for name in packages},
        "rounds": [],
    }
    if mode != "stock":
        found["described"] = await engine.call("sparrow_describe")
    for i, weights in enumerate(checkpoints(trainer)):
        if i:
            await engine.update(folder / weights)
        if mode != "stock":
            await engine.call("sparrow_counters")
        responses = await engine.generate(prompts(i))
        counts = {} if mode == "stock" else await engine.call("sparrow_counters")
        found["rounds"].append({"responses": responses, "counts": counts})
        (folder / f"{mode}.json").write_text(json.dumps(found))


@contextlib.contextmanager
def in_a_process_of_its_own(trainer: str, mode: str, folder: Path) -> Iterator[subprocess.Popen]:
    """Run ``roll_out`` in a new process that logs to ``MODE.log``. Its process group is killed on
    exit, because vLLM's engine doesn't exit on its own.
    """
    variables = {name: value for name, value in os.environ.items() if "SPARROW_" not in name}
    variables |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RAY_ADDRESS": "local",  # otherwise, Ray would look for a running cluster
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # because this module initialises CUDA
        **TRAINERS[trainer].variables(mode),
    }
    if port := variables.get("VLLM_PORT"):  # concurrent engines need different ports
        variables["VLLM_PORT"] = str(int(port) + 100 * MODES.index(mode))
    with (folder / f"{mode}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, trainer, "--inside", mode, "--folder", str(folder)],
            env=variables,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):  # the group has already exited
                os.killpg(process.pid, signal.SIGKILL)


def roll_out_all(trainer: str, modes: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run ``roll_out`` in each mode, and return the results. If a mode stopped early, its result is
    incomplete, and its log is printed.
    """
    at_once = CUDA and TRAINERS[trainer].at_once
    for group in [modes] if at_once else [[mode] for mode in modes]:
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(in_a_process_of_its_own(trainer, mode, folder))
                for mode in group
            ]
            began = time.monotonic()
            for mode, process in zip(group, processes, strict=True):
                with contextlib.suppress(subprocess.TimeoutExpired):  # there may be results anyway
                    process.wait(max(0, began + LIMIT_S - time.monotonic()))
                print(f"{mode}: ended after {time.monotonic() - began:.0f} s", flush=True)
    results = {}
    for mode in modes:
        out = folder / f"{mode}.json"
        results[mode] = json.loads(out.read_text()) if out.exists() else {"rounds": []}
        if len(results[mode]["rounds"]) < len(checkpoints(trainer)):
            print(f"{trainer}, {mode}, stopped early:\n{(folder / f'{mode}.log').read_text()}")
    return results


def judged(
    mode: str, rounds: int, found: dict[str, Any], stock: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Return a mode's result for the file. It doesn't contain the responses, but compares them with
    stock vLLM's.

    Args:
        rounds: how many rounds there should be.
    """
    result: dict[str, Any] = {
        name: found[name] for name in ("described", "seconds to start") if name in found
    }
    result["faults"] = []
    if len(found["rounds"]) < rounds:
        result["faults"].append(f"it stopped in round {len(found['rounds']) + 1}")
    for i, (one, wanted) in enumerate(zip(found["rounds"], stock["rounds"], strict=False)):
        name = WEIGHTS[i]
        against = compare(folder / name, prompts(i), wanted["responses"], one["responses"])
        result[name] = {"counts": one["counts"], "against stock": against}
        result["faults"] += [f"{name}: {fault}" for fault in failures(mode, one["counts"], against)]
    return result


def main() -> int:
    options = parser(__doc__)
    options.add_argument("trainer", choices=TRAINERS)
    options.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="the modes to run, stock first"
    )
    options.add_argument(
        "--out", type=Path, help="the JSON file to write, results/TRAINER_rollouts.json by default"
    )
    options.add_argument("--inside", choices=MODES, help="internal: the mode of this process")
    options.add_argument("--folder", type=Path, help="internal: the folder with the checkpoints")
    given = options.parse_args()
    if given.inside:
        asyncio.run(roll_out(given.trainer, given.inside, given.folder))
        os._exit(0)
    if given.modes[0] != "stock":
        options.error(
            "--modes must start with stock, because other modes are compared with it, got "
            f"{given.modes[0]}"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that process groups get killed too
    name = given.trainer.replace("-", "_")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for seed, weights in enumerate(WEIGHTS):
            make_model(folder / weights, seed)
        found = roll_out_all(given.trainer, given.modes, folder)
        stock = found["stock"]
        rounds = len(checkpoints(given.trainer))
        results = {mode: judged(mode, rounds, found[mode], stock, folder) for mode in given.modes}
    about = {"versions": stock.get("versions"), "machine": machine(), "dtype": DTYPE}
    write(given.out or RESULTS / f"{name}_rollouts.json", about | results)
    faults = [f"{mode}: {fault}" for mode in given.modes for fault in results[mode]["faults"]]
    print(
        "\n".join(faults) or f"{given.trainer}: results are as expected in {', '.join(given.modes)}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
