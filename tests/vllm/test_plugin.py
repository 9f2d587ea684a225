"""Test the parts of the plugin in isolation. vLLM is needed only for tests marked accordingly."""

import contextlib
import importlib
import importlib.util
import inspect
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sparrow import SparsitySchedule
from sparrow.decoding import Decoding
from sparrow.engines.vllm import client, engine
from sparrow.engines.vllm.server import VLLMServer, _rollout
from sparrow.errors import ConfigError, EngineError, UnsupportedModel
from sparrow.schedule import ALL_PAGES
from sparrow.vllm import config, control, fp8, versions
from sparrow.vllm.counters import PLAIN_PASSES
from sparrow.vllm.lossless import graphs, setup
from sparrow.vllm.runtime import Runtime, find

SCHEDULE = SparsitySchedule(top_k=(2, 4), bin_tokens=64, dense_layers=(0,))


def runtime(schedule: SparsitySchedule = SCHEDULE, sparse: int = 3, dense: int = 1) -> Runtime:
    made = Runtime(Decoding.lossy(schedule), max_rows=8, max_length=400, device=torch.device("cpu"))
    made.model.dense_layers, made.model.sparse_layers = (
        list(range(dense)),
        list(range(dense, dense + sparse)),
    )
    return made


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(
    made: Runtime, length_B: torch.Tensor, is_prefilling: torch.Tensor | None = None
) -> torch.Tensor:
    top_k_B = made.begin_step(len(length_B), is_prefilling)
    made.look_up(length_B)
    return top_k_B


@pytest.mark.parametrize(
    "other, message",
    [
        (
            dict(page_size=8),
            "meter_schedule has page_size 8, but draft_schedule has 16; both read the same cache",
        ),
        (
            dict(landmark_dtype="fp8_e4m3"),
            "has landmark_dtype 'fp8_e4m3', but draft_schedule has 'auto'",
        ),
        (
            dict(dense_layers=(1, 2)),
            r"layers \[0\] are sparse in meter_schedule but dense in draft_schedule; .* \[1, 2\]",
        ),
        (
            dict(head_budgets=((1,),) * 4),
            "meter_schedule has different head_budgets, but every step of a layer",
        ),
        (dict(dense_layers=(0, 2), top_k=(9,), bin_tokens=32), None),
    ],
)
def test_a_meter_schedule_must_be_compatible_with_the_draft_cache(other, message):
    made = runtime()
    refused = pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext()
    with refused:
        made.check_metered(SCHEDULE.replace(**other))


def test_steps_with_a_different_schedule_are_not_counted():
    made, other = runtime(), SCHEDULE.replace(top_k=(7,))
    step(made, lengths(100, 30))
    with made.uncounted(made.pages.of(other)):
        assert step(made, lengths(100, 30, 0)).tolist() == [7, 7, ALL_PAGES]
    assert step(made, lengths(100, 30)).tolist() == [4, 2]
    assert made.counters()["rows"] == 4


@pytest.mark.parametrize("version", ["0.24.0", "0.25.0"])
def test_unsupported_vllm_versions_raise_errors(version, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("vllm"), "__version__", version)
    message = f"does not run in vLLM {version}; install 'vllm{versions.SUPPORTED}'"
    with pytest.raises(ConfigError, match=message):
        versions.check(on_cpu=False)


@pytest.mark.parametrize(
    "version, on_cpu",
    [("0.26.0", 0), ("0.31.2", 0), ("0.32.0rc1", 1), ("0.33.1+cpu", 1), ("0.41.0", 0)],
)
def test_supported_versions_are_accepted(version, on_cpu, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("vllm"), "__version__", version)
    versions.check(on_cpu)


