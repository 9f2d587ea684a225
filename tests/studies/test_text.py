"""Test the study of a text model on a small scale: corpus, training, checkpoint, acceptance of
drafts, and tables.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparrow.model import actor
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB, tiny_model

ROOT = Path(__file__).parents[2]
MODULES = (
    "common",
    "corpus",
    "train",
    "drafts",
    "acceptance",
    "vllm_acceptance",
    "tables_text",
    "fewer_bits",
    "rounding",
)
CONTEXT, PAGES = 512, 16


@pytest.fixture(scope="module")
def trained(study, tmp_path_factory):
    """Train a two-layer model on this package's sources, except the folder ``attention``, for one
    second. Return the checkpoint folder, the model and the model card.
    """
    out = tmp_path_factory.mktemp("checkpoint")
    options = [
        "--size",
        "tiny",
        "--context",
        str(CONTEXT),
        "--batch",
        "2",
        "--vocab",
        "600",
        "--seconds",
        "1",
    ]
    text = ["--text", str(ROOT / "sparrow"), "--held-out", "attention", "--tokens", "100000"]
    return out, *study.train.main([str(out), *options, *text])


@pytest.fixture(scope="module")
def sharp(study):
    """Return a model whose output changes if pages are skipped, a batch of texts, and two start
    positions in each text.
    """
    model = tiny_model(max_position_embeddings=CONTEXT)
    model.set_attn_implementation(study.drafts.NAME)
    ids = torch.randint(VOCAB, (2, 256), generator=torch.Generator().manual_seed(1))
    return model, ids, torch.tensor([[100, 201], [127, 240]])


def actor_model():
    model = tiny_model(max_position_embeddings=CONTEXT)
    actor.set_schedule(model, SparsitySchedule.dense(dense_layers=()))
    return model


# --- corpus ---


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text * (2000 // len(text) + 1))


def test_folders_are_held_out_by_name_at_any_depth(study, tmp_path):
    write(tmp_path / "a" / "pandas" / "core", "x.py", "x = 1\n")
    write(tmp_path / "a" / "mypandas", "y.py", "y = 2\n")
    write(tmp_path / "sympy" / "physics", "z.py", "z = 3\n")
    write(tmp_path / "sympy" / "physics", "short.txt", "no source")
    train, held = study.corpus.split(study.corpus.folders([tmp_path], ".py"), study.corpus.HELD_OUT)
    assert [[path.name for path in files] for files in train] == [["y.py"]]
    assert sorted(path.name for files in held for path in files) == ["x.py", "z.py"]
    with pytest.raises(ValueError, match=r"the names numpy hold out 0 of 3 folders with text"):
        study.corpus.split(study.corpus.folders([tmp_path], ".py"), ["numpy"])


def test_duplicate_and_non_utf_8_files_are_skipped(study, tmp_path):
    write(tmp_path / "a", "x.py", "x = 1\n")
    write(tmp_path / "b", "copy.py", "x = 1\n")
    (tmp_path / "b" / "latin.py").write_bytes(b"# \xe9" * 1000)
    found = list(
        study.corpus.texts([[tmp_path / "a/x.py"], sorted((tmp_path / "b").iterdir())], set())
    )
    assert [text.splitlines()[0] for text in found] == [f"# file {tmp_path.name}/a/x.py"]


def test_each_file_starts_with_an_end_token_and_the_token_count_is_limited(study):
    tokenizer = study.corpus.train_tokenizer(["def f(x):\n    return x\n"] * 5, 300)
    tokens = study.corpus.encode(tokenizer, ["def f", "return"], 100)
    assert tokens.dtype == np.uint16 and (tokens == 0).sum() == 2 and tokens[0] == 0
    assert tokenizer.decode(tokens) == "<|endoftext|>def f<|endoftext|>return"
    assert study.corpus.encode(tokenizer, ["def f", "return"], 2).tolist() == tokens[:2].tolist()


# --- training ---


def test_the_learning_rate_warms_up_with_steps_and_decays_with_time(study):
    found = [
        study.train.learning_rate(step, share)
        for step, share in ((0, 0), (29, 0), (99, 0.3), (99, 0.65), (99, 1))
    ]
    assert found == pytest.approx([2e-3 / 60, 1e-3, 2e-3, 2e-3 * 0.525, 1e-4])


def test_transformers_loads_exactly_the_trained_model(study, trained):
    out, model, card = trained
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    held = np.load(out / "held_out.npy")
    ids = study.train.windows(held, 2, CONTEXT)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert loaded.config.model_type == "qwen3" and loaded.config.head_dim == 64
    ids = study.train.windows(held, min(32, len(held) // CONTEXT), CONTEXT)
    assert card["held_out_loss"] == round(study.train.held_out_loss(loaded, ids), 4)
    assert card["held_out_loss"] < study.train.held_out_loss(
        study.train.new_model("tiny", 600, CONTEXT), ids
    )
    assert json.loads((out / "card.json").read_text()) == card


def test_transformers_loads_the_tokenizer(trained):
    out, _, card = trained
    tokenizer = AutoTokenizer.from_pretrained(out)
    held = np.load(out / "held_out.npy")
    assert (
        len(tokenizer) == 600
        and tokenizer.eos_token_id == 0
        and card["held_out_tokens"] == len(held)
    )
    text = tokenizer.decode(held[1:400])
    assert text.startswith("# file ") and "attention/" in text.splitlines()[0]
    assert tokenizer(text)["input_ids"][:390] == held[1:391].tolist()


def test_windows_do_not_overlap(study):
    found = study.train.windows(np.arange(10, dtype=np.uint16), 3, 3)
    assert found.tolist() == [[0, 1, 2], [3, 4, 5], [7, 8, 9]]
    with pytest.raises(ValueError, match="10 tokens are too few for 4 windows of 3"):
        study.train.windows(np.arange(10, dtype=np.uint16), 4, 3)


# --- drafts ---


def test_drafts_that_read_all_pages_are_always_accepted(study, sharp):
    model, ids, start = sharp
    everything = study.acceptance.schedule(256 + 12)
    p, (found,) = study.acceptance.lossless(model, ids, start, 12, [(everything, 1)])
    position = start[..., None] + torch.arange(12)
    with torch.no_grad():
        direct = model(input_ids=ids).logits.softmax(-1)[torch.arange(2)[:, None, None], position]
    torch.testing.assert_close(p, direct, atol=1e-5, rtol=0)
    assert torch.equal(found, torch.ones(2, 2, 12))


@pytest.mark.parametrize(
    "dense_layers, budgets", [((), ()), ((0, 2), ()), ((), ((0, 3), (0.5, 0.5)) * 2)]
)
def test_drafts_of_a_cycle_match_the_teacher_forced_actor(study, sharp, dense_layers, budgets):
    """If pages are selected at every step (reuse 1), a cycle's drafts match the package's
    teacher-forced actor, given all earlier tokens as the actor's prompt.
    """
    model, ids, start = sharp
    kept = study.acceptance.schedule(96, dense_layers).replace(head_budgets=budgets)
    p, (found,) = study.acceptance.lossless(model, ids, start, 12, [(kept, 1)])
    for text, cycle in np.ndindex(2, 2):
        at = start[text, cycle][None, None]
        one = p[text, cycle][None, None]
        forced = study.acceptance.lossy(actor_model(), ids[text][None], at, one, int(at), kept)
        torch.testing.assert_close(found[text, cycle], forced[0, 0], atol=1e-5, rtol=0)
    assert found.min() < 0.9  # pages were left out


def test_reused_pages_come_from_the_step_that_selected_them(study, sharp):
    model, ids, start = sharp
    kept = study.acceptance.schedule(96)
    cache = study.drafts.DenseCache.of(model, ids, study.drafts.layout_of(kept))
    runs = {reuse: study.drafts.Cycles(cache, start, 6, kept, reuse) for reuse in (1, 4)}
    pages = {
        reuse: [cycles.kept[3].clone() for _ in study.drafts.draft(model, ids, cycles)]
        for reuse, cycles in runs.items()
    }
    assert torch.equal(pages[1][0], pages[4][0]) and not torch.equal(pages[1][1], pages[1][0])
    assert all(torch.equal(pages[4][step], pages[4][0]) for step in (1, 2, 3))
    assert not torch.equal(pages[4][4], pages[4][0]) and torch.equal(pages[4][5], pages[4][4])
    assert pages[4][0].sum(-1).eq(6).all()


def test_acceptance_rises_with_the_budget(study, sharp):
    model, ids, start = sharp
    cases = [(study.acceptance.schedule(budget), 1) for budget in (64, 128, 192, 512)]
    _, found = study.acceptance.lossless(model, ids, start, 12, cases)
    means = [values.mean().item() for values in found]
    assert means[0] < means[1] - 0.02 and means[1] < means[2] - 0.02 and means[2] < means[3] == 1.0


def test_cycle_longer_than_the_recent_pages_raises_an_error(study, sharp):
    start = sharp[2]
    cache = study.drafts.DenseCache([], [], [])
    study.drafts.Cycles(cache, start, 17, study.acceptance.schedule(96))
    with pytest.raises(ValueError, match=r"cycles of 18 drafts do not fit in .*; use 17"):
        study.drafts.Cycles(cache, start, 18, study.acceptance.schedule(96))


# --- the statistics ---


def test_tokens_per_cycle_match_a_hand_calculation(study):
    alpha = np.array([[[0.5, 1.0, 0.0], [1.0, 0.5, 0.5]]])
    measured, geometric = study.acceptance.tokens_a_cycle(alpha, 2)
    mean = 3.5 / 6
    assert measured == pytest.approx(1 + (0.5 + 0.5 + 1.0 + 0.5) / 2)
    assert geometric == pytest.approx(1 + mean + mean**2)
    assert study.acceptance.tokens_a_cycle(np.ones((1, 1, 4)), 4) == (5.0, 5.0)


def test_cycles_start_at_different_positions_spread_over_the_context(study):
    start = study.acceptance.starts(texts=4, cycles=5, context=8192, drafted=12)
    assert start.min() >= 1024 and start.max() + 12 <= 8192 and len(start.unique()) == 20
    assert start.flatten().sort().values.diff().float().std() < 1


def test_a_summary_groups_drafts_by_position_and_cycles_by_start(study):
    alpha = np.array([[[1.0, 1.0], [0.5, 1.0]], [[0.8, 0.6], [0.2, 0.4]]])
    position = np.array([[[10, 11], [19, 20]], [[12, 13], [25, 26]]])
    found = study.acceptance.summary(alpha, position, [10, 20, 30], [2])
    assert found["by_step"] == [0.625, 0.75] and found["n"] == 8 and found["mean"][0] == 0.6875
    first, second = found["bins"]
    assert (first["n"], second["n"]) == (5, 3)
    assert first["mean"][0] == pytest.approx((1 + 1 + 0.5 + 0.8 + 0.6) / 5)
    assert second["tokens_a_cycle"][2][0] == pytest.approx(1 + 0.2 + 0.08)


def test_the_interval_of_tokens_per_cycle_resamples_whole_texts(study):
    # One text's cycles yield 3 tokens and the other's 1, so a resample yields 1, 2 or 3.
    alpha = np.array([[[1.0, 1.0], [1.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
    position = np.zeros(alpha.shape, int)
    found = study.acceptance.summary(alpha, position, [0, 1], [2])
    assert found["tokens_a_cycle"][2][0] == 2
    assert found["tokens_a_cycle_interval"] == {2: [1, 3]}
    assert found["bins"][0]["tokens_a_cycle_interval"] == {2: [1, 3]}
    same = np.repeat(alpha[:1], 2, axis=0)
    assert study.acceptance.summary(same, position, [0, 1], [2])["tokens_a_cycle_interval"] == {
        2: [3, 3]
    }


def test_correlations_with_position_match_numpys_pearson_correlation(study):
    rng = np.random.default_rng(0)
    position = np.tile(np.arange(800), 6)
    text = np.repeat(np.arange(6), 800)
    alpha = np.clip(1 - position / 800 * rng.random(4800) ** 4, 0, 1)
    found = study.acceptance.correlations(alpha, position, text)
    estimate, low, high = found["tokens"]
    assert (
        estimate == pytest.approx(np.corrcoef(alpha, position)[0, 1]) and low < estimate < high < 0
    )
    tails = [np.percentile(alpha[position // 100 == i], 5) for i in range(8)]
    assert found["p5 of bins"][0] == pytest.approx(np.corrcoef(tails, np.arange(8))[0, 1])
    assert found["p5 of bins"][0] < -0.9 < estimate
    short = position < 100
    short |= text > 0
    assert list(study.acceptance.correlations(alpha[short], position[short], text[short])) == [
        "tokens"
    ]


def test_beta_fit_of_a_beta_distributed_tail_has_a_small_ks_distance(study):
    rng = np.random.default_rng(0)
    alpha = np.where(rng.random((40, 25, 12)) < 0.3, 0.999 * rng.beta(2.0, 0.6, (40, 25, 12)), 1.0)
    position = np.broadcast_to(np.arange(25 * 12).reshape(25, 12), alpha.shape)
    tail = study.acceptance.shape(alpha, position)["beta_tail"]
    low, high = tail["ks_interval"]
    assert low < tail["ks"] < high < 0.06
    low, high = tail["fraction_interval"]
    assert low < 0.3 < high < low + 0.04 and low < tail["n"] / alpha.size < high
    assert (
        tail["ks"] < 0.03
        and tail["a"] == pytest.approx(2.0, rel=0.1)
        and tail["b"] == pytest.approx(0.6, rel=0.1)
    )
    lumps = np.where(alpha < 0.7, 0.1, alpha)
    assert study.acceptance.shape(lumps, position)["beta_tail"]["ks"] > 0.1
    assert study.acceptance.shape(np.ones_like(alpha), position) == {}


def test_script_writes_the_file_that_the_tables_read(study, trained, tmp_path, monkeypatch):
    out, _, card = trained
    path = tmp_path / "text_acceptance.json"
    counts = ["--texts", "3", "--cycles", "2", "--batch", "2", "--prompt", "64"]
    budgets = [
        "--budgets",
        "64",
        "528",
        "--reuse-budgets",
        "64",
        "--reuse",
        "8",
        "--dense-layers",
        "0",
    ]
    study.acceptance.main([str(out), "--out", str(path), *counts, *budgets])
    found = study.common.read_result(path)
    assert found["model"] == card
    rows = {
        (row["mode"], row["budget"], tuple(row["dense_layers"]), row["reuse"]): row
        for row in found["rows"]
    }
    assert len(rows) == 10
    for (mode, budget, _, _), row in rows.items():
        assert row["n"] == 3 * 2 * 12
        if budget == 528:
            assert row["mean"][0] == 1.0 and row["top_k"] == 30
        else:
            assert row["mean"][0] < 1.0 and row["top_k"] == 1
        assert bool(row["tokens_a_cycle"]) == (mode == "lossless")
    drafted = rows["lossless", 64, (), 1]
    assert -1 < drafted["correlation"]["tokens"][0] < 1 and 0 < drafted["beta_tail"]["ks"] < 1

    monkeypatch.setattr(
        study.tables_text, "load", lambda name: study.common.read_result(tmp_path / f"{name}.json")
    )
    lines = study.tables_text.text_acceptance().splitlines()
    assert len(lines) == 2 + 4 and lines[-1].startswith("| 528 | 0 | 1.000 [1.000, 1.000] |")
    assert len(study.tables_text.text_lengths().splitlines()) == 2 + 4
    assert len(study.tables_text.text_reuse().splitlines()) == 2 + 2
    # If one layer is dense, the small model may lose too little acceptance for a fit of the tail.
    lossy = [
        row
        for row in found["rows"]
        if (row["mode"], row["budget"], row["dense_layers"]) == ("lossy", 64, [])
    ]
    path.write_text(json.dumps({**found, "rows": lossy}))
    below, share = (
        lossy[0]["beta_tail"]["n"] / lossy[0]["n"],
        lossy[0]["beta_tail"]["fraction_interval"],
    )
    shown = f"{1 - below:.0%} [{1 - share[1]:.0%}, {1 - share[0]:.0%}]"
    first = study.tables_text.text_tail().splitlines()[2]
    assert shown in first and first.endswith("] |")
    for row in lossy:  # a file written before intervals were recorded
        del row["beta_tail"]["fraction_interval"], row["beta_tail"]["ks_interval"]
    path.write_text(json.dumps({**found, "rows": lossy}))
    assert (
        study.tables_text.text_tail()
        .splitlines()[2]
        .endswith(f"| {lossy[0]['beta_tail']['ks']:.3f} |")
    )
    path.write_text(json.dumps(found))
    assert f"{card['held_out_loss']:.2f} nats" in study.tables_text.text_model()


# --- drafting in vLLM ---


class Engine:
    """A stand-in for the part of vLLM's engine that ``generate`` uses. It gives each request the
    listed number of tokens in each step.
    """

    def __init__(self, given: dict[str, list[int]]) -> None:
        self.given = given
        self.prompts: dict[str, list[int]] = {}

    def add_request(self, name, prompt, sampling) -> None:
        assert (
            sampling.temperature == 1.0 and sampling.ignore_eos and sampling.output_kind == "delta"
        )
        self.prompts[name] = prompt["prompt_token_ids"]

    def has_unfinished_requests(self) -> bool:
        return any(self.given.values())

    def step(self):
        for name, counts in self.given.items():
            if counts:
                tokens = [7] * counts.pop(0)
                yield SimpleNamespace(
                    request_id=name,
                    outputs=[SimpleNamespace(token_ids=tokens)],
                    finished=not counts,
                )


def test_every_step_except_the_first_and_the_last_is_one_cycle(study, monkeypatch):
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(
        sys.modules,
        "vllm",
        SimpleNamespace(SamplingParams=lambda **options: SimpleNamespace(**options)),
    )
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    llm = SimpleNamespace(llm_engine=Engine({"0": [1, 9, 2, 4], "1": [1, 3]}))
    found = study.vllm_acceptance.generate(llm, [[5, 5, 5], [6]], tokens=16)
    assert found == [([5] * 3 + [7] * 16, [(3, 9), (12, 2)]), ([6] + [7] * 4, [])]


def test_expected_acceptance_under_the_policy_equals_the_acceptance_rate(study, sharp):
    """Averaged over the dense policy's distribution, min(1, q/p) is the acceptance rate."""
    model, ids, _ = sharp
    ids = ids[:1].repeat(VOCAB, 1)
    ids[:, 151] = torch.arange(VOCAB)
    kept = study.acceptance.schedule(96)
    start = torch.full((VOCAB, 1), 150)
    alpha, ratio = study.vllm_acceptance.predict(model, ids, start, 2, kept)
    with torch.no_grad():
        p = model(input_ids=ids[:1]).logits[0, 150].softmax(-1)
    torch.testing.assert_close((p * ratio[:, 0, 0]).sum(), alpha[0, 0, 0], atol=1e-5, rtol=0)
    assert alpha[0, 0, 0] < 0.95 and alpha[:, 0, 1].std() > 0.01
    _, (consecutive,) = study.acceptance.lossless(model, ids[:1], start[:1], 2, [(kept, 1)])
    torch.testing.assert_close(alpha[:1], consecutive, atol=1e-6, rtol=0)


