"""Test drafts that use an fp8 copy of the weights, in a real vLLM; see ``test_lossless.py``."""

import contextlib
import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from tests.vllm.lossless_cases import (  # isort: skip  before vLLM is imported
    assert_greedy_and_dense,
    counters,
    engine,
    generate,
    lossless,
    tokens_of,
)
from vllm import logger

from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.vllm.lossless.draft_weights import DraftLinearMethod
from tests.vllm.lossless_life_cases import lose
from tests.vllm.lossless_reference_cases import K, by_sequence, recorded_cycles
from tests.vllm.tiny_vllm import checkpoint, on_v2, prompts

ASKED = prompts(300, 17, 150, 64, seed=41)
EVERYTHING = 40  # so many pages that drafts differ from the policy only in their weights


@pytest.fixture
def cycles(monkeypatch):
    return recorded_cycles(monkeypatch)


def test_greedy_tokens_match_stock_vllm(old_and_new):
    folder, model, *_ = old_and_new
    with engine(folder) as llm:
        expected = tokens_of(generate(llm, ASKED, 24))
    for k, pages in ((1, 4), (4, EVERYTHING), (8, 1)):
        with engine(folder, lossless(k, pages=pages, draft_weights="fp8")) as llm:
            got = generate(llm, ASKED, 24)
            counts = counters(llm)
        assert tokens_of(got) == expected, (k, pages)
        assert_greedy_and_dense(model, ASKED, got)
        assert 0 < counts["accepted"] < counts["drafted"]


# --- the weights that drafts use ---


def rounded(x):
    """Round ``[rows, columns]`` to fp8, each row with its own scale."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@contextlib.contextmanager
def rounding(model, rounds=True):
    """Make all linear layers of a transformers model, except the output layer, multiply rounded
    activations and weights.
    """

    def product(layer):
        return lambda x: linear(rounded(x), rounded(layer.weight), layer.bias)

    layers = [
        layer for layer in model.model.modules() if isinstance(layer, torch.nn.Linear) and rounds
    ]
    for layer in layers:
        layer.forward = product(layer)
    yield
    for layer in layers:
        del layer.forward


@torch.no_grad()
def gap(cached_by, model, found, written, rounds=True):
    """Return the mean total variation distance between vLLM's drafts and those of a model with
    rounded weights. Each cycle starts with a cache that ``cached_by`` has written, and drafts
    append their keys and values to it.
    """
    gaps = []
    for i, own in by_sequence(found, written).items():
        for cycle in own:
            cache = cached_by(
                torch.tensor([written[i][: cycle["cached"]]]), use_cache=True
            ).past_key_values
            with rounding(model, rounds):
                for token, logits in zip(cycle["ids"], cycle["q"], strict=False):
                    expected = (
                        model(torch.tensor([[token]]), past_key_values=cache)
                        .logits[0, -1]
                        .softmax(-1)
                    )
                    gaps.append(float((logits.softmax(-1) - expected).abs().sum() / 2))
    assert len(gaps) > 50
    return np.mean(gaps)


def answered(llm, found, seed=3):
    """Generate new responses, and return their cycles and all sequences' tokens."""
    llm.reset_prefix_cache()
    found.clear()
    completions = generate(llm, ASKED, 24, temperature=1.0, seed=seed)
    return [[*p, *ids] for p, ids in zip(ASKED, tokens_of(completions), strict=True)]


def test_drafts_use_rounded_weights_and_the_meter_measures_their_acceptance(old_and_new, cycles):
    folder, model, *_ = old_and_new
    with engine(folder, lossless(K, pages=EVERYTHING, draft_weights="fp8")) as llm:
        llm.collective_rpc("sparrow_acceptance")
        written = answered(llm, cycles)
        metered = DraftAcceptance.from_dict(
            llm.collective_rpc("sparrow_acceptance")[0]["acceptance"]
        )
    assert (
        gap(model, model, cycles, written)
        < 0.01
        < 0.03
        < gap(model, model, cycles, written, rounds=False)
    )
    alphas = []
    for cycle in cycles:
        p, q = (cycle[name].double().softmax(-1) for name in ("p", "q"))
        alphas += torch.minimum(p[:K], q).sum(-1)[: cycle["count"]].tolist()
    assert metered.mean == pytest.approx(np.mean(alphas), abs=1e-4) and 0.7 < metered.mean < 0.98
    with engine(folder, lossless(K, pages=EVERYTHING)) as llm:  # drafts with the original weights
        llm.collective_rpc("sparrow_acceptance")
        written = answered(llm, cycles)
        metered = DraftAcceptance.from_dict(
            llm.collective_rpc("sparrow_acceptance")[0]["acceptance"]
        )
    assert gap(model, model, cycles, written, rounds=False) < 1e-4 and metered.mean > 0.9999


