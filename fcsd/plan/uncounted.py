"""Names what a recipe sets and the plan does not count."""

from fcsd.config import NO_METRIC, Recipe
from fcsd.plan.setup import Hardware


def uncounted(recipe: Recipe, hardware: Hardware, ranks: int = 1) -> list[str]:
    """A text for each setting that changes time, memory or disk in a way that the plan does not know.

    Settings whose effect the plan knows are fields of ``fcsd.plan.setup.Setup``. docs/planning.md lists both kinds.

    Args:
        ranks: those of a Desync wiring.
    """
    train, parallel, divided = recipe.train, recipe.parallel, recipe.parallel.ep_size > 1
    found = {
        "train.compile: compiled layers start fewer kernels, and compiling takes minutes": train.compile,
        "train.adapter: the small kernels of the adapters, which the host starts": train.adapter is not None,
        "train.trace_every: steps that are profiled": train.trace_every > 0,
        "init.wiring: all-to-alls that the standard wiring exposes": divided and recipe.init.wiring == "standard",
        f"desync: each GPU computes {ranks} ranks of converted layers, in up to {ranks} times the time and memory": (
            ranks > parallel.tp_size
        ),
        "deterministic: slower kernels": recipe.deterministic,
        "objective.hidden: the overlap that the compared layers lose": divided and recipe.objective.hidden.weight > 0,
        "parallel.overlap: time that all-to-alls expose": divided and parallel.overlap != "on",
        "parallel.tp_size: time that all-reduces expose, and the activations that sharding saves": parallel.tp_size > 1,
        "parallel.dedup: what it saves and costs": parallel.dedup != "off",
        "parallel.quantised: what formats save and cost": parallel.quantised.any,
        "parallel.placement: searches and swaps of experts": parallel.placement.every > 0,
        "all-to-alls between nodes": parallel.ep_size > hardware.gpus,
        "early_stop: the run may end earlier; a step with the best score is saved in addition": (
            recipe.early_stop.metric != NO_METRIC
        ),
        "sweep: the trials before the run": recipe.sweep is not None,
    }
    return [text for text, is_set in found.items() if is_set]
