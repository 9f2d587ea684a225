"""Reject sampler settings that would make a trainer's importance ratios wrong.

vLLM reports log-probs of the distribution it samples from, after top-p, top-k, min-p, penalties and
biases, while trainers compute the policy's log-probs from the whole softmax. With any of these
settings, each ratio would be off by a factor that varies from token to token. For top-p, this
factor is the probability mass kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparrow.errors import ConfigError

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "logits_processors": (None, []),
}
"""Neutral values for each setting. With these, vLLM samples from the whole softmax."""


def check_whole_softmax(settings: Mapping[str, Any], place: str) -> None:
    """Check that vLLM's settings make it sample from the whole softmax.

    Args:
        settings: names and values of vLLM's ``SamplingParams``; other names are ignored.
        place: a prefix for the setting's name in the message, such as ``"GRPOConfig."``.

    Raises ConfigError if a setting changes the distribution.
    """
    for name, neutral in NEUTRAL.items():
        value = settings.get(name)
        if value not in neutral:
            raise ConfigError(
                f"{place}{name} is {value!r}, which changes the actor's distribution but not the "
                f"policy's, so their log-probs cannot be compared; leave {name} out"
            )
