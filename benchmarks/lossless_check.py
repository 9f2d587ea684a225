"""Check on a GPU that lossless mode in vLLM samples from the dense model's distribution.

    python benchmarks/lossless_check.py equal [--dtype bfloat16] [--tensor-parallel 1] \\
        [--draft-weights fp8] [--cache fp8] [--mixture] \\
        [--guess-tokens 3 [--head [--lookup-min 2]]] [--vary] --out FILE
    python benchmarks/lossless_check.py samples [--count 1000000] \\
        [--guess-tokens 2 [--head [--lookup-min 2]]] [--vary] --out samples.json
    python benchmarks/lossless_check.py invariant [--dtype bfloat16] --out invariant.json

All models are random, and drafts are accepted or rejected as in real use. With ``--head``, guesses
come from a random EAGLE-3 head instead of from history, and with ``--lookup-min``, from both.

- ``equal`` compares log-probs with transformers in float32, using the yardstick of
  ``vllm_check.py``. It also compares greedy tokens with stock vLLM's. Where they first differ, it
  reports how far apart the two tokens' log-probs are in the float32 model. With ``--cache fp8``,
  stock vLLM gets an fp8 cache too, and the yardstick is stock vLLM's error relative to float32.
- ``samples`` counts how often each continuation of a prompt is sampled at temperature 1, with a
  small vocabulary, and compares the counts with transformers' float32 probabilities (chi-square).
- ``invariant`` compares the tokens sampled by ``drafter_invariant`` with those sampled by stock
  vLLM with the same seed, up to the first difference. The yardstick is stock vLLM with fewer
  concurrent sequences, which also rounds differently. Without the option, lossless decoding differs
  right away.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import add_draft_weights, parser, qwen3, small_qwen3, write_head
from fp8_check import sampled
from scipy import stats
from transformers import Qwen3ForCausalLM
from vllm import LLM, SamplingParams
from vllm_check import (
    SAMPLED,
    UNBOUNDED,
    VARIANTS,
    gib_asleep,
    judged,
    load,
    notes,
    options,
    prompts,
    random_model,
)

from sparrow import SparsitySchedule
from sparrow.decoding import Decoding
from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm import VLLMEngine
from sparrow.rollout import Sampling
from sparrow.vllm.lossless.chooser import DraftChooser
from sparrow.vllm.lossless.plan import Choice

GREEDY = Sampling(max_new_tokens=192, temperature=0.0, top_n=0)
DRAFTS, DRAFT_TOKENS = SparsitySchedule.fixed(24, dense_layers=()), 4
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
VOCAB, TOKENS, PROMPT, AT_ONCE = 6, 3, 150, 20_000


def partings(truth: HFEngine, ours: Sequence[Any], stock: Sequence[Any]) -> list[dict[str, float]]:
    """For each pair of responses that differ, return the position of the first difference, and how
    far apart the two tokens' log-probs are in the float32 model.
    """
    scored = [truth.score(rollouts, UNBOUNDED, 1.0) for rollouts in (ours, stock)]
    differences = []
    for a, b, a_score, b_score in zip(ours, stock, *scored, strict=True):
        differ = np.flatnonzero(a.response_ids != b.response_ids)
        if len(differ):
            at = int(differ[0])
            differences.append(
                {"token": at, "gap": float(abs(a_score.logprobs[at] - b_score.logprobs[at]))}
            )
    return differences


def drafting(engine: VLLMEngine) -> dict[str, Any]:
    """Return the engine's counters without the long list of all choices it has made."""
    counters = engine.counters().to_dict()
    counters["drafts"].pop("choices", None)
    return counters


def random_head(arguments: argparse.Namespace, model: Path) -> str | None:
    """Write a random head for the model in this folder, and return the head's folder. Return None
    without ``--head``.
    """
    if not arguments.head:
        return None
    config = json.loads((model / "config.json").read_text())
    return str(write_head(config, model / "head"))


