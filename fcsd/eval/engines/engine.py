"""Loads a model into an engine for an evaluation: the settings of the engine, their checks, and the loading."""

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.disk import file_sha256, json_sha256
from fcsd.errors import ConfigError, unknown_value
from fcsd.extras import require_extra
from fcsd.launch.shared_work import Team
from fcsd.load_options import check_device, check_dtype, default_dtype
from fcsd.serve.vllm.support import RIGHT_RESULTS, installed_version, require_vllm

if TYPE_CHECKING:
    from fcsd.checkpoint import Checkpoint
    from fcsd.eval.engines.adapter import HFAdapter
    from fcsd.eval.engines.answer_cache import AnswerCache
    from fcsd.eval.engines.interface import Adapter

HF, VLLM, OWN = "hf", "vllm", "own"


@dataclass(frozen=True)
class Engine:
    """The settings by which models are run. They are the same for all models of a comparison.

    Attributes:
        backend: ``hf`` for transformers, ``vllm``, ``own`` for fcsd's engine (``engine/open.py``).
        device: ``cuda``, ``cpu``, or ``auto`` to let accelerate spread each model over the GPUs, host memory and the
            disk, in this order. None for ``cuda`` where there is one, else ``cpu``.
        dtype: the data type of the weights, one of ``fcsd.load_options.DTYPES``. None for float32 on the CPU and
            bfloat16 on a GPU.
        batch_size: the most sequences in one forward pass; None for as many as fit fixed token limits.
        max_length: the longest input in tokens; None for the model's own limit.
        generation: one of ``fcsd.engine.generate.GENERATION``; None for the fastest that the device supports.
        ep_size: the expert-parallel size, the number of ranks that divide the experts of every layer.
        gpus: the tensor-parallel degree under vLLM and in fcsd's engine.
        reduce: how the ranks of fcsd's engine reduce; see ``parallel.all_reduce.backends``.
    """

    backend: str = HF
    device: str | None = None
    dtype: str | None = None
    batch_size: int | None = None
    max_length: int | None = None
    generation: str | None = None
    ep_size: int = 1
    gpus: int = 1
    reduce: str = "nccl"

    def check(self, ranks: int) -> None:
        """Refuse settings that do not go together, before anything is loaded.

        Raises:
            ConfigError: two settings contradict each other. The message says what to change.
        """
        if self.backend not in (HF, VLLM, OWN):
            raise unknown_value("backend", self.backend, (HF, VLLM, OWN))
        check_dtype(self.dtype)
        check_device(self.device, "auto")
        if self.generation is not None:
            from fcsd.engine.generate import GENERATION

            if self.generation not in GENERATION:
                raise unknown_value("generation", self.generation, GENERATION)
        if self.backend == VLLM:
            self._check_vllm()
        if self.backend == OWN:
            self._check_own(ranks)
        elif self.reduce != "nccl":
            raise ConfigError(f"--all-reduce is for --backend {OWN}", "leave it out: other backends have their own way")
        if self.ep_size > 1 and self.device == "auto":
            raise ConfigError("--device auto spreads the model of one process, and --ep-size needs several processes")
        if ranks % self.ep_size:
            raise ConfigError(
                f"--ep-size {self.ep_size} does not divide {ranks} processes",
                f"add --gpus {self.ep_size}, or a multiple of it",
            )
        if ranks > 1 and self.device == "auto":
            raise ConfigError("--device auto uses all GPUs in one process; leave --gpus out")
        if self.ep_size > 1:
            require_extra("train", "--ep-size", "deepspeed")  # its AutoEP divides the experts

    def _check_own(self, ranks: int) -> None:
        from fcsd.parallel.all_reduce.backends import require_right

        require_right(self.reduce)
        if self.device == "auto" or self.ep_size > 1:
            name = "--device auto" if self.device == "auto" else "--ep-size"
            raise ConfigError(f"{name} is for --backend {HF}", f"backend {OWN} divides a model over --gpus")
        if ranks != self.gpus:
            raise ConfigError(
                f"backend {OWN} divides the model over all {ranks} processes, not over {self.gpus}",
                f"start it with --gpus {self.gpus}",
            )

    def _check_vllm(self) -> None:
        require_vllm("--backend vllm", rewired=False)
        wrong = [name for name in ("device", "generation") if getattr(self, name) is not None]
        if wrong or self.ep_size > 1:
            name = wrong[0] if wrong else "ep-size"
            raise ConfigError(f"--{name} is for --backend hf", "vLLM spreads a model over --gpus by tensor parallelism")


