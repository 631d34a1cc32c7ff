"""The hot-load endpoint over a real server: verified snapshots become versions, and everything doubtful is refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from interop_worlds import bytes_at, bytes_in, flip, model_at, publish_steps, served, write_model

from rollmill.weights.interop.hot_load import PATH, Refused, StoreTarget, announce, hot_load_app, share_ready
from rollmill.weights.interop.tensor_file import write_file
from rollmill.weights.interop.xor_dir import Checksum, Formats, write_xor_directory
from rollmill.weights.manifest import Lease, Tag
from rollmill.weights.store import WeightStore, open_store

KEY = {"Authorization": "Bearer sesame"}


class Deployment:
    """A store, the root that snapshots are uploaded to, and the endpoint."""

    def __init__(self, tmp_path: Path) -> None:
        self.store = open_store(tmp_path / "store")
        self.root = tmp_path / "uploads"
        self.root.mkdir()
        self.app = hot_load_app(StoreTarget(self.store, self.root), api_key="sesame")
        self.url = ""
        self.client = httpx.Client(timeout=30)

    def upload_full(self, identity: str, step: int) -> str:
        write_model(self.root / identity, step)
        return identity

    def upload_delta(self, identity: str, old: int, new: int) -> str:
        formats = Formats(checksum=Checksum.ADLER32)
        write_xor_directory(self.root / identity, version=new, base_version=old, old=model_at(old), new=model_at(new), formats=formats)
        return identity

    def post(self, body: object) -> httpx.Response:
        return self.client.post(self.url + PATH, json=body, headers=KEY)

    def get(self) -> list[dict]:
        return self.client.get(self.url + PATH, headers=KEY).json()["replicas"]


def delta_on(previous: str, identity: str) -> dict[str, object]:
    """The body as the provider's guide has it, misspelling included."""
    metadata = {"previous_snapshot_identity": previous, "compression_format": "zstd", "checksum_format": "alder32"}
    return {"identity": identity, "incremental_snapshot_metadata": metadata, "reset_prompt_cache": "new_session"}


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    found = Deployment(tmp_path)
    with found.client, served(found.app) as found.url:
        yield found


def test_full_then_deltas_become_versions(deployment: Deployment) -> None:
    assert deployment.post({"identity": deployment.upload_full("base", 0)}).json() == {
        "accepted": True, "identity": "base", "current_snapshot_identity": "base", "version": 0, "already_current": False,
    }  # fmt: skip
    for step in (1, 2):
        previous = "base" if step == 1 else "step_1"
        answer = deployment.post(delta_on(previous, deployment.upload_delta(f"step_{step}", step - 1, step)))
        assert (answer.status_code, answer.json()["version"]) == (200, step)
    assert [bytes_in(deployment.store, version) for version in range(3)] == [bytes_at(step) for step in range(3)]


def test_same_signal_twice_is_accepted_once(deployment: Deployment) -> None:
    deployment.post({"identity": deployment.upload_full("base", 0)})
    signal = delta_on("base", deployment.upload_delta("next", 0, 1))
    assert [deployment.post(signal).json()["already_current"] for _ in range(3)] == [False, True, True]
    assert deployment.store.versions() == [0, 1] and bytes_in(deployment.store, 1) == bytes_at(1)


def test_same_bits_under_a_new_identity_are_a_new_version(deployment: Deployment) -> None:
    for identity in ("a", "b"):
        assert deployment.post({"identity": deployment.upload_full(identity, 0)}).status_code == 200
    assert deployment.store.versions() == [0, 1]
    assert deployment.post(delta_on("b", deployment.upload_delta("c", 0, 1))).status_code == 200


def test_wrong_previous_is_refused_with_both_names(deployment: Deployment) -> None:
    deployment.upload_delta("next", 0, 1)
    answer = deployment.post(delta_on("base", "next"))
    assert answer.status_code == 409 and "'base'" in answer.text and "None" in answer.text
    deployment.post({"identity": deployment.upload_full("base", 0)})
    answer = deployment.post(delta_on("elsewhere", "next"))
    assert answer.status_code == 409 and "'elsewhere'" in answer.text and "'base'" in answer.text
    assert deployment.store.versions() == [0]


def test_going_back_is_refused(deployment: Deployment) -> None:
    for step, identity in enumerate(("a", "b")):
        deployment.post({"identity": deployment.upload_full(identity, step)})
    answer = deployment.post({"identity": "a"})
    assert answer.status_code == 409 and "'a' was served before 'b'" in answer.text
    assert deployment.store.versions() == [0, 1]


def test_delta_sent_as_full_and_full_sent_as_delta_are_refused(deployment: Deployment) -> None:
    deployment.post({"identity": deployment.upload_full("base", 0)})
    answer = deployment.post({"identity": deployment.upload_delta("delta", 0, 1)})
    assert answer.status_code == 422 and "sent as a full snapshot" in answer.text
    answer = deployment.post(delta_on("base", deployment.upload_full("full", 1)))
    assert answer.status_code == 422 and "sent as a delta" in answer.text
    (deployment.root / "delta" / "model.safetensors.index.json").unlink()
    assert deployment.post({"identity": "delta"}).status_code == 422
    assert deployment.store.versions() == [0]


def test_checksums_are_verified_before_anything_is_published(deployment: Deployment) -> None:
    deployment.post({"identity": deployment.upload_full("base", 0)})
    deployment.upload_delta("wrong_base", 5, 6)
    deployment.upload_delta("flipped", 0, 1)
    flip(next((deployment.root / "flipped").glob("*.safetensors")))
    for identity in ("wrong_base", "flipped"):
        assert deployment.post(delta_on("base", identity)).status_code == 422
    assert deployment.store.versions() == [0]
    # A refusal leaves the way open for the right one.
    assert deployment.post(delta_on("base", deployment.upload_delta("right", 0, 1))).status_code == 200


