"""What crosses the wall, and how: plain values as JSON that keeps their type, a line for each message."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping

TYPE_CHECKING = False  # typing.TYPE_CHECKING without typing: every program pays for the imports made here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


_PLAIN = (list, dict, tuple, set, frozenset, bytes, bytearray, complex)
# The values themselves of subclasses, whose own conversions and comparisons could claim anything.
_SCALARS: tuple[tuple[type, Any], ...] = ((int, int.__int__), (float, float.__float__), (str, str.__str__))


def pack(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """A built-in value as JSON that keeps its type; the wire format of arguments and results.

    ``other`` is asked for what a value of no plain type is written as, and answers None if it does not know either.

    Raises TypeError: a value of another kind.
    """
    if value is None or value is True or value is False:
        return value
    for scalar, exact in _SCALARS:
        if isinstance(value, scalar):
            return exact(value)
    if other is not None and type(value) not in _PLAIN and (packed := other(value)) is not None:
        return packed
    if isinstance(value, list):
        return [pack(item, other) for item in value]
    if isinstance(value, Mapping):
        return {"dict": [[pack(key, other), pack(item, other)] for key, item in value.items()]}
    for group in (tuple, set, frozenset):
        if isinstance(value, group):
            return {group.__name__: [pack(item, other) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).decode("latin-1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "tolist"):  # arrays and their scalars
        return pack(value.tolist(), other)
    if isinstance(value, Iterator) or type(value).__name__ in (
        "range",
        "deque",
        "dict_keys",
        "dict_values",
        "dict_items",
    ):
        return [pack(item, other) for item in value]
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")


def unpack(value: Any, other: Callable[[str, Any], Any] | None = None) -> Any:
    """The value that ``pack`` wrote. Raises ValueError: not written by ``pack``."""
    if isinstance(value, list):
        return [unpack(item, other) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {unpack(key, other): unpack(item, other) for key, item in content}
    if kind == "bytes":
        return content.encode("latin-1")
    if kind == "complex":
        return complex(*content)
    if kind not in ("tuple", "set", "frozenset"):
        if other is not None:
            return other(kind, content)
        raise ValueError(f"no type {kind!r} in the wire format")
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](unpack(item, other) for item in content)


class Channel:
    """Objects in lines of JSON over two file descriptors."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._requests, self._write_fd = os.fdopen(read_fd, "rb"), write_fd

    def receive(self) -> dict[str, Any]:
        """The next object; ends this process when there is none."""
        line = self._requests.readline()
        if not line:
            os._exit(0)
        return json.loads(line)

    def send(self, message: dict[str, Any]) -> None:
        write_whole(self._write_fd, json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self._requests.close()
        os.close(self._write_fd)


def write_whole(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
