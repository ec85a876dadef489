"""Lists what a result depends on besides the recipe: versions, processors, memory and settings.

Results are published, so that the list names no path of the machine.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from fcsd.version import __version__

PACKAGES = [
    "torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "safetensors", "huggingface_hub",
    "lm_eval", "evalplus", "numpy", "triton", "vllm", "wandb", "typer", "pydantic",
]  # fmt: skip
# Prefixes of the environment variables that change results or communication. No other variable is read, because some
# of them hold access tokens.
SETTINGS = (
    "NCCL_", "CUDA_", "CUBLAS_", "NVIDIA_TF32_OVERRIDE", "OMP_", "ONEDNN_", "TORCH_ALLOW_TF32", "TORCH_NCCL_",
    "TORCH_SYMM", "TRITON_", "HF_HUB_OFFLINE", "DS_",
)  # fmt: skip


def snapshot() -> dict[str, object]:
    """Everything that a bug report needs, as plain JSON values. The call imports torch.

    A setting that holds a path is listed, but its value is replaced by ``(a path)``.
    """
    import torch
    import torch.cuda.nccl

    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count() if cuda else 0)]
    return {
        "fcsd": __version__,
        "commit": _commit(Path(__file__).parents[1]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "gpus": [{"name": d.name, "memory_gib": round(d.total_memory / 2**30, 1)} for d in devices],
        "bubblewrap": "installed" if shutil.which("bwrap") else None,
        "settings": {
            name: "(a path)" if os.sep in value else value
            for name, value in sorted(os.environ.items())
            if name.startswith(SETTINGS)
        },
    }


def _commit(package: Path) -> str | None:
    """The commit of a package in a checkout, with ``-dirty`` where a tracked file was changed; None elsewhere.

    An installed package can lie inside of a checkout of something else, which does not track it.
    """
    git = ["git", "-C", str(package)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, check=True)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # there is no git, or no commit of this package
        return None


def _version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed.

    A build for CPUs has another name than its package. Only then are the files of all installed distributions searched,
    which takes half a second.
    """
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    if find_spec(package) is None:
        return None
    others = importlib.metadata.packages_distributions().get(package)
    return importlib.metadata.version(others[0]) if others else None


def to_text(facts: dict[str, object]) -> str:
    """A snapshot as aligned `key  value` lines."""
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict):
            lines += [f"{name:<18} {'not installed' if item is None else item}" for name, item in value.items()]
        elif isinstance(value, list):
            lines += [f"{key:<18} {len(value)}"]
            lines += [f"  {', '.join(str(field) for field in item.values())} GiB" for item in value]
        else:
            lines.append(f"{key:<18} {'none' if value is None else value}")
    return "\n".join(lines)
