"""`satchel serve` with a stub instead of models: one Ray actor and a small HTTP server in this process.

Run as a script, with the command line of `satchel`. STUB_DEPLOY_S (seconds) makes the deployment slow.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from satchel.api.cli import main as cli
from satchel.cluster.config.config import Config

METRICS = """# TYPE satchel_replica_up gauge
satchel_replica_up{replica="stub-0",model="recall"} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="recall",engine="stub-0"} 3.0
# TYPE satchel_requests counter
satchel_requests_total{replica="stub-0"} 7.0
"""

CLUSTER = {
    "nodes": [
        {
            "name": "local",
            "address": "127.0.0.1",
            "up": True,
            "links": [],
            "memory_free_bytes": 12_300_000_000,
            "tiers": {"memory_bytes": 4_560_000, "disk_bytes": None},
            "agents": None,
        }
    ],
    "replicas": [{"id": "stub-0", "node": "local", "pid": 7, "tokens_per_s": 12.5}],
}


MODEL = {"id": "recall", "object": "model", "aliases": [], "load": "start", "state": "loaded", "progress": None}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        bodies = {
            "/health": json.dumps({"status": "ok", "models": {"recall": True}}),
            "/v1/models": json.dumps({"object": "list", "data": [MODEL]}),
            "/metrics": METRICS,
            "/v1/cluster?agents=0": json.dumps(CLUSTER),
        }
        self._answer(200, bodies[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] != "recall":
            self._answer(404, json.dumps({"error": {"message": "no such model"}}))
            return
        said = f"{self.headers.get('X-Agent-ID')} said {body['messages'][-1]['content']}"
        chunks = [json.dumps({"choices": [{"delta": {"content": word}}]}) for word in (said[:5], said[5:])]
        self._answer(200, "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the output belongs to the command."""


class Deployment:
    def __init__(self, url: str, server: ThreadingHTTPServer) -> None:
        self.url = url
        self.models = ["recall"]
        self._server = server

    def drain(self, timeout_s: float) -> None:
        print("drained", file=sys.__stdout__, flush=True)

    def stop(self, timeout_s: float) -> None:
        self._server.shutdown()


class Worker:
    def answer(self) -> int:
        return os.getpid()


def deploy(config: Config, *, report: Callable[[str, float | None], None]) -> Deployment:
    import ray

    report("Loading recall", 0.5)
    worker = ray.remote(Worker).options(name="stub-0").remote()
    ray.get(worker.answer.remote(), timeout=60)
    time.sleep(float(os.environ.get("STUB_DEPLOY_S", "0")))
    server = ThreadingHTTPServer((config.endpoint.listen, config.endpoint.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return Deployment(f"http://{config.endpoint.listen}:{config.endpoint.port}", server)


if __name__ == "__main__":
    module = types.ModuleType("satchel.api.serve")
    module.__dict__["deploy"] = deploy
    sys.modules["satchel.api.serve"] = module
    cli.main()
