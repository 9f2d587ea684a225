"""Test the probe with a real server in lossless mode, with a stand-in for servers in all modes, and
with responses that are empty or aborted; ``test_real_server.py`` tests it with a lossy server.
"""

import math

import httpx
import numpy as np
import pytest

pytest.importorskip("vllm.version")
pytest.importorskip(
    "vllm.entrypoints.launchers.app",
    reason="the packages vLLM's server needs",
    exc_type=ImportError,
)

from sparrow.decoding import Decoding
from sparrow.errors import ConfigError, EngineError, SparrowError
from sparrow.integrations import probe
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.mismatch.tokens import TokenAcceptance
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB
from tests.engines.vllm.test_real_server import serving
from tests.vllm.tiny_vllm import checkpoint, on_v2, prompts

DRAFTS = SparsitySchedule(top_k=(6,), bin_tokens=100, recent_pages=1, dense_layers=())
ASKED = prompts(150, 33, 170, seed=5)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lossless")
    checkpoint(folder / "model", num_hidden_layers=2)
    decoding = Decoding.lossless(DRAFTS, draft_tokens=4, adapt_draft_tokens=False)
    with serving(folder, decoding.to_dict(), on_v2(folder), patience=400) as (address, _):
        yield address


@pytest.mark.slow
def test_draft_counts_from_sparrow_and_vllm_are_logged(url, monkeypatch):
    # A server that does not accept these calls gives the same result.
    assert probe._rpc(f"{url}/nowhere", "sparrow_describe") is None
    ours = probe.Probe([url])
    assert ours.mode == "lossless" and ours.schedule == DRAFTS and ours.counted() == {}
    with monkeypatch.context() as closed:
        closed.setattr(probe, "_rpc", lambda *_: None)
        with pytest.raises(
            ConfigError, match="do not report their schedule; pass schedule, or start"
        ):
            probe.Probe([url])
        theirs = probe.Probe([url, url], DRAFTS)
        assert theirs.counted() == {}
        probe.probe([url], ASKED, DRAFTS, max_new_tokens=40, top_n=5)
        by_vllm = theirs.counted()
        assert theirs.counted() == {}
    by_us = ours.counted()
    assert set(by_vllm) == {
        f"sparrow/drafts/{name}" for name in ("drafted", "accepted", "tokens_per_cycle")
    }
    assert (
        0 < by_us["sparrow/drafts/accepted"] < 1
        and 1 < by_us["sparrow/drafts/tokens_per_cycle"] < 5
    )
    # vLLM ignores drafts after a response's last token, in about one cycle of fifteen.
    assert by_us["sparrow/drafts/accepted"] < by_vllm["sparrow/drafts/accepted"]
    for name, value in by_vllm.items():
        assert value == pytest.approx(by_us[name], rel=0.2), name
    assert (
        by_us["sparrow/drafts/p5"] < by_us["sparrow/drafts/accepted"]
        and 0 < by_us["sparrow/tokens_read"] < 2
    )


@pytest.mark.slow
def test_acceptance_tail_of_a_lossless_server_is_logged_as_the_ceiling(url):
    watched = probe.Probe([url])
    found = watched.measured(ASKED, max_new_tokens=40, top_n=VOCAB)
    assert "sparrow/p5" not in found and found["sparrow/sequences"] == 3
    for length in ("0-100", "100-200", "200-300"):
        ceiling, upper = (found[f"sparrow/p5/{length}/{name}"] for name in ("ceiling", "upper"))
        assert 1 - 1e-4 < ceiling <= upper <= 1
    assert watched.counted() == {}


class Server:
    """A stand-in for a server in development mode, and for its responses: their acceptance is 0.5,
    or 0.9 if the server decodes densely.
    """

    def __init__(self, mode, schedule, dropped=b'{"success": true}'):
        self.mode = mode
        self.schedule = schedule
        self.dropped = dropped
        self.set: list[SparsitySchedule] = []
        self.read = 0
        self.held = 0

    def answer(self, url, body=None, allowed=()):
        if url.endswith("/metrics"):
            return httpx.Response(200)
        if url.endswith("/reset_prefix_cache"):
            return httpx.Response(200, content=self.dropped)
        if body["method"] == "sparrow_set_schedule":
            self.set.append(SparsitySchedule.from_json(body["args"][0]))
        layers = {"sparse_layers": [0, 1], "dense_layers": []}
        described = {"mode": self.mode, "schedule": self.schedule.to_dict(), **layers}
        drafts = dict(drafted=0, accepted=0, emitted=0)
        counts = dict(tokens_read=self.read, tokens_held=self.held, **drafts)
        if body["method"] == "sparrow_counters":
            self.read = self.held = 0
        acceptance = {"acceptance": DraftAcceptance.empty().to_dict()}
        results = {"sparrow_describe": described, "sparrow_acceptance": acceptance}
        return httpx.Response(200, json={"results": [results.get(body["method"], counts)]})

    def respond(self, urls, prompts, schedule, max_new_tokens, top_n):
        self.read += 90
        self.held += 100
        now = self.set[-1] if self.set else self.schedule
        alpha = np.full(4, 0.9 if now.is_dense or self.mode == "lossless" else 0.5)
        return [TokenAcceptance(alpha, alpha, np.full(4, 160)) for _ in prompts]


