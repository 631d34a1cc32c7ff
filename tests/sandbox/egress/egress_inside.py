"""Run as a program: makes a network namespace in which every address is local, hands out its listening sockets, runs commands in it."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

from rollmill.sandbox.egress.route import local_route

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: object) -> None:
    if getattr(LIBC, name)(*args):
        raise OSError(ctypes.get_errno(), name)


def enter() -> None:
    """A network and mount namespace, with a user namespace around them where we are not root."""
    uid, gid = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWNS | CLONE_NEWNET | (CLONE_NEWUSER if uid else 0))
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)


def netlink(message: bytes) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
        link.settimeout(10)
        link.send(message)
        code = struct.unpack_from("=i", link.recv(4096), 16)[0]
    if code:
        raise OSError(-code, "rtnetlink")


def main(owner: socket.socket, resolver: str, *ports: int) -> None:
    enter()
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    netlink(local_route("10.0.2.15/32"))
    netlink(local_route(source="10.0.2.15"))
    call("mount", os.fsencode(resolver), os.path.realpath("/etc/resolv.conf").encode(), None, MS_BIND, None)
    names = socket.socket(type=socket.SOCK_DGRAM)
    names.bind(("0.0.0.0", 53))
    listeners = [names, *(socket.create_server(("0.0.0.0", port), backlog=128) for port in (53, *ports))]
    socket.send_fds(owner, [b"ready"], [s.fileno() for s in listeners])
    for listener in listeners:
        listener.close()
    while argv := owner.recv(1 << 16):
        done = subprocess.run(json.loads(argv), capture_output=True, timeout=60, check=False)
        owner.send(json.dumps([done.returncode, (done.stdout + done.stderr).decode(errors="replace")]).encode())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as end:
        try:
            main(end, sys.argv[2], *map(int, sys.argv[3:]))
        except PermissionError as e:
            end.send(f"no: {e}".encode())
