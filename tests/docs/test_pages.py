"""What the pages say about the code is true: links, files, keys of recipes, commands, options and messages exist."""

import ast
import importlib.util
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import typer

import fcsd.errors
from fcsd.cli.main import app
from fcsd.config import Recipe, load_recipe

_REPO = Path(__file__).resolve().parents[2]
PAGES = [Path("README.md"), Path("CONTRIBUTING.md"), Path("SECURITY.md"), Path("assets/README.md")]
PAGES += sorted(path.relative_to(_REPO) for path in (_REPO / "docs").rglob("*.md"))
LAB = [Path(f"{folder}/README.md") for folder in ("benchmarks", "benchmarks/carried", "studies")]
RESULTS = sorted(path.relative_to(_REPO) for path in (_REPO / "benchmarks/results").glob("*.md"))
STUDIES = sorted(path.relative_to(_REPO) for path in (_REPO / "studies").glob("*/*.md"))


def anchors(text: str) -> set[str]:
    """What a page's headings are called in links, as GitHub does it."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *LAB, *RESULTS, *STUDIES], ids=str)
def test_links_lead_somewhere(page, repo):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", (repo / page).read_text()):
        file = (repo / page.parent / target) if target else repo / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_of_the_repository_exist(page, repo):
    text = (repo / page).read_text()
    named = re.findall(
        r"(?<![\w/.])((?:fcsd|tests|scripts|assets|docs)/[\w./*-]+\.(?:py|sh|yaml|jsonl?|gz|parquet|md))", text
    )
    missing = [name for name in named if not list(repo.glob(name))]
    assert not [name for name in missing if name != "assets/teacher"]


@pytest.mark.parametrize("folder", ["fcsd", "recipes", "scripts", "studies", "benchmarks", "tests"])
def test_pages_that_the_code_names_exist(folder, repo):
    """Messages, help texts and comments lead to a page; one that says where in the page, to its heading."""
    for file in (found for kind in ("py", "sh", "yaml") for found in (repo / folder).rglob(f"*.{kind}")):
        for name, anchor in re.findall(
            r"(?<![\w/])((?:docs|studies|benchmarks)/[\w/]+\.md)(?:#([\w-]+))?", file.read_text()
        ):
            assert (repo / name).exists(), f"{file}: {name}"
            assert not anchor or anchor in anchors((repo / name).read_text()), f"{file}: {name}#{anchor}"


def absent_programs(text, repo):
    """The programs of benchmarks/ and studies/ that a text names, by file or as a module, and that do not exist."""
    files = set(re.findall(r"(?<![\w/.])(?:benchmarks|studies)/[\w./*-]+\.(?:py|sh)\b", text))
    modules = set(re.findall(r"-m\s+((?:benchmarks|studies)(?:\.\w+)+)", text))
    wanting = {name for name in files if not list(repo.glob(name))}
    for name in modules:
        path = repo / name.replace(".", "/")
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            wanting.add(f"{name.replace('.', '/')}.py")
    return wanting


@pytest.mark.parametrize("page", [*PAGES, *LAB, *STUDIES], ids=str)
def test_programs_of_the_lab_exist(page, repo):
    assert not absent_programs((repo / page).read_text(), repo)


@pytest.mark.parametrize("page", RESULTS, ids=str)
def test_pages_of_results_say_which_programs_have_gone(page, repo):
    """A stored figure outlives its program. The page then lists the program, and the last commit that has it."""
    text = (repo / page).read_text()
    (listed,) = re.findall(r"^Not in the tree any more: (.*?)\.\n\n", text, re.M | re.S) or [""]
    assert absent_programs(text, repo) == set(re.findall(r"`([^`]+)`", listed))
    assert all(re.search(r"\(commit \w{7}\)$", part) for part in listed.split(";") if part)


def keys_of(section, key=""):
    """Every dotted key of a recipe, sections included."""
    found = set()
    for name, field in section.model_fields.items():
        own = f"{key}{name}"
        found.add(own)
        for inner in [field.annotation, *getattr(field.annotation, "__args__", ())]:
            if hasattr(inner, "model_fields"):
                found |= keys_of(inner, f"{own}.")
    return found


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_keys_of_recipes_exist(page, repo):
    known = keys_of(Recipe)
    sections = "|".join({key.partition(".")[0] for key in known if "." in key})
    keys = rf"(?<![\w/.])(?:{sections})\.[a-z_]+(?:\.[a-z_]+)*(?!\.?\w|\()"
    files = (".json", ".md", ".parquet", ".png", ".py")
    assert {name for name in re.findall(keys, (repo / page).read_text()) if not name.endswith(files)} <= known


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_recipes_load(page, repo, tmp_path):
    """What a YAML block leaves out is added where a recipe must have it."""
    for block in re.findall(r"```yaml\n(.*?)```", (repo / page).read_text(), re.DOTALL):
        needed = {
            "name": "name: a",
            "model": "model: a",
            "output_dir": "output_dir: a",
            "data": "data: {sources: [path: a]}",
        }
        keys = re.findall(r"^(\w+):", block, re.MULTILINE)
        missing = [line for key, line in needed.items() if key not in keys and "base" not in keys]
        path = tmp_path / "recipe.yaml"
        path.write_text("\n".join([*missing, block, ""]))
        assert set(keys) <= load_recipe(path).recipe.model_dump().keys() | {"base"}


def commands(command, name="fcsd"):
    """Full name -> command, groups left out."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return {name: command}
    return {full: found for key, sub in inner.items() for full, found in commands(sub, f"{name} {key}").items()}


