"""Model sizes, which determine what a decode step reads and computes.

``ModelShape.from_config`` counts parameters from a Hugging Face config without loading the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparrow.errors import ConfigError, UnsupportedModel

DENSE_TYPES = ("llama", "mistral", "qwen2", "qwen3", "olmo3", "gemma3_text", "cohere2")
MIXTURE_TYPES = ("mixtral", "qwen3_moe", "glm4_moe")
MODEL_TYPES = DENSE_TYPES + MIXTURE_TYPES
# in a config without layer_types, every n-th layer of these models has full attention
PERIODS = {"olmo3": 4, "gemma3_text": 6, "cohere2": 4}
# models in which some layers may have a window
WINDOW_TYPES = ("mistral", "qwen2", "qwen3", *PERIODS)
TIED_TYPES = ("gemma3_text", "cohere2")  # embeddings are tied if the config doesn't say
NORMS = {"gemma3_text": 4, "cohere2": 1}  # norms per layer, if not 2
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True)
class Experts:
    """The routed experts of a mixture-of-experts model."""

    layers: int  # number of layers with experts
    count: int  # number of experts per layer
    per_token: int  # experts per layer that a token is routed to
    weights: int  # parameters per expert

    def unread(self, tokens: int) -> float:
        """Return how many expert parameters a pass over ``tokens`` tokens is expected to leave
        unread.

        This assumes uniform, independent routing. Real routers favour some experts, so a pass reads
        fewer experts than predicted.
        """
        missed = (1 - self.per_token / self.count) ** tokens
        return missed * self.layers * self.count * self.weights

    @property
    def inactive(self) -> int:
        """Number of parameters in the experts that a token is not routed to."""
        return self.layers * (self.count - self.per_token) * self.weights


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    # parameters that a decode step may read: all but an untied input embedding
    weights: int
    # parameters in an untied input embedding; a step only reads B rows of it
    embedding: int = 0
    weight_bytes: float = 2.0  # bytes per parameter
    # bytes per cached element; 1 for an fp8 cache, 1 + 1 / head_dim for an int8 cache with its
    # scales
    kv_bytes: float = 2.0
    context: int | None = None  # maximum sequence length
    output: int = 0  # parameters in the output layer; included in ``weights``
    # None for a dense model; ``weights`` includes the experts' parameters
    experts: Experts | None = None
    # indices of the layers with linear attention, which have a state in place of a KV cache
    linear_layers: tuple[int, ...] = ()
    # indices of the layers that only attend to the last ``window`` tokens, and only cache those
    window_layers: tuple[int, ...] = ()
    window: int = 0
    # linear attention state in bytes per sequence, read and written in every step
    state_bytes: float = 0.0
    # how many of an engine's GPUs cache the same KV head; above 1 if a tensor-parallel engine has
    # more GPUs than the model has KV heads
    kv_copies: int = 1

    def __post_init__(self) -> None:
        known = set(self.window_layers) & set(range(self.layers))
        if len(known) < len(self.window_layers) or (self.window > 0) != bool(known):
            raise ConfigError(
                f"window_layers of {self.name} must be different layers in 0..{self.layers - 1}, "
                "and window at least 1, or both must be left out; got "
                f"{self.window_layers} and {self.window}"
            )
        others = set(range(self.layers)) - known
        if len(others & set(self.linear_layers)) < len(self.linear_layers):
            raise ConfigError(
                f"linear_layers of {self.name} must be different layers in 0..{self.layers - 1} "
                f"without a window, got {self.linear_layers}"
            )
        if self.full_layers < 1:
            raise ConfigError(
                f"no layer of {self.name} has full attention, so sparse decoding could not save "
                "anything"
            )

    @property
    def cached_heads(self) -> int:
        """Number of KV heads that an engine caches per layer, counting every copy."""
        return self.kv_heads * self.kv_copies

    @property
    def kv_layers(self) -> int:
        """Number of layers with a KV cache."""
        return self.layers - len(self.linear_layers)

    @cached_property
    def full_layers(self) -> int:
        """Number of layers with full attention. Only these can decode sparsely."""
        return self.sparse_layers(())

    def sparse_layers(self, dense_layers: Iterable[int]) -> int:
        """Return how many layers decode sparsely if a schedule keeps ``dense_layers`` dense."""
        others = {*dense_layers, *self.window_layers, *self.linear_layers}
        return len(set(range(self.layers)) - others)

    @property
    def is_hybrid(self) -> bool:
        """True if some layers don't have full attention: their attention is linear or has a window.
        In vLLM, lossless mode doesn't support such models.
        """
        return self.full_layers < self.layers

    @property
    def layer_width(self) -> int:
        """Number of cached elements per token in a layer, counting keys and values."""
        return 2 * self.cached_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Number of elements that a new token adds to the cache, counting keys and values in all
        layers. For layers with a window, ``cached_tokens`` also counts what leaves the cache.
        """
        return self.kv_layers * self.layer_width

    def cached_tokens(self, lengths: ArrayLike) -> NDArray[np.int64]:
        """Return how many tokens sequences of ``lengths`` (any shape) cache, added up over layers.

        Layers with a window cache at most ``window`` tokens, as in vLLM's hybrid KV cache manager.
        The chunk that such a layer also holds during prefill is ignored.
        """
        length = np.asarray(lengths, dtype=np.int64)
        held = len(self.window_layers) * np.minimum(length, self.window)
        return np.asarray(self.full_layers * length + held)

    @property
    def active_weights(self) -> int:
        """Number of parameters used per token."""
        return self.weights - (0 if self.experts is None else self.experts.inactive)

    def weights_read(self, tokens: int) -> float:
        """Return how many parameters a pass over ``tokens`` tokens is expected to read."""
        return self.weights - (0 if self.experts is None else self.experts.unread(tokens))

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path) -> ModelShape:
        """Compute the shape of a model from its Hugging Face config.

        Args:
            config: the contents of a ``config.json``, its path, or the folder that contains it.

        Raises UnsupportedModel if the model has an unsupported architecture, a sliding window in
        every layer, or quantized weights. Raises ConfigError if the file does not exist or is not a
        model config, or if a field is missing or invalid.
        """
        if not isinstance(config, Mapping):
            config = _read(Path(config))
        _check(config)
        hidden, layers, heads, _, vocab = (config[key] for key in SIZES)
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        head = vocab * hidden
        attention = _attention_weights(config, heads, kv_heads, head_dim)
        mlps, experts = _mlp_weights(config)
        is_tied = config.get("tie_word_embeddings", config["model_type"] in TIED_TYPES)
        window_layers = _window_layers(config)
        return cls(
            str(config.get("_name_or_path") or config["model_type"]),
            layers,
            heads,
            kv_heads,
            head_dim,
            layers * attention + mlps + hidden + head,
            0 if is_tied else head,
            context=config.get("max_position_embeddings"),
            output=head,
            experts=experts,
            window_layers=window_layers,
            window=config["sliding_window"] if window_layers else 0,
        )


