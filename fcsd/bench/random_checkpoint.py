"""A checkpoint of random weights, of any size, without the model in memory.

    python -m fcsd.bench.random_checkpoint CONFIG_DIR OUT [--dtype bf16] [--device cuda]

CONFIG_DIR holds a config.json and, if the checkpoint is to have them, tokenizer files. The weights are those of
``fcsd.parallel.random_init.random_expert_parallel`` with the same seed.
"""

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from fcsd.checkpoint import contained
from fcsd.convert import other_files
from fcsd.staging import check_out, staged

if TYPE_CHECKING:
    import torch


def write_random_checkpoint(
    source: Path, out: Path, *, dtype: "torch.dtype", device: "torch.device", seed: int = 0, max_shard: int = 5 * 10**9
) -> None:
    """Write ``out``; in memory is one module at a time, the largest being the experts of a layer.

    Raises:
        BadInputError: config.json names an unsupported architecture.
        ConfigError: ``out`` may not be written.
    """
    import torch
    from transformers import AutoConfig
    from transformers.core_model_loading import revert_weight_conversion

    from fcsd.checkpoint.weights import Writer
    from fcsd.models.build import register
    from fcsd.parallel.loading import empty_model
    from fcsd.parallel.pieces import state
    from fcsd.parallel.random_init import initial, owned
    from fcsd.parallel.saving import specs_of, write_configs

    check_out(out, [source], force=False)
    contained(source, "config.json")
    register()
    model = empty_model(AutoConfig.from_pretrained(source, trust_remote_code=False), dtype)
    names = state(model).keys()
    with staged(out) as stage:
        with Writer(stage, specs_of(model), max_shard) as writer:
            for path, (module, owner) in owned(model).items():
                prefix = f"{path}." if path else ""
                if not any(f"{prefix}{name}" in names for name in module.state_dict(keep_vars=True) if "." not in name):
                    continue
                if path.endswith(".experts"):
                    count = len(next(module.parameters()))
                    each = [initial(path, (module, owner), seed, device, expert) for expert in range(count)]
                    values = {name: torch.stack([one[name] for one in each]) for name in each[0]}
                else:
                    values = initial(path, (module, owner), seed, device)
                whole = {f"{prefix}{name}": value for name, value in values.items() if f"{prefix}{name}" in names}
                for name, value in revert_weight_conversion(model, whole).items():
                    writer.write(name, value)
            writer.describe()
        write_configs(model, stage)
        for name, file in other_files(source, {file.name for file in stage.iterdir()}).items():
            (stage / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, stage / name)


def main() -> None:
    """Parse the command line and write."""
    import torch

    from fcsd.distill.engine import DTYPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_random_checkpoint(args.config_dir, args.out, dtype=DTYPES[args.dtype], device=args.device, seed=args.seed)


if __name__ == "__main__":
    main()
