"""Sparsity schedules: how many pages the sparse actor may read at each sequence length.

A schedule gives each length bin a ``top_k``, which is the number of pages to keep by score. Sink
and recent pages are always kept in addition. Layers and kv heads can each have their own budget,
relative to ``top_k``. Lengths are in tokens and count everything in the KV cache, including the
current token. Source: Sparrow, arXiv 2606.08446, sections 2 and 4.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from operator import index
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparrow.errors import ConfigError

# a ``top_k`` large enough for any sequence, written as ``"all"`` in JSON. It makes a bin dense
ALL_PAGES = 2**30
LARGEST_PAGE = 2**16
LandmarkDtype = Literal["auto", "fp8_e4m3"]
# relative budgets are multiples of 1 / 256, so that all implementations get the same numbers
BUDGET_UNIT = 256
LARGEST_BUDGET = 64
PAGE_LAYOUT = ("page_size", "sink_pages", "recent_pages", "landmark_dtype")
"""Schedule fields that describe the pages rather than how many to keep. Keep in sync with
``attention.PageLayout``.
"""


@dataclass(frozen=True)
class SparsitySchedule:
    """How many pages to keep by score at each sequence length, and how these pages are laid out.

    Raises ConfigError if the table is empty or decreases with length, or a field is out of range.
    """

    # pages kept by score in each length bin; the last entry also covers anything longer
    top_k: tuple[int, ...]
    # bin width in tokens. Lengths are rounded up to whole pages first, so a length's bin is
    # ``ceil(length / page_size) * page_size // bin_tokens``. With 16-token pages and 2,000-token
    # bins, the bin edges are exactly those of the published tables
    bin_tokens: int = 2000
    page_size: int = 16  # tokens per page
    sink_pages: int = 1  # pages at the start of the sequence that are always kept
    # pages at the end of the sequence that are always kept; a partly filled page counts as one
    recent_pages: int = 2
    dense_layers: tuple[int, ...] = (0, 1)  # layers that always attend to all tokens
    # dtype of landmarks (the pages' mean keys): same as the cache, or 8-bit
    landmark_dtype: LandmarkDtype = "auto"
    # factors by which to multiply ``top_k``. There is one row per layer of the model, including
    # dense layers, and one factor per KV head in each row. The factors average 1 over the sparse
    # layers, so ``top_k`` is the mean number of pages. Empty if all heads have the same budget
    head_budgets: tuple[tuple[float, ...], ...] = ()
    # where the table comes from: a preset name, or a calibration's model, data and intervals
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("top_k", "dense_layers"):
            listed = _listed(name, getattr(self, name), "integers")
            numbers = tuple(_integer(f"{name}[{i}]", k) for i, k in enumerate(listed))
            object.__setattr__(self, name, numbers)
        for name in ("bin_tokens", "page_size", "sink_pages", "recent_pages"):
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        if self.landmark_dtype not in (known := get_args(LandmarkDtype)):
            raise ConfigError(
                f"a schedule's landmark_dtype must be one of {known}, got {self.landmark_dtype!r}"
            )

        if not self.top_k:
            raise ConfigError("a schedule needs at least one length bin, got an empty top_k table")
        object.__setattr__(self, "head_budgets", _head_budgets(self.head_budgets))
        for i, (before, k) in enumerate(pairwise(self.top_k), start=1):
            if k < before:
                falls_from = "all pages" if before >= ALL_PAGES else before
                least = '"all"' if before >= ALL_PAGES else f"at least {before}"
                raise ConfigError(
                    f"a schedule must not shrink with length, but top_k falls from {falls_from} "
                    f"in bin {i - 1} to {k} in bin {i}; raise it to {least}"
                )

        if self.page_size < 1 or self.bin_tokens < self.page_size:
            raise ConfigError(
                f"need 1 <= page_size <= bin_tokens, got {self.page_size} and {self.bin_tokens}"
            )
        if self.page_size > LARGEST_PAGE:  # otherwise, token counts could overflow 64 bits
            raise ConfigError(
                f"page_size must be at most {LARGEST_PAGE} tokens, got {self.page_size}"
            )
        if self.recent_pages < 1:
            raise ConfigError(
                f"recent_pages is {self.recent_pages}, but must be at least 1, because the "
                "page being written is always read"
            )

        mean = float(self.sparse_budget_units.mean()) / BUDGET_UNIT
        if abs(mean - 1) > 0.01:
            raise ConfigError(
                "a schedule's head_budgets must have a mean of 1 over the layers that are not dense, "
                f"got {mean:.4g}; divide them by {mean:.4g}, and raise top_k to read more"
            )

    def pages(self, length: ArrayLike) -> NDArray[np.int64]:
        """Return the number of pages kept by score at ``length`` tokens (any shape), averaged over
        heads. Sink and recent pages don't count.
        """
        bins = self.page_end(length) // self.bin_tokens
        last = len(self.top_k) - 1
        return np.asarray(self.top_k, dtype=np.int64)[np.minimum(bins, last)]

    def page_end(self, length: ArrayLike) -> NDArray[np.int64]:
        """Round ``length`` up to the end of the page being written. The rounded length determines
        the bin.
        """
        return -(-np.asarray(length, dtype=np.int64) // self.page_size) * self.page_size

    def tokens_read(self, length: ArrayLike) -> NDArray[Any]:
        """Return how many cached tokens a sparse layer reads at ``length``. This is the layer's KV
        budget, or all cached tokens if there are fewer.

        The result is an integer, unless heads have different budgets. It is then the mean over
        layers and heads, as a float.
        """
        return self._mean_over_heads(lambda tokens: tokens, length)

    def pages_read(self, length: ArrayLike) -> NDArray[Any]:
        """Return how many pages a sparse layer reads at ``length``. A partly filled page counts as
        one. If heads have different budgets, the result is the mean, as a float.
        """
        return self._mean_over_heads(lambda tokens: -(-tokens // self.page_size), length)

    def _mean_over_heads(
        self, of: Callable[[NDArray[np.int64]], NDArray[np.int64]], length: ArrayLike
    ) -> NDArray[Any]:
        """Apply ``of`` to the number of tokens each head reads, and average the results."""
        held = np.asarray(length, dtype=np.int64)
        top_k = self.pages(length)

        def read(pages: NDArray[np.int64]) -> NDArray[np.int64]:
            budget = (pages + self.sink_pages + self.recent_pages) * self.page_size
            return of(np.minimum(held, budget))

        if not self.head_budgets:
            return read(top_k)

        total = np.zeros(held.shape)
        cells = self.sparse_budget_units
        for relative, count in zip(*np.unique(cells, return_counts=True), strict=True):
            total = total + count * read(_budget_of(top_k, relative))
        return total / cells.size

    @property
    def budget_units(self) -> NDArray[np.int32]:
        """``head_budgets`` in units of 1 / 256, ``[layers, kv heads]``."""
        return np.round(np.array(self.head_budgets) * BUDGET_UNIT).astype(np.int32)

    @property
    def sparse_budget_units(self) -> NDArray[np.int32]:
        """The sparse layers' rows of ``budget_units``. If no layer is sparse, a single factor of 1
        (256 units).
        """
        rows = [row for i, row in enumerate(self.budget_units) if i not in self.dense_layers]
        return np.array(rows or [[BUDGET_UNIT]], dtype=np.int32)

    @property
    def page_layout(self) -> dict[str, Any]:
        """Arguments for ``PageLayout``. The attention code takes these because it doesn't know
        about schedules.
        """
        return {name: getattr(self, name) for name in PAGE_LAYOUT}

    @property
    def is_dense(self) -> bool:
        """True if no length is ever decoded sparsely."""
        return self.top_k[0] >= ALL_PAGES

    @property
    def dense_up_to(self) -> float:
        """The length in tokens, rounded down to whole bins, up to which decoding reads the whole
        cache. Infinity if decoding always reads the whole cache.
        """
        last = len(self.top_k) - 1
        least = self.sparse_budget_units.min()  # the head with the smallest budget decides
        for i, k in enumerate(self.top_k):
            if k >= ALL_PAGES:
                continue
            pages = int(_budget_of(np.int64(k), least)) + self.sink_pages + self.recent_pages
            held = pages * self.page_size
            if i == last:
                return max(i, held // self.bin_tokens) * self.bin_tokens
            if held < (i + 1) * self.bin_tokens:
                return i * self.bin_tokens
        return math.inf

    def check_model(self, num_layers: int, kv_heads: int) -> None:
        """Check that this schedule fits a model.

        Raises ConfigError if the model lacks one of the dense layers, or if the head budgets are
        for a different number of layers or heads.
        """
        if beyond := [i for i in self.dense_layers if i >= num_layers]:
            raise ConfigError(
                f"the schedule keeps layer {beyond[0]} dense, but the model has {num_layers} "
                f"layers (0..{num_layers - 1}); set dense_layers to match the model"
            )
        if self.head_budgets and self.budget_units.shape != (num_layers, kv_heads):
            layers, heads = self.budget_units.shape
            raise ConfigError(
                f"the schedule's head_budgets are for {layers} layers with {heads} kv heads, "
                f"but the model has {num_layers} layers with {kv_heads}; use a schedule made "
                "for this model, or leave head_budgets out"
            )

    def times(self, multiple: float) -> SparsitySchedule:
        """Return a schedule that reads ``multiple`` times as many pages, including sink and recent
        pages.

        A bin that keeps pages by score still keeps at least one, and a dense bin stays dense.
        """
        always = self.sink_pages + self.recent_pages

        def scaled(k: int) -> int:
            if k >= ALL_PAGES:
                return k
            return max(min(k, 1), round((k + always) * multiple) - always)

        return self.replace(top_k=tuple(scaled(k) for k in self.top_k))

    def reading_everything(self) -> SparsitySchedule:
        """Return a schedule with the same layout that reads every page at every length."""
        return self.replace(top_k=(ALL_PAGES,))

    def replace(self, **changes: Any) -> SparsitySchedule:
        """Return a copy with some fields changed, validated again."""
        return replace(self, **changes)

    @classmethod
    def dense(cls, **layout: Any) -> SparsitySchedule:
        """Build a schedule that reads every page at every length."""
        return cls(top_k=(ALL_PAGES,), **layout)

    @classmethod
    def fixed(cls, pages: int, **layout: Any) -> SparsitySchedule:
        """Build a schedule that keeps ``pages`` pages by score at every length."""
        return cls(top_k=(pages,), **layout)

    @classmethod
    def preset(cls, model: str, target: float = 0.86) -> SparsitySchedule:
        """Load a published table by model name and p5 target.

        Raises ConfigError if there's no such table; the message lists the published tables.
        """
        published = _published()
        if not isinstance(model, str) or isinstance(target, bool | str) or target is None:
            known = ", ".join(sorted(published["top_k"]))
            raise ConfigError(
                "a preset consists of a model's name and a target, got "
                f"{model!r} and {target!r}; known presets: {known}"
            )
        name = f"{model.lower()}-{target:.2f}"
        if name not in published["top_k"] or float(f"{target:.2f}") != target:
            known = ", ".join(sorted(published["top_k"]))
            raise ConfigError(
                f"no published schedule for {model!r} and {target}; published ones: {known}"
            )
        provenance = {"preset": name, "source": published["source"], "target": target}
        return cls.from_dict(
            {**published["layout"], "top_k": published["top_k"][name], "provenance": provenance}
        )

    @classmethod
    def load(cls, spec: str | Path | Mapping[str, Any]) -> SparsitySchedule:
        """Read a schedule in any form that a user can write: ``dense``, ``fixed:PAGES``,
        ``MODEL-TARGET``, the path to a JSON file, or the contents of such a file.

        Raises ConfigError if ``spec`` is none of these, or its contents aren't a valid schedule.
        """
        if isinstance(spec, Mapping):
            return cls.from_dict(spec)
        text = str(spec)
        if text.lstrip().startswith("{"):
            return cls.from_json(text)
        if text == "dense":
            return cls.dense()
        if text.startswith("fixed:") and text[6:].isdecimal() and len(text) < 32:
            return cls.fixed(int(text[6:]))
        if text.lower() in _published()["top_k"]:
            model, _, target = text.rpartition("-")
            return cls.preset(model, float(target))

        try:
            return cls.from_json(Path(text).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{text} is not a schedule: it is not UTF-8 text ({error})"
            ) from error
        except ConfigError as error:
            raise ConfigError(f"{text}: {error}") from error
        except (OSError, ValueError) as error:
            if text.endswith(".json") or Path(text).name != text:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(
                    f"cannot read the schedule file {text}: {reason}; check the path"
                ) from error
            if text.startswith("fixed:"):
                raise ConfigError(
                    f"no schedule {text!r}: PAGES must be an integer in 0..{ALL_PAGES}"
                ) from error
            known = ", ".join(sorted(_published()["top_k"]))
            expected = f"expected 'dense', 'fixed:PAGES', a JSON file, or one of {known}"
            raise ConfigError(f"no schedule {text!r}: {expected}") from error

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain JSON types that ``from_dict`` can read back. Leaves out ``head_budgets``
        if it's empty.
        """
        top_k = ["all" if k >= ALL_PAGES else k for k in self.top_k]
        plain = asdict(self) | {"top_k": top_k, "dense_layers": list(self.dense_layers)}
        rows = plain.pop("head_budgets")
        if rows:
            plain["head_budgets"] = [list(row) for row in rows]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> SparsitySchedule:
        """Build a schedule from the output of ``to_dict``.

        Raises ConfigError if a field is unknown, missing or invalid.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(plain) - known, key=str)
        if unknown:
            raise ConfigError(
                f"a schedule has the fields {sorted(known)}, of which top_k is required; "
                f"got unknown fields {unknown}"
            )
        if "top_k" not in plain:
            raise ConfigError(
                "a schedule needs the field top_k, the number of pages to keep in each length bin"
            )
        top_k = plain["top_k"]
        if isinstance(top_k, list | tuple):
            top_k = tuple(ALL_PAGES if isinstance(k, str) and k == "all" else k for k in top_k)
        provenance = plain.get("provenance") or {}
        if not isinstance(provenance, Mapping):
            raise ConfigError(f"a schedule's provenance must be a JSON object, got {provenance!r}")
        return cls(**{**plain, "top_k": top_k, "provenance": provenance})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> SparsitySchedule:
        """Build a schedule from the output of ``to_json``.

        Raises ConfigError if ``text`` isn't JSON, or isn't a schedule.
        """
        try:
            plain = json.loads(text, object_pairs_hook=without_duplicates)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the schedule is not valid JSON: {error}") from error
        if not isinstance(plain, dict):
            raise ConfigError(
                f"a schedule must be a JSON object with a top_k table, got {type(plain).__name__}"
            )
        return cls.from_dict(plain)


def auto_start(spec: str | None) -> str | None:
    """Return the schedule that a run with the setting ``schedule=spec`` starts from, if the run
    then adjusts it to the measured p5: ``dense`` for ``auto``, and SCHEDULE for ``auto:SCHEDULE``.
    Return None for a fixed schedule, which ``SparsitySchedule.load`` can read.
    """
    name, colon, start = (spec or "").partition(":")
    if name != "auto":
        return None
    return start if colon else "dense"


def _budget_of(
    top_k: NDArray[np.int64] | np.int64, relative: int | np.integer[Any]
) -> NDArray[np.int64]:
    """Compute how many pages a head keeps by score, given its relative budget in units of 1 / 256.
    A ``top_k`` of ``ALL_PAGES`` stays as it is.
    """
    rounded = (top_k * np.int64(relative) + BUDGET_UNIT // 2) // BUDGET_UNIT
    return np.where(top_k >= ALL_PAGES, top_k, rounded)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, but refuse duplicate keys. The standard library would silently keep the
    last one.
    """
    plain = dict(pairs)
    if len(plain) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return plain


