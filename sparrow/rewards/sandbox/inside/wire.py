"""What crosses the wall, and how: plain values as JSON that keeps their type, a line for each message."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping

TYPE_CHECKING = False  # typing.TYPE_CHECKING without typing: every program pays for the imports made here
if TYPE_CHECKING:
    from typing import Any


def pack(value: Any) -> Any:
    """A built-in value as JSON that keeps its type; the wire format of arguments and results.

    Raises TypeError: a value of another kind.
    """
    if value is None or value is True or value is False:
        return value
    for scalar in (int, float, str):
        if isinstance(value, scalar):
            return scalar(value)  # not a subclass, whose own comparisons could claim anything
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, Mapping):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    for group in (tuple, set, frozenset):
        if isinstance(value, group):
            return {group.__name__: [pack(item) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).decode("latin-1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "tolist"):  # arrays and their scalars
        return pack(value.tolist())
    if isinstance(value, Iterator) or type(value).__name__ in (
        "range",
        "deque",
        "dict_keys",
        "dict_values",
        "dict_items",
    ):
        return [pack(item) for item in value]
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")


def unpack(value: Any) -> Any:
    """The value that ``pack`` wrote. Raises ValueError: not written by ``pack``."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in content}
    if kind == "bytes":
        return content.encode("latin-1")
    if kind == "complex":
        return complex(*content)
    if kind not in ("tuple", "set", "frozenset"):
        raise ValueError(f"no type {kind!r} in the wire format")
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(unpack, content))


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
