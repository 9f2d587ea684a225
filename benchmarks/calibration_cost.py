"""GPU time of a calibration at Qwen3-1.7B's shape and 32K tokens, against sampling anew at each of 18 budgets.

    python benchmarks/calibration_cost.py steps    # decode steps in vLLM; writes results/calibration_steps.json
    python benchmarks/calibration_cost.py search   # the passes of a search; writes results/calibration_search.json
    python benchmarks/calibration_cost.py table    # adds them up, on any machine; writes results/calibration_cost.json

Both ways handle the same sequences: 256 of 32,768 tokens, decoded to the end in batches of 32 that never drain, which
favours sampling; a partly filled batch counts as a full one. Prefill and the statistics are left out on both sides.

Weights are random, so the search is told what to find. ``calibrate_engine`` runs unchanged, and every pass that it asks
for is run and timed on some of the sequences, but the answers that it gets are made up: p5 depends on the budget as in
the published tables, with a little noise, and the actor's own responses need 15 % more pages.

Shapes: T tokens.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import QWEN3_1_7B, RESULTS, load, save

from sparrow import SparsitySchedule
from sparrow.engines.base import Engine, Scorer
from sparrow.measure import PILOT, calibrate_engine
from sparrow.rollout import Rollout, Sampling, Scores
from sparrow.schedule import ALL_PAGES

SEQUENCES, BATCH, LENGTH, PROMPT = 256, 32, 32_768, 256
LENGTHS = (512, 4096, 16_384, 32_000)  # at which steps are timed
PAGES = (29, 125, 253, 509, 1021, ALL_PAGES)  # top-k of the steps timed
BUDGETS = np.geomspace(512, 16_384, 18).round(-1).astype(int)  # tokens; 18 budgets over the published range
DEFAULT_BUDGETS = (5, 13, 29, 61, 125, 253, 509)  # as in sparrow calibrate
REFINE, ROUNDS, TARGET = 3, 2, 0.86  # as in sparrow calibrate
TAUS = (0.75, 0.80, 0.83, 0.86, 0.88, 0.90, 0.92, 0.94)
DRIFT, NOISE = 1.15, 0.004


def write(name: str, result: dict[str, Any]) -> None:
    save(RESULTS / f"calibration_{name}.json", result)


def steps(arguments: argparse.Namespace) -> None:
    """Time decode steps of a whole batch, with the top-20 lists that calibration needs; dense layers as published."""
    from rollout import Bench

    result: dict[str, Any] = {"batch": BATCH, "steps": []}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench("qwen3-1.7b", "sparse", folder, 0.93)
        bench.step([1024] * BATCH, 20)
        for top_k in PAGES:
            bench.engine.rpc("sparrow_set_schedule", SparsitySchedule.fixed(top_k).to_json())
            for length in LENGTHS:
                row = {"top_k": top_k, "length": length, **bench.step([length] * BATCH, 20)}
                result["steps"].append(row)
                print(row, flush=True)
                write("steps", result)


class Told(Engine, Scorer):
    """An engine whose passes are real, on some of the sequences, and whose answers are made up."""

    def __init__(self, scorer: Any, rollouts: Sequence[Rollout], clock: Any) -> None:
        self.scorer, self.rollouts, self.clock = scorer, rollouts, clock
        self.rounds: list[dict[str, Any]] = []
        self.tables = [SparsitySchedule.preset("qwen3-1.7b", tau) for tau in TAUS]

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        self.rounds.append({"sampled_under": schedule.to_dict()["top_k"], "passes": []})
        self.behaviour = schedule

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        self.noise = NOISE * np.random.default_rng(sampling.seed).standard_normal(len(prompts))
        ids = np.zeros(sampling.max_new_tokens, np.int64)
        return [
            Rollout(prompt, ids, ids.astype(np.float32), ids[:, None].astype(np.int32), self.answer(self.behaviour, i),
                    "length")
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip

    def score(self, rollouts: Sequence[Rollout], schedule: SparsitySchedule, temperature: float) -> list[Scores]:
        seconds = []
        for rollout in self.rollouts:
            began = self.clock()
            self.scorer.score([rollout], schedule, temperature)
            seconds.append(self.clock() - began)
        self.rounds[-1]["passes"].append({"top_k": schedule.to_dict()["top_k"], "sequence_s": seconds})
        print(len(self.rounds), self.rounds[-1]["passes"][-1], flush=True)
        answers = [self.answer(schedule, i) for i in range(len(rollouts))]
        return [Scores(a[:, 0], a, np.zeros(len(a), np.float32)) for a in answers]

    def answer(self, schedule: SparsitySchedule, sequence: int) -> np.ndarray:
        """The actor's log-prob of the only token that is ever listed, float32 ``[T, 1]``; the policy's is 0."""
        drift = DRIFT if len(self.rounds) > 1 else 1.0
        length_T = schedule.page_end(np.arange(PROMPT, LENGTH))
        alpha_T = np.ones(len(length_T))
        for b in np.unique(length_T // schedule.bin_tokens) if not schedule.is_dense else ():
            inside = length_T // schedule.bin_tokens == b
            needed, pages = ([s.pages(length_T[inside][:1])[0] for s in some] for some in (self.tables, [schedule]))
            known = [0, *(drift * np.array(needed)), LENGTH // schedule.page_size]
            alpha_T[inside] = np.interp(pages[0], known, [0.3, *TAUS, 1.0])
        wavering = np.where(alpha_T < 1, alpha_T + self.noise[sequence], 1.0)
        return np.log(wavering.clip(1e-3, 1.0)).astype(np.float32)[:, None]


def search(arguments: argparse.Namespace) -> None:
    """What ``sparrow calibrate`` does once it has sampled; a pass scores a list of 20 tokens at every position."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sparrow.engines.hf import HFEngine

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**QWEN3_1_7B, dtype="bfloat16")).bfloat16().eval()
    scorer = HFEngine(model, SparsitySchedule.fixed(PAGES[0]), eos_ids=[], token_budget=LENGTH)
    rng, T = np.random.default_rng(0), LENGTH - PROMPT

    def ids(*shape: int) -> np.ndarray:
        return rng.integers(0, QWEN3_1_7B["vocab_size"], shape)

    def clock() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    rollouts = [
        Rollout(ids(PROMPT).tolist(), ids(T), np.zeros(T), ids(T, 20).astype(np.int32), np.zeros((T, 20)), "length")
        for _ in range(arguments.sequences)
    ]
    for schedule in (SparsitySchedule.dense(), SparsitySchedule.fixed(PAGES[0])):
        scorer.score(rollouts[:1], schedule, 1.0)
    engine = Told(scorer, rollouts, clock)
    prompts = ids(PILOT + 8, PROMPT).tolist()
    with tempfile.TemporaryDirectory() as folder:
        calibration = calibrate_engine(
            engine, engine, prompts, Sampling(T, top_n=1), Path(folder), budgets=DEFAULT_BUDGETS, target=TARGET,
            layout=SparsitySchedule.dense(), refine=REFINE, on_policy=ROUNDS, provenance={},
        )  # fmt: skip
    write("search", {"rounds": engine.rounds, "found": calibration.schedule.to_dict()["top_k"]})


