"""Turns the failure that keeps boxes from being made on this machine into one sentence that says what to change."""

from __future__ import annotations

import errno

_USER_NAMESPACE_SWITCHES = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("/proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
)


def sentence(error: OSError, *, rootless: bool) -> str:
    what = f"the namespace sandbox does not work here ({error.strerror or error})"
    if error.errno == errno.ENOSPC:
        limits = "user.max_user_namespaces, max_pid_namespaces, max_net_namespaces or max_mnt_namespaces"
        return f"{what}: the limit on namespaces is reached; raise it with sysctl ({limits})"
    if error.errno == errno.ENOSYS:
        return f"{what}: it needs Linux 6.1 or newer"
    if error.errno in (errno.EPERM, errno.EACCES):
        if not rootless:
            return f"{what}: run it outside the container, or start the container with `--privileged`"
        for path, closed, setting in _USER_NAMESPACE_SWITCHES:
            if _read(path) == closed:
                return f"{what}: allow user namespaces with `sysctl {setting}`, or run as root"
        return f"{what}: run as root, or allow this user (in a container: `--security-opt seccomp=unconfined`) to make user namespaces"
    return f"{what}: run as root on Linux 6.1 or newer"


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
