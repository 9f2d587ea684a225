"""Test sparsity schedules: published tables and their bin edges, JSON, invalid values, and the
lookup table from which engines read page counts.
"""

import json
from dataclasses import fields
from math import inf
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow import schedule
from sparrow.attention import pages
from sparrow.errors import ConfigError
from sparrow.model.actor import ScheduleTable
from sparrow.schedule import ALL_PAGES, SparsitySchedule, auto_start

QWEN3_4B_086 = [
    29,
    45,
    61,
    77,
    93,
    125,
    157,
    221,
    253,
    253,
    317,
    317,
    317,
    317,
    381,
    381,
    381,
    381,
    509,
    509,
]
QWEN3_14B_086 = [
    29,
    45,
    77,
    125,
    253,
    381,
    381,
    381,
    381,
    381,
    381,
    381,
    381,
    381,
    381,
    509,
    637,
    637,
    893,
    893,
]

# Every published table is checked by its first, tenth and last entry, and by the sum of all twenty
# entries.
PUBLISHED = {
    "qwen3-1.7b-0.75": (29, 93, 93, 1540),
    "qwen3-1.7b-0.80": (29, 157, 157, 2500),
    "qwen3-1.7b-0.83": (29, 189, 189, 3092),
    "qwen3-1.7b-0.86": (29, 253, 253, 3972),
    "qwen3-1.7b-0.88": (45, 317, 317, 4964),
    "qwen3-1.7b-0.90": (45, 381, 381, 6164),
    "qwen3-1.7b-0.92": (61, 509, 509, 7972),
    "qwen3-1.7b-0.94": (77, 765, 765, 11668),
    "qwen3-4b-0.75": (29, 125, 189, 2212),
    "qwen3-4b-0.80": (29, 157, 221, 3108),
    "qwen3-4b-0.86": (29, 253, 509, 5124),
    "qwen3-4b-0.88": (29, 445, 637, 7844),
    "qwen3-4b-0.90": (45, 765, 893, 11300),
    "qwen3-4b-0.92": (45, 1021, 1149, 15604),
    "qwen3-8b-0.75": (29, 93, 157, 1844),
    "qwen3-8b-0.80": (29, 157, 253, 3108),
    "qwen3-8b-0.86": (29, 253, 445, 4872),
    "qwen3-8b-0.87": (29, 317, 509, 5908),
    "qwen3-8b-0.92": (45, 765, 1021, 13140),
    "qwen3-14b-0.86": (29, 381, 893, 7908),
}

lengths = st.lists(st.integers(0, 70_000) | st.integers(0, 2**30), min_size=1, max_size=8)


@st.composite
def schedules(draw, bins: int = 6, **layout):
    page_size = layout.pop("page_size", draw(st.integers(1, 64)))
    top_k = sorted(
        draw(st.lists(st.integers(0, 900) | st.just(ALL_PAGES), min_size=1, max_size=bins))
    )
    values = dict(
        top_k=tuple(top_k),
        page_size=page_size,
        bin_tokens=draw(st.integers(page_size, 5000)),
        sink_pages=draw(st.integers(0, 3)),
        recent_pages=draw(st.integers(1, 4)),
        dense_layers=tuple(draw(st.lists(st.integers(0, 40), max_size=3))),
        provenance=draw(
            st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=2)
        ),
    )
    return SparsitySchedule(**(values | layout))


# --- length to pages ---


