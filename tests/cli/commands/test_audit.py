"""Test ``sparrow audit``: its exit status for each verdict, and its output."""

import json
from types import SimpleNamespace

import pytest

from sparrow.audit.statistics import Finding, Mean, Verdict
from sparrow.cli import main
from sparrow.cli.commands.audit import Audit
from sparrow.cli.entry import parse
from sparrow.engines.base import Counters
from sparrow.errors import ConfigError
from tests.conftest import fails

MODEL = ["audit", "--model", "reasoner", "--task", "trace:lines=4"]
SMALL = [*MODEL, "--count", "60", "--max-new-tokens", "12", "--resolution", "0.2"]


def status(capsys, *argv):
    """Return the exit status and the printed text."""
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    return stopped.value.code, capsys.readouterr().out


def test_audit_of_an_exact_engine_exits_with_0_and_reports_the_detectable_bias(tmp_path, capsys):
    out = tmp_path / "audit.json"
    code, printed = status(capsys, *SMALL, "--mode", "lossless", "--out", str(out))
    assert code == 0
    assert (
        "exact, at a significance level of 0.01" in printed
        and "would have been detected" in printed
    )
    written = json.loads(out.read_text())
    assert written["status"] == "exact" and written["decoding"]["mode"] == "lossless"
    assert written["dense_engine"] == "hf" and written["counters"]["drafts"]["cycles"] > 0
    assert {f["place"] for f in written["findings"]} > {"all", "draft 1"}


def test_audit_of_a_biased_actor_exits_with_1_and_reports_the_bias(capsys):
    blind = '{"top_k": [0], "page_size": 4, "sink_pages": 0, "recent_pages": 1, "dense_layers": []}'
    code, printed = status(capsys, *SMALL, "--mode", "lossy", "--schedule", blind)
    assert code == 1
    assert "biased, at a significance level of 0.01" in printed and "corrected p =" in printed


def test_inconclusive_audit_exits_with_2(capsys):
    code, printed = status(capsys, *MODEL, "--count", "32", "--max-new-tokens", "2")
    assert code == 2
    assert "cannot tell" in printed and "times as many tokens" in printed


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--engine", "nonsense"], "unknown engine 'nonsense'"),
        (["--prompts", "no.txt"], "prompts must come from exactly one of"),
        (
            ["--engine", "stock:http://localhost:1"],
            "is a server and cannot also decode densely; set --dense-engine to a second",
        ),
        (["--scorer", "prefill"], "needs stock vLLM as the dense engine, got hf"),
        (
            ["--scorer", "prefill", "--dense-engine", "none"],
            "stock vLLM as the dense engine, got none",
        ),
        (["--engine", "stock:dtype=float16"], "leave dtype out, and set precision"),
        (
            ["--engine", "stock:", "--schedule", "fixed:0"],
            "stock engines run vLLM without Sparrow, but the mode is 'lossy'; use engine vllm",
        ),
        (
            ["--engine", "stock:", "--mode", "lossless"],
            "stock engines run vLLM without Sparrow, but the mode is 'lossless'",
        ),
        (
            ["--engine", "vllm:adapter=tuned", "--dense-engine", "stock:"],
            "the engine has the adapter tuned, but the dense engine has none; use the same adapter in both",
        ),
        (["--engine", "vllm:adapter=tuned"], "cannot load the adapter 'tuned'"),
        (["--out", "/proc/self/new"], "cannot write to /proc/self"),
        (["--temperature", "0"], "temperature is 0.0, but must be greater than 0"),
        (["--config", "no.toml"], "cannot read the configuration"),
    ],
)
def test_audit_with_bad_input_exits_with_2(options, reason, capsys):
    assert reason in fails(capsys, *SMALL, *options, code=2)


def test_audit_without_a_model_exits_with_2(capsys):
    assert "sparrow audit needs --model" in fails(capsys, "audit", "--task", "trace", code=2)


@pytest.mark.parametrize(
    ("options", "dense"),
    [
        ([], "hf"),
        (["--engine", "vllm:max_model_len=512"], "vllm:max_model_len=512"),
        (
            ["--engine", 'stock:speculative_config={"method":"ngram","n":4},max_model_len=512'],
            "stock:max_model_len=512",
        ),
        (["--engine", 'stock:speculative_config={"method":"ngram"}'], "stock:"),
        (["--engine", "http://a:1", "--dense-engine", "stock:http://b:1"], "stock:http://b:1"),
        (["--engine", "http://a:1", "--dense-engine", "none"], None),
    ],
)
def test_dense_arm_uses_the_same_engine_without_drafts(options, dense):
    command = parse([*SMALL, *options])
    assert isinstance(command, Audit)
    assert command._dense_engine() == dense


def test_audit_of_a_server_requires_the_dense_engine_option():
    with pytest.raises(ConfigError, match=r"or to none \(rounding then counts as bias\)"):
        parse([*SMALL, "--engine", "http://a:1"])._dense_engine()


def test_audit_with_a_failing_engine_exits_with_2(monkeypatch, capsys):
    from sparrow.cli import loading

    def engine(*_, **__):
        def generate(prompts, sampling):
            raise ConfigError("no room")

        return SimpleNamespace(
            generate=generate, counters=lambda: Counters(0, 0), close=lambda: None
        )

    monkeypatch.setattr(loading, "load_engine", engine)
    assert fails(capsys, *SMALL, code=2) == "sparrow: no room"


def test_audit_with_prefill_refuses_responses_that_fill_the_context(monkeypatch, capsys):
    from sparrow.cli import loading

    command = [*SMALL, "--engine", "stock:", "--scorer", "prefill"]
    _, _, prompts = parse(command).load_prompts()
    context = max(map(len, prompts)) + 12
    engine = SimpleNamespace(context=context, close=lambda: None)
    monkeypatch.setattr(loading, "load_engine", lambda *_, **__: engine)
    refused = fails(capsys, *command, code=2)
    assert f"context of {context}" in refused and "lower max_new_tokens by 1, or raise" in refused


def test_biased_positions_are_listed_and_other_positions_are_only_counted(capsys):
    from sparrow.cli.terminal import print_audit

    mean = Mean(0.01, 0.001, 100, 50)

    def finding(place, corrected):
        return Finding("u3", place, "share", mean, None, 0.01, 0.005, corrected, corrected)

    findings = (finding("all", 1), finding("draft 1", 1), finding("bonus token", 1e-4))
    verdict = Verdict("biased", ("u3, bonus token: …",), findings, 0.01, 0.05, 0.005, ("a note",))
    print_audit(verdict, 100)
    printed = capsys.readouterr().out
    assert "u3, bonus token" in printed and "u3, draft 1" not in printed
    assert (
        "tests of single positions in the draft cycle that found no difference (not shown): 1"
        in printed
        and "not tested: a note" in printed
    )