@contextlib.contextmanager
def opened(model: str, engine: Engine, out: Path | None, team: Team) -> "Iterator[Adapter]":
    """A context with a model, given by path or hub id, behind lm-eval's interface. Its answers are kept below ``out``.

    The model's memory is freed when the context ends.

    Raises:
        BadInputError: the model cannot be loaded.
        ConfigError: the engine cannot run it.
    """
    import torch

    from fcsd.checkpoint import open_checkpoint
    from fcsd.eval.engines.answer_cache import AnswerCache

    source = open_checkpoint(model)
    path = source.path
    device = engine.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    dtype = engine.dtype or default_dtype(on_cpu and engine.backend != VLLM)
    with contextlib.ExitStack() as stack:
        cache = None
        if out is not None:
            key = json_sha256([_content_on(team, path), asdict(engine), dtype, device, versions(engine)])
            cache = AnswerCache(out / "answers" / f"{key[:16]}.jsonl", team.world)
            stack.callback(cache.close)
        if engine.backend == VLLM:
            adapter = _in_vllm(source, engine, dtype, cache)
        else:
            adapter = _in_transformers(path, engine, dtype, device, cache, team, stack)
        try:
            yield adapter
        finally:
            adapter.close()
            del adapter
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _in_transformers(
    path: Path,
    engine: Engine,
    dtype: str,
    device: str,
    cache: "AnswerCache | None",
    team: Team,
    stack: contextlib.ExitStack,
) -> "HFAdapter":
    import torch

    from fcsd.checkpoint.tokenizer import load_tokenizer
    from fcsd.engine.generate import SLOTS
    from fcsd.eval.engines.adapter import HFAdapter
    from fcsd.models.build import load_model

    kind = getattr(torch, dtype)
    generation, backend = engine.generation, None
    if engine.backend == OWN:
        from fcsd.engine.open import open_engine
        from fcsd.launch.world import join_world

        network = open_engine(path, join_world(), dtype=kind, reduce=engine.reduce)
        generation = generation or SLOTS
        backend = {"name": OWN, "tensor_parallel": engine.gpus, "reduce": engine.reduce}
    elif engine.ep_size > 1:
        from fcsd.parallel.weights.loading import load_expert_parallel

        network = load_expert_parallel(path, dtype=kind, device=device, ep_size=engine.ep_size)
    elif device == "auto":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fcsd-offload-"))
        network = load_model(path, dtype=kind, device_map="auto", offload_folder=folder)
    else:
        network = load_model(path, dtype=kind, device=device)
    return HFAdapter(
        network.eval(),
        load_tokenizer(path),
        batch_size=engine.batch_size,
        max_length=engine.max_length,
        generation=generation,
        cache=cache,
        team=team,
        backend=backend,
    )


def _in_vllm(source: "Checkpoint", engine: Engine, dtype: str, cache: "AnswerCache | None") -> "Adapter":
    require_vllm("--backend vllm", rewired=source.config.rewired is not None)
    os.environ[RIGHT_RESULTS] = "1"  # for vLLM's processes, which inherit it
    from fcsd.eval.engines.vllm_adapter import VLLMAdapter

    adapter: Any = VLLMAdapter  # its base has no type, so that pyright takes the class for abstract
    how: Any = {"dtype": dtype, "gpus": engine.gpus, "max_length": engine.max_length, "batch_size": engine.batch_size}
    return adapter(source.path, cache=cache, **how)


def versions(engine: Engine) -> dict[str, str]:
    """The versions of the libraries that a score depends on."""
    found = {name: version(name) for name in ("lm_eval", "transformers", "torch", "datasets")}
    return found | ({"vllm": installed_version()} if engine.backend == VLLM else {})


def _content_on(team: Team, path: Path) -> list[list[str]]:
    """Name and SHA-256 of every file of a model, which one rank reads: a copy may keep another model's times."""

    def content() -> list[list[str]]:
        return [[file.name, file_sha256(file)] for file in sorted(path.iterdir()) if file.is_file()]

    return content() if team.world is None else team.world.on_first(content)
