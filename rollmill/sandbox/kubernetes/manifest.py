"""The pod of a box and the policy that keeps it off the network, as plain data; talks to no cluster."""

from __future__ import annotations

import math
from typing import Any

from rollmill.sandbox.container.owner import LABEL
from rollmill.sandbox.records import SandboxSpec

Json = dict[str, Any]

FOLDER = "/.rollmill"
"""A volume of the pod's own for the agent, so that the image's files stay as they are."""
AGENT = f"{FOLDER}/box"
MANAGED = {"app.kubernetes.io/managed-by": "rollmill"}
_ROOT_RIGHTS = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"]
_FOLDER_BYTES = 16 << 20
CONNECT_S = 300
"""How long a pod waits for its owner's first word before it ends."""

UPLOAD = f"cat > {FOLDER}/part && chmod 755 {FOLDER}/part && mv {FOLDER}/part {AGENT}"
SERVE = f"echo $$ > {FOLDER}/pid && exec {AGENT} serve ."
WATCH = (
    f"i=0; until [ -s {FOLDER}/pid ]; do i=$((i+1)); [ $i -gt {CONNECT_S} ] && exit 1; sleep 1; done; "
    f'while kill -0 "$(cat {FOLDER}/pid)" 2>/dev/null; do sleep 1; done'
)
"""The pod's own process: the lease. The agent ends when its owner's connection does, and the pod about a second later."""


def pod(name: str, owner: str, spec: SandboxSpec, image: str, *, runtime_class: str = "") -> Json:
    limits: Json = {"memory": str(spec.memory_bytes), "ephemeral-storage": str(spec.disk_bytes + _FOLDER_BYTES)}
    if spec.cpus:
        limits["cpu"] = f"{math.ceil(spec.cpus * 1000)}m"
    security: Json = {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "capabilities": {"drop": ["ALL"], "add": _ROOT_RIGHTS if spec.root else []},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if spec.root:
        security["runAsUser"] = 0
    box = {
        "name": "box",
        "image": image,
        "command": ["/bin/sh", "-c", WATCH],
        "resources": {"limits": limits, "requests": limits},
        "securityContext": security,
        "volumeMounts": [{"name": "agent", "mountPath": FOLDER}],
    }
    content: Json = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": math.ceil(spec.lifetime_s),
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [box],
        "volumes": [{"name": "agent", "emptyDir": {"sizeLimit": str(_FOLDER_BYTES)}}],
    }
    if spec.hostname:
        content["hostname"] = spec.hostname
    if runtime_class:
        content["runtimeClassName"] = runtime_class
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {**MANAGED, LABEL: owner}},
        "spec": content,
    }


def isolation() -> Json:
    """No connection to or from any box, where the cluster's network plug-in heeds policies."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "rollmill-boxes", "labels": MANAGED},
        "spec": {"podSelector": {"matchLabels": MANAGED}, "policyTypes": ["Ingress", "Egress"]},
    }


def complaint(found: Json) -> str:
    """Why a pod does not run, in the cluster's own words."""
    status = found.get("status", {})
    waiting = [one.get("state", {}).get("waiting") or {} for one in status.get("containerStatuses", [])]
    words = [f"{one.get('reason', '')} {one.get('message', '')}".strip() for one in waiting]
    words += [str(one["message"]) for one in status.get("conditions", []) if one.get("status") == "False" and one.get("message")]
    return "; ".join(word for word in words if word) or f"its phase is {status.get('phase', 'unknown')}"
