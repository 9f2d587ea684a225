"""Calls between test code and the program under test. The two run in separate sandboxes, which are
called sides here.

Both sides send the same requests: ``call`` a function on the other side, ``look`` up a global, read
or ``set`` a ``part`` of an object, or run an ``operation`` (see ``remote``). The answer holds a
``value``, the error that was ``raised``, or the reason why the request was ``refused``. The answer
to a call also reports changes to the arguments and anything printed. A side serves requests while
it waits for an answer, so a test can pass a function to the program. Values use the ``wire``
format, extended here with a few standard types. Functions and objects of other classes stay on
their own side, and the other side refers to them by number (see ``remote``).
"""

from __future__ import annotations

import builtins
import json
import sys
import time
from collections.abc import Iterator
from importlib import import_module

from .confine import allow_cpu
from .errors import DETAIL_CHARS, RemoteError, describe
from .programs import Printed, load
from .remote import (
    LIKE,
    MOST_AHEAD,
    MUTABLE_LIKE,
    OPERATIONS,
    CannotCrossError,
    Remote,
    RemoteIterator,
    plain_base,
    stand_in,
)
from .wire import pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

    from .wire import Channel

_AHEAD_S = 0.02  # seconds that an iterator may spend on prefetched items
_ANSWERS = {"value", "raised", "refused"}
_OWN = ("program", "tests", "__main__")  # modules that either side's own classes are defined in
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


# (module, class) -> functions that write a value and read it back. Classes are imported only when
# needed.
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


# Exceptions from the other side are never rebuilt as these classes. The first two say nothing about
# the kind of error. The others would end a test's ``map`` or generator as if it had finished.
_NEVER_RAISED = (BaseException, Exception, StopIteration, StopAsyncIteration, GeneratorExit)


