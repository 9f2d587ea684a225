"""Test the decode kernels against the reference. The tests run on a GPU or, with
TRITON_INTERPRET=1, in Triton's interpreter, which cannot run the CUDA kernel. The interpreter must
be switched on before triton is imported, so ``test_interpreted.py`` runs this file in a separate
process.

Queries and landmarks are small integers, so scores are exact in float32 in any order of summation,
ties are common, and the selected pages must *equal* the reference's. All buffers contain NaN
outside the sequences.

Error bound: relative to the reference in float64, a kernel's error may be at most twice as large as
the error of the reference in the kernel's own precision on the same inputs, plus half a unit in the
last place of the result's dtype.

Shapes: B sequences, H query heads, K kv heads, G = H / K, D head dim, P page size, N pages, M
blocks.
"""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    from tests.attention.triton import triton_interpreter  # noqa: F401
else:
    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ]

from sparrow.attention import (  # noqa: E402
    CachedLayers,
    CacheScales,
    DecodeWorkspace,
    PageLayout,
    cuda,
    paged_decode,
    reference,
    update_landmarks,
)
from sparrow.attention import triton as sparrow_triton  # noqa: E402
from sparrow.attention.decode import H200, DecodeBatch  # noqa: E402
from sparrow.attention.division import plan_kernel  # noqa: E402
from sparrow.attention.int8 import from_int8, scale_of, to_int8  # noqa: E402
from sparrow.attention.pages import select_pages  # noqa: E402
from sparrow.attention.triton import LaunchConfig  # noqa: E402
from sparrow.schedule import ALL_PAGES  # noqa: E402

ONE = LaunchConfig(16, 1, 1, 4, 32, 2, 24, 4, 64, 128, 132)  # programs per ranked item
FP8, E4M3, INT8 = PageLayout(landmark_dtype="fp8_e4m3"), torch.float8_e4m3fn, torch.int8
CACHES = pytest.mark.parametrize(
    "cache_dtype", [None, E4M3, INT8], ids=["16-bit cache", "fp8 cache", "int8 cache"]
)
THREE = LaunchConfig(16, 2, 3, 4, 32, 1, 24, 4, 64, 128, 132)
CUDA = cuda.CudaConfig(4, 3, 2)
EACH_RANKS = cuda.CudaConfig(2, 2, 2, parts=3, part_pages=2, each_ranks=True)
CUDA_CONFIGS = (
    []
    if INTERPRETED
    else [
        CUDA,
        cuda.CudaConfig(2, 1, 4),
        cuda.CudaConfig(8, 1, 1, parts=3, part_pages=2),
        EACH_RANKS,
    ]
)
TRITON = [pytest.param(ONE, id="one"), pytest.param(THREE, id="three")]
PATHS = [
    *TRITON,
    *(
        pytest.param(c, id=f"cuda {c.warps} {c.stages} {c.resident}{' each' * c.each_ranks}")
        for c in CUDA_CONFIGS
    ),
]
Config = LaunchConfig | cuda.CudaConfig | None
LENGTHS = [0, 1, 5, 15, 16, 17, 40, 47, 48, 49, 200, 256, 333, 517]


@dataclass
class Case:
    """The arguments of ``paged_decode`` on ``DEVICE``. The caches contain NaN outside the
    sequences.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    landmark_cache: torch.Tensor
    table: torch.Tensor
    length: torch.Tensor
    top_k: torch.Tensor
    layout: PageLayout
    scales: CacheScales | None = None
    budgets: torch.Tensor | None = None
    tokens: int = 1

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.landmark_cache,
            self.table,
            self.length,
            self.top_k,
        )

    def batch(self, out: torch.Tensor | None = None) -> DecodeBatch:
        out = torch.empty_like(self.q) if out is None else out
        options = (self.q.shape[-1] ** -0.5, self.scales, self.budgets, self.tokens)
        return DecodeBatch(*self.inputs(), out, self.layout, *options)

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the reference's result with queries in ``dtype``, on the CPU."""
        q, *rest = (x.cpu() for x in self.inputs())
        names = ("k_cache", "v_cache", "landmark_cache", "table", "length", "top_k")
        scales = self.scales and CacheScales(*(x.cpu() for x in (self.scales.k, self.scales.v)))
        own = dict(
            zip(names, rest, strict=True),
            budgets=None if self.budgets is None else self.budgets.cpu(),
        )
        return reference.run(replace(self, q=q.to(dtype), scales=scales, **own).batch())


