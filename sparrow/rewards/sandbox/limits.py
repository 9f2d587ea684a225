"""Limits of what one program may use."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of what one program may use."""

    cpu_s: float = 6.0  # processor seconds per test, rounded up to whole seconds
    # seconds per test, sleeping included; a busy machine needs more of these than of ``cpu_s``
    wall_s: float = 12.0
    # seconds for all tests of a program; for a program that is called, also its processor seconds,
    # rounded up
    program_s: float = 60.0
    memory_bytes: int = 1 << 30  # address space
    # output, and any file it writes; results for assertions have an eighth of it
    output_bytes: int = 8 << 20
    files_bytes: int = 64 << 20  # all its files
    files: int = 1000  # files, folders and links that it has at a time
    tasks: int = 128  # threads that it has at a time

    def __post_init__(self) -> None:
        wrong = [f"{name}={value}" for name, value in asdict(self).items() if value <= 0]
        if wrong:
            raise ValueError(f"limits are positive, got {', '.join(wrong)}")
