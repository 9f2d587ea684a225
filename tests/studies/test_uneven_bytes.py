"""Test drafts whose bytes are distributed unevenly over layers, kv heads and pages: totals,
selections, calibration, and comparison.
"""

import json

import numpy as np
import pytest
import torch

from sparrow.attention.pages import page_scores, select_pages
from tests.conftest import VOCAB, tiny_model

MODULES = ("common", "acceptance", "drafts", "uneven_budgets", "uneven_bytes", "tables_text")
CONTEXT = 512
START = torch.tensor([[200, 301], [327, 440]])


@pytest.fixture(scope="module")
def sharp(study):
    """Return two texts and a model with 4 layers, 2 kv heads and 4 query heads, whose output
    changes if pages are skipped.
    """
    model = tiny_model(max_position_embeddings=CONTEXT)
    model.set_attn_implementation(study.drafts.NAME)
    return model, torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def calibration(study):
    """Return a calibration of 4 layers and 2 heads. The missed mass is largest in head 1 of layer
    2, and it halves with each additional unit.
    """
    mass = np.array([[0.3, 0.2], [0.1, 0.1], [0.2, 0.9], [0.02, 0.01]])
    lost, heads = np.array([0.01, 0.01, 0.01, 0.2]), np.array([[0, 1], [1, 0], [0, 1], [1, 1]])
    return study.uneven_budgets.Calibration(
        mass[..., None] * 0.5 ** np.arange(8), lost, heads, at=128
    )


def pages(study, model, ids, calibration, **options):
    """Return the pages ``[B, K, R, N]`` that each layer of a variant reads in each step."""
    uneven = study.uneven_bytes
    variant = uneven.Variant("", "", **{"budget": 192, **options})
    dense = study.drafts.DenseCache.of(model, ids, study.drafts.layout_of(variant.layout))
    groups = [uneven.landmarks(k.unflatten(2, (-1, 4 * variant.page_size))) for k in dense.keys]
    followers = variant.followers(4)
    made = uneven.Uneven(
        dense,
        START,
        3,
        variant.layout,
        variant=variant,
        groups=groups,
        top_k_LK=variant.top_k(calibration.tokens(variant.spread, variant.budget)),
        heads={
            layer: calibration.heads_LK[layer].tolist() if variant.matched else [0, 1]
            for layer in followers
        },
    )
    return [dict(made.kept) for _ in study.drafts.draft(model, ids, made)]


# --- budgets ---


@pytest.mark.parametrize("budget", [128, 192, 320])
def test_every_allocation_has_the_same_total_number_of_tokens(study, calibration, budget):
    ways = study.uneven_bytes.Spread.__args__
    shared = {spread: calibration.tokens(spread, budget) for spread in ways}
    for tokens in shared.values():
        assert (
            tokens.shape == (4, 2)
            and tokens.mean() == budget
            and tokens.min() >= 64
            and (tokens % 16 == 0).all()
        )
    assert (shared["even"] == budget).all()
    assert sum(len(np.unique(tokens)) > 1 for tokens in shared.values()) == len(ways) - 1
    by_head = ("heads of a layer", "heads of all layers", "weighted heads")
    assert all(
        (tokens[:, 0] == tokens[:, 1]).all() for way, tokens in shared.items() if way not in by_head
    )
    assert (shared["heads of a layer"].mean(1) == budget).all()
    # Head 1 of layer 2 leaves the most mass unread.
    assert shared["heads of all layers"].argmax() == 5
    assert shared["weighted heads"].argmax() in (6, 7)  # but unread mass costs the most in layer 3
    assert shared["layers"][:, 0].argmax() == 3


def test_allocations_match_a_hand_calculation(study):
    assert study.uneven_budgets.by_shares([1, 1, 1, 3], 192).tolist() == [
        64 + 96,
        64 + 80,
        64 + 80,
        64 + 256,
    ]


