"""Exceptions in the form in which the program and the tests report them to each other."""

from __future__ import annotations

DETAIL_CHARS = 400


class RemoteError(Exception):
    """An exception that the other side raised. If that exception has a built-in base class, this
    error is also an instance of that class.
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
