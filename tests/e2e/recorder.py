"""A program: passes requests on to a server and writes every POST, with its status, to a file of JSON lines.

    python recorder.py PORT SERVER_PORT FILE

The file is what the client really sent. Standard library only; prints ``ready`` when it listens.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "accept-encoding"}


class Recorder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # every answer ends with its connection
    server_port = 0
    file = Path("/dev/null")
    lock = threading.Lock()

    def log_message(self, *args: object) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        arrived = time.time()
        back = http.client.HTTPConnection("127.0.0.1", self.server_port)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        try:
            back.request(self.command, self.path, body or None, headers)
            answer = back.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            self.end_headers()
            while piece := answer.read1(65536):
                self.wfile.write(piece)
            self._write(arrived, body, answer.status, answer.getheader("x-request-id"))
        finally:
            back.close()

    def _write(self, arrived: float, body: bytes, status: int, request_id: str | None) -> None:
        if self.command != "POST":
            return
        entry = {"t": arrived, "path": self.path, "status": status, "id": request_id}
        entry["body"] = json.loads(body or b"null")
        with self.lock, self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = do_PATCH = do_OPTIONS = _pass_on


def main() -> None:
    port, Recorder.server_port, Recorder.file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", port), Recorder)
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
