"""Calls between test code and the program it tests, each in a sandbox of its own.

Both sides send the same requests: ``call`` a function of the other side with arguments, ``look`` up
a global, read an ``attribute`` of an object; the answer has a ``value`` or says what was
``raised``. A side that waits for an answer serves requests in the meantime, so that a test can hand
the program a function. Values cross as ``wire`` packs them, and this module adds a few more
standard types; functions and objects of other classes stay where they are and are named by a
number. What a call did to its arguments, and what it printed, comes back with the answer.
"""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Iterator
from importlib import import_module

from .wire import pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .wire import Channel

DETAIL_CHARS = 400
_MODULES = (
    "builtins",
    "math",
    "operator",
    "collections",
    "datetime",
    "decimal",
    "fractions",
    "string",
    "numpy",
)
_MUTABLE = (
    "list",
    "dict",
    "set",
    "deque",
    "bytearray",
    "ndarray",
    "Counter",
    "OrderedDict",
    "defaultdict",
    "array",
)


def _array(content: Any) -> Any:
    return import_module("numpy").array(content[1], dtype=content[0])


# By module and name: how a value is written, and how it is read back. A class is imported only when
# a value needs it.
_KINDS: dict[tuple[str, str], tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    ("decimal", "Decimal"): (str, lambda c: import_module("decimal").Decimal(c)),
    ("fractions", "Fraction"): (str, lambda c: import_module("fractions").Fraction(c)),
    ("datetime", "date"): (str, lambda c: import_module("datetime").date.fromisoformat(c)),
    ("datetime", "datetime"): (str, lambda c: import_module("datetime").datetime.fromisoformat(c)),
    ("datetime", "time"): (str, lambda c: import_module("datetime").time.fromisoformat(c)),
    ("datetime", "timedelta"): (
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda c: import_module("datetime").timedelta(*c),
    ),
    ("builtins", "range"): (lambda v: [v.start, v.stop, v.step], lambda c: range(*c)),
    ("collections", "deque"): (
        lambda v: [list(v), v.maxlen],
        lambda c: import_module("collections").deque(*c),
    ),
    ("collections", "Counter"): (dict, lambda c: import_module("collections").Counter(c)),
    ("collections", "OrderedDict"): (dict, lambda c: import_module("collections").OrderedDict(c)),
    ("array", "array"): (
        lambda v: [v.typecode, list(v)],
        lambda c: import_module("array").array(*c),
    ),
    ("numpy", "ndarray"): (lambda v: [v.dtype.str, v.tolist()], _array),
}


# Every exception is one of the first two; the others would end a test's ``map`` or generator as if
# it had finished.
_NEVER_RAISED = (BaseException, Exception, StopIteration, StopAsyncIteration, GeneratorExit)


class RemoteError(Exception):
    """The other side raised an exception; raised as a subclass of the same built-in one too, where
    there is one.
    """

    detail = ""


