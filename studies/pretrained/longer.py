"""Extend a pretrained model's context: continue its training on Python sources with a larger rotary
base.

    python studies/pretrained/longer.py runs/longer --model smollm2              # one GPU, ten minutes
    python studies/text/acceptance.py runs/longer --texts 8 --budgets 1024 2048 4096 --out FILE

The corpus and training loop come from ``studies/text/train.py``. OUT is a checkpoint like that
script's, so the scripts in ``studies/text`` can measure acceptance on it. ``card.json`` contains
the held-out loss by position, with 95 % t-intervals over held-out windows, for three models: the
original, the one with the larger base before training, and the trained one. The results of
``studies/text/acceptance.py`` contain this card.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from domains import load_model
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from sparrow.cli.loading.models import model_path

sys.path.extend(
    str(Path(__file__).parents[2] / folder)
    for folder in ("benchmarks", "studies/common", "studies/text")
)
import corpus
from common import parser
from stability_statistics import t_interval
from train import fit, windows

CHUNK = 2048  # positions to compute logits for at once


def with_base(path: str, base: float | None, context: int) -> PreTrainedModel:
    """Load the model in float32 for a context of ``context`` tokens. If ``base`` is given, use it
    as the rotary base.
    """
    config = AutoConfig.from_pretrained(path)
    if base is not None:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": base}
    config.max_position_embeddings = context
    return load_model(path, config=config)


@torch.no_grad()
def loss_by_position(
    model: PreTrainedModel, ids: Tensor, edges: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the mean loss in nats per token for each position bin, over windows ``[N, T]``, with
    the ends of its 95 % t-interval over windows.

    Raises ValueError if there is only one window.
    """
    if len(ids) < 2:
        raise ValueError("one held-out window gives no interval; use --windows 2 or more")
    nats = torch.stack([window_loss(model, row) for row in ids.to(model.device)])
    bins = []
    for low, high in pairwise(edges):
        mean, half = t_interval(nats[:, low:high].mean(1).tolist())
        limits = [round(value, 4) for value in (mean, mean - half, mean + half)]
        bins.append({"start": low, "end": high, "nats": limits})
    return bins


def window_loss(model: PreTrainedModel, row: Tensor) -> Tensor:
    """Return the loss of every token but the first of a window ``[T]``, float64 ``[T - 1]``."""
    hidden = model.get_decoder()(input_ids=row[None], use_cache=False).last_hidden_state[0]
    pieces = [
        torch.nn.functional.cross_entropy(
            model.get_output_embeddings()(some).float(), target, reduction="none"
        )
        for some, target in zip(hidden[:-1].split(CHUNK), row[1:].split(CHUNK), strict=True)
    ]
    return torch.cat(pieces).double().cpu()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--context", type=int, default=32_768)
    options.add_argument(
        "--base", type=float, default=1_600_000.0, help="base of the rotary embedding"
    )
    options.add_argument("--seconds", type=float, default=420.0, help="seconds of training")
    options.add_argument("--rate", type=float, default=2e-4, help="peak learning rate")
    options.add_argument("--batch", type=int, default=1, help="windows per step")
    options.add_argument(
        "--tokens", type=int, default=30_000_000, help="maximum number of tokens to train on"
    )
    options.add_argument("--windows", type=int, default=16, help="number of held-out windows")
    options.add_argument(
        "--text",
        type=Path,
        nargs="+",
        help="folders with text to train on; by default, installed packages",
    )
    options.add_argument(
        "--held-out",
        nargs="+",
        default=corpus.HELD_OUT,
        help="names of folders that are never trained on",
    )
    options.add_argument("--no-compile", action="store_true")
    args = options.parse_args(argv)

    began = time.monotonic()
    path = model_path(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    train, held = corpus.split(
        corpus.folders(args.text or corpus.package_roots(), ".py"), args.held_out
    )
    seen: set[int] = set()
    most = args.windows * args.context
    held_out = corpus.encode(tokenizer, corpus.texts(held, seen), most)
    tokens = corpus.encode(tokenizer, corpus.texts(train, seen), args.tokens)
    ids = windows(held_out, args.windows, args.context)
    prepared = time.monotonic() - began
    print(f"{len(tokens):,} tokens to train on, in {prepared:.0f} s", flush=True)

    edges = [args.context * share // 16 for share in (0, 1, 2, 4, 8, 12, 16)]
    before = with_base(path, None, args.context)
    losses = {"as it was": loss_by_position(before, ids, edges)}
    del before
    model = with_base(path, args.base, args.context)
    losses["larger base"] = loss_by_position(model, ids, edges)
    print(json.dumps(losses), flush=True)

    on_gpu = model.device.type == "cuda"
    model.train()
    trained = fit(
        model,
        torch.from_numpy(tokens.astype(np.int32)).to(model.device),
        args.context,
        args.batch,
        args.seconds,
        compiled=on_gpu and not args.no_compile,
        rate=args.rate,
    )
    model.eval()
    for parameter in model.parameters():  # measure the model as saved
        parameter.data = parameter.data.bfloat16().float()
    losses["after training"] = loss_by_position(model, ids, edges)
    copy.deepcopy(model).bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    np.save(args.out / "held_out.npy", held_out)
    card = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": args.context,
        "base": args.base,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "preparation_s": round(prepared, 1),
        "training_s": args.seconds,
        "steps": len(trained),
        "tokens_seen": len(trained) * args.batch * args.context,
        "tokens_distinct": len(tokens),
        "held_out": list(args.held_out),
        "held_out_windows": args.windows,
        "held_out_loss": losses,
    }
    (args.out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    print(json.dumps(card), flush=True)
    return card


if __name__ == "__main__":
    main()
