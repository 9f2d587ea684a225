"""Test an 8-bit KV cache in real vLLM engines on a CPU, against transformers with all keys and
values rounded in the same way.
"""

import numpy as np
import pytest
import torch

from sparrow.attention.int8 import scale_of
from sparrow.attention.pages import FP8
from sparrow.errors import ConfigError
from sparrow.rollout import Sampling
from sparrow.vllm import kv_cache
from sparrow.vllm.kv_cache import INT8
from tests.vllm import tiny_vllm as tiny
from tests.vllm.rounded_cache import PROMPTS, agree, as_prompts, as_rounded, flat, gaps, scales_of
from tests.vllm.tiny_vllm import SMALL, UNBOUNDED, engine, logprob_gap, same_tokens

SAMPLED = Sampling(max_new_tokens=24, temperature=1.0, top_n=0, seed=3)
GREEDY = Sampling(
    max_new_tokens=24, temperature=0.0, top_n=0
)  # log-probs are computed at temperature 1
TOLD = {"fp8": None, INT8: 0}  # number of scales, before the first prompts
CACHES = pytest.mark.parametrize("name", ["fp8", INT8])


def is_far_from(rollouts, exact, name):
    """Return whether log-probs differ from the unrounded ones by more than ``agree`` allows."""
    median, most = {"fp8": (1e-2, 0.3), INT8: (3e-3, 0.03)}[name]
    return np.quantile(gaps(rollouts, exact), 0.5) > median and logprob_gap(rollouts, exact) > most


@pytest.fixture
def grouped(monkeypatch):
    """Record the groups into which the rows of each prefill are divided."""
    seen, groups = [], kv_cache.groups
    monkeypatch.setattr(
        "sparrow.vllm.backend.groups",
        lambda lengths: seen.append(list(groups(lengths))) or seen[-1],
    )
    return seen


@tiny.CACHE_IN_8_BITS
@CACHES
def test_log_probs_match_transformers_with_rounded_keys_and_values(
    name, folder, reference, monkeypatch, grouped
):
    with engine(folder, SMALL, kv_cache_dtype=name) as sparrow:
        told = sparrow.describe()
        assert (
            told["kv_cache"] == {"fp8": "fp8_e4m3"}.get(name, name)
            and told.get("kv_scales", 0) == TOLD[name]
        )
        rollouts = sparrow.generate(PROMPTS, SAMPLED)
        assert as_rounded(rollouts, reference, SMALL, sparrow)
        assert is_far_from(rollouts, reference.score(rollouts, SMALL, 1.0), name)
        counts = sparrow.rpc("sparrow_counters")[0]
        if name == "fp8":
            scales = flat(scales_of(sparrow))
            assert torch.equal(scales.log2(), scales.log2().round()) and len(scales.unique()) > 2
            assert sparrow.describe()["kv_scales"] == [scales.min(), scales.max()]
            assert counts["kv_clipped"] == 0
        else:
            assert sparrow.describe().keys() == told.keys() and "kv_clipped" not in counts
        assert max(map(len, grouped)) == 1
        sparrow.drop_prefixes()
        monkeypatch.setattr(kv_cache, "COPIED_TOKENS", 64)
        apart = sparrow.generate(PROMPTS, SAMPLED)
        assert as_rounded(apart, reference, SMALL, sparrow) and max(map(len, grouped)) == 5


@tiny.CACHE_IN_8_BITS
@CACHES
def test_prefill_matches_decoding(name, folder, reference):
    with engine(folder, UNBOUNDED, kv_cache_dtype=name) as sparrow:
        rollouts = sparrow.generate(PROMPTS, SAMPLED)
        assert as_rounded(rollouts, reference, UNBOUNDED, sparrow)
        assert is_far_from(rollouts, reference.score(rollouts, UNBOUNDED, 1.0), name)
        assert agree(rollouts, list(as_prompts(sparrow, rollouts)))
        again = sparrow.generate(PROMPTS, SAMPLED)  # from the prefix cache
        assert same_tokens(rollouts, again) and agree(rollouts, again)
        longer = [[*r.prompt_ids, *r.response_ids.tolist()] for r in rollouts]
        assert as_rounded(sparrow.generate(longer, SAMPLED), reference, UNBOUNDED, sparrow)
        [cached] = sparrow.llm.generate([{"prompt_token_ids": longer[3]}], use_tqdm=False)
        assert cached.num_cached_tokens == 320  # the whole blocks of 324 tokens


@tiny.CACHE_IN_8_BITS
@CACHES
def test_eight_bit_landmarks_are_computed_from_stored_keys(name, folder, reference):
    schedule = SMALL.replace(landmark_dtype="fp8_e4m3")
    with engine(folder, schedule, kv_cache_dtype=name) as sparrow:
        rollouts = sparrow.generate(PROMPTS, SAMPLED)
        assert as_rounded(rollouts, reference, schedule, sparrow)


