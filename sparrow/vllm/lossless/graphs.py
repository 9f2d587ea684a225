"""CUDA graphs in lossless mode: which batch sizes to capture, and which graph a step uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

DEFAULT_ROWS = 256
"""If ``max_num_seqs`` is not set, CUDA graphs are captured for up to this many sequences."""


def capture_sizes(rows: int, choices: tuple[int, ...]) -> list[int]:
    """List the batch sizes to capture CUDA graphs for, in tokens. For each number of sequences,
    there is one size for 1 token per sequence, and one for each draft length in ``choices``.
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


def most_rows(sizes: Iterable[int], rows: int, choices: Iterable[int]) -> int:
    """Return up to how many sequences have a full graph with every draft length in ``choices``.

    Args:
        sizes: the batch sizes that vLLM captures, in tokens.
        rows: ``max_num_seqs``. vLLM captures no graph for more sequences.
        choices: the draft lengths, in tokens.
    """
    sizes = sorted(sizes)

    def most_with(tokens: int) -> int:
        # vLLM rounds sizes up to whole sequences, but not above the largest size.
        rounded = (-(-size // tokens) for size in sizes)
        return max((n for n in rounded if n * tokens <= sizes[-1] and n <= rows), default=0)

    return min(most_with(k + 1) for k in choices)


def candidates(graphs: Iterable[Any]) -> dict[tuple[int, int], list[Any]]:
    """Return the graphs that each step can use, in order of preference. The keys are a step's
    number of tokens and its number of active LoRAs.

    A step's list has the smallest graph of each kind that fits the step. A graph is either full or
    piecewise, and is either for 1 token per sequence or for drafts. vLLM itself looks only at the
    smallest graph overall. If that graph is for a different draft length, the step runs without a
    full graph, or without any (vllm-project/vllm#56136).

    Args:
        graphs: vLLM's descriptions of the graphs it captures, preferred mode first.
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
