"""A Hugging Face causal language model as a sparse actor: an attention implementation named
"sparrow".

With it, a model's decode steps are sparse under a schedule, while prefill, scoring and training
stay dense without a switch: a forward pass with one query token and a cache is a decode step, and
no other is. ``generate`` knows its prompt, so it treats a last chunk of one token as prefill too; a
decoding loop outside ``generate`` uses ``dense_steps`` for that. The ``teacher_forced`` context
makes a whole-sequence forward pass compute what decoding would have computed.

Shapes: B sequences, T query tokens, S cached tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sparrow import attention
from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.model import masks, routing
from sparrow.model.generation import dense_steps, unwatch_generate, watch_generate
from sparrow.model.scoring import evaluating
from sparrow.model.state import NAME, Actor, ScheduleTable, actor_of, attention_layers
from sparrow.schedule import SparsitySchedule

__all__ = [
    "NAME",
    "ScheduleTable",
    "dense_steps",
    "keep_attention",
    "remove_schedule",
    "set_schedule",
    "sparrow_attention",
    "sparse_calls",
    "teacher_forced",
]
_KEPT: ContextVar[list[Any] | None] = ContextVar("kept", default=None)


@dataclass
class _TeacherForcing:
    """State of a teacher-forced pass; it is a keyword argument of the forward pass, so that
    recomputation for gradients sees it too.
    """

    actor: Actor
    prompt_lengths: Tensor
    # which of the implementations in ``sparrow.attention.teacher_forced`` computes the attention
    implementation: attention.Implementation
    # the layers that called the attention, and how often
    layers: Counter[int] = field(default_factory=Counter)
    modules: list[nn.Module] = field(default_factory=list)
    windows: routing.Windows | None = None  # set only while the model is tried out
    # called with each layer's number, queries, keys and scale, as they came
    watch: Callable[[int, Tensor, Tensor, float | None], None] | None = None
    # the last mask seen, which all layers of a pass share, with the shape of that pass; then the
    # rows of that mask
    _mask: tuple[Tensor | None, tuple[int, ...]] | None = None
    _rows: masks.Rows | None = None

    def rows(self, mask: Tensor | None, query: Tensor, key: Tensor) -> masks.Rows:
        """The columns in which the sequences are.

        Raises ConfigError: see ``masks.forced``; or the prompt lengths do not fit these sequences.
        """
        shape = (key.shape[0], query.shape[2], key.shape[2])
        is_same = self._mask is not None and self._mask[0] is mask and self._mask[1] == shape
        if self._rows is None or not is_same:
            self._rows = masks.forced(mask, query, key)
            self._mask = (mask, shape)
            self._check_prompts(self._rows.length_B)
        return self._rows

    def _check_prompts(self, length_B: Tensor) -> None:
        prompt = self.prompt_lengths
        if len(prompt) != len(length_B):
            raise ConfigError(
                f"teacher_forced was given prompt lengths of {len(prompt)} sequences, but "
                f"{len(length_B)} came; give one for each row"
            )
        for b in (prompt.to(length_B.device) > length_B).nonzero()[:1, 0].tolist():
            raise ConfigError(
                f"row {b} has {int(length_B[b])} tokens, but {int(prompt[b])} prompt tokens by "
                "prompt_lengths; count the prompt's tokens without padding"
            )


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
    """Attention function of the transformers attention interface; ``[B, H, T, D]`` in, ``[B, T, H,
    D]`` out.

    Raises ConfigError: a model without a schedule is at a decode step, pages cannot follow the
    mask, or ``generate`` reads several tokens after its prompt. UnsupportedModel: the attention is
    more than a softmax over keys.
    """
    routing.check_extras(module, kwargs)
    if teacher_forcing is not None:
        out = _forced(module, query, key, value, attention_mask, scaling, teacher_forcing, kwargs)
    elif query.shape[2] == 1 and key.shape[2] > 1:
        out = _decoded(module, query, key, value, attention_mask, scaling)
    else:
        _check_prefill(module, query)
        out = None
    if out is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    return out.transpose(1, 2).contiguous(), None


def _forced(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    forcing: _TeacherForcing,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """``[B, H, T, D]``, or None where the layer is dense."""
    forcing.layers[module.layer_idx] += 1
    forcing.modules.append(module)
    if forcing.windows is not None:
        forcing.windows.check(module, mask)
    if forcing.watch is not None:
        forcing.watch(module.layer_idx, query, key, scaling)

    actor = forcing.actor
    rows = forcing.rows(mask, query, key)
    if module.layer_idx in actor.schedule.dense_layers:
        return None
    if kwargs.get("dropout"):
        raise ConfigError(
            f"attention dropout of {kwargs['dropout']} while training has no counterpart in "
            "decoding; set attention_dropout=0 in the model's config"
        )

    position = torch.arange(key.shape[2], device=key.device) - rows.start_B[:, None]
    out = attention.teacher_forced(
        rows.close(query),
        rows.close(key),
        rows.close(value),
        rows.start_B,
        rows.length_B,
        forcing.prompt_lengths.to(key.device),
        actor.table.top_k((position + 1).clamp(min=1)),
        layout=actor.layout,
        scale=scaling,
        head_budgets_K=actor.table.head_budgets(module.layer_idx, key.device),
        implementation=forcing.implementation,
        kept=_KEPT.get(),
    )
    return rows.reopen(out)


def _check_prefill(module: Any, query: Tensor) -> None:
    actor: Actor | None = getattr(module, NAME, None)
    if actor is not None and actor.is_generating and not actor.schedule.is_dense:
        raise ConfigError(
            f"generate reads {query.shape[2]} tokens in a pass after its prompt, which would be "
            "dense; leave out what makes it do so (prompt tuning by a peft that does not know "
            "this transformers does), or set SparsitySchedule.dense() first"
        )


# A compiler would take what changes here for constant: count, schedule and phase.
@torch.compiler.disable
def _decoded(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor | None:
    """``[B, H, 1, D]``, or None where the step is dense."""
    actor: Actor | None = getattr(module, NAME, None)
    if actor is None:
        raise ConfigError(
            "this model decodes with attn_implementation='sparrow' but has no schedule; "
            "call sparrow.model.actor.set_schedule(model, schedule) first"
        )
    if actor.dense or module.layer_idx in actor.schedule.dense_layers:
        return None

    actor.sparse_calls += 1
    rows = masks.decoding(mask, key)
    start = rows.start_B if mask is not None and rows.order_BS is None else None
    out_BHD = attention.decode(
        query[:, :, 0],
        rows.close(key),
        rows.close(value),
        start,
        rows.length_B,
        actor.table.top_k(rows.length_B),
        layout=actor.layout,
        scale=scaling,
        head_budgets_K=actor.table.head_budgets(module.layer_idx, key.device),
    )
    return out_BHD[:, :, None]


AttentionInterface.register(NAME, sparrow_attention)
# Without a mask function, padding would be attended to.
AttentionMaskInterface.register(NAME, routing.sparrow_mask)


def set_schedule(model: PreTrainedModel, schedule: SparsitySchedule) -> None:
    """Make ``model`` decode under ``schedule``; the first call also routes its attention and checks
    that this worked.

    Routing gives the model copies of its configs, since it may share the originals with another
    model. A model that is refused is left as it was.

    Raises UnsupportedModel: the attention cannot be routed, or is not full causal self-attention in
    every layer (the linear layers of the hybrids in ``routing.HYBRIDS`` are allowed, and left as
    they are).
    ConfigError: the schedule does not match the model.
    """
    _check_model(model)
    _check_schedule(schedule, model)
    actor = actor_of(model)
    if actor is not None and actor.routed:
        _wear(model, Actor(schedule, actor.config, actor.own_attention))
        return

    windowed = routing.check_kind(model)
    give_back = routing.own_configs(model)
    try:
        _route(model, schedule, windowed)
        if windowed is not None:
            raise windowed
    except BaseException:
        give_back()
        for module in model.modules():
            vars(module).pop(NAME, None)
        raise
    watch_generate(model)


def remove_schedule(model: PreTrainedModel) -> None:
    """Undo ``set_schedule``: ``model`` computes its own attention again, also in ``generate``.

    A model without a schedule is left as it is.
    """
    actor = actor_of(model)
    if actor is None:
        return
    if actor.routed:
        model.set_attn_implementation(actor.own_attention)
    for module in model.modules():
        vars(module).pop(NAME, None)
    unwatch_generate(model)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ConfigError(
            f"the model is {'None' if model is None else f'a {type(model).__name__}'}, not a "
            "model of transformers; give the model that decodes"
        )


def _check_schedule(schedule: SparsitySchedule, model: PreTrainedModel) -> None:
    if not isinstance(schedule, SparsitySchedule):
        raise ConfigError(
            f"the schedule is {schedule!r}, not a SparsitySchedule; SparsitySchedule.load makes "
            "one of a name or a file"
        )
    config = model.config.get_text_config()
    kv_heads = 0
    if schedule.head_budgets:  # else nobody asks for heads, which not every config has
        if len(attention_layers(config)) < config.num_hidden_layers:
            raise ConfigError(
                f"{type(model).__name__} has layers without attention, which the mean of "
                "head_budgets would count; use a schedule without them"
            )
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    schedule.check_model(config.num_hidden_layers, kv_heads)


def _wear(model: PreTrainedModel, actor: Actor) -> None:
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, NAME, actor)


def _route(
    model: PreTrainedModel, schedule: SparsitySchedule, windowed: UnsupportedModel | None
) -> None:
    """Route the attention, then push a few tokens through the model's own attention and through
    Sparrow's.

    Raises UnsupportedModel: the two differ; a layer does not call Sparrow's attention exactly once;
    or layers look back through a window, unless ``windowed`` is that refusal already.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    ids = torch.arange(8, device=model.device)[None] % config.vocab_size
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    own = routing.LayerPass()
    dense = routing.LayerPass()
    covering = routing.LayerPass()
    if config._attn_implementation == NAME:  # it was loaded with Sparrow's, or its layers are new
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    own_attention = config._attn_implementation

    calls: Counter[int] = Counter()
    modules: list[nn.Module] = []
    with evaluating(model):
        with own.watch(layers):
            model(input_ids=ids, use_cache=False)
        model.set_attn_implementation(NAME)
        _wear(model, Actor(schedule, config, own_attention))
        if layers and config._attn_implementation == NAME:
            try:
                with (
                    covering.watch(layers, like=own),
                    routing.trying(windows=windowed is None) as windows,
                ):
                    every_page = SparsitySchedule.dense(dense_layers=())
                    with _forcing(model, [1], every_page, "reference") as forcing:
                        forcing.windows = windows
                        model(input_ids=ids, use_cache=False)
                with dense.watch(layers, like=own):
                    model(input_ids=ids, use_cache=False)
            except (UnsupportedModel, torch.OutOfMemoryError):
                raise
            except Exception as error:  # the model's own pass over the same tokens raised nothing
                if windowed is not None and isinstance(error, ConfigError):
                    raise windowed from None  # the window is shorter than ``ids``
                cause, _, _ = str(error).partition("; ")  # what follows is advice on inputs
                raise UnsupportedModel(
                    f"{name} has an attention Sparrow cannot read: {cause}; choose a model whose "
                    "attention is a causal softmax over keys alone"
                ) from error
            calls = forcing.layers
            modules = forcing.modules

    if missing := attention_layers(config) - set(calls):
        raise UnsupportedModel(
            f"{name} does not route layers {sorted(missing)} through the transformers attention "
            "interface, so they cannot be decoded sparsely; choose a model whose attention calls "
            "ALL_ATTENTION_FUNCTIONS with its kwargs"
        )
    if often := [i for i, count in calls.items() if count > 1]:
        raise UnsupportedModel(
            f"{name} computes attention {calls[often[0]]} times in layer {often[0]}, but Sparrow "
            "selects pages once a layer; choose a model whose layers compute it once"
        )
    own.check_same(dense, modules, name, "Sparrow's when dense")
    own.check_same(covering, modules, name, "Sparrow's with every page")


