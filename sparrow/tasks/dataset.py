"""Tasks backed by a dataset, from a local jsonl, json or parquet file or from the Hugging Face hub.

This package does not import ``sparrow.rewards``, so callers pass in the verifiers, by kind::

    load_dataset_task("gsm8k", path="train.jsonl", verifiers={"math": sparrow.rewards.verify_math})

For a chat model, also pass a function ``render`` that applies the chat template, such as ``lambda
prompt: tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False,
add_generation_prompt=True)``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from sparrow.errors import ConfigError
from sparrow.tasks.base import Mixture, Problem, Task, check_text
from sparrow.tasks.formats import FORMATS, Format, Question, Row
from sparrow.tasks.judges import Judge, check_columns

log = logging.getLogger(__name__)

Verifier = Callable[..., float] | Judge
"""A module-level function or other picklable callable, called as ``verifier(response,
answer=answer)``. A ``Judge`` also receives the row's other columns.
"""

# response -> its stated answer, or None
Extractor = Callable[[str], str | None]


@lru_cache(maxsize=8)
def _order(size: int, name: str, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{name}/{seed}/{epoch}").shuffle(order)
    return order


class DatasetTask:
    """A task with one problem per row. Every epoch goes through all problems once, shuffled by seed
    and epoch.

    Args:
        name: prefix for the problems' ids.
        rows: the dataset. Every row is checked up front, and read again when its problem is
            requested.
        format: how to read a row.
        verifiers: verifiers by kind; the one for ``format.kind`` is used.
        extractors: extractors by kind, for ``Problem.extract``.
        template: the prompt, with ``{question}`` in place of the question. The default is the
            format's template.
        render: maps a prompt to the text for the tokenizer, including special tokens, as a chat
            template does. By default, the tokenizer gets the unchanged prompt and adds its special
            tokens.
        max_length: drop rows whose rendered prompt is longer than this, in characters.
        tokens: function that counts a text's tokens. With ``max_tokens``, drop rows whose rendered
            prompt has no tokens, or more than ``max_tokens``.
        source: where the rows come from, for error messages.

    A row is dropped if its question matches that of an earlier row, ignoring spaces and case. The
    number of dropped rows is logged.

    Raises ConfigError if a row lacks a question, an answer or a column that the verifier needs.
    Also raises ConfigError if no rows are left, or if there is no verifier for ``format.kind``.
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[Row],
        format: Format,
        verifiers: Mapping[str, Verifier],
        *,
        extractors: Mapping[str, Extractor] | None = None,
        template: str | None = None,
        render: Callable[[str], str] | None = None,
        max_length: int | None = None,
        tokens: Callable[[str], int] = len,
        max_tokens: int | None = None,
        source: str = "the dataset",
    ) -> None:
        if format.kind not in verifiers:
            raise ConfigError(
                f"dataset {name!r} needs a verifier for {format.kind!r}, got {list(verifiers)}; "
                "add one to verifiers"
            )
        self._template = format.template if template is None else template
        if "{question}" not in self._template:
            raise ConfigError(f"the prompt template {self._template!r} has no {{question}}; add it")

        self.name = name
        self._rows = rows
        self._format = format
        self._source = source
        self._render = render
        self._verifier = verifiers[format.kind]
        self._extract = (extractors or {}).get(format.kind)
        if isinstance(self._verifier, Judge):
            check_columns(self._verifier, rows, source)

        self._kept: list[int] = []
        dropped: Counter[str] = Counter()
        seen: set[str] = set()
        content = hashlib.sha256()
        for i in range(len(rows)):
            question = self._read(i)
            if question is None:
                dropped["unusable"] += 1
                continue
            prompt = self._prompt(question)
            key = " ".join(question.text.casefold().split())
            if key in seen:
                dropped["duplicate"] += 1
            elif reason := self._unfit(prompt, max_length, tokens, max_tokens):
                dropped[reason] += 1
            else:
                self._kept.append(i)
                content.update(_bytes(prompt, question.answer))
            seen.add(key)

        # digest of the kept prompts and answers, in order
        self.digest = content.hexdigest()[:16]
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        if not self._kept:
            raise ConfigError(
                f"none of the {len(rows)} rows of {source} can be used "
                f"({reasons or 'it is empty'}); raise max_length, leave more room for prompts, or check the file"
            )
        if dropped:
            log.warning(
                "%s: dropped %d of %d rows: %s", source, dropped.total(), len(rows), reasons
            )

    @staticmethod
    def _unfit(
        prompt: str, max_length: int | None, tokens: Callable[[str], int], max_tokens: int | None
    ) -> str | None:
        """Return why a prompt cannot be used, or None if it can."""
        if max_length is not None and len(prompt) > max_length:
            return "too long"
        if max_tokens is None:
            return None
        # Every non-special token covers at least one byte, so the byte count is an upper bound.
        # Most prompts have fewer bytes than the limit and needn't be tokenized.
        most = len(prompt.encode(errors="replace")) + tokens("")
        if prompt.strip() and most <= max_tokens:
            return None
        count = tokens(prompt)
        if not count:
            return "without tokens"
        return f"longer than {max_tokens} tokens" if count > max_tokens else None

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Problem]:
        """Iterate over the problems once, in row order, for evaluation."""
        return map(self._problem, self._kept)

    def problem(self, index: int, seed: int = 0) -> Problem:
        """Return problem ``index`` of the stream ``seed``. Indices past the end of the dataset fall
        in later epochs.
        """
        epoch, position = divmod(index, len(self))
        order = _order(len(self), self.name, seed, epoch)
        return self._problem(self._kept[order[position]])

    def _problem(self, row: int) -> Problem:
        question = self._read(row)
        assert question is not None
        prompt = self._prompt(question)
        answer = question.answer
        verify: Callable[[str], float]
        if isinstance(self._verifier, Judge):
            verify = self._verifier.verifier(answer, prompt, self._rows[row], self.name)
        else:
            verify = partial(self._verifier, answer=answer)
        return Problem(
            id=f"{self.name}-{row}",
            prompt=prompt,
            verify=verify,
            extract=self._extract,
            source=self.name,
            solution=question.solution,
            answer=answer if isinstance(answer, str) else None,
            rendered=self._render is not None,
        )

    def _prompt(self, question: Question) -> str:
        text = self._template.replace("{question}", question.text)
        return text if self._render is None else self._render(text)

    def _read(self, row: int) -> Question | None:
        fields = self._rows[row]
        try:
            question = self._format.read(fields)
            if question is not None and question.answer is None:
                answer = self._extract(str(question.solution)) if self._extract else None
                if answer is None:
                    raise ValueError("it has no answer, not even a \\boxed{} in its solution")
                question = replace(question, answer=answer)
            if question is not None:
                check_text(question.text)
            return question
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            fault = f"cannot be used: {error}"
            if isinstance(error, KeyError):
                fault = f"has no {error.args[0]}"
            raise ConfigError(
                f"row {row + 1} of {self._source} {fault}; its "
                f"fields are {', '.join(fields) or 'none'}; fix "
                "or remove the row, or choose the format that fits"
            ) from error


