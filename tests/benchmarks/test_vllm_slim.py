"""``benchmarks/carried/vllm_slim.py`` keeps a library's code for Hopper as it is, and takes out the rest."""

import shutil
import struct
import sys
from pathlib import Path

import pytest
from benchmarks.carried import vllm_slim as slim


def entry(kind: int, capability: int, payload: bytes, packed: int = 0) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHIQI", header, 0, kind, 0x101, 64, len(payload), packed)
    struct.pack_into("<I", header, 28, capability)
    return bytes(header) + payload


def container(*content: bytes) -> bytes:
    joined = b"".join(content)
    return struct.pack("<IHHQ", slim.CONTAINER, 1, 16, len(joined)) + joined


def library(**parts: bytes) -> bytearray:
    """An ELF file with the sections that are named, ``__`` for a leading dot."""
    named = {name.replace("__", "."): content for name, content in parts.items()}
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*named, ".shstrtab"])
    body, headers = bytearray(64), [bytes(64)]
    for name, content in [*named.items(), (".shstrtab", names)]:
        headers.append(
            struct.pack("<IIQQQQIIQQ", names.index(name.encode()), 1, 0, 0, len(body), len(content), *[0] * 4)
        )
        body += content
    struct.pack_into("<6s", body, 0, b"\x7fELF\x02\x01")
    struct.pack_into("<Q", body, 0x28, len(body))
    struct.pack_into("<HHH", body, 0x3A, 64, len(headers), len(headers) - 1)
    return body + b"".join(headers)


def of(found: bytearray, section: str) -> tuple[int, bytes]:
    offset, length = next((o, n) for name, o, n in slim.sections(found) if name == section)
    return offset, bytes(found[offset : offset + length])


def test_hopper_code_stays_and_the_rest_is_zeros(monkeypatch):
    monkeypatch.setattr(slim, "TOOLS", ("no such compiler",))
    hopper = entry(slim.MACHINE_CODE, 90, b"H" * 40)
    mixed = container(entry(slim.MACHINE_CODE, 80, b"A" * 24), hopper, entry(slim.PTX, 80, b"P" * 16), hopper)
    other = container(entry(slim.PTX, 80, b"P" * 16), entry(slim.MACHINE_CODE, 75, b"T" * 24))
    before = library(__text=b"host code", __nv_fatbin=mixed + bytes(8) + other, __strtab=b"symbols")
    after = bytearray(before)

    assert slim.slim(after) == 2 * len(hopper)
    assert len(after) == len(before)
    assert of(after, ".text") == of(before, ".text")
    assert of(after, ".strtab")[1] == bytes(7)
    start, content = of(after, ".nv_fatbin")
    kept, shell = list(slim.containers(after, start, len(content)))
    assert after[kept[1] : kept[2]] == hopper + hopper
    assert [found[:2] for found in slim.entries(after, *shell[1:])] == [(slim.MACHINE_CODE, 75)]
    assert not any(payload in content for payload in (b"AAAA", b"PPPP", b"TTTT"))
    assert shell[0] - start == len(mixed) + 8, "no container moves"


# In place of CUDA's tools: they say what they were given, and a fat binary holds it.
TOOLS = {
    "ptxas": 'open(given[2], "wb").write(" ".join(given[:1]).encode() + b" " + open(given[3], "rb").read())',
    "fatbinary": """
code = open(given[3].split("file=")[1], "rb").read().ljust(32, b"\\0")
entry = struct.pack("<HHIQQI", 2, 257, 64, len(code), 0, 0).ljust(28, b"\\0") + struct.pack("<I", 90)
entry = entry.ljust(64, b"\\0") + code
open(given[2].split("=")[1], "wb").write(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry)
""",
    "zstd": "sys.stdout.buffer.write(sys.stdin.buffer.read().replace(b'packed', b'plain'))",
}


def test_ptx_for_hopper_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, program in TOOLS.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\nimport struct, sys\ngiven = sys.argv[1:]\n{program}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert all(shutil.which(tool) for tool in slim.TOOLS)
    older = entry(slim.MACHINE_CODE, 80, b"A" * 200)
    with_ptx = container(older, entry(slim.PTX, 80, b"packed kernels, padding ", len(b"packed kernels")))
    of_older = container(older, entry(slim.PTX, 80, b"for example cutlass7Kernel2 ... "))
    for_later = container(older, entry(slim.PTX, 100, b"kernels of another GPU ."))
    whole = library(__nv_fatbin=with_ptx + of_older + for_later)
    code = b"-arch=sm_90 plain kernels".ljust(32, b"\0")
    assert slim.slim(whole) == 64 + len(code)
    start, content = of(whole, ".nv_fatbin")
    found = list(slim.containers(whole, start, len(content)))
    ((kind, capability, _, payload, end),) = slim.entries(whole, *found[0][1:])
    assert (kind, capability) == (slim.MACHINE_CODE, 90) and whole[payload:end] == code
    shells = [list(slim.entries(whole, *one[1:])) for one in found[1:]]
    assert [[entry[:2] for entry in shell] for shell in shells] == [[(slim.MACHINE_CODE, 80)]] * 2
    with pytest.raises(ValueError, match="machine code of"):
        slim.slim(library(__nv_fatbin=container(entry(slim.PTX, 80, b"few ptx "))))


def test_bytes_of_another_layout_are_refused():
    with pytest.raises(ValueError, match="no container"):
        slim.slim(library(__nv_fatbin=b"something else that is long enough"))
    with pytest.raises(ValueError, match="no entry"):
        slim.slim(library(__nv_fatbin=container(entry(7, 90, b"H" * 40))))
    with pytest.raises(ValueError, match="ELF"):
        slim.slim(bytearray(b"text"))


def test_files_that_serving_on_hopper_does_not_open_are_left_out():
    tables = "vllm/model_executor/layers/fused_moe/configs/E=8,N=14336,device_name="
    assert slim.wanted("vllm/entrypoints/llm.py") and slim.wanted(f"{tables}NVIDIA_H200.json")
    assert not slim.wanted(f"{tables}NVIDIA_B200.json")
    assert not slim.wanted("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so")
