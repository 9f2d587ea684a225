"""Test the search with simulated engines whose acceptance tail is known."""

import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from sparrow.calibrate import Acceptance, calibrate
from sparrow.calibrate.run import calibrate_engine
from sparrow.calibrate.trajectories import Trajectories
from sparrow.engines.measure import measure
from sparrow.errors import ConfigError
from sparrow.mismatch.tokens import pool
from sparrow.rollout import Rollout, Sampling, Scores
from sparrow.schedule import ALL_PAGES, SparsitySchedule

LAYOUT = SparsitySchedule.dense(bin_tokens=160, dense_layers=(0,))


def world(lengths, needed, calls=None, noise=0.0):
    """Simulate acceptance that drops by 0.01 for each page by which top_k is below
    ``needed(bin)``. Except for noise, all tokens in a bin have the same acceptance.
    """

    def measure(schedule: SparsitySchedule) -> Acceptance:
        if calls is not None:
            calls.append(schedule.top_k)
        rng = np.random.default_rng(1)
        position = np.concatenate([np.arange(n) for n in lengths])
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        short = np.maximum(needed(position // 160) - schedule.pages(position), 0)
        alpha = np.clip(
            0.95 - 0.01 * short + noise * rng.standard_normal(len(lengths))[sequence], 0, 1
        )
        return Acceptance(alpha, position, sequence)

    return measure


def fixed(*budgets):
    return [LAYOUT.replace(top_k=(k,)) for k in budgets]


def test_each_bin_gets_its_smallest_sufficient_budget_by_bisection_and_interpolation():
    calls: list = []
    # p5 is 0.95 - 0.01 * shortfall: the target 0.90 allows a shortfall of 5 pages.
    found = calibrate(
        world([640] * 30, lambda b: 10 + 8 * b, calls), fixed(2, 40), 0.8999, refine=6
    )
    assert found.schedule.top_k == (5, 13, 21, 29, ALL_PAGES)
    assert [b.p5 for b in found.bins] == pytest.approx([0.90] * 4, abs=0.003)
    assert not any(b.borrowed for b in found.bins)
    assert (
        len(calls) == len(set(calls)) == 6
    )  # every pass bisects all bins; narrow brackets are not bisected
    assert found.schedule.provenance["measured_up_to"] == 640 and found.schedule.dense_layers == (
        0,
    )


def test_p5_is_interpolated_on_a_log_scale_of_the_budget():
    found = calibrate(world([320] * 30, lambda b: 20 + 0 * b), fixed(4, 12, 24), 0.8999, refine=0)
    # p5 is 0.87 with 12 pages and 0.95 with 24 (or any number from 20 on). Interpolation gives
    # 13 * (25 / 13) ** (3 / 8) - 1 = 15.6 pages, although 15 would be enough.
    p5 = 0.87 + 0.08 * math.log(17 / 13) / math.log(25 / 13)
    assert found.schedule.top_k == (16, 16, ALL_PAGES) and found.bins[0].p5 == pytest.approx(p5)
    assert (
        calibrate(world([320] * 30, lambda b: 20 + 0 * b), fixed(15, 24), 0.8999).schedule.top_k[0]
        == 15
    )


def test_larger_budgets_are_tried_if_no_given_budget_suffices():
    calls: list = []
    found = calibrate(world([640] * 30, lambda b: 8 + 10 * b, calls), fixed(2, 5), 0.8999, refine=6)
    assert calls[2:5] == [(3, 11, 11, 11), (3, 23, 23, 23), (3, 17, 17, 47)]
    assert found.schedule.top_k == (3, 13, 23, 33, ALL_PAGES)
    calls.clear()
    found = calibrate(world([640] * 30, lambda b: 900 + 0 * b, calls), fixed(2, 5), 0.9, refine=9)
    assert found.schedule.is_dense and calls[-1] == (
        11,
        23,
        47,
        47,
    )  # 47 pages of 16 hold all 640 tokens


def test_smaller_budgets_down_to_the_minimum_are_tried_if_all_given_budgets_suffice():
    calls: list = []
    found = calibrate(world([640] * 30, lambda b: 20 + 4 * b, calls), fixed(40), 0.8999, refine=6)
    assert found.schedule.top_k == (15, 19, 24, 27, ALL_PAGES) and len(calls) < 7
    found = calibrate(
        world([640] * 30, lambda b: 20 + 4 * b), fixed(40), 0.8999, fewest=20, refine=6
    )
    assert found.schedule.top_k == (20, 20, 24, 27, ALL_PAGES)


def test_budgets_below_that_of_a_shorter_bin_are_not_tried():
    calls: list = []
    found = calibrate(
        world([320] * 30, lambda b: np.where(b == 0, 45, 15), calls),
        fixed(30, 42),
        0.8999,
        refine=6,
    )
    assert found.schedule.top_k == (40, 40, ALL_PAGES) and len(calls) == 2


def test_bins_that_miss_the_target_become_dense_and_the_schedule_stays_monotonic():
    found = calibrate(world([480] * 30, lambda b: np.where(b == 1, 500, 10)), fixed(4, 32), 0.9)
    assert found.schedule.top_k[0] <= 32 and found.schedule.top_k[1:] == (ALL_PAGES,) * 3
    assert math.isnan(found.bins[1].p5)


def test_target_applies_to_the_lower_confidence_limit_of_p5():
    quiet = calibrate(
        world([320] * 30, lambda b: 20 + 0 * b), fixed(*range(0, 40, 2)), 0.9, refine=0
    )
    noisy = calibrate(
        world([320] * 30, lambda b: 20 + 0 * b, noise=0.01), fixed(*range(0, 40, 2)), 0.9, refine=0
    )
    chosen = noisy.bins[0]
    assert chosen.lower >= 0.9 and noisy.schedule.top_k[0] >= quiet.schedule.top_k[0]
    below = noisy.curves[(chosen.top_k - 2,) * 2][0]
    assert below.lower < 0.9 <= chosen.lower


def test_bins_with_few_tokens_use_one_and_a_half_times_the_previous_budget():
    lengths = [320] * 30 + [322] * 30  # 60 tokens from 30 sequences
    found = calibrate(
        world(lengths, lambda b: 20 + 0 * b), fixed(10, 14, 18, 22, 26), 0.8999, refine=0
    )
    assert [b.borrowed for b in found.bins] == [False, False, True]
    assert found.schedule.top_k == (15, 15, 23, ALL_PAGES)
    assert SparsitySchedule.from_json(found.schedule.to_json()).top_k == found.schedule.top_k
    assert found.bins[2].n_sequences == 60


def test_too_little_data_or_no_budgets_raises_an_error():
    with pytest.raises(
        ConfigError, match=r"960 tokens from 3 sequences .* needs at least 400 tokens from 20"
    ):
        calibrate(world([320] * 3, lambda b: 20 + 0 * b), fixed(4), 0.9)
    with pytest.raises(ConfigError, match="at least one budget"):
        calibrate(world([320] * 30, lambda b: 20 + 0 * b), fixed(), 0.9)


def test_search_that_starts_from_a_schedule_adjusts_every_bin():
    found = calibrate(world([640] * 30, lambda b: 10 + 8 * b), fixed(2, 40), 0.8999, refine=6)
    assert found.schedule.top_k == (5, 13, 21, 29, ALL_PAGES)
    calls: list = []
    again = calibrate(world([640] * 30, lambda b: 8 + 10 * b, calls), [found.schedule], 0.8999)
    # Each bin tries a quarter fewer pages if its budget is enough, and a third more if it is not.
    # If a quarter fewer are enough, it tries even fewer.
    assert calls == [found.schedule.top_k, (3, 9, 28, 39), (2, 13, 28, 39)]
    # In the last bin, 33 would be enough, but interpolation predicts 34.
    assert again.schedule.top_k == (3, 13, 23, 34, ALL_PAGES)
    # Lengths beyond the schedule were sampled densely. The search tries the previous bin's budget.
    calls.clear()
    shorter = LAYOUT.replace(top_k=(9, 9, 9, ALL_PAGES))
    longer = calibrate(world([640] * 30, lambda b: 12 + 0 * b, calls), [shorter], 0.8999)
    assert calls[1] == (6, 6, 6, 6) and longer.schedule.top_k == (7, 7, 7, 7, ALL_PAGES)


def early(count, tokens):
    """Simulate thirty responses that start at position 160, and ``count`` responses that start at
    position ``160 - tokens``.
    """

    def measure(schedule):
        found = world([480] * 30 + [480] * count, lambda b: 20 * (b > 0))(schedule)
        seen = found.position >= np.where(found.sequence < 30, 160, 160 - tokens)
        return Acceptance(*(x[seen] for x in found))

    return measure


def test_leading_bins_with_too_few_tokens_are_merged():
    for world_ in (
        early(5, 100),
        early(30, 10),
    ):  # too few sequences, and too few tokens: 300 where 400 are needed
        found = calibrate(world_, fixed(10, 15, 25), 0.8999, refine=0)
        assert [(b.start, b.end, b.top_k, b.borrowed) for b in found.bins] == [
            (0, 320, 15, False),
            (320, 480, 15, False),
        ]
        assert found.schedule.top_k == (15, 15, 15, ALL_PAGES)
    found = calibrate(early(30, 20), fixed(10, 15, 25), 0.8999, refine=0)
    assert [b.start for b in found.bins] == [0, 160, 320] and found.schedule.top_k == (
        10,
        15,
        15,
        ALL_PAGES,
    )


def test_gap_in_the_sampled_lengths_does_not_shift_later_bins():
    def gap(needed, calls):
        def measure(schedule):
            found = world([320] * 30 + [960] * 30, needed, calls)(schedule)
            # Half of the sequences end at 320 and the others start at 640. No length between is sampled.
            seen = (found.sequence < 30) | (found.position >= 640)
            return Acceptance(*(x[seen] for x in found))

        return measure

    calls: list = []
    found = calibrate(gap(lambda b: 10 + 8 * b, calls), fixed(2, 60), 0.8999, refine=6)
    assert [(b.start, b.top_k) for b in found.bins] == [
        (0, 5),
        (160, 13),
        (640, 38),
        (800, 45),
    ]  # 37 would be sufficient
    assert found.schedule.top_k == (5, 13, 38, 38, 38, 45, ALL_PAGES)
    assert len(calls) == len(set(calls)), "no pass should repeat an earlier one"


@pytest.mark.slow
def test_calibration_meets_its_target_on_fresh_rollouts_and_can_be_resumed(tmp_path):
    import torch

    from sparrow.engines.hf import HFEngine
    from tests.conftest import VOCAB, tiny_model

    layout = SparsitySchedule.dense(bin_tokens=64, page_size=4, dense_layers=(0,))
    model = tiny_model(initializer_range=0.2)
    engine = HFEngine(model, layout, eos_ids=[])
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, VOCAB, (40 + i % 9,), generator=generator).tolist() for i in range(24)
    ]
    sampling = Sampling(max_new_tokens=100, top_n=VOCAB)
    phases: list[str] = []
    options = dict(
        budgets=(2, 8, 32),
        target=0.8,
        layout=layout,
        refine=2,
        on_policy=1,
        provenance={"model": "tiny"},
    )
    found = calibrate_engine(
        engine, engine, prompts, sampling, tmp_path / "work", listener=phases.append, **options
    )
    assert 0 < found.schedule.top_k[0] < 32 and found.schedule.top_k[-1] == ALL_PAGES
    fresh = pool(
        measure(engine, engine, prompts, Sampling(100, top_n=VOCAB, seed=9), found.schedule), 64
    )
    assert all(b.lower_bound > 0.8 - 0.03 for b in fresh.bins)
    sparser = found.schedule.replace(top_k=tuple(k // 3 for k in found.schedule.top_k[:-1]))
    assert (
        min(
            b.lower_bound
            for b in pool(measure(engine, engine, prompts, sampling, sparser), 64).bins
        )
        < 0.8
    )
    assert found.bins[0].n_sequences == 24 and found.schedule.provenance["sampled_under"] != ["all"]
    assert phases[:2] == ["round 0: sampling 24 responses", "round 0: scoring with 2 pages"]
    assert sum("sampling" in phase for phase in phases) == 2 and phases[-1].startswith(
        "round 1: scoring with"
    )
    # Every round also scores its responses densely, but not with the schedule that they were sampled
    # with. In the first round, that schedule has the largest budget.
    assert len(list((tmp_path / "work").glob("scores-*"))) == sum(
        "scoring" in phase for phase in phases
    )
    with pytest.raises(ConfigError, match="raise refine"):
        calibrate_engine(engine, engine, prompts, sampling, tmp_path, **dict(options, refine=0))
    # A second call finds everything on disk; responses to different requests are not reused.
    other = dict(options, budgets=(8,), refine=0, on_policy=0, target=0.5)
    calibrate_engine(
        engine, engine, prompts, Sampling(100, top_n=VOCAB, seed=3), tmp_path / "work", **other
    )
    assert len(list((tmp_path / "work").glob("rollouts-*.npz"))) == 3
    engine.score = engine.generate = None  # type: ignore[assignment, method-assign]
    again = calibrate_engine(engine, engine, prompts, sampling, tmp_path / "work", **options)
    assert again.bins == found.bins


@pytest.mark.slow
def test_samples_from_different_weights_are_not_reused(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    from sparrow.cli import main

    model, out = tmp_path / "model", tmp_path / "schedule.json"
    shutil.copytree(checkpoint, model)
    options = "--task trace:lines=4 --count 24 --max-new-tokens 20 --budgets 1 --refine 0 --on-policy 0 --target 0.001"
    command = ["calibrate", "--model", str(model), "--out", str(out), *options.split()]

    def calibrated():
        main(command)
        return SparsitySchedule.from_json(out.read_text()).provenance["bins"], len(
            list(work.glob("rollouts-*"))
        )

    work = tmp_path / "schedule.json.work"
    first, again = calibrated(), calibrated()
    assert first == again and first[1] == 1
    weights = load_file(model / "model.safetensors")
    # Training would change the weights like this without changing the model's name.
    weights["model.norm.weight"] = 0.1 * weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    trained, files = calibrated()
    assert files == 2 and trained[0]["p5"] != first[0][0]["p5"]


@pytest.mark.slow
def test_failed_search_reports_whether_lists_were_too_short_or_budgets_too_small(tmp_path, caplog):
    from sparrow.engines.hf import HFEngine
    from tests.conftest import VOCAB, tiny_model

    layout = SparsitySchedule.dense(bin_tokens=64, page_size=4, dense_layers=(0,))
    engine = HFEngine(tiny_model(initializer_range=0.2), layout, eos_ids=[])
    prompts = [[1 + i % 7] * 40 for i in range(24)]
    options = dict(budgets=(2,), layout=layout, refine=0, on_policy=0, provenance={})

    def calibrated(top_n, target, **more):
        sampling = Sampling(40, top_n=top_n)
        return calibrate_engine(
            engine, engine, prompts, sampling, tmp_path, target=target, **options, **more
        )

    short = (
        r"lists of 2 tokens cover only 0\.\d+ of the probability .* longer lists \(--top-n\), "
        "or lower"
    )
    with pytest.raises(ConfigError, match=short):
        calibrated(2, 0.9)
    few = r"no budget up to 2 pages reaches p5 0.999 in any length bin: the best lower limit was 0\.\d+; try larger"
    with pytest.raises(ConfigError, match=few):
        calibrated(VOCAB, 0.999)
    assert calibrated(VOCAB, 0.05).schedule.top_k[0] == 2 and not caplog.records
    # Longer lists are requested until they show whether p5 reaches the target.
    assert calibrated(2, 0.9, lengthen=True).schedule.top_k == calibrated(VOCAB, 0.9).schedule.top_k
    assert (
        caplog.messages[0]
        == "lists of 2 tokens are too short to show whether p5 reaches 0.9; sampling again with lists of 8"
    )


def test_engine_sleeps_while_the_scorer_works(tmp_path):
    calls = []
    ids, logprobs = np.array([[3], [5]], np.int32), np.log(np.array([[0.5], [0.8]], np.float32))
    rollout = Rollout([1, 2], np.array([3, 5]), logprobs[:, 0], ids, logprobs, "length")

    class Sampler:
        def __getattr__(self, method):
            return lambda *arguments: calls.append(method) or [rollout]

    class Judge:
        def score(self, rollouts, schedule, temperature):
            calls.append("score")
            assert len(rollouts) == 1 and schedule.is_dense and temperature == 0.7
            return [
                Scores(
                    logprobs[:, 0],
                    np.log(np.array([[0.25], [0.9]], np.float32)),
                    np.zeros(2, np.float32),
                )
            ]

    (found,) = measure(Sampler(), Judge(), [[1, 2]], Sampling(2, 0.7), SparsitySchedule.fixed(1))
    assert " ".join(calls) == "counters wake set_schedule generate sleep score"
    np.testing.assert_allclose(found.lower, [0.25, 0.8], rtol=1e-6)

    def resumed():
        calls.clear()
        Trajectories(Sampler(), Judge(), [[1, 2]], Sampling(2, 0.7), tmp_path)
        return " ".join(calls)

    assert resumed() == "wake set_schedule generate sleep score"
    # An interrupted calibration that has sampled, but not yet scored
    for scores in tmp_path.glob("scores-*.npy"):
        scores.unlink()
    assert resumed() == "sleep score"


@pytest.mark.parametrize("kind", ["rollouts-*.npz", "scores-*.npy"])
@pytest.mark.parametrize("left", [0, 0.5, 0.95], ids=["empty", "half", "almost whole"])
def test_damaged_file_is_reported_with_its_remedy(tmp_path, kind, left):
    logprobs = np.zeros((9, 4), np.float32)
    rollout = Rollout(
        [1, 2], np.arange(9), logprobs[:, 0], logprobs.astype(np.int32), logprobs, "length"
    )
    engine = SimpleNamespace(
        wake=lambda: None,
        set_schedule=lambda schedule: None,
        generate=lambda prompts, sampling: [rollout],
        sleep=lambda: None,
        score=lambda *_: [Scores(logprobs[:, 0], logprobs, logprobs[:, 0])],
    )

    def stored():
        Trajectories(engine, engine, [[1, 2]], Sampling(9), tmp_path)
        return sorted(path.name for path in tmp_path.iterdir())

    names = stored()
    (path,) = tmp_path.glob(kind)
    contents = path.read_bytes()
    path.write_bytes(contents[: int(left * len(contents))])
    with pytest.raises(ConfigError, match=f"cannot read {path}, .*; delete it, and run the same"):
        stored()
    path.unlink()
    assert stored() == names
    assert path.read_bytes() == contents


def test_schedule_is_written_even_if_stdout_is_closed(tmp_path, monkeypatch):
    from sparrow.calibrate import run
    from sparrow.cli import terminal
    from sparrow.cli.commands.calibrate import Calibrate

    def closed(*_):
        raise BrokenPipeError

    found = SimpleNamespace(schedule=SparsitySchedule.fixed(7))
    monkeypatch.setattr(run, "calibrate_engine", lambda *_, **__: found)
    monkeypatch.setattr(terminal, "print_calibration", closed)
    out = tmp_path / "schedule.json"
    with pytest.raises(BrokenPipeError):
        Calibrate(model="reasoner", task="trace:lines=4", out=str(out)).run()
    assert SparsitySchedule.load(out) == found.schedule


def test_calibration_can_be_plotted_from_its_file(tmp_path):
    from sparrow.report import draw_calibration

    found = calibrate(world([640] * 30, lambda b: 10 + 8 * b), fixed(2, 20, 40), 0.85)
    path = tmp_path / "schedule.json"
    path.write_text(found.schedule.to_json())
    picture = draw_calibration(path).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    (tmp_path / "plain.json").write_text(SparsitySchedule.fixed(2).to_json())
    with pytest.raises(ConfigError, match="contains no measurements"):
        draw_calibration(tmp_path / "plain.json")


def test_relative_target_is_drawn_separately_for_each_bin(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    from sparrow.report import draw_calibration

    drawn = []
    monkeypatch.setattr(
        Axes,
        "hlines",
        lambda _, y, start, end, **style: drawn.extend(zip(y, start, end, strict=True)),
    )
    schedule = calibrate(world([640] * 30, lambda b: 10 + 8 * b), fixed(2, 20, 40), 0.85).schedule
    evidence = {name: value for name, value in schedule.provenance.items() if name != "target"}
    ceilings = [{**b, "ceiling": 0.9 if b["start"] else 1.0} for b in evidence["bins"]]
    path = tmp_path / "schedule.json"
    path.write_text(
        schedule.replace(
            provenance={**evidence, "bins": ceilings, "relative_target": 0.85}
        ).to_json()
    )
    assert draw_calibration(path).read_bytes().startswith(b"\x89PNG")
    levels = [0.85 if b["start"] == 0 else 1 - math.hypot(0.15, 0.1) for b in ceilings]
    expected = [
        (-math.log10(1 - level), b["start"], b["end"])
        for level, b in zip(levels, ceilings, strict=True)
    ]
    np.testing.assert_allclose(drawn, expected)


class TwoPrograms:
    """A stand-in for a scorer, or for a sampler with noisy logits. The logits depend only on the
    prompt and the position. The fewer pages are read, the more they change. Lists contain all
    ``V`` tokens. All schedules share the same noise. With ``anew``, each schedule draws its own
    noise, as if sums were rounded differently.
    """

    V, T = 16, 320

    def __init__(self, noise: float, anew: bool = False) -> None:
        self.noise, self.anew, self.schedule = noise, anew, SparsitySchedule.dense()

    def logprobs(self, prompt, schedule, noise):
        rng = np.random.default_rng(prompt)
        logits, off, wrong = rng.standard_normal((3, self.T, self.V))
        pages = schedule.pages(len(prompt) + np.arange(self.T))[:, None]
        if self.anew:
            wrong = np.random.default_rng([*prompt, *schedule.top_k]).standard_normal(
                (self.T, self.V)
            )
        logits = 3 * logits + noise * wrong + 1 / np.sqrt(1 + pages) * off
        return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)

    def generate(self, prompts, sampling):
        rollouts = []
        for prompt, seed in zip(prompts, sampling.request_seeds(len(prompts)), strict=True):
            logq = self.logprobs(prompt, self.schedule, self.noise)
            tokens = (logq + np.random.default_rng(seed).gumbel(size=logq.shape)).argmax(1)
            ids = np.tile(np.arange(self.V), (self.T, 1)).astype(np.int32)
            own = np.take_along_axis(logq, tokens[:, None], 1)[:, 0].astype(np.float32)
            rollouts.append(Rollout(prompt, tokens, own, ids, logq.astype(np.float32), "length"))
        return rollouts

    def score(self, rollouts, schedule, temperature):
        tops = [self.logprobs(r.prompt_ids, schedule, 0.0).astype(np.float32) for r in rollouts]
        return [Scores(r.logprobs, top, r.logprobs) for r, top in zip(rollouts, tops, strict=True)]

    def set_schedule(self, schedule):
        self.schedule = schedule

    def sleep(self):
        pass

    wake = counters = sleep


@pytest.mark.slow
def test_resumed_calibration_reuses_all_finished_work(tmp_path):
    engine, scorer, prompts = (
        TwoPrograms(0.092),
        TwoPrograms(0.0),
        [[i, 1, 2, 3] for i in range(24)],
    )
    options = dict(
        budgets=(4, 256),
        target=0.85,
        layout=SparsitySchedule.dense(bin_tokens=160, page_size=1),
        refine=1,
        on_policy=1,
    )
    sampling = Sampling(320, top_n=16)
    first = calibrate_engine(
        engine, scorer, prompts, sampling, tmp_path, **options, provenance={"date": "1 May"}
    )
    assert first.schedule.provenance["sampled_under"] != ["all"]
    engine.generate = scorer.score = None  # type: ignore[assignment, method-assign]
    again = calibrate_engine(
        engine, scorer, prompts, sampling, tmp_path, **options, provenance={"date": "2 May"}
    )
    assert again.bins == first.bins


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True], ids=["same-noise", "noise-anew"])
@pytest.mark.parametrize(("noise", "ceiling", "target"), [(0.092, 0.95, 0.90), (0.185, 0.90, 0.86)])
def test_target_is_met_even_if_sampler_and_scorer_round_differently(
    tmp_path, noise, ceiling, target, anew
):
    engine, scorer = TwoPrograms(noise, anew), TwoPrograms(0.0)
    sampling, prompts = Sampling(320, top_n=16), [[i, 1, 2, 3] for i in range(24)]
    dense = SparsitySchedule.dense(bin_tokens=160, page_size=1)

    def tail(schedule, prompts):
        return np.array(
            [
                b.lower_bound
                for b in pool(measure(engine, scorer, prompts, sampling, schedule), 160).bins
            ]
        )

    assert abs(tail(dense, prompts)[:2] - ceiling).max() < 0.01
    found = calibrate_engine(
        engine,
        scorer,
        prompts,
        sampling,
        tmp_path,
        budgets=(4, 32, 256),
        target=target,
        layout=dense,
        refine=3,
        on_policy=1,
        provenance={},
    )
    assert 4 < found.schedule.top_k[0] < 256
    fresh = tail(found.schedule, [[i, 1, 2, 4] for i in range(24)])[:2]
    assert (fresh > target - 0.004).all() and (fresh < target + 0.02).all()
    # The ceiling is reported with each chosen bin.
    assert all(
        abs(b.ceiling - ceiling) < 0.015 and b.ceiling_lower < b.ceiling < b.ceiling_upper
        for b in found.bins
    )
    # The reported p5 describes the sampler, even for schedules that it never sampled with.
    trajectories = Trajectories(
        engine, scorer, prompts, sampling, tmp_path / "one", dense.replace(top_k=(256,))
    )
    for pages in (4, 32, 256):
        schedule = dense.replace(top_k=(pages,))
        said = [b.lower_bound for b in pool(trajectories.acceptance(schedule), 160).bins]
        assert abs(said - tail(schedule, prompts))[:2].max() < (0.01 if anew else 1e-5)
    quiet, relative = TwoPrograms(0.0), dict(target=0.9, relative=True)
    pages = []
    for name, sampler in (("quiet", quiet), ("noisy", engine)):
        schedule = calibrate_engine(
            sampler,
            scorer,
            prompts,
            sampling,
            tmp_path / name,
            budgets=(4, 32, 256),
            layout=dense,
            refine=4,
            on_policy=0,
            provenance={},
            **relative,
        ).schedule
        assert schedule.provenance["relative_target"] == 0.9 and "target" not in schedule.provenance
        pages.append(schedule.top_k[0])
    assert pages[1] == pytest.approx(pages[0], rel=0.1)
    with pytest.raises(
        ConfigError, match=r"relative tau 0\.999 lets p5 fall to 0\.\d+, which is not significantly"
    ):
        calibrate_engine(
            engine,
            scorer,
            prompts,
            sampling,
            tmp_path,
            budgets=(256,),
            target=0.999,
            layout=dense,
            refine=0,
            on_policy=0,
            provenance={},
            relative=True,
        )
    beyond = r"dense rollouts have p5 0\.\d+ with this engine .* no budget can be shown to reach p5 0\.98 there"
    with pytest.raises(ConfigError, match=beyond):
        calibrate_engine(
            engine,
            scorer,
            prompts,
            sampling,
            tmp_path,
            budgets=(256,),
            target=0.98,
            layout=dense,
            refine=0,
            on_policy=0,
            provenance={},
        )
