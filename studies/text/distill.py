"""Measure, on natural text, how a DistillSparse adapter affects responses it wasn't trained on.

    python studies/text/distill.py CHECKPOINT --samples runs/distill.npz \\
        --out benchmarks/results/text_distill.json

The policy is fixed. It samples responses to prompts from ``task.py`` once, densely and at
temperature 1. Some of them are for training; the others are held out, with prompts from packages
that the model has never seen. The schedule's page count is chosen so that p5 on some of the
training responses is as close as possible to the target. For each loss and learning rate, an
adapter that starts at zero is trained under this schedule, with the pass and lists of
``sparrow.train.distill``. It sees every training response once, and is measured on the held-out
responses several times along the way. The ``forward`` loss is the trainer's KL(policy || actor).
The ``reverse`` loss, KL(actor || policy), and ``overlap``, 1 - acceptance, are computed on the same
lists, but are not available in the trainer.

An actor is compared with the dense policy's full distributions in three ways. As a lossy actor, it
reads its own cache after the prompt, and is measured on the held-out responses and on responses
that it samples itself. As a drafter, it reads the policy's cache, and is measured in cycles
(``drafts.py``). Actors aren't trained to be drafters.

Shapes: S responses, P prompt tokens and R response tokens per response, T = P + R, n tokens per
list, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import drafts
import numpy as np
import torch
from acceptance import Floats, acceptance, distributions, gain, lossy, starts, summary
from numpy.typing import NDArray
from task import Continue
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sparrow.engines.hf import HFEngine
from sparrow.mismatch import plain
from sparrow.model.actor import set_schedule, teacher_forced
from sparrow.model.scoring import Batch, TokenScorer
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from sparrow.train.config import DistillConfig
from sparrow.train.distill import Adapter, bucket_kl
from sparrow.train.lora import merged_weights

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from common import read_result, save

BIN_TOKENS = 128
"""Width of position bins, in tokens. Each bin's p5 is also reported."""
Ids = NDArray[np.uint16]


def overlap_lost(policy_top: Tensor, actor_top: Tensor) -> Tensor:
    """Return an upper bound on 1 - acceptance, ``[M]``, from the log-probs of the listed tokens
    ``[M, n]``.
    """
    return 1 - torch.minimum(policy_top.exp(), actor_top.exp()).sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward": bucket_kl,
    "reverse": lambda policy_top, actor_top: bucket_kl(actor_top, policy_top),
    "overlap": overlap_lost,
}
"""Losses per token ``[M]``, by name. The arguments are the log-probs ``[M, n]`` that the policy and
the actor assign to the policy's top tokens.
"""


