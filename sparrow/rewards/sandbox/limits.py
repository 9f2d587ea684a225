"""Limits on the resources of one program."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """Limits on the resources of one program."""

    cpu_s: float = 6.0  # processor seconds per test, rounded up to whole seconds
    # seconds per test that the program may run and sleep (``OwnTime``)
    wall_s: float = 12.0
    # seconds for all tests of a program; if the tests call the program, also the limit on its
    # processor seconds, rounded up
    program_s: float = 60.0
    memory_bytes: int = 1 << 30  # maximum address space
    # maximum size of the output and of each file; a result sent to test code may have an eighth of
    # this size
    output_bytes: int = 8 << 20
    files_bytes: int = 64 << 20  # maximum total size of all files
    files: int = 1000  # maximum number of files, folders and links at once
    tasks: int = 128  # maximum number of threads at once

    def __post_init__(self) -> None:
        wrong = [f"{name}={value}" for name, value in asdict(self).items() if value <= 0]
        if wrong:
            raise ValueError(f"limits must be positive, got {', '.join(wrong)}")
