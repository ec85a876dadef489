"""What every command that takes a base model asks of it first, in one call for the tests."""

from dataclasses import dataclass

from fcsd.checkpoint import CheckpointConfig, Comparison, Layout, read_config, read_layout, resolve, verify_tensors


@dataclass(frozen=True)
class Base:
    """A model that passed."""

    config: CheckpointConfig
    layout: Layout
    comparison: Comparison


def open_base(model: str, *, trust_remote_code: bool = False, allow_unexpected: bool = False) -> Base:
    """Resolve, config, layout, tensors: strictly."""
    source = resolve(model)
    config = read_config(source.path, trust_remote_code=trust_remote_code)
    layout = read_layout(source.path, allow_unexpected=allow_unexpected)
    return Base(config, layout, verify_tensors(layout, config, allow_unexpected=allow_unexpected))
