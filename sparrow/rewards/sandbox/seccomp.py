"""The system calls a judged program may not make, as a seccomp filter for x86-64 and arm64.

The filter is a second wall inside bubblewrap's namespaces, and the main one where there is no bubblewrap: the
program runs as one process that can start no other, signal nobody but itself, and open no socket.
"""

from __future__ import annotations

import platform

from sparrow.errors import RewardError

Instruction = tuple[int, int, int, int | str]
"""Code, jump if true, jump if false, constant; ``"pid"`` stands for the filtered process's own id."""

_EPERM, _ENOSYS = 1, 38
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0 = 0, 4, 16  # offsets in struct seccomp_data, little-endian
_CLONE_THREAD = 0x10000
_X32 = 0x40000000

_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7), "arm64": (1, 0xC00000B7)}
_CLONE, _CLONE3, _PRLIMIT = (56, 220), (435, 435), (302, 261)
_TO_SELF_ONLY = {"kill": (62, 129), "tgkill": (234, 131)}
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "setsid": (112, 157), "setpgid": (109, 154), "setpriority": (141, 140),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "kcmp": (312, 272),
    # network, and memory that no limit counts
    "socket": (41, 198), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    # namespaces, mounts and the kernel's larger interfaces
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "fanotify_init": (300, 262),
}  # fmt: skip


def _refuse(number: int, errno: int = _EPERM) -> list[Instruction]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, 0x00050000 | errno)]


def _argument(number: int, tests: list[Instruction]) -> list[Instruction]:
    """For this call only: load the first argument and run ``tests``, which must return."""
    return [(_EQUAL, 0, len(tests) + 1, number), (_LOAD, 0, 0, _ARG0), *tests]


def program_filter() -> list[Instruction]:
    """The filter for this machine's processor. Raises RewardError: neither x86-64 nor arm64."""
    machine = platform.machine()
    if machine not in _ARCHES:
        raise RewardError(f"programs can be judged on x86_64 and aarch64, not on {machine!r}; use such a machine")
    column, arch = _ARCHES[machine]
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    refuse: Instruction = (_RETURN, 0, 0, 0x00050000 | _EPERM)
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        # Threads are allowed; clone3 hides its flags behind a pointer, so the C library is made to use clone.
        *_argument(_CLONE[column], [(_ANY_BIT, 0, 1, _CLONE_THREAD), allow, refuse]),
        *_refuse(_CLONE3[column], _ENOSYS),
        *_argument(_PRLIMIT[column], [(_EQUAL, 1, 0, 0), (_EQUAL, 0, 1, "pid"), allow, refuse]),
    ]
    for numbers in _TO_SELF_ONLY.values():
        code += _argument(numbers[column], [(_EQUAL, 0, 1, "pid"), allow, refuse])
    for both in _DENIED.values():
        if (number := both[column]) is not None:
            code += _refuse(number)
    return [*code, allow]
