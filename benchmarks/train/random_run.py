"""What benchmarks of distillation have in common: a recipe, models and rows of random values.

Student and teacher have random weights and the dimensions of a config, and no file of them remains.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PretrainedConfig, PreTrainedModel

from fcsd.config import Recipe, load_recipe
from fcsd.distill.data.corpus import Corpus, TokenSlices
from fcsd.distill.experts.expert_parallel import randomise
from fcsd.distill.step.engine import import_deepspeed
from fcsd.distill.student import DTYPES, check
from fcsd.errors import ConfigError
from fcsd.launch.world import World
from fcsd.models.build import converted_config, register
from fcsd.models.wiring import Wiring

_DOCUMENTS = 4  # documents in a row; with several of them, attention must handle packed rows
_EPOCH = 64  # rows of the random corpus


@contextmanager
def random_run(
    original: PretrainedConfig,
    name: str,
    *,
    seq: int,
    micro_batch: int,
    accumulation: int,
    steps: int,
    world: World,
    sets: Sequence[str],
) -> Iterator[tuple[Recipe, PretrainedConfig]]:
    """The recipe of a run that distills a model into its farskip conversion, and the conversion's config.

    Inside of the block, the directories that the recipe names hold both configs, so that it can be planned.

    Args:
        seq: tokens of a row.
        micro_batch: rows in a forward pass of each process.
        accumulation: micro-batches in a step of each process.
        steps: optimizer steps of the run.

    Raises:
        ConfigError: the recipe is invalid for this model or this number of processes.
    """
    import_deepspeed()
    register()
    wiring = Wiring("farskip", tuple(range(original.get_text_config().num_hidden_layers)))
    rewired = converted_config(original, wiring.to_block(base_model="random", base_revision=None, base_sha256=None))
    with tempfile.TemporaryDirectory() as folder:
        rewired.save_pretrained(f"{folder}/student")
        original.save_pretrained(f"{folder}/teacher")
        tokens = world.size * micro_batch * accumulation * seq
        recipe = random_recipe(Path(folder), name, seq, micro_batch, tokens, steps, world, sets)
        check(recipe, world.size)
        yield recipe, rewired


def require_all_trained(recipe: Recipe) -> None:
    """Checks that a recipe freezes no weights, for benchmarks that train all of them.

    Raises:
        ConfigError: it does.
    """
    if recipe.frozen_beside is not None:
        raise ConfigError(
            f"this benchmark trains all weights, so --set {recipe.frozen_beside} has no place here",
            hint="`benchmarks.train.step --teacher` times a step that freezes weights",
        )


def draw_models(
    recipe: Recipe, rewired: PretrainedConfig, original: PretrainedConfig, world: World
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Random weights for the student, and for the frozen teacher if the recipe needs a second model."""
    parallel = recipe.parallel
    draw: Any = {"dtype": DTYPES[recipe.train.dtype], "device": world.device, "seed": recipe.seed}
    student = randomise(rewired, parallel.ep_size, **draw, dispatched=parallel.quantised.any)
    if not recipe.objective.needs_teacher or recipe.frozen_beside is not None:
        return student, None
    return student, randomise(original, parallel.teacher_ep_size, **draw).requires_grad_(False)


def random_recipe(
    folder: Path, shape: str, seq: int, micro_batch: int, batch_tokens: int, steps: int, world: World, sets: Any
) -> Recipe:
    """The recipe of a benchmark, which distills ``folder/teacher`` into ``folder/student`` on random tokens.

    ``batch_tokens`` are those of an optimizer step, over all processes.
    """
    values = {
        "name": shape,
        "model": f"{folder}/student",
        "teacher": f"{folder}/teacher",
        "output_dir": f"{folder}/run",
        "data": {"sources": [{"path": "random"}], "seq_len": seq},
        "train": {
            "batch_tokens": batch_tokens,
            "micro_batch_size": micro_batch,
            "steps": steps,
            "dtype": "bf16" if world.device.type == "cuda" else "fp32",
        },
        "optim": {"lr": 1e-4, "warmup_steps": 0, "schedule": "constant"},
        "parallel": {"ep_size": world.size},
    }
    (folder / "recipe.yaml").write_text(json.dumps(values))
    return load_recipe(folder / "recipe.yaml", list(sets)).recipe


def random_corpus(vocab: int, seq: int, documents: int = _DOCUMENTS) -> Corpus:
    """A corpus of random tokens, of which ``documents`` documents fill a row.

    Some tokens are more frequent than others, so that a model can learn something and the loss falls.
    """
    generator = np.random.default_rng(0)
    ids = (vocab * generator.random((_EPOCH * documents, max(2, seq // documents))) ** 3).astype(np.int32)
    columns = Dataset.from_dict({"ids": list(ids), "counts": list(np.ones_like(ids, dtype=bool))})
    lengths = np.full(len(ids), ids.shape[1], dtype=np.int64)
    return Corpus("random", lengths, {}, {}, "split", 0, TokenSlices(columns))
