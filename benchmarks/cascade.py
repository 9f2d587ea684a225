"""Measure lossless mode with guesses in vLLM on one GPU: the time of a sparse pass over several
tokens, and the speed relative to stock vLLM and to lossless mode without guesses.

    python benchmarks/cascade.py synthetic    # writes results/cascade_qwen3-1.7b.json
    python benchmarks/cascade.py real --model MODEL --prompts TEXT

``synthetic`` uses a random model of a published shape, with states set up without prefill
(``benchmarks/rollout.py``). Such a model's drafts and guesses are meaningless, so chance decides
which ones are kept. Every guess is kept with the same probability, which makes a pass yield a given
number of drafts on average. vLLM's synthetic rejection sampler accepts drafts with the probability
measured with the text model or with SmolLM2 (``RATES``). Drafts that no pass has made are never
accepted.
Passes over 1, 2, 4 and 8 tokens are also timed on their own. The arm ``fp8`` drafts with an 8-bit
copy of the weights, at the same acceptance rates. With ``--quantization``, vLLM quantises the
weights in all engines, also in stock vLLM.

``real`` samples continuations of a text, or answers to questions, from a given model, with real
guesses, drafts and verification. Answers end where the model ends them, and continuations have the
same number of tokens. With ``--head``, a trained head guesses too, and stock vLLM drafts with it.

Each engine runs in its own process, one after another on the same GPU. The file is written after
each engine, and engines also save their results after each point. Each call adds a run to those in
the file, and ratios compare only results of the same run. ``real`` writes
results/cascade_real_MODEL.json, where MODEL is the name of the model's folder.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    SIZES,
    add_cache_size,
    add_quantization,
    cache_size,
    clock,
    earlier_runs,
    machine,
    parse_point,
    parser,
    save,
    write,
)
from processes import EngineProcess, add_together, in_turn, told_to_start, wait_for_turn

from sparrow.decoding import DraftWeights

POINTS = ((32, 15_000), (64, 4_096))
PASS_TOKENS = (1, 2, 4, 8)
DRAFT_PAGES = 61
DRAFTS = (4, 8, 12)
"""The numbers of drafts per cycle that adaptive drafting chooses from by default."""
GUESSES = 3


@dataclass(frozen=True)
class Rates:
    """Rates at which drafts are accepted, and numbers of drafts that passes yield.

    Attributes:
        acceptance: acceptance of drafts that read 1,024 tokens, with pages selected for each token.
        shared: the same with pages selected once for four tokens.
        drafts_per_pass: the numbers of drafts per pass to measure.
    """

    acceptance: float
    shared: float
    drafts_per_pass: tuple[float, ...]


RATES = (
    Rates(0.945, 0.921, (1.5, 2.1, 2.5)),  # the text model (docs/lossless.md), yields assumed
    # SmolLM2 on sources at temperature 0.7: acceptance at 4,096 tokens from
    # cascade_shared_selection.json; drafts per pass of the arm guess3 at 2,048 to 3,072 tokens,
    # from cascade_real_smollm2.json
    Rates(0.955, 0.943, (2.27,)),
)
DRAFT_WEIGHTS: dict[str, DraftWeights] = {"lossless": "auto", "fp8": "fp8"}
"""The weights that drafts use in each arm of ``synthetic``."""
STEPS = 12
SECONDS = 1.0
"""A point is timed for at least ``STEPS`` cycles and at least ``SECONDS``."""
REPLAYS = 30
ROOM = 2 * (max(DRAFTS) + 1)
"""Tokens between the longest response and ``max_model_len``. Close to this limit, vLLM trims the
drafts of some sequences, and steps with unequal numbers of drafts run without their CUDA graph.
Earlier results had no room.
"""
TRIALS = 20_000  # simulated cycles

CYCLES = ("cycles", "cycles_with_guesses", "cycles_with_guesses_alone")
"""Counts of cycles in ``sparrow_acceptance``."""

Save = Callable[..., None]


def keep_rate(drafts: float, guesses: int) -> float:
    """Return the probability of keeping a guess that makes a pass yield ``drafts`` drafts on
    average.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        if sum(rate**i for i in range(guesses + 1)) < drafts:
            low = rate
        else:
            high = rate
    return rate


