"""State shared by a model's attention layers: the schedule, and whether the layers are routed.

It's stored on the modules themselves, so that a copy of a model gets its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from sparrow.attention import PageLayout
from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule

# name of the attention implementation, and of the module attribute that holds the ``Actor``
NAME = "sparrow"


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """Return each layer's kind, as transformers names it. By default, layers have full
    attention.
    """
    kinds = getattr(config, "layer_types", None)
    layers: int = config.num_hidden_layers
    return list(kinds or ["full_attention"] * layers)[:layers]


def attention_layers(config: PreTrainedConfig) -> set[int]:
    """Return the indices of the full-attention layers, the only ones that select pages. All other
    layers always compute what they would compute without Sparrow.
    """
    return {i for i, kind in enumerate(layer_kinds(config)) if kind == "full_attention"}


def check_head_budgets(model: PreTrainedModel) -> None:
    """Raise ConfigError if ``model`` has layers that never select pages, which would distort the
    mean of head budgets.
    """
    config = model.config.get_text_config()
    if len(attention_layers(config)) < config.num_hidden_layers:
        raise ConfigError(
            f"{type(model).__name__} has layers without full attention, but the mean of "
            "head_budgets would include these layers; use a schedule without head_budgets"
        )


class ScheduleTable:
    """A schedule's page counts and head budgets, kept on the device so that lookups don't sync with
    the host.
    """

    def __init__(self, schedule: SparsitySchedule) -> None:
        self._schedule = schedule
        self._tables: dict[torch.device, Tensor] = {}
        self._budgets: dict[torch.device, Tensor] = {}

    def top_k(self, length: Tensor) -> Tensor:
        """Look up ``schedule.pages(length)``, int32 with the shape of ``length``."""
        if length.device not in self._tables:
            self._tables[length.device] = torch.tensor(
                self._schedule.top_k, dtype=torch.int32, device=length.device
            )
        table = self._tables[length.device]
        P = self._schedule.page_size
        bins = (length + P - 1) // P * P // self._schedule.bin_tokens
        return table[bins.clamp(max=len(table) - 1)]

    def head_budgets(self, layer: int, device: torch.device) -> Tensor | None:
        """Look up the multipliers for a layer's page counts, int32 ``[K]``, in units of 1 / 256.
        Return None if all heads have the same budget.
        """
        if not self._schedule.head_budgets:
            return None
        if device not in self._budgets:
            self._budgets[device] = torch.from_numpy(self._schedule.budget_units).to(device)
        return self._budgets[device][layer]


@dataclass
class Actor:
    """State shared by all attention layers of a model."""

    schedule: SparsitySchedule
    # text config, which says which attention implementation is in use
    config: PreTrainedConfig
    own_attention: str  # the model's original attention implementation
    layout: PageLayout = field(init=False)
    table: ScheduleTable = field(init=False)
    attention_layers: set[int] = field(init=False)
    sparse_layers: set[int] = field(init=False)  # attention layers that follow the schedule
    sparse_calls: int = 0
    dense: bool = False  # whether decode steps attend to all tokens right now
    # whether a pass over several tokens with a cache currently counts as one decode step
    takes_several: bool = False
    # whether ``generate`` has read its prompt, so that every later pass reads one token
    is_generating: bool = False

    def __post_init__(self) -> None:
        self.layout = PageLayout(**self.schedule.page_layout)
        self.table = ScheduleTable(self.schedule)
        self.attention_layers = attention_layers(self.config)
        self.sparse_layers = self.attention_layers - set(self.schedule.dense_layers)

    @property
    def routed(self) -> bool:
        return self.config._attn_implementation == NAME


def actor_of(model: nn.Module) -> Actor | None:
    return next((getattr(m, NAME) for m in model.modules() if hasattr(m, NAME)), None)
