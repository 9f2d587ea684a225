"""What fp8 keys and values, fp8 matrices and sparse attention each cost in acceptance, and together.

    python studies/text/fewer_bits.py CHECKPOINT --out benchmarks/results/text_bits.json

The policy is dense and in float32. Actors differ from it in what they round (``benchmarks/fp8_rounding.py``, products
in float32) and in what they read; all have a history of their own from the prompt on. An actor that is the policy in
bfloat16 is the noise floor. Texts, positions and statistics are those of ``acceptance.py``.

Shapes: as in ``acceptance.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from acceptance import lossy, schedule, starts, summary
from torch import Tensor
from train import windows
from transformers import AutoModelForCausalLM

from sparrow.mismatch import plain
from sparrow.model import actor
from sparrow.schedule import SparsitySchedule

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from common import save
from fp8_rounding import rounded_cache, rounded_matrices, scales_of

ROUNDED = {"nothing": (), "matrices": ("matrices",), "cache": ("cache",), "both": ("cache", "matrices")}


@torch.no_grad()
def dense_distributions(model: Any, ids: Tensor, position: Tensor) -> Tensor:
    """Next-token distributions ``[B, R, W, V]`` at ``position``, ``[B, R, W]``."""
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    hidden = hidden[torch.arange(len(ids), device=ids.device)[:, None, None], position]
    return model.get_output_embeddings()(hidden).float().softmax(-1)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 2048], help="tokens read, besides all")
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--context", type=int, help="tokens of a text; the model's if not given")
    parser.add_argument("--cycles", type=int, default=96, help="groups of positions in each text")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each text that set the scales of the cache")
    parser.add_argument("--implementation", choices=("triton", "reference"), help="of sparse attention")
    args = parser.parse_args(argv)

    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    card = json.loads((args.checkpoint / "card.json").read_text())
    context, width = args.context or card["context"], 12
    load = partial(AutoModelForCausalLM.from_pretrained, args.checkpoint)
    policy, history = (load(dtype=torch.float32).to(device).eval() for _ in range(2))
    in_bf16 = load(dtype=torch.bfloat16).to(device).eval()
    for model in (history, in_bf16):
        actor.set_schedule(model, SparsitySchedule.dense(dense_layers=()))
    ids = windows(np.load(args.checkpoint / "held_out.npy"), args.texts, context).to(device)
    start = starts(args.texts, args.cycles, context, width).to(device)
    position = start[..., None] + torch.arange(width, device=device)
    scales = scales_of(policy, ids[:, : args.prompt])

    everything = SparsitySchedule.dense(dense_layers=tuple(args.dense_layers))
    reads = [(None, everything), *((b, schedule(b, args.dense_layers)) for b in args.budgets)]
    actors: list[tuple[dict[str, Any], Any, SparsitySchedule]] = [
        ({"rounded": "all to bfloat16", "budget": None}, in_bf16, everything)
    ]
    for budget, kept in reads:
        for name in ROUNDED:
            if budget is not None or name != "nothing":  # the policy itself
                actors.append(({"rounded": name, "budget": budget}, history, kept))
    alpha: list[list[Tensor]] = [[] for _ in actors]
    for i in range(args.texts):
        now = slice(i, i + 1)
        p = dense_distributions(policy, ids[now], position[now])
        for (what, model, kept), values in zip(actors, alpha, strict=True):
            with contextlib.ExitStack() as stack:
                if "cache" in ROUNDED.get(what["rounded"], ()):
                    stack.enter_context(rounded_cache(model, scales))
                if "matrices" in ROUNDED.get(what["rounded"], ()):
                    stack.enter_context(rounded_matrices(model))
                values.append(
                    lossy(model, ids[now], start[now], p, args.prompt, kept, implementation=args.implementation)
                )
        print(f"{i + 1} of {args.texts} texts, {time.monotonic() - began:.0f} s", flush=True)
    edges = [context // 8, *(context * quarter // 4 for quarter in (1, 2, 3, 4))]
    rows = []
    for (what, _, kept), parts in zip(actors, alpha, strict=True):
        values = torch.cat(parts).double().clamp(0, 1).cpu().numpy()
        measured = summary(values, position.cpu().numpy(), edges, ())
        rows.append({**what, "dense_layers": list(kept.dense_layers), **measured})
        print(f"{what}: mean {measured['mean'][0]}, p5 {measured['p5'][0]}", flush=True)
    settings = {k: v for k, v in vars(args).items() if k not in ("checkpoint", "out")}
    result = {"model": card, "seconds": round(time.monotonic() - began, 1), "settings": settings, "rows": plain(rows)}
    save(args.out, result)
    return result


if __name__ == "__main__":
    main()
