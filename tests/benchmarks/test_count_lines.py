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


def test_what_was_added_is_counted_apart_and_a_commit_as_it_was(count_lines, monkeypatch):
    files = {"sparrow/cli.py": "a = 1\n", "sparrow/mode.py": "b = 1\n\n", "recipes/x.py": "# c\n"}
    monkeypatch.setattr(count_lines, "sources", lambda revision: files.items())
    found = count_lines.count(None)
    assert found["sparrow, in all", "lines"] == 3 and found["sparrow, without what was added", "lines"] == 1
    assert found["sparrow: lossless mode", "lines"] == 2 and found["sparrow: lossless mode", "code"] == 1
    assert found["benchmarks, recipes and studies", "lines"] == 1
    assert found["benchmarks, recipes and studies", "code"] == 0
