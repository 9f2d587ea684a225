"""Test that grouped-query attention with repeated heads is not left to PyTorch and yields the same
logits.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import sdpa_attention

MODULES = ("repeated_heads",)
FOLDERS = ("studies/common",)


def test_repeated_heads_yield_the_same_logits_without_grouped_query_attention(study, monkeypatch):
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", lambda *_: True)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(31, (2, 20))
    stock = torch.nn.functional.scaled_dot_product_attention
    grouped = []

    def attention(*args, **named):
        grouped.append(named.get("enable_gqa", False))
        return stock(*args, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    with torch.no_grad():
        expected = model(ids).logits
        study.repeated_heads.repeat_kv_heads()
        found = model(ids).logits
    assert grouped == [True, True, False, False]
    assert found.numpy() == pytest.approx(expected.numpy(), abs=1e-5)
