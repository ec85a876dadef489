"""The console script, and `python -m fcsd`, which is also what torchrun starts."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from fcsd.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # the imports take long enough for a user to press Ctrl-C
    run()


if __name__ == "__main__":
    main()
