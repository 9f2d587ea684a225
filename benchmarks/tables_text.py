"""Tables of the models in ``studies/text`` and ``studies/reasoner``: acceptance of drafts and of lossy actors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common import Row, load, table

KINDS = ("rejection", "drafter invariant")  # how drafts are verified
UNEVEN = ("even", "layers", "kv heads", "page scores", "two levels", "pairs of layers", "together")


def text_model() -> str:
    """One line: the model that the other tables are about."""
    result = load("text_acceptance")
    card, settings = result["model"], result["settings"]
    return (
        f"{card['parameters'] / 1e6:.0f} M parameters, {card['context']:,} tokens of context, trained for "
        f"{card['training_s']:.0f} s on one {card['device']} ({card['tokens_seen'] / 1e6:.0f} M tokens, "
        f"{card['tokens_distinct'] / 1e6:.0f} M of them distinct); held out {', '.join(card['held_out'])}: "
        f"{card['held_out_loss']:.2f} nats a token. {settings['texts']} texts, {settings['cycles']} cycles of "
        f"{max(settings['drafts'])} drafts in each.\n"
    )


def _rows(mode: str, reuse: int = 1) -> dict[tuple[int, str], Row]:
    """Budget and dense layers -> row, by rising layers and budget."""
    rows = {
        (row["budget"], ", ".join(map(str, row["dense_layers"])) or "none"): row
        for row in load("text_acceptance")["rows"]
        if row["mode"] == mode and row["reuse"] == reuse
    }
    return dict(sorted(rows.items(), key=lambda item: (item[1]["dense_layers"], item[0][0])))


def _interval(interval: list[float], digits: int, unit: str = "f") -> str:
    """An estimate and, where there is one, its interval."""
    estimate, *ends = (f"{x:.{digits}{unit}}" for x in interval)
    return f"{estimate} [{', '.join(ends)}]" if ends else estimate


def text_acceptance() -> str:
    lossy = _rows("lossy")
    rows, counts = [], []
    for (budget, dense), row in _rows("lossless").items():
        other = lossy[budget, dense]
        spans = [f"{_interval(r['mean'], 3)} | {_interval(r['p5'], 2)}" for r in (row, other)]
        counts = list(row["tokens_a_cycle"])
        rows.append(
            [f"{budget:,}", dense, *spans, *("{:.2f} ({:.2f})".format(*row["tokens_a_cycle"][k]) for k in counts)]
        )
    head = ["tokens read", "dense layers", "drafts: mean", "p5", "lossy actor: mean", "p5"]
    return table([*head, *(f"tokens a cycle, k = {k}" for k in counts)], rows)


def text_lengths() -> str:
    lossy = _rows("lossy")
    rows, bins = [], []
    for (budget, dense), row in _rows("lossless").items():
        bins = [f"{b['start']:,} to {b['end']:,}" for b in row["bins"]]
        cells = []
        for mine, other in zip(row["bins"], lossy[budget, dense]["bins"], strict=True):
            draft, actor = (f"{b['mean'][0]:.3f} / {b['p5'][0]:.2f}" for b in (mine, other))
            cells.append(f"{draft}; {actor}")
        rows.append([f"{budget:,}", dense, *cells])
    return table(["tokens read", "dense layers", *bins], rows)


def text_tail() -> str:
    """How many of the lossy actor's tokens are above 0.999, and how far the others are from a Beta distribution."""
    rows = []
    for (budget, dense), row in _rows("lossy").items():
        tail = row["beta_tail"]
        below = [tail["n"] / row["n"], *reversed(tail.get("fraction_interval", []))]
        distance = [tail["ks"], *tail.get("ks_interval", [])]
        cells = [_interval([1 - x for x in below], 0, "%"), f"Beta({tail['a']:.2f}, {tail['b']:.2f})"]
        rows.append([f"{budget:,}", dense, *cells, _interval(distance, 3)])
    return table(["tokens read", "dense layers", "above 0.999", "fit to the others", "KS distance"], rows)


def text_reuse() -> str:
    reuses = sorted({row["reuse"] for row in load("text_acceptance")["rows"]})
    by_reuse = {reuse: _rows("lossless", reuse) for reuse in reuses}
    rows = []
    for budget, dense in by_reuse[reuses[-1]]:
        variants = [by_reuse[reuse][budget, dense] for reuse in reuses]
        most = [list(row["tokens_a_cycle"].items()) for row in variants]
        counts = (", ".join(f"{tokens[0]:.2f}" for _, tokens in per_k) for per_k in most)
        cells = [f"{row['mean'][0]:.3f}; {tokens}" for row, tokens in zip(variants, counts, strict=True)]
        rows.append([f"{budget:,}", dense, *cells])
    return table(["tokens read", "dense layers", *(f"selected every {r} steps" for r in reuses)], rows)


