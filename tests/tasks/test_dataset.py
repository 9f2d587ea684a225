"""Test tasks made from dataset rows. Rows are read in the formats of the real datasets and streamed
in a reproducible order. Errors name the row.
"""

import base64
import json
import pickle
import subprocess
import sys
import textwrap
import zlib
from functools import partial
from itertools import pairwise
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from sparrow.errors import ConfigError
from sparrow.rewards import extract_answer
from sparrow.tasks import dataset, load_task
from sparrow.tasks.dataset import DatasetTask, load_dataset_task, load_rows
from sparrow.tasks.formats import FORMATS

DATA = Path(__file__).parents[1] / "data"


def same(response: str, answer: str) -> float:
    return float(response == answer)


VERIFIERS = {"math": same}
ROWS = [{"question": f"What is {n}+0?", "answer": str(n)} for n in range(10)]


def task(rows=ROWS, **options) -> DatasetTask:
    return DatasetTask(
        "sums", rows, FORMATS["qa"], VERIFIERS, extractors={"math": extract_answer}, **options
    )


def facts(problem):
    """Return a problem's contents in a form that can be compared. ``functools.partial`` objects are
    equal only if they are identical.
    """
    return (
        problem.id,
        problem.prompt,
        problem.verify.func,
        problem.verify.keywords,
        problem.solution,
    )


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_gsm8k_rows_are_converted_to_problems():
    problems = list(load_dataset_task("gsm8k", VERIFIERS, path=DATA / "gsm8k.jsonl"))
    first = problems[0]
    assert first.id == "gsm8k-0"
    assert first.prompt.startswith("Natalia sold clips to 48 of her friends in April,")
    assert first.prompt.endswith(
        "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert first.verify("72") == 1.0 and first.verify("71") == 0.0
    assert first.solution.startswith("Natalia sold 48/2") and first.solution.endswith("#### 72")
    assert [p.verify.keywords["answer"] for p in problems] == [
        "72",
        "10",
        "5",
        "42",
        "1080",
        "850000",
        "-7",
    ]


@pytest.mark.parametrize(
    ("name", "answers"), [("aime24", ["204", "113", "371"]), ("amc23", ["27", "36", "45"])]
)
def test_competition_rows_are_converted_to_problems(name, answers):
    problems = list(load_dataset_task(name, VERIFIERS, path=DATA / f"{name}.jsonl"))
    assert [p.verify.keywords["answer"] for p in problems] == answers
    assert all(
        p.prompt.split("\n\n")[0] in {row["question"] for row in load_rows(DATA / f"{name}.jsonl")}
        for p in problems
    )


def test_problems_contain_the_expected_answer_if_it_is_text():
    (problem,) = task([{"problem": "2+2?", "answer": 4}])
    assert problem.answer == "4"
    checked = load_dataset_task(
        "mbpp", {**VERIFIERS, "code": VERIFIERS["math"]}, path=DATA / "mbpp.jsonl"
    )
    assert all(problem.answer is None for problem in checked), "tests are not readable text"
    synthetic = load_task("trace", lines=4).problem(0)
    assert synthetic.verify(f"answer: {synthetic.answer}") == 1.0


def test_numeric_answers_are_converted_to_text():
    assert next(iter(task([{"problem": "2+2?", "answer": 4}]))).verify("4") == 1.0


@pytest.mark.parametrize("answer", [["4"], [4], ("4",)])
def test_a_list_with_a_single_text_or_number_is_read_as_this_one(answer):
    rows = [{"question": "2+2?", "final_answer": answer, "solution": ["Count.", "Or add."]}]
    (problem,) = task(rows)
    assert problem.answer == "4" and problem.verify("4") == 1.0 and problem.solution is None


@given(st.integers(0, 50), st.integers(0, 2**32))
def test_each_epoch_visits_every_problem_once_in_a_reproducible_order(epoch, seed):
    stream = [task().problem(10 * epoch + i, seed) for i in range(10)]
    assert {p.id for p in stream} == {f"sums-{i}" for i in range(10)}
    again = task()
    assert [facts(again.problem(10 * epoch + i, seed)) for i in reversed(range(10))] == list(
        map(facts, stream[::-1])
    )


def test_each_epoch_and_seed_has_a_different_order():
    orders = {
        tuple(task().problem(10 * epoch + i, seed).id for i in range(10))
        for epoch in range(3)
        for seed in range(3)
    }
    assert len(orders) == 9


def test_the_order_of_problems_is_the_same_in_every_version():
    """This order must never change, because a resumed run must see the same problems."""
    assert [task().problem(i, 7).id for i in range(4)] == ["sums-3", "sums-4", "sums-1", "sums-7"]


def test_iterating_over_a_task_keeps_the_order_of_rows():
    assert [p.id for p in task()] == [f"sums-{i}" for i in range(10)] and len(task()) == 10


def test_duplicate_rows_and_overlong_prompts_are_dropped_and_counted(caplog):
    rows = [
        *ROWS,
        {"question": " what IS  3+0?", "answer": "3"},
        {"question": "Why? " * 100, "answer": "1"},
    ]
    kept = task(rows, max_length=100)
    assert (
        caplog.messages == ["the dataset: dropped 2 of 12 rows: 1 duplicate, 1 too long"]
        and len(kept) == 10
    )
    longest = max(len(p.prompt) for p in kept)
    assert len(task(rows, max_length=longest)) == 10
    with pytest.raises(
        ConfigError,
        match=r"none of the 12 rows of .* can be used \(11 too long, 1 duplicate\); raise max_length",
    ):
        task(rows, max_length=longest - 1)


def test_problem_id_contains_the_row_number_even_if_earlier_rows_were_dropped():
    rows = [ROWS[0], ROWS[0], ROWS[1]]
    assert [p.id for p in task(rows)] == ["sums-0", "sums-2"]


def test_prompts_are_rendered_with_the_template_and_the_chat_format():
    rows = [{"question": "Is {x} \\in {question}?", "answer": "yes"}]
    prompt = next(
        iter(task(rows, template="Q: {question} {y}\nA:", render="<user>{}<assistant>".format))
    ).prompt
    assert prompt == "<user>Q: Is {x} \\in {question}? {y}\nA:<assistant>"
    with pytest.raises(ConfigError, match=r"no \{question\}"):
        task(template="Solve.")


def test_problems_can_be_pickled():
    problem = task().problem(3)
    assert facts(pickle.loads(pickle.dumps(problem))) == facts(problem)


def test_local_files_of_every_format_are_read(tmp_path):
    write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for kind in ("jsonl", "json", "parquet"):
        loaded = load_dataset_task("qa", VERIFIERS, path=tmp_path / f"rows.{kind}")
        assert [p.prompt for p in loaded] == [p.prompt for p in task()]
        assert [p.verify.keywords["answer"] for p in loaded] == [str(n) for n in range(10)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "2+2?"},
            "row 2 of .*rows.jsonl has no answer or final_answer; its fields are question;",
        ),
        (
            {"question": "2+2?", "answer": " "},
            "row 2 of .* has no answer or final_answer; its fields are question, answer;",
        ),
        ({"question": "2+2?", "answer": None}, "row 2 of .* has no answer"),
        (
            {"text": "2+2?", "answer": "4"},
            "row 2 of .* has no question or problem or prompt; its fields are text, answer",
        ),
        ({}, "its fields are none"),
        (
            {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"},
            "row 2 of .* cannot be used: its prompt is a list, expected text; replace messages",
        ),
        ({"question": "2+2?", "answer": ["4", "5"]}, "row 2 of .*: its answer is a list, expected"),
        ({"question": "2+2?", "answer": {"value": 4}}, "row 2 of .*: its answer is a dict"),
        ({"question": "2+2?", "answer": []}, "row 2 of .* has no answer or final_answer"),
    ],
)
def test_error_for_an_unusable_row_names_the_row(tmp_path, row, message):
    path = write(tmp_path / "rows.jsonl", [ROWS[0], row])
    with pytest.raises(ConfigError, match=message):
        load_dataset_task("qa", VERIFIERS, path=path)


