"""Tables of lossless decoding in vLLM, from what ``benchmarks/lossless*.py`` and ``vllm_train.py`` measured."""

from __future__ import annotations

from statistics import mean, stdev

from common import SHAPES, Row, interval, load, speed_ratio, table
from scipy.stats import ttest_1samp

WIDE = (157, 0.968)
POINTS = ("lossless_qwen3-1.7b_one_kernel", "lossless_qwen3-1.7b_points", "lossless_qwen3-1.7b_again")


def at(row: Row) -> tuple[int, int]:
    return row["batch"], row["length"]


def landmarks(result: Row) -> str:
    stored = result["decoding"]["draft_schedule"].get("landmark_dtype", "auto")
    return {"auto": "16 bits", "fp8_e4m3": "8 bits"}[stored]


def lossless_speed() -> str:
    rows = []
    names = {f"lossless_{shape}": f"lossless_{shape}_stock" for shape in SHAPES if shape != "qwen3-1.7b"}
    first = {name: f"{name}_stock" for name in POINTS} | {
        "lossless_qwen3-1.7b_landmarks16": "lossless_qwen3-1.7b_stock"
    }
    for name, stock_name in (first | names).items():
        stock = {at(row): row["tokens_per_s"] for row in load(stock_name)["points"]}
        ours = load(name)
        for point, base in stock.items():
            here = {(row["pages"], row["rate"], row["drafts"]): row for row in ours["points"] if at(row) == point}
            if not here:
                continue
            gain = {of: row["tokens_per_s"] / base for of, row in here.items()}
            fixed = {k: x for (pages, rate, k), x in gain.items() if (pages, rate) == (61, 0.95) and k != "adapt"}
            none, *others = sorted(fixed.items())
            chosen = []
            for case in ((61, 0.95), (61, 0.9), WIDE):
                speeds = [f"{gain[*case, 'adapt']:.2f}x"] if (*case, "adapt") in here else []
                if speeds and (settled := here[*case, "adapt"].get("settled")):
                    speeds.append(f"{settled['tokens_per_s'] / base:.2f}x")
                chosen.append(", ".join(speeds))
            drafts = ", ".join(f"{k}: {x:.2f}x" for k, x in others)
            where = [SHAPES[ours["shape"]], f"{point[0]} x {point[1]:,}", landmarks(ours), f"{base:,.0f}"]
            rows.append([*where, f"{none[1]:.2f}x", drafts, *chosen])
    head = ["shape", "sequences x tokens", "landmarks", "stock tokens/s", "no drafts", "fixed number of drafts"]
    return table([*head, "chosen, 0.95: first 4 s, after", "0.90", "2,560 tokens, 0.968"], rows)


def lossless_fp8_cache() -> str:
    """Speed with a KV cache in fp8 against stock vLLM with the same cache, then log-probs of both."""
    [stock], ours = (load(f"lossless_qwen3-1.7b_fp8{end}")["points"] for end in ("_stock", ""))
    wide = {at(row): row["tokens_per_s"] for row in load("lossless_qwen3-1.7b_again_stock")["points"]}
    point, speed = at(stock), stock["tokens_per_s"]
    chosen = next(row for row in ours if row["drafts"] == "adapt")
    gains = [x["tokens_per_s"] / speed for x in (chosen, chosen["settled"])]
    equal = load("lossless_equal_fp8_cache")
    missed = [equal[name]["missed"]["mean"] for name in ("stock vLLM with this cache", "sampled")]
    return (
        f"{point[0]} x {point[1]:,} at 1.7B, drafts of 1,024 tokens at 0.95: stock vLLM {speed:,.0f} tokens/s "
        f"({wide[point]:,.0f} with a cache in bfloat16), lossless **{gains[0]:.2f}x** in the first four seconds and "
        f"{gains[1]:.2f}x after. Log-probs miss those of transformers in float32 by {missed[1]:.3f} on average, stock "
        f"vLLM's by {missed[0]:.3f}. {beside_stock(equal)}\n"
    )


def beside_stock(result: Row) -> str:
    """What ``lossless_check.py equal`` found of greedy tokens and of a seed."""
    gaps = [row["gap"] for row in result["partings from stock"]]
    agreed, repeated = (
        result[name] for name in ("greedy tokens before the first that is not stock's", "responses that a seed repeats")
    )
    return (
        f"Greedy: {agreed} tokens come before the first that differs from stock's; where {len(gaps)} of 8 responses "
        f"part, the float32 model puts {min(gaps):.3f} to {max(gaps):.3f} nats between the two tokens. A seed repeats "
        f"{repeated} responses to the bit."
    )