def test_the_vllm_extra_installs_the_supported_versions():
    project = Path(versions.__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm{versions.SUPPORTED}"]


def test_worker_with_an_unsupported_vllm_fails_before_allocating_memory(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("vllm"), "__version__", "0.25.1")
    monkeypatch.setattr(config, "requested", lambda of: Decoding.lossy(SCHEDULE))
    from sparrow.vllm import patches

    with pytest.raises(ConfigError, match=r"does not run in vLLM 0\.25\.1"):
        patches._checked_init_device(lambda worker: None)(
            SimpleNamespace(vllm_config=vllm_config())
        )


def test_the_cache_is_viewed_in_the_layout_expected_by_the_kernels():
    blocks, K, N, D = 3, 2, 32, 4
    k, v = torch.randn(2, blocks, K, N, D)
    side_by_side = torch.cat([k, v], -1)
    keys, values = versions.key_value(side_by_side)
    assert torch.equal(keys, k) and torch.equal(values, v)
    assert keys.data_ptr() == side_by_side.data_ptr() and keys.stride(-1) == values.stride(-1) == 1
    padded = torch.zeros(blocks, K * 2 * N * D + 7)
    cache = padded.as_strided((blocks, K, N, 2 * D), (padded.stride(0), 2 * N * D, 2 * D, 1))
    keys, values = versions.cpu_key_value(cache, "vec")
    keys.copy_(k), values.copy_(v)
    stored = padded[:, :-7].view(blocks, K, 2 * N * D)
    assert torch.equal(stored[..., : N * D].reshape(blocks, K, D, N), k.transpose(2, 3))
    assert torch.equal(stored[..., N * D :].reshape(blocks, K, N, D), v)
    with pytest.raises(ConfigError, match="'amx' CPU kernels"):
        versions.cpu_key_value(cache, "amx")


def test_sparse_engines_on_a_cpu_use_vllm_kernels_that_do_not_reorder_keys(monkeypatch):
    pytest.importorskip("vllm.version")
    from sparrow.vllm import cpu

    told = []

    def with_amx(builder, *arguments):
        builder.runtime, builder.isa = arguments[2], "amx"

    monkeypatch.setattr(cpu.SparseBuilder, "__init__", with_amx)
    monkeypatch.setattr(
        cpu.CpuBuilder,
        "_set_isa_to_layers",
        lambda builder, names: told.append((builder.isa, names)),
    )
    cpu.CpuBuilder("spec", ["layer"], "a runtime", "cpu")
    assert told == [("vec", ["layer"])]
    assert cpu.CpuBuilder("spec", ["layer"], None, "cpu").isa == "amx" and len(told) == 1


def test_workers_that_cannot_find_the_plugin_cause_an_error(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(ConfigError, match=r"VLLM_PLUGINS=other.*add 'sparrow' to VLLM_PLUGINS"):
        engine.check_discoverable()


def test_page_counts_of_a_step_match_a_hand_calculation():
    made = runtime()
    # A length of 64 fills four pages and belongs to the second bin, as with the published bin
    # edges.
    assert step(made, lengths(0, 48, 49, 63, 64, 400)).tolist() == [ALL_PAGES, 2, 4, 4, 4, 4]
    # Rows in prefill read everything; padding rows may be missing from the flags.
    assert step(made, lengths(48, 17, 0), torch.tensor([False, True])).tolist() == [
        2,
        ALL_PAGES,
        ALL_PAGES,
    ]
    assert step(made, lengths(48, 17, 0)).tolist() == [2, 2, ALL_PAGES]
    made.set_schedule(SparsitySchedule(top_k=(7, 8, 9), bin_tokens=100, dense_layers=(0,)))
    assert step(made, lengths(96, 97, 400)).tolist() == [7, 8, 9]
    made.set_schedule(
        SparsitySchedule.dense(dense_layers=(5,), page_size=8)
    )  # reads everything, so the layout does not matter
    assert step(made, lengths(1)).tolist() == [ALL_PAGES]
    with pytest.raises(ConfigError, match=r"'page_size': 16.*'page_size': 8"):
        made.set_schedule(SCHEDULE.replace(page_size=8))


def test_description_includes_the_lossless_settings():
    asked = Decoding.lossless(
        SCHEDULE, draft_tokens=3, adapt_draft_tokens=False, meter_schedule=SCHEDULE
    )
    told = Runtime(asked, max_rows=8, max_length=400, device=torch.device("cpu")).describe()
    settings = asked.to_dict()
    assert settings.pop("draft_schedule") == told["schedule"]
    assert len(settings) == 4 and settings.items() <= told.items()
    assert told["meter_every"] == 16
    assert runtime().describe()["mode"] == "lossy" and "draft_tokens" not in runtime().describe()


def test_page_counts_keep_their_address_for_captured_graphs():
    made = runtime()
    first = step(made, lengths(48, 64))
    made.set_schedule(SCHEDULE.replace(top_k=(1, 9)))
    second = step(made, lengths(64, 48))
    assert first.data_ptr() == second.data_ptr() and first.tolist() == [9, 1]


def test_counters_match_a_hand_calculation():
    made = runtime(sparse=3, dense=1)
    step(made, lengths(100, 40, 0))  # 100: 4 + 3 pages of 7, dense; 40: 2 + 3 pages of 3, dense
    step(made, lengths(160, 33, 0), torch.tensor([False, True, False]))  # 160: 7 pages of 10
    made.set_schedule(SparsitySchedule.fixed(0, dense_layers=(0,)))
    step(made, lengths(160))  # 3 pages of 10
    made.count_preempted(2)
    assert made.counters() == {
        "rows": 4,
        "tokens_held": 4 * (100 + 40 + 160 + 160),
        "tokens_read": (100 + 40 + 160 + 160) + 3 * (100 + 40 + 112 + 48),
        "pages_read": 3 * (7 + 3 + 7 + 3),
        "dense_rows_schedule": 0,
        "dense_rows_short": 2,
        "dense_rows_prefill": 1,
        "preemptions": 2,
        "dense_steps": 0,
    }
    assert not any(made.counters().values())
    made.set_schedule(SparsitySchedule.dense())
    step(made, lengths(160))
    assert made.counters()["dense_rows_schedule"] == 1


def test_steps_in_which_all_rows_read_everything_are_recognised_by_length():
    made = runtime()  # 2 + 3 pages, and 4 + 3 from a length of 49 on
    assert made.pages.whole_up_to == 7 * 16
    assert made.reads_everything(lengths(112, 0, 20)) and made.reads_everything(lengths())
    assert not made.reads_everything(lengths(20, 113))
    assert not made.reads_everything(None)  # in an engine whose host does not know the lengths
    # Where the second bin begins, it already reads less than the whole sequence, although later
    # bins read more.
    made.set_schedule(SCHEDULE.replace(top_k=(0, 0, 30), bin_tokens=40))
    assert made.pages.whole_up_to == 48
    made.set_schedule(SparsitySchedule.dense(dense_layers=(0,)))
    assert made.reads_everything(lengths(400))
    with made.uncounted(made.pages.of(SCHEDULE)):  # the self-check tests Sparrow's kernels
        assert not made.reads_everything(lengths(1))
    assert made.reads_everything(lengths(400))
    # one head may leave out pages although the others do not
    made = runtime(UNEVEN)
    assert made.pages.whole_up_to == 3 * 16


def test_dense_steps_and_their_rows_are_counted():
    made = runtime(sparse=3, dense=1)
    made.begin_step(3, torch.tensor([False, True, False]))
    made.begin_dense_step(lengths(100, 7, 40))
    made.begin_dense_step(lengths())  # a step with only prompts
    counts = made.counters()
    assert counts["dense_steps"] == 1
    assert (counts["rows"], counts["dense_rows_short"], counts["dense_rows_prefill"]) == (2, 2, 1)
    assert counts["tokens_read"] == counts["tokens_held"] == 4 * 140


def test_all_rows_count_as_dense_if_no_layer_is_sparse():
    made = runtime(sparse=0, dense=4)
    step(made, lengths(160, 40, 0))  # a sparse layer would read 7 pages of 10, and 3 of 3
    counts = made.counters()
    assert (counts["rows"], counts["dense_rows_schedule"], counts["dense_rows_short"]) == (2, 2, 0)
    assert counts["tokens_read"] == counts["tokens_held"] == 4 * 200


def test_page_counts_and_counters_follow_the_draft_budget():
    decoding = Decoding.lossless(
        SparsitySchedule.fixed(5, dense_layers=()), adapt_draft_budget=True
    )
    made = Runtime(decoding, max_rows=8, max_length=400, device=torch.device("cpu"))
    made.model.sparse_layers, used = [0], []
    made.drafting.meter = SimpleNamespace(use=used.append)
    pages = []
    # Drafts read 8, 4, 4 and 16 pages. These include the sink page and two recent pages.
    for budget in (1, 0, 0, 2):
        made.use_budget(budget)
        pages.append(step(made, lengths(400)).tolist())
    assert pages == [[5], [1], [1], [13]] and used == [0, 2]
    assert made.describe()["draft_budget"] == 2.0 and made.describe()["adapt_draft_budget"] is True
    counts = made.counters()
    assert (counts["pages_read"], counts["drafted"]) == (8 + 4 + 4 + 16, 4)
    made.set_schedule(SparsitySchedule.fixed(9, dense_layers=()))
    assert step(made, lengths(400)).tolist() == [21]  # the new schedule is doubled as well
    assert made.counters()["pages_read"] == 24
    assert not any(made.counters().values())


@pytest.mark.parametrize("passes", [1, PLAIN_PASSES - 1, PLAIN_PASSES, 2 * PLAIN_PASSES + 3])
def test_passes_without_drafts_are_counted_regardless_of_when_counters_are_read(passes):
    made = Runtime(
        Decoding.lossless(SCHEDULE), max_rows=8, max_length=400, device=torch.device("cpu")
    )
    made.model.sparse_layers, made.model.dense_layers = [1, 2], [0]
    for i in range(passes):
        made.passes.count_plain(np.array([100 + i, 2**31 - 1], np.int32)[: 1 + i % 2])
    counts = made.counters()
    read = sum(101 + i + i % 2 * 2**31 for i in range(passes))
    assert counts["tokens_read"] == counts["tokens_held"] == 3 * read
    assert counts["emitted"] == passes + passes // 2 and counts["drafted"] == 0
    assert not any(made.counters().values())
    assert made.acceptance() == {"cycles": {0: passes}} and made.acceptance() == {"cycles": {}}
    made.passes.count_plain(np.array([7], np.int32))
    assert made.acceptance() == {"cycles": {0: 1}} and made.counters()["tokens_read"] == 3 * 8


UNEVEN = SCHEDULE.replace(head_budgets=((1,) * 4, (0, 1, 2, 3), (0.5, 0.5, 0.5, 0.5), (0, 1, 1, 2)))


def test_counters_are_averaged_over_heads():
    made = runtime(UNEVEN, sparse=3, dense=1)
    # At length 400, heads read 4 of 25 pages on average and three more. At length 40, they read all
    # 3 pages.
    step(made, lengths(400, 40))
    counts = made.counters()
    assert counts["tokens_read"] == 440 + 3 * (16 * 7 + 40) and counts["pages_read"] == 3 * (7 + 3)
    assert counts["dense_rows_short"] == 1
    step(made, lengths(100))  # some heads keep 3 of 7 pages and some all
    kept = [3, 7, 7, 7, 5, 5, 5, 5, 3, 7, 7, 7]
    counts = made.counters()
    assert counts["tokens_read"] == int(100 + 3 * np.mean([min(100, 16 * n) for n in kept]))
    assert counts["pages_read"] == int(3 * np.mean(kept)) and counts["dense_rows_short"] == 0


def test_a_running_engines_head_budgets_cannot_change():
    made = runtime(UNEVEN)
    made.set_schedule(UNEVEN.replace(top_k=(7,)))
    made.set_schedule(SparsitySchedule.dense())
    for other in (
        SCHEDULE,
        UNEVEN.replace(head_budgets=UNEVEN.head_budgets[:1] + UNEVEN.head_budgets[:0:-1]),
    ):
        with pytest.raises(
            ConfigError,
            match=r"not the page layout or head_budgets; it was started with \{'head_budgets': ",
        ):
            made.set_schedule(other)
    assert made.describe()["schedule"]["top_k"] == ["all"]
    assert runtime(UNEVEN).describe()["schedule"]["head_budgets"][1] == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ConfigError, match="meter_schedule has no head_budgets"):
        made.check_metered(SCHEDULE)


def test_each_worker_uses_the_budgets_of_its_own_heads():
    made = runtime(UNEVEN)
    assert made.head_budgets(1, 4, 0, 1).tolist() == [0, 256, 512, 768]
    assert [made.head_budgets(1, 2, rank, 2).tolist() for rank in range(2)] == [
        [0, 256],
        [512, 768],
    ]
    assert [made.head_budgets(1, 1, rank, 4).tolist() for rank in range(4)] == [
        [0],
        [256],
        [512],
        [768],
    ]
    copies = [made.head_budgets(3, 1, rank, 8) for rank in range(8)]  # each head on two ranks
    assert [int(x) for x in copies] == [0, 0, 256, 256, 256, 256, 512, 512] and copies[
        0
    ].dtype == torch.int32
    assert runtime().head_budgets(1, 4, 0, 1) is None


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 400), min_size=1, max_size=8), max_size=6), st.integers(1, 64)
)
def test_counters_add_up_over_any_sequence_of_steps(steps, bin_pages):
    schedule = SCHEDULE.replace(bin_tokens=16 * bin_pages, top_k=(1, 2, 5))
    made = runtime(schedule, sparse=2, dense=2)
    for each in steps:
        step(made, lengths(*each))
    every = np.array([n for step in steps for n in step if n], dtype=np.int64)
    counts = made.counters()
    assert counts["rows"] == len(every)
    assert counts["tokens_held"] == 4 * every.sum()
    assert counts["tokens_read"] == 2 * every.sum() + 2 * sum(
        schedule.tokens_read(int(n)) for n in every
    )


