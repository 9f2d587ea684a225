"""Test how clients handle a vLLM server that dies, rejects a request or stalls. A small HTTP server
stands in for vLLM.
"""

import asyncio
import contextlib
import json
import os
import shlex
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from sparrow.decoding import DRAFT_SCHEDULE, Decoding
from sparrow.engines.base import Counters
from sparrow.engines.vllm import VLLMServer, server
from sparrow.engines.vllm.client import tally
from sparrow.errors import ConfigError, EngineError
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.rollout import Sampling
from sparrow.schedule import ALL_PAGES
from tests.train.test_trainer import SCHEDULE, make_trainer, metrics_of

BREAKS = ("no response", "cut off", "reset")
"""How the first two connections of each prompt can break."""


class Pretender(BaseHTTPRequestHandler):
    """A server that decodes one token per prompt until told to misbehave."""

    def do_GET(self) -> None:
        state = self.server.state
        if self.path == "/metrics":
            state["generated"] += state["progress"]
            counted = f'vllm:generation_tokens_total{{engine="0"}} {state["generated"]}\n'
            metrics = {"yes": counted, "no": "http_requests_total 3.0\n", "hidden": "Not Found"}
            status = 404 if state["counts"] == "hidden" else 200
            self.answer(metrics[state["counts"]], status)
        else:
            self.answer({"data": [{"max_model_len": 1000}]})

    def do_POST(self) -> None:
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        state["calls"].append(body.get("method", self.path))
        state["sampling"] = body.get("sampling_params")
        state["sent"].append(body.get("token_ids"))
        state["clients"].append(self.client_address)
        described = {
            "mode": "lossy",
            "schedule": SCHEDULE.to_dict(),
            "sparse_layers": [1],
            "dense_layers": [0],
            **state["described"],
        }
        counters = {
            "tokens_read": 1,
            "tokens_held": 2,
            "preemptions": state["preemptions"],
            "drafted": 0,
            "accepted": 0,
            "emitted": 0,
        }
        acceptance = {"acceptance": DraftAcceptance.empty().to_dict()}
        results = {
            "sparrow_describe": [described],
            "sparrow_counters": [counters],
            "sparrow_acceptance": [acceptance],
        }
        if body.get("method") in state["refuses"]:
            self.answer(*state["refuses"][body["method"]])
        elif self.path != "/inference/v1/generate":
            self.answer({"success": True, "results": results.get(body.get("method"))})
        elif state["generate"] == "die":
            state["wait"].wait(0.3 * (state["calls"].count(self.path) > 3))
            self.connection.close()
        elif state["generate"] in BREAKS and state["sent"].count(body["token_ids"]) <= 2:
            self.break_connection()
        elif state["generate"] == "refuse lists":
            self.answer("Requested sample logprobs of 21, which is greater than 20", status=400)
        elif state["generate"] == "refuse":
            self.answer("EngineDeadError", status=500)
        else:
            with self.counted():
                state["meeting"].wait()
                state["wait"].wait(0.0 if state["generate"] in BREAKS else state["generate"])
            entry = {"token_id": 3, "logprob": -1.0}
            content = [{**entry, "top_logprobs": [entry, entry]}]
            choice = {
                "logprobs": {"content": content},
                "token_ids": [3],
                "finish_reason": state["end"],
            }
            self.answer({"choices": [choice]})

    def break_connection(self) -> None:
        """Close the connection before the response is complete."""
        kind = self.server.state["generate"]
        self.close_connection = True
        if kind == "cut off":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b'{"choices"')
        elif kind == "reset":
            at_once = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            os.close(self.connection.detach())

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count this prompt as one in flight."""
        state = self.server.state
        with state["lock"]:
            state["in flight"].append(state["in flight"][-1] + 1)
        yield
        with state["lock"]:
            state["in flight"].append(state["in flight"][-1] - 1)

    def answer(self, value, status=200) -> None:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    """A server that doesn't print a traceback if a client has closed its connection."""

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@pytest.fixture
def pretender(monkeypatch) -> Iterator[tuple[str, dict]]:
    made = QuietServer(("localhost", 0), Pretender)
    made.state = {
        "generate": 0.0,
        "generated": 0,
        "progress": 0,
        "counts": "yes",
        "end": "stop",
        "described": {},
        "preemptions": 0,
        "refuses": {},  # responses to the methods that fail
        "calls": [],
        "sent": [],
        "clients": [],
        "in flight": [0],
        "lock": threading.Lock(),
        "meeting": threading.Barrier(1),  # each prompt waits until this many are in flight
        "wait": threading.Event(),
    }
    threading.Thread(target=made.serve_forever, daemon=True).start()
    for name in ("HTTP_PROXY", "ALL_PROXY"):  # clients must bypass the proxy
        monkeypatch.setenv(name, "http://localhost:1")
    monkeypatch.setattr(server, "CHECK_S", 0.1)
    # On a busy machine, even a server that works may take longer than a short limit.
    monkeypatch.setattr(server, "STALL_S", 60.0)
    yield f"http://localhost:{made.server_port}", made.state
    made.state["wait"].set()
    made.shutdown()
    made.server_close()


