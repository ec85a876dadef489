"""The generated blocks of README and docs/: every figure in them is of a raw file, a table of the code or a command.

`python scripts/write_reference.py` writes them between their marks (`studies/blocks.py`).
"""

import json
import statistics
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from benchmarks.comm.goals import goals
from scripts.host_blocks import host_blocks
from studies.real import page as real
from studies.real import quantised
from typer.testing import CliRunner

from fcsd.advise.losses import losses
from fcsd.cli.main import app
from fcsd.config import load_recipe
from fcsd.markdown import table
from fcsd.models.archs import ARCHS
from fcsd.plan import GIB, Hardware, plan_run
from fcsd.plan.model import packaged_config
from fcsd.serve.vllm.support import LOST

# GPUs, GiB of each and the length of a row, for adapters beside the NF4 weights of ``IN_NF4``, half of it converted
NF4_ON = ((2, 48, 4096), (2, 48, 1024), (4, 24, 1024), (1, 80, 4096))
IN_NF4 = "meta-llama/Llama-3.3-70B-Instruct"
NF4_RUN = (
    "train.adapter={rank: 64, layers: converted, base: nf4}", "optim.train=[]", "train.tokens=100e6",
    "train.micro_batch_size=1", "parallel.tp_size=1",
)  # fmt: skip
ADVISED = "meta-llama/Llama-3.1-8B-Instruct"  # of which fcsd has the config, so that no hub is asked

_LOAD, _SLOW = "serve_vllm_load_slow_2xh100.json", "serve_vllm_8b_slow_2xh200.json"
_HOST, _TTFT = "host_tables_2xh200.json", "loads/0.6/first_p50"
_ARRIVALS = "serve_vllm_load_8b_host_sums_again_slow_2xh200.json"
_GRAPHED_ARRIVALS = "serve_vllm_load_8b_host_sums_graphs_slow_2xh200.json"
_KERNELS = "vllm_quantised_kernels_1xh200.json"
_DRAFTS = "draft_head_1xh200.jsonl"
_INT4 = "quantised_smollm2_1xh200.jsonl"
_TURNS, _AGAIN = "vllm_turns_8b_2xh200.json", "vllm_turns_8b_again_2xh200.json"
_OTHERS, _EXPERTS = "vllm_turns_int4_and_experts_2xh200.json", "vllm_turns_qwen3_experts_2xh200.json"
_WIDE, _FP8 = "vllm_turns_70b_tp4_4xh200.json", "vllm_turns_70b_fp8_2xh200.json"
_SHORT, _LONG = "first tokens of 16 x 512", "first tokens of 16 x 2048"
# What README tells of speed: the situation, the raw file, the place of the ratio in it (or of two times, the first of
# which is divided by the second), and what it is compared with.
SITUATIONS = (
    ("the model fits one GPU: `ladder` over two, throughput", _LOAD, ["ratios/ladder/peak 0"], "a replica on each"),
    ("Llama-3 8B, no NVLink, `ladder`: TPOT, one request", _SLOW, ["ratios/ladder/decode 1"], "stock vLLM"),
    ("the same: TPOT, many requests", _SLOW, ["ratios/ladder/decode 64"], "stock vLLM"),
    ("the same: TTFT, short prompts at once", _SLOW, ["ratios/ladder/prefill 512"], "stock vLLM"),
    (
        "half of Llama-3 8B, random arrivals, a busy host: median TTFT",
        _LOAD,
        [f"variants/original/{_TTFT}", f"variants/ladder/{_TTFT}"],
        "stock vLLM",
    ),
    (
        "width of Llama-3 70B, four GPUs, no NVLink, `ladder`: TTFT",
        "serve_vllm_70b_tp4_whole_slow_4xh100.json",
        ["ratios/ladder/prefill 2048"],
        "pipeline stages",
    ),
    (
        "Llama-3 8B over NVLink: TPOT, one request",
        "serve_vllm_8b_nvlink_2xh200.json",
        ["ratios/ladder/decode 1"],
        "stock vLLM",
    ),
    (
        "an all-reduce through host memory, no NVLink, 16 KiB",
        _HOST,
        ["sums/16384/stock", "sums/16384/one_shot"],
        "NCCL",
    ),
    ("the same, 16 MiB", _HOST, ["sums/16777216/stock", "sums/16777216/exchange"], "NCCL"),
    ("the same in INT8", _HOST, ["sums/16777216/stock", "sums/16777216/exchange:int8"], "NCCL"),
    *(
        (
            what,
            file,
            [f"variants/{name}/loads/0.6/token_p50" for name in ("original", "original, host sums")],
            "stock vLLM",
        )
        for what, file in (
            ("Llama-3 8B, no NVLink, nothing converted, these all-reduces, random arrivals: median TPOT", _ARRIVALS),
            ("the same, both with CUDA graphs for such prompts", _GRAPHED_ARRIVALS),
        )
    ),
    *(
        (what, file, [f"milliseconds/{one}/{figure}", f"milliseconds/{other}/{figure}"], beside)
        for what, file, figure, one, other, beside in (
            (
                "Llama-3 8B, no NVLink, **nothing converted**, these all-reduces: TPOT, many requests",
                *(_TURNS, "step of 64", "stock", "stock, host sums", "stock vLLM"),
            ),
            ("the same in a later run", _AGAIN, "step of 64", "stock", "stock, host sums", "stock vLLM"),
            (
                "the same with INT4 weights",
                *(_OTHERS, "step of 64", "llama3-8b:32:w4a16, stock", "llama3-8b:32:w4a16, stock, host sums"),
                "stock vLLM",
            ),
            (
                "with INT4 weights and INT8 all-reduces: TTFT, short prompts at once",
                *(_OTHERS, _SHORT, "llama3-8b:32:w4a16, stock", "llama3-8b:32:w4a16, stock, host sums in int8"),
                "stock vLLM",
            ),
            (
                "width of Llama-3 70B in FP8, nothing converted, these all-reduces: TPOT, many requests",
                *(_FP8, "step of 64", "stock", "stock, host sums", "stock vLLM"),
            ),
            (
                "16 layers of Qwen3-30B-A3B, nothing converted, these all-reduces: TTFT, short prompts at once",
                *(_EXPERTS, _SHORT, "stock", "stock, host sums", "stock vLLM"),
            ),
            (
                "width of Llama-3 70B, four GPUs, nothing converted, these all-reduces: TPOT, many requests",
                *(_WIDE, "step of 64", "stock", "stock, host sums", "stock vLLM"),
            ),
            (
                "the same, `ladder` with INT8 all-reduces: TPOT, many requests",
                *(_WIDE, "step of 64", "stock", "ladder, host sums in int8", "stock vLLM"),
            ),
            (
                "the same: TTFT, long prompts",
                *(_WIDE, _LONG, "stock, stages", "ladder, host sums in int8", "pipeline stages"),
            ),
            (
                "Llama-3 8B, `ladder` with INT8 all-reduces, no NVLink: TTFT, long prompts",
                *(_TURNS, _LONG, "stock with NVLink", "ladder, host sums in int8", "stock vLLM **with** NVLink"),
            ),
            (
                "the same in a later run",
                *(_AGAIN, _LONG, "stock with NVLink", "ladder, host sums in int8", "stock vLLM **with** NVLink"),
            ),
        )
    ),
)


