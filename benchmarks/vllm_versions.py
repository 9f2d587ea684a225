"""Check Sparrow in one version of vLLM on a GPU: exactness, and speed against stock vLLM.

    python benchmarks/vllm_versions.py --out benchmarks/results/vllm_versions/0.33.0.json

Run it once with each vLLM version in the table in docs/vllm.md. Models are random, so nothing is
downloaded. Each part runs in its own process. If a part fails, the last error it printed is
recorded.

- ``lossy`` and ``lossless`` summarise the results of ``vllm_check.py`` and ``lossless_check.py
  equal``. Log-prob errors are relative to transformers in float32, and are compared with the errors
  of transformers in the same 16-bit dtype. Greedy tokens are compared with stock vLLM's. Both
  checks run eagerly, with CUDA graphs, and with ``torch.compile``.
- ``audit``: ``sparrow audit`` on lossless mode, lossy mode and stock vLLM's own n-gram speculation,
  with the bundled reasoner. Drafts and lossy steps read few pages.
- ``cached``: ``sparrow audit`` on lossless mode with a fixed number of drafts, for prompts that are
  cached except for their last token. By itself, vLLM gives such requests drafts that nobody made.
- ``speed``: decode steps with Qwen3-1.7B's shape and 15,000 cached tokens per sequence, in stock
  vLLM, with the published schedule, and with drafts of which 95 % are accepted, as in
  ``lossless.py``. Stock vLLM of the same version is timed on the same GPU in the same run.

With ``--mixture``, all parts except ``speed`` run on a mixture of experts. The mixture that gets
audited is random and has the reasoner's tokenizer. For the speed of a mixture, see
``benchmarks/mixture.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import REASONER, last_error, parser, read_result, save

HERE = Path(__file__).parent
SHAPE = "qwen3-1.7b"
LENGTH = 15_000
DRAFT_PAGES = 61
DRAFT_TOKENS = 12
ACCEPTANCE = 0.95
SETTLE_S = 4.0
TIMED_S = 6.0
VARIANTS = ("stock", "sparse", "lossless")
PARTS = ("lossy", "lossless", "audit", "cached", "speed")
PATIENCE_S = 540

FEW_PAGES = {"top_k": [4], "bin_tokens": 2000, "page_size": 16, "dense_layers": [0]}
"""The schedule for drafts and lossy steps in an audit: so sparse that a lossy actor gets caught."""
AUDITED = (
    "gpu_memory_utilization=0.1,kv_cache_memory_bytes=2147483648,max_model_len=1024,"
    "max_num_seqs=256"
)
NGRAM = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4}'
TASK = "trace:lines=24"
AUDIT = ["-m", "sparrow", "audit", "--precision", "bf16", "--count", "768"]
CACHED_PROMPTS = 16  # each sampled many times, so that all but the first samples find it cached
CACHE_BLOCK = 16  # tokens; vLLM caches prompts in blocks of this size

LOSSY_PARTS = {"eager": "eager", "graphs": "sparse", "compiled": "compiled"}
LOSSLESS_PARTS = {
    "eager": "sampled, eager",
    "graphs": "sampled",
    "compiled": "sampled, compiled",
}
"""Ways to run an engine, and what their results are called in the two checks."""


def speed(variant: str, batch: int) -> dict[str, Any]:
    """Time decode steps in this process. Return tokens per second and a description of what was
    run.
    """
    import torch
    import vllm
    from lossless import accept, hold, point, scheduler
    from rollout import PROMPT, Bench

    from sparrow import SparsitySchedule
    from sparrow.decoding import Decoding
    from sparrow.vllm.lossless.chooser import DraftChooser

    decoding = None
    if variant == "lossless":
        drafts = SparsitySchedule.fixed(DRAFT_PAGES, dense_layers=())
        decoding = Decoding.lossless(drafts, draft_tokens=DRAFT_TOKENS)

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(SHAPE, variant, folder, lossless=decoding)
        for prefilled in (1, 8):  # compile the remaining kernels
            bench.start([PROMPT] * prefilled, [4] * prefilled, None)
            bench.finish()

        if decoding is None:
            bench.use("published")
        else:
            accept(bench, ACCEPTANCE)
            hold(bench, 0)
        before = point(bench, batch, LENGTH, 0.0)["tokens_per_s"]
        if decoding is not None:
            scheduler(bench).chooser = DraftChooser(scheduler(bench).chooser.choices)
            before = point(bench, batch, LENGTH, SETTLE_S, before)["tokens_per_s"]
        measured = point(bench, batch, LENGTH, TIMED_S, before)

    return {
        "vllm": vllm.__version__,
        "gpu": torch.cuda.get_device_name(),
        "batch": batch,
        "length": LENGTH,
        **measured,
    }


def lossy_findings(result: Mapping[str, Any]) -> dict[str, Any]:
    """Condense ``vllm_check.py``'s result for each way of running an engine."""
    found: dict[str, Any] = {name: result.get(part) for name, part in LOSSY_PARTS.items()}
    found["dense"] = result.get("unbounded")
    return found


def lossless_findings(result: Mapping[str, Any]) -> dict[str, Any]:
    """Condense ``lossless_check.py equal``'s result for each way of running an engine."""
    found: dict[str, Any] = {name: result.get(part) for name, part in LOSSLESS_PARTS.items()}
    found["new weights"] = result.get("sampled with new weights")
    found["greedy"] = result.get("greedy tokens before the first that is not stock's")
    gaps = [parting["gap"] for parting in result.get("partings from stock", [])]
    found["widest gap where greedy tokens part"] = max(gaps, default=0.0)
    drafts = result.get("counters", {}).get("drafts", {})
    found["drafted"] = drafts.get("drafted")
    found["accepted"] = drafts.get("accepted")
    return found


