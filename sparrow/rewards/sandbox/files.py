"""Remove whatever files a program has left behind."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress

_log = logging.getLogger(__name__)


def remove(folder: str) -> None:
    """Remove a folder no longer used by any process, or log a warning if that fails.

    A program may have nested folders so deeply that neither a path nor recursion can reach the
    bottom. Therefore, subfolders are moved to the top before their parent is removed.
    """
    number = 0
    mark = secrets.token_hex(8)
    pending = [folder]
    while pending:
        try:
            with os.scandir(folder) as entries:
                pending = [entry.path for entry in entries]
            for path in pending:
                if not _unlinked(path):
                    os.chmod(path, 0o700)
                    with os.scandir(path) as entries:
                        inner = [entry.path for entry in entries]
                    for below in inner:
                        if not _unlinked(below):
                            # moving a folder requires write permission on it
                            os.chmod(below, 0o700)
                            os.rename(below, f"{folder}/{mark}-{number}")
                            number += 1
                    os.rmdir(path)
        except FileNotFoundError:
            break
        except OSError as error:
            _log.warning("a program left %s, which cannot be removed: %s", folder, error)
            return
    with suppress(FileNotFoundError):
        os.rmdir(folder)


def _unlinked(path: str) -> bool:
    """Unlink ``path`` unless it is a folder, and return whether it was unlinked."""
    try:
        os.unlink(path)
    except IsADirectoryError:
        return False
    return True
