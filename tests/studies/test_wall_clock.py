"""Test the study of reward against wall-clock time on a small scale: a widened model computes the
same outputs, and each arm runs in vLLM.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_model
from tests.vllm.tiny_vllm import discoverable, on_v2

ROOT = Path(__file__).parents[2]
REQUIRED = ("vllm.version",)
MODULES = ("common", "corpus", "task", "wall_clock", "wall_clock_figure", "wall_clock_summary")
FOLDERS = ("benchmarks", "studies/common", "studies/reasoner", "studies/text")


@pytest.fixture(scope="module")
def checkpoint(study, tmp_path_factory):
    """Save a tiny random model and problems made from this package's sources. Return the folder."""
    folder = tmp_path_factory.mktemp("text")
    train, held = study.corpus.split(study.corpus.folders([ROOT / "sparrow"], ".py"), ["attention"])
    tokenizer = study.corpus.train_tokenizer(list(study.corpus.texts(train, set()))[:30], 400)
    tokenizer.save_pretrained(folder)
    tiny_model(vocab_size=400, eos_token_id=0, max_position_embeddings=2048).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study.task, "FEWEST_NAMES", 3)
        study.task.write_problems(folder, tokenizer, train, held, tokens=400)
    return folder


@pytest.mark.parametrize("copies", [1, 2, 8])
def test_a_widened_model_computes_the_same_outputs(study, copies):
    model = tiny_model()
    wide = study.wall_clock.widened(model, copies)
    heads = wide.model.layers[0].self_attn.k_proj.weight.shape[0]
    assert heads == copies * model.model.layers[0].self_attn.k_proj.weight.shape[0]
    assert study.wall_clock.token_bytes(wide) == copies * study.wall_clock.token_bytes(model)
    ids = torch.randint(0, model.config.vocab_size, (2, 30))
    with torch.no_grad():
        assert (wide.double()(ids).logits - model.double()(ids).logits).abs().max() < 1e-9
    with pytest.raises(ValueError, match="power of 2, got 3"):
        study.wall_clock.widened(model, 3)


def test_kernels_are_classified_by_name(study):
    kernels = [
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<x> > >",
            4000.0,
        ),
        ("attend", 3000.0),
        ("plan_kernel", 500.0),
        ("store_kernel", 500.0),
        ("nvjet_sm90_tst_128x64_64x8_4x1_v_bz_TNT", 1000.0),
        ("triton_red_fused_attended_0", 1000.0),
    ]
    assert study.wall_clock.breakdown(kernels, 4.0) == {"attention_ms": 2.0, "other_ms": 0.5}


