"""GPU time of a calibration at Qwen3-1.7B's shape and 32K tokens, against sampling anew at each of 18 budgets.

    python benchmarks/calibration_cost.py steps    # decode steps in vLLM; writes results/calibration_steps.json
    python benchmarks/calibration_cost.py passes   # teacher-forced passes; writes results/calibration_passes.json
    python benchmarks/calibration_cost.py table    # adds them up, on any machine; writes results/calibration_cost.json;
                                                   # without passes, how long one may take for a tenth of the time

Weights are random. Both ways handle the same sequences: 256 of 32,768 tokens, decoded to the end in batches of 32 that
never drain, which favours sampling; prefill is left out. A step's time at the lengths between is a line through those
measured; the passes of our search are those it asks for where p5 depends on the budget as in the published tables, and
one more in every round on policy, whose first search is rarely this right.

Shapes: T tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from sparrow import SparsitySchedule
from sparrow.calibrate import Acceptance, Calibration, around, calibrate
from sparrow.measure import PILOT
from sparrow.schedule import ALL_PAGES

RESULTS = Path(__file__).parent / "results"
SEQUENCES, BATCH, LENGTH, PROMPT = 256, 32, 32_768, 256
LENGTHS = (30_000, 16_384, 4096)  # at which steps are timed
PAGES = (ALL_PAGES, 253, 61, 1021)  # top-k of the steps timed
PASS_PAGES = (29, 125, 253, 509)
BUDGETS = np.geomspace(512, 16_384, 18).round(-1).astype(int)  # tokens; 18 as published, between the published ends
DEFAULT_BUDGETS = (5, 13, 29, 61, 125, 253, 509)  # of sparrow calibrate
TAUS = (0.75, 0.80, 0.83, 0.86, 0.88, 0.90, 0.92, 0.94)
SHAPE = dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
)  # fmt: skip


def save(name: str, found: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"calibration_{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def steps(arguments: argparse.Namespace) -> None:
    """Decode steps of the whole batch, by the difference of a long and a short generation over cached prompts."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from transformers import Qwen3Config
    from vllm import SamplingParams

    from sparrow.engines.vllm import VLLMEngine

    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 150_000, max(LENGTHS)).tolist() for _ in range(BATCH)]
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "batch": BATCH, "steps": []}
    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(**SHAPE, architectures=["Qwen3ForCausalLM"], dtype="bfloat16").save_pretrained(folder)
        engine = VLLMEngine(
            folder, SparsitySchedule.dense(), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True,
            max_model_len=LENGTH + 512, max_num_seqs=BATCH, gpu_memory_utilization=0.93,
            compilation_config=json.loads(arguments.compilation),
        )  # fmt: skip

        def seconds(length: int, tokens: int) -> float:
            parameters = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            begin = time.monotonic()
            engine.llm.generate([{"prompt_token_ids": p[:length]} for p in prompts], parameters, use_tqdm=False)
            return time.monotonic() - begin

        for top_k in PAGES:
            # Not engine.set_schedule, which forgets cached prefixes: the prompts were prefilled densely and may stay.
            engine.rpc("sparrow_set_schedule", SparsitySchedule.fixed(top_k).to_json())
            for length in LENGTHS:
                prefill = seconds(length, 1)
                times = [(seconds(length, 65) - seconds(length, 1)) / 64 for _ in range(arguments.repeats)]
                row = {"top_k": top_k, "length": length, "prefill_s": prefill, "step_s": statistics.median(times),
                       "spread_s": max(times) - min(times)}  # fmt: skip
                found["steps"].append(row)
                print(row, flush=True)
                save("steps", found)


