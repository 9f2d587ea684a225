"""Run two steps of stock TRL with lossless rollouts in stock vLLM on the V2 model runner;
``test_trl.py`` runs this file. The JSON output contains the logged metrics, the log-probs of one
final rollout according to vLLM and to transformers, and the mode of an engine that is then started
in the same process.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.vllm import v2_on_cpu  # noqa: F401  before vLLM is imported

import torch  # isort: skip
from datasets import Dataset
from trl import GRPOConfig
from trl.generation import vllm_generation
from vllm import LLM, SamplingParams

import sparrow
from sparrow.integrations.trl import SparseGRPOTrainer
from sparrow.tasks import load_task
from sparrow.vllm import config

DECODING = {
    "mode": "lossless",
    "draft_schedule": {
        "top_k": [2],
        "page_size": 8,
        "bin_tokens": 64,
        "sink_pages": 1,
        "recent_pages": 1,
        "dense_layers": [],
    },
    "draft_tokens": 4,
    "adapt_draft_tokens": False,
}


def mixed(completions, **_):
    """Return rewards that differ within every group, whatever the responses are."""
    return [float(i % 2) for i in range(len(completions))]


def main(out: Path) -> None:
    # TRL has no field for vLLM's precision, and vLLM would load a float32 checkpoint in bfloat16.
    vllm_generation.LLM = partial(LLM, dtype="float32")
    task = load_task("trace", lines=12)
    prompts = [task.problem(i, seed=1).prompt for i in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SparseGRPOTrainer(
            str(Path(sparrow.__file__).parent / "reasoner"),
            mixed,
            args=GRPOConfig(
                output_dir=folder,
                use_vllm=True,
                vllm_mode="colocate",
                vllm_max_model_length=512,
                vllm_importance_sampling_mode="token_truncate",
                vllm_importance_sampling_clip_max=2.0,
                max_completion_length=24,
                num_generations=4,
                per_device_train_batch_size=8,
                learning_rate=1e-3,
                gradient_accumulation_steps=1,
                max_steps=2,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            schedule=DECODING,
            measure_every=1,
        )
        before = next(trainer.model.parameters()).detach().clone()
        trainer.train()
    moved = float((next(trainer.model.parameters()).detach() - before).abs().max())
    trainer.vllm_generation.sync_weights()
    llm, tokenizer = trainer.vllm_generation.llm, trainer.processing_class
    asked = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
    llm.collective_rpc("sparrow_counters")
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in asked],
        SamplingParams(max_tokens=24, temperature=1.0, logprobs=0, seed=3),
        use_tqdm=False,
    )
    counts = llm.collective_rpc("sparrow_counters")[0]
    gap, tokens = 0.0, 0
    for ids, output in zip(asked, outputs, strict=True):
        response = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = trainer.model(torch.tensor([[*ids, *response]])).logits[0, len(ids) - 1 : -1]
        dense = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
        given = [
            at[token].logprob
            for at, token in zip(output.outputs[0].logprobs, response, strict=True)
        ]
        gap = max(gap, max(abs(a - b) for a, b in zip(dense, given, strict=True)))
        tokens += len(response)
    plain = LLM(model=str(Path(sparrow.__file__).parent / "reasoner"), dtype="float32")
    asked = config.requested(plain.llm_engine.vllm_config)
    result = {
        "of a plain engine": "stock" if asked is None else asked.mode,
        "log": trainer.state.log_history,
        "describe": llm.collective_rpc("sparrow_describe")[0],
        "counts": counts,
        "gap": gap,
        "tokens": tokens,
        "moved": moved,
    }
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
