"""The seccomp filter (x86-64 and arm64) for programs being judged.

Under bubblewrap, the filter is a second wall inside the namespaces. Without bubblewrap, the filter
and Landlock are the only protection. The filter confines the program to a single process that can't
start or signal others, open sockets, change a file's owner, mode or attributes, or use the kernel's
larger interfaces. System calls newer than those listed here are denied unless they're in ``_NEW``.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable
from functools import cache

from sparrow.errors import RewardError

Instruction = tuple[int, int, int, int | str]
"""A BPF instruction: opcode, jump if true, jump if false, and constant. The constant ``"pid"``
stands for the filtered process's own id.
"""

_EPERM = 1
_ENOTTY = 25
_ENOSYS = 38
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
# offsets in struct seccomp_data, little-endian
_NR = 0
_ARCH = 4
_ARGUMENTS = 16
_CLONE_THREAD = 0x10000
_O_ASYNC = 0x2000
_X32 = 0x40000000

_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7), "arm64": (1, 0xC00000B7)}
_CLONE = (56, 220)
_PRLIMIT = (302, 261)
_FCNTL = (72, 25)
_IOCTL = (16, 29)
_PRCTL = (157, 167)
_SENDTO = (44, 206)
_TO_SELF_ONLY = ((62, 129), (234, 131))  # kill, tgkill

# Both architectures use the same numbers from 424 on. The allowed calls are close_range, openat2,
# faccessat2, epoll_pwait2, futex_waitv, cachestat, futex_wake, futex_wait, futex_requeue and mseal.
# clone3 is denied because it hides its flags behind a pointer; the C library falls back to clone.
_FIRST_NEW = 424
_NEW = (436, 437, 439, 441, 449, 451, 454, 455, 456, 462)

# Refused: signalling an arbitrary process when a file becomes ready (F_SETOWN, F_SETSIG,
# F_SETOWN_EX), leases, directory change notifications, and larger pipe buffers.
_FCNTL_REFUSED = (8, 10, 15, 1024, 1026, 1031)
_F_SETFL = 4
# Allowed: checking for a terminal, reading its size, counting the readable bytes, and setting
# non-blocking mode and close-on-exec.
_IOCTL_ALLOWED = (0x5401, 0x802C542A, 0x5413, 0x540F, 0x541B, 0x5421, 0x5450, 0x5451)
# Allowed: naming threads and mappings, using huge pages, setting timers, and reading settings. None
# of these lets the program outlive its parent.
_PRCTL_ALLOWED = (2, 3, 15, 16, 21, 23, 29, 30, 38, 39, 41, 42, 0x53564D41)

_DENIED: dict[str, tuple[int | None, int | None]] = {
    # calls that start or affect other processes
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "kcmp": (312, 272),
    # credentials; switching user or group would also let the program outlive its parent
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setgroups": (116, 159),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "capset": (126, 91),
    "personality": (135, 92),
    "seccomp": (317, 277),
    # sockets: only socketpair is allowed, because asyncio needs it
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "setsockopt": (54, 208),
    # memory that no limit covers, and objects that all processes of a user or machine share
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "io_setup": (206, 0),
    "mlock": (149, 228),
    "mlockall": (151, 230),
    "mlock2": (325, 284),
    "vmsplice": (278, 75),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # files; other limits cover their contents, but not their owners, permissions or attributes
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "quotactl": (179, 60),
    "open_by_handle_at": (304, 265),
    "truncate": (76, 45),
    # namespaces, mounts, machine-wide settings, and kernel interfaces such as bpf
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "acct": (163, 89),
    "vhangup": (153, 58),
}


def _errno(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


_PASS: Instruction = (_RETURN, 0, 0, _ALLOW)


def _call(number: int, tests: list[Instruction]) -> list[Instruction]:
    """Run ``tests`` only for the system call ``number``. ``tests`` must end with a return."""
    return [(_EQUAL, 0, len(tests), number), *tests]


def _load(argument: int, upper_half: bool = False) -> Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4 * upper_half)


def _one_of(values: Iterable[int | str], then: Instruction) -> list[Instruction]:
    return [instruction for value in values for instruction in ((_EQUAL, 0, 1, value), then)]


def program_filter() -> list[Instruction]:
    """Build the filter for this machine's architecture. Raises RewardError if it is neither x86-64
    nor arm64.
    """
    machine = platform.machine()
    if machine not in _ARCHES:
        raise RewardError(
            f"programs can be judged only on x86_64 and aarch64, not on {machine!r}; use a "
            "machine with one of these architectures"
        )
    column, arch = _ARCHES[machine]
    refuse = _errno(_EPERM)
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        *_one_of(_NEW, _PASS),
        (_AT_LEAST, 0, 1, _FIRST_NEW),
        _errno(_ENOSYS),
        *_call(_CLONE[column], [_load(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), _PASS, refuse]),
        *_call(_PRLIMIT[column], [_load(0), *_one_of((0, "pid"), _PASS), refuse]),
        *_call(_PRCTL[column], [_load(0), *_one_of(_PRCTL_ALLOWED, _PASS), refuse]),
        *_call(_IOCTL[column], [_load(1), *_one_of(_IOCTL_ALLOWED, _PASS), _errno(_ENOTTY)]),
        *_call(
            _FCNTL[column],
            [
                _load(1),
                *_one_of(_FCNTL_REFUSED, refuse),
                (_EQUAL, 0, 3, _F_SETFL),
                _load(2),
                (_ANY_BIT, 0, 1, _O_ASYNC),
                refuse,
                _PASS,
            ],
        ),
        # Allow sending only over a socket pair, not to an address.
        *_call(
            _SENDTO[column],
            [_load(4), (_EQUAL, 1, 0, 0), refuse, _load(4, True), (_EQUAL, 1, 0, 0), refuse, _PASS],
        ),
    ]
    for numbers in _TO_SELF_ONLY:
        code += _call(numbers[column], [_load(0), *_one_of(("pid",), _PASS), refuse])
    for both in _DENIED.values():
        if (number := both[column]) is not None:
            code += _call(number, [refuse])
    return [*code, _PASS]


@cache
def packed_filter() -> tuple[str, list[int]]:
    """Return the filter as hex in the kernel's format. Also return the byte offsets at which to
    insert the filtered process's own id.
    """
    code = program_filter()
    packed = b"".join(
        struct.pack("HBBI", *rest, 0 if constant == "pid" else constant) for *rest, constant in code
    )
    own_ids = [8 * at + 4 for at, (*_, constant) in enumerate(code) if constant == "pid"]
    return packed.hex(), own_ids
