"""Holds predicted speeds beside those of vLLM's servers.

``predictions`` predicts them from rates that were set on fcsd's own engine with other dimensions and two
GPUs, so none of these servers had a part in them.
"""

import json
from pathlib import Path
from statistics import median

from studies.real.frontier import predicted_rows
from studies.real.page import RESULTS

from fcsd.bench.serve.model import config_of
from fcsd.markdown import table

# Servers in bf16 without peer access. Each file has the original beside the wirings, all with vLLM's own sums.
DENSE = ("", "8b_replicas_", "qwen3_32b_12_layers_", "70b_", "70b_tp4_whole_")
EXPERTS = ("v2lite_27_layers_", "qwen3_16_layers_")


def served(repo: Path = Path()) -> str:
    """Markdown with each server's speeds over the original, as predicted and as measured, of all layers converted."""
    body = []
    for name in (*DENSE, *EXPERTS):
        (file,) = (repo / RESULTS).glob(f"serve_vllm_{name}slow_?xh100.json")
        raw = json.loads(file.read_text())
        load, rounds = raw["workload"], {name: one["rounds"] for name, one in raw["variants"].items()}
        config = config_of(load["model"], load["layers"])
        rows = predicted_rows(config, load["tp"])
        depth = config.get_text_config().num_hidden_layers
        for wiring in (name for name, one in raw["variants"].items() if one["role"] == "wired" and "," not in name):
            row = rows[wiring, "100%"]
            step, short, long = (
                f"{median(rounds['original'][key]) / median(rounds[wiring][key]):.2f}x"
                for key in ("decode 16", "prefill 512", "prefill 2048")
            )
            cells = [f"{row.decode:.2f}x", step, f"{row.prefill:.2f}x", f"{short}, {long}"]
            body.append([load["model"], str(depth), f"TP {load['tp']}", wiring, *cells])
    head = ["shape", "layers", "GPUs", "wiring", "step, predicted", "measured", "first tokens, predicted", "measured"]
    return table(head, body, left=4) + "\n"
