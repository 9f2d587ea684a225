"""The entry point inside the sandbox, where ``inside`` is imported on its own, without the rest of
the package.

It exchanges lines of JSON over stdin and stdout. The first line says what to run, and is
acknowledged before anything runs. The line's ``mode`` is one of these:

- ``stdio``: each further line holds one test's standard input. The program is run on this input in
  a forked process. The reply says how the program ended, and the program's output follows.
- ``serve``: the program is loaded once, also in a forked process, and every further line calls one
  of its functions.
- ``exchange``: like ``serve``, but the calls come from test code, and objects can be passed.
- ``judge``: the first line contains trusted test code, which calls the program's functions by
  sending lines.
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
    """Return the function that runs the given mode.

    Modules that only test code needs are imported here, on demand, so that they don't slow down
    every program. Call this before ``hide``, because afterwards this process may not be able to
    read the modules' files.
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
    gc.enable()  # garbage collection was off during the imports; see ``walls``
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    hide(request["uid"])
    channel.send({"ready": True})
    run(channel, request)
