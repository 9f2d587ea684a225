"""Test that when vLLM cannot start an engine, the error gives vLLM's reason and the remedy in one
sentence.
"""

import pytest
import torch
from pydantic import BaseModel, Field, ValidationError, field_validator

from sparrow.cli import loading
from sparrow.decoding import Decoding
from sparrow.engines.vllm.starting import LARGER_CACHE, LESS_MEMORY, sentence, starting
from sparrow.errors import ConfigError, EngineError


class CacheConfig(BaseModel):
    """A config with the same kind of validation as vLLM's."""

    gpu_memory_utilization: float = Field(default=0.9, le=1)
    max_model_len: int = 1

    @field_validator("max_model_len")
    @classmethod
    def check(cls, value):
        if value > 8192:
            raise ValueError(f"max_model_len ({value}) is greater than the derived one (8192).")
        return value


def refused(**options) -> ValidationError:
    with pytest.raises(ValidationError) as error:
        CacheConfig(**options)
    return error.value


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ValueError(
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` "
                "when initializing the engine. See https://docs.vllm.ai for more details."
            ),
            f"No available memory for the cache blocks; {LARGER_CACHE}",
        ),
        (
            ValueError(
                "To serve at least one request with the model's max seq len (8192), (0.5 GiB KV "
                "cache is needed, which is larger than the available KV cache memory (0.25 GiB). "
                "Based on the available memory, the estimated maximum model length is 4096. Try "
                "increasing `gpu_memory_utilization`. See https://docs.vllm.ai for more details."
            ),
            "To serve at least one request with the model's max seq len (8192), (0.5 GiB KV cache "
            "is needed, which is larger than the available KV cache memory (0.25 GiB); based on "
            f"the available memory, the estimated maximum model length is 4096; {LARGER_CACHE}",
        ),
        (
            ValueError(
                "Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU "
                "memory utilization (0.9, 71.19 GiB). Decrease GPU memory utilization or reduce "
                "GPU memory used by other processes."
            ),
            "Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU "
            f"memory utilization (0.9, 71.19 GiB); {LESS_MEMORY}",
        ),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
                "79.11 GiB of which 1.00 GiB is free. Of the allocated memory 70.00 GiB is "
                "allocated by PyTorch. If reserved memory is large try setting expandable_segments."
            ),
            "CUDA out of memory; tried to allocate 2.00 GiB; GPU 0 has a total capacity of 79.11 "
            f"GiB of which 1.00 GiB is free; {LESS_MEMORY}",
        ),
        (
            Exception(
                "WorkerProc initialization failed due to an exception in a background process. "
                "See stack trace for root cause."
            ),
            "WorkerProc initialization failed due to an exception in a background process; see "
            "its error message above",
        ),
        (
            TypeError("EngineArgs.__init__() got an unexpected keyword argument 'max_modle_len'"),
            "EngineArgs.__init__() got an unexpected keyword argument 'max_modle_len'; change the "
            "engine's options",
        ),
        (RuntimeError(), "RuntimeError; change the engine's options"),
    ],
)
def test_each_cause_of_a_failed_start_is_reported_with_a_remedy(error, expected):
    assert sentence(error) == expected


def test_invalid_vllm_setting_is_reported_with_its_name_and_the_broken_rule():
    assert sentence(refused(gpu_memory_utilization=2)) == (
        "gpu_memory_utilization: Input should be less than or equal to 1; change the engine's "
        "options"
    )
    assert sentence(refused(max_model_len=9000)) == (
        "max_model_len: max_model_len (9000) is greater than the derived one (8192); change the "
        "engine's options"
    )


def test_unrelated_errors_during_startup_are_raised_unchanged():
    for error in (ConfigError("refused"), KeyboardInterrupt(), AssertionError("a bug")):
        with pytest.raises(type(error)) as raised, starting():
            raise error
        assert raised.value is error


def test_options_of_the_wrong_type_are_reported():
    with pytest.raises(EngineError, match=r"^vLLM did not start: 'int' object"), starting():
        (3).items()


def test_death_of_a_worker_process_is_reported():
    with pytest.raises(EngineError, match="see its error message above"), starting():
        raise Exception("WorkerProc initialization failed due to an exception. See stack trace.")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("stock", "stock engines run vLLM without Sparrow; use engine vllm with --mode or --sched"),
        ("vllm", "Sparrow's settings are not .* options; set them with --mode, --schedule and"),
    ],
)
def test_sparrow_settings_among_an_engines_options_are_refused(written, message):
    spec = f'{written}:additional_config={{"sparrow":"lossless"}}'
    densely = Decoding.lossy("dense")
    with pytest.raises(
        ConfigError, match=f"^additional_config has 'sparrow' set to 'lossless', but {message}"
    ):
        loading.load_engine(spec, "reasoner", None, None, densely, "fp32", audits=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "stock"])
def test_cache_that_is_too_small_is_reported_in_one_sentence(tmp_path, kind):
    pytest.importorskip("vllm")
    from sparrow.engines.vllm import VLLMEngine
    from sparrow.engines.vllm.stock import StockEngine
    from sparrow.schedule import SparsitySchedule
    from tests.vllm import tiny_vllm

    tiny_vllm.checkpoint(tmp_path)
    options = {**tiny_vllm.OPTIONS, "kv_cache_memory_bytes": 2**12}
    with pytest.raises(EngineError, match=r"^vLLM did not start: .*max_model_len\)$") as refused:
        if kind == "vllm":
            VLLMEngine(str(tmp_path), SparsitySchedule.fixed(1), **options)
        else:
            StockEngine(str(tmp_path), skip_tokenizer_init=True, **options)
    assert "\n" not in str(refused.value)
    assert not torch.distributed.is_initialized(), "the next engine would find stale groups"
