"""A Hugging Face causal language model as a sparse actor: an attention implementation named "sparrow".

With it a model's decode steps are sparse under a schedule, while prefill, scoring and training stay
dense with no switch: one query token with a cache is a decode step, anything else is not. The
``teacher_forced`` context turns a whole-sequence forward pass into what decoding would have computed.

Shapes: B sequences, T query tokens, S cached tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sparrow import attention
from sparrow.attention import PageLayout
from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.schedule import SparsitySchedule

NAME = "sparrow"
_KEPT: ContextVar[list[Any] | None] = ContextVar("kept", default=None)


class ScheduleTable:
    """A schedule's page counts on the device, looked up without a host synchronisation."""

    def __init__(self, schedule: SparsitySchedule) -> None:
        self._schedule = schedule
        self._tables: dict[torch.device, Tensor] = {}

    def top_k(self, length: Tensor) -> Tensor:
        """``schedule.pages(length)`` as int32, in the shape of ``length``."""
        if length.device not in self._tables:
            self._tables[length.device] = torch.tensor(self._schedule.top_k, dtype=torch.int32, device=length.device)
        table, P = self._tables[length.device], self._schedule.page_size
        bins = (length + P - 1) // P * P // self._schedule.bin_tokens
        return table[bins.clamp(max=len(table) - 1)]


@dataclass
class _Actor:
    """What all attention layers of one model share."""

    schedule: SparsitySchedule
    layout: PageLayout = field(init=False)
    table: ScheduleTable = field(init=False)
    sparse_calls: int = 0
    dense: bool = False  # decode steps attend to everything just now

    def __post_init__(self) -> None:
        self.layout = PageLayout(self.schedule.page_size, self.schedule.sink_pages, self.schedule.recent_pages)
        self.table = ScheduleTable(self.schedule)


@dataclass
class _TeacherForcing:
    """Travels as a keyword argument of the forward pass, so that recomputation for gradients sees it too."""

    actor: _Actor
    prompt_lengths: Tensor
    # what computes the attention, of those that ``sparrow.attention.teacher_forced`` offers
    implementation: attention.Implementation
    layers: set[int] = field(default_factory=set)  # those that came by


def sparrow_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    teacher_forcing: _TeacherForcing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of the transformers attention interface; ``[B, H, T, D]`` in, ``[B, T, H, D]`` out.

    Raises ConfigError: a decode step of a model that was given no schedule.
    """
    if teacher_forcing is not None:
        teacher_forcing.layers.add(module.layer_idx)
        forced = teacher_forcing.actor
        if module.layer_idx not in forced.schedule.dense_layers:
            start, length = _spans(attention_mask, key, diagonal=True)
            position = torch.arange(key.shape[2], device=key.device) - start[:, None]
            top_k = forced.table.top_k((position + 1).clamp(min=1))
            prompt = teacher_forcing.prompt_lengths.to(key.device)
            out = attention.teacher_forced(
                query, key, value, start, length, prompt, top_k, layout=forced.layout, scale=scaling,
                implementation=teacher_forcing.implementation, kept=_KEPT.get(),
            )  # fmt: skip
            return out.transpose(1, 2).contiguous(), None
    elif query.shape[2] == 1 and key.shape[2] > 1:
        actor = getattr(module, "sparrow", None)
        if actor is None:
            raise ConfigError(
                "this model decodes with attn_implementation='sparrow' but has no schedule; "
                "call sparrow.model.actor.set_schedule(model, schedule) first"
            )
        if not actor.dense and module.layer_idx not in actor.schedule.dense_layers:
            actor.sparse_calls += 1
            start, length = _spans(attention_mask, key)
            out = attention.decode(
                query[:, :, 0], key, value, start if attention_mask is not None else None, length,
                actor.table.top_k(length), layout=actor.layout, scale=scaling,
            )  # fmt: skip
            return out[:, None], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register(NAME, sparrow_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # without a mask function of that name padding would be attended


def _spans(attention_mask: Tensor | None, key: Tensor, diagonal: bool = False) -> tuple[Tensor, Tensor]:
    """First column and number of each row's real tokens, int64 ``[B]``, from the boolean mask ``[B, 1, T, S]``."""
    B, S = key.shape[0], key.shape[2]
    if attention_mask is None:
        return torch.zeros(B, dtype=torch.long, device=key.device), torch.full((B,), S, device=key.device)
    real = attention_mask[:, 0].diagonal(dim1=-2, dim2=-1) if diagonal else attention_mask[:, 0, -1]
    return real.int().argmax(-1), real.sum(-1)


