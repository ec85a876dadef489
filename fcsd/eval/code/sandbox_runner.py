"""The program that runs inside the sandbox: it executes untrusted code and returns the outputs as plain data.

It is passed to a bare interpreter as text (`python -c`), so it uses the standard library only. It never learns which
outputs are expected. Untrusted code runs in the same process and may read or change everything here. It can thereby
only choose its own outputs. `encode` and `decode` are used on both sides.

The protocol is one JSON job on stdin, and on stdout one JSON line each for `ready`, every call, and `done` (CPU seconds
used).
"""

import json
import os
import resource
import sys
import time
import types
from typing import Any


def encode(value: Any) -> Any:
    """Turn a plain Python value into JSON, tagging what JSON lacks.

    Subclasses (Counter, namedtuple, a str that redefines `__eq__`) become the builtin they hold, numpy
    scalars the number they are.

    Raises:
        TypeError: the value is not plain data (generator, match object, instance, ...).
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -(2**63) < number < 2**63 else {"int": hex(number)}
    if isinstance(value, float):
        number = float.__float__(value)
        return number if abs(number) < float("inf") else {"float": float.__repr__(number)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        # Outputs of a million numbers occur; the common items are passed without a call each.
        return [
            item if type(item) is str or (type(item) in (int, float) and -(2**63) < item < 2**63) else encode(item)
            for item in list.__iter__(value)
        ]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in tuple.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in dict.items(value)]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((encode(item) for item in value), key=json.dumps)}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes.hex(bytes(value))}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return encode(value.item())
    raise TypeError(f"{type(value).__name__} is not plain data")


def decode(value: Any) -> Any:
    """Undo `encode`.

    Raises:
        ValueError, TypeError, AttributeError: the value was not written by `encode`.
    """
    if isinstance(value, list):
        return [decode(item) if type(item) in (list, dict) else item for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "tuple":
        return tuple(decode(item) for item in content)
    if tag == "dict":
        return {decode(key): decode(item) for key, item in content}
    if tag == "set":
        # Hashable either way, and equal to a set of the same elements.
        return frozenset(decode(item) for item in content)
    if tag == "complex":
        return complex(*(decode(part) for part in content))
    if tag == "bytes":
        return bytes.fromhex(content)
    if tag == "int":
        return int(content, 16)
    if tag == "float":
        return float(content)
    raise ValueError(f"unknown tag {tag!r}")


def confine(limits: dict[str, int], uid: int | None) -> None:
    """Set resource limits (bytes, seconds, counts), and change to `uid` if it is given."""
    cpu = limits["cpu_s"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))  # SIGXCPU can be caught, the hard limit not
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except BaseException:
        return "an exception that cannot be printed"


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    results = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    confine(job["limits"], job["uid"])

    def send(reply: dict[str, Any]) -> None:
        line = memoryview(json.dumps(reply, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        while line:
            line = line[os.write(results, line) :]

    send({"ready": True})
    # A registered module, because dataclasses and pickle look their module up by name.
    solution = types.ModuleType("solution")
    sys.modules["solution"] = solution
    try:
        exec(compile(job["code"], "solution.py", "exec", dont_inherit=True), solution.__dict__)
        function = solution.__dict__[job["entry_point"]] if job["entry_point"] else None
        calls = job["calls"]
    except BaseException as error:
        send({"load": describe(error)})
        function, calls = None, []
    for index, call in enumerate(calls):
        try:
            value = eval(call, solution.__dict__) if function is None else function(*decode(call))
            if job["not_none"] and not isinstance(value, bool):
                value = value is not None
            reply = {"index": index, "value": encode(value)}
        except BaseException as error:
            reply = {"index": index, "raised": describe(error)}
        send(reply)
    send({"done": time.process_time()})
    os._exit(0)  # threads and exit handlers of the untrusted code do not run any more


if __name__ == "__main__":
    main()
