"""Test the study of a pretrained model: which positions are measured, and what is compared."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparrow.schedule import SparsitySchedule
from tests.conftest import tiny_model

FOLDERS = (
    "benchmarks",
    "studies/common",
    "studies/text",
    "studies/pretrained",
    "studies/cascade",
)
MODULES = (
    "domains",
    "drafts",
    "longer",
    "one_schedule",
    "rounding",
    "shared_selection",
    "tables_pretrained",
    "texts",
    "what_is_read",
)
REQUIRED = ("tyro",)


def test_cycles_contain_only_sampled_tokens(study):
    sampled = np.zeros((2, 64), bool)
    sampled[:, 10:14] = sampled[:, 20:30] = sampled[:, 40:60] = True
    start = study.domains.starts(sampled, [8, 32, 64], 8, 4)
    assert start.shape == (2, 8)
    for s, row in enumerate(start.tolist()):
        assert all(sampled[s, first + 1 : first + 5].all() for first in row)
        assert [first < 32 for first in row] == [True] * 4 + [False] * 4
    # Cycles of four sampled tokens fit into 10 to 13 and 20 to 29. A cycle starts one token
    # earlier, at 9 or at 19 to 25.
    assert set(start[:, :4].flatten().tolist()) <= {9, *range(19, 26)}


def test_bin_without_a_whole_cycle_of_sampled_tokens_raises_an_error(study):
    sampled = np.zeros((1, 64), bool)
    sampled[0, :32] = True
    with pytest.raises(
        ValueError,
        match=r"sequence 0 has no 8 consecutive sampled tokens between positions 32 and 64",
    ):
        study.domains.starts(sampled, [0, 32, 64], 2, 8)


def test_logits_are_divided_by_the_temperature_only_inside_the_context_manager(study):
    model = tiny_model()
    ids = torch.arange(6)[None]
    with torch.no_grad():
        before = model(ids).logits
        with study.domains.at_temperature(model, 0.5):
            assert torch.allclose(model(ids).logits, before * 2)
        assert torch.equal(model(ids).logits, before)


def test_the_two_halves_of_a_domain_share_no_sequence(study):
    ids, start = torch.arange(5)[:, None], torch.zeros(5, 1)
    first, second = study.one_schedule.halves(study.domains.Domain("prose", 1, ids, start))
    assert first.ids[:, 0].tolist() == [0, 2, 4] and second.ids[:, 0].tolist() == [1, 3]


def test_largest_schedule_reads_the_maximum_of_all_schedules_in_each_bin(study):
    kept = [SparsitySchedule(top_k=top_k, page_size=16) for top_k in ((1, 5, 6), (2, 3))]
    found = study.one_schedule.largest({"a": kept[0], "b": kept[1]})
    assert found.top_k == (2, 5, 6)


def test_bins_are_counted_as_above_within_or_below_the_target(study):
    kept = SparsitySchedule.fixed(1, page_size=16, bin_tokens=100)
    alpha = np.repeat([0.90, 0.87, 0.80], 100)
    measured = study.one_schedule.Acceptance(alpha, np.arange(300), np.tile([0, 1], 150))
    found = study.one_schedule.judged(measured, kept, 0.86)
    assert [found[name] for name in ("above", "within", "below")] == [1, 1, 1]
    # Sequences of 64 tokens or more read four pages of 16 tokens. Shorter sequences are read in
    # full.
    assert found["tokens_read"] == pytest.approx((64 * 65 / 2 + 64 * 236) / 300, abs=0.05)


def test_the_table_of_schedules_shows_the_worst_bin_with_its_interval(study, monkeypatch):
    bins = [[0, 0.87, 0.85, 0.89], [1024, 0.83, 0.8, 0.86], [2048, 0.9, 0.7, 0.95]]
    bins.append([3072, 0.83, 0.79, 0.87])  # the first of equal bins counts
    row = {"on": "prose", "domain": "sources", "p5": [0.86, 0.85, 0.87], "tokens_read": 748.0}
    result = {"rows": [{**row, "bins": bins, "below": 1}]}
    monkeypatch.setattr(study.tables_pretrained, "load", {"pretrained_schedules": result}.get)
    assert study.tables_pretrained.schedules().splitlines()[2:] == [
        "| prose | 748 | 0.860 [0.850, 0.870] / 0.830 [0.800, 0.860] / 1 |"
    ]


def test_sequences_are_spread_over_all_documents(study):
    class Words:
        def convert_tokens_to_ids(self, token):
            return 0

        def __call__(self, text, add_special_tokens):
            return type("Encoding", (), {"input_ids": [int(word) for word in text.split()]})

    found = study.texts.cut(Words(), ["1 2 3", "4 5 6", "7 8 9", "1 1 1"], 2, 4)
    assert found.tolist() == [[0, 1, 2, 3], [0, 7, 8, 9]]
    with pytest.raises(ValueError, match="enough for 1 sequences of 4, but 2 are wanted"):
        study.texts.cut(Words(), ["1 2 3"], 2, 4)


def test_baseline_variants_come_first(study):
    every = study.what_is_read.variants(30, [512])
    even = every[: len(study.what_is_read.EVEN)]
    assert [v.budget for v in even] == list(study.what_is_read.EVEN)
    assert {(v.page_size, v.dense_layers, v.score) for v in even} == {(16, (), "mean_key")}
    assert [v.dense_layers for v in every if v.dense_layers] == [(0, 1), (29,)]


def test_losses_by_position_average_to_the_overall_loss(study):
    model = tiny_model()
    ids = torch.randint(
        model.config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        whole = model(input_ids=ids, labels=ids).loss.item()
    first, rest = study.longer.loss_by_position(model, ids, [0, 8, 32])
    assert (8 * first["nats"][0] + 24 * rest["nats"][0]) / 32 == pytest.approx(whole, abs=1e-4)


def test_losses_by_position_have_t_intervals_over_windows(study):
    model = tiny_model()
    ids = torch.randint(
        model.config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        one, other = (model(input_ids=row[None], labels=row[None]).loss.item() for row in ids)
    (found,) = study.longer.loss_by_position(model, ids, [0, 32])
    half = 12.7062 * abs(one - other) / 2  # of a t-interval with one degree of freedom
    mean = (one + other) / 2
    assert found["nats"] == pytest.approx([mean, mean - half, mean + half], abs=1e-3)
    with pytest.raises(ValueError, match="one held-out window gives no interval"):
        study.longer.loss_by_position(model, ids[:1], [0, 32])


def test_the_table_of_losses_shows_their_intervals(study, monkeypatch):
    bins = [{"start": 0, "end": 2048, "nats": [1.234, 1.1, 1.368]}]
    result = {"model": {"held_out_loss": {"as it was": bins}}}
    monkeypatch.setattr(study.tables_pretrained, "load", {"pretrained_longer": result}.get)
    assert study.tables_pretrained.longer_loss().splitlines()[2:] == [
        "| as it was | 1.23 [1.10, 1.37] |"
    ]


def test_a_larger_rotary_base_rotates_distant_keys_more_slowly(study, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    same = study.longer.with_base(str(tmp_path), None, 4096)
    assert same.config.max_position_embeddings == 4096
    changed = study.longer.with_base(str(tmp_path), 1e7, 4096)
    ratio = changed.model.rotary_emb.inv_freq / same.model.rotary_emb.inv_freq
    assert torch.equal(same.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert ratio[0] == 1 and (ratio[1:] < 1).all()


def test_an_interrupted_run_continues_only_with_the_same_settings(study, tmp_path):
    def given(budget):
        parser = study.domains.domain_parser("", 4)
        parser.add_argument("--budget", type=int)
        paths = ["--texts", "x", "--conversations", "x", "--out", str(tmp_path / "x.json")]
        return parser.parse_args([*paths, "--budget", str(budget)])

    assert study.domains.earlier(given(512)) == {}
    written = study.domains.write(given(512), 0, rows=[1, 2])
    assert study.domains.earlier(given(512))["rows"] == written["rows"] == [1, 2]
    with pytest.raises(ValueError, match=r"x\.json was measured with different settings, .*512"):
        study.domains.earlier(given(1024))


def test_loading_takes_the_first_conversations_and_evenly_spaced_texts(study, tmp_path):
    ids = np.arange(6, dtype=np.uint16)[:, None].repeat(40, axis=1)
    sampled = np.ones(ids.shape, bool)
    np.savez(tmp_path / "texts.npz", prose=ids)
    np.savez(tmp_path / "conversations.npz", **{"0.6/ids": ids, "0.6/sampled": sampled})
    paths = ["--texts", str(tmp_path / "texts.npz"), "--out", "x"]
    paths += ["--conversations", str(tmp_path / "conversations.npz")]
    args = study.domains.domain_parser("", 2).parse_args(paths)
    chat, prose = study.domains.load(args, [0, 16, 32], 4, 2)
    assert (chat.name, chat.temperature, chat.ids[:, 0].tolist()) == (
        "chat mathematics",
        0.6,
        [0, 1],
    )
    assert (prose.name, prose.temperature, prose.ids[:, 0].tolist()) == ("prose", 1.0, [0, 3])
    assert prose.position(2).shape == (2, 4, 2)


def test_llama_cache_is_rounded_only_inside_the_context_manager(study):
    torch.manual_seed(0)
    shape = dict(hidden_size=96, intermediate_size=32, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=6, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **shape, **heads)).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids).logits
        scales = study.rounding.scales_of(model, ids)
        for context in (
            study.rounding.int8_cache(model),
            study.rounding.rounded_cache(model, scales),
        ):
            with context:
                assert 0 < (model(ids).logits - before).abs().max() < 0.1
            assert torch.equal(model(ids).logits, before)


def test_shared_selections_are_measured_at_the_end_of_each_text(study, tmp_path, monkeypatch):
    shared = study.shared_selection
    options = shared.Options(
        out=tmp_path / "shared.json",
        texts=2,
        tokens=96,
        span=48,
        cycles=3,
        drafts=4,
        budget=64,
        shared=4,
    )
    start = shared.starts(options)
    assert start.tolist() == [[48, 62, 76], [55, 69, 83]]
    model = tiny_model(attn_implementation=study.drafts.NAME)
    monkeypatch.setattr(shared, "model_path", lambda name: name)
    monkeypatch.setattr(shared, "load_model", lambda name, **given: model)
    monkeypatch.setattr(shared, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda path: None))
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 96))
    monkeypatch.setattr(shared, "cut", lambda tokenizer, documents, texts, tokens: ids)
    found = shared.main(options)
    places = [(row["kind"], row["temperature"], row["tokens"]) for row in found["rows"]]
    assert places == [
        (kind, temperature, tokens)
        for kind in ("sources", "manuals")
        for temperature in (0.7, 1.0)
        for tokens in (1, 4)
    ]
    assert all(row["n"] == 24 and 0.5 < row["mean"][0] < 1 for row in found["rows"])
    means = [row["mean"][0] for row in found["rows"]]
    assert means[0] != means[1]  # a shared selection keeps other pages
    assert means[0] != means[2]  # another temperature
    assert means[:4] == means[4:]  # both kinds have the same tokens here
