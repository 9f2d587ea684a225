"""Stand-ins for objects in another process. An operation on a stand-in runs in the other process,
which sends back the result.

On the tests' side (``strict``), the program must not be able to influence an assertion. Its objects
never decide comparisons, never see the tests' operands in arithmetic, and can't suppress
exceptions. An object can be read by index or by iteration, but not both. Anything that would break
these rules is refused.
"""

from __future__ import annotations

import builtins
import operator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from .exchange import Exchange

MOST_AHEAD = 256  # maximum number of iterator items to request at once

_REVERSIBLE = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "repr": repr,
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "invert": operator.invert,
}


def _enter(manager: Any) -> Any:
    return type(manager).__enter__(manager)


def _exit(manager: Any, kind: str | None, text: str) -> bool:
    if kind is None:
        return bool(type(manager).__exit__(manager, None, None, None))
    known = getattr(builtins, kind, None)
    if not (isinstance(known, type) and issubclass(known, BaseException)):
        known = Exception
    error = known(text)
    return bool(type(manager).__exit__(manager, known, error, None))


OPERATIONS: dict[str, Callable[..., Any]] = {
    **_REVERSIBLE,
    **_COMPARISONS,
    **_UNARY,
    "len": len,
    "hash": hash,
    "iter": iter,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "enter": _enter,
    "exit": _exit,
}
"""Operations on the other side's objects, by their name in requests."""


class CannotCrossError(BaseException):
    """Raised if a test needs something that a program in another process can't provide.

    This class doesn't derive from ``Exception``, so that a test can't mistake it for an exception
    that the test expects.
    """


