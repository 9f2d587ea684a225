"""Test vLLM's configuration in lossless mode before a model is loaded, and which settings and
requests are refused.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sparrow.decoding import Decoding
from sparrow.errors import ConfigError
from sparrow.vllm import config, versions
from sparrow.vllm.lossless import setup

vllm = pytest.importorskip("vllm")
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402


def arguments(**given):
    stock = dict(
        model="m",
        speculative_config=None,
        scheduler_cls=None,
        async_scheduling=None,
        attention_backend=None,
        attention_config=None,
        compilation_config=None,
        cudagraph_capture_sizes=None,
        max_cudagraph_capture_size=None,
        enforce_eager=False,
        max_num_seqs=None,
        additional_config={},
        sleep_preserve_parameter_names=[],
    )
    return SimpleNamespace(**{**stock, **given})


def prepared(decoding=None, on_cpu=True, **given):
    made = arguments(**given)
    setup.prepare(made, decoding or Decoding.lossless(), on_cpu)
    return made


@pytest.fixture
def cuda_version(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.26.1")


def test_vllm_is_configured_to_draft_with_the_model_itself():
    made = prepared(Decoding.lossless(draft_tokens=5, adapt_draft_tokens=False))
    assert made.speculative_config == {
        "method": "draft_model",
        "model": "m",
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
        "num_speculative_tokens_per_batch_size": [(1, 1, 5)],
    }
    assert made.async_scheduling is True and made.scheduler_cls is None


def test_vllm_is_configured_to_load_a_head_that_guesses(monkeypatch):
    decoding = Decoding.lossless(draft_tokens=5, guess_tokens=3, guess_head="h")
    made = prepared(decoding)
    assert made.speculative_config["method"] == "eagle3"
    assert made.speculative_config["model"] == "h"
    assert made.speculative_config["num_speculative_tokens"] == 5
    assert made.sleep_preserve_parameter_names == ["draft.*"]  # kept when sleep drops weights
    setup.prepare(made, decoding, on_cpu=True)
    assert made.sleep_preserve_parameter_names == ["draft.*"]
    assert prepared().sleep_preserve_parameter_names == []
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    with pytest.raises(
        ConfigError, match=r"^guess_head needs vLLM 0.32 or later, got 0.31.2; .*, or leave guess"
    ):
        prepared(decoding, on_cpu=False)


def test_an_adaptive_draft_count_configures_choices_and_the_scheduler():
    made = prepared(Decoding.lossless(draft_tokens=7))
    ranges = made.speculative_config["num_speculative_tokens_per_batch_size"]
    assert ranges == [(1, 1, 0), (2, 2, 2), (3, 3, 5), (4, 4, 7)]
    assert made.scheduler_cls == "sparrow.vllm.lossless.scheduler.LosslessScheduler"


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("adapts", [True, False])
def test_preparing_the_configuration_is_idempotent(cuda_version, on_cpu, adapts, monkeypatch):
    monkeypatch.setattr(versions, "check", lambda on_cpu: None)
    decoding = Decoding.lossless(adapt_draft_tokens=adapts)
    made = prepared(decoding, on_cpu)
    before = dict(vars(made))
    setup.prepare(made, decoding, on_cpu)
    assert vars(made) == before


def test_the_backend_and_graph_sizes_are_set_on_a_gpu(cuda_version):
    made = prepared(
        Decoding.lossless(draft_tokens=8, adapt_draft_tokens=False), on_cpu=False, max_num_seqs=3
    )
    assert made.attention_backend == "CUSTOM"
    assert made.cudagraph_capture_sizes == [1, 2, 3, 9, 18, 27]
    kept = prepared(
        on_cpu=False, attention_config={"backend": "CUSTOM"}, cudagraph_capture_sizes=[1, 2]
    )
    assert kept.attention_backend is None and kept.cudagraph_capture_sizes == [1, 2]
    assert prepared(on_cpu=False, enforce_eager=True).cudagraph_capture_sizes is None


def naming(place, backend):
    return {place: backend if place == "attention_backend" else {"backend": backend}}


@pytest.mark.parametrize("place", ["attention_backend", "attention_config"])
def test_only_sparrows_attention_backend_is_accepted_on_a_gpu(cuda_version, place):
    with pytest.raises(
        ConfigError,
        match=r"^mode 'lossless' drafts with .* is 'FLASH_ATTN'; leave attention_backend and the",
    ):
        prepared(on_cpu=False, **naming(place, "flash_attn"))
    kept = prepared(on_cpu=False, **naming(place, AttentionBackendEnum.CUSTOM))
    assert (
        setup.backend_of(kept) == "CUSTOM"
        and vars(kept)[place] == naming(place, AttentionBackendEnum.CUSTOM)[place]
    )
    assert prepared(on_cpu=False, **naming(place, "auto")).attention_backend == "CUSTOM"
    other = prepared(on_cpu=False, attention_config={"flash_attn_version": 2})
    assert other.attention_backend == "CUSTOM"


def test_a_backend_registered_under_vllms_name_is_accepted(cuda_version, monkeypatch):
    """If the environment sets the mode, Sparrow's backend is also registered as FLASH_ATTN."""
    monkeypatch.setattr(AttentionBackendEnum, "is_overridden", lambda self: True)
    made = prepared(on_cpu=False, attention_config={"backend": "FLASH_ATTN"})
    assert made.attention_backend is None


