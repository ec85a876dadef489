"""`python -m fcsd`, which is also what torchrun starts."""

from fcsd.cli.main import main

main()
