"""CUDA graphs of lossless mode: the batches they are made for, and the graph that serves a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

DEFAULT_ROWS = 256
"""Sequences to make CUDA graphs for if vLLM chooses ``max_num_seqs`` itself."""


def capture_sizes(rows: int, choices: tuple[int, ...]) -> list[int]:
    """List the batch sizes, in tokens, to make CUDA graphs for: every number of sequences, with 1
    token each and with each choice of drafts.
    """
    counts = [
        1,
        2,
        4,
        *range(8, 65, 8),
        *range(80, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
    ]
    counts = sorted({*(n for n in counts if n < rows), rows})
    return sorted({n * (k + 1) for n in counts for k in {0, *choices}})


def candidates(graphs: Iterable[Any]) -> dict[tuple[int, int], list[Any]]:
    """Tabulate the graphs that may serve a step, in order of preference, by the step's tokens and
    active LoRAs.

    For each kind of graph (full or piecewise, for 1 token per sequence or for drafts too) this is
    the smallest one that has room. vLLM itself offers a step only the smallest graph of all kinds;
    if that is for another number of drafts, the step would run without a full graph, or without any
    (vllm-project/vllm#56136).

    Args:
        graphs: vLLM's descriptions of the graphs that it captures, those of the preferred mode
            first.
    """
    kinds = defaultdict(list)
    for graph in graphs:
        kinds[replace(graph, num_tokens=0, num_reqs=None)].append(graph)
    table: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for same in kinds.values():
        first = 0
        for graph in sorted(same, key=lambda each: each.num_tokens):
            for tokens in range(first, graph.num_tokens + 1):
                table[tokens, graph.num_active_loras].append(graph)
            first = graph.num_tokens + 1
    return dict(table)
