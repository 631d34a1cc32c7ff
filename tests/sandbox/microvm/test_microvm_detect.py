"""What this machine can run is told from a few files, in words a person can act on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.sandbox.microvm import detect
from rollmill.sandbox.microvm.assets import Assets

WHOLE = ("kernel/vmlinux", "kernel/modules.list", "base.erofs", "base.json", "bin/qemu-system-x86_64")


def fake_host(root: Path, *, kvm: bool, modules: tuple[str, ...]) -> Path:
    (root / "dev").mkdir(parents=True)
    if kvm:
        (root / "dev" / "kvm").touch()
    for name in (*modules, "virtio"):
        (root / "sys" / "module" / name).mkdir(parents=True)
    return root


def fake_folder(root: Path, names: tuple[str, ...] = WHOLE) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch(mode=0o755)
    return root


@pytest.mark.parametrize(
    ("kvm", "modules", "may_open", "name", "words"),
    [
        (False, (), True, "tcg", "there is no /dev/kvm"),
        (True, ("kvm", "kvm_pvm"), True, "tcg", "boots no stock guest kernel"),
        (True, ("kvm", "kvm_amd", "kvm_pvm"), True, "tcg", "boots no stock guest kernel"),
        (True, ("kvm",), True, "tcg", "neither kvm_intel nor kvm_amd"),
        (True, ("kvm", "kvm_intel"), False, "tcg", "may not be opened by this user"),
        (True, ("kvm", "kvm_intel"), True, "kvm", ""),
        (True, ("kvm", "kvm_amd"), True, "kvm", ""),
    ],
)
def test_accelerator_is_the_processor_only_where_it_boots_stock_guests(
    tmp_path: Path, kvm: bool, modules: tuple[str, ...], may_open: bool, name: str, words: str
) -> None:
    root = fake_host(tmp_path / "host", kvm=kvm, modules=modules)
    host = detect.look(Assets(fake_folder(tmp_path / "vm")), root=root, may_open=lambda path: may_open)
    found = detect.accelerator(host)
    assert found.name == name
    assert words in found.why


def test_whole_folder_is_no_obstacle(tmp_path: Path) -> None:
    host = detect.look(Assets(fake_folder(tmp_path / "vm")), root=fake_host(tmp_path / "host", kvm=False, modules=()))
    if host.machine == "x86_64" and host.system == "linux" and host.has_setpriv:
        assert detect.obstacle(host) is None


def test_missing_pieces_are_named_with_the_command_that_brings_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "base.erofs" in (Assets(fake_folder(tmp_path / "a", ("kernel/vmlinux", "kernel/modules.list"))).missing or "")
    lacking = Assets(fake_folder(tmp_path / "b", WHOLE[:-1])).missing
    assert lacking is not None and "no qemu-system-x86_64" in lacking and "make setup-vm" in lacking


def test_machine_without_setpriv_is_refused_because_machines_would_outlive_their_owner(tmp_path: Path) -> None:
    host = detect.Host(system="linux", machine="x86_64", has_kvm=False, may_open_kvm=False, modules=frozenset(), has_setpriv=False)
    assert "setpriv" in (detect.obstacle(host) or "")


def test_other_systems_are_refused_by_name() -> None:
    host = detect.Host(system="darwin", machine="arm64", has_kvm=False, may_open_kvm=False, modules=frozenset(), has_setpriv=True)
    assert "darwin on arm64" in (detect.obstacle(host) or "")


def test_missing_system_folders_mean_no_processor_help(tmp_path: Path) -> None:
    host = detect.look(Assets(tmp_path), root=tmp_path / "empty")
    assert detect.accelerator(host).name == "tcg"