@pytest.mark.parametrize(
    "mode, most, said",
    [
        ("FULL_DECODE_ONLY", 60, "Steps of 57 to 60 sequences .* set max_num_seqs to 56 or 64"),
        ("FULL_AND_PIECEWISE", 3, "Steps of 3 to 3 sequences .* set max_num_seqs to 2 or 4"),
        ("FULL_DECODE_ONLY", 64, ""),
        ("FULL_DECODE_ONLY", 1000, ""),  # larger than any captured size, like the default
        ("FULL", 60, ""),
        ("NONE", 60, ""),
    ],
)
def test_warning_is_logged_for_batch_sizes_without_a_cuda_graph(mode, most, said, monkeypatch):
    vllm = pytest.importorskip("vllm.config")
    warnings = []
    logger = SimpleNamespace(info=lambda text: None, warning=warnings.append)
    monkeypatch.setattr("vllm.logger.init_logger", lambda name: logger)
    monkeypatch.setattr(config, "requested", lambda of: Decoding.lossy(SCHEDULE))
    compilation = SimpleNamespace(
        cudagraph_mode=vllm.CUDAGraphMode[mode],
        cudagraph_capture_sizes=[1, 2, 4, *range(8, 121, 8)],
        static_forward_context={"layer": SimpleNamespace(impl=SimpleNamespace(runtime=runtime()))},
    )
    control.check(
        SimpleNamespace(
            compilation_config=compilation, scheduler_config=SimpleNamespace(max_num_seqs=most)
        )
    )
    assert len(warnings) == bool(said) and re.match(said, "".join(warnings))


