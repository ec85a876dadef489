"""Groups the options of commands with many of them under headings, in the help and in docs/reference.

Typer's own panels need rich's markup, whose boxes do not fit the plain help of fcsd.
"""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand

MANY = 12  # a command with fewer options shows them in one list
ALL, REST = "Options", "Other options"  # the headings of a command with few options, and of what PANELS do not name

# heading -> names of parameters, in any command
PANELS = {
    "Recipe": "recipe_name sweep sets output_dir seed resume",
    "Questions": "suite tasks num_fewshot apply_chat_template data_mirror held_out text limit",
    "Comparison": "baseline untrained margin require",
    "Layers and wiring": "layers wiring wirings variant variants border distance tp_degree reduce quantised dedup "
    "routers",
    "Size of the work": "batch_size max_length micro_batch seq accumulation tokens points rounds steps recompute "
    "no_optimizer lengths arrivals answer batches loads minutes heal_hours",
    "Machine": "gpus nodes node_rank node_size rendezvous slurm join_timeout ep_size device dtype backend generation "
    "gpu_mem price mfu machine no_compile tp ep dp engine",
    "Output": "out log_samples picture trace dry_run as_json",
}
_HEADINGS = {name: heading for heading, names in PANELS.items() for name in names.split()}


def panels(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    """The options among a command's parameters by heading, in the order of ``PANELS``; the rest comes last."""
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    if len(options) < MANY:
        return {ALL: options}
    found = {heading: [o for o in options if _HEADINGS.get(o.name, REST) == heading] for heading in (*PANELS, REST)}
    return {heading: group for heading, group in found.items() if group}


class PanelCommand(TyperCommand):
    """A command whose help lists its options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then the options of each heading."""
        parameters = self.get_params(ctx)
        arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
        for heading, group in {"Arguments": arguments, **panels(parameters)}.items():
            if records := [record for one in group if (record := one.get_help_record(ctx)) is not None]:
                with formatter.section(heading):
                    formatter.write_dl(records)
