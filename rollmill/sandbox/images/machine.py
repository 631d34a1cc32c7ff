"""Makes a tree look like somebody's machine: accounts, /etc, a home with its dotfiles, logs. What a base already has stays as it is.

Owns only what every machine has; programs and projects come from elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import blake3
import msgspec

from rollmill.sandbox.images.tree import Tree

_FOLDERS = {
    "dev": 0o755, "etc": 0o755, "etc/skel": 0o755, "home": 0o755, "media": 0o755, "mnt": 0o755, "opt": 0o755, "proc": 0o555, "root": 0o700,
    "run": 0o755, "srv": 0o755, "sys": 0o555, "tmp": 0o1777, "usr/local/bin": 0o755, "usr/local/lib": 0o755, "usr/local/share": 0o755,
    "usr/local/src": 0o755, "var/cache": 0o755, "var/lib": 0o755, "var/log": 0o755, "var/mail": 0o2775, "var/spool": 0o755,
    "var/tmp": 0o1777,
}  # fmt: skip

_PROFILE = """\
if [ "$(id -u)" -eq 0 ]; then
  PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
else
  PATH="/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
fi
export PATH
if [ -n "${BASH-}" ] && [ -f /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi
for part in /etc/profile.d/*.sh; do [ -r "$part" ] && . "$part"; done
unset part
"""
_BASHRC = """\
case $- in *i*) ;; *) return ;; esac
HISTCONTROL=ignoreboth
HISTSIZE=1000
HISTFILESIZE=2000
shopt -s histappend checkwinsize
PS1='\\u@\\h:\\w\\$ '
alias ll='ls -alF'
alias la='ls -A'
[ -f ~/.bash_aliases ] && . ~/.bash_aliases
"""
_HOME_PROFILE = """\
if [ -n "$BASH_VERSION" ] && [ -f "$HOME/.bashrc" ]; then . "$HOME/.bashrc"; fi
if [ -d "$HOME/bin" ]; then PATH="$HOME/bin:$PATH"; fi
if [ -d "$HOME/.local/bin" ]; then PATH="$HOME/.local/bin:$PATH"; fi
"""
_LOGOUT = '[ "$SHLVL" = 1 ] && [ -x /usr/bin/clear_console ] && /usr/bin/clear_console -q\n'
_PASSWD = """\
root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
bin:x:2:2:bin:/bin:/usr/sbin/nologin
sys:x:3:3:sys:/dev:/usr/sbin/nologin
mail:x:8:8:mail:/var/mail:/usr/sbin/nologin
www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = """\
root:x:0:
daemon:x:1:
bin:x:2:
sys:x:3:
adm:x:4:
tty:x:5:
mail:x:8:
sudo:x:27:
www-data:x:33:
utmp:x:43:
staff:x:50:
users:x:100:
nogroup:x:65534:
"""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Whose machine it is."""

    user: str = "dev"
    uid: int = 1000
    home: str = "/home/dev"
    shell: str = "/bin/bash"
    hostname: str = "workstation"


def furnish(tree: Tree, account: Account) -> None:
    """Add what is missing, and the account."""
    for path, mode in _FOLDERS.items():
        if tree.stat(path) is None:
            tree.put_folder(path, mode=mode)
    for path, text in _files().items():
        if tree.stat(path) is None:
            tree.put_file(path, [text.encode()])
    if tree.stat("etc/localtime") is None:
        tree.put_link("etc/localtime", "/usr/share/zoneinfo/Etc/UTC")
    if tree.stat("etc/mtab", follow=False) is None:
        tree.put_link("etc/mtab", "../proc/self/mounts")
    _add_account(tree, account)
    # These three say which machine it is, so a base's own are replaced.
    tree.put_file("etc/hostname", [f"{account.hostname}\n".encode()])
    hosts = f"127.0.0.1\tlocalhost\n127.0.1.1\t{account.hostname}\n\n::1\tlocalhost ip6-localhost ip6-loopback\nff02::1\tip6-allnodes\n"
    tree.put_file("etc/hosts", [hosts.encode()])
    tree.put_file("etc/machine-id", [f"{blake3.blake3(account.hostname.encode()).hexdigest()[:32]}\n".encode()], mode=0o444)


def _files() -> dict[str, str]:
    files = {
        "etc/passwd": _PASSWD,
        "etc/group": _GROUP,
        "etc/nsswitch.conf": "passwd:\tfiles\ngroup:\tfiles\nshadow:\tfiles\nhosts:\tfiles dns\nservices:\tfiles\nprotocols:\tfiles\n",
        "etc/resolv.conf": "nameserver 9.9.9.9\n",
        "etc/shells": "/bin/sh\n/usr/bin/sh\n/bin/bash\n/usr/bin/bash\n",
        "etc/profile": _PROFILE,
        "etc/bash.bashrc": "[ -z \"$PS1\" ] && return\nshopt -s checkwinsize\nPS1='\\u@\\h:\\w\\$ '\n",
        "etc/timezone": "Etc/UTC\n",
        "etc/fstab": "/dev/vda1\t/\text4\terrors=remount-ro\t0\t1\n",
        "etc/environment": "LANG=C.UTF-8\n",
        "etc/host.conf": "multi on\n",
        "etc/skel/.bashrc": _BASHRC,
        "etc/skel/.profile": _HOME_PROFILE,
        "etc/skel/.bash_logout": _LOGOUT,
        "var/log/lastlog": "",
        "var/log/wtmp": "",
        "root/.bashrc": _BASHRC,
        "root/.profile": "if [ -f ~/.bashrc ]; then . ~/.bashrc; fi\n",
    }
    for name in ("protocols", "services"):
        if (host := Path("/etc") / name).is_file():
            files[f"etc/{name}"] = host.read_text()
    return files


def _add_account(tree: Tree, account: Account) -> None:
    name, ids = account.user, {"uid": account.uid, "gid": account.uid}
    if account.uid != 0:
        line = f"{name}:x:{account.uid}:{account.uid}:{name},,,:{account.home}:{account.shell}"
        _add_line(tree, "etc/passwd", line, mode=0o644)
        _add_line(tree, "etc/group", f"{name}:x:{account.uid}:", mode=0o644)
        if tree.stat("etc/shadow") is not None:
            _add_line(tree, "etc/shadow", f"{name}:!:19000:0:99999:7:::", mode=0o640)
    if tree.stat(account.home) is None:
        tree.put_folder(account.home, mode=0o755, **ids)
    for dotfile in (".bashrc", ".profile", ".bash_logout"):
        path = f"{account.home}/{dotfile}"
        if tree.stat(path) is None and (text := tree.read(f"etc/skel/{dotfile}")) is not None:
            tree.put_file(path, [text], **ids)


def _add_line(tree: Tree, path: str, line: str, *, mode: int) -> None:
    """One account per name and per id: a line that has either makes way."""
    name, _, number = line.split(":")[:3]
    lines = (tree.read(path) or b"").decode(errors="surrogateescape").splitlines()
    by_id = path != "etc/shadow"
    kept = [old for old in lines if old.split(":")[0] != name and not (by_id and [*old.split(":"), "", ""][2] == number)]
    text = "\n".join([*kept, line]) + "\n"
    tree.put_file(path, [text.encode(errors="surrogateescape")], mode=mode)
