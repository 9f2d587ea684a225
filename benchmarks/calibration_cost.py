"""Compare the GPU time of a calibration with that of sampling new responses at each of 18 budgets,
for Qwen3-1.7B's shape and 32K tokens.

    python benchmarks/calibration_cost.py steps    # decode steps in vLLM; writes results/calibration_steps.json
    python benchmarks/calibration_cost.py search   # the passes of a search; writes results/calibration_search.json

``tables.py`` adds up the totals. Both methods use 256 sequences of 32,768 tokens. We assume that
decoding runs in batches of 32. Every batch stays full to the end, which favours sampling, and the
last batch counts as full even if fewer sequences are left for it. Neither total includes prefill or
statistics.

With random weights, p5 is meaningless, so the results of the search's passes are simulated. The
simulated p5 depends on the budget as in the published tables, with a little noise added, and the
actor's own responses need 15 % more pages. Otherwise, ``calibrate_engine`` runs unchanged, and each
of its passes is timed on a few sequences.

Shapes: T tokens.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, clock, device, load, parser, qwen3, save, table

from sparrow import SparsitySchedule
from sparrow.calibrate.run import PILOT, calibrate_engine
from sparrow.engines.base import Counters, Engine, Scorer
from sparrow.rollout import Rollout, Sampling, Scores
from sparrow.schedule import ALL_PAGES

SEQUENCES, BATCH, LENGTH, PROMPT = 256, 32, 32_768, 256
SCORED = 2  # sequences to time a pass on, one by one
LENGTHS = (512, 4096, 16_384, 32_000)  # lengths to time steps at
PAGES = (29, 125, 253, 509, 1021, ALL_PAGES)  # top-k of the timed steps
BUDGETS = (
    np.geomspace(512, 16_384, 18).round(-1).astype(int)
)  # tokens; 18 budgets over the published range
DEFAULT_BUDGETS = (5, 13, 29, 61, 125, 253, 509)  # as in sparrow calibrate
REFINE, ROUNDS, TARGET = 3, 2, 0.86  # as in sparrow calibrate
TAUS = (0.75, 0.80, 0.83, 0.86, 0.88, 0.90, 0.92, 0.94)
DRIFT, NOISE = 1.15, 0.004


def steps() -> None:
    """Time full-batch decode steps that return the top-20 lists needed for calibration. Layers 0
    and 1 are dense, as published.
    """
    from rollout import Bench

    result: dict[str, Any] = {"batch": BATCH, "steps": []}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench("qwen3-1.7b", "sparse", folder)
        assert bench.engine is not None
        bench.step([1024] * BATCH, 20)
        for top_k in PAGES:
            bench.engine.rpc("sparrow_set_schedule", SparsitySchedule.fixed(top_k).to_json())
            for length in LENGTHS:
                row = {"top_k": top_k, "length": length, **bench.step([length] * BATCH, 20)}
                result["steps"].append(row)
                print(row, flush=True)
                save(RESULTS / "calibration_steps.json", result)


class Told(Engine, Scorer):
    """An engine that runs its passes on a few sequences but reports simulated results."""

    def __init__(self, scorer: Any, rollouts: Sequence[Rollout]) -> None:
        self.scorer, self.rollouts = scorer, rollouts
        self.rounds: list[dict[str, Any]] = []
        self.tables = [SparsitySchedule.preset("qwen3-1.7b", tau) for tau in TAUS]

    @property
    def schedule(self) -> SparsitySchedule:
        return self.behaviour

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        self.rounds.append({"sampled_under": schedule.to_dict()["top_k"], "passes": []})
        self.behaviour = schedule

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        self.noise = NOISE * np.random.default_rng(sampling.seed).standard_normal(len(prompts))
        ids = np.zeros(sampling.max_new_tokens, np.int64)
        return [
            Rollout(
                prompt,
                ids,
                ids.astype(np.float32),
                ids[:, None].astype(np.int32),
                self.answer(self.behaviour, i),
                "length",
            )
            for i, prompt in enumerate(prompts)
        ]

    def update_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        raise NotImplementedError  # a calibration never changes the weights

    def counters(self) -> Counters:
        return Counters(tokens_read=0, tokens_held=0)

    def score(
        self, rollouts: Sequence[Rollout], schedule: SparsitySchedule, temperature: float
    ) -> list[Scores]:
        seconds = []
        for rollout in self.rollouts:
            began = clock()
            self.scorer.score([rollout], schedule, temperature)
            seconds.append(clock() - began)
        self.rounds[-1]["passes"].append(
            {"top_k": schedule.to_dict()["top_k"], "sequence_s": seconds}
        )
        print(len(self.rounds), self.rounds[-1]["passes"][-1], flush=True)
        answers = [self.answer(schedule, i) for i in range(len(rollouts))]
        return [Scores(a[:, 0], a, np.zeros(len(a), np.float32)) for a in answers]

    def answer(self, schedule: SparsitySchedule, sequence: int) -> np.ndarray:
        """Simulate the actor's log-probs, float32 ``[T, 1]``. Each list has a single token, whose
        log-prob under the policy is 0.
        """
        drift = DRIFT if len(self.rounds) > 1 else 1.0
        length_T = schedule.page_end(np.arange(PROMPT, LENGTH))
        alpha_T = np.ones(len(length_T))
        for b in np.unique(length_T // schedule.bin_tokens) if not schedule.is_dense else ():
            inside = length_T // schedule.bin_tokens == b
            needed, pages = (
                [s.pages(length_T[inside][:1])[0] for s in some]
                for some in (self.tables, [schedule])
            )
            known = [0, *(drift * np.array(needed)), LENGTH // schedule.page_size]
            alpha_T[inside] = np.interp(pages[0], known, [0.3, *TAUS, 1.0])
        wavering = np.where(alpha_T < 1, alpha_T + self.noise[sequence], 1.0)
        return np.log(wavering.clip(1e-3, 1.0)).astype(np.float32)[:, None]


def search() -> None:
    """Run the ``sparrow calibrate`` search without its sampling. Each pass scores a list of 20
    tokens at every position.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    from sparrow.engines.hf import HFEngine

    torch.manual_seed(0)
    with device():
        model = Qwen3ForCausalLM(qwen3("qwen3-1.7b", dtype="bfloat16")).bfloat16().eval()
    scorer = HFEngine(model, SparsitySchedule.fixed(PAGES[0]), eos_ids=[], token_budget=LENGTH)
    rng, T = np.random.default_rng(0), LENGTH - PROMPT

    def ids(*shape: int) -> np.ndarray:
        return rng.integers(0, model.config.vocab_size, shape)

    rollouts = [
        Rollout(
            ids(PROMPT).tolist(),
            ids(T),
            np.zeros(T, np.float32),
            ids(T, 20).astype(np.int32),
            np.zeros((T, 20), np.float32),
            "length",
        )
        for _ in range(SCORED)
    ]
    for schedule in (SparsitySchedule.dense(), SparsitySchedule.fixed(PAGES[0])):
        scorer.score(rollouts[:1], schedule, 1.0)
    engine = Told(scorer, rollouts)
    prompts = ids(PILOT + 8, PROMPT).tolist()
    with tempfile.TemporaryDirectory() as folder:
        calibration = calibrate_engine(
            engine,
            engine,
            prompts,
            Sampling(T, top_n=1),
            Path(folder),
            budgets=DEFAULT_BUDGETS,
            target=TARGET,
            layout=SparsitySchedule.dense(),
            refine=REFINE,
            on_policy=ROUNDS,
            provenance={},
        )
    found = calibration.schedule.to_dict()["top_k"]
    save(RESULTS / "calibration_search.json", {"rounds": engine.rounds, "found": found})


