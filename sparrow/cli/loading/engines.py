"""Start engines and scorers."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparrow.cli.loading.models import Precision, model_path
from sparrow.decoding import Decoding
from sparrow.engines import hf
from sparrow.engines.base import Engine
from sparrow.engines.registry import Asked, no_engine, parse_engine


def load_engine(
    spec: str,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    decoding: Decoding,
    precision: Precision,
    audits: bool = False,
) -> Engine:
    """Start the engine that ``spec`` describes (see ``engines.registry``) for a model loaded from
    ``name``.

    If ``audits`` is set, engines without Sparrow are allowed too, and no engine can sleep.

    Raises ConfigError if there is no such engine, or it does not accept the options or the model.
    """
    parsed = parse_engine(spec)
    if parsed.kind.is_stock and not audits:
        raise no_engine(spec)
    asked = Asked(parsed, model_path(name), model, tokenizer, decoding, precision, not audits)
    return asked.start()


def load_scorer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    decoding: Decoding,
    precision: Precision,
) -> hf.HFEngine:
    """Start the transformers engine with ``model``. The engine samples with ``decoding``, and can
    score under any schedule.
    """
    asked = Asked(parse_engine("hf"), "", model, tokenizer, decoding, precision)
    return hf.start(asked)
