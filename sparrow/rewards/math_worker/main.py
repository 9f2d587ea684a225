"""The worker process that compares answers, started by ``sparrow.rewards.math``.

It replies to each line of JSON with another line. The comparison itself runs in a forked process.
When the kernel kills that process at its limit, a new fork takes over without importing the
libraries again.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import resource
import signal
import sys

from .comparison import equal

# limit on a worker's address space, because sympy can be tricked into writing out huge numbers
MEMORY_BYTES = 4 << 30
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main() -> int:
    """Fork a process to answer requests. Whenever that process is killed at its limit, fork
    another.

    Forks inherit the libraries and their caches. Return the exit status once a fork ends without
    being killed.
    """
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.dup(1)
    equal("\\frac{1}{2}", "0.25 + 0.25")  # warm-up: fills caches and builds parsers
    # Don't let anything a library prints be mistaken for a reply.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    busy = mmap.mmap(-1, 1)  # shared with the forked process: 1 while a request is in flight
    os.write(replies, b'{"ready": true}\n')
    while True:
        busy[0] = 0
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            serve(replies, busy)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)
        if busy[0]:
            os.write(replies, b'{"equal": false, "lost": true}\n')


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends for any reason.

    Otherwise, this process would keep the pipe open, and the caller would wait until its time
    limit.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(replies: int, busy: mmap.mmap) -> None:
    """Answer requests until standard input ends. Each request contains an answer, a reference and
    limits.

    The timers have no handlers, so the kernel kills this process when a comparison runs out of CPU
    or wall-clock time.
    """
    for line in sys.stdin:
        request = json.loads(line)
        limit_s = request.pop("limit_s")
        wall_s = request.pop("wall_s")
        busy[0] = 1
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        try:
            verdict = equal(**request)
        except (Exception, MemoryError, RecursionError):
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        busy[0] = 0
        os.write(replies, json.dumps({"equal": verdict}).encode() + b"\n")
