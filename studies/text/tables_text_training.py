"""Tables for the training runs in ``studies/text``: the control study, its corrections, and reward
against wall-clock time.
"""

from __future__ import annotations

from functools import partial

from common import interval, load, table


def text_control() -> str:
    """Tabulate the results of GRPO on the text model by arm: means and 95 % intervals over seeds,
    and differences from the dense run with the same seed.
    """
    rows = []
    for row in load("text_control")["rows"]:
        dense = row["arm"] == "dense"
        p5, read, kl = f"{row['p5'][0]:.3f}", f"{row['read']:.2f}", f"{row['kl'][0]:.1e}"
        cells = [f"`{row['arm']}`", len(row["seeds"]), p5, read, kl]
        cells += [
            _spread(row["reward_end"]),
            "" if dense else _spread(row["reward_minus_dense"], "+"),
        ]
        cells += ["" if dense else _spread(row["whole_reward_minus_dense"], "+")]
        cells += [f"{row['held_out_start'][0]:.3f}", _spread(row["held_out_end"])]
        cells += ["" if dense else _spread(row["held_out_minus_dense"], "+")]
        rows.append([*cells, f"{row['collapsed']} of {len(row['seeds'])}"])
    head = [
        "arm",
        "seeds",
        "p5",
        "KV read",
        "KL",
        "actor's reward, last 5 steps",
        "minus dense",
        "all steps",
    ]
    return table([*head, "held-out reward, start", "end", "minus dense", "collapsed"], rows)


def text_corrections() -> str:
    """Tabulate the results of GRPO on the text model with different corrections, with an adapter,
    and with the closed loop. Differences are between runs with the same seed.
    """
    rows = []
    for row in load("text_corrections")["rows"]:
        plain, steps = row["whole_reward_minus_plain"], sorted({row["steps"][0], row["steps"][-1]})
        cells = [f"`{row['arm']}`", len(row["seeds"]), " to ".join(map(str, steps))]
        cells += [
            f"{row['p5'][0]:.3f}",
            f"{row['read']:.2f}",
            f"{row['kl'][0]:.1e}",
            f"{row['held_out_end'][0]:.3f}",
        ]
        cells += ["" if row["arm"] == "dense" else _spread(row["whole_reward_minus_dense"], "+")]
        rows.append([*cells, _spread(plain, "+") if plain else ""])
    head = [
        "arm",
        "seeds",
        "steps",
        "p5",
        "KV read",
        "KL",
        "held-out reward, end",
        "actor's reward minus dense's",
    ]
    return table([*head, "minus that of the same schedule with token TIS"], rows)


def text_control_model(study: str) -> str:
    """Describe the trained model and its training in one line."""
    result = load(study)
    card, s = result["model"], result["settings"]
    return (
        f"The model has {card['parameters'] / 1e6:.0f} M parameters and was trained for "
        f"{card['training_s']:.0f} s on one "
        f"{card['device']}. Its held-out loss is {card['held_out_loss']:.2f}. Each of the {s['steps']} steps samples "
        f"{s['samples']} responses to each of {s['prompts']} prompts, with at most {s['max_new_tokens']} "
        f"tokens per response, "
        f"at temperature {s['temperature']:g}. The optimiser is AdamW with learning rate "
        f"{s['learning_rate']:g}, and the "
        f"correction is `{s['correction']}`. The held-out reward is that of the policy, decoded "
        f"densely, on {s['held_out']} problems.\n"
    )


def text_control_ranks() -> str:
    """Tabulate Spearman's correlation between each statistic at step 1 and the reward that a run
    loses relative to dense, with 95 % intervals.
    """
    ranking = load("text_control")["ranking"]
    kinds = ("reward", "held_out")
    rows = [
        [name, *(interval(ranking[kind][name], 2) for kind in kinds)] for name in ranking["reward"]
    ]
    return table(["statistic", "actor's reward, all steps", "held-out reward at the end"], rows)