def _head_budgets(rows: Any) -> tuple[tuple[float, ...], ...]:
    """Check relative budgets and round them to multiples of 1 / 256."""
    table: list[tuple[float, ...]] = []
    for i, row in enumerate(_listed("head_budgets", rows)):
        for j, number in enumerate(_listed(f"head_budgets[{i}]", row)):
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not 0 <= number <= LARGEST_BUDGET:
                expected = f"a number in 0..{LARGEST_BUDGET} that multiplies top_k"
                raise ConfigError(
                    f"a schedule's head_budgets[{i}][{j}] must be {expected}, got {number!r}"
                )
        table.append(tuple(round(number * BUDGET_UNIT) / BUDGET_UNIT for number in row))
    lengths = [len(row) for row in table]
    if len(set(lengths)) > 1 or 0 in lengths:
        raise ConfigError(
            "a schedule's head_budgets need one row for each layer, with one number for each kv "
            f"head, got rows of {', '.join(map(str, lengths))} numbers"
        )
    return tuple(table)


def _listed(name: str, values: Any, of: str = "numbers") -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"a schedule's {name} must be a list of {of}, got {values!r}")
    return list(values)


def _integer(name: str, value: Any) -> int:
    try:
        number = index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number <= ALL_PAGES:
        raise ConfigError(
            f"a schedule's {name} must be an integer in 0..{ALL_PAGES}, got {value!r}"
        )
    return number


@cache
def _published() -> dict[str, Any]:
    file = resources.files("sparrow").joinpath("presets.json")
    return json.loads(file.read_text(encoding="utf-8"))
