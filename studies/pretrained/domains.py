"""Code shared by the studies of a pretrained model: each domain's sequences, and the command line.

Shapes: S sequences of a domain, T tokens per sequence, R cycles per sequence, W drafts per cycle, V
vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparrow.cli.loading.models import model_path
from sparrow.mismatch import plain

sys.path.extend(
    str(Path(__file__).parents[2] / folder)
    for folder in ("benchmarks", "studies/text", "studies/common")
)
from acceptance import Floats
from common import parser, read_result, save
from repeated_heads import repeat_kv_heads

EDGES = (1024, 2048, 4096, 6144, 8192)
"""Length bin edges."""
CHAT = "chat mathematics"


@dataclass(frozen=True)
class Domain:
    """Sequences of one kind, with the cycles in which drafts are measured.

    Attributes:
        ids: token ids ``[S, T]``.
        start: first positions of the cycles ``[S, R]``.
    """

    name: str
    temperature: float
    ids: Tensor
    start: Tensor

    def position(self, drafted: int) -> NDArray[np.int64]:
        """Return the positions of all cycles' drafts, ``[S, R, W]``."""
        return (self.start[..., None] + torch.arange(drafted)).numpy()

    def measured(
        self, measure: Callable[[Tensor, Tensor], Sequence[Tensor]], batch: int, device: str
    ) -> list[Floats]:
        """Call ``measure`` on the ids and starts of ``batch`` sequences at a time, and concatenate
        the results ``[B, R, W]`` over all sequences.
        """
        parts = [
            measure(*(x.to(device) for x in some))
            for some in zip(self.ids.split(batch), self.start.split(batch), strict=True)
        ]
        return [torch.cat(of).double().clamp(0, 1).cpu().numpy() for of in zip(*parts, strict=True)]


def starts(sampled: NDArray[np.bool_], edges: Sequence[int], cycles: int, drafted: int) -> Tensor:
    """Choose cycles whose tokens were all ``sampled`` ``[S, T]``, and return their first positions
    ``[S, R]``. Each bin between two edges gets the same number of cycles, spread evenly.

    Raises ValueError if a sequence has no such cycle in a bin.
    """
    S = len(sampled)
    # A draft at a position predicts the token after it.
    whole = np.lib.stride_tricks.sliding_window_view(sampled[:, 1:], drafted, axis=1).all(-1)
    in_bin = cycles // (len(edges) - 1)
    chosen = np.empty((S, len(edges) - 1, in_bin), np.int64)
    for s in range(S):
        for b, (low, high) in enumerate(pairwise(edges)):
            possible = low + np.flatnonzero(whole[s, low : high - drafted])
            if not len(possible):
                raise ValueError(
                    f"sequence {s} has no {drafted} consecutive sampled tokens between positions "
                    f"{low} and {high}; sample longer answers"
                )
            share = (np.arange(in_bin) + (s + 0.5) / S) / in_bin
            chosen[s, b] = possible[(share * len(possible)).astype(int)]
    return torch.from_numpy(chosen.reshape(S, -1))


def load(args: argparse.Namespace, edges: Sequence[int], cycles: int, drafted: int) -> list[Domain]:
    """Load the domains from ``args.texts`` and ``args.conversations``, with at most
    ``args.sequences`` sequences each. These are the first conversations at every sampled
    temperature, and texts spread over all documents.
    """
    found = []
    with np.load(args.conversations) as file:
        for name in file.files:
            if name.endswith("/ids"):
                temperature = name.removesuffix("/ids")
                found.append((CHAT, float(temperature), file[name], file[f"{temperature}/sampled"]))
    with np.load(args.texts) as file:
        for name in file.files:
            every = file[name]
            count = min(args.sequences, len(every))
            ids = every[np.arange(count) * len(every) // count]
            found.append((name, 1.0, ids, np.ones(ids.shape, bool)))
    domains = []
    for name, temperature, all_ids, all_sampled in found:
        ids, sampled = all_ids[: args.sequences], all_sampled[: args.sequences]
        start = starts(sampled, edges, cycles, drafted)
        domains.append(Domain(name, temperature, torch.from_numpy(ids.astype(np.int64)), start))
    return domains


def domain_parser(about: str, sequences: int) -> argparse.ArgumentParser:
    """Return a command line with the arguments shared by all scripts of this study."""
    made = parser(about)
    made.add_argument("--model", default="smollm2")
    made.add_argument("--texts", type=Path, required=True, help="the file that texts.py wrote")
    made.add_argument(
        "--conversations", type=Path, required=True, help="the file that conversations.py wrote"
    )
    made.add_argument("--out", type=Path, required=True)
    made.add_argument(
        "--sequences", type=int, default=sequences, help="maximum number of sequences per domain"
    )
    made.add_argument(
        "--batch", type=int, default=4, help="number of sequences to process at a time"
    )
    made.add_argument(
        "--edges", type=int, nargs="+", default=list(EDGES), help="edges of the length bins"
    )
    made.add_argument(
        "--implementation",
        choices=("triton", "reference"),
        help="implementation of the lossy actor's attention",
    )
    return made


def load_model(name: str, **options: Any) -> PreTrainedModel:
    """Load the model in float32. If there is a GPU, use it, with TF32 matrix products."""
    torch.set_float32_matmul_precision("high")
    repeat_kv_heads()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load: Any = AutoModelForCausalLM.from_pretrained
    model: PreTrainedModel = load(model_path(name), dtype=torch.float32, **options)
    return model.to(device).eval()


@contextlib.contextmanager
def at_temperature(model: PreTrainedModel, temperature: float) -> Iterator[None]:
    """Within this context, the model's logits are divided by ``temperature``."""
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, inputs, logits: logits / temperature)
    try:
        yield
    finally:
        handle.remove()


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that affect the results."""
    others = ("model", "texts", "conversations", "out", "batch", "implementation", "seconds")
    return {name: value for name, value in vars(args).items() if name not in others}


def earlier(args: argparse.Namespace) -> dict[str, Any]:
    """Return what an interrupted run left in ``args.out``, or nothing if there is no such file.

    Raises ValueError if that run had different settings.
    """
    if not args.out.exists():
        return {}
    found: dict[str, Any] = read_result(args.out)
    if found["settings"] != settings_of(args):
        raise ValueError(
            f"{args.out} was measured with different settings, {found['settings']}; use the "
            "same settings, or a different --out"
        )
    return found


def write(args: argparse.Namespace, began: float, **results: Any) -> dict[str, Any]:
    """Save results to ``args.out``, with the settings and the seconds since ``began``."""
    seconds = round(time.monotonic() - began, 1)
    model = "SmolLM2-135M-Instruct" if args.model == "smollm2" else Path(args.model).name
    result: dict[str, Any] = plain(
        {"model": model, "seconds": seconds, "settings": settings_of(args), **results}
    )
    save(args.out, result)
    return result
