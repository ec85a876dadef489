"""Adding an architecture, a loss, a format or a suite takes the steps that its page in docs/ says, and nothing else."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import ranks
import test_rotary

from fcsd.config import TERMS
from fcsd.distill.loss.losses import COMPUTED
from fcsd.eval.suite_file import Task
from fcsd.models import archs
from fcsd.models.arch import Arch
from fcsd.models.archs import ARCHS

# The line below which each of the two files of the page gets a new entry.
TABLES = {"fcsd/models/archs.py": "_ROWS = (", "tests/tiny.py": "CONFIGS: dict[str, tuple[str, dict]] = {"}


# Added to the proof of a loss: a run with it, and what a plan counts.
RUN = """

def test_run_and_plan_read_the_row(tmp_path, monkeypatch):
    import runs

    from fcsd.distill.loop import distill_model
    from fcsd.distill.run import report
    from fcsd.plan.setup import setup_of

    monkeypatch.setattr(report, "draw_curves", lambda run: run / report.CURVES)
    runs.write_models(tmp_path, "llama")
    recipe = runs.resolved(tmp_path, objective__kl=0.0, objective__reverse_kl=2.0, train__eval_every=4)
    distill_model(recipe)
    first, *_, last = report.read_metrics(tmp_path / "run")
    assert first["loss"] == pytest.approx(2 * first["reverse_kl"] + 0.5 * first["sft"])
    assert last["held_out_reverse_kl"] > 0 and last["reverse_kl"] < first["reverse_kl"]
    setup = setup_of(recipe.recipe, 1, 4)
    assert setup.terms == ("sft", "reverse_kl") and setup.teacher != "none"
"""


# Added to the proof of a format: what reads its row.
USE = """

def test_recipes_and_exchanges_read_the_row():
    from fcsd.config import load_recipe
    from fcsd.kernels.bit_split import Format
    from fcsd.parallel.quantised import RowCodec, formats_of, simulate

    recipe = load_recipe("tiny", ["parallel.quantised.combine_grad=int6:g16:pow2"]).recipe
    formats = formats_of(recipe.parallel.quantised)
    assert "int6:g16:pow2 (7 bits a value)" in str(formats)
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    arrived = simulate(rows, RowCodec(Format.parse("int8:g32:sr:pow2")), None)
    assert not torch.equal(arrived, rows) and torch.allclose(arrived, rows, atol=0.05)
"""


class Followed(NamedTuple):
    """A copy of the repository in which three pages were followed, and the tests that passed there, as MODULE::NAME."""

    repo: Path
    passed: list[str]


@pytest.fixture(scope="module")
def page(repo: Path) -> str:
    return (repo / "docs/adding_an_architecture.md").read_text()


@pytest.fixture(scope="module")
def followed(page: str, repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """The tests run in one process for all pages: to import and collect takes most of the time."""
    ((marked, chosen),) = re.findall(r'`scripts/test\.sh tests -m "(.*?)" -k "(.*?)"`', steps_of(page))
    copy = tmp_path_factory.mktemp("copy")
    copy_repository(repo, copy)
    add_the_easy_family(page, copy)
    proofs = [add_a_loss((repo / "docs/adding_a_loss.md").read_text(), copy)]
    proofs.append(add_a_format((repo / "docs/adding_a_format.md").read_text(), copy))
    # The files that have cases of a family: to collect all others, too, would take longer still.
    named = re.compile(r"\b(CONFIGS|ARCHS|representatives|names_exist)\b")
    folders = ("models", "engine", "kernels", "parallel", "plan", "serve", "distill/step")
    files = (file for name in folders for file in (copy / "tests" / name).rglob("test_*.py"))
    where = [*map(str, proofs), *sorted(str(file) for file in files if named.search(file.read_text()))]
    run(
        copy,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml"),
        *(*where, "-m", marked, "-k", " or ".join([chosen, *(proof.stem for proof in proofs)])),
    )
    cases = ElementTree.parse(copy / "report.xml").iter("testcase")
    return Followed(copy, [f"{case.get('classname')}::{case.get('name')}" for case in cases if len(case) == 0])


def steps_of(page: str) -> str:
    return page.split("## An easy family")[1].split("\n## ")[0]


def python_blocks(page: str) -> list[str]:
    """The easy row, its tiny config, and the hard row."""
    return [block.strip() for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]


def copy_repository(repo: Path, to: Path) -> None:
    for name in ("fcsd", "tests", "scripts", "docs", "recipes", "README.md", "CONTRIBUTING.md", "pyproject.toml"):
        copy = shutil.copytree if (repo / name).is_dir() else shutil.copy
        copy(repo / name, to / name)
    for name in ("assets", "benchmarks", "studies"):
        (to / name).symlink_to(repo / name)


def run(repo: Path, *arguments: str) -> str:
    """Runs python in a copy of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(repo)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


def add_the_easy_family(page: str, copy: Path) -> None:
    if eval(python_blocks(page)[0], vars(archs)).model_type not in ARCHS:
        for (name, line), entry in zip(TABLES.items(), python_blocks(page), strict=False):
            before, after = (copy / name).read_text().split(f"\n{line}\n")
            (copy / name).write_text(f"{before}\n{line}\n    {entry},\n{after}")


