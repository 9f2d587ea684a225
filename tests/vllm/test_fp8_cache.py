"""An fp8 KV cache: real vLLM engines on CPU, against transformers with every key and value rounded to e4m3."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AttentionInterface

from sparrow.attention.pages import FP8, to_fp8
from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm import client
from sparrow.errors import ConfigError
from sparrow.model import actor
from sparrow.rollout import Sampling
from sparrow.vllm import control, fp8
from sparrow.vllm.runtime import find
from tests.vllm import tiny_vllm as tiny
from tests.vllm.tiny_vllm import SMALL, UNBOUNDED, checkpoint, engine, logprob_gap, prompts, same_tokens

PROMPTS = prompts(5, 40, 130, 300)
PROMPTS.append(PROMPTS[2])  # it reads the blocks of the other in the step that fills them
SAMPLED = Sampling(max_new_tokens=24, temperature=1.0, top_n=0, seed=3)
GREEDY = Sampling(max_new_tokens=24, temperature=0.0, top_n=0)  # log-probs are those at a temperature of 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("vllm.version")
    path = tmp_path_factory.mktemp("model")
    checkpoint(path)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    return HFEngine(tiny.tiny_model(), SMALL, eos_ids=[])


def fp8_engine(folder, schedule=SMALL, **options):
    return engine(folder, schedule, kv_cache_dtype="fp8", **options)


def scales_of(sparrow):
    """The keys' and the values' scales of every layer, ``[K]`` each."""
    layers = find(sparrow.llm.llm_engine.vllm_config).fp8_cache.layers
    return [(layer.values.k.clone(), layer.values.v.clone()) for layer in layers]


def flat(scales):
    return torch.cat([scale_K for layer in scales for scale_K in layer])


def kv_clipped(sparrow):
    return sparrow.rpc("sparrow_counters")[0]["kv_clipped"]


@contextlib.contextmanager
def rounded(scales):
    """Inside, transformers attends to keys and values that are rounded to e4m3; lists what they were, by layer.

    It is given keys as they are stored, without their scale, and queries times that scale: what landmarks in 8 bits
    are is then the same too.
    """
    seen = []

    def attend(module, query, key, value, *more, **named):
        k_scale, v_scale = (scale[:, None, None] for scale in scales[module.layer_idx])
        seen.append((key, value))
        query = query * k_scale.repeat_interleave(query.shape[1] // key.shape[1], 0)
        key, value = to_fp8(key / k_scale).float(), to_fp8(value / v_scale).float() * v_scale
        return actor.sparrow_attention(module, query, key, value, *more, **named)

    AttentionInterface.register(actor.NAME, attend)
    try:
        yield seen
    finally:
        AttentionInterface.register(actor.NAME, actor.sparrow_attention)


def gaps(a, b):
    return np.concatenate([np.abs(x.logprobs - y.logprobs) for x, y in zip(a, b, strict=True)])


def agree(a, b, few=0.0):
    """Whether log-probs are the same, up to numbers so close between two e4m3 values that 1e-7 rounds them apart.

    A batch of these prompts has 400,000 keys and values, so that a few are. Tokens that read one differ by 1e-3, the
    others by 1e-5; where a page was selected by it, a ``few`` differ by more. Without rounding the median is 0.05.
    """
    apart = gaps(a, b)
    return bool(np.quantile(apart, 0.5) < 5e-4 and np.quantile(apart, 1 - few) < 1e-2)


def as_rounded(rollouts, reference, schedule, sparrow):
    with rounded(scales_of(sparrow)):
        return agree(rollouts, reference.score(rollouts, schedule, 1.0), 0.0 if schedule.is_dense else 0.03)


def as_prompts(sparrow, rollouts):
    """The log-probs that the engine gives the tokens of these rollouts as the ends of prompts."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    requests = [{"prompt_token_ids": [*r.prompt_ids, *r.response_ids.tolist()]} for r in rollouts]
    for rollout, output in zip(rollouts, sparrow.llm.generate(requests, parameters, use_tqdm=False), strict=True):
        end = output.prompt_logprobs[-len(rollout) :]
        own = [at[int(token)].logprob for at, token in zip(end, rollout.response_ids, strict=True)]
        yield SimpleNamespace(logprobs=np.array(own))


