"""Choose ports for servers that tests start in other processes."""

import random
import socket

RANGE = range(20_000, 32_000)
"""Ports below those that Linux hands out to sockets without a port of their own, so that no other
engine takes a chosen port while its server is starting.
"""


def free_port() -> int:
    """Return a port on this machine that nothing listens on."""
    chosen = random.SystemRandom()  # tests seed the shared generator
    while True:
        port = chosen.choice(RANGE)
        with socket.socket() as tried:
            try:
                tried.bind(("localhost", port))
            except OSError:
                continue
            return port
