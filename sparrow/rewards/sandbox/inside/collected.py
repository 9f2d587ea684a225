"""Run the tests that a test runner would collect: functions named ``test_...`` and test classes.

``run`` takes the place of unittest or pytest: it finds the tests and calls them.
"""

from __future__ import annotations

import ast
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

_ENTERED = "_entered_tests"


def mark(tree: ast.Module) -> ast.Module:
    """Instrument the test code so that every ``test_...`` function records being called."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_test(node.name):
            note = ast.parse(f"{_ENTERED}.add({node.name!r})").body
            described = ast.get_docstring(node) is not None
            node.body[described:described] = note
    return ast.fix_missing_locations(tree)


def _is_test(name: str) -> bool:
    return name.startswith("test")


def prepare(source: str, namespace: dict[str, Any]) -> None:
    """Prepare the globals for the test code ``source``. ``unittest.main`` and ``pytest.main``
    become no-ops, because ``run`` calls the tests. If the source uses numpy, its comparisons are
    guarded (see ``guard_numpy``).
    """
    namespace[_ENTERED] = set()
    if "unittest" in source:
        import unittest

        unittest.main = _nothing  # type: ignore[assignment]
    if "pytest" in source:
        import_module("pytest").main = _nothing  # type: ignore[attr-defined]
    if "numpy" in source:
        guard_numpy()


def _nothing(*_: Any, **__: Any) -> int:
    return 0


def guard_numpy() -> None:
    """Make numpy's comparisons fail if one side has elements and the other has none. Broadcasting
    would otherwise make ``allclose([], 2.5)`` true.
    """
    numpy: Any = import_module("numpy")

    def empty(pair: tuple[Any, ...]) -> bool:
        """Return whether one side has elements and the other has none."""
        try:
            sizes = [numpy.size(side) for side in pair]
        except Exception:  # ragged sequences; numpy's own function will complain
            return False
        return 0 in sizes and any(sizes)

    def guarded(function: Callable[..., Any], vacuous: Callable[[], Any]) -> Callable[..., Any]:
        def compare(*args: Any, **kwargs: Any) -> Any:
            names = (("a", "actual", "x", "a1"), ("b", "desired", "y", "a2", "expected"))
            named = [value for pair in names for name, value in kwargs.items() if name in pair]
            return vacuous() if empty((*args, *named)[:2]) else function(*args, **kwargs)

        return compare

    def unequal() -> None:
        raise AssertionError("an empty array was compared with a non-empty one")

    numpy.allclose = guarded(numpy.allclose, lambda: False)
    numpy.array_equiv = guarded(numpy.array_equiv, lambda: False)
    numpy.isclose = guarded(numpy.isclose, lambda: numpy.zeros(1, dtype=bool))
    for name in (
        "assert_allclose",
        "assert_almost_equal",
        "assert_approx_equal",
        "assert_array_almost_equal",
        "assert_array_almost_equal_nulp",
        "assert_array_equal",
        "assert_array_less",
        "assert_array_max_ulp",
        "assert_equal",
    ):
        setattr(numpy.testing, name, guarded(getattr(numpy.testing, name), unequal))


def run(namespace: dict[str, Any]) -> None:
    """Run every test function and test class that the tests define but have not called.

    Raises the first failing test's exception, or TypeError if a test has parameters that only
    pytest could fill in.
    """
    for name, value in list(namespace.items()):
        if isinstance(value, type):
            if value.__module__ != namespace["__name__"]:
                continue  # such as ``from unittest import TestCase``
            if _is_test_case(value):
                _run_test_case(value)
            elif name.startswith("Test"):
                _run_class(value)
        elif _is_test(name) and _is_function(value) and name not in namespace[_ENTERED]:
            _call(value, name)


def _is_function(value: Any) -> bool:
    return type(value).__name__ == "function"


def _is_test_case(value: type) -> bool:
    import sys

    unittest = sys.modules.get("unittest")
    return unittest is not None and issubclass(value, unittest.TestCase)


def _run_test_case(case: Any) -> None:
    import unittest

    class Result(unittest.TestResult):
        """Like ``TestResult``, but keeps the first exception itself rather than just its text."""

        first: BaseException | None = None

        def _keep(self, error: BaseException | None) -> None:
            self.first = self.first or error
            self.stop()

        def addError(self, test: Any, err: Any) -> None:  # noqa: N802
            self._keep(err[1])

        addFailure = addError

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
            if err is not None:
                self._keep(err[1])

        def addUnexpectedSuccess(self, test: Any) -> None:  # noqa: N802
            self._keep(AssertionError(f"{test.id()} was expected to fail"))

    result = Result()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    if result.first is not None:
        raise result.first


def _run_class(kind: type) -> None:
    for name in _methods(kind):
        instance = kind()
        if setup := getattr(instance, "setup_method", None):
            setup()
        _call(getattr(instance, name), f"{kind.__name__}.{name}")


def _methods(kind: type) -> Iterable[str]:
    return [name for one in reversed(kind.__mro__) for name in vars(one) if _is_test(name)]


def _call(function: Callable[..., Any], name: str) -> None:
    import inspect

    needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise TypeError(
            f"nothing calls {name}, and only pytest could supply its arguments "
            f"({', '.join(needed)})"
        )
    result = function()
    if inspect.iscoroutine(result):
        import asyncio

        asyncio.run(result)
