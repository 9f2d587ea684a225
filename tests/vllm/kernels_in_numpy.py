"""Run Triton kernels on a CPU with numpy. This is more than ten times as fast as Triton's
interpreter, which also checks types. Only the language features of simple kernels are supported,
and all other kernels are left to the interpreter. Values are numpy arrays, and scalars are arrays
without axes. All programs of a launch run at once, as rows of these arrays. If they diverge, at an
``if`` or in the length of a loop, the programs on each branch start again separately. That is safe
because nothing is stored before the end. Programs run one at a time if a kernel's blocks have two
axes, or if the kernel reads the result of an atomic operation.
"""

import ast
import functools
import inspect
import textwrap
import types

import numpy as np
import torch
import triton
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton.runtime import interpreter

TYPES = {
    getattr(torch, n): getattr(np, n)
    for n in ("int8", "uint8", "int16", "int32", "int64", "float32", "float64")
}
TYPES |= {torch.bool: np.bool_, torch.uint64: np.uint64}


class Parted(Exception):
    """Raised if programs that run at once diverge. Contains the branch that each program takes."""


class OneByOne(Exception):
    """Raised if programs of this kernel cannot run at once."""


class Value(np.ndarray):
    """A tensor of Triton's language. No operation changes it in place."""

    def to(self, dtype, **_):
        return self.astype(dtype)

    def _common(self):
        """Return the value of all programs that run at once, or raise ``Parted`` if they differ."""
        if self.size > 1 and (self != self.flat[0]).any():
            raise Parted(np.broadcast_to(self, (language.programs, 1))[:, 0])
        return self.flat[0]

    def __bool__(self):
        return bool(self._common())

    def __int__(self):
        return int(self._common())

    __index__ = __int__

    for _name in ("add", "sub", "mul", "truediv", "xor", "or", "and", "lshift", "rshift"):
        locals()[f"__i{_name}__"] = getattr(np.ndarray, f"__{_name}__")
    del _name


def value(x, dtype=None):
    return np.asarray(x, dtype).view(Value)


class Pointer:
    def __init__(self, address, dtype):
        self.address, self.element = address, np.dtype(dtype)
        self.dtype = types.SimpleNamespace(element_ty=dtype)

    def __add__(self, offset):
        return Pointer(
            self.address + np.asarray(offset, np.int64) * self.element.itemsize, self.element.type
        )

    __radd__ = __add__

    def __sub__(self, offset):
        return self + -np.asarray(offset, np.int64)


def _places(pointer, mask, *others):
    address = np.asarray(pointer.address, np.uint64)
    whole = np.broadcast_arrays(address, True if mask is None else mask, *others)
    return whole[0].shape, [np.ascontiguousarray(np.atleast_1d(x)) for x in whole]


def _span(address, mask, size):
    used = address[mask.astype(bool)]
    return (int(used.min()), int(used.max()) + size) if len(used) else (0, 0)


def _forward_store(loaded, address, mask, stored):
    """If an address has a pending store, replace the value loaded from it with the stored value."""
    if stored is None or loaded.size * stored[0].size > FEW or loaded.dtype != stored[1].dtype:
        raise OneByOne
    there, x, written = (each.ravel() for each in stored)
    same = (
        (address.reshape(-1, 1) == there) & mask.reshape(-1, 1).astype(bool) & written.astype(bool)
    )
    which = same.any(1)
    loaded.reshape(-1)[which] = x[same[which].argmax(1)]


def _axis(x, axis):
    """Return the numpy arguments to reduce a block, whose axis comes after the programs' axis."""
    if axis not in (0, None):
        raise OneByOne
    return dict(axis=1, keepdims=True) if np.ndim(x) == 2 else dict(axis=axis)


