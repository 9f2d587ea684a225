"""``sparrow eval``."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from sparrow import files
from sparrow.cli.commands.sampled import Sampled
from sparrow.decoding_options import DecodingOptions
from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule
from sparrow.settings import Count, Many, Name, NotNegative, Share


@dataclass(frozen=True, kw_only=True)
class Eval(DecodingOptions, Sampled):
    """Evaluate a model by mean@k, pass@k and majority@k, with confidence intervals. Evaluate one
    mode, or compare dense and sparse decoding side by side.
    """

    # Tasks (trace:lines=24) or datasets (aime24, gsm8k:path=test.jsonl).
    benchmark: Annotated[tuple[str, ...], Field(min_length=1)]
    out: Name  # Folder for the samples; a second call continues from the samples there.
    # Your own reward function, as module:function, in place of the datasets' verifiers.
    reward: str | None = None
    # Also evaluate the sparse actor, under this schedule. With --mode lossy, evaluate only the
    # sparse actor.
    schedule: str | None = None
    temperature: NotNegative = 1.0  # Sampling temperature; 0 is greedy.
    # Sample from the smallest set of tokens whose total probability is at least this, both for
    # drafts and for the policy.
    top_p: Share = 1.0
    # Sample only from this many of the likeliest tokens. If unset, sample from all.
    top_k: Count | None = None
    k: Many = 16  # Responses per problem.
    # Number of problems to evaluate from the start of each benchmark. If unset, all problems of a
    # dataset are evaluated. Tasks are endless, so they need a limit.
    limit: Many | None = None

    def run(self) -> None:
        from sparrow.cli.loading import (
            context_of,
            is_task,
            load_benchmark,
            load_engine,
            load_model,
            prompt_room,
        )
        from sparrow.cli.terminal import note
        from sparrow.evaluation.benchmark import markdown_table, run_benchmark, weights_digest
        from sparrow.rollout import Sampling

        if self.reward is not None and all(map(is_task, self.benchmark)):
            raise ConfigError(
                f"--reward {self.reward} applies to datasets only; leave it out, because the "
                f"task {self.benchmark[0]} has its own verifier"
            )
        if self.chat.is_set and all(map(is_task, self.benchmark)):
            raise ConfigError(
                "the chat settings apply to datasets only; leave them out, because prompts "
                f"for the task {self.benchmark[0]} are sent unchanged"
            )
        decoding = self.decoding(self.schedule)
        schedules = {self.schedule or decoding.mode: decoding.schedule}
        if self.mode is None:
            schedules = {"dense": SparsitySchedule.dense(), **schedules}
        folder = files.check_folder(self.out)
        sampling = Sampling(
            self.max_new_tokens,
            self.temperature,
            top_n=0,
            seed=self.seed,
            top_k=self.top_k,
            top_p=self.top_p,
        )
        results = []
        note(f"loading {self.model}")
        model, tokenizer = load_model(self.model, self.precision)
        room = prompt_room(context_of(model), self.engine, self.max_new_tokens)
        benchmarks = {
            name: load_benchmark(name, self.limit, tokenizer, room, self.reward, chat=self.chat)
            for name in self.benchmark
        }
        note(f"starting the engine {self.engine}")
        with closing(
            load_engine(self.engine, self.model, model, tokenizer, decoding, self.precision)
        ) as engine:
            if decoding.has_default_schedule:
                schedules[decoding.mode] = engine.schedule  # a server's own
            made_by = {
                "model": self.model,
                "weights": weights_digest(model),
                "engine": self.engine,
                "precision": self.precision,
                "reward": self.reward,
            }
            for name, problems in benchmarks.items():
                for label, schedule in schedules.items():
                    note(f"{name}, {label}")
                    engine.set_schedule(schedule)
                    source: dict[str, Any] = {
                        **made_by,
                        "schedule": {**schedule.to_dict(), "provenance": None},
                    }
                    if decoding.is_lossless:
                        source |= decoding.to_dict()
                        del source["draft_schedule"]  # it is ``schedule``, with its provenance
                    results.append(
                        run_benchmark(
                            engine,
                            tokenizer,
                            problems,
                            sampling,
                            self.k,
                            folder,
                            name,
                            label,
                            source,
                        )
                    )
        files.write_text(folder / "results.md", table := markdown_table(results))
        print(table, end="")

    def interrupted(self) -> str:
        return "interrupted; run the same command again to continue"