def sparse_calls(model: PreTrainedModel) -> int:
    """The number of attention calls of ``model`` that were sparse decode steps since its schedule
    was set.
    """
    actor = actor_of(model)
    return actor.sparse_calls if actor else 0


@contextlib.contextmanager
def teacher_forced(
    model: PreTrainedModel,
    prompt_lengths: Sequence[int] | Tensor,
    schedule: SparsitySchedule | None = None,
    implementation: attention.Implementation | None = None,
) -> Iterator[_TeacherForcing]:
    """Inside the context, forward passes of ``model`` compute what step-by-step sparse decoding
    would have computed.

    Every position from ``prompt_lengths[b]`` on reads exactly the pages that a decode step there
    selects; the prompt attends densely. Gradients flow, and may be taken after the context has
    ended. A compiled model runs uncompiled inside, because a compiler would reuse one context's
    pass in the next.

    Args:
        model: a model that ``set_schedule`` was called on.
        prompt_lengths: ``[B]`` prompt tokens of each row, without padding but with virtual tokens
            of prompt tuning.
        schedule: used instead of the schedule that the model decodes under.
        implementation: what computes the attention (see ``sparrow.attention.teacher_forced``); if
            unset, ``triton`` for a model on a CUDA device and ``reference`` elsewhere. The
            context's value has the choice as ``.implementation``.

    Raises ConfigError: the model has no schedule; the prompt lengths are not one whole number for
    each row, or exceed its tokens; sequences are packed, or a mask is not causal for another
    reason; at the end, if no pass went through some of the layers.
    """
    _check_model(model)
    actor = actor_of(model)
    if actor is None or not actor.routed:
        raise ConfigError(
            "teacher_forced needs a model prepared with set_schedule(model, schedule)"
        )

    with _forcing(model, prompt_lengths, schedule, implementation) as forcing:
        yield forcing

    if missing := attention_layers(actor.config) - set(forcing.layers):
        raise ConfigError(
            f"no pass through layers {sorted(missing)} was teacher-forced; "
            "inside the context call the model that set_schedule was "
            "called on, not a copy or an exported or captured form of it"
        )


