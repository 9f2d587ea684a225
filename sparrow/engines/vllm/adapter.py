"""Apply a LoRA adapter to all of an audited engine's requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparrow.errors import ConfigError

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values vLLM accepts for ``max_lora_rank``."""


def take_adapter(options: dict[str, Any]) -> Any:
    """Remove ``adapter`` from the options for ``vllm.LLM``, and add the options that vLLM needs to
    load this adapter.

    The value of ``adapter`` is the folder of a LoRA adapter in PEFT's format.

    Returns:
        vLLM's ``LoRARequest``, or None if there is no adapter.

    Raises ConfigError if the folder has no LoRA adapter that vLLM can load.
    """
    folder = options.pop("adapter", None)
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    config = Path(str(folder)) / "adapter_config.json"
    try:
        rank = int(json.loads(config.read_text())["r"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"adapter {str(folder)!r} is not a folder with a LoRA adapter ({error}); pass a folder "
            "written by PEFT's save_pretrained"
        ) from error
    allowed = [each for each in RANKS if each >= rank]
    if not allowed:
        raise ConfigError(
            f"adapter {str(folder)!r} has rank {rank}, but vLLM supports at most {RANKS[-1]}; use "
            "an adapter of lower rank, or merge it into the model"
        )
    options.setdefault("enable_lora", True)
    options.setdefault("max_lora_rank", allowed[0])
    return LoRARequest("adapter", 1, str(folder))