def lossless_draft_weights() -> str:
    """Drafts that multiply with weights in fp8, against stock vLLM in bfloat16 on the same machine."""
    rows = []
    for name, stock_name in (
        ("lossless_qwen3-14b_draft_fp8", "lossless_qwen3-14b_draft_fp8_stock"),
        ("lossless_qwen3-1.7b_draft_fp8", "lossless_qwen3-1.7b_points_stock"),
    ):
        ours, stock = load(name), load(stock_name)
        cache = [f"{run['kv_tokens']:,}" for run in (stock, ours)]
        for point in stock["points"]:
            found = {row["drafts"]: row for row in ours["points"] if at(row) == at(point) and row["pages"] == 61}
            if found:
                base = point["tokens_per_s"]
                gain = {k: f"{row['tokens_per_s'] / base:.2f}x" for k, row in found.items()}
                fixed = ", ".join(f"{k}: {x}" for k, x in gain.items() if k not in (0, "adapt"))
                where = [SHAPES[ours["shape"]], f"{point['batch']} x {point['length']:,}", *cache, f"{base:,.0f}"]
                settled = found["adapt"]["settled"]["tokens_per_s"] / base
                rows.append([*where, gain[0], fixed, gain["adapt"], f"{settled:.2f}x"])
    head = ["shape", "sequences x tokens", "KV cache, stock (tokens)", "lossless", "stock tokens/s", "no drafts"]
    return table([*head, "fixed number of drafts", "first 4 s", "after"], rows)


def lossless_exact_draft_weights() -> str:
    """One line: log-probs of tokens that were drafted with weights in fp8."""
    result = load("lossless_equal_draft_fp8")
    sampled = [row for name, row in result.items() if name.startswith("sampled")]
    missed, yardstick = ([row[of]["mean"] for row in sampled] for of in ("missed", "yardstick"))
    repeated = result["responses that a seed repeats"]
    return (
        f"Log-probs miss those of transformers in float32 by {min(missed):.4f} to {max(missed):.4f} on average, where "
        f"transformers in bfloat16 misses them by {min(yardstick):.4f} to {max(yardstick):.4f}; a seed repeats "
        f"{repeated} responses to the bit.\n"
    )


def rollout_seconds(name: str) -> tuple[Row, float]:
    """A description of the trace, and its seconds."""
    result = load(name)
    return result["rollout"], result["rollout"]["steps"] * mean(row["ms_per_token"] for row in result["trace"]) / 1e3


def lossless_rollout() -> str:
    rows = []
    for shape, label in SHAPES.items():
        (trace, stock), (_, ours) = rollout_seconds(f"lossless_{shape}_stock"), rollout_seconds(f"lossless_{shape}")
        drafts = sorted({row["drafts"] for row in load(f"lossless_{shape}")["trace"]})
        cells = [f"{stock:,.0f} s", f"{ours:,.0f} s", f"**{stock / ours:.2f}x**", ", ".join(map(str, drafts))]
        rows.append([label, trace["slots"], landmarks(load(f"lossless_{shape}")), *cells])
    return table(["shape", "sequences at a time", "landmarks", "stock", "lossless", "", "drafts settled on"], rows)


def lossless_whole() -> str:
    stock, ours = (load(f"lossless_whole{variant}")["whole"][0] for variant in ("_stock", ""))
    return (
        f"{ours['requests']} requests, {ours['tokens']:,} tokens, the longest {ours['longest']:,}: stock "
        f"{stock['seconds']:.1f} s, lossless {ours['seconds']:.1f} s, **{stock['seconds'] / ours['seconds']:.2f}x**; "
        f"{stock['steps']:,} steps against {ours['steps']:,} cycles.\n"
    )


def short_contexts() -> str:
    """Ratios of speeds by acceptance, and of stock vLLM to itself, from files of ``lossless_short.py``."""
    rows, rates = [], dict[str, None]()
    for run_of in ("qwen3-1.7b", "qwen3-1.7b_again", "qwen3-8b"):
        result = load(f"lossless_short_{run_of}")
        label = SHAPES[result["shape"]] + (", another run" if run_of.endswith("_again") else "")
        cases = dict[tuple[int, int], list[Row]]()
        for row in result["rows"]:
            cases.setdefault(at(row), []).append(row)
        for (batch, length), runs in cases.items():
            step = 1e3 * batch / mean(run["tokens_per_s"]["stock"] for run in runs)
            rounds = [pair for run in runs for pair in zip(run["turns"]["stock"], run["turns"]["control"], strict=True)]
            ratios = {"stock twice": speed_ratio([[turn[:2] for turn in pair] for pair in rounds])}
            ratios |= {"no drafts" if run["rate"] is None else f"{run['rate']}": run["ratio"] for run in runs}
            rates |= dict.fromkeys(ratios)
            end = length + round(max(run["grown"]["stock"] for run in runs))
            where = [label, batch, f"{length:,} to {end:,}", f"{step:.2f}"]
            rows.append([*where, *(interval(ratios[rate], 3) for rate in rates)])
    return table(["shape", "sequences", "tokens", "stock step, ms", *rates], rows)