def run_arm(checkpoint, folder, arm, steps, tokens, seconds=480, ended="done"):
    """Return the log rows and the profile of a small run. It has its own process, because
    accelerate allows only one precision per process.
    """
    arguments = [str(checkpoint), str(folder), arm, str(steps), str(tokens), str(seconds)]
    path = on_v2(folder) if arm == "lossless" else discoverable(folder)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, str(ROOT)])}
    command = [sys.executable, "-m", "tests.studies.test_wall_clock", *arguments]
    subprocess.run(command, check=True, env=environment, cwd=ROOT, timeout=600)
    rows = [json.loads(line) for line in (folder / f"{arm}-0.jsonl").read_text().splitlines()]
    assert rows[-1] == {"ended": ended}, (folder / f"{arm}-0.error.txt").read_text()
    return rows, json.loads((folder / f"{arm}-0.profile.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["dense", "p86"])
def test_an_arm_runs_end_to_end(checkpoint, tmp_path, arm):
    rows, timed = run_arm(checkpoint, tmp_path, arm, steps=2, tokens=200)
    assert [row["step"] for row in rows if "held_out" in row] == [0, 2]
    steps = [row for row in rows if "reward" in row]
    assert len(steps) == 2 and all(len(row["seconds"]) == 4 for row in steps)
    # In bfloat16, a dense actor matches the policy up to rounding, but the sparse actor does not.
    assert all((row["mean"] > 0.97) == (arm == "dense") for row in steps)
    assert 90 < timed["length"] < 200 and timed["clock_ms"] > 0 and timed["tokens_per_step"] == 1


@pytest.mark.slow
def test_an_arm_that_reaches_its_time_limit_is_evaluated_at_its_last_step(checkpoint, tmp_path):
    rows, _ = run_arm(
        checkpoint, tmp_path, "p86", steps=3, tokens=100, seconds=0, ended="time is over"
    )
    assert [row["step"] for row in rows if "held_out" in row] == [0, 1]
    assert [row["step"] for row in rows if "reward" in row] == [1]


@pytest.mark.slow
def test_the_lossless_arm_runs_end_to_end(checkpoint, tmp_path):
    rows, timed = run_arm(checkpoint, tmp_path, "lossless", steps=1, tokens=80)
    (step,) = (row for row in rows if "reward" in row)
    assert (
        step["mean"] > 0.97 and timed["tokens_per_step"] >= 1
    )  # the number of drafts is still being chosen
    assert (
        rows[0]["top_k"] == step["top_k"] == [3]
    )  # training also uses the requested draft schedule
    assert step["tokens_per_cycle"] >= 1


def test_summary_numbers_match_a_hand_calculation(study, tmp_path):
    def log(name, rollout, profile):
        start = {"arm": name, "seed": 0, "top_k": ["all"], "device": "GPU", "token_bytes": 4}
        start["options"] = {"checkpoint": "here", "out": "there", "samples": 2}
        rows = [start, {"step": 0, "held_out": {"policy": 0.1}}]
        rows += [
            {"step": i, "reward": 0.1 * i, "length": 10.0, "seconds": [rollout, 1, 2, 1]}
            for i in range(1, 5)
        ]
        if name == "lossless":
            rows[2]["tokens_per_cycle"], rows[3]["tokens_per_cycle"] = 4.0, 6.0
        rows[-1]["held_out"] = {"policy": 0.3}
        rows[2]["seconds"] = [100, 0, 0, 0]  # the first step compiles
        rows.append({"ended": "time is over"})
        (tmp_path / f"{name}-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"{name}-0.profile.json").write_text(json.dumps(profile))

    log("p86", 6, {"clock_ms": 5.0, "attention_ms": 2.0, "other_ms": 1.0})
    log("dense", 16, {"clock_ms": 15.0, "attention_ms": 10.0, "other_ms": 1.0})
    log("lossless", 4, {"clock_ms": 4.0, "attention_ms": 2.0, "other_ms": 1.5})
    (tmp_path / "card.json").write_text('{"parameters": 5}')
    summary, out = study.wall_clock_summary, tmp_path / "out.json"
    summary.main(summary.Options(tmp_path, tmp_path, out))
    result = study.common.read_result(out)
    dense, lossless, lossy = result["rows"]
    assert [row["arm"] for row in result["rows"]] == ["dense", "lossless", "p86"]
    assert result["models"] == [{"parameters": 5}] and result["arms"][0]["options"] == {
        "samples": 2
    }  # local paths are left out
    assert dense["reward"] == pytest.approx(0.25) and dense["minutes"] == pytest.approx(160 / 60)
    assert [run["tokens_per_cycle"] for run in result["arms"]] == [None, 5.0, None]
    assert lossy["rollout_speedup"] == pytest.approx(16 / 6) and lossless["rollout_speedup"] == 4
    assert dense["rollout_share"] == pytest.approx([0.8] * 3) and lossy[
        "rollout_share"
    ] == pytest.approx([0.6] * 3)
    assert dense["attention_share"] == pytest.approx(2 / 3)
    assert lossy["saved_by_attention"] == pytest.approx(0.8) and dense["saved_by_attention"] is None
    assert result["arms"][2]["reward"] == [
        [100.0, 0.1],
        [110.0, 0.2],
        [120.0, pytest.approx(0.3)],
        [130.0, 0.4],
    ]
    assert result["arms"][2]["held_out"] == [[0.0, 0.1], [130.0, 0.3]]

    again = tmp_path / "again"  # the same runs with a second model
    again.mkdir()
    for path in tmp_path.glob("*-0.*"):
        (again / path.name).write_bytes(path.read_bytes())
    (again / "card.json").write_text('{"parameters": 6}')
    summary.main(summary.Options(again, again, again / "out.json", earlier=out))
    both = study.common.read_result(again / "out.json")
    assert both["models"] == [{"parameters": 5}, {"parameters": 6}]
    assert [(run["arm"], run["model"]) for run in both["arms"]] == [
        (name, model) for name in ("dense", "lossless", "p86") for model in (0, 1)
    ]
    assert [row["pairs"] for row in both["paired"]] == [8, 8]
    assert [row["step_speedup"] for row in both["paired"]] == [[2.5] * 3, [2.0] * 3]


def test_rollout_share_interval_resamples_steps(study):
    run = {"seconds": {"rollout": 15.0, "score": 2.0, "update": 2.0, "sync": 1.0}}
    run["reward"] = [
        [end, 0.0] for end in (9.0, 19.0, 49.0)
    ]  # steps of 10 and 30 s after the first
    # The mean step of a resample takes 10, 20 or 30 s, with probability 1/4, 1/2 and 1/4. The other
    # phases take 5 s.
    assert study.wall_clock_summary.rollout_share(run) == pytest.approx([3 / 4, 1 / 2, 5 / 6])


def test_paired_steps_match_a_hand_calculation(study):
    def run(name, model, reward):
        return {"arm": name, "model": model, "seed": 0, "steps": len(reward), "reward": reward}

    dense = [
        run("dense", 0, [[9.0, 0.1], [19.0, 0.2], [39.0, 0.4], [99.0, 1]]),
        run("dense", 1, [[5.0, 0], [15.0, 0]]),
    ]
    ours = [
        run("p86", 0, [[7.0, 0.1], [12.0, 0.4], [22.0, 0.4]]),
        run("p86", 1, [[9.0, 0.1], [11.0, 0.1]]),
    ]
    (row,) = study.wall_clock_summary.paired([*dense, *ours])
    # With the first model, dense steps take 10 and 20 s, and p86's steps 5 and 10 s. With the
    # second model, they take 10 s and 2 s. The first step of every run is left out, and so is the
    # fourth dense step, which has no counterpart.
    gain, low, high = row["step_speedup"]
    assert (
        row["pairs"] == 5
        and gain == pytest.approx(40 / 17)
        and low == pytest.approx(2.0)
        and high <= 5.0
    )
    assert row["reward_minus_dense"] == pytest.approx([0.2 / 3, 0.1])


def test_figure_bars_show_seconds_per_step(study, tmp_path, monkeypatch):
    figure = study.wall_clock_figure
    _, ax = figure.plt.subplots()
    seconds = {"rollout": 8.0, "score": 2.0, "update": 4.0, "sync": 1.0}
    faster = [{"arm": "p86", "seconds": {**seconds, "rollout": rollout}} for rollout in (2.0, 4.0)]
    runs = [
        {"steps": 2, "reward": [[1, 0.1], [2, 0.2]], **run}
        for run in ({"arm": "dense", "seconds": seconds}, *faster)
    ]
    figure.draw_steps(ax, figure.over_seeds(runs), {"p86": 1.5})
    bars = [(round(bar.get_x(), 6), bar.get_width()) for bar in ax.patches if bar.get_width()]
    assert bars == [(0, 8), (8, 2), (10, 5), (0, 3), (3, 2), (5, 5)]
    assert {"1", "1.50x"} <= {text.get_text() for text in ax.texts}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["dense", "lossy (p5 0.86)"]
    monkeypatch.setattr(figure, "PATH", tmp_path / "figure.png")
    figure.main()
    assert figure.PATH.stat().st_size > 10_000


def main(checkpoint, folder, arm, steps, tokens, seconds):
    """Run an arm in this process. If the arm already has a log, this does nothing."""
    for part in FOLDERS:
        sys.path.insert(0, str(ROOT / part))
    import wall_clock

    wall_clock.PROFILED = 2 if arm == "lossless" else 4
    if arm == "dense":  # on a CPU, stock vLLM packs its weights and cannot load new ones
        from torch.nn.functional import linear
        from vllm.model_executor.layers import utils

        def keep_unpacked(layer, remove_weight):
            layer.cpu_linear = linear

        utils.dispatch_cpu_unquantized_gemm = keep_unpacked
    (folder / "schedules.json").write_text(json.dumps({"p86": [3, 4]}))
    options = wall_clock.Options(
        checkpoint,
        arm,
        folder,
        copies=2,
        steps=steps,
        prompts=2,
        samples=2,
        max_new_tokens=tokens,
        top_n=400,
        held_out=2,
        held_out_every=2,
        token_budget=2048,
        draft_pages=3,
        seconds=seconds,
        engine={"enforce_eager": True},
    )
    wall_clock.main(options)
    log = folder / f"{arm}-0.jsonl"
    written = log.read_bytes()
    wall_clock.main(options)
    assert log.read_bytes() == written


if __name__ == "__main__":
    checkpoint, folder, arm, steps, tokens, seconds = sys.argv[1:]
    main(Path(checkpoint), Path(folder), arm, int(steps), int(tokens), float(seconds))
