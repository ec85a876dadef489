"""A script that loads model directories where fcsd cannot be imported, as their users do. It is never imported itself.

    python -P fresh_process.py INPUTS OUT THREADS AUTO DIRECTORY [DIRECTORY ...]

INPUTS is a safetensors file with the arguments of ``forward``, such as ``input_ids [batch, seq]``. OUT receives one
tensor for each DIRECTORY, named by its position: the logits, or the last hidden states of a model without a head.
THREADS is the number of threads of the process to compare with, so that sums are taken in the same order and are equal
to the last bit. Tensors of layers that the config leaves out are not an error.
"""

import sys
from typing import Any, cast

cast(Any, sys.modules)["fcsd"] = None  # from here on `import fcsd` fails, whatever is installed

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402


def first_output(auto: str, directory: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Load ``directory`` with its own code and run it once, on the CPU and in the checkpoint's dtype."""
    model, report = getattr(transformers, auto).from_pretrained(
        directory, trust_remote_code=True, output_loading_info=True, experts_implementation="eager"
    )
    if any(names for kind, names in report.items() if kind != "unexpected_keys"):
        raise SystemExit(f"{directory}: tensors do not match: {report}")
    if not type(model).__module__.startswith("transformers_modules."):
        raise SystemExit(f"{directory}: loaded as {type(model)}, not by its own code")
    for tensor in (*model.parameters(), *model.buffers()):  # a sum's order depends on where in memory weights lie
        tensor.data = tensor.data.clone()
    with torch.no_grad():
        return model.eval()(**inputs)[0].contiguous()


if __name__ == "__main__":
    _, inputs_file, out, threads, auto, *directories = sys.argv
    torch.set_num_threads(int(threads))
    inputs = load_file(inputs_file)
    save_file({str(i): first_output(auto, path, inputs) for i, path in enumerate(directories)}, out)
