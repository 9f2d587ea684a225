"""Load prompts, and encode them as token ids that leave room for a response."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sparrow.engines.registry import parse_engine
from sparrow.errors import ConfigError
from sparrow.tasks import Task
from sparrow.tasks.base import check_text, draw
from sparrow.tasks.dataset import load_rows
from sparrow.tasks.prompts import Prompt, check_read, encode, prompt_of

log = logging.getLogger(__name__)


def prompt_room(context: int | None, engine: str, max_new_tokens: int) -> int:
    """Return the maximum length of a prompt in tokens. A prompt of this length leaves room for a
    response in the context of the model or the engine, whichever is smaller.

    Raises ConfigError if there is no room for a prompt, or there is no such engine.
    """
    context = context or sys.maxsize
    spec = parse_engine(engine)
    if spec.kind.length_option is not None:
        limit = spec.options.get(spec.kind.length_option)
        # vLLM takes -1 as the model's own limit, or less if the memory is short.
        context = min(context, limit) if isinstance(limit, int) and limit > 0 else context
    if max_new_tokens >= context:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the {context}-token "
            "context; lower max_new_tokens"
        )
    return context - max_new_tokens


def draw_prompts(task: Task, count: int, seed: int) -> list[Prompt]:
    """Draw the first ``count`` prompts of a training run on the task with this ``seed``.

    Raises TaskError if the task raised an error.
    """
    return [prompt_of(draw(task, i, seed)) for i in range(count)]


def encode_prompts(
    prompts: Sequence[Prompt], count: int, tokenizer: PreTrainedTokenizerBase, room: int
) -> list[list[int]]:
    """Encode ``count`` prompts as token ids, repeating them as needed.

    Prompts with no tokens, or more than ``room``, are left out and counted.

    Raises ConfigError if no prompt is left, or the tokenizer cannot read the prompts.
    """
    encoded = [(prompt.name, encode(tokenizer, prompt.text, prompt.rendered)) for prompt in prompts]
    kept = [ids for _, ids in encoded if 0 < len(ids) <= room]
    if len(kept) < len(encoded):
        name, ids = next((name, ids) for name, ids in encoded if not 0 < len(ids) <= room)
        left_out = (
            f"{len(encoded) - len(kept)} of {len(encoded)} prompts are empty, or longer than the "
            f"{room} tokens that fit in the model's context together with a response; "
            f"the first is {name} with {len(ids)} tokens"
        )
        if not kept:
            raise ConfigError(f"{left_out}; replace or shorten them, or lower max_new_tokens")
        log.warning("left out: %s", left_out)
    check_read(tokenizer, prompts)
    return [kept[i % len(kept)] for i in range(count)]


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts from a file without changing them.

    Raises ConfigError if the file cannot be read, or contains no prompts.
    """
    expected = "expected text with one prompt per line, or a .jsonl, .json or .parquet file"
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.exists():
            raise ConfigError(f"cannot read prompts from {path}: no such file; {expected}")
        named = []
        for number, row in enumerate(load_rows(path), 1):
            text = row.get("prompt")
            if not isinstance(text, str):
                kind = f"a {type(text).__name__}" if "prompt" in row else "none"
                raise ConfigError(
                    f'row {number} of {path}: every row needs a "prompt" that is text, got '
                    f"{kind}; render messages with the model's chat template first"
                )
            try:
                check_text(text)
            except ValueError as error:
                raise ConfigError(f"row {number} of {path} cannot be used: {error}") from error
            named.append(Prompt(f"row {number} of {path}", text))
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot read prompts from {path}: {reason}; {expected}") from error
        if any("\0" in line for line in lines):
            raise ConfigError(
                f"{path} contains zero bytes, so it is not a text file; pass a text file with "
                "one prompt per line, or a .jsonl file"
            )
        named = [
            Prompt(f"line {i} of {path}", line) for i, line in enumerate(lines, 1) if line.strip()
        ]
    if not named:
        raise ConfigError(f"{path} contains no prompts; add some, or pass another file")
    return named