def test_gsm8k_row_without_an_answer_mark_raises_an_error(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "2+2?", "answer": "It is 4."}])
    with pytest.raises(
        ConfigError, match=r"row 1 of .* cannot be used: its answer does not end in '#### n'"
    ):
        load_dataset_task("gsm8k", VERIFIERS, path=path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"question": "1?", "answer": "1"}\n{"question": ', "line 2 is not JSON"),
        ("rows.json", '{"question": "1?"}', "does not contain objects; expected"),
        ("rows.jsonl", "[1]\n", "does not contain objects"),
        ("rows.csv", "question,answer", "files with the suffix '.csv' are not supported"),
        ("rows.parquet", "not parquet", "cannot read .*rows.parquet"),
    ],
)
def test_unreadable_files_raise_errors(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_rows(tmp_path / name)


def test_missing_file_raises_an_error():
    with pytest.raises(
        ConfigError, match=r"no dataset file at /nowhere/rows.jsonl; expected a .jsonl"
    ):
        load_dataset_task("gsm8k", VERIFIERS, path="/nowhere/rows.jsonl")


def test_error_for_an_unreachable_hub_suggests_a_local_file(monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nlong trace")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ConfigError) as caught:
        load_dataset_task("gsm8k", VERIFIERS, split="test")
    assert str(caught.value) == (
        "cannot load openai/gsm8k (main, test) from the Hugging Face hub: Couldn't reach 'openai/gsm8k' on the Hub; "
        "without a connection, pass a local .jsonl, .json or .parquet file as path"
    )


def test_hub_datasets_are_requested_by_name_config_and_split(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *a, **k: asked.append((a, k)) or datasets.Dataset.from_list(ROWS),
    )
    loaded = DatasetTask(
        "sums", dataset.load_hub_rows(FORMATS["gsm8k"], "test"), FORMATS["qa"], VERIFIERS
    )
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    assert [p.prompt for p in loaded] == [p.prompt for p in task()]


def test_unknown_datasets_and_missing_verifiers_raise_errors():
    with pytest.raises(
        ConfigError,
        match=r"no file or dataset 'gsm9k'; known datasets: .*gsm8k.*; to pass options with a file",
    ):
        load_dataset_task("gsm9k", VERIFIERS)
    with pytest.raises(ConfigError, match="'qa' is read from a local file; pass its path"):
        load_dataset_task("qa", VERIFIERS)
    with pytest.raises(ConfigError, match=r"needs a verifier for 'math', got \['code'\]"):
        load_dataset_task("gsm8k", {"code": same}, path=DATA / "gsm8k.jsonl")


def test_reference_solutions_earn_full_reward():
    from sparrow.rewards import verify_math

    for name in ("gsm8k", "aime24", "amc23"):
        for problem in load_dataset_task(name, {"math": verify_math}, path=DATA / f"{name}.jsonl"):
            answer = problem.verify.keywords["answer"]
            assert problem.verify(f"It is \\boxed{{{answer}}}.") == 1.0
            assert problem.verify(problem.solution or f"#### {answer}") == 1.0
            assert problem.verify(f"It is \\boxed{{{answer}1}}.") == 0.0
    last = load_dataset_task(
        "gsm8k", {"math": partial(verify_math, last_number=True)}, path=DATA / "gsm8k.jsonl"
    )
    assert next(iter(last)).verify("So she sold 72 clips.") == 1.0


def test_reading_local_files_loads_neither_torch_nor_the_hub_client():
    program = f"""
        import sys
        from sparrow.tasks.dataset import load_dataset_task
        load_dataset_task("gsm8k", {{"math": float}}, path={str(DATA / "gsm8k.jsonl")!r}).problem(0)
        assert not {{"torch", "datasets", "transformers", "sparrow.rewards"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def read(name: str, file: str | None = None, kind: str = "math"):
    path = DATA / f"{file or 'hub/' + name.replace('-', '_')}.jsonl"
    return list(
        load_dataset_task(name, {kind: same}, path=path, extractors={"math": extract_answer})
    )


@pytest.mark.parametrize("name", sorted(name for name, format in FORMATS.items() if format.hub))
def test_five_rows_of_each_hub_dataset_are_converted_to_five_problems(name, caplog):
    path = DATA / "hub" / f"{name.replace('-', '_').replace('+', '_plus')}.jsonl"
    verifiers = {**VERIFIERS, "code": same}
    problems = list(
        load_dataset_task(name, verifiers, path=path, extractors={"math": extract_answer})
    )
    assert len(problems) == 5 and not caplog.messages
    asked = (
        "```python code block."
        if FORMATS[name].kind == "code"
        else "\n\nPlease reason step by step, and put your"
    )
    assert all(
        asked in problem.prompt and "{question}" not in problem.prompt for problem in problems
    )


@pytest.mark.parametrize(
    ("name", "start", "answers"),
    [
        (
            "math",
            "A rectangle is three times",
            ["108", "56", r"\frac{1}{3}", r"3+\sqrt{2}", "[-2, 3]"],
        ),
        (
            "math500",
            "A rectangle is three times",
            ["108", "56", r"\frac{1}{3}", r"3+\sqrt{2}", "[-2, 3]"],
        ),
        (
            "deepscaler",
            "A rectangle is three times",
            ["108", "56", r"\frac{1}{3}", r"3+\sqrt{2}", "[-2, 3]"],
        ),
        (
            "polaris",
            "A rectangle is three times",
            ["108", "56", r"\frac{1}{3}", r"3+\sqrt{2}", "[-2, 3]"],
        ),
        ("dapo-math", "How many ordered pairs", ["80", "924", "1", "67", "54"]),
        ("aime24", "How many ordered pairs", ["80", "924", "1", "67", "54"]),
        ("aime25", "Three fair dice", ["14", "60", "351", "25", "36"]),
        ("aime26", "How many ordered pairs", ["80", "924", "1", "67", "54"]),
        ("amc23", "Three fair dice", ["14", "60", "351", "25", "36"]),
        ("amc22-24", "Three fair dice", ["14", "60", "351", "25", "36"]),
        ("gsm8k", "Mara bakes 4 trays", ["18", "6", "1300", "10", "6"]),
    ],
)
def test_math_dataset_rows_are_converted_to_problems(name, start, answers):
    from sparrow.rewards import verify_math

    problems = read(name)
    assert [p.verify.keywords["answer"] for p in problems] == answers
    assert problems[0].prompt.startswith(start)
    assert problems[0].prompt.endswith(
        "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    for answer, other in pairwise(answers):
        assert verify_math(f"So it is \\boxed{{{answer}}}.", answer) == 1.0
        assert verify_math(f"So it is \\boxed{{{answer}}}.", other) == 0.0


def test_dapo_instructions_and_duplicates_are_removed(caplog):
    task = load_dataset_task("dapo-math", VERIFIERS, path=DATA / "dapo_math.jsonl")
    assert caplog.messages[0].endswith("rows: 1 duplicate")
    prompt = next(iter(task)).prompt
    assert "Answer:" not in prompt and prompt.split("\n\n")[0].endswith("find $a + b + c$.")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\fbox{3}", "3"),
        (r"$\boxed 5$.", "5"),
        (r"\boxed{ x \in \{1, 2\} }", r"x \in \{1, 2\}"),
    ],
)
def test_boxed_answers_are_extracted_from_solutions(solution, answer):
    (problem,) = task([{"problem": "What?", "solution": solution}])
    assert problem.verify.keywords["answer"] == answer and problem.solution == solution


@pytest.mark.parametrize("solution", ["It is 5.", r"\boxed", r"\boxed{5", ""])
def test_solution_without_a_boxed_answer_raises_an_error(solution):
    with pytest.raises(
        ConfigError, match=r"row 1 of the dataset (cannot be used: it has no answer|has no answer)"
    ):
        task([{"problem": "What?", "solution": solution}])


def test_capitalised_field_names_are_accepted():
    (problem,) = task([{"Problem": "What?", "Answer": 25.0}])
    assert problem.verify.keywords["answer"] == "25.0"


def test_taco_rows_are_converted_to_problems(caplog):
    task = load_dataset_task("taco", {"code": same}, path=DATA / "taco.jsonl")
    call, stdin = task
    assert caplog.messages[0].endswith("dropped 1 of 3 rows: 1 unusable")
    tests = call.verify.keywords["answer"]
    assert tests["fn_name"] == "is_sorted_and_how" and tests["inputs"][1] == [[15, 7, 3, -8]]
    assert tests["outputs"] == [
        "yes, ascending",
        "yes, descending",
        "no",
    ]  # single values, unwrapped from one-element lists
    assert (
        "The function is called is_sorted_and_how." in call.prompt
        and "def is_sorted_and_how(arr):" in call.prompt
    )
    assert (
        call.prompt.endswith("in one ```python code block.") and "standard input" not in call.prompt
    )
    tests = stdin.verify.keywords["answer"]
    assert tests == {
        "inputs": ["3 4\n", "10 -2\n", "7 7"],
        "outputs": ["7\n-1\n", "8\n12\n", "14\n0"],
    }
    assert "reads standard input" in stdin.prompt
    assert stdin.solution.startswith("```python\na, b = ")


def test_expected_results_that_are_lists_are_not_unwrapped():
    row = {
        "question": "?",
        "input_output": json.dumps(
            {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [1, 2]]}
        ),
    }
    (problem,) = DatasetTask("taco", [row], FORMATS["taco"], {"code": same})
    assert problem.verify.keywords["answer"]["outputs"] == [[1], [1, 2]]


@pytest.mark.parametrize(
    "tests",
    ["", None, "{", "{}", '{"inputs": ["1"], "outputs": []}', '{"inputs": [' + "9" * 5000 + "]}"],
)
def test_unusable_taco_rows_are_dropped_and_counted(tests, caplog):
    good = {"question": "1?", "input_output": json.dumps({"inputs": ["1"], "outputs": ["1"]})}
    task = DatasetTask(
        "taco", [{"question": "0?", "input_output": tests}, good], FORMATS["taco"], {"code": same}
    )
    assert caplog.messages == ["the dataset: dropped 1 of 2 rows: 1 unusable"] and [
        p.id for p in task
    ] == ["taco-1"]


def test_humaneval_and_mbpp_rows_are_converted_to_problems():
    first, _, helper, _ = read("humaneval", "humaneval", kind="code")
    tests = helper.verify.keywords["answer"]
    assert first.prompt.startswith("Complete this function:\n```python\nfrom typing import List")
    assert (
        tests["entry_point"] == "make_palindrome"
        and "def is_palindrome" in tests["setup"] == tests["prelude"]
    )
    assert helper.solution.endswith("return string + string[:beginning_of_suffix][::-1]\n\n```")
    similar = read("mbpp", "mbpp", kind="code")[0]
    assert similar.prompt.startswith(
        "Write a function to find the similar elements from the given two tuple lists.\n\nIt must"
    )
    assert similar.prompt.count("assert similar_elements(") == 3
    (plus,) = read("mbpp+", "mbpp_plus", kind="code")
    assert (
        "np.allclose" in plus.verify.keywords["answer"]["test"] and "np.allclose" not in plus.prompt
    )


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("humaneval", {"prompt": "def f():", "test": "x"}, "has no entry_point"),
        ("humaneval", {"entry_point": "f", "test": "x"}, "has no prompt"),
        ("mbpp", {"text": "Write."}, "has no test_list"),
        ("livecodebench", {"question_content": "Print."}, "has no public_test_cases"),
        ("dapo-math", {"prompt": [{"content": "1?"}]}, "has no ground_truth"),
        ("dapo-math", {"reward_model": {"ground_truth": "1"}}, "has no prompt"),
        ("taco", {"input_output": "{}"}, "has no question"),
    ],
)
def test_rows_with_missing_fields_raise_errors(name, row, message):
    with pytest.raises(ConfigError, match=f"row 1 of the dataset {message}; its fields are"):
        DatasetTask(name, [row], FORMATS[name], {"math": same, "code": same})


def test_pickles_in_livecodebench_cannot_run_code(tmp_path):
    """The private tests are a pickle, which could call any function, so only text is accepted."""

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    row = json.loads((DATA / "livecodebench.jsonl").read_text().splitlines()[0])
    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    for private, message in (
        (packed, "contain the Python object"),
        ("AAAA", "cannot be unpacked"),
        ("é", "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=message):
            DatasetTask(
                "x",
                [{**row, "private_test_cases": private}],
                FORMATS["livecodebench"],
                {"code": same},
            )
    assert list(tmp_path.iterdir()) == []


def test_data_files_are_specified_for_repositories_that_require_them(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *a, **k: asked.append((a, k)) or datasets.Dataset.from_list(ROWS),
    )
    dataset.load_hub_rows(FORMATS["taco"], "train")
    dataset.load_hub_rows(FORMATS["livecodebench"], "test")
    assert asked == [
        (
            ("parquet",),
            {
                "data_files": {"train": ["hf://datasets/BAAI/TACO/ALL/train-*.parquet"]},
                "split": "train",
            },
        ),
        (
            ("json",),
            {
                "data_files": {
                    "test": ["hf://datasets/livecodebench/code_generation_lite/test*.jsonl"]
                },
                "split": "test",
            },
        ),
    ]
