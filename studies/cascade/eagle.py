"""A trained head that guesses tokens: one decoder layer on top of a policy's hidden states, as in
EAGLE-3 (Li et al., arXiv 2503.01840).

At slot t, the head reads the embedding of token t + 1 and three of the policy's hidden states at
token t. It predicts the policy's distribution of token t + 2. To guess further, it reads its own
output at the previous slot in place of the hidden states. Training does the same for several steps
(the paper's training-time test): in step j, slot t reads the output of step j - 1 at slot t - 1. It
attends to slots 0 to t - j of step 0, and to one slot of each later step. The head uses the
policy's embedding and ``lm_head``, which stay as they are.

Weights have the same names as in EAGLE-3 checkpoints, so vLLM can load what ``save`` writes.

Shapes: N tokens of a sequence, T = N - 1 slots, S state size, W hidden size, H query heads, G kv
heads, R = H / G, D head size, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)


@dataclass(frozen=True)
class Reading:
    """What the policy computed on a sequence of N tokens."""

    tokens_N: Tensor
    states_NS: Tensor  # three hidden states, S = 3 W
    last_NW: Tensor  # inputs of ``lm_head``


def state_layers(config: Any) -> tuple[int, int, int]:
    """Return the layers whose inputs the head reads: vLLM's defaults for EAGLE-3."""
    layers = config.num_hidden_layers
    return 2, layers // 2, layers - 3


@torch.no_grad()
def read(policy: PreTrainedModel, tokens: list[int]) -> Reading:
    """Run the policy on a sequence."""
    tokens_N = torch.tensor(tokens, device=policy.device)
    out = policy.model(tokens_N[None], output_hidden_states=True, use_cache=False)
    states = [out.hidden_states[layer][0] for layer in state_layers(policy.config)]
    return Reading(tokens_N, torch.cat(states, -1), out.last_hidden_state[0])


class Layer(nn.Module):
    """A Llama decoder layer whose attention also reads an embedding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        eps = config.rms_norm_eps
        self.heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        query, kv = (heads * config.head_dim for heads in self.heads[:2])
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * width, query, bias=False),
                "k_proj": nn.Linear(2 * width, kv, bias=False),
                "v_proj": nn.Linear(2 * width, kv, bias=False),
                "o_proj": nn.Linear(query, width, bias=False),
            }
        )
        self.mlp = LlamaMLP(config)

    def qkv(self, embedded_TW: Tensor, hidden_TW: Tensor, rotation: Any) -> list[Tensor]:
        """Return queries ``[H, T, D]``, and keys and values ``[G, T, D]``."""
        both = torch.cat([self.input_layernorm(embedded_TW), self.hidden_norm(hidden_TW)], -1)
        query_heads, kv_heads, size = self.heads
        shapes = {"q_proj": query_heads, "k_proj": kv_heads, "v_proj": kv_heads}
        q, k, v = (
            self.self_attn[name](both).view(len(both), heads, size).transpose(0, 1)
            for name, heads in shapes.items()
        )
        q, k = (x[0] for x in apply_rotary_pos_emb(q[None], k[None], *rotation))
        return [q, k, v]

    def after_attention(self, hidden_TW: Tensor, mixed_HTD: Tensor) -> Tensor:
        """Return the layer's output ``[T, W]``."""
        mixed = mixed_HTD.transpose(0, 1).flatten(1)
        hidden_TW = hidden_TW + self.self_attn["o_proj"](mixed)
        return hidden_TW + self.mlp(self.post_attention_layernorm(hidden_TW))


