"""Code shared by benchmarks and studies, mostly for reading and writing results and tables."""

from __future__ import annotations

import argparse
import json
import platform
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
REASONER = ROOT / "sparrow" / "reasoner"
SHAPES = {"qwen3-1.7b": "1.7B", "qwen3-4b": "4B", "qwen3-8b": "8B", "qwen3-14b": "14B"}
"""The dense shapes, with their names in tables."""
MIXTURES = {"qwen3-30b-a3b": "30B-A3B"}
"""The same for mixtures of experts."""
NAMES = SHAPES | MIXTURES
"""The shapes we measure, and their names in tables."""
SIZES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-4b": (2560, 9728, 36, 32, True),
    "qwen3-8b": (4096, 12_288, 36, 32, False),
    "qwen3-14b": (5120, 17_408, 40, 40, False),
    "qwen3-30b-a3b": (2048, 6144, 48, 32, False),
}
"""Hidden size, MLP width, layers, query heads, and whether embeddings are tied."""
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": dict(
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    )
}
"""Config fields that only mixtures of experts have, or that differ from the other shapes."""
SMALL_VOCAB = 4096
"""Vocabulary size of ``small_qwen3``."""
LINE = 300
"""A list or object of up to this many characters goes on one line."""
Row = dict[str, Any]
Column = str | Callable[[Row], Any]


def parser(about: str, out: str | None = None) -> argparse.ArgumentParser:
    """Return a command line that uses the script's docstring as its help.

    Args:
        out: if given, adds an ``--out`` option, which defaults to ``benchmarks/results/OUT.json``.
    """
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if out:
        made.add_argument(
            "--out", type=Path, default=RESULTS / f"{out}.json", help="the JSON file to write"
        )
    return made


def add_draft_weights(options: argparse.ArgumentParser) -> None:
    """Add the ``--draft-weights`` option to a script that measures lossless mode."""
    from sparrow.decoding import DraftWeights

    options.add_argument(
        "--draft-weights",
        choices=get_args(DraftWeights),
        default="auto",
        help="weights to use for drafts",
    )


def add_cache_size(options: argparse.ArgumentParser) -> None:
    """Add the ``--cache-gib`` option to a script that starts engines through ``rollout.Bench``."""
    options.add_argument(
        "--cache-gib",
        type=float,
        help="size of the KV cache in GiB; by default, vLLM takes nearly all of the GPU's memory",
    )


def cache_size(gib: float | None) -> dict[str, Any]:
    """Return the options of ``rollout.Bench`` for a KV cache of this size."""
    if gib is None:
        return {}
    # ``memory`` is a fraction of the GPU's memory. vLLM still checks that this much is free.
    return {"memory": 0.1, "kv_cache_memory_bytes": int(gib * 2**30)}


def add_quantization(options: argparse.ArgumentParser) -> None:
    """Add the ``--quantization`` option to a script whose engines are ``rollout.Bench``."""
    options.add_argument(
        "--quantization",
        help="how vLLM quantises the weights in all engines, such as fp8_per_block; by default, "
        "they stay in bfloat16",
    )


def parse_point(text: str) -> tuple[int, int]:
    """Parse a point such as ``32x15000`` from the command line into sequences and tokens.

    Raises ArgumentTypeError, whose message argparse shows, if the form is wrong.
    """
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"a point must have the form SEQUENCESxTOKENS, such as 64x4096, got {text!r}"
        )
    return int(found[1]), int(found[2])


def parse_states(
    options: argparse.ArgumentParser, name: str, states: Mapping[str, Sequence[tuple[int, int]]]
) -> tuple[str, list[tuple[int, int]], Path]:
    """Read the command line of a script that measures one shape in several states. A state is a
    batch size and the sequence length in tokens.

    Returns: The shape, the requested states, and the output file, ``NAME_SHAPE.json`` by default.
    """
    options.add_argument("--shape", choices=states, default="qwen3-1.7b")
    options.add_argument(
        "--sequences",
        type=int,
        nargs="+",
        help="measure only states with one of these numbers of sequences",
    )
    options.add_argument(
        "--out", type=Path, help=f"the JSON file to write, results/{name}_SHAPE.json by default"
    )
    given = options.parse_args()
    wanted = [
        state
        for state in states[given.shape]
        if given.sequences is None or state[0] in given.sequences
    ]
    return given.shape, wanted, given.out or RESULTS / f"{name}_{given.shape}.json"


