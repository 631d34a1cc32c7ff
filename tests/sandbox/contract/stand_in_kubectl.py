#!/usr/bin/env python3
"""Stands in for `kubectl`: a pod is a folder, its programs run there as ordinary processes. Keeps the verbs' shape, isolates nothing.

State lies below $STAND_IN_CLUSTER: pods/NAME/{manifest.json,home,volume} and policies.jsonl; the volume's path is rewritten.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

CLUSTER = Path(os.environ["STAND_IN_CLUSTER"])
MOUNT = "/.rollmill"


def pod(name: str) -> Path:
    folder = CLUSTER / "pods" / name
    if not folder.is_dir():
        sys.exit(f'Error from server (NotFound): pods "{name}" not found')
    return folder


def create() -> None:
    content = json.load(sys.stdin)
    folder = CLUSTER / "pods" / content["metadata"]["name"]
    if content["spec"]["containers"][0]["image"] == "no-such-image":
        content["status"] = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}
    for part in ("home", "volume"):
        (folder / part).mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(content))
    print(f"pod/{content['metadata']['name']} created")


def apply() -> None:
    with (CLUSTER / "policies.jsonl").open("a") as file:
        file.write(json.dumps(json.load(sys.stdin)) + "\n")


def wait(*args: str) -> None:
    name = args[1].removeprefix("pod/")
    if "status" in json.loads((pod(name) / "manifest.json").read_text()):
        sys.exit(f"error: timed out waiting for the condition on pods/{name}")


def get(kind: str, *args: str) -> None:
    if kind == "pod":
        print((pod(args[0]) / "manifest.json").read_text())
        return
    found = [json.loads(path.read_text()) for path in sorted((CLUSTER / "pods").glob("*/manifest.json"))]
    print(json.dumps({"items": found}))


def delete(_: str, *args: str) -> None:
    for name in args:
        if name.startswith("--") or not (CLUSTER / "pods" / name).is_dir():
            continue
        end(name)
        shutil.rmtree(CLUSTER / "pods" / name, ignore_errors=True)


def end(name: str) -> None:
    """Kill every process that began in the pod, known by a variable that it inherited."""
    mark = f"STAND_IN_POD={CLUSTER}/{name}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            pass  # ended, or not ours


def run(_: str, name: str, __: str, *argv: str) -> None:
    folder = pod(name)
    words = [word.replace(MOUNT, str(folder / "volume")) for word in argv]
    os.chdir(folder / "home")
    os.environ["STAND_IN_POD"] = f"{CLUSTER}/{name}"
    os.execvp(words[0], words)


VERBS = {"create": lambda _: create(), "apply": lambda _: apply(), "wait": wait, "get": get, "delete": delete, "exec": run}

if __name__ == "__main__":
    if sys.argv[1] == "auth":
        sys.exit(0)
    VERBS[sys.argv[1]](*sys.argv[2:])
