"""The on-policy tail against forward KL at equal tokens: the last share of a run on text that the student wrote.

    python -m studies.real.on_policy run TEACHER OUT --own DIR --set KEY=JSON
    python -m studies.real.on_policy page

For each seed a conversion heals by KL on text of its teacher (DIR, as ``fcsd write`` leaves it), and writes text. From
there its tails go on: by KL on more text of the teacher, and by KL, reverse KL and the Jensen-Shannon divergence on the
student's text. ``whole`` is one run of the same tokens by KL without a break. Every model is measured on text of its
teacher that none has read, and on text that it then writes itself (``self``). ``OUT/results.jsonl`` receives a line for
each; the same command goes on. The last command writes the table of the stored results into
``docs/objectives.md``.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from studies.real.heal import heal, measure

from fcsd.markdown import table as markdown_table

PAGE = Path("docs/objectives.md")
RAW = Path("benchmarks/results/on_policy_bundled_cpu.json")
PARTS = {"first": (0.0, 0.57), "second": (0.57, 0.95), "unread": (0.95, 1.0)}  # of the teacher's text
TAILS = {  # the text and the divergence
    "own-kl": ("second", "kl"),
    "student-kl": ("student", "kl"),
    "student-reverse": ("student", "reverse_kl"),
    "student-jsd": ("student", "jsd"),
}
BASE, WHOLE = "base", "whole"
TITLES = {
    BASE: "none: the run before it",
    WHOLE: "KL on the teacher's text, in one run",
    "own-kl": "KL on the teacher's text, a run of its own",
    "student-kl": "KL on the student's text",
    "student-reverse": "reverse KL on the student's text",
    "student-jsd": "JSD on the student's text",
}
COLUMNS = {  # the text and the divergence on it
    "KL(teacher ‖ student), teacher's text": ("unread", "kl"),
    "KL(student ‖ teacher), teacher's text": ("unread", "reverse_kl"),
    "KL(student ‖ teacher), text of the model itself": ("self", "reverse_kl"),
}


def main() -> None:
    """Run the study, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("teacher", nargs="?", type=Path)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--own", type=Path, help="text of the teacher")
    parser.add_argument("--wiring", default="farskip")
    parser.add_argument("--layers", default="all")
    parser.add_argument("--tokens", type=float, default=122880, help="with the tail")
    parser.add_argument("--tail", type=float, default=24576, help="tokens of the tail")
    parser.add_argument("--judged", type=int, default=12000, help="tokens that each model writes to be judged")
    parser.add_argument("--batch", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a document")
    parser.add_argument("--write-batch", type=int, default=128, help="documents written at a time")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tail-lr", type=float, default=3e-4)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="of every recipe")
    given = parser.parse_args()
    if given.what == "page":
        PAGE.write_text(filled(PAGE.read_text(), json.loads(RAW.read_text())))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    texts = parted(given.own, given.out)
    for seed in map(int, given.seeds.split(",")):
        study(given, texts, seed)


def cases(given: argparse.Namespace, seed: int) -> dict[str, dict[str, Any]]:
    """The cases of one seed, as ``studies.real.heal`` reads them, the first one before the others."""
    settings = {key: json.loads(value) for key, _, value in (text.partition("=") for text in given.set)}
    how = {"wiring": given.wiring, "layers": given.layers, "batch": given.batch, "seed": seed}
    first = given.tokens - given.tail
    found = {BASE: {**how, "text": "first", "tokens": first, "lr": given.lr, "set": settings}}
    for name, (text, divergence) in TAILS.items():
        own = {**settings, "optim.warmup_steps": 1, "objective.divergence": divergence}
        found[name] = {**how, "from": f"{BASE}-{seed}", "text": text, "tokens": given.tail, "lr": given.tail_lr}
        found[name]["set"] = own
    found[WHOLE] = {**how, "text": "first+second", "tokens": given.tokens, "lr": given.lr, "set": settings}
    return {name: {"name": f"{name}-{seed}", **case} for name, case in found.items()}


def study(given: argparse.Namespace, texts: dict[str, Path], seed: int) -> None:
    """Heal and measure the models of one seed that have no result yet."""
    results = given.out / "results.jsonl"
    ended = {json.loads(line)["name"] for line in results.read_text().splitlines()} if results.exists() else set()
    texts = dict(texts)
    for name, case in cases(given, seed).items():
        if case["name"] not in ended:
            found = heal(case, given.teacher, given.out, texts, None, 0, dict(os.environ))
            final = given.out / case["name"] / "run" / "final"
            judged = write(given, final, given.out / case["name"] / "self", given.judged, 77)
            found["kl"] |= measure(final, given.teacher, {"self": judged})
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")
        if name == BASE:
            final = given.out / case["name"] / "run" / "final"
            texts["student"] = write(given, final, given.out / f"text-{seed}", int(given.tail * 1.06), seed)


def write(given: argparse.Namespace, model: Path, out: Path, tokens: int, seed: int) -> Path:
    """Text of a model in a directory whose ``held_out`` has all of it."""
    how = ["--max-tokens", given.max_tokens, "--batch-size", given.write_batch, "--seed", seed]
    command = [sys.executable, "-m", "fcsd", "write", model, "--tokens", tokens, *how, "--out", out]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    shutil.copytree(out / "train", out / "held_out", dirs_exist_ok=True)
    return out


def parted(own: Path, out: Path) -> dict[str, Path]:
    """The parts of the teacher's text, in directories as ``studies.real.heal`` takes them."""
    import pyarrow.parquet as pq

    whole, held_out = (pq.read_table(own / part) for part in ("train", "held_out"))
    for name, (begin, end) in PARTS.items():
        start, stop = round(begin * whole.num_rows), round(end * whole.num_rows)
        part = whole.slice(start, stop - start)
        for kind, table in (("train", part), ("held_out", part if name == "unread" else held_out)):
            (out / name / kind).mkdir(parents=True, exist_ok=True)
            pq.write_table(table, out / name / kind / "part-00000.parquet")
    return {name: out / name for name in PARTS}


def table(raw: dict[str, Any]) -> str:
    """Markdown with a row for each tail: means over the seeds and their standard deviations, in nats per token."""
    body = []
    for name, title in TITLES.items():
        runs = [run["kl"] for run in raw["runs"] if run["name"].rsplit("-", 1)[0] == name]
        values = [[kl[text][kind] for kl in runs] for text, kind in COLUMNS.values()]
        body.append([title, *(f"{statistics.mean(found):.3f} ± {statistics.stdev(found):.3f}" for found in values)])
    return markdown_table(["the last 20 % of the tokens", *COLUMNS], body, left=1) + "\n"


def filled(page: str, raw: dict[str, Any]) -> str:
    """The page with the table of the stored runs."""
    begin, end = "<!-- tails -->\n", "<!-- end of tails -->\n"
    before, rest = page.split(begin)
    return before + begin + table(raw) + end + rest.split(end)[1]


if __name__ == "__main__":
    main()
