"""The error of a failed self-check."""

from __future__ import annotations

import torch

from sparrow.errors import ConfigError
from sparrow.vllm import versions


def refusal(what: str) -> ConfigError:
    """Make the error that says what is wrong, and what to do about it."""
    import vllm

    return ConfigError(
        f"Sparrow's self-check failed in vLLM {vllm.__version__} with torch "
        f"{torch.__version__}: {what}; install vllm {', '.join(versions.PROVEN)}, or start "
        "vLLM without Sparrow"
    )
