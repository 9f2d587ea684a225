"""Test that packages import only what a table allows, both in the sources and in fresh
interpreters.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparrow

PACKAGE = Path(sparrow.__file__).parent
EVERYTHING = "everything"

# For each part, the other parts that it may import. Every part may also import ``errors`` and the
# top-level package. A module belongs to the part with the longest matching name, and may import
# anything within that part.
ALLOWED = {
    "audit": ["audit.statistics", "engines.base", "mismatch", "rollout", "schedule"],
    "audit.statistics": [],
    "errors": [],
    "schedule": [],
    "rollout": [],
    "settings": [],
    "files": [],
    "decoding": ["schedule"],
    "decoding_options": ["decoding", "schedule", "settings"],
    "_moved": [],
    "cost": ["_moved", "cost.roofline", "cost.shapes"],
    "cost.shapes": [],
    "cost.roofline": ["cost.shapes", "schedule"],
    "cost.lossless": ["cost.roofline", "cost.shapes", "decoding", "schedule"],
    "cost.drafters": ["cost.lossless", "cost.roofline", "cost.shapes"],
    "cost.cluster": ["cost.lossless", "cost.roofline", "cost.shapes", "schedule"],
    "mismatch": [],
    "mismatch.tokens": ["mismatch", "rollout", "schedule"],
    "calibrate": ["_moved", "calibrate.search"],
    "calibrate.search": ["mismatch", "schedule"],
    "calibrate.trajectories": [
        "engines.base",
        "engines.measure",
        "files",
        "mismatch",
        "mismatch.tokens",
        "rollout",
        "schedule",
    ],
    "calibrate.run": [
        "_moved",
        "calibrate.search",
        "calibrate.trajectories",
        "engines.base",
        "engines.measure",
        "mismatch",
        "mismatch.tokens",
        "rollout",
        "schedule",
    ],
    "calibrate.head_budgets": [
        "calibrate.trajectories",
        "engines.hf",
        "mismatch.tokens",
        "rollout",
        "schedule",
    ],
    "evaluation": [],
    "evaluation.scores": [],
    "evaluation.benchmark": [
        "engines.base",
        "evaluation.scores",
        "files",
        "rewards",
        "rollout",
        "tasks",
    ],
    "rewards": [],
    "tasks": ["settings"],
    "attention": ["attention.api", "attention.decode", "attention.pages"],
    "attention.api": [
        "attention.cuda",
        "attention.decode",
        "attention.pages",
        "attention.reference",
        "attention.triton",
    ],
    "attention.pages": [],
    "attention.decode": ["attention.pages"],
    "attention.division": ["attention.decode", "attention.pages"],
    "attention.int8": [],
    "attention.reference": ["attention.decode", "attention.int8", "attention.pages"],
    "attention.cuda": ["attention.decode", "attention.division", "attention.pages"],
    "attention.triton": [
        "attention.decode",
        "attention.division",
        "attention.int8",
        "attention.pages",
        "attention.reference",
        "files",
    ],
    "engines": ["decoding", "engines.base", "engines.registry", "model", "rollout", "schedule"],
    "engines.base": ["decoding", "mismatch", "rollout", "schedule"],
    "engines.registry": ["decoding", "engines.base", "settings"],
    "engines.measure": ["engines.base", "mismatch", "mismatch.tokens", "rollout", "schedule"],
    "model": [
        "attention",
        "attention.api",
        "attention.pages",
        "decoding",
        "files",
        "model.scoring",
        "schedule",
    ],
    "model.scoring": ["rollout"],
    "engines.responses": ["model", "rollout"],
    "engines.hf": [
        "attention",
        "engines.base",
        "engines.registry",
        "engines.responses",
        "mismatch",
        "decoding",
        "model",
        "model.scoring",
        "rollout",
        "schedule",
    ],
    "vllm": [
        "mismatch",
        "attention",
        "attention.decode",
        "attention.int8",
        "attention.pages",
        "attention.reference",
        "attention.triton",
        "decoding",
        "schedule",
    ],
    "engines.vllm": [
        "decoding",
        "engines.base",
        "engines.registry",
        "mismatch",
        "rollout",
        "schedule",
        "vllm",
    ],
    "run": ["files", "mismatch", "schedule"],
    "report": ["mismatch", "run", "schedule"],
    "train": [
        "decoding",
        "decoding_options",
        "engines.base",
        "evaluation.benchmark",
        "evaluation.scores",
        "mismatch",
        "mismatch.tokens",
        "model.scoring",
        "rewards",
        "rollout",
        "run",
        "schedule",
        "settings",
        "tasks",
        "train.dial",
        "train.distill",
    ],
    "train.dial": ["cost", "cost.lossless", "mismatch", "schedule"],
    "train.distill": ["mismatch", "model", "model.scoring", "schedule", "train"],
    "integrations": [
        "decoding",
        "engines.base",
        "engines.hf",
        "engines.measure",
        "engines.vllm",
        "mismatch",
        "mismatch.tokens",
        "rollout",
        "schedule",
        "vllm",
    ],
    "cli": ["_moved", "cli.entry"],
    "cli.entry": ["cli.commands"],
    "cli.commands": EVERYTHING,
    "cli.loading": [
        "decoding",
        "engines",
        "engines.base",
        "engines.hf",
        "engines.registry",
        "model",
        "rewards",
        "schedule",
        "settings",
        "tasks",
    ],
    "cli.terminal": ["attention.triton", "audit.statistics", "calibrate", "mismatch", "schedule"],
    "__main__": ["cli"],
}
PURE = [
    "audit.statistics",
    "errors",
    "schedule",
    "rollout",
    "decoding",
    "_moved",
    "cost",
    "cost.shapes",
    "cost.roofline",
    "cost.lossless",
    "cost.drafters",
    "cost.cluster",
    "calibrate",
    "calibrate.search",
    "evaluation",
    "evaluation.scores",
    "mismatch",
    "mismatch.tokens",
    "run",
    "train.dial",
]  # numpy is their only third-party package
ONLY_IN = {"triton": ("attention.triton", "attention.division"), "vllm": ("vllm", "engines.vllm")}


def modules() -> dict[str, Path]:
    """Return all source files by module name, without the prefix ``sparrow.``. The name of the
    package itself is empty.
    """
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def part_of(module: str) -> str:
    """Return the part that ``module`` belongs to: the longest matching name in the table."""
    fits = [name for name in ALLOWED if f"{module}.".startswith(f"{name}.")]
    assert fits, f"sparrow.{module} is not in the table of imports; add it to ALLOWED"
    return max(fits, key=len)


def imports(source: str, module: str, is_package: bool, running: bool = False) -> Iterator[str]:
    """Return the full name of everything that ``source`` imports, in the form ``module.name``. A
    name may itself be a module. With ``running``, imports used only for type annotations are left
    out.
    """
    tree = ast.parse(source)
    for node in without_type_checking(tree) if running else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["sparrow", *module.split(".")] if module else ["sparrow"]
                up = node.level - is_package
                base = ".".join([*parents[: len(parents) - up], *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def edges(
    source: str, module: str, is_package: bool, known: dict[str, Path], running: bool = False
) -> Iterator[str]:
    """Return the names of the Sparrow modules that ``source`` imports. If ``source`` imports a name
    from a module, the module is returned. See ``modules`` and ``imports`` for the arguments.
    """
    for name in imports(source, module, is_package, running):
        first, _, inner = name.partition(".")
        if first == "sparrow":
            yield inner if inner in known else inner.rpartition(".")[0]


def fresh(code: str) -> dict[str, list[str]]:
    """Return what ``code`` prints as JSON in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- the sources ---