def add_a_loss(page: str, copy: Path) -> Path:
    """Adds the loss of the page, and returns the file of its tests."""
    row, function, proof = map(textwrap.dedent, re.findall(r"```python\n(.*?)   ```", page, re.DOTALL))
    objective, losses = copy / "fcsd/config/sections.py", copy / "fcsd/distill/loss/losses.py"
    before, after = objective.read_text().split("    hidden: Annotated[")
    objective.write_text(f"{before}{textwrap.indent(row, '    ')}    hidden: Annotated[{after}")
    before, after = losses.read_text().split("# The function of each term")
    after = after.replace('"sft": _sft', '"sft": _sft, "reverse_kl": _reverse_kl')
    losses.write_text(f"{before}{function}\n\n# The function of each term{after}")
    test = copy / "tests/distill/loss/test_reverse_kl.py"
    test.write_text(proof + RUN)
    return test


def add_a_format(page: str, copy: Path) -> Path:
    """Adds the format of the page, and returns the file of its tests."""
    blocks = map(textwrap.dedent, re.findall(r"```python\n(.*?)   ```", page, re.DOTALL))
    row, functions, coding, proof = blocks
    for name, after, entry in (("format", "SCALES = {", row), ("reference", "CODINGS = {", coding)):
        file = copy / f"fcsd/kernels/bit_split/{name}.py"
        text = file.read_text()
        assert text.count(f"\n{after}\n") == 1
        file.write_text(text.replace(f"\n{after}\n", f"\n{after}\n{textwrap.indent(entry, '    ')}"))
    reference = copy / "fcsd/kernels/bit_split/reference.py"
    before, rest = reference.read_text().split("class Coding(")
    reference.write_text(f"{before}{functions}\n\nclass Coding({rest}")
    test = copy / "tests/kernels/test_pow2.py"
    test.write_text(proof + USE)
    return test


@pytest.mark.nightly
def test_the_steps_add_the_easy_family(page: str, followed: Followed) -> None:
    """In a copy of the repository; the commands are those of the steps."""
    steps = steps_of(page)
    assert len(re.findall(r"^\d\. ", steps, re.MULTILINE)) == 4
    ((_, chosen),) = re.findall(r'`scripts/test\.sh tests -m "(.*?)" -k "(.*?)"`', steps)
    (script,) = re.findall(r"`python (scripts/\w+\.py)`", steps)
    family = eval(python_blocks(page)[0], vars(archs)).model_type
    assert family in chosen.split()
    assert len([name for name in followed.passed if not re.search("test_(reverse_kl|pow2)", name)]) > 40
    run(followed.repo, script)
    assert f"`{family}`" in (followed.repo / "docs/reference/architectures.md").read_text()


def test_the_hard_row_is_that_of_the_table_and_every_field_is_explained(page: str) -> None:
    row = eval(python_blocks(page)[2], vars(archs))
    assert row == ARCHS[row.model_type]
    assert [field.name for field in fields(Arch) if f"`{field.name}`" not in page] == ["model_type"]


def test_a_forgotten_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a default row the hard family does not pass: its kernel would rotate by other angles."""
    monkeypatch.setitem(ARCHS, "gpt_oss", archs._row("gpt_oss", "GptOss"))  # pyright: ignore
    with pytest.raises(AssertionError):
        test_rotary.test_a_model_with_fused_rotations_computes_the_same_and_becomes_itself_again("gpt_oss")


def test_a_loss_is_a_row_a_function_and_a_proof(followed: Followed) -> None:
    assert len([name for name in followed.passed if "test_reverse_kl" in name]) == 3


def test_every_term_of_the_table_is_computed() -> None:
    assert COMPUTED.keys() == TERMS.keys()


def test_a_format_is_a_row_functions_and_a_proof(followed: Followed) -> None:
    assert len([name for name in followed.passed if "test_pow2" in name]) == 23


def test_a_suite_is_a_file_of_names(repo: Path, tmp_path: Path) -> None:
    page = (repo / "docs/adding_a_suite.md").read_text()
    (suite,) = map(textwrap.dedent, re.findall(r"```yml\n(.*?)   ```", page, re.DOTALL))
    (command,) = re.findall(r"```bash\n\s*fcsd (.*?)\n\s*```", page)
    (tmp_path / "mine.yaml").write_text(suite)
    (tmp_path / "assets").symlink_to(repo / "assets")
    done = ranks.fcsd("convert", "assets/teacher", "rewired", "--no-check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = ranks.fcsd(*shlex.split(command), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    scored = json.loads((tmp_path / "scores/rewired.json").read_text())
    assert [row["column"] for row in scored] == ["piqa", "ARC-E, raw", "gsm8k"]
    assert {row["suite"] for row in scored} == {"mine"} and {row["n"] for row in scored} == {4}
    settings = [row["settings"] for row in scored]
    assert [each["metric"] for each in settings] == ["acc_norm", "acc", "exact_match"]
    assert settings[1]["shots"] == 2 and settings[2]["filter"] == "flexible-extract" and scored[2]["chance"] == 0
    assert settings[2]["generation"] == {"max_gen_toks": 64}
    keys = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert keys == list(Task.model_fields)
