"""Says which versions of vLLM the plugin supports, what of vLLM a converted model goes without, and whether this
environment can serve one.
"""

import os
from importlib.metadata import entry_points
from typing import NamedTuple

from fcsd.errors import ConfigError
from fcsd.extras import require_extra

GROUP = "vllm.general_plugins"  # the group of entry points that every process of vLLM loads
# The first supported version, and the first one that is not supported: the range of the extra in pyproject.toml.
OLDEST, TOO_NEW = (0, 24), (0, 34)
# ``fcsd serve`` and ``fcsd eval`` set this variable, so that the plugin refuses reductions with wrong results.
RIGHT_RESULTS = "FCSD_RIGHT_RESULTS"
INSTALL = "Run pip install 'fcsd[vllm]'."


class Lost(NamedTuple):
    """Something that vLLM does for an original and the plugin refuses for a converted model.

    Attributes:
        what: its name.
        option: the option of ``vllm serve`` that asks for it.
        why: the reason.
        instead: what to do.
        cost: what a user gives up.
    """

    what: str
    option: str
    why: str
    instead: str
    cost: str


# ``checks.py`` makes its messages of these, and docs/serving.md has them as a table.
LOST = {
    "data_parallel": Lost(
        "data-parallel attention of a model with experts, without expert parallelism or with pipeline stages",
        "--data-parallel-size N",
        "it was not tested",
        "add --enable-expert-parallel and leave --pipeline-parallel-size out, or start a server per replica",
        "experts whose matrices are divided over data-parallel ranks",
    ),
    "sequence_parallel": Lost(
        "sequence-parallel experts",
        "--data-parallel-size N with tensor and expert parallelism",
        "they do not leave the sums to fcsd",
        "use --tensor-parallel-size 1 or --data-parallel-size 1",
        "a model whose attention needs more than one GPU gives up data-parallel attention",
    ),
    "all2all": Lost(
        "other exchanges of tokens than vLLM's default",
        "--all2all-backend BACKEND with --data-parallel-size N",
        "no machine of these tests has their libraries",
        "use allgather_reducescatter",
        "between nodes they send a token to its experts alone; the default sends every token to every rank",
    ),
    "dbo": Lost(
        "two-batch overlap",
        "--enable-dbo",
        "it would put two batches on one stream of sums",
        "leave --enable-dbo out",
        "the other way to hide the communication of experts; the wiring is in its place",
    ),
    "eplb": Lost(
        "moving experts between ranks (EPLB)",
        "--enable-eplb",
        "vLLM has it on GPUs alone, and none of these tests ran it",
        "leave --enable-eplb out",
        "a step waits for the rank whose experts are chosen most",
    ),
    "context": Lost(
        "context parallelism",
        "--decode-context-parallel-size N",
        "it was not tested",
        "leave the options --*-context-parallel-size out",
        "keys and values of one long prompt are not divided further than by tensor parallelism",
    ),
    "enable_sp": Lost(
        "sequence parallelism and async TP by the compiler (up to 0.31)",
        "pass_config.enable_sp",
        "the pass moves the sums that fcsd starts",
        "set it to false",
        "the original can hide its sums without a conversion where vLLM has the pass; measure it by `fcsd bench serve`",
    ),
    "speculation": Lost(
        "speculation by EAGLE-3 and other readers of streams between layers",
        "--speculative-config",
        "sums are in flight in these streams",
        "use one of eagle, mtp, ngram, ngram_gpu, suffix, draft_model",
        "drafts that were trained on the original guess fewer tokens rightly; what is answered stays exact",
    ),
    "lora": Lost(
        "LoRA adapters",
        "--enable-lora",
        "vLLM puts modules of its own around the layers that are rewired, and adapters were trained on the original",
        "merge the adapter into the model, or leave --enable-lora out",
        "a server per adapter",
    ),
    "pooling": Lost(
        "embeddings and scores instead of text",
        "--runner pooling",
        "they were not tested",
        "compute them with transformers",
        "vLLM's speed for them",
    ),
    "connectors": Lost(
        "keys and values that other servers compute or store",
        "--kv-transfer-config",
        "it was not tested",
        "leave --kv-transfer-config out",
        "prefill and decoding on different servers, and caches outside of the GPU",
    ),
    "fast_prefill": Lost(
        "prefill that leaves out layers without keys of their own",
        "--kv-sharing-fast-prefill",
        "vLLM then runs the layers in two parts, between which sums in flight would get lost",
        "leave --kv-sharing-fast-prefill out",
        "faster prefill of the Gemma 4 models whose last layers read the keys and values of others",
    ),
    "float16": Lost(
        "float16 for DeepSeek models",
        "--dtype float16",
        "vLLM rescales their stream in float16, and the plugin does not",
        "use --dtype bfloat16",
        "nothing on GPUs that have bfloat16",
    ),
    "gates": Lost(
        "quantised weights with gated attention",
        "--quantization METHOD",
        "the plugin makes the gates, and it makes them for weights as they are",
        "leave --quantization out, and serve a checkpoint that is not quantised",
        "GPU memory",
    ),
    "long_positions": Lost(
        "positions beyond those before longrope",
        "--max-model-len N",
        "vLLM then scales the positions of short texts as those of long ones, and transformers does not",
        "leave it out, or use at most original_max_position_embeddings",
        "the long contexts of such models",
    ),
    "dynamic_rope": Lost(
        "rotary factors that grow with the text (rope type dynamic)",
        "rope_parameters of config.json",
        "vLLM has one set of factors for all positions, those of the longest text",
        "use fcsd's own engine",
        "texts beyond max_position_embeddings",
    ),
    "pipeline": Lost(
        "pipeline parallelism of Desync, at a distance of 2 or more, or of layers that add their outputs themselves",
        "--pipeline-parallel-size N",
        "a stage hands on one pair of streams, and the layers of some families one stream",
        "use --pipeline-parallel-size 1",
        "a model that needs more GPUs than a host has",
    ),
    "degree": Lost(
        "another tensor-parallel degree for Desync",
        "--tensor-parallel-size N",
        "the function depends on the degree",
        "convert again for this degree, or use that of the conversion",
        "one directory serves one degree",
    ),
}