def test_bytes_read_match_a_hand_calculation(study):
    tokens, length = np.array([[128, 64], [320, 128]]), np.array([256, 512])

    def read(**options):
        return study.uneven_bytes.Variant("", "", 160, **options).tokens_read(tokens, length)

    pages = 160, np.mean([0.5 * n for n in (16, 16, 0, 16, 32, 32, 32, 32)])
    short = (320 - 256) / 8  # a head given 320 tokens can read only 256
    assert read() == pytest.approx(pages[0] - short + pages[1])
    assert read(page_size=8, precision="fp8") == pytest.approx(read())
    assert read(first_follower=1) == pytest.approx(
        pages[0] - short + np.mean([8, 8, 0, 0, 16, 16, 0, 0])
    )
    # top-k is 5, 1, 17 and 5 pages, so twice as many candidate pages lie in 3, 1, 9 and 3 groups.
    # The newest group is always added.
    first = [4, 4, 0, 4, 8, 8, 8, 8]
    second = [min(4 * 4, 16), 2 * 4, 0, 4 * 4, 4 * 4, 2 * 4, 32, 4 * 4]
    least = np.minimum(
        np.add(first, second), [16, 16, 0, 16, 32, 32, 32, 32]
    )  # no more than with one level
    assert read(candidates=2) == pytest.approx(pages[0] - short + 0.5 * least.mean())


# --- selections ---


def test_even_allocation_matches_the_schedule_of_the_other_studies(study, sharp, calibration):
    model, ids = sharp
    even = study.uneven_bytes.Variant("", "", 128)
    kept = study.acceptance.schedule(128)
    (found,) = study.uneven_bytes.measure(model, [even], calibration, ids, START)
    _, (known,) = study.acceptance.lossless(
        model, ids, START, study.uneven_bytes.DRAFTS, [(kept, 1)]
    )
    assert torch.equal(found, known) and found.mean() < 0.9


def test_each_head_reads_its_allocated_number_of_pages(study, sharp, calibration):
    tokens = calibration.tokens("weighted heads", 192)
    for size in (16, 4):
        for step in pages(study, *sharp, calibration, spread="weighted heads", page_size=size):
            for layer, kept in step.items():
                assert (kept.sum(-1)[0, :, 1] * size).tolist() == np.minimum(
                    tokens[layer], 304
                ).tolist()


