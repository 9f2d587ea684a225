"""``sparrow audit``."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparrow import files
from sparrow.cli.commands.sampled import FromPrompts
from sparrow.decoding import Decoding
from sparrow.decoding_options import DecodingOptions
from sparrow.engines.registry import parse_engine
from sparrow.errors import ConfigError
from sparrow.settings import Count, Many, Name, Probability, Share, without_option

if TYPE_CHECKING:
    from sparrow.engines.base import Engine, Ranker

STATUS = {"exact": 0, "biased": 1, "cannot tell": 2}


@dataclass(frozen=True, kw_only=True)
class Audit(DecodingOptions, FromPrompts):
    """Test whether an engine's samples follow the dense model exactly. The exit status is 0 if no
    bias was found and a bias would have been detected, 1 if the engine is biased, and 2 if the
    audit cannot tell or could not run.
    """

    failure = 2

    # The engine to audit: hf, vllm, vllm with options, or http://host:port. For vLLM without
    # Sparrow, use stock: followed by options of vllm.LLM
    # (stock:speculative_config={"method":"ngram",...}), or stock:http://host:port. The option
    # adapter=FOLDER applies a LoRA adapter to all requests.
    engine: str = "hf"
    # An engine that decodes densely, to tell rounding from bias. Defaults to the audited engine in
    # dense mode, unless that engine is a server. With none, there is no dense arm, and rounding
    # counts as bias.
    dense_engine: str | None = None
    # How tokens are ranked. hf: by transformers, over the full distribution. prefill: by the dense
    # engine's own prefill, over the top tokens only; requires an engine whose name begins with
    # stock:.
    scorer: Literal["hf", "prefill"] = "hf"
    # With the scorer prefill: number of top tokens. A server allows at most 20 unless it was
    # started with a higher limit.
    lists: Count = 20
    # Audit the sparse actor under this schedule; such an audit should fail.
    schedule: str | None = None
    # Sample from the smallest set of tokens whose total probability is at least this.
    top_p: Share = 1.0
    # Sample only from this many of the likeliest tokens. If unset, sample from all.
    top_k: Count | None = None
    count: Many = 512  # Responses per arm; prompts are repeated as needed.
    max_new_tokens: Count = 64  # Responses are cut at this many tokens.
    # Log-probs that the engine reports. processed: after temperature and truncation, as in
    # Sparrow's engines. raw: before them, as in vLLM by default. none: do not compare log-probs.
    logprobs: Literal["processed", "raw", "none"] = "processed"
    level: Probability = 0.01  # The probability of calling an exact engine biased.
    # The verdict is exact only if a bias that moves this share of tokens up in rank would be
    # detected.
    resolution: Probability = 0.05
    out: Name | None = None  # Write the full report to this JSON file.

    def run(self) -> None:
        from sparrow.audit.run import run_audit
        from sparrow.cli.terminal import note, print_audit
        from sparrow.rollout import Sampling

        decoding = self.decoding(self.schedule)
        dense = self._dense_engine()
        if self.scorer == "prefill" and not (dense and parse_engine(dense).kind.is_stock):
            raise ConfigError(
                "--scorer prefill needs stock vLLM as the dense engine, got "
                f"{dense or 'none'}; pass --dense-engine stock:..., or use --scorer hf"
            )
        adapter = self._adapter(dense)
        if self.out:
            files.check_file(self.out)
        model, tokenizer, prompts = self.load_prompts()
        if adapter is not None:
            from sparrow.cli import loading

            model = loading.with_adapter(model, adapter)
        sampling = Sampling(
            self.max_new_tokens,
            self.temperature,
            top_n=0,
            seed=self.seed,
            top_k=self.top_k,
            top_p=self.top_p,
        )

        def made(spec: str, how: Decoding) -> Engine:
            from sparrow.cli import loading

            return loading.load_engine(
                spec, self.model, model, tokenizer, how, self.precision, audits=True
            )

        def audited_engine() -> Engine:
            nonlocal decoding
            engine = made(self.engine, decoding)
            if decoding.has_default_schedule:
                decoding = decoding.with_schedule(engine.schedule)  # a server's own
            return engine

        def ranker() -> AbstractContextManager[Ranker]:
            from sparrow.audit.run import ListRanker
            from sparrow.cli import loading

            densely = Decoding.lossy("dense")
            if self.scorer == "hf":
                return nullcontext(loading.load_scorer(model, tokenizer, densely, self.precision))
            scorer: Any = made(str(dense), densely)
            return closing(ListRanker(scorer, self.lists))

        audited = run_audit(
            audited_engine,
            None if dense is None else lambda: made(dense, Decoding.lossy("dense")),
            ranker,
            prompts,
            sampling,
            self.logprobs,
            self.level,
            self.resolution,
            note,
            prefills=self.scorer == "prefill",
        )
        if self.out:
            report = {
                **audited.to_dict(),
                "model": self.model,
                "engine": self.engine,
                "decoding": decoding.to_dict(),
                "dense_engine": dense,
                "scorer": self.scorer,
                "precision": self.precision,
            }
            files.write_text(Path(self.out), json.dumps(report, indent=1, allow_nan=False))
        print_audit(audited.verdict, audited.tokens)
        sys.exit(STATUS[audited.verdict.status])

    def _adapter(self, dense: str | None) -> str | None:
        """Return the folder of the tested engine's LoRA adapter, or None.

        Raises ConfigError if the dense engine has a different adapter.
        """
        adapter, theirs = (
            None if spec is None else parse_engine(spec).options.get("adapter")
            for spec in (self.engine, dense)
        )
        if dense is not None and adapter != theirs:
            raise ConfigError(
                f"the engine has the adapter {adapter or 'none'}, but the dense engine has "
                f"{theirs or 'none'}; use the same adapter in both"
            )
        return None if adapter is None else str(adapter)

    def _dense_engine(self) -> str | None:
        """Return the engine of the dense arm, or None if the audit has none."""
        if self.dense_engine is not None:
            return None if self.dense_engine == "none" else self.dense_engine
        engine = parse_engine(self.engine)
        if engine.kind.takes == "address":
            raise ConfigError(
                f"{self.engine} is a server and cannot also decode densely; set "
                "--dense-engine to a second server that runs the same model without drafts, "
                "or to none (rounding then counts as bias)"
            )
        if engine.kind.is_stock:
            return "stock:" + without_option(engine.rest, "speculative_config")
        return self.engine
