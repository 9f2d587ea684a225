"""Sample groups of responses to four kinds of prompts from an instruction-tuned model in stock
vLLM, or in transformers (``--engine hf``).

    python studies/cascade/samples.py MODEL --questions gsm8k_test.jsonl --out runs/samples.npz

Prompts for mathematics and stories use the model's chat template. For sources and manuals, the
model continues passages. They come from files of Python's standard library, and from the long
descriptions of installed packages.

The file is rewritten after each kind and temperature, so an interrupted run keeps everything it has
finished. It contains these arrays:

- ``KIND/TEMPERATURE/PROMPT/prompt``: token ids of a prompt;
- ``KIND/TEMPERATURE/PROMPT/N``: token ids of its Nth response;
- ``KIND/TEMPERATURE/PROMPT/N/logprobs``: log-probs of the response's tokens at that temperature.
"""

from __future__ import annotations

import json
import os
import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from transformers import AutoTokenizer, PreTrainedTokenizerBase

PEOPLE = ("a lighthouse keeper", "a watchmaker", "two sisters", "a retired sailor", "a young nurse")
THINGS = ("an old map", "a broken radio", "a letter", "a garden in winter", "a borrowed violin")
PLACES = ("a harbour town", "a night train", "an empty school", "a mountain village", "a library")
Engine = Literal["vllm", "hf"]
Responses = list[tuple[list[int], list[float]]]
"""The token ids and log-probs of each response to one prompt."""
Sampler = Callable[[Sequence[list[int]], float, int], list[Responses]]
"""Samples responses to prompts, given a temperature and the first prompt's number."""


@dataclass(frozen=True)
class Options:
    """What to sample."""

    model: Annotated[str, tyro.conf.Positional]  # An instruction-tuned checkpoint.
    questions: Path  # JSON lines with a field `question`: the prompts for mathematics.
    out: Path  # The .npz file of samples.
    temperatures: tuple[float, ...] = (0.7, 1.0)
    prompts: int = 12  # Prompts of each kind.
    samples: int = 16  # Responses per prompt.
    max_new_tokens: int = 1024
    context: int = 1024  # Tokens in a prompt from a source or manual.
    engine: Engine = "vllm"  # `hf` is for machines without a GPU.
    memory: float = 0.9  # Share of the GPU's memory that vLLM may use.
    cache_gib: int = 20  # GiB of this memory for the KV cache.
    seed: int = 0


def chat(tokenizer: PreTrainedTokenizerBase, request: str) -> list[int]:
    """Apply the chat template to a request, and return the token ids."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False).input_ids


def mathematics(path: Path, drawn: random.Random) -> Iterator[str]:
    """Yield questions, each with an instruction to think before answering."""
    questions = [json.loads(line)["question"] for line in path.read_text("utf-8").splitlines()]
    for question in drawn.sample(questions, len(questions)):
        yield f"{question}\nThink step by step, then check your answer in another way."


def stories(drawn: random.Random) -> Iterator[str]:
    """Yield requests for stories."""
    while True:
        person, thing, place = (drawn.choice(words) for words in (PEOPLE, THINGS, PLACES))
        yield f"Write a long story about {person} and {thing} in {place}."


def sources() -> Iterator[str]:
    """Yield the files of Python's standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text("utf-8", errors="ignore")


def manuals() -> Iterator[str]:
    """Yield the long descriptions of installed packages."""
    found = {d.metadata["Name"]: d.metadata.get_payload() for d in metadata.distributions()}
    for name in sorted(name for name in found if name):
        yield str(found[name])


def continued(
    tokenizer: PreTrainedTokenizerBase, texts: Iterator[str], tokens: int, drawn: random.Random
) -> Iterator[list[int]]:
    """Yield a passage of ``tokens`` tokens from each text that is long enough."""
    passages = []
    for text in texts:
        ids = tokenizer(text[: 40 * tokens], add_special_tokens=False).input_ids
        if len(ids) > 2 * tokens:
            begin = drawn.randrange(len(ids) - tokens)
            passages.append(ids[begin : begin + tokens])
    drawn.shuffle(passages)
    yield from passages