def test_every_import_between_packages_is_allowed_by_the_table():
    known = modules()
    wrong = set()
    for module, path in known.items():
        if not module:
            continue
        part = part_of(module)
        for target in edges(
            path.read_text(encoding="utf-8"), module, path.name == "__init__.py", known
        ):
            if (
                ALLOWED[part] == EVERYTHING
                or target in ("", "errors")
                or part_of(target) in (part, *ALLOWED[part])
            ):
                continue
            wrong.add(f"sparrow.{module} imports sparrow.{target}")
    assert not wrong, "\n".join(sorted(wrong))


def test_the_top_level_package_imports_only_schedules_and_errors():
    known = modules()
    assert set(edges(known[""].read_text(encoding="utf-8"), "", True, known)) == {
        "_moved",
        "errors",
        "schedule",
    }


def test_each_package_imports_only_its_permitted_third_party_libraries():
    wrong = set()
    for module, path in modules().items():
        part = part_of(module) if module else "errors"
        for name in imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
            top = name.partition(".")[0]
            foreign = top != "sparrow" and top not in sys.stdlib_module_names
            if foreign and (
                (part in PURE and top != "numpy") or part not in ONLY_IN.get(top, (part,))
            ):
                wrong.add(f"sparrow.{module} imports {name}")
    assert not wrong, "\n".join(sorted(wrong))


