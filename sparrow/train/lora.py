"""LoRA layers that use the same merged weights as the engine, and a policy in which only the LoRA
is trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import peft
import torch
from peft.tuners.lora import Linear
from torch import Tensor
from transformers import PreTrainedModel

from sparrow.errors import ConfigError
from sparrow.train.config import LoraConfig, TrainConfig


class _TimesMerged(torch.autograd.Function):
    """``x @ weight.T + bias``, where weight is the base weight plus ``scale * B @ A``. Only x, A
    and B get gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, A.to(x.dtype), B.to(x.dtype))
        ctx.scale = scale
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, A, B = ctx.saved_tensors
        d_out = gradients[0]
        d_x = d_out @ weight if ctx.needs_input_grad[0] else None
        x = x.flatten(0, -2)
        d_out = d_out.flatten(0, -2)
        d_A = ctx.scale * ((d_out @ B).T @ x)
        d_B = ctx.scale * (d_out.T @ (x @ A.T))
        return d_x, None, None, d_A, d_B, None


class MergedLinear(Linear):
    """A linear layer with a LoRA. While the LoRA is active, it does a single matmul with the merged
    weight.

    The engine gets the same merged weight. PEFT's own forward pass adds the LoRA as a separate
    term, which takes a tenth of the update time. PEFT's forward pass runs only if theta has less
    than float32 precision, as in shards. Merging would then lose changes smaller than theta's last
    bit.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.disable_adapters or self.base_layer.weight.dtype != torch.float32:
            return super().forward(x)
        device = x.device.type
        bias = self.base_layer.bias
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            weight = self.merged_weight().to(x.dtype)
            bias = bias if bias is None else bias.to(x.dtype)
            return cast(
                Tensor, _TimesMerged.apply(x, weight, bias, *self._phi(), self.scaling["default"])
            )

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Compute theta + delta(phi) as a new float32 tensor.

        Merging in place and undoing it again would change bf16 weights through rounding.
        """
        A, B = self._phi()
        theta = cast(Tensor, self.base_layer.weight)
        return torch.addmm(theta.float(), B.float(), A.float(), alpha=self.scaling["default"])

    def _phi(self) -> tuple[Tensor, Tensor]:
        return cast(Tensor, self.lora_A["default"].weight), cast(
            Tensor, self.lora_B["default"].weight
        )


def check_loras(model: PreTrainedModel, config: TrainConfig) -> None:
    """Check that every LoRA in ``config`` fits ``model``. The model's weights may be empty.

    Raises ConfigError: see ``check_lora``.
    """
    if config.lora.r is not None:
        check_lora(model, config.lora.r, config.lora.target_modules, "lora.r")
    if config.distill.enabled:
        check_lora(model, config.distill.rank, config.distill.target_modules, "distill.rank")


def check_lora(
    model: PreTrainedModel, rank: int, target_modules: Sequence[str], setting: str
) -> None:
    """Check that a LoRA fits the model. ``setting`` is the command-line name of its rank.

    Raises ConfigError if a name matches no linear layer, or if none of the layers' weight matrices
    can have so high a rank.
    """
    # the head may be tied to the embeddings, which cannot have a LoRA
    head = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    ranks: dict[str, int] = {}
    for target in target_modules:
        found = [m for name, m in linear.items() if f".{name}".endswith(f".{target}")]
        ranks[target] = max((min(m.in_features, m.out_features) for m in found), default=0)
    if missing := [target for target, most in ranks.items() if not most]:
        available = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ConfigError(
            f"cannot add a LoRA to {', '.join(missing)}; choose from "
            f"the linear layers of this model: {available}"
        )
    most = max(ranks.values())
    if rank > most:
        raise ConfigError(
            f"{setting} is {rank}, but no matrix of {', '.join(ranks)} in this model has a rank "
            f"above {most}; lower {setting} to {most} or less"
        )


def inject(
    model: PreTrainedModel, rank: int, alpha: int, target_modules: Sequence[str], setting: str
) -> peft.LoraConfig:
    """Replace the linear layers ``target_modules`` with ``MergedLinear``. The LoRA starts out
    active, and nothing else trains.

    Raises ConfigError: see ``check_lora``.
    """
    check_lora(model, rank, target_modules, setting)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(target_modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    config._register_custom_module({torch.nn.Linear: MergedLinear})
    peft.inject_adapter_in_model(config, model)
    return config


def layers(model: PreTrainedModel) -> list[MergedLinear]:
    """List the LoRA layers."""
    return [module for module in model.modules() if isinstance(module, MergedLinear)]


def base_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return theta, keyed by the parameter names of the model without the LoRA."""
    parameters = model.named_parameters()
    return {
        name.replace(".base_layer", ""): p.detach() for name, p in parameters if "lora_" not in name
    }


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield theta + delta(phi) in theta's dtype, one tensor at a time, leaving theta alone."""
    with_lora = {
        f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, MergedLinear)
    }
    for name, weight in base_weights(model).items():
        if name in with_lora:
            yield name, with_lora[name].merged_weight().to(weight.dtype)
        else:
            yield name, weight


@contextlib.contextmanager
def switched(model: PreTrainedModel, on: bool) -> Iterator[None]:
    """Switch the LoRA on or off inside the context, and to the opposite state on exit."""
    for layer in layers(model):
        layer.enable_adapters(on)
    try:
        yield
    finally:
        for layer in layers(model):
            layer.enable_adapters(not on)


class PolicyLora:
    """The policy's LoRA, the only part of the policy that trains. It is active except inside
    ``taken_off``.

    Raises ConfigError: see ``inject``.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig) -> None:
        assert config.r is not None
        self.model = model
        inject(model, config.r, config.alpha, config.target_modules, "lora.r")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights, with the LoRA merged."""
        return merged_weights(self.model)

    def taken_off(self) -> contextlib.AbstractContextManager[None]:
        """Turn the LoRA off inside the context. The model is then the one that the run started
        from.
        """
        return switched(self.model, False)