def audit_findings(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``sparrow audit``'s verdict, its smallest p-value, and the detectable bias."""
    findings = result.get("findings", [])
    return {
        "status": result.get("status"),
        "p": min((each["corrected"] for each in findings), default=None),
        "detectable share of tokens": result.get("detectable"),
        "tokens": result.get("tokens"),
        "drafts": result.get("counters", {}).get("drafts", {}).get("drafted"),
        "engine": result.get("engine"),
    }


def audits(model: str, schedule: str) -> dict[str, list[str]]:
    """Return each audit's arguments."""
    audit = [*AUDIT, "--task", TASK, "--max-new-tokens", "128", "--model", model]
    ours = ["--engine", f"vllm:{AUDITED}"]
    return {
        "audit lossless": [*audit, *ours, "--mode", "lossless", "--draft-schedule", schedule],
        "audit lossy": [*audit, *ours, "--schedule", schedule],
        "audit ngram": [*audit, "--engine", f"stock:{AUDITED},speculative_config={NGRAM}"],
    }


def cached_audit(model: str, schedule: str, prompts: Path) -> dict[str, list[str]]:
    """Write prompts that the cache holds except for their last token, and return the arguments of
    an audit on them.
    """
    write_cached_prompts(prompts)
    audit = [*AUDIT, "--prompts", str(prompts), "--max-new-tokens", "16", "--model", model]
    lossless = ["--mode", "lossless", "--draft-schedule", schedule]
    fixed = ["--draft-tokens", "4", "--no-adapt-draft-tokens"]
    ours = ["--engine", f"vllm:{AUDITED}"]
    return {"audit cached prompts": [*audit, *ours, *lossless, *fixed]}


def write_cached_prompts(path: Path) -> None:
    """Write prompts whose last token is the first one in its cache block. Once a request has filled
    the cache, vLLM computes only this token for the next request with the same prompt.
    """
    from transformers import AutoTokenizer

    from sparrow.cli import loading

    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    task = loading.load_problems(TASK, (), tokenizer, None)
    with path.open("w") as file:
        for prompt in loading.draw_prompts(task, CACHED_PROMPTS, 0):
            tokens = tokenizer(prompt.text).input_ids
            kept = (len(tokens) - 1) // CACHE_BLOCK * CACHE_BLOCK + 1
            file.write(json.dumps({"prompt": tokenizer.decode(tokens[:kept])}) + "\n")


def random_mixture(folder: Path) -> None:
    """Write a small random mixture of experts with the reasoner's tokenizer, and with attention so
    sharp that leaving out pages changes its samples.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(2.0)
            layer.self_attn.k_norm.weight.fill_(2.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def child(arguments: list[str], log: Path, allowed: Sequence[int]) -> str | None:
    """Run a process. Return why it failed, or None if its exit status is allowed."""
    with log.open("w") as output:
        try:
            code = subprocess.run(
                [sys.executable, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE_S,
                cwd=HERE,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"did not finish within {PATIENCE_S} s"
    return None if code in allowed else last_error(log, code)


def part(
    result: dict[str, Any],
    name: str,
    arguments: list[str],
    condense: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    out: Path,
    allowed: Sequence[int] = (0,),
) -> None:
    """Run one part of the measurement, add its findings to ``result``, and write the result.

    Args:
        allowed: exit statuses that don't count as failures; an audit that finds a bias exits with
            1.
    """
    log = out.with_name(f"{out.stem}_{name.replace(' ', '_')}.log")
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "part.json"
        failure = child([*arguments, "--out", str(written)], log, allowed)
        found = read_result(written) if written.exists() else {}
    result[name] = {**condense(found)}
    if failure is not None:
        result[name]["failed"] = failure
    else:
        log.unlink()
    save(out, result)


def measure(arguments: argparse.Namespace) -> None:
    import vllm

    out = arguments.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = read_result(out) if out.exists() else {}
    result["vllm"] = vllm.__version__

    model = ["--mixture"] if arguments.mixture else []
    if "lossy" in arguments.parts:
        part(result, "lossy", ["vllm_check.py", *model], lossy_findings, out)
    if "lossless" in arguments.parts:
        part(result, "lossless", ["lossless_check.py", "equal", *model], lossless_findings, out)
    with tempfile.TemporaryDirectory() as folder:
        schedule = Path(folder) / "schedule.json"
        schedule.write_text(json.dumps(FEW_PAGES))
        audited = "reasoner"
        if arguments.mixture:
            audited = str(Path(folder) / "mixture")
            random_mixture(Path(audited))
        wanted: dict[str, list[str]] = {}
        if "audit" in arguments.parts:
            wanted |= audits(audited, str(schedule))
        if "cached" in arguments.parts:
            wanted |= cached_audit(audited, str(schedule), Path(folder) / "cached.jsonl")
        for name, command in wanted.items():
            part(result, name, command, audit_findings, out, allowed=(0, 1))
    for variant in VARIANTS if "speed" in arguments.parts and not arguments.mixture else ():
        again = [Path(__file__).name, "--variant", variant, "--batch", str(arguments.batch)]
        part(result, f"speed {variant}", again, dict, out)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--mixture", action="store_true", help="check a mixture of experts")
    options.add_argument(
        "--batch", type=int, default=64, help="number of sequences for the part 'speed'"
    )
    options.add_argument("--variant", choices=VARIANTS, help="time this variant, in this process")
    options.add_argument(
        "--out",
        type=Path,
        required=True,
        help="the JSON file to write; results that it contains for other parts are kept",
    )
    arguments = options.parse_args()

    if arguments.variant is None:
        measure(arguments)
    else:
        arguments.out.write_text(json.dumps(speed(arguments.variant, arguments.batch)))


if __name__ == "__main__":
    main()