def shell_commands(text):
    """The words of every command in a page's shell blocks."""
    shell, lines = None, []
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            shell = line.strip().strip("`") in ("", "bash", "sh", "console") if shell is None else None
        elif shell:
            lines.append(line.removeprefix("$ "))
    for line in lines:
        if re.search(r"\bfcsd ", line):
            words = shlex.split(line, comments=True)
            ends = [n for n, word in enumerate(words) if word in ("&&", "||", "|", ">", "2>")]
            for start, end in pairwise([-1, *ends, len(words)]):
                yield words[start + 1 : end]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_and_their_options_exist(page, repo):
    known = commands(typer.main.get_command(app))
    for words in shell_commands((repo / page).read_text()):
        if words[:1] == ["fcsd"]:
            name = next(" ".join(words[:n]) for n in (3, 2) if " ".join(words[:n]) in known)
            options = {option for parameter in known[name].params for option in parameter.opts}
            ours = words[: words.index("--")] if "--" in words else words  # what follows is for another program
            given = {word.partition("=")[0] for word in ours if word.startswith("--")}
            assert given <= options, words


@pytest.fixture(scope="module")
def messages():
    """Every text in fcsd's code, its insertions shown as `...`, and the exit code of the error that it is given to."""
    codes = {name: found.exit_code for name, found in vars(fcsd.errors).items() if hasattr(found, "exit_code")}
    found = []
    spec = importlib.util.find_spec("fcsd")
    assert spec is not None and spec.origin is not None
    for path in Path(spec.origin).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                found.append((written(node), None))
            raised = node if isinstance(node, ast.Call) and getattr(node.func, "id", "") in codes else None
            if raised is not None and raised.args:
                found.append((written(raised.args[0]), codes[raised.func.id]))
            if isinstance(node, ast.Tuple) and len(node.elts) == 5 and getattr(node.elts[2], "id", "") in codes:
                found.append((written(node.elts[3]), codes[node.elts[2].id]))  # the table of foreign_errors
    return found


def written(node: ast.AST) -> str:
    """The text of an expression, with `...` for what is inserted into it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(written, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return written(node.left) + written(node.right)
    return "..."


def test_messages_in_troubleshooting_are_those_of_the_code(repo, messages):
    """A section may begin with the exit code of all its messages that give no other; a warning has none."""
    entries = []
    for section in (repo / "docs/troubleshooting.md").read_text().split("\n### ")[1:]:
        (usual,) = re.findall(r"^Exit code (\d+), unless another one is given\.$", section, re.MULTILINE) or [""]
        found = re.findall(r'^((?:\*\*"[^*]+"\*\*(?:,?\s+and\s+|,\s+)?)+)(?:\s+\(([^)]*)\))?', section, re.MULTILINE)
        entries += [(quoted, code_told(told, usual)) for quoted, told in found]
    assert len(entries) > 40
    wrong = []
    for quoted, code in entries:
        for message in re.findall(r'"([^"]+)"', quoted):
            pattern = re.escape(message).replace(r"\.\.\.", ".*")
            codes = {given for said, given in messages if re.search(pattern, said, re.DOTALL)}
            if not codes or (code and codes != {None} and int(code) not in codes):
                wrong.append((message, code, codes))
    assert not wrong


def code_told(told: str, usual: str) -> str:
    """The exit code in the brackets behind a message, or that of its section; none of a warning."""
    own = re.search(r"exit (\d+)", told)
    return own[1] if own else "" if "warning" in told else usual
