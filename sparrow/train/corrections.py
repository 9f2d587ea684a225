"""Corrections for training the dense policy p on tokens that the sparse actor q sampled.

Shapes: B sequences, T response tokens (right-padded), V vocabulary.

Each kind of correction is a pure function of the log ratio log p/q (`log_r_BT`, float64, 0 on
padding), the mask of response tokens and the settings. `compute_correction` checks its arguments
and builds a `Correction`, whose weights multiply the token losses. The weights carry no gradient
(the stop-gradient in Sparrow's objective, arXiv 2606.08446). Everything is computed in log space in
float64, so the product of 32K ratios neither overflows nor loses precision.

Masked-out tokens have weight 0 but still count in the denominator of the loss, as in IcePop,
Sparse-RL and M2PO. Masking a token therefore doesn't change any other token's share of the
gradient. The exception is `obrs`, whose weights are relative to the accepted tokens.

Metrics are computed over response tokens, or over sequences with a response. r is the ratio p/q,
and w is the weight, which is 0 for masked-out tokens:
  ess_token                  (sum w)^2 / (N sum w^2): effective sample size, as a share of the N
                             tokens
  ess_sequence               the same for each sequence's mean weight
  ess_sequence_ratio         the same for each sequence's product of r, before any correction. It
                             is 1 if q = p, and falls towards 1 / sequences as a single sequence
                             outweighs the others
  clipped_fraction           tokens whose weight was cut to the cap
  masked_fraction            tokens not kept
  dropped_sequence_fraction  sequences with no token kept
  ratio_mean, ratio_max      of r; the mean is 1 in expectation
  kl_k1, kl_k3               KL(q || p) per token, as the mean of -log r and of r - 1 - log r
                             (Schulman 2020, "Approximating KL divergence"); k1 may be negative, k3
                             may not
  weight_mean                of w: the factor by which the correction scales the loss, except with
                             obrs
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.train.config import ICEPOP_BAND, SPARSE_RL_BAND, CorrectionConfig


@dataclass(frozen=True)
class Correction:
    """Token weights of a rollout batch."""

    weight_BT: Tensor  # float32, >= 0; 0 where mask_BT is false. No gradient.
    mask_BT: Tensor  # bool, the tokens kept: a subset of the response tokens.
    counted_BT: Tensor  # bool, the tokens that the loss's denominator counts.
    metrics: dict[str, float]  # See the module docstring.


def _log_ratio(log_p_BT: Tensor, log_q_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Compute log p/q in float64, without a gradient; 0 on padding."""
    if log_p_BT.ndim != 2 or not log_p_BT.shape == log_q_BT.shape == mask_BT.shape:
        shapes = tuple(log_p_BT.shape), tuple(log_q_BT.shape), tuple(mask_BT.shape)
        raise ValueError(
            f"log p, log q and mask have shapes {shapes}; pass three tensors of the same "
            "shape [B, T]."
        )
    if mask_BT.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask_BT.dtype}; pass a bool tensor.")
    if not mask_BT.any():
        raise ValueError(
            f"mask of shape {tuple(mask_BT.shape)} selects no response token; it must be True for at "
            "least one."
        )
    difference_BT = log_p_BT.detach().double() - log_q_BT.detach().double()
    bad_BT = mask_BT & ~difference_BT.isfinite()
    if bad_BT.any():
        b, t = bad_BT.nonzero()[0].tolist()
        raise ValueError(
            f"token {t} of sequence {b} has log p {log_p_BT[b, t].item()} "
            f"and log q {log_q_BT[b, t].item()}; both must be finite: "
            "score with the full softmax, without top-k or top-p."
        )
    return torch.where(mask_BT, difference_BT, 0.0)


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _inside(log_r_BT: Tensor, band: tuple[float, float]) -> Tensor:
    return (log_r_BT >= _log(band[0])) & (log_r_BT <= _log(band[1]))