# --- tables ---


def rollout_seconds(schedule: SparsitySchedule, sequences: int = SEQUENCES) -> float:
    """Return the decoding time in seconds. Step times are interpolated linearly in length and
    pages.
    """
    length_T = np.arange(PROMPT, LENGTH)
    ms = {(row["top_k"], row["length"]): row["ms"] for row in load("calibration_steps")["steps"]}
    steps_T = {k: np.interp(length_T, LENGTHS, [ms[k, n] / 1e3 for n in LENGTHS]) for k in PAGES}
    pages_T, kept = schedule.pages(length_T), schedule.sink_pages + schedule.recent_pages
    seconds = 0.0
    for k in np.unique(pages_T):
        place = np.interp(k, PAGES[:-1], range(len(PAGES) - 1))
        low, high = (steps_T[PAGES[int(round_(place))]] for round_ in (math.floor, math.ceil))
        sparse_T = low + (place % 1) * (high - low)
        dense = length_T <= (k + kept) * schedule.page_size
        seconds += np.where(dense, steps_T[ALL_PAGES], sparse_T)[pages_T == k].sum()
    return float(seconds) * math.ceil(sequences / BATCH)


def calibration_cost() -> str:
    """Return a table of costs: of sampling at every budget, and of two ways to calibrate."""
    rounds = load("calibration_search")["rounds"]
    counts = [max(PILOT, SEQUENCES // 10)] * ROUNDS + [SEQUENCES]
    dense = (
        float(np.median([s for r in rounds for s in r["passes"][0]["sequence_s"]]))
        * SEQUENCES
        * len(BUDGETS)
    )
    anew = sum(rollout_seconds(SparsitySchedule.fixed(int(b) // 16 - 3)) for b in BUDGETS)
    sampling = sum(
        rollout_seconds(
            SparsitySchedule(tuple(ALL_PAGES if k == "all" else k for k in r["sampled_under"])), n
        )
        for r, n in zip(rounds, counts, strict=True)
    )
    # The dense pass, one pass per budget (except the one used for sampling), and the passes added
    # by --refine.
    most = [len(DEFAULT_BUDGETS) + REFINE] + [1 + REFINE] * ROUNDS
    slowest = max(s for r in rounds for p in r["passes"] for s in p["sequence_s"])
    ways = {
        "sparrow calibrate, as its search ran": [
            [np.mean(p["sequence_s"]) for p in r["passes"]] for r in rounds
        ],
        "every round with all the passes that --refine allows, each as slow as the slowest": [
            [slowest] * n for n in most
        ],
    }
    published = "sampling at each of 18 budgets from 512 to 16,384 tokens, as published"
    rows = [[published, f"{anew:,.0f}", f"({dense:,.0f}, not counted)", f"{anew:,.0f}", ""]]
    for (
        label,
        passes,
    ) in ways.items():  # seconds per sequence for each pass, by round
        scoring = sum(sum(row) * n for row, n in zip(passes, counts, strict=True))
        scored = sum(len(row) * n for row, n in zip(passes, counts, strict=True))
        cells = [
            f"{sampling:,.0f}",
            f"{scoring:,.0f} ({scored:,} sequences)",
            f"{sampling + scoring:,.0f}",
        ]
        rows.append([label, *cells, f"{anew / (sampling + scoring):.1f}x"])
    return table(["method", "sampling, s", "scoring, s", "total, s", "reduction"], rows)


def scoring_passes() -> str:
    def span(top_k: list[Any]) -> str:
        """Return the range of a schedule's pages, skipping lengths that were not measured."""
        pages = [k for k in top_k if k != "all"] or top_k
        return f"{pages[0]}" if len(pages) == 1 else f"{pages[0]} to {pages[-1]}"

    rows = []
    for number, row in enumerate(load("calibration_search")["rounds"]):
        passes = [f"{span(p['top_k'])}: {np.mean(p['sequence_s']):.2f}" for p in row["passes"]]
        rows.append([number, span(row["sampled_under"]), "; ".join(passes)])
    return table(["round", "sampled with", "pages in each pass: seconds per sequence"], rows)


TABLES = {"calibration cost": calibration_cost, "scoring passes": scoring_passes}


def main() -> None:
    commands = {"steps": steps, "search": search}
    options = parser(__doc__)
    options.add_argument("what", choices=commands)
    commands[options.parse_args().what]()


if __name__ == "__main__":
    main()