def test_full_snapshot_of_another_model_or_damaged_is_refused(deployment: Deployment) -> None:
    deployment.post({"identity": deployment.upload_full("base", 0)})
    (deployment.root / "other").mkdir()
    write_file(deployment.root / "other" / "model.safetensors", {n: t for n, t in model_at(1).items() if n != "norm"}, {})
    answer = deployment.post({"identity": "other"})
    assert answer.status_code == 422 and "norm" in answer.text
    torn = deployment.root / deployment.upload_full("torn", 1) / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-4])
    assert deployment.post({"identity": "torn"}).status_code == 422
    (deployment.root / "nothing").mkdir()
    assert deployment.post({"identity": "nothing"}).status_code == 422
    assert deployment.store.versions() == [0]


@pytest.mark.parametrize("identity", ["", "..", "a/b", "../store", ".hidden", "x" * 300, "line\nbreak"])
def test_identity_that_is_no_directory_name_is_refused(deployment: Deployment, identity: str) -> None:
    assert deployment.post({"identity": identity}).status_code == 400


def test_links_out_of_the_root_and_missing_snapshots_are_not_found(deployment: Deployment, tmp_path: Path) -> None:
    write_model(tmp_path / "outside", 0)
    (deployment.root / "link").symlink_to(tmp_path / "outside")
    assert [deployment.post({"identity": name}).status_code for name in ("link", "missing")] == [404, 404]


def test_malformed_signals_and_strangers_are_refused(deployment: Deployment) -> None:
    for body in (
        [],
        {},
        {"identity": 7},
        {"identity": "a", "incremental_snapshot_metadata": {}},
        {"identity": "a", "reset_prompt_cache": "x"},
    ):
        assert deployment.post(body).status_code == 400, body
    assert deployment.client.post(deployment.url + PATH, json={"identity": "a"}).status_code == 401
    assert deployment.client.get(deployment.url + PATH, headers={"Authorization": "Bearer other"}).status_code == 401
    assert deployment.post(delta_on("x", "y") | {"incremental_snapshot_metadata": {"previous_snapshot_identity": "x"}}).status_code == 409


def test_unknown_compression_is_named(deployment: Deployment) -> None:
    deployment.post({"identity": deployment.upload_full("base", 0)})
    body = delta_on("base", deployment.upload_delta("next", 0, 1))
    body["incremental_snapshot_metadata"] = {"previous_snapshot_identity": "base", "compression_format": "arc_v2"}
    answer = deployment.post(body)
    assert answer.status_code == 422 and "arc_v2" in answer.text


def lease(store: WeightStore, replica: str, version: int | None, **more: object) -> None:
    proof = "" if version is None else store.version(version).fingerprint
    fields = {"fingerprint": proof, "renewed": 0.0, "expires": 4e9} | more
    store.renew(Lease(replica=replica, version=version, **fields))  # type: ignore[arg-type]


def test_status_tells_what_each_live_replica_serves(deployment: Deployment) -> None:
    assert deployment.get() == []
    deployment.post({"identity": deployment.upload_full("base", 0)})
    deployment.post(delta_on("base", deployment.upload_delta("next", 0, 1)))
    lease(deployment.store, "a", 1)
    lease(deployment.store, "b", 0)
    lease(deployment.store, "c", None)
    lease(deployment.store, "d", 1, fingerprint="00" * 16)
    lease(deployment.store, "e", 1, problem="the disk is full")
    lease(deployment.store, "gone", 1, expires=1.0)
    rows = {row["replica_id"]: row for row in deployment.get()}
    assert rows.keys() == set("abcde")
    assert rows["a"] == {"replica_id": "a", "readiness": True, "current_snapshot_identity": "next", "current_version": 1}
    assert (rows["b"]["readiness"], rows["b"]["current_snapshot_identity"]) == (True, "base")
    assert [rows[name]["readiness"] for name in "cde"] == [False] * 3
    assert "other weights" in rows["d"]["readiness_reason"] and rows["e"]["readiness_reason"] == "the disk is full"
    assert share_ready(deployment.url, "next", headers=KEY) == pytest.approx(1 / 5)


def test_version_of_the_trainer_goes_by_its_tag_or_number(deployment: Deployment) -> None:
    publish_steps(deployment.store, 0)
    assert deployment.post(delta_on("wrong", "x")).text.count("'0'") == 1
    deployment.store.tag(Tag(name="released", version=0, created=1.0))
    assert deployment.post(delta_on("released", deployment.upload_delta("next", 0, 1))).status_code == 200
    assert bytes_in(deployment.store, 1) == bytes_at(1)


def test_identities_are_known_to_a_new_process(deployment: Deployment) -> None:
    deployment.post({"identity": deployment.upload_full("base", 0)})
    again = StoreTarget(deployment.store, deployment.root)
    assert again.current() == "base" and again.knows("base") and not again.knows("next")


def test_client_announces_and_hears_refusals(deployment: Deployment) -> None:
    assert announce(deployment.url, deployment.upload_full("base", 0), headers=KEY)["version"] == 0
    assert announce(deployment.url, deployment.upload_delta("next", 0, 1), previous="base", headers=KEY)["version"] == 1
    with pytest.raises(Refused, match=r"409.*'base'.*'next'") as refused:
        announce(deployment.url, deployment.upload_delta("third", 0, 1), previous="base", headers=KEY)
    assert refused.value.status == 409
    with pytest.raises(ValueError, match="no address"):
        announce("ftp://x", "base")
