"""The arms of the stability study, i.e. how its runs differ."""

from __future__ import annotations

from dataclasses import dataclass

TARGETS = (0.75, 0.80, 0.86, 0.89, 0.92, 0.95, 0.97)
DIALS = ("98", "985", "99", "999")
SCHEDULES = ("fixed:4", *(f"p{100 * target:.0f}" for target in TARGETS))
CORRECTIONS = ("none", "geometric_tis", "icepop", "obrs", "sparse_rl")


@dataclass(frozen=True)
class Arm:
    """The settings a run can differ in.

    Attributes:
        schedule: dense, fixed:PAGES, pN (calibrated to a p5 of 0.N), auto:N (the closed loop with
            tau 0.N, starting dense), auto:N:START (starting with schedule START), or dial:N (the
            dial with tau 0.N and the schedule in ``--dial``).
        correction, advantage, normalization: as in ``sparrow train``.
        samples: responses per prompt.
        actor: another difference from the policy: none, ``evict`` (tokens beyond the schedule's
            budget are dropped from the cache), ``bits:N`` (N-bit weights), ``stale:N`` (weights are
            refreshed every N steps), ``noise:S:W`` (at S % of the positions, the uniform
            distribution has a weight of W %) or ``worn`` (a distilled LoRA); or a fault after step
            N: ``halved:N`` (the schedule is halved) or ``unworn:N`` (the actor loses its
            LoRA).
    """

    schedule: str = "dense"
    correction: str = "token_tis"
    advantage: str = "grpo"
    normalization: str = "dapo"
    samples: int = 8
    actor: str = ""


def arms() -> dict[str, Arm]:
    """Return all arms of the study by name: first the ones that vary the mismatch, then the ones
    that vary the countermeasures.
    """
    by_name = {"dense": Arm()}
    by_name |= {name.replace(":", ""): Arm(name) for name in SCHEDULES}
    for n in (86, 90, 92, 95, 97, 98, 99):
        by_name[f"auto{n}"] = Arm(f"auto:{n}")
        by_name[f"auto{n}-fault"] = Arm(f"auto:{n}", actor="halved:25")
    by_name |= {f"auto{n}-sparse_rl": Arm(f"auto:{n}", "sparse_rl") for n in (92, 95)}
    by_name |= {f"dial{n}": Arm(f"dial:{n}") for n in DIALS}
    by_name |= {
        "p86-worn": Arm("p86", actor="worn"),
        "auto86-unworn": Arm("auto:86:p86", actor="unworn:15"),
    }
    by_name |= {f"{s}-evict": Arm(s, actor="evict") for s in ("p86", "p92", "p95", "p97")}
    by_name |= {f"bits{n}": Arm(actor=f"bits:{n}") for n in (6, 5, 4, 3)}
    by_name |= {f"stale{n}": Arm(actor=f"stale:{n}") for n in (2, 4, 8)}
    by_name |= {f"noise-all-{n}": Arm(actor=f"noise:100:{n}") for n in (1, 3)}
    by_name |= {f"noise-rare-{n}": Arm(actor=f"noise:{n}:50") for n in (1, 3, 6)}
    for s in ("p80", "p86", "p92", "p95"):
        by_name |= {f"{s}-{c}": Arm(s, c) for c in CORRECTIONS}
    for s in ("dense", "p80", "p86", "p92", "p95"):
        by_name[f"{s}-rloo"] = Arm(s, advantage="rloo")
        by_name[f"{s}-grpo"] = Arm(s, normalization="grpo")
    by_name |= {f"{s}-samples16": Arm(s, samples=16) for s in ("p80", "p86", "p92")}
    return by_name
