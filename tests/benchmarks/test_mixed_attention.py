"""Test how ``benchmarks/mixed_attention.py`` times decode steps, and the table of its results. One
test runs the script with tiny models in a real vLLM on a CPU.
"""

import importlib
import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparrow.cost import SHAPES
from tests.conftest import SMALL

FOLDER = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    names = ("mixed_attention", "tables_mixed_attention")
    yield tuple(importlib.import_module(name) for name in names)
    for name in (*names, "never_slower", "predicted", "common"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("shape", ["qwen3-next", "olmo3-7b"])
def test_all_layers_cost_as_much_as_the_published_model(scripts, shape):
    script, _ = scripts
    published = SHAPES[script.SHAPES[shape].published]
    assert script.cost_shape(shape, published.layers) == published


def test_fewer_layers_keep_the_share_of_full_layers(scripts):
    script, _ = scripts
    model = script.cost_shape("qwen3-next", 12)
    whole = SHAPES["qwen3-next-80b-a3b"]
    assert (model.layers, model.full_layers, model.experts.layers) == (12, 3, 12)
    assert 4 * (model.weights - model.output) == whole.weights - whole.output
    assert 4 * model.state_bytes == whole.state_bytes


@pytest.mark.parametrize("shape", ["qwen3-next", "olmo3-7b"])
def test_configs_have_the_sizes_of_the_cost_model(scripts, shape):
    script, _ = scripts
    chosen = script.SHAPES[shape]
    model = script.cost_shape(shape, chosen.layers)
    config = chosen.config(chosen.layers)
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    others = {*model.window_layers, *model.linear_layers}
    assert len(config.layer_types) == config.num_hidden_layers == model.layers
    assert full == [i for i in range(model.layers) if i not in others]
    assert (config.num_key_value_heads, config.num_attention_heads) == (model.kv_heads, model.heads)
    assert config.vocab_size * config.hidden_size == model.output
    assert config.eos_token_id is None
    if model.experts:
        assert (config.num_experts, config.num_experts_per_tok) == (
            model.experts.count,
            model.experts.per_token,
        )
        assert 3 * config.hidden_size * config.moe_intermediate_size == model.experts.weights
    else:
        assert config.sliding_window == model.window


@pytest.mark.parametrize("shape", ["qwen3-next", "olmo3-7b"])
def test_committed_results_have_the_default_layers_and_points(scripts, shape):
    script, tables = scripts
    [result] = [each for each in tables.results() if each["shape"] == shape]
    points = tuple(script.Point(row["sequences"], row["prompt"]) for row in result["points"])
    assert (result["layers"], points) == (script.SHAPES[shape].layers, script.SHAPES[shape].points)


def test_two_engines_fit_on_an_h200(scripts):
    script, _ = scripts
    for name, shape in script.SHAPES.items():
        model = script.cost_shape(name, shape.layers)
        held = model.weight_bytes * (model.weights + model.embedding)
        held += script.cache_bytes(model, shape.points)
        assert 2 * held < 0.9 * 143_771 * 2**20
        tokens = max(point.sequences * point.prompt for point in shape.points)
        assert script.cache_bytes(model, shape.points) > 2 * tokens * model.layer_width * (
            model.full_layers
        )


def test_points_are_read_from_text(scripts):
    script, _ = scripts
    point = script.Point.parse("64x4096")
    assert point == (64, 4096) and str(point) == "64x4096"
    with pytest.raises(ArgumentTypeError, match=r"SEQUENCESxTOKENS, .* got '64x4096x2'"):
        script.Point.parse("64x4096x2")


def test_a_point_is_expected_to_take_as_long_as_earlier_ones(scripts):
    script, _ = scripts
    point = script.Point(8, 100)
    rows = [
        dict(sequences=4, prompt=100, prefill_s={"stock": 2.0, "lossy": 4.0}, decode_s=3.0),
        dict(sequences=2, prompt=100, prefill_s={"stock": 1.0, "lossy": 1.0}, decode_s=7.0),
    ]
    assert script.expected_seconds([], point) == 0
    assert script.expected_seconds(rows, point) == pytest.approx(800 * 4 / 400 + 7)


def test_new_tokens_match_a_hand_calculation(scripts):
    script, _ = scripts
    # Decoding leaves prefill at least 8,192 - 32 tokens per step, so it takes 118 steps. At most
    # one more step per sequence passes until all have begun. 13 turns follow, and one is a margin.
    assert script.Point(32, 30_000).new == 118 + 32 + 14 * 36


def test_cache_size_matches_a_hand_calculation(scripts):
    script, _ = scripts
    small = script.Point(1, 100)
    large = script.Point(2, 10_000)
    length = 10_000 + (3 + 2 + 14 * 36) + 2048
    # Three layers with 2 heads of 256 elements. Nine layers each have two states per sequence:
    # float32 states of 32 heads, and 3 tokens of 8,192 channels in bfloat16.
    keys_and_values = 2 * 3 * length * 2 * 2 * 256 * 2
    states = 2 * 2 * 9 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    hybrid = script.cache_bytes(script.cost_shape("qwen3-next", 12), [small, large])
    assert hybrid == int(1.15 * (keys_and_values + states))
    # Eight full layers and 24 with a window, with 32 heads of 128 elements.
    tokens = 2 * (8 * length + 24 * 4096) + 24 * (8192 + 2 * 32)
    windowed = script.cache_bytes(script.cost_shape("olmo3-7b", 32), [small, large])
    assert windowed == int(1.15 * tokens * 2 * 32 * 128 * 2)


class Engines:
    """A stand-in for both engines' processes. Prefill takes a second per sequence. Turn n takes n
    ms per step on its engine's clock, and 1 s on this process's.
    """

    def __init__(self, monkeypatch):
        self.calls = []
        self.now = 0.0
        self.turns = 0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def call(self, function, arguments):
        self.calls.append((function.__name__, *arguments))
        return {name: getattr(self, function.__name__)(*given) for name, given in arguments.items()}

    def start(self, name, folder, options):
        return {"vllm": "0", "start_s": 1.0, "chosen": {}}

    def begin(self, point, seed, vocabulary):
        assert tuple(seed) == point  # so that both engines get the same prompts
        self.now += point.sequences / 2  # for each of two engines
        return {"seconds": float(point.sequences)}

    def turn(self):
        self.now += 1.0
        self.turns += 1
        return {"seconds": self.turns * 32e-3, "steps": 32, "length": self.turns}

    def counters(self):
        return {"turns": self.turns}

    def end(self):
        return {}

    def close(self):
        pass


def test_engines_take_turns_in_alternating_order_after_a_round_that_warms_up(scripts, monkeypatch):
    script, _ = scripts
    monkeypatch.setattr(script, "ROUNDS", 5)
    engines = Engines(monkeypatch)
    row = script.measured(engines, script.Point(3, 100), 1000)
    stock = ("turn", "stock")
    lossy = ("turn", "lossy")
    counters = ("counters", "lossy")
    pair = [stock, lossy, lossy, stock]
    assert engines.calls == [
        ("begin", "stock", "lossy"),
        *(lossy, stock, counters),
        *(*pair, *pair, counters),
        ("end", "stock", "lossy"),
    ]
    assert row["ms"]["stock"] == pytest.approx([3, 6, 7, 10])
    assert row["ms"]["lossy"] == pytest.approx([4, 5, 8, 9])
    assert (row["length"], row["decode_s"]) == (6.5, 10)
    assert row["prefill_s"] == {"stock": 3, "lossy": 3}
    assert row["counts"] == {"turns": 10}


def test_points_without_time_are_skipped_and_recorded(scripts, tmp_path, monkeypatch):
    script, tables = scripts
    engines = Engines(monkeypatch)
    monkeypatch.setattr(script, "Engines", lambda *_: engines)
    points = [script.Point(sequences, 100) for sequences in (2, 8, 1, 1)]
    out = tmp_path / "found.json"
    given = dict(shape="olmo3-7b", layers=4, points=points, pages=61, compile=False, out=out)
    # Besides its 26 turns, a point takes a second per sequence. There is time for the first and
    # third points, but after the first one, not for the second one.
    script.measure(Namespace(**given, deadline=28.0 + 27.0))
    result = tables.read_result(out)
    assert [row["sequences"] for row in result["points"]] == [2, 1]
    assert result["skipped"] == ["8x100", "1x100"]


class Engine:
    """A stand-in for vLLM's engine: sequence i begins in step i, and every step takes a second."""

    def __init__(self, monkeypatch, new):
        self.steps = 0
        self.names = []
        self.left = new
        monkeypatch.setattr("time.perf_counter", lambda: float(self.steps))

    def add_request(self, name, prompt, parameters):
        self.names.append(name)

    def step(self):
        self.steps += 1
        if self.steps % 10 == 0:
            return []  # vLLM has only begun a step
        self.left -= 1
        completion = SimpleNamespace(token_ids=[5])
        return [
            SimpleNamespace(request_id=name, finished=self.left < 0, outputs=[completion])
            for name in self.names[: self.steps]
        ]


def test_turn_times_steps_in_which_every_sequence_gets_a_token(scripts, monkeypatch):
    pytest.importorskip("vllm.version")
    script, _ = scripts
    engine = Engine(monkeypatch, new=100)
    batch = script.Batch(engine, [[1] * 20, [1] * 20, [1] * 20], new=100)
    batch.begin()
    assert engine.steps == 3
    found = batch.decode()
    # Steps 4, 5, 6 and 7 settle. Of steps 8 to 42, steps 10, 20, 30 and 40 only begin, so 32 timed
    # ones end with step 43.
    assert found["seconds"] == 43 - 7 and found["steps"] == script.STEPS
    assert found["length"] == 20 + 2 + 4 + 16  # the three sequences began in steps 1, 2 and 3
    engine.names = engine.names[:2]
    with pytest.raises(RuntimeError, match="gave 2 of 3 sequences 2 tokens"):
        batch.decode()


def test_sequences_that_end_early_are_an_error(scripts, monkeypatch):
    pytest.importorskip("vllm.version")
    script, _ = scripts
    batch = script.Batch(Engine(monkeypatch, new=6), [[1]], new=6)
    batch.begin()
    with pytest.raises(RuntimeError, match="sequence 0 ended before the measurement did"):
        batch.decode()


def test_mean_of_pairs_matches_a_hand_calculation(scripts):
    _, tables = scripts
    # The pairs' geometric means are 1, 2 and 4. With L = log 2, their logarithms have mean L and
    # standard error L / sqrt(3), and t with 2 degrees of freedom has a 97.5 % quantile of 4.3027.
    half = 4.302653 / 3**0.5
    expected = [2, 2 ** (1 - half), 2 ** (1 + half)]
    assert tables.mean_of_pairs([0.5, 2, 4, 1, 2, 8]) == pytest.approx(expected)


def test_mean_of_pairs_is_unaffected_by_the_order_of_engines(scripts):
    _, tables = scripts
    drift = [1.0, 1.0, 1.1, 1.1, 1.2, 1.2]
    alternating = [x * y for x, y in zip(drift, [1.5, 1 / 1.5] * 3, strict=True)]
    assert tables.mean_of_pairs(alternating) == pytest.approx(tables.mean_of_pairs(drift))


def test_table_shows_means_of_pairs_and_the_predicted_ratio(scripts, monkeypatch):
    _, tables = scripts
    point = dict(sequences=64, prompt=15_000, length=15_300.4)
    point["ms"] = {"stock": [10.0, 10.0, 11.0, 11.0], "lossy": [10.0, 2.5, 8.0, 2.0]}
    result = dict(shape="qwen3-next", layers=12, schedule="fixed:61", points=[point])
    monkeypatch.setattr(tables, "results", lambda: [result | {"machine": "NVIDIA H200"}])
    _, _, line = tables.mixed_attention().splitlines()
    # Pairs of ratios have the means 2 and 2.75. With 1 degree of freedom, t is 12.7062.
    stock = (10 * 11) ** 0.5
    lossy = 20**0.5
    ratio = 5.5**0.5
    factors = [(high / low) ** (12.7062 / 2) for low, high in ((10, 11), (4, 5), (2, 2.75))]
    assert line == (
        "| Qwen3-Next-80B-A3B, 12 layers | 3 | 64 x 15,300 "
        f"| {stock:.2f} [{stock / factors[0]:.2f}, {stock * factors[0]:.2f}] "
        f"| {lossy:.2f} [{lossy / factors[1]:.2f}, {lossy * factors[1]:.2f}] "
        f"| {tables.prediction(result, point):.3f} "
        f"| {ratio:.3f} [{ratio / factors[2]:.3f}, {ratio * factors[2]:.3f}] |"
    )
    monkeypatch.setattr(tables, "results", lambda: [result | {"machine": "NVIDIA H100"}])
    assert tables.mixed_attention().splitlines()[2].split(" | ")[5] == ""


def test_prediction_matches_a_hand_calculation(scripts):
    script, tables = scripts
    # The overhead, weights, states and cache of 12 layers. Lossy mode reads 1,024 tokens and the
    # landmarks, one key per page of 16 tokens, instead of 15,300 tokens.
    model = script.cost_shape("qwen3-next", 12)
    bandwidth = 0.9362 * 4.65e12
    read = 2 * model.weights_read(64) + 64 * 2 * model.state_bytes
    dense = 12 * 49.65e-6 + 64 * 1.191e-6 + (read + 64 * 15_300 * 3 * 2048) / bandwidth
    saved = 64 * 3 * 2048 * (15_300 - 1024 - 15_300 / 16 / 2) / bandwidth
    result = dict(shape="qwen3-next", layers=12, schedule="fixed:61")
    predicted = tables.prediction(result, dict(sequences=64, length=15_300))
    assert predicted - 1 == pytest.approx(saved / (dense - saved), rel=1e-3)


def test_docs_state_the_prediction_for_a_shorter_context(scripts):
    script, tables = scripts
    [olmo] = [each for each in tables.results() if each["shape"] == "olmo3-7b"]
    point = script.Point(16, 4096)
    middle = point.prompt + point.new / 2
    predicted = tables.prediction(olmo, dict(sequences=16, length=middle))
    page = (Path(FOLDER).parent / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"(for 16 x 4,096, {predicted:.2f} is predicted)" in page


def tiny_qwen3_next(layers):
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **{**SMALL, "num_hidden_layers": layers, "hidden_size": 64, "head_dim": 32},
        layer_types=["linear_attention", "full_attention"] * (layers // 2),
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        architectures=["Qwen3NextForCausalLM"],
        dtype="bfloat16",
    )


def tiny_olmo3(layers):
    from transformers import Olmo3Config

    return Olmo3Config(
        **{**SMALL, "num_hidden_layers": layers, "num_key_value_heads": 2, "head_dim": 32},
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        sliding_window=50,
        architectures=["Olmo3ForCausalLM"],
        pad_token_id=0,
        eos_token_id=None,
        dtype="bfloat16",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, config", [("qwen3-next", tiny_qwen3_next), ("olmo3-7b", tiny_olmo3)]
)
def test_script_measures_tiny_models(scripts, tmp_path, monkeypatch, shape, config):
    pytest.importorskip("vllm.version")
    script, tables = scripts
    for name, value in dict(
        VLLM_CPU_OMP_THREADS_BIND="nobind", TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR"
    ).items():
        monkeypatch.setenv(name, value)
    chosen = script.SHAPES[shape]._replace(config=config)
    monkeypatch.setitem(script.SHAPES, shape, chosen)
    monkeypatch.setattr(script, "cache_bytes", lambda *_: 64 * 2**20)
    out = tmp_path / f"mixed_attention_{shape}.json"
    arguments = ["--shape", shape, "--layers", "4", "--pages", "2", "--out", str(out)]
    arguments += ["--points", "3x200", "2x100", "--deadline", "inf"]
    monkeypatch.setattr(sys, "argv", ["mixed_attention.py", *arguments])
    script.main()
    result = tables.read_result(out)
    monkeypatch.setattr(tables, "results", lambda: [result])
    assert [(row["sequences"], row["prompt"]) for row in result["points"]] == [(3, 200), (2, 100)]
    for row in result["points"]:
        rounds = script.ROUNDS - 1
        assert all(len(row["ms"][arm]) == rounds and min(row["ms"][arm]) > 0 for arm in script.ARMS)
        steps = rounds * (script.SETTLE + script.STEPS)
        assert abs(row["counts"]["rows"] - steps * row["sequences"]) <= 2 * row["sequences"]
        assert row["counts"]["tokens_read"] < row["counts"]["tokens_held"]
    assert len(tables.mixed_attention().splitlines()) == 4
