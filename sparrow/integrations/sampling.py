"""Refuses what would make a trainer's importance ratios wrong: samplers that reshape the
distribution whose log-probs the policy's are divided by.

vLLM's log-probs are those of what it samples from, after top-p, top-k, min-p, penalties and biases;
the trainers compute the policy's from all of the softmax. The ratio is then too small by the kept
mass, at every token and by another factor.
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
"""What a sampler may be set to, by name in vLLM, so that it samples from the whole softmax."""


def check_whole_softmax(settings: Mapping[str, Any], place: str) -> None:
    """Check that vLLM is asked to sample from the whole softmax.

    Args:
        settings: names and values as vLLM's ``SamplingParams`` have them; others are not looked at.
        place: what stands before a setting's name in the message, such as ``"GRPOConfig."``.

    Raises ConfigError: a setting that changes the distribution.
    """
    for name, neutral in NEUTRAL.items():
        value = settings.get(name)
        if value not in neutral:
            raise ConfigError(
                f"{place}{name} is {value!r}, which changes what the actor samples from but not "
                f"the policy that its log-probs are compared with; leave {name} out"
            )