@contextlib.contextmanager
def _forcing(
    model: PreTrainedModel,
    prompt_lengths: Sequence[int] | Tensor,
    schedule: SparsitySchedule | None,
    implementation: attention.Implementation | None,
) -> Iterator[_TeacherForcing]:
    actor = actor_of(model)
    assert actor is not None
    if schedule is not None:
        _check_schedule(schedule, model)
        actor = Actor(schedule, actor.config, actor.own_attention)
    if implementation is None:
        implementation = "triton" if model.device.type == "cuda" else "reference"
    forcing = _TeacherForcing(actor, _whole(prompt_lengths), implementation)
    decoder = model.get_decoder()
    handle = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "teacher_forcing": forcing}),
        with_kwargs=True,
    )
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code does not look for new hooks
            yield forcing
    finally:
        handle.remove()


def _whole(prompt_lengths: Sequence[int] | Tensor) -> Tensor:
    try:
        lengths = torch.as_tensor(prompt_lengths)
    except (TypeError, ValueError, RuntimeError):
        lengths = torch.empty(0, 0)
    kind = lengths.dtype
    is_whole = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
    if lengths.dim() != 1 or not is_whole or bool((lengths < 0).any()):
        raise ConfigError(
            f"prompt_lengths must be one whole number from 0 for each row, got {prompt_lengths!r}; "
            "count the prompt tokens of each row"
        )
    return lengths


def keep_attention() -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    """A ``context_fn`` for gradient checkpointing that keeps teacher-forced attention from being
    computed twice.

    Attention is the most expensive part of a sparse layer, and its result and pages are little of
    what the layer would store.
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