def qwen3(shape: str, **changed: Any) -> Any:
    """Return a Qwen3 config in which no token ends a response."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    width, mlp, layers, heads, tied = SIZES[shape]
    settings: dict[str, Any] = dict(
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
        architectures=["Qwen3ForCausalLM"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    kind = Qwen3MoeConfig if shape in EXPERTS else Qwen3Config
    return kind(**settings | EXPERTS.get(shape, {}) | changed)


def small_qwen3(is_mixture: bool = False) -> Any:
    """Return the config of a small six-layer Qwen3, for checks with random weights."""
    small: dict[str, Any] = dict(
        vocab_size=SMALL_VOCAB,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.03,
    )
    if not is_mixture:
        return qwen3("qwen3-1.7b", **small)
    return qwen3(
        "qwen3-30b-a3b", **small, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512
    )


def small_hybrid() -> Any:
    """Return the config of a small six-layer Qwen3-Next, for checks with random weights. Every
    third layer has attention, with heads as in the published model.
    """
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=SMALL_VOCAB,
        hidden_size=1024,
        num_hidden_layers=6,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        max_position_embeddings=8192,
        initializer_range=0.03,
        architectures=["Qwen3NextForCausalLM"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


def small_windowed() -> Any:
    """Return the config of a small six-layer EXAONE 4, for checks with random weights. Every third
    layer has full attention, and the others have a window that is shorter than most prompts.
    """
    from transformers import Exaone4Config

    return Exaone4Config(
        vocab_size=SMALL_VOCAB,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=512,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        initializer_range=0.03,
        architectures=["Exaone4ForCausalLM"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


def free_port() -> int:
    """Return a port on this machine that nothing listens on."""
    with socket.socket() as tried:
        tried.bind(("localhost", 0))
        port: int = tried.getsockname()[1]
    return port


def write_head(model: Mapping[str, Any], folder: Path) -> Path:
    """Write a random EAGLE-3 head for a model with this ``config.json``, and return the folder."""
    import torch
    from safetensors.torch import save_file

    config = dict(model)
    width, mlp, words = (config[x] for x in ("hidden_size", "intermediate_size", "vocab_size"))
    layers = config["num_hidden_layers"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    for name in ("layer_types", "max_window_layers"):
        config.pop(name, None)
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": words,
        "eagle_aux_hidden_state_layer_ids": [min(2, layers // 2 - 1), layers // 2, layers],
        "tie_word_embeddings": False,
    }
    sizes = {
        "fc": (width, 3 * width),
        "midlayer.self_attn.q_proj": (heads, 2 * width),
        "midlayer.self_attn.k_proj": (kv_heads, 2 * width),
        "midlayer.self_attn.v_proj": (kv_heads, 2 * width),
        "midlayer.self_attn.o_proj": (width, heads),
        "midlayer.mlp.gate_proj": (mlp, width),
        "midlayer.mlp.up_proj": (mlp, width),
        "midlayer.mlp.down_proj": (width, mlp),
        "lm_head": (words, width),
    }
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(size) / size[1] ** 0.5 for name, size in sizes.items()}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for norm in ("norm", *(f"midlayer.{name}" for name in norms)):
        weights[f"{norm}.weight"] = torch.ones(width)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tracing(
    path: str | Path, lines: int, count: int, seed: int, device: Any
) -> tuple[Any, list[int], list[list[int]]]:
    """Load a model for the ``trace`` task in float32. Return it with its EOS tokens and the token
    ids of ``count`` prompts.
    """
    from sparrow.engines.hf import eos_ids, load_model
    from sparrow.tasks import Trace
    from sparrow.tasks.prompts import encode

    model, tokenizer = load_model(str(path), "fp32", device)
    texts = [Trace(lines).problem(i, seed).prompt for i in range(count)]
    return model, eos_ids(model, tokenizer), [encode(tokenizer, text) for text in texts]


def machine() -> str:
    """Return the name of the GPU, or of the CPU if there is no GPU."""
    import torch

    return (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"
    )


def device() -> Any:
    """Return the current GPU, or the CPU if there is no GPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def clock() -> float:
    """Wait for the device to finish its work, and return the time in seconds."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def last_error(log: Path, code: int) -> str:
    """Return the last error in ``log``, or the process's exit status ``code`` if there is none."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1][-300:] if lines else f"exit status {code}"


def load(name: str) -> Any:
    """Load a result by file name."""
    return read_result(RESULTS / f"{name}.json")


def read_result(path: Path) -> Any:
    """Read a file that ``write`` or ``save`` wrote. Tables become lists of rows again."""

    def with_rows(x: dict[str, Any]) -> Any:
        if x.keys() != {"columns", "data"}:
            return x
        return [dict(zip(x["columns"], row, strict=True)) for row in x["data"]]

    return json.loads(path.read_text(encoding="utf-8"), object_hook=with_rows)


