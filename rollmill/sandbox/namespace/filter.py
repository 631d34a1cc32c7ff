"""The system-call filter of a box as a classic BPF program: a pure function of the machine type.

A deny list, because model-written code may legitimately call nearly anything: refused are the calls that make namespaces
or mounts, reach the kernel's large attack surfaces, draw on what all boxes share, open sockets that a network namespace does not
contain, or change how the box's first process runs, which has the same user as the programs it starts.
"""

from __future__ import annotations

import errno
import struct

# (x86_64, aarch64); -1 where the machine has no such call.
_DENIED = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268), "unshare": (272, 97),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "clock_settime": (227, 112), "settimeofday": (164, 170), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "vhangup": (153, 58),
    "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "iopl": (172, -1), "ioperm": (173, -1), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443), "open_tree_attr": (467, 467),
}  # fmt: skip
_ABSENT = {
    # It hides its flags behind a pointer, which a filter cannot follow; "no such call" makes every libc fall back to clone.
    "clone3": (435, 435),
    # Its contexts are counted for the whole machine, so that one box could take them all; programs fall back to threads.
    "io_setup": (206, 0),
}
_FIRST_UNKNOWN = 470
"""Calls from here on are newer than this table: absent until someone has looked at them."""
_OF_PROCESS = {
    "prlimit64": (302, 261), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}  # fmt: skip
"""Calls whose first argument is a process."""
_SETPRIORITY, _IOPRIO_SET = (141, 140), (251, 30)
_USER_PRIORITY, _USER_IOPRIO = 2, 3
"""`which` of those two: all processes of a user, the first one among them."""
_AGENT = 1
_CLONE, _SOCKET = (56, 220), (41, 198)
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NAMESPACE_FLAGS = 0x7E020000
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
"""The families that a network namespace contains."""
_INET_PROTOCOLS = (0, 1, 6, 17, 58)
"""Default, ICMP, TCP, UDP, ICMPv6: a socket of another protocol has the kernel load a module for whoever asks."""
_NETLINK_PROTOCOLS = (0, 4)
"""Routes and addresses, which resolvers read; lists of sockets."""
_X32_BIT = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def program(machine: str) -> bytes | None:
    """The filter for a machine type as `uname -m` names it; None where no table exists for it."""
    if machine not in _AUDIT_ARCH:
        return None
    column = 0 if machine == "x86_64" else 1
    # Instructions with labels: (code, operand, label if true, label if false); "" falls through.
    code: list[tuple[int, int, str, str]] = [
        (_LOAD, _ARCH, "", ""),
        (_EQUAL, _AUDIT_ARCH[machine], "", "deny"),
        (_LOAD, _NR, "", ""),
        (_AT_LEAST, _X32_BIT, "deny", ""),
        (_AT_LEAST, _FIRST_UNKNOWN, "absent", ""),
        (_EQUAL, _CLONE[column], "clone", ""),
        (_EQUAL, _SOCKET[column], "socket", ""),
        (_EQUAL, _SETPRIORITY[column], "priority", ""),
        (_EQUAL, _IOPRIO_SET[column], "ioprio", ""),
    ]
    code += [(_EQUAL, numbers[column], "process", "") for numbers in _OF_PROCESS.values()]
    code += [(_EQUAL, numbers[column], "absent", "") for numbers in _ABSENT.values()]
    code += [(_EQUAL, numbers[column], "deny", "") for numbers in _DENIED.values() if numbers[column] >= 0]
    labels: dict[str, int] = {}

    def block(label: str, *instructions: tuple[int, int, str, str]) -> None:
        labels[label] = len(code)
        code.extend(instructions)

    block("allow", (_RETURN, _ALLOW, "", ""))
    block("clone", (_LOAD, _ARG0, "", ""), (_ANY_BIT, _NAMESPACE_FLAGS, "deny", ""), (_RETURN, _ALLOW, "", ""))
    for label, user in (("priority", _USER_PRIORITY), ("ioprio", _USER_IOPRIO)):
        block(label, (_LOAD, _ARG0, "", ""), (_EQUAL, user, "deny", ""), (_LOAD, _ARG1, "", ""), (_EQUAL, _AGENT, "deny", "yes"))
    block("process", (_LOAD, _ARG0, "", ""), (_EQUAL, _AGENT, "deny", "yes"))
    families = ((_UNIX, "yes"), (_INET, "inet"), (_INET6, "inet"), (_NETLINK, "netlink"))
    known = [(_EQUAL, family, label, "") for family, label in families]
    block("socket", (_LOAD, _ARG0, "", ""), *known, (_RETURN, _ERRNO | errno.EAFNOSUPPORT, "", ""))
    for label, protocols in (("inet", _INET_PROTOCOLS), ("netlink", _NETLINK_PROTOCOLS)):
        spoken = [(_EQUAL, protocol, "yes", "") for protocol in protocols]
        block(label, (_LOAD, _ARG2, "", ""), *spoken, (_RETURN, _ERRNO | errno.EPROTONOSUPPORT, "", ""))
    block("yes", (_RETURN, _ALLOW, "", ""))
    block("deny", (_RETURN, _ERRNO | errno.EPERM, "", ""))
    block("absent", (_RETURN, _ERRNO | errno.ENOSYS, "", ""))

    out = b""
    for here, (op, operand, yes, no) in enumerate(code):
        jump_yes, jump_no = (labels[label] - here - 1 if label else 0 for label in (yes, no))
        assert 0 <= jump_yes < 256 and 0 <= jump_no < 256
        out += struct.pack("<HBBI", op, jump_yes, jump_no, operand)
    return out