def test_published_bins_end_at_page_boundaries():
    schedule = SparsitySchedule(top_k=tuple(range(20)))
    for length, expected in {
        1: 0,
        1984: 0,
        1985: 1,
        2000: 1,
        3984: 1,
        3985: 2,
        4000: 2,
        35_984: 17,
        35_985: 18,
        37_984: 18,
        37_985: 19,
        39_984: 19,
        39_985: 19,
        40_000: 19,
        131_072: 19,
        10_000_000: 19,
    }.items():
        assert schedule.pages(length) == expected, length


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 60_000))
def test_a_length_belongs_to_the_first_bin_that_ends_beyond_its_last_page(length):
    bins = [i for i in range(20) if -(-length // 16) < 125 * (i + 1)]
    assert SparsitySchedule(top_k=tuple(range(20))).pages(length) == (bins[0] if bins else 19)


def test_page_end_rounds_lengths_up_to_full_pages():
    assert SparsitySchedule.fixed(1).page_end([0, 1, 15, 16, 17, 1984, 1985]).tolist() == [
        0,
        16,
        16,
        16,
        32,
        1984,
        2000,
    ]
    assert SparsitySchedule.fixed(1, page_size=1).page_end(7) == 7


def test_page_counts_have_the_same_shape_as_the_lengths():
    schedule = SparsitySchedule(top_k=(3, 5), bin_tokens=64)
    many = schedule.pages([[1, 48], [49, 500]])
    assert many.dtype == np.int64 and many.tolist() == [[3, 3], [5, 5]]
    assert schedule.pages(40).tolist() == 3


@settings(deadline=None, max_examples=50)
@given(schedules(), lengths)
def test_page_counts_never_decrease_with_length(schedule, some):
    assert (np.diff(schedule.pages(sorted(some))) >= 0).all()


def test_multiplying_a_schedule_scales_each_bins_total_page_count():
    table = SparsitySchedule(
        top_k=(0, 1, 61, ALL_PAGES), bin_tokens=64
    )  # in addition to a sink page and two recent pages
    assert table.times(1) == table
    assert table.times(2).top_k == (3, 5, 125, ALL_PAGES)
    assert table.times(0.5).top_k == (0, 1, 29, ALL_PAGES)
    assert table.times(2).page_layout == table.page_layout


def test_tokens_read_are_limited_by_the_budget_and_the_length():
    schedule = SparsitySchedule(
        top_k=(2, 29), bin_tokens=160
    )  # kept: 2 + 3 = 5 pages, then 29 + 3 = 32
    assert schedule.tokens_read([1, 80, 81, 144]).tolist() == [1, 80, 80, 80]
    assert schedule.tokens_read([145, 512, 513]).tolist() == [145, 512, 512]
    assert (
        SparsitySchedule.fixed(2, sink_pages=0, recent_pages=1, page_size=8).tokens_read(1000) == 24
    )
    assert SparsitySchedule.dense().tokens_read([1, 40_000, 2**33]).tolist() == [1, 40_000, 2**33]


# --- presets ---


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_preset_matches_the_published_table(name):
    first, tenth, last, total = PUBLISHED[name]
    model, _, target = name.rpartition("-")
    schedule = SparsitySchedule.preset(model, float(target))
    assert len(schedule.top_k) == 20 and sum(schedule.top_k) == total
    assert schedule.pages([1, 19_000, 32_768 + 8192]).tolist() == [first, tenth, last]
    assert (schedule.bin_tokens, schedule.page_size) == (2000, 16)
    assert (schedule.sink_pages, schedule.recent_pages, schedule.dense_layers) == (1, 2, (0, 1))
    assert schedule.provenance["preset"] == name and schedule.provenance["target"] == float(target)
    assert "2606.08446" in schedule.provenance["source"]
    assert SparsitySchedule.load(name) == schedule


def test_all_entries_of_two_presets_match_the_published_tables():
    assert list(SparsitySchedule.preset("qwen3-4b").top_k) == QWEN3_4B_086
    assert list(SparsitySchedule.preset("Qwen3-14B", 0.86).top_k) == QWEN3_14B_086


def test_error_for_an_unknown_preset_lists_the_published_ones():
    with pytest.raises(
        ConfigError, match=r"no published schedule for 'Qwen3-32B' and 0\.86; published ones: "
    ) as error:
        SparsitySchedule.preset("Qwen3-32B")
    assert str(error.value).split("published ones: ")[1].split(", ") == sorted(PUBLISHED)


# --- load and JSON ---


def test_schedules_load_from_every_accepted_form(tmp_path):
    assert SparsitySchedule.load("dense").is_dense
    assert SparsitySchedule.load("fixed:29") == SparsitySchedule(top_k=(29,))
    assert not SparsitySchedule.load("fixed:29").is_dense
    assert list(SparsitySchedule.load("Qwen3-4B-0.86").top_k) == QWEN3_4B_086
    own = SparsitySchedule(
        top_k=(1, ALL_PAGES), bin_tokens=64, page_size=8, dense_layers=(), provenance={"by": "me"}
    )
    path = tmp_path / "own.json"
    path.write_text(own.to_json())
    for spec in (path, str(path)):
        loaded = SparsitySchedule.load(spec)
        assert loaded == own and loaded.provenance == {"by": "me"}


@pytest.mark.parametrize(
    "spec", ["fixed:", "fixed:-1", "fixed:2.5", "fixed:²", "fixed:" + "9" * 5000]
)
def test_error_for_an_invalid_page_count_names_the_accepted_range(spec):
    with pytest.raises(ConfigError) as error:
        SparsitySchedule.load(spec)
    assert str(error.value) == (f"no schedule {spec!r}: PAGES must be an integer in 0..{ALL_PAGES}")


@pytest.mark.parametrize("spec", ["dens", "fixed", "qwen3-4b"])
def test_error_for_an_invalid_schedule_name_lists_the_accepted_forms(spec):
    with pytest.raises(ConfigError) as error:
        SparsitySchedule.load(spec)
    message = str(error.value)
    assert message.startswith(
        f"no schedule {spec!r}: expected 'dense', 'fixed:PAGES', a JSON file, or one of "
    )
    assert all(name in message for name in PUBLISHED)


@settings(deadline=None, max_examples=50)
@given(schedules() | schedules(head_budgets=((1.5, 0.5), (0.25, 1.75)) * 21))
def test_schedules_survive_a_json_round_trip(schedule):
    back = SparsitySchedule.from_json(schedule.to_json())
    assert back == schedule and back.provenance == schedule.provenance
    assert SparsitySchedule.from_dict(schedule.to_dict()) == schedule


def test_json_represents_dense_bins_as_all_and_may_omit_defaults():
    assert json.loads(SparsitySchedule(top_k=(3, ALL_PAGES)).to_json())["top_k"] == [3, "all"]
    assert SparsitySchedule.from_json('{"top_k": [3, "all"]}') == SparsitySchedule(
        top_k=(3, ALL_PAGES)
    )


# --- invalid schedules ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(top_k=()), r"needs at least one length bin, got an empty top_k table"),
        (dict(top_k=(-1,)), r"top_k\[0\] must be an integer in 0\.\.1073741824, got -1"),
        (
            dict(top_k=(3, ALL_PAGES + 1)),
            r"top_k\[1\] must be an integer in .*, got 1073741825",
        ),
        (
            dict(top_k=(29, 45, 44)),
            r"falls from 45 in bin 1 to 44 in bin 2; raise it to at least 45",
        ),
        (
            dict(top_k=(ALL_PAGES, 1)),
            r'falls from all pages in bin 0 to 1 in bin 1; raise it to "all"',
        ),
        (dict(top_k=(1,), page_size=0), r"page_size <= bin_tokens, got 0 and 2000"),
        (dict(top_k=(1,), bin_tokens=15), r"page_size <= bin_tokens, got 16 and 15"),
        (dict(top_k=(1,), sink_pages=-1), r"sink_pages must be an integer .*, got -1"),
        (dict(top_k=(1,), recent_pages=0), r"recent_pages is 0, but must be at least 1"),
        (
            dict(top_k=(1,), dense_layers=(0, -1)),
            r"dense_layers\[1\] must be an integer in .*, got -1",
        ),
    ],
)
def test_invalid_schedule_values_raise_errors(fields, message):
    with pytest.raises(ConfigError, match=message):
        SparsitySchedule(**fields)
    with pytest.raises(ConfigError, match=message):
        SparsitySchedule.from_dict(fields)


