"""Test the scales of an fp8 KV cache, and weights that vLLM quantises, in real vLLM engines on a
CPU.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sparrow.engines.vllm import client
from sparrow.errors import ConfigError
from sparrow.rollout import Sampling
from sparrow.vllm import control, fp8
from tests.vllm import tiny_vllm as tiny
from tests.vllm.rounded_cache import PROMPTS, agree, flat, rounded, scales_of
from tests.vllm.tiny_vllm import SMALL, UNBOUNDED, engine, logprob_gap

SAMPLED = Sampling(max_new_tokens=24, temperature=1.0, top_n=0, seed=3)


def fp8_engine(folder, schedule=SMALL, **options):
    return engine(folder, schedule, kv_cache_dtype="fp8", **options)


def kv_clipped(sparrow):
    return sparrow.rpc("sparrow_counters")[0]["kv_clipped"]


@tiny.CACHE_IN_8_BITS
@pytest.mark.slow
def test_scales_are_recomputed_for_new_weights(tmp_path, folder):
    louder = tiny.tiny_model(seed=1)
    with torch.no_grad():
        for layer in louder.model.layers:
            layer.self_attn.v_proj.weight *= 64
            layer.self_attn.k_norm.weight *= 4
    louder.save_pretrained(tmp_path)
    with fp8_engine(tmp_path) as fresh:
        expected, new = fresh.generate(PROMPTS, SAMPLED), flat(scales_of(fresh))
    with fp8_engine(folder) as sparrow:
        first, old = sparrow.generate(PROMPTS, SAMPLED), flat(scales_of(sparrow))
        assert (new > old).all()
        for in_process in (True, False):  # False: the path used by other processes
            sparrow._in_process = in_process
            sparrow.update_weights(louder.named_parameters())
            assert sparrow.describe()["kv_scales"] is None
            assert logprob_gap(sparrow.generate(PROMPTS, SAMPLED), expected) < 1e-5
            assert torch.equal(flat(scales_of(sparrow)), new) and kv_clipped(sparrow) == 0
            sparrow.update_weights(tiny.tiny_model().named_parameters())
        assert logprob_gap(sparrow.generate(PROMPTS, SAMPLED), first) < 1e-5


@tiny.CACHE_IN_8_BITS
def test_renewing_scales_requires_resetting_the_prefix_cache(folder):
    with fp8_engine(folder) as sparrow:
        first = sparrow.generate(PROMPTS, SAMPLED)
        sparrow.drop_prefixes()
        sparrow.rpc("sparrow_renew_kv_scales")
        assert logprob_gap(sparrow.generate(PROMPTS, SAMPLED), first) < 1e-5
        assert len(sparrow.generate([[7]], SAMPLED)[0]) == 24  # one token, but not the first prompt
        sparrow.rpc("sparrow_renew_kv_scales")
        with pytest.raises(
            ConfigError, match="reset the prefix cache, then call sparrow_renew_kv_scales"
        ):
            sparrow.generate(PROMPTS[2:3], SAMPLED)


@tiny.CACHE_IN_8_BITS
def test_scales_are_not_computed_from_a_single_token(folder):
    with (
        fp8_engine(folder) as sparrow,
        pytest.raises(ConfigError, match="only one token; start with prompts of two tokens"),
    ):
        sparrow.generate([[7]], SAMPLED)


@tiny.CACHE_IN_8_BITS
def test_values_beyond_the_range_are_clamped_and_counted(folder, reference, monkeypatch):
    monkeypatch.setattr(fp8, "MARGIN", 0.75)
    prompt, cached = (
        PROMPTS[2:3],
        len(PROMPTS[2]) + SAMPLED.max_new_tokens - 1,
    )  # the last token is not cached
    with fp8_engine(folder, UNBOUNDED) as sparrow:
        rollouts = sparrow.generate(prompt, SAMPLED)
        counted, scales = kv_clipped(sparrow), scales_of(sparrow)
        assert kv_clipped(sparrow) == 0  # reset by the previous call
    with rounded(scales) as seen:
        assert agree(rollouts, reference.score(rollouts, UNBOUNDED, 1.0))
    beyond = torch.zeros(2, len(scales), cached, dtype=torch.bool)  # keys, values
    for i, (layer, its_scales) in enumerate(zip(seen, scales, strict=True)):
        for which, ([x_KTD], scale_K) in enumerate(zip(layer, its_scales, strict=True)):
            largest_K = x_KTD[:, : len(prompt[0])].abs().amax((1, 2))  # only the prompt sets them
            assert torch.equal(scale_K, (0.75 * largest_K / 448).log2().ceil().exp2())
            beyond[which, i] = (x_KTD.abs().amax(2) > 448 * scale_K[:, None]).any(0)[:cached]
    assert counted == beyond.any(0).sum()
    # For some tokens, only keys exceed the range, and for others, only values do.
    assert (beyond.sum((1, 2)) < counted).all()


@pytest.mark.parametrize(
    "largest, dtype, scale",
    [
        (0.0, torch.bfloat16, 1.0),
        (112.0, torch.bfloat16, 1.0),  # 4 * 112 is 448, the largest e4m3
        (112.5, torch.bfloat16, 2.0),
        (56.0, torch.float32, 0.5),
        (1e-38, torch.bfloat16, 2.0**-60),
        (1e38, torch.bfloat16, 2.0**119),
        (1000.0, torch.float16, 16.0),
        (60_000.0, torch.float16, 128.0),  # 448 * 256 would be infinite in float16
        (
            1e-7,
            torch.float16,
            2.0**-15,
        ),  # the smallest e4m3, 2^-9, times this is the smallest float16
    ],
)
def test_scales_are_the_smallest_powers_of_two_with_headroom(largest, dtype, scale):
    assert fp8.power_of_two(torch.tensor([largest, 0.0]), dtype).tolist() == [scale, 1.0]
    assert torch.isfinite(torch.tensor(448.0 * scale).to(dtype))


def test_reads_of_tokens_stored_in_earlier_steps_are_detected():
    cache = fp8.Fp8Cache(torch.device("cpu"))
    table = torch.tensor([[3, 4, 0], [3, 7, 9]], dtype=torch.int32)
    slots = torch.cat([torch.arange(48, 80), torch.arange(112, 128)])  # blocks 3, 4 and 7
    for computed, beyond in (
        ([0, 0], False),
        ([0, 16], False),
        ([0, 32], False),
        ([0, 33], True),
        ([0, 48], True),
    ):
        cache.begin_step(0, table, np.array(computed), 16)
        assert cache.reads_beyond(slots) == beyond
    # a sequence that continues in a block partly filled by an earlier step
    cache.begin_step(0, table[:1], np.array([5]), 16)
    assert cache.reads_beyond(torch.tensor([53]))


def test_quantised_weights_are_sent_in_one_file(monkeypatch):
    monkeypatch.setattr(client, "CHUNK_BYTES", 70)
    weights = {f"w{i}": torch.randn(7, 2) for i in range(5)}
    assert sum(1 for _ in client.weight_files(weights.items())) == 3
    [held] = [load_file(path) for path in client.weight_files(weights.items(), whole=True)]
    assert held.keys() == weights.keys() and all(
        torch.equal(held[name], weights[name]) for name in weights
    )
    assert list(client.weight_files([], whole=True)) == []


Q, K, V = (f"self_attn.{x}_proj.weight" for x in "qkv")
GATE, UP, DOWN = (f"mlp.{x}_proj.weight" for x in ("gate", "up", "down"))


@pytest.mark.parametrize(
    "names, message",
    [
        ([], None),
        (["embed_tokens.weight", f"0.{DOWN}", f"1.{GATE}", f"1.{UP}"], None),
        ([f"{i}.{each}" for each in (K, V, Q) for i in range(2)], None),
        ([f"0.{Q}"], r"0.self_attn.q_proj.weight .*\['k_proj', 'v_proj'\]"),
        ([f"0.{UP}", f"1.{GATE}"], "is quantised together with"),
        (
            [f"0.{Q}", f"0.{V}", f"1.{K}", f"1.{Q}", f"1.{V}"],
            r"0.self_attn.[qv]_proj.weight .*\['k_proj'\]",
        ),
    ],
)
def test_weights_that_are_quantised_together_must_be_sent_together(names, message):
    model = SimpleNamespace(
        packed_modules_mapping={
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
    )
    weights = [(name, torch.zeros(1)) for name in names]
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with refused:
        assert list(control._whole(weights, model)) == weights
    assert list(control._whole(weights, object())) == weights  # a model without packed modules