def text_wall_clock() -> str:
    """Tabulate how much time GRPO takes on the widened text model, by arm: the seconds per step,
    and how the time of a decode step is spent.
    """
    result = load("text_wall_clock")
    rows = []
    for run, row in zip(result["arms"], result["rows"], strict=True):
        profile, seconds = run["profile"], run["seconds"]
        waiting = profile["clock_ms"] - profile["attention_ms"] - profile["other_ms"]
        decode = [profile["clock_ms"], profile["attention_ms"], profile["other_ms"], waiting]
        saved = row["saved_by_attention"]
        cells = [f"`{run['arm']}`", run["model"] + 1]
        cells += [f"{seconds[phase]:.1f}" for phase in ("rollout", "score", "update", "sync")]
        cells += [f"{run['step_s']:.1f}", interval(row["rollout_share"], 0, "%")]
        cells += [f"{row['rollout_speedup']:.2f}x" if saved else ""]
        cells += [f"{ms:.2f}" for ms in decode]
        rows.append([*cells, f"{100 * saved:.0f} %" if saved else ""])
    head = [
        "rollouts",
        "model",
        "rollout, s",
        "scoring",
        "update",
        "new weights",
        "step, s",
        "rollout's share",
    ]
    head += ["rollout speed-up", "decoding, ms per token", "attention", "other kernels", "GPU idle"]
    return table([*head, "share of savings from attention"], rows)


def text_wall_clock_paired() -> str:
    """Compare each arm with dense, step by step on the same problems."""
    rows = []
    for row in load("text_wall_clock")["paired"]:
        cells = [
            f"`{row['arm']}`",
            len(row["seeds"]),
            row["pairs"],
            interval(row["step_speedup"], 2),
        ]
        rows.append([*cells, ", ".join(f"{x:+.3f}" for x in row["reward_minus_dense"])])
    return table(
        [
            "rollouts",
            "models",
            "pairs of steps",
            "step speed-up",
            "reward minus dense's, by model",
        ],
        rows,
    )


def text_wall_clock_model() -> str:
    """Describe the runs in one line, and each model in another."""
    result = load("text_wall_clock")
    dense = result["arms"][0]
    o = dense["options"]
    text = (
        f"{dense['device']}; {o['copies']} copies of every head, "
        f"{dense['token_bytes'] / 1024:.0f} KiB of cache per token; "
        f"{o['prompts']} prompts x {o['samples']} responses of "
        f"at most {o['max_new_tokens']:,} tokens, temperature {o['temperature']:g}, AdamW at {o['learning_rate']:g}."
        "\n\n"
    )
    for i, card in enumerate(result["models"]):
        (lossy,) = (run for run in result["arms"] if run["arm"] == "p86" and run["model"] == i)
        text += (
            f"- Model {i + 1}: held-out loss {card['held_out_loss']:.2f}, problems of seed {lossy['seed']}; `p86` "
            f"selects {', '.join(map(str, lossy['top_k']))} pages in successive bins of 256 tokens, in "
            "addition to the first and the latest page.\n"
        )
    return text


def text_wall_clock_rewards() -> str:
    """Tabulate the arms' rewards by steps and by minutes."""
    rows = []
    result = load("text_wall_clock")
    for run, row in zip(result["arms"], result["rows"], strict=True):
        cycle = "" if run["tokens_per_cycle"] is None else f"{run['tokens_per_cycle']:.1f}"
        held = ", ".join(
            f"{reward:.2f} ({seconds / 60:.1f})" for seconds, reward in run["held_out"]
        )
        cells = [
            f"`{run['arm']}`",
            run["model"] + 1,
            f"{run['tokens']:,.0f}",
            cycle,
            f"{row['reward']:.3f}",
        ]
        rows.append([*cells, f"{row['minutes']:.1f}", held])
    first = f"reward, mean of the first {result['rows'][0]['first_steps']} steps"
    head = [
        "rollouts",
        "model",
        "tokens per response",
        "tokens per cycle",
        first,
        "minutes for these steps",
    ]
    return table([*head, "policy's held-out reward (at minute)"], rows)


def _spread(interval: list[float | None], sign: str = "") -> str:
    """Format a mean over seeds, with the half-width of its interval if there are several."""
    mean, _, high = interval
    if mean is None:
        return "no dense run"
    return f"{mean:{sign}.3f}" if high is None else f"{mean:{sign}.3f} ± {high - mean:.3f}"


TABLES = {
    "text control": text_control,
    "text corrections": text_corrections,
    "text corrections model": partial(text_control_model, "text_corrections"),
    "text control model": partial(text_control_model, "text_control"),
    "text control ranks": text_control_ranks,
    "text wall clock": text_wall_clock,
    "text wall clock model": text_wall_clock_model,
    "text wall clock paired": text_wall_clock_paired,
    "text wall clock rewards": text_wall_clock_rewards,
}
