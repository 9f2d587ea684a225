"""State shared by a vLLM worker's sparse layers: the schedule on the device, the current step's
page counts, counters, and details of the model, the KV cache and drafting.

Shapes: B decode batch size, including CUDA graph padding rows, which have length 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from sparrow.attention import Choice, DecodeWorkspace, PageLayout
from sparrow.decoding import Decoding
from sparrow.errors import ConfigError
from sparrow.schedule import PAGE_LAYOUT, SparsitySchedule
from sparrow.vllm import kv_cache
from sparrow.vllm.counters import DecodedRows, DensePasses
from sparrow.vllm.fp8 import Fp8Cache
from sparrow.vllm.page_tables import PageTables

LAYOUT = (*PAGE_LAYOUT, "dense_layers", "head_budgets")
"""Schedule fields that can't change while the engine runs, because CUDA graphs and landmarks depend
on them.
"""


@dataclass
class Model:
    """A worker's model: its layers and their decode kernels. ``backend.attach`` fills this in."""

    backend: str = ""
    quantization: str | None = None  # how vLLM quantises the weights
    # which ``sparrow.attention`` implementation to decode with
    kernels: Choice = field(default_factory=lambda: Choice("reference"))
    # the implementation for passes over several tokens per sequence, if the engine uses guesses
    pass_kernels: Choice = field(default_factory=lambda: Choice("reference"))
    workspace: DecodeWorkspace | None = None
    sparse_layers: list[int] = field(default_factory=list)
    dense_layers: list[int] = field(default_factory=list)
    # whether the most recently attached layer is sparse; None before the first layer
    last_decoded: bool | None = None

    @property
    def layers(self) -> int:
        return len(self.sparse_layers) + len(self.dense_layers)


@dataclass
class CacheLayout:
    """KV cache layout. ``backend.attach`` fills this in."""

    # float8_e4m3fn or int8 for an 8-bit cache, otherwise None
    in_8_bits: torch.dtype | None = None
    fp8: Fp8Cache | None = None  # scales of an fp8 KV cache, otherwise None
    landmark_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    landmark_share: float = 0.0  # share of the KV cache taken up by landmarks


@dataclass
class DraftState:
    """Drafting state in lossless mode. The speculator fills this in."""

    is_running: bool = False  # whether a draft step is running or being captured in a graph
    logits_bytes: int = 0  # size of the draft logits
    weights: Any = None  # fp8 copy of the weights for drafting, if any
    meter: Any = None  # see ``sparrow.vllm.lossless.meter``
    # whether the latest drafts used guesses; None if that isn't chosen per cycle
    has_guesses: bool | None = None


