"""Test the audit of a data-parallel server, with a stand-in for the server and with vLLM on a
CPU.
"""

import importlib
import itertools
import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SERVER = """
    import json, os, signal, subprocess, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from pathlib import Path

    given = sys.argv[1:]
    print("given", json.dumps(given), flush=True)
    if "--broken" in given:
        sys.exit(3)
    if "--stubborn" in given:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    METRICS = Path(__file__).with_name("metrics.txt").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS if self.path == "/metrics" else b"")

    port = int(given[given.index("--port") + 1])
    HTTPServer(("localhost", port), Handler).serve_forever()
"""
METRICS = """\
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 8.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 4.0
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 6.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 5.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.2e+03
vllm:generation_tokens_total{engine="1",model_name="m"} 900.0
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return the script, which starts a stand-in for vLLM's server."""
    server = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    for package in list(server.relative_to(tmp_path).parents)[:-1]:
        (tmp_path / package / "__init__.py").touch()
    server.write_text(textwrap.dedent(SERVER))
    server.with_name("metrics.txt").write_text(METRICS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("audit_serving")


def test_server_gets_the_options_and_its_counts_are_read_per_rank(script, capfd):
    with script.serving("max_num_seqs=8,enforce_eager=true", "fp32") as address:
        assert script.counted(address) == {
            "drafted": 12,
            "accepted": 9,
            "tokens of rank 0": 1200,
            "tokens of rank 1": 900,
        }
    printed = capfd.readouterr().out
    given = json.loads(printed.splitlines()[0].removeprefix("given "))
    pairs = dict(itertools.pairwise(given))
    assert given[-3:] == ["--max-num-seqs", "8", "--enforce-eager"]
    assert (pairs["--data-parallel-size"], pairs["--dtype"]) == ("2", "float32")
    settings = json.loads(pairs["--additional-config"])["sparrow"]
    assert settings == {"mode": "lossless", "draft_schedule": script.FEW_PAGES}
    assert "the server started in" in printed


def test_output_of_a_server_that_does_not_start_is_shown(script, capfd):
    with pytest.raises(RuntimeError, match="did not start"), script.serving("broken=true", "bf16"):
        pass
    assert "--broken" in capfd.readouterr().out


def test_server_that_does_not_stop_is_killed_with_its_processes(script, monkeypatch):
    monkeypatch.setattr(script, "STOP_S", 0.5)
    this = psutil.Process()
    before = this.children(recursive=True)  # other tests' helper processes may still be running
    with script.serving("stubborn=true", "bf16"):
        family = set(this.children(recursive=True)) - set(before)
        assert len(family) == 2
    _, running = psutil.wait_procs(family, 60)
    assert not running


ARM = """
    import json, sys

    sys.path.insert(0, sys.argv[1])
    import audits
    import audit_serving

    audits.NEW_TOKENS = 16
    sampled = audit_serving.sample("data parallel", *sys.argv[2:4], "fp32", 2, 6)
    tokens = [len(each) for each in sampled.seeds]
    print(json.dumps({"tokens": tokens, "drafts": sampled.drafts}))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="no vllm")
def test_ranks_of_a_real_server_share_the_requests_of_an_arm(tmp_path):
    pytest.importorskip("vllm.entrypoints.launchers.app", exc_type=ImportError)
    from tests.vllm.tiny_vllm import OPTIONS, on_v2

    options = ",".join(f"{name}={value}" for name, value in OPTIONS.items() if name != "dtype")
    arguments = [str(ROOT / "benchmarks"), str(tmp_path), options.replace("True", "true")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ARM), *arguments],
        env={**os.environ, "PYTHONPATH": on_v2(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    drafts = found["drafts"]
    assert min(drafts.values()) > 0 and drafts["accepted"] <= drafts["drafted"]
    ranks = [drafts[f"tokens of rank {rank}"] for rank in range(2)]
    assert sum(ranks) == sum(found["tokens"]) and min(found["tokens"]) > 0