SAMPLING = Sampling(max_new_tokens=4, top_n=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generate", "message"),
    [
        ("die", "no vLLM server answers"),
        ("refuse", "HTTP 500 .*EngineDeadError"),
        (60.0, "generated nothing for 0 s"),
    ],
    ids=["dies", "refuses", "stalls"],
)
def test_failing_server_is_reported_in_one_sentence(pretender, monkeypatch, generate, message):
    url, state = pretender
    before = threading.active_count()
    client = VLLMServer(url, SCHEDULE)
    assert [r.response_ids.tolist() for r in client.generate([[1], [2]], SAMPLING)] == [[3], [3]]
    state["generate"] = generate
    if generate == 60.0:
        monkeypatch.setattr(server, "STALL_S", 0.5)
    with pytest.raises(EngineError, match=message):
        client.generate([[1], [2]] * 4, SAMPLING)
    threads = [
        thread.name for thread in threading.enumerate() if "process_request" not in thread.name
    ]
    assert len(threads) <= before, "threads that are still running when Python exits can abort it"


@pytest.mark.parametrize("how", BREAKS)
def test_prompts_are_sent_again_if_their_connections_break(pretender, how):
    url, state = pretender
    client = VLLMServer(url, SCHEDULE)
    state["generate"] = how
    responses = client.generate([[1], [2]], SAMPLING)
    assert [response.response_ids.tolist() for response in responses] == [[3], [3]]
    assert sorted(filter(None, state["sent"])) == [[1]] * 3 + [[2]] * 3


def test_every_prompt_has_its_own_connection(pretender, monkeypatch):
    """Otherwise, a server may close a connection just as the next prompt is sent on it."""
    url, state = pretender
    monkeypatch.setattr(Pretender, "protocol_version", "HTTP/1.1")  # keeps connections open
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    client = VLLMServer(url, SCHEDULE)
    state["clients"].clear()
    assert len(client.generate([[1]] * 8, SAMPLING)) == 8
    assert len(set(state["clients"])) == 8


def test_a_limited_number_of_prompts_is_in_flight(pretender, monkeypatch):
    url, state = pretender
    monkeypatch.setattr(server, "CONNECTIONS", 4)
    client = VLLMServer(url, SCHEDULE)
    state["generate"] = 0.1
    state["meeting"] = threading.Barrier(4, timeout=60.0)
    assert len(client.generate([[1]] * 12, SAMPLING)) == 12
    assert max(state["in flight"]) == 4


@pytest.mark.slow
def test_client_waits_for_a_slow_server_that_makes_progress(pretender, monkeypatch):
    url, state = pretender
    monkeypatch.setattr(server, "STALL_S", 0.5)
    client = VLLMServer(url, SCHEDULE)
    state["generate"], state["progress"] = 1.5, 1  # three times STALL_S
    assert len(client.generate([[1]], SAMPLING)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("counts", ["no", "hidden"])
def test_client_waits_for_a_slow_server_without_counters(pretender, monkeypatch, counts):
    """With ``--disable-log-stats``, vLLM has no token counters, and a proxy may hide them, so a
    stalled server cannot be distinguished from one that does not count.
    """
    url, state = pretender
    monkeypatch.setattr(server, "STALL_S", 0.5)
    client = VLLMServer(url, SCHEDULE)
    state["generate"] = 1.5  # three times STALL_S
    state["counts"] = counts
    assert len(client.generate([[1]], SAMPLING)) == 1


@pytest.mark.parametrize("end", ["abort", "repetition"])
def test_aborted_response_raises_an_error(pretender, end):
    url, state = pretender
    client = VLLMServer(url, SCHEDULE)
    state["end"] = "length"
    assert client.generate([[1]], SAMPLING)[0].finish_reason == "length"
    state["end"] = end
    with pytest.raises(EngineError, match=f"vLLM ended a response after 1 tokens with '{end}'"):
        client.generate([[1], [2]], SAMPLING)


def test_cached_gpu_memory_is_released_before_the_server_wakes(pretender, monkeypatch):
    url, state = pretender
    client = VLLMServer(url, SCHEDULE)
    led = VLLMServer(url, SCHEDULE, controls=False)
    state["calls"].clear()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: state["calls"].append("empty_cache"))
    led.wake()
    client.wake()
    assert state["calls"] == ["empty_cache", "empty_cache", "/wake_up"]


