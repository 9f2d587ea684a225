"""Turn a Hugging Face causal language model into a sparse actor, using an attention implementation
named "sparrow".

Decode steps then follow a sparsity schedule, while prefill, scoring and training stay dense.
There's no switch to flip: a forward pass counts as a decode step if it has a cache and a single
query token (or several, inside ``steps_of_several``). But the last chunk of a prompt can be a
single token too. ``generate`` handles this case itself; any other decoding loop must read the
prompt inside ``dense_steps``. Inside ``teacher_forced``, a forward pass over whole sequences
computes what decoding would have computed.

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
from sparrow.model.state import (
    NAME,
    Actor,
    ScheduleTable,
    actor_of,
    attention_layers,
    check_head_budgets,
)
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
    """State of a teacher-forced pass. It's passed to the model as a keyword argument, so that
    gradient checkpointing recomputes with the same state.
    """

    actor: Actor
    prompt_lengths: Tensor
    # which implementation of ``sparrow.attention.teacher_forced`` to use
    implementation: attention.Implementation
    tokens: int = 1  # tokens per decode step
    # attention calls per layer
    layers: Counter[int] = field(default_factory=Counter)
    modules: list[nn.Module] = field(default_factory=list)
    windows: routing.Windows | None = None  # only set while checking the model
    # called with each layer's index, queries, keys and scale
    watch: Callable[[int, Tensor, Tensor, float | None], None] | None = None
    # the mask and pass shape that ``_rows`` was computed for; all layers of a pass share a mask
    _mask: tuple[Tensor | None, tuple[int, ...]] | None = None
    _rows: masks.Rows | None = None

    def rows(self, mask: Tensor | None, query: Tensor, key: Tensor) -> masks.Rows:
        """Return the columns that hold each row's tokens.

        Raises ConfigError if the prompt lengths don't match the sequences, or ``masks.forced``
        refuses the pass.
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
                f"teacher_forced got {len(prompt)} prompt lengths for a pass over "
                f"{len(length_B)} sequences; pass one prompt length per row"
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
    """Compute attention for the transformers attention interface. Takes ``[B, H, T, D]`` inputs and
    returns ``[B, T, H, D]``.

    Raises ConfigError if a decode step's model has no schedule, the mask rules out page selection,
    or ``generate`` reads several tokens in one pass after the prompt. Raises UnsupportedModel if
    the attention isn't a plain softmax over keys.
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
    actor = forcing.actor
    if module.layer_idx not in actor.attention_layers:
        return None
    if forcing.windows is not None:
        forcing.windows.check(module, mask)
    if forcing.watch is not None:
        forcing.watch(module.layer_idx, query, key, scaling)

    rows = forcing.rows(mask, query, key)
    if module.layer_idx not in actor.sparse_layers:
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
            f"after the prompt, generate computes {query.shape[2]} tokens in one pass, which "
            "would be dense; remove the cause (for example, prompt tuning with a version of "
            "peft that does not support this version of transformers), or set "
            "SparsitySchedule.dense() first"
        )


# torch.compile would bake in the call count, the schedule and the phase as constants.
@torch.compiler.disable
def _decoded(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor | None:
    """Compute a sparse decode step ``[B, H, T, D]``, or return None if the step or the layer is
    dense.
    """
    actor: Actor | None = getattr(module, NAME, None)
    if actor is None:
        raise ConfigError(
            "the model decodes with attn_implementation='sparrow' but has no schedule; "
            "call sparrow.model.actor.set_schedule(model, schedule) first"
        )
    if actor.dense or module.layer_idx not in actor.sparse_layers:
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
    through Sparrow and checks that this works.

    Routing gives the model its own copies of its configs, since other models may share the
    originals. If the model is refused, it's left unchanged.

    Layers that the config calls full attention follow the schedule. Sliding-window layers, and
    the linear layers of the hybrid models in ``routing.HYBRIDS``, keep computing what the model
    defines.

    Raises UnsupportedModel if the attention can't be routed, no layer has full attention, or a
    layer that should have it doesn't compute full causal self-attention. Raises ConfigError if the
    schedule doesn't fit the model.
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
    """Undo ``set_schedule``, so that ``model`` goes back to its own attention and its own
    ``generate``.

    This does nothing to a model without a schedule.
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
    # Only head budgets need the number of heads, and not every config has it.
    if schedule.head_budgets:
        check_head_budgets(model)
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    schedule.check_model(config.num_hidden_layers, kv_heads)


def _wear(model: PreTrainedModel, actor: Actor) -> None:
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, NAME, actor)