def _range(*bounds, **_):
    """Act like ``range`` for programs that run at once, which diverge only if their loops have
    different lengths.
    """
    begin, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    for i in range(int(value(-(-(end - begin) // step)))):
        yield begin + i * step


class Language(types.SimpleNamespace):
    """The replacement for ``triton.language``."""

    constexpr = tl.constexpr
    dtype = tl.dtype
    program = (0, 0, 0)  # numbers or, for programs that run at once, columns of numbers
    programs = 1
    grid = (1, 1, 1)
    later = None  # pending changes of programs that run at once, and their addresses
    int1, uint8, int32, int64 = np.bool_, np.uint8, np.int32, np.int64
    uint32, uint64, float32, float64 = np.uint32, np.uint64, np.float32, np.float64
    range = static_range = staticmethod(_range)
    arange = staticmethod(lambda a, b: np.arange(a, b, dtype=np.int32).view(Value))
    full = staticmethod(lambda shape, x, dtype: np.full(shape, x, dtype).view(Value))
    zeros = staticmethod(lambda shape, dtype: np.zeros(shape, dtype).view(Value))
    where = staticmethod(lambda c, a, b: np.where(c, a, b).view(Value))
    maximum = staticmethod(lambda a, b: value(np.maximum(a, b)))
    minimum = staticmethod(lambda a, b: value(np.minimum(a, b)))
    exp = staticmethod(lambda x: value(np.exp(x)))
    log = staticmethod(lambda x: value(np.log(x)))
    min = staticmethod(lambda x, axis=None: value(np.min(x, **_axis(x, axis))))
    sum = staticmethod(
        lambda x, axis=None: value(
            np.sum(x, **_axis(x, axis), dtype=x.dtype if x.dtype.kind == "f" else None)
        )
    )
    cumsum = staticmethod(lambda x, axis=0: value(np.cumsum(x, _axis(x, axis)["axis"])))
    argmax = staticmethod(lambda x, axis=None: value(np.argmax(x, **_axis(x, axis)), np.int32))
    div_rn = staticmethod(lambda a, b: a / b)
    cdiv = staticmethod(triton.cdiv)
    debug_barrier = staticmethod(lambda: None)
    multiple_of = staticmethod(lambda x, _: x)
    pointer_type = staticmethod(lambda dtype: ("pointer", dtype))

    def program_id(self, axis):
        return value(self.program[axis], np.int32)

    def num_programs(self, axis):
        return value(self.grid[axis], np.int32)

    def max(self, x, axis=None, return_indices=False):
        largest = value(np.max(x, **_axis(x, axis)))
        return (largest, self.argmax(x, axis)) if return_indices else largest

    def cast(self, x, dtype):
        return (
            Pointer(np.asarray(x, np.int64), dtype[1])
            if isinstance(dtype, tuple)
            else x.astype(dtype)
        )

    def load(self, pointer, mask=None, other=0, **_):
        shape, (address, mask, other) = _places(pointer, mask, other if other is not None else 0)
        dtype = pointer.element
        loaded = memory.load(address, mask, other.astype(dtype), dtype)
        if self.later:
            begin, end = _span(address, mask, dtype.itemsize)
            for there_begin, there_end, _, stored in self.later:
                if begin < there_end and there_begin < end:
                    _forward_store(loaded, address, mask, stored)
        return loaded.reshape(shape).view(Value)

    def store(self, pointer, x, mask=None, **_):
        self._change(memory.store, pointer, x, mask)

    def atomic_add(self, pointer, x, mask=None, **_):
        self._change(self._atomically, pointer, x, mask, memory.RMW_OP.ADD)

    def atomic_or(self, pointer, x, mask=None):
        self._change(self._atomically, pointer, x, mask, memory.RMW_OP.OR)

    @staticmethod
    def _atomically(address, x, mask, operation):
        memory.atomic_rmw(operation, address, x, mask, memory.MEM_SEMANTIC.RELAXED)

    def _change(self, change, pointer, x, mask, *more):
        _, (address, mask, x) = _places(pointer, mask, x)
        x = x.astype(pointer.element)
        if self.later is None:
            change(address, x, mask, *more)
        else:
            stored = None if more else (address, x, mask)
            self.later.append(
                (*_span(address, mask, x.itemsize), lambda: change(address, x, mask, *more), stored)
            )

    def rand(self, seed, offset):
        """Return uniform numbers in [0, 1) by Philox 4x32-10, like Triton's ``rand``."""
        low, seed = np.uint64(0xFFFFFFFF), np.asarray(seed).astype(np.int64).astype(np.uint64)
        key = [seed & low, seed >> np.uint64(32)]
        zero = np.zeros_like(np.asarray(offset), np.uint64)
        c = [np.asarray(offset).astype(np.uint32).astype(np.uint64), zero, zero, zero]
        for _ in range(10):
            b, a = c[2] * np.uint64(0xCD9E8D57), c[0] * np.uint64(0xD2511F53)
            c = [
                b >> np.uint64(32) ^ c[1] ^ key[0],
                b & low,
                a >> np.uint64(32) ^ c[3] ^ key[1],
                a & low,
            ]
            key = [
                (k + np.uint64(w)) & low for k, w in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
            ]
        bits = c[0].astype(np.uint32).astype(np.int32)
        return value(
            np.where(bits < 0, -bits - 1, bits).astype(np.float32) * np.float32(4.6566127342e-10)
        )


language = Language()
device = types.SimpleNamespace(log1p=lambda x: value(np.log1p(x)))
_globals = {}


def _is_libdevice(x):
    return isinstance(x, types.ModuleType) and x.__name__.endswith("libdevice")


def _is_known(kernel, seen):
    """Return whether a kernel, and every function it calls, uses only what ``Language``
    supports.
    """
    if kernel in seen or kernel.fn.__module__.endswith(
        ".watermark"
    ):  # called only if watermarks are requested
        return True
    seen.add(kernel)
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))))
    if any(isinstance(n, ast.Subscript) for n in nodes):
        _one_by_one.add(kernel)
    used = {
        n.attr
        for n in nodes
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "tl"
    }
    if any(not hasattr(language, name) for name in used):
        return False
    names = [kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names]
    modules = [
        x for x in names if isinstance(x, types.ModuleType) and not _is_libdevice(x) and x is not tl
    ]
    return not modules and all(
        _is_known(x, seen) for x in names if isinstance(x, interpreter.InterpretedFunction)
    )