def acceptance_by_place(
    acceptance: float, rate: float, guesses: int, passes: int, drafts: int
) -> list[float]:
    """Return each draft's probability of being accepted if all earlier drafts in the cycle are
    accepted. Guesses are kept with probability ``rate``, and drafts that no pass has made are
    rejected.
    """
    draws = np.random.default_rng(0).random((TRIALS, passes, guesses)) < rate
    made = (1 + draws.cumprod(2).sum(2)).sum(1)
    filled = [float(np.mean(made > place)) for place in range(drafts)]
    return [
        acceptance * here / before if before else 0.0
        for here, before in zip(filled, [1.0, *filled], strict=False)
    ]


# --- synthetic ---


def adaptive_choices(draft_tokens: int) -> list[int]:
    """Return the numbers of drafts per cycle that adaptive drafting chooses from, without 0."""
    from sparrow.decoding import Decoding
    from sparrow.vllm.lossless.setup import draft_choices

    _, *some = draft_choices(Decoding.lossless(draft_tokens=draft_tokens))
    return some


def start_synthetic(arm: str, folder: Path, arguments: argparse.Namespace) -> Any:
    """Start an engine for an arm, as a ``rollout.Bench``."""
    from rollout import Bench

    from sparrow import SparsitySchedule
    from sparrow.decoding import Decoding

    decoding = None
    if arm != "stock":
        decoding = Decoding.lossless(
            SparsitySchedule.fixed(DRAFT_PAGES, dense_layers=()),
            draft_tokens=arguments.draft_tokens,
            guess_tokens=max(PASS_TOKENS) - 1,
            draft_weights=DRAFT_WEIGHTS[arm],
        )
    batches = [batch for batch, _ in arguments.points]
    drafts_per_cycle = [0, *adaptive_choices(arguments.draft_tokens)]
    sizes = sorted({batch * (drafts + 1) for batch in batches for drafts in drafts_per_cycle})
    return Bench(
        arguments.shape,
        "stock" if arm == "stock" else "lossless",
        str(folder),
        lossless=decoding,
        slots=max(batches),
        cudagraph_capture_sizes=sizes,
        quantization=arguments.quantization,
        **cache_size(arguments.cache_gib),
    )


def keep_some_guesses(rate: Any) -> None:
    """Make the cascade's drafter keep each guess with probability ``rate``, which is a tensor."""
    import torch

    from sparrow.vllm.lossless import cascade

    stock = cascade.CascadeDrafter._sample

    def sample(drafter: Any, logits: Any, *args: Any) -> Any:
        drawn = stock(drafter, logits, *args)
        ids = drafter._vllm.input_buffers.input_ids[: len(drawn)].view(-1, drafter.tokens)
        is_kept = torch.rand(ids.shape, device=ids.device) < rate
        is_kept[:, -1:].zero_()  # there's no guess after the last token
        return torch.where(is_kept.flatten(), ids.roll(-1, 1).flatten().long(), drawn)

    cascade.CascadeDrafter._sample = sample  # type: ignore[method-assign, assignment]


def captured(drafter: Any) -> dict[int, Any]:
    """Capture a pass with guesses for each number of tokens per sequence. Return the graphs, with
    these numbers as keys.
    """
    graphs = {}
    for tokens in PASS_TOKENS[1:]:
        drafter.tokens = tokens
        drafter._graphs.clear()
        if drafter._vllm._captures:
            drafter.capture()
        graphs[tokens] = dict(drafter._graphs[False])
    return graphs


def use_tokens(drafter: Any, graphs: dict[int, Any], tokens: int) -> None:
    """Make all later passes with guesses read this many tokens per sequence."""
    drafter.tokens = tokens
    drafter._graphs[False] = graphs[tokens]


