"""Lists which of the names that fcsd's plugin uses, or could use, exist in versions of vLLM, from their sources.

    python -m benchmarks.vllm names 0.24.0=FOLDER ...      print the lists, to add to tests/serve/vllm_names.json
    python -m benchmarks.vllm names breaks WHEEL ...       print what the plugin would miss, a line each

``FOLDER`` holds vLLM's Python files in ``vllm/``: an installation, an unpacked wheel, or an unpacked source archive. A
WHEEL is a file ``vllm-VERSION-*.whl``. Both commands take either. ``breaks`` ends with 1 if anything is missing. It
reads names and the first arguments of functions, and imports and runs nothing: a version in which nothing is missing
still has to be run before the plugin supports it.

The list has the children of the decoder layers of every causal LM that transformers has, too, so that a family can be
added without vLLM at hand. ``tests/serve/test_vllm_names.py`` compares the list with what the plugin uses now.
"""

import ast
import json
import re
import zipfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fcsd.models.arch import Arch, VllmNames
from fcsd.models.archs import ARCHS
from fcsd.serve.vllm.support import version_of

ARGUMENTS = {"what": dict(nargs="+", metavar="breaks|SITE")}
Site = Path | zipfile.Path  # a folder or a wheel that has ``vllm/``

PLUGIN = Path(__file__).parents[2] / "fcsd" / "serve" / "vllm"
# What the plugin takes from objects of vLLM, by the module that defines their class.
ATTRIBUTES = {
    "vllm.model_executor.layers.fused_moe.runner.moe_runner": (
        "_shared_experts _forward_entry _select_forward _maybe_reduce_final_output "
        "_maybe_reduce_shared_expert_output _fused_output_is_reduced layer_name moe_config"
    ),
    "vllm.model_executor.layers.fused_moe.runner.shared_experts": "_layer",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn": "out_proj",
    "vllm.model_executor.layers.linear": "reduce_results input_size output_size weight_loader",
    "vllm.distributed.parallel_state": "_groups _all_reduce_out_place unique_name device_group",
    "vllm.forward_context": "cudagraph_runtime_mode",
    "vllm.model_executor.models.registry": "register_model _try_load_model_cls is_backend_compatible",
    "vllm.model_executor.models.config": "verify_and_update_config verify_and_update_model_config",
    "vllm.config.vllm": (
        "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES additional_config quant_config speculative_config kv_transfer_config"
    ),
    "vllm.config.model": "runner_type",
    "vllm.config.parallel": (
        "use_sequence_parallel_moe use_ubatching enable_eplb enable_expert_parallel all2all_backend "
        "allgather_reducescatter data_parallel_size decode_context_parallel_size prefill_context_parallel_size"
    ),
    "vllm.config.compilation": "pass_config enable_sp PIECEWISE",
    "vllm.transformers_utils.config": "_CONFIG_FORMAT_TO_CONFIG_PARSER trust_remote_code",
}
# The first arguments of functions that the plugin calls, or puts its own in the place of.
FIRST_ARGUMENTS = {
    "vllm.model_executor.layers.fused_moe.runner.moe_runner": (
        "_maybe_reduce_final_output(self,states,trunc_size _maybe_reduce_shared_expert_output(self,shared_output "
        "_select_forward(self"
    ),
    "vllm.distributed.parallel_state": "_all_reduce_out_place(self,input_",
    "vllm.model_executor.models.registry": "register_model(self,model_arch,model_cls",
    "vllm.model_executor.models.config": (
        "verify_and_update_config(vllm_config verify_and_update_model_config(model_config"
    ),
    "vllm.transformers_utils.config": "parse(self,model,trust_remote_code,revision,code_revision",
}
# What the plugin uses only in older versions, and the first version in which it does not.
UNTIL = {
    "vllm.config.vllm:DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES": (0, 29),
    "vllm.config.compilation:enable_sp": (0, 32),
}
# Families for which vLLM has no class of its own any more, from this version on. The plugin refuses them by name there.
_FAMILIES = ("Arcee", "Cwm", "Glm", "Mellum", "SeedOss")
NO_CLASS_FROM = {f"{name}ForCausalLM": (0, 32) for name in _FAMILIES}
NO_CLASS_FROM |= {"Olmo2ForCausalLM": (0, 26), "Olmo3ForCausalLM": (0, 29), "FlexOlmoForCausalLM": (0, 29)}

# Classes that vLLM does not have before this version.
CLASS_FROM = {f"{name}ForCausalLM": (0, 27) for name in ("ExaoneMoe", "Qwen3_5", "Qwen3_5Moe")}


