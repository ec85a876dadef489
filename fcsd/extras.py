"""The optional parts of the installation, and the error of what needs a part that is not installed.

`fcsd` alone is enough to inspect, convert, plan, export and push, and for the plugin of vLLM. Every other package
stands in an extra of pyproject.toml.
"""

from importlib.util import find_spec

from fcsd.errors import ConfigError

# Extra -> the packages that it adds, by the names under which they are imported.
EXTRAS = {
    "train": ("accelerate", "datasets", "deepspeed", "matplotlib", "peft", "pyarrow", "scipy"),
    "eval": ("accelerate", "datasets", "evalplus", "lm_eval", "matplotlib", "psutil", "pyarrow", "scipy"),
    "quantise": ("datasets", "llmcompressor", "pyarrow"),
    "nf4": ("bitsandbytes",),
    "vllm": ("vllm",),
    "track": ("tensorboard", "trackio", "wandb"),
}


def require_extra(extra: str, what: str, *packages: str) -> None:
    """Checks that packages are installed, without importing them. A command calls this before it writes anything.

    Args:
        what: the command, option or recipe field that needs them, for the message.
        packages: the names under which they are imported; without any, all packages of the extra.

    Raises:
        ConfigError: a package is not installed. The message says how to install it.
    """
    if missing := [package for package in packages or EXTRAS[extra] if find_spec(package) is None]:
        raise ConfigError(f"{what} needs {', '.join(missing)}: pip install 'fcsd[{extra}]'")