def time_pass(drafter: Any, rows: int) -> dict[str, float]:
    """Time sparse passes over the running sequences. Return the median and the spread in ms."""
    cycle = getattr(drafter, "_cycle", None)
    times = []
    for _ in range(REPLAYS):
        if cycle is not None:
            cycle.made_R.zero_()
        began = clock()
        drafter._replay(1, rows)
        times.append(1e3 * (clock() - began))
    low, middle, high = np.percentile(times[REPLAYS // 3 :], [10, 50, 90])
    return {"ms": float(middle), "p10": float(low), "p90": float(high)}


def time_passes(
    bench: Any, arguments: argparse.Namespace, keep: Save, graphs: dict[int, Any]
) -> None:
    """Time passes over one token per sequence without guesses, and over several with guesses."""
    from lossless import abandon, begin, hold, runner

    from sparrow.vllm.lossless.plan import Guessed

    drafter = runner(bench).speculator.drafter
    for batch, length in arguments.points:
        for tokens in PASS_TOKENS:
            if tokens == 1:
                hold(bench, arguments.draft_tokens)
                timed = drafter._plain
            else:
                hold(bench, Guessed(arguments.draft_tokens))
                timed = drafter._guessing
                use_tokens(timed, graphs, tokens)
            begin(bench, [length] * batch)
            keep("passes", batch=batch, length=length, tokens=tokens, **time_pass(timed, batch))
            abandon(bench, batch)


def cycles(bench: Any, batch: int, length: int) -> dict[str, float]:
    """Time cycles in a given state."""
    from lossless import abandon, begin, timed

    begin(bench, [length] * batch)
    found = timed(bench, [length] * batch, STEPS, SECONDS)
    abandon(bench, batch)
    return found


def time_without_guesses(
    bench: Any, point: tuple[int, int], drafts_per_cycle: Sequence[int], keep: Save
) -> None:
    """Time cycles without guesses in a state."""
    from lossless import hold, runner

    batch, length = point
    conditional = runner(bench).rejection_sampler.synthetic_conditional_rates
    for rates, drafts in product(RATES, drafts_per_cycle):
        conditional.fill_(rates.acceptance)
        hold(bench, drafts)
        keep(
            "points",
            batch=batch,
            length=length,
            drafts=drafts,
            acceptance=rates.acceptance,
            **cycles(bench, batch, length),
        )


def time_with_guesses(
    bench: Any, point: tuple[int, int], drafts_per_cycle: Sequence[int], keep: Save, rate: Any
) -> None:
    """Time cycles with guesses in a state, at each number of drafts per pass."""
    from lossless import hold, runner

    from sparrow.vllm.lossless.plan import Guessed
    from sparrow.vllm.lossless.setup import passes_of

    batch, length = point
    conditional = runner(bench).rejection_sampler.synthetic_conditional_rates
    asked = [(rates.shared, per_pass) for rates in RATES for per_pass in rates.drafts_per_pass]
    for (acceptance, per_pass), drafts in product(asked, drafts_per_cycle):
        rate.fill_(keep_rate(per_pass, GUESSES))
        passes = passes_of(drafts)
        by_place = acceptance_by_place(acceptance, float(rate), GUESSES, passes, len(conditional))
        conditional.copy_(conditional.new_tensor(by_place))
        hold(bench, Guessed(drafts))
        bench.llm.collective_rpc("sparrow_counters")
        found = cycles(bench, batch, length)
        counts = bench.llm.collective_rpc("sparrow_counters")[0]
        yielded = (counts["drafted"] - counts["guessed"]) / max(counts["passes"], 1)
        keep(
            "points",
            batch=batch,
            length=length,
            drafts=drafts,
            acceptance=acceptance,
            guesses=GUESSES,
            passes=passes,
            asked_per_pass=per_pass,
            drafts_per_pass=yielded,
            **found,
        )


def synthetic(arguments: argparse.Namespace, keep: Save) -> None:
    import torch
    from lossless import runner

    arm = arguments.child
    drafts_per_cycle = adaptive_choices(arguments.draft_tokens)
    rate = torch.zeros((), device="cuda" if torch.cuda.is_available() else "cpu")
    keep_some_guesses(rate)
    began = time.monotonic()
    folder = arguments.out.parent  # shared by all arms, as vLLM caches compiled code by its path
    bench = start_synthetic(arm, folder, arguments)
    for _ in range(2):  # compile the remaining kernels
        bench.start([256] * 8, [4] * 8, None)
        bench.finish()
    keep(None, start_s=time.monotonic() - began, kv_tokens=bench.kv_tokens)
    wait_for_turn()

    if arm == "stock":
        for batch, length in arguments.points:
            keep("points", batch=batch, length=length, **cycles(bench, batch, length))
        return
    with torch.inference_mode():  # as in the engine, since passes change its tensors
        drafter = runner(bench).speculator.drafter._guessing
        graphs = captured(drafter)
        time_passes(bench, arguments, keep, graphs)
        use_tokens(drafter, graphs, GUESSES + 1)
    for point in arguments.points:
        time_without_guesses(bench, point, drafts_per_cycle, keep)
        time_with_guesses(bench, point, drafts_per_cycle, keep, rate)


# --- real ---


def real_prompts(tokenizer: Any, path: Path, count: int, context: int) -> list[list[int]]:
    """Return the token ids of the prompts. A JSON Lines file holds questions, which go through the
    chat template. Any other file is plain text, cut into prompts of ``context`` tokens.
    """
    text = path.read_text("utf-8", errors="ignore")
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines()[:count]]
        chats = [
            [{"role": "user", "content": row.get("question") or row["prompt"]}] for row in rows
        ]
        written = [
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            for chat in chats
        ]
        return [tokenizer(each, add_special_tokens=False).input_ids for each in written]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) >= context, f"{path} has {len(ids)} tokens, fewer than a prompt of {context}"
    starts = np.linspace(0, len(ids) - context, count).astype(int)
    return [ids[at : at + context] for at in starts]


