"""The part that all vLLM engines share, whether their vLLM runs in this process or behind HTTP."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sparrow.engines.base import Counters
from sparrow.errors import ConfigError, EngineError, SparrowError
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.rollout import Rollout, Sampling
from sparrow.schedule import SparsitySchedule

logger = logging.getLogger(__name__)

SHARED_MEMORY = "/dev/shm"
CHUNK_BYTES = 2**30  # weights are handed to other processes in files of about this size


class Client(ABC):
    """Controls the workers of one vLLM that was started with a schedule; see
    ``sparrow.engines.base.Engine``.
    """

    schedule: SparsitySchedule

    def connect(self, context: int) -> None:
        """Ask the workers for their schedule and mode; ``context`` is the most tokens that a
        sequence may have.
        """
        self.context = context
        self._described = self.rpc("sparrow_describe")
        self.schedule = SparsitySchedule.from_dict(self._described[0]["schedule"])
        self._is_lossless = self._described[0]["mode"] == "lossless"
        self.counters()  # forget what vLLM's own warm-up steps read

    def check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Refuse prompts and sampling that vLLM cannot serve.

        Raises PromptError: see ``Sampling.check``. ConfigError: a truncation that drafts would not
        follow.
        """
        sampling.check(prompts, self.context)
        if sampling.truncated and self._is_lossless:
            raise ConfigError(
                f"top_k is {sampling.top_k} and top_p {sampling.top_p:g}, but in vLLM lossless "
                "drafts are sampled from the whole vocabulary and many would be rejected; leave "
                "them out, use mode dense or lossy, or engine hf"
            )

    @abstractmethod
    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Drop the prefix cache; False if requests hold it."""

    def describe(self) -> dict[str, Any]:
        """Backend, schedule and layers, as the first worker reports them."""
        return self.rpc("sparrow_describe")[0]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``Engine.update_weights``; a LoRA comes merged, as full weights.

        Raises ConfigError: a name the model does not have.
        """
        for path in weight_files(weights, whole="weights" in self._described[0]):
            self.rpc("sparrow_load_weights", path)
        self._forget_cached()

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """See ``Engine.set_schedule``; CUDA graphs stay as they are.

        Raises ConfigError: another page layout, or other dense layers, than vLLM was started with.
        """
        self.rpc("sparrow_set_schedule", schedule.to_json())
        self.schedule = schedule
        self.drop_prefixes()

    def _forget_cached(self) -> None:
        """After new weights: drop prefixes, and take new scales for an fp8 KV cache from the next
        prompts.
        """
        self.drop_prefixes()
        if "kv_scales" in self._described[0]:
            self.rpc("sparrow_renew_kv_scales")

    def drop_prefixes(self) -> None:
        """Drop cached prefixes, whose keys and values were computed with other weights or under
        other budgets.

        Raises SparrowError: requests are running.
        """
        if not self.reset_prefix_cache():
            raise SparrowError(
                "vLLM cannot drop its prefix cache while requests run; wait for them to end"
            )

    def counters(self) -> Counters:
        counters = tally(self._described, self.rpc)
        if counters.preemptions:
            logger.warning(
                "vLLM preempted %d sequences and prefilled their generated tokens again, densely: "
                "not what the actor would have cached; give it more KV cache or lower max_num_seqs",
                counters.preemptions,
            )
        return counters


def tally(
    described: Sequence[Mapping[str, Any]], rpc: Callable[[str], Sequence[Mapping[str, Any]]]
) -> Counters:
    """Add up the counts of all workers of one vLLM since they were last asked.

    Args:
        described: the answer of each worker to ``sparrow_describe``.
        rpc: calls a method of every worker.
    """
    counts = rpc("sparrow_counters")
    # Pipeline stages have different layers; tensor-parallel workers count the same layers again.
    stages = {(*d["sparse_layers"], *d["dense_layers"]) for d in described}
    copies = len(counts) // len(stages)
    read = sum(count["tokens_read"] for count in counts) // copies
    held = sum(count["tokens_held"] for count in counts) // copies
    # Every worker counts all; the plugin of 0.1.0 counts none.
    preemptions = counts[0].get("preemptions", 0)
    if described[0]["mode"] != "lossless":
        return Counters(read, held, preemptions)

    acceptance = rpc("sparrow_acceptance")[0]
    # Every worker takes part in every draft and sees all of its logits.
    drafted, accepted, emitted = (counts[0][name] for name in ("drafted", "accepted", "emitted"))
    parts = (acceptance, acceptance.get("metered"))
    drafts, metered = (
        DraftAcceptance.from_dict(part["acceptance"]) if part else DraftAcceptance.empty()
        for part in parts
    )
    return Counters(read, held, preemptions, drafted, accepted, emitted - accepted, drafts, metered)


def weight_files(weights: Iterable[tuple[str, Tensor]], whole: bool = False) -> Iterator[str]:
    """Weights for other processes of this machine, as paths of safetensors files.

    A file is gone once the next one is asked for. ``whole``: one file, for an engine that quantises
    its weights.
    """
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        chunk[name] = tensor.detach().to("cpu").contiguous()
        size += chunk[name].nbytes
        if size >= CHUNK_BYTES and not whole:
            with _saved(chunk, size) as path:
                yield path
            chunk = {}
            size = 0
    if chunk:
        with _saved(chunk, size) as path:
            yield path


@contextlib.contextmanager
def _saved(chunk: dict[str, Tensor], size: int) -> Iterator[str]:
    """A safetensors file of ``size`` bytes of weights: in memory, or where containers leave too
    little, on disk.
    """
    from safetensors.torch import save_file

    in_memory = (
        os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > 1.1 * size
    )
    with tempfile.TemporaryDirectory(
        prefix="sparrow-weights-", dir=SHARED_MEMORY if in_memory else None
    ) as folder:
        path = str(Path(folder) / "weights.safetensors")
        save_file(chunk, path)
        yield path


def rollout(
    prompt: Sequence[int], tokens: Sequence[int], ids: np.ndarray, logprobs: np.ndarray, end: Any
) -> Rollout:
    """A rollout from ids and log-probs ``[T, 1 + n]``: the sampled token's, then those of the
    likeliest, best first.

    Raises EngineError: a response that ended neither by itself nor at its limit, such as one that
    was aborted.
    """
    if end not in ("stop", "length"):
        raise EngineError(
            f"vLLM ended a response after {len(tokens)} tokens with {end!r}, not 'stop' or "
            "'length', so it is not a sample of the actor; do not abort requests, pause or stop "
            "vLLM during a run; go on with --resume"
        )
    return Rollout(
        prompt_ids=prompt,
        response_ids=np.asarray(tokens, dtype=np.int64),
        logprobs=logprobs[:, 0],
        top_ids=ids[:, 1:],
        top_logprobs=logprobs[:, 1:],
        finish_reason=end,
    )
