"""Reduces a wheel of vLLM to what one kind of GPU runs, as two archives that are small enough to be carried by hand.

    python benchmarks/carried/vllm_slim.py WHEEL FOLDER

FOLDER gets ``kernels.tar.xz``, vLLM's own libraries of kernels, and ``vllm.tar.xz``, everything else.

A wheel of vLLM holds machine code for seven generations of GPUs. This script takes out of the shared libraries what a
Hopper GPU (compute capability 9.0: H100, H200) does not run: code for other GPUs, PTX, and the tables of symbols. Zeros
take their place, which compress to nothing, so that no address changes and the libraries load as before. The script
also leaves files out (``LEFT_OUT``) that serving through FlashAttention 3 or Triton on Hopper does not open.

Some kernels are PTX for Hopper (0.24.0: the Marlin kernels of mixtures of experts, those of dense layers in float16,
and those that lay weights out for them). A driver would compile them when they are first called, for minutes. This
script compiles them with ``ptxas``, ``fatbinary`` (CUDA 13) and ``zstd``: 20 CPU minutes for 0.24.0. Without one of the
three it says so, and these kernels fail when they are called.

What no longer works: FlashAttention 2, DeepGEMM, FlashMLA, the Rust front end, and every GPU but Hopper.

The layout of a fat binary (a container with a header, then one entry for each GPU, each with a header and a payload) is
not documented by NVIDIA. Where the bytes do not follow it, the script stops.
"""

import contextlib
import fnmatch
import io
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CONTAINER = 0xBA55ED50  # the first four bytes of a container
PTX, MACHINE_CODE = 1, 2  # kinds of entries
HOPPER = 90
TOOLS = ("ptxas", "fatbinary", "zstd")
OLDER = b"cutlass7Kernel2"  # in the names of kernels that vLLM calls on GPUs before Hopper alone
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/_rust_tool_parser*",
    "vllm/_deepselect*",
    "vllm/_flashkda*",
    "vllm/_flashmla*",
    "vllm/_qutlass*",
    "vllm/vllm_flash_attn/_vllm_fa2*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/deep_gemm/*",
    "vllm/kernels/helion/configs/*",
    "vllm/entrypoints/serve/instrumentator/static/*",
    "*.jpg",
    "*.cu",
    "*/RECORD",
)
KERNELS = "vllm/_*C_stable*.so"
DEVICE_TABLES = "*device_name=*.json"  # tuned sizes of Triton kernels, one file for each GPU and shape
OWN_TABLES = "*device_name=NVIDIA_H[12]00*.json"


def sections(library: bytearray) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each section of a 64-bit little-endian ELF file."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (start,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", library, start + n * size) for n in range(count)]
    table = headers[names][4]
    for name, kind, _, _, offset, length, *_ in headers:
        text = bytes(library[table + name : library.index(0, table + name)]).decode()
        if kind != 8:  # NOBITS: such a section takes no bytes of the file
            yield text, offset, length


def containers(library: bytearray, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Where each container of a section of fat binaries starts, where its entries start, and where they end.

    Raises:
        ValueError: the bytes are not laid out as this script expects.
    """
    at, end = offset, offset + length
    while at + 16 <= end:
        magic, version, header, content = struct.unpack_from("<IHHQ", library, at)
        if magic == 0:  # padding between containers
            at += 8
            continue
        if magic != CONTAINER or version != 1 or at + header + content > end:
            raise ValueError(f"no container of a fat binary at byte {at}")
        yield at, at + header, at + header + content
        at += header + content


def entries(library: bytearray, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Kind, compute capability, start, start of the payload, and end of each entry of a container.

    Raises:
        ValueError: the bytes are not laid out as this script expects.
    """
    while start < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, start)
        (capability,) = struct.unpack_from("<I", library, start + 28)
        if kind not in (PTX, MACHINE_CODE) or not 64 <= header <= header + size <= end - start:
            raise ValueError(f"no entry of a fat binary at byte {start}")
        yield kind, capability, start, start + header, start + header + size
        start += header + size


def slim(library: bytearray) -> int:
    """Take out, in place, what Hopper does not run. Returns how many bytes of code for it are left."""
    kept = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # ptxas is a process
        for name, offset, length in list(sections(library)):
            if name in (".symtab", ".strtab"):
                library[offset : offset + length] = bytes(length)
            elif name == ".nv_fatbin":
                found = list(containers(library, offset, length))
                kept += sum(pool.map(lambda container: keep_hopper(library, *container), found))
    return kept