def test_generation_works_inside_a_running_event_loop(pretender):
    url, _ = pretender
    client = VLLMServer(url, SCHEDULE)

    async def cell():
        return client.generate([[1], [2]], SAMPLING)

    assert [r.response_ids.tolist() for r in asyncio.run(cell())] == [[3], [3]]


@pytest.mark.parametrize(
    ("runs", "asked"),
    [
        ("lossy", Decoding.lossless(SCHEDULE, draft_tokens=3)),
        ("lossless", Decoding.lossy(SCHEDULE)),
        ("lossless", Decoding.lossy("dense")),
    ],
)
def test_server_in_a_different_mode_raises_an_error_with_the_remedy(pretender, runs, asked):
    url, state = pretender
    state["described"] = {"mode": runs}
    with pytest.raises(ConfigError) as caught:
        VLLMServer(url, asked)
    said = str(caught.value)
    assert f"runs in mode '{runs}', not '{asked.mode}', and" in said
    assert ("--attention-backend CUSTOM" in said) == (not asked.is_lossless)
    words = shlex.split(said.partition("start it with ")[2].rpartition(", or use mode")[0])
    assert words[0] == "--additional-config"
    assert Decoding.load(json.loads(words[1])["sparrow"]) == asked


OTHER = SCHEDULE.replace(top_k=(1, 2))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            dict(draft_tokens=2),
            "has draft_tokens 4, not 2, and cannot change it.*or set draft_tokens to 4",
        ),
        (dict(adapt_draft_tokens=False), "has adapt_draft_tokens True, not False"),
        (
            dict(adapt_draft_budget=False),
            "has adapt_draft_budget True, not False, and cannot change it",
        ),
        (dict(drafter_invariant=True), "has drafter_invariant False, not True"),
        (dict(draft_weights="fp8"), "has draft_weights 'auto', not 'fp8', and cannot change it"),
        (dict(meter_schedule=SCHEDULE), "has meter_schedule {'top_k'.*, not {'top_k'.*"),
        (dict(meter_schedule=OTHER, meter_every=8), "has meter_every 16, not 8, and cannot change"),
        (dict(meter_schedule=OTHER, meter_every=16), None),
        (dict(meter_schedule=OTHER), None),
        (dict(draft_tokens=4), None),
        ({}, None),  # omitted settings keep the server's values
    ],
)
def test_lossless_settings_that_contradict_the_server_raise_an_error(pretender, asked, message):
    url, state = pretender
    state["described"] = {
        "mode": "lossless",
        "draft_tokens": 4,
        "adapt_draft_tokens": True,
        "adapt_draft_budget": True,
        "meter_schedule": OTHER.to_dict(),
        "meter_every": 16,
    }
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        VLLMServer(url, Decoding.lossless(SCHEDULE, **asked))


def test_a_server_keeps_its_own_draft_schedule_unless_another_one_is_given(pretender):
    url, state = pretender
    state["described"] = {"mode": "lossless"}
    for asked in (Decoding.lossless(), "lossless", {"mode": "lossless", "draft_tokens": 12}):
        assert VLLMServer(url, asked).schedule == SCHEDULE
    assert "sparrow_set_schedule" not in state["calls"]
    for given in (DRAFT_SCHEDULE, OTHER):
        assert VLLMServer(url, Decoding.lossless(given)).schedule == given
    assert state["calls"].count("sparrow_set_schedule") == 2


def test_truncation_options_are_sent_in_lossy_mode_and_refused_in_lossless_mode(pretender):
    url, state = pretender
    engine = VLLMServer(url, SCHEDULE)
    engine.generate([[1]], Sampling(4, top_n=1, top_k=20, top_p=0.7))
    assert (state["sampling"]["top_k"], state["sampling"]["top_p"]) == (20, 0.7)
    engine.generate([[1]], SAMPLING)
    assert (state["sampling"]["top_k"], state["sampling"]["top_p"]) == (0, 1.0)
    engine._is_lossless = True
    with pytest.raises(
        ConfigError,
        match=r"top_p is 0.7, but drafts in vLLM .*; leave both settings out, or use mode dense",
    ):
        engine.generate([[1]], Sampling(4, top_p=0.7))
    engine.generate([[1]], SAMPLING)


def test_refused_lists_are_reported_by_the_name_of_their_option(pretender):
    url, state = pretender
    state["generate"] = "refuse lists"
    with pytest.raises(ConfigError, match=r"top_n is 20, .* logprobs of 21.*; lower top_n below"):
        VLLMServer(url, SCHEDULE).generate([[1]], Sampling(4, top_n=20))


