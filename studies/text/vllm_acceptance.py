"""Count the tokens per cycle of lossless mode in vLLM, by length, on continuations of held-out text
at temperature 1.

    python studies/text/vllm_acceptance.py CHECKPOINT --out benchmarks/results/text_vllm.json

Every engine step ends one cycle of every request, so the tokens a request gets in a step are the
accepted drafts and one more token. The tokens per cycle are compared with a prediction for the same
cycles. The model computes the prediction in float32, along the sampled tokens (``drafts.py``).
Since these tokens follow the dense policy's distribution, the mean product of min(1, q/p) over the
first j tokens is an unbiased estimate of the probability that the first j drafts are accepted. For
comparison, ``consecutive`` and ``geometric`` are the estimates from ``acceptance.py``. ``meter`` is
the mean acceptance by length that vLLM itself measured over all verified drafts.

With ``--meter-budget``, one cycle in four also measures a second schedule, and its mean acceptance
is compared with the model's at the first drafts of the same cycles. With ``--drafter-invariant``,
drafts are accepted up to the first one that differs from the policy's own token, but the prediction
is still for rejection sampling. With ``--draft-weights fp8``, vLLM's drafts use rounded weights,
but the prediction is still for the model's own weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import acceptance
import drafts
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from sparrow.decoding import Decoding, DraftWeights
from sparrow.mismatch import plain, sequence_bootstrap, weighted_mean
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.schedule import LandmarkDtype, SparsitySchedule

Array = NDArray[Any]
Cycle = tuple[int, int]  # position of the first draft's input, and tokens the cycle yields


def generate(
    llm: Any, prompts: Sequence[list[int]], tokens: int
) -> list[tuple[list[int], list[Cycle]]]:
    """Return each prompt with its continuation, and its cycles. The last cycle is left out, because
    ``tokens`` may have cut it short.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    texts, cycles = [list(prompt) for prompt in prompts], [list[Cycle]() for _ in prompts]
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            ignore_eos=True,
            seed=i,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            i, new = int(output.request_id), list(output.outputs[0].token_ids)
            if len(texts[i]) > len(prompts[i]) and new and not output.finished:
                cycles[i].append((len(texts[i]) - 1, len(new)))
            texts[i] += new
    return list(zip(texts, cycles, strict=True))


def predict(
    model: PreTrainedModel, ids: Tensor, start: Tensor, drafted: int, kept: SparsitySchedule
) -> tuple[Tensor, Tensor]:
    """Return two arrays ``[B, R, W]`` for the cycles' drafts: acceptance, and min(1, q/p) of the
    text's own tokens.
    """
    dense = SparsitySchedule.dense(page_size=kept.page_size, dense_layers=())
    cache = drafts.DenseCache.of(model, ids, drafts.layout_of(kept))
    alpha, ratio = [], []
    pairs = zip(
        *(drafts.draft(model, ids, drafts.Cycles(cache, start, drafted, s)) for s in (dense, kept)),
        strict=True,
    )
    for step, (p, q) in enumerate(pairs):
        token = ids.gather(1, start + step + 1)[..., None]
        alpha.append(acceptance.acceptance(p, q))
        ratio.append((q.gather(-1, token) / p.gather(-1, token)).clamp(max=1)[..., 0])
    return torch.stack(alpha, dim=-1), torch.stack(ratio, dim=-1)


def compare(
    start: Array, emitted: Array, alpha: Array, ratio: Array, edges: Sequence[int]
) -> dict[str, Any]:
    """Compare tokens per cycle ``[S, R]`` with predictions from the drafts ``[S, R, W]``, overall
    and by length bin.
    """
    request = np.broadcast_to(np.arange(len(start))[:, None], start.shape)
    before = np.concatenate([np.ones_like(ratio[..., :1]), ratio[..., :-1].cumprod(-1)], axis=-1)
    sampled = 1 + (before * alpha).sum(
        -1
    )  # use the exact acceptance for the last draft rather than its sampled token

    def of(where: Any) -> dict[str, Any]:
        measured = sequence_bootstrap(emitted[where], request[where], weighted_mean)
        consecutive, geometric = acceptance.tokens_a_cycle(alpha[where], alpha.shape[-1])
        predicted = {
            "sampled": float(sampled[where].mean()),
            "consecutive": consecutive,
            "geometric": geometric,
        }
        return {
            "cycles": int(where.sum()),
            "tokens_a_cycle": [round(x, 3) for x in measured[:3]],
            "predicted": {name: round(x, 3) for name, x in predicted.items()},
            "measured_over_predicted": round(measured.estimate / predicted["sampled"], 4),
            "mean_acceptance": round(float(alpha[where].mean()), 4),
        }

    spans = [(low, high, (start >= low) & (start < high)) for low, high in pairwise(edges)]
    bins = [{"start": low, "end": high, **of(where)} for low, high, where in spans if where.any()]
    return {**of(np.ones(start.shape, bool)), "bins": bins}


