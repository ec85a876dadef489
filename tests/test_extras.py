"""`fcsd` alone is enough for its core commands, and everything else says which extra it needs."""

import ast
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from distributions import closure
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from reached import Reached, Source
from test_imports import imported_packages
from typer.testing import CliRunner

import fcsd
import fcsd.models.build
from fcsd import extras
from fcsd.cli.main import app
from fcsd.errors import ConfigError
from fcsd.extras import EXTRAS, require_extra

# What a command imports and no requirement of fcsd names: the requirement that brings it, which imports it itself.
COMES_WITH = {
    **{"pydantic_core": "pydantic", "evaluate": "lm_eval", "nltk": "lm_eval"},
    **{"tokenizers": "transformers", "regex": "transformers"},
}
# torch's builds for CUDA bring it; without it fcsd sends rows through NCCL.
WHERE_CUDA_IS = {"cuda"}
CORE = {
    "inspect": ("fcsd.cli.models", "inspect"),
    "convert": ("fcsd.cli.models", "convert"),
    "export": ("fcsd.cli.models", "export"),
    "push": ("fcsd.cli.models", "push"),
    "plan": ("fcsd.cli.distill", "plan"),
    "recipes": ("fcsd.cli.recipes", "recipes_show"),
    "env": ("fcsd.launch.environment", "snapshot"),
}


@pytest.fixture(scope="module")
def source(repo: Path) -> Source:
    return Source(repo)


# What some calls of a core command need: --picture, --calibration, a run with adapters, also in NF4, and --quantise.
OF_EXPORT = {"accelerate", "bitsandbytes", "deepspeed", "peft", "datasets", "llmcompressor", "pyarrow"}
OPTIONAL = {"plan": {"matplotlib"}, "convert": {"pyarrow"}, "export": OF_EXPORT}


@pytest.fixture(scope="module")
def project(repo: Path) -> dict:
    return tomllib.loads((repo / "pyproject.toml").read_text())["project"]


def module_names(requirements: Iterable[str]) -> set[str]:
    """The names under which required distributions are imported."""
    names = {canonicalize_name(Requirement(text).name).replace("-", "_") for text in requirements}
    return {"yaml" if name == "pyyaml" else name for name in names}


def required(reached: Reached, project: dict) -> set[str]:
    """The packages that calls of ``require_extra`` check; all of the extra where they are not written as text."""
    packages: set[str] = set()
    for call in reached.calls:
        if isinstance(call.func, ast.Name) and call.func.id == "require_extra":
            extra, _, *named = call.args
            assert isinstance(extra, ast.Constant)
            texts = {argument.value for argument in named if isinstance(argument, ast.Constant)}
            everything = module_names(project["optional-dependencies"][extra.value])
            packages |= texts if named and len(texts) == len(named) else everything
    return packages


def unnamed(reached: Reached, allowed: set[str]) -> dict[str, str]:
    """The packages that are reached and not allowed, each with a place that imports it."""
    return {
        package: ".".join(filter(None, place))
        for package, place in sorted(reached.packages.items())
        if COMES_WITH.get(package, package) not in allowed | WHERE_CUDA_IS
    }


@pytest.mark.parametrize("name", CORE)
def test_a_core_command_reaches_core_dependencies_alone(source: Source, project: dict, name: str) -> None:
    reached = source.reached([CORE[name]])
    optional = OPTIONAL.get(name, set()) & required(reached, project)
    allowed = module_names(project["dependencies"]) | optional
    assert unnamed(reached, allowed) == {}


def test_the_plugin_needs_nothing_that_vllms_image_lacks(source: Source) -> None:
    """``pip install --no-deps fcsd`` beside vLLM is enough for it."""
    modules = [f"fcsd.serve.vllm.{name}" for name in ("plugin", "registration", "models", "checks")]
    reached = source.reached([name for module in modules for name in source.names(module)])
    assert unnamed(reached, {"vllm", "torch", "transformers", "safetensors", "triton"}) == {}


