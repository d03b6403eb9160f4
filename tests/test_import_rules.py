"""The layers may not blur: who imports whom, read from the source, and what ``import oscar_kv`` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import oscar_kv

ROOT = Path(oscar_kv.__path__[0])
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
ENGINES = {"transformers", "triton", "vllm", "sglang"}
# What each layer may use of the package and of others, besides the standard library.
LAYERS = {
    "method": ({"method"}, {"torch", "numpy"}),
    "cache": ({"cache", "method", "config"}, {"torch"}),
    "kernels": ({"kernels", "method"}, {"torch", "cuda"} | ENGINES),
    "config.py": (set(), set()),
    "errors.py": (set(), set()),
}
IMPORT_LIMIT_S = 0.3


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, and whether it runs when the file is imported."""

    module: str
    at_top: bool
    line: int

    @property
    def layer(self) -> str:
        """Of the package: ``method``, ``cache``, ... or empty for other packages and the package itself."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == "oscar_kv" and len(parts) > 1 else ""

    @property
    def package(self) -> str:
        return self.module.split(".")[0]


def imports(file: str, source: str | None = None) -> list[Import]:
    """All imports of a file but those for type checkers only."""
    tree = ast.parse((ROOT / file).read_text("utf-8") if source is None else source)
    here = ["oscar_kv", *Path(file).parts[:-1]]
    return list(visit(tree.body, here, at_top=True))


def visit(body: list[ast.stmt], here: list[str], at_top: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, at_top, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            if node.module and module != ["oscar_kv"]:
                yield Import(".".join(module), at_top, node.lineno)
            else:  # "from . import x": x may be a module
                for alias in node.names:
                    yield Import(".".join([*module, alias.name]), at_top, node.lineno)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from visit(node.orelse, here, at_top)
        else:
            inside = at_top and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for name in ("body", "orelse", "finalbody"):
                yield from visit(getattr(node, name, []), here, inside)
            for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
                yield from visit(part.body, here, inside)


def files_of(layer: str) -> list[str]:
    return [file for file in FILES if file == layer or file.startswith(f"{layer}/")]


def test_the_reader_of_imports_reads_imports() -> None:
    source = (
        "import torch.nn, json\n"
        "from ..config import OscarConfig\n"
        "from . import codecs\n"
        "from .. import artifact\n"
        "if TYPE_CHECKING:\n    import vllm\n"
        "try:\n    import triton\nexcept ImportError:\n    import numpy\n"
        "class A:\n    import sglang\n    def f(self):\n        with x:\n            from transformers import Cache\n"
    )
    found = [(i.module, i.at_top) for i in imports("method/transform.py", source)]
    assert found == [
        ("torch.nn", True),
        ("json", True),
        ("oscar_kv.config", True),
        ("oscar_kv.method.codecs", True),
        ("oscar_kv.artifact", True),
        ("triton", True),
        ("numpy", True),
        ("sglang", True),
        ("transformers", False),
    ]


@pytest.mark.parametrize("layer", list(LAYERS))
def test_a_layer_uses_only_what_lies_below(layer: str) -> None:
    own, others = LAYERS[layer]
    assert files_of(layer), f"no file in {layer}: was it renamed?"
    wrong = []
    for file in files_of(layer):
        for found in imports(file):
            if found.package == "oscar_kv":
                allowed = found.layer in own
            else:
                allowed = found.package in others or found.package in sys.stdlib_module_names
            if not allowed:
                wrong.append(f"{file}:{found.line} imports {found.module}")
    assert wrong == []


def test_only_cli_evaluate_bench_and_lazily_the_package_import_integrations() -> None:
    wrong = []
    for file in FILES:
        if file.split("/")[0] in ("cli", "evaluate", "bench", "integrations"):
            continue
        for found in imports(file):
            if found.layer == "integrations" and (found.at_top or file != "__init__.py"):
                wrong.append(f"{file}:{found.line} imports {found.module}")
    assert wrong == []


def test_nothing_below_imports_the_command_line_or_the_evaluation() -> None:
    above = {"cli": {"cli"}, "evaluate": {"cli", "evaluate"}}
    wrong = []
    for file in FILES:
        for found in imports(file):
            if found.layer in above and file.split("/")[0] not in above[found.layer]:
                wrong.append(f"{file}:{found.line} imports {found.module}")
    assert wrong == []


def test_engines_are_imported_where_they_are_used() -> None:
    wrong = [
        f"{file}:{found.line} imports {found.module}"
        for file in FILES
        if not file.startswith("integrations/")
        for found in imports(file)
        if found.at_top and found.package in ENGINES
    ]
    assert wrong == []


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_is_quick_and_loads_no_engine() -> None:
    code = (
        "import sys, time, torch\n"
        "start = time.perf_counter()\n"
        "import oscar_kv\n"
        "spent = time.perf_counter() - start\n"
        f"print(spent, *(set(sys.modules) & {ENGINES!r}))\n"
    )
    best = float("inf")
    for _ in range(3):
        spent, *loaded = run(code).split()
        assert loaded == []
        best = min(best, float(spent))
        if best <= IMPORT_LIMIT_S:
            break
    assert best <= IMPORT_LIMIT_S


def test_the_layers_below_integrations_work_with_torch_alone() -> None:
    files = [*(f for layer in ("method", "cache", "kernels") for f in files_of(layer)), "config.py", "errors.py"]
    modules = sorted({".".join(["oscar_kv", *Path(f).with_suffix("").parts]).removesuffix(".__init__") for f in files})
    blocked = sorted(ENGINES | {"safetensors", "typer", "rich", "tokenizers", "huggingface_hub"})
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"  # None: importing it fails
        f"for name in {['oscar_kv', *modules]!r}:\n    importlib.import_module(name)\n"
        "print('done')\n"
    )
    assert run(code) == "done"