class Head(nn.Module):
    """The head for a Llama policy. It is initialised from the policy's last layer, so at first it
    ignores the embedding and reads only the last of the three hidden states.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        config = policy.config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)
        self.to(policy.device)
        self._start_from(policy)

    @torch.no_grad()
    def _start_from(self, policy: PreTrainedModel) -> None:
        last = policy.model.layers[-1]
        width = policy.config.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, 2 * width :].fill_diagonal_(1)
        for name, projection in self.midlayer.self_attn.items():
            projection.weight.zero_()
            projection.weight[:, -last.self_attn.get_submodule(name).in_features :] = (
                last.self_attn.get_submodule(name).weight
            )
        self.midlayer.mlp.load_state_dict(last.mlp.state_dict())
        for mine, its in (
            (self.midlayer.input_layernorm, policy.model.layers[0].input_layernorm),
            (self.midlayer.hidden_norm, last.input_layernorm),
            (self.midlayer.post_attention_layernorm, last.post_attention_layernorm),
            (self.norm, policy.model.norm),
        ):
            mine.load_state_dict(its.state_dict())

    def forward(self, embedded_TW: Tensor, states_TS: Tensor, steps: int) -> list[Tensor]:
        """Return the normalised outputs ``[T, W]`` of each step, for ``lm_head``. The outputs of
        step j are meaningless at slots before j.
        """
        hidden = self.fc(states_TS)
        places = torch.arange(len(hidden), device=hidden.device)
        rotation = self.rotary(hidden, places[None])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for _ in range(steps):
            q, k, v = self.midlayer.qkv(embedded_TW, hidden, rotation)
            keys.append(k)
            values.append(v)
            output = self.midlayer.after_attention(hidden, attend(q, keys, values))
            outputs.append(self.norm(output))
            hidden = pad(output[:-1], (0, 0, 1, 0))  # slot t reads what slot t - 1 wrote
        return outputs


def attend(q_HTD: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Compute attention in the last of several steps. Each step has keys and values ``[G, T, D]``.

    In step j, slot t reads slots 0 to t - j of step 0, and slot t - j + i of step i.
    """
    H, T, D = q_HTD.shape
    G = len(keys[0])
    step = len(keys) - 1
    q_GRTD = q_HTD.view(G, H // G, T, D) * D**-0.5
    scores = q_GRTD @ keys[0][:, None].transpose(-1, -2)
    is_read = scores.new_ones(T, T, dtype=torch.bool).tril(-step)
    scores = [scores.masked_fill(~is_read, -torch.inf)]
    later = range(1, step + 1)
    for i in later:
        k_GTD = keys[i].roll(step - i, 1)
        scores.append((q_GRTD * k_GTD[:, None]).sum(-1, keepdim=True))
    weights = torch.cat(scores, -1).softmax(-1).to(values[0].dtype)
    out = weights[..., :T] @ values[0][:, None]
    for i in later:
        out = out + weights[..., T + i - 1, None] * values[i].roll(step - i, 1)[:, None]
    return out.reshape(H, T, D)


def outputs(head: Head, policy: PreTrainedModel, reading: Reading, steps: int) -> list[Tensor]:
    """Run the head on a sequence, and return each step's outputs ``[T, W]``."""
    embedded = policy.get_input_embeddings()(reading.tokens_N[1:])
    with torch.autocast(policy.device.type, torch.bfloat16):
        return head(embedded, reading.states_NS[:-1], steps)


def logprobs(policy: PreTrainedModel, hidden: Tensor, temperature: float) -> Tensor:
    """Return log-probs ``[..., V]`` in float32, given the inputs of ``lm_head``, ``[..., W]``."""
    weight = policy.lm_head.weight
    return (linear(hidden.to(weight.dtype), weight).float() / temperature).log_softmax(-1)


def losses(
    head: Head,
    policy: PreTrainedModel,
    reading: Reading,
    temperature: float,
    steps: int,
    slots: Tensor,
) -> Tensor:
    """Return each step's mean KL(policy || head) over the given slots, in nats, ``[steps]``. Step j
    leaves out slots before j.
    """
    target = logprobs(policy, reading.last_NW[slots + 1], temperature)
    found = []
    for step, output in enumerate(outputs(head, policy, reading, steps)):
        own = logprobs(policy, output[slots], temperature)
        kl = (target.exp() * (target - own)).sum(-1)
        counts = (slots >= step).float()
        found.append((kl * counts).sum() / counts.sum().clamp(min=1))
    return torch.stack(found)


def save(head: Head, policy: PreTrainedModel, folder: Path) -> None:
    """Write an EAGLE-3 checkpoint in the policy's dtype, for vLLM's method ``eagle3``."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {**head.state_dict(), "lm_head.weight": policy.lm_head.weight}
    dtype = policy.lm_head.weight.dtype
    tensors = {name: x.detach().to(dtype).contiguous().cpu() for name, x in weights.items()}
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    config = policy.config.to_dict() | {
        "_name_or_path": "",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": policy.config.vocab_size,
        "eagle_aux_hidden_state_layer_ids": state_layers(policy.config),
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