class Study:
    """The policy and its responses, for training and measuring actors.

    Attributes:
        policy: the policy in float32, which never changes.
        train: token ids ``[N, T]`` of the training responses, including their prompts.
        held_out: the same for the held-out responses.
        prompt: P.
        schedule: the actors' schedule.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.prompt = args, args.prompt
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.policy = self.load(attn_implementation=drafts.NAME)
        self.train, self.held_out = self._responses()
        self.dense = list(self._batches(self.held_out, self.policy_distributions))

    def load(self, **options: Any) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(
            self.args.checkpoint, dtype=torch.float32, **options
        )
        return model.to(self.device).eval().requires_grad_(False)

    def layout(self, pages: int) -> SparsitySchedule:
        return SparsitySchedule.fixed(
            pages, page_size=16, dense_layers=tuple(self.args.dense_layers)
        )

    def sample(
        self,
        model: PreTrainedModel,
        schedule: SparsitySchedule,
        prompts: Sequence[list[int]],
        seed: int,
    ) -> Ids:
        """Return prompts with sampled responses of exactly R tokens, ``[S, T]``. A response may run
        on into another file.
        """
        engine = HFEngine(model, schedule, [], self.args.sampled_together)
        rollouts = engine.generate(prompts, Sampling(self.args.tokens, 1.0, 0, seed=seed))
        return np.stack([np.concatenate([r.prompt_ids, r.response_ids]) for r in rollouts]).astype(
            np.uint16
        )

    def _responses(self) -> list[Ids]:
        args = self.args
        if not args.samples.exists():
            tokenizer, model = AutoTokenizer.from_pretrained(args.checkpoint), self.load()
            dense = SparsitySchedule.dense(dense_layers=())
            sampled = {}
            for seed, kind, count in ((0, "train", args.train), (1, "held_out", args.held_out)):
                task = Continue(args.checkpoint, kind)
                texts = [task.problem(i, seed).prompt for i in range(count)]
                ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
                prompts = [prompt[-self.prompt :] for prompt in ids]
                if (short := min(map(len, prompts))) < self.prompt:
                    raise ValueError(
                        f"a prompt has only {short} tokens; use --prompt {short} or less"
                    )
                sampled[kind] = self.sample(model, dense, prompts, seed)
            args.samples.parent.mkdir(parents=True, exist_ok=True)
            np.savez(args.samples, **sampled)
        with np.load(args.samples) as file:
            found = [file["train"][: args.train], file["held_out"][: args.held_out]]
        wanted = [
            (args.train, self.prompt + args.tokens),
            (args.held_out, self.prompt + args.tokens),
        ]
        if [ids.shape for ids in found] != wanted:
            raise ValueError(
                f"{args.samples} contains arrays with the shapes {[i.shape for i in found]}, "
                f"but these settings need {wanted}; pass a new file with --samples"
            )
        return found

    def _batches(self, ids: Ids, of: Callable[[Tensor], Any]) -> Iterator[Any]:
        for some in torch.from_numpy(ids.astype(np.int64)).split(self.args.batch):
            yield of(some.to(self.device))

    def policy_distributions(self, ids: Tensor) -> Tensor:
        """Return the policy's distributions at the response tokens, ``[B, 1, R, V]``."""
        return distributions(self.policy, ids, self._first(ids), self.args.tokens)

    def _first(self, ids: Tensor) -> Tensor:
        return torch.full((len(ids), 1), self.prompt - 1, device=self.device)

    def batch(self, rows: Sequence[int]) -> tuple[Batch, Tensor]:
        """Return training responses with lists of the policy's top n tokens, and the log-probs of
        these tokens ``[B * R, n]``.
        """
        ids = self.train[rows].astype(np.int64)
        top = self.policy_distributions(torch.from_numpy(ids).to(self.device))[:, 0].topk(
            self.args.top_n
        )
        lists = [row.cpu().numpy() for row in top.indices]
        prompts, responses = ids[:, : self.prompt].tolist(), list(ids[:, self.prompt :])
        return Batch.build(prompts, responses, lists, self.device), top.values.log().flatten(0, 1)

    def measured(
        self,
        actor: PreTrainedModel,
        ids: Ids,
        schedule: SparsitySchedule,
        dense: Sequence[Tensor] | None = None,
    ) -> Floats:
        """Return a lossy actor's acceptance ``[S, R]`` along these responses. The first token of
        each response is predicted by the dense prefill.
        """
        policy = iter(dense) if dense else self._batches(ids, self.policy_distributions)

        def of(some: Tensor) -> Tensor:
            return lossy(actor, some, self._first(some), next(policy), self.prompt, schedule)[:, 0]

        return torch.cat(list(self._batches(ids, of))).double().clamp(0, 1).cpu().numpy()

    def calibrate(self) -> list[dict[str, float]]:
        """Measure mean and p5 on some training responses for each page count, and choose the
        schedule with the p5 closest to the target.
        """
        actor, ids = self.load(), self.train[: self.args.calibration]
        set_schedule(actor, self.layout(1))
        curve = []
        for pages in self.args.pages:
            alpha = self.measured(actor, ids, self.layout(pages))
            curve.append(
                {"pages": pages, "mean": float(alpha.mean()), "p5": float(np.percentile(alpha, 5))}
            )
            print(curve[-1], flush=True)
        self.schedule = self.layout(
            int(min(curve, key=lambda row: abs(row["p5"] - self.args.target))["pages"])
        )
        return curve

    def along(self, alpha: Floats) -> dict[str, Any]:
        """Compute statistics of acceptance ``[S, R]``, overall and by position."""
        first, end = self.prompt, self.prompt + self.args.tokens
        position = np.broadcast_to(np.arange(first, end), alpha.shape)[..., None]
        found = summary(alpha[..., None], position, [*range(first, end, BIN_TOKENS), end], ())
        return {k: v for k, v in found.items() if k != "by_step"}

    def on_its_own(self, actor: PreTrainedModel) -> dict[str, Any]:
        """Return statistics for the actor's own responses to the held-out prompts."""
        ids = self.sample(actor, self.schedule, self.held_out[:, : self.prompt].tolist(), 2)
        return self.along(self.measured(actor, ids, self.schedule))

    def drafting(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """Return statistics for draft cycles on the held-out responses. Drafts use these weights
        and read the policy's cache.
        """
        drafter = self.load(attn_implementation=drafts.NAME)
        assert not drafter.load_state_dict(weights, strict=False).unexpected_keys
        W, ks = max(self.args.drafts), self.args.drafts
        tokens = self.args.tokens
        start_SR = self.prompt + starts(len(self.held_out), self.args.cycles, tokens, W)
        start_SR = start_SR.to(self.device)
        start = iter(start_SR.split(self.args.batch))
        every = self.schedule.replace(top_k=SparsitySchedule.dense().top_k, dense_layers=())

        def of(ids: Tensor) -> Tensor:
            now = next(start)
            cache = drafts.DenseCache.of(self.policy, ids, drafts.layout_of(self.schedule))
            policy = drafts.draft(self.policy, ids, drafts.Cycles(cache, now, W, every))
            drafted = drafts.draft(drafter, ids, drafts.Cycles(cache, now, W, self.schedule))
            return torch.stack(
                [acceptance(p, q) for p, q in zip(policy, drafted, strict=True)], dim=-1
            )

        alpha = torch.cat(list(self._batches(self.held_out, of))).double().clamp(0, 1).cpu().numpy()
        position = (start_SR[..., None].cpu() + torch.arange(W)).numpy()
        found = summary(alpha, position, [self.prompt, self.prompt + tokens], ks)
        return {k: v for k, v in found.items() if k != "bins"}


def trained(study: Study, name: str, rate: float) -> Iterator[tuple[int, Adapter, float]]:
    """Train an adapter. At each of ``--measure-at``, yield the number of responses seen, the
    adapter, and the mean loss since the previous yield.

    An update uses ``--update`` responses, with one forward pass per ``--batch`` of them.
    """
    args, model = study.args, study.load()
    torch.manual_seed(args.seed)
    adapter = Adapter(model, DistillConfig(rank=args.rank, learning_rate=rate), study.schedule)
    scorer = TokenScorer(model)
    optimizer = torch.optim.AdamW(adapter.parameters, lr=rate, weight_decay=0.0)
    losses = []
    for first in range(0, args.train, args.update):
        rows = range(first, min(first + args.update, args.train))
        total = 0.0
        with adapter.active():
            for begin in range(first, rows.stop, args.batch):
                some = range(begin, min(begin + args.batch, rows.stop))
                batch, policy_top = study.batch(some)
                with teacher_forced(model, batch.prompt_lengths):
                    top = scorer(batch, 1.0).top_logprobs
                assert top is not None
                loss = LOSSES[name](policy_top, top).sum() / (len(rows) * args.tokens)
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(adapter.parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total)
        print(f"{name} at {rate:g}: {rows.stop} responses, loss {total:.4f}", flush=True)
        if rows.stop in args.measure_at:
            yield rows.stop, adapter, float(np.mean(losses))
            losses.clear()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--samples",
        type=Path,
        required=True,
        help="file with the policy's responses; they are sampled if it does not exist",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="the JSON file of results; runs that it already contains are skipped",
    )
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument(
        "--prompt",
        type=int,
        default=256,
        help="number of tokens to keep at the end of the task's prompts",
    )
    parser.add_argument("--tokens", type=int, default=384, help="tokens per response")
    parser.add_argument("--train", type=int, default=1024, help="number of responses to train on")
    parser.add_argument(
        "--held-out", type=int, default=128, help="number of held-out responses to measure on"
    )
    parser.add_argument(
        "--calibration",
        type=int,
        default=16,
        help="number of training responses to choose the schedule with",
    )
    parser.add_argument(
        "--pages",
        type=int,
        nargs="+",
        default=[4, 6, 8, 10, 12, 14, 16, 18],
        help="page counts to try",
    )
    parser.add_argument("--target", type=float, default=0.80, help="target p5 for the schedule")
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--learning-rates",
        type=float,
        nargs="+",
        default=[1e-3],
        help="learning rates, each tried with every loss",
    )
    parser.add_argument("--seed", type=int, default=0, help="the adapter's seed")
    parser.add_argument("--top-n", type=int, default=256, help="tokens per list")
    parser.add_argument("--update", type=int, default=4, help="responses per update")
    parser.add_argument(
        "--measure-at",
        type=int,
        nargs="+",
        default=[64, 256, 1024],
        help="after how many training responses to measure",
    )
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--cycles", type=int, default=16, help="cycles per held-out response")
    parser.add_argument("--batch", type=int, default=4, help="responses per forward pass")
    parser.add_argument("--sampled-together", type=int, default=32)
    args = parser.parse_args(argv)

    began = time.monotonic()
    study = Study(args)
    apart = ("checkpoint", "out", "samples", "losses", "learning_rates")
    result: dict[str, Any] = {
        "settings": {k: v for k, v in vars(args).items() if k not in apart},
        "seconds": 0,
    }
    if args.out.exists():
        found = read_result(args.out)
        if found["settings"] != result["settings"]:
            raise ValueError(
                f"{args.out} was made with different settings; pass a new file with --out"
            )
        result = found
        study.schedule = SparsitySchedule.from_dict(found["schedule"])
    else:
        card = json.loads((args.checkpoint / "card.json").read_text())
        result |= {
            "model": card,
            "calibration": study.calibrate(),
            "schedule": study.schedule.to_dict(),
            "rows": [],
        }
    rows, spent = result["rows"], result["seconds"]

    def keep(row: dict[str, Any]) -> None:
        rows.append(plain(row))
        save(args.out, result | {"seconds": round(spent + time.monotonic() - began, 1)})
        print(row, flush=True)

    actor = study.load()
    set_schedule(actor, study.schedule)
    before = study.measured(actor, study.held_out, study.schedule, study.dense)
    if not rows:
        own = {"on_its_own": study.on_its_own(actor), "drafting": study.drafting({})}
        keep({"loss": "none", "responses": 0, "held_out": study.along(before), **own})
    for name, rate in product(args.losses, args.learning_rates):
        there = [row for row in rows if (row["loss"], row.get("learning_rate")) == (name, rate)]
        if any("drafting" in row for row in there):
            continue
        rows[:] = [row for row in rows if row not in there]  # left by an interrupted run
        for seen, adapter, loss in trained(study, name, rate):
            with adapter.active():
                alpha = study.measured(adapter.model, study.held_out, study.schedule, study.dense)
            row = {"loss": name, "learning_rate": rate, "responses": seen, "training_loss": loss}
            row |= {"held_out": study.along(alpha)}
            row["gain"] = gain(before, alpha)
            if seen == max(args.measure_at):
                weights = dict(merged_weights(adapter.model))
                assert not actor.load_state_dict(weights, strict=False).unexpected_keys
                row |= {"on_its_own": study.on_its_own(actor), "drafting": study.drafting(weights)}
            keep(row)
    return read_result(args.out)


if __name__ == "__main__":
    main()
