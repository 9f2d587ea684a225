"""Turn a Hugging Face causal language model into a sparse actor, with an attention implementation
named "sparrow".

With this implementation, the decode steps of a model are sparse under a schedule, while prefill,
scoring and training stay dense. No switch is needed, because a forward pass counts as a decode step
only if it has a cache and one query token (or several query tokens, inside ``steps_of_several``).
The final chunk of a prompt may also have only one token: ``generate`` treats such a chunk as
prefill, but any other decoding loop has to use ``dense_steps`` for it. Inside the
``teacher_forced`` context, a whole-sequence forward pass computes what decoding would have
computed.

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
from sparrow.model.generation import (
    dense_steps,
    steps_of_several,
    unwatch_generate,
    watch_generate,
)
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
    "steps_of_several",
    "teacher_forced",
]
_KEPT: ContextVar[list[Any] | None] = ContextVar("kept", default=None)


@dataclass
class _TeacherForcing:
    """State of a teacher-forced pass, which is passed to the model as a keyword argument, so that
    recomputation for gradients receives the same state.
    """

    actor: Actor
    prompt_lengths: Tensor
    # implementation of ``sparrow.attention.teacher_forced`` that computes the attention
    implementation: attention.Implementation
    tokens: int = 1  # number of tokens per decode step
    # number of attention calls by layer
    layers: Counter[int] = field(default_factory=Counter)
    modules: list[nn.Module] = field(default_factory=list)
    windows: routing.Windows | None = None  # set only while the model is checked
    # a function that is called with each layer's number, queries, keys and scale
    watch: Callable[[int, Tensor, Tensor, float | None], None] | None = None
    # the latest mask, which all layers of a pass share, and the shape of the pass; ``_rows`` are
    # computed from this mask
    _mask: tuple[Tensor | None, tuple[int, ...]] | None = None
    _rows: masks.Rows | None = None

    def rows(self, mask: Tensor | None, query: Tensor, key: Tensor) -> masks.Rows:
        """Return the columns that contain each row's sequence.

        Raises ConfigError if the prompt lengths do not match the sequences. Also raises the errors
        of ``masks.forced``.
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
                f"teacher_forced got prompt lengths for {len(prompt)} sequences, but the pass has "
                f"{len(length_B)}; pass one prompt length per row"
            )
        for b in (prompt.to(length_B.device) > length_B).nonzero()[:1, 0].tolist():
            raise ConfigError(
                f"row {b} has {int(length_B[b])} tokens, but prompt_lengths specifies "
                f"{int(prompt[b])} prompt tokens; count the prompt's tokens without padding"
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
    """Compute attention for the transformers attention interface. The inputs have the shape
    ``[B, H, T, D]``, and the output ``[B, T, H, D]``.

    Raises ConfigError if a model without a schedule reaches a decode step; the mask does not allow
    page selection; or ``generate`` reads several tokens in one pass after its prompt. Raises
    UnsupportedModel if the attention is not a plain softmax over keys.
    """
    routing.check_extras(module, kwargs)
    if teacher_forcing is not None:
        out = _forced(module, query, key, value, attention_mask, scaling, teacher_forcing, kwargs)
    elif _is_decode_step(module, query, key):
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
    """Compute teacher-forced attention ``[B, H, T, D]``, or return None if the layer is dense."""
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
            f"attention dropout is {kwargs['dropout']} during training, but decoding has no "
            "dropout; set attention_dropout=0 in the model's config"
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
        tokens=forcing.tokens,
    )
    return rows.reopen(out)


def _is_decode_step(module: Any, query: Tensor, key: Tensor) -> bool:
    T, S = query.shape[2], key.shape[2]
    actor: Actor | None = getattr(module, NAME, None)
    several = actor is not None and actor.takes_several
    return T < S and (T == 1 or several)


def _check_prefill(module: Any, query: Tensor) -> None:
    actor: Actor | None = getattr(module, NAME, None)
    if actor is not None and actor.is_generating and not actor.schedule.is_dense:
        raise ConfigError(
            f"generate computes {query.shape[2]} tokens in one pass after its prompt, and such a "
            "pass would be dense; remove the cause (for example, prompt tuning with a version of "
            "peft that does not support this version of transformers), or set "
            "SparsitySchedule.dense() first"
        )


# torch.compile would treat the call count, the schedule and the phase as constants.
@torch.compiler.disable
def _decoded(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor | None:
    """Compute a sparse decode step ``[B, H, T, D]``, or return None if the step is dense."""
    actor: Actor | None = getattr(module, NAME, None)
    if actor is None:
        raise ConfigError(
            "the model decodes with attn_implementation='sparrow' but has no schedule; "
            "call sparrow.model.actor.set_schedule(model, schedule) first"
        )
    if actor.dense or module.layer_idx in actor.schedule.dense_layers:
        return None

    actor.sparse_calls += 1
    rows = masks.decoding(mask, key)
    start = rows.start_B if mask is not None and rows.order_BS is None else None
    return attention.decode_several(
        query,
        rows.close(key),
        rows.close(value),
        start,
        rows.length_B,
        actor.table.top_k(rows.length_B - (query.shape[2] - 1)),
        layout=actor.layout,
        scale=scaling,
        head_budgets_K=actor.table.head_budgets(module.layer_idx, key.device),
    )


AttentionInterface.register(NAME, sparrow_attention)
# Without a mask function, tokens would attend to padding.
AttentionMaskInterface.register(NAME, routing.sparrow_mask)


def set_schedule(model: PreTrainedModel, schedule: SparsitySchedule) -> None:
    """Make ``model`` decode under ``schedule``. The first call also routes the model's attention
    through Sparrow, and checks the result.

    Routing gives the model its own copies of its configs, since other models may share the
    originals. If the model is refused, it is left unchanged.

    Raises UnsupportedModel if the attention cannot be routed, or is not full causal self-attention
    in every layer. (The hybrid models in ``routing.HYBRIDS`` may have linear layers, which are not
    changed.) Raises ConfigError if the schedule does not match the model.
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
    """Undo ``set_schedule``, so that ``model`` uses its own attention again, also in ``generate``.

    A model without a schedule is left unchanged.
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
            "transformers model; pass the model that decodes"
        )


