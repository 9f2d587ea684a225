"""Long conversations about mathematics, in which all answers are samples of the model, from stock
vLLM.

    python studies/pretrained/conversations.py --model smollm2 --questions gsm8k_test.jsonl \\
      --out runs/conversations.npz

A small model answers a question in some hundred tokens. To reach thousands of tokens without
leaving what the model was trained for, each answer is followed by the next question. An answer that
does not end by itself is cut after ``turn`` tokens.

The file contains ``TEMPERATURE/ids``, token ids ``[S, T]`` of S conversations of T tokens, and
``TEMPERATURE/sampled``, bool ``[S, T]``, which tokens the model sampled.
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

    questions: Path  # Lines of JSON with a field `question`.
    out: Path  # The .npz file of conversations.
    model: str = "smollm2"  # An instruction-tuned model.
    temperatures: tuple[float, ...] = (1.0, 0.8, 0.6)
    conversations: tuple[int, ...] = (40, 24, 24)  # At each temperature.
    tokens: int = 8192  # Tokens of a conversation.
    turn: int = 512  # The most tokens of an answer.
    memory: float = 0.9  # Share of the GPU's memory that vLLM may use.
    cache_gib: int = 40  # GiB of it for keys and values.
    seed: int = 0


@dataclass
class Conversation:
    """A conversation at a temperature, so far."""

    temperature: float
    ids: list[int]
    sampled: list[bool] = field(default_factory=list)

    def add(self, ids: list[int], sampled: bool) -> None:
        """Append tokens, which the model has ``sampled`` or not."""
        self.sampled += [False] * (len(self.ids) - len(self.sampled))
        self.ids += ids
        self.sampled += [sampled] * len(ids)


def next_turn(tokenizer: PreTrainedTokenizerBase, request: str) -> list[int]:
    """Return the token ids between the end of an answer and the beginning of the next."""
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
    """Sample, and save the conversations."""
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
