"""Tables for the models in ``studies/text`` and ``studies/reasoner``: acceptance of drafts and of
lossy actors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common import Row, interval, load, table

KINDS = ("rejection", "drafter invariant")  # how drafts are verified
UNEVEN = ("even", "layers", "kv heads", "page scores", "two levels", "pairs of layers", "together")


def text_model() -> str:
    """Describe the model behind the other tables in one line."""
    result = load("text_acceptance")
    card, settings = result["model"], result["settings"]
    return (
        f"The model has {card['parameters'] / 1e6:.0f} M parameters and a context of {card['context']:,} "
        f"tokens. It was "
        f"trained for {card['training_s']:.0f} s on one {card['device']}, on {card['tokens_seen'] / 1e6:.0f} M tokens, "
        f"{card['tokens_distinct'] / 1e6:.0f} M of them distinct. Its loss on held-out packages "
        f"({', '.join(card['held_out'])}) is {card['held_out_loss']:.2f} nats per token. Acceptance was measured on "
        f"{settings['texts']} texts, in {settings['cycles']} cycles of {max(settings['drafts'])} drafts per text.\n"
    )


def _rows(mode: str, reuse: int = 1) -> dict[tuple[int, str], Row]:
    """Return rows by (budget, dense layers), sorted by layers, then by budget."""
    rows = {
        (row["budget"], ", ".join(map(str, row["dense_layers"])) or "none"): row
        for row in load("text_acceptance")["rows"]
        if row["mode"] == mode and row["reuse"] == reuse
    }
    return dict(sorted(rows.items(), key=lambda item: (item[1]["dense_layers"], item[0][0])))


def text_acceptance() -> str:
    lossy = _rows("lossy")
    rows, counts = [], []
    for (budget, dense), row in _rows("lossless").items():
        other = lossy[budget, dense]
        spans = [f"{interval(r['mean'], 3)} | {interval(r['p5'], 2)}" for r in (row, other)]
        counts = list(row["tokens_a_cycle"])
        rows.append(
            [
                f"{budget:,}",
                dense,
                *spans,
                *("{:.2f} ({:.2f})".format(*row["tokens_a_cycle"][k]) for k in counts),
            ]
        )
    head = ["tokens read", "dense layers", "drafts: mean", "p5", "lossy actor: mean", "p5"]
    return table([*head, *(f"tokens per cycle, k = {k}" for k in counts)], rows)


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
    """Tabulate how many of the lossy actor's tokens have an acceptance above 0.999, and how far the
    rest are from a Beta distribution.
    """
    rows = []
    for (budget, dense), row in _rows("lossy").items():
        tail = row["beta_tail"]
        below = [tail["n"] / row["n"], *reversed(tail.get("fraction_interval", []))]
        distance = [tail["ks"], *tail.get("ks_interval", [])]
        cells = [
            interval([1 - x for x in below], 0, "%"),
            f"Beta({tail['a']:.2f}, {tail['b']:.2f})",
        ]
        rows.append([f"{budget:,}", dense, *cells, interval(distance, 3)])
    return table(
        ["tokens read", "dense layers", "above 0.999", "fit to all other tokens", "KS distance"],
        rows,
    )


def text_reuse() -> str:
    reuses = sorted({row["reuse"] for row in load("text_acceptance")["rows"]})
    by_reuse = {reuse: _rows("lossless", reuse) for reuse in reuses}
    rows = []
    for budget, dense in by_reuse[reuses[-1]]:
        variants = [by_reuse[reuse][budget, dense] for reuse in reuses]
        most = [list(row["tokens_a_cycle"].items()) for row in variants]
        counts = (", ".join(f"{tokens[0]:.2f}" for _, tokens in per_k) for per_k in most)
        cells = [
            f"{row['mean'][0]:.3f}; {tokens}" for row, tokens in zip(variants, counts, strict=True)
        ]
        rows.append([f"{budget:,}", dense, *cells])
    return table(
        [
            "tokens read",
            "dense layers",
            *("selected at every step" if r == 1 else f"every {r} steps" for r in reuses),
        ],
        rows,
    )


def text_shared_noise() -> str:
    rows, counts = [], []
    for row in load("text_shared_noise")["rows"]:
        kept, cycles = row["kept"], row["tokens_a_cycle"]
        counts = list(cycles)
        cells = [
            interval(kept["rejection"], 3),
            interval(kept["shared noise"], 3),
            f"{kept['at least']:.3f}",
        ]
        for k in counts:
            pair = "; ".join(interval(cycles[k][how], 2) for how in ("rejection", "shared noise"))
            cells.append(f"{pair}; {cycles[k]['ratio'][0] - 1:.1%}")
        rows.append([f"{row['budget']:,}", *cells])
    head = [
        "tokens read",
        "accepted by rejection sampling",
        "with the same Gumbel noise",
        "lower bound a / (2 - a)",
    ]
    return table(
        [*head, *(f"tokens per cycle, k = {k}: rejection; drafter-invariant" for k in counts)], rows
    )


def text_vllm(study: str) -> str:
    """Tabulate tokens per cycle in vLLM by position, next to the model's own prediction for
    rejection sampling.
    """
    result = load(study)
    rows = []
    for row in [
        *result["bins"],
        {"start": "all", **{k: v for k, v in result.items() if k != "bins"}},
    ]:
        where = "all" if row["start"] == "all" else f"{row['start']:,} to {row['end']:,}"
        measured, predicted = (
            interval(row["tokens_a_cycle"], 2),
            f"{row['predicted']['sampled']:.2f}",
        )
        share = f"{row['measured_over_predicted']:.1%}"
        rows.append(
            [where, row["cycles"], measured, predicted, share, f"{row['mean_acceptance']:.3f}"]
        )
    head = [
        "position",
        "cycles",
        "tokens per cycle in vLLM",
        "predicted for the same cycles",
        "measured / predicted",
        "mean acceptance",
    ]
    return table(head, rows)


def text_draft_weights() -> str:
    """Tabulate tokens per cycle in vLLM by position, for drafts with the model's own weights and
    for drafts with an fp8 copy of them.
    """
    own, copied = load("text_vllm_draft_auto"), load("text_vllm_draft_fp8")
    rows = []
    for a, b in zip(
        [*own["bins"], {**own, "start": "all"}], [*copied["bins"], copied], strict=True
    ):
        where = "all" if a["start"] == "all" else f"{a['start']:,} to {a['end']:,}"
        rows.append(
            [
                where,
                *(
                    cell
                    for row in (a, b)
                    for cell in (row["cycles"], interval(row["tokens_a_cycle"], 2))
                ),
            ]
        )
    head = [
        "position",
        "cycles, own weights",
        "tokens per cycle",
        "cycles, weights in fp8",
        "tokens per cycle",
    ]
    return table(head, rows)


def text_budgets() -> str:
    """Tabulate tokens per cycle in vLLM by draft budget and draft weights, next to the prediction
    for the model's own weights.
    """
    rows = []
    for budget in (1024, 2560):
        for weights, label in (("own", "the model's own"), ("fp8", "fp8")):
            result = load(f"text_vllm_{budget}_{weights}")
            predicted, last = f"{result['predicted']['sampled']:.2f}", result["bins"][-1]
            cells = [
                interval(result["tokens_a_cycle"], 2),
                predicted,
                f"{result['mean_acceptance']:.3f}",
            ]
            end = f"{interval(last['tokens_a_cycle'], 2)}; {last['mean_acceptance']:.3f}"
            rows.append([f"{budget:,}", label, *cells, end])
    head = [
        "tokens read",
        "weights",
        "tokens per cycle in vLLM",
        "predicted",
        "mean acceptance",
        "tokens per cycle; acceptance at 6,144 to 8,192",
    ]
    return table(head, rows)


def text_metered() -> str:
    """Describe in one line what vLLM measured for a second schedule during a run, and what the
    model measured in the same cycles.
    """
    result = load("text_vllm_metered")["metered"]
    pairs = (
        f"{name} of {result['measured'][name]:.3f} (predicted: {interval(result['predicted'][name], 3)})"
        for name in ("mean", "p5")
    )
    return (
        f"With {result['budget']} tokens read, vLLM measured {result['drafts']:,} drafts, with a "
        f"{' and a '.join(pairs)}.\n"
    )


def _bytes(study: str, cells: Callable[[Row], list[str]], head: list[str]) -> str:
    rows = []
    for row in load("text_bytes")["rows"]:
        if row["study"] == study:
            shown = [
                f"{row['mean'][0]:.3f}",
                interval(row["p5"], 2),
                f"{row['tokens_a_cycle']['8'][0]:.2f}",
            ]
            rows.append([*cells(row), f"{row['tokens_read']:,.0f}", *shown])
    return table([*head, "bytes read, in KV tokens", "mean", "p5", "tokens per cycle, k = 8"], rows)


def text_pages() -> str:
    return _bytes(
        "page size", lambda r: [r["page_size"], f"{r['budget']:,}"], ["page size", "tokens read"]
    )


def text_landmarks() -> str:
    head = ["page size", "landmarks", "tokens read"]
    return _bytes("landmarks", lambda r: [r["page_size"], r["landmarks"], f"{r['budget']:,}"], head)


def text_quest() -> str:
    return _bytes(
        "quest", lambda r: [r["page_size"], f"{r['budget']:,}"], ["page size", "tokens read"]
    )


def text_layers() -> str:
    return _bytes(
        "one dense layer",
        lambda r: [r["dense_layers"][0]],
        ["dense layer (all others read 512 tokens)"],
    )


def text_kept() -> str:
    rows = [
        [row["sink_pages"], row["recent_pages"], f"{row['mean'][0]:.3f}", interval(row["p5"], 2)]
        for row in load("text_bytes")["rows"]
        if row["study"] in ("sink pages", "recent pages")
    ]
    return table(["sink pages", "recent pages", "mean", "p5"], rows)


def text_uneven(study: str) -> str:
    """Tabulate a study's rows, each compared with the even schedule at the same bytes (interpolated
    between its budgets).
    """
    rows = []
    for row in load("text_uneven")["rows"]:
        if row["study"] == study:
            cells = [] if study == "even" else [row["how"]]
            cells += [f"{row['budget']:,}", f"{row['tokens_read']:,.0f}", f"{row['mean'][0]:.3f}"]
            cells += [interval(row["p5"], 2), f"{row['tokens_a_cycle']['8'][0]:.2f}"]
            rows.append(
                cells if study == "even" else [*cells, _difference(row["minus_even"]["p5"])]
            )
    head = [
        "tokens read",
        "bytes read, in KV tokens",
        "mean",
        "p5",
        "tokens per cycle, k = 8",
    ]
    return table(
        head
        if study == "even"
        else [study.replace("kv", "KV"), *head, "p5 minus even schedule's, same bytes"],
        rows,
    )


def text_uneven_target() -> str:
    """Tabulate the bytes each variant needs for the target p5, and its p5 at half the bytes of the
    even schedule.
    """
    result = load("text_uneven")
    whole, rows = result["even_at_target"], []
    for row in result["targets"]:
        reached = (
            ""
            if row["reached"] is None
            else f"{row['reached']:,.0f} ({row['reached'] / whole:.0%})"
        )
        name = "even" if row["study"] == "even" else f"{row['study']}: {row['how']}"
        rows.append([name, interval(row["p5_at_half"], 3), reached])
    return table(
        [
            "budgets",
            f"p5 at {whole / 2:,.0f} KV tokens",
            f"KV tokens at a p5 of {result['target']:.2f}",
        ],
        rows,
    )


def _difference(interval: list[float]) -> str:
    estimate, low, high = interval
    return f"{estimate:+.3f} [{low:+.3f}, {high:+.3f}]"


def text_distill_setting() -> str:
    """Describe in one line the data, machine and schedule that adapters were trained with."""
    result = load("text_distill")
    s, schedule = result["settings"], result["schedule"]
    dense = " and ".join(map(str, schedule["dense_layers"])) or "none"
    pages = schedule["top_k"][0] + schedule["sink_pages"] + schedule["recent_pages"]
    return (
        f"The model's held-out loss is {result['model']['held_out_loss']:.2f} nats per token. {s['train']} training "
        f"responses and {s['held_out']} held-out responses of {s['tokens']} tokens were sampled at temperature 1 from "
        f"prompts of {s['prompt']} tokens, in float32 ({result['machine']}). The schedule reads {pages} pages of "
        f"{schedule['page_size']} tokens, including sink and recent pages; layers {dense} are dense. The adapter has "
        f"rank {s['rank']} and was trained with AdamW, with {s['update']} responses per update, lists of "
        f"{s['top_n']} tokens, and seed {s['seed']}.\n"
    )


def text_distill() -> str:
    """Tabulate acceptance with an adapter by loss and number of training responses: on held-out
    responses, on the actor's own responses, and for drafts.
    """
    names = {
        "none": "no adapter",
        "forward": "forward KL",
        "reverse": "reverse KL",
        "overlap": "overlap",
    }
    rows, counts = [], list(load("text_distill")["rows"][0]["drafting"]["tokens_a_cycle"])
    for row in load("text_distill")["rows"]:
        held, own, drafts = row["held_out"], row.get("on_its_own"), row.get("drafting")
        gains = [_difference(row["gain"][name]) if "gain" in row else "" for name in ("mean", "p5")]
        rate = f"{row['learning_rate']:g}" if "learning_rate" in row else ""
        cells = [names[row["loss"]], rate, row["responses"]]
        cells += [f"{held['mean'][0]:.3f}", gains[0], interval(held["p5"], 3), gains[1]]
        cells += [interval(own[name], 3) if own else "" for name in ("mean", "p5")]
        cells += [interval(drafts["mean"], 3) if drafts else ""]
        cells += [
            "{:.2f} ({:.2f})".format(*drafts["tokens_a_cycle"][k]) if drafts else "" for k in counts
        ]
        rows.append(cells)
    head = ["loss", "learning rate", "responses seen", "held out: mean", "gain", "p5", "gain"]
    return table(
        [
            *head,
            "its own samples: mean",
            "p5",
            "drafts: mean",
            *(f"tokens per cycle, k = {k}" for k in counts),
        ],
        rows,
    )


def reasoner_acceptance() -> str:
    rows = []
    for model in load("reasoner_acceptance")["models"]:
        for row in model["rows"]:
            lossy, (few, many) = row["lossy"], (row["lossless"][k] for k in ("4", "8"))
            spans = [interval(lossy[name], 3) for name in ("mean", "p5")]
            drafts = [f"{few['acceptance']:.3f}", f"{few['p5']:.3f}"]
            cycles = [f"{metrics['tokens_per_cycle']:.2f}" for metrics in (few, many)]
            which = f"{model['layers']} layers, {model['lines']} lines"
            rows.append([which, row["tokens"], *spans, *drafts, *cycles])
    head = [
        "model and programs",
        "tokens read",
        "lossy actor: mean",
        "p5",
        "drafts, k = 4: mean",
        "p5",
    ]
    return table([*head, "tokens per cycle, k = 4", "tokens per cycle, k = 8"], rows)


def drafter_invariance() -> str:
    result = load("drafter_invariance")
    rows = []
    for row in result["rows"]:
        kept = [f"{row['kept'][how]:.4f}" for how in ("rejection", "gumbel", "inverse")]
        cycles = [
            f"{row['cycles'][f'{how}, k = {k}']['tokens']:.2f}" for how in KINDS for k in (4, 8)
        ]
        as_dense = min(row["cycles"][f"{KINDS[1]}, k = {k}"]["as_dense"] for k in (4, 8))
        rows.append([row["tokens"], *kept, *cycles, f"{as_dense} of {result['problems']}"])
    head = [
        "tokens read",
        "accepted by rejection sampling",
        "with the same Gumbel noise",
        "with the same uniform number",
    ]
    cycles = [
        f"{how}: tokens per cycle, k = {k}"
        for how in ("rejection", "drafter-invariant")
        for k in (4, 8)
    ]
    return table([*head, *cycles, "responses identical to dense decoding"], rows)


TABLES = {
    "reasoner acceptance": reasoner_acceptance,
    "drafter invariance": drafter_invariance,
    "text shared noise": text_shared_noise,
    "text vllm": partial(text_vllm, "text_vllm"),
    "text vllm draft weights": text_draft_weights,
    "text vllm budgets": text_budgets,
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
    "text model": text_model,
    "text acceptance": text_acceptance,
    "text acceptance by length": text_lengths,
    "text tail": text_tail,
    "text reuse": text_reuse,
}
