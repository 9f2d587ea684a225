"""Train the bundled reasoner with stock verl and dense, lossless or lossy rollouts in stock vLLM.

    python recipes/verl/grpo.py --mode lossless --gpus 2 --out run.json

Written for verl 0.9.1 (pip install -e '.[verl]'). Prepares a data set and a model folder,
runs ``python -m verl.trainer.main_ppo`` with the settings below, and collects verl's logs. Dense
rollouts are verl's own, without Sparrow. The exit status is verl's, or 1 if a lossless run drafted
nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets

import sparrow
from sparrow.tasks import load_task
from sparrow.tasks.vocabulary import check_answer

MODEL = Path(sparrow.__file__).parent / "reasoner"
LAYOUT: dict[str, Any] = {"bin_tokens": 64, "page_size": 8, "sink_pages": 1, "recent_pages": 2}
SCHEDULE: dict[str, Any] = {
    "top_k": [8, 8, 8, 16, 20, 24, 28],
    **LAYOUT,
    "dense_layers": [0],
}
"""The schedule for lossy rollouts, with a p5 of 0.95 on ``trace`` with 24 lines. Its pages have 8
tokens, the smallest size that the decode kernels support.
"""
LOSSLESS: dict[str, Any] = {
    "mode": "lossless",
    "draft_schedule": {"top_k": [8], **LAYOUT, "dense_layers": []},
    "draft_tokens": 4,
    "adapt_draft_tokens": False,
}
"""The settings for lossless rollouts. The draft length is fixed so that every step verifies some
drafts. An adaptive one would drop to zero: with such a small model and such short responses,
decoding is fastest without drafts.
"""
SAMPLES = 8
CAPTURED = [1, 2, 4, *range(8, 8 * SAMPLES + 1, 8)]
PACKAGES = ("verl", "vllm", "torch", "transformers", "ray")
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """verl's reward function."""
    return check_answer(solution_str, int(ground_truth))


def by_mode(mode: str) -> list[str]:
    """Return the settings that depend on the mode."""
    if mode == "dense":
        return ["trainer.v1.trainer_mode=sync", captured(CAPTURED)]
    if mode == "lossless":
        # Sparrow chooses which graphs to capture: the ones for drafting and for verification.
        return ["trainer.v1.trainer_mode=sparrow", additional(LOSSLESS)]
    return [
        "trainer.v1.trainer_mode=sparrow",
        additional(SCHEDULE),
        f"+{ENGINE}.attention_backend=CUSTOM",
        "+trainer.v1.sparrow={probe_every: 5, sequences: 32}",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
        captured(CAPTURED),
    ]


def additional(settings: dict[str, Any]) -> str:
    """Return the setting that hands Sparrow's settings to vLLM."""
    return f"+{ENGINE}.additional_config={{sparrow: {json.dumps(settings).replace(chr(34), '')}}}"


def captured(sizes: list[int]) -> str:
    return f"actor_rollout_ref.rollout.cudagraph_capture_sizes={sizes}"


def overrides(
    folder: Path, mode: str, gpus: int, steps: int, lines: int, prompts: int
) -> list[str]:
    """Return all settings for ``verl.trainer.main_ppo``. Only those from ``by_mode`` concern
    Sparrow.
    """
    return [
        *by_mode(mode),
        # no compilation, but full CUDA graphs for decode steps
        f"+{ENGINE}.compilation_config={{mode: 0, cudagraph_mode: FULL_DECODE_ONLY}}",
        f"+{ENGINE}.kv_cache_memory_bytes=2147483648",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=256",
        f"data.max_response_length={12 * lines}",
        "data.shuffle=False",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.05",
        "actor_rollout_ref.rollout.max_model_len=1024",
        f"actor_rollout_ref.rollout.max_num_seqs={CAPTURED[-1]}",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=65536",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.custom_reward_function.name=score",
        "reward.num_workers=1",
        "trainer.logger=[console,file]",
        f"trainer.n_gpus_per_node={gpus}",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


def prepare(folder: Path, steps: int, lines: int, prompts: int) -> None:
    """Write the data set, and the model with a chat template that passes prompts through as is."""
    shutil.copytree(MODEL, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    task = load_task("trace", lines=lines)
    problems = [task.problem(i, seed=1) for i in range(steps * prompts)]
    rows = [
        {
            "data_source": "trace",
            "prompt": [{"role": "user", "content": problem.prompt}],
            "reward_model": {"style": "rule", "ground_truth": problem.solution[-1]},
        }
        for problem in problems
    ]
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")


def train(settings: list[str], mode: str, log: Path) -> int:
    """Run verl, which appends each step's metrics to ``log``, and return its exit status. SIGTERM
    is passed on to verl.
    """
    variables = {"VERL_FILE_LOGGER_PATH": str(log)}
    if mode != "dense":
        variables["VERL_USE_EXTERNAL_MODULES"] = "sparrow.integrations.verl"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings]
    verl = subprocess.Popen(command, env=os.environ | variables)
    signal.signal(signal.SIGTERM, lambda *_: verl.terminate())
    return verl.wait()


def drafted(steps: list[dict[str, Any]]) -> int:
    """Return the total number of drafted tokens."""
    return sum(step["data"].get("sparrow/drafts/drafted", 0) for step in steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("dense", "lossless", "lossy"), default="lossless")
    parser.add_argument(
        "--gpus", type=int, default=1, help="number of GPUs in this machine to train on"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--lines", type=int, default=24, help="number of lines in the programs to trace"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=8,
        help=f"prompts per step, with {SAMPLES} responses each",
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "more", nargs="*", help="additional settings for verl, such as trainer.nnodes=2"
    )
    asked = parser.parse_args()

    sizes = {"steps": asked.steps, "lines": asked.lines, "prompts": asked.prompts}
    log = asked.out.absolute().with_suffix(".jsonl")
    log.unlink(missing_ok=True)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, **sizes)
        settings = overrides(folder, asked.mode, asked.gpus, **sizes)
        code = train([*settings, *asked.more], asked.mode, log)
    steps = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    import torch  # imported late, so that this process doesn't use a GPU while verl is running

    result = {
        "mode": asked.mode,
        "settings": {"lossless": LOSSLESS, "lossy": SCHEDULE}.get(asked.mode),
        "gpus": asked.gpus,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"sparrow": sparrow.__version__}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "exit": code,
        "seconds": time.perf_counter() - started,
        "log": steps,
    }
    asked.out.write_text(json.dumps(result, indent=1))
    if asked.mode == "lossless" and not code and not drafted(steps):
        print("no tokens were drafted, so these rollouts were not lossless", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
