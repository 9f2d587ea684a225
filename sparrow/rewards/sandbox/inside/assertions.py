"""The mode that runs test code, which is trusted and calls the program's functions in another
sandbox.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping

from .confine import confine
from .exchange import Exchange, Remote, RemoteError, describe
from .programs import execute

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from typing import Any

    from .wire import Channel


class Names(dict[str, "Any"]):
    """The tests' globals. A name that is not defined here is the program's and is looked up there
    each time.
    """

    def __init__(self, defined: Mapping[str, Any], exchange: Exchange, own: set[str]) -> None:
        super().__init__(defined)
        self._exchange, self._own = exchange, own

    def __missing__(self, name: str) -> Any:
        if (name in dir(builtins) and name not in self._own) or name.startswith("__"):
            raise KeyError(name)
        value = self._exchange.look(name)
        return Remote(self._exchange, name) if isinstance(value, Remote) else value


def builtins_under_test(tree: ast.Module, defined: set[str]) -> set[str]:
    """The built-in name that is the program's: the one that the tests call if they name nothing
    else of the program's.

    Raises ValueError: the tests call several, and any of them may be meant.
    """
    import ast  # imported here, and again below: at the top, every program would pay for it

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
            f"say with 'entry_point' which of {', '.join(sorted(called))} is the program's"
        )
    return called


def judge(channel: Channel, request: Mapping[str, Any]) -> None:
    """Mode ``judge``: run the tests; a name that neither they nor their setup define is the
    program's.
    """

    def not_here(name: str) -> Any:
        raise NameError(f"the tests have no function {name!r} for the program")

    import ast

    confine(request, request["limits"]["program_s"])
    channel.hostile = True
    try:
        exchange = Exchange(channel, not_here)
        defined = execute("tests", request["setup"])
        tree = ast.parse(request["test"])
        entry_point = request["entry_point"]
        own = {entry_point} if entry_point else builtins_under_test(tree, set(defined))
        names = Names(defined, exchange, own)
        if entry_point:
            names[entry_point] = Remote(exchange, entry_point)
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), names)
        if entry_point and "check" in names:
            names["check"](names[entry_point])
        verdict = {"verdict": "pass", "detail": ""}
    except RemoteError as error:
        verdict = {
            "verdict": "memory" if error.detail.startswith("MemoryError") else "error",
            "detail": error.detail,
        }
    except AssertionError as error:
        verdict = {"verdict": "wrong", "detail": describe(error)}
    except BaseException as error:
        verdict = {"verdict": "error", "detail": f"in the tests: {describe(error)}"}
    channel.send(verdict)