def test_replacing_schedule_fields_validates_the_copy():
    schedule = SparsitySchedule(top_k=(1, 2))
    assert schedule.replace(page_size=8).page_size == 8 and schedule.page_size == 16
    with pytest.raises(ConfigError, match="falls from 2 in bin 0 to 1 in bin 1"):
        schedule.replace(top_k=(2, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{top_k: 1}", "the schedule is not valid JSON: "),
        ("[1, 2]", "a schedule must be a JSON object with a top_k table, got list"),
        ("{}", "a schedule needs the field top_k, the number of pages to keep"),
        (
            '{"top_k": [1], "pagesize": 8}',
            r"\[.*'page_size'.*\], of which top_k is required; got unknown fields \['pagesize'\]",
        ),
        ('{"top_k": 5}', "top_k must be a list of integers, got 5"),
        ('{"top_k": "all"}', "top_k must be a list of integers, got 'all'"),
        ('{"top_k": ["12"]}', r"top_k\[0\] must be an integer in .*, got '12'"),
        ('{"top_k": [2.5]}', r"top_k\[0\] must be an integer in .*, got 2\.5"),
        ('{"top_k": [null]}', r"top_k\[0\] must be an integer in .*, got None"),
        (
            '{"top_k": [1], "bin_tokens": "2000"}',
            "bin_tokens must be an integer in .*, got '2000'",
        ),
        ('{"top_k": [1], "page_size": 16.5}', r"page_size must be an integer in .*, got 16\.5"),
        (
            '{"top_k": [1], "dense_layers": 2}',
            "dense_layers must be a list of integers, got 2",
        ),
        (
            '{"top_k": [1], "dense_layers": ["a"]}',
            r"dense_layers\[0\] must be an integer in .*, got 'a'",
        ),
        ('{"top_k": [1], "provenance": 3}', "provenance must be a JSON object, got 3"),
        ("[" * 100_000, "the schedule is not valid JSON: "),
    ],
)
def test_files_without_a_valid_schedule_raise_errors(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        SparsitySchedule.from_json(text)
    path = tmp_path / "schedule.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        SparsitySchedule.load(path)


@pytest.mark.parametrize("layers", [{}, "", {"0": 1}])
def test_dense_layers_must_be_a_list(layers):
    with pytest.raises(ConfigError, match="dense_layers must be a list of integers, got"):
        SparsitySchedule.from_dict({"top_k": [1], "dense_layers": layers})


@pytest.mark.parametrize(
    "fields",
    [{"top_k": [True]}, {"dense_layers": [False]}, {"page_size": True}, {"sink_pages": True}],
)
def test_a_boolean_is_not_accepted_as_a_count(fields):
    with pytest.raises(
        ConfigError, match=r"must be an integer in 0\.\.1073741824, got (True|False)"
    ):
        SparsitySchedule.from_dict({"top_k": [1], **fields})


def test_duplicate_keys_in_a_schedule_raise_an_error():
    with pytest.raises(ConfigError, match="the key 'top_k' occurs twice"):
        SparsitySchedule.from_json('{"top_k": [1], "page_size": 8, "top_k": [2]}')


def test_a_schedule_can_set_the_dtype_of_landmarks():
    schedule = SparsitySchedule.from_dict({"top_k": [1], "landmark_dtype": "fp8_e4m3"})
    assert (
        SparsitySchedule.from_json(schedule.to_json())
        == schedule
        != schedule.replace(landmark_dtype="auto")
    )
    assert SparsitySchedule.preset("qwen3-4b").landmark_dtype == "auto"
    for wrong in ("fp8", None, ["auto"]):
        with pytest.raises(
            ConfigError, match=r"landmark_dtype must be one of \('auto', 'fp8_e4m3'\), got"
        ):
            SparsitySchedule(top_k=(1,), landmark_dtype=wrong)


@pytest.mark.parametrize("name", ["page_size", "sink_pages", "recent_pages", "bin_tokens"])
def test_schedule_values_above_the_limits_raise_errors(name):
    with pytest.raises(
        ConfigError, match=rf"{name} must be an integer in 0\.\.1073741824, got {2**60}"
    ):
        SparsitySchedule.from_dict({"top_k": [1], name: 2**60})
    with pytest.raises(ConfigError, match="page_size must be at most 65536 tokens, got 131072"):
        SparsitySchedule(top_k=(1,), page_size=2**17, bin_tokens=2**20)
    largest = SparsitySchedule(
        top_k=(ALL_PAGES - 1,),
        page_size=2**16,
        bin_tokens=2**30,
        sink_pages=ALL_PAGES,
        recent_pages=ALL_PAGES,
    )
    assert largest.tokens_read(2**62) == (3 * ALL_PAGES - 1) * 2**16  # in 64 bits


def test_schedule_file_that_is_not_utf_8_raises_an_error(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_bytes(b'{"top_k": [1], "provenance": {"by": "Andr\xe9"}}')
    with pytest.raises(
        ConfigError, match=r"schedule\.json is not a schedule: it is not UTF-8 text"
    ):
        SparsitySchedule.load(path)


def test_error_for_a_missing_schedule_file_does_not_list_presets(tmp_path):
    for missing in ("missing.json", str(tmp_path / "schedules" / "mine"), str(tmp_path)):
        with pytest.raises(ConfigError, match="cannot read the schedule file") as error:
            SparsitySchedule.load(missing)
        assert missing in str(error.value) and "qwen3" not in str(error.value)


def test_dense_layer_index_beyond_the_last_layer_raises_an_error():
    schedule = SparsitySchedule(top_k=(1,), dense_layers=(0, 4))
    schedule.check_model(5, kv_heads=2)
    with pytest.raises(
        ConfigError, match=r"keeps layer 4 dense, but .* 4 layers \(0\.\.3\); set dense_layers"
    ):
        schedule.check_model(4, kv_heads=2)


# --- budgets of layers and kv heads ---

UNEVEN = SparsitySchedule(
    (10, 20), bin_tokens=640, dense_layers=(0,), head_budgets=((9, 9), (0, 0.5), (1.5, 2))
)


def test_head_budgets_are_rounded_to_multiples_of_one_256th():
    third = SparsitySchedule((1,), dense_layers=(), head_budgets=((1 / 3, 5 / 3), (1, 1)))
    assert third.head_budgets == ((85 / 256, 427 / 256), (1.0, 1.0))
    assert (
        third.budget_units.tolist() == [[85, 427], [256, 256]]
        and third.budget_units.dtype == np.int32
    )
    assert UNEVEN.sparse_budget_units.tolist() == [[0, 128], [384, 512]]
    assert SparsitySchedule((1,)).sparse_budget_units.tolist() == [[256]]


def test_tokens_read_are_averaged_over_sparse_layers_and_heads():
    # By score, the heads read 0, 5, 15 and 20 pages, which is 10 on average. Each head also reads
    # the three pages that are always kept. No head reads more pages than the sequence has.
    assert UNEVEN.tokens_read(600) == (3 + 8 + 18 + 23) / 4 * 16
    assert UNEVEN.tokens_read([300, 40]).tolist() == [(48 + 128 + 288 + 300) / 4, 40]
    assert UNEVEN.pages_read([600, 300, 41]).tolist() == [13, (3 + 8 + 18 + 19) / 4, 3]
    assert UNEVEN.tokens_read(10_000) == 23 * 16 and UNEVEN.pages(10_000) == 20
    even = UNEVEN.replace(head_budgets=())
    assert (
        even.pages_read([600, 300, 41]).tolist() == [13, 13, 3]
        and even.tokens_read(600).dtype == np.int64
    )
    dense = UNEVEN.reading_everything()
    assert dense.is_dense and dense.tokens_read(5000) == 5000 and dense.dense_up_to == inf
    assert (
        SparsitySchedule((0,), head_budgets=((1,), (1,))).tokens_read(5000) == 48
    )  # all layers are dense


@pytest.mark.parametrize(
    ("spec", "start"),
    [
        ("auto", "dense"),
        ("auto:fixed:9", "fixed:9"),
        ("auto:", ""),
        ("automatic.json", None),
        ("fixed:9", None),
        (None, None),
    ],
)
def test_auto_schedule_names_the_schedule_it_starts_from(spec, start):
    assert auto_start(spec) == start


def test_reading_everything_keeps_the_layout():
    layout = dict(bin_tokens=64, page_size=8, recent_pages=1, landmark_dtype="fp8_e4m3")
    heads = dict(dense_layers=(0,), head_budgets=((1.0,), (1.0,)))
    everything = SparsitySchedule((1, 3), **layout, **heads).reading_everything()
    assert everything == SparsitySchedule((ALL_PAGES,), **layout, **heads) and everything.is_dense


def test_dense_length_is_limited_by_the_smallest_head_budget():
    layout = SparsitySchedule((6, 13, 20), bin_tokens=64, page_size=8, dense_layers=())
    assert layout.replace(head_budgets=((1, 1),)).dense_up_to == layout.dense_up_to == 128
    assert layout.replace(head_budgets=((0.9, 1.1),)).dense_up_to == 64  # 13 pages become 12
    assert layout.replace(head_budgets=((0.5, 1.5),)).dense_up_to == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("even", "head_budgets must be a list of numbers, got 'even'"),
        ((1, 1), r"head_budgets\[0\] must be a list of numbers, got 1"),
        (
            ((1, "2"),),
            r"head_budgets\[0\]\[1\] must be a number in 0\.\.64 that multiplies top_k, got '2'",
        ),
        (((1, True),), r"head_budgets\[0\]\[1\] must be a number in 0\.\.64 .* got True"),
        (((1, -0.5),), r"got -0\.5"),
        (((1, 64.5),), r"got 64\.5"),
        (((1, float("nan")),), "got nan"),
        (((1, float("inf")),), "got inf"),
        (
            ((1, 1), (1,)),
            "one row for each layer, with one number for each kv head, got rows of 2, 1 numbers",
        ),
        (((), ()), "got rows of 0, 0 numbers"),
        (
            ((1.02, 1), (1, 1.05)),
            r"must have a mean of 1 over the layers that are not dense, got 1\.018; divide them by 1\.018",
        ),
    ],
)
def test_invalid_head_budgets_raise_errors(rows, message):
    with pytest.raises(ConfigError, match=message):
        SparsitySchedule((1,), dense_layers=(), head_budgets=rows)


