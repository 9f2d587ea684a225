"""Resource limits for a single program."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """Resource limits for a single program."""

    cpu_s: float = 6.0  # CPU seconds per test, rounded up to whole seconds
    # seconds of running and sleeping per test (see ``OwnTime``)
    wall_s: float = 12.0
    # seconds for all of a program's tests together. If the tests call the program, this is also the
    # program's CPU time limit, rounded up
    program_s: float = 60.0
    memory_bytes: int = 1 << 30  # maximum address space
    # maximum size of the output and of each file. For results sent to test code, the limit is an
    # eighth of this
    output_bytes: int = 8 << 20
    files_bytes: int = 64 << 20  # maximum total size of all files
    files: int = 1000  # maximum number of files, folders and links at once
    tasks: int = 128  # maximum number of threads at once

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value}" for name, value in asdict(self).items() if not 0 < value < math.inf
        ]
        if wrong:
            raise ValueError(f"limits must be positive and finite, got {', '.join(wrong)}")