class Runtime:
    """One worker's state, which lives as long as its model. The tensors are updated in place,
    because CUDA graphs refer to them by address.

    Args:
        decoding: the engine's initial settings; page counts can change later.
        max_rows: maximum decode batch size, including graph padding.
        max_length: maximum sequence length, in tokens.
        device: the model's device.
    """

    def __init__(
        self, decoding: Decoding, max_rows: int, max_length: int, device: torch.device
    ) -> None:
        self.decoding = decoding
        self.is_lossless = decoding.is_lossless
        self.layout = PageLayout(**decoding.schedule.page_layout)
        self.model = Model()
        self.cache = CacheLayout()
        self.drafting = DraftState()
        # The draft budgets, as multiples of the schedule; in lossy mode, just 1.
        budgets = decoding.draft_budgets
        self.pages = PageTables(decoding.schedule, budgets, max_rows, max_length, device)
        self.rows = DecodedRows(len(budgets), max_rows, max_length, device)
        self.passes = DensePasses(device)
        # which rows of the next step are in prefill, where vLLM's metadata doesn't say so
        # (``patches.HYBRID``); bool on the host
        self.is_prefilling: Tensor | None = None
        self._counts: Counter[str] = Counter()  # counts so far under earlier schedules

    @property
    def schedule(self) -> SparsitySchedule:
        """The current schedule."""
        return self.pages.schedule

    @property
    def budgets(self) -> tuple[float, ...]:
        """The draft budgets, as multiples of the schedule."""
        return self.pages.budgets

    def begin_step(self, rows: int, is_prefilling: Tensor | None) -> Tensor:
        """Prepare a step. Return the int32 tensor ``top_k_B``, where ``look_up`` will write the
        page counts of the decode rows.

        Call this on the host before the model runs or its graph is replayed. It costs nothing for
        plain decode steps.

        Args:
            rows: B, the number of rows with one query token, including padding rows.
            is_prefilling: whether each row is a one-token prompt chunk, bool on the host. Padding
                rows may be left out. Prompt chunks go through decode step graphs, but must read all
                pages to get the same keys and values as in a dense prefill.
        """
        if self.is_prefilling is not None:
            is_prefilling = self.is_prefilling
        self.rows.in_prefill += self.pages.mark_prefill(rows, is_prefilling)
        return self.pages.top_k[:rows]

    def reads_everything(self, length_B: Tensor | None) -> bool:
        """Return whether decode rows of these lengths read all their tokens. Return False if the
        lengths are unknown. ``length_B`` is on the host.
        """
        if length_B is None:
            return False
        return int(length_B.numpy().max(initial=0)) <= self.pages.whole_up_to

    def begin_dense_step(self, length_B: Tensor) -> None:
        """Count a step whose decode rows run vLLM's own attention because they read all their
        tokens. ``length_B`` holds their lengths, int32.
        """
        if len(length_B):
            self._counts["dense_steps"] += 1
            self.look_up(length_B)

    def look_up(self, length_B: Tensor) -> None:
        """Write a step's page counts, and count its rows. This runs in the model's graph, before
        the first attention layer.

        Args:
            length_B: int32, cached tokens per row, including the newest.
        """
        self.rows.add(self.pages.look_up(length_B))

    @contextmanager
    def uncounted(self, top_k_at_length: Tensor) -> Iterator[None]:
        """Inside the context, use different page counts (see ``PageTables.of``) and don't count
        steps.
        """
        changed = (self.pages.at_length, self.pages.top_k, self.rows.at_length)
        before = [each.clone() for each in changed]
        whole_up_to = self.pages.whole_up_to
        self.pages.at_length.copy_(top_k_at_length)
        self.pages.whole_up_to = -1  # Sparrow's kernels decode every row
        try:
            yield
        finally:
            self.pages.whole_up_to = whole_up_to
            for each, values in zip(changed, before, strict=True):
                each.copy_(values)

    def head_budgets(self, layer: int, kv_heads: int, rank: int, ranks: int) -> Tensor | None:
        """Return one factor for each of this worker's heads in a layer, int32 ``[kv_heads]``, in
        units of 1 / 256. The factor scales the head's page counts. Return None if the schedule has
        no head budgets.

        With tensor parallelism, each rank has an equal, contiguous share of a layer's heads. If
        there are fewer heads than ranks, each head is replicated on the same number of ranks.
        """
        if not self.decoding.schedule.head_budgets:
            return None
        row_K = torch.from_numpy(self.decoding.schedule.budget_units[layer])
        first = rank * len(row_K) // ranks
        return row_K[first : first + kv_heads].to(self.pages.top_k.device, copy=True)

    def use_budget(self, budget: int) -> None:
        """Switch to another draft budget, given as an index into ``budgets``.

        Call this on the host between cycles. It doesn't synchronise with the device.
        """
        if budget == self.pages.budget:
            return
        self.rows.end_budget(self.pages.budget)
        self.pages.use_budget(budget)
        self.drafting.meter.use(budget)

    def begin_serving(self) -> None:
        """Reset the counters, and let prompts set fp8 scales. Call this once vLLM has warmed up."""
        self.counters()
        self.acceptance()
        if self.cache.fp8 is not None:
            self.cache.fp8.is_serving = True

    def renew_draft_weights(self) -> None:
        """Mark the draft weights, if any, as stale, so that they are copied again before the next
        drafts.
        """
        if self.drafting.weights is not None:
            self.drafting.weights.is_stale = True

    def count_preempted(self, sequences: int) -> None:
        """Count preempted sequences, whose cache vLLM has dropped and will prefill again."""
        self._counts["preemptions"] += sequences

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Switch to another schedule's page counts from the next step on.

        Raises ConfigError if the schedule's page layout, dense layers or head_budgets differ from
        those that the engine started with. A dense schedule is always accepted.
        """
        started_with = self.decoding.schedule
        changed = [
            name for name in LAYOUT if getattr(schedule, name) != getattr(started_with, name)
        ]
        if changed and not schedule.is_dense:
            ours, theirs = (
                {name: getattr(s, name) for name in changed} for s in (started_with, schedule)
            )
            raise ConfigError(
                "a running vLLM engine can change how many pages are kept, but not the page "
                f"layout or head_budgets; it was started with {ours}, but this schedule has "
                f"{theirs}, so start a new engine for it"
            )
        self._count_steps()
        self.pages.fill(schedule)

    def check_metered(self, schedule: SparsitySchedule) -> None:
        """Check that a schedule can be measured alongside the drafts.

        Raises ConfigError if the two schedules differ in pages, landmarks or head_budgets, or if a
        layer is sparse in this schedule but dense in the draft schedule.
        """
        ours = self.decoding.schedule
        for name in PAGE_LAYOUT:
            if getattr(schedule, name) != getattr(ours, name):
                raise ConfigError(
                    f"meter_schedule has {name} {getattr(schedule, name)!r}, but "
                    f"draft_schedule has {getattr(ours, name)!r}; both read the same cache, "
                    "so these values must be equal"
                )
        if schedule.head_budgets != ours.head_budgets:
            raise ConfigError(
                f"meter_schedule has {'different' if schedule.head_budgets else 'no'} "
                "head_budgets, but every step of a layer uses the head_budgets of "
                "draft_schedule; make them equal"
            )
        if lacking := sorted(set(ours.dense_layers) - set(schedule.dense_layers)):
            raise ConfigError(
                f"layers {lacking} are sparse in meter_schedule but dense in draft_schedule; "
                "remove them from draft_schedule's dense_layers, or make them dense in "
                f"meter_schedule too, where dense_layers is {list(schedule.dense_layers)}"
            )

    def counters(self) -> dict[str, int]:
        """Return the counts since the last call, and reset them; see
        ``control.sparrow_counters``.
        """
        self._count_steps()
        counts = {"preemptions": 0, "dense_steps": 0, **self._counts}
        self._counts = Counter()
        if self.cache.fp8 is not None and self.cache.fp8.sets_scales:
            counts["kv_clipped"] = int(self.cache.fp8.clipped)
            self.cache.fp8.clipped.zero_()
        return counts

    def acceptance(self) -> dict[str, Any]:
        """Report draft acceptance since the last call; see ``control.sparrow_acceptance``."""
        cycles = {"cycles": self.passes.take_cycles()}
        if self.decoding.guess_tokens:
            cycles["cycles_with_guesses"] = self.passes.take_guessed_cycles()
            cycles["cycles_with_guesses_alone"] = self.passes.take_alone_cycles()
        meter = self.drafting.meter
        if meter is None:
            return dict(cycles)
        drafts = meter.take()
        report: dict[str, Any] = {**cycles, **_acceptance_report(reduce(add, drafts))}
        if len(drafts) > 1:
            report["budgets"] = [
                {"multiple": multiple, **_acceptance_report(acceptance)}
                for multiple, acceptance in zip(self.budgets, drafts, strict=True)
                if acceptance.drafts
            ]
        if (metered := meter.metered) is not None:
            report["metered"] = {
                "schedule": metered.schedule.to_dict(),
                **_acceptance_report(metered.tally.take()),
            }
        return report

    def describe(self) -> dict[str, Any]:
        """Describe the mode, kernels, schedule and layers as a JSON-compatible dict."""
        stored = self.cache.in_8_bits
        quantization = self.model.quantization
        copies = self.drafting.weights
        guesses = self.decoding.guess_tokens
        has_guesses = self.drafting.has_guesses
        settings = self.decoding.to_dict() if self.is_lossless else {}
        # The schedule may have changed since the engine started, so the current one is added below.
        settings.pop("draft_schedule", None)
        if self.is_lossless:
            settings["adapt_draft_budget"] = len(self.budgets) > 1
            if self.decoding.guess_head is not None:
                settings["guess_lookup_min"] = self.decoding.lookup_min
            if self.decoding.meter_schedule is not None:
                settings["meter_every"] = self.decoding.meter_cycles
        return {
            "mode": self.decoding.mode,
            **settings,
            "backend": self.model.backend,
            "kernels": str(self.model.kernels),
            **({"pass_kernels": str(self.model.pass_kernels)} if guesses else {}),
            "schedule": self.schedule.to_dict(),
            **({"draft_budget": self.budgets[self.pages.budget]} if len(self.budgets) > 1 else {}),
            **({} if has_guesses is None else {"drafts_have_guesses": has_guesses}),
            "sparse_layers": self.model.sparse_layers,
            "dense_layers": self.model.dense_layers,
            **({} if stored is None else {"kv_cache": kv_cache.NAMES[stored]}),
            **({} if self.cache.fp8 is None else self.cache.fp8.describe()),
            **({} if quantization is None else {"weights": quantization}),
            **({} if copies is None else copies.describe()),
        }

    def _count_steps(self) -> None:
        """Count the steps decoded since the last call under the current schedule."""
        counts = self.rows.take(
            [self.schedule.times(multiple) for multiple in self.budgets],
            self.pages.budget,
            len(self.model.sparse_layers),
            len(self.model.dense_layers),
        )
        if self.is_lossless:
            self.passes.add_to(counts, self.model.layers, self.decoding.guess_tokens > 0)
        self._counts.update(counts)


def _acceptance_report(acceptance: Any) -> dict[str, Any]:
    return {
        "bins": [asdict(each) for each in acceptance.bins()],
        "acceptance": acceptance.to_dict(),
    }


def attached(vllm_config: Any) -> dict[str, Any]:
    """Return this worker's layers that decode with Sparrow, by name. They all have full attention.
    In a hybrid model, the others are vLLM's own.
    """
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    return {
        name: layer
        for name, layer in layers.items()
        if getattr(getattr(layer, "impl", None), "runtime", None) is not None
    }


def find(vllm_config: Any) -> Runtime | None:
    """Return the runtime shared by this worker's attention layers, or None if no layer decodes with
    Sparrow.
    """
    layers = attached(vllm_config).values()
    return next((layer.impl.runtime for layer in layers), None)


def layers_of(vllm_config: Any) -> list[Any]:
    """List the model's layers that run Sparrow's attention, in order. Leave out the layers of a
    head that guesses.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    ours = [layer for layer in attached(vllm_config).values() if not layer.impl.is_of_head]
    return sorted(ours, key=lambda layer: extract_layer_index(layer.layer_name))
