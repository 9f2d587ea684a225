"""Tests of the sampler for CPUs: sampled tokens have the policy's log-probs, and end where they
should.
"""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDERS = ("benchmarks", "studies/cascade")
MODULES = ("decode", "history", "samples")
REQUIRED = ("tyro",)
STOP = 2


@pytest.fixture
def policy():
    """A small policy with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        eos_token_id=STOP,
    )
    return LlamaForCausalLM(config).eval()


def check(policy, prompt, responses, most, atol):
    """Compare log-probs with those of a pass over the whole sequence, and check lengths."""
    for ids, logprobs in responses:
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.float().div(0.7).log_softmax(-1)[torch.arange(len(ids)), ids]
        np.testing.assert_allclose(logprobs, wanted, atol=atol)
        assert STOP not in ids[:-1] and (len(ids) == most or ids[-1] == STOP)


def test_sampled_tokens_have_the_policys_log_probs(study, policy):
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    policy.set_attn_implementation("grouped")
    generator = torch.Generator().manual_seed(0)
    sampled = study.decode.sample(policy, prompts, 3, 0.7, 20, STOP, generator)
    policy.set_attn_implementation("sdpa")
    assert [len(responses) for responses in sampled] == [3, 3]
    assert len({len(ids) for responses in sampled for ids, _ in responses}) > 1
    for prompt, responses in zip(prompts, sampled, strict=True):
        check(policy, prompt, responses, 20, 1e-4)


def test_samples_are_saved_without_vllm(study, policy, tmp_path, monkeypatch):
    policy.save_pretrained(tmp_path / "model")
    asked = {"letters": [[5, 6, 7], [9, 8]]}
    monkeypatch.setattr(study.samples, "prompts", lambda tokenizer, options: asked)
    monkeypatch.setattr(study.samples.AutoTokenizer, "from_pretrained", lambda model: None)
    out = tmp_path / "samples.npz"
    options = study.samples.Options(
        str(tmp_path / "model"),
        tmp_path,
        out,
        temperatures=(0.7,),
        samples=4,
        max_new_tokens=6,
        engine="transformers",
    )
    study.samples.main(options)
    for prompt, group in zip(asked["letters"], study.history.groups(out), strict=True):
        assert (group.kind, group.temperature, group.prompt) == ("letters", 0.7, prompt)
        assert len(group.responses) == 4 and group.nats > 0
