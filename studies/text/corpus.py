"""Text for training: the sources of installed Python packages or files from other folders, and a
tokenizer trained on them.
"""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HELD_OUT = (
    "networkx",
    "pandas",
    "sympy/physics",
    "asyncio",
)  # folders with these names, at any depth, are never trained on
END = "<|endoftext|>"  # precedes every file; its id is 0
SIZES = range(1_500, 400_000)  # bytes; shorter files don't say much, longer ones are mostly tables


def package_roots() -> list[Path]:
    """Return the folders of Python's standard library and of installed packages."""
    return [
        Path(root)
        for root in sorted(
            {sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")}
        )
    ]


def folders(roots: Iterable[Path], suffix: str) -> list[list[Path]]:
    """Return the files of each folder that has any, without duplicates. The order depends only on
    names.
    """
    by_folder: dict[str, list[Path]] = {}
    for root in roots:
        for folder, _, names in os.walk(root.resolve()):
            paths = [Path(folder, name) for name in sorted(names) if name.endswith(suffix)]
            if kept := [path for path in paths if path.is_file() and path.stat().st_size in SIZES]:
                by_folder[folder] = kept
    ordered = [by_folder[folder] for folder in sorted(by_folder)]
    random.Random(0).shuffle(ordered)
    return ordered


def split(
    folders: Sequence[list[Path]], held_out: Sequence[str]
) -> tuple[list[list[Path]], list[list[Path]]]:
    """Split folders into training folders and held-out folders. Folders are held out if their path
    contains a name in ``held_out``.

    Raises ValueError if either part is empty.
    """
    parts: tuple[list[list[Path]], list[list[Path]]] = ([], [])
    for files in folders:
        parts[any(f"/{name}/" in files[0].as_posix() for name in held_out)].append(files)
    if not all(parts):
        raise ValueError(
            f"the names {', '.join(held_out)} hold out {len(parts[1])} of {len(folders)} folders "
            "with text; choose names with --held-out that match some of them, but not all"
        )
    return parts


def texts(folders: Iterable[list[Path]], seen: set[int]) -> Iterator[str]:
    """Yield the contents of files. Each is preceded by the end of the file's path. Files that
    aren't UTF-8, or whose content has already been ``seen``, are skipped.
    """
    for files in folders:
        for path in files:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if (key := hash(text)) not in seen:
                seen.add(key)
                yield f"# file {'/'.join(path.parts[-3:])}\n{text}\n"


def train_tokenizer(sample: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with ``vocab_size`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"vocab_size": vocab_size, "special_tokens": [END], "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(sample, trainers.BpeTrainer(initial_alphabet=alphabet, **options))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], most: int) -> np.ndarray:
    """Return the first ``most`` tokens of ``texts``, uint16, with ``END`` before each text."""
    pieces, total, texts = [], 0, iter(texts)
    while total < most and (batch := list(beginning(texts, 2_000_000))):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(batch):
            pieces.append(np.array([0, *encoding.ids], np.uint16))
            total += len(pieces[-1])
    return np.concatenate(pieces)[:most]


def beginning(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yield texts until they add up to ``characters`` characters."""
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return
