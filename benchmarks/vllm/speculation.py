"""Checks that a converted model answers the same with drafts that read its last hidden state: EAGLE heads, MTP layers.

    python -m benchmarks.vllm speculation FOLDER OUT.json [--tp N]

The models are two cases of ``cases.py``, and both are drafts of random weights: a head of one layer for a dense
model, and a layer behind the last one of a DeepSeek model. The answers, greedy and in float32, have to be those without
speculation, token by token, for originals and converted models, eagerly and in CUDA graphs. How many drafts were
accepted stands beside them; with random weights it says that drafts are made, and nothing about speed.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from benchmarks.out_file import out_file
from benchmarks.vllm.cases import made, prompts
from benchmarks.vllm.engines import generate, in_a_fork, sampling
from benchmarks.vllm.parity import MODES, engine, release

from fcsd.bench.runner import write

ARGUMENTS = {"folder": Path, "out": out_file, "--tp": 1, "--modes": "eager,graph"}
METHODS = {"llama-ladder": "eagle", "deepseek_v3-farskip": "mtp"}
NEW = 48  # tokens of an answer


def tensors_of(path: Path) -> dict[str, Any]:
    """All tensors of a model by name."""
    from safetensors.torch import load_file

    return {name: x for file in sorted(path.glob("*.safetensors")) for name, x in load_file(file).items()}


def add_mtp(path: Path) -> None:
    """Give a model a layer that predicts one token more: a copy of its last one, between random parts."""
    import torch
    from safetensors.torch import save_file

    tensors = tensors_of(path)
    for file in path.glob("model*.safetensors*"):
        file.unlink()
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    last, new = (f"model.layers.{config['num_hidden_layers'] + n}." for n in (-1, 0))
    width = config["hidden_size"]
    copies = {new + name.removeprefix(last): x.clone() for name, x in tensors.items() if name.startswith(last)}
    torch.manual_seed(0)
    copies |= {new + f"{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    copies[new + "eh_proj.weight"] = torch.randn(width, 2 * width) / (2 * width) ** 0.5
    copies[new + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    copies[new + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | copies, path / "model.safetensors", metadata={"format": "pt"})


def eagle_head(target: Path, path: Path) -> None:
    """A draft model of one layer, which is a copy of the target's last one, behind a random projection."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    tensors, last = tensors_of(target), f"model.layers.{config['num_hidden_layers'] - 1}."
    copies = {"layers.0." + name.removeprefix(last): x for name, x in tensors.items() if name.startswith(last)}
    copies.pop("layers.0.input_layernorm.weight")
    torch.manual_seed(0)
    width = config["hidden_size"]
    copies["fc.weight"] = torch.randn(width, 2 * width) / (2 * width) ** 0.5
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file({name: x.clone() for name, x in copies.items()}, path / "model.safetensors", metadata={"format": "pt"})


def answers(path: Path, asked: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """vLLM's greedy answers, and how many tokens were drafted and accepted."""
    llm = engine(path, "float32", max_model_len=256, max_num_seqs=8, disable_log_stats=False, **options)
    outputs = generate(llm, asked, sampling(NEW))
    drafts = [m for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode_num") and hasattr(m, "value")]
    counted = {m.name.removeprefix("vllm:spec_decode_"): m.value for m in drafts}
    del llm
    release()
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "counted": counted}


def main(given: Any) -> bool:
    """See the head of this file; whether a row is wrong."""
    os.environ.setdefault("VLLM_MLA_DISABLE", "1")
    folder, ranks = given.folder, given.tp
    rows: list[dict[str, Any]] = []
    for case, method in METHODS.items():
        paths = made(folder, case)
        speculative: dict[str, Any] = dict(method=method, num_speculative_tokens=2)
        if method == "mtp":
            own = {role: folder / f"{case}-mtp{role}" for role in paths}
            for path in own.values():
                shutil.rmtree(path, ignore_errors=True)
            for role, path in own.items():
                shutil.copytree(paths[role], path)
                add_mtp(path)
            paths = own
        else:
            eagle_head(paths["original"], folder / "eagle")
            speculative["model"] = str(folder / "eagle")
        asked = prompts(paths["original"], case)
        for mode in given.modes.split(","):
            for role, path in paths.items():
                row: dict[str, Any] = dict(case=case, role=role, method=method, mode=mode, ranks=ranks)
                try:
                    common = dict(tensor_parallel_size=ranks, **MODES[mode])
                    plain = in_a_fork(answers, path, asked, common)
                    drafted = in_a_fork(answers, path, asked, {**common, "speculative_config": speculative})
                    row |= dict(right=plain["tokens"] == drafted["tokens"], **drafted["counted"])
                except Exception as error:
                    row |= dict(right=False, error=f"{type(error).__name__}: {error}"[:2000])
                rows.append(row)
                print(row, flush=True)
                write(rows, given.out)
    return not all(row["right"] for row in rows)
