"""What a user installs: the wheel, away from this checkout."""

import email
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from reached import NOT_IMPORTED

from fcsd import __version__


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=repo, check=True, capture_output=True, timeout=300)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    return target


def fcsd(installed: Path, elsewhere: Path, *args: str) -> str:
    """The console script's stdout; the installed package comes first, the checkout is out of reach."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [str(installed / "bin" / "fcsd"), *args]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_console_script_and_recipes(installed: Path, tmp_path: Path, repo: Path) -> None:
    assert fcsd(installed, tmp_path, "--version") == f"{__version__}\n"
    names = sorted(path.stem for path in (repo / "recipes").glob("*.yaml"))
    assert [line.split()[0] for line in fcsd(installed, tmp_path, "recipes", "list").splitlines()] == names
    assert fcsd(installed, tmp_path, "recipes", "show", "tiny").startswith("name: tiny ")
    assert fcsd(installed, tmp_path, "recipes", "copy", "tiny") == "tiny.yaml\n"
    assert (tmp_path / "tiny.yaml").read_bytes() == (repo / "recipes" / "tiny.yaml").read_bytes()


def test_every_module_imports_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """No module needs the checkout, and none of them works at import time: no output, no files."""
    code = (
        "import importlib, pkgutil, fcsd\n"
        f"assert fcsd.__file__.startswith({str(installed)!r}), fcsd.__file__\n"
        "modules = {module.name for module in pkgutil.walk_packages(fcsd.__path__, 'fcsd.')}\n"
        f"for name in sorted(modules - {NOT_IMPORTED}): importlib.import_module(name)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_wheel_holds_the_package_the_licence_and_nothing_else(wheel: Path, repo: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_name))
    packaged = {f"fcsd/recipes/_data/{path.name}" for path in (repo / "recipes").glob("*.yaml")}
    assert packaged | {"fcsd/py.typed"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"fcsd", metadata_name.split("/")[0]}
    assert not [name for name in names if name.endswith((".pyc", ".safetensors"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert (metadata["Name"], metadata["Version"]) == ("fcsd", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"


def test_constraints_pin_every_direct_dependency_inside_its_range(repo: Path) -> None:
    lines = (repo / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    assert versions["torch"] == "2.13.0"
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tested = [*extras["dev"], *extras["train"], *extras["eval"]]  # dev brings the other two
    for wanted in map(Requirement, [*project["dependencies"], *tested]):
        assert wanted.name == "fcsd" or wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), wanted
