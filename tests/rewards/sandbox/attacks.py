"""Programs that attack the sandbox, the process that judges them, or the machine. A program passes
its tests if, and only if, its attack succeeds. Programs that attack through their answer can never
pass. After every attack, ``harness.py`` also checks the judging process: it must be alive, must
have answered in time without using much more memory, and must have judged an honest program
correctly at the same time. Nothing may be left behind or changed.

    python tests/rewards/sandbox/attacks.py bwrap session    # the score of each isolation

In a program, PARENT stands for the judging process, and OUTSIDE for a folder with a file ``secret``
and a listening Unix socket ``socket``. SEGMENT stands for a System V shared memory segment, and
ABSTRACT for the name of an abstract Unix socket.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["stdio", "call", "assert"]

TESTS: dict[Kind, dict[str, Any]] = {
    "stdio": {"inputs": ["21\n", "4\n"], "outputs": ["42\n", "8\n"]},
    "call": {"fn_name": "f", "inputs": [[21], [4]], "outputs": [42, 8]},
    "assert": {"test": "assert f(21) == 42\nassert f(4) == 8"},
}
ANSWER: dict[Kind, str] = {
    "stdio": "\nprint(int(input()) * 2)\n",
    "call": "\ndef f(x): return 2 * x\n",
    "assert": "\ndef f(x): return 2 * x\n",
}

# ``call`` makes a raw system call, given its numbers on x86-64 and arm64, and raises OSError if it
# fails.
PRELUDE = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def call(x86, arm, *arguments):
    number = x86 if platform.machine() == "x86_64" else arm
    assert number is not None, "no such call on this processor"
    found = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if found < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
"""


@dataclass(frozen=True)
class Attack:
    """A program, and the kind of tests that judge it."""

    group: str
    name: str
    program: str
    kind: Kind = "stdio"

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


def _cut(group: str, text: str, kind: Kind = "stdio", answered: bool = True) -> list[Attack]:
    """Split a text into attacks at its ``### name`` headings. With ``answered``, code that prints
    the right answers is appended, so that a program passes its tests if its attack succeeds.
    """
    attacks = []
    for part in text.split("### ")[1:]:
        name, _, body = part.partition("\n")
        body = textwrap.dedent(body)
        prelude = PRELUDE if any(word in body for word in ("call(", "libc", "ctypes.")) else ""
        attacks.append(
            Attack(group, name.strip(), prelude + body + (ANSWER[kind] if answered else ""), kind)
        )
    return attacks


