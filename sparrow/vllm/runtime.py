"""What the sparse layers of one vLLM worker share: the schedule on the device, this step's page
counts, counters.

Shapes: B rows of a decode batch, padding rows of a CUDA graph (length 0) included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow.attention import Choice, DecodeWorkspace, PageLayout
from sparrow.decoding import Decoding
from sparrow.errors import ConfigError
from sparrow.schedule import ALL_PAGES, PAGE_LAYOUT, SparsitySchedule
from sparrow.vllm import kv_cache
from sparrow.vllm.fp8 import Fp8Cache

LAYOUT = (*PAGE_LAYOUT, "dense_layers", "head_budgets")
"""What CUDA graphs and landmarks are made for: a running engine cannot change it."""
PLAIN_PASSES = 256
"""Passes without drafts whose tokens are summed at a time: a short step waits for the host, and a
sum costs it time.
"""


class Runtime:
    """Lives as long as the worker's model. Its tensors stay where they are: CUDA graphs hold their
    addresses.

    Args:
        decoding: what the engine was started with; its page counts can change afterwards.
        max_rows: most sequences decoded together, graph padding included.
        max_length: tokens of the longest sequence.
        device: where the model runs.
    """

    def __init__(
        self, decoding: Decoding, max_rows: int, max_length: int, device: torch.device
    ) -> None:
        self.decoding = decoding
        self.is_lossless = decoding.is_lossless
        schedule = self._started_with = decoding.schedule
        self.layout = PageLayout(**schedule.page_layout)
        self.sparse_layers: list[int] = []
        self.dense_layers: list[int] = []
        self.backend = ""
        self.kernels = Choice(
            "reference"
        )  # the implementation of ``sparrow.attention`` that decodes
        self.workspace: DecodeWorkspace | None = None
        self.last_decoded: bool | None = (
            None  # whether the layer attached last is sparse; None before the first
        )
        self.is_drafting = (
            False  # in lossless mode: whether a draft step runs, or is captured in a graph
        )
        self.draft_bytes = 0  # memory of the logits that drafts are drawn from
        self.draft_weights: Any = None  # the fp8 copy of the weights, if drafts have one
        self.landmark_share = 0.0  # the landmarks' share of the KV cache
        self.landmark_dtype = torch.get_default_dtype()
        self.cache_in_8_bits: torch.dtype | None = (
            None  # float8_e4m3fn, int8, or None: the model's dtype
        )
        self.fp8_cache: Fp8Cache | None = None  # scales of an engine with an fp8 KV cache
        self.quantization: str | None = None  # how vLLM quantises the weights
        self.meter: Any = None  # set in lossless mode; see ``sparrow.vllm.lossless.meter``
        # What drafts may read, in multiples of the schedule; a lossy actor reads just that.
        self.budgets = decoding.draft_budgets
        self._budget = self.base_budget = self.budgets.index(1.0)
        self._cycles: Counter[int] = (
            Counter()
        )  # dense passes, by how many tokens were drafted afterwards
        self._verified = torch.zeros(
            4, dtype=torch.int64, device=device
        )  # tokens read, held, emitted; rows
        # The same of passes without drafts: sequences, and tokens read.
        self._plain_rows = self._plain_tokens = 0
        self._plain_passes: list[np.ndarray] = []  # those that are not in these sums yet
        self._everything_B = torch.full((max_rows,), ALL_PAGES, dtype=torch.int32, device=device)
        # The schedule at every length, so that any bins fit. Rows in prefill look at place 0, where
        # everything is read.
        self.top_k_at_length = torch.empty(max_length + 1, dtype=torch.int32, device=device)
        self._tables = self.top_k_at_length.repeat(
            len(self.budgets), 1
        )  # such a table for each budget
        self.top_k = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # How often a row was decoded at each length. Everything that is counted follows from it and
        # the schedule, and a step pays for one addition on the device and no synchronisation.
        self.decoded = torch.zeros(max_length + 1, dtype=torch.int64, device=device)
        self._decoded_before = self.decoded.repeat(
            len(self.budgets), 1
        )  # by budget, without the latest steps
        self._one_B = torch.ones(max_rows, dtype=torch.int64, device=device)
        self._decodes_B = torch.ones(
            max_rows, dtype=torch.int32, device=device
        )  # 0 for rows in prefill
        self._all_decode = True
        self._prefill_rows = 0
        self._counts: Counter[str] = Counter()
        self._fill(schedule)

    def begin_step(self, rows: int, is_prefilling: Tensor | None) -> Tensor:
        """Prepare a step; returns ``top_k_B``, int32, where ``look_up`` will write the page counts
        of its decode rows.

        Called on the host before the model runs or its graph is replayed; costs nothing for a plain
        decode step.

        Args: rows: B, the rows with one query token, padding rows included. is_prefilling: bool, on
            the host, possibly without the padding rows: marks rows that get all pages. A
                one-token chunk of a prompt replays the graphs of a decode step, but its keys and
                values must be those that dense prefill gives.
        """
        flags = np.zeros(0, bool) if is_prefilling is None else is_prefilling.numpy()[:rows]
        prefilling = int(np.count_nonzero(flags))
        if prefilling:
            decodes = torch.ones(len(self._decodes_B), dtype=torch.int32)
            decodes[: len(flags)] -= torch.from_numpy(flags).int()
            self._decodes_B.copy_(decodes, non_blocking=True)
        elif not self._all_decode:
            self._decodes_B.fill_(1)
        self._all_decode = not prefilling
        self._prefill_rows += prefilling
        return self.top_k[:rows]

    def look_up(self, length_B: Tensor) -> None:
        """Write a step's page counts and count its rows; part of the model's graph, before its
        first attention layer.

        Args:
            length_B: int32, cached tokens of each row, the newest included.
        """
        B = len(length_B)
        place_B = length_B * self._decodes_B[:B]
        torch.index_select(self.top_k_at_length, 0, place_B, out=self.top_k[:B])
        self.decoded.index_add_(0, place_B, self._one_B[:B])

    @contextmanager
    def uncounted(self, top_k_at_length: Tensor) -> Iterator[None]:
        """Steps inside the context read what another table says (``page_table``), and nothing
        counts them.
        """
        changed = (self.top_k_at_length, self.top_k, self.decoded)
        before = [each.clone() for each in changed]
        self.top_k_at_length.copy_(top_k_at_length)
        try:
            yield
        finally:
            for each, values in zip(changed, before, strict=True):
                each.copy_(values)

    def page_table(self, schedule: SparsitySchedule) -> Tensor:
        """Pages kept by score at every length, int32, on the host; rows in prefill look at length
        0.
        """
        table = torch.from_numpy(
            schedule.pages(np.arange(len(self.top_k_at_length))).astype(np.int32)
        )
        table[0] = ALL_PAGES
        return table

    def head_budgets(self, layer: int, kv_heads: int, rank: int, ranks: int) -> Tensor | None:
        """What multiplies the page counts of a layer, int32 ``[kv_heads]`` in units of 1 / 256;
        None if nothing does.

        Of the ``kv_heads`` that this worker has: tensor parallelism gives its ``ranks`` equal parts
        of a layer's heads in their order or, where there are fewer heads than ranks, each head to
        equally many ranks.
        """
        if not self._started_with.head_budgets:
            return None
        row_K = torch.from_numpy(self._started_with.budget_units[layer])
        first = rank * len(row_K) // ranks
        return row_K[first : first + kv_heads].to(self._everything_B.device, copy=True)

    def everything(self, rows: int) -> Tensor:
        """Page counts ``[rows]``, int32, that leave nothing out."""
        return self._everything_B[:rows]

    def use_budget(self, budget: int) -> None:
        """Have drafts read what this budget says from now on; ``budget`` is an index of
        ``budgets``.

        Called on the host between cycles; the device need not wait for it.
        """
        if budget == self._budget:
            return
        self._decoded_before[self._budget] += self.decoded
        self.decoded.zero_()
        self.top_k_at_length.copy_(self._tables[budget])
        self.meter.use(budget)
        self._budget = budget

    def begin_serving(self) -> None:
        """vLLM's warm-up is over: steps are a user's from now on."""
        if self.fp8_cache is not None:
            self.fp8_cache.is_serving = True

    def renew_draft_weights(self) -> None:
        """The weights have changed, or may have: have the next drafts copy them, if they use a copy
        at all.
        """
        if self.draft_weights is not None:
            self.draft_weights.is_stale = True

    def count_preempted(self, sequences: int) -> None:
        """Count sequences whose cache vLLM has dropped, to prefill them again."""
        self._counts["preemptions"] += sequences

    def count_pass(self, drafts: int) -> Tensor:
        """Count one dense pass of lossless mode, after which ``drafts`` tokens are drafted; the
        caller counts the rest.

        Returns: int64 [4], to which the caller adds, over the sequences that were not in prefill:
            tokens read by the pass, tokens that decoding one by one would have read instead, tokens
            that came out, and sequences.
        """
        self._cycles[drafts] += 1
        return self._verified

    def count_plain_pass(self, computed: np.ndarray) -> None:
        """Count one dense pass of lossless mode in which every sequence gets one token, with no
        drafts around it.

        Args: computed: tokens that each sequence had in the cache before. The pass after a
            verification is scheduled
                before it is known which drafts were rejected, and counts those too.
        """
        self._plain_passes.append(computed)
        if len(self._plain_passes) >= PLAIN_PASSES:
            self._sum_plain_passes()

    def _sum_plain_passes(self) -> None:
        if self._plain_passes:
            self._cycles[0] += len(self._plain_passes)
            computed = np.concatenate(self._plain_passes)
            self._plain_rows += len(computed)
            self._plain_tokens += int(computed.sum(dtype=np.int64)) + len(computed)
            self._plain_passes.clear()

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Use other page counts from the next step on.

        Raises ConfigError: another page layout, other dense layers or head_budgets, unless
        everything is read anyway.
        """
        changed = [
            name for name in LAYOUT if getattr(schedule, name) != getattr(self._started_with, name)
        ]
        if changed and not schedule.is_dense:
            ours, theirs = (
                {name: getattr(s, name) for name in changed} for s in (self._started_with, schedule)
            )
            raise ConfigError(
                f"a running vLLM can change how many pages are kept, not their layout or head_budgets; it was "
                f"started with {ours}, got {theirs}; start a new engine for it"
            )
        self._settle()
        self._fill(schedule)

    def check_metered(self, schedule: SparsitySchedule) -> None:
        """Raises ConfigError: a schedule to measure with other pages, landmarks or head_budgets
        than drafts have, or without one of their dense layers."""
        ours = self._started_with
        for name in PAGE_LAYOUT:
            if getattr(schedule, name) != getattr(ours, name):
                raise ConfigError(
                    f"meter_schedule has {name} {getattr(schedule, name)!r}, drafts {getattr(ours, name)!r}; both read "
                    "the same cache, so give both the same"
                )
        if schedule.head_budgets != ours.head_budgets:
            raise ConfigError(
                f"meter_schedule has {'other' if schedule.head_budgets else 'no'} head_budgets, but all steps of a "
                "layer follow those of drafts; give both the same"
            )
        if lacking := sorted(set(ours.dense_layers) - set(schedule.dense_layers)):
            raise ConfigError(
                f"meter_schedule reads layers {lacking} sparsely, which drafts read whole; give draft_schedule only "
                f"dense layers that meter_schedule has, {list(schedule.dense_layers)}"
            )

    def _fill(self, schedule: SparsitySchedule) -> None:
        for budget, multiple in enumerate(self.budgets):
            self._tables[budget].copy_(self.page_table(schedule.times(multiple)))
        self.top_k_at_length.copy_(self._tables[self._budget])
        self.schedule = schedule

    def counters(self) -> dict[str, int]:
        """What decode steps did since the last call; see ``control.sparrow_counters``."""
        self._settle()
        counts, self._counts = {"preemptions": 0, **self._counts}, Counter()
        if self.fp8_cache is not None and self.fp8_cache.sets_scales:
            counts["kv_clipped"] = int(self.fp8_cache.clipped)
            self.fp8_cache.clipped.zero_()
        return counts

    def acceptance(self) -> dict[str, Any]:
        """How drafts fared since the last call; see ``control.sparrow_acceptance``."""
        self._sum_plain_passes()
        cycles, self._cycles = dict(sorted(self._cycles.items())), Counter()
        if self.meter is None:
            return {"cycles": cycles}
        drafts = self.meter.settle()
        report = {"cycles": cycles, **_acceptance_report(reduce(add, drafts))}
        if len(drafts) > 1:
            report["budgets"] = [
                {"multiple": multiple, **_acceptance_report(acceptance)}
                for multiple, acceptance in zip(self.budgets, drafts, strict=True)
                if acceptance.drafts
            ]
        if (metered := self.meter.metered) is not None:
            report["metered"] = {
                "schedule": metered.schedule.to_dict(),
                **_acceptance_report(metered.tally.settle()),
            }
        return report

    def describe(self) -> dict[str, Any]:
        """What runs where, in plain types."""
        settings = self.decoding.to_dict() if self.is_lossless else {}
        settings.pop(
            "draft_schedule", None
        )  # it may have changed since; ``schedule`` has the one in use
        if self.is_lossless:
            settings["adapt_draft_budget"] = len(self.budgets) > 1
        return {
            "mode": self.decoding.mode,
            **settings,
            "backend": self.backend,
            "kernels": str(self.kernels),
            "schedule": self.schedule.to_dict(),
            **({"draft_budget": self.budgets[self._budget]} if len(self.budgets) > 1 else {}),
            "sparse_layers": self.sparse_layers,
            "dense_layers": self.dense_layers,
            **(
                {}
                if self.cache_in_8_bits is None
                else {"kv_cache": kv_cache.NAMES[self.cache_in_8_bits]}
            ),
            **({} if self.fp8_cache is None else self.fp8_cache.describe()),
            **({} if self.quantization is None else {"weights": self.quantization}),
            **({} if self.draft_weights is None else self.draft_weights.describe()),
        }

    def _settle(self) -> None:
        """Add what was decoded under the present schedule to the counts."""
        self._decoded_before[self._budget] += self.decoded
        settled = Counter({"dense_rows_prefill": self._prefill_rows})
        for multiple, decoded in zip(self.budgets, self._decoded_before.cpu().numpy(), strict=True):
            settled.update(self._decode_counts(self.schedule.times(multiple), decoded.copy()))
        self.decoded.zero_()
        self._decoded_before.zero_()
        self._prefill_rows = 0
        if self.is_lossless:  # the steps counted above are drafts
            self._sum_plain_passes()
            read, held, emitted, passes = self._verified.tolist()
            layers = len(self.sparse_layers) + len(self.dense_layers)
            settled["tokens_read"] += layers * (read + self._plain_tokens)
            settled["tokens_held"] = layers * (held + self._plain_tokens)
            settled["drafted"], settled["accepted"] = settled["rows"], emitted - passes
            settled["emitted"] = emitted + self._plain_rows
            self._verified.zero_()
            self._plain_rows = self._plain_tokens = 0
        self._counts.update(settled)

    def _decode_counts(self, schedule: SparsitySchedule, decoded: np.ndarray) -> dict[str, int]:
        """The counts of decode steps under ``schedule``, of which there were ``decoded`` at each
        length.
        """
        decoded[0] = 0  # padding rows, and rows in prefill
        length = np.flatnonzero(decoded)
        rows = decoded[length]
        sparse, dense = len(self.sparse_layers), len(self.dense_layers)
        read = schedule.tokens_read(length)
        everything = schedule.pages(length) >= ALL_PAGES
        counts = {
            "rows": rows.sum(),
            "tokens_read": (rows * (sparse * read + dense * length)).sum(),
            "tokens_held": (rows * (sparse + dense) * length).sum(),
            "pages_read": (rows * sparse * schedule.pages_read(length)).sum(),
            "dense_rows_schedule": rows[everything].sum(),
            "dense_rows_short": rows[~everything & (read == length)].sum(),
        }
        return {name: int(count) for name, count in counts.items()}


def _acceptance_report(acceptance: Any) -> dict[str, Any]:
    return {
        "bins": [asdict(each) for each in acceptance.bins()],
        "acceptance": acceptance.to_dict(),
    }


def find(vllm_config: Any) -> Runtime | None:
    """The runtime that the attention layers of this worker's model share, if any of them decodes
    with Sparrow.
    """
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    runtimes = (getattr(getattr(layer, "impl", None), "runtime", None) for layer in layers.values())
    return next((runtime for runtime in runtimes if runtime is not None), None)
