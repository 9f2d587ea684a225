"""Convert a Llama model from a GGUF file to a Hugging Face checkpoint.

GGUF is llama.cpp's file format: named values, followed by tensors, most of them quantised. The
checkpoint holds the tensors' exact values, dequantised to float32. A file that can't be converted
exactly is refused. Reasons include an unsupported architecture or tokenizer, or an unexpected
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from sparrow.errors import ConfigError

# llama.cpp tensor name -> transformers name
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD = "output.weight"  # not in the file if the output head is tied to the embedding
CONTROL = 3  # token type of the special tokens that structure a chat or document


def convert(path: Path, folder: Path) -> None:
    """Convert the model in the GGUF file ``path``, along with its tokenizer, and save both to
    ``folder``.

    Raises ConfigError if the file is damaged or the model isn't supported. Raises ImportError if
    the ``gguf`` package is missing.
    """
    fields, tensors = _read(path)
    try:
        config = _config(fields, tied=HEAD not in tensors)
        tokenizer = _tokenizer(fields, config)
    except KeyError as error:
        raise ConfigError(
            f"{path} has no field {error}; use a GGUF file of a Llama model"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    save_file(_weights(path, tensors, config), folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    generation = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a file's named values, and its tensors by name."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"cannot read {path} ({error}); use a complete GGUF file") from error
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def _config(fields: Mapping[str, Any], tied: bool) -> LlamaConfig:
    _require(fields, "general.architecture", "llama")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        # The file stores a float32. Recover the intended value, the shortest decimal that rounds to
        # it.
        rms_norm_eps=float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def _tokenizer(fields: Mapping[str, Any], config: LlamaConfig) -> PreTrainedTokenizerFast:
    """Build the byte-level BPE tokenizer. Digits are split off before words, so a number after a
    space becomes a space followed by single digits.
    """
    _require(fields, "tokenizer.ggml.model", "gpt2")
    _require(fields, "tokenizer.ggml.pre", "smollm")
    _require(fields, "tokenizer.ggml.add_bos_token", False)
    pieces = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [piece for piece, kind in zip(pieces, types, strict=True) if kind == CONTROL]
    bpe.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=pieces[config.bos_token_id],
        eos_token=pieces[config.eos_token_id],
        pad_token=pieces[config.pad_token_id],
        unk_token=pieces[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=config.max_position_embeddings,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _require(fields: Mapping[str, Any], name: str, expected: Any) -> None:
    if fields[name] != expected:
        raise ConfigError(f"{name} is {fields[name]!r}; only {expected!r} can be converted")


def _weights(
    path: Path, tensors: Mapping[str, Any], config: LlamaConfig
) -> dict[str, np.ndarray[Any, Any]]:
    from gguf.quants import dequantize

    places = _places(config)
    if difference := sorted(places.keys() ^ tensors.keys()):
        kind = "lacks the tensor" if difference[0] in places else "has the unexpected tensor"
        raise ConfigError(
            f"{path} {kind} {difference[0]}; use a complete GGUF file of a Llama model"
        )
    weights = {}
    for name, place in places.items():
        try:
            weight = dequantize(tensors[name].data, tensors[name].tensor_type)
        except NotImplementedError as error:
            kind = tensors[name].tensor_type.name
            raise ConfigError(
                f"{path}: {name} is quantised as {kind}, which the package gguf cannot read; "
                "use a file quantised as Q4_1, Q8_0 or F16"
            ) from error
        if ".attn_q." in name:
            weight = _halves(weight, config.num_attention_heads)
        elif ".attn_k." in name:
            weight = _halves(weight, config.num_key_value_heads or config.num_attention_heads)
        weights[place] = np.ascontiguousarray(weight, dtype=np.float32)
    return weights


def _places(config: LlamaConfig) -> dict[str, str]:
    """Map the tensor names expected in this model's file to their names in transformers."""
    places = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in TENSORS.items()}
    if not config.tie_word_embeddings:
        places[HEAD] = "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        for ours, theirs in LAYER_TENSORS.items():
            places[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    return places


def _halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of a query or key projection for transformers.

    Rotary embeddings rotate a head's rows in pairs. llama.cpp puts the two rows of a pair next to
    each other, while transformers puts one in each half of the head.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