def earlier_runs(out: Path | None, name: str, shape: str) -> tuple[Path, dict[str, Any]]:
    """Return the file for a shape's new run, and the runs that the file already contains.

    Args:
        out: the file; by default, ``benchmarks/results/NAME_SHAPE.json``.

    Raises ValueError if the file has runs with another shape.
    """
    path = (out or RESULTS / f"{name}_{shape}.json").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return path, {"shape": shape, "runs": []}
    result = read_result(path)
    if result["shape"] != shape:
        raise ValueError(
            f"{path} has runs on {result['shape']}, not {shape}; pass a different --out"
        )
    return path, result


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, filling in the machine, versions and date if they are missing."""
    import torch

    record = {"machine": machine(), "torch": torch.__version__, "python": platform.python_version()}
    record |= {"date": time.strftime("%Y-%m-%d"), **result}
    write(path, record)


def write(path: Path, result: Any) -> None:
    """Write a result with numbers rounded to seven digits. Long lists of rows with the same fields
    are written as tables, which ``read_result`` turns into rows again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = json.loads(json.dumps(result))  # turn keys into strings, and tuples into lists
    path.write_text(compact(tabulated(rounded(plain))) + "\n", encoding="utf-8")


def rounded(x: Any) -> Any:
    """Round all floats in a nested structure to seven digits."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    if isinstance(x, float) and not x.is_integer():
        return float(f"{x:.7g}")
    return x


def tabulated(x: Any) -> Any:
    """Replace lists of rows that don't fit on one line by tables, ``{"columns": names, "data":
    [values of each row]}``, if all rows have the same fields and each row's values fit on a line.
    """
    if isinstance(x, dict):
        return {key: tabulated(value) for key, value in x.items()}
    if not isinstance(x, list) or len(one_line(x)) <= LINE:
        return x
    if all(isinstance(row, dict) and list(row) == list(x[0]) for row in x):
        data = [list(row.values()) for row in x]
        if len(data) > 1 and all(len(one_line(row)) <= LINE for row in data):
            return {"columns": list(x[0]), "data": data}
    return [tabulated(value) for value in x]


def compact(x: Any) -> str:
    """Format as JSON with few line breaks and no spaces: a list or object goes on one line if it
    fits, or if it contains no other list or object.
    """
    whole = one_line(x)
    inner: list[Any] = []
    if isinstance(x, dict):
        inner = list(x.values())
    elif isinstance(x, list):
        inner = x
    if len(whole) <= LINE or not any(isinstance(value, (dict, list)) for value in inner):
        return whole

    parts = [compact(value) for value in inner]
    opening, closing = "[]"
    if isinstance(x, dict):
        opening, closing = "{}"
        parts = [f"{json.dumps(key)}:{part}" for key, part in zip(x, parts, strict=True)]
    body = ",\n".join(parts)
    return f"{opening}\n{body}\n{closing}"


def one_line(x: Any) -> str:
    """Format as JSON on one line, without spaces."""
    return json.dumps(x, separators=(",", ":"))


def speed_ratio(turns: ArrayLike) -> list[float]:
    """Return how fast the second of two engines is relative to the first, with a 95 % interval.

    The interval comes from resampling pairs of turns.

    Args:
        turns: both engines' tokens and seconds in each turn, ``[turns, 2, 2]``.
    """
    each = np.asarray(turns)
    draws = np.random.default_rng(0).integers(0, len(each), (2000, len(each)))
    sums = np.concatenate(
        [each.sum(0)[None], each[draws].sum(1)]
    )  # over all turns, then for each resample
    speeds = sums[..., 0] / sums[..., 1]
    ratio, *resampled = (speeds[:, 1] / speeds[:, 0]).tolist()
    return [ratio, *np.percentile(resampled, [2.5, 97.5]).tolist()]


def interval(values: list[float], digits: int, unit: str = "f") -> str:
    """Format an estimate, with its interval if there is one."""
    estimate, *ends = (f"{x:.{digits}{unit}}" for x in values)
    return f"{estimate} [{', '.join(ends)}]" if ends else estimate


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def declared(rows: Iterable[Row], cells: Mapping[str, Column]) -> str:
    """Return a table. Each column is either a format string for the row's fields or a function of
    the row.
    """
    lines = (
        [cell.format(**row) if isinstance(cell, str) else cell(row) for cell in cells.values()]
        for row in rows
    )
    return table(list(cells), list(lines))


def render(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Regenerate a page's tables, i.e. everything between ``<!-- table: NAME -->`` and ``<!-- end
    -->``.
    """

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{tables[match[1]]()}<!-- end -->"

    return re.sub(r"<!-- table: ([^>]+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)
