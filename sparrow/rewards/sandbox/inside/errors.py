"""Exceptions passed between the program and the tests."""

from __future__ import annotations

DETAIL_CHARS = 400


class RemoteError(Exception):
    """An exception raised on the other side. It is also an instance of the original exception's
    built-in base class, if there is one.
    """

    detail = ""


def describe(error: BaseException) -> str:
    """Return an exception's type and message as one short line, even if its ``__str__`` raises."""
    if isinstance(error, RemoteError):
        return error.detail
    try:
        text = str(error)
    except BaseException:
        text = ""
    return " ".join([type(error).__name__ + ":" * bool(text.strip()), *text.split()])[:DETAIL_CHARS]
