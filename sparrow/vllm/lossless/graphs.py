"""CUDA graphs of lossless mode: which batch sizes to capture, and which graph a step uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

DEFAULT_ROWS = 256
"""Maximum number of sequences for which CUDA graphs are captured if vLLM itself chooses
``max_num_seqs``.
"""


def capture_sizes(rows: int, choices: tuple[int, ...]) -> list[int]:
    """List the batch sizes, in tokens, for which to capture CUDA graphs. For each number of
    sequences, there is a size for 1 token per sequence, and one for each number of drafts in
    ``choices``.
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
    """Tabulate the graphs that a step can use, in order of preference, by the step's number of
    tokens and number of active LoRAs.

    These are the smallest graphs of each kind (full or piecewise, for 1 token per sequence or with
    drafts) that fit the step. vLLM itself considers only the smallest graph of any kind. If that
    graph is for a different number of drafts, the step would run without a full graph or without
    any graph (vllm-project/vllm#56136).

    Args:
        graphs: vLLM's descriptions of the graphs that it captures, with those of the preferred mode
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
