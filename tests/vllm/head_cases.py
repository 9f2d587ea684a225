"""Test lossless mode with guesses by a head in a real vLLM; ``test_lossless.py`` runs this file in
its own process.
"""

import pickle
from types import SimpleNamespace

import pytest
import torch

from tests.vllm import lossless_cases as cases  # isort: skip  before vLLM is imported

import numpy as np

from sparrow.errors import ConfigError
from sparrow.model.history import guess
from sparrow.vllm.lossless import plan, setup
from sparrow.vllm.lossless.guesses import CycleProgress
from sparrow.vllm.lossless.head import HeadSource
from sparrow.vllm.lossless.mixed import MixedSource
from sparrow.vllm.runtime import layers_of
from tests.vllm import cascade_cases, eagle_head
from tests.vllm import tiny_vllm as tiny

lossless = cases.lossless
LENGTHS = [300, 17, 150, 64, 33, 15]


def trained(model, words=None, seed=5):
    """Return a head whose guesses are often right."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, model.config.vocab_size, (16, 128), generator=generator)
    return eagle_head.Head(model, words=words).train(prompts)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a model's folder, its head's folder, the model, and the head."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny.checkpoint(folder / "model", num_hidden_layers=2, initializer_range=0.05)
    head = trained(model)
    return folder / "model", head.save(folder / "head"), model, head


def with_head(folder, k=8, **options):
    """By default, the head makes all guesses."""
    head = {"guess_tokens": 3, "guess_head": str(folder), "guess_lookup_min": 0}
    return lossless(k, **{**head, **options})


class Guesses:
    """Collects what a source guessed, before every sparse pass and in every cycle without passes:
    for each row, the tokens so far, the number of drafts among them, and the guesses.
    """

    def __init__(self, monkeypatch, kind=HeadSource):
        self.rows = []
        self.alone = []  # the rows of cycles without passes
        self.worker = None
        guess = kind.guess
        guess_alone = kind.guess_alone

        def collected(source, rows):
            guess(source, rows)
            if self.worker is not None:
                self.rows += self._collect(source, rows, "_guess_tokens")

        def collected_alone(source, rows):
            guess_alone(source, rows)
            if self.worker is not None:
                self.alone += self._collect(source, rows, "_alone")

        monkeypatch.setattr(kind, "guess", collected)
        monkeypatch.setattr(kind, "guess_alone", collected_alone)

    def _collect(self, source, rows, number):
        head = source._head if isinstance(source, MixedSource) else source
        vllm = head._vllm
        cycle = head._cycle
        m = getattr(head, number)
        text = self.worker.model_runner.req_states.all_token_ids.gpu
        for row in range(rows):
            length, made = int(cycle.length_R[row]), int(cycle.made_R[row])
            takes_part = length and made < int(cycle.drafts)
            if takes_part and length + made + m <= vllm.max_model_len:
                known = text[vllm.idx_mapping[row], : length - 1].tolist()
                known += [int(cycle.newest_R[row]), *vllm.draft_tokens[row, :made].tolist()]
                yield known, made, source.guesses_RG[row, :m].tolist()


def worker_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker


def assert_as_the_reference(head, rows, every=3):
    """Check the guesses of every ``every``-th row against the reference, up to the first guess that
    rounding may have decided. Return the number of guesses that agree.
    """
    agreeing = 0
    for known, _, guesses in rows[::every]:
        expected, margins = head.guesses(known, len(guesses))
        for wanted, margin, found in zip(expected, margins, guesses, strict=True):
            if margin < 1e-3:
                break
            assert found == wanted, (len(known), expected, guesses)
            agreeing += 1
    return agreeing


# --- guesses ---


@pytest.mark.parametrize("adapts", [False, True])
def test_guesses_match_those_of_a_head_in_plain_torch(made, monkeypatch, adapts):
    """Passes read everything, so the head sees the policy's own hidden states. Prompts share blocks
    and are prefilled in chunks. If drafting is adaptive, some cycles have no guesses, and some have
    guesses alone.
    """
    folder, of_head, _, head = made
    if adapts:
        cascade_cases.in_turn(monkeypatch)
    shared = tiny.prompts(70, seed=2)[0]
    asked = [shared + rest for rest in tiny.prompts(5, 90, 33, seed=3)] + tiny.prompts(17, 150)
    seen = Guesses(monkeypatch)
    decoding = with_head(of_head, adapt=adapts, pages=1000)
    with cases.engine(folder, decoding, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        seen.worker = worker_of(llm)
        cases.generate(llm, asked, 40)
        cases.generate(llm, asked, 40, temperature=1.0, seed=3)
        counts = cases.counters(llm)
    assert assert_as_the_reference(head, seen.rows) > 100
    assert assert_as_the_reference(head, [row for row in seen.rows if row[1] == 0]) > 30
    assert any(made for _, made, _ in seen.rows)
    assert bool(seen.alone) == adapts
    assert not adapts or assert_as_the_reference(head, seen.alone, 1) > 15
    assert counts["drafted"] - counts["guessed"] > 1.1 * counts["passes"]


@pytest.mark.parametrize("least", [2, 4])
def test_history_guesses_where_enough_tokens_repeat_and_the_head_elsewhere(
    made, monkeypatch, least
):
    folder, of_head, _, head = made
    asked = [*cascade_cases.repetitive(150, 64, seed=1), *tiny.prompts(33, 90, seed=3)]
    seen = Guesses(monkeypatch, MixedSource)
    decoding = with_head(of_head, pages=1000, guess_lookup_min=least)
    with cases.engine(folder, decoding) as llm:
        seen.worker = worker_of(llm)
        cases.generate(llm, asked, 40)
        cases.generate(llm, asked, 40, temperature=1.0, seed=3)
    repeated = [cascade_cases.longest_repeated_suffix(known) >= least for known, _, _ in seen.rows]
    by_history = [row for row, repeats in zip(seen.rows, repeated, strict=True) if repeats]
    by_head = [row for row, repeats in zip(seen.rows, repeated, strict=True) if not repeats]
    assert len(by_history) > 20
    for known, _, guesses in by_history:
        tokens = torch.tensor([[known]])
        length = torch.tensor([[len(known)]])
        assert guess(tokens, length, len(guesses)).tolist() == [guesses]
    assert assert_as_the_reference(head, by_head, every=1) > 20


class Constant:
    """A source whose guesses say which source made them, and when."""

    def __init__(self, first, matched=()):
        self.guesses_RG = torch.zeros(3, 2, dtype=torch.int64)
        self.matched_R = torch.zeros(3, dtype=torch.int32)
        self._first = first
        self._matched = matched

    def _write(self, token, rows):
        self.guesses_RG[:rows] = self._first + token
        if self._matched:
            self.matched_R[:rows] = torch.tensor(self._matched[token][:rows])

    def guess(self, rows):
        self._write(0, rows)

    def guess_alone(self, rows):
        self._write(1, rows)

    def fill(self, B):
        self._write(2, B)


def test_the_source_is_chosen_anew_for_each_row_whenever_tokens_are_guessed():
    """The last guesses of a cycle must not be those of an earlier pass."""
    history = Constant(10, matched=([2, 1, 0], [0, 2, 3], [1, 8, 2]))
    source = MixedSource(history, Constant(20), least=2)
    found = source.guesses_RG
    source.guess(3)
    assert found.tolist() == [[10, 10], [20, 20], [20, 20]]
    source.guess_alone(3)
    assert found.tolist() == [[21, 21], [11, 11], [11, 11]]
    source.fill(2)
    assert found.tolist() == [[22, 22], [12, 12], [11, 11]]
    assert source.guesses_RG is found


def test_rows_that_are_too_long_for_guesses_alone_keep_only_the_first(monkeypatch):
    """Their other guesses would be old, or about other tokens."""
    device = torch.device("cpu")
    speculator = SimpleNamespace(
        max_num_reqs=3, device=device, hidden_size=1, dtype=torch.float32, max_model_len=32
    )
    cycle = CycleProgress(3, device)
    source = HeadSource(speculator, cycle, guess_tokens=1, alone=3, guesses=5)
    source._runtime = SimpleNamespace(pages=SimpleNamespace(everything=lambda rows: None))
    source._blocks_SM, source._block_tokens = torch.arange(12, dtype=torch.int32).view(3, 4), 8
    run = []

    def draft(ids, positions, output, step, slots):
        run.append((ids.tolist(), positions.tolist(), slots.tolist()))
        return output, output + 1

    monkeypatch.setattr(source, "_draft", draft)
    monkeypatch.setattr(source, "_most_likely", lambda hidden: hidden[:, 0].long() + 20)
    cycle.length_R[:] = torch.tensor([29, 30, 0])  # the last row drafts nothing
    cycle.drafts.fill_(3)
    source.guesses_RG[:] = 7
    source.guess_alone(3)
    assert source.guesses_RG.tolist() == [[7, 20, 21, 0, 0], [7, 0, 0, 0, 0], [7, 0, 0, 0, 0]]
    assert run == [
        ([7, 0, 0], [28, 0, 0], [28, -1, -1]),
        ([20, 0, 0], [29, 0, 0], [29, -1, -1]),
    ]


def test_guesses_at_the_start_of_a_cycle_match_vllms_own_eagle3(made, monkeypatch):
    """After the same text, vLLM's EAGLE-3 drafts what the head guesses."""
    folder, of_head, _, _ = made
    asked = tiny.prompts(*LENGTHS, seed=1)
    eagle3 = {"method": "eagle3", "model": str(of_head), "num_speculative_tokens": 3}
    theirs = {}
    with cases.engine(folder, speculative_config=eagle3) as llm:
        runner = worker_of(llm).model_runner
        stock = runner.speculator.propose

        def propose(batch, *args, **named):
            drafts = stock(batch, *args, **named)
            states = runner.req_states
            for row in range(batch.num_reqs):
                index = int(batch.idx_mapping[row])
                known = states.all_token_ids.gpu[index, : int(states.total_len.gpu[index])]
                theirs[tuple(known.tolist())] = drafts[row].tolist()
            return drafts

        monkeypatch.setattr(runner.speculator, "propose", propose)
        expected = cases.tokens_of(cases.generate(llm, asked, 40))
    seen = Guesses(monkeypatch)
    with cases.engine(folder, with_head(of_head, pages=4)) as llm:
        seen.worker = worker_of(llm)
        assert cases.tokens_of(cases.generate(llm, asked, 40)) == expected
    common = [
        (tuple(known), guesses)
        for known, drafts, guesses in seen.rows
        if not drafts and tuple(known) in theirs
    ]
    assert len(common) > 20
    assert [guesses for _, guesses in common] == [theirs[known] for known, _ in common]
    cascade_cases.hold(monkeypatch, plan.Guessed(3, alone=True))
    with cases.engine(folder, with_head(of_head, adapt=True, guess_tokens=1)) as llm:
        seen.worker = worker_of(llm)
        assert cases.tokens_of(cases.generate(llm, asked, 40)) == expected
        assert cases.counters(llm)["passes"] == 0
    ours = {tuple(known): guesses for known, _, guesses in seen.alone if tuple(known) in theirs}
    assert len(ours) > 20 and ours == {known: theirs[known] for known in ours}


