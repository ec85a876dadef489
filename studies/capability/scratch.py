"""Training from random weights at equal tokens: the study ``scratch``, its configs and what is stored of a run.

- FarSkip Appendix A: the bundled teacher's architecture, standard against farskip. The paper's losses are 2.187 and
  2.205 after 50 B tokens.
- Ladder §4.1 and §5: dense models of two sizes, standard against parallel, ladder, desync-2x and desync-4x. Desync has
  a degree of 8, as in the benchmarks of the paper, so these models have 8 heads.

All runs have the same optimizer settings. Within a seed they read the same rows in the same order. What counts is the
training loss, averaged over the last 50 steps; these models are too weak for the benchmarks.
"""

import json
import shutil
from pathlib import Path
from statistics import mean
from typing import Any

from studies.capability.runs import PUBLISHED, SEEDS, SFT, Run, config_folder

TEACHER = Path(__file__).resolve().parents[2] / "assets/teacher"
SHARE = 0.01  # of the teacher's tokens
AVERAGED = 50  # steps
DEGREE = 8
HEADS = 8
CONFIGS: dict[str, dict[str, int]] = {  # of dense models; the ratios are those of studies/teacher/layouts.py
    "llama-128": {"hidden_size": 128, "num_hidden_layers": 16, "intermediate_size": 384},
    "llama-256": {"hidden_size": 256, "num_hidden_layers": 16, "intermediate_size": 768},
}
MOE, DENSE = ("standard", "farskip"), ("standard", "parallel", "ladder", "desync-2x", "desync-4x")
SETTINGS: dict[str, Any] = {
    **SFT,
    "init.weights": "random",
    "train.batch_tokens": 16384,  # a thousand steps
    "train.log_every": 1,
    "optim.lr": 1e-3,
    "optim.min_lr": 1e-4,
    "optim.warmup_steps": 100,
    "optim.weight_decay": 0.1,
}


def scratch_runs() -> list[Run]:
    """Three seeds of the MoE model, and one of the dense models, whose Desync computes every rank on one GPU."""
    return [
        *(_run(wiring, seed) for seed in SEEDS for wiring in MOE),
        *(_run(wiring, SEEDS[0], model) for model in CONFIGS for wiring in DENSE),
    ]


def _run(wiring: str, seed: int, model: str = "") -> Run:
    degree = {"init.tp_degree": DEGREE} if wiring.startswith("desync") else {}
    settings = {**SETTINGS, "init.wiring": wiring, **degree}
    return Run(f"from scratch, {wiring}", "same", SHARE, seed, settings=settings, sweep=PUBLISHED, model=model)


def write_config(model: str, work: Path) -> None:
    """Write the config of a dense model and the bundled teacher's tokenizer; a run draws the weights itself."""
    teacher = json.loads((TEACHER / "config.json").read_text())
    shared = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "rms_norm_eps")
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    config |= {key: teacher[key] for key in shared} | CONFIGS[model] | heads
    folder = config_folder(model, work)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TEACHER / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def scratch_results(metrics: list[dict[str, Any]], model: Path) -> dict[str, Any]:
    """What the line of a run from scratch has instead of scores.

    Args:
        metrics: the records of the run, one for each step.
        model: the trained model.
    """
    from fcsd.checkpoint import inspect_checkpoint

    losses = [record["loss"] for record in metrics if record.get("loss") is not None]
    return {"final_loss": mean(losses[-AVERAGED:]), "parameters": inspect_checkpoint(str(model)).parameters}
