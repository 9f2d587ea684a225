"""Test rollouts and top lists from a server without Sparrow, simulated by a small HTTP server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from sparrow.engines.base import Counters
from sparrow.engines.vllm.stock import StockServer
from sparrow.errors import ConfigError, EngineError, PromptError
from sparrow.rollout import Rollout, Sampling
from sparrow.schedule import SparsitySchedule


class Completions(BaseHTTPRequestHandler):
    """A server that answers every prompt with its last token and the next two, each with
    probability 1/2.
    """

    def do_GET(self):
        if self.path == "/metrics":
            self.answer("")
        else:
            self.answer({"data": [{"id": "served", "max_model_len": 100}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        last = body["prompt"][-1]
        choice = {"finish_reason": "length"}
        if "prompt_logprobs" in body:
            n = min(body["prompt_logprobs"], self.server.longest)
            likely = {str(k): {"logprob": -float(k), "rank": k} for k in range(1, n + 1)}
            positions = [
                {**likely, str(token): {"logprob": -float(token), "rank": token}}
                for token in body["prompt"][1:]
            ]
            choice["prompt_logprobs"] = [None, *positions]
        else:
            choice["logprobs"] = {"token_logprobs": [-0.5] * 3}
            if body["return_token_ids"] and self.server.knows_ids:
                choice["token_ids"] = [last, last + 1, last + 2]
        self.answer({"choices": [choice]})

    def answer(self, value):
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Suppress log messages."""


@pytest.fixture
def served():
    server = ThreadingHTTPServer(("localhost", 0), Completions)
    server.asked, server.longest, server.knows_ids = [], 20, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def connected(server):
    return StockServer(f"http://localhost:{server.server_port}/")


def test_completions_are_converted_to_rollouts(served):
    engine = connected(served)
    sampling = Sampling(3, temperature=0.8, top_k=5, top_p=0.9, seed=1, top_n=0)
    rollouts = engine.generate([[1, 2], [7]], sampling)
    assert [r.response_ids.tolist() for r in rollouts] == [[2, 3, 4], [7, 8, 9]]
    assert rollouts[0].logprobs.tolist() == [-0.5] * 3 and rollouts[0].top_ids.shape == (3, 0)
    assert rollouts[0].cycle_place is None
    bodies = [body for path, body in served.asked if path == "/v1/completions"]
    assert {body["seed"] for body in bodies} == set(sampling.request_seeds(2))
    asked = {"model": "served", "temperature": 0.8, "top_k": 5, "top_p": 0.9, "max_tokens": 3}
    assert all(body[name] == value for body in bodies for name, value in asked.items())
    assert engine.counters() == Counters(0, 0)


def test_settings_of_the_checkpoint_do_not_change_the_distribution(served):
    """A server takes missing settings from the checkpoint's generation_config.json."""
    connected(served).generate([[1, 2]], Sampling(3, temperature=0.8, top_n=0))
    (body,) = [body for path, body in served.asked if path == "/v1/completions"]
    neutral = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0}
    assert {name: body.get(name) for name in neutral} == neutral


def test_top_lists_cover_only_the_response(served):
    rollouts = [
        Rollout([9, 9], np.array([2, 5]), None, None, None, "length"),
        Rollout([9], np.array([30]), None, None, None, "length"),
    ]
    first, second = connected(served).top_lists(rollouts, 3)
    assert first.logprobs.tolist() == [
        -2.0,
        -5.0,
    ]  # the second token is not listed, but has a log-prob
    assert first.top_ids.tolist() == [[1, 2, 3], [1, 2, 3]]
    assert first.top_logprobs.tolist() == [[-1.0, -2.0, -3.0]] * 2
    assert second.logprobs.tolist() == [-30.0]
    prompts = sorted(body["prompt"] for _, body in served.asked)
    assert prompts == [[9, 9, 2, 5], [9, 30]]


def test_top_lists_shorter_than_requested_raise_an_error(served):
    served.longest = 5
    rollout = Rollout([9], np.array([2]), None, None, None, "length")
    with pytest.raises(EngineError, match=r"a list of 5 tokens, expected 8; .*--max-logprobs"):
        connected(served).top_lists([rollout], 8)


def test_response_without_token_ids_raises_an_error(served):
    served.knows_ids = False
    with pytest.raises(EngineError, match="contains no token ids"):
        connected(served).generate([[1]], Sampling(3, top_n=0))


def test_stock_vllm_rejects_overlong_prompts_and_any_schedule(served):
    engine = connected(served)
    with pytest.raises(PromptError, match="do not fit in the model's context of 100"):
        engine.generate([[1] * 98], Sampling(3, top_n=0))
    with pytest.raises(ConfigError, match="stock vLLM cannot follow a schedule"):
        engine.set_schedule(SparsitySchedule.dense())


def test_an_address_with_the_path_of_the_openai_api_is_refused():
    message = "is 'http://localhost:1/v1/', but .* outside /v1; give 'http://localhost:1'"
    with pytest.raises(ConfigError, match=message):
        StockServer("http://localhost:1/v1/")


def test_unreachable_server_is_reported():
    with pytest.raises(EngineError, match="no vLLM server answers at http://localhost:1"):
        StockServer("http://localhost:1")
