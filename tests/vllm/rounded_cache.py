"""A reference for engines with an 8-bit KV cache: transformers, with all keys and values rounded in
the same way as in the engine.
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
PROMPTS.append(PROMPTS[2])  # equal prompts share blocks that the same step fills


def scales_of(sparrow):
    """Return the scales of keys and values, ``[K]`` each, for every layer of an fp8 cache. Return
    None for an int8 cache.
    """
    runtime = find(sparrow.llm.llm_engine.vllm_config)
    if runtime.cache.in_8_bits == torch.int8:
        return None
    return [(layer.values.k.clone(), layer.values.v.clone()) for layer in runtime.cache.fp8.layers]


def flat(scales):
    return torch.cat([scale_K for layer in scales for scale_K in layer])


@contextlib.contextmanager
def rounded(scales):
    """Make transformers attend to keys and values that are rounded to e4m3 or, if ``scales`` is
    None, to int8. Yield a list that collects the original keys and values by layer.

    With e4m3, keys are passed in stored form, without their scale, and queries are multiplied by
    the scale instead. 8-bit landmarks are then the same as in the engine.
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
    """Return whether log-probs agree. Some keys and values are so close to the midpoint between two
    e4m3 values that an error of 1e-7 changes their rounding. There are a few of them among the
    400,000 in a batch of these prompts. Tokens that read one of them differ by 1e-3, and all other
    tokens by 1e-5. If one of them changes which page is selected, tokens differ by more; ``few`` is
    the share of tokens for which this is allowed. Without rounding, the median difference is 0.05.
    """
    apart = gaps(a, b)
    return bool(np.quantile(apart, 0.5) < 5e-4 and np.quantile(apart, 1 - few) < 1e-2)


def as_rounded(rollouts, reference, schedule, sparrow):
    with rounded(scales_of(sparrow)):
        return agree(
            rollouts, reference.score(rollouts, schedule, 1.0), 0.0 if schedule.is_dense else 0.03
        )


def as_prompts(sparrow, rollouts):
    """Return the log-probs that the engine computes for the responses' tokens when they are part of
    a prompt.
    """
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    requests = [{"prompt_token_ids": [*r.prompt_ids, *r.response_ids.tolist()]} for r in rollouts]
    for rollout, output in zip(
        rollouts, sparrow.llm.generate(requests, parameters, use_tqdm=False), strict=True
    ):
        end = output.prompt_logprobs[-len(rollout) :]
        own = [at[int(token)].logprob for at, token in zip(end, rollout.response_ids, strict=True)]
        yield SimpleNamespace(logprobs=np.array(own))
