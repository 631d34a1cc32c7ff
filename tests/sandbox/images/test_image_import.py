"""Images come in without a daemon, checked to the last byte, whichever of the usual shapes they have."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import tarfile
from pathlib import Path

import pytest
import zstandard
from test_image_layers import pack, seen

from rollmill.sandbox.images import ImageStore, import_archive

PASSWD = b"root:x:0:0::/root:/bin/sh\nann:x:1001:1002::/home/ann:/bin/bash\nweb:x:33:33::/var/www:/usr/sbin/nologin\n"
LAYERS = [pack(("etc/passwd", PASSWD), ("etc/group", b"staff:x:50:\n"), ("bin/sh", b"#!"), ("a", b"1")), pack((".wh.a", b""), ("b", b"2"))]
MERGED = {"bin": "folder", "bin/sh": "#!", "b": "2", "etc": "folder", "etc/group": "staff:x:50:\n", "etc/passwd": PASSWD.decode()}
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def config(user: str = "ann", layers: list[bytes] = LAYERS) -> bytes:
    inner = {"Env": ["PATH=/opt/bin", "A=b=c"], "WorkingDir": "/srv", "User": user, "Entrypoint": ["/never"]}
    return json.dumps({"config": inner, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha(layer)}" for layer in layers]}}).encode()


def saved(**changed: bytes) -> bytes:
    """As `docker save` wrote before 25."""
    manifest = json.dumps([{"Config": "c.json", "RepoTags": ["x:1"], "Layers": ["0/layer.tar", "1/layer.tar"]}]).encode()
    files = {"c.json": config(), "0/layer.tar": LAYERS[0], "1/layer.tar": LAYERS[1], "manifest.json": manifest} | changed
    return pack(*files.items())


def layout(squeeze: object = gzip.compress, user: str = "ann") -> dict[str, bytes]:
    blobs = {}

    def blob(data: bytes, kind: str, **more: object) -> dict[str, object]:
        blobs[f"blobs/sha256/{sha(data)}"] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{sha(data)}", "size": len(data), **more}

    layers = [blob(squeeze(layer), "layer.v1.tar+gzip") for layer in LAYERS]  # type: ignore[operator]
    manifest = blob(json.dumps({"config": blob(config(user), "config.v1+json"), "layers": layers}).encode(), "manifest.v1+json")
    other = {"mediaType": "x", "digest": f"sha256:{'0' * 64}", "platform": {"architecture": "unknown"}}
    inner = blob(json.dumps({"manifests": [manifest | {"platform": {"architecture": ARCHITECTURE}}, other]}).encode(), "index.v1+json")
    return blobs | {"oci-layout": b"{}", "index.json": json.dumps({"manifests": [inner]}).encode()}


def on_disk(folder: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def take(store: ImageStore, tmp_path: Path, data: bytes) -> dict[str, str]:
    (tmp_path / "archive").write_bytes(data)
    image = import_archive(tmp_path / "archive", "taken", store=store)
    return seen(store.rootfs(image))


@pytest.mark.parametrize("shape", ["saved", "saved, gzip", "layout as tar", "layout as tar, zstd"])
def test_archive_of_an_image_becomes_one_tree(store: ImageStore, tmp_path: Path, shape: str) -> None:
    data = {
        "saved": saved, "saved, gzip": lambda: gzip.compress(saved()), "layout as tar": lambda: pack(*layout().items()),
        "layout as tar, zstd": lambda: zstandard.compress(pack(*layout(zstandard.compress).items())),
    }[shape]()  # fmt: skip
    assert take(store, tmp_path, data) == MERGED
    image = store.get("taken")
    assert (image.user, image.uid, image.gid, image.home, image.shell) == ("ann", 1001, 1002, "/home/ann", "/bin/bash")
    assert image.env == {"PATH": "/opt/bin", "A": "b=c"} and image.workdir == "/srv"
    assert image.layers == tuple(f"sha256:{sha(layer)}" for layer in LAYERS)


def test_layout_in_a_folder_becomes_one_tree(store: ImageStore, tmp_path: Path) -> None:
    image = import_archive(on_disk(tmp_path / "l", layout()), "taken", store=store)
    assert seen(store.rootfs(image)) == MERGED


@pytest.mark.parametrize("squeeze", [bytes, gzip.compress, zstandard.compress])
def test_plain_root_file_system_becomes_an_image_of_root(store: ImageStore, tmp_path: Path, squeeze: object) -> None:
    assert take(store, tmp_path, squeeze(LAYERS[0]))["a"] == "1"  # type: ignore[operator]
    assert (store.get("taken").user, store.get("taken").shell, store.get("taken").home) == ("root", "/bin/sh", "/root")


@pytest.mark.parametrize(
    ("user", "found"),
    [
        ("33", ("web", 33, 33, "/bin/sh")),
        ("ann:staff", ("ann", 1001, 50, "/bin/bash")),
        ("7:8", ("7", 7, 8, "/bin/sh")),
        ("", ("root", 0, 0, "/bin/sh")),
    ],
)
def test_user_is_looked_up_in_the_image(store: ImageStore, tmp_path: Path, user: str, found: tuple[object, ...]) -> None:
    image = import_archive(on_disk(tmp_path / "l", layout(user=user)), "taken", store=store)
    assert (image.user, image.uid, image.gid, image.shell) == found


MANIFEST = json.dumps([{"Config": "c", "Layers": ["x"]}]).encode()
DAMAGED = {
    "a layer that is not the one named": (lambda: saved(**{"1/layer.tar": pack(("evil", b"1"))}), "damaged"),
    "a layer that is missing": (lambda: pack(("manifest.json", MANIFEST), ("c", config())), "layers"),
    "two images": (lambda: saved(**{"manifest.json": b"[{}, {}]"}), "more than one image"),
    "no JSON": (lambda: saved(**{"c.json": b"hello"}), "not JSON"),
    "cut": (lambda: gzip.compress(saved())[:-40], "damaged"),
    "not a tar": (lambda: os.urandom(2000), "damaged"),
    "a link as layer that leads out": (lambda: pack(("manifest.json", MANIFEST), ("c", "->/etc/passwd")), "not in"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "words"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_image_is_refused_and_leaves_nothing(store: ImageStore, tmp_path: Path, data: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        take(store, tmp_path, data())  # type: ignore[operator]
    assert store.images() == [] and list(store.root.glob("[0-9a-f]*")) == []


def test_blob_that_does_not_match_its_name_is_refused(store: ImageStore, tmp_path: Path) -> None:
    files = layout()
    name = next(name for name, data in files.items() if name.startswith("blobs") and b"diff_ids" in data)
    files[name] = files[name].replace(b"/srv", b"/etc")
    with pytest.raises(ValueError, match="is damaged: its SHA-256"):
        import_archive(on_disk(tmp_path / "l", files), "taken", store=store)


def test_image_for_another_machine_is_refused_with_what_there_is(store: ImageStore, tmp_path: Path) -> None:
    index = {"manifests": [{"digest": f"sha256:{'0' * 64}", "platform": {"architecture": "s390x"}}]}
    with pytest.raises(ValueError, match=r"0 images for .*s390x"):
        import_archive(on_disk(tmp_path / "l", {"index.json": json.dumps(index).encode()}), "taken", store=store)


def test_digest_that_is_a_path_is_refused(store: ImageStore, tmp_path: Path) -> None:
    index = {"manifests": [{"digest": "sha256:../../../etc/passwd"}]}
    with pytest.raises(ValueError, match="not a SHA-256"):
        import_archive(on_disk(tmp_path / "l", {"index.json": json.dumps(index).encode()}), "taken", store=store)


def test_huge_header_of_the_outer_archive_is_refused(store: ImageStore, tmp_path: Path) -> None:
    item = tarfile.TarInfo("././@LongLink")
    item.type, item.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
    path = tmp_path / "archive"
    data = io.BytesIO(saved()).getvalue()[: -(2 * 512)].rstrip(b"\0")
    path.write_bytes(data.ljust((len(data) + 511) // 512 * 512, b"\0") + item.tobuf(tarfile.GNU_FORMAT) + b"a" * 1024)
    with pytest.raises(ValueError, match="header of 8589934592 bytes"):
        import_archive(path, "taken", store=store)