def test_cycles_are_compared_with_predictions_from_draft_acceptance(study):
    start, emitted = np.array([[10, 30], [12, 25]]), np.array([[3, 1], [2, 2]])
    alpha = np.array([[[0.8, 0.5], [0.6, 0.4]], [[1.0, 1.0], [0.2, 0.4]]])
    ratio = np.array([[[0.5, 1.0], [0.0, 1.0]], [[1.0, 0.3], [0.5, 1.0]]])
    found = study.vllm_acceptance.compare(start, emitted, alpha, ratio, [8, 20, 40])
    first, second = found["bins"]
    assert first["tokens_a_cycle"][0] == 2.5 and first["cycles"] == 2
    assert first["predicted"]["sampled"] == pytest.approx(
        1 + ((0.8 + 0.5 * 0.5) + (1 + 1)) / 2, abs=1e-3
    )
    assert first["predicted"]["consecutive"] == pytest.approx(1 + ((0.8 + 0.4) + 2) / 2, abs=1e-3)
    assert second["measured_over_predicted"] == pytest.approx(
        1.5 / (1 + (0.6 + 0.2 + 0.2) / 2), abs=1e-4
    )
    assert found["mean_acceptance"] == pytest.approx(alpha.mean(), abs=1e-4)


# --- fewer bits ---