def keep_hopper(library: bytearray, container: int, start: int, end: int) -> int:
    """Reduce one container to the entries for Hopper, as if it had been compiled for nothing else.

    A container without one gets what its PTX is compiled to. Without PTX it keeps its machine code for other GPUs as
    empty shells. A kernel in it then fails as it does in any program that was not compiled for the GPU.

    Returns:
        How many bytes of code for Hopper the container has.
    """
    found = list(entries(library, start, end))
    code = [bytes(library[a:z]) for kind, capability, a, _, z in found if (kind, capability) == (MACHINE_CODE, HOPPER)]
    sources = [bytes(library[a:z]) for kind, capability, a, _, z in found if kind == PTX and capability < HOPPER]
    if not code and sources and all(map(shutil.which, TOOLS)):
        code = compiled(sources[-1], room=end - start)
    shells = [bytes(library[a:p]) + bytes(z - p) for kind, _, a, p, z in found if kind == MACHINE_CODE]
    content = b"".join(code or shells)
    if not content:
        return 0  # nothing but PTX stays as it is
    library[start:end] = content.ljust(end - start, b"\0")
    struct.pack_into("<Q", library, container + 8, len(content))
    return len(content) if code else 0


def compiled(entry: bytes, room: int) -> list[bytes]:
    """The entry of machine code for Hopper that an entry of PTX is compiled to; none for kernels of older GPUs.

    Raises:
        ValueError: the machine code is larger than ``room``.
    """
    _, _, header, size, packed = struct.unpack_from("<HHIQI", entry)
    source = entry[header : header + (packed or size)]
    if packed:
        source = subprocess.run(["zstd", "-dcq"], input=source, capture_output=True, check=True).stdout
    if OLDER in source:
        return []
    with tempfile.TemporaryDirectory() as folder:
        ptx, code, whole = (str(Path(folder, name)) for name in ("kernels.ptx", "kernels.cubin", "kernels.fatbin"))
        Path(ptx).write_bytes(source.rstrip(b"\0"))
        subprocess.run(["ptxas", f"-arch=sm_{HOPPER}", "-o", code, ptx], check=True)
        image = f"--image3=kind=elf,sm={HOPPER},file={code}"
        subprocess.run(["fatbinary", "-64", "--compress-all", f"--create={whole}", image], check=True)
        made = bytearray(Path(whole).read_bytes())
    _, start, end = next(containers(made, 0, len(made)))
    if end - start > room:
        raise ValueError(f"machine code of {end - start} bytes for a place of {room}")
    return [bytes(made[start:end])]


def wanted(name: str) -> bool:
    """Whether a file of the wheel goes into the archive."""
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_OUT):
        return False
    return not fnmatch.fnmatchcase(name, DEVICE_TABLES) or fnmatch.fnmatchcase(name, OWN_TABLES)


def main() -> None:
    """Write the archives to the folder that the arguments name."""
    wheel, folder = map(Path, sys.argv[1:])
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        print(f"without {', '.join(missing)} kernels that are PTX for Hopper are left out")
    names = {True: folder / "kernels.tar.xz", False: folder / "vllm.tar.xz"}
    with zipfile.ZipFile(wheel) as source, contextlib.ExitStack() as opened:
        archives = {
            kernels: opened.enter_context(tarfile.open(file, "w:xz", preset=6)) for kernels, file in names.items()
        }
        for entry in source.infolist():
            if entry.is_dir() or not wanted(entry.filename):
                continue
            content = bytearray(source.read(entry))
            if entry.filename.endswith(".so"):
                kept = slim(content)
                packed = len(lzma.compress(content, preset=0))
                print(f"{entry.filename}: {len(content) >> 20} MiB, code for Hopper {kept >> 20} MiB", end="")
                print(f", about {packed >> 20} MiB compressed", flush=True)
            file = tarfile.TarInfo(entry.filename)
            file.size, file.mode = len(content), 0o644
            archives[fnmatch.fnmatchcase(entry.filename, KERNELS)].addfile(file, io.BytesIO(content))
    for file in names.values():
        print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