def test_a_head_with_its_own_vocabulary_guesses_only_its_words(made, monkeypatch, tmp_path):
    folder, _, model, _ = made
    words = list(range(0, tiny.VOCAB, 2))
    head = trained(model, words)
    asked = tiny.prompts(*LENGTHS, seed=1)
    with cases.engine(folder) as llm:
        expected = cases.tokens_of(cases.generate(llm, asked, 30))
    seen = Guesses(monkeypatch)
    decoding = with_head(head.save(tmp_path / "head"), pages=1000, guess_tokens=2)
    with cases.engine(folder, decoding) as llm:
        seen.worker = worker_of(llm)
        assert cases.tokens_of(cases.generate(llm, asked, 30)) == expected
    assert {token for *_, guesses in seen.rows for token in guesses} <= {*words}
    assert assert_as_the_reference(head, seen.rows) > 50


# --- greedy ---


@pytest.mark.parametrize("m, weights", [(1, "auto"), (3, "auto"), (3, "fp8")])
def test_greedy_tokens_match_stock_vllm(made, m, weights):
    folder, of_head, model, _ = made
    asked = tiny.prompts(*LENGTHS, seed=1)
    with cases.engine(folder) as llm:
        expected = cases.generate(llm, asked, 40)
    for k, pages in ((4, 1), (8, 12), (5, 4)):
        decoding = with_head(of_head, k, pages=pages, guess_tokens=m, draft_weights=weights)
        with cases.engine(folder, decoding, checks_itself=True) as llm:
            got = cases.generate(llm, asked, 40)
            counts = cases.counters(llm)
        assert cases.tokens_of(got) == cases.tokens_of(expected), (k, pages)
        cases.assert_greedy_and_dense(model, asked, got)
        assert 0 < counts["accepted"] < counts["drafted"]
        drawn = counts["drafted"] - counts["guessed"]
        assert 1.1 * counts["passes"] < drawn <= counts["drafted"]


