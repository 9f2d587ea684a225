"""What engines with an 8-bit KV cache are held against: transformers with every key and value
rounded likewise.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AttentionInterface

from sparrow.attention.int8 import from_int8, to_int8
from sparrow.attention.pages import to_fp8
from sparrow.model import actor
from sparrow.vllm.runtime import find
from tests.vllm.tiny_vllm import prompts

PROMPTS = prompts(5, 40, 130, 300)
PROMPTS.append(PROMPTS[2])  # it reads the blocks of the other in the step that fills them


def scales_of(sparrow):
    """Of an fp8 cache, the keys' and the values' scales of every layer, ``[K]`` each; of int8 None."""
    runtime = find(sparrow.llm.llm_engine.vllm_config)
    if runtime.cache.in_8_bits == torch.int8:
        return None
    return [(layer.values.k.clone(), layer.values.v.clone()) for layer in runtime.cache.fp8.layers]


def flat(scales):
    return torch.cat([scale_K for layer in scales for scale_K in layer])


@contextlib.contextmanager
def rounded(scales):
    """Inside, transformers attends to keys and values rounded to e4m3 or, without scales, to int8;
    lists what they were, by layer.

    Of e4m3, it is given keys as they are stored, without their scale, and queries times that scale:
    what 8-bit landmarks are is then the same too.
    """
    seen = []

    def attend(module, query, key, value, *more, **named):
        seen.append((key, value))
        if scales is None:
            key, value = (from_int8(*to_int8(x), x.dtype) for x in (key, value))
            return actor.sparrow_attention(module, query, key, value, *more, **named)
        k_scale, v_scale = (scale[:, None, None] for scale in scales[module.layer_idx])
        query = query * k_scale.repeat_interleave(query.shape[1] // key.shape[1], 0)
        key, value = to_fp8(key / k_scale).float(), to_fp8(value / v_scale).float() * v_scale
        return actor.sparrow_attention(module, query, key, value, *more, **named)

    AttentionInterface.register(actor.NAME, attend)
    try:
        yield seen
    finally:
        AttentionInterface.register(actor.NAME, actor.sparrow_attention)


def gaps(a, b):
    return np.concatenate([np.abs(x.logprobs - y.logprobs) for x, y in zip(a, b, strict=True)])


def agree(a, b, few=0.0):
    """Whether log-probs are the same, up to numbers so close between two e4m3 values that 1e-7
    rounds them apart.

    A batch of these prompts has 400,000 keys and values, so that a few are. Tokens that read one
    differ by 1e-3, the others by 1e-5; where a page was selected by it, a ``few`` differ by more.
    Without rounding the median is 0.05.
    """
    apart = gaps(a, b)
    return bool(np.quantile(apart, 0.5) < 5e-4 and np.quantile(apart, 1 - few) < 1e-2)


def as_rounded(rollouts, reference, schedule, sparrow):
    with rounded(scales_of(sparrow)):
        return agree(
            rollouts, reference.score(rollouts, schedule, 1.0), 0.0 if schedule.is_dense else 0.03
        )


def as_prompts(sparrow, rollouts):
    """The log-probs that the engine gives the tokens of these rollouts as the ends of prompts."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    requests = [{"prompt_token_ids": [*r.prompt_ids, *r.response_ids.tolist()]} for r in rollouts]
    for rollout, output in zip(
        rollouts, sparrow.llm.generate(requests, parameters, use_tqdm=False), strict=True
    ):
        end = output.prompt_logprobs[-len(rollout) :]
        own = [at[int(token)].logprob for at, token in zip(end, rollout.response_ids, strict=True)]
        yield SimpleNamespace(logprobs=np.array(own))