FAILED = "Call to collective_rpc method failed: "
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@pytest.mark.parametrize(
    ("method", "answer", "error", "message"),
    [
        ("describe", ("Not Found", 404), ConfigError, "start it with VLLM_SERVER_DEV_MODE=1"),
        ("describe", (FAILED + "no attribute", 500), ConfigError, "start it with Sparrow and a mo"),
        ("set_schedule", (FAILED + "the page layout", 500), ConfigError, "schedule that allows"),
        ("set_schedule", (DEAD, 500), EngineError, "see the server's log"),
        (
            "load_weights",
            (FAILED + "No such file or directory: '/dev/shm/x'", 500),
            ConfigError,
            "run it on this machine, where it can read the files in /dev/shm",
        ),
        ("load_weights", (FAILED + "named 'visual'", 500), EngineError, "named 'visual'.* log"),
        ("counters", (DEAD, 500), EngineError, "EngineCore encountered"),
    ],
)
def test_failing_calls_are_reported_with_their_own_remedy(
    pretender, method, answer, error, message
):
    url, state = pretender
    state["refuses"]["sparrow_" + method] = answer
    with pytest.raises((ConfigError, EngineError), match=message) as caught:
        client = VLLMServer(url, SCHEDULE)
        client.update_weights([("a", torch.zeros(2))])
        client.set_schedule(SCHEDULE.replace(top_k=(1, 2)))
    assert type(caught.value) is error
    assert f"refused sparrow_{method} ({answer[1]}: {answer[0]})" in str(caught.value)


@pytest.mark.parametrize("mode", ["lossless", "lossy", "dense"])
def test_preemption_is_said_to_change_the_cache_only_in_lossy_mode(pretender, caplog, mode):
    url, state = pretender
    schedule = SCHEDULE.replace(top_k=(ALL_PAGES,)) if mode == "dense" else SCHEDULE
    state["described"] = {"mode": mode, "schedule": schedule.to_dict()}
    asked = Decoding.lossless(SCHEDULE) if mode == "lossless" else schedule
    engine = VLLMServer(url, asked)
    state["preemptions"] = 2
    with caplog.at_level("WARNING"):
        engine.counters()
    [said] = caplog.messages
    assert said.startswith("vLLM preempted 2 sequences") and "larger KV cache" in said
    assert ("differs from the actor's" in said) == (mode == "lossy")
    assert ("takes time" in said) == (mode != "lossy")


def test_only_the_leading_client_controls_the_server(pretender):
    url, state = pretender
    led, leader = VLLMServer(url, SCHEDULE, controls=False), VLLMServer(url, SCHEDULE)
    state["calls"].clear()
    handed: list[str] = []

    def weights():
        for name in ("a", "b"):
            handed.append(name)
            yield name, torch.zeros(2)

    led.update_weights(weights())
    led.set_schedule(SCHEDULE.replace(top_k=(1, 2)))
    led.sleep()
    led.wake()
    assert handed == ["a", "b"], "all processes must take part in gathering sharded weights"
    assert state["calls"] == [] and led.counters().tokens_held == 0
    leader.update_weights(weights())
    leader.sleep()
    assert state["calls"] == ["sparrow_load_weights", "/reset_prefix_cache", "/sleep?level=1"]
    assert leader.counters().tokens_held == 2


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["generate", "update_weights"])
def test_finished_steps_are_saved_if_an_engine_fails(tmp_path, failing):
    trainer = make_trainer(tmp_path, steps=4, save_every=100)
    works, calls = getattr(trainer.engine, failing), []

    def fail(*args):
        calls.append(1)
        # The fourth call is in step 3, because one call precedes step 1.
        if len(calls) == 4:
            raise EngineError("it died")
        return works(*args)

    setattr(trainer.engine, failing, fail)
    with pytest.raises(EngineError, match="it died"):
        trainer.train()
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2]
    make_trainer(tmp_path, steps=4, save_every=100, resume=True).train()
    make_trainer(tmp_path / "whole", steps=4, save_every=100).train()
    rows = [metrics_of(tmp_path), metrics_of(tmp_path / "whole")]
    assert [row["reward"] for row in rows[0]] == [row["reward"] for row in rows[1]]
    assert np.isclose(rows[0][3]["loss"]["loss"], rows[1][3]["loss"]["loss"])


def test_tokens_are_dense_only_if_every_pipeline_stage_reads_all_their_pages():
    described = [
        {"mode": "lossy", "sparse_layers": [], "dense_layers": [0]},
        {"mode": "lossy", "sparse_layers": [1], "dense_layers": []},
    ]
    of_stages = [
        {"tokens_read": 90, "tokens_held": 90, "rows": 5, "dense_rows_schedule": 5},
        {"tokens_read": 40, "tokens_held": 90, "rows": 5, "dense_rows_short": 2},
    ]
    assert tally(described, lambda _: of_stages) == Counters(130, 180, rows=5, dense_rows=2)