def _effective_sample_size(log_w: Tensor) -> Tensor:
    """Compute (sum w)^2 / (n sum w^2) from the logs of n >= 1 weights; 0 if all weights are 0."""
    return ((2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp() / len(log_w)).nan_to_num(0.0)


Parts = tuple[Tensor, Tensor, Tensor | None]
"""Three [B, T] tensors: the weights (only used for kept tokens), the mask of kept tokens, and the
mask of weights that were cut to the cap.
"""


def _truncated(log_weight_BT: Tensor, mask_BT: Tensor, cap: float) -> Parts:
    log_cap = math.log(cap)
    return log_weight_BT.clamp(max=log_cap).exp(), mask_BT, log_weight_BT > log_cap


def none(log_r_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> Parts:
    """Give every token weight 1, as if it had been sampled from p. The metrics still show the
    mismatch.
    """
    return torch.ones_like(log_r_BT), mask_BT, None


def token_tis(log_r_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> Parts:
    """Use one truncated importance weight per token: min(p/q, cap).

    Sparrow, arXiv 2606.08446 (C = 2); Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training".
    """
    return _truncated(log_r_BT, mask_BT, config.cap)


def sequence_tis(log_r_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> Parts:
    """Use one truncated importance weight per sequence: every token has weight min(product of p/q
    over the sequence, cap).

    The product is unbiased, but its variance grows exponentially with length: at 32K tokens, nearly
    every weight is 0 or the cap. Liu, Li et al. 2025, "When Speed Kills Stability".
    """
    return _truncated(log_r_BT.sum(1, keepdim=True).expand_as(log_r_BT), mask_BT, config.cap)


def geometric_tis(log_r_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> Parts:
    """Use one truncated weight per sequence, like `sequence_tis`, but truncate the geometric mean
    of the sequence's ratios, which stays near 1 at any length.

    GSPO, arXiv 2507.18071, section 4.1.
    """
    mean_B1 = log_r_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
    return _truncated(mean_B1.expand_as(log_r_BT), mask_BT, config.cap)


def icepop(log_r_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> Parts:
    """Keep tokens whose ratio p/q is within the band, including its ends, and mask out the others.
    Kept tokens have weight p/q.

    Source: IcePop, in Ring-1T, "Every Step Evolves", arXiv 2510.18855, where the band is 0.5 to 5.
    """
    return log_r_BT.exp(), mask_BT & _inside(log_r_BT, config.band or ICEPOP_BAND), None


def sparse_rl(log_r_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> Parts:
    """Drop a sequence if it has a token whose ratio xi = p/q is below reject_below, because the
    policy would never have written that token. In the remaining sequences, mask out tokens outside
    the band. The other tokens have weight xi, so no weight exceeds the upper end of the band.

    Sparse-RL, arXiv 2601.10079: sparsity-aware rejection sampling and importance-based reweighting.
    """
    # Padding has log ratio 0, so it never counts as anomalous.
    anomalous_B1 = (log_r_BT < _log(config.reject_below)).any(1, keepdim=True)
    kept_BT = mask_BT & ~anomalous_B1 & _inside(log_r_BT, config.band or SPARSE_RL_BAND)
    return log_r_BT.exp(), kept_BT, None


def m2po(log_r_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig) -> Parts:
    """Mask out the tokens with the largest (log p/q)^2, until the mean of (log p/q)^2 over the kept
    tokens is at most m2_bound. Kept tokens have weight p/q. Since only the batch mean is bounded, a
    token with an extreme weight may be kept.

    Source: M2PO, arXiv 2510.01161, the equation of M2 and its mask, with tau_M2 = 0.04. In the
    paper, q is a stale policy.
    """
    m2, order = log_r_BT[mask_BT].square().sort(stable=True)
    # These means never decrease, because m2 is sorted.
    mean_of_smallest = m2.cumsum(0) / torch.arange(1, len(m2) + 1, device=m2.device)
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept[order[: int((mean_of_smallest <= config.m2_bound).sum())]] = True
    kept_BT = mask_BT.clone()
    kept_BT[mask_BT] = kept
    return log_r_BT.exp(), kept_BT, None


def obrs(
    log_r_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig, z_BT: Tensor, uniform_BT: Tensor
) -> Parts:
    """Accept each token with probability a = min(1, p / (lambda q)): optimal budgeted rejection
    sampling. An accepted token has weight min(Z max(lambda, p/q), cap), where Z = sum_v min(q, p /
    lambda) is the position's acceptance rate.

    z_BT [B, T] contains Z. If lambda = 1, Z is the acceptance rate that sparrow.mismatch measures.
    uniform_BT [B, T] contains one random number from [0, 1) per token, so that the result depends
    only on the arguments. Without the cap, sum_v q a w f = Z E_p[f] for any function f of the
    token. The loss therefore estimates E_p[f], averaged over positions in proportion to Z, if it is
    divided by the number of accepted tokens (with Correction.counted_BT as its mask). If it were
    divided by the number of response tokens, it would be scaled by the mean of Z, as it is with
    dr_grpo, whose denominator doesn't depend on the tokens.

    Source: Jackpot, arXiv 2602.06107. Its objective also truncates the weight, as cap does here.

    Raises ValueError if z_BT or uniform_BT has a different shape from the mask, or a value outside
    [0, 1].
    """
    for name, value_BT in (("z_BT", z_BT), ("uniform_BT", uniform_BT)):
        if value_BT.shape != mask_BT.shape:
            raise ValueError(
                f"{name} has shape {tuple(value_BT.shape)}, but mask has "
                f"{tuple(mask_BT.shape)}; pass tensors of the same shape."
            )
        # The sum of a float32 softmax may be slightly above 1.
        is_probability_BT = (value_BT >= 0) & (value_BT <= 1 + 1e-4)
        if not is_probability_BT[mask_BT].all():
            raise ValueError(
                f"{name} is outside [0, 1] on a response token; pass a probability for each token."
            )

    log_lambda = math.log(config.obrs_lambda)
    accepted_BT = mask_BT & (uniform_BT.double() < (log_r_BT - log_lambda).exp())
    z_BT = torch.where(mask_BT, z_BT.detach().double(), 0.0)
    weight_BT = z_BT * log_r_BT.clamp(min=log_lambda).exp()
    return weight_BT.clamp(max=config.cap), accepted_BT, weight_BT > config.cap


KINDS: dict[str, Callable[[Tensor, Tensor, CorrectionConfig], Parts]] = {
    "none": none,
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
    "geometric_tis": geometric_tis,
    "icepop": icepop,
    "sparse_rl": sparse_rl,
    "m2po": m2po,
}


def compute_correction(
    config: CorrectionConfig,
    log_p_BT: Tensor,
    log_q_BT: Tensor,
    mask_BT: Tensor,
    *,
    z_BT: Tensor | None = None,
    uniform_BT: Tensor | None = None,
) -> Correction:
    """Compute the correction selected by `config.kind`. z_BT and uniform_BT are only for `obrs`,
    which needs both.

    Args:
        log_p_BT: log-probs of the sampled tokens under p as it was at rollout time.
        log_q_BT: log-probs of the same tokens under q at the time of sampling, at the same
            temperature and over the full softmax.
        mask_BT: bool, true on response tokens. Elsewhere, the other tensors may hold any value.

    Raises ValueError if shapes disagree, there is no response token, or a response token's log-prob
    isn't finite.
    """
    log_r_BT = _log_ratio(log_p_BT, log_q_BT, mask_BT)

    if config.kind == "obrs":
        if z_BT is None or uniform_BT is None:
            raise ValueError(
                "obrs needs the normaliser Z and uniform draws; pass z_BT and uniform_BT."
            )
        weight_BT, kept_BT, clipped_BT = obrs(log_r_BT, mask_BT, config, z_BT, uniform_BT)
    else:
        weight_BT, kept_BT, clipped_BT = KINDS[config.kind](log_r_BT, mask_BT, config)
    weight_BT = torch.where(kept_BT, weight_BT, 0.0)
    clipped_BT = torch.zeros_like(kept_BT) if clipped_BT is None else clipped_BT & kept_BT

    length_B = mask_BT.sum(1)
    rows_B = length_B > 0
    log_r = log_r_BT[mask_BT]
    metrics = {
        "ess_token": _effective_sample_size(weight_BT[mask_BT].log()),
        "ess_sequence": _effective_sample_size((weight_BT.sum(1) / length_B)[rows_B].log()),
        "ess_sequence_ratio": _effective_sample_size(log_r_BT.sum(1)[rows_B]),
        "clipped_fraction": clipped_BT[mask_BT].double().mean(),
        "masked_fraction": (~kept_BT)[mask_BT].double().mean(),
        "dropped_sequence_fraction": (~kept_BT.any(1))[rows_B].double().mean(),
        "ratio_mean": log_r.exp().mean(),
        "ratio_max": log_r.amax().exp(),
        "kl_k1": -log_r.mean(),
        "kl_k3": (log_r.expm1() - log_r).mean(),
        "weight_mean": weight_BT[mask_BT].mean(),
    }
    # One device-to-host copy for all values.
    values = torch.stack(list(metrics.values())).tolist()
    return Correction(
        weight_BT.float(),
        kept_BT,
        counted_BT=kept_BT if config.kind == "obrs" else mask_BT,
        metrics=dict(zip(metrics, values, strict=True)),
    )