def imported() -> set[tuple[str, str]]:
    """``(module, name)`` of everything that the plugin imports from vLLM."""
    found = set()
    for path in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
                found |= {(node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {tuple(name.name.rsplit(".", 1)) for name in node.names if name.name.startswith("vllm.")}
    return found


def used() -> set[str]:
    """Every name that the plugin uses in some version: ``module:name``, and for a row of the table ``class.attribute``.

    A function with its first arguments is ``module:name(argument,argument``.
    """
    names = {f"{module}:{name}" for module, name in imported()}
    for table in (ATTRIBUTES, FIRST_ARGUMENTS):
        names |= {f"{module}:{name}" for module, attributes in table.items() for name in attributes.split()}
    for arch in ARCHS.values():
        if arch.no_vllm is not None:
            continue
        names.add(arch.vllm_causal_lm)
        if "." not in arch.vllm.decoder:  # the multimodal class holds the language model, whose row has the same layers
            names |= {f"{arch.vllm_causal_lm}.{name}" for name in children(arch)}
    return names


def used_in(version: str) -> set[str]:
    """The names of ``used`` that the plugin uses in this version of vLLM."""
    found = version_of(version)
    gone = {name for name, first in UNTIL.items() if found >= first}
    without = {model for model, first in NO_CLASS_FROM.items() if found >= first}
    without |= {model for model, first in CLASS_FROM.items() if found < first}
    return {name for name in used() - gone if name.split(".")[0] not in without}


def children(arch: Arch) -> set[str]:
    """What the plugin takes from a decoder layer of this architecture and from its parts."""
    names = arch.vllm
    parts = (names.attn, names.linear, names.mlp, names.shared, names.outs[0])
    beside = (names.router, *(names.beside or ()), *(names.inputs or ())) if names.beside else ()
    down = () if names.down == VllmNames.down else (names.down,)
    return {name for name in (*parts, *down, *beside, *names.attn_norms, *names.mlp_norms) if name}


def possible() -> set[str]:
    """What ``used`` would contain if every causal LM of transformers were in the table, with any row's children."""
    inner = set().union(*map(children, ARCHS.values()))
    models = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return used() | {name for model in models for name in (model, *(f"{model}.{child}" for child in inner))}


@cache
def text_of(site: Site, module: str) -> str:
    """The source of a module; empty if there is none."""
    stem = module.replace(".", "/")
    files = (site / f"{stem}.py", site / f"{stem}/__init__.py")
    return next((file.read_text("utf-8") for file in files if file.is_file()), "")


def exists(site: Site, name: str) -> bool:
    """Whether a name of ``used`` exists in the vLLM below ``site``."""
    if ":" in name:
        module, attribute = name.split(":")
        if "(" in attribute:
            return takes(text_of(site, module), *attribute.split("("))
        submodule = text_of(site, f"{module}.{attribute}") or (module, attribute) == ("vllm", "__version__")
        text = text_of(site, module)
        text += "".join(
            text_of(site, f"{module}.{inner}") for inner in re.findall(r"^from \.(\w+) import \*", text, re.M)
        )
        return bool(submodule) or re.search(rf"\b{re.escape(attribute)}\b", text) is not None
    model, _, attribute = name.partition(".")
    files = list(files_of(site, model))
    return bool(files) and (not attribute or any(f"self.{attribute} = " in file for file in files))


def takes(text: str, function: str, first: str) -> bool:
    """Whether a source has a function of this name whose first arguments are ``first``, divided by commas."""
    wanted = first.split(",")
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name == function
        and [argument.arg for argument in node.args.args][: len(wanted)] == wanted
        for node in ast.walk(ast.parse(text))
    )


def files_of(site: Site, model: str) -> Iterator[str]:
    """The sources of a class of vLLM's registry, and of the model classes that they build on."""
    registry = text_of(site, "vllm.model_executor.models.registry")
    entry = re.search(rf'"{model}":\s*\(\s*"(\w+)",\s*"\w+",?\s*\)', registry)
    if entry:
        text = text_of(site, f"vllm.model_executor.models.{entry[1]}")
        yield text
        for other in re.findall(r"^\s*from (?:\.|vllm\.model_executor\.models\.)(\w+) import", text, re.MULTILINE):
            yield text_of(site, f"vllm.model_executor.models.{other}")


def main(given: Any) -> bool:
    """Print version -> the names that exist, or what is missing; whether anything is."""
    sites = dict(map(site_of, (word for word in given.what if word != "breaks")))
    if given.what[0] != "breaks":
        print(json.dumps({version: listed(site) for version, site in sites.items()}, indent=1))
        return False
    missing = [f"{version}: {name}" for version, site in sites.items() for name in breaks(version, site)]
    print("\n".join(missing) or "every name exists")
    return bool(missing)


def site_of(word: str) -> tuple[str, Site]:
    """The version and the files that an argument names: ``VERSION=FOLDER``, or the file of a wheel."""
    if word.endswith(".whl"):
        return Path(word).name.split("-")[1], zipfile.Path(word)
    version, _, folder = word.partition("=")
    return version, Path(folder)


def breaks(version: str, site: Site) -> list[str]:
    """What the plugin uses in this version, or would use if the version is newer than all, and ``site`` lacks."""
    return sorted(name for name in used_in(version) if not exists(site, name))


def listed(site: Site) -> dict[str, str]:
    """The names that exist: module or class -> its names, divided by spaces."""
    found: dict[str, list[str]] = {}
    for name in sorted(filter(partial(exists, site), possible())):
        owner, _, inner = name.partition(":" if ":" in name else ".")
        found.setdefault(owner, []).extend([inner] if inner else [])
    return {owner: " ".join(names) for owner, names in found.items()}
