"""``python -m benchmarks.vllm NAME ...`` starts a program of this folder; without a NAME it lists them."""

import sys

from benchmarks.programs import start

if __name__ == "__main__":
    sys.exit(start("benchmarks.vllm", *sys.argv[1:]))