@pytest.fixture
def grouped(monkeypatch):
    """The groups of rows that each prefill was divided into."""
    seen, groups = [], fp8.groups
    monkeypatch.setattr(fp8, "groups", lambda lengths: seen.append(list(groups(lengths))) or seen[-1])
    return seen


@pytest.mark.slow
def test_log_probs_are_those_of_rounded_keys_and_values(folder, reference, monkeypatch, grouped):
    with fp8_engine(folder, SMALL) as sparrow:
        assert sparrow.describe()["kv_cache"] == "fp8_e4m3" and sparrow.describe()["kv_scales"] is None
        rollouts = sparrow.generate(PROMPTS, SAMPLED)
        assert as_rounded(rollouts, reference, SMALL, sparrow)
        exact = reference.score(rollouts, SMALL, 1.0)
        assert np.quantile(gaps(rollouts, exact), 0.5) > 1e-2 and logprob_gap(rollouts, exact) > 0.3
        scales = flat(scales_of(sparrow))
        assert torch.equal(scales.log2(), scales.log2().round()) and len(scales.unique()) > 2
        assert sparrow.describe()["kv_scales"] == [scales.min(), scales.max()]
        assert kv_clipped(sparrow) == 0 and max(map(len, grouped)) == 1
        sparrow.drop_prefixes()
        monkeypatch.setattr(fp8, "COPIED_TOKENS", 64)
        apart = sparrow.generate(PROMPTS, SAMPLED)
        assert as_rounded(apart, reference, SMALL, sparrow) and max(map(len, grouped)) == 5


@pytest.mark.slow
def test_prefill_agrees_with_decoding(folder, reference):
    with fp8_engine(folder, UNBOUNDED) as sparrow:
        rollouts = sparrow.generate(PROMPTS, SAMPLED)
        assert as_rounded(rollouts, reference, UNBOUNDED, sparrow)
        exact = reference.score(rollouts, UNBOUNDED, 1.0)
        assert np.quantile(gaps(rollouts, exact), 0.5) > 1e-2 and logprob_gap(rollouts, exact) > 0.3
        assert agree(rollouts, list(as_prompts(sparrow, rollouts)))
        again = sparrow.generate(PROMPTS, SAMPLED)  # from the prefix cache
        assert same_tokens(rollouts, again) and agree(rollouts, again)
        longer = [[*r.prompt_ids, *r.response_ids.tolist()] for r in rollouts]
        assert as_rounded(sparrow.generate(longer, SAMPLED), reference, UNBOUNDED, sparrow)
        [cached] = sparrow.llm.generate([{"prompt_token_ids": longer[3]}], use_tqdm=False)
        assert cached.num_cached_tokens == 320  # so it was: whole blocks of 324 tokens


