"""The search behind ``sparrow tune``. It times variants of the shipped configuration on this GPU,
and keeps the fastest one that agrees with the reference.

Each step reads random blocks from one large pool, so hardly anything is in the L2 cache. Queries
and landmarks are integers, so scores are exact in any summation order, and the kernels select the
same pages as the reference.

Shapes: S steps, B sequences, H query heads, K kv heads, G = H / K, D head dim, P page size, M
one-page blocks in a block table row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from sparrow.attention import reference
from sparrow.attention.decode import (
    FP8,
    HEAD_DIMS,
    MAX_GROUP,
    MAX_PAGES,
    PAGE_SIZES,
    CacheScales,
    DecodeBatch,
    DecodeWorkspace,
    fp8_lacking,
)
from sparrow.attention.pages import PageLayout
from sparrow.attention.triton.launch import Launches, check
from sparrow.attention.triton.saved import Cell, Choices, Measurement, Target
from sparrow.attention.triton.tuning import LaunchConfig, choose
from sparrow.attention.triton.variants import ATTEND, FACTORS, RANK, Variant, fits
from sparrow.errors import ConfigError

POOL_BYTES = 2**31  # size of the keys and values, many times larger than any L2 cache
# The steps that are timed together read about this many bytes in total, unless that takes more than
# MOST_STEPS.
STEP_BYTES = 2**29
MOST_STEPS = 16
MARGIN = 0.01  # a variant must be faster by more than this fraction to replace another
REPEATS = 3  # how often the chosen and the shipped configuration are measured at the end
CHECKED_ROWS = 3
INT8_EXPONENT = 120  # a scale of 2^-7, so that codes span -1 to 1
FP8_SCALE = 0.25

Launch = Callable[[], None]
Timer = Callable[[Sequence[Launch]], float]
Times = Sequence[float]


class WrongResult(Exception):
    """Raised if a configuration's results are further from the reference than rounding explains."""


@dataclass(frozen=True)
class Grid:
    """The batches to time: every batch size with every page budget."""

    batches: tuple[int, ...]
    pages: tuple[int, ...]  # kept by score
    tokens: int  # sequence length


def check_target(target: Target, grid: Grid, device: torch.device) -> None:
    """Raise ConfigError if the Triton kernels don't support the shape on ``device``. Also raise
    ConfigError if the sequences are too long to rank, or so short that all pages would be kept.
    """
    for name, value, supported in (
        ("head dim", target.head_dim, HEAD_DIMS),
        ("group", target.group, range(1, MAX_GROUP + 1)),
        ("page size", target.page_size, PAGE_SIZES),
    ):
        if value not in supported:
            raise ConfigError(
                f"there are no Triton kernels for {name} {value}, expected one of {[*supported]}"
            )
    if lacking := fp8_lacking(device, target.dtype, "auto"):
        raise ConfigError(lacking)
    pages = grid.tokens // target.page_size
    layout = PageLayout(page_size=target.page_size)
    most = pages - layout.sink_pages - layout.recent_pages - 1
    if pages >= MAX_PAGES or max(grid.pages) > most:
        raise ConfigError(
            f"sequences of {grid.tokens} tokens have {pages} pages of {target.page_size} "
            f"tokens, but at most {MAX_PAGES - 1} pages are supported, and at most {most} of "
            f"these {pages} can be kept by score (got {max(grid.pages)}); change --tokens or "
            "--pages"
        )