def text_shared_noise() -> str:
    rows, counts = [], []
    for row in load("text_shared_noise")["rows"]:
        kept, cycles = row["kept"], row["tokens_a_cycle"]
        counts = list(cycles)
        cells = [_interval(kept["rejection"], 3), _interval(kept["shared noise"], 3), f"{kept['at least']:.3f}"]
        for k in counts:
            pair = "; ".join(_interval(cycles[k][how], 2) for how in ("rejection", "shared noise"))
            cells.append(f"{pair}; {cycles[k]['ratio'][0] - 1:.1%}")
        rows.append([f"{row['budget']:,}", *cells])
    head = ["tokens read", "kept by rejection sampling", "with the same Gumbel noise", "at least, a / (2 - a)"]
    return table([*head, *(f"tokens a cycle, k = {k}: rejection; drafter-invariant" for k in counts)], rows)


def text_vllm(study: str) -> str:
    """Tokens of vLLM's cycles by position, beside what rejection sampling gives for them by the model itself."""
    result = load(study)
    rows = []
    for row in [*result["bins"], {"start": "all", **{k: v for k, v in result.items() if k != "bins"}}]:
        where = "all" if row["start"] == "all" else f"{row['start']:,} to {row['end']:,}"
        measured, predicted = _interval(row["tokens_a_cycle"], 2), f"{row['predicted']['sampled']:.2f}"
        share = f"{row['measured_over_predicted']:.1%}"
        rows.append([where, row["cycles"], measured, predicted, share, f"{row['mean_acceptance']:.3f}"])
    head = ["position", "cycles", "tokens a cycle in vLLM", "predicted for the same cycles", "", "mean acceptance"]
    return table(head, rows)


def text_metered() -> str:
    """One line: another schedule as vLLM measured it during a run, and as the model has it at cycles of that run."""
    result = load("text_vllm_metered")["metered"]
    pairs = (
        f"{name} {result['measured'][name]:.3f}, where the model itself has {_interval(result['predicted'][name], 3)}"
        for name in ("mean", "p5")
    )
    return f"{result['budget']} tokens read, {result['drafts']:,} drafts measured: {'; '.join(pairs)}.\n"


def _bytes(study: str, cells: Callable[[Row], list[str]], head: list[str]) -> str:
    rows = []
    for row in load("text_bytes")["rows"]:
        if row["study"] == study:
            shown = [f"{row['mean'][0]:.3f}", _interval(row["p5"], 2), f"{row['tokens_a_cycle']['8'][0]:.2f}"]
            rows.append([*cells(row), f"{row['tokens_read']:,.0f}", *shown])
    return table([*head, "bytes read, in tokens of a layer", "mean", "p5", "tokens a cycle, k = 8"], rows)


def text_pages() -> str:
    return _bytes("page size", lambda r: [r["page_size"], f"{r['budget']:,}"], ["page size", "tokens read"])


def text_landmarks() -> str:
    head = ["page size", "landmarks", "tokens read"]
    return _bytes("landmarks", lambda r: [r["page_size"], r["landmarks"], f"{r['budget']:,}"], head)


def text_quest() -> str:
    return _bytes("quest", lambda r: [r["page_size"], f"{r['budget']:,}"], ["page size", "tokens read"])


def text_layers() -> str:
    return _bytes("one dense layer", lambda r: [r["dense_layers"][0]], ["dense layer, the others read 512 tokens"])


def text_kept() -> str:
    rows = [
        [row["sink_pages"], row["recent_pages"], f"{row['mean'][0]:.3f}", _interval(row["p5"], 2)]
        for row in load("text_bytes")["rows"]
        if row["study"] in ("sink pages", "recent pages")
    ]
    return table(["sink pages", "recent pages", "mean", "p5"], rows)


def text_uneven(study: str) -> str:
    """One study's rows, each compared with the even schedule at the same bytes, interpolated over its budgets."""
    rows = []
    for row in load("text_uneven")["rows"]:
        if row["study"] == study:
            cells = [] if study == "even" else [row["how"]]
            cells += [f"{row['budget']:,}", f"{row['tokens_read']:,.0f}", f"{row['mean'][0]:.3f}"]
            cells += [_interval(row["p5"], 2), f"{row['tokens_a_cycle']['8'][0]:.2f}"]
            rows.append(cells if study == "even" else [*cells, _difference(row["minus_even"]["p5"])])
    head = ["tokens read", "bytes read, in tokens of a layer", "mean", "p5", "tokens a cycle, k = 8"]
    return table(head if study == "even" else [study, *head, "p5 minus even, same bytes"], rows)


