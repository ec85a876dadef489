"""The file that a benchmark writes, which is checked before anything is measured."""

import argparse
from pathlib import Path


def out_file(text: str) -> Path:
    """The path ``text``, as a ``type`` of argparse.

    Raises:
        ArgumentTypeError: the directory of the file does not exist, or the path is that of a directory.
    """
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the directory of {path} does not exist; create it first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory; name a file in it")
    return path
