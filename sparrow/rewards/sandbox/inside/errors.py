"""Exceptions as the two sides describe them to each other."""

from __future__ import annotations

DETAIL_CHARS = 400


class RemoteError(Exception):
    """The other side raised an exception; raised as a subclass of the same built-in one too, where
    there is one.
    """

    detail = ""


def describe(error: BaseException) -> str:
    """Type and message of an exception, in one short line; safe with exceptions whose own text
    fails.
    """
    if isinstance(error, RemoteError):
        return error.detail
    try:
        text = str(error)
    except BaseException:
        text = ""
    return " ".join([type(error).__name__ + ":" * bool(text.strip()), *text.split()])[:DETAIL_CHARS]
