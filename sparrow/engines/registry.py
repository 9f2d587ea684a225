"""The engines that a user can name: one entry of ``KINDS`` for each.

An engine's module has the function that starts it; its entry has the facts that commands need
before anything is loaded. This module does not import torch.
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
    """Facts about an engine that commands need before it is loaded."""

    names: tuple[str, ...]  # what a spec of it begins with
    start: str  # the function that starts it from an ``Asked``, as module:function
    takes: Literal["nothing", "options", "address"]  # what follows the name
    # It samples with the very model that was loaded, of which there is no copy: it can score too,
    # leave verification out at some lengths, and change the head budgets.
    shares_model: bool = False
    colocated: bool = True  # runs on the GPUs of the process that started it
    predicted: bool = True  # the cost model says how fast it is
    # It is not Sparrow's: it follows no schedule, takes no weights, and can only be audited.
    is_stock: bool = False
    length_option: str | None = None  # the option that limits the tokens of a sequence

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
"""A spec belongs to the first kind that claims it."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine as a user names it."""

    written: str
    kind: Kind

    @property
    def rest(self) -> str:
        """The text after the name and its colon; for an address, all but ``stock:``."""
        if self.kind.takes == "address":
            return self.written.removeprefix("stock:")
        return self.written.partition(":")[2]

    @property
    def options(self) -> dict[str, Any]:
        """The options by name. Raises ConfigError: as ``settings.parse_options``."""
        return parse_options(self.rest, self.written) if self.kind.takes == "options" else {}


@dataclass(frozen=True)
class Asked:
    """Everything an engine is started with; each kind uses the parts that it needs."""

    spec: EngineSpec
    checkpoint: str  # the model's folder or its name on the hub
    model: Any  # the same model, loaded by transformers
    tokenizer: Any
    decoding: Decoding
    precision: Literal["fp32", "bf16"]
    sleeps: bool = True  # whether it will have to give up its memory between rollouts

    def start(self) -> Engine:
        """Start the engine. Raises ConfigError: options or a model that it does not accept."""
        module, _, function = self.spec.kind.start.partition(":")
        engine: Engine = getattr(importlib.import_module(module), function)(self)
        return engine


def parse_engine(spec: str) -> EngineSpec:
    """Find the engine that ``spec`` names. Raises ConfigError: there is none."""
    for kind in KINDS:
        if kind.claims(spec):
            return EngineSpec(spec, kind)
    raise no_engine(spec)


def no_engine(spec: str) -> ConfigError:
    """Make the error for a spec that names no engine to sample or train with."""
    written = {
        "nothing": "{0}",
        "options": "{0}, {0}:option=value,...",
        "address": "{0}://host:port",
    }
    known = [written[kind.takes].format(kind.names[0]) for kind in KINDS if not kind.is_stock]
    return ConfigError(f"no engine {spec!r}; expected {', '.join(known[:-1])} or {known[-1]}")
