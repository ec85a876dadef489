"""A checkpoint of random weights, of any size, without the model in memory.

    python -m benchmarks.random_checkpoint CONFIG_DIR OUT [--dtype bf16] [--device cuda]
    python -m benchmarks.random_checkpoint deepseek-v2-lite OUT --layers 8 --tokenizer assets/teacher

CONFIG_DIR holds a config.json and, if the checkpoint is to have them, tokenizer files; instead of it goes a name in
``fcsd.bench.shapes``. The weights are those of ``fcsd.parallel.weights.random_init`` with the same seed.
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fcsd.checkpoint import contained
from fcsd.checkpoint.staging import check_out, copy_small, side_files, staged

if TYPE_CHECKING:
    import torch


def write_random_checkpoint(
    source: Path, out: Path, *, dtype: "torch.dtype", device: "torch.device", seed: int = 0, max_shard: int = 5 * 10**9
) -> None:
    """Writes a checkpoint of random weights to ``out``.

    Only one module at a time is in memory. The largest one holds the experts of a layer.

    Args:
        source: directory with a config.json, and with tokenizer files if the checkpoint should have them.
        max_shard: most bytes of a weights file.

    Raises:
        BadInputError: config.json names an unsupported architecture.
        ConfigError: ``out`` may not be written.
    """
    from transformers import AutoConfig

    from fcsd.checkpoint.weights import Writer, stored
    from fcsd.models.build import register
    from fcsd.parallel.weights.loading import empty_model
    from fcsd.parallel.weights.random_init import drawn
    from fcsd.parallel.weights.saving import specs_of, write_configs

    former = check_out(out, [source], force=False)
    contained(source, "config.json")
    register()
    model = empty_model(AutoConfig.from_pretrained(source, trust_remote_code=False), dtype)
    with staged(out, former) as stage:
        with Writer(stage, specs_of(model), max_shard) as writer:
            for values in drawn(model, seed, device):
                for name, value in stored(model, values).items():
                    writer.write(name, value)
            writer.describe()
        write_configs(model, stage)
        copy_small(side_files(source, {file.name for file in stage.iterdir()}), stage)


def write_config(shape: str, layers: int, tokenizer: Path, out: Path) -> None:
    """Writes the config of a shape and a tokenizer to ``out``; the vocabulary is large enough for the tokenizer.

    Args:
        shape: a name in ``fcsd.bench.shapes``.
        layers: decoder layers.
        tokenizer: directory of the tokenizer.
    """
    from transformers import AutoTokenizer

    from fcsd.bench.shapes import SHAPES

    config, words = SHAPES[shape](layers), AutoTokenizer.from_pretrained(tokenizer)
    config.vocab_size = max(config.vocab_size, len(words))
    config.save_pretrained(out)
    words.save_pretrained(out)


def main() -> None:
    """Parses the command line and writes the checkpoint."""
    import torch

    from fcsd.bench.shapes import SHAPES
    from fcsd.distill.student import DTYPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG_DIR|SHAPE")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, help="of a SHAPE")
    parser.add_argument("--tokenizer", type=Path, help="directory; of a SHAPE")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.layers is None) != (args.tokenizer is None) or (args.layers and args.config not in SHAPES):
        parser.error(f"--layers and --tokenizer go together, with one of {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(args.config)
        if args.layers is not None:
            source = Path(scratch)
            write_config(args.config, args.layers, args.tokenizer, source)
        write_random_checkpoint(source, args.out, dtype=DTYPES[args.dtype], device=args.device, seed=args.seed)


if __name__ == "__main__":
    main()
