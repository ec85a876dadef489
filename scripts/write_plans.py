"""Writes the table of benchmarks/results/plan.md that says what healing large models takes, by the plans of recipes.

Run it after a change to `fcsd/plan/` or to one of these recipes. `tests/docs/test_plans.py` fails while the table is
out of date.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from fcsd.config import load_recipe
from fcsd.plan import of_one_rank, setup_for
from fcsd.plan.memory import memory
from fcsd.plan.model import MetaModel, of_rank
from fcsd.plan.setup import GIB, Hardware
from fcsd.plan.speed import speed

PAGE = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "plan.md"
PLACE = re.compile(r"(<!-- large models -->\n).*?(<!-- end -->)", re.DOTALL)
PRICE = 2.5  # dollars for a GPU and hour
MACHINES = ((8, 80), (8, 141), (4, 80), (4, 48))  # GPUs, and the memory of each in GB
SLOWER = 48  # GB of GPUs that compute more slowly than the plan assumes
TOKENS = (100e6, 300e6, 1e9)

SHARDED = ("parallel.tp_size={gpus}",)
ROUNDED = ("optim.moments=8bit",)
ADAPTERS = ("optim.train=[]", "parallel.tp_size=1", "train.adapter={{layers: converted, base: nf4}}")
EXPERTS = ("parallel.ep_size={gpus}",)
SHORT = ("data.seq_len=2048",)
# The settings to try, by recipe; {gpus} is the number of GPUs.
SETTINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "llama3.3-70b-ladder": (SHARDED, (*SHARDED, *ROUNDED), ADAPTERS, (*ADAPTERS, *SHORT)),
    "qwen3-32b-ladder": (SHARDED, (*SHARDED, *ROUNDED), (*SHARDED, "init.layers=last:24"), ADAPTERS),
    "qwen3-235b-a22b-farskip": (EXPERTS, (*EXPERTS, *SHORT)),
    "glm-4.5-air-farskip": (EXPERTS, (*EXPERTS, *SHORT)),
    "gpt-oss-120b-farskip": ((), SHORT),
}
MORE = {"gpt-oss-120b-farskip": ((1, 288),)}


def main() -> None:
    """Writes the table into the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """The text of the page with a new table."""
    assert PLACE.search(text), "the page has no lines <!-- large models --> and <!-- end -->"
    head = (
        "| recipe | GPUs | `--set` | GiB of each | tokens/s, predicted without all-reduces of `tp_size` | 100 M tokens "
        + "| 300 M | 1 B |\n"
        + "|---" * 8
        + "|"
    )
    return PLACE.sub(lambda found: found[1] + "\n".join([head, *rows()]) + "\n" + found[2], text)


def rows() -> Iterator[str]:
    """The rows of the table, in the order of ``SETTINGS``."""
    for name in SETTINGS:
        model = MetaModel(load_recipe(name).recipe.model, rewired=True)
        for gpus, size in (*MACHINES, *MORE.get(name, ())):
            yield (
                "| "
                + " | ".join([f"`{name}`", f"{gpus} x {size} GB", *cells(name, model, Hardware(gpus, 1, size))])
                + " |"
            )


def cells(name: str, model: MetaModel, hardware: Hardware) -> list[str]:
    """What stands in a row behind the recipe and the machine: the first settings that fit, or that none does."""
    needed: list[float] = []
    for settings in SETTINGS[name]:
        written = [setting.format(gpus=hardware.gpus) for setting in settings]
        recipe = load_recipe(name, written).recipe
        setup = setup_for(recipe, hardware.gpus, model)
        own, held = of_rank(model.numbers, setup.tp_size), of_one_rank(setup)
        taken = memory(own, own, model.layer_bytes(setup), held, hardware)
        needed.append(taken.total / GIB)
        if taken.fits:
            own_sizes = load_recipe(name).recipe.parallel
            default = {f"parallel.ep_size={own_sizes.ep_size}", f"parallel.tp_size={own_sizes.tp_size}"}
            shown = " ".join(f"`{one}`" for one in written if one not in default) or "as it is"
            rate = speed(own, own, held, hardware).tokens_per_second
            return [shown, f"{needed[-1]:.0f}", *figures(rate, hardware)]
    return ["nothing that was tried fits", f"{min(needed):.0f}, too much", *[""] * (1 + len(TOKENS))]


def figures(rate: float, hardware: Hardware) -> list[str]:
    """Tokens per second, and hours and dollars for each number of tokens; empty where the speed is not known."""
    if hardware.memory == SLOWER:
        return [""] * (1 + len(TOKENS))
    hours = [tokens / rate / 3600 for tokens in TOKENS]
    return [f"{rate:,.0f}", *(f"{each:.1f} h, ${each * hardware.gpus * PRICE:,.0f}" for each in hours)]


if __name__ == "__main__":
    main()