def passes(arguments: argparse.Namespace) -> None:
    """Whole scoring passes of the engine, sampled log-probs of 20 tokens a position included."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sparrow.engines.base import Rollout
    from sparrow.engines.hf import HFEngine

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, dtype="bfloat16")).bfloat16().eval()
    engine = HFEngine(model, SparsitySchedule.fixed(PASS_PAGES[0]), eos_ids=[], token_budget=LENGTH)
    rng = np.random.default_rng(0)
    T = LENGTH - PROMPT
    rollouts = [
        Rollout(
            prompt_ids=rng.integers(0, 150_000, PROMPT).tolist(),
            response_ids=rng.integers(0, 150_000, T),
            logprobs=np.zeros(T, np.float32),
            top_ids=rng.integers(0, 150_000, (T, 20)).astype(np.int32),
            top_logprobs=np.zeros((T, 20), np.float32),
            finish_reason="length",
        )
        for _ in range(arguments.sequences)
    ]
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "length": LENGTH, "passes": []}
    for top_k in (ALL_PAGES, *PASS_PAGES):
        schedule = SparsitySchedule.fixed(top_k)
        engine.score(rollouts[:1], schedule, 1.0)
        times = []
        for rollout in rollouts:
            torch.cuda.synchronize()
            begin = time.monotonic()
            engine.score([rollout], schedule, 1.0)
            torch.cuda.synchronize()
            times.append(time.monotonic() - begin)
        row = {"top_k": top_k, "sequence_s": statistics.median(times), "spread_s": max(times) - min(times)}
        found["passes"].append(row)
        print(row, flush=True)
        save("passes", found)


def table(arguments: argparse.Namespace) -> None:
    timed = json.loads((RESULTS / "calibration_steps.json").read_text())
    rows = {(r["top_k"], r["length"]): r["step_s"] for r in timed["steps"]}
    length_T = np.arange(PROMPT, LENGTH)
    line = np.polyfit(LENGTHS, [rows[ALL_PAGES, n] for n in LENGTHS], 1)
    dense_T = np.polyval(line, length_T)
    # A sparse step reads its pages, the landmarks and, in two layers, everything: a plane in budget and length.
    sparse = [(k, n, s) for (k, n), s in rows.items() if k < ALL_PAGES and n > (k + 3) * 16]
    points = np.array([[1, (k + 3) * 16, n] for k, n, _ in sparse])
    measured = np.array([s for *_, s in sparse])
    plane, *_ = np.linalg.lstsq(points, measured, rcond=None)
    misfit = float(np.abs(points @ plane / measured - 1).max())
    dense_misfit = float(np.abs(np.polyval(line, LENGTHS) / [rows[ALL_PAGES, n] for n in LENGTHS] - 1).max())

    def rollout(tokens_T: np.ndarray, sequences: int = SEQUENCES) -> float:
        """Seconds to decode sequences under a budget of tokens by length."""
        steps_T = np.where(tokens_T >= length_T, dense_T, plane[0] + plane[1] * tokens_T + plane[2] * length_T)
        return float(steps_T.sum()) * sequences / BATCH

    anew = {int(b): rollout(np.full_like(length_T, b)) for b in BUDGETS}
    few = max(PILOT, SEQUENCES // 10)
    first: list[SparsitySchedule] = []
    then: list[SparsitySchedule] = []
    chosen = search(first, [SparsitySchedule.fixed(k) for k in DEFAULT_BUDGETS])
    search(then, around(chosen.schedule, min(DEFAULT_BUDGETS)))  # the schedule sampled under takes no pass: one is over
    under_chosen, guess = (
        schedule.tokens_read(length_T) for schedule in (chosen.schedule, SparsitySchedule.preset("qwen3-1.7b", 0.86))
    )
    found: dict[str, Any] = {
        "device": timed["device"], "sequences": SEQUENCES, "batch": BATCH, "length": LENGTH,
        "largest_misfit_of_steps": max(misfit, dense_misfit), "sampling_18_budgets_s": sum(anew.values()),
        "sampling_by_budget_s": anew, "passes_first": len(first), "passes_in_a_round": len(then), "ways": [],
    }  # fmt: skip
    path = RESULTS / "calibration_passes.json"
    per_sequence = (
        {r["top_k"]: r["sequence_s"] for r in json.loads(path.read_text())["passes"]} if path.exists() else None
    )

    def add(label: str, sampling_s: float, scored: list[tuple[list[SparsitySchedule], int]]) -> None:
        """A way to calibrate: seconds of sampling, and (passes, sequences) scored, each with a dense pass beside."""
        passes = sum((1 + len(schedules)) * sequences for schedules, sequences in scored)
        allowed = (sum(anew.values()) / 10 - sampling_s) / passes
        way: dict[str, Any] = {"label": label, "sampling_s": sampling_s, "sequences_scored": passes}
        way["sequence_may_take_s_for_a_tenth"] = allowed
        if per_sequence is not None:
            way["scoring_s"] = 0.0
            for schedules, sequences in scored:
                pages = [schedule.pages(length_T).mean() for schedule in schedules]
                sparse_s = np.interp(pages, PASS_PAGES, [per_sequence[k] for k in PASS_PAGES]).sum()
                way["scoring_s"] += sequences * (per_sequence[ALL_PAGES] + float(sparse_s))
            way["times_less"] = sum(anew.values()) / (sampling_s + way["scoring_s"])
        found["ways"].append(way)
        print(way)

    rounds = rollout(under_chosen, few + SEQUENCES)  # one with few, one with all
    searched = [(first, few), (then, few + SEQUENCES)]
    add("sparrow calibrate as it is", rollout(length_T, few) + rounds, searched)
    most = [(first, few), (then + then[:2], few + SEQUENCES)]
    add("the same, every round with all the passes that --refine allows", rollout(length_T, few) + rounds, most)
    add("its first responses sampled under a published table (--layout)", rollout(guess, few) + rounds, searched)
    add("all sampled under a published table, once (--on-policy 0)", rollout(guess), [(first, SEQUENCES)])
    add("all sampled dense, once (--on-policy 0)", rollout(length_T), [(first, SEQUENCES)])
    save("cost", found)


def search(asked: list[SparsitySchedule], trials: list[SparsitySchedule]) -> Calibration:
    """The search of ``sparrow calibrate`` in a world whose p5 is the published tables'; notes what it asks for."""
    tables = [SparsitySchedule.preset("qwen3-1.7b", tau) for tau in TAUS]
    position = np.tile(np.arange(PROMPT, LENGTH, 16), 32)
    sequence = np.repeat(np.arange(32), len(position) // 32)
    needed = np.stack([t.pages(position) for t in tables])  # [tau, T]

    def measure(schedule: SparsitySchedule) -> Acceptance:
        asked.append(schedule)
        pages = schedule.pages(position)
        alpha = np.empty(len(position))
        for column in np.unique(np.vstack([needed, pages]), axis=1).T:
            inside = (needed == column[:-1, None]).all(0) & (pages == column[-1])
            alpha[inside] = np.interp(column[-1], [0, *column[:-1], 2048], [0.3, *TAUS, 1.0])
        return Acceptance(alpha, position, sequence)

    return calibrate(measure, trials, 0.86, min(DEFAULT_BUDGETS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"steps": steps, "passes": passes, "table": table}
    parser.add_argument("what", choices=commands)
    parser.add_argument("--compilation", default="{}", help="vLLM's compilation_config as JSON")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=3, help="sequences scored in a pass, one by one")
    arguments = parser.parse_args()
    commands[arguments.what](arguments)


if __name__ == "__main__":
    main()