STOCK_ARMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 4,
        }
    },
    "eagle3": {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}},
}
"""vLLM options for the arms of ``real`` without Sparrow: dense decoding, and vLLM's own drafts from
history or from a head.
"""
LOSSLESS_ARMS: dict[str, dict[str, Any]] = {
    "adaptive": {"adapt_draft_tokens": True},
    "guess3": {"adapt_draft_tokens": False, "guess_tokens": 3},
    "guess7": {"adapt_draft_tokens": False, "guess_tokens": 7},
    "adaptive_guess3": {"adapt_draft_tokens": True, "guess_tokens": 3},
    "head_guess3": {"adapt_draft_tokens": False, "guess_tokens": 3, "guess_lookup_min": 0},
    "adaptive_head_guess3": {"adapt_draft_tokens": True, "guess_tokens": 3, "guess_lookup_min": 0},
    "mixed2_guess3": {"adapt_draft_tokens": False, "guess_tokens": 3, "guess_lookup_min": 2},
    "mixed4_guess3": {"adapt_draft_tokens": False, "guess_tokens": 3, "guess_lookup_min": 4},
    "adaptive_mixed4_guess3": {
        "adapt_draft_tokens": True,
        "guess_tokens": 3,
        "guess_lookup_min": 4,
    },
}
"""Lossless settings for the other arms of ``real``. An arm that isn't adaptive drafts and guesses
in every cycle. In a ``mixed`` arm, history guesses where at least so many tokens repeat, and the
head elsewhere.
"""
WITH_HEAD = (
    "eagle3",
    "head_guess3",
    "adaptive_head_guess3",
    "mixed2_guess3",
    "mixed4_guess3",
    "adaptive_mixed4_guess3",
)
"""Arms that need ``--head``."""


def real_decoding(arm: str, head: Path | None = None) -> Any:
    """Return an arm's settings of lossless mode, or None if it runs without Sparrow."""
    from sparrow import SparsitySchedule
    from sparrow.decoding import Decoding

    if arm in STOCK_ARMS:
        return None
    settings = dict(LOSSLESS_ARMS[arm])
    if arm in WITH_HEAD:
        settings["guess_head"] = str(head)
    schedule = SparsitySchedule.fixed(DRAFT_PAGES, dense_layers=())
    return Decoding.lossless(schedule, draft_tokens=max(DRAFTS), **settings)


