"""Sparrow's cache folder, and checks that output files can be written. Commands run these checks up
front, so that a missing folder or a full disk doesn't cost any results.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sparrow.errors import ConfigError

ROOM = 2**16  # bytes that must be free on the disk


def cache_folder() -> Path:
    """Return Sparrow's cache folder, following the XDG Base Directory Specification."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    return cache / "sparrow"


def check_folder(path: str | Path) -> Path:
    """Check that a folder can be written to. Create the folder if it's missing.

    Raises ConfigError if the path is a file, or nothing can be written there.
    """
    path = Path(path)
    with _writing(path):
        if path.exists() and not path.is_dir():
            raise ConfigError(
                f"{path} is a file, expected a folder to write to; choose another path"
            )
        path.mkdir(parents=True, exist_ok=True)
        # Where the file has a name, make it hidden, since it does not belong in the folder.
        with tempfile.TemporaryFile(dir=path, prefix=".") as file:
            file.write(bytes(ROOM))
    return path


def check_file(path: str | Path) -> Path:
    """Check that a file, or a device such as /dev/stdout, can be written. Create the file's folder
    if it's missing.

    Raises ConfigError if the path is a folder, or nothing can be written there.
    """
    path = Path(path)
    with _writing(path):
        if path.is_dir():
            raise ConfigError(
                f"{path} is a folder, expected a file to write to; choose another path"
            )
    check_folder(path.parent)
    return path


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a file atomically.

    Raises ConfigError if the file can't be written.
    """
    write_parts(path, map(str.encode, [text]))


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Like ``write_text``, but write the contents one part at a time, so that they needn't fit in
    memory. The parts may be read from the file that is replaced.
    """
    with replacing(path) as file:
        file.writelines(parts)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file whose contents are replaced atomically at the end of the ``with`` block.

    Raises ConfigError if the file can't be written.
    """
    with _writing(path):
        if path.exists() and not path.is_file():  # a device or a pipe, which must not be replaced
            with open(path, "wb") as file:
                yield file
            return
        partial = path.with_name(path.name + ".partial")
        try:
            with open(partial, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn OS errors into a one-sentence ConfigError."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot write to {path}: {reason}; choose another path or make room"
        ) from error
