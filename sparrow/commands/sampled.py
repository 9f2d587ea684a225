"""What commands that sample have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sparrow.commands.base import Command
from sparrow.settings import Count, Positive, Seed

if TYPE_CHECKING:
    from sparrow.engines.base import Engine, Scorer
    from sparrow.mode import Decoding


@dataclass(frozen=True, kw_only=True)
class Sampled(Command):
    """What measuring, calibrating and evaluating have in common: a model and responses sampled from it."""

    model: str = "reasoner"  # A Hugging Face causal language model, by name or path.
    max_new_tokens: Count = 1024  # Responses are cut at this many tokens.
    precision: Literal["fp32", "bf16"] = "fp32"  # Weights are loaded, and forward passes run, in this precision.
    # What samples: hf, vllm, vllm with options (vllm:gpu_memory_utilization=0.5), or http://host:port.
    engine: str = "hf"
    seed: Seed = 0  # Seeds the samples.


@dataclass(frozen=True, kw_only=True)
class FromPrompts(Sampled):
    """What measuring and calibrating have in common."""

    # Prompts to sample from: a .jsonl file with a "prompt" field, or a text file with one prompt a line.
    prompts: str | None = None
    task: str | None = None  # Take the prompts from a synthetic task instead, such as trace:lines=24.
    # Softmax temperature of actor and policy alike; a greedy actor (0) has no acceptance rate.
    temperature: Positive = 1.0
    count: Count = 64  # Responses to sample; prompts are repeated as needed.
    # Length of the actor's lists of most likely tokens, which bound the acceptance rate; flat distributions need more.
    top_n: Count = 20

    def load_sampler(self, decoding: Decoding) -> tuple[Engine, Scorer, list[list[int]]]:
        """An engine that samples as the command says, transformers to score, and the prompts as token ids."""
        from sparrow.loading import encode_prompts, load_engine, load_model, load_scorer, prompt_room, read_prompts
        from sparrow.terminal import status

        named = read_prompts(self.prompts, self.task, self.count, self.seed)
        with status(f"loading {self.model}") as shown:
            model, tokenizer = load_model(self.model, self.precision)
            room = prompt_room(model, self.engine, self.max_new_tokens)
            prompts = encode_prompts(named, self.count, tokenizer, room)
            loaded = model, tokenizer, decoding, self.precision
            scorer = load_scorer(*loaded)
            shown.update(f"starting the engine {self.engine}")
            engine = scorer if self.engine == "hf" else load_engine(self.engine, self.model, *loaded)
        return engine, scorer, prompts