def real(arguments: argparse.Namespace, keep: Save) -> None:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from sparrow.vllm import plugin

    decoding = real_decoding(arguments.child, arguments.head)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts = [
        (path, real_prompts(tokenizer, path, arguments.sequences, arguments.context))
        for path in arguments.prompts
    ]
    longest = max(len(prompt) for _, some in prompts for prompt in some)
    options: dict[str, Any] = json.loads(arguments.options)
    options |= STOCK_ARMS.get(arguments.child, {})
    if decoding is not None:
        plugin.register()
        options["additional_config"] = {"sparrow": decoding.to_dict()}
    if arguments.child == "eagle3":
        eagle3 = {**options["speculative_config"], "model": str(arguments.head)}
        options["speculative_config"] = eagle3
    began = time.monotonic()
    llm = LLM(
        str(arguments.model),
        skip_tokenizer_init=True,
        max_model_len=longest + arguments.max_new_tokens + ROOM,
        max_num_seqs=arguments.sequences,
        enable_prefix_caching=False,
        **options,
    )
    keep(None, start_s=time.monotonic() - began)
    wait_for_turn()
    for path, some in prompts:
        for temperature in arguments.temperatures:
            for seed in range(1 + arguments.repeats):
                wanted = [
                    SamplingParams(
                        temperature=temperature,
                        max_tokens=arguments.max_new_tokens,
                        ignore_eos=path.suffix != ".jsonl",
                        detokenize=False,
                        seed=1_000 * seed + i,
                    )
                    for i in range(len(some))
                ]
                found = time_sampling(llm, some, wanted, decoding)
                if seed > 0:  # the first pass warms up
                    keep("points", text=path.name, temperature=temperature, **found)


def time_sampling(
    llm: Any, prompts: Sequence[Sequence[int]], wanted: Sequence[Any], decoding: Any
) -> dict[str, Any]:
    """Time the sampling of one response per prompt, and return its speed. In lossless mode, also
    return how many drafts were made and accepted, and, if their number is adaptive, how many cycles
    made each choice.
    """
    if decoding is not None:
        llm.collective_rpc("sparrow_counters")
        llm.collective_rpc("sparrow_acceptance")
    began = clock()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False
    )
    seconds = clock() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    found: dict[str, Any] = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
    }
    if decoding is None:
        return found

    counts = llm.collective_rpc("sparrow_counters")[0]
    told = llm.collective_rpc("sparrow_acceptance")[0]
    steps = counts["emitted"] - counts["accepted"]
    found["tokens_per_cycle"] = counts["emitted"] / max(steps, 1)
    drafts = sum(each["drafts"] for each in told["bins"])
    total = sum(each["drafts"] * each["mean"] for each in told["bins"])
    if drafts:  # guesses without a sparse pass have no acceptance by the actor
        found["acceptance"] = total / drafts
    if decoding.guess_tokens:
        drawn = counts["drafted"] - counts["guessed"]
        found["drafts_per_pass"] = drawn / max(counts["passes"], 1)
        found["passes_per_cycle"] = counts["passes"] / max(steps, 1)
    if decoding.adapt_draft_tokens:  # cycles by number of drafts
        found["choices"] = {name: told[name] for name in CYCLES if name in told}
    return found


# --- processes ---

ARMS = {
    "synthetic": ("stock", *DRAFT_WEIGHTS),
    "real": (*STOCK_ARMS, *LOSSLESS_ARMS),
}
RUN = {"synthetic": synthetic, "real": real}


def saving(out: Path) -> Save:
    """Return a function that adds a row to one of the result's lists, or adds values to the result
    itself. Each call also writes the result to the file.
    """
    result: dict[str, Any] = {"points": [], "finished": False}
    began = time.monotonic()

    def keep(part: str | None, **row: Any) -> None:
        if part is None:
            result.update(row)
        else:
            result.setdefault(part, []).append(row)
        write(out, result)
        print(f"{time.monotonic() - began:6.1f} s  {part or ''} {json.dumps(row)}", flush=True)

    return keep


def again(arguments: argparse.Namespace) -> Iterator[str]:
    """Return the command line for an engine's process, up to the engine's name and file."""
    yield from (Path(__file__).name, arguments.part)
    if arguments.part == "synthetic":
        yield from ("--shape", arguments.shape, "--points")
        yield from (f"{batch}x{length}" for batch, length in arguments.points)
        yield from ("--draft-tokens", str(arguments.draft_tokens))
        if arguments.cache_gib is not None:
            yield from ("--cache-gib", str(arguments.cache_gib))
        if arguments.quantization is not None:
            yield from ("--quantization", arguments.quantization)
        return
    yield from ("--model", str(arguments.model.resolve()), "--options", arguments.options)
    yield from ("--prompts", *(str(path.resolve()) for path in arguments.prompts))
    yield from ("--temperatures", *map(str, arguments.temperatures))
    yield from ("--sequences", str(arguments.sequences), "--context", str(arguments.context))
    yield from ("--max-new-tokens", str(arguments.max_new_tokens))
    yield from ("--repeats", str(arguments.repeats))
    if arguments.head is not None:
        yield from ("--head", str(arguments.head.resolve()))