@pytest.mark.parametrize(
    "mode, most, sizes, said",
    [
        ("FULL_AND_PIECEWISE", 1024, 256, "more than 256 sequences .* set max_num_seqs to 256, or"),
        ("FULL_DECODE_ONLY", 300, 256, "more than 256 sequences .* at least 13 times as many, and"),
        ("FULL_AND_PIECEWISE", 300, 300, ""),
        ("FULL_AND_PIECEWISE", 1, 1, ""),
        ("PIECEWISE", 1024, 256, ""),
        ("NONE", 1024, 256, ""),
    ],
)
def test_warning_is_logged_for_lossless_batches_without_a_cuda_graph(
    mode, most, sizes, said, monkeypatch
):
    vllm = pytest.importorskip("vllm.config")
    pytest.importorskip("vllm.triton_utils")  # this import also logs a message
    decoding = Decoding.lossless(SCHEDULE)
    warnings = []
    logger = SimpleNamespace(info=lambda text: None, warning=warnings.append)
    monkeypatch.setattr("vllm.logger.init_logger", lambda name: logger)
    monkeypatch.setattr(config, "requested", lambda of: decoding)
    made = Runtime(decoding, 4, 100, torch.device("cpu"))
    made.drafting.meter = SimpleNamespace(metered=None)
    engine = without_graphs({"layer": SimpleNamespace(impl=SimpleNamespace(runtime=made))})
    engine.scheduler_config.max_num_seqs = most
    engine.compilation_config.cudagraph_mode = vllm.CUDAGraphMode[mode]
    engine.compilation_config.cudagraph_capture_sizes = graphs.capture_sizes(
        sizes, setup.draft_choices(decoding)
    )
    control.check(engine)
    assert len(warnings) == bool(said) and re.search(said, "".join(warnings))


def test_kernels_in_the_config_override_the_environment(monkeypatch):
    def asked(additional):
        return config.kernels(SimpleNamespace(additional_config=additional))

    monkeypatch.delenv("SPARROW_KERNELS", raising=False)
    assert (
        asked({}) is None
        and asked(None) is None
        and asked({"sparrow_kernels": "triton"}) == "triton"
    )
    monkeypatch.setenv("SPARROW_KERNELS", "cuda")
    assert asked({}) == "cuda" and asked({"sparrow_kernels": "triton"}) == "triton"
    with pytest.raises(ConfigError, match="unknown sparrow_kernels 'flash'"):
        asked({"sparrow_kernels": "flash"})


def test_misspelt_settings_are_refused():
    for name in ("sparrow_kernal", "Sparrow", "SPARROW", "sparow"):
        given = {"sparrow": "dense", name: "triton", "other": 1, "sparse": 2}
        with pytest.raises(ConfigError, match=rf"^additional_config has no setting '{name}'"):
            config.requested(SimpleNamespace(additional_config=given))
    others = SimpleNamespace(additional_config={"other": 1, "sparse": 2})
    assert config.requested(others) is None


def test_a_schedule_in_the_config_overrides_the_environment(monkeypatch, tmp_path):
    def asked(additional):
        decoding = config.requested(SimpleNamespace(additional_config=additional))
        return decoding and decoding.schedule

    monkeypatch.delenv("SPARROW_MODE", raising=False)
    monkeypatch.delenv("SPARROW_SCHEDULE", raising=False)
    assert asked({}) is None and asked(None) is None
    assert asked({"sparrow": SCHEDULE.to_dict()}) == SCHEDULE
    assert asked({"sparrow": "fixed:9"}) == SparsitySchedule.fixed(9)
    (tmp_path / "schedule.json").write_text(SCHEDULE.to_json())
    for text in (
        str(tmp_path / "schedule.json"),
        SCHEDULE.to_json(),
        "  " + json.dumps(SCHEDULE.to_dict()),
    ):
        monkeypatch.setenv("SPARROW_SCHEDULE", text)
        assert asked({}) == SCHEDULE
        assert asked({"sparrow": "dense"}).is_dense
    monkeypatch.setenv("SPARROW_SCHEDULE", "qwen9-9b-0.99")
    with pytest.raises(ConfigError, match="no schedule 'qwen9-9b"):
        asked({})
    with pytest.raises(ConfigError, match="no schedule '3'"):
        asked({"sparrow": 3})


@pytest.mark.parametrize(
    "mode, schedule, expected",
    [
        ("", "", None),
        ("", "fixed:9", Decoding.lossy("fixed:9")),
        ("lossy", "fixed:9", Decoding.lossy("fixed:9")),
        ("lossless", "", Decoding.lossless()),
        ("lossless", "fixed:9", Decoding.lossless("fixed:9")),
        ("dense", "", Decoding.load("dense")),
        (' {"mode": "lossless", "draft_tokens": 4}', "", Decoding.lossless(draft_tokens=4)),
    ],
)
def test_the_environment_specifies_mode_and_schedule(mode, schedule, expected, monkeypatch):
    monkeypatch.setenv("SPARROW_MODE", mode)
    monkeypatch.setenv("SPARROW_SCHEDULE", schedule)
    assert config.from_environment() == expected


def test_conflicting_environment_variables_raise_an_error(monkeypatch):
    monkeypatch.setenv("SPARROW_MODE", '{"mode": "lossless"}')
    monkeypatch.setenv("SPARROW_SCHEDULE", "fixed:9")
    with pytest.raises(
        ConfigError, match=r"SPARROW_SCHEDULE='fixed:9' .* all settings; unset SPARROW_SCHEDULE$"
    ):
        config.from_environment()
    monkeypatch.setenv("SPARROW_MODE", "dense")
    with pytest.raises(
        ConfigError,
        match=r"^cannot use SPARROW_MODE='dense' and SPARROW_SCHEDULE='fixed:9' from the "
        r"environment: mode 'dense' has no setting 'schedule'",
    ):
        config.from_environment()


