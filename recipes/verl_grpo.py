"""GRPO with stock verl on the bundled reasoner, rollouts by stock vLLM under a schedule, acceptance
in verl's metrics.

    python recipes/verl_grpo.py --out run.json

Needs one GPU. Written for verl 0.9.1 (pip install 'sparrow-rl[verl]'). It prepares a data set and a
model folder, runs ``python -m verl.trainer.main_ppo`` with the settings below, and collects what
verl logged.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
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
SCHEDULE: dict[str, Any] = {
    "top_k": [8, 8, 8, 16, 20, 24, 28],
    "bin_tokens": 64,
    "page_size": 8,
    "sink_pages": 1,
    "recent_pages": 2,
    "dense_layers": [0],
}
"""For ``trace`` at 24 lines and a p5 of 0.95; pages of 8 tokens are the decode kernels' smallest.
"""


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Serve as verl's reward function."""
    return check_answer(solution_str, int(ground_truth))


def overrides(folder: Path, steps: int, lines: int, prompts: int) -> list[str]:
    """Return settings of ``verl.trainer.main_ppo``; Sparrow needs the first block."""
    schedule = json.dumps(SCHEDULE).replace('"', "")
    return [
        "trainer.v1.trainer_mode=sparrow",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend=CUSTOM",
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config={{sparrow: {schedule}}}",
        "+trainer.v1.sparrow={probe_every: 5, sequences: 32}",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
        # Skip compilation; use full CUDA graphs for decode steps.
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config={mode: 0, cudagraph_mode: FULL_DECODE_ONLY}",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=2147483648",
        "actor_rollout_ref.rollout.cudagraph_capture_sizes=[8, 16, 32, 64, 128]",
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
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.05",
        "actor_rollout_ref.rollout.max_model_len=1024",
        "actor_rollout_ref.rollout.max_num_seqs=128",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=65536",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.custom_reward_function.name=score",
        "reward.num_workers=1",
        "trainer.logger=[console,file]",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--lines", type=int, default=24, help="length of the programs that are traced"
    )
    parser.add_argument(
        "--prompts", type=int, default=8, help="prompts per step, with 8 responses each"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    task = load_task("trace", lines=arguments.lines)
    problems = [task.problem(i, seed=1) for i in range(arguments.steps * arguments.prompts)]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(MODEL, folder / "model")
        (folder / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
        rows = [
            {
                "data_source": "trace",
                "prompt": [{"role": "user", "content": problem.prompt}],
                "reward_model": {"style": "rule", "ground_truth": problem.solution[-1]},
            }
            for problem in problems
        ]
        datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
        command = [sys.executable, "-m", "verl.trainer.main_ppo"]
        command += overrides(folder, arguments.steps, arguments.lines, arguments.prompts)
        log = arguments.out.absolute().with_suffix(".jsonl")
        modules = {
            "VERL_USE_EXTERNAL_MODULES": "sparrow.integrations.verl",
            "VERL_FILE_LOGGER_PATH": str(log),
        }
        done = subprocess.run(command, env=os.environ | modules)
        steps = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    result = {
        "versions": {
            name: importlib.metadata.version(name) for name in ("verl", "vllm", "torch", "ray")
        },
        "schedule": SCHEDULE,
        "exit": done.returncode,
        "seconds": time.perf_counter() - started,
        "log": steps,
    }
    arguments.out.write_text(json.dumps(result, indent=1))
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