def test_a_meter_schedule_is_measured_with_the_original_weights(old_and_new):
    decoding = lossless(K, pages=EVERYTHING, draft_weights="fp8")
    with engine(
        old_and_new[0], replace(decoding, meter_schedule=decoding.schedule, meter_every=1)
    ) as llm:
        generate(llm, ASKED, 24, temperature=1.0, seed=3)
        report = llm.collective_rpc("sparrow_acceptance")[0]
    drafts, metered = (
        DraftAcceptance.from_dict(part["acceptance"]) for part in (report, report["metered"])
    )
    assert metered.drafts > 20 and metered.mean > 0.9999 and drafts.mean < 0.98


def test_a_compiled_model_drafts_with_the_rounded_copy(old_and_new, monkeypatch):
    """torch.compile traces during a dense step, which must not fix the choice of weights."""
    folder, model, *_ = old_and_new
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # vLLM's mode that traces without inductor
    acceptance = []
    for enforce_eager in (True, False):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with engine(
            folder, lossless(4, pages=EVERYTHING, draft_weights="fp8"), enforce_eager=enforce_eager
        ) as llm:
            llm.collective_rpc("sparrow_acceptance")
            assert_greedy_and_dense(model, ASKED, generate(llm, ASKED, 12))
            generate(llm, ASKED, 24, temperature=1.0, seed=3)
            report = llm.collective_rpc("sparrow_acceptance")[0]["acceptance"]
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        assert (compiled == 0) is enforce_eager
        acceptance.append(DraftAcceptance.from_dict(report).mean)
    assert acceptance[0] == pytest.approx(acceptance[1], abs=1e-4) and acceptance[0] < 0.98


# --- logging and errors ---


def test_the_size_of_the_weight_copy_is_logged(tmp_path, monkeypatch):
    said, init = [], logger.init_logger
    ours = SimpleNamespace(info=said.append)
    monkeypatch.setattr(
        logger, "init_logger", lambda name: ours if name == "vllm.sparrow" else init(name)
    )
    checkpoint(tmp_path, num_hidden_layers=2, intermediate_size=100)  # not a multiple of 16
    with engine(tmp_path, lossless(2, draft_weights="fp8")) as llm:
        assert tokens_of(generate(llm, ASKED, 4))
        [told] = llm.collective_rpc("sparrow_describe")
    outputs = 2 * (
        2 * 4 * 32 + 64
    )  # in the projections of queries, keys and values and in the output projection
    size = 2 * (64 * (4 + 2 * 2) * 32 + 4 * 32 * 64) + 4 * outputs
    assert told["draft_weights"] == "fp8" and told["draft_weight_bytes"] == size
    assert (told["draft_layers"], told["draft_layers_in_16_bits"]) == (4, 4)
    assert said[0] == (
        "Drafts use fp8 copies of 4 linear layers (0.00 GiB); 4 other linear "
        "layers (0.00 GiB), the embedding and the output layer are not copied"
    )


def test_model_without_layers_that_can_be_copied_raises_an_error(tmp_path):
    odd = dict(hidden_size=60, head_dim=32, intermediate_size=100)
    checkpoint(tmp_path, num_hidden_layers=2, **odd)
    with (
        pytest.raises(
            UnsupportedModel,
            match="Qwen3ForCausalLM has no 16-bit linear layer whose input and output sizes",
        ),
        engine(tmp_path, lossless(2, draft_weights="fp8")),
    ):
        pass


def test_renewing_draft_weights_without_a_copy_raises_an_error(old_and_new):
    with engine(old_and_new[0], lossless(2)) as llm:
        assert "draft_weight_bytes" not in llm.collective_rpc("sparrow_describe")[0]
        with pytest.raises(
            ConfigError,
            match=r"has no separate copy of the weights for drafts; start it with .* draft_weights 'fp8'",
        ):
            llm.collective_rpc("sparrow_renew_draft_weights")


# --- the copy follows the weights ---


