"""A small EAGLE-3 head in plain torch, as a reference for guesses by a head. It can be trained, and
saved for vLLM.

Shapes: N tokens of a sequence, T slots, W hidden size, H query heads, K kv heads, D head size, V
vocabulary.
"""

import json

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

THETA = 10_000.0


def states(model, ids):
    """Return a model's hidden states ``[B, N, 3 W]`` and its logits. The states are taken before
    the first layer, in the middle, and before the final norm.
    """
    seen = []
    layers = model.model.layers
    hooks = [
        layer.register_forward_hook(
            lambda _, given, out: seen.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in layers
    ]
    logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    every = [model.get_input_embeddings()(ids), *seen]
    return torch.cat([every[i] for i in places(model.config)], -1), logits


def places(config):
    """Return the indices of the hidden states that the head reads, in vLLM's numbering."""
    return 0, config.num_hidden_layers // 2, config.num_hidden_layers


class Head:
    """A head with random weights that shares the model's embedding and output layer.

    Args:
        words: the tokens that the head can guess; None for all.
    """

    def __init__(self, model, seed=0, words=None):
        config = model.config
        W, V = config.hidden_size, config.vocab_size
        self.H, self.K = config.num_attention_heads, config.num_key_value_heads
        self.D = getattr(config, "head_dim", None) or W // self.H
        self.eps = config.rms_norm_eps
        self.model = model
        self.words = torch.arange(V) if words is None else torch.tensor(words)
        torch.manual_seed(seed)
        sizes = {
            "fc": (W, 3 * W),
            "midlayer.self_attn.q_proj": (self.H * self.D, 2 * W),
            "midlayer.self_attn.k_proj": (self.K * self.D, 2 * W),
            "midlayer.self_attn.v_proj": (self.K * self.D, 2 * W),
            "midlayer.self_attn.o_proj": (W, self.H * self.D),
            "midlayer.mlp.gate_proj": (2 * W, W),
            "midlayer.mlp.up_proj": (2 * W, W),
            "midlayer.mlp.down_proj": (W, 2 * W),
        }
        self.weights = {name: torch.randn(size) / size[1] ** 0.5 for name, size in sizes.items()}
        for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            self.weights[f"midlayer.{norm}"] = torch.ones(W)
        self.weights["norm"] = torch.ones(W)
        output = model.lm_head.weight.detach().clone()
        self.weights["lm_head"] = output[self.words]

    def _norm(self, x, name):
        return rms_norm(x, x.shape[-1:], self.weights[name], self.eps)

    def run(self, embedded, hidden, cache):
        """Run the head on the slots that follow those in ``cache``, and add their keys and values
        ``[B, K, T, D]`` to it. Return the inputs of the output layer and of the next step, both
        ``[B, T, W]``.
        """
        weights = self.weights
        before = cache[0].shape[2] if cache else 0
        T = embedded.shape[1]
        normed = self._norm(embedded, "midlayer.input_layernorm")
        both = torch.cat([normed, self._norm(hidden, "midlayer.hidden_norm")], -1)
        q, k, v = (
            linear(both, weights[f"midlayer.self_attn.{name}_proj"])
            .unflatten(-1, (-1, self.D))
            .transpose(1, 2)
            for name in "qkv"
        )
        angle = torch.outer(
            torch.arange(before, before + T).float(),
            THETA ** -(torch.arange(0, self.D, 2) / self.D),
        )
        q, k = (self._rotated(x, angle) for x in (q, k))
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = k, v
        is_read = torch.ones(T, before + T).tril(before).bool()
        mixed = scaled_dot_product_attention(q, k, v, is_read, enable_gqa=True)
        hidden = hidden + linear(
            mixed.transpose(1, 2).flatten(2), weights["midlayer.self_attn.o_proj"]
        )
        x = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up, down = (weights[f"midlayer.mlp.{name}_proj"] for name in ("gate", "up", "down"))
        hidden = hidden + linear(silu(linear(x, gate)) * linear(x, up), down)
        return self._norm(hidden, "norm"), hidden

    @staticmethod
    def _rotated(x, angle):
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def logits(self, hidden):
        """Return logits for ``words``."""
        return linear(hidden, self.weights["lm_head"])

    def train(self, prompts, steps=150):
        """Fit the head to the model's most likely tokens after random prompts ``[B, N]``."""
        with torch.no_grad():
            read, logits = states(self.model, prompts)
            embedded = self.model.get_input_embeddings()(prompts)
        index = torch.full((self.model.config.vocab_size,), -100)
        index[self.words] = torch.arange(len(self.words))
        target = index[logits[:, 1:].argmax(-1)]
        trained = [x.requires_grad_() for x in self.weights.values()]
        adam = torch.optim.Adam(trained, 3e-3)
        for _ in range(steps):
            hidden, _ = self.run(embedded[:, 1:], linear(read[:, :-1], self.weights["fc"]), [])
            loss = torch.nn.functional.cross_entropy(
                self.logits(hidden).flatten(0, 1), target.flatten()
            )
            adam.zero_grad()
            loss.backward()
            adam.step()
        for x in trained:
            x.requires_grad_(False)
        return self

    @torch.no_grad()
    def guesses(self, tokens, count):
        """Return the next ``count`` guesses after these tokens, and the difference between each
        guess's logit and the second largest logit.
        """
        ids = torch.tensor([tokens])
        read, _ = states(self.model, ids)
        embed = self.model.get_input_embeddings()
        cache = []
        hidden, output = self.run(
            embed(ids[:, 1:]), linear(read[:, :-1], self.weights["fc"]), cache
        )
        found, margins = [], []
        for number in range(count):
            best = self.logits(hidden[0, -1]).topk(2)
            found.append(int(self.words[best.indices[0]]))
            margins.append(float(best.values[0] - best.values[1]))
            if number + 1 < count:
                newest = embed(torch.tensor([found[-1:]]))
                hidden, output = self.run(newest, output[:, -1:], cache)
        return found, margins

    def save(self, folder, **changes):
        """Write a checkpoint for vLLM's method ``eagle3``."""
        config = self.model.config
        folder.mkdir(parents=True, exist_ok=True)
        V, words = config.vocab_size, len(self.words)
        tensors = {f"{name}.weight": x.contiguous() for name, x in self.weights.items()}
        if words < V:
            tensors["d2t"] = self.words - torch.arange(words)
        save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
        made = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": config.hidden_size,
            "intermediate_size": 2 * config.hidden_size,
            "num_attention_heads": self.H,
            "num_key_value_heads": self.K,
            "head_dim": self.D,
            "rms_norm_eps": self.eps,
            "rope_theta": THETA,
            "max_position_embeddings": config.max_position_embeddings,
            "vocab_size": V,
            "draft_vocab_size": words,
            "eagle_aux_hidden_state_layer_ids": list(places(config)),
            "tie_word_embeddings": False,
            "dtype": "float32",
        }
        (folder / "config.json").write_text(json.dumps({**made, **changes}))
        return folder