def test_page_scores_match_a_hand_calculation(study):
    q = torch.tensor([[2.0, 0.0], [-2.0, 1.0]])[None, :, None]  # two heads of one group
    marks = torch.tensor([[3.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])[None, None]
    known = torch.tensor([[[True, True, False]]])

    def scores(how):
        return study.uneven_bytes.scored(how, q, marks, known)[0, 0, 0].tolist()

    assert scores("mean query") == [0.0, 0.5, -0.5]
    assert scores("best head") == [6.0, 1.0, 1.0]  # the larger of 6 and -6, 0 and 1, -2 and 1
    heads = torch.tensor([[6.0, 0.0], [-6.0, 1.0]]).div(2**0.5).exp()
    assert scores("softmax") == pytest.approx(
        [*(heads / heads.sum(-1, keepdim=True)).sum(0).tolist(), 0.0]
    )


def test_two_level_selection_with_every_group_equals_one_level_selection(study, sharp, calibration):
    one = pages(study, *sharp, calibration, budget=96)
    every = pages(study, *sharp, calibration, budget=96, candidates=100)
    some = pages(study, *sharp, calibration, budget=96, candidates=2)
    assert all(
        torch.equal(one[step][layer], every[step][layer]) for step in range(3) for layer in range(4)
    )
    assert not torch.equal(one[0][0], some[0][0]) and torch.equal(
        one[0][0].sum(-1), some[0][0].sum(-1)
    )


def test_pages_in_low_scoring_groups_are_skipped_except_in_the_newest_group(study, calibration):
    uneven = study.uneven_bytes
    variant = uneven.Variant("", "", 80, candidates=2)
    marks = torch.zeros(
        1, 1, 16, 1
    )  # 250 tokens fill pages 0 to 14; the group of pages 12 to 15 is not full
    marks[0, 0, 4:8, 0] = torch.tensor(
        [9.0, -9.0, -9.0, -9.0]
    )  # the best page of all, in the lowest-scoring group
    marks[0, 0, 8:12, 0] = torch.tensor([1.0, 2.0, 3.0, 1.0])
    marks[0, 0, 12:14, 0] = torch.tensor([2.5, -20.0])
    cache = study.drafts.DenseCache([marks], [marks], [marks])

    def kept(top_k):
        made = uneven.Uneven(
            cache,
            torch.tensor([[249]]),
            1,
            variant.layout,
            variant=variant,
            top_k_LK=np.array([[top_k]]),
            groups=[marks.unflatten(2, (4, 4)).mean(3)],
            heads={},
        )
        return made.select(0, torch.ones(1, 1, 1, 1))[0, 0, 0].nonzero().flatten().tolist()

    assert kept(2) == [0, 10, 12, 14, 15]
    assert 4 in kept(6)  # three groups plus the newest one are all groups


def test_follower_layers_reuse_the_pages_of_the_preceding_layer(study, sharp, calibration):
    alone = pages(study, *sharp, calibration)
    for step in pages(study, *sharp, calibration, first_follower=1):
        assert torch.equal(step[1], step[0]) and torch.equal(step[3], step[2])
    assert not torch.equal(alone[0][1], alone[0][0])
    for step in pages(study, *sharp, calibration, first_follower=1, matched=True):
        assert torch.equal(step[1], step[0][:, [1, 0]]) and torch.equal(step[3], step[2][:, [1, 1]])
    last = pages(study, *sharp, calibration, first_follower=2)[0]
    assert torch.equal(last[2], last[1]) and torch.equal(last[1], alone[0][1])
    assert not torch.equal(last[1], last[0]) and not torch.equal(last[3], last[2])


# --- calibration ---


def test_missed_mass_is_the_attention_outside_the_selection(study, sharp):
    """Only the first layer is checked, because its queries do not depend on earlier reads."""
    model, ids = sharp
    dense = study.uneven_bytes.SparsitySchedule.dense(dense_layers=())
    layout, left, other = study.drafts.layout_of(dense), [], []

    class Direct(study.uneven_budgets.Masses):
        def select(self, layer, q_BHRD):
            length = self.start_BR + self.step + 1
            scores = page_scores(q_BHRD, self.cache.landmarks[layer])
            self.chosen = select_pages(
                scores, length, torch.full_like(length, 5), layout
            )  # 128 tokens, including those that are always read
            return super().select(layer, q_BHRD)

        def weights(self, layer, q_BHRD, read_BKRT):
            weights = super().weights(layer, q_BHRD, read_BKRT)
            if layer == 0:
                kept = self.chosen.repeat_interleave(16, -1)[:, :, None]
                left.append(
                    weights[..., :CONTEXT].masked_fill(kept, 0).sum(-1).mean((0, 2, 3))
                    * START.numel()
                )
                self.first = self.chosen.float()
            if layer == 1:
                mass = weights[..., :CONTEXT].mean(2).unflatten(-1, (-1, 16)).sum(-1)
                other.append(torch.einsum("bkrn,bjrn->kj", mass, self.first))
            return weights

    cache = study.drafts.DenseCache.of(model, ids, layout)
    masses = Direct(cache, START, 3, dense, at=128)
    found = torch.stack(list(study.drafts.draft(model, ids, masses)), dim=2)
    torch.testing.assert_close(masses.missed[0][:, 1], sum(left), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(masses.caught[1], sum(other), rtol=1e-4, atol=1e-4)
    assert (masses.missed[0].diff(dim=-1) <= 1e-4).all() and 0.01 < masses.missed[0][
        :, 1
    ].mean() < 12
    assert masses.missed[0][:, -1].abs().max() < 1e-3
    direct, _ = study.acceptance.lossless(
        model, ids, START, 3, [(study.acceptance.schedule(128), 1)]
    )
    torch.testing.assert_close(found, direct, atol=1e-6, rtol=0)  # these cycles draft densely


def test_calibration_averages_over_drafts_and_gives_the_costliest_layer_the_most_tokens(
    study, sharp
):
    model, ids = sharp
    found = study.uneven_budgets.calibrate(model, ids, START, 128)
    assert found.missed_LKU.shape == (4, 2, CONTEXT // 64) and found.missed_LKU.max() < 1
    twice = study.uneven_budgets.calibrate(model, ids[[0, 1, 0, 1]], START[[0, 1, 0, 1]], 128)
    np.testing.assert_allclose(twice.missed_LKU, found.missed_LKU, atol=1e-6)
    np.testing.assert_allclose(twice.lost_L, found.lost_L, atol=1e-6)
    assert found.lost_L.argmax() == found.tokens("layers", 192)[:, 0].argmax()
    assert found.heads_LK[0].tolist() == [0, 1] and found.heads_LK.shape == (4, 2)


# --- comparison ---


def test_curves_are_compared_at_equal_bytes(study):
    uneven = study.uneven_bytes
    low, high, mine = (np.full((3, 2, 2), x) for x in (0.4, 0.8, 0.7))
    curve = [(100.0, low), (400.0, high)]
    assert uneven.between(200.0, [100.0, 400.0], [np.array(0.4), np.array(0.8)]) == pytest.approx(
        0.6
    )
    assert uneven.at_bytes(200.0, [(200.0, mine)], curve, True) == pytest.approx([0.1] * 3)
    assert uneven.at_bytes(200.0, curve, None, False) == pytest.approx([0.6] * 3)
    assert uneven.reaches(0.6, [100.0, 400.0], [0.4, 0.8]) == pytest.approx(200)
    assert uneven.reaches(0.9, [100.0, 400.0], [0.4, 0.8]) is None
    noisy = np.random.default_rng(0).random((30, 4, 4))
    paired = uneven.at_bytes(
        100.0, [(100.0, noisy + 0.01)], [(100.0, noisy), (400.0, noisy + 0.1)], True
    )
    assert paired == pytest.approx([0.01] * 3)  # both curves use the same resamples of texts


@pytest.mark.slow
def test_script_writes_the_file_that_the_tables_read(study, tmp_path, monkeypatch):
    path = tmp_path / "text_uneven.json"
    tiny_model(max_position_embeddings=CONTEXT).save_pretrained(tmp_path)
    (tmp_path / "card.json").write_text(json.dumps({"context": CONTEXT}))
    np.save(
        tmp_path / "held_out.npy",
        np.random.default_rng(0).integers(0, VOCAB, 6 * CONTEXT).astype(np.uint16),
    )
    counts = ["--texts", "3", "--calibration", "2", "--cycles", "2", "--even", "64", "128", "512"]
    study.uneven_bytes.main(
        [
            str(tmp_path),
            "--out",
            str(path),
            *counts,
            "--budgets",
            "128",
            "192",
            "--together",
            "128",
            "192",
        ]
    )
    found = study.common.read_result(path)
    assert str(tmp_path) not in path.read_text()
    rows = {(row["study"], row["how"], row["budget"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 3 + 2 * (4 + 3 + 2 + 2 + 3 + 6)
    assert (
        rows["even", "even", 512]["mean"] == [1, 1, 1] and rows["even", "even", 64]["mean"][0] < 0.9
    )
    assert all(np.mean(row["tokens"]) == row["budget"] for row in found["rows"] if "tokens" in row)
    assert found["even_at_target"] and all(len(of["p5_at_half"]) == 3 for of in found["targets"])

    monkeypatch.setattr(
        study.tables_text, "load", lambda name: study.common.read_result(tmp_path / f"{name}.json")
    )
    tables = {
        name: write()
        for name, write in study.tables_text.TABLES.items()
        if name.startswith("text uneven")
    }
    assert len(tables) == 8
    assert len(tables["text uneven even"].splitlines()) == 2 + 3
    assert len(tables["text uneven together"].splitlines()) == 2 + 12
    assert len(tables["text uneven target"].splitlines()) == 2 + 1 + 4 + 3 + 2 + 2 + 3 + 6