def negate_model(model):
    for name, weight in model.named_parameters():
        if "mlp" in name:
            weight.data.neg_()


def negate(worker):
    """Write to the parameters directly."""
    negate_model(worker.model_runner.model)


@torch.no_grad()
def negate_by_vllm(worker):
    weights = [
        (name, -w if "mlp" in name else w)
        for name, w in worker.model_runner.model.named_parameters()
    ]
    worker.reload_weights(weights_iterator=weights, is_checkpoint_format=False)


def negated(model):
    other = copy.deepcopy(model)
    negate_model(other)
    return other


def test_the_weight_copy_is_updated_however_weights_are_loaded(old_and_new, cycles):
    folder, old, new, weights = old_and_new
    with engine(folder, lossless(K, pages=EVERYTHING, draft_weights="fp8")) as llm:
        model, written = old, answered(llm, cycles)
        assert gap(model, model, cycles, written) < 0.01

        def follows(other):
            nonlocal model
            before, model, written = model, other, answered(llm, cycles)
            assert (
                gap(model, model, cycles, written)
                < 0.01
                < 0.1
                < gap(model, before, cycles, written)
            )

        addresses = llm.collective_rpc(where_copies_are)
        llm.collective_rpc("sparrow_load_weights", args=(weights,))
        follows(new)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        follows(old)
        llm.collective_rpc(negate_by_vllm)
        follows(negated(old))
        llm.collective_rpc(negate)
        written = answered(llm, cycles)  # the copy has not been notified
        assert gap(old, model, cycles, written) < 0.01 < 0.1 < gap(old, old, cycles, written)
        llm.collective_rpc("sparrow_renew_draft_weights")
        follows(old)
        llm.apply_model(negate_model)
        follows(negated(old))
        assert llm.collective_rpc(where_copies_are) == addresses


def copies(worker):
    methods = [
        getattr(layer, "quant_method", None) for layer in worker.model_runner.model.modules()
    ]
    return [method for method in methods if isinstance(method, DraftLinearMethod)]


def where_copies_are(worker):
    return [x.data_ptr() for method in copies(worker) for x in (method.values, method.scales)]


def test_weight_copy_is_recreated_after_sleep(old_and_new, cycles):
    """vLLM does not sleep on a CPU. The test instead overwrites the memory that vLLM's allocator
    would drop, including the copy.
    """
    folder, _, new, weights = old_and_new
    with engine(folder, lossless(K, pages=EVERYTHING, draft_weights="fp8")) as llm:
        answered(llm, cycles)
        llm.collective_rpc(lose, args=(2,))
        llm.collective_rpc(lose_copies)
        llm.reset_prefix_cache()
        llm.collective_rpc("sparrow_load_weights", args=(weights,))
        assert gap(new, new, cycles, answered(llm, cycles)) < 0.01


def lose_copies(worker):
    for method in copies(worker):
        method.values.view(torch.uint8).fill_(0x7F)  # not a number
        method.scales.fill_(float("nan"))


# --- tensor parallel ---


def test_each_tensor_parallel_worker_copies_its_part_of_the_weights(
    old_and_new, tmp_path, monkeypatch
):
    folder, model, new, weights = old_and_new
    monkeypatch.setenv("PYTHONPATH", on_v2(tmp_path))
    with engine(
        folder, lossless(4, pages=EVERYTHING, draft_weights="fp8"), tensor_parallel_size=2
    ) as llm:
        assert_greedy_and_dense(model, ASKED, generate(llm, ASKED, 16))
        llm.collective_rpc("sparrow_load_weights", args=(weights,))
        llm.reset_prefix_cache()
        assert_greedy_and_dense(new, ASKED, generate(llm, ASKED, 16))
        llm.collective_rpc("sparrow_acceptance")
        generate(llm, ASKED, 24, temperature=1.0, seed=3)
        metered = DraftAcceptance.from_dict(
            llm.collective_rpc("sparrow_acceptance")[0]["acceptance"]
        )
        sizes = [told["draft_weight_bytes"] for told in llm.collective_rpc("sparrow_describe")]
    whole = 2 * (64 * (4 + 2 * 2) * 32 + 4 * 32 * 64 + 3 * 64 * 96)
    assert len(sizes) == 2 and all(whole / 2 < size < 0.6 * whole for size in sizes)
    assert 0.7 < metered.mean < 0.98
