"""The clipped policy objective, exact under gradient accumulation.

Shapes: B sequences, T response tokens (right-padded).

One optimiser step may be split into micro-batches of whole sequences. The whole step's denominators
are counted once (`count_normalizers`) and passed to every micro-batch, so the micro-batch losses,
their gradients and their metrics *add up* to those of the full batch. With data parallelism, count
over all ranks; if gradients are averaged rather than summed over ranks, multiply the loss by the
number of ranks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from sparrow.errors import TrainingDiverged
from sparrow.train.config import LossConfig, Normalization


@dataclass(frozen=True)
class Normalizers:
    """Denominators of one optimiser step, over all its micro-batches and ranks.

    They count the same tokens as the numerators, so leaving out a token doesn't shrink the others'
    share.
    """

    sequences: int  # Number of sequences with at least one token.
    tokens: int  # Number of tokens in all sequences.
    max_length: int  # Maximum response length in tokens, the constant dr_grpo divides by.

    def __post_init__(self) -> None:
        if min(self.sequences, self.tokens, self.max_length) < 1:
            raise ValueError(
                f"{self} has a denominator below 1; every denominator must be at least 1."
            )


def count_normalizers(mask_BT: Tensor, max_length: int) -> Normalizers:
    """Count a step's normalizers from the full batch's mask. If the mask is all false, the losses
    are sums of zeros, and the counts are set to 1 to avoid dividing by 0.
    """
    sequences = int(mask_BT.any(1).sum())
    tokens = int(mask_BT.sum())
    return Normalizers(max(sequences, 1), max(tokens, 1), max_length)


def policy_loss(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    weight_BT: Tensor,
    config: LossConfig,
    normalizers: Normalizers,
) -> tuple[Tensor, dict[str, float]]:
    """Compute one micro-batch's loss and metrics. The loss is a scalar, differentiable in logp_BT
    only.

    With rho = pi_theta / p_old, a token's loss is weight * -min(rho A, clip(rho, 1 - clip_low, 1 +
    clip_high) A). This is Sparrow's training objective (arXiv 2606.08446) with the two clip widths
    of DAPO (arXiv 2503.14476, section 3.1). Where A < 0 and clip_ratio_c is set, the loss is at
    most weight * clip_ratio_c * |A| (dual clip, arXiv 1912.09729, equation 5). The token losses are
    summed according to config.normalization:
      grpo     sum_b (1 / length_b) sum_t / sequences  DeepSeekMath, arXiv 2402.03300, section 4.1.1
      dapo     sum_b sum_t / tokens                    DAPO, section 3.3
      dr_grpo  sum_b sum_t / (sequences * max_length)  Dr. GRPO, arXiv 2503.20783, section 3.2

    logp_BT, old_logp_BT [B, T]: log-probs of the sampled tokens under the trained policy and under
    the dense policy at rollout time. advantages_B [B]. weight_BT [B, T]: Correction.weight_BT.
    mask_BT bool [B, T]: the tokens counted by the loss and the normalizers. These are the tokens in
    Correction.counted_BT of responses being trained on. Except with obrs, they include tokens that
    the correction masks out (weight 0).

    Metrics. All except *_max add up over micro-batches (see `merge_metrics`), and all except loss
    and *_max are means over normalizers.tokens:
      loss; clip_low_fraction, clip_high_fraction: tokens at which the lower or upper clip is
      active; ratio_mean: rho; approx_kl: rho - 1 - log rho, an estimate of KL(p_old || pi_theta);
      log_ratio_abs_max. Dual clip adds clip_c_fraction: tokens at which it is active.
    Raises ValueError if shapes disagree.
    """
    one_shape = logp_BT.shape == old_logp_BT.shape == mask_BT.shape == weight_BT.shape
    if not one_shape or advantages_B.shape != logp_BT.shape[:1]:
        shapes = [tuple(x.shape) for x in (logp_BT, old_logp_BT, mask_BT, weight_BT, advantages_B)]
        raise ValueError(
            f"logp, old logp, mask, weight and advantages have shapes {shapes}; pass four tensors "
            "[B, T] and advantages [B]."
        )
    dtype = torch.promote_types(logp_BT.dtype, torch.float32)
    # Zero out padding before any exp: an inf there makes gradients NaN, even when multiplied by 0.
    log_ratio_BT = torch.where(mask_BT, logp_BT.to(dtype) - old_logp_BT.detach().to(dtype), 0.0)
    weight_BT = torch.where(mask_BT, weight_BT.detach().to(dtype), 0.0)
    advantages_B1 = advantages_B.detach().to(dtype)[:, None]

    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain_BT = torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
    totals = {
        "clip_low_fraction": (
            (ratio_BT < 1 - config.clip_low) & (advantages_B1 < 0) & mask_BT
        ).sum(),
        "clip_high_fraction": (
            (ratio_BT > 1 + config.clip_high) & (advantages_B1 > 0) & mask_BT
        ).sum(),
        "ratio_mean": ratio_BT.detach()[mask_BT].sum(),
        "approx_kl": (log_ratio_BT.expm1() - log_ratio_BT).detach().sum(),
    }
    if config.clip_ratio_c is not None:
        floor_B1 = torch.where(advantages_B1 < 0, config.clip_ratio_c * advantages_B1, -torch.inf)
        totals["clip_c_fraction"] = ((gain_BT < floor_B1) & mask_BT).sum()
        gain_BT = torch.maximum(gain_BT, floor_B1)
    loss = _total(-weight_BT * gain_BT, mask_BT, config.normalization, normalizers)
    metrics = {"loss": loss.detach()} | {
        name: sums.double() / normalizers.tokens for name, sums in totals.items()
    }
    metrics["log_ratio_abs_max"] = log_ratio_BT.detach().abs().amax()
    # One device-to-host copy for all values.
    values = torch.stack([value.double() for value in metrics.values()]).tolist()
    return loss, dict(zip(metrics, values, strict=True))


def reference_loss(
    logp_BT: Tensor,
    ref_logp_BT: Tensor,
    mask_BT: Tensor,
    config: LossConfig,
    normalizers: Normalizers,
) -> tuple[Tensor, dict[str, float]]:
    """Compute beta * KL(pi_theta || reference) for one micro-batch.

    The KL is DeepSeekMath's per-token estimate (arXiv 2402.03300, equation 4), unweighted as in
    TRL. The loss is differentiable in logp_BT only, and summed as in ``policy_loss``.

    ref_logp_BT [B, T]: log-probs under the reference policy. mask_BT bool [B, T]: the tokens
    counted by the loss and the normalizers, i.e. all response tokens. Metrics: loss, and kl, the
    mean over normalizers.tokens.
    """
    dtype = torch.promote_types(logp_BT.dtype, torch.float32)
    log_away_BT = torch.where(mask_BT, ref_logp_BT.detach().to(dtype) - logp_BT.to(dtype), 0.0)
    kl_BT = log_away_BT.expm1() - log_away_BT
    loss = _total(config.beta * kl_BT, mask_BT, config.normalization, normalizers)
    kl = kl_BT.detach().sum().double() / normalizers.tokens
    return loss, {"loss": loss.item(), "kl": kl.item()}


def _total(
    token_loss_BT: Tensor, mask_BT: Tensor, normalization: Normalization, normalizers: Normalizers
) -> Tensor:
    match normalization:
        case "grpo":
            length_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
            return (token_loss_BT / length_B1).sum() / normalizers.sequences
        case "dapo":
            return token_loss_BT.sum() / normalizers.tokens
        case "dr_grpo":
            return token_loss_BT.sum() / (normalizers.sequences * normalizers.max_length)
        case _:
            assert_never(normalization)


def merge_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of a step's micro-batches: max for `*_max`, sum for everything else."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name.endswith("_max"):  # keeps a NaN, which Python's max might drop
                merged[name] = max(merged.get(name, value), value, key=lambda x: (math.isnan(x), x))
            else:
                merged[name] = merged.get(name, 0.0) + value
    return merged


def check_finite(metrics: Mapping[str, float], max_log_ratio: float) -> None:
    """Check the metrics of `policy_loss` and the gradient norm.

    Call this before the optimiser step, while the weights are still from the last good step.

    Raises TrainingDiverged if a metric is not finite, or log_ratio_abs_max exceeds max_log_ratio.
    """
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise TrainingDiverged(
                f"{name} is {value}, but must be finite; go back to the last checkpoint and lower "
                "the learning rate, or use a denser schedule."
            )
    log_ratio = metrics.get("log_ratio_abs_max", 0.0)
    if log_ratio > max_log_ratio:
        raise TrainingDiverged(
            f"the largest |log pi_theta - log p_old| is {log_ratio:.4g}, above the bound of "
            f"{max_log_ratio:g}; lower the learning rate, make fewer updates per rollout, or "
            "check that both sides are scored at the same temperature."
        )