@pytest.mark.slow
def test_landmarks_in_8_bits_are_those_of_stored_keys(folder, reference):
    schedule = SMALL.replace(landmark_dtype="fp8_e4m3")
    with fp8_engine(folder, schedule) as sparrow:
        rollouts = sparrow.generate(PROMPTS, SAMPLED)
        assert as_rounded(rollouts, reference, schedule, sparrow)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule, options, copied_tokens",
    [
        (SMALL, dict(max_num_batched_tokens=96, max_num_seqs=4), 64),  # prompts in chunks, among decode rows
        (UNBOUNDED, dict(num_gpu_blocks_override=24, max_model_len=576, enable_prefix_caching=False), 65_536),
    ],
    ids=["chunked-prefill", "preemption"],
)
def test_scheduling_does_not_matter(folder, reference, monkeypatch, grouped, schedule, options, copied_tokens):
    monkeypatch.setattr(fp8, "COPIED_TOKENS", copied_tokens)
    with fp8_engine(folder, schedule, **options) as sparrow:
        for _ in range(2):  # the second time from the prefix cache, where there is one
            rollouts = sparrow.generate(PROMPTS, GREEDY)
            assert as_rounded(rollouts, reference, schedule, sparrow)
            assert (sparrow.counters().preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert (max(map(len, grouped)) > 1) == (copied_tokens == 64)


@pytest.mark.slow
def test_new_weights_get_new_scales(tmp_path, folder):
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
        for in_process in (True, False):  # False: the way other processes get weights
            sparrow._in_process = in_process
            sparrow.update_weights(louder.named_parameters())
            assert sparrow.describe()["kv_scales"] is None
            assert logprob_gap(sparrow.generate(PROMPTS, SAMPLED), expected) < 1e-5
            assert torch.equal(flat(scales_of(sparrow)), new) and kv_clipped(sparrow) == 0
            sparrow.update_weights(tiny.tiny_model().named_parameters())
        assert logprob_gap(sparrow.generate(PROMPTS, SAMPLED), first) < 1e-5


@pytest.mark.slow
def test_scales_stay_while_something_is_cached(folder):
    with fp8_engine(folder) as sparrow:
        first = sparrow.generate(PROMPTS, SAMPLED)
        sparrow.drop_prefixes()
        sparrow.rpc("sparrow_renew_kv_scales")
        assert logprob_gap(sparrow.generate(PROMPTS, SAMPLED), first) < 1e-5
        assert len(sparrow.generate([[7]], SAMPLED)[0]) == 24  # one token, but not the first prompt
        sparrow.rpc("sparrow_renew_kv_scales")
        with pytest.raises(ConfigError, match="reset the prefix cache before sparrow_renew_kv_scales"):
            sparrow.generate(PROMPTS[2:3], SAMPLED)


@pytest.mark.slow
def test_scales_are_not_taken_from_one_token(folder):
    with fp8_engine(folder) as sparrow, pytest.raises(ConfigError, match="first prompts, which must have two tokens"):
        sparrow.generate([[7]], SAMPLED)


@pytest.mark.slow
def test_what_is_beyond_the_range_is_clamped_and_counted(folder, reference, monkeypatch):
    monkeypatch.setattr(fp8, "MARGIN", 0.75)
    prompt, cached = PROMPTS[2:3], len(PROMPTS[2]) + SAMPLED.max_new_tokens - 1  # the last token is not cached
    with fp8_engine(folder, UNBOUNDED) as sparrow:
        rollouts = sparrow.generate(prompt, SAMPLED)
        counted, scales = kv_clipped(sparrow), scales_of(sparrow)
        assert kv_clipped(sparrow) == 0  # the last call has reset it
    with rounded(scales) as seen:
        assert agree(rollouts, reference.score(rollouts, UNBOUNDED, 1.0))
    beyond = torch.zeros(2, len(scales), cached, dtype=torch.bool)  # keys, values
    for i, (layer, its_scales) in enumerate(zip(seen, scales, strict=True)):
        for which, ([x_KTD], scale_K) in enumerate(zip(layer, its_scales, strict=True)):
            largest_K = x_KTD[:, : len(prompt[0])].abs().amax((1, 2))  # the prompt alone sets them
            assert torch.equal(scale_K, (0.75 * largest_K / 448).log2().ceil().exp2())
            beyond[which, i] = (x_KTD.abs().amax(2) > 448 * scale_K[:, None]).any(0)[:cached]
    assert counted == beyond.any(0).sum()
    assert (beyond.sum((1, 2)) < counted).all()  # of some the key is beyond, of others the value


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
        (1e-7, torch.float16, 2.0**-15),  # the smallest e4m3, 2^-9, times this is the smallest float16
    ],
)
def test_scales_are_the_least_powers_of_two_that_leave_room(largest, dtype, scale):
    assert fp8.power_of_two(torch.tensor([largest, 0.0]), dtype).tolist() == [scale, 1.0]
    assert torch.isfinite(torch.tensor(448.0 * scale).to(dtype))