def make_caches(
    kind: str,
    blocks: int,
    K: int,
    block_tokens: int,
    D: int,
    layout: PageLayout,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys, values and landmarks as views of one NaN-filled allocation. The landmarks lie in
    the padded tail of each block. A block of int8 keys and values also has room for their scales
    (``make_scales``), which precede the landmarks.
    """
    tail, pages, mark = 64, block_tokens // layout.page_size, layout.landmark_type(dtype)
    dtype = cache_dtype or dtype
    size = 2 * block_tokens * K * D
    before_marks = size + 2 * block_tokens * K * (dtype == INT8)
    stride = before_marks + pages * K * D * max(1, mark.itemsize // dtype.itemsize) + tail
    if dtype == torch.int8:
        memory = torch.full((blocks * stride,), -128, dtype=dtype, device=DEVICE)  # no code is -128
    else:
        memory = torch.full((blocks * stride,), float("nan"), device=DEVICE).to(dtype)
    if kind == "2NHD":  # keys and values as two planes: (blocks, 2, N, H, D)
        kv = memory.as_strided(
            (blocks, 2, block_tokens, K, D), (stride, block_tokens * K * D, K * D, D, 1)
        )
        k, v = kv[:, 0].transpose(1, 2), kv[:, 1].transpose(1, 2)
    elif kind == "HN2D":  # vLLM 0.26 and later: (blocks, H, N, 2 D)
        kv = memory.as_strided(
            (blocks, K, block_tokens, 2 * D), (stride, block_tokens * 2 * D, 2 * D, 1)
        )
        k, v = kv.split(D, dim=-1)
    else:  # NH2D: tokens before heads
        kv = memory.as_strided(
            (blocks, block_tokens, K, 2 * D), (stride, K * 2 * D, 2 * D, 1)
        ).transpose(1, 2)
        k, v = kv.split(D, dim=-1)
    in_marks = [n * dtype.itemsize // mark.itemsize for n in (stride, before_marks)]
    marks = memory.view(mark).as_strided(
        (blocks, pages, K, D), (in_marks[0], K * D, D, 1), in_marks[1]
    )
    marks.view(torch.uint8 if mark.itemsize == 1 else torch.int16).fill_(
        0x7F if mark.itemsize == 1 else 0x7FFF
    )  # NaN
    return k, v, marks


def make_scales(k: torch.Tensor) -> CacheScales:
    """Return the memory that ``make_caches`` reserved for the scales of an int8 cache, filled with
    255, which stands for NaN.
    """
    blocks, K, N, D = k.shape
    memory = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(
        k.untyped_storage(), 2 * K * N * D, (blocks, K, 2, N), (k.stride(0), 2 * N, N, 1)
    )
    memory.fill_(255)
    return CacheScales(memory[:, :, 0], memory[:, :, 1])


def put(to: torch.Tensor, at: tuple[torch.Tensor | slice, ...], values: torch.Tensor) -> None:
    """Assign ``to[at] = values``. 8-bit values are assigned as bytes, because torch has no
    kernel that assigns float8.
    """
    if to.itemsize == 1:
        to, values = to.view(torch.uint8), values.view(torch.uint8)
    to[at] = values


def make_case(
    lengths: list[int],
    top_k: list[int],
    *,
    K: int = 2,
    G: int = 2,
    D: int = 64,
    layout: PageLayout = PageLayout(),
    pages_per_block: int = 1,
    dtype: torch.dtype = torch.float16,
    kind: str = "HN2D",
    extra_blocks: int = 3,
    seed: int = 0,
    cache_dtype: torch.dtype | None = None,
    spread: int = 3,
    budgets: tuple[float, ...] = (),
    tokens: int = 1,
) -> Case:
    """Build a case with random keys and values. In int8, tokens differ in magnitude by up to
    2^``spread``, and a few are all zero.
    """
    rng = torch.Generator().manual_seed(seed)
    P, B = layout.page_size, len(lengths)
    block_tokens = P * pages_per_block
    needed = [-(-length // block_tokens) for length in lengths]
    blocks = sum(needed) + extra_blocks
    k, v, marks = make_caches(kind, blocks, K, block_tokens, D, layout, dtype, cache_dtype)
    scales = (
        CacheScales(*(2.0 ** (torch.arange(K) % 3 - i).to(DEVICE) for i in (4, 1)))
        if cache_dtype == E4M3
        else None
    )
    scales = make_scales(k) if cache_dtype == INT8 else scales
    order = torch.randperm(blocks, generator=rng)
    table = torch.full((B, max(1, *needed) + 1), 2**30, dtype=torch.int32)
    used = 0
    for b, length in enumerate(lengths):
        ids = order[used : used + needed[b]]
        used += needed[b]
        table[b, : needed[b]] = ids
        token = torch.arange(length)
        at = (
            ids[token // block_tokens].to(DEVICE),
            slice(None),
            (token % block_tokens).to(DEVICE),
        )  # [length, K, ...]
        for i, cache in enumerate((k, v)):
            entries = torch.randn(length, K, D, generator=rng).to(DEVICE)
            if cache_dtype == INT8:
                loud = torch.randint(0, spread if i else 2, (length, K, 1), generator=rng)
                entries = entries * (
                    (loud < 1) | (torch.rand(length, K, 1, generator=rng) > 0.1)
                ).to(DEVICE)
                entries, (scales.k, scales.v)[i][at] = to_int8(
                    (entries * 2.0 ** loud.to(DEVICE)).to(dtype)
                )
            elif scales is not None:
                entries = entries / (scales.k, scales.v)[i][:, None]
            put(cache, at, entries.to(cache.dtype))
        page = torch.arange(length // P)
        values = (
            torch.randint(-3, 4, (len(page), K, D), generator=rng).to(DEVICE, dtype).to(marks.dtype)
        )
        put(
            marks,
            (ids[page // pages_per_block].to(DEVICE), (page % pages_per_block).to(DEVICE)),
            values,
        )
    queries = B * tokens
    q_BKGD = torch.randint(-2, 3, (queries, K, G, D), generator=rng)
    q_BKGD[:, :, 0] -= q_BKGD.sum(2) % G  # a group's mean is an integer
    qkv = torch.full((queries, (G + 2) * K, D), float("nan"), dtype=dtype, device=DEVICE)
    qkv[:, : K * G] = q_BKGD.flatten(1, 2).to(DEVICE, dtype)
    return Case(
        qkv[:, : K * G],
        k,
        v,
        marks,
        table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
        layout,
        scales,
        torch.tensor(budgets, device=DEVICE).mul(256).int() if budgets else None,
        tokens,
    )


def make_workspace(case: Case) -> DecodeWorkspace:
    H, D = case.q.shape[1:]
    B, T = len(case.length), case.tokens
    K, pages = case.k_cache.shape[1], case.k_cache.shape[2] // case.layout.page_size
    workspace = DecodeWorkspace(B, K, H // K, D, case.table.shape[1] * pages, DEVICE, T)
    # Room for any configuration that a test requests.
    workspace.partial = torch.empty(3 * B * K + 500, H // K * T, D, device=DEVICE)
    workspace.stats = torch.empty(3 * B * K + 500, 2, H // K * T, device=DEVICE)
    workspace.plan = torch.empty(3 * B + 500, 8, dtype=torch.int32, device=DEVICE)
    for buffer in (workspace.rows, workspace.partial, workspace.stats):
        buffer.fill_(float("nan"))
    workspace.plan.fill_(
        -(2**20)
    )  # not a row, so a program that reads beyond its plan accesses memory outside the tensors
    return workspace


def decode(
    config: Config, batch: DecodeBatch, workspace: DecodeWorkspace, reuse_plan: bool = False
) -> torch.Tensor:
    """Decode with the implementation that ``config`` belongs to."""
    if isinstance(config, cuda.CudaConfig):
        cuda.check(batch, workspace)
        return cuda.run(batch, workspace, reuse_plan, config)
    sparrow_triton.check(batch, workspace)
    return sparrow_triton.run(batch, workspace, reuse_plan, config)


def run(case: Case, config: Config, workspace: DecodeWorkspace | None = None) -> torch.Tensor:
    """Return the kernels' output, written to a strided view filled with NaN, and check that all
    counters are reset to zero.
    """
    workspace = workspace or make_workspace(case)
    B, H, D = case.q.shape
    wide = torch.full((B, H + 1, D), float("nan"), dtype=case.q.dtype, device=DEVICE)
    out = wide[:, :H]
    result = decode(config, case.batch(out), workspace)
    assert result is out
    assert wide[:, H:].isnan().all()
    assert not workspace.counters.any()
    return out


def check(case: Case, config: Config) -> None:
    out = run(case, config)
    if not INTERPRETED:  # in the interpreter, programs run one after another, so results never vary
        assert torch.equal(out, run(case, config))
    exact, low = case.expected(torch.float64), case.expected(case.q.dtype).double()
    error = (out.cpu().double() - exact).norm(dim=-1)
    bound = 2 * (low - exact).norm(dim=-1).amax() + torch.finfo(out.dtype).eps / 2 * exact.norm(
        dim=-1
    )
    worst = (error - bound).argmax()
    assert (error <= bound).all(), (
        f"error {error.flatten()[worst]:.2e} exceeds the bound {bound.flatten()[worst]:.2e}"
    )


def kept_pages(workspace: DecodeWorkspace, item: int, count: int) -> list[int]:
    return workspace.rows.view(torch.int32)[item, :count].tolist()


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("top_k", [0, 1, 4, 1000, ALL_PAGES])
def test_sequences_of_every_length_match_the_reference(config, top_k):
    check(make_case(LENGTHS, [top_k] * len(LENGTHS), K=1), config)


@pytest.mark.parametrize("config", PATHS)
def test_each_row_of_a_batch_has_its_own_length_and_budget(config):
    check(
        make_case([517, 0, 333, 333, 48, 200], [3, 5, ALL_PAGES, 0, 1, 9], pages_per_block=2),
        config,
    )


# --- several new tokens per row ---


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize("split", [False, True], ids=["as shipped", "small parts"])
@CACHES
def test_several_new_tokens_per_row_match_the_reference(config, tokens, split, cache_dtype):
    case = make_case(
        [517, 0, 333, 338, 48, 200, 8, 49, 55],
        [3, 5, ALL_PAGES, 0, 1, 9, 4, 0, 0],
        pages_per_block=2,
        tokens=tokens,
        cache_dtype=cache_dtype,
    )
    config = with_room(config, case)
    check(case, small_parts(config) if split else config)


@pytest.mark.parametrize("config", TRITON)
@pytest.mark.parametrize(
    ("G", "tokens", "P"), [(1, 3, 8), (5, 4, 16), (8, 8, 8), (7, 2, 32), (16, 4, 16)]
)
def test_several_new_tokens_match_the_reference_for_any_group_and_page_size(config, G, tokens, P):
    layout = PageLayout(page_size=P)
    case = make_case(
        [40 * P + 1, 9 * P, 6 * P + 2], [5, 3, 1], G=G, layout=layout, tokens=tokens, seed=G
    )
    check(case, small_parts(config))


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@CACHES
@pytest.mark.parametrize("landmark_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("config", ["one row", "many rows", "each part ranks"])
@pytest.mark.parametrize(
    "G, D, tokens",
    [
        (2, 128, 4),
        (4, 128, 4),
        (5, 128, 4),
        (8, 128, 4),
        (2, 128, 8),
        (4, 128, 8),
        (1, 64, 16),
        (8, 64, 4),
        (2, 256, 8),
        (5, 256, 3),
    ],
)
def test_cuda_kernel_decodes_several_tokens_for_any_group_size(
    G, D, tokens, config, landmark_dtype, cache_dtype
):
    case = make_case(
        [2500, 0, 17, 333, 48, 1600, 517, 516],
        [70, 3, 5, ALL_PAGES, 0, 1, 9, 2],
        G=G,
        D=D,
        layout=PageLayout(landmark_dtype=landmark_dtype),
        pages_per_block=2,
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        tokens=tokens,
    )
    stored = cache_dtype or torch.bfloat16
    shipped = {
        "one row": cuda.launch.choose_config(16, D, 160, H200, stored, G * tokens),
        "many rows": cuda.launch.choose_config(512, D, 160, H200, stored, G * tokens),
        "each part ranks": with_room(EACH_RANKS, case),
    }
    check(case, shipped[config])
    check(case, small_parts(shipped[config]))


def with_room(config: Config, case: Case) -> Config:
    """For an 8-bit cache, double the number of pages in flight. The CUDA kernel writes its results
    over these pages, which would otherwise be too small for the results of many queries.
    """
    if case.scales is None or not isinstance(config, cuda.CudaConfig):
        return config
    return replace(config, stages=2 * config.stages)


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("layout", [PageLayout(16, 0, 1), PageLayout(16, 3, 4)])
def test_several_tokens_match_the_reference_for_any_sink_and_recent_pages(config, layout):
    case = make_case([400, 517, 93, 8], [1, 9, 2, 1], layout=layout, tokens=8)
    check(case, config)
    check(replace(case, budgets=torch.tensor([640, 64], dtype=torch.int32, device=DEVICE)), config)


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize(
    "louder, stored",
    [
        (1, {}),
        (64, dict(cache_dtype=E4M3)),
        (64, dict(cache_dtype=INT8)),
        # far beyond float16's range, although 8-bit landmarks are multiplied in float16
        (2.0**40, dict(layout=FP8, dtype=torch.bfloat16)),
    ],
    ids=["16-bit cache", "fp8 cache", "int8 cache", "fp8 landmarks"],
)
def test_queries_of_later_tokens_do_not_change_earlier_outputs(config, louder, stored):
    case = make_case([517, 200], [3, 2], tokens=4, **stored)
    out = run(case, config).unflatten(0, (2, 4))
    q = case.q.unflatten(0, (2, 4)).clone()
    q[:, 2:] = q[:, 2:].flip(0) * louder
    changed = run(replace(case, q=q.flatten(0, 1)), config).unflatten(0, (2, 4))
    assert torch.equal(changed[:, :2], out[:, :2]) and not torch.equal(changed[:, 2:], out[:, 2:])


@pytest.mark.parametrize("config", PATHS)
def test_value_of_the_newest_token_is_read_only_by_that_token(config):
    case = make_case([517, 200, 33], [3, 2, ALL_PAGES], tokens=4)
    out = run(case, config).unflatten(0, (3, 4))
    for b, length in enumerate([517, 200, 33]):
        block = case.table[b, (length - 1) // 16]
        case.v_cache[block, :, (length - 1) % 16] += 1
    changed = run(case, config).unflatten(0, (3, 4))
    assert torch.equal(changed[:, :3], out[:, :3])
    assert (changed[:, 3] != out[:, 3]).flatten(1).any(1).all()


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("length", [64, 65, 66, 67, 68])
def test_page_filled_by_any_new_token_gets_a_landmark(config, length):
    case = make_case([length], [1], K=1, tokens=4)
    marks = case.landmark_cache.float().clone()
    run(case, config)
    page = case.table[0, 3]
    expected = case.k_cache[page].float().mean(1) if length < 68 else marks[page, 0]
    torch.testing.assert_close(case.landmark_cache[page, 0].float(), expected, atol=2e-3, rtol=0)
    others = [int(n) for n in case.table[0, :3]]
    assert torch.equal(case.landmark_cache[others].float(), marks[others])


def test_too_many_new_tokens_raise_an_error():
    case = make_case([64, 64], [1, 1], tokens=4)
    with pytest.raises(
        ValueError, match="each sequence has 4 new tokens, but the workspace allows 1"
    ):
        decode(ONE, case.batch(), make_workspace(replace(case, tokens=1)))
    nine = make_case([64], [1], layout=PageLayout(page_size=8), tokens=9)
    with pytest.raises(ValueError, match=r"has 9 new tokens.*page size allows 8"):
        decode(ONE, nine.batch(), make_workspace(nine))
    wide = make_case([64], [1], G=16, tokens=5)
    with pytest.raises(ValueError, match="a group of 16 allows 4; decode fewer tokens"):
        decode(ONE, wide.batch(), make_workspace(wide))
    with pytest.raises(ValueError, match="expected one query per new token"):
        decode(ONE, replace(case, tokens=3).batch(), make_workspace(case))


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("split", [False, True], ids=["as shipped", "small parts"])
@pytest.mark.parametrize(
    "budgets", [(0.0, 4.0, 0.125, 1.0), (1.5, 0.5, 1.0, 1.0), (64.0, 0.0, 1 / 256, 3.9)]
)
def test_each_head_has_its_own_budget(config, split, budgets):
    """Check rows whose heads keep all pages, a few pages by score, or none by score. ``split``
    divides the rows into many parts.
    """
    case = make_case(
        [700, 517, 0, 333, 333, 48, 200, 16],
        [8, 3, 5, ALL_PAGES, 0, 1, 9, 300],
        K=4,
        pages_per_block=2,
        budgets=budgets,
    )
    exact = case.expected(torch.float64)
    assert (exact != replace(case, budgets=None).expected(torch.float64)).flatten(1).any(
        1
    ).tolist() == [row not in (2, 3, 4, 5, 7) for row in range(8)]
    check(case, small_parts(config) if split else config)


@pytest.mark.parametrize("config", PATHS)
def test_layers_with_different_budgets_can_share_a_plan(config):
    fine = small_parts(config)
    case = make_case([700, 517, 333], [12, 3, 9], budgets=(1.75, 0.25))
    other = replace(case, budgets=case.budgets.flip(0))
    even = replace(case, budgets=None)
    workspace = make_workspace(case)
    expected = [run(each, fine) for each in (case, other, even)]
    assert not torch.equal(expected[0], expected[1]) and not torch.equal(expected[0], expected[2])
    decode(fine, case.batch(), workspace)
    for each, out in zip((case, other, even, case), (*expected, expected[0]), strict=True):
        assert torch.equal(decode(fine, each.batch(), workspace, reuse_plan=True), out)


@pytest.mark.parametrize("config", PATHS)
def test_equal_head_budgets_do_not_change_any_bit_of_the_output(config):
    case = make_case([700, 333, 200, 48], [7, 5, ALL_PAGES, 2], budgets=(1.0, 1.0))
    assert torch.equal(run(case, config), run(replace(case, budgets=None), config))


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("relative", [1, 127, 128, 383, 64 * 256])
def test_budgets_are_rounded_as_in_the_reference(config, relative):
    budgets = torch.tensor([relative], dtype=torch.int32)
    for top_k in (1, 3, 2560, ALL_PAGES - 1, ALL_PAGES):
        check_selection([float(n % 29) for n in range(40)], top_k, config, budgets=budgets)


# G, D, P, pages per block, dtype, cache layout, config
SHAPES = [
    (1, 64, 16, 1, torch.float16, "HN2D", ONE),
    (2, 128, 16, 1, torch.bfloat16, "2NHD", ONE),
    (2, 128, 16, 4, torch.bfloat16, "HN2D", THREE),
    (3, 96, 8, 2, torch.float16, "2NHD", THREE),
    (4, 80, 32, 1, torch.float16, "NH2D", ONE),
    (5, 64, 64, 1, torch.bfloat16, "HN2D", THREE),
    (7, 128, 8, 3, torch.float16, "NH2D", ONE),
    (8, 256, 16, 2, torch.bfloat16, "HN2D", ONE),
    (16, 64, 32, 2, torch.float16, "2NHD", THREE),
    (16, 80, 16, 1, torch.bfloat16, "2NHD", ONE),
    (1, 256, 64, 2, torch.float16, "NH2D", THREE),
    *(
        ()
        if INTERPRETED
        else (
            (1, 64, 16, 1, torch.float16, "HN2D", CUDA),
            (3, 128, 16, 4, torch.float16, "2NHD", CUDA),
            (5, 64, 16, 2, torch.bfloat16, "NH2D", CUDA),
            (8, 128, 16, 1, torch.bfloat16, "HN2D", CUDA),
        )
    ),
]


@pytest.mark.parametrize("landmark_dtype", ["auto", "fp8_e4m3"])
@CACHES
@pytest.mark.parametrize(
    "G, D, P, per_block, dtype, kind, config",
    SHAPES,
    ids=lambda x: "cuda" if isinstance(x, cuda.CudaConfig) else None,
)
def test_all_shapes_dtypes_and_cache_layouts_match_the_reference(
    G, D, P, per_block, dtype, kind, config, cache_dtype, landmark_dtype
):
    layout = PageLayout(P, landmark_dtype=landmark_dtype)
    case = make_case(
        [0, 37, 19 * P + 3],
        [2, 2, 5],
        K=2,
        G=G,
        D=D,
        layout=layout,
        pages_per_block=per_block,
        dtype=dtype,
        kind=kind,
        cache_dtype=cache_dtype,
    )
    check(case, config)
    if not INTERPRETED:
        check(
            replace(case, budgets=torch.tensor([640, 128], dtype=torch.int32, device=DEVICE)),
            config,
        )


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("landmark_dtype", ["auto", "fp8_e4m3"])
@CACHES
@pytest.mark.parametrize("config", ["one row", "many rows", "each part ranks"])
@pytest.mark.parametrize(
    "G, D, dtype",
    [
        (9, 64, torch.float16),
        (12, 128, torch.bfloat16),
        (16, 128, torch.bfloat16),
        (1, 256, torch.float16),
        (8, 256, torch.bfloat16),
        (11, 256, torch.float16),
        (16, 256, torch.bfloat16),
    ],
)
def test_cuda_kernel_decodes_large_groups_and_heads(
    G, D, dtype, config, cache_dtype, landmark_dtype
):
    """Check all kinds of rows, including some with more pages than a warp looks up at once, and the
    landmarks of completed pages.
    """
    case = make_case(
        [2500, 0, 17, 333, 48, 1600, 517, 1],
        [70, 3, 5, ALL_PAGES, 0, 1, 9, 2],
        G=G,
        D=D,
        layout=PageLayout(landmark_dtype=landmark_dtype),
        pages_per_block=2,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    stored = cache_dtype or dtype
    shipped = {
        "one row": cuda.launch.choose_config(16, D, 160, H200, stored),
        "many rows": cuda.launch.choose_config(512, D, 160, H200, stored),
        "each part ranks": EACH_RANKS,
    }
    check(case, shipped[config])
    check(case, small_parts(shipped[config]))
    budgets = torch.tensor([640, 128], dtype=torch.int32, device=DEVICE)
    check(replace(case, budgets=budgets), shipped[config])


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_cache_matches_the_reference(config, dtype):
    case = make_case(
        [517, 0, 333, 333, 48, 200], [3, 5, ALL_PAGES, 0, 1, 9], dtype=dtype, cache_dtype=E4M3
    )
    check(case, config)
    before, scales = run(case, config).clone(), case.scales
    # Multiplying by a power of 2 is exact, so results must be bitwise equal.
    assert torch.equal(
        run(replace(case, scales=CacheScales(scales.k, scales.v * 4)), config), before * 4
    )
    case.q.mul_(0.5)
    assert torch.equal(
        run(replace(case, scales=CacheScales(scales.k * 2, scales.v)), config), before
    )
    # Use queries beyond float16's range, and a group whose queries are all zero.
    if dtype == torch.bfloat16:
        case.q.mul_(2.0**41)
        case.q[2] = 0
        check(replace(case, scales=CacheScales(scales.k * 2.0**-40, scales.v)), config)


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spread", [8, 21])
def test_int8_cache_matches_the_reference(config, dtype, spread):
    """Check values whose scales differ by a factor of 2^20, vectors of zeros, and tiny and huge
    keys and values.
    """
    shape = dict(
        dtype=dtype, cache_dtype=INT8, spread=min(spread, 13) if dtype == torch.float16 else spread
    )
    case = make_case(
        [517, 0, 333, 333, 48, 200], [3, 5, ALL_PAGES, 0, 1, 9], pages_per_block=2, **shape
    )
    assert set(case.scales.v.flatten().tolist()) > {255, 77 if dtype == torch.bfloat16 else 103}
    check(case, config)
    check(case, small_parts(config))
    case.scales.v[case.scales.v < 130] -= 20 if dtype == torch.bfloat16 else 0
    check(case, config)
    # Use tiny keys with huge queries, beyond float16's range, and a group whose queries are all
    # zero.
    if dtype == torch.bfloat16:
        case.q.mul_(2.0**41)
        case.q[2] = 0
        case.scales.k[case.scales.k < 255] -= 41
        check(case, config)


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("token", [0, 100, 332])
def test_nan_scale_in_an_int8_cache_yields_nan_only_for_its_head(config, which, token):
    case = make_case([333, 333, 40], [ALL_PAGES, 4, 1], cache_dtype=INT8)
    expected = run(case, config).clone()
    block, head, place = case.table[0, token // 16].long(), 1, token % 16
    getattr(case.scales, which)[block, head, place] = 255
    (case.k_cache if which == "k" else case.v_cache)[block, head, place] = 0
    out = run(case, config).unflatten(1, (2, 2))  # [B, K, G, D]
    assert out[0, 1].isnan().all() and torch.equal(out[0, 0], expected.unflatten(1, (2, 2))[0, 0])
    assert torch.equal(out[1:], expected[1:].unflatten(1, (2, 2)))


@pytest.mark.parametrize("config", PATHS)
def test_int8_cache_of_zeros_yields_zeros(config):
    case = make_case([333, 40], [4, 1], cache_dtype=INT8)
    for cache, scales in ((case.k_cache, case.scales.k), (case.v_cache, case.scales.v)):
        cache.zero_()
        scales[:] = to_int8(torch.zeros(1, dtype=torch.float16))[1].item()
    assert torch.equal(run(case, config), torch.zeros_like(case.q))


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("cache_dtype", [E4M3, INT8], ids=["fp8", "int8"])
def test_every_8_bit_key_and_value_is_read_exactly(config, cache_dtype):
    every = torch.arange(256, dtype=torch.uint8).view(cache_dtype).float()
    every = every[~every.isnan() & (every > -128 if cache_dtype == INT8 else True)].to(DEVICE)
    case = make_case(
        [len(every)], [ALL_PAGES], K=1, G=1, dtype=torch.float16, cache_dtype=cache_dtype
    )

    def scaled(k_scale: float, v_scale: float) -> Case:
        if cache_dtype == E4M3:
            scales = CacheScales(*(torch.tensor([x], device=DEVICE) for x in (k_scale, v_scale)))
            return replace(case, scales=scales)
        for scales, x in ((case.scales.k, k_scale), (case.scales.v, v_scale)):
            scales[:] = torch.tensor(x).log2() + 127
        return case

    blocks = case.table[0, : -(-len(every) // 16)].long()

    def fill(cache: torch.Tensor, x_TD: torch.Tensor) -> None:
        rows = torch.zeros(16 * len(blocks), 64, device=DEVICE)
        rows[: len(every)] = x_TD
        cache[blocks, 0] = rows.view(-1, 16, 64).to(cache_dtype)

    # All tokens have the same weight, so each dimension of the mean shows one token's value.
    case.q.zero_()
    for first in range(0, len(every), 64):
        own = torch.arange(64, device=DEVICE) + first
        held = torch.zeros(len(every), 64, device=DEVICE)
        inside = own < len(every)
        held[own[inside], torch.arange(64, device=DEVICE)[inside]] = every[own[inside]]
        fill(case.v_cache, held)
        out = run(scaled(1.0, 256.0), config)[0, 0][inside].float() * len(every) / 256
        assert torch.allclose(out, every[own[inside]], rtol=2**-10, atol=0)
    # The attention weight of a token depends on its key.
    fill(case.k_cache, every[:, None] * (torch.arange(64, device=DEVICE) == 7))
    fill(case.v_cache, torch.zeros(len(every), 64, device=DEVICE))
    case.q[..., 7] = 1.0
    k_scale = 2**-3 if cache_dtype == E4M3 else 2**-2
    expected = (every.double() * k_scale / 8).softmax(0)
    for t in range(0, len(every), 5):
        fill(
            case.v_cache,
            (torch.arange(len(every), device=DEVICE) == t)[:, None] * torch.ones(64, device=DEVICE),
        )
        weight = run(scaled(k_scale, 1.0), config)[0, 0]
        assert torch.allclose(weight.double(), expected[t].expand(64), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ranking_by_8_bit_landmarks_matches_the_reference(config, dtype):
    case = make_case(
        [517, 0, 333, 333, 48, 200],
        [3, 5, ALL_PAGES, 0, 1, 9],
        layout=FP8,
        pages_per_block=2,
        dtype=dtype,
    )
    check(case, config)
    # Use queries beyond float16's range, and a group whose queries are all zero.
    if dtype == torch.bfloat16:
        case.q.mul_(2.0**40)
        case.q[2] = 0
        case.k_cache.mul_(2.0**-40)
        check(case, config)


@pytest.mark.parametrize("layout", [PageLayout(16, 0, 1), PageLayout(16, 3, 4)])
@pytest.mark.parametrize("config", PATHS)
def test_layouts_with_any_number_of_sink_and_recent_pages_match_the_reference(config, layout):
    check(make_case([1, 90, 400], [1, 2, 4], layout=layout), config)


def test_shipped_configurations_match_the_reference_for_small_and_large_batches():
    check(make_case([333], [4]), None)
    check(make_case([40] * 50 + [100], [1] * 51, K=4, G=1), None)


def scored_case(
    scores: list[float], top_k: int, dtype: torch.dtype, layout: PageLayout = PageLayout()
) -> Case:
    """Build a sequence whose page n has the score ``scores[n]``, with a query that reads dimension
    0 of the landmarks.
    """
    case = make_case(
        [16 * len(scores)], [top_k], K=1, G=1, dtype=dtype, layout=layout, extra_blocks=0
    )
    case.q.zero_()
    case.q[..., 0] = 1
    scores_N = torch.tensor(scores, device=DEVICE, dtype=dtype)
    marks_ND = torch.copysign(
        torch.zeros(len(scores), 64, device=DEVICE, dtype=dtype), scores_N[:, None]
    )
    # All other dimensions are zeros with the sign of the score, so that the sum for -0.0 is -0.0.
    marks_ND[:, 0] = scores_N
    # Assigned as bytes, because some versions of torch cannot index-assign 8-bit floats.
    cache, marks = (
        x.view(torch.uint8 if layout is FP8 else x.dtype)
        for x in (case.landmark_cache, marks_ND.to(case.landmark_cache.dtype))
    )
    cache[case.table[0, : len(scores)].long(), 0, 0] = marks
    return case


def check_selection(
    scores: list[float],
    top_k: int,
    config: Config,
    dtype: torch.dtype = torch.bfloat16,
    layout: PageLayout = PageLayout(),
    budgets: torch.Tensor | None = None,
) -> None:
    budgets = budgets if budgets is None else budgets.to(DEVICE)
    case = replace(scored_case(scores, top_k, dtype, layout), budgets=budgets)
    if isinstance(config, cuda.CudaConfig):
        return check(case, config)  # the CUDA kernel writes no list of kept pages
    workspace = make_workspace(case)
    run(case, config, workspace)
    rounded = torch.tensor(scores).to(dtype).float()
    keep_N = select_pages(
        rounded[None, None, None],
        torch.tensor([[16 * len(scores)]]),
        torch.tensor([[top_k]]),
        case.layout,
        budgets if budgets is None else budgets.cpu(),
    )[0, 0, 0]
    if budgets is not None:
        check(case, config)
    if keep_N.all():
        return  # without a list, all pages are read from the block table
    pages = case.table[0, : len(scores)].cpu()[keep_N].tolist()
    assert kept_pages(workspace, 0, len(pages)) == pages


@pytest.mark.parametrize("config", TRITON)
def test_earlier_of_two_pages_with_equal_scores_is_kept(config):
    case = scored_case([2.0] * 40, 5, torch.float16)
    workspace = make_workspace(case)
    run(case, config, workspace)
    table = case.table[0].tolist()
    assert kept_pages(workspace, 0, 8) == [table[n] for n in (0, 1, 2, 3, 4, 5, 38, 39)]


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize(
    "scores",
    [
        [1.0, 1.0, 1.0, 1e30, *(1 + n / 128 for n in range(30)), -1e30, 1.0],
        [0.0, -0.0] * 20,
        [float("-inf"), float("inf"), 1.0] * 12,
        [(-1) ** n * 2.0 ** (n - 20) for n in range(40)],
        [1e-38 * n for n in range(40)],
    ],
    ids=["outliers", "signed zeros", "infinities", "all exponents", "tiny"],
)
def test_selection_is_exact_for_extreme_scores(config, scores):
    for top_k in (1, 2, 11, 20, len(scores) - 4):
        check_selection(scores, top_k, config)


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_8_bit_landmark_is_read_exactly(config, dtype):
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    order = torch.randperm(254, generator=torch.Generator().manual_seed(0))
    scores = every[~every.isnan()][order].tolist()
    for top_k in (1, 9, 100, 200, 250):
        check_selection(scores, top_k, config, dtype, FP8)


@settings(max_examples=25 if INTERPRETED else 100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(-2, 2).map(float),
            st.floats(-1e4, 1e4, width=16),
            st.floats(-(2.0**127), 2.0**127, width=32),
        ),
        min_size=1,
        max_size=50,
    ),
    st.integers(0, 55),
    st.sampled_from([ONE, THREE] if INTERPRETED else [ONE, THREE, CUDA]),
)
def test_selection_is_exact(scores, top_k, config):
    check_selection(scores, top_k, config)


def test_full_budget_matches_dense_attention_bit_for_bit():
    case = make_case([333, 517], [ALL_PAGES, ALL_PAGES])
    dense = run(case, ONE)
    case.top_k[:] = torch.tensor([-(-333 // 16) - 3, -(-517 // 16) - 3])
    assert torch.equal(run(case, ONE), dense)
    assert torch.equal(
        dense, run(replace(case, landmark_cache=torch.zeros_like(case.landmark_cache)), ONE)
    )


def small_parts(config: Config) -> Config:
    return (
        replace(config, part_pages=2)
        if isinstance(config, cuda.CudaConfig)
        else replace(config, part_tokens=32)
    )


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("top_k", [2, ALL_PAGES])
def test_long_rows_are_split_across_programs(config, top_k):
    """Check batches in which one row is much longer than the others, and batches with more items
    than programs. Rows are dense or ranked.
    """
    case = make_case(
        [700, 17, 64, 333, 40], [ALL_PAGES, 1, ALL_PAGES, top_k, 3], G=3, pages_per_block=2
    )
    fine = small_parts(config)
    check(case, fine)
    if isinstance(fine, LaunchConfig):
        check(case, replace(fine, extra_programs=4))
    case = make_case(
        [700, 17, 64, 333, 40], [3 * top_k + 20, 1, 0, 1, 3] if top_k == 2 else [top_k] * 5
    )
    check(case, fine)


def test_extra_programs_must_be_a_multiple_of_the_kv_heads():
    case = make_case([100], [2], K=8)
    with pytest.raises(
        ValueError, match="extra_programs must be a multiple of the 8 kv heads, got 20"
    ):
        decode(replace(ONE, extra_programs=20), case.batch(), make_workspace(case))


def test_a_plan_that_does_not_fit_in_the_workspace_raises_an_error():
    case = make_case([100, 40], [2, 1], K=8)
    shape = (2, 8, case.batch().group, case.batch().head_dim, case.batch().max_pages)
    workspace = DecodeWorkspace(*shape, DEVICE)
    room = len(workspace.plan)
    config = replace(ONE, extra_programs=8 * (room - 1))
    message = f"the plan has {room + 1} entries, but the workspace has room for {room}"
    with pytest.raises(ValueError, match=message):
        decode(config, case.batch(), workspace)


@pytest.mark.parametrize("P", [16, 64])
@pytest.mark.parametrize("target", [5, 6, 20])
@pytest.mark.parametrize(
    "lengths",
    [
        [900] * 5,
        [900, 880, 860, 840, 820],
        [3000, 700, 2000, 60, 1200],
        [5000, 1, 0, 16, 17],
        [130, 100, 90, 80, 70],
    ],
)
def test_plan_covers_every_row_and_nearly_minimizes_the_largest_part(lengths, target, P):
    tokens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    everything = torch.full_like(tokens, ALL_PAGES)
    plan = torch.full((len(lengths) + target, 8), -1, dtype=torch.int32, device=DEVICE)
    resident = len(lengths) + target
    plan_kernel[(1,)](
        tokens, everything, plan, len(lengths), target, resident, P, 1, 2, 1, 64, 16, False
    )
    entries, slots, largest = (
        [entry[:4] for entry in plan.tolist() if entry[0] < len(lengths)],
        set(),
        0.0,
    )
    assert all(
        entry[4:6] == [lengths[entry[0]], ALL_PAGES]
        for entry in plan.tolist()
        if entry[0] < len(lengths)
    )
    work = [lengths[b] // of // P for b, _, of, _ in entries]
    assert work == sorted(work, reverse=True)
    started = [b for b, part, _, _ in entries if part == 0]
    assert all(part == 0 or started.index(b) < i for i, (b, part, _, _) in enumerate(entries))
    for row, length in enumerate(lengths):
        parts = [entry[1:] for entry in entries if entry[0] == row]
        of, slot = parts[0][1:]
        assert parts == [[part, of, slot] for part in range(of)]
        slots |= set(range(slot, slot + of))
        largest = max(largest, length / of)
    assert slots == set(range(len(entries)))  # no program writes to the slot of another row
    best = next(s for s in range(64, 10_000) if sum(max(n - 1, 0) // s for n in lengths) <= target)
    assert largest <= 1.1 * best


@pytest.mark.parametrize(
    "config, dtype",
    [
        (config, dtype)
        for config in (ONE, THREE, *CUDA_CONFIGS)
        for dtype in (torch.float16, torch.bfloat16)
    ],
)
@pytest.mark.parametrize("layout", [PageLayout(), FP8], ids=["auto", "fp8"])
@CACHES
def test_decoding_writes_the_landmarks_of_completed_pages(config, dtype, layout, cache_dtype):
    case = make_case(
        [48, 47, 0, 64, 5],
        [0, 9, 1, ALL_PAGES, 2],
        D={CUDA: 256}.get(config, 64) if config in CUDA_CONFIGS else 80,
        pages_per_block=2,
        dtype=dtype,
        layout=layout,
        cache_dtype=cache_dtype,
    )
    if cache_dtype is not None:
        case.k_cache.copy_(torch.randint(-8, 9, case.k_cache.shape).float().to(cache_dtype))
    if cache_dtype == INT8:
        case.scales.k[:] = torch.randint(125, 131, case.scales.k.shape)
    if cache_dtype is None and layout is FP8:
        # Sums are exact, so landmarks must be bitwise equal to the reference's. Some exceed 448,
        # the maximum of e4m3.
        case.k_cache.copy_(torch.randint(-8, 9, case.k_cache.shape))
        case.k_cache[..., :5] *= 128
    expected = case.landmark_cache.clone()
    slots = torch.tensor(
        [case.table[b, 1] * 32 + at for b, at in ((0, 15), (3, 31))], device=DEVICE
    )
    layer = (case.k_cache, expected, *([case.scales.k] if cache_dtype == INT8 else []))
    update_landmarks(CachedLayers([layer]), slots, layout=case.layout, implementation="triton")
    assert not torch.equal(
        expected.float().nan_to_num(7.0), case.landmark_cache.float().nan_to_num(7.0)
    )
    by_reference = case.landmark_cache.cpu().clone()
    run(case, config)
    assert torch.equal(
        case.landmark_cache.float().nan_to_num(7.0), expected.float().nan_to_num(7.0)
    )
    replace(case, landmark_cache=by_reference).expected(case.q.dtype)
    error = (by_reference.float() - expected.cpu().float()).nan_to_num(0.0).abs()
    eps = 0.0 if layout is FP8 else torch.finfo(dtype).eps
    assert (error <= eps * expected.cpu().float().nan_to_num(0.0).abs()).all()


@pytest.mark.parametrize("kind", ["2NHD", "HN2D", "NH2D"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_8_bit_landmarks_match_the_reference(kind, dtype):
    P, K, D, layout = 8, 2, 80, PageLayout(8, landmark_dtype="fp8_e4m3")
    k, _, marks = make_caches(kind, 6, K, 2 * P, D, layout, dtype)
    # Use multiples of 2^-10, whose sums are exact. Means range from below e4m3's smallest value to
    # above its largest.
    scale = 2.0 ** (torch.arange(6) * 4 - 10)
    k[:] = (torch.randint(-8, 9, k.shape) * scale[:, None, None, None]).to(DEVICE, dtype)
    expected = marks.clone()
    slots = torch.arange(5, 6 * 2 * P, device=DEVICE)
    reference.update_landmarks(CachedLayers([(k, expected)]), slots, layout)
    update_landmarks(CachedLayers([(k, marks)]), slots, layout=layout, implementation="triton")
    assert torch.equal(marks.float(), expected.float()) and marks.dtype == torch.float8_e4m3fn
    assert marks.float().abs().amax() == 448 and (marks.float().abs() == 2**-9).any()


@pytest.mark.parametrize("kind", ["2NHD", "HN2D", "NH2D"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_landmark_is_computed_when_its_page_is_completed(kind, dtype):
    P, per_block, K, D = 8, 2, 2, 80
    k, _, marks = make_caches(kind, 5, K, P * per_block, D, PageLayout(P), dtype)
    k[:, :, :] = torch.randn(5, K, P * per_block, D).to(DEVICE, dtype)
    # Page 1 of block 3 and page 0 of block 1 are completed; page 0 of block 4 is not; -1 and -9 are
    # padding.
    slots = torch.tensor([-1, 3 * 16 + 15, 4 * 16 + 6, -9, 1 * 16 + 6, 1 * 16 + 7], device=DEVICE)
    update_landmarks(
        CachedLayers([(k, marks)]), slots, layout=PageLayout(P), implementation="triton"
    )
    written = ~marks.float().isnan().all(-1)
    assert written.nonzero().tolist() == [[1, 0, 0], [1, 0, 1], [3, 1, 0], [3, 1, 1]]
    for block, page in ((1, 0), (3, 1)):
        exact = k[block, :, page * P : page * P + P].double().mean(1)
        unit = torch.finfo(dtype).eps
        error = (marks[block, page].double() - exact).abs()
        assert (
            error <= unit / 2 * 1.001 * exact.abs() + torch.finfo(dtype).smallest_normal * unit
        ).all()
    again = marks.float()
    update_landmarks(
        CachedLayers([(k, marks)]), slots.int(), layout=PageLayout(P), implementation="triton"
    )
    assert torch.equal(marks.float().nan_to_num(7.0), again.nan_to_num(7.0))


@pytest.mark.parametrize("layout", [PageLayout(), FP8], ids=["auto", "fp8"])
@pytest.mark.parametrize("cache_dtype", [None, INT8], ids=["16-bit cache", "int8 cache"])
def test_landmarks_of_a_long_prefill_match_the_reference_in_all_layers(layout, cache_dtype):
    keys, _, marks = make_caches("HN2D", 3 * 70, 1, 16, 64, layout, torch.float16, cache_dtype)
    scales = [make_scales(keys).k] if cache_dtype else []
    for scale in scales:
        scale[:] = torch.randint(125, 131, scale.shape)
    keys[:] = torch.randint(-8, 9, keys.shape).to(DEVICE, keys.dtype)  # means are exact
    parts = (x.split(70) for x in (keys, marks, *scales))
    caches = list(zip(*parts, strict=True))  # one per layer, in the same allocation
    expected = [(k, marks.clone(), *scale) for k, marks, *scale in caches]
    slots = torch.cat([torch.arange(5, 600), torch.tensor([-1] * 7), torch.arange(640, 1119)]).to(
        DEVICE
    )
    assert len(slots) > 1024
    for layer in expected:
        reference.update_landmarks(CachedLayers([layer]), slots, layout)
    update_landmarks(CachedLayers(caches), slots, layout=layout, implementation="triton")
    for (_, marks, *_), (_, theirs, *_) in zip(caches, expected, strict=True):
        assert torch.equal(marks.float().nan_to_num(7.0), theirs.float().nan_to_num(7.0))
        assert int((~marks.float().isnan().any(-1)).sum()) == 37 + 29


@pytest.mark.parametrize("kind", ["2NHD", "HN2D", "NH2D"])
def test_tokens_are_stored_in_their_slots(kind):
    K, D = 3, 80
    k, v, _ = make_caches(kind, 5, K, 16, D, PageLayout(), torch.bfloat16)
    qkv = torch.randn(4, 9, D).to(DEVICE, torch.bfloat16)
    key, value, slots = qkv[:, 3:6], qkv[:, 6:], torch.tensor([37, -1, 64, 3], device=DEVICE)
    sparrow_triton.store_tokens(key, value, k, v, slots)
    for cache, tokens in ((k, key), (v, value)):
        for t, block, place in ((0, 2, 5), (2, 4, 0), (3, 0, 3)):
            assert torch.equal(cache[block, :, place], tokens[t])
        assert int((~cache.isnan()).sum()) == 3 * K * D


@pytest.mark.parametrize("kind", ["2NHD", "HN2D", "NH2D"])
def test_tokens_are_stored_in_fp8_as_in_the_reference(kind):
    K, D, slots = 3, 80, torch.tensor([37, -1, 64, 3, 5], device=DEVICE)
    qkv = torch.randn(5, 9, D).to(DEVICE, torch.bfloat16) * 2.0 ** torch.randint(
        -12, 6, (5, 9, D)
    ).to(DEVICE)
    key, value = qkv.clamp_(-50, 50)[:, 3:6], qkv[:, 6:]
    key[0, 1, 7], value[2, 2, 5], key[2, 0, 0], value[4, 0, 0] = 1e4, -1e30, 1e30, 448 * 2.0**-3
    scales = CacheScales(*(2.0 ** torch.tensor([-3.0, 0.0, 2.0], device=DEVICE) for _ in "kv"))
    stored = []
    for store in (sparrow_triton.store_tokens, reference.store_tokens):
        k, v, _ = make_caches(kind, 5, K, 16, D, PageLayout(), torch.bfloat16, E4M3)
        clipped = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        store(key, value, k, v, slots, scales, clipped)
        stored.append([k.float(), v.float()])
        assert clipped.item() == 2
    for a, b in zip(*stored, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        assert int((~a.isnan()).sum()) == 4 * K * D
    assert stored[0][0][2, 1, 5, 7] == 448 and stored[0][1][4, 2, 0, 5] == -448


@pytest.mark.parametrize("kind", ["2NHD", "HN2D", "NH2D"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_are_stored_in_int8_as_in_the_reference(kind, dtype):
    K, D, slots = 3, 80, torch.tensor([37, -1, 64, 3, 5], device=DEVICE)
    low = 8 if dtype == torch.float16 else 40
    magnitude = 2.0 ** torch.randint(-low, low, (5, 9, 1)).to(DEVICE)
    qkv = (torch.randn(5, 9, D).to(DEVICE) * magnitude).to(dtype)
    key, value = qkv[:, 3:6], qkv[:, 6:]
    key[0, 1], value[2, 2, 1:], value[2, 2, 0], value[3, 0, 4] = 0.0, 0.0, 127.0, float("nan")
    key[3, 1] = torch.arange(80, device=DEVICE) / 2  # halfway between two codes, rounded to even
    key[3, 1, 79] = 126.5
    stored = []
    for store in (sparrow_triton.store_tokens, reference.store_tokens):
        k, v, _ = make_caches(kind, 5, K, 16, D, PageLayout(), dtype, INT8)
        scales = make_scales(k)
        store(key, value, k, v, slots, scales)
        stored.append([k.clone(), v.clone(), scales.k.clone(), scales.v.clone()])
    for a, b in zip(*stored, strict=True):
        assert torch.equal(a, b)
    (k, v, k_scales, v_scales), _ = stored
    assert (
        int((k != -128).sum()) == int((v != -128).sum()) == 4 * K * D
        and int((k_scales < 255).sum()) == 4 * K
    )
    assert (
        v_scales[4, 2, 0] == 127 and v_scales[0, 0, 3] == 255
    )  # 127, the largest code at scale 1, and NaN
    assert k[0, 1, 3, [1, 3, 5, 79]].tolist() == [0, 2, 2, 126]
    for t, block, place in ((0, 2, 5), (2, 4, 0), (4, 0, 5)):
        for cache, scale, x in ((k, k_scales, key), (v, v_scales, value)):
            back = from_int8(cache[block, :, place], scale[block, :, place], dtype).double()
            half_a_step = (
                scale_of(scale[block, :, place])[..., None].double() / 2
            )  # exact, unlike powers computed on a GPU
            assert ((back - x[t].double()).abs() <= half_a_step).all()


@pytest.mark.parametrize("config", PATHS)
@pytest.mark.parametrize("cache_dtype", [None, INT8], ids=["16-bit cache", "int8 cache"])
def test_decoding_reads_newly_stored_tokens(config, cache_dtype):
    case = make_case([700, 333, 48, 160, 97], [5, 4, 1, 2, 0], cache_dtype=cache_dtype)
    expected, workspace, out = run(case, config), make_workspace(case), torch.empty_like(case.q)
    last = case.length.long() - 1
    blocks, places = case.table[torch.arange(5, device=DEVICE), last // 16].long(), last % 16
    newest = [cache[blocks, :, places].clone() for cache in (case.k_cache, case.v_cache)]
    if cache_dtype == INT8:
        newest = [
            from_int8(new, scale[blocks, :, places], case.q.dtype)
            for new, scale in zip(newest, (case.scales.k, case.scales.v), strict=True)
        ]
    batch = case.batch(out)
    decode(config, batch, workspace)
    for _ in range(3):
        out.fill_(float("nan"))
        for cache in (
            (case.k_cache, case.v_cache) if cache_dtype is None else (case.scales.k, case.scales.v)
        ):
            cache[blocks, :, places] = float("nan") if cache_dtype is None else 255
        sparrow_triton.store_tokens(
            *newest, case.k_cache, case.v_cache, blocks * 16 + places, case.scales
        )
        decode(config, batch, workspace, reuse_plan=True)
        assert torch.equal(out, expected)


def test_public_operation_uses_exactly_the_requested_implementation():
    case = make_case([100], [2])
    workspace = make_workspace(case)
    out = torch.empty_like(case.q)
    options = dict(layout=case.layout, out=out)
    assert (
        paged_decode(*case.inputs(), implementation="triton", workspace=workspace, **options) is out
    )
    assert torch.equal(out, run(case, None))
    cpu = [x.cpu() for x in case.inputs()]
    by_reference = paged_decode(*cpu, layout=case.layout, implementation="reference")
    assert torch.equal(by_reference, case.expected(torch.float16))
    with pytest.raises(ValueError, match="need a workspace"):
        paged_decode(*case.inputs(), implementation="triton", **options)
    with pytest.raises(ValueError, match="unknown implementation 'flash'"):
        paged_decode(*case.inputs(), implementation="flash", **options)
    if INTERPRETED:
        with pytest.raises(ValueError, match="needs a Hopper GPU"):
            paged_decode(*case.inputs(), implementation="cuda", workspace=workspace, **options)
    else:
        check_shipped_cuda(case)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_an_empty_batch_gives_an_empty_result(implementation):
    case = make_case([100], [2])
    none = replace(
        case, q=case.q[:0], table=case.table[:0], length=case.length[:0], top_k=case.top_k[:0]
    )
    out = paged_decode(
        *none.inputs(),
        layout=case.layout,
        implementation=implementation,
        workspace=make_workspace(case),
    )
    assert out.shape == none.q.shape and out.dtype == case.q.dtype


def check_shipped_cuda(one_row: Case) -> None:
    """Request the CUDA kernel by name, for one row and for forty, and check that the results are
    bitwise equal to those of the shipped configuration.
    """
    for case in (one_row, make_case([333] * 40, [4] * 40, K=4)):
        out, capacity = torch.empty_like(case.q), -(-case.table.shape[1] // 32) * 32
        config = cuda.launch.choose_config(len(case.q) * case.k_cache.shape[1], 64, capacity, H200)
        paged_decode(
            *case.inputs(),
            implementation="cuda",
            layout=case.layout,
            out=out,
            workspace=make_workspace(case),
        )
        assert torch.equal(out, run(case, config))


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, the kernel itself is tested")
def test_cuda_kernel_receives_all_arguments_of_a_step(monkeypatch):
    """Check the plan, the macros, and every field of the kernel's argument. The kernel itself does
    not run, because it needs a GPU.
    """
    launched = []

    def kernel(defines, shared_bytes, device):
        return lambda programs, threads, arguments: launched.append(
            (
                dict(defines),
                shared_bytes,
                programs,
                threads,
                {f: getattr(arguments, f) for f, _ in arguments._fields_},
            )
        )

    monkeypatch.setattr(cuda.launch, "unsupported_reason", lambda *of: None)
    monkeypatch.setattr(cuda.launch, "_kernel", kernel)
    case = make_case([333] * 20, [4] * 20, K=4, pages_per_block=2)
    workspace, out = make_workspace(case), torch.empty_like(case.q)
    for reuse_plan in (False, True):
        workspace.plan.fill_(-1)
        assert out is paged_decode(
            *case.inputs(),
            implementation="cuda",
            layout=case.layout,
            scale=0.125,
            out=out,
            workspace=workspace,
            reuse_plan=reuse_plan,
        )
        assert bool((workspace.plan[:20, 0] >= 0).all()) is not reuse_plan
    (defines, shared_bytes, programs, threads, fields), (*_, again) = launched
    config = cuda.launch.choose_config(80, 64, 32, H200)
    assert defines == dict(
        D=64,
        G=2,
        K=4,
        NEW_TOKENS=1,
        PER_BLOCK=2,
        SINK=1,
        RECENT=2,
        BF16=0,
        FP8_CACHE=0,
        INT8_CACHE=0,
        FP8_LANDMARKS=0,
        WARPS=config.warps,
        STAGES=config.stages,
        RESIDENT=config.resident,
        EACH_RANKS=0,
        BINS=1024,
        CANDIDATES=256,
    )
    assert (shared_bytes, threads) == (config.shared_bytes(128, 32), 32 * config.warps)
    assert programs == 80 + config.division(80, 4, 132).extra_programs
    tensors = dict(
        q=case.q,
        k=case.k_cache,
        v=case.v_cache,
        landmarks=case.landmark_cache,
        table=case.table,
        out=out,
        rows=workspace.rows,
        partial=workspace.partial,
        stats=workspace.stats,
        ready=workspace.counters[0],
        counters=workspace.counters[1],
        plan=workspace.plan,
    )
    assert fields.pop("k_scales") is fields.pop("v_scales") is fields.pop("head_budgets") is None
    strides = dict(
        q_row=case.q.stride(0),
        q_head=64,
        block=case.k_cache.stride(0),
        head=case.k_cache.stride(1),
        token=case.k_cache.stride(2),
        landmark_block=case.landmark_cache.stride(0),
        landmark_page=4 * 64,
        landmark_head=64,
        table_row=case.table.stride(0),
        out_row=8 * 64,
        out_head=64,
        rows_row=workspace.rows.stride(0),
    )
    scalars = dict(
        scale_log2=pytest.approx(0.125 * 1.442695), count=20, rank_before_wait=0, capacity=32
    )
    scalars |= dict(scale_block=0, scale_head=0)
    assert fields == {**{name: x.data_ptr() for name, x in tensors.items()}, **strides, **scalars}
    assert again == fields | {
        "rank_before_wait": 1,
        "k_scales": None,
        "v_scales": None,
        "head_budgets": None,
    }
    case = make_case([333] * 20, [4] * 20, K=4, cache_dtype=E4M3, budgets=(0.5, 1.5, 1, 1))
    decode(config, case.batch(), workspace)
    *_, (defines, shared_bytes, *_, fields) = launched
    assert (defines["FP8_CACHE"], defines["FP8_LANDMARKS"], shared_bytes) == (
        1,
        0,
        config.shared_bytes(64, 32),
    )
    assert [fields[name] for name in ("k_scales", "v_scales", "head_budgets")] == [
        x.data_ptr() for x in (case.scales.k, case.scales.v, case.budgets)
    ]
    case = make_case([333] * 20, [4] * 20, K=4, pages_per_block=2, cache_dtype=INT8)
    decode(config, case.batch(), workspace)
    *_, (defines, shared_bytes, *_, fields) = launched
    assert (defines["FP8_CACHE"], defines["INT8_CACHE"], shared_bytes) == (
        0,
        1,
        config.shared_bytes(64 + 1, 32),
    )
    assert [fields[name] for name in ("k_scales", "v_scales", "scale_block", "scale_head")] == [
        case.scales.k.data_ptr(),
        case.scales.v.data_ptr(),
        case.k_cache.stride(0),
        64,
    ]
    several = make_case([333] * 20, [4] * 20, K=4, D=128, G=8, tokens=4)
    cuda.run(several.batch(), make_workspace(several))
    *_, (defines, shared_bytes, programs, _, fields) = launched
    config = cuda.launch.choose_config(80, 128, 32, H200, queries=32)
    assert (defines["G"], defines["NEW_TOKENS"], fields["count"]) == (8, 4, 20)
    assert shared_bytes == config.shared_bytes(256, 32)
    assert programs == 80 + config.division(80, 4, 132).extra_programs
    unaligned = CacheScales(
        *(torch.zeros(*x.shape[:2], 40, dtype=x.dtype)[..., :32] for x in (case.scales.k,) * 2)
    )
    with pytest.raises(
        ValueError, match="copies 16 bytes at a time; align scales of keys to 16 bytes"
    ):
        decode(config, replace(case, scales=unaligned).batch(), workspace)


def refuse(match: str, case: Case, workspace: DecodeWorkspace | None = None, **changes) -> None:
    case = replace(case, **changes)
    with pytest.raises(ValueError, match=match):
        paged_decode(
            *case.inputs(),
            layout=case.layout,
            implementation="triton",
            cache_scales=case.scales,
            head_budgets_K=case.budgets,
            workspace=workspace or make_workspace(case),
        )


def test_unsupported_inputs_raise_an_error():
    case = make_case([100], [2])
    workspace = make_workspace(case)
    refuse(
        "pages of 12 tokens do not fit blocks of 16 tokens", case, workspace, layout=PageLayout(12)
    )
    refuse("queries must be float16 or bfloat16", case, q=case.q.float())
    refuse("length_B must be contiguous int32", case, length=case.length.long())
    refuse("caches must be", case, k_cache=case.k_cache.float(), v_cache=case.v_cache.float())
    refuse("landmarks must be", case, landmark_cache=case.landmark_cache[:, :, :1])
    refuse(
        r"landmarks must be .* in torch.float8_e4m3fn, got .* in torch.float16", case, layout=FP8
    )
    fp8, int8 = make_case([100], [2], cache_dtype=E4M3), make_case([100], [2], cache_dtype=INT8)
    refuse(
        "require scales, and caches in other dtypes must not have scales; got .* no scales",
        fp8,
        scales=None,
    )
    refuse(
        "require scales, and caches in other dtypes must not have scales; got .* and scales",
        case,
        scales=fp8.scales,
    )
    refuse(
        r"scales must be contiguous torch.float32 \[2\], got .* \(1,\)",
        fp8,
        scales=CacheScales(fp8.scales.k, fp8.scales.v[:1]),
    )
    refuse(
        r"scales must be contiguous torch.uint8 \[\d+, 2, 16\], got torch.float32",
        int8,
        scales=fp8.scales,
    )
    refuse(
        "scales of keys and values must have the same strides",
        int8,
        scales=replace(int8.scales, v=int8.scales.v.clone()),
    )
    refuse("landmarks must be in torch.float16", fp8, landmark_cache=fp8.landmark_cache.bfloat16())
    budgets = torch.full((2,), 256, dtype=torch.int32, device=DEVICE)
    refuse(r"head_budgets_K must be contiguous int32 \[2\] on", case, budgets=budgets[:1])
    refuse(
        r"head_budgets_K must be contiguous int32 \[2\] on .*, got torch.int64",
        case,
        budgets=budgets.long(),
    )
    refuse("create a larger workspace", case, DecodeWorkspace(1, 2, 2, 64, 3, DEVICE))
    refuse("for 2 kv heads, group 4", case, DecodeWorkspace(1, 2, 4, 64, 100, DEVICE))
    for layer in (
        (int8.k_cache, int8.landmark_cache),
        (case.k_cache, case.landmark_cache, int8.scales.k),
    ):
        with pytest.raises(
            ValueError,
            match="int8 keys need one tensor of scales, and keys in other dtypes need none",
        ):
            CachedLayers([layer])
    with pytest.raises(ValueError, match="cannot rank sequences"):
        DecodeWorkspace(1, 1, 1, 64, 16385, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [PageLayout(), FP8], ids=["auto", "fp8"])
@pytest.mark.parametrize("config", [*PATHS, pytest.param(None, id="shipped")])
@pytest.mark.parametrize("cache_dtype", [None, INT8], ids=["16-bit cache", "int8 cache"])
def test_long_sequences_match_the_reference(config, layout, cache_dtype):
    shape = dict(D=128, dtype=torch.bfloat16, layout=layout, cache_dtype=cache_dtype)
    check(make_case([3001, 40000, 7919, 1], [61, 1000, 221, 7], **shape), config)
    check(make_case([131072, 5001, 100000], [253, 61, ALL_PAGES], K=1, **shape), config)
    check(
        make_case(
            [40000, 7919, 131072, 300],
            [381, 61, 253, 29],
            K=4,
            budgets=(2.5, 0.0, 0.5, 1.0),
            **shape,
        ),
        config,
    )
    many = dict(K=8, budgets=(3.0, 0.25, 1.5, 0.5, 1.0, 0.75, 0.0, 1.0), **shape)
    check(make_case([9000, 4000, 6000, 100] * 3, [221, 61, 600, 29] * 3, **many), config)


@pytest.mark.gpu
def test_captured_graph_uses_updated_lengths_budgets_and_queries():
    every = ((ONE, (), None), (THREE, (0.5, 1.5), None), (CUDA, (), None), (CUDA, (0.5, 1.5), None))
    for config, budgets, cache_dtype in (*every, (ONE, (), INT8), (CUDA, (), INT8)):
        case = make_case([700, 333, 48], [5, 4, 1], budgets=budgets, cache_dtype=cache_dtype)
        workspace, out = make_workspace(case), torch.empty_like(case.q)
        batch = case.batch(out)
        decode(config, batch, workspace)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        decode(config, batch, workspace)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode(config, batch, workspace)
        for lengths, top_k in (([700, 333, 48], [5, 4, 1]), ([0, 200, 33], [7, ALL_PAGES, 0])):
            case.length[:] = torch.tensor(lengths)
            case.top_k[:] = torch.tensor(top_k)
            case.q.add_(1)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, run(case, config))


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, INT8], ids=["16-bit cache", "int8 cache"])
def test_caches_larger_than_two_billion_elements_are_addressed_correctly(cache_dtype):
    case = make_case([333, 90], [3, 2], K=2, D=128, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    blocks, itemsize = case.k_cache.shape[0], case.k_cache.itemsize
    gap = (2**31 // (blocks - 1) // 16 * 16 + case.k_cache.stride(0)) * itemsize
    memory = torch.empty(blocks * gap, dtype=torch.uint8, device=DEVICE)

    def spread(view: torch.Tensor) -> torch.Tensor:
        typed = memory.view(view.dtype)
        far = typed.as_strided(
            view.shape, (gap // view.itemsize, *view.stride()[1:]), view.storage_offset()
        )
        return far.copy_(view)

    marks, scales = (
        spread(case.landmark_cache),
        case.scales and CacheScales(spread(case.scales.k), spread(case.scales.v)),
    )
    far = replace(
        case,
        k_cache=spread(case.k_cache),
        v_cache=spread(case.v_cache),
        landmark_cache=marks,
        scales=scales,
    )
    for config in (ONE, THREE, CUDA):
        assert torch.equal(run(far, config), run(case, config))