def test_head_budgets_are_written_only_if_set():
    plain = UNEVEN.to_dict()
    assert plain["head_budgets"] == [[9.0, 9.0], [0.0, 0.5], [1.5, 2.0]]
    assert SparsitySchedule.from_json(UNEVEN.to_json()) == UNEVEN != UNEVEN.replace(head_budgets=())
    assert "head_budgets" not in UNEVEN.replace(head_budgets=()).to_dict()


def test_head_budgets_made_for_a_different_model_raise_an_error():
    UNEVEN.check_model(3, kv_heads=2)
    for layers, heads in ((4, 2), (3, 4)):
        with pytest.raises(
            ConfigError,
            match=rf"for 3 layers with 2 kv heads, but the model has {layers} layers with {heads}",
        ):
            UNEVEN.check_model(layers, heads)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, ALL_PAGES), st.floats(0, 2), st.integers(0, 2**30))
def test_head_budgets_on_the_device_match_the_schedule(top_k, relative, length):
    schedule = SparsitySchedule(
        (top_k,), dense_layers=(), head_budgets=((relative, 2 - relative),), sink_pages=0
    )
    budgets = ScheduleTable(schedule).head_budgets(0, torch.device("cpu"))
    assert budgets.dtype == torch.int32 and budgets.tolist() == schedule.budget_units[0].tolist()
    kept = pages.head_top_k(torch.tensor([[top_k]]), budgets).flatten()
    assert schedule.tokens_read(length) == np.minimum(length, (kept.numpy() + 2) * 16).mean()