def text_uneven_target() -> str:
    """What the target p5 takes, and what p5 half the bytes of the even schedule give."""
    result = load("text_uneven")
    whole, rows = result["even_at_target"], []
    for row in result["targets"]:
        reached = "" if row["reached"] is None else f"{row['reached']:,.0f} ({row['reached'] / whole:.0%})"
        name = "even" if row["study"] == "even" else f"{row['study']}: {row['how']}"
        rows.append([name, _interval(row["p5_at_half"], 3), reached])
    return table(
        ["", f"p5 at {whole / 2:,.0f} tokens' worth", f"tokens' worth at a p5 of {result['target']:.2f}"], rows
    )


def _difference(interval: list[float]) -> str:
    estimate, low, high = interval
    return f"{estimate:+.3f} [{low:+.3f}, {high:+.3f}]"


def text_control() -> str:
    """GRPO on the text model by arm; mean and 95 % interval over seeds, differences to the dense run of the seed."""
    rows = []
    for row in load("text_control")["rows"]:
        dense = row["arm"] == "dense"
        p5, read, kl = f"{row['p5'][0]:.3f}", f"{row['read']:.2f}", f"{row['kl'][0]:.1e}"
        cells = [f"`{row['arm']}`", len(row["seeds"]), p5, read, kl]
        cells += [_spread(row["reward_end"]), "" if dense else _spread(row["reward_minus_dense"], "+")]
        cells += ["" if dense else _spread(row["whole_reward_minus_dense"], "+")]
        cells += [f"{row['held_out_start'][0]:.3f}", _spread(row["held_out_end"])]
        cells += ["" if dense else _spread(row["held_out_minus_dense"], "+")]
        rows.append([*cells, f"{row['collapsed']} of {len(row['seeds'])}"])
    head = ["arm", "seeds", "p5", "KV read", "KL", "actor's reward, last 5 steps", "minus dense", "all steps"]
    return table([*head, "held-out reward, start", "end", "minus dense", "collapsed"], rows)


def text_corrections() -> str:
    """GRPO on the text model by correction, with an adapter and with the closed loop; differences by seed."""
    rows = []
    for row in load("text_corrections")["rows"]:
        plain, steps = row["whole_reward_minus_plain"], sorted({row["steps"][0], row["steps"][-1]})
        cells = [f"`{row['arm']}`", len(row["seeds"]), " to ".join(map(str, steps))]
        cells += [f"{row['p5'][0]:.3f}", f"{row['read']:.2f}", f"{row['kl'][0]:.1e}", f"{row['held_out_end'][0]:.3f}"]
        cells += ["" if row["arm"] == "dense" else _spread(row["whole_reward_minus_dense"], "+")]
        rows.append([*cells, _spread(plain, "+") if plain else ""])
    head = ["arm", "seeds", "steps", "p5", "KV read", "KL", "held-out reward, end", "actor's reward minus dense's"]
    return table([*head, "minus that of the same schedule with token TIS"], rows)


def text_control_model(study: str) -> str:
    """One line: the model that was trained, and how."""
    result = load(study)
    card, s = result["model"], result["settings"]
    return (
        f"{card['parameters'] / 1e6:.0f} M parameters, trained for {card['training_s']:.0f} s on one {card['device']}, "
        f"held-out loss {card['held_out_loss']:.2f}. {s['steps']} steps of {s['prompts']} prompts x {s['samples']} "
        f"responses of at most {s['max_new_tokens']} tokens, temperature {s['temperature']:g}, AdamW at "
        f"{s['learning_rate']:g}, correction `{s['correction']}`. Held-out reward: the policy's, decoded densely, on "
        f"{s['held_out']} problems.\n"
    )


def text_control_ranks() -> str:
    """Spearman's correlation of each statistic at step 1 with what a run lost against dense, and 95 % intervals."""
    ranking = load("text_control")["ranking"]
    kinds = ("reward", "held_out")
    rows = [[name, *(_interval(ranking[kind][name], 2) for kind in kinds)] for name in ranking["reward"]]
    return table(["statistic", "actor's reward, all steps", "held-out reward at the end"], rows)