@tiny.CACHE_IN_8_BITS
@pytest.mark.slow
@CACHES
@pytest.mark.parametrize(
    "schedule, options, copied_tokens",
    [
        (
            SMALL,
            dict(max_num_batched_tokens=96, max_num_seqs=4),
            64,
        ),  # prompts in chunks, among decode rows
        (
            UNBOUNDED,
            dict(num_gpu_blocks_override=24, max_model_len=576, enable_prefix_caching=False),
            65_536,
        ),
    ],
    ids=["chunked-prefill", "preemption"],
)
def test_scheduling_does_not_change_results(
    name, folder, reference, monkeypatch, grouped, schedule, options, copied_tokens
):
    monkeypatch.setattr(kv_cache, "COPIED_TOKENS", copied_tokens)
    with engine(folder, schedule, kv_cache_dtype=name, **options) as sparrow:
        for _ in range(2):  # the second time from the prefix cache, if enabled
            rollouts = sparrow.generate(PROMPTS, GREEDY)
            assert as_rounded(rollouts, reference, schedule, sparrow)
            assert (sparrow.counters().preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert (max(map(len, grouped)) > 1) == (copied_tokens == 64)


@tiny.CACHE_IN_8_BITS
@pytest.mark.slow
def test_an_int8_cache_works_with_new_weights_without_new_scales(tmp_path, folder):
    louder = tiny.tiny_model(seed=1)
    with torch.no_grad():
        for layer in louder.model.layers:
            layer.self_attn.v_proj.weight *= 64
            layer.self_attn.k_norm.weight *= 4
    louder.save_pretrained(tmp_path)
    with engine(tmp_path, SMALL, kv_cache_dtype=INT8) as fresh:
        expected = fresh.generate(PROMPTS, SAMPLED)
    with engine(folder, SMALL, kv_cache_dtype=INT8) as sparrow:
        assert (
            len(sparrow.generate([[7]], SAMPLED)[0]) == 24
        )  # only one token, too few to set fp8 scales from
        first = sparrow.generate(PROMPTS, SAMPLED)
        assert logprob_gap(first, expected) > 1e-2
        sparrow.update_weights(louder.named_parameters())
        assert logprob_gap(sparrow.generate(PROMPTS, SAMPLED), expected) < 1e-5
        with pytest.raises(
            ConfigError, match="has separate scales for every token, so there are none to renew"
        ):
            sparrow.rpc("sparrow_renew_kv_scales")


def test_an_int8_cache_on_a_gpu_does_not_depend_on_vllms_attention(monkeypatch):
    pytest.importorskip("vllm.version")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    from sparrow.vllm.cuda import CudaBackend, CudaFlashBackend

    asked = VllmConfig(additional_config={"sparrow": SMALL.to_dict()})
    seen = []
    stock = classmethod(
        lambda cls, head_size, dtype, kv_cache_dtype, *more, **named: seen.append(kv_cache_dtype)
    )
    monkeypatch.setattr(FlashAttentionBackend, "supports_combination", stock)
    with set_current_vllm_config(asked):
        for backend in (CudaBackend, CudaFlashBackend):
            assert backend.supports_kv_cache_dtype(INT8)
            assert not backend.supports_kv_cache_dtype("fp8_per_token_head")
            for name in (INT8, "fp8"):
                backend.supports_combination(
                    128, torch.bfloat16, name, 16, False, False, False, False, None
                )
    assert not FlashAttentionBackend.supports_kv_cache_dtype(INT8) and seen == ["auto", "fp8"] * 2


def test_copied_blocks_equal_the_stored_codes_times_their_scales():
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    codes = codes[codes.float().isfinite()][:252].view(3, 2, 6, 7)
    scale_K = torch.tensor([0.125, 4.0])
    out = torch.full((2, 2, 6, 7), torch.nan, dtype=torch.bfloat16)
    kv_cache.copy_blocks(codes, torch.tensor([2, 0]), scale_K, out)
    assert torch.equal(out.double(), codes.double()[[2, 0]] * scale_K[:, None, None].double())
    codes = torch.randint(-127, 128, (3, 2, 6, 7), dtype=torch.int8)
    exponents = torch.randint(77, 178, (3, 2, 2, 6), dtype=torch.uint8)[
        :, :, 1
    ]  # a part of a block, as in vLLM's cache
    kv_cache.copy_blocks(codes, torch.tensor([2, 0]), exponents, out)
    assert torch.equal(
        out.double(), codes.double()[[2, 0]] * scale_of(exponents[[2, 0]])[..., None].double()
    )


def test_every_block_of_each_row_is_copied_once_and_in_order():
    table = torch.arange(100, 148, dtype=torch.int32).view(4, 12)[1:, :8]  # a part of vLLM's table
    lengths = np.array([17, 16, 65])
    copied = kv_cache.copied_blocks(table, lengths, 16)
    assert (
        copied.blocks.tolist() == [112, 113, 124, 136, 137, 138, 139, 140]
        and copied.blocks.dtype == torch.int64
    )
    assert copied.table.dtype == torch.int32 and copied.table.shape == (3, 5)
    for row, count in enumerate((2, 1, 5)):
        assert torch.equal(
            copied.blocks[copied.table[row].long()][:count], table[row, :count].long()
        )
    assert copied.table.min() >= 0 and copied.table.max() < len(
        copied.blocks
    )  # vLLM may read ahead


@pytest.mark.parametrize(
    "lengths, expected",
    [
        ([5], [(0, 1)]),
        ([5, 5, 1], [(0, 2), (2, 3)]),
        ([5, 5], [(0, 2)]),
        ([40, 3, 40, 40], [(0, 1), (1, 2), (2, 3), (3, 4)]),  # the longer sequence is on its own
        ([1, 9, 10, 2], [(0, 2), (2, 3), (3, 4)]),
    ],
)
def test_groups_are_as_large_as_the_copy_limit_allows(lengths, expected, monkeypatch):
    monkeypatch.setattr(kv_cache, "COPIED_TOKENS", 10)
    assert list(kv_cache.groups(np.array(lengths))) == expected
