"""Proves that an exported directory loads where fcsd is not installed, and records the proof."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.checkpoint import CheckpointConfig, Layout, expect_directory, fingerprint, read_layout, read_object
from fcsd.checkpoint.files import quoted
from fcsd.disk import bytes_sha256, file_sha256
from fcsd.errors import BadInputError, DoesNotFitError, FcsdError
from fcsd.foreign_errors import reason_in
from fcsd.parity import first_layers, logits, plan_proof, shortened, token_ids

if TYPE_CHECKING:
    from torch import Tensor

    from fcsd.models.arch import Arch

RECORD = "reload_proof.json"


def prove_reload(source: Layout, directory: Path, config: CheckpointConfig, arch: "Arch") -> dict[str, Any]:
    """Compare ``directory``, loaded by its own code in a fresh process, with ``source``, loaded by fcsd in this one.

    If the model is larger than memory, only the first layers are compared, as many as fit.

    Returns:
        The record to write to ``directory/RECORD``.

    Raises:
        FcsdError: the directory does not load, or its logits are not equal bit for bit.
        BadInputError: the model has fp8 blocks that transformers cannot read without a GPU.
        DoesNotFitError: not even one layer fits in memory.
    """
    if uneven := _uneven_blocks(source, config):
        raise BadInputError(
            f"{source.path}: transformers on a CPU misreads the fp8 blocks of {quoted(uneven)}, which do not divide it",
            "Save a dequantised copy in bf16, and convert and export that.",
        )
    proof = plan_proof(source, config, arch)
    if proof.layers == 0:
        raise DoesNotFitError(
            f"{directory}: the reload proof needs one layer in memory, and {proof.free_bytes} bytes are free",
            "Export on a machine with more memory.",
        )
    model = first_layers(source.path, list(source.files.values()), config, arch, proof.layers)
    ids, expected = token_ids(model), logits(model)
    del model
    return prove_logits(directory, ids, expected, proof.layers, proof.of)


def prove_logits(directory: Path, ids: "Tensor", expected: "Tensor", layers: int, of: int) -> dict[str, Any]:
    """Compare ``directory``, loaded by its own code in a fresh process, with the logits that fcsd's classes gave.

    Args:
        ids: the token ids ``[1, seq]`` of ``expected``.
        layers, of: the number of first layers that ``expected`` was computed with, and that of the whole model.

    Returns:
        The record to write to ``directory/RECORD``.

    Raises:
        FcsdError: the directory does not load, or its logits are not equal bit for bit.
    """
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as scratch:
        shown = directory if layers == of else _first_layers_of(directory, Path(scratch), layers)
        found = _in_fresh_process(shown, ids, Path(scratch))
    if not torch.isfinite(expected).all() or not torch.equal(found, expected):
        raise FcsdError(f"{directory}: reloaded without fcsd, its logits are not the model's")
    return {
        "layers": layers,
        "of": of,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "logits_sha256": bytes_sha256(expected.float().numpy().tobytes()),
        **_identity(directory),
    }


def _uneven_blocks(source: Layout, config: CheckpointConfig) -> str | None:
    """An fp8 matrix whose last block is smaller than the others, which transformers alone dequantises wrongly."""
    if config.quantization != "fp8":
        return None
    block, tensors = config.raw["quantization_config"]["weight_block_size"], source.tensors
    for name, tensor in tensors.items():
        if tensor.dtype == "F8_E4M3" and any(
            size > wide and size % wide for size, wide in zip(tensor.shape, block, strict=True)
        ):
            return name
    return None


def check_record(directory: Path) -> None:
    """Check that a directory has a reload proof and has not changed since. Its card may have changed.

    Raises:
        BadInputError: there is no proof, or another file than the card has changed.
    """
    hint = "Export it (again): fcsd export MODEL OUT."
    expect_directory(directory)
    if not (directory / RECORD).is_file():
        raise BadInputError(f"{directory}: has no {RECORD}, so nothing proves that it loads without fcsd", hint)
    record, now = read_object(directory / RECORD), _identity(directory)
    changed = [key for key in now if record.get(key) != now[key]]
    if changed:
        raise BadInputError(f"{directory}: its {' and '.join(changed)} changed since its reload proof", hint)


def _identity(directory: Path) -> dict[str, Any]:
    code = {path.name: file_sha256(path) for path in sorted(directory.glob("*.py"))}
    return {"fingerprint": fingerprint(read_layout(directory)), "code": code}


def _first_layers_of(directory: Path, scratch: Path, layers: int) -> Path:
    """A directory of links to ``directory`` with a config of fewer layers."""
    from transformers import AutoConfig

    view = scratch / "model"
    view.mkdir()
    for path in directory.iterdir():
        if path.name != "config.json":
            (view / path.name).symlink_to(path.resolve())
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    shortened(config, layers).to_json_file(view / "config.json")
    return view


def _in_fresh_process(directory: Path, ids: Any, scratch: Path) -> Any:
    import torch
    from safetensors.torch import load_file, save_file

    save_file({"input_ids": ids}, scratch / "inputs")
    script = Path(__file__).with_name("fresh_process.py")
    arguments = ["inputs", "logits", str(torch.get_num_threads()), "AutoModelForCausalLM", str(directory.resolve())]
    # The process uses no GPU, as this one does, no network, and no code that an earlier load has cached.
    own = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(scratch / "modules")}
    done = subprocess.run(
        [sys.executable, "-P", str(script), *arguments],
        cwd=scratch,
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        why = reason_in(done.stderr) or f"exit status {done.returncode}"
        raise FcsdError(f"{directory}: does not load without fcsd ({why})")
    return load_file(scratch / "logits")["0"]