def _route(
    model: PreTrainedModel, schedule: SparsitySchedule, windowed: UnsupportedModel | None
) -> None:
    """Route the attention, then check on a few tokens that Sparrow's output matches the model's
    own.

    Raises UnsupportedModel if the outputs differ, or a full-attention layer doesn't call Sparrow's
    attention exactly once or has a sliding window. Sliding windows are not checked if ``windowed``
    already reports one.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    ids = torch.arange(8, device=model.device)[None] % config.vocab_size
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    own = routing.LayerPass()
    dense = routing.LayerPass()
    covering = routing.LayerPass()
    # The model was loaded with Sparrow's attention, or was given new layers later.
    if config._attn_implementation == NAME:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    own_attention = config._attn_implementation
    selecting = attention_layers(config)
    if windowed is not None:  # its advice would give every layer full attention
        selecting = set(range(config.num_hidden_layers))

    calls: Counter[int] = Counter()
    modules: list[nn.Module] = []
    with evaluating(model), routing.full_precision():
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
            # Sparrow must have raised this error: the model's own pass over the same tokens went
            # fine.
            except Exception as error:
                if windowed is not None and isinstance(error, ConfigError):
                    raise windowed from None  # the window is shorter than ``ids``
                # Drop the rest of the message, which gives advice on the inputs.
                cause, _, _ = str(error).partition("; ")
                raise UnsupportedModel(
                    f"{name} uses a form of attention that Sparrow does not support: {cause}; choose "
                    "a model with plain causal softmax attention"
                ) from error
            calls = forcing.layers
            modules = forcing.modules

    if missing := selecting - set(calls):
        raise UnsupportedModel(
            f"{name} does not route layers {sorted(missing)} through the transformers attention "
            "interface, so they cannot be decoded sparsely; choose a model whose attention passes "
            "its kwargs to a function from ALL_ATTENTION_FUNCTIONS"
        )
    if often := [i for i, count in calls.items() if count > 1 and i in selecting]:
        raise UnsupportedModel(
            f"{name} computes attention {calls[often[0]]} times in layer {often[0]}, but Sparrow "
            "selects pages once per layer; choose a model whose layers compute attention once"
        )
    own.check_same(dense, modules, name, "Sparrow's dense output")
    # In this pass, window layers had smaller windows than their own.
    modules = [module for module in modules if module.layer_idx in selecting]
    own.check_same(covering, modules, name, "Sparrow's output with every page")


def sparse_calls(model: PreTrainedModel) -> int:
    """Return how many sparse attention calls ``model`` has made in decode steps since its schedule
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
    """Inside the context, forward passes of ``model`` compute what step-by-step sparse decoding
    would have computed.

    From ``prompt_lengths[b]`` on, each position of a full-attention layer reads exactly the pages
    that a decode step would select there, while the prompt attends densely. The result is
    differentiable, and backward may run after the context has ended. Compiled models run uncompiled
    inside the context, because compiled code would carry one context's state over into the next.

    Args:
        model: a model that ``set_schedule`` was called on.
        prompt_lengths: number of prompt tokens per row, ``[B]``. Padding doesn't count, but virtual
            tokens from prompt tuning do.
        schedule: the schedule to use; defaults to the schedule that the model decodes under.
        implementation: which attention implementation to use (see
            ``sparrow.attention.teacher_forced``); defaults to ``triton`` if the model is on a CUDA
            device and ``reference`` otherwise. The context yields an object whose
            ``.implementation`` is the one in use.
        tokens: number of tokens per decode step, if steps read several (see ``steps_of_several``).
            The first step starts right after the prompt.

    Raises ConfigError if the model has no schedule, the mask isn't causal (for example because
    sequences are packed), or the prompt lengths don't fit. Lengths must be one whole number per
    row, at most the row's length. On exit, raises ConfigError if some full-attention layers weren't
    part of any pass.
    """
    _check_model(model)
    actor = actor_of(model)
    if actor is None or not actor.routed:
        raise ConfigError(
            "teacher_forced needs a model prepared with set_schedule(model, schedule)"
        )

    with _forcing(model, prompt_lengths, schedule, implementation, tokens) as forcing:
        yield forcing

    if missing := actor.attention_layers - set(forcing.layers):
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
        # Compiled code would ignore the hook.
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
            "prompt_lengths must contain an integer of at least 0 for each row, got "
            f"{prompt_lengths!r}; count the prompt tokens of each row"
        )
    return lengths


def keep_attention() -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    """Keep gradient checkpointing from computing teacher-forced attention twice. Pass this function
    as the ``context_fn`` of checkpointing. It returns the contexts for a layer's forward pass and
    recomputation.

    Attention is the most expensive part of a sparse layer to recompute. Keeping the attention's
    result and pages takes little memory compared with not checkpointing the layer.
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
