"""Host memory of a process whose model's experts are divided: its share and no more than a layer, at every stage."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from benchmarks.random_checkpoint import write_random_checkpoint
from test_loading import join
from transformers import AutoConfig, Qwen3MoeConfig

from fcsd.checkpoint import read_layout

MIB = 2**20
# Allocator and interpreter; the smallest model below is several times as large.
MARGIN = 48 * MIB
SMALL = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 16, "num_hidden_layers": 8}
LARGE = {"hidden_size": 2048, "moe_intermediate_size": 1024, "num_experts": 32, "num_hidden_layers": 12}


def resident(kind: str) -> int:
    """``VmRSS`` of this process, or ``VmHWM``, its largest value since ``growth`` reset it; bytes."""
    (kilobytes,) = re.findall(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def growth(function: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a function, and by how many bytes this process grew at most while it ran."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = function()
    return result, resident("VmHWM") - before


def checkpointed(checkpoint: Path, out: Path, ep_size: int) -> dict[str, int]:
    """Bytes: this rank's ``share`` of the model, and the growth while it is read and written."""
    from fcsd.distill.experts.expert_parallel import load
    from fcsd.distill.student import write_student
    from fcsd.launch.world import join_world
    from fcsd.parallel.weights.saving import own_part

    join()
    world = join_world()
    model, read = growth(lambda: load(checkpoint, ep_size, dtype=torch.bfloat16, device=world.device))
    share = sum(tensor.nbytes for tensor in model.state_dict().values())
    _, written = growth(lambda: write_student(own_part(model), checkpoint, out, world))
    return {"share": share, "read": read, "written": written}


def made_at_random(source: Path, ep_size: int) -> int:
    """Growth while a random model is made, a share on every rank."""
    from fcsd.distill.experts.expert_parallel import randomise

    join()
    config = AutoConfig.from_pretrained(source)
    device = torch.device("cpu")
    return growth(lambda: randomise(config, ep_size, dtype=torch.bfloat16, device=device, seed=0))[1]


def written_at_random(source: Path, out: Path) -> int:
    """Growth while a random checkpoint is written."""

    return growth(lambda: write_random_checkpoint(source, out, dtype=torch.bfloat16, device=torch.device("cpu")))[1]


def largest_layer(checkpoint: Path) -> int:
    """Bytes of the largest decoder layer with all its experts."""
    layers: Counter[str] = Counter()
    for name, info in read_layout(checkpoint).tensors.items():
        if "layers." in name:
            layers[name.split("layers.")[1].split(".")[0]] += info.end - info.start
    return max(layers.values())


@pytest.mark.parametrize(
    ("shape", "size"), [(SMALL, 2), pytest.param(LARGE, 4, marks=pytest.mark.nightly)], ids=["small", "large"]
)
def test_a_rank_never_holds_more_than_its_share_and_a_layer(shape: dict[str, int], size: int, tmp_path: Path) -> None:
    fixed: Any = {"vocab_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    Qwen3MoeConfig(**fixed, **shape).save_pretrained(tmp_path / "config")
    (wrote,) = ranks.on_ranks(1, written_at_random, tmp_path / "config", tmp_path / "in")
    whole = sum(info.end - info.start for info in read_layout(tmp_path / "in").tensors.values())
    layer = largest_layer(tmp_path / "in")
    shares = ranks.on_ranks(size, checkpointed, tmp_path / "in", tmp_path / "out", size)
    made = ranks.on_ranks(size, made_at_random, tmp_path / "config", size)
    print(f"MiB: whole {whole / MIB:.0f}, layer {layer / MIB:.0f}, writing it at random {wrote / MIB:.0f}")
    assert wrote <= 3 * layer + MARGIN < whole  # of a module drawn, the one before, and one that is taken apart
    for rank, random in zip(shares, made, strict=True):
        print(", ".join(f"{name} {most / MIB:.0f}" for name, most in {**rank, "made at random": random}.items()))
        assert rank["share"] + layer + MARGIN < whole, "too small a model to show anything"
        assert max(rank["read"], random) <= rank["share"] + layer + MARGIN
        assert rank["written"] <= layer + MARGIN