def text_wall_clock() -> str:
    """GRPO of the widened text model by arm: seconds of a step and where a decode step's time goes."""
    result = load("text_wall_clock")
    rows = []
    for run, row in zip(result["arms"], result["rows"], strict=True):
        profile, seconds = run["profile"], run["seconds"]
        waiting = profile["clock_ms"] - profile["attention_ms"] - profile["other_ms"]
        decode = [profile["clock_ms"], profile["attention_ms"], profile["other_ms"], waiting]
        saved = row["saved_by_attention"]
        cells = [f"`{run['arm']}`", run["model"] + 1]
        cells += [f"{seconds[phase]:.1f}" for phase in ("rollout", "score", "update", "sync")]
        cells += [f"{run['step_s']:.1f}", _interval(row["rollout_share"], 0, "%")]
        cells += [f"{row['rollout_speedup']:.2f}x" if saved else ""]
        cells += [f"{ms:.2f}" for ms in decode]
        rows.append([*cells, f"{100 * saved:.0f} %" if saved else ""])
    head = ["rollouts", "model", "rollout, s", "scoring", "update", "new weights", "step, s", "rollout's part"]
    head += ["rollout over dense", "decoding a token, ms", "attention", "other kernels", "neither"]
    return table([*head, "saved by attention"], rows)


def text_wall_clock_paired() -> str:
    """Each arm against dense, step by step on the same problems."""
    rows = []
    for row in load("text_wall_clock")["paired"]:
        cells = [f"`{row['arm']}`", len(row["seeds"]), row["pairs"], _interval(row["step_speedup"], 2)]
        rows.append([*cells, ", ".join(f"{x:+.3f}" for x in row["reward_minus_dense"])])
    return table(["rollouts", "models", "pairs of steps", "step over dense", "reward minus dense's, by model"], rows)


def text_wall_clock_model() -> str:
    """A line: what was trained; and one for each model."""
    result = load("text_wall_clock")
    dense = result["arms"][0]
    o = dense["options"]
    text = (
        f"{dense['device']}; {o['copies']} copies of every head, "
        f"{dense['token_bytes'] / 1024:.0f} KiB of cache a token; {o['prompts']} prompts x {o['samples']} responses of "
        f"at most {o['max_new_tokens']:,} tokens, temperature {o['temperature']:g}, AdamW at {o['learning_rate']:g}."
        "\n\n"
    )
    for i, card in enumerate(result["models"]):
        (lossy,) = (run for run in result["arms"] if run["arm"] == "p86" and run["model"] == i)
        text += (
            f"- Model {i + 1}: held-out loss {card['held_out_loss']:.2f}, problems of seed {lossy['seed']}; `p86` "
            f"selects {', '.join(map(str, lossy['top_k']))} pages by 256 tokens of context, beside the first and the "
            "latest.\n"
        )
    return text


def text_wall_clock_rewards() -> str:
    """What the arms earned, by steps and by minutes."""
    rows = []
    result = load("text_wall_clock")
    for run, row in zip(result["arms"], result["rows"], strict=True):
        cycle = "" if run["tokens_per_cycle"] is None else f"{run['tokens_per_cycle']:.1f}"
        held = ", ".join(f"{reward:.2f} ({seconds / 60:.1f})" for seconds, reward in run["held_out"])
        cells = [f"`{run['arm']}`", run["model"] + 1, f"{run['tokens']:,.0f}", cycle, f"{row['reward']:.3f}"]
        rows.append([*cells, f"{row['minutes']:.1f}", held])
    first = f"reward, mean of the first {result['rows'][0]['first_steps']} steps"
    head = ["rollouts", "model", "tokens a response", "tokens a cycle", first, "minutes they took"]
    return table([*head, "policy's held-out reward (at minute)"], rows)


def _spread(interval: list[float | None], sign: str = "") -> str:
    """A mean over seeds and the half width of its interval, if there are several seeds."""
    mean, _, high = interval
    if mean is None:
        return "no dense run"
    return f"{mean:{sign}.3f}" if high is None else f"{mean:{sign}.3f} ± {high - mean:.3f}"


def text_distill_setting() -> str:
    """One line: what the adapters were trained on, where, and the schedule."""
    result = load("text_distill")
    s, schedule = result["settings"], result["schedule"]
    dense = " and ".join(map(str, schedule["dense_layers"])) or "none"
    pages = schedule["top_k"][0] + schedule["sink_pages"] + schedule["recent_pages"]
    return (
        f"Held-out loss {result['model']['held_out_loss']:.2f} nats a token. "
        f"Prompts of {s['prompt']} tokens, {s['train']} responses of {s['tokens']} tokens to train on and "
        f"{s['held_out']} held-out ones, temperature 1, float32, {result['machine']}. Schedule: {pages} pages of "
        f"{schedule['page_size']} tokens, sink and recent ones included; dense layers: {dense}. Adapter: rank "
        f"{s['rank']}, AdamW, {s['update']} responses an update, lists of "
        f"{s['top_n']} tokens, seed {s['seed']}.\n"
    )