def page_blocks(root: Path) -> dict[str, dict[str, str]]:
    """The text of each block by its name, by page."""
    return {
        "README.md": {"advise": advised(), "situations": situations(root)},
        "docs/quality.md": {"losses": lost_points()},
        "docs/quantised_models.md": {"int4": int4(root), "nf4": in_nf4()},
        "docs/serving.md": {"refused": refused(), "served types": served_types()},
        "benchmarks/results/host_goals.md": {"goals": goals(root)},
        "benchmarks/results/vllm_right.md": {"quantised kernels": quantised_kernels(root), "drafts": drafts(root)},
        **host_blocks(root),
    }


def advised() -> str:
    """What `fcsd advise` prints for a model that fits each of two consumer cards."""
    words = ["advise", "Llama-3.1-8B-Instruct", "--gpu", "RTX 4090", "--gpus", "2"]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        config = packaged_config(ADVISED)
        if config is None:
            raise ValueError(f"fcsd has no config of {ADVISED}")
        config.save_pretrained(words[1])
        done = CliRunner().invoke(app, words)
    if done.exit_code:
        raise ValueError(done.output)
    command = " ".join(f'"{word}"' if " " in word else word for word in words)
    return f"```text\n# fcsd {command}\n{done.stdout}```\n"


def quantised_kernels(root: Path) -> str:
    """How far vLLM is from transformers with the same weights, by method and kernels, converted and not."""
    parts = json.loads((root / real.RESULTS / _KERNELS).read_text()).values()
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in (row for part in parts for row in part["rows"]):
        model, _, method = row["case"].partition("-")
        kernels = ", ".join(name.removesuffix("Kernel") for name in row["computed_by"])
        found.setdefault((model, method, f"{row['dtype']}, {row['mode']}", kernels), {})[row["role"]] = row
    body = []
    for what, roles in found.items():
        both = [roles[role] for role in ("converted", "original")]
        shown = [
            (f"{row['rms']:.2g}" if row["right"] else f"**{row['rms']:.2g}**", f"{row['tolerance']:.2g}")
            for row in both
        ]
        body.append([*what, *(value for pair in shown for value in pair)])
    head = ["model", "method", "dtype, mode", "kernels", "converted", "may be", "original", "may be"]
    return table(head, body, left=4) + "\n"


