"""The entry point inside the sandbox, where the folder ``inside`` is imported without the rest of
this package.

It speaks in lines of JSON over its standard input and output. The first says what to run and is
acknowledged before anything runs; its ``mode`` is one of

- ``stdio``: every further line has one test's standard input; the program runs once for each, in a
  forked process, and the reply is how it ended, followed by what it wrote.
- ``serve``: the program is loaded once, in a forked process too; every further line is a call of
  one of its functions.
- ``judge``: the line holds trusted test code, which calls the program's functions by sending lines.
"""

from __future__ import annotations

import os

from .assertions import judge
from .confine import hide
from .programs import run_tests, serve
from .wire import Channel


def main() -> None:
    channel = Channel(os.dup(0), os.dup(1), os.dup(2))
    nowhere = os.open(os.devnull, os.O_RDWR)
    request = channel.receive()
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    hide(request["uid"])
    channel.send({"ready": True})
    {"stdio": run_tests, "serve": serve, "judge": judge}[request["mode"]](channel, request)
