"""`fcsd serve`: what it checks, when it is ready, how it ends; vLLM's server is a script of a few lines."""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import tiny

from fcsd import extras
from fcsd.checkpoint import Checkpoint
from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError, ConfigError
from fcsd.serve import server
from fcsd.serve.vllm import support

# A server with a child of its own. It answers once the file `go` exists, and ends as its first argument says.
SCRIPT = """
import http.server, os, pathlib, signal, subprocess, sys, time
print("log line")
if sys.argv[1] == "fail": sys.exit(7)
pathlib.Path("right").write_text(os.environ.get("FCSD_RIGHT_RESULTS", ""))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("child").write_text(str(child.pid))
if sys.argv[1] == "deaf": signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" and os.path.exists("go") else 503); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Answer).serve_forever()
"""


def serve_script(folder: Path, how: str, port: int, grace: float) -> None:
    """In a process of its own: run the script, and write what happened."""
    os.chdir(folder)
    Path("server.py").write_text(SCRIPT)

    def ready(url: str) -> None:
        Path("ready").write_text(url)

    code = server.run([sys.executable, "server.py", how, str(port)], f"http://127.0.0.1:{port}", ready, grace)
    Path("code").write_text(str(code))


def appears(path: Path) -> None:
    limit = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < limit, f"{path} does not appear"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("how", "number", "grace"), [("well", signal.SIGTERM, 60.0), ("deaf", signal.SIGTERM, 0.3)])
def test_a_signal_ends_the_server_and_its_children(how, number, grace, tmp_path):
    port = ranks.free_port()
    process = ranks.start(serve_script, tmp_path, how, port, grace)
    appears(tmp_path / "child")
    assert (tmp_path / "right").read_text() == "1", "reductions with wrong results are refused"
    assert not (tmp_path / "ready").exists(), "it does not answer yet"
    (tmp_path / "go").touch()
    appears(tmp_path / "ready")
    assert (tmp_path / "ready").read_text() == f"http://127.0.0.1:{port}"
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number and not (tmp_path / "code").exists()
    assert is_gone(int((tmp_path / "child").read_text()))


def test_a_server_that_fails_is_reported(tmp_path):
    assert ranks.exit_code(serve_script, tmp_path, "fail", ranks.free_port(), 60.0) == 0
    assert (tmp_path / "code").read_text() == "7" and not (tmp_path / "ready").exists()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.model("llama").save_pretrained(folder / "base")
    convert_checkpoint(folder / "base", folder / "ladder", wiring="ladder", check=False)
    convert_checkpoint(folder / "base", folder / "desync", wiring="desync-2x", tp_degree=2, check=False)
    return folder


def never(url: str) -> None:
    raise AssertionError(f"{url} is not served")


def test_what_is_checked_before_vllm_starts(models, monkeypatch):
    run: list[Any] = []
    monkeypatch.setattr(server, "run", lambda *arguments, **_: run.append(arguments) or 0)
    with pytest.raises(BadInputError, match="no such directory"):
        server.serve(str(models / "nowhere"), ready=never)
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "verify", lambda source: pytest.fail("tensors are compared for nothing"))
        with pytest.raises(ConfigError, match=r"^fcsd serve needs vllm: pip install 'fcsd\[vllm\]'$"):
            server.serve(str(models / "ladder"), ready=never)
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    monkeypatch.setattr(support, "entry_points", lambda group: [])
    with pytest.raises(ConfigError, match="only with fcsd's plugin"):
        server.serve(str(models / "ladder"), ready=never)
    plugin = type("Plugin", (), {"name": "fcsd", "value": "fcsd.serve.vllm.plugin:register"})
    monkeypatch.setattr(support, "entry_points", lambda group: [plugin])
    monkeypatch.setattr(support, "installed_version", lambda: "0.34.0")
    with pytest.raises(ConfigError, match=r"needs vLLM >=0.24,<0.34, not 0.34.0"):
        server.serve(str(models / "ladder"), ready=never)
    monkeypatch.setattr(support, "installed_version", lambda: "0.24.0")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(ConfigError, match="VLLM_PLUGINS=other leaves fcsd's plugin out"):
        server.serve(str(models / "ladder"), ready=never)
    monkeypatch.delenv("VLLM_PLUGINS")
    for gpus in (1, 4):
        with pytest.raises(ConfigError, match=f"converted for 2 tensor-parallel ranks, not {gpus}") as caught:
            server.serve(str(models / "desync"), gpus=gpus, ready=never)
        assert caught.value.hint == "Add --gpus 2."
    for option in ("-tp", "-tp9", "-tp=9", "--tensor_parallel_size=2", "--tensor-par", "--port", "--mod=x"):
        with pytest.raises(ConfigError, match=f"{option} behind -- is set by fcsd serve"):
            server.serve(str(models / "ladder"), options=[option, "2"], ready=never)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"--port \d+: Address already in use"):
            server.serve(str(models / "ladder"), port=taken.getsockname()[1], ready=never)
    assert not run
    port = ranks.free_port()
    server.serve(str(models / "desync"), port=port, options=["--max-model-len", "64"], ready=never)
    ((command, url, ready),) = run
    assert command[1:6] == ["-P", "-m", "vllm.entrypoints.cli.main", "serve", str(models / "desync")]
    assert command[-2:] == ["--max-model-len", "64"] and url == f"http://127.0.0.1:{port}" and ready is never
    assert command[command.index("--tensor-parallel-size") + 1] == "2"


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--host", "0.0.0.0"], "http://127.0.0.1:8000"),
        (["--host=gpu7.example"], "http://gpu7.example:8000"),
        (["--host", "fe80::1"], "http://[fe80::1]:8000"),
        (["--ssl_keyfile", "key.pem", "--ssl-certfile", "cert.pem"], "https://127.0.0.1:8000"),
    ],
)
def test_the_address_follows_the_options_of_vllm(options: list[str], url: str) -> None:
    assert server._url(8000, options) == url
    with pytest.raises(ConfigError, match="no Unix sockets"):
        server._url(8000, [*options, "--uds", "/tmp/socket"])


