"""The processes in a run. They share the sampling and the forward and backward passes, and every
process gets all results.

Every process gathers the rollouts, rewards and log-probs of the whole step, in the same order.
Statistics, corrections and decisions are therefore computed from the same numbers as in a
single-process run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, is_initialized
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from sparrow.errors import ConfigError, ProcessLost, SparrowError
from sparrow.model.scoring import micro_batches

T = TypeVar("T")

PATIENCE_S = 1800  # how long to wait for the slowest process in a phase


class Ranks:
    """The rank of this process among those started by ``accelerate launch``. In a single-process
    run, the rank is 0.

    Raises ConfigError if FSDP was requested but this run can't use it.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank = accelerator.process_index
        self.count = accelerator.num_processes
        self.is_main = accelerator.is_main_process
        self.is_sharded = accelerator.is_fsdp2
        if asked_to_shard() and not self.is_sharded:
            raise ConfigError(
                "FSDP shards over several GPUs, which this run does not have; "
                "launch it without --use_fsdp"
            )
        self.seconds: dict[str, list[float]] = {}
        """Seconds spent in each phase, with one entry per process. The wait for other processes at
        the end of a phase is not counted.
        """
        # Objects always go through host memory, whatever backend tensors use.
        self._group = None
        if self.count > 1:
            patience = timedelta(seconds=PATIENCE_S)
            self._group = dist.new_group(backend="gloo", timeout=patience)

    def check_equal(self, model: nn.Module) -> None:
        """Check that all processes start from the same weights. Call this before sharding, while
        each process still has all of them.

        Raises ConfigError if the weights differ.
        """
        sums = [p.detach().double().sum().item() for p in model.parameters()]
        if any(other != sums for other in self.gather("start", lambda: sums)):
            raise ConfigError(
                "the processes of this run start from different weights; load the same checkpoint "
                "in each, with FSDP_CPU_RAM_EFFICIENT_LOADING=false in the environment"
            )

    def gather(self, phase: str, work: Callable[[], T]) -> list[T]:
        """Call ``work()`` in every process, and return everyone's results in rank order.

        An error in one process is raised in all of them.

        Args:
            phase: name of the work in error messages and in ``seconds``.

        Raises SparrowError or OSError if ``work`` raised one in any process. If several processes
        failed, the lowest rank's error is raised. Raises ProcessLost if a process died or is still
        working ``PATIENCE_S`` seconds after this one finished.
        """
        began = time.perf_counter()
        if self._group is None:
            result = work()
            self._count(phase, [time.perf_counter() - began])
            return [result]

        outcome: tuple[T | None, Exception | None]
        try:
            with self.connected(phase):
                outcome = work(), None
        except ProcessLost:
            raise
        except (SparrowError, OSError) as error:
            outcome = None, error

        outcomes: list[Any] = [None] * self.count
        seconds = time.perf_counter() - began
        with self.connected(phase):
            dist.monitored_barrier(self._group, timedelta(seconds=PATIENCE_S), wait_all_ranks=True)
            dist.all_gather_object(outcomes, (*outcome, seconds), group=self._group)

        for rank, (_, failed, _) in enumerate(outcomes):
            if failed is not None:
                raise outcome[1] if rank == self.rank and outcome[1] else failed
        self._count(phase, [seconds for _, _, seconds in outcomes])
        return [result for result, _, _ in outcomes]

    @contextlib.contextmanager
    def connected(self, phase: str) -> Iterator[None]:
        """Context for work that needs all processes at once.

        Raises ProcessLost if another process can no longer be reached, or is more than
        ``PATIENCE_S`` seconds behind.
        """
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if (
                not isinstance(error, dist.DistError)
                and "gloo" not in text
                and "monitoredBarrier" not in text
            ):
                raise
            raise ProcessLost(
                f"a process of this run died, or fell {PATIENCE_S} s behind, in phase {phase!r} "
                f"({text.splitlines()[0][:200]}); resume from the last checkpoint with --resume"
            ) from error

    def on_main(self, phase: str, work: Callable[[], T]) -> T:
        """Call ``work()`` in the main process only, and return its result in every process. Raises
        the same errors as ``gather``.
        """
        results = self.gather(phase, lambda: work() if self.is_main else None)
        return results[0]  # type: ignore[return-value]

    def spread(self, phase: str, count: int, work: Callable[[range], list[T]]) -> list[T]:
        """Split ``range(count)`` across processes, call ``work(indices)`` in each, and return the
        results in order. Neighbouring indices go to different processes. Raises the same errors as
        ``gather``.
        """
        parts = self.gather(phase, lambda: work(range(self.rank, count, self.count)))
        return [parts[i % self.count][i // self.count] for i in range(count)]

    def batched(
        self,
        phase: str,
        lengths: Sequence[int],
        budget: int,
        work: Callable[[list[int]], Sequence[T]],
    ) -> list[T]:
        """Split the rows of ``lengths`` into micro-batches (see ``micro_batches``), call
        ``work(rows)`` for each, and return one result per row, in order. Raises the same errors as
        ``gather``.
        """

        def own_results() -> dict[int, T]:
            by_row: dict[int, T] = {}
            for rows, counts in self.micro_batches(range(len(lengths)), lengths, budget):
                results = work(rows)
                if counts:
                    by_row.update(zip(rows, results, strict=True))
            return by_row

        by_row: dict[int, T] = {}
        for part in self.gather(phase, own_results):
            by_row |= part
        return [by_row[i] for i in range(len(lengths))]

    def imbalance(self, phase: str) -> float:
        """Return the slowest process's time in a phase since the last call, divided by the mean
        over all processes.
        """
        seconds = self.seconds.pop(phase)
        return max(seconds) * len(seconds) / sum(seconds)

    def _count(self, phase: str, seconds: list[float]) -> None:
        before = self.seconds.get(phase, [0.0] * self.count)
        self.seconds[phase] = [a + b for a, b in zip(before, seconds, strict=True)]

    def micro_batches(
        self, rows: Sequence[int], lengths: Sequence[int], budget: int
    ) -> list[tuple[list[int], bool]]:
        """Split this process's share of ``rows`` into groups of at most ``budget`` padded tokens.
        Each group comes with a flag that says whether its results count.

        All processes return the same number of groups, since a forward or backward pass may need
        every process. A process with fewer groups than the others adds dummy groups, whose results
        don't count. A dummy group contains only the shortest of ``rows``.

        Args:
            rows: indices into ``lengths``, the same in all processes.
            lengths: number of tokens in each row.
        """

        def grouped(part: list[int]) -> list[list[int]]:
            """Split one process's rows into groups that fit the budget."""
            of_part = [rows[i] for i in part]
            groups = micro_batches([lengths[row] for row in of_part], budget)
            return [[of_part[i] for i in group] for group in groups]

        groups = [grouped(part) for part in divide([lengths[row] for row in rows], self.count)]
        own_groups = [(group, True) for group in groups[self.rank]]
        shortest = min(rows, key=lambda row: lengths[row])
        missing = max(map(len, groups)) - len(own_groups)
        return own_groups + [([shortest], False)] * missing


def divide(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Split indices into ``count`` parts with about the same number of tokens. Indices are assigned
    from longest to shortest, each to the part with the fewest tokens so far.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        smallest = tokens.index(min(tokens))
        parts[smallest].append(i)
        tokens[smallest] += lengths[i]
    return [sorted(part) for part in parts]


def mixed_precision(precision: str) -> str:
    """Convert ``optimizer.precision`` to accelerate's name for it.

    Raises ConfigError if this process has already trained in another precision, since accelerate
    would keep using that one.
    """
    wanted = "bf16" if precision == "bf16" else "no"
    kept = AcceleratorState().mixed_precision if is_initialized() else wanted
    if kept != wanted:
        before = "fp32" if kept == "no" else kept
        raise ConfigError(
            f"optimizer.precision is {precision!r}, but this process has already trained in "
            f"{before!r}, and accelerate uses one precision for all runs in a process; start "
            "this run in a new process"
        )
    return wanted


def sharding(model: nn.Module, bf16: bool) -> FullyShardedDataParallelPlugin | None:
    """Build FSDP2 settings that shard ``model`` layer by layer. Return None unless the run was
    started with ``accelerate launch --use_fsdp``.

    Weights and optimiser state stay float32, and gradients are reduced in float32. If the run
    computes in bf16, layers are gathered in bf16.
    """
    if not asked_to_shard():
        return None
    precision = MixedPrecisionPolicy()
    if bf16:
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted(getattr(model, "_no_split_modules", None) or ()),
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
        mixed_precision_policy=precision,
    )


def asked_to_shard() -> bool:
    """Return whether ``accelerate launch`` was called with FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def reshard(model: nn.Module) -> None:
    """Free the full parameters gathered by ``model``'s last forward pass, and keep the trained
    shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield unsharded weights, gathered one at a time. Every process must consume all of them."""
    for name, weight in weights:
        yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight
