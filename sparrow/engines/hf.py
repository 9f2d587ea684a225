"""The engine that samples with transformers in this process. It is correct on every device, and
serves as the reference for other engines.

Shapes: B sequences, T response tokens, k drafts per cycle, n top-n list entries, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from huggingface_hub import logging as hub_logging
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sparrow.attention import PageLayout
from sparrow.decoding import Decoding
from sparrow.engines.base import Counters, Engine, Ranker, Scorer
from sparrow.engines.registry import Asked
from sparrow.engines.responses import Responses
from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.model.actor import (
    NAME,
    remove_schedule,
    set_schedule,
    sparse_calls,
    teacher_forced,
)
from sparrow.model.history import History
from sparrow.model.scoring import Batch, TokenScorer, evaluating, micro_batches
from sparrow.model.speculative import CachedSequences, Cycle, Shape, draw, speculate
from sparrow.model.standing import standing
from sparrow.model.state import actor_of, attention_layers, check_head_budgets, layer_kinds
from sparrow.model.unread import unread
from sparrow.rollout import Rollout, Sampling, Scores, Standing, derived_seed, split
from sparrow.schedule import SparsitySchedule

LOOKED_AT = 64  # measure attention for at most this many tokens per response
DECODE_TOKENS = 2**19
"""Maximum number of tokens in a batch, counting every sequence at its full length. For example, a
batch can have 128 sequences of 4,096 tokens.
"""
DECODE_LOGITS = 2**27
"""Maximum number of logits per decode step, or per verification, of a batch. They take up to 30
bytes each.
"""
ONLY_IN_VLLM = {
    "adapt_draft_budget": "the draft budget never changes",
    "draft_weights": "drafts use the model's own weights",
    "guess_head": "guesses come only from history",
    "meter_schedule": "only the acceptance of the draft schedule is measured",
}
"""Settings that this engine does not support, and what it does instead."""


CONFIGS = ("config.json", "adapter_config.json")
"""A folder that transformers can load has one of these files."""


class HFEngine(Engine, Scorer, Ranker):
    """An engine that samples with transformers in this process, using the given model directly
    rather than a copy.

    It is correct on every device but fast on none. Use it on a CPU, for small models, or as the
    reference for other engines.

    A plain ``schedule`` makes decoding lossy, or dense if the schedule reads everything. A
    ``Decoding`` also specifies the mode. Lossless decoding always drafts ``draft_tokens`` tokens,
    since drafting fewer wouldn't be any faster here. In mode auto, responses are lossless up to the
    length last passed to ``verify_up_to``, and lossy after that. Until ``verify_up_to`` is called,
    whole responses are lossless.

    The model may have several engines, each with its own schedule.

    ``batch_size`` sequences are decoded together. By default, a batch has as many sequences as
    ``DECODE_TOKENS``, at their maximum length, and ``DECODE_LOGITS`` allow. Up to ``token_budget``
    tokens, including padding, are scored together. If ``autocast`` is given, the model runs under
    autocast to this dtype.

    Raises UnsupportedModel or ConfigError if ``set_schedule`` rejects the model or the schedule.
    Raises ConfigError if a setting in ``ONLY_IN_VLLM`` is set.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        schedule: SparsitySchedule | Decoding,
        eos_ids: Sequence[int],
        batch_size: int | None = None,
        token_budget: int = 65536,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.decoding = schedule if isinstance(schedule, Decoding) else Decoding.lossy(schedule)
        self.batch_size = batch_size
        self.token_budget = token_budget
        config = model.config.get_text_config()
        self._attention_layers = attention_layers(config)
        if self.decoding.verifies and "linear_attention" in layer_kinds(config):
            raise UnsupportedModel(
                f"{type(model).__name__} has linear-attention layers, whose state cannot be restored "
                "after a rejected draft; use mode dense or lossy, or a model without them"
            )
        _check_settings(self.decoding)
        self._eos = torch.tensor(list(eos_ids), device=model.device)
        self._autocast = autocast
        self._counters = Counters(0, 0)
        self._verified_up_to = math.inf
        # Create the scorer first, so that a model it refuses is left unchanged.
        self._scorer = TokenScorer(model)
        actor = actor_of(model)
        self._schedule_before = actor.schedule if actor is not None and actor.routed else None
        set_schedule(model, self.schedule)

    @property
    def schedule(self) -> SparsitySchedule:
        """The schedule for decode steps, or the draft schedule in lossless mode."""
        return self.decoding.schedule

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See ``Engine.generate``. Prompts of similar length are decoded together.

        Raises PromptError, like ``Sampling.check``.
        """
        config = self.model.config.get_text_config()
        sampling.check(prompts, config.max_position_embeddings, config.vocab_size)
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        seeds = sampling.request_seeds(len(prompts))
        rollouts: dict[int, Rollout] = {}
        longest = max(map(len, prompts), default=0) + sampling.max_new_tokens
        batch_size = self.batch_size or self._default_batch(longest)
        self._apply_schedule()
        with self._inference():
            for begin in range(0, len(order), batch_size):
                rows = order[begin : begin + batch_size]
                decoded = self._decode(
                    [prompts[i] for i in rows], sampling, [seeds[i] for i in rows]
                )
                rollouts.update(zip(rows, decoded, strict=True))
        return [rollouts[i] for i in range(len(prompts))]

    def _decode(
        self, prompts: list[Sequence[int]], sampling: Sampling, seeds: list[int]
    ) -> list[Rollout]:
        B = len(prompts)
        steps = sampling.max_new_tokens
        shape = Shape(sampling.temperature, sampling.top_k, sampling.top_p)
        uniform = self._uniform(seeds, sampling).to(self.model.device)
        responses = Responses(
            B, sampling, self.model.config.get_text_config().vocab_size, self._eos.cpu()
        )
        calls = sparse_calls(self.model)
        sparse_steps = 0

        max_tokens_B = torch.full((B,), steps)
        if self.decoding.mode == "auto":
            responses.verified = self._to_verify(prompts, steps)
            parts = [(responses.verified, True), (max_tokens_B, False)]
        else:
            parts = [(max_tokens_B, self.decoding.is_lossless)]
        for limit_B, drafting in parts:
            if len(rows := responses.open(limit_B)):
                history = None
                if drafting and self.decoding.guess_tokens:
                    history = self._history(prompts, seeds, rows, responses, steps)
                sparse_steps += self._go_on(
                    prompts, rows, responses, shape, uniform, limit_B, drafting, history
                )
        self._check_sparse(calls, sparse_steps)
        return responses.rollouts(prompts)

    def _go_on(
        self,
        prompts: list[Sequence[int]],
        rows: Tensor,
        responses: Responses,
        shape: Shape,
        uniform: Tensor,
        limit_B: Tensor,
        drafting: bool,
        history: History | None,
    ) -> int:
        """Continue the responses ``rows`` up to their limits, and return the number of sparse
        steps.

        The tokens so far are prefilled densely, and the next token is sampled from this prefill.
        """
        device = self.model.device
        contexts = responses.contexts(prompts, rows)
        longest = max(map(len, contexts))
        padding = [longest - len(context) for context in contexts]
        padded = [[0] * p + context for p, context in zip(padding, contexts, strict=True)]
        ids = torch.tensor(padded, device=device)
        sequences = CachedSequences(self.model, torch.tensor(padding, device=device))
        logits = sequences.read(ids, logits_to_keep=1)
        numbers = uniform[2, rows.to(device), responses.length[rows].to(device)]
        cycle = _sampled(logits, shape, numbers[:, None])
        place = torch.arange(len(rows), device=device)  # rows of ``history``
        before = responses.length[rows]
        active = responses.append(rows, cycle, limit_B)

        sparse_steps = 0
        while len(active):
            if history is not None:
                added = (responses.length[rows] - before).to(device)
                history.extend(place, cycle.tokens, added)
            last_token = cycle.tokens.gather(1, cycle.count[:, None] - 1)[:, 0][active]
            if len(active) < len(rows):
                sequences.select(active)
                place = place[active]
                rows = rows[active.cpu()]

            length = responses.length[rows].to(device)
            remaining = (limit_B - responses.length)[rows].to(device)
            cached = sequences.lengths
            drafts = (remaining - 1).clamp(max=self.decoding.draft_tokens if drafting else 0)
            position = length[:, None] + torch.arange(int(drafts.max()) + 1, device=device)
            numbers = uniform[:, rows.to(device)[:, None], position.clamp(max=uniform.shape[2] - 1)]

            if drafting:
                cycle = speculate(
                    sequences,
                    last_token,
                    drafts,
                    shape,
                    numbers,
                    self.decoding.drafter_invariant,
                    None if history is None else (history, place),
                )
                sparse_steps += int(cycle.opens_pass.sum(1).max())
            else:
                cycle = _sampled(sequences.read(last_token[:, None]), shape, numbers[2])
                sparse_steps += 1
            self._count(cached + 1, drafts, cycle, drafting)
            before = responses.length[rows]
            active = responses.append(rows, cycle, limit_B, drafts)
        return sparse_steps

    def _history(
        self,
        prompts: list[Sequence[int]],
        seeds: list[int],
        rows: Tensor,
        responses: Responses,
        steps: int,
    ) -> History:
        """Create the history for these rows. Guesses for a response may also come from other
        responses to the same prompt.

        Responses with the same seed are excluded, because their tokens are drawn with the same
        random numbers.
        """
        twins: Counter[tuple[tuple[int, ...], int]] = Counter()
        groups = []
        for b in rows.tolist():
            prompt = tuple(prompts[b])
            groups.append((prompt, twins[prompt, seeds[b]]))
            twins[prompt, seeds[b]] += 1
        contexts = responses.contexts(prompts, rows)
        # The history also has to hold a cycle's drafts until the cycle ends.
        room = steps + self.decoding.draft_tokens
        return History(contexts, groups, room, self.decoding.guess_tokens, self.model.device)

    def _to_verify(self, prompts: list[Sequence[int]], steps: int) -> Tensor:
        """In mode auto, return how many tokens to verify at the start of each response, int64
        ``[B]``.
        """
        lengths = np.array([len(p) for p in prompts])[:, None] + np.arange(steps)
        return torch.from_numpy((self.schedule.page_end(lengths) < self._verified_up_to).sum(1))

    def _uniform(self, seeds: list[int], sampling: Sampling) -> Tensor:
        """Return random numbers, float64 ``[3, B, T]``, that depend only on the response and the
        position within it, not on the batch.

        The first row is for sampling drafts, the second for accepting them, and the third for all
        other tokens. Several drafts for the same position may use the same number. This is fine,
        because earlier tokens never depend on that number.
        """
        if sampling.temperature == 0 or not self.decoding.verifies:
            drawn = torch.stack([_uniform(sampling.max_new_tokens, seed) for seed in seeds])
            return drawn.expand(3, -1, -1)

        def three_rows(seed: int) -> Tensor:
            streams = (derived_seed(seed, 0), derived_seed(seed, 1), seed)
            return torch.stack([_uniform(sampling.max_new_tokens, stream) for stream in streams])

        return torch.stack([three_rows(seed) for seed in seeds], 1)

    def check_head_budgets(self) -> None:
        """Raise ConfigError if a schedule for this model can't have head budgets."""
        check_head_budgets(self.model)

    def unread(
        self, rollouts: Sequence[Rollout], layout: SparsitySchedule, pages: Sequence[int]
    ) -> NDArray[np.float64]:
        """For each full-attention layer and kv head, measure the share of the dense policy's
        attention mass that falls outside an actor's pages.

        The result is ``[layers, kv heads, len(pages)]``. Each entry of ``pages`` is the number of
        pages that an actor keeps by score. ``layout`` says how tokens are split into pages. The
        mass is averaged over up to ``LOOKED_AT`` tokens per response.
        """
        of_each = []
        for rollout in rollouts:
            ids = torch.tensor(
                [*rollout.prompt_ids, *rollout.response_ids.tolist()], device=self.model.device
            )
            first = len(rollout.prompt_ids)
            count = min(LOOKED_AT, len(rollout))
            spread = torch.linspace(first, len(ids) - 1, count)
            position = spread.round().long().to(ids.device)
            with self._inference():
                found = unread(self.model, ids, position, PageLayout(**layout.page_layout), pages)
            of_each.append(found.double().cpu().numpy())
        return np.asarray(np.mean(of_each, axis=0))

    def score(
        self, rollouts: Sequence[Rollout], schedule: SparsitySchedule, temperature: float
    ) -> list[Scores]:
        """See ``Scorer.score``."""
        scores: dict[int, Scores] = {}
        lengths = [len(r.prompt_ids) + len(r) for r in rollouts]
        for rows in micro_batches(lengths, self.token_budget):
            batch_rollouts = [rollouts[i] for i in rows]
            batch = Batch.of(batch_rollouts, self.model.device, with_top=True)
            sparse: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if not schedule.is_dense:
                sparse = teacher_forced(self.model, batch.prompt_lengths, schedule)
            with self._inference(), sparse:
                result = self._scorer(batch, temperature)
            parts = _by_response(result, batch_rollouts)
            scores.update((i, Scores(*part)) for i, *part in zip(rows, *parts, strict=True))
        return [scores[i] for i in range(len(rollouts))]

    def rank(
        self, rollouts: Sequence[Rollout], sampling: Sampling, common: float
    ) -> list[Standing]:
        """See ``Ranker.rank``."""
        shape = Shape(sampling.temperature, sampling.top_k, sampling.top_p)
        found: dict[int, Standing] = {}
        lengths = [len(r.prompt_ids) + len(r) for r in rollouts]
        for rows in micro_batches(lengths, self.token_budget):
            batch_rollouts = [rollouts[i] for i in rows]
            batch = Batch.of(batch_rollouts, self.model.device)
            with self._inference():
                result = self._scorer.over_logits(
                    batch, partial(standing, shape=shape, common=common)
                )
            parts = _by_response(result, batch_rollouts)
            found.update((i, Standing(*part)) for i, *part in zip(rows, *parts, strict=True))
        return [found[i] for i in range(len(rollouts))]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``Engine.update_weights``. Tensors the model already uses are not copied.

        Raises ConfigError if the model has no parameter with that name and shape.
        """
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            if name not in parameters or parameters[name].shape != tensor.shape:
                reason = "the engine's model has no such parameter"
                if name in parameters:
                    reason = (
                        f"its shape is {tuple(parameters[name].shape)} in the engine's model and "
                        f"{tuple(tensor.shape)} in the new weights"
                    )
                raise ConfigError(
                    f"cannot update {name!r}: {reason}; pass weights of the same model"
                )
            if parameters[name].data_ptr() != tensor.data_ptr():
                parameters[name].data.copy_(tensor)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """See ``Engine.set_schedule``. In a lossless engine, this sets the draft schedule."""
        set_schedule(self.model, schedule)
        self.decoding = self.decoding.with_schedule(schedule)

    def verify_up_to(self, length: float) -> None:
        """See ``PartVerifier.verify_up_to``.

        When verification ends, the verified tokens are prefilled again. This engine never reuses a
        cache for another response, so no unverified tokens leak.
        """
        if self.decoding.mode != "auto":
            raise ConfigError(
                f"verification can stop at a length only in mode 'auto', but the engine was started "
                f"in mode {self.decoding.mode!r}; start it in mode 'auto'"
            )
        self._verified_up_to = length

    def counters(self) -> Counters:
        counters = self._counters
        self._counters = Counters(0, 0)
        return counters

    def close(self) -> None:
        """See ``Engine.close``. The model gets its previous attention back."""
        if self._schedule_before is None:
            remove_schedule(self.model)
        else:
            set_schedule(self.model, self._schedule_before)

    def _default_batch(self, longest: int) -> int:
        """Return how many sequences of up to ``longest`` tokens to decode together."""
        config = self.model.config.get_text_config()
        verified = self.decoding.draft_tokens + 1 if self.decoding.verifies else 1
        by_logits = DECODE_LOGITS // (verified * config.vocab_size)
        return max(1, min(DECODE_TOKENS // longest, by_logits))

    def _apply_schedule(self) -> None:
        """Give the model this engine's schedule, if another engine has replaced or removed it."""
        actor = actor_of(self.model)
        if actor is None or (actor.routed and actor.schedule != self.schedule):
            set_schedule(self.model, self.schedule)

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        autocast = torch.autocast(
            self.model.device.type, self._autocast, enabled=self._autocast is not None
        )
        with evaluating(self.model), autocast:
            yield

    def _check_sparse(self, calls_before: int, sparse_steps: int) -> None:
        expected = sparse_steps * len(self._attention_layers - set(self.schedule.dense_layers))
        calls = sparse_calls(self.model) - calls_before
        if calls != expected:
            raise UnsupportedModel(
                f"{type(self.model).__name__} made {calls} sparse attention calls in "
                f"{sparse_steps} decode steps, expected {expected}; its attention implementation "
                f"is {self.model.config._attn_implementation!r}, but must be {NAME!r}"
            )

    def _count(self, length: Tensor, drafts: Tensor, cycle: Cycle, lossless: bool) -> None:
        """Count one step. ``length`` ``[B]`` is each sequence's length, including the step's first
        token.
        """
        num_layers = len(self._attention_layers)
        dense = len(self._attention_layers & set(self.schedule.dense_layers))
        length_B, drafts_B, count_B = (x.cpu().numpy() for x in (length, drafts, cycle.count))
        offset = np.arange(cycle.tokens.shape[1])
        at_BT = length_B[:, None] + offset
        sparse_at = at_BT[:, :-1][cycle.opens_pass.cpu().numpy()] if lossless else length_B
        guessed = len(sparse_at) * self.decoding.guess_tokens if lossless else 0
        by_dense_layers = dense * (sparse_at.sum() + guessed)
        read_B = self.schedule.tokens_read(sparse_at)
        by_sparse_layers = (num_layers - dense) * (read_B.sum() + guessed)
        is_dense_B = (read_B == sparse_at) | (num_layers == dense)
        self._counters += Counters(
            tokens_read=round(float(by_dense_layers + by_sparse_layers)),
            tokens_held=num_layers * int(at_BT[offset < count_B[:, None]].sum()),
            rows=0 if lossless else len(length_B),
            dense_rows=0 if lossless else int(is_dense_B.sum()),
        )

        if lossless:
            alpha_Bk = cycle.acceptance.cpu().numpy()
            looked_at = ~np.isnan(alpha_Bk)
            position = self.schedule.page_end(at_BT[:, :-1][looked_at])
            self._counters += Counters(
                # a verification reads the cache just once for all its tokens
                tokens_read=num_layers * int((length_B + drafts_B).sum()),
                tokens_held=0,
                drafted=int(drafts_B.sum()),
                accepted=int((count_B - 1).sum()),
                cycles=len(count_B),
                passes=len(sparse_at) if self.decoding.guess_tokens else 0,
                acceptance=DraftAcceptance.of(
                    alpha_Bk[looked_at], position, self.schedule.bin_tokens
                ),
            )