def test_what_does_not_speak_http_is_not_ready_and_ends_nothing() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def greet() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"SSH-2.0-not http\r\n\r\n")

        greeter = threading.Thread(target=greet)
        greeter.start()
        assert not server.answers(f"http://127.0.0.1:{listening.getsockname()[1]}/health")
        greeter.join()


def test_sums_through_the_host_are_asked_of_vllm(monkeypatch, tmp_path):
    given = {}
    config = SimpleNamespace(rewired=None, foreign=False, text={"hidden_size": 2880})
    opened = SimpleNamespace(path=tmp_path, config=config, verify=lambda: None)
    monkeypatch.setattr(server, "open_checkpoint", lambda model: opened)
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    monkeypatch.setattr(server, "run", lambda command, url, ready, environment: given.update(environment) or 0)
    port = ranks.free_port()
    with pytest.raises(ConfigError, match="do not divide rows of 2880") as refused:
        server.serve("model", gpus=2, port=port, all_reduce="host:int8", ready=print)
    assert "int8:g64" in str(refused.value.hint) and given == {}
    server.serve("model", gpus=2, port=port, all_reduce="host:int8:g64", ready=print)
    assert given == {"FCSD_ALL_REDUCE": "host:int8:g64"}
    config.text = {"n_embd": 2880}
    server.serve("model", gpus=2, port=port, all_reduce="host:int8", ready=print)
    assert given == {"FCSD_ALL_REDUCE": "host:int8"}, "the server sums exactly, and says so"
    with pytest.raises(ConfigError, match="one GPU sums nothing"):
        server.serve("model", gpus=1, port=port, all_reduce="host", ready=print)
    with pytest.raises(ConfigError, match="sums are vLLM's own, host or host:FORMAT"):
        server.serve("model", gpus=2, port=port, all_reduce="nccl", ready=print)


def test_graphs_are_closest_where_most_steps_are():
    sizes = server.graph_sizes(512, 64)
    assert sizes[:11] == [1, 2, 4, *range(8, 65, 8)], "answers alone"
    assert {512, 528, 544, 560, 576} <= set(sizes), "one prompt beside them"
    assert {1024, 1040, 1056, 1088, 1152} <= set(sizes) and sizes == sorted(set(sizes)), "two prompts"
    assert max(server.graph_sizes(8192, 64)) < 8192, "no graph of a step that computes for long"
    assert max(server.graph_sizes(server.MOST_GRAPHED, 64)) == server.MOST_GRAPHED
    assert server.graph_sizes(1, 1)[:2] == [1, 2]


def test_graphs_and_a_table_are_options_of_vllm(tmp_path):
    table = tmp_path / "table.json"
    rows = {"decode": [{"from": 1, "reduce": "vllm", "travels": True}], "prefill": []}
    about = {"version": 1, "user": "plugin", "tp": 2, "wiring": "ladder", "model": "m", "command": "c"}
    table.write_text(json.dumps({**about, **rows}))
    words = list(server._further(table, (16, 2), 2, ["--seed", "1"]))
    assert json.loads(words[1]) == {"fcsd": {"reduce": str(table)}}
    assert json.loads(words[3]) == {"cudagraph_capture_sizes": server.graph_sizes(16, 2)}
    with pytest.raises(BadInputError, match="measured with --gpus 2"):
        list(server._further(table, None, 4, []))
    with pytest.raises(ConfigError, match="--compilation-config behind -- is what --prompt-tokens sets"):
        list(server._further(None, (16, 2), 2, ["--compilation_config={}"]))
