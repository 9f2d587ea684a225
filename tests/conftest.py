"""Tiny random models that the whole suite shares."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97
SMALL = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=1024, initializer_range=0.3, attn_implementation="sdpa",
)  # fmt: skip
ARCHITECTURES = {
    "qwen3-gqa": (Qwen3ForCausalLM, Qwen3Config, dict(num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)),
    "llama-mha": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=4)),
    "qwen2-gqa": (Qwen2ForCausalLM, Qwen2Config, dict(num_key_value_heads=2)),
    "mistral-mqa": (MistralForCausalLM, MistralConfig, dict(num_key_value_heads=1, sliding_window=None)),
}


def tiny_model(name: str = "qwen3-gqa", seed: int = 0, **changes) -> PreTrainedModel:
    """A random float32 model whose attention is sharp enough that leaving pages out changes its output."""
    model_class, config_class, own = ARCHITECTURES[name]
    torch.manual_seed(seed)
    return model_class(config_class(**{**SMALL, **own, **changes})).eval()


@pytest.fixture(params=list(ARCHITECTURES))
def architecture(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """The folder of a tiny random model that reads and writes the bundled tasks."""
    from sparrow.tasks import build_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = build_tokenizer()
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def fails(capsys, *argv: str, code: int = 1) -> str:
    """Why a command ends with ``code``: the last thing on stderr, in one line."""
    from sparrow.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == code
    _, mark, reason = " ".join(capsys.readouterr().err.split()).rpartition("sparrow: ")
    return mark + reason
