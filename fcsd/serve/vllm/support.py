"""Says which versions of vLLM the plugin supports, and whether this environment can serve a converted model."""

import os
from importlib.metadata import entry_points

from fcsd.errors import ConfigError
from fcsd.extras import require_extra

GROUP = "vllm.general_plugins"  # the group of entry points that every process of vLLM loads
# The first supported version, and the first one that is not supported. pyproject.toml admits a part of this range.
OLDEST, TOO_NEW = (0, 24), (0, 29)
# ``fcsd serve`` and ``fcsd eval`` set this variable, so that the plugin refuses reductions with wrong results.
RIGHT_RESULTS = "FCSD_RIGHT_RESULTS"
INSTALL = "Run pip install 'fcsd[vllm]'."


def version_of(version: str) -> tuple[int, ...]:
    """Major and minor number of a version such as ``0.28.0+cpu``."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def why_unsupported(version: str) -> str | None:
    """One line that says why the plugin does not work with this version of vLLM; None if it does."""
    if OLDEST <= version_of(version) < TOO_NEW:
        return None
    oldest, too_new = (".".join(map(str, edge)) for edge in (OLDEST, TOO_NEW))
    return f"fcsd's plugin needs vLLM >={oldest},<{too_new}, not {version}: converted models cannot be served"


def require_vllm(what: str, *, rewired: bool) -> None:
    """Check that vLLM can be started here, and that it will load fcsd's plugin if the model needs it.

    Args:
        what: the command or option that needs vLLM, for the message.
        rewired: whether the model is a converted one.

    Raises:
        ConfigError: vLLM or the plugin is missing, or the plugin does not support the version of vLLM.
    """
    require_extra("vllm", what)
    if not rewired:
        return
    plugins = {plugin.name for plugin in entry_points(group=GROUP) if plugin.value.startswith("fcsd.")}
    if not plugins:
        raise ConfigError(f"{what}: vLLM serves converted models only with fcsd's plugin", INSTALL)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not plugins & set(allowed.split(",")):
        raise ConfigError(f"{what}: VLLM_PLUGINS={allowed} leaves fcsd's plugin out", "Add fcsd to it, or unset it.")
    if problem := why_unsupported(installed_version()):
        raise ConfigError(f"{what}: {problem}", INSTALL)


def installed_version() -> str:
    """The version of the installed vLLM, whatever its distribution is called. The call imports vLLM's top package."""
    from vllm import __version__  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    return __version__