def test_a_copy_is_what_is_stored_times_its_scale():
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    codes = codes[codes.float().isfinite()][:252].view(3, 2, 6, 7)
    scale_K = torch.tensor([0.125, 4.0])
    out = torch.full((2, 2, 6, 7), torch.nan, dtype=torch.bfloat16)
    fp8.copy_blocks(codes, torch.tensor([2, 0]), scale_K, out)
    assert torch.equal(out.double(), codes.double()[[2, 0]] * scale_K[:, None, None].double())


def test_copied_blocks_are_every_block_of_the_rows_once_and_in_order():
    table = torch.arange(100, 148, dtype=torch.int32).view(4, 12)[1:, :8]  # a part of vLLM's table
    lengths = np.array([17, 16, 65])
    copied = fp8.copied_blocks(table, lengths, 16)
    assert copied.blocks.tolist() == [112, 113, 124, 136, 137, 138, 139, 140] and copied.blocks.dtype == torch.int64
    assert copied.table.dtype == torch.int32 and copied.table.shape == (3, 5)
    for row, count in enumerate((2, 1, 5)):
        assert torch.equal(copied.blocks[copied.table[row].long()][:count], table[row, :count].long())
    assert copied.table.min() >= 0 and copied.table.max() < len(copied.blocks)  # vLLM may read ahead


@pytest.mark.parametrize(
    "lengths, expected",
    [
        ([5], [(0, 1)]),
        ([5, 5, 1], [(0, 2), (2, 3)]),
        ([5, 5], [(0, 2)]),
        ([40, 3, 40, 40], [(0, 1), (1, 2), (2, 3), (3, 4)]),  # a sequence that is longer is alone
        ([1, 9, 10, 2], [(0, 2), (2, 3), (3, 4)]),
    ],
)
def test_groups_are_as_large_as_may_be_copied_at_once(lengths, expected, monkeypatch):
    monkeypatch.setattr(fp8, "COPIED_TOKENS", 10)
    assert list(fp8.groups(np.array(lengths))) == expected


def test_only_tokens_that_the_step_stores_may_be_read():
    cache = fp8.Fp8Cache(torch.device("cpu"))
    table = torch.tensor([[3, 4, 0], [3, 7, 9]], dtype=torch.int32)
    slots = torch.cat([torch.arange(48, 80), torch.arange(112, 128)])  # blocks 3, 4 and 7
    for computed, beyond in (([0, 0], False), ([0, 16], False), ([0, 32], False), ([0, 33], True), ([0, 48], True)):
        cache.begin_step(0, table, np.array(computed), 16)
        assert cache.reads_beyond(slots) == beyond
    # A sequence that goes on within a block of which an earlier step filled the beginning.
    cache.begin_step(0, table[:1], np.array([5]), 16)
    assert cache.reads_beyond(torch.tensor([53]))


def test_weights_that_are_quantised_come_in_one_file(monkeypatch):
    monkeypatch.setattr(client, "CHUNK_BYTES", 70)
    weights = {f"w{i}": torch.randn(7, 2) for i in range(5)}
    assert sum(1 for _ in client.weight_files(weights.items())) == 3
    [held] = [load_file(path) for path in client.weight_files(weights.items(), whole=True)]
    assert held.keys() == weights.keys() and all(torch.equal(held[name], weights[name]) for name in weights)
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
        ([f"0.{Q}", f"0.{V}", f"1.{K}", f"1.{Q}", f"1.{V}"], r"0.self_attn.[qv]_proj.weight .*\['k_proj'\]"),
    ],
)
def test_what_is_quantised_as_one_is_given_as_one(names, message):
    model = SimpleNamespace(
        packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    )
    weights = [(name, torch.zeros(1)) for name in names]
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with refused:
        assert list(control._whole(weights, model)) == weights
    assert list(control._whole(weights, object())) == weights  # a model that packs nothing