def equal(arguments: argparse.Namespace) -> None:
    note = notes(arguments.out, dtype=arguments.dtype)
    if arguments.vary:
        vary_drafts()
    alone = arguments.tensor_parallel == 1
    shared = options(
        arguments.dtype,
        tensor_parallel_size=arguments.tensor_parallel,
        compilation_config=GRAPHS,
        kv_cache_dtype=arguments.cache,
    )

    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name) / "a", Path(name) / "b"
        model, new_weights = (
            random_model(path, arguments.dtype, small_qwen3(arguments.mixture), seed)
            for seed, path in enumerate((folder, other))
        )
        decoding = Decoding.lossless(
            DRAFTS,
            draft_tokens=DRAFT_TOKENS,
            adapt_draft_tokens=arguments.vary,
            draft_weights=arguments.draft_weights,
            guess_tokens=arguments.guess_tokens,
            guess_head=random_head(arguments, folder),
            guess_lookup_min=arguments.lookup_min,
        )
        truths = [
            HFEngine(load(path, "float32").cuda(), UNBOUNDED, eos_ids=[])
            for path in (folder, other)
        ]
        rounded = [HFEngine(m.cuda(), UNBOUNDED, eos_ids=[]) for m in (model, new_weights)]

        def judge(label: str, rollouts: Sequence[Any], weights: int = 0) -> None:
            scores = (
                e[weights].score(rollouts, UNBOUNDED, SAMPLED.temperature)
                for e in (truths, rounded)
            )
            note(label, judged(rollouts, *scores))

        llm = LLM(
            str(folder), skip_tokenizer_init=True, **shared
        )  # kept alive to the end, because its graphs use vLLM's memory pool
        parameters = SamplingParams(temperature=0.0, max_tokens=192, detokenize=False)
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in prompts()], parameters, use_tqdm=False
        )
        if arguments.cache != "auto":
            judge("stock vLLM with this cache", sampled(llm))

        engine = VLLMEngine(str(folder), decoding, **{**shared, "enable_sleep_mode": alone})
        note("engine", engine.describe())
        engine.counters()
        greedy = engine.generate(prompts(), GREEDY)
        stock = [
            replace(r, response_ids=np.asarray(o.outputs[0].token_ids, dtype=r.response_ids.dtype))
            for r, o in zip(greedy, outputs, strict=True)
        ]
        agreed = [
            np.cumprod(a.response_ids == b.response_ids) for a, b in zip(greedy, stock, strict=True)
        ]
        note(
            "greedy tokens before the first that is not stock's",
            f"{sum(a.sum() for a in agreed)} of {8 * 192}",
        )
        note("partings from stock", partings(truths[0], greedy, stock))
        engine.drop_prefixes()  # a cached prompt is rounded differently from a prefilled one
        first = engine.generate(prompts(), SAMPLED)
        note("counters", drafting(engine))
        judge("sampled", first)
        engine.drop_prefixes()
        again = engine.generate(prompts(), SAMPLED)
        same = [
            np.array_equal(a.response_ids, b.response_ids)
            for a, b in zip(first, again, strict=True)
        ]
        note("responses that a seed repeats", f"{sum(same)} of {len(same)}")
        if alone:
            note("GiB in use asleep", gib_asleep(engine))
        engine.drop_prefixes()
        judge("sampled after sleep", engine.generate(prompts(), SAMPLED))
        engine.update_weights(new_weights.named_parameters())
        judge("sampled with new weights", engine.generate(prompts(), SAMPLED), weights=1)
        engine.update_weights(model.named_parameters())
        judge("sampled with the old weights again", engine.generate(prompts(), SAMPLED))
        if alone:
            engine.drop_prefixes()
            engine.llm.sleep(level=2)  # this drops the weights
            engine.llm.wake_up()
            engine.update_weights(model.named_parameters())
            judge("sampled after sleep at level 2", engine.generate(prompts(), SAMPLED))
        note("counters after", drafting(engine))
        engine.close()
        variants = VARIANTS | {"compiled": dict(compilation_config=None)}
        for label, more in variants.items() if alone else ():
            engine = VLLMEngine(str(folder), decoding, **{**shared, **more})
            judge(f"sampled, {label}", engine.generate(prompts(), SAMPLED))
            note(f"preempted, {label}", engine.counters().preemptions)
            engine.close()
        if not alone:
            # otherwise the process would wait for its workers
            llm.llm_engine.engine_core.shutdown()


