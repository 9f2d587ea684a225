"""Test the operation that a linear layer with an fp8 copy calls: vLLM's kernels on a GPU, and the
same arithmetic on a CPU.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("vllm.version")

from sparrow.vllm.lossless.draft_weights import DraftLinearMethod, drafting, quantize

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def copied(weight):
    """Return a layer with this weight ``[N, K]``, and its linear method."""
    layer = SimpleNamespace(weight=weight)
    method = DraftLinearMethod(layer)
    method.scales.copy_(quantize(weight, method.values))
    return layer, method


def rounded(x):
    """Round each row of ``[..., columns]`` to fp8 with its own scale. Return the result in double
    precision.
    """
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-9)
    return (x.float() / scale).to(torch.float8_e4m3fn).double() * scale


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens", [(1,), (3, 5), (64,), (257,)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_only_drafts_multiply_rounded_activations_and_weights(tokens, has_bias):
    x, weight, bias = (
        random(*tokens, 512),
        random(192, 512, seed=2),
        random(192, seed=3) if has_bias else None,
    )
    layer, method = copied(weight)
    assert torch.equal(method.apply(layer, x, bias), linear(x, weight, bias))
    with drafting():
        found = method.apply(layer, x, bias)
    assert found.shape == (*tokens, 192) and found.dtype == DTYPE
    wide = None if bias is None else bias.double()
    assert error(found, linear(rounded(x), rounded(weight), wide)) < (0.01 if CUDA else 1e-4)
    assert error(found, linear(x.double(), weight.double(), wide)) > 0.02
    assert torch.equal(method.apply(layer, x, bias), linear(x, weight, bias))


def test_each_row_has_a_separate_scale_and_zeros_stay_zero():
    weight = random(16, 64) * (torch.arange(16, device=DEVICE) ** 4)[:, None].to(DTYPE)
    layer, method = copied(weight)
    own = method.values.float() * method.scales
    assert torch.equal(own[0], torch.zeros(64, device=DEVICE)) and method.scales.isfinite().all()
    assert ((own - weight.float()).abs().amax(1) <= weight.float().abs().amax(1) / 16 + 1e-6).all()
    with drafting():
        assert torch.equal(
            method.apply(layer, torch.zeros_like(weight)[:2]), torch.zeros_like(weight)[:2, :16]
        )


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_cuda_graph_replays_the_kind_of_matrix_product_that_it_captured():
    x, weight, other = random(8, 512), random(192, 512, seed=2), random(192, 512, seed=3)
    layer, method = copied(weight)
    outputs, graphs = [], []
    for drafts in (True, False):
        with drafting() if drafts else torch.no_grad():
            method.apply(layer, x)
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                outputs.append(method.apply(layer, x))
    for new in (weight, other):
        weight.copy_(new)
        method.scales.copy_(quantize(weight, method.values))
        for graph in graphs:
            graph.replay()
        assert error(outputs[0], linear(rounded(x), rounded(weight))) < 0.01
        assert (
            error(outputs[1], linear(x.double(), weight.double()))
            < 0.01
            < error(outputs[0], outputs[1].double())
        )
