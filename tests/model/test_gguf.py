"""Test that a GGUF file is converted back to the checkpoint it was written from, with the same
logits and token ids.
"""

import json

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sparrow.errors import ConfigError
from sparrow.model.gguf import LAYER_TENSORS, TENSORS, convert

gguf = pytest.importorskip("gguf")

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "in 1984 there were 12",
    "a  7\n\n 30x and 0.25",
    "no digits",
    "<|im_start|>user\nwas it 9?<|im_end|>",
]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Train a byte-level tokenizer on text with numbers, so that it would merge digits if they were
    not split.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True) for token in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 4, trainer)
    return made


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "own-head"])
def model(request, tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=request.param,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def write(path, model, tokenizer, quantised=None, **changed):
    """Write the model as llama.cpp would, and return the model that the file represents. Matrices
    are stored in the type ``quantised``. ``changed`` gives new values for fields, or None for
    tensors to omit.
    """
    config = model.config
    names = {f"{theirs}.weight": f"{ours}.weight" for ours, theirs in TENSORS.items()}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in LAYER_TENSORS.items():
            names[f"model.layers.{layer}.{theirs}.weight"] = f"blk.{layer}.{ours}.weight"
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = "output.weight"
    writer = gguf.GGUFWriter(path, changed.get("architecture", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed.get("pre", "smollm"))
    writer.add_token_list([piece for piece, _ in vocabulary])
    writer.add_token_types([3 if piece in CONTROL_TOKENS else 1 for piece, _ in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in merges_of(tokenizer)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    stored = {}
    for name, weight in model.state_dict().items():
        if name not in names:
            continue
        values = weight.numpy()
        kind = gguf.GGMLQuantizationType.F32
        if quantised is not None and values.ndim == 2:
            kind = quantised
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        stored[name] = torch.from_numpy(values.copy())
        for projection, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if projection in name:
                values = side_by_side(values, heads)
        if names[name] != changed.get("left_out"):
            writer.add_tensor(names[name], gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    written = LlamaForCausalLM(config).eval()
    written.load_state_dict(stored, strict=False)
    written.tie_weights()
    return written


def merges_of(tokenizer) -> list:
    return json.loads(tokenizer.to_str())["model"]["merges"]


def side_by_side(weight, heads):
    """Interleave the rows of each head: 0 1 2 ... | h h+1 h+2 ... becomes 0 h 1 h+1 2 h+2 ..."""
    head_dim = len(weight) // heads
    half = head_dim // 2
    order = [
        head * head_dim + half * (i % 2) + i // 2 for head in range(heads) for i in range(head_dim)
    ]
    return np.ascontiguousarray(weight[order])


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_converted_checkpoint_has_the_logits_of_the_original_model(
    tmp_path, model, tokenizer, kind
):
    quantised = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
    written = write(tmp_path / "model.gguf", model, tokenizer, quantised)
    convert(tmp_path / "model.gguf", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert loaded.config.rms_norm_eps == model.config.rms_norm_eps
    assert loaded.generation_config.eos_token_id == 2
    ids = torch.randint(0, model.config.vocab_size, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, written(ids).logits, rtol=0, atol=0)


def test_converted_tokenizer_produces_the_same_ids_as_the_original(tmp_path, model, tokenizer):
    write(tmp_path / "model.gguf", model, tokenizer)
    convert(tmp_path / "model.gguf", tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = loaded(text).input_ids
        assert ids == tokenizer.encode(text).ids
        assert loaded.decode(ids) == text
    # Digits are single tokens, and no token is added before the text.
    assert loaded.convert_ids_to_tokens(loaded(" 84").input_ids) == ["Ġ", "8", "4"]
    chat = [{"role": "user", "content": "no digits"}]
    rendered = loaded.apply_chat_template(chat, tokenize=False)
    assert rendered == "<|im_start|>no digits<|im_end|>"
    assert loaded(rendered).input_ids[0] == 1
    assert loaded.decode(loaded(rendered).input_ids, skip_special_tokens=True) == "no digits"
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"architecture": "qwen2"}, "general.architecture is 'qwen2'; only 'llama'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'; only 'smollm'"),
        ({"left_out": "blk.1.attn_v.weight"}, "lacks the tensor blk.1.attn_v.weight"),
    ],
)
def test_unsupported_gguf_files_raise_an_error(tmp_path, model, tokenizer, changed, reason):
    write(tmp_path / "model.gguf", model, tokenizer, **changed)
    with pytest.raises(ConfigError, match=reason):
        convert(tmp_path / "model.gguf", tmp_path / "out")


def test_truncated_file_raises_an_error(tmp_path, model, tokenizer):
    write(tmp_path / "model.gguf", model, tokenizer)
    whole = (tmp_path / "model.gguf").read_bytes()
    for length in (3, len(whole) // 2, len(whole) - 100):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cannot read .*cut\.gguf"):
            convert(tmp_path / "cut.gguf", tmp_path / "out")
