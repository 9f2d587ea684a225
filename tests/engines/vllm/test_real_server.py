"""Test a real vLLM server on a CPU, in separate processes. It finds Sparrow through its entry
point.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("vllm.version")
pytest.importorskip(
    "vllm.entrypoints.launchers.app",
    reason="the packages vLLM's server needs",
    exc_type=ImportError,
)

from sparrow import SparsitySchedule
from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm import VLLMServer
from sparrow.errors import ConfigError, EngineError
from sparrow.rollout import Sampling
from tests.conftest import VOCAB
from tests.ports import free_port
from tests.vllm.tiny_vllm import (
    OPTIONS,
    SMALL,
    checkpoint,
    discoverable,
    logprob_gap,
    prompts,
    same_tokens,
    tiny_model,
)

pytestmark = pytest.mark.slow

RAGGED = prompts(300, 17, 150, 511)
SAMPLED = Sampling(max_new_tokens=32, temperature=0.8, top_n=5, seed=3)


@contextlib.contextmanager
def serving(folder, sparrow, path, *more, patience=600):
    """Start a server for the model in ``folder`` with ``PYTHONPATH`` set to ``path``, and yield its
    address and process.
    """
    port = free_port()
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in OPTIONS.items()
        if value is not True
    ]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder / "model"),
        *flags,
        "--enforce-eager",
        "--skip-tokenizer-init",
        "--max-logprobs=-1",
        "--additional-config",
        json.dumps({"sparrow": sparrow}),
        "--logprobs-mode",
        "processed_logprobs",
        "--enable-scale-out",
        "--host",
        "localhost",
        "--port",
        str(port),
        *more,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "VLLM_SERVER_DEV_MODE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    log = folder / "log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + patience
    try:
        while server.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("localhost", port)) == 0:
                    break
            time.sleep(0.5)
        else:
            raise AssertionError(f"the server did not come up:\n{log.read_text()[-4000:]}")
        yield f"http://localhost:{port}", server
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Return a server's address and process."""
    folder = tmp_path_factory.mktemp("served")
    checkpoint(folder / "model")
    with serving(
        folder, SMALL.to_dict(), discoverable(folder), "--attention-backend", "CUSTOM"
    ) as server:
        yield server


def test_server_behaves_like_any_other_engine(served):
    url, _ = served
    model = tiny_model()
    scorer = HFEngine(model, SMALL, eos_ids=[])
    server = VLLMServer(url, SMALL)
    assert server.describe()["backend"] == "sparrow.vllm.cpu.CpuImpl"
    rollouts = server.generate(RAGGED, SAMPLED)
    scores = scorer.score(rollouts, SMALL, SAMPLED.temperature)
    assert logprob_gap(rollouts, scores) < 1e-4
    for rollout, score in zip(rollouts, scores, strict=True):
        assert len(rollout) == 32 and np.abs(rollout.top_logprobs - score.top_logprobs).max() < 1e-4
    cached = np.concatenate(
        [np.arange(len(p) + 1, len(p) + len(r)) for p, r in zip(RAGGED, rollouts, strict=True)]
    )
    counters = server.counters()
    assert counters.tokens_held == 4 * cached.sum()
    assert counters.tokens_read == cached.sum() + 3 * SMALL.tokens_read(cached).sum()
    assert same_tokens(rollouts, server.generate(RAGGED, SAMPLED))
    with pytest.raises(ConfigError, match="top_n is 100000, but the vLLM server"):
        server.generate(RAGGED, replace(SAMPLED, top_n=100_000))

    dense = SparsitySchedule.dense()
    other = tiny_model(seed=1)
    server.set_schedule(dense)
    server.update_weights(other.named_parameters())
    updated = server.generate(RAGGED, SAMPLED)
    assert (
        logprob_gap(
            updated, HFEngine(other, SMALL, eos_ids=[]).score(updated, dense, SAMPLED.temperature)
        )
        < 1e-4
    )
    # A client that connects with a schedule sets the server's schedule.
    server.update_weights(model.named_parameters())
    assert same_tokens(rollouts, VLLMServer(url, SMALL).generate(RAGGED, SAMPLED))
    with pytest.raises(ConfigError, match="not the page layout"):
        server.set_schedule(SMALL.replace(page_size=8))


def test_http_probe_measures_the_same_acceptance_as_an_engine(served):
    """Compare the actor's lists from decoding with the policy's lists from a dense prefill, which
    must not read the actor's cache.
    """
    from sparrow.integrations.probe import probe

    url, _ = served
    asked = prompts(200, 17, 330, seed=5)
    # Lists contain the whole vocabulary, so the two bounds are equal.
    found = probe([url, url], asked, SMALL, max_new_tokens=40, top_n=VOCAB)
    for one in found:
        assert len(one.lower) == 40
        np.testing.assert_allclose(one.lower, one.upper, atol=1e-4)
    # In the second response, the actor reads everything and equals the policy. In the others,
    # sparsity lowers acceptance by more than rounding does.
    assert found[1].lower.min() > 1 - 1e-4
    assert found[0].upper.min() < 0.97 and found[2].upper.min() < 0.97
    (short,) = probe([url], asked[:1], SMALL, max_new_tokens=40, top_n=8)
    assert np.all(short.lower <= short.upper) and short.lower.min() < short.upper.min() < 1
    assert found[0].position[0] == 208 and found[2].position[-1] == 384
    with pytest.raises(ConfigError, match="no vLLM server answers at http://localhost:1"):
        probe(["http://localhost:1"], asked, SMALL, 1)


def test_probe_logs_the_acceptance_tails_of_sparse_and_dense_rollouts(served):
    from sparrow.integrations.probe import Probe

    url, _ = served
    watched = Probe([url])
    assert watched.schedule == SMALL and watched.counted() == {}
    asked = prompts(200, 330, 260, seed=5)
    found = watched.measured(asked, max_new_tokens=40, top_n=VOCAB)
    for length in (
        "200-300",
        "300-400",
    ):  # lists of the whole vocabulary: dense rollouts differ only by rounding
        assert (
            found[f"sparrow/p5/{length}"]
            < 0.97
            < 1 - 1e-4
            < found[f"sparrow/p5/{length}/ceiling"]
            <= 1
        )
    assert found["sparrow/p5"] == min(found[f"sparrow/p5/{at}"] for at in ("200-300", "300-400"))
    assert found["sparrow/sequences"] == 3 == watched.report.n_sequences
    assert watched.counted() == {}, "what the measurement reads must not be counted"
    server = VLLMServer(url, SMALL)
    assert server.schedule == SMALL, "the schedule must be restored"
    server.generate(RAGGED, SAMPLED)
    assert 0.3 < watched.counted()["sparrow/tokens_read"] < 0.9
    short = watched.measured(asked, max_new_tokens=40, top_n=8)  # keeps the ceiling
    assert short["sparrow/p5/200-300/ceiling"] == found["sparrow/p5/200-300/ceiling"]


def test_killed_server_is_reported_in_one_sentence(served):
    url, process = served
    server = VLLMServer(url, SMALL)
    threading.Timer(2, process.kill).start()
    with pytest.raises(
        EngineError, match=f"no vLLM server answers at {url} .*--resume|HTTP 500 .*EngineCore"
    ):
        for _ in range(1000):
            server.generate(prompts(*[300] * 32), SAMPLED)
