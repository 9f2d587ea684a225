"""Test lossless mode in a real vLLM against the reference in transformers, cycle by cycle; see
``test_lossless.py``.
"""

from functools import wraps

import numpy as np
import pytest
import torch

from tests.vllm import lossless_cases as cases  # isort: skip  before vLLM is imported
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from sparrow.decoding import Decoding
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.model import speculative
from sparrow.model.actor import set_schedule
from tests.vllm.lossless_cases import DRAFTS, generate, tokens_of
from tests.vllm.tiny_vllm import checkpoint, prompts

K, PAGES = 4, 2
LENGTHS = (300, 17, 150, 64)
BUDGETS = ((0, 2), (1.5, 0.5))  # their mean is 1, whichever layers are dense


def recorded_cycles(monkeypatch):
    """Record all of vLLM's verifications: the position in the sequence, the preceding tokens, the
    drafts, the logits of policy and drafts, and the result.
    """
    found = []
    stock = rejection_sampler.rejection_sample

    @wraps(stock)
    def recorded(target, draft, inputs, first, position, place, *args, **named):
        sampled, count = stock(target, draft, inputs, first, position, place, *args, **named)
        for b, (begin, end) in enumerate(zip(first.tolist(), first[1:].tolist(), strict=False)):
            if end - begin == K + 1:
                found.append(
                    dict(
                        place=int(place[b]),
                        cached=int(position[begin]),
                        ids=inputs[begin:end].tolist(),
                        p=target[begin:end].clone(),
                        q=draft[place[b], :K].clone(),
                        count=int(count[b]),
                    )
                )
        return sampled, count

    monkeypatch.setattr(rejection_sampler, "rejection_sample", recorded)
    return found


@pytest.fixture
def cycles(monkeypatch):
    return recorded_cycles(monkeypatch)


def by_sequence(cycles, written):
    """Return the cycles of each sequence in order. Cycles are assigned to sequences by their
    tokens.
    """
    found = {}
    for place in {c["place"] for c in cycles}:
        own = [c for c in cycles if c["place"] == place]
        [i] = [
            i
            for i, ids in enumerate(written)
            if all(ids[c["cached"] : c["cached"] + 1] == c["ids"][:1] for c in own)
        ]
        found[i] = own
    return found


