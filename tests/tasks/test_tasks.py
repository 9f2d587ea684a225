"""Test tasks: a problem depends only on its index and the seed, solutions are accepted, and text
survives the tokenizer.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparrow
from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import Problem, Trace, build_tokenizer, load_task, register_task
from sparrow.tasks.vocabulary import LINKS, NAMES, check_answer

REASONER = Path(sparrow.__file__).parent / "reasoner"

indices = st.integers(0, 10**9)
seeds = st.integers(0, 10**6)


def run_program(prompt: str) -> int:
    """Interpret a program independently of the task. Reading a value twice or overwriting an unread
    value is an error.
    """
    values: dict[str, int] = {}
    for line in prompt.removeprefix("program:\n").removesuffix("trace:\n").splitlines():
        expression, name = line.strip().split(" -> ")
        words = expression.split(" ")
        numbers = [int(word) if word.isdigit() else values.pop(word) for word in words[::2]]
        assert name not in values
        result = (
            numbers[0]
            if len(words) == 1
            else numbers[0] + (numbers[1] if words[1] == "+" else -numbers[1])
        )
        values[name] = result % 10
    (last,) = values.values()
    return last


@given(st.integers(2, 40), indices, seeds)
def test_a_trace_solution_matches_its_programs_result(lines: int, index: int, seed: int) -> None:
    problem = Trace(lines).problem(index, seed)
    answer = run_program(problem.prompt)
    assert problem.solution is not None
    assert problem.solution.endswith(f"answer: {answer}")
    assert problem.verify(problem.solution) == 1.0
    assert sum(problem.verify(f"answer: {digit}") for digit in range(10)) == 1.0
    assert problem.prompt.count("\n") == lines + 2


def test_solutions_of_hard_problems_have_thousands_of_tokens() -> None:
    problem = Trace(300).problem(0)
    assert problem.solution is not None
    assert len(build_tokenizer()(problem.solution)["input_ids"]) > 2500
    assert problem.verify(problem.solution) == 1.0


def test_long_programs_reuse_a_name_only_after_its_value_was_read() -> None:
    for index in range(20):
        problem = Trace(400).problem(index)
        assert problem.solution is not None
        assert problem.solution.endswith(f"answer: {run_program(problem.prompt)}")


def test_problems_depend_only_on_index_and_seed() -> None:
    task = Trace(12)
    problems = [task.problem(i, seed) for seed in range(5) for i in range(40)]
    again = [task.problem(i, seed) for seed in range(5) for i in range(40)]
    assert [(p.id, p.prompt, p.solution) for p in again] == [
        (p.id, p.prompt, p.solution) for p in problems
    ]
    assert len({p.prompt for p in problems}) == len({p.id for p in problems}) == 200


def test_generated_problems_match_the_published_ones() -> None:
    # The checkpoint and every reported figure depend on exactly these texts.
    problem = Trace(4).problem(0)
    assert problem.prompt == "program:\n 8 -> gi\n 3 -> je\n je - 1 -> se\n gi - se -> pa\ntrace:\n"
    assert problem.solution == (
        " 8 hence gi 8\n 3 next je 3\n je - 1 well je 3, next se 2\n gi - se hence gi 8, se 2, well pa 6\nanswer: 6"
    )


def test_problems_can_be_pickled() -> None:
    problem = Trace(6).problem(3)
    assert pickle.loads(pickle.dumps(problem)).verify(problem.solution) == 1.0


def test_the_slip_setting_corrupts_the_specified_share_of_results() -> None:
    line = re.compile(r" \w+ ([+-]) (\w+) \w+ \w+ (\d),(?: \w+ (\d),)? \w+ \w+ (\d)")
    wrong, results, unsolved = 0, 0, 0
    for index in range(400):
        problem = Trace(16, slip=0.25).problem(index)
        assert problem.solution is not None
        for sign, operand, left, right, result in line.findall(problem.solution):
            results += 1
            wrong += (int(left) + int(sign + (right or operand))) % 10 != int(result)
        unsolved += problem.verify(problem.solution) == 0.0
    assert results > 3000
    assert wrong / results == pytest.approx(0.25, abs=0.03)
    assert unsolved > 300


def test_linking_words_are_drawn_from_a_polya_urn() -> None:
    # Each of 8 words has the weight 1/2 plus 1 for each use, so the second word repeats the first
    # with probability (1/2 + 1) / (4 + 1).
    repeated = 0
    for index in range(4000):
        solution = Trace(2).problem(index).solution
        assert solution is not None
        first, second = re.findall(rf" ({'|'.join(LINKS)}) \w+ \d\n", solution)
        repeated += first == second
    assert repeated / 4000 == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("answer: 7", 1.0),
        (" ba 7\nanswer: 7\n", 1.0),
        ("answer: 7<eos>", 1.0),
        ("answer: 7<eos><eos>\n", 1.0),
        ("answer: 3", 0.0),
        ("answer: 7\nanswer: 3", 0.0),
        ("answer: 77", 0.0),
        ("answer: 7 and more", 0.0),
        ("7", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_final_answer_is_rewarded(response: str, reward: float) -> None:
    assert check_answer(response, 7) == reward


@settings(max_examples=30)
@given(st.sampled_from([Trace(5), Trace(5, slip=0.5), Trace(140)]), indices)
def test_the_tokenizer_round_trips_text(task: Trace, index: int) -> None:
    tokenizer = build_tokenizer()
    problem = task.problem(index)
    text = f"{problem.prompt}{problem.solution}"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.decode([i]) for i in ids) == text
    assert ids == tokenizer(problem.prompt)["input_ids"] + tokenizer(problem.solution)["input_ids"]
    assert tokenizer.unk_token_id not in ids


def test_the_tokenizer_is_small_and_loads_from_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 162
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == ["<pad>", "<bos>", "<eos>", "<unk>"]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    tokenizer.save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = " 7 then ba 7\nanswer: 7<eos>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (
        loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True)
        == " 7 then ba 7\nanswer: 7"
    )
    assert loaded("what")["input_ids"] == [loaded.unk_token_id]


def test_names_are_distinct_and_differ_from_linking_words() -> None:
    assert len(set(NAMES)) == 128
    assert not set(NAMES) & set(LINKS)


def test_tasks_can_be_loaded_by_name() -> None:
    assert load_task("trace", lines=7, slip=0.1) == Trace(7, slip=0.1)
    with pytest.raises(ConfigError, match="no task 'maze'; choose one of trace,"):
        load_task("maze")
    with pytest.raises(ConfigError, match="'steps'"):
        load_task("trace", steps=3)
    with pytest.raises(ConfigError, match="'trace' is taken"):
        register_task("trace", Trace)


def test_registered_tasks_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Echo:
        def problem(self, index: int, seed: int = 0) -> Problem:
            return Problem(f"echo-{seed}-{index}", str(index), str(index).__eq__)

    monkeypatch.setattr("sparrow.tasks.base.TASKS", {})
    register_task("echo", Echo)
    assert load_task("echo").problem(4, seed=2).id == "echo-2-4"


@pytest.fixture(scope="module")
def reasoner() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(REASONER).eval()


def test_reasoner_and_task_use_the_same_vocabulary() -> None:
    transformers = pytest.importorskip("transformers")
    assert (
        transformers.AutoTokenizer.from_pretrained(REASONER).get_vocab()
        == build_tokenizer().get_vocab()
    )


def test_the_reasoner_solves_unseen_programs_greedily(reasoner: Any) -> None:
    tokenizer = build_tokenizer()
    problems = [Trace(8).problem(i, seed=1) for i in range(8)]
    inputs = tokenizer(
        [p.prompt for p in problems], padding=True, return_tensors="pt", return_token_type_ids=False
    )
    output = reasoner.generate(**inputs, max_new_tokens=96, do_sample=False)
    texts = tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert [p.verify(text) for p, text in zip(problems, texts, strict=True)] == [1.0] * 8


def test_the_reasoners_acceptance_rises_gradually_with_the_number_of_pages_read(
    reasoner: Any,
) -> None:
    import torch

    from sparrow.engines.hf import set_schedule, teacher_forced

    tokenizer = build_tokenizer()
    p5 = []
    for top_k in (1, 6, 16):
        set_schedule(reasoner, SparsitySchedule.fixed(top_k, dense_layers=(0,)))
        alpha = []
        for i in range(6):
            problem = Trace(32).problem(i, seed=1)
            prompt = tokenizer(problem.prompt)["input_ids"]
            ids = torch.tensor([prompt + tokenizer(problem.solution)["input_ids"]])
            with torch.no_grad():
                dense = reasoner(ids, use_cache=False).logits.softmax(-1)[0, len(prompt) - 1 :]
                with teacher_forced(reasoner, [len(prompt)]):
                    sparse = reasoner(ids, use_cache=False).logits.softmax(-1)[0, len(prompt) - 1 :]
            alpha.append(torch.minimum(dense, sparse).sum(-1))
        p5.append(torch.cat(alpha).quantile(0.05).item())
    assert p5[0] < 0.05
    assert 0.86 < p5[1] < 0.94
    assert p5[2] > 0.98


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Trace(1), "lines is 1, but must be greater than or equal to 2"),
        (lambda: Trace(8, slip=1.0), "slip is 1.0, but must be less than 1"),
    ],
)
def test_invalid_task_settings_raise_errors(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_tasks_load_neither_torch_nor_transformers() -> None:
    code = "import sys, sparrow.tasks; print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
