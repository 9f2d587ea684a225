"""Rollouts by transformers, in this process: correct everywhere, and the reference for other engines.

Shapes: B sequences, T response tokens, n entries of a top-n list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sparrow.engines.base import Counters, Engine, Scorer
from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.model.actor import NAME, set_schedule, sparse_calls, teacher_forced
from sparrow.model.scoring import Batch, TokenScorer, micro_batches
from sparrow.rollout import Rollout, Sampling, Scores, split
from sparrow.schedule import SparsitySchedule


class HFEngine(Engine, Scorer):
    """Rollouts by transformers, in this process, on the model it is given: no copy of the weights is made.

    Correct everywhere, fast nowhere: use it on a CPU, on small models and as the reference for other engines.

    ``batch_size`` sequences are decoded together, and ``token_budget`` padded tokens scored together, under autocast to
    the dtype ``autocast`` if there is one.

    Raises UnsupportedModel, ConfigError: see ``set_schedule``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        schedule: SparsitySchedule,
        eos_ids: Sequence[int],
        batch_size: int = 128,
        token_budget: int = 65536,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.schedule = schedule
        self.batch_size = batch_size
        self.token_budget = token_budget
        self._eos = torch.tensor(list(eos_ids), device=model.device)
        self._autocast = autocast
        self._read = self._held = 0
        set_schedule(model, schedule)
        self._scorer = TokenScorer(model)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See ``Engine.generate``; prompts of similar length are decoded together."""
        sampling.check(prompts, self.model.config.get_text_config().max_position_embeddings)
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        seeds = sampling.request_seeds(len(prompts))
        rollouts: dict[int, Rollout] = {}
        with self._inference():
            for begin in range(0, len(order), self.batch_size):
                rows = order[begin : begin + self.batch_size]
                decoded = self._decode([prompts[i] for i in rows], sampling, [seeds[i] for i in rows])
                rollouts.update(zip(rows, decoded, strict=True))
        return [rollouts[i] for i in range(len(prompts))]

    def _decode(self, prompts: list[Sequence[int]], sampling: Sampling, seeds: list[int]) -> list[Rollout]:
        device, B = self.model.device, len(prompts)
        longest = max(map(len, prompts))
        start = torch.tensor([longest - len(p) for p in prompts], device=device)
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
        ragged = bool(start.any())
        steps, top_n = sampling.max_new_tokens, min(sampling.top_n, self.model.config.get_text_config().vocab_size)
        uniform = torch.stack([_uniform(steps, seed) for seed in seeds]).to(device) if sampling.temperature else None
        tokens = torch.zeros(B, steps, dtype=torch.long)
        logprobs = torch.zeros(B, steps)
        top_ids, top_logprobs = torch.zeros(B, steps, top_n, dtype=torch.int32), torch.zeros(B, steps, top_n)
        length = torch.full((B,), steps)
        stopped = torch.zeros(B, dtype=torch.bool)
        rows = torch.arange(B)  # which response each row of the cache belongs to
        calls = sparse_calls(self.model)
        cache = DynamicCache(config=self.model.config)
        for t in range(steps):
            columns = torch.arange(longest + t, device=device)
            out = self.model(
                input_ids=ids,
                attention_mask=(columns >= start[:, None]).long() if ragged else None,
                position_ids=(columns[-ids.shape[1] :] - start[:, None]).clamp(min=0),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            log_q = (out.logits[:, -1].float() / (sampling.temperature or 1.0)).log_softmax(-1)
            if uniform is None:
                token = log_q.argmax(-1, keepdim=True)
            else:
                # The inverse of the distribution function, at a number that belongs to the response and the step.
                below = log_q.double().exp().cumsum(-1)
                token = torch.searchsorted(below, uniform[:, t, None] * below[:, -1:], right=True)
            best = log_q.topk(top_n, dim=-1)
            tokens[rows, t] = token[:, 0].cpu()
            logprobs[rows, t] = log_q.gather(-1, token)[:, 0].cpu()
            top_ids[rows, t], top_logprobs[rows, t] = best.indices.int().cpu(), best.values.cpu()
            ended = torch.isin(token[:, 0], self._eos)
            done = rows[ended.cpu()]
            length[done], stopped[done] = t + 1, True
            ids = token
            if ended.any():
                going = (~ended).nonzero()[:, 0]
                if not len(going):
                    break
                cache.batch_select_indices(going)
                ids, start, rows = ids[going], start[going], rows[going.cpu()]
                uniform = uniform[going] if uniform is not None else None
        self._check_sparse(calls, int(length.max()) - 1)
        self._count(prompts, length)
        return [
            Rollout(
                prompt_ids=prompts[b],
                response_ids=tokens[b, :n].numpy(),
                logprobs=logprobs[b, :n].numpy(),
                top_ids=top_ids[b, :n].numpy(),
                top_logprobs=top_logprobs[b, :n].numpy(),
                finish_reason="stop" if stopped[b] else "length",
            )
            for b, n in enumerate(length.tolist())
        ]

    def score(self, rollouts: Sequence[Rollout], schedule: SparsitySchedule, temperature: float) -> list[Scores]:
        """See ``Scorer.score``."""
        scores: dict[int, Scores] = {}
        lengths = [len(r.prompt_ids) + len(r) for r in rollouts]
        for rows in micro_batches(lengths, self.token_budget):
            some = [rollouts[i] for i in rows]
            batch = Batch.build(
                [r.prompt_ids for r in some],
                [r.response_ids for r in some],
                [r.top_ids for r in some],
                self.model.device,
            )
            sparse = contextlib.nullcontext() if schedule.is_dense else teacher_forced(
                self.model, batch.prompt_lengths, schedule
            )  # fmt: skip
            with self._inference(), sparse:
                result = self._scorer(batch, temperature)
            parts = (split(x.cpu().numpy(), [len(r) for r in some]) for x in result)
            scores.update((i, Scores(*part)) for i, *part in zip(rows, *parts, strict=True))
        return [scores[i] for i in range(len(rollouts))]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``Engine.update_weights``; tensors that are the model's own are left alone.

        Raises ConfigError: a name or shape the model does not have.
        """
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            if name not in own or own[name].shape != tensor.shape:
                expected = tuple(own[name].shape) if name in own else "no such parameter"
                raise ConfigError(f"cannot update {name!r} with shape {tuple(tensor.shape)}: the engine has {expected}")
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].data.copy_(tensor)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        set_schedule(self.model, schedule)
        self.schedule = schedule

    def counters(self) -> Counters:
        counters = Counters(tokens_read=self._read, tokens_held=self._held)
        self._read = self._held = 0
        return counters

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        autocast = torch.autocast(self.model.device.type, self._autocast, enabled=self._autocast is not None)
        try:
            with torch.no_grad(), autocast:
                yield
        finally:
            self.model.train(training)

    def _check_sparse(self, calls_before: int, decode_steps: int) -> None:
        num_layers = self.model.config.get_text_config().num_hidden_layers
        expected = decode_steps * (num_layers - len(set(self.schedule.dense_layers)))
        seen = sparse_calls(self.model) - calls_before
        if seen != expected:
            raise UnsupportedModel(
                f"{type(self.model).__name__} made {seen} sparse attention calls in {decode_steps} decode steps where "
                f"{expected} were due; its attention implementation is {self.model.config._attn_implementation!r}, "
                f"expected {NAME!r}"
            )

    def _count(self, prompts: list[Sequence[int]], length: Tensor) -> None:
        num_layers = self.model.config.get_text_config().num_hidden_layers
        dense = len(set(self.schedule.dense_layers))
        for prompt, n in zip(prompts, length.tolist(), strict=True):
            cached = np.arange(len(prompt) + 1, len(prompt) + n)
            held = int(cached.sum())
            self._held += num_layers * held
            self._read += dense * held + (num_layers - dense) * int(self.schedule.tokens_read(cached).sum())


def _uniform(count: int, seed: int) -> Tensor:
    """float64 ``[count]`` in [0, 1), the same on every device."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def load_model(
    name: str, precision: Literal["fp32", "bf16"], device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Hugging Face causal language model and its tokenizer, by hub name or local path.

    Raises ConfigError: nothing there, or the hub cannot be reached.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load model {name!r} ({str(error).splitlines()[0]}); give the path of a local checkpoint folder, "
            "or a hub name with the hub in reach"
        ) from error
    torch.nn.Module.to(model, device)
    return model, tokenizer


def load_config(name: str) -> dict[str, Any]:
    """The contents of a model's ``config.json``, by hub name.

    Raises ConfigError: nothing there, or the hub cannot be reached.
    """
    try:
        return AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot load the config of {name!r} ({str(error).splitlines()[0]}); give the path of its config.json"
        ) from error


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a response: those of the generation config and the tokenizer's."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})