def prompts(tokenizer: PreTrainedTokenizerBase, options: Options) -> dict[str, list[list[int]]]:
    """Return the token ids of each kind's prompts.

    Raises ValueError if there are fewer texts than prompts.
    """
    drawn = random.Random(options.seed)
    kinds = {
        "mathematics": (chat(tokenizer, q) for q in mathematics(options.questions, drawn)),
        "stories": (chat(tokenizer, request) for request in stories(drawn)),
        "sources": continued(tokenizer, sources(), options.context, drawn),
        "manuals": continued(tokenizer, manuals(), options.context, drawn),
    }
    taken = {}
    for kind, found in kinds.items():
        taken[kind] = [ids for ids, _ in zip(found, range(options.prompts), strict=False)]
        if len(taken[kind]) < options.prompts:
            raise ValueError(
                f"there are only {len(taken[kind])} prompts for {kind}, but {options.prompts} are "
                "wanted; ask for fewer with --prompts, or shorter ones with --context"
            )
    return taken


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays atomically, so the file is complete even if the run gets interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new.npz")
    np.savez_compressed(new, **arrays)
    os.replace(new, path)


def vllm_sampler(options: Options) -> Sampler:
    """Return a sampler that uses stock vLLM. Each prompt has its own seed."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        options.model,
        seed=options.seed,
        max_model_len=options.context + 2 * options.max_new_tokens,
        gpu_memory_utilization=options.memory,
        kv_cache_memory_bytes=options.cache_gib << 30,
        logprobs_mode="processed_logprobs",
    )

    def sample(prompts: Sequence[list[int]], temperature: float, first: int) -> list[Responses]:
        settings = [
            SamplingParams(
                n=options.samples,
                temperature=temperature,
                max_tokens=options.max_new_tokens,
                logprobs=0,
                seed=options.seed + first + number + 1,
            )
            for number in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        sampled = []
        for output in llm.generate(inputs, settings, use_tqdm=False):
            responses = []
            for response in output.outputs:
                ids = list(response.token_ids)
                steps = zip(response.logprobs, ids, strict=True)
                responses.append((ids, [step[token].logprob for step, token in steps]))
            sampled.append(responses)
        return sampled

    return sample


def hf_sampler(options: Options) -> Sampler:
    """Return a sampler that uses Sparrow's transformers engine, decoding densely."""
    from sparrow import SparsitySchedule
    from sparrow.cli.loading import load_model
    from sparrow.engines.hf import HFEngine, eos_ids
    from sparrow.rollout import Sampling

    model, tokenizer = load_model(options.model, "bf16")
    engine = HFEngine(model, SparsitySchedule.dense(), eos_ids(model, tokenizer))

    def sample(prompts: Sequence[list[int]], temperature: float, first: int) -> list[Responses]:
        settings = Sampling(
            options.max_new_tokens, temperature, top_n=0, seed=options.seed + first + 1
        )
        requests = [ids for ids in prompts for _ in range(options.samples)]
        responses = [
            (rollout.response_ids.tolist(), rollout.logprobs.tolist())
            for rollout in engine.generate(requests, settings)
        ]
        return [
            responses[at : at + options.samples] for at in range(0, len(responses), options.samples)
        ]

    return sample


def main(options: Options) -> None:
    """Sample, and save the responses with their log-probs."""
    asked = prompts(AutoTokenizer.from_pretrained(options.model), options)
    samplers = {"vllm": vllm_sampler, "hf": hf_sampler}
    sample = samplers[options.engine](options)
    saved: dict[str, np.ndarray] = {}
    requests = 0
    for temperature in options.temperatures:
        for kind, kind_prompts in asked.items():
            began = time.monotonic()
            sampled = sample(kind_prompts, temperature, requests)
            requests += len(kind_prompts)

            tokens = 0
            for number, (ids, responses) in enumerate(zip(kind_prompts, sampled, strict=True)):
                key = f"{kind}/{temperature}/{number}"
                saved[f"{key}/prompt"] = np.array(ids, np.int32)
                for place, (response, logprobs) in enumerate(responses):
                    saved[f"{key}/{place}"] = np.array(response, np.int32)
                    saved[f"{key}/{place}/logprobs"] = np.array(logprobs, np.float16)
                    tokens += len(response)
            save(options.out, saved)
            seconds = time.monotonic() - began
            print(f"{kind} at {temperature}: {tokens:,} tokens, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
