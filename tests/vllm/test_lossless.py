"""Run the test cases of lossless mode, hybrid models and models with windows on vLLM's V2 model
runner, with Triton's interpreter.
"""

from pathlib import Path

import pytest

from tests import own_process

pytestmark = pytest.mark.slow

pytest.importorskip("vllm.version")
FOLDER = Path(__file__).parent
PARTS = {
    "distribution": ("lossless_cases.py", "distribution"),
    "64_ragged": ("lossless_cases.py", "64_ragged"),
    "greedy_tokens_match": ("lossless_cases.py", "greedy_tokens_match"),
    "cases": ("lossless_cases.py", "not (distribution or 64_ragged or greedy_tokens_match)"),
    "life": ("lossless_life_cases.py", ""),
    "reference": ("lossless_reference_cases.py", ""),
    "draft_weights": ("draft_weights_cases.py", ""),
    "adapters": ("adapters_cases.py", ""),
    "audit": ("audit_cases.py", ""),
    "mixture": ("mixture_cases.py", ""),
    "cascade": ("cascade_cases.py", "not distribution"),
    "cascade_distribution": ("cascade_cases.py", "distribution"),
    "head": ("head_cases.py", "not distribution"),
    "head_distribution": ("head_cases.py", "distribution"),
    "selfcheck": ("selfcheck_cases.py", ""),
    "hybrid": ("hybrid_cases.py", ""),
    "windows": ("windows_cases.py", ""),
}


def run(part):
    file, names = PARTS[part]
    return own_process.run(
        "--all",
        "-k",
        names,
        str(FOLDER / file),
        TRITON_INTERPRET="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
    )


@pytest.fixture(scope="module")
def runs(request):
    yield from own_process.side_by_side(request, "part", run)


@pytest.mark.parametrize("part", PARTS)
def test_lossless_cases_pass_in_separate_processes(runs, part):
    own_process.passed(runs[part].result())
