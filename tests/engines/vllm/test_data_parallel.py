"""Test lossless mode in a real vLLM server with data parallelism, in processes on a CPU."""

import re
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm.version")
pytest.importorskip(
    "vllm.entrypoints.launchers.app",
    reason="the packages vLLM's server needs",
    exc_type=ImportError,
)

import torch

from sparrow.decoding import Decoding
from sparrow.engines.vllm import VLLMServer
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.engines.vllm.test_real_server import serving
from tests.vllm.tiny_vllm import checkpoint, on_v2, prompts

pytestmark = pytest.mark.slow

DRAFTS = SparsitySchedule(top_k=(4,), bin_tokens=100, recent_pages=1, dense_layers=())


def by_rank(metrics, name):
    """Return one of vLLM's counters for each data-parallel rank."""
    found = re.findall(rf'^vllm:{name}_total\{{engine="(\d)"[^}}]*\}} (\S+)', metrics, re.M)
    return {int(rank): float(value) for rank, value in found}


@torch.no_grad()
def greediest(model, rollout):
    """Return the largest difference between the best token's log-prob and the sampled token's, as
    computed by transformers.
    """
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
    log_p = model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
    own = log_p.gather(1, ids[0, len(rollout.prompt_ids) :, None])[:, 0]
    return float((log_p.amax(1) - own).max())


def test_both_ranks_draft_and_sample_greedy_tokens_of_the_dense_model(tmp_path):
    model = checkpoint(tmp_path / "model", num_hidden_layers=2)
    decoding = Decoding.lossless(DRAFTS, draft_tokens=4)  # the number of drafts adapts
    asked = prompts(*[60, 40, 90, 33] * 3, seed=6)
    flags = ("--data-parallel-size=2",)
    with serving(tmp_path, decoding.to_dict(), on_v2(tmp_path), *flags, patience=500) as (url, _):
        engine = VLLMServer(url, decoding)
        rollouts = engine.generate(asked, Sampling(24, temperature=0.0, top_n=0))
        metrics = urlopen(f"{url}/metrics").read().decode()
    assert max(greediest(model, rollout) for rollout in rollouts) < 1e-4
    generated = by_rank(metrics, "generation_tokens")
    accepted = by_rank(metrics, "spec_decode_num_accepted_tokens")
    assert sum(generated.values()) == 24 * len(asked)
    assert generated.keys() == accepted.keys() == {0, 1}
    assert min(*generated.values(), *accepted.values()) > 0
