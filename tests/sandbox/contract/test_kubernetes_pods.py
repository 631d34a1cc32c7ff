"""Our side of a cluster: the exact pod, the lease in it, what is swept and what a failure says. No cluster is asked."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from contract_stages import STAND_IN

from rollmill.records import RunFailure
from rollmill.sandbox import SandboxSpec
from rollmill.sandbox.container.owner import LABEL, machine, owner
from rollmill.sandbox.kubernetes import KubernetesBackend, manifest

WAIT_S = 60.0


def _cluster(folder: Path) -> KubernetesBackend:
    program = folder / "kubectl"
    program.write_text(f'#!/bin/sh\nSTAND_IN_CLUSTER={folder} exec {sys.executable} -I -S {STAND_IN} "$@"\n')
    program.chmod(0o755)
    (folder / "pods").mkdir()
    return KubernetesBackend(str(program), image="any")


def test_the_pod_of_a_box_is_exactly_this() -> None:
    spec = SandboxSpec(memory_bytes=1 << 28, disk_bytes=1 << 26, cpus=0.5, lifetime_s=99.5, hostname="dev")
    assert manifest.pod("name", "owner", spec, "image", runtime_class="gvisor") == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "name", "labels": {"app.kubernetes.io/managed-by": "rollmill", "rollmill-owner": "owner"}},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 100,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": "dev",
            "runtimeClassName": "gvisor",
            "containers": [
                {
                    "name": "box",
                    "image": "image",
                    "command": ["/bin/sh", "-c", manifest.WATCH],
                    "resources": {
                        "limits": {"memory": "268435456", "ephemeral-storage": "83886080", "cpu": "500m"},
                        "requests": {"memory": "268435456", "ephemeral-storage": "83886080", "cpu": "500m"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "privileged": False,
                        "capabilities": {"drop": ["ALL"], "add": []},
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "volumeMounts": [{"name": "agent", "mountPath": "/.rollmill"}],
                }
            ],
            "volumes": [{"name": "agent", "emptyDir": {"sizeLimit": "16777216"}}],
        },
    }


def test_a_policy_cuts_every_box_off_both_ways(tmp_path: Path) -> None:
    async def play() -> None:
        backend = _cluster(tmp_path)
        await (await backend.create(SandboxSpec())).close()
        await backend.close()

    asyncio.run(play())
    (policy,) = [json.loads(line) for line in (tmp_path / "policies.jsonl").read_text().splitlines()]
    assert policy["kind"] == "NetworkPolicy"
    assert policy["spec"] == {
        "podSelector": {"matchLabels": {"app.kubernetes.io/managed-by": "rollmill"}},
        "policyTypes": ["Ingress", "Egress"],
    }
    assert not list((tmp_path / "pods").iterdir()), "a closed box leaves no pod"


def test_a_pod_ends_when_its_agent_does(tmp_path: Path) -> None:
    """The lease: the pod's own process goes when the process whose number lies in the volume has gone."""
    agent = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    (tmp_path / "pid").write_text(f"{agent.pid}\n")
    watch = subprocess.Popen(["/bin/sh", "-c", manifest.WATCH.replace(manifest.FOLDER, str(tmp_path))])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            watch.wait(timeout=0.3)
        agent.communicate(timeout=WAIT_S)
        assert watch.wait(timeout=WAIT_S) == 0
    finally:
        watch.kill()
        watch.wait(timeout=WAIT_S)


def test_pods_of_dead_owners_are_swept_and_those_of_others_stay(tmp_path: Path) -> None:
    async def play() -> None:
        backend = _cluster(tmp_path)
        for name, whose in (("dead", f"{machine()}.1.1"), ("living", owner()), ("far", "other-machine.1.1")):
            folder = tmp_path / "pods" / name
            folder.mkdir()
            (folder / "manifest.json").write_text(json.dumps({"metadata": {"name": name, "labels": {LABEL: whose}}}))
        await (await backend.create(SandboxSpec())).close()
        await backend.close()

    asyncio.run(play())
    assert sorted(path.name for path in (tmp_path / "pods").iterdir()) == ["far", "living"]


def test_a_pod_that_cannot_start_says_why_and_is_not_left(tmp_path: Path) -> None:
    async def play() -> None:
        backend = _cluster(tmp_path)
        with pytest.raises(RunFailure, match="ImagePullBackOff"):
            await backend.create(SandboxSpec(image="no-such-image"))
        await backend.close()

    asyncio.run(play())
    assert not list((tmp_path / "pods").iterdir())


def test_a_missing_kubectl_is_said_by_the_probe() -> None:
    assert "not installed" in (KubernetesBackend.probe("no-such-kubectl") or "")
