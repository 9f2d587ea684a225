"""Test which batches lossless mode has CUDA graphs for, and which graph each batch uses. No graph
is captured.
"""

import inspect
from types import SimpleNamespace

import pytest

from sparrow.decoding import Decoding
from sparrow.vllm import config, patches
from sparrow.vllm.lossless import graphs
from sparrow.vllm.lossless.setup import draft_choices

vllm = pytest.importorskip("vllm")
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager  # noqa: E402

ROWS = 64
CHOICES = draft_choices(Decoding.lossless())


def test_capture_sizes_cover_every_batch_with_and_without_drafts():
    assert graphs.capture_sizes(5, (0, 2, 4)) == [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 25]
    sizes = graphs.capture_sizes(100, (0, 8))
    assert {100, 900, 96, 864, 64, 576} <= set(sizes) and max(sizes) == 900
    assert sizes == sorted(set(sizes))


def manager(init_candidates, rows, sizes):
    """Return vLLM's graph dispatcher for ``rows`` sequences, in its state after capturing graphs of
    these sizes.
    """
    made = CudaGraphManager.__new__(CudaGraphManager)
    ranges = [(n, n, drafts) for n, drafts in enumerate(CHOICES, start=1)]
    speculative = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: True,
        num_speculative_tokens_per_batch_size=ranges,
    )
    vars(made).update(
        vllm_config=SimpleNamespace(
            speculative_config=speculative,
            num_speculative_tokens=CHOICES[-1],
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
        ),
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        max_num_reqs=rows,
        decode_query_len=CHOICES[-1] + 1,
        varlen_decode=False,
        ubatch_runner=None,
        lora_capture_cases=[0],
        _lora_dispatch_map={},
        _max_lora_case=0,
        _candidates={},
        _capture_descs={},
        _graphs_captured=True,
    )
    init_candidates(made)
    return made


def stock_and_patched(monkeypatch, decoding, rows=ROWS, sizes=None):
    sizes = sizes or graphs.capture_sizes(rows, CHOICES)
    stock = inspect.unwrap(CudaGraphManager._init_candidates)  # another test may have replaced it
    monkeypatch.setattr(config, "requested", lambda vllm_config: decoding)
    return (
        manager(stock, rows, sizes),
        manager(patches._candidates_by_drafts(stock), rows, sizes),
    )


@pytest.fixture
def stock_and_ours(monkeypatch):
    return stock_and_patched(monkeypatch, Decoding.lossless())


def served(manager, rows, drafts):
    return manager.dispatch(rows, rows * (drafts + 1), drafts + 1, 0)


def test_every_number_of_sequences_and_drafts_uses_a_full_graph(stock_and_ours):
    stock, ours = stock_and_ours
    steps = [(rows, drafts) for rows in range(1, ROWS + 1) for drafts in CHOICES]
    assert any(
        served(stock, *step).cg_mode != CUDAGraphMode.FULL for step in steps
    )  # otherwise, the patch is no longer needed
    for rows, drafts in steps:
        graph = served(ours, rows, drafts)
        assert graph.cg_mode == CUDAGraphMode.FULL and graph.uniform_token_count == drafts + 1
        larger = {n for n in graphs.capture_sizes(ROWS, (0,)) if n >= rows}
        assert rows <= graph.num_reqs <= min(larger)
    assert ours._capture_descs == stock._capture_descs  # the graphs are vLLM's own


@pytest.mark.parametrize("rows", [1, 3, ROWS, ROWS + 1, 4 * ROWS])
def test_the_largest_batch_with_a_full_graph_is_known(monkeypatch, rows):
    sizes = graphs.capture_sizes(ROWS, CHOICES)
    _, ours = stock_and_patched(monkeypatch, Decoding.lossless(), rows, sizes)

    def is_full(n):
        return all(served(ours, n, drafts).cg_mode == CUDAGraphMode.FULL for drafts in CHOICES)

    most = graphs.most_rows(sizes, rows, CHOICES)
    assert all(is_full(n) for n in range(1, most + 1))
    assert most == rows or not is_full(most + 1)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_few_sequences_use_full_graphs_with_every_number_of_drafts(monkeypatch, rows):
    _, ours = stock_and_patched(monkeypatch, Decoding.lossless(), rows)
    for n in range(1, rows + 1):
        for drafts in CHOICES:
            graph = served(ours, n, drafts)
            assert graph.cg_mode == CUDAGraphMode.FULL and graph.uniform_token_count == drafts + 1
            assert n <= graph.num_reqs <= rows
    captured = [graph for each in ours._capture_descs.values() for graph in each]
    assert all(graph.num_reqs is None or graph.num_reqs <= rows for graph in captured)
    assert ours.max_num_reqs == rows


def test_a_batch_with_uneven_token_counts_uses_the_smallest_piecewise_graph(stock_and_ours):
    _, ours = stock_and_ours
    sizes = graphs.capture_sizes(ROWS, CHOICES)
    for tokens in range(1, sizes[-1] + 1):
        graph = ours.dispatch(1, tokens, None, 0)
        assert graph.cg_mode == CUDAGraphMode.PIECEWISE
        assert graph.num_tokens == min(size for size in sizes if size >= tokens)
    assert ours.dispatch(1, sizes[-1] + 1, None, 0).cg_mode == CUDAGraphMode.NONE


@pytest.mark.parametrize("decoding", [None, Decoding.lossy("fixed:8")])
def test_stock_and_lossy_engines_keep_vllms_graph_sizes(monkeypatch, decoding):
    stock, patched = stock_and_patched(monkeypatch, decoding)
    assert patched._candidates == stock._candidates
