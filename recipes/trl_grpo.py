"""Train the bundled reasoner with stock TRL and sparse rollouts in stock vLLM; TRL's logs include
p5.

    python recipes/trl_grpo.py --out run.json                                 # vLLM in the trainer's process
    python recipes/trl_grpo.py --schedule lossless --out run.json             # drafts that the dense policy verifies
    python recipes/trl_grpo.py --server http://localhost:8000 --out run.json  # a `vllm serve` on another GPU

Written for TRL 1.16 (pip install -e '.[trl]' in a clone). docs/integrations.md has the server's
flags.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trl
import vllm
from datasets import Dataset
from trl import GRPOConfig

import sparrow
from sparrow import SparsitySchedule
from sparrow.integrations.trl import SparseGRPOTrainer
from sparrow.tasks import load_task

MODEL = Path(sparrow.__file__).parent / "reasoner"
SCHEDULE = SparsitySchedule(
    top_k=(8, 8, 8, 16, 20, 24, 28),
    bin_tokens=64,
    page_size=8,
    sink_pages=1,
    recent_pages=2,
    dense_layers=(0,),
)
"""A schedule with a p5 of 0.95 on ``trace`` with 24 lines. Its pages have 8 tokens, the smallest
size that the decode kernels support.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--schedule",
        help="a schedule file, or lossless; by default, a schedule for programs of 24 lines",
    )
    parser.add_argument(
        "--server", help="URL of a vLLM server; by default vLLM runs in this process"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--lines", type=int, default=24, help="number of lines in the programs to trace"
    )
    parser.add_argument("--batch", type=int, default=64, help="responses per step, 8 per prompt")
    parser.add_argument("--measure-every", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    task = load_task("trace", lines=arguments.lines)
    problems = [task.problem(i, seed=1) for i in range(arguments.steps * arguments.batch // 8)]

    def correct(completions: list[str], index: list[int], **_: Any) -> list[float]:
        return [problems[i].verify(text) for text, i in zip(completions, index, strict=True)]

    on_gpu = torch.cuda.is_available()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = SparseGRPOTrainer(
            str(MODEL),
            correct,
            args=GRPOConfig(
                output_dir=folder,
                use_vllm=True,
                vllm_mode="server" if arguments.server else "colocate",
                vllm_server_base_url=arguments.server,
                vllm_gpu_memory_utilization=0.1,
                vllm_max_model_length=512,
                vllm_importance_sampling_mode="token_truncate",
                vllm_importance_sampling_clip_max=2.0,
                max_completion_length=12 * arguments.lines,
                num_generations=8,
                per_device_train_batch_size=arguments.batch,
                gradient_accumulation_steps=1,
                learning_rate=5e-4,
                epsilon_high=0.28,
                max_steps=arguments.steps,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                bf16=on_gpu,
                use_cpu=not on_gpu,
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=Dataset.from_list(
                [{"prompt": p.prompt, "index": i} for i, p in enumerate(problems)]
            ),
            schedule=arguments.schedule or SCHEDULE,
            measure_every=arguments.measure_every,
        )
        ready = time.perf_counter()
        trainer.train()
    result: dict[str, Any] = {
        "versions": {"trl": trl.__version__, "vllm": vllm.__version__, "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "mode": trainer.vllm_mode,
        "schedule": trainer.schedule.to_dict(),
        "start_s": ready - started,
        "train_s": time.perf_counter() - ready,
        "log": trainer.state.log_history,
    }
    arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
