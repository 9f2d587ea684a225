"""Test the files that ``sparrow tune`` writes. They are read back unchanged and used for the nearest
batch. A file that is damaged, or that belongs to a different GPU or shape, is rejected.
"""

import json

import pytest
import torch

pytest.importorskip("triton")
import triton

from sparrow.attention import DecodeWorkspace, PageLayout, choose
from sparrow.attention.decode import H200, DecodeBatch, DeviceLimits
from sparrow.attention.triton import launch, saved
from sparrow.attention.triton import tuning as shipped_tables
from sparrow.attention.triton.saved import Cell, Choices, Measurement, Target
from sparrow.attention.triton.variants import ATTEND, RANK, Variant
from sparrow.errors import ConfigError

A100 = DeviceLimits(108, 163 * 1024)
TARGET = Target(
    "NVIDIA A100-SXM4-80GB",
    A100.multiprocessors,
    A100.shared_memory,
    triton.__version__,
    kv_heads=8,
    group=4,
    head_dim=128,
    cache_dtype="bfloat16",
    page_size=16,
)
FEW = Variant(attend=ATTEND[2], splits=2.0)
MANY = Variant(attend=ATTEND[-1], rank=RANK[0], extra=0.5)
CHOICES = Choices(
    TARGET,
    (
        Cell(4, FEW, (Measurement(64, 20.0, 15.0, 10.0),)),
        Cell(64, MANY, (Measurement(64, 200.0, 150.0, 100.0),)),
    ),
)
MODEL = dict(page_size=16, head_dim=128, kv_heads=8, group=4, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def a100(monkeypatch, tmp_path):
    """Pretend that there is an A100, and provide an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: TARGET.gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(saved, "device_limits", lambda device: A100)
    saved.read.cache_clear()
    saved._tuned.cache_clear()
    yield
    saved.read.cache_clear()
    saved._tuned.cache_clear()


def chosen(rows: int, device: str = "cuda", tokens: int = 1, **changed) -> tuple:
    """Return the shipped configuration for a batch on the A100, and the one actually used."""
    sizes = MODEL | changed
    items = rows * sizes["kv_heads"]
    config = shipped_tables.choose(items, sizes["kv_heads"], 256, A100)

    class Batch:  # the properties that determine the choice
        length_B = range(rows)
        q_BHD = torch.empty(0)
        k_cache = torch.empty(0, dtype=sizes["dtype"])
        layout = PageLayout(page_size=sizes["page_size"])
        kv_heads = sizes["kv_heads"]
        group = sizes["group"]
        head_dim = sizes["head_dim"]

    Batch.tokens = tokens
    Batch.q_BHD = type("OnDevice", (), {"device": torch.device(device)})
    return config, saved.tuned(Batch, config)


def test_saved_file_is_read_back_unchanged_from_the_user_cache_folder(tmp_path):
    path = CHOICES.save()
    assert path.parent == tmp_path / "sparrow" / "tuned"
    assert path.name.startswith("NVIDIA-A100-SXM4-80GB-8-4-128-bfloat16-pages16-triton3.")
    assert Choices.load(TARGET) == CHOICES


def test_shipped_configuration_is_used_without_a_tuned_file():
    for rows in (1, 4, 64, 300):
        config, used = chosen(rows)
        assert used is config
    assert not choose(None, **MODEL, device=torch.device("cuda")).is_tuned


@pytest.mark.parametrize(
    "rows, variant", [(1, FEW), (4, FEW), (16, FEW), (17, MANY), (64, MANY), (500, MANY)]
)
def test_batch_uses_the_variant_of_the_nearest_tuned_batch(rows, variant):
    CHOICES.save()
    config, used = chosen(rows)
    assert used == variant.of(config, 8, 256, A100) != config


def test_untuned_shapes_use_the_shipped_configuration():
    CHOICES.save()
    for changed in (
        dict(group=2),
        dict(page_size=32),
        dict(dtype=torch.float16),
        dict(kv_heads=4),
        dict(device="cpu"),
        dict(tokens=2),
    ):
        config, used = chosen(4, **changed)
        assert used is config, changed


def test_tuned_file_is_ignored_under_a_different_triton_version(monkeypatch):
    CHOICES.save()
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    config, used = chosen(4)
    assert used is config


def test_tuned_file_is_read_once_per_process():
    path = CHOICES.save()
    before = chosen(4)
    path.unlink()
    saved._tuned.cache_clear()
    assert chosen(4) == before


def test_launcher_uses_the_tuned_choice_unless_a_configuration_is_given(monkeypatch):
    k, v = torch.empty(8, 8, 16, 256, dtype=torch.bfloat16).split(128, dim=-1)
    q = torch.empty(4, 32, 128, dtype=torch.bfloat16)
    rows = torch.zeros(4, dtype=torch.int32)
    marks = torch.empty(8, 1, 8, 128, dtype=torch.bfloat16)
    table = torch.zeros(4, 8, dtype=torch.int32)
    batch = DecodeBatch(q, k, v, marks, table, rows, rows, q, PageLayout(), 1.0)
    workspace = DecodeWorkspace(4, 8, 4, 128, 8, "cpu")
    shipped = shipped_tables.choose(32, 8, 256, H200)
    assert launch.Launches(batch, workspace).config == shipped
    saved._tuned.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(saved, "read", lambda device, *sizes: CHOICES)
        assert launch.Launches(batch, workspace).config == FEW.of(shipped, 8, 256, A100)
        assert launch.Launches(batch, workspace, shipped).config is shipped


def test_reported_implementation_says_that_the_kernels_are_tuned():
    CHOICES.save()
    choice = choose(None, **MODEL, device=torch.device("cuda"))
    assert str(choice) == "triton as tuned by sparrow tune"
    assert str(choose("reference", **MODEL, device=torch.device("cuda"))) == "reference"


# --- files that are damaged or do not match ---


def damaged(change) -> str:
    """Change the record in the file, start an engine, and return its error about the file."""
    path = CHOICES.save()
    record = json.loads(path.read_text())
    changed = change(record)
    path.write_text(changed if isinstance(changed, str) else json.dumps(record))
    with pytest.raises(ConfigError) as refused:
        choose(None, **MODEL, device=torch.device("cuda"))
    message = str(refused.value)
    assert str(path) in message and message.endswith("delete it, or run sparrow tune again")
    return message


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"text"', "{}", '{"format": 1}', "[" * 100_000]
)
def test_tuned_file_without_a_valid_record_is_rejected(text):
    assert "is not a file from sparrow tune" in damaged(lambda record: text or " ")


@pytest.mark.parametrize(
    "field, value",
    [
        ("batch", 0),
        ("batch", "64"),
        ("batch", True),
        ("measured", [{"pages": 64}]),
        ("measured", None),
        ("variant", None),
        ("variant", {"attend": None}),
    ],
)
def test_damaged_cell_is_rejected(field, value):
    message = damaged(lambda record: record["cells"][0].update({field: value}))
    assert "is not a file from sparrow tune" in message


@pytest.mark.parametrize(
    "field, value",
    [
        ("attend", dict(tokens=48, stages=2, warps=4, resident=1)),
        ("rank", dict(pages=64, stages=2, warps=3)),
        ("extra", 1000.0),
        ("splits", [1]),
        ("splits", None),
    ],
)
def test_parameters_that_sparrow_tune_never_tries_are_rejected(field, value):
    message = damaged(lambda record: record["cells"][0]["variant"].update({field: value}))
    assert "which sparrow tune never chooses" in message


def test_tuned_file_for_a_different_gpu_or_shape_is_rejected():
    message = damaged(lambda record: record["target"].update(gpu="NVIDIA L40S", group=2))
    assert "is for {'gpu': 'NVIDIA L40S', 'group': 2}, expected {'gpu': 'NVIDIA A100" in message


def test_tuned_file_in_a_different_format_is_rejected():
    message = damaged(lambda record: record.update(format=0))
    assert "has format 0, but this version of Sparrow reads format 1" in message


def test_tuned_file_without_cells_is_rejected():
    assert "has no cells" in damaged(lambda record: record.update(cells=[]))
