"""The identity of a run: the facts that it must share with its checkpoints, and that its ranks must agree on."""

import os
import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fcsd.config import Recipe
from fcsd.errors import ConfigError
from fcsd.launch.world import World
from fcsd.version import __version__

if TYPE_CHECKING:  # `fcsd export` reads checkpoints without the libraries that read data
    from fcsd.distill.data.corpus import Corpus

# A resumed run may differ from the earlier one in recipe fields whose key begins with one of these. They do not change
# what is computed. Paths of data are free because the hashes of the data are compared instead. The number of steps may
# differ as well, but the end of the schedule may not.
_FREE = (
    "name",
    "output_dir",
    "report",
    "sweep",
    "data.held_out",  # where it is scored, the hash of its rows is compared: ``early_stop.scored_text``
    "train.steps",
    "train.tokens",
    "optim.horizon",
    "parallel.overlap",
    "parallel.all_reduce",
    "parallel.transport",
    "parallel.tp_size",
    "train.log_every",
    "train.eval_every",
    "train.trace_every",
    "train.sample_tokens",
    "checkpoint",
    "faults",
    "early_stop.every",
    "early_stop.patience",
    "early_stop.delta",
    "early_stop.data_mirror",  # the hash of its questions is compared: ``early_stop.ScoreHistory``
)
_SOURCE_FREE = re.compile(r"data\.sources\.\d+\.(path|format|chat_template|min_counted)")
# Variables of the environment that make libraries round or sum in another way, whatever the recipe says.
_ENVIRONMENT = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
_CODE = ("torch", "transformers", "deepspeed")  # other versions of these packages may give results with other bits
PROCESSES = "processes"  # the fact how many divide the rows
_SCHEDULE = "optim.horizon (or train.steps)"  # the number of steps of the learning-rate schedule


def run_identity(recipe: Recipe, corpora: "list[Corpus]", world: World) -> dict[str, object]:
    """The facts that a run must have in common with the checkpoints from which it resumes, as a flat mapping.

    The number of processes alone may change. Processes that shard a model count as one.
    """
    fields = flat(recipe.model_dump())
    unused = tuple(key for key, is_used in _later_fields(recipe, world).items() if not is_used)
    fields = {key: value for key, value in fields.items() if not key.startswith(unused)}
    own = {key: value for key, value in fields.items() if not key.startswith(_FREE) and not _SOURCE_FREE.match(key)}
    # These fields are later ones, too, and have no effect on such data.
    if len(corpora) == 1 or all(corpus.overlong == "split" for corpus in corpora):
        own.pop("data.weight_by", None)
    for number, source in enumerate(recipe.data.sources):
        if not source.chat:
            own.pop(f"data.sources.{number}.earlier_reasoning", None)
        if source.token_ids is None:
            own.pop(f"data.sources.{number}.token_ids", None)
    made_of = {f"data.sources.{n}: {name}": sha for n, c in enumerate(corpora) for name, sha in c.sha256.items()}
    code = {"version of fcsd": __version__} | {f"version of {name}": version(name) for name in _CODE}
    own |= {"objective.teacher_cache": None}  # a removed field, which checkpoints of earlier versions name
    own["init.tp_degree"] = own.pop("init.gpus")  # as they name it
    own |= {"optim.accumulate_dtype": recipe.accumulate_dtype, "optim.reduce_dtype": recipe.reduce_dtype}
    return {
        **own,
        **made_of,
        **code,
        **{f"the variable {name}": os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)},
        _SCHEDULE: recipe.schedule_steps,
        PROCESSES: world.size // recipe.parallel.tp_size,
    }


def _later_fields(recipe: Recipe, world: World) -> dict[str, bool]:
    """The recipe fields that earlier versions of fcsd did not have, by the beginning of their keys.

    The value says whether this run makes use of the field. A field that is not used is no part of the identity, so that
    a run can be resumed that was started before the field existed.
    """
    train, optim, parallel = recipe.train, recipe.optim, recipe.parallel
    return {
        "data.document_end": False,  # the token that it chooses is among the hashes of the data
        "train.attention": world.device.type == "cuda" and train.attention != "masked",  # other devices ignore it
        "train.compile": train.compile,
        "train.adapter": train.adapter is not None,
        "train.adapter.base": train.adapter is not None and train.adapter.base is not None,
        "train.draft_head": train.draft_head,
        "optim.train": bool(optim.train),
        "optim.moments": optim.moments != "fp32",
        "optim.offload": optim.offload != "none",
        "parallel.dedup": parallel.dedup != "off",
        "parallel.node_size": parallel.dedup == "node",
        "parallel.placement.": parallel.placement.every > 0,
        "parallel.quantised.": parallel.quantised.any,
    }


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each key whose value differs between the two mappings."""
    absent = "nothing"
    return [
        f"{key} was {then.get(key, absent)!r:.200} and is now {now.get(key, absent)!r:.200}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key, absent) != now.get(key, absent)
    ]


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Turns nested mappings and lists into one mapping with dotted keys."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return {key: value}
    return {k: v for name, item in items for k, v in flat(item, f"{key}.{name}" if key else str(name)).items()}


def require_agreement(world: World, facts: dict[str, Any]) -> None:
    """Compares ``facts`` over all ranks. Ranks that were started differently then end with an error instead of hanging.

    Raises:
        ConfigError: the facts differ; the message names the first difference and the rank.
    """
    everyone = world.everywhere(lambda: facts)
    for rank, others in enumerate(everyone):
        for key in sorted(others.keys() | everyone[0].keys()):
            here, there = everyone[0].get(key, "nothing"), others.get(key, "nothing")
            if here != there:
                raise ConfigError(
                    f"the processes disagree: {key} is {here!r} on rank 0 and {there!r} on rank {rank}",
                    hint="every node needs the same command, recipe, model and data",
                )