# --- the lookup table of an engine ---


@settings(deadline=None, max_examples=50)
@given(schedules(), lengths)
def test_the_lookup_table_matches_the_schedule(schedule, some):
    looked_up = ScheduleTable(schedule).top_k(torch.tensor(some))
    assert looked_up.dtype == torch.int32
    assert looked_up.tolist() == schedule.pages(some).tolist()


def test_the_lookup_table_keeps_the_shape_of_lengths_and_accepts_int32():
    length = torch.tensor([[1, 48], [49, 500]], dtype=torch.int32)
    assert ScheduleTable(SparsitySchedule(top_k=(3, 5), bin_tokens=64)).top_k(length).tolist() == [
        [3, 3],
        [5, 5],
    ]


def test_the_dense_length_matches_a_hand_calculation():
    def layout(*top_k):
        return SparsitySchedule(top_k, bin_tokens=64, page_size=8, dense_layers=(0,))

    assert layout(ALL_PAGES).dense_up_to == inf
    assert (
        layout(0, ALL_PAGES).dense_up_to == 0
    )  # a dense bin after a sparse one contains keys computed with sparse reads
    assert (
        layout(5, 13, 20).dense_up_to == 128
    )  # bin 0 reads 8 pages of 8 and bin 1 16 of 16, but bin 2 only 23 of 24
    assert layout(5, 12, 20).dense_up_to == 64
    assert layout(13).dense_up_to == 128 and layout(4).dense_up_to == 0
    assert layout(13, ALL_PAGES).dense_up_to == inf
    lengths = np.arange(1, 128)
    assert (layout(5, 13, 20).tokens_read(lengths) == lengths).all()


def test_schedule_and_attention_define_the_same_page_layout():
    """``PageLayout`` and schedules have separate definitions, because schedules must not import
    torch.
    """
    assert tuple(field.name for field in fields(pages.PageLayout)) == schedule.PAGE_LAYOUT
    assert get_args(schedule.LandmarkDtype) == get_args(pages.LandmarkDtype)
    assert (schedule.ALL_PAGES, schedule.BUDGET_UNIT) == (pages.ALL_PAGES, pages.BUDGET_UNIT)
    chosen = SparsitySchedule(
        (3,), page_size=8, sink_pages=2, recent_pages=4, landmark_dtype="fp8_e4m3"
    )
    assert pages.PageLayout(**chosen.page_layout) == pages.PageLayout(8, 2, 4, "fp8_e4m3")
