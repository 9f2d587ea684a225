"""Fixtures with tiny random models for all tests, and the option ``--all``, which also runs slow
tests.
"""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
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
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

LIMIT_S = 30.0
"""A test that is not marked ``slow`` fails if it takes more than this many seconds of processor
time. The slowest of these tests takes a third of the limit, which leaves room for slow machines.
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
    "qwen3-mixture": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        dict(
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            norm_topk_prob=True,
        ),
    ),
}


# On a busy machine, any example may exceed a limit on wall-clock time, as may drawing it.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

ONE_THREAD = "PYTEST_XDIST_WORKER" in os.environ
"""With ``-n``, several processes share the machine. Use one thread in each, because more threads
would only wait for each other.
"""

if ONE_THREAD:
    torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the tests that are marked slow too")


def pytest_collection_modifyitems(config, items):
    """Skip slow tests unless ``--all`` is given or tests are selected by name."""
    if config.getoption("all") or any("::" in argument for argument in config.args):
        return

    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail any test that should be marked slow but isn't. The limit applies to processor time,
    including that of child processes, because it doesn't depend on how busy the machine is, unless
    threads busy-wait for each other.
    """
    before = sum(os.times()[:4])
    result = yield
    used = sum(os.times()[:4]) - before
    if ONE_THREAD and used > LIMIT_S and not item.get_closest_marker("slow"):
        pytest.fail(
            f"took {used:.0f} s of processor time; make it faster, or mark it slow", pytrace=False
        )
    return result


def tiny_model(name: str = "qwen3-gqa", seed: int = 0, **changes) -> PreTrainedModel:
    """Return a random float32 model whose attention is sharp enough that skipping pages changes the
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
    """Return the folder of a tiny random model with the tokenizer of the bundled tasks."""
    from sparrow.tasks import build_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = build_tokenizer()
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_bytewise(folder: Path, initializer_range: float) -> str:
    """Save a tiny random model with a byte-level tokenizer, which can read any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocabulary)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    model = tiny_model(
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        initializer_range=initializer_range,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def reading_checkpoint(tmp_path_factory) -> str:
    """Return the folder of a byte-level model whose distributions are nearly flat, so that most
    drafts are accepted.
    """
    return save_bytewise(tmp_path_factory.mktemp("reading"), initializer_range=0.02)


@pytest.fixture(scope="session")
def peaked_checkpoint(tmp_path_factory) -> str:
    """Return the folder of a byte-level model whose token lists contain nearly all the probability
    mass.
    """
    return save_bytewise(tmp_path_factory.mktemp("peaked"), initializer_range=0.3)


def fails(capsys, *argv: str, code: int = 1) -> str:
    """Check that a command exits with ``code``, and return its last message on stderr as one
    line.
    """
    from sparrow.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == code
    _, mark, reason = " ".join(capsys.readouterr().err.split()).rpartition("sparrow: ")
    return mark + reason
