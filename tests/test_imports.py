"""Imports point one way: down the list of rooms, and never in a circle."""

import ast
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

# From the top down; a module may import from its own room and from rooms below it. `fcsd/__init__.py` is the Python
# API above all rooms but the command line; `__main__` starts the command line.
ROOMS = [
    "__main__",
    "cli",
    "__init__",
    "advise",
    "bench",
    "export",
    "experimental",
    "distill",
    "eval",
    "serve",
    "engine",
    "plan",
    "launch",
    "convert",
    "parity",
    "parallel",
    "config",
    "recipes",
    "checkpoint",
    "models",
    "kernels",
    "foreign_errors",
    "extras",
    "load_options",
    "input_lines",
    "strict_json",
    "disk",
    "errors",
    "markdown",
    "progress",
    "terminal",
    "version",
]


def module_name(path: Path, package: Path) -> str:
    """`fcsd.eval.suite` of `fcsd/eval/suite.py`; a package's name is that of its `__init__`."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


@cache
def read_imports(package: Path) -> dict[str, set[str]]:
    """Every module of a package -> the modules of the package that it imports, wherever in its text it does."""
    paths = {module_name(path, package): path for path in package.rglob("*.py")}
    names = paths.keys() | {package.name}
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        found[name] = set()
        inside = ".".join(path.relative_to(package.parent).parent.parts)  # where a relative import starts
        for node in ast.walk(ast.parse(path.read_text())):
            imported: list[str] = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = inside.rsplit(".", node.level - 1)[0] if node.level else ""
                source = ".".join(filter(None, [base, node.module]))
                imported = [f"{source}.{alias.name}" for alias in node.names]
                imported = [full if full in names else source for full in imported]
            found[name] |= {known for known in imported if known.split(".")[0] == package.name} - {name}
    return found


def room(module: str) -> str:
    """The room of a module, `eval` of `fcsd.eval.suite`; the package itself is its `__init__`."""
    return [*module.split("."), "__init__"][1]


def unit(module: str, folders: set[str]) -> str:
    """What may not import itself by a detour: a folder inside a room, or a file at the top of one."""
    parts = module.split(".")
    inner = ".".join(parts[:3])
    return inner if inner in folders else module


def upward(imports: dict[str, set[str]]) -> list[str]:
    """The imports that point up, a line each."""
    rank = {name: number for number, name in enumerate(ROOMS)}
    return [
        f"{module} imports {target}, which lies above it"
        for module, targets in sorted(imports.items())
        for target in sorted(targets)
        if rank[room(target)] < rank[room(module)]
    ]


def test_every_room_is_listed(repo: Path) -> None:
    assert {room(module) for module in read_imports(repo / "fcsd")} == set(ROOMS)


# The one place for each experimental feature where the core imports it, when a recipe asks for it.
OPTS_IN = {"fcsd.distill.loop": "fcsd.experimental.placement.swaps"}


def test_no_import_points_up(repo: Path) -> None:
    allowed = [f"{module} imports {target}, which lies above it" for module, target in OPTS_IN.items()]
    assert upward(read_imports(repo / "fcsd")) == sorted(allowed)


def test_what_is_experimental_is_imported_when_it_is_asked_for(repo: Path) -> None:
    imports = read_imports(repo / "fcsd").items()
    pairs = [(module, target) for module, targets in imports for target in targets if room(module) != "experimental"]
    assert sorted(pair for pair in pairs if room(pair[1]) == "experimental") == sorted(OPTS_IN.items())
    for module, target in OPTS_IN.items():
        at_once = ast.parse((repo / module.replace(".", "/")).with_suffix(".py").read_text()).body
        assert not any(isinstance(node, ast.ImportFrom) and node.module == target for node in at_once), module


def test_folders_do_not_import_in_a_circle(repo: Path) -> None:
    imports = read_imports(repo / "fcsd")
    folders = {".".join(path.relative_to(repo).parts) for path in (repo / "fcsd").glob("*/*/") if path.is_dir()}
    graph: dict[str, set[str]] = {}
    for module, targets in imports.items():
        here = unit(module, folders)
        graph.setdefault(here, set()).update(there for target in targets if (there := unit(target, folders)) != here)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


# The only files that import DeepSpeed, lazily or not. In `parallel/` it is the adapter for experts.
DEEPSPEED = {
    "distill/step/engine.py",
    "distill/run/resharded.py",
    "distill/run/snapshot.py",
    "distill/optim/adamw_choice.py",
    "distill/optim/adamw_norms.py",
    "parallel/expert/autoep.py",
}


@cache
def imported_packages(path: Path) -> set[str]:
    """The top-level packages that a file imports by absolute names, wherever in its text it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_deepspeed_is_imported_where_it_is_adapted(repo: Path) -> None:
    package = repo / "fcsd"
    importers = {path for path in package.rglob("*.py") if "deepspeed" in imported_packages(path)}
    assert {path.relative_to(package).as_posix() for path in importers} == DEEPSPEED


