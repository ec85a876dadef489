"""`python -m fcsd`, which is also what torchrun starts."""

from fcsd.cli import main

main()