def text_distill() -> str:
    """Acceptance with an adapter by loss and training responses: on held-out responses, on its own, and of drafts."""
    names = {"none": "no adapter", "forward": "forward KL", "reverse": "reverse KL", "overlap": "overlap"}
    rows, counts = [], list(load("text_distill")["rows"][0]["drafting"]["tokens_a_cycle"])
    for row in load("text_distill")["rows"]:
        held, own, drafts = row["held_out"], row.get("on_its_own"), row.get("drafting")
        gains = [_difference(row["gain"][name]) if "gain" in row else "" for name in ("mean", "p5")]
        rate = f"{row['learning_rate']:g}" if "learning_rate" in row else ""
        cells = [names[row["loss"]], rate, row["responses"]]
        cells += [f"{held['mean'][0]:.3f}", gains[0], _interval(held["p5"], 3), gains[1]]
        cells += [_interval(own[name], 3) if own else "" for name in ("mean", "p5")]
        cells += [_interval(drafts["mean"], 3) if drafts else ""]
        cells += ["{:.2f} ({:.2f})".format(*drafts["tokens_a_cycle"][k]) if drafts else "" for k in counts]
        rows.append(cells)
    head = ["loss", "learning rate", "responses seen", "held out: mean", "gain", "p5", "gain"]
    return table(
        [*head, "its own samples: mean", "p5", "drafts: mean", *(f"tokens a cycle, k = {k}" for k in counts)], rows
    )


def reasoner_acceptance() -> str:
    rows = []
    for model in load("reasoner_acceptance")["models"]:
        for row in model["rows"]:
            lossy, (few, many) = row["lossy"], (row["lossless"][k] for k in ("4", "8"))
            spans = [_interval(lossy[name], 3) for name in ("mean", "p5")]
            drafts = [f"{few['acceptance']:.3f}", f"{few['p5']:.3f}"]
            cycles = [f"{metrics['tokens_per_cycle']:.2f}" for metrics in (few, many)]
            which = f"{model['layers']} layers, {model['lines']} lines"
            rows.append([which, row["tokens"], *spans, *drafts, *cycles])
    head = ["model and programs", "tokens read", "lossy actor: mean", "p5", "drafts, k = 4: mean", "p5"]
    return table([*head, "tokens a cycle, k = 4", "tokens a cycle, k = 8"], rows)


def drafter_invariance() -> str:
    result = load("drafter_invariance")
    rows = []
    for row in result["rows"]:
        kept = [f"{row['kept'][how]:.4f}" for how in ("rejection", "gumbel", "inverse")]
        cycles = [f"{row['cycles'][f'{how}, k = {k}']['tokens']:.2f}" for how in KINDS for k in (4, 8)]
        as_dense = min(row["cycles"][f"{KINDS[1]}, k = {k}"]["as_dense"] for k in (4, 8))
        rows.append([row["tokens"], *kept, *cycles, f"{as_dense} of {result['problems']}"])
    head = ["tokens read", "kept by rejection sampling", "with the same Gumbel noise", "with the same uniform number"]
    cycles = [f"{how}: tokens a cycle, k = {k}" for how in ("rejection", "drafter-invariant") for k in (4, 8)]
    return table([*head, *cycles, "responses as dense decoding's"], rows)


TABLES = {
    "reasoner acceptance": reasoner_acceptance,
    "drafter invariance": drafter_invariance,
    "text shared noise": text_shared_noise,
    "text vllm": partial(text_vllm, "text_vllm"),
    "text vllm invariant": partial(text_vllm, "text_vllm_invariant"),
    "text metered": text_metered,
    "text page sizes": text_pages,
    "text landmarks": text_landmarks,
    "text quest": text_quest,
    "text layers": text_layers,
    "text kept": text_kept,
    **{f"text uneven {study}": partial(text_uneven, study) for study in UNEVEN},
    "text uneven target": text_uneven_target,
    "text distill": text_distill,
    "text distill setting": text_distill_setting,
    "text control": text_control,
    "text corrections": text_corrections,
    "text corrections model": partial(text_control_model, "text_corrections"),
    "text control model": partial(text_control_model, "text_control"),
    "text control ranks": text_control_ranks,
    "text wall clock": text_wall_clock,
    "text wall clock model": text_wall_clock_model,
    "text wall clock paired": text_wall_clock_paired,
    "text wall clock rewards": text_wall_clock_rewards,
    "text model": text_model,
    "text acceptance": text_acceptance,
    "text acceptance by length": text_lengths,
    "text tail": text_tail,
    "text reuse": text_reuse,
}
