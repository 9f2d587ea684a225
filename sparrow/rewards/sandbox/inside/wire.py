"""The message format between the sandbox and the outside: one plain value per line, as
type-preserving JSON.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Hashable, Iterator, Mapping

# not typing.TYPE_CHECKING, because importing typing would slow down every program
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# These limits keep a program's messages cheap to read. The size of a message is limited elsewhere.
MOST_VALUES = 1 << 20
MOST_CONTAINERS = 1 << 18
MOST_STRINGS = 1 << 18
MOST_DEPTH = 200
MOST_DIGITS = 4300
# maximum number of keys with the same hash; building a set may compare each of them with all
# the others
MOST_ALIKE = 32
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")


_PLAIN = (list, dict, tuple, set, frozenset, bytes, bytearray, complex)
# These return a plain value even for a subclass instance, whose own conversions and comparisons
# could return anything.
_SCALARS: tuple[tuple[type, Any], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
)


def pack(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """Convert a built-in value to type-preserving JSON, the format for arguments and results.

    ``other`` converts values of other types, or returns None for types it doesn't support.

    Raises TypeError if a value's type isn't supported.
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
        plain = complex(value)  # the real and imaginary parts of a subclass could be anything
        return {"complex": [plain.real, plain.imag]}
    if hasattr(value, "tolist"):  # arrays and array scalars
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
    """Restore a value converted by ``pack``. Raises ValueError if ``value`` isn't in its format."""
    if isinstance(value, list):
        return [unpack(item, other) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        keys = _spread([unpack(key, other) for key, _ in content])
        return dict(zip(keys, (unpack(item, other) for _, item in content), strict=True))
    if kind == "bytes":
        return content.encode("latin-1")
    if kind == "complex":
        return complex(*content)
    if kind not in ("tuple", "set", "frozenset"):
        if other is not None:
            return other(kind, content)
        raise ValueError(f"the wire format has no type {kind!r}")
    items = [unpack(item, other) for item in content]
    if kind == "tuple":
        return tuple(items)
    _spread(items)
    return set(items) if kind == "set" else frozenset(items)


def _spread(keys: list[Hashable]) -> list[Hashable]:
    """Return ``keys`` after checking their hashes. Raises ValueError if so many hashes collide that
    building a set would take too long.
    """
    alike: dict[int, int] = {}
    for key in keys:
        hash_value = hash(key)
        alike[hash_value] = alike.get(hash_value, 0) + 1
    if alike and max(alike.values()) > MOST_ALIKE:
        raise ValueError(f"more than {MOST_ALIKE} keys have the same hash")
    return keys


def parse(line: bytes) -> dict[str, Any]:
    """Check that a possibly hostile line of JSON is cheap to read, then read the object in it.

    Raises ValueError if the line is not JSON or not an object, has too many values, containers,
    strings or digits, or is nested too deeply.
    """
    if (strings := (line.count(b'"') - line.count(b'\\"')) // 2) > MOST_STRINGS:
        raise ValueError(f"it has {strings} strings, over the limit of {MOST_STRINGS}")
    if _values(line) > MOST_VALUES or _containers(line) > MOST_DEPTH:
        outside = _STRING.sub(b"0", line)
        if (values := _values(outside)) > MOST_VALUES:
            raise ValueError(f"it has {values} values, over the limit of {MOST_VALUES}")
        if (containers := _containers(outside)) > MOST_CONTAINERS:
            raise ValueError(f"it has {containers} containers, over the limit of {MOST_CONTAINERS}")
        depth = deepest = 0
        for bracket in outside.translate(None, _NO_BRACKETS):
            depth += 1 if bracket in b"[{" else -1
            deepest = max(deepest, depth)
        if deepest > MOST_DEPTH:
            raise ValueError(f"it is nested {deepest} levels deep, over the limit of {MOST_DEPTH}")

    # If the interpreter's own digit limit is strict enough, rely on that, as it's cheaper.
    unlimited = not 0 < sys.get_int_max_str_digits() <= MOST_DIGITS
    try:
        message = json.loads(line, parse_int=_short_int if unlimited else None)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


def _values(line: bytes) -> int:
    return line.count(b",") + line.count(b":") + 1


def _containers(line: bytes) -> int:
    return line.count(b"[") + line.count(b"{")


def _short_int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, over the limit of {MOST_DIGITS}")
    return int(digits)


class Channel:
    """Exchanges objects as lines of JSON over two file descriptors. A third file descriptor takes a
    final message.
    """

    hostile = False  # whether messages come from a program and so need ``parse``

    def __init__(self, read_fd: int, write_fd: int, error_fd: int) -> None:
        self._requests = os.fdopen(read_fd, "rb")
        self._write_fd = write_fd
        self._error_fd = error_fd

    def receive(self) -> dict[str, Any]:
        """Receive the next object, or exit if there are no more."""
        line = self._requests.readline()
        if not line:
            os._exit(0)
        return parse(line) if self.hostile else json.loads(line)

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Send one object, followed by ``body``. The object must contain the length of ``body``."""
        write_whole(self._write_fd, json.dumps(message).encode() + b"\n" + body)

    def complain(self, text: str) -> None:
        """Write a final message saying why this process is ending."""
        write_whole(self._error_fd, text.encode(errors="replace"))

    def close(self, but_errors: bool = False) -> None:
        self._requests.close()
        os.close(self._write_fd)
        if not but_errors:
            os.close(self._error_fd)


def write_whole(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
