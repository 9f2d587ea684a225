"""Test how the decode implementation is chosen and reported. An explicit request is never
overridden.
"""

import pytest
import torch

pytest.importorskip("triton")
from sparrow.attention import Choice, choose, cuda
from sparrow.attention.decode import H200
from sparrow.attention.triton import saved
from sparrow.attention.triton.variants import Variant
from sparrow.errors import ConfigError

MODEL = dict(page_size=16, head_dim=128, kv_heads=8, group=4, dtype=torch.bfloat16)
GPU = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda.launch, "device_limits", lambda device: H200)
    monkeypatch.setattr(cuda.launch, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(saved, "device_limits", lambda device: H200)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    saved.read.cache_clear()
    yield
    saved.read.cache_clear()


def test_default_implementation_combines_two_kernels_and_names_both(hopper):
    chosen = choose(None, **MODEL, device=GPU)
    assert str(chosen) == "cuda, triton for up to 4 rows"
    assert [chosen.of(rows) for rows in (1, 4, 5, 256)] == ["triton", "triton", "cuda", "cuda"]
    assert (
        str(choose(None, **MODEL | dict(kv_heads=4), device=GPU)) == "cuda, triton for up to 9 rows"
    )
    assert str(choose(None, **MODEL | dict(kv_heads=64), device=GPU)) == "cuda"


@pytest.mark.parametrize("asked", ["cuda", "triton", "reference"])
def test_explicitly_requested_implementation_is_used_for_any_number_of_rows(hopper, asked):
    chosen = choose(asked, **MODEL, device=GPU)
    assert str(chosen) == asked
    assert {chosen.of(rows) for rows in range(1, 300)} == {asked}


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(page_size=32), "got pages of 32, head dim 128, group 4 and torch.bfloat16"),
        (dict(head_dim=96), "got pages of 16, head dim 96"),
        (dict(group=17), "group 17"),
        (dict(dtype=torch.float8_e5m2), "float8_e5m2"),
    ],
)
def test_triton_replaces_an_unsupported_cuda_kernel_unless_cuda_was_requested(
    hopper, change, reason
):
    assert choose(None, **MODEL | change, device=GPU) == Choice("triton")
    with pytest.raises(ConfigError, match=reason):
        choose("cuda", **MODEL | change, device=GPU)


@pytest.mark.parametrize("change", [dict(head_dim=256), dict(group=16)])
def test_default_kernels_support_large_heads_and_groups(hopper, change):
    assert choose(None, **MODEL | change, device=GPU) == choose(None, **MODEL, device=GPU)


@pytest.mark.parametrize(
    "head_dim, group, most", [(64, 8, 4), (128, 2, 16), (128, 5, 6), (128, 16, 2), (256, 8, 2)]
)
def test_cuda_kernel_decodes_as_many_tokens_per_launch_as_fit_in_registers(
    hopper, head_dim, group, most
):
    model = MODEL | dict(head_dim=head_dim, group=group)
    assert choose(None, **model, device=GPU, tokens=most) == choose(None, **model, device=GPU)
    assert choose(None, **model, device=GPU, tokens=most + 1) == Choice("triton")
    reason = (
        f"with head dim {head_dim} and group {group}, the CUDA kernel decodes up to {most} new "
        f"tokens of a sequence at a time, got {most + 1}; use the Triton kernels"
    )
    with pytest.raises(ConfigError, match=reason):
        choose("cuda", **model, device=GPU, tokens=most + 1)


def test_fp8_landmarks_and_caches_require_a_gpu_that_can_convert_fp8(hopper, monkeypatch):
    stored = dict(landmark_dtype="fp8_e4m3")
    assert str(choose(None, **MODEL, **stored, device=GPU)) == "cuda, triton for up to 4 rows"
    assert choose(None, **MODEL, **stored, device=torch.device("cpu")) == Choice("reference")
    cache = MODEL | dict(dtype=torch.float8_e4m3fn)
    assert str(choose(None, **cache, device=GPU)) == "cuda, triton for up to 4 rows"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for asked in (None, "triton"):
        with pytest.raises(
            ConfigError,
            match=r"compute capability 8\.9 or higher, but A100 has less; set landmark_dtype to",
        ):
            choose(asked, **MODEL, **stored, device=GPU)
        with pytest.raises(
            ConfigError, match=r"values in fp8_e4m3 need a GPU with .* set kv_cache_dtype to"
        ):
            choose(asked, **cache, device=GPU)
    assert choose(None, **MODEL, device=GPU) == Choice("triton")
    assert choose(None, **MODEL | dict(dtype=torch.int8), device=GPU) == Choice(
        "triton"
    )  # any GPU can convert int8


def test_cuda_kernel_supports_an_int8_cache(hopper):
    assert str(choose("cuda", **MODEL | dict(dtype=torch.int8), device=GPU)) == "cuda"


def test_blackwell_gpus_use_triton_and_cpus_use_the_reference(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert choose(None, **MODEL, device=GPU) == Choice("triton")
    with pytest.raises(ConfigError, match="needs a Hopper GPU"):
        choose("cuda", **MODEL, device=GPU)
    assert choose(None, **MODEL, device=torch.device("cpu")) == Choice("reference")
    with pytest.raises(ConfigError, match="no cuda kernels for CPUs; leave sparrow_kernels out"):
        choose("cuda", **MODEL, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="unknown implementation 'flash'"):
        choose("flash", **MODEL, device=GPU)


def test_triton_row_limit_decreases_with_the_number_of_kv_heads():
    # Without a GPU, the limit is the H200's, 0.3 x 132 items. Each kv head of a row is one item.
    assert cuda.few_rows(8, torch.device("cpu")) == 4
    assert cuda.few_rows(1, torch.device("cpu")) == 39


def test_chosen_implementation_says_whether_triton_was_tuned(hopper):
    sizes = {name: x for name, x in MODEL.items() if name != "page_size"}
    target = saved.Target.on(GPU, page_size=16, **sizes)
    saved.Choices(target, (saved.Cell(4, Variant(), ()),)).save()
    chosen = choose(None, **MODEL, device=GPU)
    assert str(chosen) == "cuda, triton for up to 4 rows as tuned by sparrow tune"
    assert str(choose("cuda", **MODEL, device=GPU)) == "cuda"
    assert str(choose("triton", **MODEL | dict(group=2), device=GPU)) == "triton"
