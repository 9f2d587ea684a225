"""The mode that runs trusted test code. The program that the tests call runs in another sandbox."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Mapping

from . import collected
from .confine import confine
from .errors import RemoteError, describe
from .exchange import Exchange
from .programs import execute, run_source
from .remote import CannotCrossError, Remote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .wire import Channel


class Names(dict[str, "Any"]):
    """The test code's globals. Any name not defined here is looked up in the program each time it's
    used.
    """

    def __init__(self, defined: Mapping[str, Any], exchange: Exchange, own: set[str]) -> None:
        super().__init__(defined)
        self._exchange = exchange
        self.own = own  # names of built-in functions that the program redefines

    def __missing__(self, name: str) -> Any:
        if (name in dir(builtins) and name not in self.own) or name.startswith("__"):
            raise KeyError(name)
        value = self._exchange.look(name)
        if type(value) is not Remote:
            return value
        return Remote(self._exchange, name, value._compares, value._identity)


def builtins_under_test(tree: ast.Module, defined: set[str]) -> set[str]:
    """Find a function under test that shadows a built-in such as ``sum``. If every name in the
    tests is a built-in or already defined, the built-in that the tests call must be the program's
    function. Return a set with that function's name, or an empty set if there is no such function.

    Raises ValueError if the tests call several built-ins, because any of them could be the function
    under test.
    """
    nodes = list(ast.walk(tree))
    bound = defined | {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {
        node.name
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
    }
    aliases = [node for node in nodes if isinstance(node, ast.alias)]
    bound |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    known = set(dir(builtins)) - bound
    if {node.id for node in nodes if isinstance(node, ast.Name)} - known - bound:
        return set()
    called = {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    } & known
    called = {
        name for name in called if not (name == "print" or name.endswith(("Error", "Exception")))
    }
    if len(called) > 1:
        raise ValueError(
            f"the tests call {', '.join(sorted(called))}; set 'entry_point' to the one that the program "
            "defines"
        )
    return called


def judge(channel: Channel, request: Mapping[str, Any]) -> None:
    """Mode ``judge``: run the tests. Names that neither the tests nor their setup define are looked
    up in the program.
    """

    def not_here(name: str) -> Any:
        raise NameError(f"the tests use {name!r}, but neither the tests nor the program define it")

    confine(request, request["limits"]["program_s"])
    channel.hostile = True
    try:
        exchange = Exchange(channel, not_here, strict=True)
        run_tests(exchange, request)
        verdict = {"verdict": "pass", "detail": ""}
    except RemoteError as error:
        verdict = {
            "verdict": "memory" if error.detail.startswith("MemoryError") else "error",
            "detail": error.detail,
        }
    except AssertionError as error:
        verdict = {"verdict": "wrong", "detail": describe(error)}
    except CannotCrossError as error:
        verdict = {"verdict": "error", "detail": f"cannot be judged: {error}"}
    except BaseException as error:
        verdict = {"verdict": "error", "detail": f"in the tests: {describe(error)}"}
    channel.send(verdict)


def run_tests(exchange: Exchange, request: Mapping[str, Any]) -> None:
    """Run the setup and the test code, then any test functions and classes they define but don't
    call.

    Raises the first exception from a test. Raises RemoteError if the program can't be loaded, or
    ValueError if no test has called the program or read any of its names.
    """
    setup = request["setup"]
    test = request["test"]
    entry_point = request["entry_point"]
    names = Names(execute("tests"), exchange, set())
    collected.prepare(setup + test, names)
    exchange.require()

    run_source(setup, names)
    tree = collected.mark(ast.parse(test))
    names.own = {entry_point} if entry_point else builtins_under_test(tree, set(names))
    if entry_point:
        names[entry_point] = Remote(exchange, entry_point)

    # Test files often run their tests under ``if __name__ == "__main__"``.
    names["__name__"] = "__main__"
    sys.modules["__main__"] = sys.modules["tests"]
    try:
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), names)
    except SystemExit as error:
        if isinstance(error, RemoteError) or error.code:
            raise
    if entry_point and "check" in names:
        names["check"](names[entry_point])
    collected.run(names)
    if not exchange.asked:
        raise ValueError("no test has called the program or read any of its names")
