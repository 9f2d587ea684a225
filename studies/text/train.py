"""Train a small Qwen3 language model on Python sources within minutes on one GPU, and save it as a
checkpoint.

    python studies/text/train.py OUT                    # 28 M parameters, 8,192 tokens of context, 150 s
    python studies/text/train.py OUT --text DIR --suffix .md --held-out guide appendix

OUT then contains a checkpoint for transformers and vLLM (``config.json``, ``model*.safetensors`` in
bfloat16, the tokenizer), the held-out tokens (``held_out.npy``), problems for reinforcement
learning (``problems.json``), and ``card.json`` with sizes, tokens seen, seconds and held-out loss.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import task
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

SIZES: dict[str, dict[str, int]] = {  # head dim 64; twice as many query heads as kv heads
    "28m": dict(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8
    ),
    "60m": dict(
        hidden_size=640, intermediate_size=1792, num_hidden_layers=12, num_attention_heads=10
    ),
    "tiny": dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2
    ),  # for tests
}
LEARNING_RATE, WARMUP_STEPS, DECAY_FROM, LAST_RATE = 2e-3, 60, 0.3, 0.05


def new_model(size: str, vocab_size: int, context: int) -> Qwen3ForCausalLM:
    """Build a new float32 model. Weight matrices that write to the residual stream are divided by
    the square root of their number.
    """
    shape = SIZES[size]
    config = Qwen3Config(
        **shape,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data /= math.sqrt(2 * config.num_hidden_layers)
    return model


def learning_rate(step: int, share: float, rate: float = LEARNING_RATE) -> float:
    """Return the learning rate after ``step`` steps and a ``share`` of the time. It warms up over
    some steps, stays at ``rate``, and finally decays linearly over time.
    """
    decay = 1 - (1 - LAST_RATE) * min(1.0, max(0.0, (share - DECAY_FROM) / (1 - DECAY_FROM)))
    return rate * min(1.0, (step + 1) / WARMUP_STEPS) * decay


def fit(
    model: PreTrainedModel,
    tokens: Tensor,
    context: int,
    batch: int,
    seconds: float,
    compiled: bool,
    rate: float = LEARNING_RATE,
) -> list[float]:
    """Train on random windows, and return each step's loss. The clock for ``seconds`` starts after
    three steps, once everything has been compiled.
    """
    device = model.device
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [
        {"params": matrices},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, rate, (0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    generator = torch.Generator().manual_seed(0)
    losses: list[Tensor] = []
    began, share = math.inf, 0.0
    while share < 1:
        begins = torch.randint(0, len(tokens) - context + 1, (batch,), generator=generator).to(
            device
        )
        ids = tokens[begins[:, None] + torch.arange(context, device=device)].long()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(len(losses), share, rate)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if len(losses) == 3 or len(losses) % 10 == 0:
            reached = loss.item()  # wait for the GPU, so that the clock is right
            began = min(began, time.monotonic())
            share = (time.monotonic() - began) / seconds
        if len(losses) % 50 == 0:
            print(
                f"{len(losses)} steps, {len(losses) * batch * context / 1e6:.0f} M tokens, loss {reached:.3f}",
                flush=True,
            )
    if compiled:
        for layer in model.model.layers:
            layer._compiled_call_impl = None
    return torch.stack(losses).tolist()


def windows(tokens: np.ndarray, count: int, context: int) -> Tensor:
    """Return ``count`` windows spread evenly over ``tokens``, int64 ``[count, context]``.

    Raises ValueError if the windows would overlap.
    """
    if len(tokens) < count * context:
        raise ValueError(
            f"{len(tokens)} tokens are too few for {count} windows of {context}; use fewer or shorter windows"
        )
    begins = np.linspace(0, len(tokens) - context, count).astype(int)
    return torch.from_numpy(np.stack([tokens[i : i + context] for i in begins]).astype(np.int64))


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, ids: Tensor) -> float:
    """Return the mean cross-entropy over windows ``[N, T]``, in nats per token. Windows are
    evaluated one at a time, in the model's own precision.
    """
    losses = [
        model(input_ids=row[None], labels=row[None], use_cache=False).loss.item()
        for row in ids.to(model.device)
    ]
    return float(np.mean(losses))


def main(argv: Sequence[str] | None = None) -> tuple[Qwen3ForCausalLM, dict[str, Any]]:
    """Train a model and save it. Return the saved model (bfloat16 weights, loaded in float32) and
    its card.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--seconds",
        type=float,
        default=150.0,
        help="training time in seconds, excluding preparation",
    )
    parser.add_argument("--size", choices=SIZES, default="28m")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=12, help="windows per step")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument(
        "--tokens",
        type=int,
        default=22_000_000,
        help="approximate maximum number of tokens to train on",
    )
    parser.add_argument("--held-out-tokens", type=int, default=1_500_000)
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        help="folders with text to train on; by default, installed packages",
    )
    parser.add_argument("--suffix", default=".py")
    parser.add_argument(
        "--held-out",
        nargs="+",
        default=corpus.HELD_OUT,
        help="names of folders that are never trained on",
    )
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args(argv)

    began = time.monotonic()
    train, held = corpus.split(
        corpus.folders(args.text or corpus.package_roots(), args.suffix), args.held_out
    )
    sample = corpus.beginning(corpus.texts(train, set()), 12_000_000)
    tokenizer = corpus.train_tokenizer(sample, args.vocab)
    seen: set[int] = set()  # held-out files go first, so that no copies of them are trained on
    held_tokens = corpus.encode(tokenizer, corpus.texts(held, seen), args.held_out_tokens)
    tokens = corpus.encode(tokenizer, corpus.texts(train, seen), args.tokens)
    prepared = time.monotonic() - began
    print(
        f"{len(tokens):,} tokens to train on, {len(held_tokens):,} held out, in {prepared:.0f} s",
        flush=True,
    )

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = new_model(args.size, len(tokenizer), args.context).to(device)
    torch.set_float32_matmul_precision("high")
    losses = fit(
        model,
        torch.from_numpy(tokens.astype(np.int32)).to(device),
        args.context,
        args.batch,
        args.seconds,
        compiled=device == "cuda" and not args.no_compile,
    )
    torch.set_float32_matmul_precision("highest")

    model.eval()
    for parameter in model.parameters():  # as saved, but with exact rotary frequencies
        parameter.data = parameter.data.bfloat16().float()
    copy.deepcopy(model).bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    np.save(args.out / "held_out.npy", held_tokens)
    problems = task.write_problems(args.out, tokenizer, train, held) if args.suffix == ".py" else {}
    count = min(32, len(held_tokens) // args.context)
    card = {
        "size": args.size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": args.context,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "preparation_s": round(prepared, 1),
        "training_s": args.seconds,
        "steps": len(losses),
        "tokens_seen": len(losses) * args.batch * args.context,
        "tokens_distinct": len(tokens),
        "training_loss": round(float(np.mean(losses[-50:])), 4),
        "held_out": list(args.held_out),
        "held_out_tokens": len(held_tokens),
        "problems": problems,
        "held_out_loss": round(held_out_loss(model, windows(held_tokens, count, args.context)), 4),
    }
    (args.out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    print(json.dumps(card), flush=True)
    return model, card


if __name__ == "__main__":
    main()
