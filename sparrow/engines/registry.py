"""The engines that a user can select, each with an entry in ``KINDS``.

An entry contains the facts that commands need before anything is loaded. The function that starts
an engine is in the engine's own module, so this module does not import torch.
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
    """Facts that commands need about an engine before it is loaded."""

    names: tuple[str, ...]  # names of the engine; its spec begins with one of them
    start: str  # the function that starts the engine from an ``Asked``, as module:function
    takes: Literal["nothing", "options", "address"]  # what may follow the name in a spec
    # whether the engine samples with the loaded model itself, not with a copy. Such an engine can
    # also score, skip verification at some lengths, and change the head budgets
    shares_model: bool = False
    colocated: bool = True  # whether the engine runs on the GPUs of the process that started it
    predicted: bool = True  # whether the cost model can predict the engine's speed
    # whether the engine runs without Sparrow; it then has no schedule, accepts no weights, and can
    # only be audited
    is_stock: bool = False
    length_option: str | None = None  # the option that limits the length of a sequence

    def claims(self, spec: str) -> bool:
        """Return whether ``spec`` names an engine of this kind."""
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
    """An engine as specified by the user."""

    written: str
    kind: Kind

    @property
    def rest(self) -> str:
        """The text after the name and the colon. For an address, everything except the prefix
        ``stock:``.
        """
        if self.kind.takes == "address":
            return self.written.removeprefix("stock:")
        return self.written.partition(":")[2]

    @property
    def options(self) -> dict[str, Any]:
        """The values of the options, by name. Raises ConfigError if ``settings.parse_options``
        rejects them.
        """
        return parse_options(self.rest, self.written) if self.kind.takes == "options" else {}


@dataclass(frozen=True)
class Asked:
    """Everything needed to start an engine. Each kind of engine uses only some of the fields."""

    spec: EngineSpec
    checkpoint: str  # folder or hub name of the model
    model: Any  # the model, as loaded by transformers
    tokenizer: Any
    decoding: Decoding
    precision: Literal["fp32", "bf16"]
    sleeps: bool = True  # whether the engine must free its memory between rollouts

    def start(self) -> Engine:
        """Start the engine. Raises ConfigError if the engine does not support the options or the
        model.
        """
        module, _, function = self.spec.kind.start.partition(":")
        engine: Engine = getattr(importlib.import_module(module), function)(self)
        return engine


def parse_engine(spec: str) -> EngineSpec:
    """Find the engine that ``spec`` names. Raises ConfigError if no engine has this name."""
    for kind in KINDS:
        if kind.claims(spec):
            return EngineSpec(spec, kind)
    raise no_engine(spec)


def no_engine(spec: str) -> ConfigError:
    """Create the error for a spec that names no engine for sampling or training."""
    written = {
        "nothing": "{0}",
        "options": "{0}, {0}:option=value,...",
        "address": "{0}://host:port",
    }
    known = [written[kind.takes].format(kind.names[0]) for kind in KINDS if not kind.is_stock]
    return ConfigError(f"unknown engine {spec!r}; expected {', '.join(known[:-1])} or {known[-1]}")
