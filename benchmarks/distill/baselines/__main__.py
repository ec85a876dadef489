"""``python -m benchmarks.distill.baselines SHAPE --against NAMES``: the distillation step beside public trainers."""

import argparse
from pathlib import Path

from benchmarks.distill.baselines.compare import BASELINES, bench
from benchmarks.train.step.workload import Workload

from fcsd.checkpoint.location import located


def main() -> None:
    """Reads the arguments and measures on one device; each side runs at its best micro-batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", help="deepseek-v2-lite, dense-1.5b, ... or a checkpoint's directory")
    parser.add_argument("--against", required=True, metavar="NAME[,NAME...]", help=f"some of {', '.join(BASELINES)}")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=4, help="the largest; its divisors are tried, too")
    parser.add_argument(
        "--largest", action="store_true", help="try micro-batches from the largest down, and take the first that fits"
    )
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="directory for baselines.json")
    given = parser.parse_args()
    load = Workload(
        located(given.shape),
        given.layers,
        given.micro_batch,
        given.seq,
        teacher=True,
        rounds=given.rounds,
        steps=given.steps,
        accumulation=given.accumulation,
        sets=tuple(given.sets),
    )
    bench(load, tuple(given.against.split(",")), given.out, given.largest)


if __name__ == "__main__":
    main()
