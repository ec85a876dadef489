"""Reads the formats of a recipe's ``parallel.wire``, and checks whether the rows of a model can be rounded to them."""

from transformers import PretrainedConfig

from fcsd import config
from fcsd.errors import ConfigError
from fcsd.models.build import arch_of
from fcsd.parallel.expert.autoep import expert_parallel_config
from fcsd.parallel.quantised.rows import WireFormats


def formats_of(wire: config.Wire) -> WireFormats | None:
    """The formats of a recipe's ``parallel.wire``; None if no direction has one.

    Raises:
        ConfigError: the format of a gradient has integer scales.
    """
    return WireFormats.read(wire.model_dump(exclude={"stochastic"}), wire.stochastic) if wire.any else None


def check_formats(formats: WireFormats, model: PretrainedConfig, name: str) -> None:
    """Check that the rows of a model can be rounded.

    Args:
        model: the configuration of the model.
        name: its name, for the message.

    Raises:
        ConfigError: the model has no experts, or has experts that no dispatcher can reach, or the groups of a format do
            not divide its rows.
    """
    try:
        expert_parallel_config(arch_of(model), ep_size=1)
        formats.check_width(model.get_text_config().hidden_size)
    except ConfigError as error:
        raise ConfigError(f"parallel.wire: {name}: {error}", error.hint or "remove parallel.wire") from error
