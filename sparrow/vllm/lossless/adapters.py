"""LoRA adapters in draft steps.

Before each pass, vLLM builds a mapping from tokens to adapters on the device. A verification has
several tokens per sequence but a draft step has only one, so the draft steps after a verification
cannot use its mapping. For the output layer, vLLM also maps sequences to adapters. Draft steps use
this second mapping in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY

from sparrow.errors import ConfigError

BY_TOKEN = ("token_lora_mapping", "token_indices_sorted_by_lora_ids")
BY_ADAPTER = ("num_tokens_per_lora", "lora_token_start_loc", "active_lora_ids")
"""Names of the tensors in a mapping (vLLM's ``LoRAKernelMeta``): those with one entry per token,
and those with one entry per active adapter.
"""


class DraftAdapters:
    """The adapters in one worker's draft steps.

    Mappings are overwritten in place, because CUDA graphs refer to them by address. They are
    restored after the drafts, because vLLM reuses them for as long as the batch stays the same.

    Args:
        manager: vLLM's ``LoRAModelManager``. It is patched to refuse adapters for the output layer.
        rows: the worker's maximum number of sequences.
    """

    def __init__(self, manager: Any, rows: int) -> None:
        language = DEFAULT_LANGUAGE_WRAPPER_KEY
        if manager.supports_mm:
            language = manager.mm_mapping.language_model[0]
        wrapper = manager.punica_wrapper_mapping[language]
        self._manager = manager
        self._of_tokens = wrapper.token_mapping_meta
        self._of_sequences = wrapper.prompt_mapping_meta
        self._vocabulary = manager.vocab_size
        self._sequence_adapters = wrapper._sampler_indices[:rows]

        # Unlike the other layers, the embedding reads each token's adapter offset, not a mapping.
        embedding = wrapper._embeddings_indices[:rows]
        self._places = torch.empty_like(embedding)
        self._read = [*_tensors(self._of_tokens, rows), embedding]
        self._wanted = [*_tensors(self._of_sequences, rows), self._places]
        self._kept = [torch.empty_like(each) for each in self._read]
        _refuse_output_layers(manager)

    @property
    def are_used(self) -> bool:
        """True if any sequence in the current batch has an adapter."""
        return not self._of_tokens.no_lora_flag_cpu.item()

    @contextmanager
    def by_sequence(self) -> Iterator[None]:
        """Inside the context, map each row to its sequence's adapter."""
        if not self.are_used:
            yield
            return
        last = self._manager.lora_slots - 1  # padding has no adapter, but needs a valid offset
        torch.clamp(self._sequence_adapters, min=0, max=last, out=self._places)
        self._places.mul_(self._vocabulary)
        torch._foreach_copy_(self._kept, self._read)
        torch._foreach_copy_(self._read, self._wanted)
        try:
            yield
        finally:
            torch._foreach_copy_(self._read, self._kept)

    @contextmanager
    def captured(self, with_adapters: bool) -> Iterator[None]:
        """Prepare to capture CUDA graphs inside the context. If ``with_adapters`` is true, the
        graphs are for batches with any number of adapters. Otherwise, they are for batches without
        LoRA. No row has an adapter during capture.
        """
        mappings = (self._of_tokens, self._of_sequences)
        for mapping in mappings:
            mapping._reset()
            mapping.no_lora_flag_cpu.fill_(not with_adapters)
            mapping.num_active_loras_cpu.fill_(self._manager.lora_slots + 1)
        try:
            yield
        finally:
            self._manager._last_mapping = None  # makes vLLM set its mappings again


def _tensors(mapping: Any, rows: int) -> list[Tensor]:
    by_token = [getattr(mapping, name)[:rows] for name in BY_TOKEN]
    return by_token + [getattr(mapping, name) for name in BY_ADAPTER]


def _refuse_output_layers(manager: Any) -> None:
    """Make ``manager`` raise ConfigError for adapters that change the output layer."""
    outputs = [
        name
        for name, module in manager.modules.items()
        if isinstance(module, LogitsProcessorWithLoRA)
    ]
    add_adapter = manager.add_adapter

    @wraps(add_adapter)
    def checked(adapter: Any) -> Any:
        for name in outputs:
            weights = adapter.loras.get(name)
            if weights is not None and weights.lora_b.any():
                raise ConfigError(
                    f"mode 'lossless' does not support the LoRA adapter {adapter.id}, which "
                    f"changes {name}: vLLM maps adapters of {name} to one token per sequence, but "
                    f"verification samples several; train the adapter without {name}, or use mode "
                    "'lossy'"
                )
        return add_adapter(adapter)

    manager.add_adapter = checked
