"""The mode that runs test code, which is trusted and calls the program's functions in another sandbox."""

from __future__ import annotations

import builtins
from collections.abc import Mapping

from .confine import confine
from .programs import describe, execute
from .wire import pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .wire import Channel


class ProgramError(Exception):
    """The program under judgement raised an exception."""


def judge(channel: Channel, request: Mapping[str, Any]) -> None:
    """Mode ``judge``: run the tests; a name that neither they nor their setup define is a call of the program's."""

    def remote(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            channel.send({"call": name, "args": pack(list(args)), "kwargs": pack(kwargs)})
            reply = channel.receive()
            if "raised" in reply:
                raise ProgramError(reply["raised"])
            return unpack(reply["value"])

        call.__name__ = name
        return call

    import ast

    confine(request["limits"], request["filter"], request["limits"]["program_s"])
    try:
        namespace = execute("tests", request["setup"])
        tree = ast.parse(request["test"])
        # What the tests define themselves takes the place of a call once they have run so far.
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        wanted = names - set(namespace) - set(dir(builtins)) | {request["entry_point"]} - {None}
        namespace.update({name: remote(name) for name in wanted})
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), namespace)
        if request["entry_point"] and "check" in namespace:
            namespace["check"](namespace[request["entry_point"]])
        verdict = {"verdict": "pass", "detail": ""}
    except AssertionError as error:
        verdict = {"verdict": "wrong", "detail": describe(error)}
    except ProgramError as error:
        detail = str(error)
        verdict = {"verdict": "memory" if detail.startswith("MemoryError") else "error", "detail": detail}
    except BaseException as error:
        verdict = {"verdict": "error", "detail": f"in the tests: {describe(error)}"}
    channel.send(verdict)
