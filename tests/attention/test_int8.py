"""Compare the int8 format, which has one exponent per vector, with its definition in float64."""

import pytest
import torch

from sparrow.attention.int8 import exponent_limits, from_int8, scale_of, to_int8

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


@DTYPES
def test_scales_are_minimal_powers_of_two_and_codes_round_to_nearest(dtype):
    torch.manual_seed(0)
    low = 8 if dtype == torch.float16 else 40
    x = (torch.randn(2000, 8) * 2.0 ** torch.randint(-low, low // 2, (2000, 1))).to(dtype)
    codes, exponent = to_int8(x)
    assert codes.dtype == torch.int8 and exponent.dtype == torch.uint8 and exponent.shape == (2000,)
    exact, scale = x.double(), 2.0 ** (exponent.double() - 127)
    largest = exact.abs().amax(-1)
    assert (largest <= 127 * scale).all()
    at_the_limit = exponent == exponent_limits(dtype)[0] + 127
    assert ((largest > 127 * scale / 2) | at_the_limit).all() and not at_the_limit.all()
    assert torch.equal(codes.double(), (exact / scale[:, None]).round())
    assert torch.equal(from_int8(codes, exponent, dtype).double(), codes.double() * scale[:, None])


@DTYPES
def test_int8_codes_are_dequantised_without_rounding(dtype):
    """Check every code with every possible scale. Quantising the result must return both."""
    least, most = exponent_limits(dtype)
    exponent = torch.arange(least + 127, most + 128, dtype=torch.uint8)
    codes = torch.arange(-127, 128).expand(len(exponent), -1).to(torch.int8)
    back = from_int8(codes, exponent, dtype)
    assert torch.equal(back.double(), codes.double() * 2.0 ** (exponent.double() - 127)[:, None])
    again = to_int8(back)
    assert torch.equal(again[0], codes) and torch.equal(again[1], exponent)


@DTYPES
def test_rounding_and_scales_are_correct_in_edge_cases(dtype):
    least, most = (n + 127 for n in exponent_limits(dtype))
    inf, nan = float("inf"), float("nan")
    largest = torch.finfo(dtype).max
    cases = [
        (
            [0.0, -0.0],
            [0, 0],
            least,
        ),  # zeros get the smallest scale
        ([127.0, -127.0], [127, -127], 127),
        ([127.5, 1.0], [64, 0], 128),  # 0.5 rounds to even
        ([2.5, 127.0], [2, 127], 127),
        ([3.5, -2.5 - 125], [2, -64], 128),
        ([2.0**-24, 0.0], [1, 0], least)
        if dtype == torch.float16
        else ([1e-30, 0.0], [0, 0], least),
        (
            [largest, -largest],
            [127, -127],
            most,
        ),  # beyond the largest scale, values are clipped
        ([inf, 1.0], None, 255),
        ([nan, 1.0], None, 255),
    ]
    for x, codes, exponent in cases:
        got, its_exponent = to_int8(torch.tensor([x], dtype=dtype))
        assert its_exponent.item() == exponent and (codes is None or got[0].tolist() == codes)
        back = from_int8(got, its_exponent, dtype)
        assert back.isfinite().all() if codes else not back.isfinite().all()


def test_scale_bytes_decode_to_powers_of_two():
    assert scale_of(torch.tensor([1, 127, 130, 254, 255], dtype=torch.uint8)).tolist() == [
        2.0**-126,
        1.0,
        8.0,
        2.0**127,
        float("inf"),
    ]


@DTYPES
def test_exponent_limits_fit_the_dtype(dtype):
    least, most = exponent_limits(dtype)
    assert most - least <= 100 and 127 * 2.0**most <= torch.finfo(dtype).max
    assert torch.tensor(2.0**least, dtype=dtype).item() == 2.0**least
