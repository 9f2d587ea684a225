"""Make transformers' ``generate`` work with a schedule: tell prefill from decoding, and refuse
options that would make decoding dense.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessorList

from sparrow.errors import ConfigError
from sparrow.model.state import actor_of

# Options that make ``generate`` verify several tokens in one pass.
SEVERAL = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


@contextlib.contextmanager
def dense_steps(model: nn.Module) -> Iterator[None]:
    """Ignore the schedule inside the context, so that decode steps of ``model`` attend to all
    tokens.

    Use this to read a prompt in chunks: if the last chunk is a single token, it looks like a decode
    step.

    Raises ConfigError if the model has no schedule.
    """
    actor = actor_of(model)
    if actor is None:
        raise ConfigError(
            "dense_steps needs a model prepared with "
            "sparrow.model.actor.set_schedule(model, schedule)"
        )
    before = actor.dense
    actor.dense = True
    try:
        yield
    finally:
        actor.dense = before


@contextlib.contextmanager
def steps_of_several(model: nn.Module) -> Iterator[None]:
    """Inside the context, a pass of ``model`` with a cache counts as one sparse decode step even if
    it reads several tokens. In each layer, the query of a row's first new token selects the pages
    for all of the row's new tokens.

    Raises ConfigError if the model has no schedule.
    """
    actor = actor_of(model)
    if actor is None:
        raise ConfigError(
            "steps_of_several needs a model prepared with "
            "sparrow.model.actor.set_schedule(model, schedule)"
        )
    before = actor.takes_several
    actor.takes_several = True
    try:
        yield
    finally:
        actor.takes_several = before


def watch_generate(model: nn.Module) -> None:
    """Wrap ``model.generate`` so that it tells prefill from decoding and refuses options that make
    decoding dense.
    """
    for module in model.modules():
        if isinstance(module, GenerationMixin):
            # Use a partial rather than a bound method. A partial can be unpickled, and each copy of
            # the model gets its own.
            vars(module)["generate"] = partial(_generate, module)


def unwatch_generate(model: nn.Module) -> None:
    """Undo ``watch_generate``."""
    for module in model.modules():
        if isinstance(vars(module).get("generate"), partial):
            del vars(module)["generate"]


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand-in for ``generate`` on a routed model. Checks that decode steps will read one token
    with a cache, then calls the model's own method.

    Raises ConfigError if an option makes decode steps read several tokens or turns off the cache.
    """
    generate = type(self).generate
    actor = actor_of(self)
    if actor is None or not actor.routed or actor.dense:
        return generate(self, *args, **kwargs)
    bound = inspect.signature(generate).bind(self, *args, **kwargs)
    given = {**bound.arguments, **bound.kwargs}
    if not actor.schedule.is_dense:
        _check_options(self, given)

    def first_token(ids: Tensor, scores: Tensor) -> Tensor:
        # The first token is being sampled, so the prompt has been read.
        actor.dense = False
        actor.is_generating = True
        return scores

    processors = LogitsProcessorList([*(given.get("logits_processor") or []), first_token])
    if "logits_processor" in bound.arguments:  # may have been passed positionally
        bound.arguments["logits_processor"] = processors
    else:
        bound = inspect.signature(generate).bind(self, *args, **kwargs, logits_processor=processors)
    try:
        with dense_steps(self):
            return generate(*bound.args, **bound.kwargs)
    finally:
        actor.is_generating = False


def _check_options(model: Any, given: dict[str, Any]) -> None:
    configs = [
        config
        for config in (given.get("generation_config"), model.generation_config)
        if config is not None
    ]

    def option(name: str) -> Any:
        candidates = (given.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in candidates if value is not None), None)

    if several := [name for name in SEVERAL if option(name)]:
        raise ConfigError(
            f"generate with {several[0]} verifies several tokens in one pass, which would be "
            f"dense; leave {several[0]} out, or set SparsitySchedule.dense() first"
        )
    if option("use_cache") is False:
        raise ConfigError(
            "generate with use_cache=False computes the whole sequence at every step, which would "
            "be dense; use the cache, or set SparsitySchedule.dense() first"
        )
