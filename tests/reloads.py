"""Scripts in a forked process that has imported transformers and not fcsd, for tests that are not about these imports.

A fresh process imports transformers for seconds. Here one process per session makes these imports, without fcsd, and
forks a child for each script: for that of the reload proof, and for those of tests.
"""

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# Forks a child for each line of its input, and answers with the child's exit code. It ends with its input.
_SERVER = """
import json, os, runpy, sys
import deepspeed, torch, transformers.integrations.mistral  # which loading and saving a model import
from transformers import AutoModelForCausalLM, dynamic_module_utils
from transformers.models.auto import tokenization_auto
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_moe import modeling_qwen3_moe

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
job = json.loads(line)
os.dup2(os.open(job["said"], os.O_WRONLY), 2)
os.dup2(2, 1)
os.chdir(job["cwd"])
dynamic_module_utils.HF_MODULES_CACHE = job["modules"]  # was read from the environment when it was imported
sys.argv = job["argv"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def fork_reloads(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` is undone, ``export`` reloads in a forked process."""
    patch.setattr("fcsd.export.reload.subprocess", SimpleNamespace(run=_run, DEVNULL=subprocess.DEVNULL))


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", _SERVER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def _run(command: list[str], *, cwd: Path, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
    interpreter, safe_path, *argv = command
    assert (interpreter, safe_path) == (sys.executable, "-P")
    return subprocess.CompletedProcess(command, *run_script(argv, cwd, env["HF_MODULES_CACHE"]))


def run_script(argv: list[str], cwd: Path, modules: str) -> tuple[int, str, str]:
    """Runs the script ``argv[0]`` with the arguments behind it, as ``python -P`` would.

    Args:
        modules: the directory for code that comes with a model.

    Returns:
        The exit code, nothing, and all that was printed.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as said:
        job = {"argv": argv, "cwd": str(cwd), "modules": modules, "said": said.name}
        server.stdin.write(json.dumps(job) + "\n")
        return int(server.stdout.readline()), "", said.read()