class Remote:
    """A function or object of the other side."""

    def __init__(self, exchange: Exchange, key: int | str) -> None:
        self._exchange, self._key = exchange, key
        self.__name__ = str(key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._exchange.call(self._key, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name} of the other side's objects cannot be used")
        return self._exchange.ask({"attribute": [self._key, name]})


class Exchange:
    """One side of the calls.

    Args: channel: the connection to the other side. find: returns the function or global that the
        other side asks for by name. Raises NameError: there is none.
    """

    def __init__(self, channel: Channel, find: Callable[[str], Any]) -> None:
        self._channel, self._find = channel, find
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}

    def call(self, key: int | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of the other side. Raises RemoteError: it raised; TypeError: an argument
        cannot cross.
        """
        message = {"call": key, "args": self._pack(list(args)), "kwargs": self._pack(dict(kwargs))}
        return self.ask(message, dict(enumerate(args)) | dict(kwargs))

    def look(self, name: str) -> Any:
        """The value of a global of the other side. Raises RemoteError: it has none of this name."""
        return self.ask({"look": name})

    def ask(self, message: dict[str, Any], arguments: Mapping[int | str, Any] | None = None) -> Any:
        self._channel.send(message)
        while "value" not in (reply := self._channel.receive()) and "raised" not in reply:
            self.answer(reply)
        if reply.get("printed"):
            sys.stdout.write(str(reply["printed"]))
        for place, value in reply.get("changed", ()):
            _change((arguments or {})[place], self._unpack(value))
        if "raised" in reply:
            raise _error(reply, self._unpack)
        return self._unpack(reply["value"])

    def answer(self, header: Mapping[str, Any], printed: Callable[[], str] = str) -> None:
        """Do what the other side asks and send it the answer."""
        try:
            if "look" in header:
                reply = {"value": self._pack(self._find(header["look"]))}
            elif "attribute" in header:
                key, name = header["attribute"]
                if name.startswith(
                    "_"
                ):  # through such a name, a program could reach the tests' globals
                    raise AttributeError(name)
                reply = {"value": self._pack(getattr(self._named(key), name))}
            else:
                reply = self._called(header)
            json.dumps(reply)
        except BaseException as error:
            reply = _raised(error, self._pack)
        if text := printed():
            reply["printed"] = text
        self._channel.send(reply)

    def _called(self, header: Mapping[str, Any]) -> dict[str, Any]:
        key, args, kwargs = (
            header["call"],
            self._unpack(header["args"]),
            self._unpack(header["kwargs"]),
        )
        function = self._named(key)
        reply = {"value": self._pack(function(*args, **kwargs))}
        before = [
            *enumerate(header["args"]),
            *((name, value) for name, value in header["kwargs"]["dict"]),
        ]
        after = dict(enumerate(args)) | kwargs
        mutable = [(place, old) for place, old in before if type(after[place]).__name__ in _MUTABLE]
        changed = [
            (place, new) for place, old in mutable if (new := self._pack(after[place])) != old
        ]
        return reply | ({"changed": changed} if changed else {})

    def _pack(self, value: Any) -> Any:
        return pack(value, self._pack_other)

    def _unpack(self, value: Any) -> Any:
        return unpack(value, self._unpack_other)

    def _pack_other(self, value: Any) -> Any:
        """Pack a value of no plain type; None leaves it to ``wire``."""
        if isinstance(value, Remote):
            return {"yours": value._key}
        kind = (type(value).__module__, type(value).__name__)
        if kind in _KINDS and (kind[1] != "ndarray" or value.dtype.kind in "biufcSU"):
            return {".".join(kind): self._pack(_KINDS[kind][0](value))}
        if isinstance(value, Iterator):
            return {"iterator": [self._pack(item) for item in value]}
        if (name := _public_name(value)) is not None:
            return {"named": name}
        if callable(value) or type(value).__module__ in ("program", "tests"):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self._kept)
                self._kept.append(value)
            return {"mine": self._numbers[id(value)]}
        return None

    def _named(self, key: int | str) -> Any:
        return self._kept[key] if isinstance(key, int) else self._find(key)

    def _unpack_other(self, kind: str, content: Any) -> Any:
        if kind == "yours":
            return self._named(content)
        if kind == "mine":
            return self._remotes.setdefault(content, Remote(self, int(content)))
        if kind == "iterator":
            return iter([self._unpack(item) for item in content])
        if kind == "named" and content[0] in _MODULES:
            value = import_module(content[0])
            for name in content[1].split("."):
                value = getattr(value, name)
            if _public_name(value) == content:
                return value
        module, _, name = kind.partition(".")
        if (module, name) not in _KINDS:
            raise ValueError(f"no type {kind!r} in the wire format")
        return _KINDS[module, name][1](self._unpack(content))


def _public_name(value: Any) -> list[str] | None:
    """Module and name of a class or function that both sides have anyway, such as ``int`` or
    ``operator.add``.
    """
    name = getattr(value, "__qualname__", None)
    if not callable(value) or not isinstance(name, str):
        return None
    module = getattr(getattr(value, "__objclass__", value), "__module__", None)
    if module in ("_operator", "_collections", "_decimal"):
        module = module[1:]
    if module not in _MODULES or module not in sys.modules:
        return None
    resolved: Any = sys.modules[module]
    for part in name.split("."):
        resolved = getattr(resolved, part, None)
    return [module, name] if resolved is value else None


def _change(original: Any, new: Any) -> None:
    """Give a mutable argument the value that the other side's copy of it has now, and keep its
    parts' identities.
    """
    if isinstance(original, dict):
        merged = {key: _kept(original.get(key), value) for key, value in new.items()}
        original.clear()
        original.update(merged)
    elif isinstance(original, set):
        original.clear()
        original.update(new)
    elif type(original).__name__ == "ndarray":
        original[...] = new
    else:
        old = list(original)
        merged_items = [_kept(old[i] if i < len(old) else None, item) for i, item in enumerate(new)]
        original.clear() if hasattr(original, "clear") else original.__delitem__(slice(None))
        original.extend(merged_items)


def _kept(old: Any, new: Any) -> Any:
    if type(old) is not type(new) or type(old).__name__ not in _MUTABLE:
        return new
    _change(old, new)
    return old


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


def _raised(error: BaseException, pack: Callable[[Any], Any]) -> dict[str, Any]:
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    reply: dict[str, Any] = {"raised": describe(error), "kinds": kinds}
    try:
        reply["with"] = pack(list(error.args))
        json.dumps(reply["with"])
    except BaseException:
        reply["with"] = [reply["raised"].partition(": ")[2]]
    return reply


def _error(reply: Mapping[str, Any], unpack: Callable[[Any], Any]) -> RemoteError:
    """The other side's exception, as one that the same ``except`` catches."""
    detail = str(reply["raised"])
    for name in reply.get("kinds", ()):
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, BaseException) and kind not in _NEVER_RAISED:
            try:
                error = type(kind.__name__, (RemoteError, kind), {})(*unpack(reply.get("with", [])))
            except TypeError:  # one that needs certain arguments; its base will do
                continue
            error.detail = detail
            return error
    error = RemoteError(detail)
    error.detail = detail
    return error
