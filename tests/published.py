"""Writes tiny checkpoints under the names of published files, where transformers would save other names.

The names are written down here, and follow neither from fcsd's code nor from transformers'. Those of OLMo-Hybrid are
in the script that converted its weights, those of Kimi-K2.5 in the loaders of other programs. Qwen3-VL's experts have
their last two dimensions exchanged there.
"""

import re
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor

_KIMI = (
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.language_model\.", "language_model.model."),
    (r"^model\.mm_projector\.in_proj\.", "mm_projector.proj.0."),
    (r"^model\.mm_projector\.out_proj\.", "mm_projector.proj.2."),
    (r"^model\.mm_projector\.", "mm_projector."),
    (r"^model\.vision_tower\.layers\.(\d+)\.attn\.proj\.", r"vision_tower.encoder.blocks.\1.wo."),
    (r"^model\.vision_tower\.layers\.(\d+)\.(norm|mlp\.fc)1\.", r"vision_tower.encoder.blocks.\1.\g<2>0."),
    (r"^model\.vision_tower\.layers\.(\d+)\.(norm|mlp\.fc)2\.", r"vision_tower.encoder.blocks.\1.\g<2>1."),
    (r"^model\.vision_tower\.final_layernorm\.", "vision_tower.encoder.final_layernorm."),
    (r"^model\.vision_tower\.patch_embed\.pos_emb\.position_embeddings$", "vision_tower.patch_embed.pos_emb.weight"),
    (r"^model\.vision_tower\.", "vision_tower."),
)


def write(arch: str, folder: Path) -> Any:
    """Write a tiny checkpoint of one of ``NAMED``; returns its model."""
    model = tiny.model(arch, initializer_range=0.1)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = NAMED[arch](model)
    save_file({name: x.clone() for name, x in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def kimi_k25(model: Any) -> dict[str, Tensor]:
    state, found = model.state_dict(), {}
    for name, tensor in state.items():
        if match := re.fullmatch(r"model\.vision_tower\.layers\.(\d+)\.attn\.q_proj\.(\w+)", name):
            queries, keys, values = (state[name.replace("q_proj", f"{one}_proj")] for one in "qkv")
            heads = model.config.vision_config.num_attention_heads
            rows = [_neighbours(queries, heads), _neighbours(keys, heads), values]
            found[f"vision_tower.encoder.blocks.{match[1]}.wqkv.{match[2]}"] = torch.cat(rows)
        elif re.search(r"\.attn\.[kv]_proj\.", name):
            continue
        elif name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                stem = _renamed(name, _KIMI).removesuffix("gate_up_proj") + str(number)
                found |= {f"{stem}.{one}_proj.weight": x for one, x in zip(("gate", "up"), both.chunk(2), strict=True)}
        elif name.endswith("experts.down_proj"):
            stem = _renamed(name, _KIMI).removesuffix("down_proj")
            found |= {f"{stem}{number}.down_proj.weight": x for number, x in enumerate(tensor)}
        else:
            found[_renamed(name, _KIMI)] = tensor
    return found


def _renamed(name: str, names: tuple[tuple[str, str], ...]) -> str:
    for pattern, new in names:
        if (changed := re.sub(pattern, new, name)) != name:
            return changed
    return name


def _neighbours(rows: Tensor, heads: int) -> Tensor:
    """The rows of queries or keys in the order of files, which rotate neighbours and not halves of a head."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def qwen3_vl_moe(model: Any) -> dict[str, Tensor]:
    return {name: x.mT.contiguous() if ".mlp.experts." in name else x for name, x in model.state_dict().items()}


NAMED = {
    "kimi_k25": kimi_k25,
    "qwen3_vl_moe": qwen3_vl_moe,
}