def cached(model, ids):
    """Return keys and values of layer 0, ``[B, K, T, D]``."""
    with torch.no_grad():
        layer = model.model(input_ids=ids, use_cache=True).past_key_values.layers[0]
    return layer.keys, layer.values


def test_the_cache_is_rounded_to_e4m3_with_scales_from_the_prompts(study, sharp):
    model, ids = tiny_model(max_position_embeddings=CONTEXT), sharp[1]
    exact, logits = cached(model, ids), model(input_ids=ids).logits
    scales = study.rounding.scales_of(model, ids[:, :64])
    prompts = cached(model, ids[:, :64])
    with study.rounding.rounded_cache(model, scales):
        rounded, changed = cached(model, ids), model(input_ids=ids).logits
    for before, after, prompt, scale_K in zip(exact, rounded, prompts, scales[0], strict=True):
        room = 448 * scale_K / prompt.abs().amax((0, 2, 3))
        assert ((room >= 4) & (room < 8)).all() and (scale_K.log2() % 1 == 0).all()
        codes = (before / scale_K[:, None, None]).to(torch.float8_e4m3fn).float()
        assert torch.equal(after, codes * scale_K[:, None, None]) and not torch.equal(after, before)
    assert not torch.allclose(logits, changed, atol=1e-3)
    assert torch.equal(model(input_ids=ids).logits, logits)  # no rounding remains afterwards