def vllm_config(model=None, **parts):
    model = dict(
        architecture="Some",
        use_mla=False,
        is_encoder_decoder=False,
        is_hybrid=False,
        is_mm_prefix_lm=False,
        is_attention_free=False,
        runner_type="generate",
        get_head_size=lambda: 128,
        get_total_num_hidden_layers=lambda: 4,
        get_total_num_kv_heads=lambda: 4,
    ) | (model or {})
    whole = dict(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, use_ubatching=False
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        kv_transfer_config=None,
    )
    return SimpleNamespace(model_config=SimpleNamespace(**model), **(whole | parts))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(model=dict(use_mla=True)), "Some has multi-head latent attention"),
        (dict(model=dict(is_encoder_decoder=True)), "cross-attention"),
        (dict(model=dict(is_attention_free=True)), "layers without attention"),
        (
            dict(cache_config=SimpleNamespace(cache_dtype="auto", sliding_window=128)),
            "Some has a sliding window of 128 tokens in every layer",
        ),
        (
            dict(model=dict(is_mm_prefix_lm=True)),
            "attention to images, which Some has; set language_model_only=True",
        ),
        (dict(model=dict(runner_type="pooling")), "the runner 'pooling'"),
        (
            dict(model=dict(get_total_num_hidden_layers=lambda: 0)),
            "layer 0 dense, but the model has 0 layers",
        ),
        (
            dict(speculative_config=SimpleNamespace(method="eagle3")),
            r"speculative decoding \(eagle3\)",
        ),
        (dict(kv_transfer_config=object()), "a KV connector"),
        (
            dict(cache_config=SimpleNamespace(cache_dtype="fp8_e5m2")),
            "kv_cache_dtype='fp8_e5m2'; set kv_cache_dtype='auto', 'fp8' or 'int8_per_token_head'",
        ),
        (
            dict(cache_config=SimpleNamespace(cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"])),
            "a KV cache with more than one dtype; leave kv_cache_dtype_skip_layers out",
        ),
        (
            dict(cache_config=SimpleNamespace(cache_dtype="fp8", calculate_kv_scales=True)),
            "KV scales calculated by vLLM, .*; leave calculate_kv_scales out",
        ),
        (
            dict(
                cache_config=SimpleNamespace(
                    cache_dtype="int8_per_token_head", kv_cache_dtype_skip_layers=["0"]
                )
            ),
            "a KV cache with more than one dtype; leave kv_cache_dtype_skip_layers out",
        ),
        (
            dict(cache_config=SimpleNamespace(cache_dtype="fp8_per_token_head")),
            "kv_cache_dtype='fp8_per_token_head'; set kv_cache_dtype='auto', 'fp8' or",
        ),
        (
            dict(
                parallel_config=SimpleNamespace(decode_context_parallel_size=2, use_ubatching=False)
            ),
            "decode context parallelism",
        ),
        (
            dict(
                parallel_config=SimpleNamespace(decode_context_parallel_size=1, use_ubatching=True)
            ),
            "dual-batch overlap",
        ),
    ],
)
def test_unsupported_configurations_raise_errors(wrong, message):
    config.check_supported(vllm_config(), Decoding.lossy(SCHEDULE), on_cpu=True)
    with pytest.raises((UnsupportedModel, ConfigError), match=message):
        config.check_supported(vllm_config(**wrong), Decoding.lossy(SCHEDULE), on_cpu=True)


@pytest.mark.parametrize(
    "decoding, cache, message",
    [
        (Decoding.lossless(SCHEDULE), {}, "mode 'lossless', .* removed from a state; set mode"),
        (
            Decoding.lossy(SCHEDULE.replace(head_budgets=((1, 1, 1, 1),) * 4)),
            {},
            "head_budgets, whose mean would include layers without full attention; leave",
        ),
        (
            Decoding.lossy(SCHEDULE),
            dict(cache_dtype="fp8"),
            "'fp8', which has not been tested; set",
        ),
        (
            Decoding.lossy(SCHEDULE),
            dict(prefix_match_unit=32),
            "prefix_match_unit=32, because vLLM",
        ),
    ],
)
def test_error_names_the_setting_that_does_not_work_with_a_hybrid_model(
    decoding, cache, message, monkeypatch
):
    monkeypatch.setattr(pytest.importorskip("vllm"), "__version__", "0.32.0")
    settings = dict(cache_dtype="auto", prefix_match_unit=None)
    works, fails = (
        vllm_config(dict(is_hybrid=True), cache_config=SimpleNamespace(**settings | changes))
        for changes in ({}, cache)
    )
    config.check_supported(works, Decoding.lossy(SCHEDULE), on_cpu=True)
    with pytest.raises(
        ConfigError, match=f"Some has a state .* layers, .* not support .*{message}"
    ):
        config.check_supported(fails, decoding, on_cpu=True)
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    with pytest.raises(ConfigError, match=r"hybrid models need vLLM 0\.32 or later, got 0\.31\.0"):
        config.check_supported(works, Decoding.lossy(SCHEDULE), on_cpu=True)


def guessing(adapt_draft_tokens=False, **changes):
    """Return the settings of a lossless engine with guesses."""
    return Decoding.lossless(
        SCHEDULE, adapt_draft_tokens=adapt_draft_tokens, **dict(guess_tokens=3) | changes
    )


@pytest.mark.parametrize(
    "decoding, change, message",
    [
        (guessing(True, adapt_draft_budget=True), {}, "guess_tokens=3: adapt_draft_budget has not"),
        (guessing(drafter_invariant=True), {}, "drafter_invariant has not been tested"),
        (guessing(meter_schedule=SCHEDULE), {}, "meter_schedule has not been tested"),
        (guessing(), dict(lora_config=object()), "LoRA adapters have not been tested"),
        (guessing(), dict(tensor_parallel_size=2), "tensor parallelism has not been tested"),
        (guessing(), dict(cache_dtype="fp8"), "kv_cache_dtype 'fp8' has not been tested"),
        (guessing(), dict(method="block"), "rejection_sample_method 'block' has not been tested"),
        (guessing(guess_tokens=16), {}, "set guess_tokens to 15 or less"),
        (guessing(guess_tokens=7), dict(heads=64), "each token takes 16; set guess_tokens to 3"),
        (guessing(), dict(max_num_seqs=512), "reads 2048 tokens, more than .* lower max_num_seqs"),
    ],
)
def test_error_names_the_setting_that_does_not_work_with_guesses(decoding, change, message):
    values = dict(tensor_parallel_size=1, cache_dtype="auto", method="standard", heads=16) | change
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda _: values["heads"], get_num_kv_heads=lambda _: 4
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=values["tensor_parallel_size"]),
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"]),
        scheduler_config=SimpleNamespace(
            max_num_seqs=values.get("max_num_seqs", 64), max_num_batched_tokens=1024
        ),
        speculative_config=SimpleNamespace(rejection_sample_method=values["method"]),
        lora_config=values.get("lora_config"),
    )
    with pytest.raises(ConfigError, match=message):
        setup.check_guesses(made, decoding)
    if not change:
        setup.check_guesses(made, guessing())
        setup.check_guesses(made, guessing(True))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_lossless_mode_supports_fp8_but_not_int8_caches(monkeypatch, on_cpu):
    monkeypatch.setattr("sparrow.vllm.lossless.setup.check_supported", lambda _: None)
    for name in ("fp8", "fp8_e4m3", "int8_per_token_head"):
        made = vllm_config(cache_config=SimpleNamespace(cache_dtype=name))
        config.check_supported(made, Decoding.lossy(SCHEDULE), on_cpu)
        if name != "int8_per_token_head":
            config.check_supported(made, Decoding.lossless(SCHEDULE), on_cpu)
    with pytest.raises(
        ConfigError,
        match=r"in lossless mode, because vLLM's own attention cannot read int8; set .* 'fp8'",
    ):
        config.check_supported(made, Decoding.lossless(SCHEDULE), on_cpu)