def measure(arguments: argparse.Namespace) -> None:
    import vllm

    if arguments.part == "synthetic":
        out, result = earlier_runs(arguments.out, "cascade", arguments.shape)
    else:
        out, result = earlier_runs(arguments.out, "cascade_real", arguments.model.name)
    engines: dict[str, Any] = {}
    run: dict[str, Any] = {"gpu": machine(), "vllm": vllm.__version__}
    if getattr(arguments, "quantization", None) is not None:
        run["quantization"] = arguments.quantization
    result["runs"].append(run | {"engines": engines})
    head = getattr(arguments, "head", None)
    arms = arguments.arms or [
        arm for arm in ARMS[arguments.part] if head is not None or arm not in WITH_HEAD
    ]
    until = time.time() + arguments.deadline
    with tempfile.TemporaryDirectory() as folder:

        def start(arm: str) -> EngineProcess:
            written = Path(folder) / f"{arm}.json"
            command = [*again(arguments), "--child", arm, "--out", str(written)]
            log = out.with_name(f"{out.stem}_{arm}.log")
            return EngineProcess(command, written, log, os.environ)

        for arm, found in in_turn(arms, start, until, getattr(arguments, "together", 1)):
            engines[arm] = found
            save(out, result)
            for row in found["points"]:
                print(json.dumps({"arm": arm, **row}), flush=True)
            for row in found.get("passes", ()):
                print(json.dumps({"arm": arm, "pass": row}), flush=True)


def main() -> None:
    options = parser(__doc__)
    names = ", ".join(WITH_HEAD)
    parts = options.add_subparsers(dest="part", required=True)
    for part in RUN:
        each = parts.add_parser(part)
        each.add_argument(
            "--arms", nargs="+", help="the engines to run, in this order; by default, all"
        )
        each.add_argument(
            "--deadline", type=float, default=280.0, help="time limit for the whole run, in seconds"
        )
        each.add_argument("--out", type=Path, help="the JSON file to add the run to")
        each.add_argument("--child", help=argparse.SUPPRESS)
        if part == "synthetic":
            each.add_argument("--shape", choices=SIZES, default="qwen3-1.7b")
            each.add_argument("--points", nargs="+", type=parse_point, default=POINTS)
            each.add_argument(
                "--draft-tokens",
                type=int,
                default=max(DRAFTS),
                help="the most drafts per cycle; about a third and two thirds are measured too",
            )
            add_cache_size(each)
            add_quantization(each)
            continue
        each.add_argument("--model", type=Path, required=True, help="a folder with a checkpoint")
        each.add_argument(
            "--prompts",
            type=Path,
            nargs="+",
            required=True,
            help="texts to continue, or .jsonl files with fields `question` or `prompt`",
        )
        each.add_argument("--temperatures", type=float, nargs="+", default=[0.7])
        each.add_argument("--sequences", type=int, default=32)
        each.add_argument(
            "--context",
            type=int,
            default=2048,
            help="tokens per prompt, if prompts come from a text",
        )
        each.add_argument("--max-new-tokens", type=int, default=1024)
        each.add_argument(
            "--repeats", type=int, default=2, help="number of timed passes over the prompts"
        )
        each.add_argument("--options", default="{}", help="more vLLM options, as JSON")
        add_together(each, "--options")
        each.add_argument(
            "--head", type=Path, help="an EAGLE-3 head for the model, for the arms " + names
        )
    arguments = options.parse_args()
    if set(arguments.arms or ()) & {*WITH_HEAD} and arguments.head is None:
        options.error(f"the arms {names} need --head")

    if arguments.child is None:
        measure(arguments)
        return
    told_to_start()
    keep = saving(arguments.out)
    RUN[arguments.part](arguments, keep)
    keep(None, finished=True)


if __name__ == "__main__":
    main()
