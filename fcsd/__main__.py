"""`python -m fcsd`, which is also what torchrun starts."""

import sys

try:
    from fcsd.cli.main import main
except KeyboardInterrupt:
    sys.exit(130)  # the imports take long enough for a user to press Ctrl-C

main()