def test_fp8_cache_reports_its_scales_and_clipped_values(monkeypatch):
    made, said = runtime(), []
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(
                cudagraph_mode=None,
                cudagraph_capture_sizes=[],
                static_forward_context={
                    "layer": SimpleNamespace(impl=SimpleNamespace(runtime=made))
                },
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )
    )
    logger = SimpleNamespace(info=said.append)
    assert (
        not {"kv_cache", "kv_scales"} & set(made.describe()) and "kv_clipped" not in made.counters()
    )
    with pytest.raises(ConfigError, match=r"no fp8 KV cache.*kv_cache_dtype='fp8'"):
        control.sparrow_renew_kv_scales(worker)
    made.cache.in_8_bits = torch.float8_e4m3fn
    cache = made.cache.fp8 = fp8.Fp8Cache(torch.device("cpu"))
    layers = [fp8.LayerScales(2, cache) for _ in range(2)]
    assert made.describe()["kv_cache"] == "fp8_e4m3" and made.describe()["kv_scales"] is None
    for layer in layers:
        assert not cache.is_set
        layer.is_set = True
    layers[1].values.v[0], layers[0].values.k[1] = 0.25, 8
    assert made.describe()["kv_scales"] == [0.25, 8.0]
    cache.clipped += 3
    assert [made.counters()["kv_clipped"] for _ in range(2)] == [3, 0]
    control.sparrow_renew_kv_scales(worker)
    assert made.describe()["kv_scales"] is None
    if importlib.util.find_spec("vllm"):
        monkeypatch.setattr("vllm.logger.init_logger", lambda name: logger)
        monkeypatch.setattr(config, "requested", lambda of: Decoding.lossy(SCHEDULE))
        control.check(worker.vllm_config)
        assert said[0].endswith(
            "of the KV cache, which is in fp8_e4m3 (scales per layer and kv head)"
        )
        made.cache.fp8, made.cache.in_8_bits = None, None
        control.check(worker.vllm_config)
        assert said[1].endswith("of the KV cache")
        made.cache.in_8_bits = torch.int8
        control.check(worker.vllm_config)
        assert said[2].endswith(
            "of the KV cache, which is in int8_per_token_head (scales per token and kv head)"
        )


def test_int8_cache_has_no_scales_to_report_or_renew():
    made = runtime()
    made.cache.in_8_bits = torch.int8
    assert (
        made.describe()["kv_cache"] == "int8_per_token_head" and "kv_scales" not in made.describe()
    )
    assert "kv_clipped" not in made.counters()
    layers = {"layer": SimpleNamespace(impl=SimpleNamespace(runtime=made))}
    compilation = SimpleNamespace(static_forward_context=layers)
    worker = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    with pytest.raises(
        ConfigError,
        match=r"'int8_per_token_head', every token has scales .* none to renew; remove the call",
    ):
        control.sparrow_renew_kv_scales(worker)


def without_graphs(layers):
    """Return the configuration of an engine with these layers, which captures no CUDA graphs."""
    compilation = SimpleNamespace(static_forward_context=layers, cudagraph_mode=None)
    scheduler = SimpleNamespace(max_num_seqs=4)
    return SimpleNamespace(compilation_config=compilation, scheduler_config=scheduler)


def test_an_fp8_cache_uses_vllms_scales_in_lossless_mode(monkeypatch):
    decoding = Decoding.lossless(SCHEDULE)
    made = Runtime(decoding, 4, 100, torch.device("cpu"))
    made.cache.in_8_bits = torch.float8_e4m3fn
    made.drafting.meter = SimpleNamespace(metered=None)
    monkeypatch.setattr(made, "acceptance", dict)  # the meter has no data
    cache = made.cache.fp8 = fp8.Fp8Cache(torch.device("cpu"), sets_scales=False)
    for of_layer, expected in (
        (torch.tensor(0.25), [0.25, 0.25]),
        (torch.tensor([0.5, 2.0]), [0.5, 2.0]),
    ):
        scales = fp8.LayerScales(
            2, cache, SimpleNamespace(_k_scale=of_layer, _v_scale=4 * of_layer)
        )
        assert scales.values.k.tolist() == expected and scales.values.v.tolist() == [
            4 * x for x in expected
        ]
        made.begin_serving()
        scales.set_once(
            torch.full((1, 2, 8), 1e4),
            torch.full((1, 2, 8), 1e4),
            torch.zeros(1, dtype=torch.int64),
        )
        assert scales.values.k.tolist() == expected
    assert made.describe()["kv_cache"] == "fp8_e4m3" and "kv_scales" not in made.describe()
    assert "kv_clipped" not in made.counters()
    layers = {"layer": SimpleNamespace(impl=SimpleNamespace(runtime=made))}
    worker = SimpleNamespace(vllm_config=without_graphs(layers))
    with pytest.raises(
        ConfigError,
        match="vLLM sets the scales of an fp8 KV cache, and they never change; remove the call",
    ):
        control.sparrow_renew_kv_scales(worker)
    if importlib.util.find_spec("vllm"):
        importlib.import_module("vllm.triton_utils")  # this import also logs a message
        said: list[str] = []
        logger = SimpleNamespace(info=said.append)
        monkeypatch.setattr("vllm.logger.init_logger", lambda name: logger)
        monkeypatch.setattr(config, "requested", lambda of: decoding)
        control.check(worker.vllm_config)
        assert (
            "verifies them; samples follow the policy with a KV cache in fp8_e4m3. Draft logits"
            in said[0]
        )


def test_a_meter_schedule_is_logged_at_start(monkeypatch):
    pytest.importorskip("vllm.triton_utils")  # this import also logs a message
    other = SCHEDULE.replace(top_k=(3, 5))
    decoding = Decoding.lossless(SCHEDULE, meter_schedule=other, meter_every=7)
    made = Runtime(decoding, 4, 100, torch.device("cpu"))
    made.drafting.meter = SimpleNamespace(metered=SimpleNamespace(schedule=other))
    layers = {"layer": SimpleNamespace(impl=SimpleNamespace(runtime=made))}
    said: list[str] = []
    monkeypatch.setattr("vllm.logger.init_logger", lambda name: SimpleNamespace(info=said.append))
    monkeypatch.setattr(config, "requested", lambda of: decoding)
    control.check(without_graphs(layers))
    assert (
        "Once every 7 cycles" in said[0]
        and "(dense layers: [0]; top-k pages per bin of 64 tokens: [3, 5])" in said[0]
    )


