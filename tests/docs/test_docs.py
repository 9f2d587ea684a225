"""Run the Python examples in the docs, and parse the documented options of all commands."""

import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sparrow.cli.loading import load_problems, load_task_spec
from sparrow.engines.registry import parse_engine
from sparrow.schedule import ALL_PAGES, SparsitySchedule
from sparrow.tasks import Mixture, Trace, build_tokenizer
from tests.conftest import tiny_model
from tests.vllm.tiny_vllm import discoverable

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(
    str(page.relative_to(DOCS))
    for page in DOCS.rglob("*.md")
    if "```python" in page.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_in_the_docs_run(page):
    blocks = re.findall(
        r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.S
    )
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], check=True)


EXAMPLES = [DOCS.parent / "README.md", DOCS / "own-loop.md"]
"""Pages with examples that need a model from the hub."""
PREPARE = {
    'additional_config={"sparrow": "lossless"}': """
        from tests.vllm import v2_on_cpu  # the model runner used on GPUs
        from vllm.v1.sample.ops import topk_topp_sampler
        topk_topp_sampler.HAS_TRITON = False
    """,
    'attention_backend="CUSTOM"': "",
    "AutoModelForCausalLM": "",
}
"""A text that identifies each block, and the code that must run before it on a machine without a
GPU.
"""


@pytest.mark.parametrize("mark", PREPARE)
def test_examples_with_hub_models_run_as_printed(mark, tmp_path):
    """Replace the model in the example with a random one whose shape suits the published schedule."""
    blocks = [
        block
        for page in EXAMPLES
        for block in re.findall(r"```py(?:thon)?\n(.*?)```", page.read_text("utf-8"), flags=re.S)
    ]
    (block,) = (block for block in blocks if mark in block)
    if "from vllm" in block:
        pytest.importorskip("vllm.version")
    folder, tokenizer = tmp_path / "Qwen" / "Qwen3-4B", build_tokenizer()
    model = tiny_model(
        vocab_size=len(tokenizer),
        num_hidden_layers=36,
        hidden_size=32,
        head_dim=64,
        num_attention_heads=4,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    code = (
        textwrap.dedent(PREPARE[mark])
        + block
        + "\nimport sparrow\nprint('ran with', sparrow.__file__)"
    )
    quiet = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_USE_AOT_COMPILE": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": discoverable(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "ran with" in done.stdout, (
        done.stdout[-2000:] + done.stderr[-3000:]
    )


def test_command_line_page_matches_the_help_output():
    write_cli = runpy.run_path(str(DOCS / "write_cli.py"))
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    commands = ["demo", "train", "measure", "calibrate", "eval", "cost", "tune", "audit", "report"]
    assert re.findall(r"<!-- options: (\w+) -->", page) == commands
    assert "`--rollout.temperature FLOAT`" in page and "`PATH`" in page
    assert write_cli["written"](page) == page, "run python docs/write_cli.py"


def test_every_example_of_an_option_format_can_be_parsed(monkeypatch, tmp_path):
    """Check that each example in the table of formats matches its row."""
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    lines = page.partition("## `sparrow demo`")[0].splitlines()
    rows = [
        [cell.strip() for cell in line.split("|")[1:3]]
        for line in lines
        if line.startswith("|") and "`" in line
    ]
    forms: dict[str, list[str]] = {}
    form = ""
    for name, examples in rows:
        form = name or form
        forms.setdefault(form, []).extend(re.findall(r"`(.*?)`", examples))
    assert {form: len(examples) for form, examples in forms.items()} == {
        "a schedule": 6,
        "a task": 3,
        "a dataset": 2,
        "a reward": 1,
        "an engine": 8,
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "schedule.json").write_text('{"top_k": [7]}')
    (tmp_path / "my_tasks.py").write_text(
        "class Reverse:\n    def __init__(self, digits=8):\n        self.digits = digits\n"
        "    def problem(self, index, seed=0): ...\n"
    )
    (tmp_path / "my_rewards.py").write_text("def judge(response, answer): return 1.0\n")
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    top_k = [
        SparsitySchedule.load(text.removeprefix("auto:")).top_k[0]
        for text in forms["a schedule"]
        if text != "auto"
    ]
    assert top_k == [ALL_PAGES, 64, 29, 7, 64]
    tasks = [load_task_spec(text) for text in forms["a task"]]
    assert tasks[0] == Trace(lines=24) and [task.digits for task in tasks[1:]] == [8, 4]
    tokenizer = build_tokenizer()
    assert isinstance(load_problems(None, forms["a dataset"], tokenizer), Mixture)
    judged = load_problems(None, forms["a dataset"][:1], tokenizer, reward=forms["a reward"][0])
    assert judged.problem(0).verify("anything") == 1.0
    engines = [parse_engine(text) for text in forms["an engine"]]
    assert [engine.options for engine in engines[:3]] == [
        {},
        {},
        {"gpu_memory_utilization": 0.5, "max_model_len": 4096},
    ]
    assert [engine.kind.is_stock for engine in engines] == [False] * 5 + [True] * 3