@pytest.mark.parametrize("options", [{}, {"draft_weights": "fp8"}, {"guess_lookup_min": None}])
def test_greedy_tokens_match_stock_vllm_while_stages_change(made, monkeypatch, options):
    """The head also has to read passes that are followed by no drafts, by drafts without guesses,
    or by guesses alone.
    """
    folder, of_head, model, _ = made
    asked = tiny.prompts(*LENGTHS, seed=1)
    with cases.engine(folder) as llm:
        expected = cases.generate(llm, asked, 120)
    found = cases.Landmarks(monkeypatch)
    cascade_cases.in_turn(monkeypatch)
    decoding = with_head(of_head, adapt=True, pages=4, **options)
    with cases.engine(folder, decoding, checks_itself=True) as llm:
        got = cases.generate(llm, asked, 120)
        told = llm.collective_rpc("sparrow_acceptance")[0]
        described = llm.collective_rpc("sparrow_describe")[0]
    assert cases.tokens_of(got) == cases.tokens_of(expected)
    cases.assert_greedy_and_dense(model, asked, got)
    assert found.worst < 1e-5 and found.pages > 500
    assert set(told["cycles"]) == {0, 3, 5, 8} and set(told["cycles_with_guesses"]) == {3, 5, 8}
    assert set(told["cycles_with_guesses_alone"]) == {3}
    assert described["guess_head"] == str(of_head)
    assert described["guess_lookup_min"] == decoding.lookup_min
    assert described["sparse_layers"] == [0, 1]  # the head's layer is not listed