def test_unsupported_head_sizes_raise_an_error_only_on_a_gpu():
    odd = vllm_config(dict(get_head_size=lambda: 48))
    config.check_supported(odd, Decoding.lossy(SCHEDULE), on_cpu=True)
    config.check_supported(vllm_config(), Decoding.lossy(SCHEDULE), on_cpu=False)
    with pytest.raises(UnsupportedModel, match="heads of size 48, but the decode kernels support"):
        config.check_supported(odd, Decoding.lossy(SCHEDULE), on_cpu=False)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(kv_cache_dtype="fp8_e5m2"), "a KV cache in 'fp8_e5m2'"),
        (dict(attn_type="encoder_decoder"), "'encoder_decoder'"),
        (dict(alibi_slopes=[0.5]), "ALiBi"),
        (dict(logits_soft_cap=30.0), "soft-capped logits"),
        (dict(sinks=torch.zeros(4)), "attention sinks"),
        (dict(kv_sharing_target_layer_name="model.layers.0"), "a KV cache shared"),
    ],
)
def test_layers_with_unsupported_attention_raise_errors(wrong, message):
    plain = dict(
        kv_cache_dtype="auto",
        sliding_window=None,
        attn_type="decoder",
        alibi_slopes=None,
        logits_soft_cap=None,
        sinks=None,
        kv_sharing_target_layer_name=None,
    )
    config.check_layer(plain)
    config.check_layer(plain | dict(sliding_window=128))
    with pytest.raises(UnsupportedModel, match=message):
        config.check_layer(plain | wrong)


def test_the_runtime_is_found_in_a_models_layers():
    made = runtime()
    layers = {
        "a": object(),
        "b": SimpleNamespace(impl=object()),
        "c": SimpleNamespace(impl=SimpleNamespace(runtime=made)),
    }
    for context, expected in ((layers, made), ({"a": object()}, None)):
        of = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
        assert find(of) is expected


def test_weight_files_contain_every_tensor_and_are_deleted(monkeypatch):
    monkeypatch.setattr(client, "CHUNK_BYTES", 70)
    weights = {
        f"w{i}": torch.randn(5, 3).T if i % 2 else torch.randn(7, dtype=torch.bfloat16)
        for i in range(7)
    }
    seen, paths = {}, []
    for path in client.weight_files(weights.items()):
        paths.append(path)
        seen |= load_file(path)
    assert len(paths) == 4 and seen.keys() == weights.keys()
    assert all(torch.equal(seen[name], weights[name]) for name in weights)
    with pytest.raises(FileNotFoundError):
        load_file(paths[-1])