class Exchange:
    """One of two sides that call each other.

    Args:
        channel: the connection to the other side.
        find: looks up a function or global by name for the other side; raises NameError if there is
            none.
        loaded: raises an error if loading this side failed.
        strict: whether the other side is untrusted; see ``remote``.
    """

    def __init__(
        self,
        channel: Channel,
        find: Callable[[str], Any],
        loaded: Callable[[], None] = lambda: None,
        strict: bool = False,
    ) -> None:
        self._channel = channel
        self._find = find
        self._loaded = loaded
        self.strict = strict
        self.asked = 0  # calls and look-ups answered by the other side so far
        self.changes = 0  # operations so far that may have changed the other side's objects
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}
        self._failed: dict[int, BaseException] = {}
        # Mutable parts that this side has read from the other side's objects, and their contents
        # when they were read. Each key names the object, the kind of part and the part.
        self._borrowed: dict[str, tuple[list[Any], Any, Any]] = {}

    def call(
        self,
        key: int | str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        owner: Any = None,
    ) -> Any:
        """Call a function on the other side. If the function is a method of a ``Like``, ``owner``
        is that object.

        Raises RemoteError if the function raised an error. Raises CannotCrossError if an argument
        or the result cannot be sent.
        """
        self._send_changes()
        self._give_back(owner)
        message = {
            "call": key,
            "args": self._crossing(list(args)),
            "kwargs": self._crossing(dict(kwargs)),
        }
        self.changes += 1
        try:
            return self.ask(message, dict(enumerate(args)) | dict(kwargs))
        finally:
            for copy in (owner, *args, *kwargs.values()):
                self._renew(copy)

    def look(self, name: str) -> Any:
        """Return the value of a global on the other side. Raises RemoteError if there is none."""
        return self.ask({"look": name})

    def require(self) -> None:
        """Raise a RemoteError if loading the other side failed."""
        self.ask({"load": True})

    def operate(self, name: str, *operands: Any) -> Any:
        """Run one of ``OPERATIONS`` on the side where the objects live."""
        self._send_changes()
        return self.ask({"operation": [name, self._crossing(list(operands))]})

    def part(self, key: int | str, kind: str, name: Any) -> Any:
        """Return an attribute or item of an object on the other side. If the value is mutable, such
        as a list or dict, changes made to the value here are sent back before the next call.
        """
        place = [key, kind, self._crossing(name)]
        written = json.dumps(place)
        if written in self._borrowed:
            return self._borrowed[written][1]
        value = self.ask({"part": place})
        if type(value).__name__ in _MUTABLE:
            self._borrowed[written] = (place, value, self._pack(value))
        return value

    def set(self, key: int | str, name: str, value: Any) -> None:
        """Set an attribute of an object on the other side."""
        self._send_changes()
        self.changes += 1
        self.ask({"set": [key, name, self._crossing(value)]})

    def delete(self, key: int | str, name: str) -> None:
        """Delete an attribute of an object on the other side."""
        self._send_changes()
        self.changes += 1
        self.ask({"delete": [key, name]})

    def written(self, value: Any) -> str:
        """Return a value's wire format as text, for use as a dict key."""
        return json.dumps(self._crossing(value))

    def ask(self, message: dict[str, Any], arguments: Mapping[int | str, Any] | None = None) -> Any:
        self._channel.send(message)
        while not _ANSWERS & (reply := self._channel.receive()).keys():
            self.answer(reply)
        if reply.get("printed"):
            sys.stdout.write(str(reply["printed"]))
        if "refused" in reply:
            raise CannotCrossError(str(reply["refused"])[:DETAIL_CHARS])
        for place, value in reply.get("changed", ()):
            _change((arguments or {})[place], self._unpack(value))
        self.asked += "call" in message or "look" in message
        if "raised" in reply:
            raise _error(reply, self._unpack)
        return self._unpack(reply["value"])

    def _send_changes(self) -> None:
        """Send back changes made here to mutable parts of the other side's objects."""
        borrowed = list(self._borrowed.values())
        self._borrowed.clear()
        for place, value, before in borrowed:
            if (now := self._crossing(value)) != before:
                self.changes += 1
                self.ask({"alter": [*place, now]})

    def _give_back(self, copy: Any) -> None:
        """Send back changes made here to a copy of the other side's list, dict or set."""
        if isinstance(copy, MUTABLE_LIKE):
            content = self._crossing(_content(copy))
            if content != copy._known:
                copy._known = content
                self.ask({"alter": [copy._remote._key, "content", None, content]})

    def _renew(self, copy: Any) -> None:
        """Refresh a copy of the other side's list, dict or set."""
        if isinstance(copy, MUTABLE_LIKE):
            content = self.ask({"content": copy._remote._key})
            _change(copy, content)
            copy._known = self._pack(_content(copy))

    def answer(self, header: Mapping[str, Any], printed: Callable[[], str] = str) -> None:
        """Carry out a request from the other side and send the answer."""
        try:
            reply = self._answered(header)
            json.dumps(reply)
        except CannotCrossError as error:
            reply = {"refused": str(error)}
        except BaseException as error:
            reply = _raised(error, self._pack)
        if text := printed():
            reply["printed"] = text
        self._channel.send(reply)

    def _answered(self, header: Mapping[str, Any]) -> dict[str, Any]:
        if "call" in header:
            return self._called(header)
        value: Any = None
        if "load" in header:
            self._loaded()
        elif "look" in header:
            value = self._find(header["look"])
        elif "part" in header:
            value = self._part(*header["part"])
        elif "set" in header:
            key, name, new = header["set"]
            setattr(self._settable(key, name), name, self._unpack(new))
        elif "delete" in header:
            key, name = header["delete"]
            delattr(self._settable(key, name), name)
        elif "alter" in header:
            self._alter(*header["alter"])
        elif "operation" in header:
            name, operands = header["operation"]
            value = OPERATIONS[name](*self._unpack(operands))
        elif "content" in header:
            value = _content(self._named(header["content"]))
        elif "next" in header:
            value = self._next(*header["next"])
        else:
            raise ValueError(f"unknown request with the fields {', '.join(map(str, header))}")
        self._send_changes()
        return {"value": self._crossing(value)}

    def _called(self, header: Mapping[str, Any]) -> dict[str, Any]:
        key = header["call"]
        args = self._unpack(header["args"])
        kwargs = self._unpack(header["kwargs"])
        function = self._named(key)
        try:
            value = function(*args, **kwargs)
        finally:
            self._send_changes()
            for copy in (*args, *kwargs.values()):
                self._give_back(copy)
        reply = {"value": self._crossing(value)}
        before = [
            *enumerate(header["args"]),
            *((name, value) for name, value in header["kwargs"]["dict"]),
        ]
        after = dict(enumerate(args)) | kwargs
        mutable = [(place, old) for place, old in before if type(after[place]).__name__ in _MUTABLE]
        changed = [
            (place, new) for place, old in mutable if (new := self._crossing(after[place])) != old
        ]
        return reply | ({"changed": changed} if changed else {})

    def _part(self, key: int | str, kind: str, name: Any) -> Any:
        owner = self._named(key)
        if kind == "item":
            return owner[self._unpack(name)]
        if name.startswith("_"):  # a program could reach the tests' globals through such a name
            raise AttributeError(name)
        return getattr(owner, name)

    def _settable(self, key: int | str, name: str) -> Any:
        """Return the object ``key`` after checking that the other side may set its attribute
        ``name``.

        Raises AttributeError if setting the attribute isn't allowed, since it could change how this
        side's code behaves.
        """
        owner = self._named(key)
        if type(owner).__module__ not in _OWN or isinstance(owner, type):
            raise AttributeError(
                f"attributes of {type(owner).__name__} objects cannot be set from another process"
            )
        if name.startswith("_") or callable(getattr(type(owner), name, None)):
            raise AttributeError(f"{name} cannot be set from another process")
        return owner

    def _alter(self, key: int | str, kind: str, name: Any, new: Any) -> None:
        if kind == "content":
            part = self._named(key)
            allowed = plain_base(part, _OWN) is not None
        else:
            part = self._part(key, kind, name)
            allowed = type(part).__name__ in _MUTABLE
        if not allowed:
            raise AttributeError(f"{name} cannot be changed in place from another process")
        _change(part, self._unpack(new))

    def _next(self, key: int, count: int) -> tuple[list[Any], bool]:
        """Return up to ``count`` more items from an iterator, and whether it's exhausted."""
        if key in self._failed:
            raise self._failed.pop(key)
        iterator = self._kept[key]
        items: list[Any] = []
        start = time.monotonic()
        try:
            while len(items) < min(count, MOST_AHEAD):
                items.append(next(iterator))
                if time.monotonic() - start > _AHEAD_S:
                    break
        except StopIteration:
            return items, True
        except BaseException as error:
            if not items:
                raise
            self._failed[key] = error
        return items, False

    def _crossing(self, value: Any) -> Any:
        """Pack ``value`` for the other side. Raises CannotCrossError if it cannot be sent."""
        try:
            packed = self._pack(value)
        except TypeError as error:
            raise CannotCrossError(str(error)) from error
        return packed

    def _pack(self, value: Any) -> Any:
        return pack(value, self._pack_other)

    def _unpack(self, value: Any) -> Any:
        return unpack(value, self._unpack_other)

    def _pack_other(self, value: Any) -> Any:
        """Pack a value of a non-plain type. Return None for values that ``wire`` can pack."""
        if (other := stand_in(value)) is not None:
            self._give_back(value)
            return {"yours": other._key}
        kind = (type(value).__module__, type(value).__name__)
        if kind in _KINDS and (kind[1] != "ndarray" or value.dtype.kind in "biufcSU"):
            return {".".join(kind): self._pack(_KINDS[kind][0](value))}
        if (base := plain_base(value, _OWN)) is not None:
            content = self._pack(_content(value))
            return {"like": [self._number(value), base.__name__, content]}
        if isinstance(value, Iterator):
            return {"iterator": self._number(value)}
        if (name := _public_name(value)) is not None:
            return {"named": name}
        if callable(value) or type(value).__module__ in _OWN:
            compares = type(value).__eq__ is not object.__eq__
            return {"mine": [self._number(value), compares]}
        return None

    def _number(self, value: Any) -> int:
        """Return the number by which the other side refers to an object that stays here."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return self._numbers[id(value)]

    def _named(self, key: int | str) -> Any:
        return self._kept[key] if isinstance(key, int) else self._find(key)

    def _unpack_other(self, kind: str, content: Any) -> Any:
        if kind == "yours":
            return self._named(content)
        if kind == "mine":
            number, compares = content
            return self._stand_in(int(number), lambda n: Remote(self, n, bool(compares)))
        if kind == "iterator":
            return self._stand_in(int(content), lambda n: RemoteIterator(self, n))
        if kind == "like":
            return self._like(*content)
        if kind == "named" and content[0] in _MODULES:
            value = import_module(content[0])
            for name in content[1].split("."):
                value = getattr(value, name)
            if _public_name(value) == content:
                return value
        module, _, name = kind.partition(".")
        if (module, name) not in _KINDS:
            raise ValueError(f"the wire format has no type {kind!r}")
        return _KINDS[module, name][1](self._unpack(content))

    def _stand_in(self, number: int, make: Callable[[int], Any]) -> Any:
        """Return the stand-in for an object on the other side. An object always gets the same
        stand-in.
        """
        if number not in self._remotes:
            self._remotes[number] = make(number)
        return self._remotes[number]

    def _like(self, number: int, base: str, content: Any) -> Any:
        """Create or update the copy of an object on the other side, and return the copy. The object
        is an instance of a container subclass, such as a named tuple.
        """
        value = self._unpack(content)
        copy = self._remotes.get(number)
        if copy is None or not isinstance(copy, LIKE[base]) or not isinstance(copy, MUTABLE_LIKE):
            copy = self._remotes[number] = LIKE[base](value)
            copy._remote = Remote(self, number)
        else:
            _change(copy, value)
        copy._known = content
        return copy


def _content(value: Any) -> Any:
    """Return a value's contents as its built-in base class sees them, ignoring the subclass's
    overrides.
    """
    if isinstance(value, dict):
        return dict(dict.items(value))
    for base in (list, tuple, set, frozenset):
        if issubclass(type(value), base):
            return base(base.__iter__(value))
    raise TypeError(f"a {type(value).__name__} is not a subclass of a plain container")


def _public_name(value: Any) -> list[str] | None:
    """Return the module and name of a class or function that exists on both sides, such as ``int``
    or ``operator.add``. Return None for anything else.
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
    """Update a mutable argument in place from the other side's copy, preserving the identities of
    its parts.
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
    """Rebuild an exception raised on the other side, so that the same ``except`` clauses catch it."""
    detail = str(reply["raised"])
    for name in reply.get("kinds", ()):
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, BaseException) and kind not in _NEVER_RAISED:
            try:
                error = type(kind.__name__, (RemoteError, kind), {})(*unpack(reply.get("with", [])))
            # The class needs different arguments, so fall back to its base class.
            except TypeError:
                continue
            error.detail = detail
            return error
    error = RemoteError(detail)
    error.detail = detail
    return error


def serve(channel: Channel, request: Mapping[str, Any]) -> NoReturn:
    """Mode ``exchange``: answer the tests' requests, passing objects as well as plain values."""
    printed = Printed()
    sys.stdout = printed
    program = load(channel, request)
    printed.take()  # discard what the program printed while loading
    exchange = Exchange(channel, program.find, program.loaded)
    while True:
        header = channel.receive()
        allow_cpu(request["limits"])
        exchange.answer(header, printed.take)
