"""Groups the options of commands with many of them under headings, in the help and in docs/reference.

Typer's own panels need rich's markup, whose boxes do not fit the plain help of fcsd.
"""

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from typer.core import TyperCommand, TyperGroup

# Of the options that every command has.
VERBOSE_NAMES, QUIET_NAMES = ("--verbose", "-v"), ("--quiet", "-q")
VERSION_NAMES = {"--version", "-V"}  # of fcsd itself, wherever they stand
# What options were called, and what they are now. A command that has an option of the first name means that one.
RENAMED = {
    "--tp": "--gpus",
    "--tp-degree": "--gpus",
    "--reduce": "--all-reduce",
    "--sums": "--all-reduce",
    "--prompts": "--prompt-tokens",
    "--arrivals": "--concurrency",
    "--layers": "--depth",
}
MANY = 12  # a command with fewer options shows them in one list
ALL, REST = "Options", "Other options"  # the headings of a command with few options, and of what PANELS do not name

# heading -> names of parameters, in any command
PANELS = {
    "Recipe": "recipe_name sweep sets output_dir seed resume",
    "Questions": "suite tasks num_fewshot apply_chat_template data_mirror held_out limit",
    "Comparison": "baseline untrained margin require",
    "Layers and wiring": "layers wiring wirings variant border distance reduce",
    "Size of the work": "batch_size max_length tokens rounds prompt_tokens concurrency answer batches loads minutes "
    "depth heal_hours",
    "Machine": "gpus launch join_timeout ep_size device dtype backend generation ep dp all_reduce",
    "Output": "out log_samples dry_run as_json",
}
_MEANT = {"heal": "distill", "train": "distill", "rewire": "convert", "evaluate": "eval", "score": "eval"}
_TYPE = re.compile(r" <(?:list\[)?(int|float|str|path)\b.*>")
_WORDS = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT", "path": "PATH"}
_HEADINGS = {name: heading for heading, names in PANELS.items() for name in names.split()}


def panels(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    """The options among a command's parameters by heading, in the order of ``PANELS``; the rest comes last."""
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    if len(options) < MANY:
        return {ALL: options}
    found = {heading: [o for o in options if _HEADINGS.get(o.name, REST) == heading] for heading in (*PANELS, REST)}
    return {heading: group for heading, group in found.items() if group}


class Commands(TyperGroup):
    """A group whose help has the whole first sentence of each command, and which knows other words for commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands; typer would cut their sentences to one line."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(limit=200)) for name, one in self.commands.items()])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes ``-V`` anywhere, and ``-v`` and ``-q`` of a command before its name and in a group of commands, too."""
        own = list(takewhile(lambda word: word != "--", args))
        if ctx.parent is None and not VERSION_NAMES.isdisjoint(own):  # behind the command's name, too
            return super().parse_args(ctx, ["--version"])
        before = list(takewhile(lambda word: word.startswith("-"), own))
        moved = [word for word in before if word in (*VERBOSE_NAMES, *QUIET_NAMES)]
        if moved and len(before) < len(args):
            args = [word for word in before if word not in moved] + args[len(before) :]
            after = len(before) - len(moved) + 1  # the command's name
            args = [*args[:after], *moved, *args[after:]]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command; the error of an unknown one names the nearest by its letters, or by its meaning."""
        if (meant := _MEANT.get(args[0])) in self.commands and args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant!r}?")
        return super().resolve_command(ctx, args)


class PanelCommand(TyperCommand):
    """A command whose help lists its options under headings, and which takes options by their earlier names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Writes the options before ``--`` by the names of ``RENAMED`` that the command has."""
        known = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        own = list(takewhile(lambda word: word != "--", args))
        for place, word in enumerate(own):
            name, *value = word.split("=", 1)
            if name not in known and RENAMED.get(name) in known:
                own[place] = "=".join([RENAMED[name], *value])
        return super().parse_args(ctx, own + args[len(own) :])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The options and arguments of the first line, without typer's braces around what is required."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"\.\.\.([\]}])\.\.\.$", r"...\1", piece).strip("{}") for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then the options of each heading."""
        parameters = self.get_params(ctx)
        arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
        for heading, group in {"Arguments": arguments, **panels(parameters)}.items():
            records = [(one, record) for one in group if (record := one.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(heading):
                    formatter.write_dl([(_named(one, name), text) for one, (name, text) in records])


def _named(parameter: Any, name: str) -> str:
    """What typer calls a parameter, with words such as INTEGER for ``<int range>``; an argument needs none."""
    return _TYPE.sub("" if parameter.param_type_name == "argument" else lambda found: f" {_WORDS[found[1]]}", name)
