"""One small engine of vLLM, and the rows in which a part of ``scripts/vllm_gpu.py`` says what it found."""

import gc
import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def report(row: Row, work: Any, *given: Any) -> None:
    """Do a piece of work that returns fields of a row, and print the row. A failure is a row, too."""
    print("START " + json.dumps(row), flush=True)
    start = time.perf_counter()
    try:
        row = row | work(*given)
    except Exception as error:
        traceback.print_exc()
        row = row | dict(right=False, error=f"{type(error).__name__}: {str(error)[:300]}")
    print("ROW " + json.dumps(row | dict(seconds=round(time.perf_counter() - start, 1))), flush=True)


def engine(path: Path, dtype: str, tensor_parallel: int, expert_parallel: bool, **options: Any) -> Any:
    """vLLM's engine for a small model, which shares the GPU with others. It needs no tokenizer: requests are ids."""
    import torch
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    options.setdefault("kv_cache_memory_bytes", 1 << 28)
    if not torch.cuda.is_available():  # the CPU build, whose rotary kernel is wrong for DeepSeek (docs/serving.md)
        options.setdefault("compilation_config", dict(custom_ops=["none"]))
    elif dtype == "float32":
        options["attention_config"] = dict(backend="TRITON_ATTN")  # FlashAttention has no float32
    return LLM(
        str(path), dtype=dtype, tensor_parallel_size=tensor_parallel, enable_expert_parallel=expert_parallel,
        skip_tokenizer_init=True, enable_prefix_caching=False, gpu_memory_utilization=0.1, **options,
    )  # fmt: skip


def release() -> None:
    """End the engine that was deleted before this call, and free its memory."""
    gc.collect()
    # An engine in processes of its own has ended with them. This process must not touch a GPU then: it forks the next.
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

        cleanup_dist_env_and_memory()


def facts(config: Any) -> Row:
    """What vLLM has chosen by itself, from its ``VllmConfig``."""
    return dict(
        runner="v2" if config.use_v2_model_runner else "v1",
        backend=str(config.attention_config.backend),
        graphs=str(config.compilation_config.cudagraph_mode),
    )
