"""What a plain loop runs in the layers of student and teacher: transformers' code, Liger's kernels, or AutoEP's layers.

The student is the converted one on every side. transformers computes routed experts by ``grouped_mm``, which is its
fastest way that needs no download, unless a function says otherwise.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.distill.baselines.setting import Setting
from benchmarks.train.step.variants import tune_autoep
from transformers import PreTrainedModel

from fcsd.distill.step.engine import import_deepspeed
from fcsd.distill.teacher.targets import compile_layers
from fcsd.errors import ConfigError
from fcsd.models.build import arch_of

# Yields the student, in training mode, and the teacher. What it changes outside of them is put back at the end.
Layers = Callable[[Setting], AbstractContextManager[tuple[PreTrainedModel, PreTrainedModel]]]


@contextmanager
def plain(setting: Setting) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """transformers' code."""
    student = setting.new_student().train()
    compile_layers(student, setting.recipe)
    yield student, setting.plain_teacher()


@contextmanager
def compiled(setting: Setting) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """transformers' code, each layer of student and teacher compiled by torch."""
    train = setting.recipe.train.model_copy(update={"compile": True})
    with plain(setting) as models:
        for model in models:
            compile_layers(model, setting.recipe.model_copy(update={"train": train}))
        yield models


@contextmanager
def liger(setting: Setting, **choices: bool) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """Liger's kernels for norms, rotations, gated MLPs and, in a mixture of experts, routed experts.

    Liger replaces functions of transformers' module, too. They are put back at the end, for the other sides.

    Args:
        choices: arguments of Liger's function for the family. ``swiglu=False`` leaves MLPs and experts as they are.

    Raises:
        ConfigError: Liger does not know the family.
    """
    from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )

    if (family := setting.teacher.config.model_type) not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"Liger has no kernels for {family}", hint="compare with loop-liger-compiled")
    _compile_at_once()
    replaced = import_module(type(setting.teacher).__module__)
    before = dict(vars(replaced))
    try:
        with plain(setting) as models:
            for model in models:
                MODEL_TYPE_TO_APPLY_LIGER_FN[family](fused_linear_cross_entropy=False, model=model, **choices)
            yield models
    finally:
        vars(replaced).update(before)


liger_but_experts = partial(liger, swiglu=False)


@contextmanager
def autoep(setting: Setting, gate_up: str = "separate") -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """DeepSpeed AutoEP's own layers on one process, with its options for speed on GPUs, and Liger's other kernels.

    Args:
        gate_up: AutoEP's ``gate_up_impl``; ``fused`` computes gates and ups in one product, on GPUs alone.

    Raises:
        ConfigError: the model has shared experts, which AutoEP's layer computes in one with the routed ones; or see
            ``shard_experts``.
    """
    from fcsd.parallel.expert.autoep import shard_experts

    arch = arch_of(setting.student)
    if arch.blocks.shared is not None:
        raise ConfigError(
            f"AutoEP's own layer cannot wait for the routed experts of {arch.model_type} alone",
            hint="compare it on a model without shared experts",
        )
    import_deepspeed()
    with liger_but_experts(setting) as models:
        for model in models:
            shard_experts(model, arch, 1)
            if model.device.type == "cuda":
                tune_autoep(model, tuned=True, gate_up=gate_up)
        models[1].requires_grad_(False)
        yield models


def _compile_at_once() -> None:
    """Lets Liger's kernels for experts compile all their settings at once before they try them.

    Each kernel tries up to 32 settings at its first call. All are still tried, each for 30 ms in place of Triton's 100.
    """
    from liger_kernel.ops import fused_moe_kernels  # pyright: ignore[reportMissingImports]
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    if os.environ.get("TRITON_INTERPRET"):
        return  # nothing is compiled
    for kernel in vars(fused_moe_kernels).values():
        if isinstance(kernel, Autotuner) and "prune_configs" not in vars(kernel):
            kernel.prune_configs = partial(compile_configs, kernel, kernel.prune_configs)
            kernel._do_bench = partial(do_bench, warmup=5, rep=30)


def compile_configs(kernel: Any, prune: Callable[[Any], list[Any]], options: dict[str, Any]) -> list[Any]:
    """The settings that a Triton kernel is to try, after all of them are compiled, by as many threads as processors.

    Args:
        kernel: Triton's ``Autotuner``, in a call.
        prune: its own function that names the settings.
        options: the keyword arguments of the call.
    """
    from triton.runtime._async_compile import AsyncCompileMode

    configs = prune(options)
    # One that cannot be compiled is left to the tuner, which knows what to do with it.
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for config in configs:
            kernel.fn.run(*kernel.nargs.values(), **{**options, "warmup": True}, **config.all_kwargs())
    return configs
