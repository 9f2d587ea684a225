"""The entry point inside the sandbox, where the folder ``inside`` is imported without the rest of
this package.

It speaks in lines of JSON over its standard input and output. The first says what to run and is
acknowledged before anything runs; its ``mode`` is one of

- ``stdio``: every further line has one test's standard input; the program runs once for each, in a
  forked process, and the reply is how it ended, followed by what it wrote.
- ``serve``: the program is loaded once, in a forked process too; every further line is a call of
  one of its functions.
- ``exchange``: as ``serve``, but the calls come from test code, and objects can be handed over.
- ``judge``: the line holds trusted test code, which calls the program's functions by sending lines.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping

from .confine import hide
from .programs import run_tests, serve
from .wire import Channel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _runs(mode: str) -> Callable[[Channel, Mapping[str, Any]], None]:
    """The function that runs a mode.

    What only test code needs is imported only for it: every program would pay for it. It is
    imported before ``hide``, after which this process may not be able to read these files.
    """
    if mode == "judge":
        from .assertions import judge

        return judge
    if mode == "exchange":
        from .exchange import serve as exchange

        return exchange
    return {"stdio": run_tests, "serve": serve}[mode]


def main() -> None:
    channel = Channel(os.dup(0), os.dup(1), os.dup(2))
    nowhere = os.open(os.devnull, os.O_RDWR)
    request = channel.receive()
    run = _runs(request["mode"])
    gc.enable()  # collection was off for the imports, see ``walls``
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    hide(request["uid"])
    channel.send({"ready": True})
    run(channel, request)
