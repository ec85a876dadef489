"""What all commands share: results go to stdout, and an error is printed as one line and a hint, with an exit code.

With `-v`, the traceback of an error is printed too.
"""

import contextlib
import contextvars
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, signature
from itertools import chain
from typing import Annotated, Any, TextIO, get_type_hints

import typer

from fcsd.cli.panels import QUIET_NAMES, VERBOSE_NAMES, PanelCommand
from fcsd.errors import DiskError, PreemptedError, Stopped
from fcsd.foreign_errors import reason_of, translate
from fcsd.launch.world import first_rank
from fcsd.terminal import printable

SHARED = [  # by all commands
    Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, typer.Option(*names, help=text)])
    for name, names, text in (
        ("verbose", VERBOSE_NAMES, "Show tracebacks."),
        ("quiet", QUIET_NAMES, "Print results, warnings and errors alone."),
    )
]

_SLOW = 1.0  # seconds after which a user wants to see something
_FIRST_RANK_SPEAKS = 5  # seconds that the other processes of a machine wait before they print their error

_DATA: contextvars.ContextVar[TextIO] = contextvars.ContextVar("stdout of the running command")


def emit(text: object, end: str = "\n") -> None:
    """Prints a command's result to stdout; anything else that is printed goes to stderr.

    A control character, which a terminal would obey, is printed escaped; line feeds and tabs stay. So is a character
    that stdout's encoding does not have, as in a file name that is not UTF-8.

    Raises:
        DiskError: stdout is a file that cannot be written.
        BrokenPipeError: nobody reads stdout any more.
    """
    stream = _DATA.get()
    encoding = stream.encoding or "utf-8"
    shown = printable(str(text)).encode(encoding, "backslashreplace").decode(encoding)
    try:
        print(shown, end=end, file=stream, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DiskError(
            f"the result cannot be printed: {error.strerror}",
            "The command's own files are complete. Only its standard output has to go elsewhere.",
        ) from error


def command(group: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a command, gives it `-v` and `-q`, and ends its errors in one line, a hint and their exit code.

    A parameter whose type is a dataclass stands for options: each field is one, with its name, type and default.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = signature(function)
        groups: dict[str, Any] = {p.name: p.annotation for p in own.parameters.values() if is_dataclass(p.annotation)}

        @functools.wraps(function)
        def guarded(*, verbose: bool, quiet: bool, **options: object) -> None:
            logging.basicConfig(format="%(message)s", stream=sys.stderr)
            for library in ("huggingface_hub", "datasets"):  # they print their messages themselves
                logging.getLogger(library).propagate = False
            level = logging.WARNING if quiet else logging.INFO
            logging.getLogger("fcsd").setLevel(logging.DEBUG if verbose else level)
            if quiet:
                show_no_bars()
            if sys.stdout is None:  # the caller has closed it
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            _DATA.set(sys.stdout)
            try:
                for group_name, of in groups.items():
                    options[group_name] = of(**{field.name: options.pop(field.name) for field in fields(of)})
                # Libraries print and log to stdout.
                with contextlib.redirect_stdout(sys.stderr), ended_by_signals(), said_if_slow():
                    function(**options)
            except BrokenPipeError:
                raise  # `fcsd recipes show tiny | head` is not an error; typer exits without a message
            except (KeyboardInterrupt, Stopped, Exception) as error:
                if verbose:
                    traceback.print_exc()
                sys.exit(report_error(error))

        spread = chain.from_iterable(
            _fields_of(p.annotation) if p.name in groups else [p] for p in own.parameters.values()
        )
        parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in spread]
        guarded.__signature__ = own.replace(parameters=[*parameters, *SHARED])  # type: ignore[attr-defined]
        group.command(name, cls=PanelCommand)(guarded)
        return function

    return register


@contextlib.contextmanager
def said_if_slow() -> Iterator[None]:
    """On a terminal, says after a second that torch is being imported, which shows nothing itself."""

    def say() -> None:
        if "torch" in sys.modules:
            print("loading torch and transformers", file=sys.stderr)

    timer = threading.Timer(_SLOW, say)
    timer.daemon = True
    if sys.stderr.isatty() and "WORLD_SIZE" not in os.environ:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _fields_of(options: type) -> Iterator[Parameter]:
    """A parameter for each field of a dataclass."""
    types = get_type_hints(options, include_extras=True)
    for field in fields(options):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if default is MISSING else default,
            annotation=types[field.name],
        )


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does: what it has begun is removed, and what it has started ends.

    A signal that somebody handles already, or that `nohup` ignores, stays as it is. Python drops an error that is
    raised while it frees an object, so a signal that arrives there is sent again.
    """
    process = os.getpid()
    report_dropped = sys.unraisablehook

    def end(number: int, frame: object) -> None:
        if os.getpid() != process:  # a copy of this process, which does not report
            os._exit(128 + number)
        error = KeyboardInterrupt() if number == signal.SIGINT else Stopped(number)
        if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
            os._exit(report_error(error))  # torch's C++ aborts the process when its import is interrupted
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)  # a launcher may repeat it while files are removed
        raise error

    def repeat(dropped: "sys.UnraisableHookArgs") -> None:
        error = dropped.exc_value
        if not isinstance(error, (KeyboardInterrupt, Stopped)):
            report_dropped(dropped)
            return
        number = error.exit_code - 128 if isinstance(error, Stopped) else signal.SIGINT
        if number in free:
            signal.signal(number, end)
            threading.Timer(0.02, os.kill, (process, number)).start()

    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    here = threading.current_thread() is threading.main_thread()
    free = {number: handler for number, handler in usual.items() if here and signal.getsignal(number) == handler}
    for number in free:
        signal.signal(number, end)
    if free:
        sys.unraisablehook = repeat
    try:
        yield
    finally:
        if free:
            sys.unraisablehook = report_dropped
        for number, handler in free.items():
            signal.signal(number, handler)


def report_error(error: BaseException) -> int:
    """Prints an error to stderr and returns the exit code that goes with it."""
    known = translate(error)
    if isinstance(error, KeyboardInterrupt):
        message, hint, code = "interrupted", None, 128 + signal.SIGINT
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return code  # the command that started this process, or torchrun, reports it once for all
    elif isinstance(error, Stopped):
        message, hint, code = f"stopped by {error.name}", None, error.exit_code
        if not first_rank():
            return code
    elif known is not None:
        message, hint, code = str(known), known.hint, known.exit_code
    else:
        message, hint, code = f"{type(error).__name__}: {reason_of(error)}", "-v shows the traceback", 1
    rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    later = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0"
    if later and not isinstance(known, PreemptedError):  # who preempts a run does not wait
        # An error that all processes find is said once: when the first process of a machine has failed, torchrun ends
        # the others, which still wait here.
        time.sleep(_FIRST_RANK_SPEAKS)
    print(f"{rank}{_coloured('error:', typer.colors.RED)} {printable(message)}", file=sys.stderr)
    if hint:
        print(f"{rank}{_coloured('hint:', typer.colors.CYAN)} {printable(hint)}", file=sys.stderr)
    return code


def _coloured(word: str, colour: str) -> str:
    """A word of a message, in colour on a terminal unless NO_COLOR is set; see https://no-color.org."""
    return typer.style(word, fg=colour) if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else word


def show_no_bars() -> None:
    """Keeps the progress bars of other libraries from stderr."""
    for variable in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(variable, "1")
