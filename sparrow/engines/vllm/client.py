"""The base class for vLLM engines, whether vLLM runs in this process or behind HTTP."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shlex
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sparrow.decoding import LOSSLESS_SETTINGS, Decoding
from sparrow.engines.base import Counters
from sparrow.errors import ConfigError, EngineError, SparrowError
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.rollout import Rollout, Sampling
from sparrow.schedule import SparsitySchedule

logger = logging.getLogger(__name__)

SHARED_MEMORY = "/dev/shm"
METHOD_FAILED = "method failed"
"""Part of vLLM's message for an exception in a method that ``collective_rpc`` called."""
CHUNK_BYTES = 2**30  # approximate size of the files used to pass weights to other processes
WHOLE_SOFTMAX: Mapping[str, float] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Settings of a completion request that make vLLM sample from the whole softmax. They have to be in
every request, because a server takes missing ones from the checkpoint's generation_config.json.
"""
WITHOUT_SPARROW: Sequence[Mapping[str, Any]] = (
    {"mode": "dense", "schedule": SparsitySchedule.dense().to_dict()},
)
"""Describes the workers of a vLLM instance that runs without Sparrow."""


class Client(ABC):
    """An ``Engine`` (see ``sparrow.engines.base``) that controls one vLLM instance's workers.

    A subclass first sets its own attributes, so that ``rpc`` and ``counters`` work, and then calls
    this class's ``__init__``.

    Args:
        context: the maximum sequence length, in tokens.
        described: each worker's description. If it is None, the workers are asked for it, so the
            instance must have been started with a schedule.
        vocabulary: the number of the model's token ids; None if it isn't known.
    """

    def __init__(
        self,
        context: int,
        described: Sequence[Mapping[str, Any]] | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.context = context
        self._vocabulary = vocabulary
        self._described = self.rpc("sparrow_describe") if described is None else described
        self.schedule = SparsitySchedule.from_dict(self._described[0]["schedule"])
        self._is_lossless = self._described[0]["mode"] == "lossless"
        self.counters()  # drop the counts of vLLM's own warm-up steps

    def check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Refuse prompts and sampling settings that vLLM cannot serve.

        Raises PromptError, like ``Sampling.check``. Raises ConfigError if top-k or top-p is set in
        lossless mode, because drafts would ignore these settings.
        """
        sampling.check(prompts, self.context, self._vocabulary)
        if sampling.truncated and self._is_lossless:
            raise ConfigError(
                f"top_k is {sampling.top_k} and top_p is {sampling.top_p:g}, but drafts in vLLM "
                "are sampled from the whole vocabulary, and many of them would be rejected; leave "
                "both settings out, or use mode dense or lossy, or engine hf"
            )

    @abstractmethod
    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every worker, and return one result per worker."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Drop the prefix cache. Return False if running requests still use it."""

    def describe(self) -> dict[str, Any]:
        """Return the backend, schedule and layers reported by the first worker."""
        return self.rpc("sparrow_describe")[0]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``Engine.update_weights``. Merge a LoRA into full weights first.

        Raises ConfigError if loading fails, for example because the model has no weight by that
        name. All weights must then be loaded again.
        """
        for path in weight_files(weights, whole="weights" in self._described[0]):
            self.rpc("sparrow_load_weights", path)
        self._forget_cached()

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """See ``Engine.set_schedule``. CUDA graphs don't have to be captured again.

        Raises ConfigError if the page layout or the dense layers differ from what vLLM was started
        with.
        """
        self.rpc("sparrow_set_schedule", schedule.to_json())
        self.schedule = schedule
        self.drop_prefixes()

    def _forget_cached(self) -> None:
        """Drop cached prefixes after loading new weights. If there are fp8 KV cache scales, let the
        next prompts set them again.
        """
        self.drop_prefixes()
        if "kv_scales" in self._described[0]:
            self.rpc("sparrow_renew_kv_scales")

    def drop_prefixes(self) -> None:
        """Drop cached prefixes, because their keys and values were computed with different weights
        or budgets.

        Raises SparrowError if requests are running.
        """
        if not self.reset_prefix_cache():
            raise SparrowError(
                "vLLM cannot drop its prefix cache while requests are running; "
                "wait for the requests to finish"
            )

    def counters(self) -> Counters:
        counters = tally(self._described, self.rpc)
        if counters.preemptions:
            reads_all = self._is_lossless or self.schedule.is_dense
            logger.warning(
                "vLLM preempted %d sequences and prefilled their generated tokens again, %s; give "
                "vLLM a larger KV cache, or lower max_num_seqs",
                counters.preemptions,
                "which takes time"
                if reads_all
                else "densely, so their KV cache differs from the actor's",
            )
        return counters


def refusal(url: str, method: str, status: int, reason: str) -> SparrowError:
    """Make the error for a worker's method that a server did not run.

    Args:
        url: the server's address.
        method: the name of the method.
        status: the HTTP status of the server's response.
        reason: the server's response.
    """
    refused = f"the vLLM server at {url} refused {method} ({status}: {reason})"
    if status == 404:
        return ConfigError(f"{refused}; start it with VLLM_SERVER_DEV_MODE=1")
    # Only then did the method itself fail. Otherwise, the engine may be dead.
    if METHOD_FAILED in reason:
        if method == "sparrow_describe":
            return ConfigError(f"{refused}; start it with Sparrow and a mode or a schedule")
        if method == "sparrow_set_schedule":
            return ConfigError(f"{refused}; start it with a Sparrow schedule that allows this")
        if method == "sparrow_load_weights" and os.strerror(errno.ENOENT) in reason:
            return ConfigError(
                f"{refused}; run it on this machine, where it can read the files in "
                f"{SHARED_MEMORY} that pass on the weights"
            )
    return EngineError(f"{refused}; see the server's log for the cause")


def check_mode(
    decoding: Decoding, described: Mapping[str, Any], server: str, otherwise: str
) -> None:
    """Check that a running server verifies drafts if these settings are for lossless mode, and only
    then, because a running server can't change this.

    Args:
        decoding: the settings that are asked for.
        described: a worker's ``sparrow_describe`` result.
        server: the server, for the error message.
        otherwise: what to do instead of restarting the server.

    Raises ConfigError with options for ``vllm serve`` if the mode differs.
    """
    mode = described["mode"]
    if decoding.is_lossless == (mode == "lossless"):
        return
    setting = shlex.quote(json.dumps({"sparrow": decoding.to_dict()}))
    # Only lossless mode chooses the backend itself. On a CPU, there is only one.
    backend = "" if decoding.is_lossless else " and, on a GPU, --attention-backend CUSTOM"
    raise ConfigError(
        f"{server} runs in mode {mode!r}, not {decoding.mode!r}, and cannot change its mode; start "
        f"it with --additional-config {setting}{backend}, or {otherwise}"
    )


def check_settings(decoding: Decoding, described: Mapping[str, Any], server: str) -> None:
    """Check that a running server has the same value for each lossless setting that differs from
    its default, because a running server can't change these settings.

    Args:
        decoding: the settings that are asked for, in lossless mode.
        described: a worker's ``sparrow_describe`` result, in lossless mode.
        server: the server, for error messages.

    Raises ConfigError if a value differs.
    """
    for name in (each for each in LOSSLESS_SETTINGS if each != "draft_schedule"):
        default = getattr(Decoding.lossless(), name)
        theirs = described.get(name, default)
        value = decoding.to_dict().get(name, default)
        if value not in (default, theirs):
            raise ConfigError(
                f"{server} has {name} {theirs!r}, not {value!r}, and cannot change it; start the "
                f"server with that {name} in --additional-config, or set {name} to {theirs!r}"
            )


def tally(
    described: Sequence[Mapping[str, Any]], rpc: Callable[[str], Sequence[Mapping[str, Any]]]
) -> Counters:
    """Sum the counts since the last call over all workers of one vLLM instance.

    Args:
        described: each worker's ``sparrow_describe`` result.
        rpc: calls a method on every worker.
    """
    counts = rpc("sparrow_counters")
    # Pipeline stages have different layers, but tensor-parallel workers all count the same ones.
    stages = {(*d["sparse_layers"], *d["dense_layers"]) for d in described}
    copies = len(counts) // len(stages)
    read = sum(count["tokens_read"] for count in counts) // copies
    held = sum(count["tokens_held"] for count in counts) // copies
    # Every worker counts all preemptions. Sparrow 0.1.0's plugin doesn't count them.
    preemptions = counts[0].get("preemptions", 0)
    if described[0]["mode"] != "lossless":
        rows = counts[0].get("rows", 0)
        # A pipeline stage without sparse layers counts all rows; the other stages agree.
        dense = min(
            sum(count.get(f"dense_rows_{why}", 0) for why in ("short", "schedule"))
            for count in counts
        )
        return Counters(read, held, preemptions, rows=rows, dense_rows=dense)

    acceptance = rpc("sparrow_acceptance")[0]
    # Every worker takes part in every draft and sees all logits, so one worker's counts are enough.
    drafted, accepted, emitted = (counts[0][name] for name in ("drafted", "accepted", "emitted"))
    parts = (acceptance, acceptance.get("metered"))
    drafts, metered = (
        DraftAcceptance.from_dict(part["acceptance"]) if part else DraftAcceptance.empty()
        for part in parts
    )
    return Counters(
        tokens_read=read,
        tokens_held=held,
        preemptions=preemptions,
        drafted=drafted,
        accepted=accepted,
        cycles=emitted - accepted,
        acceptance=drafts,
        metered=metered,
        passes=counts[0].get("passes", 0),
        guessed=counts[0].get("guessed", 0),
    )


def weight_files(weights: Iterable[tuple[str, Tensor]], whole: bool = False) -> Iterator[str]:
    """Write weights to safetensors files for other processes on this machine, and yield their
    paths.

    Each file is deleted when the next one is requested. If ``whole`` is true, all weights go into
    one file. Engines that quantise their weights need this.
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
    """Save ``size`` bytes of weights to a temporary safetensors file in shared memory. Fall back to
    disk if there isn't enough shared memory, as in many containers.
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
    """Build a rollout from ids and log-probs ``[T, 1 + n]``. Each row has the sampled token first,
    then the most likely tokens, best first.

    Raises EngineError if the response is incomplete; see ``check_end``.
    """
    check_end(len(tokens), end)
    return Rollout(
        prompt_ids=prompt,
        response_ids=np.asarray(tokens, dtype=np.int64),
        logprobs=logprobs[:, 0],
        top_ids=ids[:, 1:],
        top_logprobs=logprobs[:, 1:],
        finish_reason=end,
    )


def check_end(length: int, end: Any) -> None:
    """Check that a response of ``length`` tokens ended with an end-of-sequence token or at the
    length limit.

    Raises EngineError if it didn't, for example because it was aborted.
    """
    if end not in ("stop", "length"):
        raise EngineError(
            f"vLLM ended a response after {length} tokens with {end!r} instead of 'stop' or "
            "'length', so the response is not a sample from the actor; do not abort requests or "
            "pause or stop vLLM while responses are sampled (a training run that was cut off "
            "continues with --resume)"
        )
