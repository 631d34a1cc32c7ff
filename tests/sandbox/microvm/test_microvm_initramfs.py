"""The archive a guest boots from says what was put in, to any reader of the format."""

from __future__ import annotations

import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.sandbox.microvm import initramfs
from rollmill.sandbox.microvm.clock import counter_khz

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=40).filter(lambda name: name != "TRAILER!!!")


def read_archive(data: bytes) -> dict[str, tuple[int, bytes, tuple[int, int]]]:
    """As the kernel does: entry after entry, going on behind a trailer when another archive follows."""
    found, at = {}, 0
    while at < len(data):
        assert data[at : at + 6] == b"070701" and at % 4 == 0
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        mode, size, rdev, num_name = fields[1], fields[6], (fields[9], fields[10]), fields[11]
        name = data[at + 110 : at + 110 + num_name - 1].decode()
        at += (110 + num_name + 3) // 4 * 4
        if name != "TRAILER!!!":
            found[name] = (mode, data[at : at + size], rdev)
        at += (size + 3) // 4 * 4
    return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.dictionaries(NAMES, st.binary(max_size=300), max_size=6))
def test_archive_gives_back_every_file(files: dict[str, bytes]) -> None:
    found = read_archive(initramfs.cpio([(name, stat.S_IFREG | 0o644, data) for name, data in files.items()]))
    assert {name: data for name, (_, data, _) in found.items()} == files


def test_boxs_part_follows_the_shared_part() -> None:
    modules = {"b.ko": b"two", "a.ko": b"one"}
    found = read_archive(initramfs.base(b"\x7fELF", modules) + initramfs.box({"hostname": "h", "uid": 1000}, {"A": "x=y"}))
    assert found["init"][:2] == (stat.S_IFREG | 0o755, b"\x7fELF")
    assert found["modules.list"][1] == b"/modules/b.ko\n/modules/a.ko\n"
    assert found["modules/a.ko"][1] == b"one"
    assert found["dev/console"][0] == stat.S_IFCHR | 0o600 and found["dev/console"][2] == (5, 1)
    assert found["box.conf"][1] == b"hostname=h\0uid=1000\0env=A=x=y\0"


def test_setting_with_a_nul_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        initramfs.box({"hostname": "a\0b"}, {})


def test_counter_is_measured_alike_twice() -> None:
    first = counter_khz()
    if first is None:
        pytest.skip("this processor has no time-stamp counter that can be read")
    counter_khz.cache_clear()
    second = counter_khz()
    # The readings are 20 ms apart and each lies within some microseconds of its time, 1 in 10,000; a hundred times that is a mistake.
    assert second is not None and abs(second - first) < first / 100
