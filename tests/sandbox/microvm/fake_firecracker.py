"""A fake of Firecracker's interface as its documentation describes it: takes requests in the order a real one demands, runs no guest.

Its "guest" listens on two vsock ports: a real agent (the program in ROLLMILL_FAKE_AGENT) and a warden that answers every line with 0.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any


class Guest:
    """What has been configured, and the connections into it."""

    def __init__(self) -> None:
        self.state = "configuring"
        self.seen: dict[str, Any] = {}
        self.open: list[socket.socket] = []
        self.log = Path(os.environ["ROLLMILL_FAKE_LOG"])

    def take(self, method: str, path: str, body: dict[str, Any]) -> str | None:
        """None, or the fault of the request."""
        with self.log.open("a") as log:
            log.write(json.dumps([method, path, body]) + "\n")
        if method == "PUT" and path in ("/machine-config", "/boot-source", "/drives/root", "/vsock"):
            if self.state != "configuring":
                return "The requested operation is not supported after starting the microVM."
            for key in ("kernel_image_path", "initrd_path", "path_on_host"):
                if key in body and not Path(body[key]).is_file():
                    return f"{key} does not exist"
            self.seen[path] = body
        elif (method, path) == ("PUT", "/actions"):
            if not {"/boot-source", "/vsock"} <= self.seen.keys():
                return "The boot source was not configured."
            self.start(self.seen["/vsock"]["uds_path"])
        elif (method, path) == ("PATCH", "/vm"):
            self.state = body["state"]
        elif (method, path) == ("PUT", "/snapshot/create"):
            if self.state != "Paused":
                return "The microVM is not paused."
            Path(body["snapshot_path"]).write_text(json.dumps({"uds_path": self.seen["/vsock"]["uds_path"]}))
            Path(body["mem_file_path"]).write_bytes(b"\0" * 4096)
            for sock in self.open:
                sock.shutdown(socket.SHUT_RDWR)
            self.open.clear()
        elif (method, path) == ("PUT", "/snapshot/load"):
            if Path(body["mem_backend"]["backend_path"]).stat().st_size != 4096:
                return "The memory file is too short."
            self.seen["/vsock"] = json.loads(Path(body["snapshot_path"]).read_text())
            self.start(self.seen["/vsock"]["uds_path"])
        else:
            return f"no {method} {path}"
        return None

    def start(self, uds_path: str) -> None:
        self.state = "Resumed"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(uds_path)
        listener.listen()
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()
        print("booted", flush=True)

    def accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            with sock.makefile("rb", buffering=0) as lines:
                port = int(lines.readline().split()[1])
            sock.sendall(b"OK 1073741824\n")
            self.open.append(sock)
            if port == 1024:
                subprocess.Popen([*shlex.split(os.environ["ROLLMILL_FAKE_AGENT"])], stdin=sock, stdout=sock)
            else:
                threading.Thread(target=self.answer, args=(sock,), daemon=True).start()

    @staticmethod
    def answer(sock: socket.socket) -> None:
        while line := sock.recv(256):
            assert line.startswith(b"identity ")
            sock.sendall(b"0\n")


GUEST = Guest()


class Face(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        fault = GUEST.take(self.command, self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        data = json.dumps({"fault_message": fault}).encode() if fault else b""
        self.send_response(400 if fault else 204)
        if fault:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_PATCH = do_PUT

    def address_string(self) -> str:
        return "owner"

    def log_message(self, *args: object) -> None: ...


if __name__ == "__main__":
    if "--version" in sys.argv:
        print("Firecracker v1.99.0")
    else:
        ThreadingUnixStreamServer(sys.argv[sys.argv.index("--api-sock") + 1], Face).serve_forever()
