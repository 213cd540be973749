"""An HTTP server that stores what is put into it, and can fail in the ways that servers do."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Literal

Fault = Literal["", "dies", "hangs", "refuses", "endless"]


class Store(ThreadingHTTPServer):
    """``objects`` by path. ``fault`` is how it fails: it closes the connection in the middle of an object, never
    answers, answers 503, or sends without an end.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fault: Fault = ""
        self.url = f"http://127.0.0.1:{self.server_port}/kernels"
        self.closing = threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def entry(self) -> str:
        """The path of the only entry."""
        (path,) = (path for path in self.objects if path.endswith(".kernel"))
        return path

    def close(self) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that give up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: Store

    def do_GET(self) -> None:
        self.server.requests.append(f"GET {PurePosixPath(self.path).suffix}")
        if self._fails():
            return
        content = self.server.objects.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if content is not None and self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if self.server.fault == "dies" else content)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.server.requests.append(f"PUT {PurePosixPath(self.path).suffix}")
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._fails():
            self.server.objects[self.path] = content
            self.send_response(201)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _fails(self) -> bool:
        if self.server.fault == "refuses":
            self.send_error(503)
        elif self.server.fault == "hangs":
            self.server.closing.wait(30)
        elif self.server.fault == "endless":
            self.send_response(200)
            self.end_headers()
            while not self.server.closing.is_set():
                self.wfile.write(b"x" * 2**16)
                time.sleep(0.001)
        return self.server.fault in ("refuses", "hangs", "endless")

    def log_message(self, format: str, *args: object) -> None:
        """The tests look at ``requests``."""
