"""Tables for lossless decoding in vLLM, from ``benchmarks/lossless*.py`` and ``vllm_train.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, stdev

from common import RESULTS, SHAPES, Row, interval, load, table
from scipy.stats import ttest_1samp

SHORT_SHAPES = ("qwen3-1.7b", "qwen3-8b")
"""The shapes that ``lossless_short.py`` measured."""


def at(row: Row) -> tuple[int, int]:
    return row["batch"], row["length"]


def landmarks(result: Row) -> str:
    stored = result["decoding"]["draft_schedule"].get("landmark_dtype", "auto")
    return {"auto": "16 bits", "fp8_e4m3": "8 bits"}[stored]


def text_model() -> dict[int, float]:
    """Return the text model's measured acceptance by the number of pages that drafts read. States
    were timed at this acceptance.
    """
    rows = load("text_acceptance")["rows"]
    drafts = next(
        row
        for row in rows
        if (row["mode"], row["top_k"], row["dense_layers"]) == ("lossless", 61, [])
    )
    return {
        61: round(drafts["mean"][0], 3),
        157: round(load("text_vllm_2560_own")["mean_acceptance"], 3),
    }


def lossless_speed() -> str:
    """Tabulate speeds by draft budget. Sparrow chooses the draft length without earlier
    measurements. At acceptance 0.95, the table also has speeds with fixed draft lengths.
    """
    rows, measured = [], text_model()
    pairs = {f"lossless_{shape}": f"lossless_{shape}_stock" for shape in SHAPES}
    pairs["lossless_qwen3-1.7b_landmarks16"] = "lossless_qwen3-1.7b_landmarks16_stock"
    for name, stock_name in pairs.items():
        ours = load(name)
        for stock in load(stock_name)["points"]:
            base, point = (
                stock["tokens_per_s"],
                [row for row in ours["points"] if at(row) == at(stock)],
            )
            for pages in sorted({row["pages"] for row in point}):
                drafted = [row for row in point if row["pages"] == pages]
                fixed = [row for row in drafted if row["drafts"] != "adapt"]
                held = {row["drafts"]: f"{row['tokens_per_s'] / base:.2f}x" for row in fixed}
                none = held.pop(0, "")
                chosen = {row["rate"]: row for row in drafted if row["drafts"] == "adapt"}
                cells = []
                for rate in (measured[pages], 0.95, 0.9, 0.968):
                    runs = (
                        [chosen[rate], *filter(None, [chosen[rate].get("settled")])]
                        if rate in chosen
                        else []
                    )
                    cells.append(", ".join(f"{run['tokens_per_s'] / base:.2f}x" for run in runs))
                rows.append(
                    [
                        SHAPES[ours["shape"]],
                        f"{stock['batch']} x {stock['length']:,}",
                        f"{16 * (pages + 3):,}",
                        landmarks(ours),
                        f"{base:,.0f}",
                        none,
                        ", ".join(f"{k}: {x}" for k, x in held.items()),
                        *cells,
                    ]
                )
    head = [
        "shape",
        "sequences x tokens",
        "draft budget",
        "landmarks",
        "stock tokens/s",
        "no drafts",
    ]
    head += ["fixed number of drafts", "chosen, text model's acceptance", "0.95", "0.90", "0.968"]
    return table(head, rows)


def lossless_fp8_cache() -> str:
    """Compare lossless mode with stock vLLM, both with an fp8 KV cache, in speed and log-prob
    errors.
    """
    [stock], ours = (load(f"lossless_qwen3-1.7b_fp8{end}")["points"] for end in ("_stock", ""))
    wide = {
        at(row): row["tokens_per_s"] for row in load("lossless_qwen3-1.7b_again_stock")["points"]
    }
    point, speed = at(stock), stock["tokens_per_s"]
    chosen = next(row for row in ours if row["drafts"] == "adapt")
    gains = [x["tokens_per_s"] / speed for x in (chosen, chosen["settled"])]
    equal = load("lossless_equal_fp8_cache")
    missed = [equal[name]["missed"]["mean"] for name in ("stock vLLM with this cache", "sampled")]
    return (
        f"With {point[0]} sequences of {point[1]:,} tokens at 1.7B, stock vLLM generates {speed:,.0f} tokens/s "
        f"({wide[point]:,.0f} with a cache in bfloat16). If drafts read 1,024 tokens and are accepted with probability "
        f"0.95, lossless mode is **{gains[0]:.2f}** times as fast in the first four seconds, and {gains[1]:.2f} times "
        f"as fast after that. "
        f"Log-probs differ from those of transformers in float32 by {missed[1]:.3f} on average, "
        f"and those of stock vLLM by {missed[0]:.3f}. {beside_stock(equal)}\n"
    )


def beside_stock(result: Row) -> str:
    """Format the ``lossless_check.py equal`` results for greedy tokens and for tokens sampled with
    a seed.
    """
    gaps = [row["gap"] for row in result["partings from stock"]]
    agreed, repeated = (
        result[name]
        for name in (
            "greedy tokens before the first that is not stock's",
            "responses that a seed repeats",
        )
    )
    same, _, all_tokens = agreed.partition(" of ")
    return (
        f"With greedy decoding, {int(same):,} of {int(all_tokens):,} tokens come before the first token that differs "
        f"from stock vLLM's. {len(gaps)} of 8 responses diverge. Where they do, the "
        f"log-probs of the two tokens in float32 differ by {min(gaps):.3f} to {max(gaps):.3f} nats. If "
        f"sampling is repeated with the same "
        f"seed, {repeated} responses are identical."
    )


def lossless_draft_weights() -> str:
    """Tabulate the speed with fp8 draft weights, relative to stock vLLM in bfloat16 on the same
    machine.
    """
    rows = []
    for name, stock_name in (
        ("lossless_qwen3-14b_draft_fp8", "lossless_qwen3-14b_draft_fp8_stock"),
        ("lossless_qwen3-1.7b_draft_fp8", "lossless_qwen3-1.7b_points_stock"),
    ):
        ours, stock = load(name), load(stock_name)
        cache = [f"{run['kv_tokens']:,}" for run in (stock, ours)]
        for point in stock["points"]:
            found = {
                row["drafts"]: row
                for row in ours["points"]
                if at(row) == at(point) and row["pages"] == 61
            }
            if found:
                base = point["tokens_per_s"]
                gain = {k: f"{row['tokens_per_s'] / base:.2f}x" for k, row in found.items()}
                fixed = ", ".join(f"{k}: {x}" for k, x in gain.items() if k not in (0, "adapt"))
                where = [
                    SHAPES[ours["shape"]],
                    f"{point['batch']} x {point['length']:,}",
                    *cache,
                    f"{base:,.0f}",
                ]
                settled = found["adapt"]["settled"]["tokens_per_s"] / base
                rows.append([*where, gain[0], fixed, gain["adapt"], f"{settled:.2f}x"])
    head = [
        "shape",
        "sequences x tokens",
        "KV cache, stock (tokens)",
        "lossless",
        "stock tokens/s",
        "no drafts",
    ]
    return table([*head, "fixed number of drafts", "first 4 s", "after"], rows)


def beside_float32(result: Row) -> str:
    """Describe the log-prob errors of sampled tokens, over all checks of a run."""
    sampled = [row for name, row in result.items() if name.startswith("sampled")]
    missed, yardstick = ([row[of]["mean"] for row in sampled] for of in ("missed", "yardstick"))
    return (
        f"Log-probs differ from those of transformers in float32 by {min(missed):.4f} to {max(missed):.4f} on "
        f"average, and those of transformers in bfloat16 by {min(yardstick):.4f} to {max(yardstick):.4f}."
    )


def lossless_exact_draft_weights() -> str:
    """Return a sentence about the log-probs of tokens drafted with fp8 weights."""
    result = load("lossless_equal_draft_fp8")
    repeated = result["responses that a seed repeats"]
    return f"{beside_float32(result)} If sampling is repeated with the same seed, {repeated} responses are identical.\n"


def lossless_exact_guesses() -> str:
    """One row per source of guesses and weights of drafts: greedy tokens, errors of log-probs, and
    the chi-square test, if it was run.
    """
    rows = []
    for source, equal, chi_square in (
        ("history", "guess3", "guess2"),
        ("head", "head3", "head2"),
        ("history from 2 tokens, head elsewhere", "mixed3", "mixed2"),
        ("history, drafts in 8 bits", "guess3_draft_fp8", None),
    ):
        result = load(f"lossless_equal_{equal}_vary")
        tested = ""
        if chi_square is not None:
            samples = load(f"lossless_samples_{chi_square}")
            tested = f"p = {samples['p']:.2f} ({samples['samples']:,} samples)"
        same, _, total = result["greedy tokens before the first that is not stock's"].partition(
            " of "
        )
        gaps = [row["gap"] for row in result["partings from stock"]]
        sampled = [row for label, row in result.items() if label.startswith("sampled")]
        errors = [
            f"{min(means):.4f} to {max(means):.4f}"
            for of in ("missed", "yardstick")
            if (means := [row[of]["mean"] for row in sampled])
        ]
        rows.append(
            [
                source,
                f"{int(same):,} of {int(total):,}",
                f"{min(gaps):.3f} to {max(gaps):.3f}",
                *errors,
                tested,
            ]
        )
    head = [
        "guesses from",
        "greedy tokens before the first difference",
        "difference in log-prob there, nats",
        "error of log-probs",
        "reference error",
        "chi-square test",
    ]
    return table(head, rows)


def rollout_seconds(name: str) -> tuple[Row, float]:
    """Return a description of the trace, and its time in seconds."""
    result = load(name)
    return result["rollout"], result["rollout"]["steps"] * mean(
        row["ms_per_token"] for row in result["trace"]
    ) / 1e3


def lossless_rollout() -> str:
    rows = []
    for shape, label in SHAPES.items():
        (trace, stock), (_, ours) = (
            rollout_seconds(f"lossless_{shape}_stock"),
            rollout_seconds(f"lossless_{shape}"),
        )
        drafts = sorted({row["drafts"] for row in load(f"lossless_{shape}")["trace"]})
        cells = [
            f"{stock:,.0f} s",
            f"{ours:,.0f} s",
            f"**{stock / ours:.2f}x**",
            ", ".join(map(str, drafts)),
        ]
        rows.append([label, trace["slots"], landmarks(load(f"lossless_{shape}")), *cells])
    return table(
        [
            "shape",
            "sequences at a time",
            "landmarks",
            "stock",
            "lossless",
            "speed-up",
            "numbers of drafts chosen",
        ],
        rows,
    )


def lossless_whole() -> str:
    stock, ours = (load(f"lossless_whole{variant}")["whole"][0] for variant in ("_stock", ""))
    return (
        f"The {ours['requests']} responses have {ours['tokens']:,} tokens in total and at most "
        f"{ours['longest']:,} each. "
        f"Stock vLLM took {stock['seconds']:.1f} s ({stock['steps']:,} steps). Lossless mode took "
        f"{ours['seconds']:.1f} s ({ours['steps']:,} cycles), so it was "
        f"**{stock['seconds'] / ours['seconds']:.2f}** times as fast.\n"
    )


def short_contexts() -> str:
    """Tabulate the speed of lossless mode relative to stock vLLM at each acceptance. Each speed is
    a mean over the runs of ``lossless_short.py``. Also show the speed of a second stock vLLM
    relative to the first.
    """
    rows, columns = [], {"no drafts": None, "0.95": 0.95, "0.9": 0.9, "0.5": 0.5}
    for shape in SHORT_SHAPES:
        cases = dict[tuple[int, int], list[Row]]()
        for row in _rows(f"lossless_short_{shape}"):
            cases.setdefault(at(row), []).append(row)
        for (batch, length), each in cases.items():
            runs = {rate: [row for row in each if row["rate"] == rate] for rate in columns.values()}
            steps = [1e3 * batch / row["tokens_per_s"]["stock"] for row in each]
            stock = [row["control"][0] for row in each]
            end = length + round(max(row["grown"]["stock"] for row in each))
            rows.append(
                [
                    SHAPES[shape],
                    batch,
                    f"{length:,} to {end:,}",
                    len(runs[None]),
                    f"{min(steps):.2f} to {max(steps):.2f}",
                    f"{min(stock):.3f} to {max(stock):.3f}",
                    *(_mean_of_runs(runs[rate]) for rate in columns.values()),
                ]
            )
    return table(
        ["shape", "sequences", "tokens", "runs", "stock step, ms", "second stock run", *columns],
        rows,
    )


def short_contexts_runs() -> str:
    """Return a sentence about the slowest individual runs of ``short_contexts``."""
    rows = [row for shape in SHORT_SHAPES for row in _rows(f"lossless_short_{shape}")]
    ratios = [row["ratio"][0] for row in rows]
    slow = sum(ratio < 0.98 for ratio in ratios)
    control = min(row["control"][0] for row in rows)
    return (
        f"Of the {len(ratios)} ratios of individual runs, {slow} are below 0.98, and the lowest is "
        f"{min(ratios):.3f}. A second stock engine is up to {100 * (1 - control):.1f} % slower than "
        "the first.\n"
    )


def _mean_of_runs(runs: Sequence[Row]) -> str:
    """Return the mean ratio and a 95 % interval: from Student's t over the runs or, for a single
    run, from resampling its turns.
    """
    ratios = [run["ratio"][0] for run in runs]
    if len(runs) == 1:
        return interval(runs[0]["ratio"], 3)
    return interval([mean(ratios), *ttest_1samp(ratios, 0.0).confidence_interval()], 3)


def _rows(name: str) -> Iterator[Row]:
    """Return the rows from all files whose names start with ``name``. The file without a number
    comes first.
    """
    for path in sorted(RESULTS.glob(f"{name}*.json")):
        yield from load(path.stem)["rows"]


def lossless_budgets() -> str:
    """Tabulate the speed with other fixed budgets and with the chosen budget, relative to a fixed
    budget of 1,024 tokens, and show which budget was chosen.
    """
    rows, usual = [], 1024
    for shape in ("qwen3-1.7b", "qwen3-8b"):
        groups = dict[tuple[int, int, float], dict[float | None, Row]]()
        for row in _rows(f"lossless_budgets_{shape}"):
            groups.setdefault((row["batch"], row["length"], row["rate"]), {})[row["held"]] = row
        for (batch, length, rate), runs in groups.items():
            speed = runs[1.0]["tokens_per_s"]
            ratios = [
                f"{runs[of]['tokens_per_s'] / speed:.2f}x" if of in runs else ""
                for of in (0.5, 2.0, None)
            ]
            budgets = set[int]()
            if None in runs:
                budgets = {int(usual * of) for of in runs[None]["budgets"].values()} or {usual}
            chosen = ", ".join(f"{tokens:,}" for tokens in sorted(budgets))
            rows.append(
                [SHAPES[shape], f"{batch} x {length:,}", rate, f"{speed:,.0f}", *ratios, chosen]
            )
    labels = [
        f"{usual:,} tokens: tokens/s",
        f"{usual // 2:,}",
        f"{2 * usual:,}",
        "chosen",
        "chosen budget",
    ]
    return table(["shape", "sequences x tokens", "acceptance", *labels], rows)


def lossless_memory() -> str:
    rows = []
    for shape, label in SHAPES.items():
        stock, ours = load(f"lossless_{shape}_stock"), load(f"lossless_{shape}")
        tokens = [run["kv_tokens"] for run in (stock, ours)]
        starts = [f"{run['start_s']:.0f} s" for run in (stock, ours)]
        rows.append(
            [label, *(f"{n:,}" for n in tokens), f"{tokens[1] / tokens[0] - 1:+.1%}", *starts]
        )
    return table(
        ["shape", "KV cache, stock (tokens)", "lossless", "difference", "start, stock", "lossless"],
        rows,
    )


def lossless_exact() -> str:
    result, samples = load("lossless_equal_bf16"), load("lossless_samples")
    rows = []
    two = load("lossless_equal_bf16_tp2")
    for name, row in [*result.items(), ("sampled, tensor parallel 2", two["sampled"])]:
        if name.startswith("sampled"):
            far = [
                f"{row[of][which]:.4f}"
                for of in ("missed", "yardstick")
                for which in ("mean", "p99")
            ]
            rows.append([name.removeprefix("sampled").strip(", ") or "sampled", *far])
    text = (
        f"\n{beside_stock(result)} A chi-square test of {samples['samples']:,} continuations, each of 3 tokens from a "
        f"vocabulary of 6, yields p = {samples['p']:.2f} (chi-square {samples['chi-square']:.0f}, "
        f"{samples['degrees of freedom']} degrees of freedom).\n"
    )
    errors = [f"{of}: {which}" for of in ("error", "reference error") for which in ("mean", "p99")]
    return table(["run", *errors], rows) + text


def lossless_invariant() -> str:
    """For each other run, tabulate how many tokens match stock vLLM's with the same seed."""
    rows = []
    for name, row in load("lossless_invariant").items():
        if isinstance(row, dict) and "common" in row:
            common = [
                f"{row['common']:,} of {row['tokens']:,}",
                f"{row['common'] / row['tokens']:.0%}",
            ]
            rows.append([name, f"{row['same']} of {row['responses']}", *common])
    head = ["run", "identical responses", "tokens before the first difference", "share"]
    return table(head, rows)