def invariant(arguments: argparse.Namespace) -> None:
    note = notes(arguments.out, dtype=arguments.dtype)
    shared = options(arguments.dtype, compilation_config=GRAPHS, enable_prefix_caching=False)
    settings = [
        SamplingParams(temperature=t, seed=seed, max_tokens=192, ignore_eos=True, detokenize=False)
        for t, seed in ((1.0, 1), (0.7, 2))
    ]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]

    def tokens(llm: LLM) -> list[np.ndarray]:
        outputs = [llm.generate(asked, each, use_tqdm=False) for each in settings]
        return [np.asarray(o.outputs[0].token_ids) for some in outputs for o in some]

    def compare(label: str, stock: Sequence[np.ndarray], ours: Sequence[np.ndarray]) -> None:
        common = [int(np.cumprod(a == b).sum()) for a, b in zip(stock, ours, strict=True)]
        same = sum(n == len(a) for n, a in zip(common, stock, strict=True))
        note(
            label,
            {
                "responses": len(stock),
                "same": same,
                "tokens": sum(map(len, stock)),
                "common": sum(common),
            },
        )

    with tempfile.TemporaryDirectory() as name:
        random_model(Path(name), arguments.dtype, small_qwen3(arguments.mixture))
        llm = LLM(name, skip_tokenizer_init=True, **shared)
        stock = tokens(llm)
        compare("stock again", stock, tokens(llm))
        few = LLM(name, skip_tokenizer_init=True, **{**shared, "max_num_seqs": 2})
        compare("stock, 2 sequences at a time", stock, tokens(few))
        for k, own in ((4, True), (12, True), (4, False)):
            drafts = Decoding.lossless(
                DRAFTS, draft_tokens=k, adapt_draft_tokens=False, drafter_invariant=own
            )
            engine = VLLMEngine(name, drafts, **shared)
            engine.counters()
            compare(
                f"{k} drafts" if own else f"{k} drafts, without drafter_invariant",
                stock,
                tokens(engine.llm),
            )
            note(
                f"counters, {k} drafts" + (", without" if not own else ""),
                engine.counters().to_dict(),
            )
            engine.close()


def enumerated(model: Qwen3ForCausalLM, prompt: Sequence[int]) -> np.ndarray:
    """Return the probability of every continuation, ``[VOCAB ** TOKENS]``."""
    p, written = np.ones(1), np.zeros((1, 0), int)
    for _ in range(TOKENS):
        rows = torch.tensor([[*prompt, *row] for row in written], device=model.device)
        with torch.no_grad():
            log_p = torch.log_softmax(model(rows).logits[:, -1].double(), -1)
        p = (p[:, None] * log_p.exp().cpu().numpy()).reshape(-1)
        written = np.concatenate(
            [written.repeat(VOCAB, 0), np.tile(np.arange(VOCAB), len(written))[:, None]], 1
        )
    return p


def vary_drafts() -> None:
    """Replace adaptive drafting's choice with a random one, so that cycles of all kinds occur.
    Otherwise, vLLM would soon stop drafting, because it isn't worth it for so small a model.
    """
    rng = np.random.default_rng(0)

    def choose(self: DraftChooser, *_: Any) -> Choice:
        return self.choices[rng.integers(len(self.choices))]

    DraftChooser.choose = choose  # type: ignore[method-assign, assignment]


def drawn(
    folder: str, decoding: dict[str, Any], process: int, seeds: range
) -> tuple[np.ndarray, dict[str, int]]:
    """Sample a continuation for each seed. Return how often each one occurred, and the engine's
    counters.
    """
    os.environ["VLLM_PORT"] = str(
        41_000 + 50 * process
    )  # otherwise, engines starting at the same time could pick the same free port
    if decoding["adapt_draft_tokens"]:
        vary_drafts()
    cuda = torch.cuda.is_available()
    machine = (
        {"max_num_seqs": 1024}
        if cuda
        else {"max_num_seqs": 256, "block_size": 32, "enforce_eager": True}
    )
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        additional_config={"sparrow": decoding},
        max_model_len=256,
        kv_cache_memory_bytes=2**30 if cuda else 2**26,
        gpu_memory_utilization=0.05,
        **machine,
    )
    counts = np.zeros(VOCAB**TOKENS, int)
    for begin in range(0, len(seeds), AT_ONCE):
        wanted = [
            SamplingParams(
                temperature=1.0, max_tokens=TOKENS, seed=seed, ignore_eos=True, detokenize=False
            )
            for seed in seeds[begin : begin + AT_ONCE]
        ]
        outputs = llm.generate(
            [{"prompt_token_ids": sample_prompt()}] * len(wanted), wanted, use_tqdm=False
        )
        code = np.array([o.outputs[0].token_ids for o in outputs]) @ (
            VOCAB ** np.arange(TOKENS - 1, -1, -1)
        )
        counts += np.bincount(code, minlength=VOCAB**TOKENS)
    return counts, llm.collective_rpc("sparrow_counters")[0]