@pytest.mark.parametrize("free, in_memory", [(64, False), (10**6, True)])
def test_weights_that_exceed_shared_memory_are_written_to_disk(
    monkeypatch, tmp_path, free, in_memory
):
    (shared := tmp_path / "shared").mkdir()
    monkeypatch.setattr(client, "SHARED_MEMORY", str(shared))
    monkeypatch.setattr(client.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    for path in client.weight_files([("w", torch.ones(16))]):  # 64 bytes
        assert load_file(path)["w"].sum() == 16 and Path(path).is_relative_to(shared) is in_memory
    assert not list(shared.iterdir())


@pytest.mark.parametrize("as_text", [True, False], ids=["0.26", "0.32"])
def test_lists_from_a_server_are_truncated_and_sorted(as_text):
    def entry(token, logprob):
        return (
            {"token": f"token_id:{token}", "logprob": logprob}
            if as_text
            else {"token_id": token, "logprob": logprob}
        )

    def position(sampled, *best):  # the sampled token first, three entries in all
        return {**entry(*sampled), "top_logprobs": [entry(*e) for e in (sampled, *best)][:3]}

    content = [
        position((9, -7.0), (4, -0.1), (5, -0.2), (6, -3.0)),
        position((5, -0.2), (4, -0.1), (6, -3.0)),
    ]
    rollout = _rollout(
        [1],
        {"logprobs": {"content": content}, "token_ids": [9, 5], "finish_reason": "length"},
        top_n=2,
    )
    assert rollout.response_ids.tolist() == [9, 5] and rollout.logprobs.tolist() == pytest.approx(
        [-7.0, -0.2]
    )
    assert rollout.top_ids.tolist() == [[4, 5], [4, 5]]
    assert rollout.top_logprobs.ravel().tolist() == pytest.approx([-0.1, -0.2] * 2)


def test_unreachable_server_raises_an_error():
    with pytest.raises(
        EngineError, match=r"no vLLM server answers at http://localhost:9 .*start one"
    ):
        VLLMServer("http://localhost:9/", SCHEDULE)


def test_registering_the_plugin_is_idempotent():
    pytest.importorskip("vllm.version")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    from sparrow.vllm import plugin

    plugin.register()
    wrapped = WorkerWrapperBase.initialize_from_config
    plugin.register()
    assert WorkerWrapperBase.initialize_from_config is wrapped
    assert AttentionBackendEnum.CPU_ATTN.get_path() == plugin.CPU
    assert WorkerBase.sparrow_counters.__name__ == "sparrow_counters"


def engine_arguments(**given):
    stock = dict(additional_config={}, attention_backend=None, attention_config=None)
    return SimpleNamespace(**{**stock, **given})


@pytest.mark.parametrize(
    "given, backend",
    [
        ({}, "CUSTOM"),
        ({"attention_backend": "FLASH_ATTN"}, "FLASH_ATTN"),
        ({"attention_config": {"backend": "FLASH_ATTN"}}, None),
        ({"attention_config": SimpleNamespace(backend=None)}, "CUSTOM"),
    ],
)
def test_environment_variables_configure_an_engine_like_its_config(given, backend):
    """This also holds if an engine without Sparrow has started before. FlashAttention is then
    vLLM's own.
    """
    made = engine_arguments(**given, additional_config={"theirs": 1})
    config.store(made, Decoding.lossy(SCHEDULE), on_cpu=False)
    assert made.attention_backend == backend and made.additional_config["theirs"] == 1
    assert config.requested(made) == Decoding.lossy(SCHEDULE)
    by_config = engine_arguments(**given, additional_config={"sparrow": SCHEDULE.to_dict()})
    config.store(by_config, Decoding.lossy(SCHEDULE), on_cpu=False)
    assert by_config.attention_backend == given.get("attention_backend")
    on_cpu = engine_arguments()
    config.store(on_cpu, Decoding.lossy(SCHEDULE), on_cpu=True)
    assert on_cpu.attention_backend is None


def test_sparrows_backend_without_settings_is_recognised(monkeypatch):
    pytest.importorskip("vllm.version")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    paths = {AttentionBackendEnum.CUSTOM: "sparrow.vllm.cuda.CudaBackend"}
    monkeypatch.setattr(AttentionBackendEnum, "is_overridden", lambda self: self in paths)
    monkeypatch.setattr(AttentionBackendEnum, "get_path", lambda self: paths[self])
    unset = engine_arguments(attention_backend="CUSTOM")
    assert config.is_ours_but_unset(unset)
    assert not config.is_ours_but_unset(engine_arguments())
    dense = engine_arguments(attention_backend="CUSTOM", additional_config={"sparrow": "dense"})
    assert not config.is_ours_but_unset(dense)
    paths[AttentionBackendEnum.CUSTOM] = "theirs.Backend"
    assert not config.is_ours_but_unset(unset)


def test_an_engine_without_sparrow_uses_stock_flash_attention_even_after_a_sparse_engine(
    monkeypatch,
):
    vllm = pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(vllm, "__version__", "0.26.1")
    cuda = importlib.import_module("sparrow.vllm.cuda")
    plain, asked = VllmConfig(), VllmConfig(additional_config={"sparrow": SCHEDULE.to_dict()})
    stock = flash_attn.FlashAttentionMetadataBuilder.get_cudagraph_support(plain, None)
    assert cuda.CudaBuilder.get_cudagraph_support(plain, None) == stock
    with set_current_vllm_config(plain):
        assert cuda.CudaFlashBackend.get_impl_cls() is flash_attn.FlashAttentionImpl
        assert not cuda.CudaFlashBackend.supports_kv_cache_dtype("int8_per_token_head")
    with set_current_vllm_config(asked):
        assert cuda.CudaFlashBackend.get_impl_cls() is cuda.CudaImpl
        assert cuda.CudaFlashBackend.supports_kv_cache_dtype("int8_per_token_head")


def test_the_environment_is_restored_even_after_an_exception(monkeypatch):
    monkeypatch.setenv("SPARROW_SCHEDULE", "fixed:3")
    monkeypatch.delenv("SPARROW_MODE", raising=False)
    with (
        pytest.raises(KeyError),
        config.variables({"SPARROW_MODE": "lossless", "SPARROW_SCHEDULE": None}),
    ):
        assert config.from_environment() == Decoding.lossless()
        raise KeyError
    assert config.from_environment() == Decoding.lossy("fixed:3")


def test_invalid_environment_variables_stop_vllm_at_registration(monkeypatch):
    pytest.importorskip("vllm.version")
    from sparrow.vllm import plugin

    monkeypatch.setenv("SPARROW_SCHEDULE", "fixed:x")
    with pytest.raises(ConfigError, match="no schedule 'fixed:x'"):
        plugin.register()


def test_every_patched_name_exists_with_the_expected_parameters():
    vllm = pytest.importorskip("vllm")
    from sparrow.vllm import patches

    tables = [value for value in vars(patches).values() if isinstance(value, tuple) and value]
    every = [patch for table in tables for patch in table if isinstance(patch, patches.Patch)]
    assert len(every) >= 5
    for patch in every:
        assert len(patch.reason) > 20
        if patch.applies_to(vllm.__version__):
            _, _, stock = patch.find()
            assert set(patch.parameters) <= set(inspect.signature(stock).parameters), patch.target


def test_patching_a_missing_name_fails_with_an_error_that_names_it(monkeypatch):
    vllm = pytest.importorskip("vllm")
    from sparrow.vllm import patches

    def stock(a):
        return a

    monkeypatch.setattr(vllm, "sparrow_test", stock, raising=False)

    def patch(target="vllm:sparrow_test", versions=">=0.1", parameters=("a",)):
        return (
            patches.Patch(target, versions, "", lambda stock: lambda a: stock(a) + 1, parameters),
        )

    patches.apply(patch(versions="<0.1"))
    assert vllm.sparrow_test is stock
    for _ in range(2):  # the second call changes nothing
        patches.apply(patch())
        assert vllm.sparrow_test(1) == 2
    monkeypatch.setattr(vllm, "sparrow_test", stock)
    with pytest.raises(ConfigError, match="vllm:sparrow_test has no parameter 'b'; install vllm"):
        patches.apply(patch(parameters=("b",)))
    with pytest.raises(ConfigError, match="vllm:sparrow_gone is missing"):
        patches.apply(patch(target="vllm:sparrow_gone"))


@pytest.mark.parametrize("drafts", [False, True])
def test_preemptions_are_counted_with_any_executor(drafts, monkeypatch):
    """Ray's executor calls the model runner directly. Warm-up steps preempt nothing and serve no
    user, and the engine checks itself only after them.
    """
    from sparrow.vllm import patches
    from sparrow.vllm.selfcheck import engine as engine_check

    calls = []
    monkeypatch.setattr(engine_check, "check_engine", lambda *of: calls.append("checked"))
    runtime = SimpleNamespace(
        count_preempted=lambda n: calls.append(n),
        begin_serving=lambda: calls.append("serving"),
    )
    vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(impl=SimpleNamespace(runtime=runtime))}
        )
    )
    runner = SimpleNamespace(
        execute_model=lambda output, *rest, dummy_run=False: (output, rest, dummy_run)
    )
    told = []
    if drafts:
        runner.speculator = SimpleNamespace(begin_step=told.append)

    def warm_up():
        worker.model_runner.execute_model(SimpleNamespace(preempted_req_ids=None), dummy_run=True)
        return "seconds"

    worker = SimpleNamespace(model_runner=runner, compile_or_warm_up_model=warm_up)
    patches.watch(worker, vllm_config)
    assert worker.compile_or_warm_up_model() == "seconds" and calls == ["checked", "serving"]
    calls.clear()
    assert worker.compile_or_warm_up_model() == "seconds" and not calls  # blocks may be in use now
    told.clear()
    step = SimpleNamespace(preempted_req_ids={"a", "b"})
    assert runner.execute_model(step, None, dummy_run=False) == (step, (None,), False)
    assert runner.execute_model(SimpleNamespace(preempted_req_ids=set()))[1:] == ((), False)
    assert calls == [2]
    assert [each.preempted_req_ids for each in told] == ([{"a", "b"}, set()] if drafts else [])