@pytest.mark.parametrize("least", [0, 2])
def test_stages_with_a_head_replay_their_graphs(made, monkeypatch, least):
    """A graph may have more rows than the batch."""
    folder, of_head, _, _ = made
    asked = tiny.prompts(*LENGTHS, seed=1)
    with cases.engine(folder) as llm:
        expected = cases.tokens_of(cases.generate(llm, asked, 60))
    cascade_cases.in_turn(monkeypatch)
    decoding = with_head(of_head, adapt=True, pages=4, guess_lookup_min=least)
    with cases.engine(folder, decoding, max_num_seqs=8) as llm:
        drafter = worker_of(llm).model_runner.speculator.drafter._guessing
        graph, alone = cases.Replayed(drafter), cascade_cases.ReplayedAlone(drafter)
        with torch.inference_mode():
            drafter._draft(graph.rows)
        drafter._graphs[False][graph.rows] = graph
        drafter._alone_graphs[alone.rows] = alone
        assert cases.tokens_of(cases.generate(llm, asked, 60)) == expected
        told = llm.collective_rpc("sparrow_acceptance")[0]
    guessed = told["cycles_with_guesses"]
    assert graph.count == sum(setup.passes_of(k) * n for k, n in guessed.items()) > 0
    assert alone.count == told["cycles_with_guesses_alone"][3] > 0