def sample_prompt() -> list[int]:
    return np.random.default_rng(1).integers(0, VOCAB, PROMPT).tolist()


def samples(arguments: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    note = notes(arguments.out)
    torch.manual_seed(3)
    config = qwen3(
        "qwen3-1.7b",
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_norm.weight.fill_(2.0)
                layer.self_attn.k_norm.weight.fill_(2.0)
            model.lm_head.weight.normal_(0.0, 0.05)  # so that no continuation is too rare
        # With 10^6 samples, bfloat16's coarser rounding would show.
        model.to(torch.float16 if cuda else torch.float32).save_pretrained(folder)
        truth = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        expected = enumerated(truth, sample_prompt())
        kept = SparsitySchedule(top_k=(1,), bin_tokens=100, recent_pages=1, dense_layers=())
        decoding = Decoding.lossless(
            kept,
            draft_tokens=TOKENS - 1,
            adapt_draft_tokens=arguments.vary,
            guess_tokens=arguments.guess_tokens,
            guess_head=random_head(arguments, Path(folder)),
            guess_lookup_min=arguments.lookup_min,
        ).to_dict()
        share = -(-arguments.count // arguments.processes)
        parts = [
            range(10**6 + i, 10**6 + min(i + share, arguments.count))
            for i in range(0, arguments.count, share)
        ]
        with ProcessPoolExecutor(len(parts), mp_context=get_context("spawn")) as pool:
            results = list(
                pool.map(
                    drawn, [folder] * len(parts), [decoding] * len(parts), range(len(parts)), parts
                )
            )
    counts = np.sum([counts for counts, _ in results], axis=0)
    note(
        "counters",
        {name: sum(of[name] for _, of in results) for name in ("drafted", "accepted", "emitted")},
    )
    test = stats.chisquare(counts, expected * counts.sum() / expected.sum())
    note("samples", int(counts.sum()))
    note("chi-square", float(test.statistic))
    note("degrees of freedom", len(counts) - 1)
    note("fewest expected", float((expected * counts.sum()).min()))
    note("p", float(test.pvalue))


def main() -> None:
    command = parser(__doc__)
    command.add_argument("what", choices=["equal", "samples", "invariant"])
    command.add_argument("--dtype", default="bfloat16")
    command.add_argument("--tensor-parallel", type=int, default=1)
    add_draft_weights(command)
    command.add_argument(
        "--cache", choices=["auto", "fp8"], default="auto", help="dtype of the KV cache (for equal)"
    )
    command.add_argument(
        "--mixture",
        action="store_true",
        help="check a mixture of experts (for equal and invariant)",
    )
    command.add_argument(
        "--guess-tokens", type=int, default=0, help="guesses per pass (for equal and samples)"
    )
    command.add_argument(
        "--head",
        action="store_true",
        help="take guesses from a random EAGLE-3 head instead of history (for equal and samples)",
    )
    command.add_argument(
        "--lookup-min",
        type=int,
        default=0,
        help="with --head, take guesses from history where so many tokens repeat (for equal and "
        "samples)",
    )
    command.add_argument(
        "--vary",
        action="store_true",
        help="randomly change the number of drafts, and how guesses are used, between cycles (for "
        "equal and samples)",
    )
    command.add_argument("--count", type=int, default=1_000_000)
    command.add_argument(
        "--processes",
        type=int,
        default=8,
        help="number of processes to sample in, each with its own engine on the same GPU",
    )
    command.add_argument("--out", type=Path, required=True)
    arguments = command.parse_args()
    if arguments.what == "invariant" and (arguments.guess_tokens or arguments.vary):
        command.error(
            "invariant does not support --guess-tokens or --vary; leave them out, or check "
            "equal or samples"
        )
    if arguments.head and not arguments.guess_tokens:
        command.error("--head needs --guess-tokens, such as 3")
    if arguments.lookup_min and not arguments.head:
        command.error("--lookup-min needs --head")
    if arguments.what != "equal" and (arguments.cache, arguments.draft_weights) != ("auto", "auto"):
        command.error(
            f"{arguments.what} does not support --cache or --draft-weights; leave them out, "
            "or check equal"
        )
    {"equal": equal, "samples": samples, "invariant": invariant}[arguments.what](arguments)


if __name__ == "__main__":
    main()