def set_schedule(model: PreTrainedModel, schedule: SparsitySchedule) -> None:
    """Make ``model`` decode under ``schedule``; the first call also routes its attention and checks that it took.

    Raises UnsupportedModel: attention that cannot be routed, or is not full causal self-attention in every layer.
    ConfigError: a schedule that does not match the model.
    """
    config = model.config.get_text_config()
    schedule.check_model(config.num_hidden_layers)
    layers = [m for m in model.modules() if hasattr(m, "layer_idx")]
    fresh = not layers or not hasattr(layers[0], NAME) or not _is_routed(model)
    if fresh:
        _check_attention_kind(model)
        model.set_attn_implementation(NAME)
    actor = _Actor(schedule)
    for module in layers:
        setattr(module, NAME, actor)
    if fresh:
        _check_routed(model, config.num_hidden_layers)


def _check_attention_kind(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; Sparrow decodes causal language models only")
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if not kinds and window and getattr(config, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    if kinds:
        raise UnsupportedModel(
            f"{name} has layers of the kind {', '.join(sorted(kinds))} (window {window}), but Sparrow selects pages "
            "from full attention only; choose a model with full attention in every layer, or set sliding_window=None "
            "in its config if sequences stay shorter than the window"
        )


@torch.no_grad()
def _check_routed(model: PreTrainedModel, num_layers: int) -> None:
    """Push two tokens through the model and see which layers came by."""
    name = type(model).__name__
    missing = set(range(num_layers))
    if _is_routed(model):
        ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        try:
            with teacher_forced(model, [1], implementation="reference") as forcing:
                model(input_ids=ids, use_cache=False)
        except ValueError as error:
            raise UnsupportedModel(f"{name} has an attention Sparrow cannot read: {error}") from error
        missing -= forcing.layers
    if missing:
        raise UnsupportedModel(
            f"{name} does not route layers {sorted(missing)} through the transformers attention interface, so they "
            "cannot be decoded sparsely; choose a model whose attention calls ALL_ATTENTION_FUNCTIONS with its kwargs"
        )


def _is_routed(model: PreTrainedModel) -> bool:
    return model.config.get_text_config()._attn_implementation == NAME


def _actor_of(model: PreTrainedModel) -> _Actor | None:
    return next((getattr(m, NAME) for m in model.modules() if hasattr(m, NAME)), None)


def sparse_calls(model: PreTrainedModel) -> int:
    """Attention calls that ``model`` has decoded sparsely since its schedule was set."""
    actor = _actor_of(model)
    return actor.sparse_calls if actor else 0


@contextlib.contextmanager
def dense_steps(model: PreTrainedModel) -> Iterator[None]:
    """Decode steps of ``model`` inside the context attend to everything, whatever its schedule says.

    Raises ConfigError: the model has no schedule.
    """
    actor = _actor_of(model)
    if actor is None:
        raise ConfigError("dense_steps needs a model prepared with sparrow.model.actor.set_schedule(model, schedule)")
    actor.dense = True
    try:
        yield
    finally:
        actor.dense = False


@contextlib.contextmanager
def teacher_forced(
    model: PreTrainedModel,
    prompt_lengths: Sequence[int] | Tensor,
    schedule: SparsitySchedule | None = None,
    implementation: attention.Implementation | None = None,
) -> Iterator[_TeacherForcing]:
    """Forward passes of ``model`` inside the context compute what step-by-step sparse decoding would have.

    Every position from ``prompt_lengths[b]`` on reads exactly the pages that a decode step there selects;
    the prompt attends densely. Gradients flow, and may be taken after the context has ended.

    Args:
        model: a model that ``set_schedule`` was called on.
        prompt_lengths: ``[B]`` prompt tokens of each row, padding not counted.
        schedule: another schedule than the one the model decodes under.
        implementation: what computes the attention (see ``sparrow.attention.teacher_forced``); unset, ``triton`` for
            a model on a CUDA device and ``reference`` elsewhere. The context's value says which: ``.implementation``.

    Raises ConfigError: the model has no schedule.
    """
    actor = _actor_of(model)
    if actor is None or not _is_routed(model):
        raise ConfigError(
            "teacher_forced needs a model prepared with sparrow.model.actor.set_schedule(model, schedule)"
        )
    if implementation is None:
        implementation = "triton" if model.device.type == "cuda" else "reference"
    forcing = _TeacherForcing(_Actor(schedule) if schedule else actor, torch.as_tensor(prompt_lengths), implementation)
    decoder = model.get_decoder()
    handle = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "teacher_forcing": forcing}), with_kwargs=True
    )
    try:
        yield forcing
    finally:
        handle.remove()


def keep_attention() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """A ``context_fn`` for gradient checkpointing: what teacher-forced attention computes once is not computed again.

    It is the dearest part of a sparse layer, and its result and pages are a small part of what the layer would store.
    """
    kept: list[Any] = []
    return _sharing(kept), _sharing(kept)


@contextlib.contextmanager
def _sharing(kept: list[Any]) -> Iterator[None]:
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)
