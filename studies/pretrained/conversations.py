"""Sample long conversations about mathematics with stock vLLM; the model writes all answers.

    python studies/pretrained/conversations.py --model smollm2 --questions gsm8k_test.jsonl \\
      --out runs/conversations.npz

A small model answers a question in a few hundred tokens. So each answer is followed by the next
question. This way, conversations reach thousands of tokens, and are still the kind of text the
model was trained on. Answers that don't end on their own are cut after ``turn`` tokens.

For each temperature, the file contains ``TEMPERATURE/ids``, the token ids ``[S, T]`` of S
conversations of T tokens, and ``TEMPERATURE/sampled``, bool ``[S, T]``, which is true for tokens
sampled by the model.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import numpy as np
import tyro
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sparrow.cli.loading.models import model_path

sys.path.append(str(Path(__file__).parents[1] / "cascade"))
from samples import chat, mathematics, save


@dataclass(frozen=True)
class Options:
    """What to sample."""

    questions: Path  # JSON lines with a field `question`.
    out: Path  # The .npz file of conversations.
    model: str = "smollm2"  # An instruction-tuned model.
    temperatures: tuple[float, ...] = (1.0, 0.8, 0.6)
    conversations: tuple[int, ...] = (40, 24, 24)  # At each temperature.
    tokens: int = 8192  # Tokens per conversation.
    turn: int = 512  # Maximum number of tokens per answer.
    memory: float = 0.9  # Share of the GPU's memory that vLLM may use.
    cache_gib: int = 40  # GiB of this memory for the KV cache.
    seed: int = 0


@dataclass
class Conversation:
    """A conversation so far, and the sampling temperature for its answers."""

    temperature: float
    ids: list[int]
    sampled: list[bool] = field(default_factory=list)

    def add(self, ids: list[int], sampled: bool) -> None:
        """Append tokens. ``sampled`` is whether the model sampled them."""
        self.sampled += [False] * (len(self.ids) - len(self.sampled))
        self.ids += ids
        self.sampled += [sampled] * len(ids)


def next_turn(tokenizer: PreTrainedTokenizerBase, request: str) -> list[int]:
    """Return the token ids between an answer and the answer to ``request``."""
    answer = "ANSWER"
    turns = [("user", ""), ("assistant", answer), ("user", request)]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        tokenize=False,
        add_generation_prompt=True,
    )
    _, after = text.split(f"{answer}{tokenizer.eos_token}")
    return tokenizer(after, add_special_tokens=False).input_ids


def main(options: Options) -> None:
    """Sample the conversations, and save them."""
    from vllm import LLM, SamplingParams

    model = model_path(options.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = cycle(list(mathematics(options.questions, random.Random(options.seed))))
    every = [
        Conversation(temperature, chat(tokenizer, next(questions)))
        for temperature, count in zip(options.temperatures, options.conversations, strict=True)
        for _ in range(count)
    ]
    llm = LLM(
        model,
        seed=options.seed,
        max_model_len=options.tokens,
        gpu_memory_utilization=options.memory,
        kv_cache_memory_bytes=options.cache_gib << 30,
    )
    began, requests = time.monotonic(), 0
    while running := [one for one in every if len(one.ids) < options.tokens]:
        settings = [
            SamplingParams(
                temperature=one.temperature,
                max_tokens=min(options.turn, options.tokens - len(one.ids)),
                seed=options.seed + requests + number + 1,
            )
            for number, one in enumerate(running)
        ]
        requests += len(running)
        inputs = [{"prompt_token_ids": one.ids} for one in running]
        outputs = llm.generate(inputs, settings, use_tqdm=False)
        for one, output in zip(running, outputs, strict=True):
            answer = list(output.outputs[0].token_ids)
            one.add(answer, sampled=True)
            if answer[-1] != tokenizer.eos_token_id:
                one.add([tokenizer.eos_token_id], sampled=False)
            one.add(next_turn(tokenizer, next(questions)), sampled=False)

    llm.llm_engine.engine_core.shutdown()  # otherwise, the process may wait for the engine's

    arrays = {}
    for temperature in options.temperatures:
        of = [one for one in every if one.temperature == temperature]
        ids = [one.ids[: options.tokens] for one in of]
        sampled = [one.sampled[: options.tokens] for one in of]
        arrays[f"{temperature}/ids"] = np.array(ids, np.uint16)
        arrays[f"{temperature}/sampled"] = np.array(sampled)
    save(options.out, arrays)
    seconds = time.monotonic() - began
    print(f"{requests} answers, {sum(sum(one.sampled) for one in every):,} tokens, {seconds:.0f} s")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