def _by_response(tensors: Iterable[Tensor], rollouts: Sequence[Rollout]) -> list[list[Any]]:
    """Split each tensor of concatenated response tokens into one array per response."""
    lengths = [len(rollout) for rollout in rollouts]
    return [split(x.cpu().numpy(), lengths) for x in tensors]


def _sampled(logits: Tensor, shape: Shape, uniform: Tensor) -> Cycle:
    """Sample one token per row without drafting, from logits ``[B, 1, V]`` and random numbers
    ``[B, 1]``.
    """
    log_q = shape.log_probs(logits)
    token = draw(shape.distribution(logits[:, 0].float()), uniform[:, 0])
    none = log_q[:, :0, 0]
    return Cycle(token[:, None], torch.ones_like(token), log_q, none, none.bool())


def _uniform(count: int, seed: int) -> Tensor:
    """Return random numbers, float64 ``[count]`` in [0, 1). They are the same on every device."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def load_model(
    name: str, precision: Literal["fp32", "bf16"], device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a Hugging Face causal language model and its tokenizer, by hub name or local path.

    Raises ConfigError if the model doesn't exist or the hub cannot be reached. Also raises
    ConfigError if the model's files are damaged or incomplete, or don't match its config.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    path = _find(name, "model")
    # The declared return type is missing the second value.
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        with _quiet_hub():  # the first to look up the name
            tokenizer = AutoTokenizer.from_pretrained(path)
        model, loading_info = load(
            path,
            dtype=dtype,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        # transformers, safetensors, tokenizers and the hub raise all sorts of exceptions.
        raise ConfigError(
            f"cannot load model {name!r} ({_reason(error)}); pass the path of a complete local "
            "checkpoint folder, or a hub name if the hub can be reached"
        ) from error

    # transformers would silently initialise mismatched weights at random.
    if mismatched := sorted(loading_info["mismatched_keys"]):
        key, stored, expected = mismatched[0]
        raise ConfigError(
            f"cannot load model {name!r}: {key} has shape {tuple(stored)} in the checkpoint, but "
            f"config.json implies {tuple(expected)} ({len(mismatched)} weights differ); use the "
            "weights and the config of the same model"
        )
    if missing := sorted(loading_info["missing_keys"]):
        raise ConfigError(
            f"cannot load model {name!r}: {missing[0]} and "
            f"{len(missing) - 1} more weights are missing; use a complete checkpoint"
        )
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConfigError(
            f"cannot load model {name!r}: its tokenizer is empty; add the tokenizer files"
        )
    torch.nn.Module.to(model, device)
    return model, tokenizer


def load_shape(name: str) -> PreTrainedModel:
    """Load a Hugging Face causal language model without its weights, by hub name or local path.

    Raises ConfigError if there is no such model, or if the hub cannot be reached.
    """
    try:
        with _quiet_hub():
            config = AutoConfig.from_pretrained(_find(name, "the config of"))
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load the config of {name!r} ({_reason(error)}); pass the path of a complete "
            "local checkpoint folder, or a hub name if the hub can be reached"
        ) from error


def _find(name: str, what: str) -> str:
    """Check that ``name`` is a local path or could be a hub name. The check doesn't contact the
    hub, because failed requests take minutes to time out.

    Raises ConfigError if ``name`` can only be a path and no such path exists, or if it is a folder
    without a model's config.
    """
    if os.path.exists(name):
        if os.path.isdir(name) and not any(
            os.path.isfile(os.path.join(name, config)) for config in CONFIGS
        ):
            raise ConfigError(
                f"cannot load {what} {name!r}: the folder has no {CONFIGS[0]}; pass the path of a "
                "complete checkpoint folder, or a hub name"
            )
        return name
    first, _, rest = name.partition("/")
    if (
        not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
        or first in (".", "..")
        or (rest and os.path.isdir(first))
    ):
        raise ConfigError(
            f"cannot load {what} {name!r}: there is no such "
            "file or folder; check the path, or pass a hub name"
        )
    return name


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Context in which the hub's client does not log its retries. If it gives up, it raises an
    error.
    """
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return f"{kind}{lines[0]}" if lines else type(error).__name__


def load_config(name: str) -> dict[str, Any]:
    """Load a model's ``config.json``, by hub name.

    Raises ConfigError if there is no such model, or if the hub cannot be reached.
    """
    try:
        with _quiet_hub():
            return AutoConfig.from_pretrained(_find(name, "the config of")).to_dict()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load the config of {name!r} ({_reason(error)}); pass the path of its "
            "config.json"
        ) from error


def _check_settings(decoding: Decoding) -> None:
    """Raise ConfigError if a setting in ``ONLY_IN_VLLM`` is set."""
    defaults = Decoding.lossless()
    for name, instead in ONLY_IN_VLLM.items():
        value = getattr(decoding, name)
        if value not in (False, getattr(defaults, name)):
            raise ConfigError(
                f"{name} is {value!r}, but in engine hf, {instead}; leave {name} out, or use "
                "engine vllm"
            )


def start(asked: Asked) -> HFEngine:
    """Create an engine from the model that's already loaded."""
    ends = eos_ids(asked.model, asked.tokenizer)
    autocast = torch.bfloat16 if asked.precision == "bf16" else None
    return HFEngine(asked.model, asked.decoding, ends, autocast=autocast)


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the ids of end-of-response tokens, from the generation config and the tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})
