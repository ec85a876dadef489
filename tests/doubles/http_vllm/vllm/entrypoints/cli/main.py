"""``vllm serve DIRECTORY ...``: a server over HTTP that streams as many tokens as are asked for.

It writes its arguments, its model's config.json and the process that it starts and never ends to the file that
``FCSD_DOUBLE`` names. With ``--disable-custom-all-reduce`` it fails as vLLM does, with ``--compilation-config`` it
dies when it is asked, and with symmetric memory by NCCL it says that it leaves it out. The tokens of a model with the
wiring that ``FCSD_DOUBLE_BURST`` names come all at once.
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STEP = 0.002  # seconds of a token


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "--compilation-config" in sys.argv:
            print("(EngineCore pid=7) ERROR 11-22 02:46:00 [core.py:9] torch.OutOfMemoryError: no memory", flush=True)
            os._exit(1)
        if len(asked["prompt"]) > 900:
            body = json.dumps({"error": {"message": "too long"}}).encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        at_once = asked["max_tokens"] if BURST else 1  # vLLM puts the tokens that it could not send into one event
        for number in range(0, asked["max_tokens"], at_once):
            time.sleep(STEP * at_once)
            choice = {"index": 0, "text": "", "token_ids": [number] * at_once, "finish_reason": None}
            self.piece(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        self.piece(b"data: [DO")  # a piece may end within an event
        self.piece(b"NE]\n\n")
        self.piece(b"")

    def piece(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    request_queue_size = 256


if __name__ == "__main__":
    arguments = sys.argv[2:]
    worker = subprocess.Popen(["sleep", "600"])
    config = json.loads((Path(arguments[0]) / "config.json").read_text())
    BURST = config.get("fcsd", {}).get("wiring", "none") == os.environ.get("FCSD_DOUBLE_BURST")
    with Path(os.environ["FCSD_DOUBLE"]).open("a") as told:
        settings = {
            name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "CUDA_VISIBLE", "FCSD_ALL_"))
        }
        line = {"arguments": arguments, "config": config, "settings": settings, "processes": [os.getpid(), worker.pid]}
        print(json.dumps(line), file=told, flush=True)
    if "--disable-custom-all-reduce" in arguments:
        print("ERROR 11-22 02:46:00 [core.py:9] ValueError: no way to sum")
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(1)
    if os.environ.get("VLLM_USE_NCCL_SYMM_MEM") == "1":
        print("WARNING 11-22 02:46:00 [core.py:9] Failed to compile NCCL memory allocator.", flush=True)
    Server(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