def test_requests_may_be_chunked_preempted_or_cut_off_at_the_context_length(made, monkeypatch):
    folder, of_head, model, head = made
    preempted = []
    stock = cases.Scheduler._preempt_request
    monkeypatch.setattr(
        cases.Scheduler,
        "_preempt_request",
        lambda self, *a, **kw: preempted.append(1) or stock(self, *a, **kw),
    )
    asked = tiny.prompts(90, 17, 70, 64, 33, 100, seed=3)
    small = dict(
        num_gpu_blocks_override=12, max_model_len=128, max_num_batched_tokens=48, max_num_seqs=6
    )
    stock_fill, fills = HeadSource.fill, []

    def fill(source, B):
        stock_fill(source, B)
        fills.append(int(source.guesses_RG[:B, 1:].count_nonzero()))

    monkeypatch.setattr(HeadSource, "fill", fill)
    seen = Guesses(monkeypatch)
    with cases.engine(folder, with_head(of_head, 4, pages=1000), **small) as llm:
        seen.worker = worker_of(llm)
        got = cases.generate(llm, asked, 60)
    assert len(fills) > 20 and not any(fills)  # only the first guess is about this cycle's text
    assert len(preempted) > 0
    assert [len(c.token_ids) for c in got] == [min(60, 128 - len(p)) for p in asked]
    cases.assert_greedy_and_dense(model, asked, got)
    assert assert_as_the_reference(head, seen.rows) > 50


def test_updating_the_model_keeps_samples_exact_and_the_head_unchanged(made, tmp_path):
    folder, of_head, _, _ = made
    new = tiny.checkpoint(tmp_path, num_hidden_layers=2, initializer_range=0.05, seed=1)
    asked = tiny.prompts(*LENGTHS, seed=1)
    with cases.engine(folder, with_head(of_head, pages=4)) as llm:
        before = cases.generate(llm, asked, 30)
        worker = worker_of(llm)
        head = worker.model_runner.speculator.model
        kept = {name: x.clone() for name, x in head.named_parameters() if "embed" not in name}
        llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": list(new.state_dict().items())}
        )
        llm.reset_prefix_cache()
        after = cases.generate(llm, asked, 30)
        own = dict(head.named_parameters())
        assert all(torch.equal(x, own[name]) for name, x in kept.items())
    cases.assert_greedy_and_dense(new, asked, after)
    assert cases.tokens_of(before) != cases.tokens_of(after)


def test_the_head_has_its_own_cache_in_the_models_blocks(made):
    folder, of_head, _, _ = made
    with cases.engine(folder, with_head(of_head, adapt=True)) as llm:
        runner = worker_of(llm).model_runner
        [group] = runner.kv_cache_config.kv_cache_groups
        layers = layers_of(runner.vllm_config)
        addresses = runner.speculator.drafter.addresses()
        config = runner.vllm_config
    assert len(group.layer_names) == 3 and len(layers) == 2
    [of_the_head] = set(group.layer_names) - {layer.layer_name for layer in layers}
    assert addresses[f"the head's KV cache of {of_the_head}"] not in [
        addresses[f"the KV cache of {layer.layer_name}"] for layer in layers
    ]
    assert setup.is_ours(pickle.loads(pickle.dumps(config.speculative_config)))


# --- sampling ---


SAMPLES = {
    "exact": 20_000,
    "any stage": 20_000,
    "any stage, with history": 20_000,
    "guesses alone": 4_000,
    "guesses become drafts without being judged": 4_000,
    "rejected drafts are kept": 4_000,
}


