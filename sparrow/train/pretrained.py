"""Save a trained model as a Hugging Face folder. The weights keep the dtype of the checkpoint that
the model was loaded from, and the files use names that older transformers versions can read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

# Config fields renamed in transformers 5. If the checkpoint used one of these names, the value is
# saved under it too.
FORMER_NAMES = ("torch_dtype", "rope_theta", "rope_scaling")
ANY_TOKENIZER = "PreTrainedTokenizerFast"  # loads a tokenizer.json in any transformers version


def save_model(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write ``weights`` (by name) and the model config to ``folder``.

    Weights are saved in the dtype of the checkpoint that the model was loaded from, even if they
    were trained in another dtype. If there is no checkpoint, they keep the dtype they were trained
    in.
    """
    source = _read_json(model.name_or_path, "config.json")
    dtype = _dtype_of(source)
    cast = {name: _cast(model, name, weight, dtype) for name, weight in weights.items()}
    model.save_pretrained(folder, state_dict=cast)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    former = {name: source[name] for name in FORMER_NAMES if name in source}
    path.write_text(json.dumps({**former, **config}, indent=2) + "\n", encoding="utf-8")


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer under its checkpoint's class name.

    By default, transformers 5 writes a class name and lists that earlier versions can't load.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    named = _read_json(tokenizer.name_or_path, "tokenizer_config.json").get("tokenizer_class")
    config["tokenizer_class"] = named or config["tokenizer_class"]
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = ANY_TOKENIZER
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype in a checkpoint's ``config.json``, or None if it isn't floating-point."""
    name = config.get("dtype") or config.get("torch_dtype")
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def _cast(model: PreTrainedModel, name: str, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast ``weight`` to ``dtype``, unless the architecture keeps this weight in float32."""
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    if dtype is None or not weight.is_floating_point() or any(part in name for part in kept):
        return weight
    return weight.to(dtype)


def _read_json(name_or_path: str | None, file: str) -> dict[str, Any]:
    """Read one of the JSON files in the loaded checkpoint, without downloading it. Return an empty
    dict if the file is missing.
    """
    if not name_or_path:
        return {}
    path = cached_file(
        name_or_path,
        file,
        local_files_only=True,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