def _check_schedule(schedule: SparsitySchedule, model: PreTrainedModel) -> None:
    if not isinstance(schedule, SparsitySchedule):
        raise ConfigError(
            f"the schedule is {schedule!r}, not a SparsitySchedule; use SparsitySchedule.load to "
            "get one from a name or a file"
        )
    config = model.config.get_text_config()
    kv_heads = 0
    # The number of heads is needed only for head budgets, and not every config has it.
    if schedule.head_budgets:
        if len(attention_layers(config)) < config.num_hidden_layers:
            raise ConfigError(
                f"{type(model).__name__} has layers without attention, which the mean of "
                "head_budgets would include; use a schedule without head_budgets"
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
    """Route the attention, and then compare the model's own attention with Sparrow's on a few
    tokens.

    Raises UnsupportedModel if the results differ; a layer does not call Sparrow's attention exactly
    once; or layers have a sliding window. If ``windowed`` already reports a window, windows are not
    checked again here.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    ids = torch.arange(8, device=model.device)[None] % config.vocab_size
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    own = routing.LayerPass()
    dense = routing.LayerPass()
    covering = routing.LayerPass()
    # true if the model was loaded with Sparrow's attention, or was given new layers
    if config._attn_implementation == NAME:
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
            # raised by Sparrow: the model's own pass over the same tokens succeeded
            except Exception as error:
                if windowed is not None and isinstance(error, ConfigError):
                    raise windowed from None  # the window is shorter than ``ids``
                # the rest of the message is advice on inputs
                cause, _, _ = str(error).partition("; ")
                raise UnsupportedModel(
                    f"{name} has an attention that Sparrow does not support: {cause}; choose a "
                    "model with plain causal softmax attention"
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
            "selects pages once per layer; choose a model whose layers compute attention once"
        )
    own.check_same(dense, modules, name, "Sparrow's dense output")
    own.check_same(covering, modules, name, "Sparrow's output with every page")


def sparse_calls(model: PreTrainedModel) -> int:
    """Return how many attention calls of ``model`` have been sparse decode steps since its schedule
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
    tokens: int = 1,
) -> Iterator[_TeacherForcing]:
    """Make forward passes of ``model`` inside the context compute what step-by-step sparse decoding
    would have computed.

    Every position from ``prompt_lengths[b]`` on reads exactly the pages that a decode step at that
    position selects, while the prompt attends densely. The result is differentiable, even after the
    context has ended. A compiled model runs uncompiled inside the context, because the compiled
    code would reuse the state of one context in the next.

    Args:
        model: a model that ``set_schedule`` was called on.
        prompt_lengths: ``[B]``, the number of prompt tokens in each row, excluding padding but
            including the virtual tokens of prompt tuning.
        schedule: the schedule to use; by default, the one that the model decodes under.
        implementation: the implementation of the attention (see
            ``sparrow.attention.teacher_forced``); by default, ``triton`` for a model on a CUDA
            device, and ``reference`` elsewhere. The value that the context yields has the choice in
            ``.implementation``.
        tokens: number of tokens per decode step, as in ``steps_of_several``; steps are counted from
            the end of the prompt.

    Raises ConfigError if the model has no schedule; the prompt lengths are not one whole number per
    row, or exceed the tokens of a row; sequences are packed, or a mask is not causal for another
    reason; or, at the end of the context, some layers were not part of any pass.
    """
    _check_model(model)
    actor = actor_of(model)
    if actor is None or not actor.routed:
        raise ConfigError(
            "teacher_forced needs a model prepared with set_schedule(model, schedule)"
        )

    with _forcing(model, prompt_lengths, schedule, implementation, tokens) as forcing:
        yield forcing

    if missing := attention_layers(actor.config) - set(forcing.layers):
        raise ConfigError(
            f"no pass through layers {sorted(missing)} was teacher-forced; "
            "inside the context, call the model that set_schedule was called on, not a copy of "
            "it or an exported or captured version"
        )


@contextlib.contextmanager
def _forcing(
    model: PreTrainedModel,
    prompt_lengths: Sequence[int] | Tensor,
    schedule: SparsitySchedule | None,
    implementation: attention.Implementation | None,
    tokens: int = 1,
) -> Iterator[_TeacherForcing]:
    actor = actor_of(model)
    assert actor is not None
    if schedule is not None:
        _check_schedule(schedule, model)
        actor = Actor(schedule, actor.config, actor.own_attention)
    if implementation is None:
        implementation = "triton" if model.device.type == "cuda" else "reference"
    forcing = _TeacherForcing(actor, _whole(prompt_lengths), implementation, tokens)
    decoder = model.get_decoder()
    handle = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "teacher_forcing": forcing}),
        with_kwargs=True,
    )
    try:
        # compiled code would ignore the hook that is added here
        with torch.compiler.set_stance("force_eager"):
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
            "prompt_lengths must contain a whole number of at least 0 for each row, got "
            f"{prompt_lengths!r}; count the prompt tokens of each row"
        )
    return lengths


def keep_attention() -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    """Return the two contexts of a checkpointed layer, in which teacher-forced attention is not
    computed twice. Pass this function as ``context_fn`` of gradient checkpointing.

    Attention is the most expensive part of a sparse layer to recompute, but its result and pages
    are only a small part of what the layer would store without checkpointing.
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