def test_imports_are_found_anywhere_in_a_module():
    source = """
import torch.nn as nn, sparrow.cost
from sparrow import attention, SparsitySchedule
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from sparrow.attention import reference
class A:
    def f(self):
        from sparrow.mismatch.tail import split_by_bin
        from . import hf
        from .vllm import plugin
        from ..train.losses import policy_loss
"""
    names = [
        "",
        "cost",
        "attention",
        "attention.reference",
        "mismatch.tail",
        "engines.hf",
        "engines.vllm.plugin",
    ]
    found = set(
        edges(source, "engines.base", False, dict.fromkeys([*names, "train.losses"], PACKAGE))
    )
    assert found == {*names, "train.losses"}
    assert "torch.nn" in set(imports(source, "engines.base", False))
    source = "from . import api\nfrom .pages import PageLayout"
    assert set(
        edges(
            source, "attention", True, dict.fromkeys(["attention.api", "attention.pages"], PACKAGE)
        )
    ) == {
        "attention.api",
        "attention.pages",
    }


def test_module_belongs_to_the_part_with_the_longest_matching_name():
    assert (
        part_of("mismatch.tail") == "mismatch"
        and part_of("attention.triton.launch") == "attention.triton"
    )
    with pytest.raises(AssertionError, match=r"sparrow\.mismatches is not in the table"):
        part_of("mismatches")


# --- cycles ---


def without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of ``tree`` that run: all except the bodies of ``if TYPE_CHECKING:``."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        only_for_types = isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING"
        if not (only_for_types and child in tree.body):
            yield from without_type_checking(child)


def circle(arrows: dict[str, set[str]]) -> list[str] | None:
    """Return the names along a cycle of the graph, with the first one repeated at the end, or None
    if there is no cycle.
    """
    done: set[str] = set()

    def search(path: list[str]) -> list[str] | None:
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]) :]
        if path[-1] in done:
            return None
        for target in sorted(arrows.get(path[-1], ())):
            if found := search([*path, target]):
                return found
        done.add(path[-1])
        return None

    return next(filter(None, (search([name]) for name in arrows)), None)


def test_there_are_no_import_cycles():
    known = modules()
    arrows = {}
    for module, path in known.items():
        package = path.name == "__init__.py"
        arrows[module] = set(edges(path.read_text(encoding="utf-8"), module, package, known, True))
    assert (found := circle(arrows)) is None, " imports ".join(found or [])


def test_import_cycles_through_function_level_imports_are_detected():
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}) == ["b", "c", "b"]
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from sparrow.train import trainer
else:
    from sparrow.train import learner
def f():
    from sparrow.cli.commands import train
"""
    names = ["train.trainer", "train.learner", "cli.commands.train"]
    known = dict.fromkeys(names, PACKAGE)
    assert set(edges(source, "m", False, known, True)) == set(names[1:])
    assert set(edges(source, "m", False, known)) == set(names)


# --- fresh interpreters ---


def test_pure_packages_do_not_load_torch():
    names = [
        "sparrow",
        *(f"sparrow.{module}" for module in modules() if module and part_of(module) in PURE),
    ]
    assert {"sparrow", "sparrow.schedule", "sparrow.mismatch"} <= set(names)
    code = f"""
import importlib, json, sys
heavy = {{}}
for name in {names}:
    importlib.import_module(name)
    heavy[name] = sorted({{"torch", "transformers", "triton", "vllm"}} & set(sys.modules))
print(json.dumps(heavy))
"""
    assert fresh(code) == {name: [] for name in names}


def test_attention_does_not_load_triton():
    code = """
import json, sys
import torch
before = set(sys.modules)
import sparrow.attention
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(new & {"triton", "transformers", "vllm"})))
"""
    assert fresh(code) == []


def test_vllm_plugin_loads_no_http_or_training_libraries():
    code = """
import importlib, json, sys
import torch, vllm, vllm.plugins, vllm.model_executor.layers.attention, vllm.v1.attention.backends.cpu_attn
before = set(sys.modules)
for name in ("backend", "config", "control", "cpu", "patches", "plugin", "runtime", "versions"):
    importlib.import_module(f"sparrow.vllm.{name}")
new = {name.partition(".")[0] for name in set(sys.modules) - before}
ours = {".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("sparrow.")}
print(json.dumps([sorted(new & {"httpx", "accelerate", "peft", "datasets", "trl", "matplotlib"}), sorted(ours)]))
"""
    pytest.importorskip("vllm.version")
    foreign, ours = fresh(code)
    assert foreign == []
    assert set(ours) <= {
        "sparrow._moved",
        "sparrow.attention",
        "sparrow.errors",
        "sparrow.decoding",
        "sparrow.schedule",
        "sparrow.vllm",
    }
