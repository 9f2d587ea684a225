"""Check a few steps of the whole model: decode steps, or in lossless mode a cycle of drafting and
verification, against a dense pass over the same tokens.

Shapes: T tokens, G guesses, V vocabulary, k drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sparrow.schedule import ALL_PAGES
from sparrow.vllm.lossless import setup
from sparrow.vllm.selfcheck.layers import bytes_of
from sparrow.vllm.selfcheck.refusal import refusal

STEP_TOKENS = 160
"""Maximum length of the sequence used to check the model."""
LOG_PROB_BOUNDS = {4: 1e-3, 2: 0.2}
FP8_WEIGHTS_BOUND = 0.5
"""Largest allowed distance from a dense pass's log-probs, keyed by the model dtype's size in bytes.
The distance is relative to the spread of the dense log-probs. No distance is exactly 0, because
passes of different shapes round differently. ``FP8_WEIGHTS_BOUND`` is for drafting with 8-bit
weights.
"""


class _Sequence:
    """A sequence to run on a worker as if vLLM's scheduler had scheduled it.

    Args:
        blocks: the block ids for each KV cache group.
    """

    def __init__(self, worker: Any, name: str, blocks: tuple[list[int], ...]) -> None:
        self._worker = worker
        self._name = name
        self._blocks = blocks
        self._computed = 0

    def prefill(self, tokens: list[int], drafts: int) -> int:
        """Prefill a prompt, draft ``drafts`` more tokens, and return the sampled token."""
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData

        request = NewRequestData(
            req_id=self._name,
            prompt_token_ids=tokens,
            mm_features=[],
            sampling_params=SamplingParams(temperature=1.0, seed=1, max_tokens=len(tokens)),
            pooling_params=None,
            block_ids=self._blocks,
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=tokens,
        )
        return self._run(
            len(tokens), scheduled_new_reqs=[request], num_spec_tokens_to_schedule=drafts
        )

    def decode(self, drafts: int) -> int:
        """Run a pass over the newest token and its drafts, and return the first sampled token."""
        from vllm.v1.core.sched.output import CachedRequestData

        cached = CachedRequestData.make_empty()
        cached.req_ids = [self._name]
        cached.num_computed_tokens = [self._computed]
        cached.num_output_tokens = [1]
        cached.new_block_ids = [None]
        drafted = {self._name: [0] * drafts} if drafts else {}
        return self._run(
            1 + drafts, scheduled_cached_reqs=cached, scheduled_spec_decode_tokens=drafted
        )

    def finish(self) -> None:
        step = self._step(finished_req_ids={self._name})
        self._worker.execute_model(step)

    def _step(self, **values: Any) -> Any:
        from vllm.v1.core.sched.output import SchedulerOutput

        step = SchedulerOutput.make_empty()
        if hasattr(step, "num_common_prefix_blocks"):
            step.num_common_prefix_blocks = [0] * len(self._blocks)
        for name, value in values.items():
            setattr(step, name, value)
        return step

    def _run(self, tokens: int, **values: Any) -> int:
        step = self._step(
            num_scheduled_tokens={self._name: tokens}, total_num_scheduled_tokens=tokens, **values
        )
        self._computed += tokens
        output = self._worker.execute_model(step)
        if output is None:
            output = self._worker.sample_tokens(None)
        if hasattr(output, "get_output"):  # with async scheduling, the output is fetched later
            output = output.get_output()
        return int(output.sampled_token_ids[0][0])


def check_steps(worker: Any, runtime: Any, speculator: Any, layers: list[Any]) -> float:
    """Decode a sequence as the engine does, but with all pages kept, and compare its log-probs with
    those of a dense pass over the same tokens.

    In lossless mode, this runs one cycle of drafting and verification, with the kind of drafts that
    ``speculator.plan`` asks for. Drafting is replayed from CUDA graphs if the engine has captured
    any. The draft log-probs are compared with the verification's, and the verification's with a
    dense prefill's.

    Returns the largest distance (see ``distance``), or 0 if this worker has no log-probs to
    compare.

    Raises ConfigError if the log-probs differ by more than rounding explains.
    """
    config = worker.vllm_config
    cache = worker.model_runner.kv_cache_config
    if config.parallel_config.pipeline_parallel_size > 1:  # only the last stage has log-probs
        return 0.0
    k = 0
    if speculator is not None:
        k = min(n for n in setup.draft_choices(runtime.decoding) if n)
    groups = cache.kv_cache_groups
    # available blocks per sequence in each group
    half = (cache.num_blocks - 1) // (2 * len(groups))
    room = min(
        STEP_TOKENS,
        config.model_config.max_model_len,
        config.scheduler_config.max_num_batched_tokens,
        half * min(group.kv_cache_spec.block_size for group in groups),
    )
    T = room - 2 * (k + 1)
    if T < 1:
        return 0.0

    vocabulary = config.model_config.get_vocab_size()
    prompt = [(7919 * n + 13) % vocabulary for n in range(T)]
    # blocks used in each group, and the null block, which a pass over guesses may write to
    used: dict[int, list[int]] = {number: [0] for number in range(len(groups))}
    sequences: list[_Sequence] = []
    for name in ("_sparrow_decode_", "_sparrow_dense_"):
        blocks = []
        for number, group in enumerate(groups):
            count = -(-room // group.kv_cache_spec.block_size)
            first = 1 + (len(sequences) * len(groups) + number) * half
            blocks.append(list(range(first, first + count)))
            used[number].extend(blocks[-1])
        sequences.append(_Sequence(worker, name, tuple(blocks)))
    decoding, dense = sequences

    everything = torch.full_like(runtime.pages.at_length, ALL_PAGES)
    drafted: list[int] = []
    with _logits_of(worker.model_runner.model) as logits, runtime.uncounted(everything):
        sampled = decoding.prefill(prompt, k)
        if speculator is not None:
            drafted = speculator.draft_tokens[0, :k].tolist()
            index = int(speculator.idx_mapping[0])
            drawn_S = speculator.drafter.drawn_S
            drawn = k if drawn_S is None else int(drawn_S[index])
            if (drawn == 0) != speculator.plan.alone:
                raise refusal(
                    f"a cycle of {k} drafts has {drawn} drafts of the sparse actor, but its plan "
                    f"is {speculator.plan}"
                )
            of_drafts = speculator.draft_logits[index, :k].float()
            _check_guesses(of_drafts[drawn:], speculator.draft_tokens[0, drawn:k])
        logits.clear()
        decoding.decode(k)
        decoded = logits[:1]
        decoding.finish()
        logits.clear()
        dense.prefill([*prompt, sampled, *drafted], 0)
        expected = logits[:1]
        dense.finish()
    for number, group in enumerate(groups):
        for layer in layers:
            if layer.layer_name in group.layer_names:
                # The kernels' blocks may be smaller than the scheduler's.
                parts = len(layer.kv_cache) // cache.num_blocks
                emptied = [block * parts + part for block in used[number] for part in range(parts)]
                bytes_of(layer)[emptied] = 0

    if not decoded or not expected:  # another worker may have computed the logits
        return 0.0
    bound = LOG_PROB_BOUNDS[config.model_config.dtype.itemsize]
    if speculator is None:
        return _hold(decoded[0], expected[0], bound, "a decode step that keeps every page")
    draft_bound = bound if runtime.drafting.weights is None else FP8_WEIGHTS_BOUND
    differences = [_hold(decoded[0][-1:], expected[0], bound, "verification")]
    if drawn:  # otherwise, all drafts are guesses
        what = "drafts that keep every page"
        differences.append(_hold(of_drafts[:drawn], decoded[0][:drawn], draft_bound, what))
    return max(differences)


def _check_guesses(logits_GV: Tensor, token_G: Tensor) -> None:
    """Check that guesses used as drafts have a distribution with all its mass on the guess.

    Raises ConfigError if one doesn't.
    """
    mass_G1 = logits_GV.softmax(-1).gather(1, token_G.long()[:, None])
    if not (mass_G1 == 1).all():
        raise refusal(
            "verification would take a guess for a draft of the sparse actor, because the stored "
            "distribution does not have all its mass on the guess"
        )


def _hold(found_TV: Tensor, expected_TV: Tensor, bound: float, what: str) -> float:
    error = distance(found_TV, expected_TV)
    if not error <= bound:
        raise refusal(
            f"log-probs of {what} differ from those of a dense pass by {error:.2g} times their "
            f"spread, but rounding accounts for at most {bound}"
        )
    return error


def distance(found_TV: Tensor, expected_TV: Tensor) -> float:
    """Return the RMS difference in log-probs, relative to the standard deviation of the expected
    ones. Return infinity if any log-prob is finite in only one of the two tensors.
    """
    V = min(found_TV.shape[-1], expected_TV.shape[-1])
    found, expected = (x[..., :V].double().log_softmax(-1) for x in (found_TV, expected_TV))
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    difference = (found - expected)[finite]
    spread = expected[finite].std()
    return float(difference.square().mean().sqrt() / spread.clamp(min=1e-6))


@contextmanager
def _logits_of(model: Any) -> Iterator[list[Tensor]]:
    """Inside the context, collect copies of the logits that ``compute_logits`` returns. They are
    copied before the sampler modifies them.
    """
    kept: list[Tensor] = []
    own = vars(model).get("compute_logits")
    stock = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = stock(*args, **kwargs)
        if logits is not None:
            kept.append(logits.detach().float().clone())
        return logits

    model.compute_logits = compute_logits
    try:
        yield kept
    finally:
        if own is None:
            del model.compute_logits
        else:
            model.compute_logits = own
