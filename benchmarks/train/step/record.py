"""Records a Chrome trace of the device and of fcsd's ranges, without the operators of torch.

``torch.profiler`` also records every operator. This slows down the host, so that the device waits at places where it
would not wait without the profiler.
"""

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import RecordScope
from torch.autograd import _add_metadata_json, profiler  # pyright: ignore[reportPrivateImportUsage]

from fcsd.launch.world import World


def record(run: Callable[[], Any], path: Path, world: World) -> None:
    """Calls ``run``, and writes the gzipped trace of this rank's device to ``path``."""
    device = world.device.type if world.device.type == "cuda" else None
    settings = profiler.profile(use_device=device, use_kineto=True)
    _prepare_profiler(settings.config(), settings.kineto_activities)
    enable: Any = _enable_profiler  # torch's type annotation lacks the third argument
    enable(settings.config(), settings.kineto_activities, {RecordScope.USER_SCOPE})
    run()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    _add_metadata_json("distributedInfo", json.dumps({"rank": world.rank}))
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "trace.json")
        _disable_profiler().save(str(plain))
        path.write_bytes(gzip.compress(plain.read_bytes()))
