"""What a function of fcsd can reach: a walk over names in the source, without importing anything.

A module that is imported runs its top level, so all imports there are reached. A function or class is reached where its
name is used, by a module or by a function that is reached; then the imports in its body are, too. A method is reached
with its class. Imports for type checkers alone are left out.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "fcsd"
# Scripts for processes of their own, and what can be imported only where vLLM is.
NOT_IMPORTED = {
    "fcsd.__main__",
    "fcsd.export.fresh_process",
    "fcsd.eval.engines.vllm_adapter",
    "fcsd.serve.vllm.models",
    "fcsd.serve.vllm.registration",
}
Name = tuple[str, str | None]  # a module, and a name at its top level; None for the module itself


@dataclass
class _Module:
    """What a module binds by imports, what it defines, each by name, and the statements that importing it runs."""

    bound: dict[str, Name] = field(default_factory=dict)
    defined: dict[str, list[ast.stmt]] = field(default_factory=dict)
    run: list[ast.stmt] = field(default_factory=list)


@dataclass
class Reached:
    """Attributes: the names that are reached; foreign packages, with a function that imports each; and all calls."""

    names: set[Name] = field(default_factory=set)
    packages: dict[str, Name] = field(default_factory=dict)
    calls: list[ast.Call] = field(default_factory=list)


class Source:
    """The modules of the package in ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.paths = {_module_name(path, root): path for path in (root / PACKAGE).rglob("*.py")}
        self.modules = {name: self._read(name) for name in self.paths}

    def names(self, module: str) -> list[Name]:
        """Every definition of a module."""
        return [(module, name) for name in self.modules[module].defined]

    def reached(self, starts: Iterable[Name]) -> Reached:
        """Everything that the functions and modules of ``starts`` can reach."""
        found = Reached()
        todo: list[Name] = []

        def enter(module: str, user: Name) -> None:
            package, *inner = module.split(".")
            if package != PACKAGE:
                if package not in sys.stdlib_module_names:
                    found.packages.setdefault(package, user)
                return
            todo.extend((".".join([package, *inner[:length]]), None) for length in range(len(inner) + 1))

        def use(name: Name, user: Name) -> None:
            enter(name[0], user)
            if name[0].split(".")[0] == PACKAGE:
                todo.append(name)

        for start in starts:
            use(start, start)
        while todo:
            here = todo.pop()
            if here in found.names:
                continue
            found.names.add(here)
            module = self.modules[here[0]]
            if here[1] in module.bound:
                use(module.bound[here[1]], here)
            for statement in module.run if here[1] is None else module.defined.get(here[1], []):
                nodes = list(_walk(statement))
                inside: dict[str, Name] = {}
                for node in nodes:
                    for bound, target, imported in self._imports(node, here[0]):
                        enter(imported, here)
                        if here[1] is not None:
                            inside[bound] = target
                for node in nodes:
                    if isinstance(node, ast.Call):
                        found.calls.append(node)
                    if isinstance(node, ast.Name):
                        if node.id in inside:
                            use(inside[node.id], here)
                        elif node.id in module.defined or node.id in module.bound:
                            use((here[0], node.id), here)
                    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                        target = inside.get(node.value.id) or module.bound.get(node.value.id)
                        if target is not None and target[1] is None and target[0] in self.modules:
                            use((target[0], node.attr), here)
        return found

    def _read(self, name: str) -> _Module:
        module = _Module()
        for statement in _statements(ast.parse(self.paths[name].read_text()).body):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                module.defined.setdefault(statement.name, []).append(statement)
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for node in (node for target in targets for node in ast.walk(target)):
                    if isinstance(node, ast.Name):
                        module.defined.setdefault(node.id, []).append(statement)
            else:
                module.run.append(statement)
                module.bound |= {bound: target for bound, target, _ in self._imports(statement, name)}
        return module

    def _imports(self, node: ast.AST, module: str) -> Iterator[tuple[str, Name, str]]:
        """For each name that an import binds: the name, what it stands for, and the module that is imported."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                yield alias.asname or whole, (whole, None), alias.name
        elif isinstance(node, ast.ImportFrom):
            folder = _module_name(self.paths[module].parent / "__init__.py", self._root).split(".")
            base = folder[: len(folder) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                target: Name = (full, None) if full in self.paths else (source, alias.name)
                yield alias.asname or alias.name, target, target[0]


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements at the top level of a module, those in `if`, `try` and `with` included."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            parts = [] if _for_type_checkers(statement) else [statement.body]
            parts += [getattr(statement, name, []) for name in ("orelse", "finalbody")]
            parts += [handler.body for handler in getattr(statement, "handlers", [])]
            for part in parts:
                yield from _statements(part)
        else:
            yield statement


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """``ast.walk`` without what stands under ``if TYPE_CHECKING``."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not _for_type_checkers(child):
            yield from _walk(child)