def int4(root: Path) -> str:
    """How far each form of SmolLM2-135M that was measured is from the original."""
    lines = map(json.loads, (root / real.RESULTS / _INT4).read_text().splitlines())
    # A form that lost and was removed is in LOG.md.
    return quantised.table([line for line in lines if not line.get("form", "").endswith("+rerounded")]) + "\n"


def drafts(root: Path) -> str:
    """How many drafts of a small EAGLE head were accepted, before healing and after it."""
    lines = map(json.loads, (root / real.RESULTS / _DRAFTS).read_text().splitlines())
    body = [[line["target"], line["head"], f"{line['acceptance']:.1%}"] for line in lines]
    return table(["model", "head trained on", "drafts accepted"], body, left=2) + "\n"


def in_nf4() -> str:
    """What `fcsd plan` counts for adapters beside a model's weights in NF4, on several sorts of GPUs."""
    body = []
    with tempfile.TemporaryDirectory() as folder:
        config = packaged_config(IN_NF4)
        if config is None:
            raise ValueError(f"fcsd has no config of {IN_NF4}")
        config.save_pretrained(folder)
        for gpus, memory, length in NF4_ON:
            changes = (f"model={folder}", *NF4_RUN, f"data.seq_len={length}")
            plan = plan_run(load_recipe("llama3.3-70b-ladder", list(changes)).recipe, Hardware(gpus, memory=memory))
            whole, held = (f"{size / GIB:.1f}" for size in (plan.memory.total, plan.memory.peak.weights))
            hours = f"{plan.speed.hours:.1f}" if plan.memory.fits else ""
            body.append([f"{gpus} x {memory} GB", f"{length}", whole, held, "yes" if hours else "no", hours])
    head = ["GPUs", "`data.seq_len`", "GiB of each", "weights", "fits", "hours, were they H200s"]
    return table(head, body, left=1) + "\n"


def situations(root: Path) -> str:
    """A row for each situation with one number."""
    body = []
    for what, file, places, beside in SITUATIONS:
        raw = json.loads((root / real.RESULTS / file).read_text())
        ratio, *other = (_at(raw, place) for place in places)
        ratio /= other[0] if other else 1.0
        body.append([what, f"{ratio:.2f}x of {beside}", f"[raw]({real.RESULTS / file})"])
    found = {run["count"]: run for run in real.best(list(real.read(root).values()))}
    for count, layers in ((15, "half of the layers"), (real.DEPTH, "all layers")):
        points, error = found[count]["lost"]
        what = f"quality of SmolLM2-135M after healing, `ladder` on {layers}"
        body.append([what, f"{-points:.1f} ± {error:.1f} points lost", f"[page]({real.PAGE})"])
    return table(["situation", "figure", "from"], body, left=1) + "\n"


def _at(raw: Any, place: str) -> float:
    """The number at a place, or the median of the numbers there."""
    for key in place.split("/"):
        raw = raw[key]
    return statistics.median(raw) if isinstance(raw, list) else float(raw)


def lost_points() -> str:
    """Every healed conversion that is known, the papers' and ours, with the points that each benchmark lost."""
    named = ("MMLU", "GSM8K", "HumanEval+", "HellaSwag")
    head = ["model", "wiring", "layers", "tokens", *named, "mean", "source"]
    body = []
    for row in losses():
        lost = ["-" if (points := row.lost(name)) is None else f"{points:.1f}" for name in named]
        tokens = f"{row.tokens_b:g} B" if row.tokens_b >= 0.1 else f"{1e3 * row.tokens_b:g} M"
        source = row.source
        if source.startswith("fcsd, "):
            source = f"[ours](../{source.removeprefix('fcsd, ')})"
        body.append([row.model, row.wiring, f"{row.share:.0%}", tokens, *lost, f"{row.mean:.1f}", source])
    return table(head, body, left=2) + "\n"


def refused() -> str:
    """What vLLM does for an original alone; the messages of the plugin are made of the same rows."""
    rows = [[lost.what, f"`{lost.option}`"] for lost in LOST.values()]
    return table(["what", "asked by"], rows, left=2) + "\n"


def served_types() -> str:
    """How many architectures the plugin serves."""
    return f"The plugin serves {sum(arch.no_vllm is None for arch in ARCHS.values())} model types.\n"