def of_first(alpha: Array) -> dict[str, list[float]]:
    """Return the mean and p5 of acceptance ``[S, R, 1]``, with 95 % intervals from resampling
    texts.
    """
    text = np.broadcast_to(np.arange(len(alpha))[:, None, None], alpha.shape).ravel()
    return acceptance.mean_and_p5(alpha.ravel(), text)


def main(argv: Sequence[str] | None = None, **options: Any) -> dict[str, Any]:
    """Run the study. ``options`` are passed to vLLM, for machines that need different options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[])
    parser.add_argument(
        "--landmarks",
        choices=get_args(LandmarkDtype),
        default="auto",
        help="dtype of stored landmarks",
    )
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument(
        "--meter-budget", type=int, help="budget of a second schedule to measure during the run"
    )
    parser.add_argument(
        "--drafter-invariant",
        action="store_true",
        help="generate the same tokens as dense decoding",
    )
    parser.add_argument(
        "--draft-weights",
        choices=get_args(DraftWeights),
        default="auto",
        help="weights that drafts use in vLLM",
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument(
        "--tokens", type=int, default=768, help="tokens to generate after each prompt"
    )
    parser.add_argument(
        "--cycles",
        type=int,
        default=48,
        help="cycles per request to compare with the prediction",
    )
    parser.add_argument(
        "--memory", type=float, default=0.4, help="share of the GPU's memory for vLLM"
    )
    args = parser.parse_args(argv)

    from vllm import LLM

    study = acceptance.Study(args.checkpoint, args.requests, args.cycles, args.drafts)
    context, kept = (
        study.context,
        acceptance.schedule(args.budget, args.dense_layers, 16, args.landmarks),
    )
    lengths = np.linspace(
        context // 8, context - args.tokens - args.drafts - 1, args.requests
    ).astype(int)
    prompts = [row[:length].tolist() for row, length in zip(study.ids, lengths, strict=True)]
    other = (
        acceptance.schedule(args.meter_budget, args.dense_layers, 16, args.landmarks)
        if args.meter_budget
        else None
    )
    metered = {} if other is None else {"meter_schedule": other, "meter_every": 4}
    decoding = Decoding.lossless(
        kept,
        draft_tokens=args.drafts,
        adapt_draft_tokens=False,
        drafter_invariant=args.drafter_invariant,
        draft_weights=args.draft_weights,
        **metered,
    )
    defaults = {
        "max_num_seqs": args.requests,
        "gpu_memory_utilization": args.memory,
        "enable_prefix_caching": False,
    }
    llm = LLM(
        str(args.checkpoint),
        additional_config={"sparrow": decoding.to_dict()},
        max_model_len=context,
        **{**defaults, **options},
    )
    llm.collective_rpc("sparrow_counters")
    llm.collective_rpc("sparrow_acceptance")
    began = time.perf_counter()
    done = generate(llm, prompts, args.tokens)
    seconds = time.perf_counter() - began
    counters = llm.collective_rpc("sparrow_counters")
    (report,) = llm.collective_rpc("sparrow_acceptance")
    del llm

    model = study.load(attn_implementation=drafts.NAME)
    # Only use cycles that can't reach the end of the text, however many tokens they yield. This
    # depends on where a cycle starts, but not on how many tokens it yielded, so it introduces no
    # bias.
    whole = [
        [cycle for cycle in cycles if cycle[0] + args.drafts + 2 < len(text)]
        for text, cycles in done
    ]
    count = min(args.cycles, *map(len, whole))
    cycles = np.array(
        [[c[i] for i in np.linspace(0, len(c) - 1, count).astype(int)] for c in whole]
    )
    start, emitted = cycles[..., 0], cycles[..., 1]
    ids = torch.tensor(
        [text + [0] * (context - len(text)) for text, _ in done], device=study.device
    )
    first = torch.from_numpy(start).to(study.device)

    def predicted(drafted: int, schedule: SparsitySchedule) -> list[Array]:
        pairs = zip(ids.split(4), first.split(4), strict=True)
        parts = zip(*(predict(model, *some, drafted, schedule) for some in pairs), strict=True)
        return [torch.cat(of).double().cpu().numpy() for of in parts]

    told = compare(start, emitted, *predicted(args.drafts, kept), study.edges)
    result = {"counters": counters, "seconds": seconds, "meter": report["bins"], **told}
    if other is not None:
        measured = DraftAcceptance.from_dict(report["metered"]["acceptance"])
        result["metered"] = {
            "budget": args.meter_budget,
            "drafts": measured.drafts,
            "measured": {"mean": measured.mean, "p5": measured.percentile(5)},
            "predicted": of_first(predicted(1, other)[0]),
        }
    print(json.dumps(plain(result)), flush=True)
    return study.save(args, **result)


if __name__ == "__main__":
    main()
