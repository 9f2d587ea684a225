"""What ``benchmarks/count_lines.py`` takes for a line of code."""

import pytest


@pytest.fixture
def count_lines(monkeypatch, request):
    monkeypatch.syspath_prepend(request.config.rootpath / "benchmarks")
    import count_lines

    return count_lines


def test_code_is_neither_blank_nor_comment_nor_docstring(count_lines):
    text = '''"""Two lines
of a docstring."""

import os  # counts

# does not
X = """a value
# of two lines"""
"""What X is."""


def f():
    """Once more."""
    return (
        1,

        2,
    )
'''
    assert count_lines.code_lines("a.py", text) == 1 + 2 + 1 + 4
    assert count_lines.code_lines("a.cu", "// no\n/* no\nno */ int a; // yes\n\nint b;\n") == 2


@pytest.fixture
def repository(count_lines, tmp_path, monkeypatch):
    """A package with three commits: the first, one that rewords a line of it, and one that adds
    two.
    """
    monkeypatch.setattr(count_lines, "ROOT", tmp_path)

    def commit(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        count_lines.git("add", "-A")
        count_lines.git(
            "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-q", "--no-verify", "-m", "x"
        )
        return count_lines.git("rev-parse", "HEAD").decode().strip()

    count_lines.git("init", "-q")
    old = "first = 1\nsecond = 2\nthird = 3\n"
    monkeypatch.setattr(
        count_lines,
        "FIRST",
        commit({"sparrow/a.py": old, "sparrow/rewards/sandbox/b.py": "b = 1\n"}),
    )
    reworded = commit({"sparrow/a.py": old.replace("second =", "runner_up =")})
    commit(
        {
            "sparrow/a.py": old.replace("second =", "runner_up =") + "new = 4\n\n",
            "recipes/x.py": "# c\n",
            count_lines.IGNORED: f"{reworded}  # reworded\n",
        }
    )
    return count_lines


def test_lines_are_as_old_as_what_they_stand_for(repository):
    found = repository.count("HEAD")
    assert [found["sparrow", kind] for kind in ("lines", "code", "added")] == [5, 4, 2]
    assert [found["sparrow, in all", kind] for kind in ("lines", "added")] == [6, 2]
    assert (
        found["sparrow, but for packages in it", "lines"] == 5
        and found["sparrow/rewards/sandbox", "lines"] == 1
    )
    assert [found["benchmarks, recipes and studies", kind] for kind in ("lines", "code")] == [1, 0]
    assert repository.cell(found, "sparrow") == "5 (4); 2 added, 3 without"
    assert repository.cell(repository.count(repository.FIRST), "sparrow") == "3 (3)"


def test_a_blank_line_is_as_old_as_the_line_after_it(repository):
    """Where a commit replaces what stands around a blank line, git takes that line for an old one."""
    path = repository.ROOT / "sparrow/c.py"
    for text in ("old = 1\n\nkept = 2\n\nalso = 3\n", "other = 1\n\nkept = 2\n\nanother = 3\n"):
        path.write_text(text)
        repository.git("add", "-A")
        repository.git(
            "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-q", "--no-verify", "-m", "x"
        )
    second = repository.git("rev-parse", "HEAD").decode().strip()
    assert repository.added_lines("HEAD", "sparrow/c.py", {second}, set()) == 3


def test_of_two_lines_from_one_a_single_one_is_old(repository):
    line = "copied = a_function_with_a_name(of_its_own, and_arguments, so_that_git_finds_it)\n"
    for files in ({"a": line}, {"a": line, "b": "b = 1\n" + line}):
        for name, text in files.items():
            (repository.ROOT / f"sparrow/{name}.py").write_text(text)
        repository.git("add", "-A")
        repository.git(
            "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-q", "--no-verify", "-m", "x"
        )
    second, origins = repository.git("rev-parse", "HEAD").decode().strip(), set()
    added = [
        repository.added_lines("HEAD", f"sparrow/{name}.py", {second}, origins) for name in "ab"
    ]
    assert added == [0, 2] and repository.added_lines("HEAD", "sparrow/b.py", {second}, set()) == 1


def test_a_commit_that_is_not_listed_adds_the_lines_it_rewords(repository):
    (repository.ROOT / repository.IGNORED).write_text("")
    assert repository.count("HEAD")["sparrow", "added"] == 3