def test_the_cache_is_rounded_to_int8_with_a_scale_per_token_and_head(study, sharp):
    model, ids = tiny_model(max_position_embeddings=CONTEXT), sharp[1]
    exact = cached(model, ids)
    with study.rounding.int8_cache(model):
        rounded = cached(model, ids)
    for before, after in zip(exact, rounded, strict=True):
        step = (before.abs().amax(-1, keepdim=True) / 127).log2().ceil().exp2()
        assert torch.equal((after / step).round() * step, after) and not torch.equal(after, before)
        assert ((after - before).abs() <= step / 2).all() and (after.abs() <= 127 * step).all()


def test_weights_are_rounded_with_a_scale_per_output_and_inputs_with_a_scale_per_token(study):
    model = tiny_model()
    linear = model.model.layers[1].mlp.up_proj
    x = torch.randn(3, linear.in_features) * torch.tensor([[1.0], [100.0], [0.01]])
    weight, exact = linear.weight.detach().clone(), linear(x)
    with study.rounding.rounded_matrices(model):
        rounded = linear(x)

    def through(matrix):
        scale = matrix.abs().amax(-1, keepdim=True) / 448
        return (matrix / scale).to(torch.float8_e4m3fn).float() * scale

    assert torch.allclose(rounded, through(x) @ through(weight).T, rtol=1e-4, atol=1e-5)
    assert torch.equal(linear.weight, weight) and torch.equal(linear(x), exact)
    assert 0.001 < ((rounded - exact).norm(dim=-1) / exact.norm(dim=-1)).mean() < 0.1


