"""Collect sequences of three kinds of text for a pretrained model: Python sources, manuals and old
prose.

    python studies/pretrained/texts.py --model smollm2 --prose FILE... --out runs/texts.npz

Sources are files of Python's standard library, manuals are the topics of Python's language
reference and the long descriptions of installed packages, and prose comes from text files, such as
Project Gutenberg books. Each kind's documents are concatenated, separated by the end-of-text token,
and cut into sequences. Of these, an evenly spread subset is kept.

For each kind, the file contains an array ``[S, T]`` of token ids, with S sequences of T tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import tyro
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sparrow.cli.loading.models import model_path

sys.path.append(str(Path(__file__).parents[1] / "cascade"))
from samples import manuals, save, sources

END = "<|endoftext|>"


@dataclass(frozen=True)
class Options:
    """What to cut into sequences."""

    prose: tuple[Path, ...]  # Text files with prose.
    out: Path  # The .npz file of sequences.
    model: str = "smollm2"  # The model whose tokenizer is used.
    sequences: int = 40  # Sequences per kind.
    tokens: int = 8192  # Tokens per sequence.


def cut(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], sequences: int, tokens: int
) -> np.ndarray:
    """Concatenate the documents, and return sequences of consecutive tokens ``[S, T]``.

    Raises ValueError if the documents are too short.
    """
    end = tokenizer.convert_tokens_to_ids(END)
    joined: list[int] = []
    for document in documents:
        joined += [end, *tokenizer(document, add_special_tokens=False).input_ids]
    whole = len(joined) // tokens
    if whole < sequences:
        raise ValueError(
            f"the documents have {len(joined):,} tokens, enough for {whole} sequences of {tokens:,}, "
            f"but {sequences} are wanted; give more documents, or ask for fewer with --sequences"
        )
    chosen = np.arange(sequences) * whole // sequences
    return np.array(joined[: whole * tokens], np.uint16).reshape(whole, tokens)[chosen]


def main(options: Options) -> None:
    """Tokenize the texts, and save the sequences."""
    tokenizer = AutoTokenizer.from_pretrained(model_path(options.model))
    kinds = {
        "sources": sources(),
        "manuals": [*(topics[name] for name in sorted(topics)), *manuals()],
        "prose": (path.read_text("utf-8-sig", errors="ignore") for path in options.prose),
    }
    size = options.sequences, options.tokens
    save(options.out, {name: cut(tokenizer, kind, *size) for name, kind in kinds.items()})


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
