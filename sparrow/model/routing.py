"""Check whether a model's attention can be routed through Sparrow, by reading the config and by
comparing the outputs of Sparrow's attention with the model's own.

A refused model is left unchanged. The check only changes copies of the model's configs, and puts
the originals back.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from sparrow.errors import UnsupportedModel
from sparrow.model.scoring import evaluating

# Extra arguments that some models pass to their attention, and what they mean.
EXTRAS = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "a soft cap",
    "position_bias": "a position bias",
    "indices": "a selection of its own",
    "block_indices": "a selection of its own",
    "cache": "a paged cache",
}
# Sparrow's output may differ from the model's own by this much, relative to the largest entry of
# the model's output. The two attention implementations sum in different orders, so their outputs
# are never exactly equal.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
HALF_TOLERANCE = 3e-2
# Use at most this many tokens to compare a model with and without a config change.
TRIED_TOKENS = 64

# Models whose linear layers may be left alone. These are gated delta nets, which only need a mask
# for the prompt.
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def check_extras(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse attention that isn't a plain softmax over keys.

    Raises UnsupportedModel if an attention call's ``kwargs`` include something that Sparrow would
    ignore.
    """
    extra = [name for name in EXTRAS if kwargs.get(name) is not None]
    if extra:
        raise UnsupportedModel(
            f"{type(module).__name__} passes {EXTRAS[extra[0]]} ({extra[0]}) to its attention, "
            "and Sparrow's attention would ignore it; choose a model with plain softmax attention"
        )


def check_kind(model: PreTrainedModel) -> UnsupportedModel | None:
    """Check the config for full causal self-attention in some layers, and for nothing in the other
    layers but kinds that may be left alone: sliding windows or, in a hybrid model, linear
    attention.

    Returns None, or an error that suggests a config change. The caller should raise this error only
    if nothing else is wrong with the model, because otherwise the change wouldn't help.

    Raises UnsupportedModel if the model is an encoder-decoder, or has other kinds of layers that no
    config change can fix.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{name} is an encoder-decoder; choose a causal language model, the only kind that "
            "Sparrow decodes"
        )

    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None) or getattr(
        config, "attention_chunk_size", None
    )
    change: dict[str, Any] = {"layer_types": ["full_attention"] * config.num_hidden_layers}
    if not kinds and window and getattr(config, "use_sliding_window", True):
        kinds = {"sliding_attention"}
        change = {"sliding_window": None}
    if "full_attention" in kinds:
        kinds -= {"full_attention", "sliding_attention"}
        if getattr(config, "model_type", None) in HYBRIDS:
            kinds -= {"linear_attention"}
    if not kinds:
        return None

    windowed = kinds <= {"sliding_attention", "chunked_attention"}
    size = f" (window {window})" if windowed else ""
    sentence = (
        f"{name} has layers of the kind {', '.join(sorted(kinds))}{size}, but Sparrow only "
        "selects pages in layers with full attention; choose a model with full attention in "
        "every layer"
    )
    if not windowed or not window or not _computes_same(model, change, window):
        raise UnsupportedModel(sentence)
    setting = (
        "sliding_window=None" if "sliding_window" in change else "layer_types all 'full_attention'"
    )
    return UnsupportedModel(
        f"{sentence}, or load this model with {setting} in its "
        "config if sequences stay shorter than the window"
    )


@torch.no_grad()
def _computes_same(model: PreTrainedModel, change: dict[str, Any], window: int) -> bool:
    """Check whether the model's output stays the same if ``change`` is applied to its config. The
    test sequence fits in the window.

    Often, the output changes. In Cohere 2, EXAONE 4 and Gemma 3, for example, a layer's rotary
    embedding also depends on the kind of layer.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    ids = torch.arange(min(window, TRIED_TOKENS), device=model.device)[None] % text.vocab_size
    try:
        changed_text = type(text).from_dict({**text.to_dict(), **change})
        if config is text:
            config = changed_text
        for name, value in list(vars(config).items()):
            if value is text:
                setattr(config, name, changed_text)
        # skip initialisation, since the model's own weights get loaded
        with init_empty_weights(include_buffers=False):
            changed = type(model)._from_config(
                config, attn_implementation=model.config._attn_implementation
            )
        changed.load_state_dict(model.state_dict(), assign=True)
        changed.tie_weights()
        with evaluating(model):
            own = model(input_ids=ids, use_cache=False).logits.float()
        found = changed.to(model.device).eval()(input_ids=ids, use_cache=False).logits.float()
    except Exception:  # the config does not allow the change, or the model cannot be rebuilt
        return False

    tolerance = TOLERANCE.get(model.dtype, HALF_TOLERANCE)
    return torch.allclose(own, found, rtol=0, atol=tolerance * float(own.abs().max()))


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32 inside the context, even if the program allows TF32 or
    bfloat16.
    """
    mkldnn: Any = torch.backends.mkldnn  # its type lacks the attribute
    backends = torch.backends.cuda.matmul, mkldnn.matmul
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


class Windows:
    """Masks created for sliding-window layers while a model is checked, and their window sizes.
    Layers that the config calls full attention must not use them.
    """

    def __init__(self) -> None:
        self.made: list[tuple[Tensor, int]] = []

    def check(self, module: nn.Module, mask: Tensor | None) -> None:
        """Raise UnsupportedModel if the full-attention layer ``module`` uses one of these masks."""
        for windowed, size in self.made:
            if mask is windowed:
                raise UnsupportedModel(
                    f"{type(module).__name__} has a sliding window of {size} tokens in layer "
                    f"{module.layer_idx}, but Sparrow only selects pages in layers with full "
                    "attention; choose a model with full attention in every layer"
                )


_WINDOWS: ContextVar[Windows | None] = ContextVar("windows", default=None)


@contextlib.contextmanager
def trying(windows: bool) -> Iterator[Windows | None]:
    """If ``windows`` is true, shrink sliding windows to two tokens inside the context, so that they
    make a difference even on the shortest input.
    """
    record = Windows() if windows else None
    token = _WINDOWS.set(record)
    try:
        yield record
    finally:
        _WINDOWS.reset(token)


def sparrow_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Create an attention mask for the transformers mask interface. Sparrow uses the same masks as
    ``sdpa``.
    """
    windows = _WINDOWS.get()
    size = kwargs.get("local_size")
    if windows is None or size is None:
        return sdpa_mask(*args, **kwargs)
    mask = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    assert mask is not None
    windows.made.append((mask & torch.ones_like(mask).triu(-1), size))
    return windows.made[-1][0]