@functools.cache
def _loop_steps(kernel):
    """Return the names of the parameters that are the step of a loop, in this kernel or in a
    function that it calls with a parameter of the same name.
    """
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))))
    loops = [n.iter for n in nodes if isinstance(n, ast.For) and isinstance(n.iter, ast.Call)]
    steps = {ast.unparse(loop.args[2]) for loop in loops if len(loop.args) == 3}
    called = [kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names]
    for each in called:
        if isinstance(each, interpreter.InterpretedFunction):
            steps |= _loop_steps(each)
    return steps


def _function(kernel):
    """Return a kernel as a Python function that uses this language instead of Triton's."""
    theirs = kernel.fn.__globals__
    if id(theirs) not in _globals:
        ours = _globals[id(theirs)] = {"range": language.range}
        for name, x in theirs.items():
            if x is tl:
                ours[name] = language
            elif _is_libdevice(x):
                ours[name] = device
            elif isinstance(x, tl.constexpr):
                ours[name] = x.value
            elif isinstance(x, interpreter.InterpretedFunction):
                ours[name] = _Later(x)
            else:
                ours[name] = x
    fn = kernel.fn
    made = types.FunctionType(
        fn.__code__, _globals[id(theirs)], fn.__name__, fn.__defaults__, fn.__closure__
    )
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


class _Later:
    """A function that kernels call, which is translated at its first call."""

    def __init__(self, kernel):
        self.kernel, self.made = kernel, None

    def __call__(self, *args, **kwargs):
        self.made = self.made or _function(self.kernel)
        return self.made(*args, **kwargs)


def _argument(x):
    if isinstance(x, torch.Tensor):
        return Pointer(np.int64(x.data_ptr()), TYPES[x.dtype])
    if isinstance(x, (bool, str, tl.dtype)) or x is None:
        return x
    if isinstance(x, int):
        return value(x, np.int32 if -(2**31) <= x < 2**31 else np.int64)
    if isinstance(x, float):
        return value(x, np.float32)
    raise KeyError(type(x))


_interpreted = interpreter.InterpretedFunction.run
_ready = {}
_one_by_one = set()
AT_ONCE = 1 << 16  # numbers in the blocks of all programs; more would not fit in the cache
FEW = 1 << 20  # pairs of addresses to compare
LARGE = 1024  # blocks of at least this many tokens are reduced to the vocabulary size of the test,
STEP = 64  # or to this size if they are the steps of a loop, which needs few of them in a test


def run(self, *args, grid, warmup, **kwargs):
    if self not in _ready:
        called = set()
        _ready[self] = (
            (_function(self), inspect.signature(self.fn)) if _is_known(self, called) else None
        )
        if called & _one_by_one:
            _one_by_one.add(self)
    if _ready[self] is None:
        return _interpreted(self, *args, grid=grid, warmup=warmup, **kwargs)
    fn, signature = _ready[self]
    bound = signature.bind(*args, **{k: v for k, v in kwargs.items() if k in signature.parameters})
    bound.apply_defaults()
    vocab_size = bound.arguments.get("vocab_size", bound.arguments.get("V"))
    for name in ("BLOCK_SIZE", "BLOCK"):
        if vocab_size is not None and bound.arguments.get(name, 0) >= LARGE:
            bound.arguments[name] = min(bound.arguments[name], triton.next_power_of_2(vocab_size))
    for name in _loop_steps(self):
        if bound.arguments.get(name, 0) >= LARGE:
            bound.arguments[name] = STEP
    fixed = {n for n, p in signature.parameters.items() if "constexpr" in str(p.annotation)}
    try:
        given = {n: x if n in fixed else _argument(x) for n, x in bound.arguments.items()}
    except KeyError:
        return _interpreted(self, *args, grid=grid, warmup=warmup, **kwargs)
    grid = grid(bound.arguments) if callable(grid) else grid
    language.grid = (*grid, 1, 1)[:3]
    programs = np.indices(language.grid).reshape(3, -1)
    with np.errstate(all="ignore"):
        if programs.shape[1] > 1 and self not in _one_by_one:
            try:
                sizes = [bound.arguments[n] for n in fixed if isinstance(bound.arguments[n], int)]
                at_once = max(AT_ONCE // max(sizes, default=1), 1)
                parts = np.array_split(programs, -(-programs.shape[1] // at_once), axis=1)
                changes = [each for part in parts for each in _at_once(fn, given, part)]
            except OneByOne:
                _one_by_one.add(self)
            else:
                for _, _, change, _ in changes:
                    change()
                return
        for language.program in programs.T:
            fn(**given)


def _at_once(fn, given, programs):
    """Run these programs, and return the changes that each one makes, in order."""
    language.program, language.programs, language.later = (
        programs[:, :, None],
        programs.shape[1],
        [],
    )
    try:
        fn(**given)
        return language.later
    except Parted as parted:
        ways = parted.args[0]
    finally:
        language.later = None
    return [
        each for way in np.unique(ways) for each in _at_once(fn, given, programs[:, ways == way])
    ]


def install():
    interpreter.InterpretedFunction.run = run
