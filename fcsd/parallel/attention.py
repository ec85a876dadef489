"""Lets a caller run functions before and after core attention, without a copy of transformers' code.

Every attention module of transformers computes q, k and v, calls the attention function that its config names, and
projects the output. fcsd registers attention functions under names of its own, with a prefix. Such a function calls
transformers' function of the same name without the prefix. Before and after this call it calls the functions that
it receives through the module's keyword arguments.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fcsd.errors import ConfigError
from fcsd.kernels.packed_attention import NAME as PACKED
from fcsd.models.wiring import is_linear

PREFIX = "fcsd_"
SPLIT = ("sdpa", "eager", PACKED)
# The name of the last projection before rotary embeddings: in latent attention, and in all other attention.
_LAST = ("kv_a_proj_with_mqa", "v_proj")
# The same before the convolution of linear attention, and the projection of its output.
_LAST_OF_LINEAR = ("in_proj_ba", "in_proj_a", "v_proj", "in_proj")
_OUTPUT_OF_LINEAR = ("out_proj", "o_proj")


class Around(NamedTuple):
    """The functions to call around core attention.

    Attributes:
        projected: called after the projections of the input, before rotary embeddings.
        before_core: called when q, k and v are known.
        after_core: called after core attention and before the output projection.
    """

    projected: Callable[[], None]
    before_core: Callable[[], None]
    after_core: Callable[[], None]


def split_attention(model: PreTrainedModel) -> None:
    """Let the attention modules of ``model`` accept ``around=Around(...)``.

    Raises:
        ConfigError: the model's attention implementation cannot be split.
    """
    name = (model.config._attn_implementation or "eager").removeprefix(PREFIX)
    if name not in SPLIT:
        raise ConfigError(
            f"overlap needs attention {' or '.join(SPLIT)}, not {name}",
            hint=f"load the model with attn_implementation={SPLIT[0]!r}",
        )
    AttentionInterface.register(PREFIX + name, _with_calls(name))
    AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    model.set_attn_implementation(PREFIX + name)


def join_attention(model: PreTrainedModel) -> None:
    """Undo ``split_attention``."""
    name = model.config._attn_implementation or ""
    if name.startswith(PREFIX):
        model.set_attn_implementation(name.removeprefix(PREFIX))


@contextmanager
def calls_inside(attention: nn.Module, around: Around) -> Iterator[dict[str, Any]]:
    """Within the block, ``attention`` calls the functions. It must get the arguments that the block begins with.

    Linear attention has no rotary embeddings and calls no function that could be registered. Its convolution and its
    recurrence are what runs between its last projection of the input and the projection of its output.
    """
    children = dict(attention.named_children())
    if not is_linear(attention):
        last = next(name for name in _LAST if name in children)
        hooks = [children[last].register_forward_hook(lambda *_: around.projected())]
        arguments: dict[str, Any] = {"around": around}
    else:
        last, output = (
            next(name for name in names if name in children) for names in (_LAST_OF_LINEAR, _OUTPUT_OF_LINEAR)
        )

        def before(*_: Any) -> None:
            around.projected()
            around.before_core()

        hooks = [
            children[last].register_forward_hook(before),
            children[output].register_forward_pre_hook(lambda *_: around.after_core()),
        ]
        arguments = {}
    try:
        yield arguments
    finally:
        for hook in hooks:
            hook.remove()


def _with_calls(name: str) -> Callable[..., Any]:
    def attention(module: nn.Module, *args: Any, around: Around | None = None, **kwargs: Any) -> tuple[Tensor, Any]:
        # Eager attention is not registered: each modeling file of transformers has its own function.
        eager = sys.modules[type(module).__module__].eager_attention_forward if name == "eager" else None
        core = eager or ALL_ATTENTION_FUNCTIONS[name]
        if around is None:
            return core(module, *args, **kwargs)
        around.before_core()
        out = core(module, *args, **kwargs)
        around.after_core()
        return out

    return attention