def refusal(name: str) -> str:
    """What the plugin says of an entry of ``LOST``, without who says it: one line."""
    lost = LOST[name]
    return f"{lost.what}: {lost.why}; {lost.instead}"


def version_of(version: str) -> tuple[int, ...]:
    """Major and minor number of a version such as ``0.28.0+cpu``."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def why_unsupported(version: str) -> str | None:
    """One line that says why the plugin does not work with this version of vLLM; None if it does."""
    if OLDEST <= version_of(version) < TOO_NEW:
        return None
    oldest, too_new = (".".join(map(str, edge)) for edge in (OLDEST, TOO_NEW))
    return f"fcsd's plugin needs vLLM >={oldest},<{too_new}, not {version}: converted models cannot be served"


def require_vllm(what: str, *, rewired: bool) -> None:
    """Check that vLLM can be started here, and that it will load fcsd's plugin if the model needs it.

    Args:
        what: the command or option that needs vLLM, for the message.
        rewired: whether the model is a converted one.

    Raises:
        ConfigError: vLLM or the plugin is missing, or the plugin does not support the version of vLLM.
    """
    require_extra("vllm", what)
    if not rewired:
        return
    plugins = {plugin.name for plugin in entry_points(group=GROUP) if plugin.value.startswith("fcsd.")}
    if not plugins:
        raise ConfigError(f"{what}: vLLM serves converted models only with fcsd's plugin", INSTALL)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not plugins & set(allowed.split(",")):
        raise ConfigError(f"{what}: VLLM_PLUGINS={allowed} leaves fcsd's plugin out", "Add fcsd to it, or unset it.")
    if problem := why_unsupported(installed_version()):
        raise ConfigError(f"{what}: {problem}", INSTALL)


def installed_version() -> str:
    """The version of the installed vLLM, whatever its distribution is called. The call imports vLLM's top package."""
    from vllm import __version__  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    return __version__
