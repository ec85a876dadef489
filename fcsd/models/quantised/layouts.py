"""How the weights of a linear layer are stored: one row for each layout, with the tensors that files have for it.

Every value is ``(code - zero point) * scale``, and rows and columns of a rectangle of values share a scale. So a layout
says only where codes, scales and zero points are. Without torch, because headers are read without it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Shape = tuple[int, ...]

FLOATS = ("F64", "F32", "BF16", "F16")
INTEGERS = ("I64", "I32")
# Scales of activations and of a cache, which belong to a quantised checkpoint: no weight depends on them.
BESIDE = r"\.(?:input_scale|input_zero_point|input_global_scale|activation_scale|output_scale|[kvq]_scale|kv_scale)$"
_ANY = (1 << 20, 1 << 20)  # a size of a matrix, to ask which tensors a scheme has
# torch's names of the dtypes of codes -> those in headers
_NAMES = {"torch.float8_e4m3fn": "F8_E4M3", "torch.int8": "I8", "torch.uint8": "U8", "torch.int32": "I32"}


@dataclass(frozen=True)
class Scheme:
    """How the weights of a linear layer are stored.

    Attributes:
        layout: a key of ``LAYOUTS``.
        bits: bits of a code.
        block: the rows and columns of the values that share a scale; 0 stands for all of them.
        floats: whether a code is a small float; otherwise it is an integer.
        symmetric: whether there are no zero points in the files.
        ordered: whether the columns of a group are scattered, and a tensor says which is in which.
        offset: what is added to a zero point in the files; 1 for the first version of GPTQ's files.
    """

    layout: str
    bits: int
    block: tuple[int, int] = (0, 0)
    floats: bool = False
    symmetric: bool = True
    ordered: bool = False
    offset: int = 0

    def __str__(self) -> str:
        rows, columns = self.block
        shares = {(0, 0): "with one scale for a matrix", (1, 0): "with a scale for each row"}
        several = f"in groups of {columns}" if rows == 1 else f"in blocks of {rows} x {columns}"
        return f"{self.bits}-bit {'floats' if self.floats else 'integers'} {shares.get(self.block, several)}"

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """The number of scales of a matrix, down and across."""
        return -(-rows // (self.block[0] or rows)), -(-columns // (self.block[1] or columns))

    def bytes(self, rows: int, columns: int) -> float:
        """Bytes of a matrix, with its scales and zero points, without what does not grow with it."""
        layout = LAYOUTS[self.layout]
        down, across = self.grid(rows, columns)
        beside = layout.scale + (0 if self.symmetric else self.bits / 8)
        return rows * columns * self.bits / 8 + down * across * beside


class Held(NamedTuple):
    """A tensor that files have, or may have, for a linear layer.

    Attributes:
        shapes: the shapes that it may have; the first is the usual one.
        dtypes: the dtypes that it may have, as headers name them.
        needed: whether it must be there.
    """

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    needed: bool = True


class Layout(NamedTuple):
    """One way to store the weights of a linear layer.

    Attributes:
        key: the suffix of the tensor with the codes, by whose name and dtype a layer that is stored so is known.
        held: the tensors by suffix, for the rows (outputs) and columns (inputs) of a matrix.
        scale: bytes of a scale, as files usually have it.
        whole: whether groups must divide the columns.
        stem: what a weight's name ends in, instead of which the tensors have their suffixes.
    """

    key: str
    held: Callable[[Scheme, int, int], dict[str, Held]]
    scale: float
    whole: bool = False
    stem: str = "weight"


def held_of(scheme: Scheme, weight: str, shape: Shape) -> dict[str, Held]:
    """The tensors that files have, or may have, for a weight: name -> what is held.

    Args:
        shape: of the weight where it is not quantised; more than two dimensions are a stack of matrices.

    Raises:
        ValueError: the scheme cannot store such a matrix.
    """
    layout = LAYOUTS[scheme.layout]
    if layout.whole and shape[-1] % (scheme.block[1] or 1):
        raise ValueError(f"{shape[-1]} values cannot be stored in groups of {scheme.block[1]}")
    start, stack = weight.removesuffix(layout.stem), shape[:-2]
    return {
        start + suffix: held._replace(shapes=tuple((*stack, *one) for one in held.shapes))
        for suffix, held in layout.held(scheme, *shape[-2:]).items()
    }


def needed(scheme: Scheme) -> list[str]:
    """The suffixes of the tensors without which nothing can be decoded."""
    return [suffix for suffix, held in LAYOUTS[scheme.layout].held(scheme, *_ANY).items() if held.needed]


def lacking(scheme: Scheme, weight: str, held: Mapping[str, Any]) -> list[str]:
    """The names of the tensors that a weight needs under a scheme, and that files do not have."""
    start = weight.removesuffix(LAYOUTS[scheme.layout].stem)
    return [start + suffix for suffix in needed(scheme) if start + suffix not in held]


def suffixes(schemes: Iterable[Scheme]) -> set[str]:
    """The suffixes of all tensors that weights of these schemes have or may have."""
    return {suffix for scheme in schemes for suffix in LAYOUTS[scheme.layout].held(scheme, *_ANY)}


def stored_so(scheme: Scheme, weight: str, held: Mapping[str, Any]) -> bool:
    """Whether files hold a weight as a scheme says.

    Args:
        weight: its name, as in files that are not quantised.
        held: name of each tensor in the files -> the tensor, its header, or a slice of a safetensors file.
    """
    layout = LAYOUTS[scheme.layout]
    found = held.get(weight.removesuffix(layout.stem) + layout.key)
    if found is None:
        return False
    name = str(found.get_dtype() if hasattr(found, "get_dtype") else found.dtype)
    return _NAMES.get(name, name) in layout.held(scheme, *_ANY)[layout.key].dtypes


def _packed_held(scheme: Scheme, rows: int, columns: int) -> dict[str, Held]:
    down, across = scheme.grid(rows, columns)
    held = {
        "weight_packed": Held(((rows, -(-columns * scheme.bits // 32)),), ("I32",)),
        "weight_scale": Held(((down, across), (down,)), FLOATS),
        "weight_shape": Held(((2,),), INTEGERS),
    }
    if not scheme.symmetric:
        held["weight_zero_point"] = Held(((-(-down * scheme.bits // 32), across),), ("I32",))
    if scheme.ordered:
        held["weight_g_idx"] = Held(((columns,),), INTEGERS, needed=False)
    return held


def _plain_held(scheme: Scheme, rows: int, columns: int) -> dict[str, Held]:
    down, across = scheme.grid(rows, columns)
    shapes: tuple[Shape, ...] = ((down, across),)
    shapes += ((), (1,)) if (down, across) == (1, 1) else ((down,),) if across == 1 else ()
    held = {
        "weight": Held(((rows, columns),), ("F8_E4M3",) if scheme.floats else ("I8",)),
        scale_of(scheme): Held(shapes, FLOATS),
    }
    if not scheme.symmetric:
        held["weight_zero_point"] = Held(shapes, ("I8", "F8_E4M3", *INTEGERS))
    return held


def scale_of(scheme: Scheme) -> str:
    return "weight_scale_inv" if scheme.layout == "inverse" else "weight_scale"


def _nvfp4_held(scheme: Scheme, rows: int, columns: int) -> dict[str, Held]:
    grid = scheme.grid(rows, columns)
    if scheme.layout == "modelopt4":
        return {
            "weight": Held(((rows, -(-columns // 2)),), ("U8",)),
            "weight_scale": Held((grid,), ("F8_E4M3",)),
            "weight_scale_2": Held(((), (1,)), ("F32",)),
        }
    return {
        "weight_packed": Held(((rows, -(-columns // 2)),), ("U8",)),
        "weight_scale": Held((grid,), ("F8_E4M3",)),
        "weight_global_scale": Held(((1,), ()), ("F32",)),
    }


def _awq_held(scheme: Scheme, rows: int, columns: int) -> dict[str, Held]:
    words, groups = -(-rows * scheme.bits // 32), scheme.grid(rows, columns)[1]
    return {
        "qweight": Held(((columns, words),), ("I32",)),
        "qzeros": Held(((groups, words),), ("I32",)),
        "scales": Held(((groups, rows),), FLOATS),
    }


def _gptq_held(scheme: Scheme, rows: int, columns: int) -> dict[str, Held]:
    groups = scheme.grid(rows, columns)[1]
    return {
        "qweight": Held(((-(-columns * scheme.bits // 32), rows),), ("I32",)),
        "qzeros": Held(((groups, -(-rows * scheme.bits // 32)),), ("I32",)),
        "scales": Held(((groups, rows),), FLOATS),
        "g_idx": Held(((columns,),), INTEGERS, needed=scheme.ordered),
    }


def _mxfp4_held(scheme: Scheme, inner: int, outer: int) -> dict[str, Held]:
    """Of the matrix ``[in, out]`` of an expert; the files have one dimension more, before these."""
    if inner % 32:
        raise ValueError(f"{inner} values cannot be stored in MXFP4 blocks of 32")
    groups = inner // 32
    return {"_blocks": Held(((outer, groups, 16),), ("U8",)), "_scales": Held(((outer, groups),), ("U8",))}


LAYOUTS: dict[str, Layout] = {
    "packed": Layout("weight_packed", _packed_held, 2, whole=True),
    "plain": Layout("weight", _plain_held, 2),
    "inverse": Layout("weight", _plain_held, 4),
    "modelopt8": Layout("weight", _plain_held, 4),
    "nvfp4": Layout("weight_packed", _nvfp4_held, 1, whole=True),
    "modelopt4": Layout("weight", _nvfp4_held, 1, whole=True),
    "awq": Layout("qweight", _awq_held, 2),
    "gptq": Layout("qweight", _gptq_held, 2),
    "mxfp4": Layout("_blocks", _mxfp4_held, 1, stem=""),
}