def reference_cycle(model, monkeypatch, ids, cycle, temperature):
    """Compute p, q and the acceptance of vLLM's drafts with the reference."""
    seen = []
    stock = speculative.verify
    given = [torch.tensor([token]) for token in cycle["ids"][1:]]
    draw = speculative.draw
    with monkeypatch.context() as patch:
        patch.setattr(
            speculative,
            "verify",
            lambda p, q, *args: seen.extend((p[0], q[0])) or stock(p, q, *args),
        )
        patch.setattr(speculative, "draw", lambda *args: given.pop(0) if given else draw(*args))
        sequence = speculative.CachedSequences(model, torch.zeros(1, dtype=torch.long))
        sequence.read(torch.tensor([ids[: cycle["cached"]]]), 1)
        kept = torch.arange(K + 1) < cycle["count"] - 1
        uniform = torch.stack(
            [torch.zeros(K + 1), (~kept).double() * (1 - 1e-9), torch.zeros(K + 1)]
        ).double()
        newest = torch.tensor(cycle["ids"][:1])
        done = speculative.speculate(
            sequence, newest, torch.tensor([K]), speculative.Shape(temperature), uniform[:, None]
        )
    assert int(done.count) == cycle["count"]
    return *seen, done.acceptance[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = checkpoint(folder, num_hidden_layers=2)
    set_schedule(model, DRAFTS.replace(top_k=(PAGES,)))
    return folder, model


@pytest.mark.parametrize(
    "changes", [dict(landmark_dtype="fp8_e4m3"), dict(head_budgets=BUDGETS), {}]
)
def test_distributions_and_acceptance_match_the_reference(made, monkeypatch, cycles, changes):
    (folder, model), asked = made, prompts(*LENGTHS, seed=21)
    # The last case sets the schedule that the other tests use.
    set_schedule(model, DRAFTS.replace(top_k=(PAGES,), **changes))
    with cases.engine(folder, cases.lossless(K, pages=PAGES, **changes)) as llm:
        llm.collective_rpc("sparrow_acceptance")
        completions = generate(llm, asked, 24, temperature=0.7, seed=3)
        metered = DraftAcceptance.from_dict(
            llm.collective_rpc("sparrow_acceptance")[0]["acceptance"]
        )
    written = [[*p, *ids] for p, ids in zip(asked, tokens_of(completions), strict=True)]
    acceptance = []
    for i, own in by_sequence(cycles, written).items():
        for cycle in own:
            p, q, alpha = reference_cycle(model, monkeypatch, written[i], cycle, 0.7)
            assert float((cycle["p"].double().softmax(-1) - p).abs().max()) < 1e-4
            assert float(((cycle["q"].double() / 0.7).softmax(-1) - q).abs().max()) < 1e-4
            acceptance += alpha[~alpha.isnan()].tolist()
    assert len(acceptance) > 50 and np.std(acceptance) > 0.1
    assert metered.drafts == len(acceptance)
    assert metered.mean == pytest.approx(np.mean(acceptance), abs=1e-4)


@torch.no_grad()
def test_a_meter_schedule_is_measured_without_changing_samples(made, cycles):
    """The measured acceptance equals the reference's, and tokens, log-probs and counts are bitwise
    unchanged.
    """
    (folder, model), asked = made, prompts(*LENGTHS, seed=23)
    drafts = DRAFTS.replace(top_k=(PAGES,), head_budgets=BUDGETS)
    other = drafts.replace(top_k=(1, 4), bin_tokens=150, dense_layers=(1,))
    runs = {}
    for every in (None, 2, 1):
        metered = {} if every is None else {"meter_schedule": other, "meter_every": every}
        decoding = Decoding.lossless(drafts, draft_tokens=K, adapt_draft_tokens=False, **metered)
        with cases.engine(folder, decoding) as llm:
            llm.collective_rpc("sparrow_acceptance")
            cycles.clear()
            completions = generate(llm, asked, 24, temperature=0.7, seed=3)
            told = llm.collective_rpc("sparrow_acceptance")[0]
            counted = cases.counters(llm)
        found = told.pop("metered", None)
        logprobs = [cases.logprobs_of(c).tolist() for c in completions]
        runs[every] = (tokens_of(completions), logprobs, told, counted), found
    assert runs[None][0] == runs[2][0] == runs[1][0] and runs[None][1] is None

    written = [[*p, *ids] for p, ids in zip(asked, tokens_of(completions), strict=True)]
    set_schedule(model, other)
    expected, length = [], []
    for i, own in by_sequence(cycles, written).items():
        for cycle in own:
            sequence = speculative.CachedSequences(model, torch.zeros(1, dtype=torch.long))
            sequence.read(torch.tensor([written[i][: cycle["cached"]]]), 1)
            sparse, p = (
                sequence.read(torch.tensor([cycle["ids"][:1]]))[0, 0],
                cycle["p"][0].double().softmax(-1),
            )
            expected.append(float(torch.minimum((sparse.double() / 0.7).softmax(-1), p).sum()))
            length.append(cycle["cached"] + 1)
    set_schedule(model, DRAFTS.replace(top_k=(PAGES,)))
    found = runs[1][1]
    assert found["schedule"] == other.to_dict() and np.std(expected) > 0.1
    measured, reference = (
        DraftAcceptance.from_dict(found["acceptance"]),
        DraftAcceptance.of(expected, length, 150),
    )
    assert measured.drafts == len(expected) > 20 and np.allclose(
        measured.sums, reference.sums, atol=1e-3
    )
    half = DraftAcceptance.from_dict(runs[2][1]["acceptance"])
    assert 0.3 < half.drafts / measured.drafts < 0.7


def test_greedy_tokens_and_tokens_per_cycle_match_the_reference(made, cycles):
    (folder, model), asked = made, prompts(*LENGTHS, seed=22)
    with cases.engine(folder, cases.lossless(K, pages=PAGES)) as llm:
        completions = generate(llm, asked, 24)
    written = [[*p, *ids] for p, ids in zip(asked, tokens_of(completions), strict=True)]
    found = by_sequence(cycles, written)
    for i, prompt in enumerate(asked):
        sequence = speculative.CachedSequences(model, torch.zeros(1, dtype=torch.long))
        ids = [int(sequence.read(torch.tensor([prompt]), 1)[0, -1].argmax())]
        counts = []
        while len(ids) < 24:
            newest, drafts = torch.tensor(ids[-1:]), torch.tensor([K])
            done = speculative.speculate(
                sequence, newest, drafts, speculative.Shape(0.0), torch.zeros(3, 1, K + 1).double()
            )
            counts.append(int(done.count))
            ids += done.tokens[0, : counts[-1]].tolist()
        assert written[i][len(prompt) :] == ids[:24]
        assert [c["count"] for c in found[i]][: len(counts)] == counts
        assert len(found[i]) >= len(counts)