def test_each_kind_of_rounding_is_measured_alone_and_with_sparse_attention(study, tmp_path):
    model, card = tiny_model(max_position_embeddings=CONTEXT), {"context": CONTEXT}
    model.save_pretrained(tmp_path)
    (tmp_path / "card.json").write_text(json.dumps(card))
    np.save(
        tmp_path / "held_out.npy",
        np.random.default_rng(0).integers(0, VOCAB, 3 * CONTEXT).astype(np.uint16),
    )
    everything = CONTEXT + 64
    result = study.fewer_bits.main(
        [
            str(tmp_path),
            "--out",
            str(tmp_path / "bits.json"),
            "--budgets",
            "64",
            str(everything),
            "--dense-layers",
            "--texts",
            "3",
            "--cycles",
            "8",
            "--prompt",
            "32",
            "--implementation",
            "reference",
        ]
    )
    rows = {(row["rounded"], row["budget"]): row["mean"][0] for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 1 + 5 + 6 + 6
    assert rows["nothing", everything] == 1 and rows["nothing", 64] < 0.95
    for name in ("cache", "matrices", "both", "int8 cache, matrices"):
        assert rows[name, None] == rows[name, everything] < rows["all to bfloat16", None] - 0.01
    assert rows["both", None] < rows["cache", None] < rows["int8 cache", None] < 1
    changes = {(row["rounded"], row["budget"]): row.get("p5_change") for row in result["rows"]}
    p5 = {(row["rounded"], row["budget"]): row["p5"][0] for row in result["rows"]}
    assert (
        changes["nothing", 64] is None and changes["both", None] is None
    )  # nothing to compare with
    change, low, high = changes["both", everything]
    assert low <= change <= high < 0 and abs(change - (p5["both", everything] - 1)) < 2e-4
    assert study.common.read_result(tmp_path / "bits.json")["model"] == card


def test_bfloat16_actors_lose_acceptance_to_bfloat16_and_to_additional_rounding(study, tmp_path):
    tiny_model(max_position_embeddings=CONTEXT).save_pretrained(tmp_path)
    (tmp_path / "card.json").write_text(json.dumps({"context": CONTEXT}))
    np.save(
        tmp_path / "held_out.npy",
        np.random.default_rng(0).integers(0, VOCAB, 3 * CONTEXT).astype(np.uint16),
    )
    everything = CONTEXT + 64
    result = study.fewer_bits.main(
        [
            str(tmp_path),
            "--out",
            str(tmp_path / "bits.json"),
            "--budgets",
            str(everything),
            "--dense-layers",
            "--texts",
            "3",
            "--cycles",
            "8",
            "--prompt",
            "32",
            "--implementation",
            "reference",
            "--bfloat16",
            "--rounded",
            "both",
            "nothing",
        ]
    )
    assert [row["rounded"] for row in result["rows"]] == [
        "all to bfloat16",
        "both",
        "nothing",
        "both",
    ]
    assert "p5_change" in result["rows"][-1]
    mean = {(row["rounded"], row["budget"]): row["mean"][0] for row in result["rows"]}
    assert set(mean) == {
        ("all to bfloat16", None),
        ("both", None),
        ("nothing", everything),
        ("both", everything),
    }
    assert abs(mean["nothing", everything] - mean["all to bfloat16", None]) < 1e-3
    assert mean["both", everything] < mean["nothing", everything] < 1
