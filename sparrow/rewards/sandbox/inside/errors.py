"""Exceptions as the program and the tests report them to each other."""

from __future__ import annotations

DETAIL_CHARS = 400


class RemoteError(Exception):
    """An exception that the other side raised. It is also an instance of that exception's built-in
    base class, if it has one.
    """

    detail = ""


def describe(error: BaseException) -> str:
    """Return the type and message of an exception in one short line, even if converting the
    exception to text raises an error.
    """
    if isinstance(error, RemoteError):
        return error.detail
    try:
        text = str(error)
    except BaseException:
        text = ""
    return " ".join([type(error).__name__ + ":" * bool(text.strip()), *text.split()])[:DETAIL_CHARS]
