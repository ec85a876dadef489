"""``fcsd bench serve`` as a whole: what is printed, and what the result says of the run."""

import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fcsd.bench import runner
from fcsd.bench.serve import choice, figures, table, under_vllm
from fcsd.bench.serve.model import config_of
from fcsd.bench.serve.workload import Workload
from fcsd.disk import write_json
from fcsd.errors import ConfigError
from fcsd.extras import require_extra
from fcsd.launch.environment import snapshot


def bench(
    load: Workload, out: Path | None = None, heal_hours: float | None = None, table_file: Path | None = None
) -> tuple[dict[str, Any], str]:
    """Measure a workload.

    Args:
        out: directory for ``serve.json``, which is written again as the run goes on, and for ``serve.png``. A
            ``serve.json`` that is there is kept as ``serve.1.json``, or with the next number.
        heal_hours: GPU-hours of healing, for the break-even.
        table_file: the file that gets the table of ways, see ``choice.check_table``. Nothing is written if the wiring
            was not timed in two ways.

    Returns:
        What ``serve.json`` holds, and the text to print. The content is ``workload``, ``command``, ``environment``
        (versions, GPUs and settings), ``link``, ``seconds``, ``complete``, ``variants`` with the milliseconds of each
        round, ``missing`` with a sentence for each, ``notes``, ``tables`` with the fastest way of each wiring for each
        size; and for each wired variant in ``ratios`` its speed over the best original, in ``verdicts`` the sentence
        (without the figures of ``says_nothing``, in which the bound itself is slower than the original), in
        ``load_verdicts`` one for each load, and in ``break_even_days`` when healing is won back, null if never.

    Raises:
        ConfigError: vLLM is missing, or the model cannot have a wiring.
        BadInputError: config.json cannot be read.
    """
    begun = time.monotonic()
    config = config_of(load.model, load.layers)
    facts: dict[str, Any] = snapshot()
    gpus = load.tp * load.dp
    command = shlex.join(["fcsd", *(runner.without_folders(word) for word in sys.argv[1:])])
    head = {"workload": runner.without_folders(asdict(load)), "command": command, "environment": facts}
    head["link"] = under_vllm.link()
    path = None if out is None else out / "serve.json"
    runner.set_aside(path, "serve.png")

    def write(found: Mapping[str, Any], complete: bool = False) -> None:
        runner.write(head | {"complete": complete} | stored(found, heal_hours, gpus), path)

    cards: Any = facts["gpus"]
    memory = int(min(card["memory_gib"] for card in cards) * 2**30) if cards else None
    found = under_vllm.bench(load, config, memory, write)
    choice.add_tables(load, found)
    head["seconds"] = round(time.monotonic() - begun, 1)
    write(found, complete=True)
    if table_file is not None and found["tables"]:
        write_json(table_file, runner.without_folders(choice.file_of(load, found, command)))
    if out is not None and table.ratios_of(found):
        try:
            require_extra("train", "serve.png", "matplotlib")
        except ConfigError as error:  # fcsd was installed beside vLLM with --no-deps
            found["notes"].append(str(error))
        else:
            table.draw(found, f"{load.model}, {gpus} GPUs", out / "serve.png")
    return head | {"complete": True} | stored(found, heal_hours, gpus), table.text(found, heal_hours, gpus)


def stored(found: Mapping[str, Any], heal_hours: float | None, gpus: int) -> dict[str, Any]:
    """What was found, with keys that JSON has, and what follows from it."""
    variants = {name: {**row, "rounds": figures.to_json(row["rounds"])} for name, row in found["variants"].items()}
    ratios = table.ratios_of(found)
    missing = {name: one.why for name, one in found["missing"].items()}
    result = runner.without_folders({**found, "variants": variants, "missing": missing})
    result["ratios"] = {name: figures.to_json(own) for name, own in ratios.items()}
    judged = table.judged_of(found)
    result["says_nothing"] = figures.to_json(table.says_nothing(found))
    result["verdicts"] = {name: figures.verdict(name, own) for name, own in judged.items()}
    result["load_verdicts"] = table.load_verdicts(found)
    if heal_hours is not None:
        days = {
            name: figures.break_even_days(heal_hours, figures.overall(own) or 1.0, gpus) for name, own in judged.items()
        }
        result["break_even_days"] = {name: None if day == float("inf") else day for name, day in days.items()}
    return result