def _read(path: Path) -> Mapping[str, Any]:
    """Read a ``config.json`` from its path or from the folder that contains it."""
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"there is no model config at {path}; pass a config.json or the folder that contains it"
        )
    try:
        config = {
            "_name_or_path": path.parent.name,
            **json.loads(path.read_text(encoding="utf-8")),
        }
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a model config ({error}); expected a JSON object"
        ) from error
    if "model_type" not in config:
        raise ConfigError(
            f"{path} is not a model's config.json, because it has no 'model_type'; pass a "
            "config.json or the folder that contains it"
        )
    return config


def _check(config: Mapping[str, Any]) -> None:
    """Check that parameters can be counted for this config. Raises the same errors as
    ``ModelShape.from_config``.
    """
    kind = config.get("model_type")
    quantized = bool(config.get("quantization_config"))
    supported = kind in MODEL_TYPES and not quantized
    if supported:
        _check_sizes(config)
    windows = len(_window_layers(config)) if supported else 0
    windowed = bool(windows) and (
        windows == config["num_hidden_layers"] or kind not in WINDOW_TYPES
    )
    if not supported or windowed:
        raise UnsupportedModel(
            f"the cost model supports {', '.join(MODEL_TYPES)} without quantization, and sliding "
            f"windows only in some layers of {', '.join(WINDOW_TYPES)}, got model_type {kind!r}, "
            f"{windowed=}, {quantized=}; describe this model with your own ModelShape"
        )


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Check that sizes are complete and valid. Raises ConfigError if not."""
    required = SIZES + _expert_sizes(config)
    if config["model_type"] == "gemma3_text":
        required += ("head_dim",)
    for key in (*required, "num_key_value_heads", "head_dim"):
        value = config.get(key)
        if key in required and value is None:
            raise ConfigError(f"the model config has no {key!r}; pass a complete config.json")
        if value is not None and not _is_size(value):
            raise ConfigError(
                f"the model config's {key!r} is {value!r}, but must be an integer of at least 1"
            )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _window_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the layers with a sliding window.

    Raises ConfigError if ``layer_types`` does not describe every layer, or the window is missing.
    """
    get = config.get
    kind = config["model_type"]
    layers = range(config["num_hidden_layers"])
    is_mistral = kind == "mistral"  # these models have a sliding window by default
    found: tuple[int, ...] = ()
    if types := get("layer_types"):
        if len(types) != len(layers) or not {*types} <= {"full_attention", "sliding_attention"}:
            raise ConfigError(
                f"the model config's 'layer_types' must be full_attention or sliding_attention for "
                f"each of {len(layers)} layers, got {types}"
            )
        found = tuple(i for i in layers if types[i] == "sliding_attention")
    elif kind in PERIODS:
        period = get("sliding_window_pattern") or get("_sliding_window_pattern") or PERIODS[kind]
        found = _all_but_every(period, len(layers))
    elif get("sliding_window", is_mistral) and get("use_sliding_window", is_mistral):
        first = 0 if is_mistral else get("max_window_layers", 28)
        return tuple(layers[first:])
    if found and not _is_size(window := get("sliding_window")):
        raise ConfigError(
            f"the model config's 'sliding_window' is {window!r}, but layers with a window need an "
            "integer of at least 1"
        )
    return found


