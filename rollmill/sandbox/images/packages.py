"""Fetches packages on the host, so that a box can install them for real without a network: Debian packages with apt, wheels with pip.

Signatures are checked by the host's own apt with its own keys. Knows what to fetch; the installing commands run in a box.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_FETCH_S = 1800.0
_KEYRINGS = ("/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/ubuntu-archive-keyring.gpg")
INSTALL_DEBS = """\
set -e
cd {folder}
export DEBIAN_FRONTEND=noninteractive DEBCONF_NONINTERACTIVE_SEEN=true LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin
printf '#!/bin/sh\\nexit 101\\n' > /usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
mkdir -p /var/lib/dpkg
test -e /var/lib/dpkg/status || touch /var/lib/dpkg/status
test -e /var/lib/dpkg/available || touch /var/lib/dpkg/available
for first in {first}; do
  for deb in "$first"_*.deb; do test ! -e "$deb" || dpkg --force-unsafe-io --force-depends --install "$deb"; done
done
dpkg --force-unsafe-io --force-depends --unpack *.deb
dpkg --force-unsafe-io --configure --pending
rm -f /usr/sbin/policy-rc.d
dpkg --audit
"""
"""Real installation, with every package's own scripts; services are not started (`policy-rc.d`), since nothing runs in an image;
nothing is flushed to the disk (`unsafe-io`), since a box that dies is not kept."""
FIRST = "base-passwd base-files dpkg libc6 perl-base mawk debconf".split()
"""What the scripts of other packages take for granted, in an order that works from nothing."""
INSTALL_WHEELS = (
    'set -e; cd {folder}; set -- pip-*.whl; python3 "$1/pip" install --quiet --no-index --find-links=. --break-system-packages '
    "--root-user-action=ignore --no-warn-script-location --no-cache-dir --requirement=requirements.txt"
)


def sources_for(suite: str, mirror: str) -> list[str]:
    """The lines of a sources.list for a suite: from the mirror, or from where this host gets its own packages."""
    key = next((path for path in _KEYRINGS if os.path.exists(path)), None)
    if not re.fullmatch(r"[a-z][a-z0-9-]*", suite):
        raise ValueError(f"suite {suite!r} is not the name of a Debian release; write e.g. base = 'debian:bookworm'")
    options = f" [signed-by={key}]" if key else ""
    uris = [mirror] if mirror else _host_uris()
    if not uris:
        raise ValueError("this host has no Debian sources; say where packages come from: mirror = 'URL' in the recipe")
    lines = []
    for uri in dict.fromkeys(uris):
        is_security = "security" in uri
        lines.append(f"deb{options} {uri} {suite}{'-security' if is_security else ''} main")
        if not is_security:
            lines.append(f"deb{options} {uri} {suite}-updates main")
    return lines if suite not in ("sid", "unstable") else lines[:1]


def _host_uris() -> list[str]:
    found = []
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if path.is_file() and path.suffix in (".list", ".sources"):
            text = path.read_text(errors="replace")
            found += re.findall(r"^URIs:\s*(\S+)", text, re.MULTILINE)
            found += re.findall(r"^deb\s+(?:\[[^\]]*\]\s+)?(\S+)", text, re.MULTILINE)
    return [uri for uri in found if re.search(r"/(debian|debian-security|ubuntu)/?$", uri)]


def fetch_debs(names: Sequence[str], folder: Path, *, status: bytes, sources: Iterable[str]) -> list[Path]:
    """The packages and all they need that `status`, the image's dpkg database, does not have yet."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise ValueError(
                f"Debian packages need `{program}` on this host, which is not there; use another base, or build on a Debian host"
            )
    for path in ("lists/partial", "archives/partial"):
        (folder / path).mkdir(parents=True, exist_ok=True)
    (folder / "status").write_bytes(status)
    (folder / "sources.list").write_text("".join(f"{line}\n" for line in sources))
    options = {
        "Dir::State": folder, "Dir::State::status": folder / "status", "Dir::State::lists": folder / "lists", "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives", "Dir::Etc::sourcelist": folder / "sources.list", "Dir::Etc::sourceparts": "-",
        "Dir::Etc::preferencesparts": "-", "APT::Install-Recommends": "false", "APT::Sandbox::User": "", "Acquire::Languages": "none",
        "Acquire::Retries": "2", "APT::Get::List-Cleanup": "false", "APT::Update::Error-Mode": "any",
    }  # fmt: skip
    apt = ["apt-get", "--yes", "--quiet=2", *(f"-o{key}={value}" for key, value in options.items())]
    _fetch([*apt, "update"], "the lists of Debian packages")
    _fetch([*apt, "install", "--download-only", "--no-install-recommends", "--", *names], f"Debian packages {' '.join(names)[:200]}")
    return sorted((folder / "archives").glob("*.deb"))


def fetch_wheels(requirements: Sequence[str], folder: Path, *, python: str, glibc: str) -> None:
    """Wheels of the requirements and of pip itself, for the image's Python (`3.11`) and C library (`2.36`)."""
    for requirement in requirements:
        if requirement.startswith("-"):
            raise ValueError(f"packages.pip = {requirement!r} is an option, not a requirement; write names and versions only")
    folder.mkdir(exist_ok=True)
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements))
    arch, newest = os.uname().machine, int(glibc.partition(".")[2])
    platforms = [f"manylinux_2_{minor}_{arch}" for minor in range(newest, 16, -1)] + [f"manylinux2014_{arch}", f"linux_{arch}"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    where = [f"--platform={name}" for name in platforms]
    _fetch([*pip, *where, f"--dest={folder}", "pip", *requirements], f"Python packages {' '.join(requirements)[:200]}")


def _fetch(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{what} could not be fetched within {_FETCH_S:g} s; check the network of this host") from None
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.startswith(("E:", "Err:", "ERROR:"))] or done.stderr.splitlines()
        raise ValueError(f"{what} could not be fetched: {' / '.join(words[-4:])}; check the names, and the network of this host")
