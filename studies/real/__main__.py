"""``python -m studies.real NAME ...`` starts a program of this folder; without a NAME it lists them."""

import sys

from benchmarks.programs import start

if __name__ == "__main__":
    sys.exit(start("studies.real", *sys.argv[1:]))