ATTACKS = [
    *_cut(
        "other processes",
        r"""
### fork
import os
if os.fork() == 0: os._exit(0)
### fork bomb that stops at 50
import os
for _ in range(50):
    if os.fork() == 0: os._exit(0)
### vfork by number
call(58, 220, 17, 0, 0, 0, 0)
### clone without a thread
if call(56, 220, 17, 0, 0, 0, 0) == 0: os._exit(0)
### clone into a new user namespace
if call(56, 220, 17 | 0x10000000, 0, 0, 0, 0) == 0: os._exit(0)
### clone3
import struct
args = struct.pack("11Q", 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
if call(435, 435, args, 88) == 0: os._exit(0)
### clone3 with a namespace
import struct
args = struct.pack("11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
if call(435, 435, args, 88) == 0: os._exit(0)
### subprocess
import subprocess
subprocess.run(["true"], check=True)
### shell
import os
assert os.system("true") == 0
### posix_spawn
import os
os.posix_spawn("/bin/true", ["true"], {})
### multiprocessing
import multiprocessing
process = multiprocessing.Process(target=print)
process.start(); process.join(); assert process.exitcode == 0
### daemon
import os, time
if os.fork(): os._exit(0)
os.setsid(); time.sleep(20)
### becomes another program
import os
os.execv("/bin/sh", ["sh", "-c", "read n; echo $((n * 2))"])
### executes a file by its descriptor
import os
os.execve(os.open("/bin/sh", os.O_RDONLY), ["sh", "-c", "read n; echo $((n * 2))"], {})
### executes what it has written
import os
with open("own", "w") as file: file.write("#!/bin/sh\nread n; echo $((n * 2))\n")
os.chmod("own", 0o755)
os.execv("./own", ["own"])
### leaves its session
import os
os.setsid()
### leaves its process group
import os
os.setpgid(0, 0)
### traces the judge
if libc.ptrace(16, PARENT, 0, 0): raise OSError
### traces the harness
if libc.ptrace(16, os.getppid(), 0, 0): raise OSError
### asks to be traced
if libc.ptrace(0, 0, 0, 0): raise OSError
### reads the judge's memory through process_vm_readv
import struct
own = ctypes.create_string_buffer(8)
local = struct.pack("QQ", ctypes.addressof(own), 8)
call(310, 270, PARENT, local, 1, struct.pack("QQ", 0x400000, 8), 1, 0)
### takes a descriptor of the judge
call(438, 438, call(434, 434, PARENT, 0), 0, 0)
### compares descriptors with the judge
call(312, 272, PARENT, os.getpid(), 0, 0, 0)
### counts its harness's events
import struct
attr = struct.pack("IIQ", 1, 112, 0) + bytes(96)
call(298, 241, attr, os.getppid(), -1, -1, 0)
""",
    ),
    *_cut(
        "signals",
        r"""
### kills the judge
import os
os.kill(PARENT, 9)
### kills its harness
import os
os.kill(os.getppid(), 9)
### stops its harness
import os, signal
os.kill(os.getppid(), signal.SIGSTOP)
### kills its group
import os
os.kill(0, 9)
### signals the judge with no signal
import os
os.kill(PARENT, 0)
### kills the judge's main thread
call(234, 131, PARENT, PARENT, 9)
### kills a thread of any process
call(200, 130, PARENT, 9)
### queues a signal to the judge
import struct
info = struct.pack("iii", 10, 0, -1) + bytes(116)
call(129, 138, PARENT, 10, info)
### signals by a pidfd
call(424, 424, call(434, 434, PARENT, 0), 9, 0, 0)
### F_SETOWN to the judge and SIGKILL on a pipe
import fcntl, os
r, w = os.pipe()
fcntl.fcntl(r, 8, PARENT)
fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_NONBLOCK | 0x2000)
os.write(w, b"x")
### F_SETOWN to its harness
import fcntl, os
r, w = os.pipe()
fcntl.fcntl(r, 8, os.getppid())
### F_SETOWN_EX to the judge
import fcntl, os, struct
r, w = os.pipe()
fcntl.fcntl(r, 15, struct.pack("ii", 1, PARENT))
### F_SETSIG to SIGKILL
import fcntl, os
r, w = os.pipe()
fcntl.fcntl(r, 10, 9)
### O_ASYNC on a pipe
import fcntl, os
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETFL, 0x2000)
### FIOSETOWN to the judge
import fcntl, socket, struct
a, b = socket.socketpair()
fcntl.ioctl(a, 0x8901, struct.pack("i", PARENT))
### SIOCSPGRP to the judge
import fcntl, socket, struct
a, b = socket.socketpair()
fcntl.ioctl(a, 0x8902, struct.pack("i", PARENT))
### FIOASYNC
import fcntl, os, struct
r, w = os.pipe()
fcntl.ioctl(r, 0x5452, struct.pack("i", 1))
### directory notification
import fcntl, os
fcntl.fcntl(os.open(".", os.O_RDONLY), 1026, 1)
### lease on a file
import fcntl, os
open("own", "w").close()
fcntl.fcntl(os.open("own", os.O_RDONLY), 1024, 0)
### forgets to die with its harness
if libc.prctl(1, 0, 0, 0, 0): raise OSError
### forgets to die with its harness by another user id
os.setresuid(12345, 12345, 12345)
### becomes the reaper of processes
if libc.prctl(36, 1, 0, 0, 0): raise OSError
### asks to be dumped
if libc.prctl(4, 1, 0, 0, 0): raise OSError
### lets any process trace it
if libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0): raise OSError
""",
    ),
    *_cut(
        "limits",
        r"""
### raises its limit of memory
import resource
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
### raises its limit of open files
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
### raises its limit of processor time
import resource
resource.setrlimit(resource.RLIMIT_CPU, (99, 99))
### lowers the limits of the judge
import resource
resource.prlimit(PARENT, resource.RLIMIT_NOFILE, (1, 1))
### lowers the limits of its harness
import os, resource
resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))
### raises its priority
import os
os.setpriority(os.PRIO_PROCESS, 0, -10)
### takes the processors of the judge
import os
os.sched_setaffinity(PARENT, {0})
### becomes a real-time process
import os
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
### real-time input and output
call(251, 30, 1, 0, (1 << 13))
### catches SIGXCPU and goes on
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True: pass
### sleeps
import time
time.sleep(60)
### stops itself
import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
### loops in C
10 ** 10 ** 9
### a regular expression that backtracks
import re
re.match(r"(a*)*b", "a" * 60)
### 6,000 threads by clone
import mmap, time
stack = mmap.mmap(-1, 1 << 20)
top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 19)
# threads that pause at once: their code is mov eax, 34; syscall; jmp back
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("b8220000000f05ebf7") if platform.machine() == "x86_64" else bytes(64))
start = ctypes.addressof(ctypes.c_char.from_buffer(code))
ctypes.c_uint64.from_address(top).value = start
made = 0
trampoline = mmap.mmap(-1, 4096, prot=7)
# clone(flags in rdi, stack in rsi); the child returns to the address on its stack
trampoline.write(bytes.fromhex("b838000000" "4831d2" "4d31d2" "4d31c0" "0f05" "c3"))
at = ctypes.addressof(ctypes.c_char.from_buffer(trampoline))
spawn = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_long)(at)
for _ in range(6000):
    if spawn(0x50F00, top) < 0: raise OSError(made)
    made += 1
time.sleep(0.2)
os.write(1, b"%d\n" % (2 * int(os.read(0, 9))))
os._exit(0)
### 2,000 threads by Python
import threading, time
threading.stack_size(32768)
for _ in range(2000): threading.Thread(target=time.sleep, args=(0.4,), daemon=True).start()
### a leader that ends before its thread
import threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
call(60, 93, 0)
### memory by doubling
x = [0]
while True: x += x
### memory at once
bytearray(1 << 34)
### memory in shared mappings
import mmap
kept = []
for _ in range(64):
    kept.append(mmap.mmap(-1, 1 << 24)); kept[-1].write(b"x" * (1 << 24))
### memory in a memfd
import os
os.memfd_create("x")
### memory in a secret memfd
call(447, 447, 0)
### memory in System V shared memory
call(29, 194, 0, 1 << 24, 0o1600)
### memory in System V queues
call(68, 186, 0, 0o1600)
### memory in POSIX queues
call(240, 180, b"/sparrow", 0o102, 0o600, None)
### memory in /dev/shm
with open("/dev/shm/sparrow-attack", "wb") as file: file.write(bytes(1 << 20))
import os
os.remove("/dev/shm/sparrow-attack")
### locked memory
import mmap
own = mmap.mmap(-1, 1 << 24)
at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(own)))
if libc.mlock(at, ctypes.c_size_t(1 << 24)): raise OSError
### memory in pipes
import fcntl, os
for _ in range(16):
    r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20); os.write(w, bytes(1 << 20))
### 5,000 timers
own = ctypes.c_int()
for _ in range(5000):
    call(222, 107, 0, None, ctypes.byref(own))
### asynchronous input and output of the whole machine
own = ctypes.c_ulong()
call(206, 0, 1024, ctypes.byref(own))
### io_uring
call(425, 425, 8, ctypes.create_string_buffer(120))
### inotify
call(294, 26, 0)
### keys of the kernel
call(248, 217, b"user", b"sparrow", b"x", 1, -2)
### endless output
while True: print("x" * 1000)
### endless output that goes on when refused
while True:
    try: print("x" * 1000)
    except BaseException: pass
### endless errors
import sys
while True: sys.stderr.write("x" * 1000)
### one file too large
with open("own", "wb") as file:
    for _ in range(40): file.write(bytes(1 << 20))
### 200 MB in many files
for i in range(200):
    with open(f"own{i}", "wb") as file: file.write(bytes(1 << 20))
### 60,000 files
for i in range(60_000): open(f"{i}", "w").close()
import time; time.sleep(0.3)
### 60,000 folders
import os
for i in range(60_000): os.mkdir(f"{i}")
import time; time.sleep(0.3)
### 60,000 links
import os
for i in range(60_000): os.symlink("x" * 200, f"{i}")
import time; time.sleep(0.3)
### 60,000 names of one file
import os
open("own", "w").close()
for i in range(60_000): os.link("own", f"{i}")
import time; time.sleep(0.3)
### extended attributes
import os
open("own", "w").close()
for i in range(2000): os.setxattr("own", f"user.{i}", bytes(1000))
### one extended attribute
import os
os.setxattr(".", "user.x", b"x")
### extended attributes by the new call
import struct
open("own", "w").close()
value = ctypes.create_string_buffer(b"x" * 100)
call(463, 463, -100, b"own", 0, b"user.x", struct.pack("QII", ctypes.addressof(value), 100, 0), 16)
### too many open files
import os
for _ in range(100): os.dup(0)
### descriptors hidden in a socket
import array, socket
a, b = socket.socketpair()
a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))])
""",
    ),
    *_cut(
        "files",
        r"""
### reads a file outside
assert open("OUTSIDE/secret").read()
### writes a file outside
open("OUTSIDE/new", "w").write("x")
### overwrites a file outside
open("OUTSIDE/secret", "w").write("x")
### empties a file outside
import os
os.truncate("OUTSIDE/secret", 0)
### empties a file outside that it opens for reading
import os
os.open("OUTSIDE/secret", os.O_RDONLY | os.O_TRUNC)
### removes a file outside
import os
os.remove("OUTSIDE/secret")
### renames a file outside
import os
os.rename("OUTSIDE/secret", "OUTSIDE/gone")
### takes a file from outside
import os
os.rename("OUTSIDE/secret", "own")
### links a file from outside
import os
os.link("OUTSIDE/secret", "own")
assert open("own").read()
### follows a link outside
import os
os.symlink("OUTSIDE/secret", "own")
assert open("own").read()
### writes through a link
import os
os.symlink("OUTSIDE", "own")
open("own/new", "w").write("x")
### makes a folder outside
import os
os.mkdir("OUTSIDE/new")
### lists a folder outside
import os
assert os.listdir("OUTSIDE")
### changes the mode of a file outside
import os
os.chmod("OUTSIDE/secret", 0o777)
### changes the mode by the new call
call(452, 452, -100, b"OUTSIDE/secret", 0o777, 0)
### changes the owner of a file outside
import os
os.chown("OUTSIDE/secret", os.getuid(), os.getgid())
### changes the times of a file outside
import os
os.utime("OUTSIDE/secret", (1, 1))
### marks a file outside
import os
os.setxattr("OUTSIDE/secret", "user.x", b"x")
### watches a folder outside
fd = call(294, 26, 0)
if libc.inotify_add_watch(fd, b"OUTSIDE", 0xFFF) < 0: raise OSError
### reads the user's home
import os
assert os.listdir(os.path.expanduser("~root")) is not None
### reads the password file
assert open("/etc/passwd").read()
### reads a host key
import os
assert os.listdir("/etc/ssh") is not None
### reads the machine's id
assert open("/etc/hostname").read()
### writes into the system
open("/usr/sparrow-attack", "w").write("x")
import os
os.remove("/usr/sparrow-attack")
### writes into Python's folder
import json, os
path = json.__file__ + ".attack"
open(path, "w").write("x"); os.remove(path)
### opens a module of Python to append
import json
open(json.__file__, "a").close()
### opens the harness to append
import sys
open(sys.modules["inside.main"].__file__, "a").close()
### opens the harness at its place in the sandbox to append
open("/sandbox/inside/main.py", "a").close()
### removes the harness
import os, sys
os.remove(sys.modules["inside.main"].__file__)
### replaces a folder above
import os
os.rename("/usr", "/usr2")
### fills its folder
for i in range(99):
    with open(f"own{i}", "wb") as file: file.write(bytes(1 << 20))
import time; time.sleep(0.3)
### moves the root
import os
os.chroot(".")
### makes a device
import os, stat
os.mknod("own", stat.S_IFCHR | 0o600, os.makedev(1, 3))
### makes a fifo outside
import os
os.mkfifo("OUTSIDE/fifo")
### binds a Unix socket outside
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
c = socket.socket(fileno=a.detach()); c.bind("OUTSIDE/bound")
### opens a file by its handle
import struct
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
mount = ctypes.c_int()
call(303, 264, -100, b"/", handle, ctypes.byref(mount), 0)
call(304, 265, os.open(".", os.O_RDONLY), handle, 0)
### lists the devices
import os
assert set(os.listdir("/dev")) & {"mem", "kmsg", "vda", "ptmx", "shm", "loop0", "sda"}
open("/dev/kmsg").close()
### a file that cannot be removed
import array, fcntl
with open("own", "w") as file: fcntl.ioctl(file, 0x40086602, array.array("l", [0x10]))
### a file that cannot be removed, by the new call
import struct
open("own", "w").close()
call(469, 469, -100, b"own", struct.pack("QIIII", 8, 0, 0, 0, 0), 24, 0)
### locks a file of the system
import fcntl, os
fd = os.open("/etc/shadow", os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_SH)
### the private folder of another program
import os
assert open(os.path.dirname(os.getcwd()) + "/sparrow-other/secret").read()
### writes to the machine's temporary folder
import os
os.chdir("/")
with open("/var/tmp/sparrow-attack", "w") as file: file.write("x")
os.remove("/var/tmp/sparrow-attack")
""",
    ),
    *_cut(
        "clean-up",
        r"""
### a folder 3,000 deep
import os
for _ in range(3000):
    os.mkdir("d"); os.chdir("d")
raise SystemExit(1)
### a folder 3,000 deep with links on the way
import os
for _ in range(3000):
    os.mkdir("d"); os.symlink("/", "s"); os.chdir("d")
raise SystemExit(1)
### folders that nobody may enter
import os
for i in range(20):
    os.makedirs(f"{i}/a/b"); open(f"{i}/a/b/c", "w").close()
    for part in ("a/b", "a", "."): os.chmod(f"{i}/{part}", 0)
raise SystemExit(1)
### folders made without any permission
import os
for i in range(20): os.mkdir(f"{i}", 0)
raise SystemExit(1)
### names that are no text
import os
open(b"\xff\xfe", "w").close(); os.mkdir(b"\xff")
raise SystemExit(1)
### names with everything in them
import os
for name in ("a\nb", "-rf", "$(kill 1)", "*", " ", "\x01", "x" * 255): os.mkdir(name)
raise SystemExit(1)
### removes its own folder
import os
os.rmdir(os.getcwd())
raise SystemExit(1)
### renames its own folder
import os
os.rename(os.getcwd(), os.getcwd() + "-gone")
### a fifo where a file would be
import os
os.mkfifo("own")
raise SystemExit(1)
### closes every descriptor
import os
os.closerange(0, 1024)
raise SystemExit(1)
""",
        answered=False,
    ),
    *_cut(
        "network",
        r"""
### a socket
import socket
socket.socket()
### a UDP socket
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))
### a raw socket
import socket
socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
### a packet socket
import socket
socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
### a netlink socket
import socket
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
### a Unix socket
import socket
socket.socket(socket.AF_UNIX)
### a socket of virtual machines
import socket
socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
### a socket of the kernel's ciphers
import socket
socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)
### reaches a Unix socket by socketpair and sendto
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b"x", "OUTSIDE/socket")
### reaches a Unix socket by socketpair and connect
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.connect("OUTSIDE/socket"); a.send(b"x")
### reaches a Unix socket by socketpair and sendmsg
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendmsg([b"x"], [], 0, "OUTSIDE/socket")
### reaches an abstract socket by socketpair
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b"x", "\0ABSTRACT")
### listens on an abstract name by socketpair
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
a.bind("\0sparrow-attack")
### looks a name up
import socket
socket.getaddrinfo("localhost", 80, socket.AF_INET)
assert open("/etc/hosts").read()
""",
    ),
    *_cut(
        "the kernel",
        r"""
### reads the judge's memory
maps = open("/proc/PARENT/maps").read().split("-")[0]
with open("/proc/PARENT/mem", "rb", 0) as file:
    file.seek(int(maps, 16)); assert file.read(8)
### opens its harness's memory
import os
open(f"/proc/{os.getppid()}/mem", "rb").close()
### reads the judge's environment
assert open("/proc/PARENT/environ").read()
### reads the judge's command line
assert open("/proc/PARENT/cmdline").read()
### reads its harness's environment
import os
assert open(f"/proc/{os.getppid()}/environ").read()
### reads the judge's open files
import os
assert os.listdir("/proc/PARENT/fd")
### goes outside through the judge's folder
import os
assert os.listdir("/proc/PARENT/cwd") is not None
### goes outside through the judge's root
import os
assert os.listdir("/proc/PARENT/root")
### lists processes
import os
assert len([name for name in os.listdir("/proc") if name.isdigit()]) > 1
### makes the judge the first to die when memory is short
open("/proc/PARENT/oom_score_adj", "w").write("1000")
### reads the kernel's settings
assert open("/proc/sys/kernel/random/boot_id").read()
### writes a setting of the kernel
path = "/proc/sys/vm/overcommit_memory"
same = open(path).read()
open(path, "w").write(same)
### reads the kernel's log
own = ctypes.create_string_buffer(64)
call(103, 116, 3, own, 64)
### makes a control group
import os
found = next(p for p in ("/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified", "/sys/fs/cgroup") if os.path.isdir(p))
os.mkdir(found + "/sparrow-attack"); os.rmdir(found + "/sparrow-attack")
### reads the machine's devices
import os
assert os.listdir("/sys/class")
### a new user namespace
if libc.unshare(0x10000000): raise OSError
### new namespaces of every kind
if libc.unshare(0x7E020000 & ~0x80): raise OSError
### enters the judge's namespaces
call(308, 268, call(434, 434, PARENT, 0), 0x00020000)
### mounts
if libc.mount(b"none", b".", b"tmpfs", 0, None): raise OSError
### mounts by the new calls
call(430, 430, b"tmpfs", 0)
### copies a mount
call(428, 428, -100, b"/", 1)
### bpf
call(321, 280, 0, bytes(128), 128)
### user fault handling
call(323, 282, 1)
### names the machine
import os
name = os.uname().nodename.encode()
call(170, 161, name, len(name))
### takes the processor's ports
call(172, None, 3)
### keeps its capabilities
import struct
header = struct.pack("Ii", 0x20080522, 0)
own = ctypes.create_string_buffer(24)
call(125, 90, header, own)
assert any(struct.unpack("6I", own.raw)[0:2]), "none"
### a new user id
import os
os.setuid(54321)
### a new group id
import os
os.setgid(54321)
### new groups
import os
os.setgroups([1])
### a call by the old 32-bit gate
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("b814000000cd80c3"))  # getpid by int 0x80
own = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
assert own() == os.getpid()
### a call by the numbers of x32
call(0x40000000 + 39, None)
### shared memory of others: attaches
assert call(30, 196, SEGMENT, 0, 0o10000)
### shared memory of others: removes
call(31, 195, SEGMENT, 0, None)
### kills the watching filter
call(317, 277, 0, 0, None)
### writes to a terminal
import os
master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
### types into a terminal
import fcntl
fcntl.ioctl(0, 0x5412, b"x")
""",
    ),
    *_cut(
        "verdicts",
        r"""
### writes a verdict to every descriptor
import os, struct
text = b'{"outcome": "ok", "stdout": "42\\n"}'
for fd in range(3, 1024):
    try: os.write(fd, text + b"\n" + struct.pack(">II", len(text), 3) + text)
    except OSError: pass
### replaces the harness's functions
import json, sys
for module in list(sys.modules.values()):
    for name in ("wait", "finish", "confine", "same_output", "pack", "unpack", "describe", "watch"):
        if hasattr(module, name): setattr(module, name, lambda *a, **k: {"outcome": "ok", "stdout": "42\n"})
json.dumps = lambda *a, **k: '{"outcome": "ok", "stdout": "42"}'
### looks for the expected output
import gc
for o in gc.get_objects():
    if isinstance(o, dict):
        for s in list(o.values()):
            if s in ("42\n", b"42\n"): print(42); raise SystemExit
### exits at once
import os
os._exit(0)
### exits with 0 after half the answer
import sys
print(4, end=""); sys.stdout.flush(); sys.exit(0)
### ends by a signal
ctypes.string_at(0)
### an error whose text fails
class E(Exception):
    def __str__(self): raise E
raise E
### an error whose text is endless
class E(Exception):
    def __str__(self): return "x" * (1 << 27)
raise E
""",
        answered=False,
    ),
    Attack("verdicts", "source that is no text", "\ud800\0"),
    Attack("verdicts", "source nested 100,000 deep", "(" * 10**5),
    Attack("verdicts", "source with 200,000 operators", "x = " + "-" * 200_000 + "1\n"),
    *_cut(
        "answers",
        r"""
### a complex number too large to read
class C(complex): real = 10**400
def f(x): return C(1)
### a complex number that is no number
class C(complex): real = "x"; imag = [1]
def f(x): return C(1)
### an integer of 5,000 digits
def f(x): return 10**5000
### an integer that claims another value
class I(int):
    def __int__(self): return 43
    def __index__(self): return 43
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return I(7)
### equals everything
class E(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return E(99)
### colliding integers as keys
def f(x): return {i * (2**61 - 1): 0 for i in range(1000)} and _big
class _Big(dict):
    def items(self): return [(i * (2**61 - 1), 0) for i in range(330_000)]
_big = _Big({1: 1})
### colliding integers in a set by hand
import os, json
def f(x):
    line = '{"value": {"set": [%s]}}' % ",".join(str(i * (2**61 - 1)) for i in range(250_000))
    for fd in range(3, 16):
        try: os.write(fd, line.encode() + b"\n")
        except OSError: pass
### colliding integers in tuples by hand
import os, json
def f(x):
    line = '{"value": {"set": [%s]}}' % ",".join('{"tuple": [%d]}' % (i * (2**61 - 1)) for i in range(150_000))
    for fd in range(3, 16):
        try: os.write(fd, line.encode() + b"\n")
        except OSError: pass
### colliding complex numbers by hand
import os, json
def f(x):
    line = '{"value": {"set": [%s]}}' % ",".join(str(i * float(2**61 - 1) * 2.0 ** (i % 40)) for i in range(1, 250_000))
    for fd in range(3, 16):
        try: os.write(fd, line.encode() + b"\n")
        except OSError: pass
### 8 MB of empty lists
import os
def f(x):
    line = b'{"value": [' + b"[]," * 2_700_000 + b"[]]}\n"
    for fd in range(3, 16):
        try: os.write(fd, line)
        except OSError: pass
### 8 MB of empty objects
import os
def f(x):
    line = b'{"value": [' + b"{}," * 2_700_000 + b"{}]}\n"
    for fd in range(3, 16):
        try: os.write(fd, line)
        except OSError: pass
### 8 MB of objects with a key each
import os
def f(x):
    line = b'{"value": [' + b'{"a":0},' * 1_000_000 + b"0]}\n"
    for fd in range(3, 16):
        try: os.write(fd, line)
        except OSError: pass
### 8 MB of keys
import os
def f(x):
    line = b'{"value": 1, ' + b",".join(b'"%d":0' % i for i in range(700_000)) + b"}\n"
    for fd in range(3, 16):
        try: os.write(fd, line)
        except OSError: pass
### 8 MB of numbers
def f(x): return [0] * 2_700_000
### nested 100,000 deep
def f(x):
    found = 1
    for _ in range(100_000): found = [found]
    return found
### nested 100,000 deep by hand
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
        except OSError: pass
### nested 900 deep by hand
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"value": ' + b"[" * 900 + b"]" * 900 + b"}\n")
        except OSError: pass
### a key that is a list
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"value": {"dict": [[[1], 2]]}}\n{"value": {"set": [[1]]}}\n')
        except OSError: pass
### kinds that do not exist
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"value": {"eval": "1"}}\n')
        except OSError: pass
### contents that do not fit their kind
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"value": {"complex": [1, 2, 3]}}\n')
        except OSError: pass
### bytes that are none
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"value": {"bytes": 7}}\n')
        except OSError: pass
### bytes beyond Latin-1
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, '{"value": {"bytes": "\u20ac"}}\n'.encode())
        except OSError: pass
### a dictionary of no pairs
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"value": {"dict": [[1, 2, 3], 4]}}\n')
        except OSError: pass
### not a number and infinity
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"value": [NaN, Infinity, -Infinity, 1e999]}\n')
        except OSError: pass
### no JSON
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b"\xff\xfe\x00\n")
        except OSError: pass
### lone surrogates
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"raised": "\\ud800"}\n')
        except OSError: pass
### an error that is a structure
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"raised": [' + b"[]," * 1_000_000 + b"[]]}\n")
        except OSError: pass
### an error of 8 MB
def f(x): raise ValueError("x" * (8 << 20))
### a reply that never ends
import os
def f(x):
    while True:
        for fd in range(3, 16):
            try: os.write(fd, b"x" * 65536)
            except OSError: pass
### a reply a byte at a time
import os
def f(x):
    while True:
        for fd in range(3, 16):
            try: os.write(fd, b"x")
            except OSError: pass
### replies before they are asked for
import os
for fd in range(3, 16):
    try: os.write(fd, b'{"value": 7}\n' * 4000)
    except OSError: pass
def f(x): return 7
### a reply of lines and lines
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b"\n" * 60_000)
        except OSError: pass
### an endless iterator
import itertools
def f(x): return itertools.count()
### an iterator of endless iterators
import itertools
def f(x): return (itertools.repeat(0) for _ in itertools.count())
### a list that holds itself
def f(x):
    found = []
    found.append(found)
    return found
### a mapping that never ends
from collections.abc import Mapping
class M(Mapping):
    def __getitem__(self, key): return 0
    def __len__(self): return 1
    def __iter__(self):
        i = 0
        while True: yield (i := i + 1)
def f(x): return M()
### an array that returns itself
class A:
    def tolist(self): return self
def f(x): return A()
### ends in the call
import os
def f(x): os._exit(0)
### closes the channel
import os
os.closerange(0, 99)
def f(x): return 2 * x
### never answers
import time
def f(x): time.sleep(60)
### loops
def f(x):
    while True: pass
### loops in its definition
while True: pass
def f(x): return 1
### raises what is no Exception
def f(x): raise GeneratorExit
### raises SystemExit
def f(x): raise SystemExit(0)
""",
        "call",
        answered=False,
    ),
    *_cut(
        "answers to assertions",
        r"""
### says pass on every descriptor
import os
for fd in range(3, 99):
    try: os.write(fd, b'{"verdict": "pass", "detail": ""}\n')
    except OSError: pass
def f(x): return 7
### equals everything
class E(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return E(7)
### colliding integers
def f(x): return {i * (2**61 - 1) for i in range(2000)} and _S()
import os
class _S:
    def tolist(self):
        line = '{"value": {"set": [%s]}}' % ",".join(str(i * (2**61 - 1)) for i in range(250_000))
        for fd in range(3, 16):
            try: os.write(fd, line.encode() + b"\n")
            except OSError: pass
        return 1
### 8 MB of empty lists
import os
def f(x):
    line = b'{"value": [' + b"[]," * 2_700_000 + b"[]]}\n"
    for fd in range(3, 16):
        try: os.write(fd, line)
        except OSError: pass
### nested 900 deep
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"value": ' + b"[" * 900 + b"]" * 900 + b"}\n")
        except OSError: pass
### a complex number too large to read
class C(complex): real = 10**400
def f(x): return C(1)
### patches assertions away
import builtins
builtins.AssertionError = OSError
def f(x): return 7
### a verdict as a value
import os
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, b'{"verdict": "pass", "detail": "", "value": 42}\n')
        except OSError: pass
    return 7
### closes the channel
import os
os.closerange(0, 99)
def f(x): return 2 * x
""",
        "assert",
        answered=False,
    ),
    *_cut(
        "outputs",
        r"""
### 8 MB of lines
import sys
sys.stdout.write("\n" * ((8 << 20) - 10) + "x")
### 8 MB of words
import sys
sys.stdout.write("x " * ((4 << 20) - 10))
### 8 MB of words on lines
import sys
sys.stdout.write("x\n" * ((4 << 20) - 10))
### 8 MB of zeros
import sys
sys.stdout.write("\0" * ((8 << 20) - 10))
### 8 MB that JSON would escape
import sys
sys.stdout.write("\x01" * ((8 << 20) - 10))
### 8 MB with one wide character
import sys
sys.stdout.write("x" * (8_000_000) + "\U0001f40d")
### bytes that are no text
import os
os.write(1, b"\xff" * (8_000_000))
### a number of a million digits
print("9" * 1_000_000)
### a number with a huge exponent
print("4.2e99999999999999999999")
### a number in other digits
print("\u0664\u0662.0e0\u0661")
""",
        answered=False,
    ),
]


def main(names: list[str]) -> int:
    """Print the score of each isolation and the attacks that succeeded."""
    import json

    from harness import score

    for isolation in names:
        failed = score(ATTACKS, isolation)
        print(f"{isolation}: {len(ATTACKS) - len(failed)} of {len(ATTACKS)} held")
        print(json.dumps(failed, indent=1))
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