def tune(
    target: Target,
    grid: Grid,
    device: torch.device,
    bytes_per_second: float,
    time: Timer,
    note: Callable[[str], None],
    pool_bytes: int = POOL_BYTES,
) -> Choices:
    """Choose a variant for each batch size in ``grid``.

    Args:
        target: the GPU and the attention shape.
        grid: the batches to time.
        device: the GPU.
        bytes_per_second: the GPU's read bandwidth.
        time: takes launches and returns the microseconds per launch.
        note: called with a line of text for each batch size, and for each variant that is skipped
            because its results are wrong.
        pool_bytes: size of the keys and values in memory.

    Raises ConfigError if the shape or the sequence length isn't supported, or if the shipped
    configuration doesn't run on this GPU or gives wrong results.
    """
    check_target(target, grid, device)
    pool = Pool(target, device, pool_bytes)
    cells = []
    for batch in grid.batches:
        bench = Bench(
            [Problem(pool, batch, pages, grid.tokens) for pages in grid.pages], time, note
        )
        variant = fastest(bench.times)
        shipped_us, tuned_us = measured_again(bench.times, variant)
        if any(tuned > shipped for tuned, shipped in zip(tuned_us, shipped_us, strict=True)):
            variant = Variant()
        if variant == Variant():
            tuned_us = shipped_us
        rows = zip(bench.problems, shipped_us, tuned_us, strict=True)
        measured = tuple(
            Measurement(problem.pages, shipped, tuned, problem.bytes / bytes_per_second * 1e6)
            for problem, shipped, tuned in rows
        )
        note(f"{batch} sequences: {variant}")
        cells.append(Cell(batch, variant, measured))
    return Choices(target, tuple(cells))


def fastest(times: Callable[[Variant], Times | None]) -> Variant:
    """Search for the fastest variant, one parameter at a time, starting from the shipped
    configuration.

    Variants are compared by mean time relative to the shipped configuration. A variant that's
    slower for any page budget is never chosen.

    Args:
        times: returns a variant's time for each page budget, or None if the variant is unusable.

    Raises ConfigError if the shipped configuration is unusable.
    """
    shipped = times(Variant())
    if shipped is None:
        raise ConfigError(
            "the shipped configuration of the Triton kernels does not run on this GPU, or gives "
            "wrong results; start vLLM without a schedule, and report this GPU"
        )
    best = Variant()
    best_ratio = 1.0
    for name, options in (
        ("attend", ATTEND),
        ("extra", FACTORS),
        ("rank", RANK),
        ("splits", FACTORS),
    ):
        start = best
        for option in options:
            changed: dict[str, Any] = {name: option}
            candidate = replace(start, **changed)
            taken = times(candidate)
            if taken is None:
                continue
            ratios = [new / old for new, old in zip(taken, shipped, strict=True)]
            ratio = statistics.mean(ratios)
            if max(ratios) <= 1 and ratio < (1 - MARGIN) * best_ratio:
                best = candidate
                best_ratio = ratio
    return best


def measured_again(
    times: Callable[[Variant], Times | None], variant: Variant
) -> tuple[list[float], list[float]]:
    """Measure the shipped configuration and ``variant`` alternately, and return both median
    times.
    """
    taken: dict[Variant, list[Times]] = {Variant(): [], variant: []}
    for _ in range(REPEATS):
        for each, rows in taken.items():
            row = times(each)
            assert row is not None  # already measured in the search
            rows.append(row)

    def medians(each: Variant) -> list[float]:
        return [statistics.median(column) for column in zip(*taken[each], strict=True)]

    return medians(Variant()), medians(variant)


