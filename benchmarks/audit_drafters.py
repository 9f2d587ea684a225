"""Audit vLLM's drafters on a GPU with ten seeds each: lossless mode with and without guesses, and
stock vLLM's EAGLE-3.

    python benchmarks/audit_drafters.py    # writes benchmarks/results/audit_drafters.json

Runs the ``sparrow audit`` test at the 1 % level on the bundled reasoner in bfloat16. Drafts in
lossless mode read few pages. In the arms ``history``, ``head`` and ``mixed``, every cycle has
guesses. In ``mixed``, history guesses where tokens repeat, and the head elsewhere. The EAGLE-3 head
has random weights, so most but not all of its drafts are rejected. Each drafter is compared with
dense decoding by the same kind of engine. All engines run at once, each in its own process: one
engine samples all seeds and shuts down, then the process ranks the tokens with transformers. With
``--drafters``, the file keeps its results for the other drafters.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from audits import LEVEL, TASK, Sampled, audited, command_line, loaded, samplings, separate
from common import REASONER, machine, read_result, write, write_head
from vllm_versions import FEW_PAGES

DRAFTS = 3  # EAGLE-3's draft length
GUESSES = 3  # guesses per pass
LOOKUP_MIN = 3  # how many tokens must repeat for history to guess instead of the head
LOSSLESS = ("lossless", "history", "head", "mixed")
ARMS = dict.fromkeys(LOSSLESS, "lossless, dense") | {"eagle3": "stock"}
"""Maps each drafter to the dense arm it is compared with."""
TEMPERATURES = dict.fromkeys((*LOSSLESS, "lossless, dense"), 1.0)
TEMPERATURES |= dict.fromkeys(("eagle3", "stock"), 2.0)
"""A higher temperature flattens the distributions, so more of the random drafts are accepted."""


def random_head(folder: Path) -> str:
    """Write a random EAGLE-3 head for the reasoner, and return its folder."""
    return str(write_head(json.loads((REASONER / "config.json").read_text()), folder))


def eagle3(folder: Path) -> dict[str, Any]:
    """Return vLLM's options for drafting with a random EAGLE-3 head."""
    return {
        "method": "eagle3",
        "model": random_head(folder),
        "num_speculative_tokens": DRAFTS,
        "draft_sample_method": "probabilistic",
    }


def decoding_of(arm: str, folder: Path) -> Any:
    """Return how an arm's engine decodes, apart from vLLM's own speculation."""
    from sparrow.decoding import Decoding
    from sparrow.schedule import SparsitySchedule

    if arm not in LOSSLESS:
        return Decoding.lossy("dense")
    few_pages = SparsitySchedule.from_dict(FEW_PAGES)
    if arm == "lossless":
        return Decoding.lossless(few_pages)
    guesses: dict[str, Any] = {"guess_tokens": GUESSES, "adapt_draft_tokens": False}
    if arm in ("head", "mixed"):
        guesses["guess_head"] = random_head(folder)
        guesses["guess_lookup_min"] = LOOKUP_MIN if arm == "mixed" else 0
    return Decoding.lossless(few_pages, **guesses)


def sample(arm: str, folder: str, options: str, seeds: int, count: int) -> Sampled:
    """Sample an arm with all seeds in this process, and rank its tokens with the dense model.

    Args:
        options: vLLM options, in the format of ``sparrow audit --engine``.
    """
    separate(folder, arm)

    from sparrow.audit.run import tokens_of
    from sparrow.audit.statistics import COMMON
    from sparrow.cli import loading
    from sparrow.decoding import Decoding

    dense = Decoding.lossy("dense")
    decoding = decoding_of(arm, Path(folder) / arm)
    spec = f"{'vllm' if arm in (*LOSSLESS, ARMS['lossless']) else 'stock'}:{options}"
    if arm == "eagle3":
        asked = json.dumps(eagle3(Path(folder) / arm))
        spec += f",disable_log_stats=false,speculative_config={asked}"

    model, tokenizer, prompts = loaded(spec, "bf16", count)
    wanted = samplings(ARMS, arm, seeds, TEMPERATURES[arm])
    engine = loading.load_engine(spec, "reasoner", model, tokenizer, decoding, "bf16", audits=True)
    began = time.monotonic()
    rollouts = [engine.generate(prompts, sampling) for sampling in wanted]
    drafts = drafts_of(engine, arm)
    engine.close()
    print(f"{arm}: sampled in {time.monotonic() - began:.0f} s", flush=True)

    began = time.monotonic()
    scorer = loading.load_scorer(model, tokenizer, dense, "bf16")
    ranked = [
        tokens_of(made, scorer.rank(made, sampling, COMMON))
        for made, sampling in zip(rollouts, wanted, strict=True)
    ]
    print(f"{arm}: ranked in {time.monotonic() - began:.0f} s", flush=True)
    return Sampled(ranked, drafts)


def drafts_of(engine: Any, arm: str) -> dict[str, int]:
    """Return how many tokens an arm's engine has drafted so far, and how many of them were
    accepted.
    """
    if arm in LOSSLESS:
        counters = engine.counters()
        return {"drafted": counters.drafted, "accepted": counters.accepted}
    if arm == "eagle3":
        found = {each.name: each for each in engine.llm.get_metrics()}
        return {
            name: int(found[f"vllm:spec_decode_num_{counted}_tokens"].value)
            for name, counted in (("drafted", "draft"), ("accepted", "accepted"))
        }
    return {}


def measure(arguments: argparse.Namespace) -> None:
    import torch
    import vllm

    result: dict[str, Any] = {
        "model": "reasoner",
        "task": TASK,
        "level": LEVEL,
        "draft_schedule": FEW_PAGES,
        "drafters": {},
    }
    if arguments.out.exists():
        result["drafters"] = read_result(arguments.out)["drafters"]
    with tempfile.TemporaryDirectory() as folder:
        asked = (folder, arguments.options, arguments.seeds, arguments.count)
        for drafter, found in audited(ARMS, arguments.drafters, sample, *asked):
            result["drafters"][drafter] = {
                "machine": machine(),
                "date": time.strftime("%Y-%m-%d"),
                "vllm": vllm.__version__,
                "torch": torch.__version__,
                "temperature": TEMPERATURES[drafter],
                "responses": arguments.count,
                **found,
            }
            write(arguments.out, result)


if __name__ == "__main__":
    measure(command_line(__doc__, "audit_drafters", "drafters", ARMS).parse_args())
