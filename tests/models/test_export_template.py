"""The code files of a converted directory: equal to what fcsd builds itself, and sufficient without it."""

import importlib
import importlib.util
import io
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from representatives import by_day_and_night
from safetensors.torch import load_file, save_file

import fcsd
from fcsd.models import build
from fcsd.models.arch import CONFIGURATION, MODELING
from fcsd.models.archs import ARCHS
from fcsd.models.export_template import render
from fcsd.models.wiring import Wiring, refuse_unknown_backend


def wired_directory(arch: str, auto: str, out: Path) -> transformers.PreTrainedModel:
    """Save a tiny farskip model of ``arch`` with its code; the model that was saved."""
    base: Any = tiny.model(arch)
    arch = base.config.model_type
    base = base.model if auto == "AutoModel" else base
    config = build.converted_config(base.config, Wiring("farskip", (1, 2, 3)).to_block())
    config.auto_map = ARCHS[arch].auto_map
    model = build.model_classes(arch)[auto](config).eval()
    model.load_state_dict(base.state_dict())
    model.save_pretrained(out)
    for name, text in render(ARCHS[arch]).items():
        (out / name).write_text(text)
    return model


def load_module(directory: Path, package: str, name: str):
    """Import ``directory/name.py`` as ``package.name``, ``directory`` being the package."""
    if package not in sys.modules:
        spec = ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(directory)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.{name}")


def test_the_code_is_the_same_in_every_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = render(ARCHS["llama"])
    monkeypatch.setattr(io, "text_encoding", lambda encoding, _=2: encoding or "ascii")
    assert render(ARCHS["llama"]) == expected


@pytest.mark.parametrize("model_type", ARCHS)
def test_rendered_classes_equal_the_built_ones(model_type: str, tmp_path: Path) -> None:
    arch = ARCHS[model_type]
    for name, text in render(arch).items():
        (tmp_path / name).write_text(text)
    package = f"rendered_{model_type}"
    configuration = load_module(tmp_path, package, CONFIGURATION)
    modeling = load_module(tmp_path, package, MODELING)
    wiring = load_module(tmp_path, package, "wiring")

    ours = build.config_class(model_type)
    theirs = getattr(configuration, ours.__name__)
    assert theirs.__bases__ == ours.__bases__
    assert (theirs.model_type, theirs.fcsd) == (ours.model_type, ours.fcsd)
    assert theirs.__annotations__["fcsd"] == ours.__annotations__["fcsd"]
    assert arch.auto_map.keys() == {"AutoConfig", *arch.classes}
    for auto, built in build.model_classes(model_type).items():
        module, name = arch.auto_map[auto].split(".")
        rendered = getattr(modeling, name)
        assert module == MODELING and name == built.__name__
        assert rendered.__bases__ == (wiring.WiredModel, built.__bases__[1])
        assert rendered.config_class is theirs
        assert rendered.fcsd_decoder == built.fcsd_decoder
        assert vars(rendered.fcsd_blocks) == vars(built.fcsd_blocks)


def test_rendered_code_passes_transformers_import_check(tmp_path: Path) -> None:
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    for name, text in render(ARCHS["deepseek_v2"]).items():
        (tmp_path / name).write_text(text)
        assert set(get_imports(tmp_path / name)) <= {
            "torch",
            "transformers",
            *sys.stdlib_module_names,
        }
        assert all("." not in sibling for sibling in get_relative_imports(tmp_path / name))


def test_another_transformers_is_refused_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in render(ARCHS["llama"]).items():
        (tmp_path / name).write_text(text)
    for version in ("5.16.2", "6.0.0", "4.57.1"):
        # not the name imported above: transformers replaces itself in sys.modules while it is used
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        with pytest.raises(ImportError, match=f"needs transformers >=5.17,<6, not {version}"):
            load_module(tmp_path, f"rendered_for_{version.replace('.', '_')}", CONFIGURATION)


# Runs a script once for each list of arguments.
EACH = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("archs", by_day_and_night("layer", "moe", "head", of=[*tiny.CONFIGS, *tiny.INSIDE]))
def test_every_architecture_loads_bit_equal_in_a_process_without_fcsd(tmp_path: Path, archs: list[str]) -> None:
    inputs, expected, jobs = {"input_ids": tiny.tokens()}, {}, []
    for auto in ("AutoModelForCausalLM", "AutoModel"):
        folders = []
        for arch in archs:
            folders.append(f"{arch}-{auto}")
            model = wired_directory(arch, auto, tmp_path / folders[-1])
            model.set_experts_implementation("eager")
            with torch.no_grad():
                expected[folders[-1]] = model(**inputs)[0]
        jobs.append([f"{fcsd.__path__[0]}/export/fresh_process.py", "inputs", auto, "1", auto, *folders])
    save_file(inputs, tmp_path / "inputs")
    subprocess.run([sys.executable, "-P", "-c", EACH, json.dumps(jobs)], cwd=tmp_path, check=True)
    for _, _, out, _, _, *folders in jobs:
        found = load_file(tmp_path / out)
        for i, folder in enumerate(folders):
            assert torch.equal(found[str(i)], expected[folder]), folder


def test_neither_fcsd_nor_remote_code_is_an_error_never_the_base_graph(tmp_path: Path) -> None:
    wired_directory("llama", "AutoModelForCausalLM", tmp_path / "wired")
    code = """if True:
        import sys
        sys.modules["fcsd"] = None
        import transformers
        for options in ({}, {"trust_remote_code": False}):
            try:
                transformers.AutoModelForCausalLM.from_pretrained("wired", **options)
            except ValueError as error:
                assert "contains custom code" in str(error)
            else:
                raise AssertionError(options)
    """
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, stdin=subprocess.DEVNULL, check=True)


@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModel"])
def test_a_backend_that_brings_its_own_attention_is_refused(auto: str, tmp_path: Path) -> None:
    """As vLLM's Transformers backend does: it names its attention in the config, and then builds the model."""
    saved = wired_directory("qwen3_moe", auto, tmp_path)
    package = f"built_by_a_backend_{auto}"
    config = load_module(tmp_path, package, CONFIGURATION).FcsdQwen3MoeConfig.from_pretrained(tmp_path)
    shipped = getattr(load_module(tmp_path, package, MODELING), type(saved).__name__)
    config._attn_implementation = "vllm"
    with pytest.raises(ValueError, match=r"'vllm', which does not know its wiring.*fcsd's plugin"):
        shipped._from_config(config)
    config._attn_implementation = "eager"
    assert shipped._from_config(config).config.fcsd == saved.config.fcsd


@pytest.mark.parametrize(
    "name", [None, "eager", "sdpa", "flash_attention_3", "paged|sdpa", "kernels-community/flash-attn"]
)
def test_the_attention_of_transformers_is_known(name: str | None) -> None:
    config = tiny.config("llama")
    config._attn_implementation_internal = name
    refuse_unknown_backend(config)


def test_the_attention_of_a_decoder_counts() -> None:
    config = transformers.Llama4Config(text_config=tiny.config("llama4_text").to_dict())
    config.text_config._attn_implementation_internal = "sglang"
    with pytest.raises(ValueError, match="sglang"):
        refuse_unknown_backend(config)