def own_configs(model: nn.Module) -> Callable[[], None]:
    """Give ``model`` its own copies of its configs, which other models may share. Returns a
    function that puts the originals back.
    """
    memo: dict[int, Any] = {}
    held = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    ]
    for module, name, value in held:
        setattr(module, name, copy.deepcopy(value, memo))

    def give_back() -> None:
        for module, name, value in held:
            setattr(module, name, value)

    return give_back


class LayerPass:
    """Inputs and outputs of each attention layer in a forward pass."""

    def __init__(self) -> None:
        self.given: dict[nn.Module, Tensor] = {}
        self.found: dict[nn.Module, Tensor] = {}

    @contextlib.contextmanager
    def watch(self, layers: list[nn.Module], like: LayerPass | None = None) -> Iterator[None]:
        """Record a pass. If ``like`` is given, feed each layer its hidden states from that earlier
        pass, so that differences don't accumulate.
        """

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if like is not None and module in like.given:
                hidden = like.given[module]
                if args:
                    args = (hidden, *args[1:])
                else:
                    kwargs = {**kwargs, "hidden_states": hidden}
            elif isinstance(hidden, Tensor):
                self.given[module] = hidden
            return args, kwargs

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.found[module] = output[0] if isinstance(output, tuple) else output

        handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in layers]
        handles += [m.register_forward_hook(after) for m in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def check_same(
        self, other: LayerPass, layers: Iterable[nn.Module], name: str, what: str
    ) -> None:
        """Compare the outputs of ``layers``.

        Raises UnsupportedModel if they differ by more than summation order can explain.
        """
        for module in layers:
            own = self.found[module].float()
            ours = other.found[module].float()
            tolerance = TOLERANCE.get(self.found[module].dtype, HALF_TOLERANCE)
            if not torch.allclose(
                own, ours, rtol=0, atol=tolerance * float(own.abs().max()), equal_nan=True
            ):
                raise UnsupportedModel(
                    f"{name} does not compute causal attention to all tokens in layer "
                    f"{module.layer_idx}: its own output and {what} differ by up to "
                    f"{float((own - ours).abs().max()):.2g} (the largest value of its own output "
                    f"is {float(own.abs().max()):.2g}); choose a model with plain causal softmax "
                    "attention"
                )