@pytest.fixture
def watched(monkeypatch):
    """Return a function that creates a probe of this stand-in server."""

    def start(server):
        monkeypatch.setattr(probe, "_answer", server.answer)
        monkeypatch.setattr(probe, "probe", server.respond)
        return probe.Probe(["http://served"])

    return start


EVERYTHING = DRAFTS.reading_everything()


@pytest.mark.parametrize("urls", ["http://served", []])
def test_addresses_that_are_not_a_list_raise_an_error(urls):
    with pytest.raises(ConfigError, match="urls must be a list of server addresses, got "):
        probe.Probe(urls)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no prompts to measure"),
        (["12"], "prompt 0 is the text '12'"),  # its digits could pass for token ids
        ([[5], []], "prompt 1 has no tokens"),
    ],
)
def test_prompts_without_token_ids_raise_an_error(watched, given, message):
    with pytest.raises(ConfigError, match=message):
        watched(Server("lossy", DRAFTS)).measured(given, 4)


def test_counts_leave_out_measurements_but_not_the_steps_before_them(watched):
    server = Server("lossy", DRAFTS)
    watching = watched(server)
    server.read = 30
    server.held = 100
    watching.measured([[1], [2]], 4)
    server.read = 50
    server.held = 100
    assert watching.counted()["sparrow/tokens_read"] == 0.4
    assert watching.counted() == {}


@pytest.mark.parametrize(
    ("mode", "schedule", "p5", "changes"),
    [
        ("lossless", DRAFTS, None, []),
        ("dense", EVERYTHING, None, []),
        ("lossy", EVERYTHING, None, []),
        ("lossy", DRAFTS, 0.5, [EVERYTHING, DRAFTS]),
        ("dense", DRAFTS, 0.5, [EVERYTHING, DRAFTS]),  # started dense, then given a schedule
    ],
)
def test_ceiling_is_measured_in_every_mode(watched, mode, schedule, p5, changes):
    server = Server(mode, schedule)
    watching = watched(server)
    for _ in range(2):  # the second call reuses the ceiling
        found = watching.measured([[1], [2]], 4)
        assert found["sparrow/p5/100-200/ceiling"] == 0.9 and found.get("sparrow/p5") == p5
        assert server.set == changes


def test_prefix_cache_that_cannot_be_dropped_is_reported(watched):
    server = Server("lossy", DRAFTS, b'{"success": false}')
    watching = watched(server)
    with pytest.raises(SparrowError, match="served cannot drop its prefix cache while requests"):
        watching.measured([[1], [2]], 4)
    assert server.set[-1] == DRAFTS, "the schedule must be restored"
    server.dropped = b""
    assert watching.measured([[1], [2]], 4)["sparrow/p5"] == 0.5


def answers(sampled_end, scored_end, tokens, context=100):
    """Return a stand-in for ``_request``. The server samples ``tokens``; both list them with
    probability 1/2.
    """

    def request(url, body=None):
        if body is None:
            return {"data": [{"id": "served", "max_model_len": context}]}
        assert len(body["prompt"]) + body["max_tokens"] <= context
        if "prompt_logprobs" in body:
            scored = [{str(token): {"logprob": math.log(0.5)}} for token in body["prompt"]]
            return {"choices": [{"finish_reason": scored_end, "prompt_logprobs": scored}]}
        names = [f"token_id:{token}" for token in tokens]
        lists = [{name: math.log(0.5)} for name in names]
        logprobs = {"tokens": names, "top_logprobs": lists}
        return {"choices": [{"finish_reason": sampled_end, "logprobs": logprobs}]}

    return request


def probed():
    (found,) = probe.probe(["http://served"], [[1, 2]], DRAFTS, max_new_tokens=8, top_n=1)
    return found


@pytest.mark.parametrize(
    ("ends", "tokens"),
    [(("abort", "length"), [5]), (("abort", "length"), []), (("stop", "abort"), [5])],
)
def test_aborted_response_is_not_measured(monkeypatch, ends, tokens):
    monkeypatch.setattr(probe, "_request", answers(*ends, tokens))
    with pytest.raises(EngineError, match=r"vLLM ended a response after \d tokens with 'abort'"):
        probed()


def test_empty_response_has_no_acceptances(monkeypatch):
    monkeypatch.setattr(probe, "_request", answers("stop", "length", [5, 6]))
    assert len(probed().lower) == 2
    monkeypatch.setattr(probe, "_request", answers("stop", "length", []))
    assert len(probed().lower) == 0


def test_only_the_last_token_of_a_response_that_fills_the_context_is_left_out(monkeypatch):
    filling = list(range(3, 11))  # after a prompt of two tokens
    for context, measured in ((11, 8), (10, 7)):
        monkeypatch.setattr(probe, "_request", answers("length", "length", filling, context))
        assert len(probed().lower) == measured