@pytest.mark.parametrize("variant", SAMPLES)
def test_continuations_follow_the_dense_distribution(tmp_path, monkeypatch, variant):
    """The test also detects defects in how guesses or drafts are verified."""
    V, T = 6, 4
    model = tiny.checkpoint(
        tmp_path / "model", vocab_size=V, num_hidden_layers=2, initializer_range=0.35, seed=7
    )
    of_head = trained(model).save(tmp_path / "head")
    k = T - 1
    if variant.startswith("any stage"):
        cascade_cases.in_turn(monkeypatch)
    elif variant == "guesses alone":
        k = 3 * (T - 1)  # so that T - 1 is the smallest number of drafts
        cascade_cases.hold(monkeypatch, plan.Guessed(T - 1, alone=True))
    elif variant == "guesses become drafts without being judged":
        cascade_cases.drafting_guesses(monkeypatch)
    elif variant == "rejected drafts are kept":
        cases.keep_rejected(monkeypatch)
    prompt = np.random.default_rng(1).integers(0, V, 150).tolist()
    layout = dict(max_model_len=256, max_num_seqs=256, max_num_batched_tokens=4096)
    adapts = variant.startswith(("any stage", "guesses alone"))
    least = 3 if variant.endswith("with history") else 0
    decoding = with_head(of_head, k, adapt=adapts, guess_tokens=2, guess_lookup_min=least)
    with cases.engine(tmp_path / "model", decoding, **layout) as llm:
        wanted = [
            cases.parameters(T, temperature=1.0, seed=10**6 + i, logprobs=None)
            for i in range(SAMPLES[variant])
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt}] * len(wanted), wanted, use_tqdm=False)
        counts = cases.counters(llm)
    assert 0 < counts["accepted"] < counts["drafted"]
    if not adapts:
        assert counts["drafted"] - counts["guessed"] > 1.1 * counts["passes"]
    tokens = np.array([o.outputs[0].token_ids for o in outputs])
    expected = cases.enumerated(model, prompt, T, 1.0)
    p_value = cases.likelihood(
        np.bincount(tokens @ (V ** np.arange(T - 1, -1, -1)), minlength=V**T), expected
    )
    print(variant, p_value, counts)  # shown if the test fails
    if not adapts and variant != "exact":
        assert p_value < 1e-4
        return
    assert p_value > 1e-3
    for place in range(T):
        p = expected.reshape([V] * T).sum(tuple(n for n in range(T) if n != place))
        assert cases.likelihood(np.bincount(tokens[:, place], minlength=V), p) > 1e-3, place


# --- errors ---


def test_unsupported_request_options_raise_an_error_with_a_head(made):
    folder, of_head, _, _ = made
    with cases.engine(folder, with_head(of_head)) as llm:
        asked = tiny.prompts(33)
        cases.generate(llm, asked, 4, temperature=1.0, min_p=0.2, logit_bias={3: 2.0})
        with pytest.raises(ValueError, match="mode 'lossless' does not support logprob_token_ids"):
            cases.generate(llm, asked, 4, logprobs=None, logprob_token_ids=[3])


@pytest.mark.parametrize(
    "changes, problem",
    [
        (dict(vocab_size=98), "its vocabulary has 98 tokens, but the model's has 97"),
        (
            dict(target_hidden_size=32),
            "it reads hidden states of size 32, but the model's have size 64",
        ),
        (
            dict(head_dim=16),
            r"are 4, 2, 16 and float32, but must equal the model's \(4, 2, 32 and float32\)",
        ),
        (dict(eagle_config={"use_aux_hidden_state": False}), "only the model's last hidden state"),
    ],
)
def test_head_that_does_not_fit_the_model_raises_an_error(made, tmp_path, changes, problem):
    folder, _, _, head = made
    of_head = head.save(tmp_path, **changes)
    with (
        pytest.raises(ConfigError, match=rf"^guess_head '{of_head}': .*{problem}.*; choose"),
        cases.engine(folder, with_head(of_head)),
    ):
        pass


def test_broken_head_gives_wrong_guesses_but_exact_samples(made, monkeypatch, tmp_path):
    """A head that reads slots of the wrong tokens makes wrong guesses, but samples stay exact."""
    folder, of_head, model, head = made
    asked = tiny.prompts(*LENGTHS, seed=1)
    stock = HeadSource.follow

    def shifted(source, rows, sparse):
        stock(source, rows, sparse._replace(drawn_RT=sparse.drawn_RT.roll(1)))

    monkeypatch.setattr(HeadSource, "follow", shifted)
    seen = Guesses(monkeypatch)
    with cases.engine(folder, with_head(of_head, pages=1000)) as llm:
        seen.worker = worker_of(llm)
        got = cases.generate(llm, asked, 30)
    cases.assert_greedy_and_dense(model, asked, got)
    with pytest.raises(AssertionError):
        assert_as_the_reference(head, seen.rows, 1)
