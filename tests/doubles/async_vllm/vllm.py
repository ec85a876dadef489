"""A stand-in for vLLM at the border that ``python -m benchmarks.infer`` talks to, in the process of an engine.

Every engine writes a line to the file that ``FCSD_DOUBLE`` names: its arguments, the config.json and the other files of
its model, and a process that it starts and never ends. Every batch writes a line, too.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

__version__ = "0.28.0"
_preempted = SimpleNamespace(name="vllm:num_preemptions", value=0)


class SamplingParams:
    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


def _write(line: dict[str, Any]) -> None:
    with open(os.environ["FCSD_DOUBLE"], "a") as file:
        file.write(json.dumps(line) + "\n")


class AsyncLLM:
    """Preempts a request if one rank has more than three, and fails with some all-reduce backends."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.running = arguments, 0
        self.vllm_config = SimpleNamespace(
            use_v2_model_runner=True,
            compilation_config=SimpleNamespace(cudagraph_mode="FULL"),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        )

    @classmethod
    def from_engine_args(cls, arguments: dict[str, Any], usage_context: str) -> "AsyncLLM":
        assert usage_context == "server"
        path = Path(arguments["model"])
        files = {file.name: str(file.resolve()) for file in path.iterdir() if file.name != "config.json"}
        worker = subprocess.Popen(["sleep", "600"])
        config = json.loads((path / "config.json").read_text())
        _write({"arguments": arguments, "config": config, "files": files, "worker": worker.pid})
        kind = arguments["additional_config"].get("fcsd", {}).get("reduce")
        if kind == "quantised:int4":
            print("ERROR 11-22 12:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory", file=sys.stderr)
        if kind == "symmetric":
            print("(Worker) ERROR 11-22 12:00:00 [core.py:1] ValueError: no window", flush=True)
            print("(EngineCore) ERROR 11-22 12:00:01 [core.py:2] RuntimeError: a worker failed", flush=True)
        if kind == "quantised:int5":
            os._exit(3)
        if kind in ("quantised:int4", "symmetric"):
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        return cls(arguments)

    async def generate(self, prompt: dict[str, list[int]], sampling: Any, name: str) -> AsyncIterator[None]:
        assert sampling.ignore_eos and sampling.temperature == 0
        self.running += 1
        if self.running > 3 and self.arguments["tensor_parallel_size"] == 1:
            _preempted.value += 1
        _write({"prompt": prompt["prompt_token_ids"], "new": sampling.max_tokens, "name": name})
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(0.001)
            yield
        self.running -= 1

    def shutdown(self) -> None:
        _write({"shutdown": True})


def _module(name: str, **contents: Any) -> None:
    sys.modules[f"vllm.{name}"] = module = ModuleType(name)
    vars(module).update(contents)


_module("engine.arg_utils", AsyncEngineArgs=dict)
_module("sampling_params", RequestOutputKind=SimpleNamespace(DELTA="delta"))
_module("usage.usage_lib", UsageContext=SimpleNamespace(OPENAI_API_SERVER="server"))
_module("v1.engine.async_llm", AsyncLLM=AsyncLLM)
_module("v1.metrics.reader", get_metrics_snapshot=lambda: [_preempted])