def lossless_training() -> str:
    results = load("vllm_train_lossless")
    rows = []
    for mode in ("dense", "lossless"):
        runs = [run["steps"] for name, run in results.items() if name.startswith(mode)]
        rewards = [mean(steps["reward"][-5:]) for steps in runs]
        cells = [
            ", ".join(f"{x:.3f}" for x in rewards),
            f"{mean(rewards):.3f} +- {stdev(rewards):.3f}",
        ]
        p5 = [mean(steps["p5_mean"][3:]) for steps in runs]
        low, high = ttest_1samp(p5, 0).confidence_interval()
        kl, seconds = (
            mean(value for steps in runs for value in steps[name][3:])
            for name in ("kl", "rollout_s")
        )
        drafts = [tokens for steps in runs for tokens in steps["tokens_per_cycle"] if tokens]
        tokens = f"{mean(drafts):.1f}" if drafts else ""
        rows.append(
            [
                mode,
                *cells,
                f"{mean(p5):.4f} [{low:.4f}, {high:.4f}]",
                f"{kl:.2e}",
                tokens,
                f"{seconds:.2f} s",
            ]
        )
    head = [
        "rollouts",
        "reward, last 5 of 30 steps, seeds 0 to 2",
        "mean",
        "p5 between actor and trainer",
        "KL",
    ]
    return table([*head, "tokens per cycle", "rollout per step"], rows)


TABLES = {
    "lossless speed": lossless_speed,
    "lossless fp8 cache": lossless_fp8_cache,
    "lossless draft weights": lossless_draft_weights,
    "lossless exact draft weights": lossless_exact_draft_weights,
    "lossless exact guesses": lossless_exact_guesses,
    "lossless rollout": lossless_rollout,
    "lossless whole": lossless_whole,
    "lossless short contexts": short_contexts,
    "lossless short runs": short_contexts_runs,
    "lossless budgets": lossless_budgets,
    "lossless memory": lossless_memory,
    "lossless exact": lossless_exact,
    "lossless invariant": lossless_invariant,
    "lossless training": lossless_training,
}
