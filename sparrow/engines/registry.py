"""The engines users can choose from, listed in ``KINDS``.

An entry tells commands what they need to know before anything is loaded. The functions that start
engines live in the engines' own modules, so this one doesn't import torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparrow.decoding import Decoding
from sparrow.errors import ConfigError
from sparrow.settings import parse_options

if TYPE_CHECKING:
    from sparrow.engines.base import Engine


@dataclass(frozen=True)
class Kind:
    """What commands need to know about an engine before it is loaded."""

    names: tuple[str, ...]  # the engine's names; its spec starts with one of them
    start: str  # module:function that starts the engine from an ``Asked``
    takes: Literal["nothing", "options", "address"]  # what may follow the name in a spec
    # whether the engine samples with the loaded model itself rather than a copy. If so, it can also
    # score, skip verification at some lengths, and change the head budgets.
    shares_model: bool = False
    colocated: bool = True  # whether the engine runs on the GPUs of the process that starts it
    predicted: bool = True  # whether the cost model can predict the engine's speed
    # whether the engine runs without Sparrow. If so, it has no schedule, accepts no weights, and
    # can only be audited.
    is_stock: bool = False
    length_option: str | None = None  # the option that limits sequence length

    def claims(self, spec: str) -> bool:
        """Return whether ``spec`` is for this kind of engine."""
        if self.takes == "address":
            return spec.startswith(tuple(f"{name}://" for name in self.names))
        if self.takes == "options":
            return spec in self.names or spec.startswith(tuple(f"{name}:" for name in self.names))
        return spec in self.names


KINDS = (
    Kind(("hf",), "sparrow.engines.hf:start", "nothing", shares_model=True, predicted=False),
    Kind(
        ("vllm",),
        "sparrow.engines.vllm.engine:start",
        "options",
        length_option="max_model_len",
    ),
    Kind(("http", "https"), "sparrow.engines.vllm.server:start", "address", colocated=False),
    Kind(
        ("stock:http", "stock:https"),
        "sparrow.engines.vllm.stock:start_server",
        "address",
        colocated=False,
        is_stock=True,
    ),
    Kind(
        ("stock",),
        "sparrow.engines.vllm.stock:start",
        "options",
        is_stock=True,
        length_option="max_model_len",
    ),
)
"""The kinds of engine. A spec belongs to the first kind that claims it."""


@dataclass(frozen=True)
class EngineSpec:
    """A user's engine spec."""

    written: str
    kind: Kind

    @property
    def rest(self) -> str:
        """The part of the spec after the name and the colon. If the spec is an address, this is the
        address without a ``stock:`` prefix.
        """
        if self.kind.takes == "address":
            return self.written.removeprefix("stock:")
        return self.written.partition(":")[2]

    @property
    def options(self) -> dict[str, Any]:
        """Option values by name. Raises ConfigError if ``settings.parse_options`` rejects them."""
        return parse_options(self.rest, self.written) if self.kind.takes == "options" else {}


@dataclass(frozen=True)
class Asked:
    """Everything needed to start an engine. No engine uses all of it."""

    spec: EngineSpec
    checkpoint: str  # the model's folder or hub name
    model: Any  # the model, as loaded by transformers
    tokenizer: Any
    decoding: Decoding
    precision: Literal["fp32", "bf16"]
    sleeps: bool = True  # whether the engine must free its memory between rollouts

    def start(self) -> Engine:
        """Start the engine. Raises ConfigError if it does not support the options or the model."""
        module, _, function = self.spec.kind.start.partition(":")
        engine: Engine = getattr(importlib.import_module(module), function)(self)
        return engine


def parse_engine(spec: str) -> EngineSpec:
    """Find the engine for ``spec``. Raises ConfigError if no engine has that name."""
    for kind in KINDS:
        if kind.claims(spec):
            return EngineSpec(spec, kind)
    raise no_engine(spec)


def no_engine(spec: str) -> ConfigError:
    """Create the error for a spec that doesn't name an engine for sampling or training."""
    written = {
        "nothing": "{0}",
        "options": "{0}, {0}:option=value,...",
        "address": "{0}://host:port",
    }
    known = [written[kind.takes].format(kind.names[0]) for kind in KINDS if not kind.is_stock]
    return ConfigError(f"unknown engine {spec!r}; expected {', '.join(known[:-1])} or {known[-1]}")
