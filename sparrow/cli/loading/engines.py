"""Starts engines and scorers."""

from __future__ import annotations

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparrow.cli.loading.models import Precision, model_path
from sparrow.cli.loading.specs import parse_options, parse_spec
from sparrow.decoding import Decoding
from sparrow.engines import hf
from sparrow.engines.base import Engine
from sparrow.errors import ConfigError


def load_engine(
    spec: str,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    decoding: Decoding,
    precision: Precision,
) -> Engine:
    """The engine that ``spec`` names: ``hf``, which runs ``model``; ``vllm`` with options of
    ``vllm.LLM``, which loads the model by ``name``; or the addresses of vLLM servers.

    Raises ConfigError: none of these, more servers than processes, or a dtype beside the precision.
    """
    if spec.startswith(("http://", "https://")):
        from sparrow.engines.vllm import VLLMServer

        rank, urls = PartialState().process_index, spec.split(",")
        if len(urls) > PartialState().num_processes:
            raise ConfigError(
                f"{len(urls)} vLLM servers for {PartialState().num_processes} processes; give one each"
            )
        return VLLMServer(urls[rank % len(urls)], decoding, controls=rank < len(urls))
    kind, options = parse_spec(spec)
    if kind == "vllm":
        from sparrow.engines.vllm import VLLMEngine

        dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
        if "dtype" in options:
            raise ConfigError(
                f"engine {spec!r}: vLLM's dtype follows the trainer's, {precision}; leave dtype out, set precision"
            )
        return VLLMEngine(model_path(name), decoding, dtype=dtype, **options)
    if kind != "hf" or options:
        raise ConfigError(
            f"no engine {spec!r}; expected hf, vllm, vllm:option=value,... or http://host:port"
        )
    return load_scorer(model, tokenizer, decoding, precision)


def load_stock_engine(spec: str, name: str, precision: Precision) -> Engine:
    """vLLM without Sparrow: the options of ``vllm.LLM`` that ``spec`` gives, or a server's address.

    Raises ConfigError: vLLM is missing, or a dtype beside the precision.
    """
    from sparrow.engines.vllm.stock import StockEngine, StockServer

    if spec.startswith(("http://", "https://")):
        return StockServer(spec)
    options = parse_options(spec, f"stock:{spec}")
    if "dtype" in options:
        raise ConfigError(
            f"engine 'stock:{spec}': vLLM's dtype follows {precision}; leave dtype out, set precision"
        )
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    return StockEngine(model_path(name), dtype=dtype, **options)


def load_scorer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    decoding: Decoding,
    precision: Precision,
) -> hf.HFEngine:
    """The transformers engine on ``model``: it scores under any schedule and samples as
    ``decoding`` says.
    """
    autocast = torch.bfloat16 if precision == "bf16" else None
    return hf.HFEngine(model, decoding, hf.eos_ids(model, tokenizer), autocast=autocast)
