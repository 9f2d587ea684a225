"""Time the decode kernels on one GPU. Each time is compared with a read limit, the time for just
reading the necessary bytes. Sparse decoding is also compared with dense decoding.

    python benchmarks/decode_kernels.py            # the shipped configurations; writes JSON to benchmarks/results/
    python benchmarks/decode_kernels.py --families # attention shapes of common models, with CUDA and with Triton
    python benchmarks/decode_kernels.py --sweep    # the same shapes in several configurations of the CUDA kernel
    python benchmarks/decode_kernels.py --tokens   # several new tokens per sequence, with CUDA and with Triton
    python benchmarks/decode_kernels.py --tuned    # the shapes that `sparrow tune` has tuned on this GPU

Every case has the caches of several layers, filled with random values. Their blocks are in random
order and in vLLM's layout, with landmarks in the padded tails. A CUDA graph runs through all
layers, so no layer is read twice in a row. The block table is as wide as for a model with 40,960
positions, and one row in sixteen completes a page. Times are per layer: medians over graph replays,
with the 10th and 90th percentile. "Dense" is the fastest of our own kernels with every page kept;
vLLM's FlashAttention is timed too if vLLM is installed. The read limit assumes the bandwidth that a
kernel reaches on this GPU if it only reads.

Shapes: B sequences, L tokens per sequence, T new tokens per sequence, G query heads per kv head, k
pages kept by score, K kv heads, D head dim, P page size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from common import RESULTS, Row, machine, parser, save
from rollout_trace import PROMPT, SLOTS, responses, simulate, states

from sparrow.attention import (
    CachedLayers,
    CacheScales,
    Choice,
    DecodeWorkspace,
    PageLayout,
    choose,
    cuda,
    update_landmarks,
)
from sparrow.attention import triton as by_triton
from sparrow.attention.cuda import CudaConfig
from sparrow.attention.cuda.compile import compiled
from sparrow.attention.decode import DecodeBatch, device_limits
from sparrow.attention.pages import BUDGET_UNIT, LandmarkDtype, head_top_k
from sparrow.attention.triton import LaunchConfig, saved, tuning
from sparrow.attention.triton.timing import read_limit, timed
from sparrow.schedule import ALL_PAGES, SparsitySchedule

Config = LaunchConfig | CudaConfig | None
Launches = cuda.Launches | by_triton.Launches
K, LAYERS, TOKENS, MAX_TOKENS = 8, 3, 960_512, 40_960
CASES = [
    (64, 15_000, 2, 221),
    (32, 30_000, 2, 253),
    (64, 15_000, 4, 221),
    (32, 30_000, 4, 381),
    (8, 30_000, 2, 253),
    (32, 30_000, 2, 61),
    (128, 4_000, 2, 61),
    (16, 30_000, 4, 381),
    (1, 30_000, 4, 381),
    (4, 30_000, 2, 253),
    (12, 30_000, 2, 253),
    (24, 30_000, 2, 253),
    (96, 10_000, 2, 151),
]
# Draft steps, in the same format as CASES.
DRAFTS = [
    (64, 15_000, 2, 61),
    (32, 30_000, 2, 61),
    (8, 30_000, 2, 61),
    (64, 4_096, 2, 61),
    (64, 15_000, 4, 61),
]
# Batches with every page kept, for comparison with FlashAttention.
DENSE = [
    (64, 15_000),
    (32, 30_000),
    (8, 30_000),
    (64, 4_096),
    (64, 1_024),
    (128, 300),
    (8, 1_024),
    (1, 1_024),
]
# Shapes and their query heads per kv head. Batches come from the rollout traces, so their sequences
# differ in length. Budgets come from the 0.86 tables.
RAGGED = [("qwen3-1.7b", 2), ("qwen3-4b", 4)]
# Head dim, cache dtype and page size. The rest of the benchmark uses the first row. All rows keep
# the same number of tokens.
SHAPES = [
    (128, torch.bfloat16, 16),
    (64, torch.bfloat16, 16),
    (256, torch.bfloat16, 16),
    (80, torch.bfloat16, 16),
    (128, torch.bfloat16, 8),
    (128, torch.bfloat16, 32),
]


# Storage formats for keys and values, with the landmark dtypes to measure.
CACHES: dict[str, tuple[LandmarkDtype, ...]] = {
    "auto": ("auto",),
    "fp8": ("auto", "fp8_e4m3"),
    "int8": ("auto",),
}
# Kv heads, group size, head dim, and a model with these numbers.
FAMILIES = [
    (8, 2, 128, "Qwen3-1.7B"),
    (8, 5, 128, "Qwen3-14B"),
    (4, 8, 128, "Qwen3-30B-A3B"),
    (4, 7, 128, "Qwen2.5-7B"),
    (2, 6, 128, "Qwen2.5-1.5B"),
    (8, 4, 64, "Llama-3.2-1B"),
    (4, 16, 128, "Qwen3-235B-A22B"),
    (8, 12, 128, "GLM-4.5"),
    (2, 8, 256, "Qwen3-Next"),
    (4, 4, 256, "-"),
    (3, 3, 64, "SmolLM2-135M"),
    (1, 4, 128, "Qwen3-8B on 8 GPUs"),
]
FAMILY_BATCH = (64, 15_000)
FAMILY_BUDGETS = (61, 221)
TUNED_BATCHES = [(8, 30_000), FAMILY_BATCH]
TURNS = 3  # how often to alternate between the shipped and the tuned configuration
# Batches from other tables. Each has as many items as one of the families' batches. An entry
# consists of sequences, tokens, kv heads, group size, head dim and budgets.
ALSO_SWEPT = [(8, 30_000, 8, 2, 128, (61, 253)), (32, 30_000, 8, 4, 64, (381,))]
# Configurations to compare with the shipped one, by head dim and item count.
SWEPT = {
    (128, 512): [CudaConfig(8, 1, 2), CudaConfig(2, 2, 4)],
    (128, 256): [
        CudaConfig(8, 1, 2),
        CudaConfig(2, 2, 4, parts=2),
        CudaConfig(2, 2, 4, parts=2, each_ranks=True),
    ],
    (128, 128): [
        CudaConfig(4, 3, 2, parts=2),
        CudaConfig(4, 3, 2, parts=2, each_ranks=True),
        CudaConfig(8, 1, 2, parts=2, each_ranks=True),
    ],
    (128, 64): [
        CudaConfig(8, 3, 1, parts=2),
        CudaConfig(8, 3, 1, parts=2, each_ranks=True),
        CudaConfig(4, 3, 2, parts=4),
        CudaConfig(4, 3, 2, parts=4, each_ranks=True),
        CudaConfig(8, 1, 2, parts=4, each_ranks=True),
        CudaConfig(4, 3, 2, parts=2, each_ranks=True),
    ],
    (64, 512): [
        CudaConfig(4, 2, 4),
        CudaConfig(4, 3, 3),
        CudaConfig(2, 4, 4),
        CudaConfig(4, 6, 2),
        CudaConfig(8, 3, 2),
    ],
    (64, 256): [CudaConfig(4, 2, 4), CudaConfig(4, 6, 2), CudaConfig(8, 3, 2)],
    (64, 192): [
        CudaConfig(4, 3, 3, parts=2),
        CudaConfig(4, 3, 3, parts=2, each_ranks=True),
        CudaConfig(4, 2, 4, parts=2, each_ranks=True),
        CudaConfig(8, 3, 2),
        CudaConfig(4, 6, 2),
    ],
    (256, 256): [CudaConfig(4, 3, 1), CudaConfig(4, 1, 2), CudaConfig(8, 1, 1)],
    (256, 128): [
        CudaConfig(2, 3, 2, parts=2),
        CudaConfig(2, 3, 2, parts=2, each_ranks=True),
        CudaConfig(4, 1, 2, parts=2, each_ranks=True),
        CudaConfig(8, 1, 1),
    ],
}
# Steps over several new tokens: batches, group sizes (each with an example model), and numbers of
# new tokens. 64 pages of 16 tokens are kept.
WIDE_BATCHES = [(32, 15_000), (64, 4_096)]
WIDE_GROUPS = {2: "Qwen3-1.7B", 4: "Qwen3-8B"}
WIDE_TOKENS = (1, 2, 4, 8)
WIDE_BUDGET = 61
INT8_EXPONENT = 122  # for a scale of 2^-5, which puts code 127 at four standard deviations


class Pool:
    """The caches of all layers. A layer's cache is a single ``[blocks, K, P, 2 D]`` allocation in
    which every block has a tail of landmarks.
    """

    def __init__(
        self,
        tokens: int,
        layers: int,
        D: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        P: int = 16,
        landmark_dtype: LandmarkDtype = "auto",
        cache: str = "auto",
        K: int = K,
    ) -> None:
        self.K = K
        self.layout = PageLayout(P, landmark_dtype=landmark_dtype)
        self.k, self.v, self.marks, self.D, mark = [], [], [], D, self.layout.landmark_type(dtype)
        self.scales: list[CacheScales | None] = []
        dtype = {"auto": dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[cache]
        ratio, interior = dtype.itemsize / mark.itemsize, P * K * 2 * D
        before_marks = interior + (2 * P * K if cache == "int8" else 0)
        blocks, stride = tokens // P, before_marks + int(K * D / ratio)
        for _ in range(layers):
            values = torch.empty(blocks, stride, dtype=torch.bfloat16, device="cuda").normal_()
            if cache == "int8":
                values = values.mul_(2.0 ** (127 - INT8_EXPONENT)).round_().clamp_(-127, 127)
            memory = values.to(dtype)
            del values
            self.scales.append(None)
            if cache == "fp8":
                self.scales[-1] = CacheScales(
                    *(torch.full((K,), 2.0**-4, device="cuda") for _ in "kv")
                )
            if cache == "int8":
                exponents = memory.view(torch.uint8).as_strided(
                    (blocks, K, 2, P), (stride, 2 * P, P, 1), interior
                )
                self.scales[-1] = CacheScales(*exponents.fill_(INT8_EXPONENT).unbind(2))
            kv = memory.as_strided((blocks, K, P, 2 * D), (stride, P * 2 * D, 2 * D, 1))
            self.k.append(kv[..., :D])
            self.v.append(kv[..., D:])
            tail = memory.view(mark)
            start, block = int(before_marks * ratio), int(stride * ratio)
            self.marks.append(tail.as_strided((blocks, 1, K, D), (block, K * D, D, 1), start))
            self.update_landmarks(-1, torch.arange(blocks * P, device="cuda"))

    def update_landmarks(self, layer: int, slots: torch.Tensor) -> None:
        scales = self.scales[layer] if self.k[layer].dtype == torch.int8 else None
        caches = CachedLayers(
            [(self.k[layer], self.marks[layer], *(() if scales is None else (scales.k,)))]
        )
        update_landmarks(caches, slots, layout=self.layout, implementation="triton")


class Case:
    """A batch of sequences stored in the pool's blocks, using the same blocks in every layer."""

    budgets: Sequence[torch.Tensor] = ()  # per layer, unless all kv heads keep ``top_k``
    triton = False  # whether to use Triton's kernels for any number of rows

    def __init__(self, pool: Pool, B: int, L: int, G: int, k: int, tokens: int = 1) -> None:
        self.pool, self.k, P, D = pool, k, pool.layout.page_size, pool.D
        self.tokens = tokens
        K = pool.K
        self.choice: Choice = choose(
            "triton" if self.triton else None,
            page_size=P,
            head_dim=D,
            kv_heads=K,
            group=G,
            dtype=pool.k[0].dtype,
            device=pool.k[0].device,
            tokens=tokens,
        )
        pages, blocks = -(-L // P), pool.k[0].shape[0]
        self.table = torch.zeros(B, MAX_TOKENS // P, dtype=torch.int32, device="cuda")
        order = torch.randperm(max(blocks, B * pages), device="cuda")[: B * pages] % blocks
        self.table[:, :pages] = order.view(B, pages).int()
        self.length = (L - torch.arange(B) % 16).int().cuda()
        self.top_k = torch.full((B,), k, dtype=torch.int32, device="cuda")
        self.q = torch.randn(B * tokens, K * G, D, device="cuda").bfloat16()
        self.out = torch.empty_like(self.q)
        self.workspace = DecodeWorkspace(B, K, G, D, self.table.shape[1], "cuda", tokens)
        parts = B * K + 1024  # enough for any configuration
        self.workspace.partial = torch.empty(parts, G * tokens, D, device="cuda")
        self.workspace.stats = torch.empty(parts, 2, G * tokens, device="cuda")
        self.workspace.plan = torch.empty(
            parts // K, *self.workspace.plan.shape[1:], dtype=torch.int32, device="cuda"
        )

    def bytes(self, top_k: torch.Tensor) -> float:
        """Return the bytes a layer reads: landmarks for heads that skip pages, plus the keys and
        values of kept pages.
        """
        P, D, K = self.pool.layout.page_size, self.pool.D, self.pool.K
        every = list(self.budgets) or [torch.full((K,), BUDGET_UNIT, device="cuda")]
        budgets = torch.cat(every)  # summed over the heads of all layers
        ranked = ((self.length + P - 1) // P - 3).clamp(min=0)[:, None]
        budget = torch.minimum(ranked, head_top_k(top_k[:, None], budgets)[..., 0])
        scored = torch.where((budget > 0) & (budget < ranked), ranked, 0)
        tokens = self.length[:, None] - (ranked - budget) * P
        marks, kv = (
            D * self.pool.marks[0].element_size(),
            2 * cuda.launch.key_bytes(D, self.pool.k[0].dtype),
        )
        return (int(scored.sum()) * marks + int(tokens.sum()) * kv) * K / len(budgets)

    def step(self, config: Config, layer: int, top_k: torch.Tensor | None = None) -> Launches:
        """Return the launches of a decode step, with the shipped configuration if ``config`` is
        None.
        """
        pool = self.pool
        batch = DecodeBatch(
            self.q,
            pool.k[layer],
            pool.v[layer],
            pool.marks[layer],
            self.table,
            self.length,
            self.top_k if top_k is None else top_k,
            self.out,
            pool.layout,
            pool.D**-0.5,
            pool.scales[layer],
            self.budgets[layer] if self.budgets else None,
            self.tokens,
        )
        step: Launches
        if isinstance(config, CudaConfig) or (
            config is None and self.choice.of(len(self.length)) == "cuda"
        ):
            cuda.check(batch, self.workspace)
            step = cuda.Launches(batch, self.workspace, config)
        else:
            by_triton.check(batch, self.workspace)
            step = by_triton.Launches(batch, self.workspace, config)
        step.plan()  # done once per model step rather than once per layer
        return step

    def time(
        self, config: Config, what: str, top_k: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Return the time per layer of ``what``: ``rank``, ``attend`` or the whole ``step``."""
        steps = [self.step(config, layer, top_k) for layer in range(len(self.pool.k))]
        return timed([launches(step, what) for step in steps])

    def flash(self) -> dict[str, float] | None:
        """Return the time per layer of vLLM's FlashAttention on the whole cache, called as in a
        captured decode step.
        """
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata
        except ImportError:
            return None
        K = self.pool.K
        (B, H, D), pool, longest = self.q.shape, self.pool, int(self.length.max())
        starts = torch.arange(B + 1, dtype=torch.int32, device="cuda")
        shared = dict(causal=True, window_size=[-1, -1], num_splits=32)
        plan = get_scheduler_metadata(
            B,
            1,
            longest,
            H,
            K,
            D,
            self.length,
            torch.bfloat16,
            cu_seqlens_q=starts,
            page_size=pool.layout.page_size,
            **shared,
        )
        layers = zip(pool.k, pool.v, strict=True)
        return timed(
            [
                partial(
                    flash_attn_varlen_func,
                    self.q,
                    k.transpose(1, 2),
                    v.transpose(1, 2),
                    1,
                    starts,
                    longest,
                    seqused_k=self.length,
                    softmax_scale=D**-0.5,
                    block_table=self.table,
                    out=self.out,
                    scheduler_metadata=plan,
                    fa_version=3,
                    **shared,
                )
                for k, v in layers
            ]
        )


def launches(step: Launches, what: str) -> Callable[[], None]:
    if what != "step" or isinstance(step, cuda.Launches):
        return getattr(step, "attend" if what == "step" else what)

    def both() -> None:
        step.rank()
        step.attend()

    return both


def measured(case: Case, limit: float, **about: Any) -> Row:
    """Time a sparse step and a step that keeps every page, and return a row with their times and
    read limits.
    """
    everything = torch.full_like(case.top_k, ALL_PAGES)
    row = about | dict(
        step=case.time(None, "step"),
        dense=case.time(None, "step", everything),
        limit_us=case.bytes(case.top_k) / limit * 1e6,
        dense_limit_us=case.bytes(everything) / limit * 1e6,
    )
    show(about | {"dense us": round(row["dense"]["us"], 1)}, row["step"], row["limit_us"])
    return row


def sparse_only(case: Case, limit: float, **about: Any) -> Row:
    """Time a sparse step, and return a row with its time and read limit."""
    row = about | case.time(None, "step") | {"limit_us": case.bytes(case.top_k) / limit * 1e6}
    show(about, row, row["limit_us"])
    return row


def show(about: Row, times: dict[str, float], limit_us: float) -> None:
    spread = f"{times['p10']:.1f} .. {times['p90']:.1f}"
    print(
        f"{about}: {times['us']:.1f} us ({spread}), {limit_us / times['us']:.0%} of limit",
        flush=True,
    )


def ragged(pool: Pool, limit: float) -> list[Row]:
    rows = []
    for shape, G in RAGGED:
        for step, lengths in states(simulate([PROMPT] * 240, responses(240), SLOTS[shape]), 12):
            case = Case(pool, len(lengths), int(lengths.max()), G, 0)
            case.length = torch.tensor(lengths, dtype=torch.int32, device="cuda")
            case.top_k = torch.tensor(
                SparsitySchedule.preset(shape).pages(lengths), dtype=torch.int32, device="cuda"
            )
            rows.append(
                sparse_only(
                    case, limit, shape=shape, step=step, B=len(lengths), tokens=int(lengths.sum())
                )
            )
    return rows


def landmarks(limit: float) -> Row:
    """Measure draft steps with landmarks in the cache dtype and in 8 bits."""
    rows = []
    for dtype in get_args(LandmarkDtype):
        pool = Pool(TOKENS, LAYERS, landmark_dtype=dtype)
        for size in DRAFTS:
            about = dict(zip("BLGk", size, strict=True), landmark_dtype=dtype)
            rows.append(sparse_only(Case(pool, *size), limit, **about))
        del pool
    return dict(landmarks=rows)


def caches(limit: float, names: Sequence[str]) -> Row:
    """Measure sparse and dense steps with 16-bit and 8-bit keys and values. Landmarks have 16 bits;
    with fp8, 8-bit landmarks are measured too.
    """
    rows = []
    for cache, landmark_dtype in [(name, dtype) for name in names for dtype in CACHES[name]]:
        pool = Pool(TOKENS, LAYERS, landmark_dtype=landmark_dtype, cache=cache)
        for size in CASES:
            about = dict(zip("BLGk", size, strict=True), cache=cache, landmark_dtype=landmark_dtype)
            case = Case(pool, *size)
            rows.append(measured(case, limit, **about, kernel=case.choice.of(size[0])))
        del pool, case
    return dict(cases=rows)


def head_budgets(limit: float, spread: float) -> Row:
    """Measure steps with equal and with unequal budgets for the kv heads. Both have the same mean.
    ``spread`` is the standard deviation of the unequal budgets' logarithms.
    """
    pool, rows = Pool(TOKENS, LAYERS), []
    drawn = (spread * torch.randn(LAYERS, K, generator=torch.Generator().manual_seed(0))).exp()
    budgets = (drawn / drawn.mean() * BUDGET_UNIT).round().int()
    for size in [*CASES, *DRAFTS]:
        case = Case(pool, *size)
        row: Row = dict(zip("BLGk", size, strict=True), kernel=case.choice.of(size[0]))
        for name, case.budgets in (("even", ()), ("uneven", budgets.cuda().unbind())):
            row[name] = sparse_only(case, limit)
        rows.append(row)
    return dict(spread=spread, budgets=budgets.tolist(), cases=rows)


def family_pool(K: int, D: int) -> Pool:
    """Return caches with the same size in bytes for every shape, so that all shapes benefit equally
    from the L2 cache.
    """
    return Pool(TOKENS, LAYERS * 8 * 128 // (K * D), D, K=K)


def families(limit: float) -> Row:
    """Measure the attention shapes of common models with the CUDA kernel and the Triton kernels."""
    B, L = FAMILY_BATCH
    rows = []
    for K, G, D, model in FAMILIES:
        pool = family_pool(K, D)
        for k in FAMILY_BUDGETS:
            case = Case(pool, B, L, G, k)
            about = dict(model=model, K=K, G=G, D=D, k=k)
            row = about | dict(
                bytes=case.bytes(case.top_k),
                limit_us=case.bytes(case.top_k) / limit * 1e6,
            )
            for kernel in ("cuda", "triton"):
                case.choice = Choice(kernel)
                timed = sparse_only(case, limit, **about, kernel=kernel)
                row[kernel] = {name: timed[name] for name in ("us", "p10", "p90")}
            rows.append(row)
        del pool, case
    return dict(B=B, L=L, families=rows)


def tuned(limit: float) -> Row:
    """Measure the Triton kernels as shipped and as tuned, for the shapes that ``sparrow tune`` has
    tuned on this GPU.

    Raises SystemExit if no shape has been tuned.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for K, G, D, model in FAMILIES:
        choices = saved.read(device, K, G, D, torch.bfloat16, 16)
        if choices is None:
            continue
        pool = family_pool(K, D)
        for (B, L), k in itertools.product(TUNED_BATCHES, FAMILY_BUDGETS):
            case = Case(pool, B, L, G, k)
            case.choice = Choice("triton")
            shipped = tuning.choose(B * K, K, choices.target.head_bytes, device_limits(device))
            turns = [(case.time(shipped, "step"), case.time(None, "step")) for _ in range(TURNS)]
            row = dict(
                model=model,
                K=K,
                G=G,
                D=D,
                B=B,
                L=L,
                k=k,
                variant=str(choices.of(B)),
                limit_us=case.bytes(case.top_k) / limit * 1e6,
                shipped_us=[before["us"] for before, _ in turns],
                tuned_us=[after["us"] for _, after in turns],
            )
            rows.append(row)
            print(row, flush=True)
        del pool, case
    if not rows:
        raise SystemExit(
            "no shape has been tuned on this GPU; run sparrow tune --shape 8,4,128 first"
        )
    return dict(tuned=rows)


def sweep(limit: float) -> Row:
    """Measure the shipped configuration and the configurations in ``SWEPT``."""
    B, L = FAMILY_BATCH
    batches = [(B, L, K, G, D, FAMILY_BUDGETS) for K, G, D, _ in FAMILIES]
    rows = []
    for B, L, K, G, D, budgets in [*batches, *ALSO_SWEPT]:
        pool = family_pool(K, D)
        for k in budgets:
            case = Case(pool, B, L, G, k)
            case.choice = Choice("cuda")
            steps = [case.step(config, 0) for config in (None, *SWEPT[D, B * K])]
            configs = [step.config for step in steps]
            with ThreadPoolExecutor() as executor:
                list(executor.map(compile_for, steps))
            for config in configs:
                about = dict(B=B, L=L, K=K, G=G, D=D, k=k, config=asdict(config))
                row: Row = about | case.time(config, "step")
                row["of_limit"] = case.bytes(case.top_k) / limit * 1e6 / row["us"]
                rows.append(row)
                print(f"{K} {G} {D}, {k} pages: {row['of_limit']:.1%} {config}", flush=True)
        del pool, case
    return dict(sweep=rows)


def several_tokens(limit: float) -> Row:
    """Measure steps over several new tokens per sequence, with the CUDA kernel and with the Triton
    kernels. Compare them with one-token steps of the default kernel.
    """
    pool, rows = Pool(TOKENS // 2, LAYERS), []
    sizes = [(B, L, G, T) for B, L in WIDE_BATCHES for G in WIDE_GROUPS for T in WIDE_TOKENS]
    cases = [Case(pool, B, L, G, WIDE_BUDGET, T) for B, L, G, T in sizes]
    defaults = [case.choice.of(len(case.length)) for case in cases]
    compile_wide(cases)
    for size, case, default in zip(sizes, cases, defaults, strict=True):
        about = dict(zip("BLGT", size, strict=True), model=WIDE_GROUPS[size[2]])
        row: Row = about | dict(default=default, limit_us=case.bytes(case.top_k) / limit * 1e6)
        for kernel in ("cuda", "triton"):
            case.choice = Choice(kernel)
            times = sparse_only(case, limit, **about, kernel=kernel)
            row[kernel] = {name: times[name] for name in ("us", "p10", "p90")}
        if case.tokens == 1:
            one = row[default]["us"]
        for kernel in ("cuda", "triton"):
            row[kernel]["ratio"] = row[kernel]["us"] / one
            print(f"    {kernel}: {row[kernel]['ratio']:.3f}x the time for one token", flush=True)
        rows.append(row)
    return dict(k=WIDE_BUDGET, rows=rows)


def compile_wide(cases: Sequence[Case]) -> None:
    """Compile both implementations' kernels for these cases, in parallel threads."""
    steps: dict[str, list[Any]] = {}
    for kernel in ("cuda", "triton"):
        for case in cases:
            case.choice = Choice(kernel)
        steps[kernel] = [case.step(None, 0) for case in cases]
    with ThreadPoolExecutor() as executor:
        list(executor.map(compile_for, steps["cuda"]))
        # Triton compiles on the first launch. Triton's steps were planned last, so the plans in
        # memory belong to them, and they can be launched here.
        list(executor.map(lambda step: launches(step, "step")(), steps["triton"]))


def compile_for(step: cuda.Launches) -> None:
    """Compile a step's kernel in advance for all launches with the same macros."""
    compiled("decode.cu", tuple(step.defines.items()), "sm_90")


def bench(limit: float) -> Row:
    by_dtype = landmarks(limit)
    pool, rows = Pool(TOKENS, LAYERS), []
    for size in CASES:
        case = Case(pool, *size)
        everything = torch.full_like(case.top_k, ALL_PAGES)
        row = measured(
            case,
            limit,
            **dict(zip("BLGk", size, strict=True)),
            config=asdict(case.step(None, 0).config),
        )
        row["all_pages"] = row["dense"]
        tried = [case.time(c, "step", everything) for c in dense_configs()]
        row["dense"] = min([row["all_pages"], *tried], key=lambda t: t["us"])
        row["speedup"] = row["dense"]["us"] / row["step"]["us"]
        rows.append(row)
    dense_rows = []
    for B, L in DENSE:
        case = Case(pool, B, L, 2, 0)
        everything = torch.full_like(case.top_k, ALL_PAGES)
        row = dict(B=B, L=L, ours=case.time(None, "step", everything), flash=case.flash())
        row["limit_us"] = case.bytes(everything) / limit * 1e6
        dense_rows.append(row)
        print(row, flush=True)
    batches = ragged(pool, limit)
    del pool, case
    B, L, G, k = CASES[3]
    shapes = []
    for D, dtype, P in SHAPES:
        case = Case(Pool(TOKENS, LAYERS, D, dtype, P), B, L, G, k * 16 // P)
        shapes.append(measured(case, limit, D=D, dtype=str(dtype), P=P))
        del case
    return dict(cases=rows, dense=dense_rows, ragged=batches, shapes=shapes) | by_dtype


def attending(tokens: int, warps: int, stages: int, resident: int) -> LaunchConfig:
    registers = min(255, 65536 // (32 * warps * resident) // 8 * 8)
    return LaunchConfig(
        64, 2, 1, 4, tokens, stages, 256, warps, 2 * tokens, registers, 132 * resident
    )


def dense_configs() -> list[LaunchConfig]:
    """Return the candidate configurations for the fastest dense kernel."""
    tried = [
        attending(*tile) for tile in ((64, 4, 1, 4), (64, 4, 2, 3), (128, 4, 1, 3), (128, 4, 2, 1))
    ]
    return tried + [
        replace(c, extra_programs=n) for c, n in zip(tried[1:], (392, 392, 128), strict=True)
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--triton",
        action="store_true",
        help="use Triton's kernels even where the CUDA kernel is the default",
    )
    options.add_argument(
        "--landmarks",
        action="store_true",
        help="measure only draft steps, with each landmark dtype",
    )
    options.add_argument(
        "--caches",
        nargs="*",
        choices=CACHES,
        help="measure only the given formats of keys and values, or all formats if none is given",
    )
    options.add_argument(
        "--head-budgets",
        type=float,
        metavar="SPREAD",
        help="measure only budgets that differ between kv heads",
    )
    options.add_argument(
        "--families",
        action="store_true",
        help="measure only the attention shapes of common models, with both kernels",
    )
    options.add_argument(
        "--sweep",
        action="store_true",
        help="measure only these shapes, with several configurations of the CUDA kernel",
    )
    options.add_argument(
        "--tokens",
        action="store_true",
        help="measure only steps with several new tokens per sequence, with both kernels",
    )
    options.add_argument(
        "--tuned",
        action="store_true",
        help="compare only shipped with tuned configurations, for shapes that sparrow tune has "
        "tuned on this GPU",
    )
    options.add_argument("--out", type=Path, default=RESULTS, help="the folder to write to")
    args = options.parse_args()
    Case.triton = args.triton
    limit = read_limit()
    print(f"{machine()}, read limit {limit / 1e12:.2f} TB/s")
    if args.caches is not None:
        name, result = "fp8_cache", caches(limit, args.caches or list(CACHES))
    elif args.head_budgets is not None:
        name, result = "head_budgets", head_budgets(limit, args.head_budgets)
    elif args.families:
        name, result = "decode_families", families(limit)
    elif args.tokens:
        name, result = "wide", several_tokens(limit)
    elif args.sweep:
        name, result = "decode_sweep", sweep(limit)
    elif args.tuned:
        name, result = "tune", tuned(limit)
    elif args.landmarks:
        name, result = "landmarks", landmarks(limit)
    else:
        name, result = "kernels", bench(limit)
    save(args.out / f"{name}.json", dict(triton=triton.__version__, read_limit=limit) | result)


if __name__ == "__main__":
    main()
