"""The entry point ``vllm.general_plugins``: vLLM calls ``register`` once in each of its processes.

vLLM calls it for every model that is served, so the function is cheap, and it fails for nobody: vLLM does not catch
what a plugin raises, and would end for models that are none of fcsd's. With a version of vLLM that is not supported,
and where anything goes wrong, it reports one line. vLLM then refuses converted models, because it cannot read their
configs.
"""

import logging

from fcsd.foreign_errors import reason_of
from fcsd.serve.vllm.support import why_unsupported

log = logging.getLogger("vllm.fcsd")  # below vLLM's logger, whose settings it shares


def register() -> None:
    """Teach vLLM the converted architectures. A second call changes nothing."""
    from vllm import __version__  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    if problem := why_unsupported(__version__):
        log.error(problem)
        return
    try:
        from fcsd.serve.vllm.communicator import use_host_sums

        use_host_sums()
    except Exception as error:
        log.error("sums are vLLM's own: %s", reason_of(error))
    try:
        from fcsd.serve.vllm import registration

        registration.register()
    except Exception as error:  # anything in vLLM may have another name or form than the plugin expects
        why = f"{type(error).__name__}: {reason_of(error)}"
        log.error("fcsd's plugin cannot be used, so converted models cannot be served: %s", why)
