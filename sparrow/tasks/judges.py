"""User-defined reward functions that replace a dataset's verifier.

Three signatures are supported, told apart by their parameter names. A row's columns are passed to
the parameters of the same name, and ``**columns`` receives all of them:

- ``f(response, answer=..., **columns) -> number``: Sparrow's own. The first parameter may have any
  name; a column of that name is left out;
- ``f(completions, prompts=..., **columns) -> [number]``: as in TRL, where every argument is a
  list, here of length one;
- ``f(data_source, solution_str, ground_truth, extra_info=None) -> number or {"score": number}``:
  as in verl.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from sparrow.errors import ConfigError, RewardError

Style = Literal["sparrow", "trl", "verl"]
KNOWN = (
    "a reward is f(response, answer=..., **columns), f(completions, **columns) as in TRL, or "
    "f(data_source, solution_str, ground_truth, extra_info) as in verl"
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Judge:
    """A user's reward function, called as its signature requires."""

    function: Callable[..., Any]
    name: str  # the name as the user wrote it, for error messages
    style: Style
    takes: tuple[str, ...]  # parameters passed by name
    needs: tuple[str, ...]  # parameters in ``takes`` without a default
    takes_all: bool  # whether it takes ``**columns``
    # in Sparrow's style, the parameter that receives the response; it cannot receive a column too
    response: str | None = None

    @classmethod
    def of(cls, function: Any, name: str) -> Judge:
        """Build a judge from a function.

        Raises ConfigError if ``function`` is not a function, or has none of the three signatures.
        """
        if not callable(function):
            raise ConfigError(f"reward {name!r} is a {type(function).__name__}; {KNOWN}")
        call = function if inspect.isroutine(function) else type(function).__call__
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
            raise ConfigError(f"reward {name!r} is asynchronous; make it a plain function: {KNOWN}")
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # a C function without a readable signature
            return cls(function, name, "sparrow", ("answer",), (), False)

        named = {p.name: p for p in parameters if p.kind in _NAMED}
        style: Style = "sparrow"
        response = None
        if "solution_str" in named:
            style = "verl"
        elif "completions" in named:
            style = "trl"
        if style == "sparrow":
            first = parameters[0] if parameters else None
            if first is None or first.kind in (
                inspect.Parameter.KEYWORD_ONLY,
                inspect.Parameter.VAR_KEYWORD,
            ):
                raise ConfigError(f"reward {name!r} has no parameter for the response; {KNOWN}")
            response = first.name if named.pop(first.name, None) else None

        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        required = [p for p in named.values() if p.default is inspect.Parameter.empty]
        unnamed = [
            p
            for p in parameters[style == "sparrow" :]
            if p.kind is inspect.Parameter.POSITIONAL_ONLY and p.default is inspect.Parameter.empty
        ]
        if unnamed:
            raise ConfigError(
                f"reward {name!r} has the positional-only parameter {unnamed[0].name!r}, which "
                f"cannot receive a column; {KNOWN}"
            )
        if style == "sparrow" and not takes_all and "answer" not in named:
            raise ConfigError(f"reward {name!r} has no parameter for the answer; {KNOWN}")
        return cls(
            function,
            name,
            style,
            takes=tuple(named),
            needs=tuple(p.name for p in required),
            takes_all=takes_all,
            response=response,
        )

    def missing(self, row: Mapping[str, Any]) -> str | None:
        """Return the first required parameter missing from ``row``, or None."""
        given = self._arguments("", None, "", row, "").keys()
        return next((name for name in self.needs if name not in given), None)

    def verifier(
        self, answer: Any, prompt: str, row: Mapping[str, Any], source: str
    ) -> Callable[[str], float]:
        """Build the verifier for the problem in ``row``. ``source`` is the dataset's name."""
        return partial(self._judge, answer=answer, prompt=prompt, row=row, source=source)

    def _judge(
        self, response: str, *, answer: Any, prompt: str, row: Mapping[str, Any], source: str
    ) -> float:
        arguments = self._arguments(response, answer, prompt, row, source)
        if not self.takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self.takes}
        if self.style == "sparrow":
            if self.response is not None:
                arguments.pop(self.response, None)
            return self.function(response, **arguments)
        result = self.function(**arguments)
        if self.style == "trl":
            return self._only(result)
        if isinstance(result, Mapping):
            if "score" not in result:
                raise RewardError(
                    f"reward {self.name!r} returned a mapping without the key 'score' "
                    f"(keys: {', '.join(map(str, result)) or 'none'}); add 'score', or return a "
                    "number"
                )
            return result["score"]
        return result

    def _only(self, result: Any) -> Any:
        is_list = hasattr(result, "__len__") and not isinstance(result, str | bytes | Mapping)
        if not is_list or len(result) != 1:
            raise RewardError(
                f"reward {self.name!r} returned {result!r} for a list of one completion, "
                "expected a list of one number"
            )
        return result[0]

    def _arguments(
        self, response: str, answer: Any, prompt: str, row: Mapping[str, Any], source: str
    ) -> dict[str, Any]:
        """Collect all arguments that the function may take, by name."""
        if self.style == "verl":
            return {
                "data_source": row.get("data_source", source),
                "solution_str": response,
                "ground_truth": answer,
                "extra_info": {**row, **(row.get("extra_info") or {})},
            }
        if self.style == "trl":
            columns = {**row, "answer": answer}
            lists = {name: [value] for name, value in columns.items() if name != "prompt"}
            return {**lists, "prompts": [prompt], "completions": [response]}
        return {**row, "answer": answer}


def check_columns(judge: Judge, rows: Sequence[Mapping[str, Any]], source: str) -> None:
    """Check that every row has the columns that the judge's function needs.

    Raises ConfigError if a row lacks a column; the message names the first such row.
    """
    for i, row in enumerate(rows):
        if name := judge.missing(row):
            raise ConfigError(
                f"reward {judge.name!r} needs {name!r}, but the columns of row {i + 1} of {source} "
                f"are {', '.join(map(str, row)) or 'none'}; "
                f"give {name} a default, or add the column"
            )