def lossless_budgets() -> str:
    """Speeds with each budget held, over those with 1,024 tokens, and the budget that was found."""
    rows = []
    for shape in ("qwen3-1.7b", "qwen3-8b"):
        groups = dict[tuple[int, int, float], dict[float | None, Row]]()
        for row in load(f"lossless_budgets_{shape}")["rows"]:
            groups.setdefault((row["batch"], row["length"], row["rate"]), {})[row["held"]] = row
        for (batch, length, rate), runs in groups.items():
            usual = runs[1.0]["tokens_per_s"]
            held = [f"{runs[multiple]['tokens_per_s'] / usual:.2f}x" for multiple in (0.5, 2.0)]
            found = sorted({int(1024 * multiple) for multiple in runs[None]["budgets"].values()} or {1024})
            rows.append([
                SHAPES[shape], f"{batch} x {length:,}", rate, f"{usual:,.0f}", *held, ", ".join(f"{n:,}" for n in found)
            ])  # fmt: skip
    return table(["shape", "sequences x tokens", "acceptance", "1,024 tokens: tokens/s", "512", "2,048", "found"], rows)


def lossless_memory() -> str:
    rows = []
    for shape, label in SHAPES.items():
        stock, ours = load(f"lossless_{shape}_stock"), load(f"lossless_{shape}")
        tokens = [run["kv_tokens"] for run in (stock, ours)]
        starts = [f"{run['start_s']:.0f} s" for run in (stock, ours)]
        rows.append([label, *(f"{n:,}" for n in tokens), f"{tokens[1] / tokens[0] - 1:+.1%}", *starts])
    return table(["shape", "KV cache, stock (tokens)", "lossless", "", "start, stock", "lossless"], rows)


def lossless_exact() -> str:
    result, samples = load("lossless_equal_bf16"), load("lossless_samples")
    rows = []
    two = load("lossless_equal_bf16_tp2")
    for name, row in [*result.items(), ("sampled, tensor parallel 2", two["sampled"])]:
        if name.startswith("sampled"):
            far = [f"{row[of][which]:.4f}" for of in ("missed", "yardstick") for which in ("mean", "p99")]
            rows.append([name.removeprefix("sampled").strip(", ") or "sampled", *far])
    text = (
        f"\n{beside_stock(result)} {samples['samples']:,} continuations of 3 tokens over 6 words: "
        f"chi-square {samples['chi-square']:.0f} with {samples['degrees of freedom']} degrees of freedom, "
        f"p = {samples['p']:.2f}.\n"
    )
    return table(["", "missed: mean", "99 %", "yardstick: mean", "99 %"], rows) + text


def lossless_invariant() -> str:
    """Tokens of a seed against stock vLLM's, by what else decoded them."""
    rows = []
    for name, row in load("lossless_invariant").items():
        if isinstance(row, dict) and "common" in row:
            common = [f"{row['common']:,} of {row['tokens']:,}", f"{row['common'] / row['tokens']:.0%}"]
            rows.append([name, f"{row['same']} of {row['responses']}", *common])
    return table(["", "responses that are the same", "tokens before the first that is not", ""], rows)


def lossless_training() -> str:
    results = load("vllm_train_lossless")
    rows = []
    for mode in ("dense", "lossless"):
        runs = [run["steps"] for name, run in results.items() if name.startswith(mode)]
        rewards = [mean(step["reward"] for step in steps[-5:]) for steps in runs]
        cells = [", ".join(f"{x:.3f}" for x in rewards), f"{mean(rewards):.3f} +- {stdev(rewards):.3f}"]
        p5 = [mean(s["p5_mean"] for s in steps[3:]) for steps in runs]
        low, high = ttest_1samp(p5, 0).confidence_interval()
        kl, seconds = (mean(value(s) for steps in runs for s in steps[3:]) for value in (
            lambda s: s["kl"], lambda s: s["seconds"]["rollout"]
        ))  # fmt: skip
        drafts = [step["drafts"]["tokens_per_cycle"] for steps in runs for step in steps if step["drafts"]]
        tokens = f"{mean(drafts):.1f}" if drafts else ""
        rows.append([mode, *cells, f"{mean(p5):.4f} [{low:.4f}, {high:.4f}]", f"{kl:.2e}", tokens, f"{seconds:.2f} s"])
    head = ["rollouts", "reward, last 5 of 30 steps, seeds 0 to 2", "mean", "p5, actor and trainer", "KL"]
    return table([*head, "tokens a cycle", "rollout of a step"], rows)


TABLES = {
    "lossless speed": lossless_speed,
    "lossless fp8 cache": lossless_fp8_cache,
    "lossless draft weights": lossless_draft_weights,
    "lossless exact draft weights": lossless_exact_draft_weights,
    "lossless rollout": lossless_rollout,
    "lossless whole": lossless_whole,
    "lossless short contexts": short_contexts,
    "lossless budgets": lossless_budgets,
    "lossless memory": lossless_memory,
    "lossless exact": lossless_exact,
    "lossless invariant": lossless_invariant,
    "lossless training": lossless_training,
}