def _attention_weights(config: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int) -> int:
    """Count the parameters of a layer's attention and norms."""
    hidden = config["hidden_size"]
    kind = config["model_type"]
    qkv = (heads + 2 * kv_heads) * head_dim
    weights = hidden * (qkv + heads * head_dim + NORMS.get(kind, 2))
    if kind == "qwen2":
        weights += qkv  # biases of the query, key and value projections
    if kind == "olmo3":
        weights += (heads + kv_heads) * head_dim  # query and key norms over all heads
    elif kind in ("qwen3", "qwen3_moe", "gemma3_text") or config.get("use_qk_norm"):
        weights += 2 * head_dim
    if config.get("attention_bias"):
        weights += qkv
        if kind != "glm4_moe":
            weights += hidden
    return int(weights)


def _expert_sizes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the config fields for the number of experts, the number of experts per
    token, and the width of an expert. For a dense model, return an empty tuple.
    """
    kind = config["model_type"]
    if kind not in MIXTURE_TYPES:
        return ()
    # For some models, configs saved by transformers use a different name for this field than
    # published configs.
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    count = next((name for name in names if config.get(name) is not None), names[0])
    width = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
    return count, "num_experts_per_tok", width


def _mlp_weights(config: Mapping[str, Any]) -> tuple[int, Experts | None]:
    """Count the parameters of all MLPs, including routed experts, and describe the experts."""
    hidden, layers, _, width, _ = (config[key] for key in SIZES)
    kind = config["model_type"]
    dense = 3 * hidden * width
    if kind not in MIXTURE_TYPES:
        return layers * dense, None

    count, per_token, expert_width = (config[key] for key in _expert_sizes(config))
    mixed = layers
    if kind == "qwen3_moe":
        every = config.get("decoder_sparse_step") or 1
        plain = set(config.get("mlp_only_layers") or ())
        mixed = sum(n not in plain and (n + 1) % every == 0 for n in range(layers))
    elif kind == "glm4_moe":
        mixed -= config.get("first_k_dense_replace") or 0
    expert = 3 * hidden * expert_width
    shared = (config.get("n_shared_experts") or 0) * expert if kind == "glm4_moe" else 0
    experts = Experts(mixed, count, per_token, expert)
    router = hidden * count
    total = (layers - mixed) * dense + mixed * (count * expert + shared + router)
    return total, experts


def _all_but_every(period: int, layers: int) -> tuple[int, ...]:
    """Return the indices of all layers but every ``period``-th."""
    return tuple(i for i in range(layers) if (i + 1) % period)


SHAPES = {
    "qwen3-1.7b": ModelShape(
        "Qwen3-1.7B", 28, 16, 8, 128, 1_720_574_976, context=40960, output=311_164_928
    ),
    "qwen3-4b": ModelShape(
        "Qwen3-4B", 36, 32, 8, 128, 4_022_468_096, context=40960, output=388_956_160
    ),
    "qwen3-8b": ModelShape(
        "Qwen3-8B", 36, 32, 8, 128, 7_568_405_504, 622_329_856, context=40960, output=622_329_856
    ),
    "qwen3-14b": ModelShape(
        "Qwen3-14B", 40, 40, 8, 128, 13_990_394_880, 777_912_320, context=40960, output=777_912_320
    ),
    "qwen3-30b-a3b": ModelShape(
        "Qwen3-30B-A3B",
        48,
        32,
        4,
        128,
        30_220_957_696,
        311_164_928,
        context=40960,
        output=311_164_928,
        experts=Experts(48, 128, 8, 4_718_592),
    ),
    "qwen3-next-80b-a3b": ModelShape(
        "Qwen3-Next-80B-A3B",
        48,
        16,
        2,
        256,
        79_363_226_368,
        311_164_928,
        context=262_144,
        output=311_164_928,
        experts=Experts(48, 512, 10, 3_145_728),
        linear_layers=_all_but_every(4, 48),
        # 36 layers with 32 states of 128 x 128 in float32, and 3 inputs of 8,192 channels in bf16
        state_bytes=36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192),
    ),
    "olmo-3-7b": ModelShape(
        "Olmo-3-7B",
        32,
        32,
        32,
        128,
        6_887_272_448,
        410_738_688,
        context=65536,
        output=410_738_688,
        window_layers=_all_but_every(4, 32),
        window=4096,
    ),
    "olmo-3-32b": ModelShape(
        "Olmo-3-32B",
        64,
        40,
        8,
        128,
        31_720_098_816,
        513_423_360,
        context=65536,
        output=513_423_360,
        window_layers=_all_but_every(4, 64),
        window=4096,
    ),
    "gemma-3-27b": ModelShape(
        "Gemma-3-27B",
        62,
        32,
        16,
        128,
        27_009_346_304,
        context=131_072,
        output=1_409_630_208,
        window_layers=_all_but_every(6, 62),
        window=1024,
    ),
}
