"""The entry point ``vllm.general_plugins``: vLLM calls ``register`` once in each of its processes.

vLLM calls it for every model that is served, so the function is cheap, and it fails for nobody: with a version of vLLM
that is not supported it reports one line and changes nothing. vLLM then refuses converted models, because it does not
know their architectures.
"""

import logging

from fcsd.serve.vllm.support import why_unsupported

log = logging.getLogger("vllm.fcsd")  # below vLLM's logger, whose settings it shares


def register() -> None:
    """Teach vLLM the converted architectures. A second call changes nothing."""
    from vllm import __version__  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    if problem := why_unsupported(__version__):
        log.error(problem)
        return
    from fcsd.serve.vllm import registration

    registration.register()