def table(arguments: argparse.Namespace) -> None:
    timed, searched = load("calibration_steps"), load("calibration_search")
    length_T = np.arange(PROMPT, LENGTH)
    ms = {(row["top_k"], row["length"]): row["ms"] for row in timed["steps"]}
    steps_T = {k: np.interp(length_T, LENGTHS, [ms[k, n] / 1e3 for n in LENGTHS]) for k in PAGES}

    def rollout(schedule: SparsitySchedule, sequences: int = SEQUENCES) -> float:
        """Seconds to decode sequences; step times are interpolated linearly in length and in pages."""
        pages_T, kept = schedule.pages(length_T), schedule.sink_pages + schedule.recent_pages
        seconds = 0.0
        for k in np.unique(pages_T):
            place = np.interp(k, PAGES[:-1], range(len(PAGES) - 1))
            low, high = (steps_T[PAGES[int(round_(place))]] for round_ in (math.floor, math.ceil))
            sparse_T = low + (place % 1) * (high - low)
            dense = length_T <= (k + kept) * schedule.page_size
            seconds += np.where(dense, steps_T[ALL_PAGES], sparse_T)[pages_T == k].sum()
        return float(seconds) * math.ceil(sequences / BATCH)

    def named(top_k: Sequence[int | str]) -> SparsitySchedule:
        return SparsitySchedule(tuple(ALL_PAGES if k == "all" else int(k) for k in top_k))

    anew = {int(b): rollout(SparsitySchedule.fixed(int(b) // 16 - 3)) for b in BUDGETS}
    rounds = searched["rounds"]
    counts = [max(PILOT, SEQUENCES // 10)] * ROUNDS + [SEQUENCES]
    every = [s for r in rounds for p in r["passes"] for s in p["sequence_s"]]
    dense = float(np.median([s for r in rounds for s in r["passes"][0]["sequence_s"]]))
    result: dict[str, Any] = {
        "machine": timed.get("machine", timed.get("device")), "sequences": SEQUENCES, "batch": BATCH, "length": LENGTH,
        "sampling_18_budgets_s": sum(anew.values()), "sampling_by_budget_s": anew,
        "scoring_18_budgets_s": dense * SEQUENCES * len(anew), "dense_pass_s": dense,
        "pass_s": [min(every), float(np.median(every)), max(every)], "ways": [],
    }  # fmt: skip

    def add(label: str, seconds: Sequence[Sequence[float]]) -> None:
        """Add a way to calibrate; ``seconds`` has, for every round, the time of each of its passes for one sequence."""
        sampling = sum(rollout(named(r["sampled_under"]), n) for r, n in zip(rounds, counts, strict=True))
        scoring = sum(sum(row) * n for row, n in zip(seconds, counts, strict=True))
        less = result["sampling_18_budgets_s"] / (sampling + scoring)
        scored = sum(len(row) * n for row, n in zip(seconds, counts, strict=True))
        way = {"label": label, "passes": [len(row) for row in seconds], "sampling_s": sampling, "scoring_s": scoring,
               "sequences_scored": scored, "times_less": less}  # fmt: skip
        result["ways"].append(way)
        print(way)

    taken = [[float(np.mean(p["sequence_s"])) for p in r["passes"]] for r in rounds]
    add("sparrow calibrate, as its search ran", taken)
    # The dense pass, the trials except the one sampled under, and what --refine allows.
    most = [len(DEFAULT_BUDGETS) + REFINE] + [1 + REFINE] * ROUNDS
    label = "every round with all the passes that --refine allows, each as slow as the slowest"
    add(label, [[max(every)] * n for n in most])
    write("cost", result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"steps": steps, "search": search, "table": table}
    parser.add_argument("what", choices=commands)
    parser.add_argument("--sequences", type=int, default=2, help="sequences scored in a pass, one by one")
    arguments = parser.parse_args()
    commands[arguments.what](arguments)


if __name__ == "__main__":
    main()