def test_draft_count_choices_match_the_expected_values():
    assert setup.draft_choices(Decoding.lossless(draft_tokens=8)) == (0, 3, 5, 8)
    assert setup.draft_choices(Decoding.lossless(draft_tokens=1)) == (0, 1)
    assert setup.draft_choices(Decoding.lossless(draft_tokens=8, adapt_draft_tokens=False)) == (8,)


def test_synthetic_acceptance_can_be_requested():
    made = prepared(
        speculative_config={
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.9],
        }
    )
    assert made.speculative_config["rejection_sample_method"] == "synthetic"
    assert made.speculative_config["method"] == "draft_model"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            dict(speculative_config={"method": "ngram"}),
            "sets vLLM's speculative_config itself, got {'method': 'ngram'",
        ),
        (
            dict(speculative_config="ngram"),
            "sets vLLM's speculative_config itself, got 'ngram'; leave speculative_config out",
        ),
        (
            dict(speculative_config={"num_speculative_tokens": 3}),
            "speculative_config itself, .*leave speculative_config out",
        ),
        (
            dict(scheduler_cls="mine.Scheduler"),
            "scheduler_cls is 'mine.Scheduler'; leave scheduler_cls out",
        ),
        (
            dict(async_scheduling=False),
            "async_scheduling=False does not work with an adaptive number of drafts",
        ),
    ],
)
def test_options_incompatible_with_lossless_mode_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        prepared(**given)


def test_synthetic_acceptance_cannot_be_combined_with_drafter_invariance():
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9]}
    with pytest.raises(
        ConfigError, match="rejection_sample_method is 'synthetic'; leave out one of the two"
    ):
        prepared(Decoding.lossless(drafter_invariant=True), speculative_config=rates)
    assert (
        prepared(Decoding.lossless(drafter_invariant=True)).speculative_config["method"]
        == "draft_model"
    )


def test_compiled_models_are_cached_separately_for_different_settings(monkeypatch):
    """The settings are part of vLLM's configuration, even if an environment variable sets them."""
    monkeypatch.setenv("SPARROW_MODE", '{"mode": "lossless", "draft_weights": "fp8"}')
    decoding = config.requested(arguments())
    made = arguments(additional_config={"theirs": 1})
    config.store(made, decoding, on_cpu=True)
    assert made.additional_config == {"theirs": 1, "sparrow": decoding.to_dict()}
    config.store(made, config.requested(made), on_cpu=True)
    assert config.requested(made) == decoding and "theirs" in made.additional_config


def test_fixed_draft_count_works_with_any_scheduler():
    fixed = Decoding.lossless(adapt_draft_tokens=False)
    assert prepared(fixed, async_scheduling=False).async_scheduling is False
    assert prepared(fixed, scheduler_cls="mine.Scheduler").scheduler_cls == "mine.Scheduler"


@pytest.mark.parametrize(
    ("version", "on_cpu", "message"),
    [
        ("0.24.0", False, "does not run in vLLM 0.24.0; install 'vllm>="),
        ("0.31.0", True, "on CPUs, Sparrow needs vLLM 0.32 or later, got 0.31.0"),
    ],
)
def test_unsupported_vllm_versions_raise_errors(version, on_cpu, message, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ConfigError, match=message):
        versions.check(on_cpu)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(speculative_config=None), "vLLM has no speculative_config"),
        (dict(use_v2_model_runner=False), "it needs vLLM's V2 model runner"),
        (
            dict(parallel=dict(pipeline_parallel_size=2)),
            "it does not support pipeline parallelism; use tensor",
        ),
        (
            dict(parallel=dict(data_parallel_size=2), is_moe=True),
            "it does not support vLLM's data parallelism for mixtures of experts, where all ranks",
        ),
    ],
)
def test_configurations_that_would_prevent_drafting_raise_errors(wrong, message):
    parallel = SimpleNamespace(
        **{"pipeline_parallel_size": 1, "data_parallel_size": 1, **wrong.pop("parallel", {})}
    )
    model = SimpleNamespace(is_moe=wrong.pop("is_moe", False))
    made = SimpleNamespace(
        **{
            "speculative_config": object(),
            "use_v2_model_runner": True,
            "parallel_config": parallel,
            "model_config": model,
            **wrong,
        }
    )
    with pytest.raises(ConfigError, match=f"mode 'lossless': {message}"):
        setup.check_supported(made)


