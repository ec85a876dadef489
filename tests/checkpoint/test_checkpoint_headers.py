"""Safetensors headers: every way a file can lie, by hand and by mutation."""

import io
import json
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors

from fcsd.checkpoint import read_header
from fcsd.checkpoint.files import parse_header
from fcsd.errors import BadInputError

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
    "none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [22, 22]},
    "scalar": {"dtype": "F16", "shape": [], "data_offsets": [22, 24]},
}


def pack(header: dict | str | bytes, data: int = 24, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(range(data))


def changed(**entry) -> bytes:
    return pack({**GOOD, "a": {**GOOD["a"], **entry}})


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "seven bytes": (b"\0" * 7, "truncated"),
    "no header": (struct.pack("<Q", 100), "truncated"),
    "header cut": (pack(GOOD)[:60], "truncated"),
    "data cut": (pack(GOOD, 23), "truncated"),
    "data too long": (pack(GOOD, 25), "1 bytes after its last tensor"),
    "header length 2^64-1": (pack(GOOD, length=2**64 - 1), "truncated"),
    "header of 33 MB": (pack(b"{" + b" " * (33 << 20)), "is the limit"),
    "zero header": (pack(b""), "not a safetensors file"),
    "not JSON": (pack(b"{oops}"), "not strict JSON"),
    "leading space": (pack(b" " + json.dumps(GOOD).encode()), "not a safetensors file"),
    "a list": (pack(b"[]"), "not a safetensors file"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "not strict JSON"),
    "NaN": (pack('{"a": NaN}'), "NaN is not a finite number"),
    "nested 100 000 deep": (pack(b'{"a":' * 100_000), "nested more than 32 levels deep"),
    "number of 5000 digits": (pack(b'{"a":' + b"9" * 5000 + b"}"), "not strict JSON"),
    "duplicate tensor": (pack(json.dumps(GOOD)[:-1] + ', "a": ' + json.dumps(GOOD["a"]) + "}"), "duplicate key 'a'"),
    "duplicate field": (pack('{"a": {"dtype": "F32", "dtype": "F16"}}'), "duplicate key 'dtype'"),
    "entry not an object": (pack({**GOOD, "a": 3}), "needs exactly"),
    "field missing": (pack({"a": {"dtype": "F32", "shape": [6]}}), "needs exactly"),
    "field unknown": (changed(more=1), "needs exactly"),
    "dtype unknown": (changed(dtype="F7"), "unknown dtype 'F7'"),
    "dtype a list": (changed(dtype=["F32"]), "unknown dtype"),
    "shape negative": (changed(shape=[-2, -2]), "not a list of sizes"),
    "shape of floats": (changed(shape=[2.0, 2.0]), "not a list of sizes"),
    "shape of booleans": (changed(shape=[True, 4]), "not a list of sizes"),
    "shape overflows": (changed(shape=[2**62, 2**62, 16]), "not those of F32"),
    "shape of 10 000 axes": (changed(shape=[1] * 10_000), "not a list of sizes"),
    "shape too large": (changed(shape=[2, 3]), "has 16 bytes, not those of F32 [2, 3]"),
    "offsets reversed": (changed(data_offsets=[16, 0]), "not a range"),
    "offsets negative": (changed(data_offsets=[-16, 0]), "not a range"),
    "offsets of three": (changed(data_offsets=[0, 8, 16]), "not a range"),
    "offset past the end": (changed(data_offsets=[10**12, 10**12 + 16]), "truncated"),
    "overlap": (pack({"a": GOOD["a"], "b": {**GOOD["b"], "data_offsets": [10, 16]}}, 16), "overlaps"),
    "hole": (pack({"a": GOOD["a"], "b": {**GOOD["b"], "data_offsets": [18, 24]}}), "hole"),
    "hole at the start": (pack({"a": {**GOOD["a"], "data_offsets": [8, 24]}}), "hole"),
    "metadata not strings": (pack({"__metadata__": {"format": 1}, **GOOD}), "__metadata__"),
    "name with a line break": (pack({"a\nb": {"dtype": "F7", "shape": [], "data_offsets": [0, 0]}}), r"'a\nb'"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_is_refused(case, tmp_path):
    content, reason = MALFORMED[case]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        read_header(file)
    assert reason in str(caught.value) and str(file) in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert file.read_bytes() == content


def test_good_header(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(pack({"__metadata__": {"format": "pt"}, **GOOD}))
    tensors = read_header(file)
    assert list(tensors) == ["a", "b", "none", "scalar"]
    assert file.read_bytes()[tensors["b"].start : tensors["b"].end] == bytes(range(16, 22))
    assert tensors["none"].shape == (0, 4) and tensors["scalar"].shape == ()


def test_file_cut_after_its_size_was_taken():
    """A mapped file would kill the process here."""
    content = pack(GOOD)
    with pytest.raises(BadInputError, match="not a safetensors file"):
        parse_header(io.BytesIO(content[:40]), len(content), "x")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_fifo, "is a FIFO, not a regular file"),
        (_socket, "is a socket, not a regular file"),
        (Path.mkdir, "is a directory, not a regular file"),
        (_loop, "cannot be opened"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a regular file"),
        (lambda path: None, "is missing"),
    ],
)
def test_only_regular_files_are_opened(make: Callable[[Path], None], reason, tmp_path):
    file = tmp_path / "model.safetensors"
    make(file)
    with pytest.raises(BadInputError, match=reason):
        read_header(file)


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One to four random edits: flip, replace by a telling byte, delete, repeat, cut."""
    edited = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        # Mostly in the length and the JSON: bytes of the data are nobody's business here.
        at = rng.randrange(min(len(edited), 8) if rng.random() < 0.1 else max(1, len(edited) - 24))
        kind = rng.randrange(5)
        if kind == 0:
            edited[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            edited[at] = rng.choice(b'0123456789-,:.eE[]{}" \0\xff')
        elif kind == 2:
            del edited[at : at + rng.randint(1, 8)]
        elif kind == 3:
            edited[at:at] = edited[at : at + rng.randint(1, 40)]
        else:
            del edited[rng.randrange(len(edited)) :]
        edited = edited or bytearray(b"\0")
    return bytes(edited)


def check_mutants(seeds: range) -> int:
    """Each mutant is refused, or read exactly as the format's own library reads it; returns how many were read."""
    accepted = 0
    original = pack({"__metadata__": {"format": "pt"}, **GOOD})
    for seed in seeds:
        content = mutate(original, random.Random(seed))
        try:
            tensors = parse_header(io.BytesIO(content), len(content), "mutant")
        except BadInputError as error:
            assert "\n" not in str(error), seed
            continue
        accepted += 1
        theirs = {
            name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(content)
        }
        ours = {name: (t.dtype, t.shape, content[t.start : t.end]) for name, t in tensors.items()}
        assert ours == theirs, seed
    return accepted


def test_mutants():
    assert check_mutants(range(10_000)) > 50


@pytest.mark.nightly
def test_many_mutants():
    check_mutants(range(10_000, 500_000))


def test_memory_is_bounded(tmp_path):
    """A header of 31 MB of empty lists, in a process that may use 1 GB of address space and imports no torch."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(pack(b'{"a":[' + b"[]," * (31 * 1024 * 1024 // 3) + b"[]]}"))
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "from fcsd.checkpoint import read_header; read_header(sys.argv[1])"
    )
    run = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, timeout=60, check=False)
    assert "BadInputError" in run.stderr and "needs exactly" in run.stderr