class Remote:
    """A stand-in for a function or object on the other side.

    Args:
        exchange: the connection to the other side.
        key: the object's number or name on the other side.
        compares: whether the object's class defines equality.
        identity: the object's number, if ``key`` is a name.
    """

    def __init__(
        self,
        exchange: Exchange,
        key: int | str,
        compares: bool = False,
        identity: int | None = None,
    ) -> None:
        own: dict[str, Any] = {
            "_exchange": exchange,
            "_key": key,
            "_compares": compares,
            "_identity": key if identity is None else identity,
            "_owner": None,  # the ``Like`` that this is a method of, if any
            "_way": None,  # how the object was read: by index or by iteration
            # the value of the exchange's ``changes`` when the values below were read
            "_read_at": -1,
            "_items": [],
            "_parts": {},
            "_source": None,
            "_length": None,
            "__name__": str(key),
        }
        self.__dict__.update(own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._exchange.call(self._key, args, kwargs, self._owner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name} is private, so it cannot be read from another process")
        return self._exchange.part(self._key, "attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._exchange.set(self._key, name, value)

    def __delattr__(self, name: str) -> None:
        self._exchange.delete(self._key, name)

    def _do(self, name: str, *operands: Any) -> Any:
        return self._exchange.operate(name, *operands)

    # Reading the object as a container.

    def _renew(self, way: str | None = None) -> None:
        """Discard the values read so far if anything may have changed on the other side since then.

        Raises CannotCrossError if the object has already been read in another ``way``.
        """
        if self._exchange.strict and way is not None:
            if self._way not in (None, way):
                raise CannotCrossError(
                    "the tests read an object of the program's own class both by index and "
                    "by iteration, and the two may disagree; return a list"
                )
            self.__dict__["_way"] = way
        if self._read_at != self._exchange.changes:
            self.__dict__.update(
                _read_at=self._exchange.changes, _items=[], _parts={}, _source=None, _length=None
            )

    def __len__(self) -> int:
        self._renew()
        if self._length is None:
            self.__dict__["_length"] = operator.index(self._do("len", self))
        return int(self._length)

    def __getitem__(self, index: Any) -> Any:
        self._renew("index")
        place = self._exchange.written(index)
        if place not in self._parts:
            self._parts[place] = self._exchange.part(self._key, "item", index)
        return self._parts[place]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._exchange.changes += 1
        self._do("setitem", self, index, value)

    def __delitem__(self, index: Any) -> None:
        self._exchange.changes += 1
        self._do("delitem", self, index)

    def __iter__(self) -> Iterator[Any]:
        self._renew("iteration")
        if self._source is None:
            self.__dict__["_source"] = iter(self._do("iter", self))
        items = self._items
        source = self._source
        position = 0
        while True:
            if position == len(items):
                try:
                    items.append(next(source))
                except StopIteration:
                    break
            yield items[position]
            position += 1
        if self._items is items:
            if self._length not in (None, position):
                raise CannotCrossError(
                    f"an object of the program's own class has {position} items but reports a length "
                    f"of {self._length}"
                )
            self.__dict__["_length"] = position

    # Comparing the object.

    def _compare(self, name: str, other: Any) -> bool:
        if not self._exchange.strict:
            return bool(self._do(name, self, other))
        own = isinstance(other, Remote)
        if name in ("eq", "ne"):
            if own and other._identity == self._identity:
                return name == "eq"
            decided = self._compares or (own and other._compares) or isinstance(other, type)
            if other is None or not decided:
                return name == "ne"
        raise CannotCrossError(
            "objects of the program's own classes cannot be compared, since their classes would "
            "decide the result; compare their attributes"
        )

    def __eq__(self, other: object) -> bool:
        return self._compare("eq", other)

    def __ne__(self, other: object) -> bool:
        return self._compare("ne", other)

    def __lt__(self, other: Any) -> bool:
        return self._compare("lt", other)

    def __le__(self, other: Any) -> bool:
        return self._compare("le", other)

    def __gt__(self, other: Any) -> bool:
        return self._compare("gt", other)

    def __ge__(self, other: Any) -> bool:
        return self._compare("ge", other)

    def __hash__(self) -> int:
        if not self._exchange.strict:
            return int(self._do("hash", self))
        if self._compares:
            raise CannotCrossError(
                "an object whose class the program defines cannot be in a set or be a key of "
                "a dict if that class defines equality"
            )
        return hash(self._identity)

    def __instancecheck__(self, other: Any) -> bool:
        if stand_in(other) is not None:
            return self._do("isinstance", other, self) is True
        if self._exchange.strict and isinstance(other, (int, float, str)):
            for plain in (int, float, str):
                if isinstance(other, plain) and self._do("issubclass", self, plain) is True:
                    raise CannotCrossError(
                        f"isinstance cannot check for a subclass of {plain.__name__} that the program "
                        f"defines, because the tests get a plain {plain.__name__}"
                    )
        return False

    def __subclasscheck__(self, other: Any) -> bool:
        return stand_in(other) is not None and self._do("issubclass", other, self) is True

    # Using the object in a ``with`` statement.

    def __enter__(self) -> Any:
        return self._do("enter", self)

    def __exit__(self, kind: type[BaseException] | None, error: Any, _: object) -> bool:
        name = None if kind is None else kind.__name__
        try:
            text = str(error)
        except Exception:
            text = ""
        swallows = self._do("exit", self, name, text) is True
        if not self._exchange.strict or kind is None:
            return swallows
        if swallows and issubclass(kind, Exception) and not issubclass(kind, AssertionError):
            raise CannotCrossError(
                "a context manager from the program must not suppress an exception in the tests"
            )
        return False


def _unary(name: str) -> Callable[[Remote], Any]:
    return lambda self: self._do(name, self)


def _binary(name: str, reverse: bool) -> Callable[[Remote, Any], Any]:
    def apply(self: Remote, other: Any) -> Any:
        if self._exchange.strict and not isinstance(other, Remote):
            raise CannotCrossError(
                f"cannot apply {name} to an object whose class the program defines and a "
                f"value of type {type(other).__name__} from the tests, because that class "
                "would then see the expected value"
            )
        return self._do(name, *((other, self) if reverse else (self, other)))

    return apply


for _name in _UNARY:
    setattr(Remote, f"__{_name}__", _unary(_name))
for _name in _REVERSIBLE:
    setattr(Remote, f"__{_name}__", _binary(_name, reverse=False))
    setattr(Remote, f"__r{_name}__", _binary(_name, reverse=True))


class RemoteIterator(Remote):
    """A stand-in for a (possibly endless) iterator on the other side.

    ``next`` requests one item. A loop requests ever larger batches, but never prefetches more items
    than it has already used.
    """

    def __init__(self, exchange: Exchange, key: int) -> None:
        super().__init__(exchange, key)
        self.__dict__.update(_ahead=0, _buffer=[], _done=False)

    def __iter__(self) -> RemoteIterator:
        self.__dict__["_ahead"] = max(1, self._ahead)
        return self

    def __next__(self) -> Any:
        if not self._buffer:
            if self._done:
                raise StopIteration
            items, done = self._exchange.ask({"next": [self._key, max(1, self._ahead)]})
            # Treat an empty reply as the end, or we'd keep asking forever.
            self.__dict__.update(
                _buffer=list(reversed(items)),
                _done=bool(done) or not items,
                _ahead=min(2 * self._ahead, MOST_AHEAD),
            )
            if not items:
                raise StopIteration
        return self._buffer.pop()


class Like:
    """A stand-in for an instance of a tuple, list, dict, set or frozenset subclass. It holds a copy
    of the contents. Other attributes are read from the original.

    Comparisons, lengths and items come from the copy, whatever the subclass defines.
    """

    _remote: Remote
    _known: Any  # the packed contents that both sides last agreed on

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._remote, name)
        if isinstance(value, Remote) and not isinstance(self, (tuple, frozenset)):
            value.__dict__["_owner"] = self
        return value


class LikeTuple(Like, tuple):  # type: ignore[type-arg]
    """A stand-in for an instance of a ``tuple`` subclass, such as a named tuple."""


class LikeFrozenset(Like, frozenset):  # type: ignore[type-arg]
    """A stand-in for an instance of a ``frozenset`` subclass."""


class LikeList(Like, list):  # type: ignore[type-arg]
    """A stand-in for an instance of a ``list`` subclass."""


class LikeDict(Like, dict):  # type: ignore[type-arg]
    """A stand-in for an instance of a ``dict`` subclass."""


class LikeSet(Like, set):  # type: ignore[type-arg]
    """A stand-in for an instance of a ``set`` subclass."""


LIKE: dict[str, type[Any]] = {
    "tuple": LikeTuple,
    "frozenset": LikeFrozenset,
    "list": LikeList,
    "dict": LikeDict,
    "set": LikeSet,
}
MUTABLE_LIKE = (LikeList, LikeDict, LikeSet)


def stand_in(value: Any) -> Remote | None:
    """Return ``value`` itself if it is a ``Remote``, or the ``Remote`` of a ``Like``. Return None
    for other values, which belong to this side.
    """
    kind = type(value)  # ``isinstance`` would trust the value's own ``__class__``
    if issubclass(kind, Remote):
        return value
    return value._remote if issubclass(kind, Like) else None


_DECIDING = (
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__len__",
    "__getitem__",
    "__iter__",
    "__contains__",
    "__missing__",
    "__bool__",
    "__add__",
    "__mul__",
    "__hash__",
)


def plain_base(value: Any, own: tuple[str, ...]) -> type[Any] | None:
    """Return the built-in class that can represent ``value``. Return None if the class of ``value``
    has no such base, or overrides the behaviour of its base.

    ``own`` lists the modules that this side's classes are defined in.
    """
    kind = type(value)
    for base in (tuple, list, dict, set, frozenset):
        if not issubclass(kind, base) or kind is base:
            continue
        above = kind.__mro__[: kind.__mro__.index(base)]
        if base is not tuple and not any(one.__module__ in own for one in above):
            return None  # a standard library class, which ``wire`` supports
        changed = {
            name
            for one in above
            for name in vars(one)
            if name in _DECIDING or (not name.startswith("_") and hasattr(base, name))
        }
        return None if changed else base
    return None