@pytest.mark.parametrize(
    ("wrong", "capability", "message"),
    [
        (
            dict(quant_config=object(), quantization="fp8"),
            90,
            r"vLLM already quantises the weights \(fp8\)",
        ),
        (dict(is_moe=True), 90, "experts, which are most of the model's weights, cannot be copied"),
        (
            dict(dtype=torch.float32),
            90,
            "vLLM's fp8 kernels return 16-bit values, but the model's dtype is torch.float32",
        ),
        ({}, 80, "the GPU cannot multiply in fp8, which needs compute capability 8.9 or later"),
        ({}, 89, None),
    ],
)
def test_draft_weights_setting_raises_an_error_if_weights_cannot_be_copied(
    monkeypatch, wrong, capability, message
):
    from vllm import platforms

    gpu = SimpleNamespace(
        is_cuda=lambda: True, has_device_capability=lambda needed: capability >= needed
    )
    monkeypatch.setattr(platforms, "_current_platform", gpu)
    model = {"quantization": None, "is_moe": False, "dtype": torch.bfloat16, **wrong}
    made = SimpleNamespace(
        quant_config=model.pop("quant_config", None), model_config=SimpleNamespace(**model)
    )
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        setup.check_draft_weights(made, on_cpu=False)


def test_draft_weights_are_refused_for_a_batch_invariant_engine(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    model = SimpleNamespace(quantization=None, is_moe=False, dtype=torch.float32)
    with pytest.raises(ConfigError, match="uses its own kernels; leave draft_weights out"):
        setup.check_draft_weights(
            SimpleNamespace(quant_config=None, model_config=model), on_cpu=True
        )


def test_the_weight_copy_is_renewed_however_vllm_changes_weights(monkeypatch):
    from sparrow.vllm import patches

    stale, done = [], []

    def update_weights(info):
        raise ValueError(info)

    worker = SimpleNamespace(
        reload_weights=lambda **given: done.append(given),
        update_weights=update_weights,
        finish_weight_update=lambda: "done",
        apply_model=lambda change: change("model"),
    )
    runtime = SimpleNamespace(renew_draft_weights=lambda: stale.append(len(stale)))
    monkeypatch.setattr(patches, "find", lambda vllm_config: runtime)
    patches.follow_weights(worker, None)
    worker.reload_weights(weights_path="somewhere")
    with pytest.raises(ValueError, match="half"):  # some weights may already have been written
        worker.update_weights("half")
    assert (
        worker.finish_weight_update() == "done"
        and done == [{"weights_path": "somewhere"}]
        and len(stale) == 3
    )
    worker.apply_model(done.append)
    assert done[-1] == "model" and len(stale) == 4
    monkeypatch.setattr(
        patches, "find", lambda vllm_config: None
    )  # before layers have their backend
    worker.reload_weights()
    assert len(stale) == 4


def speculative_configs():
    """Return vLLM's speculative configurations for lossless mode and for a different draft model."""
    ours, other = SimpleNamespace(), SimpleNamespace()
    setup.claim(ours)
    return ours, other


@pytest.mark.parametrize("name", setup.REFUSED_OPTIONS)
def test_requests_with_options_that_drafts_do_not_support_are_refused(name):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    from sparrow.vllm import plugin

    plugin.register()
    values = dict(
        structured_outputs=StructuredOutputsParams(choice=["a"]), logprob_token_ids=[3, 5]
    )
    asked = SamplingParams(**{name: values[name]})
    ours, other = speculative_configs()
    SamplingParams()._validate_spec_decode(ours)
    asked._validate_spec_decode(None)
    with pytest.raises(
        ValueError,
        match=f"^mode 'lossless' does not support {name}, got .*, because .*; leave {name} out, or",
    ):
        asked._validate_spec_decode(ours)
    with contextlib.suppress(VLLMValidationError):  # vLLM's own message, if there is one
        asked._validate_spec_decode(other)


def test_min_p_and_logit_bias_are_allowed_only_in_lossless_mode():
    from vllm import SamplingParams

    from sparrow.vllm import plugin

    plugin.register()
    ours, other = speculative_configs()
    asked = SamplingParams(min_p=0.25, logit_bias={3: 4.0})
    asked._validate_spec_decode(ours)
    assert asked.min_p == 0.25 and asked.logit_bias == {3: 4.0}
    with pytest.raises(Exception, match="not yet supported with speculative decoding"):
        asked._validate_spec_decode(other)
