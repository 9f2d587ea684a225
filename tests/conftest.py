"""Tiny random models that the whole suite shares, and ``--fast``: the tests that one runs at every
save.
"""

import os
from pathlib import Path

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

FAST_S = 10.0
"""Seconds of processor time that a test without the mark ``slow`` may take under ``--fast``; the
slow take over two.
"""

ROOT = Path(__file__).parents[1]
VOCAB = 97
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=1024,
    initializer_range=0.3,
    attn_implementation="sdpa",
)
ARCHITECTURES = {
    "qwen3-gqa": (
        Qwen3ForCausalLM,
        Qwen3Config,
        dict(num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
    ),
    "llama-mha": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=4)),
    "qwen2-gqa": (Qwen2ForCausalLM, Qwen2Config, dict(num_key_value_heads=2)),
    "mistral-mqa": (
        MistralForCausalLM,
        MistralConfig,
        dict(num_key_value_heads=1, sliding_window=None),
    ),
}


if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # the processes of ``-n`` share the machine: threads of each would only wait
    torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--fast", action="store_true", help=f"no slow tests; fail others over {FAST_S:.0f} s"
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("fast"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Processor time, of child processes too, does not depend on how busy the machine is."""
    before = sum(os.times()[:4])
    result = yield
    used = sum(os.times()[:4]) - before
    if item.config.getoption("fast") and used > FAST_S:
        pytest.fail(
            f"took {used:.0f} s of processor time: make it faster, or mark it slow", pytrace=False
        )
    return result


def tiny_model(name: str = "qwen3-gqa", seed: int = 0, **changes) -> PreTrainedModel:
    """A random float32 model whose attention is sharp enough that leaving pages out changes its
    output.
    """
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


@pytest.fixture(scope="session")
def reading_checkpoint(tmp_path_factory) -> str:
    """The folder of a tiny random model whose tokenizer reads any text, one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocabulary)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    folder = tmp_path_factory.mktemp("reading")
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096)
    model.save_pretrained(folder)
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