def test_autoep_is_named_by_its_adapter_alone(repo: Path) -> None:
    parallel = repo / "fcsd" / "parallel"
    assert [path.name for path in parallel.rglob("*.py") if "AutoEP" in path.read_text()] == ["autoep.py"]


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    package = tmp_path / "fcsd"
    (package / "models").mkdir(parents=True)
    (package / "eval").mkdir()
    (package / "__init__.py").write_text("")
    (package / "eval" / "__init__.py").write_text("")
    (package / "eval" / "suite.py").write_text("")
    (package / "models" / "wiring.py").write_text(
        "def late():\n    from ..eval import suite\n    from .archs import X\n"
    )
    (package / "models" / "archs.py").write_text("import fcsd.eval.suite\n")
    imports = read_imports(package)
    assert imports["fcsd.models.wiring"] == {"fcsd.eval.suite", "fcsd.models.archs"}
    assert upward(imports) == [
        "fcsd.models.archs imports fcsd.eval.suite, which lies above it",
        "fcsd.models.wiring imports fcsd.eval.suite, which lies above it",
    ]


@pytest.mark.parametrize(
    "folder", ["bench", "cli", "distill", "distill/run", "eval", "experimental/placement", "parallel", "checkpoint"]
)
def test_every_folder_says_what_it_is_for(repo: Path, folder: str) -> None:
    assert ast.get_docstring(ast.parse((repo / "fcsd" / folder / "__init__.py").read_text()))


LAB = {"benchmarks", "studies", "tests"}


def test_the_core_imports_nothing_of_the_lab(repo: Path) -> None:
    importers = {path for path in (repo / "fcsd").rglob("*.py") if LAB & imported_packages(path)}
    assert not importers


# What starts from outside of the package, or is started by its name: console script, vLLM's entry point, subprocesses.
ENTRIES = ("fcsd.__init__", "fcsd.__main__", "fcsd.cli.main", "fcsd.serve.vllm.plugin")
# Modules that a text names instead of importing, and who does so.
NAMED = {
    "fcsd.eval.code.judge_worker": "fcsd.eval.code.judge",
    "fcsd.export.fresh_process": "fcsd.export.reload",
    "fcsd.serve.vllm.models": "fcsd.serve.vllm.registration",
}


def reached(imports: dict[str, set[str]], entries: Iterable[str]) -> set[str]:
    """The modules that a walk along imports reaches from ``entries``; a module's package is imported with it."""
    found: set[str] = set()
    waiting = list(entries)
    while waiting:
        module = waiting.pop()
        if module in found or module not in imports:
            continue
        found.add(module)
        waiting += [*imports[module], module.rpartition(".")[0]]
    return found


def test_everything_is_reached_from_the_commands_or_the_api(repo: Path) -> None:
    imports = read_imports(repo / "fcsd")
    for named, by in NAMED.items():
        text = (repo / by.replace(".", "/")).with_suffix(".py").read_text()
        assert named in text or f"{named.rpartition('.')[2]}.py" in text, f"{by} no longer names {named}"
    unreached = imports.keys() - reached(imports, [*ENTRIES, *NAMED])
    assert not unreached, "delete what nothing reaches, or move it to benchmarks/, studies/ or tests/"


def test_a_module_that_nothing_imports_is_not_reached() -> None:
    imports = {
        "fcsd": {"fcsd.cli.main"},
        "fcsd.cli.main": {"fcsd.a.b"},
        "fcsd.a.b": set(),
        "fcsd.a": set(),
        "fcsd.c": set(),
    }
    assert reached(imports, ["fcsd"]) == {"fcsd", "fcsd.cli.main", "fcsd.a.b", "fcsd.a"}
