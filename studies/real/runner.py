"""What the programs of this folder share: models in memory, texts as rows of token ids, and files of results."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fcsd.disk import append
from fcsd.models.build import load_model

SEQ = 1024
HELD_OUT_ROWS = 128
LOGITS = 1 << 28  # of the rows that a GPU measures at once: 1 GiB in fp32


def loaded(path: Path) -> Any:
    """A model in evaluation, on a GPU in bfloat16, on a CPU in float32."""
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    return load_model(path, dtype=dtype, device="cuda" if cuda else "cpu").eval()


def machine() -> dict[str, Any]:
    """What a result says of the machine that it was measured on."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"machine": name, "torch": torch.__version__}


def store(file: Path, line: dict[str, Any]) -> None:
    """Add a line of JSON to the results of a program, which may go on after an interruption."""
    append(file, json.dumps(line) + "\n")


def stored(file: Path) -> list[dict[str, Any]]:
    """The lines of such a file; none if there is no file yet."""
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()] if file.exists() else []


def measure(student: Path, teacher: Path, texts: dict[str, Path], rows: int = HELD_OUT_ROWS) -> dict[str, Any]:
    """``divergences`` of two directories of models."""
    return divergences(*map(loaded, (student, teacher)), texts, rows)


def divergences(
    student: Any, teacher: Any, texts: dict[str, Path], rows: int = HELD_OUT_ROWS, seq: int = SEQ
) -> dict[str, Any]:
    """KL(teacher || student) and both losses in nats per token, on ``rows`` held-out rows of every text.

    Rows are packed as in training, but attention reads over the borders of documents, for both models alike.
    """
    device = student.device
    # One row is enough work for a CPU, and the host starts the kernels of a row in about the time that a GPU takes.
    at_once = max(1, LOGITS // (seq * student.config.get_text_config().vocab_size)) if device.type == "cuda" else 1
    found = {}
    for name, folder in texts.items():
        held_out = token_rows(folder / "held_out", rows * seq, seq).to(device)
        sums = torch.zeros(3, dtype=torch.float64)
        for batch in held_out.split(at_once):
            with torch.no_grad():
                own, theirs = (
                    functional.log_softmax(model(batch).logits[:, :-1].float(), -1) for model in (student, teacher)
                )
            kl = (theirs.exp() * (theirs - own)).sum(-1)
            losses = [-log.gather(-1, batch[:, 1:, None]) for log in (own, theirs)]
            sums += torch.stack([value.double().sum().cpu() for value in (kl, *losses)])
        tokens = held_out.shape[0] * (held_out.shape[1] - 1)
        found[name] = dict(zip(("kl", "loss", "teacher_loss"), (sums / tokens).tolist(), strict=True))
        found[name]["tokens"] = tokens
    return found


def token_rows(folder: Path, tokens: int, seq: int = SEQ) -> Tensor:
    """The first ids of a part of a text, at most ``tokens``, in rows ``[rows, seq]``; a short text is one row."""
    import pyarrow.parquet as pq

    ids: list[int] = []
    for file in sorted(folder.glob("*.parquet")):
        for row in pq.read_table(file)["input_ids"]:
            ids += row.as_py()
            if len(ids) >= tokens:
                break
    ids = ids[:tokens]
    seq = min(seq, len(ids))
    return torch.tensor(ids[: len(ids) // seq * seq]).view(-1, seq)