class Pool:
    """Random keys, values and landmarks for one layer."""

    def __init__(self, target: Target, device: torch.device, nbytes: int) -> None:
        K = target.kv_heads
        D = target.head_dim
        P = target.page_size
        dtype = target.dtype
        self.target = target
        self.device = device
        self.layout = PageLayout(page_size=P)
        self.q_dtype = torch.bfloat16 if dtype in (FP8, torch.int8) else dtype
        self.blocks = max(64, nbytes // (2 * K * P * D * dtype.itemsize))
        shape = (self.blocks, K, P, 2 * D)
        self.scales: CacheScales | None = None
        if dtype == torch.int8:
            kv = torch.randint(-127, 128, shape, dtype=dtype, device=device)
            exponents = torch.full(
                (2, self.blocks, K, P), INT8_EXPONENT, dtype=torch.uint8, device=device
            )
            self.scales = CacheScales(*exponents)
        else:
            kv = torch.empty(shape, dtype=self.q_dtype, device=device).uniform_(-1, 1).to(dtype)
        if dtype == FP8:
            self.scales = CacheScales(*torch.full((2, K), FP8_SCALE, device=device))
        self.keys, self.values = kv.split(D, dim=-1)
        marks = torch.randint(-127, 128, (self.blocks, 1, K, D), device=device, dtype=torch.int8)
        self.landmarks = marks.to(self.q_dtype)


class Problem:
    """Decode steps for one batch, with ``pages`` pages kept by score. Each step reads different
    random blocks.
    """

    def __init__(self, pool: Pool, batch: int, pages: int, tokens: int) -> None:
        target = pool.target
        K = target.kv_heads
        G = target.group
        D = target.head_dim
        P = target.page_size
        device = pool.device
        self.pool = pool
        self.pages = pages
        # No row ends with a full page, so steps never write landmarks.
        table_width = tokens // P
        self.length = (tokens // P - 1) * P + 1 + torch.arange(batch) % (P - 1)
        self.steps = int(max(1, min(MOST_STEPS, STEP_BYTES // self.bytes)))
        self.tables_SBM = torch.randint(
            pool.blocks, (self.steps, batch, table_width), dtype=torch.int32, device=device
        )
        q_BKGD = torch.randint(-8, 9, (batch, K, G, D), device=device)
        q_BKGD[:, :, 0] -= q_BKGD.sum(2) % G  # make the group mean an integer
        self.q = q_BKGD.flatten(1, 2).to(pool.q_dtype)
        self.out = torch.empty_like(self.q)
        self.length_B = self.length.int().to(device)
        self.top_k_B = torch.full((batch,), pages, dtype=torch.int32, device=device)
        self.workspace = DecodeWorkspace(batch, K, G, D, table_width, device)

    @property
    def bytes(self) -> int:
        """Bytes read per step: the landmarks, plus the keys and values of the kept pages."""
        target = self.pool.target
        layout = self.pool.layout
        scale_bytes = int(target.dtype == torch.int8)
        key_bytes = target.head_dim * target.dtype.itemsize + scale_bytes
        landmark_bytes = target.head_dim * self.pool.q_dtype.itemsize
        always = layout.sink_pages + layout.recent_pages
        ranked_B = (self.length + target.page_size - 1) // target.page_size - always
        tokens_B = self.length - (ranked_B - self.pages) * target.page_size
        per_head = int(ranked_B.sum()) * landmark_bytes + int(tokens_B.sum()) * 2 * key_bytes
        return target.kv_heads * per_head

    @property
    def shipped(self) -> LaunchConfig:
        target = self.pool.target
        items = len(self.q) * target.kv_heads
        return choose(items, target.kv_heads, target.head_bytes, target.limits)

    def batch(self, step: int) -> DecodeBatch:
        pool = self.pool
        return DecodeBatch(
            self.q,
            pool.keys,
            pool.values,
            pool.landmarks,
            self.tables_SBM[step],
            self.length_B,
            self.top_k_B,
            self.out,
            pool.layout,
            pool.target.head_dim**-0.5,
            pool.scales,
        )

    def launches(self, config: LaunchConfig) -> list[Launch]:
        """Plan the steps, and return a list of functions that each launch one step."""
        check(self.batch(0), self.workspace)
        steps = [Launches(self.batch(step), self.workspace, config) for step in range(self.steps)]
        steps[0].plan()
        return [partial(_rank_and_attend, step) for step in steps]

    @cached_property
    def checked_rows(self) -> Tensor:
        last = len(self.q) - 1
        return torch.linspace(0, last, min(CHECKED_ROWS, len(self.q))).long()

    @cached_property
    def expected(self) -> tuple[Tensor, float]:
        """Values for checking the first step: the exact result for ``checked_rows``, computed in
        float64, and the reference's largest error at the kernels' precision.
        """
        exact = self._reference(torch.float64)
        low = self._reference(self.pool.q_dtype)
        return exact, float((low - exact).norm(dim=-1).amax())

    def check_result(self) -> None:
        """Check the first step's result in ``out``.

        Raises WrongResult if the error is more than twice the reference's error at the same
        precision, plus half an ulp.
        """
        exact, reference_error = self.expected
        result = self.out[self.checked_rows.to(self.out.device)].cpu().double()
        error = (result - exact).norm(dim=-1)
        rounding = torch.finfo(self.out.dtype).eps / 2 * exact.norm(dim=-1)
        over = error - (2 * reference_error + rounding)
        if not bool((over <= 0).all()):  # written this way to catch NaN as well
            raise WrongResult(
                f"the error is up to {float(error.max()):.2g}, but the reference's own error is "
                f"{reference_error:.2g}"
            )

    def _reference(self, dtype: torch.dtype) -> Tensor:
        """Run the reference on the CPU, with a copy of the blocks used by ``checked_rows``."""
        pool = self.pool
        rows = self.checked_rows.to(pool.device)
        blocks = self.tables_SBM[0, rows].flatten().long()
        table = torch.arange(len(blocks), dtype=torch.int32).view(len(rows), -1)
        scales = pool.scales
        if scales is not None and pool.target.dtype == torch.int8:
            scales = CacheScales(scales.k[blocks].cpu(), scales.v[blocks].cpu())
        elif scales is not None:
            scales = CacheScales(scales.k.cpu(), scales.v.cpu())
        q = self.q[rows].cpu().to(dtype)
        batch = DecodeBatch(
            q,
            _rows(pool.keys, blocks),
            _rows(pool.values, blocks),
            pool.landmarks[blocks].cpu(),
            table,
            self.length_B[rows].cpu(),
            self.top_k_B[rows].cpu(),
            torch.empty_like(q),
            pool.layout,
            pool.target.head_dim**-0.5,
            scales,
        )
        return reference.run(batch).double()


class Bench:
    """Times variants on all problems with the same batch size, and checks their results.

    Skips variants that don't run on this GPU. Reports and skips those that give wrong results.
    """

    def __init__(
        self, problems: Sequence[Problem], time: Timer, note: Callable[[str], None]
    ) -> None:
        self.problems = problems
        self._time = time
        self._note = note
        self._refused: set[LaunchConfig] = set()

    def times(self, variant: Variant) -> list[float] | None:
        """Return the variant's time for each problem, or None if the variant is unusable."""
        problem = self.problems[0]
        target = problem.pool.target
        config = variant.of(problem.shipped, target.kv_heads, target.head_bytes, target.limits)
        if config in self._refused or not fits(config, target.head_bytes, target.limits):
            return None
        try:
            return [self._checked_time(problem, config) for problem in self.problems]
        except (OutOfResources, PTXASError):  # not enough shared memory or registers
            pass
        except WrongResult as error:
            self._note(f"{len(problem.q)} sequences: left out {variant}, because {error}")
        self._refused.add(config)
        return None

    def _checked_time(self, problem: Problem, config: LaunchConfig) -> float:
        launches = problem.launches(config)
        problem.out.fill_(float("nan"))
        launches[0]()
        problem.check_result()
        return self._time(launches)


def _rank_and_attend(step: Launches) -> None:
    step.rank()
    step.attend()


def _rows(cache: Tensor, blocks: Tensor) -> Tensor:
    """Copy ``cache[blocks]`` to the CPU. Torch can't index float8, so it's indexed as uint8."""
    if cache.dtype == FP8:
        return cache.view(torch.uint8)[blocks].cpu().view(FP8)
    return cache[blocks].cpu()