def commands(source: Source) -> list[tuple[str, str]]:
    """Every function of the command line that is a command."""
    # The top level of `main` names all commands, and so reaches everything.
    groups = [module for module in source.modules if module.startswith("fcsd.cli.") and module != "fcsd.cli.main"]
    return [
        (module, name)
        for module, name in (name for group in groups for name in source.names(group))
        if isinstance(source.modules[module].defined[name][0], ast.FunctionDef) and not name.startswith("_")
    ]


def test_every_command_names_the_extra_of_each_package_that_it_reaches(source: Source, project: dict) -> None:
    found = commands(source)
    assert {("fcsd.cli.eval", "evaluate"), ("fcsd.cli.serve", "serve"), ("fcsd.cli.bench", "links")} <= set(found)
    for command in found:
        reached = source.reached([command])
        allowed = module_names(project["dependencies"]) | required(reached, project)
        assert unnamed(reached, allowed) == {}, command


def test_the_python_api_names_the_extra_of_each_package_that_it_reaches(source: Source, project: dict) -> None:
    for name in fcsd.__all__:
        reached = source.reached([(fcsd._MODULES[name], name)])
        allowed = module_names(project["dependencies"]) | required(reached, project)
        allowed |= set(EXTRAS.get(fcsd._EXTRAS.get(name, ""), ()))
        assert unnamed(reached, allowed) == {}, name


def test_the_table_of_extras_is_that_of_pyproject(project: dict) -> None:
    for extra, packages in EXTRAS.items():
        assert module_names(project["optional-dependencies"][extra]) == set(packages), extra
    (everything,) = project["optional-dependencies"]["all"]
    # llm-compressor and vLLM each admit one version of compressed-tensors, and not the same.
    assert Requirement(everything).extras == set(EXTRAS) - {"quantise"}


def test_no_dependency_is_left_over(repo: Path, project: dict) -> None:
    imported = set().union(*map(imported_packages, (repo / "fcsd").rglob("*.py")))
    wanted = module_names(project["dependencies"]).union(*map(set, EXTRAS.values()))
    assert wanted - imported == {"tensorboard"}  # torch.utils.tensorboard needs it


def test_vllm_comes_without_the_libraries_of_the_benchmarks(project: dict) -> None:
    wanted = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    assert {"torch", "vllm"} <= closure(wanted)
    assert not closure(wanted) & {"lm-eval", "evalplus", "deepspeed", "datasets", "wandb", "scipy", "triton-kernels"}
    assert {"lm-eval", "evalplus"} <= closure(project["optional-dependencies"]["eval"])


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"deepspeed", "accelerate"}
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(ConfigError) as caught:
        require_extra("train", "fcsd distill")
    assert str(caught.value) == "fcsd distill needs accelerate, deepspeed: pip install 'fcsd[train]'"
    assert caught.value.hint is None and caught.value.exit_code == 2
    require_extra("train", "fcsd plan --picture", "matplotlib")
    require_extra("eval", "fcsd eval", "scipy")


def test_a_run_that_stops_by_a_benchmark_needs_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "lm_eval" else object())
    commands = ["distill", "tiny", "--set", "early_stop.metric=piqa", "--dry-run"]
    found = CliRunner().invoke(app, commands)
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr == "error: early_stop.metric piqa needs lm_eval: pip install 'fcsd[eval]'\n"


@pytest.mark.parametrize(
    ("name", "extra"), [("distill_model", "train"), ("evaluate_models", "eval"), ("compare_models", "eval")]
)
def test_the_python_api_names_the_extra(monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"^fcsd\.{name} needs .*: pip install 'fcsd\[{extra}\]'$"):
        getattr(fcsd, name)
    assert callable(fcsd.convert_checkpoint)


def test_a_model_is_spread_over_gpus_only_with_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"^a model that is spread over GPUs needs accelerate: .*\[eval\]'$"):
        fcsd.models.build.load_on_device("nowhere", device="cuda", dtype=None)
