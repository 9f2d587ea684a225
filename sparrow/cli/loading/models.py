"""Load models and their tokenizers."""

from __future__ import annotations

import logging
from importlib import resources
from typing import Literal, cast

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from sparrow.engines import hf
from sparrow.errors import ConfigError
from sparrow.model import smollm2

Precision = Literal["fp32", "bf16"]
REASONER = "reasoner"
SMOLLM2 = "smollm2"
OWN_NAMES = (REASONER, SMOLLM2)
"""Models that Sparrow provides: the first is bundled, the second comes in a separate package."""


def load_model(
    name: str, precision: Precision = "fp32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model onto this process's device. ``name`` is a name on the hub, a path or one of
    ``OWN_NAMES``.

    Raises the same errors as ``model_path`` and ``hf.load_model``.
    """
    disable_progress_bar()  # Sparrow shows its own progress
    # Silence a warning about tied weights, which are intentionally saved only once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    place = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    return hf.load_model(model_path(name), precision, place.device)


def with_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """Apply a PEFT LoRA adapter to a model without merging it into the weights.

    Raises ConfigError if the folder contains no adapter for this model.
    """
    import peft  # imported here because it takes a second

    try:
        adapted = peft.PeftModel.from_pretrained(model, folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cannot load the adapter {folder!r} ({error}); pass a folder with a LoRA adapter for "
            "this model"
        ) from error
    return cast(PreTrainedModel, adapted.base_model.model)


def model_path(name: str) -> str:
    """Resolve one of ``OWN_NAMES`` to its path; return any other name or path unchanged.

    Raises the same errors as ``smollm2.checkpoint``.
    """
    if name == REASONER:
        return str(resources.files("sparrow") / REASONER)
    if name == SMOLLM2:
        return str(smollm2.checkpoint())
    return name


def context_of(model: PreTrainedModel) -> int | None:
    """Return the model's maximum sequence length in tokens, or None if its config doesn't say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
