"""Sample from a Llama model in transformers, for machines on which vLLM is slow or absent.

Transformers repeats the keys and values of grouped heads, and copies the cache at every step. Both
are avoided here, which makes sampling several times faster on a CPU.

Shapes: B sequences, H query heads, G kv heads, T query tokens, L cached tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, PreTrainedModel


def grouped(
    module: nn.Module,
    q_BHTD: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    mask: Tensor | None,
    scaling: float,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend to a prompt (T = L), or with one token per sequence (T = 1). The second treats the
    query heads that share a kv head as the rows of one query.
    """
    B, H, T, D = q_BHTD.shape
    G = k_BGLD.shape[1]
    if T == 1:
        q_BGRD = q_BHTD.view(B, G, H // G, D)
        out = scaled_dot_product_attention(q_BGRD, k_BGLD, v_BGLD, mask, scale=scaling)
        out = out.reshape(B, H, 1, D)
    else:
        keys, values = (x.repeat_interleave(H // G, 1) for x in (k_BGLD, v_BGLD))
        out = scaled_dot_product_attention(q_BHTD, keys, values, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", grouped)


class Room(DynamicCache):
    """A KV cache with room for all tokens, to which steps add theirs without a copy."""

    def __init__(self, config: Any, rows: int, room: int, like: Tensor) -> None:
        super().__init__(config=config)
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, room)
        self.kv = like.new_empty(*shape, config.head_dim)
        self.filled = 0

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *unused: Any, **also_unused: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values, and return all of this layer's."""
        end = self.filled + keys.shape[2]
        for place, new in enumerate((keys, values)):
            self.kv[layer, place, :, :, self.filled : end] = new
        if layer == len(self.kv) - 1:
            self.filled = end
        return self.kv[layer, 0, :, :, :end], self.kv[layer, 1, :, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens."""
        return self.filled


def load(path: str, device: Any) -> PreTrainedModel:
    """Load a checkpoint in bfloat16, for ``sample``."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="grouped"
    )
    return model.to(device).eval()


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    copies: int,
    temperature: float,
    most: int,
    stop: int,
    generator: torch.Generator,
) -> list[list[tuple[list[int], list[float]]]]:
    """Sample ``copies`` responses of up to ``most`` tokens to each prompt, all in one batch.

    Args:
        model: a model that ``load`` returned.
        stop: the token that ends a response, and belongs to it.

    Returns: For each prompt, the token ids of its responses and their log-probs at the temperature.
    """
    longest = max(map(len, prompts))
    rows = len(prompts) * copies
    cache = Room(model.config, rows, longest + most, model.lm_head.weight)
    cache.kv.zero_()
    logits, padded = [], []
    for number, prompt in enumerate(prompts):  # right-aligned, with nothing in front of the first
        own = Room(model.config, 1, len(prompt), model.lm_head.weight)
        ids = torch.tensor([list(prompt)], device=model.device)
        logits.append(model(ids, past_key_values=own, logits_to_keep=1).logits[:, -1])
        row = number * copies
        cache.kv[:, :, row : row + copies, :, longest - len(prompt) : longest] = own.kv
        padded += [longest - len(prompt)] * copies
    cache.filled = longest

    pad_B = torch.tensor(padded, device=model.device)
    is_read = torch.arange(longest + most, device=model.device) >= pad_B[:, None]
    found: list[Tensor] = []
    chances: list[Tensor] = []
    last = torch.cat(logits).repeat_interleave(copies, 0)
    going = torch.ones(rows, dtype=torch.bool, device=model.device)
    while True:
        logprobs = (last.float() / temperature).log_softmax(-1)
        token = torch.multinomial(logprobs.exp(), 1, generator=generator)
        found.append(token)
        chances.append(logprobs.gather(1, token))
        going &= token[:, 0] != stop
        if len(found) == most or not going.any():
            break
        end = cache.filled
        last = model(
            token,
            past_key_values=cache,
            attention_mask=is_read[:, None, None, : end + 1],
            position_ids=(end - pad_B)[:, None],
        ).logits[:, -1]

    tokens = torch.cat(found, 1).tolist()
    each = torch.cat(chances, 1).tolist()
    responses = []
    for ids, logprob in zip(tokens, each, strict=True):
        length = ids.index(stop) + 1 if stop in ids else len(ids)
        responses.append((ids[:length], logprob[:length]))
    return [responses[at : at + copies] for at in range(0, rows, copies)]