def _bytes(prompt: str, answer: Any) -> bytes:
    return json.dumps([prompt, answer], default=str).encode(errors="replace")


def fingerprint(task: Task) -> Any:
    """Return the fingerprint of a task's data, as plain JSON types: the problem count, and a digest
    of the prompts and answers in order.

    For a mixture, return the fingerprints of its parts. For an endless task, return None.
    """
    if isinstance(task, Mixture):
        return [fingerprint(part) for part in task.tasks]
    if isinstance(task, DatasetTask):
        return {"problems": len(task), "digest": task.digest}
    return None


def fingerprint_of(problems: Sequence[Problem]) -> Any:
    """Return the fingerprint of a list of problems; see ``fingerprint``."""
    content = hashlib.sha256()
    for problem in problems:
        content.update(_bytes(problem.prompt, problem.answer))
    return {"problems": len(problems), "digest": content.hexdigest()[:16]}


def load_rows(path: str | Path) -> Sequence[Row]:
    """Load the rows of a local ``.jsonl``, ``.json`` (a list of objects) or ``.parquet`` file.

    Raises ConfigError if there is no such file, its type is not supported, or it does not contain
    rows.
    """
    path = Path(path)
    expected = "expected a .jsonl, .json (a list of objects) or .parquet file"
    if not path.is_file():
        raise ConfigError(f"no dataset file at {path}; {expected}")
    try:
        match path.suffix:
            case ".jsonl":
                with path.open(encoding="utf-8") as lines:
                    rows = [
                        _json(line, f"line {i}") for i, line in enumerate(lines, 1) if line.strip()
                    ]
            case ".json":
                rows = _json(path.read_text(encoding="utf-8"), "the file")
            case ".parquet":
                import datasets
                from pyarrow import parquet

                # Rows are read on demand.
                return datasets.Dataset(parquet.read_table(path))
            case suffix:
                raise ValueError(f"files with the suffix {suffix!r} are not supported")
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}; {expected}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path} does not contain objects; {expected} with one object per row")
    return rows


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error


def load_hub_rows(format: Format, split: str) -> Sequence[Row]:
    """Load one split of a format's dataset from the Hugging Face hub or its local cache.

    Raises ConfigError if the hub cannot be reached, or has no such dataset, configuration or split.
    """
    import datasets

    try:
        if format.files:
            paths = [
                f"hf://datasets/{format.hub}/{pattern.format(split=split)}"
                for pattern in format.files
            ]
            kind = "parquet" if paths[0].endswith(".parquet") else "json"
            return datasets.load_dataset(kind, data_files={split: paths}, split=split)
        return datasets.load_dataset(format.hub, format.config, split=split)
    except Exception as error:  # the hub's client raises many unrelated exceptions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"cannot load {format.hub} ({format.config or 'default'}, "
            f"{split}) from the Hugging Face hub: {reason}; without a "
            "connection, pass a local .jsonl, .json or .parquet file as path"
        ) from error


def load_dataset_task(
    name: str,
    verifiers: Mapping[str, Verifier],
    *,
    path: str | Path | None = None,
    split: str | None = None,
    **options: Any,
) -> DatasetTask:
    """Load the dataset ``name`` as a task.

    Args:
        name: a registered format. ``qa`` reads any file with a question (or problem, or prompt) and
            an answer in each row.
        verifiers: verifiers by kind, such as ``{"math": verify_math}``.
        path: a local file to read instead of the hub.
        split: a split of the dataset on the hub; by default, the format's usual split.
        options: passed to ``DatasetTask``: extractors, template, render, max_length, tokens,
            max_tokens.

    Raises ConfigError if there is no such format, or the rows cannot be loaded or used.
    """
    if name not in FORMATS:
        raise ConfigError(
            f"no file or dataset {name!r}; known datasets: {', '.join(sorted(FORMATS))}; to pass "
            "options with a file, write qa:path=FILE"
        )
    format = FORMATS[name]
    if path is not None:
        # a mixture may have several files, which need distinct names
        name = Path(path).stem if name == "qa" else name
        return DatasetTask(name, load_rows(path), format, verifiers, source=str(path), **options)
    if format.hub is None:
        raise ConfigError(f"dataset {name!r} is read from a local file; pass its path")
    split = split or format.split
    rows = load_hub_rows(format, split)
    return DatasetTask(name, rows, format, verifiers, source=f"{format.hub} ({split})", **options)
