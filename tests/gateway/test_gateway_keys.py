"""Keys open what they should and nothing else, and quotas hold whatever the clock does."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.gateway.front.keys import Bucket, Grant, KeyRing, KeySpec, digest_of, key_of, read_keys, ring_from
from rollmill.gateway.front.run import check_loopback
from rollmill.web import ApiError

SECRET = b"s" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def spec(name: str = "team", key: str = "sk-team", **limits: object) -> KeySpec:
    return KeySpec(name=name, digest=digest_of(key), **limits)  # type: ignore[arg-type]


def refused(ring: KeyRing, key: str, episode: str = "") -> int:
    with pytest.raises(ApiError) as caught:
        ring.grant(key, episode)
    return caught.value.status_code


def test_known_key_is_granted_and_others_are_not() -> None:
    ring = KeyRing([spec(may_admin=True)], secret=SECRET)
    grant = ring.grant("sk-team", "any")
    assert (grant.name, grant.is_admin, grant.episode) == ("team", True, "")
    assert [refused(ring, key) for key in ("", "sk-other", "sk-team ", "SK-TEAM", "\x00", "é")] == [401] * 6


def test_open_ring_grants_everything_but_a_forged_episode_key() -> None:
    ring = KeyRing(is_open=True, secret=SECRET)
    assert ring.grant("", "") == ring.grant("whatever", "e") == Grant(is_admin=True)
    assert refused(ring, "rme-" + "0" * 32 + "-e1", "e1") == 401


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_episode_key_opens_its_episode_alone(mine: str, other: str) -> None:
    ring = KeyRing(secret=SECRET)
    key = ring.episode_key(mine)
    assert key.isascii() and key.isprintable()
    mine = mine.encode("utf-8", "replace").decode()
    assert ring.grant(key, mine).episode == ring.grant(key, "").episode == mine
    assert not ring.grant(key, mine).is_admin
    if other != mine:
        assert refused(ring, key, other) == 403
    assert refused(KeyRing(secret=b"t" * 32), key, mine) == 401
    forged = key[:4] + ("0" if key[4] != "0" else "1") + key[5:]
    assert refused(ring, forged) == refused(ring, forged, mine) == refused(ring, key + "x") == 401


def test_episode_keys_survive_a_restart_with_the_same_secret() -> None:
    assert KeyRing(secret=SECRET).episode_key("e") == KeyRing(secret=SECRET).episode_key("e") != KeyRing().episode_key("e")


def test_requests_per_minute_are_refused_with_the_seconds_to_wait() -> None:
    clock = Clock()
    holder = KeyRing([spec(requests_per_min=2)], clock=clock).grant("sk-team", "").holder
    assert holder is not None
    holder.admit()
    holder.admit()
    with pytest.raises(ApiError) as caught:
        holder.admit()
    assert caught.value.status_code == 429 and dict(caught.value.headers or {})["retry-after"] == "30"
    clock.now += 30
    holder.admit()


def test_tokens_are_charged_after_the_call_and_overdrawn_quota_waits() -> None:
    clock = Clock()
    holder = KeyRing([spec(tokens_per_min=600)], clock=clock).grant("sk-team", "").holder
    assert holder is not None
    holder.admit()
    holder.release(900)
    with pytest.raises(ApiError) as caught:
        holder.admit()
    assert caught.value.status_code == 429
    clock.now += int(dict(caught.value.headers or {})["retry-after"])
    holder.admit()


def test_running_requests_are_limited_and_given_back() -> None:
    holder = KeyRing([spec(max_running=1)]).grant("sk-team", "").holder
    assert holder is not None
    holder.admit()
    with pytest.raises(ApiError, match="1 requests running"):
        holder.admit()
    holder.release(10)
    holder.admit()


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 50)), max_size=60), st.floats(1, 100))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_bucket_never_gives_more_than_its_rate(steps: list[tuple[float, float]], per_min: float) -> None:
    bucket, now, taken = Bucket(per_min, 0.0), 0.0, 0.0
    for wait_s, cost in steps:
        now += wait_s
        cost = min(cost, per_min)
        if bucket.wait_s(now, cost) == 0:
            bucket.take(cost)
            taken += cost
        assert taken <= per_min + now * per_min / 60 + 1e-6


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    digest = blake3(b"sk-b").hexdigest()
    path.write_text(
        f'[[key]]\nname = "a"\nkey = "sk-a"\nrequests_per_min = 60\n\n[[key]]\nname = "b"\nhash = "blake3:{digest}"\nmay_admin = true\n'
    )
    ring = KeyRing(read_keys(path))
    assert ring.grant("sk-a", "").name == "a" and ring.grant("sk-b", "").is_admin
    assert ring_from({"ROLLMILL_GATEWAY_KEYS": str(path)}, None).grant("sk-a", "").name == "a"
    assert ring_from({}, None).is_open and not ring_from({}, path).is_open


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[key]]\nname = "a"\n', "either key or hash"),
        ('[[key]]\nname = "a"\nkey = "x"\nhash = "blake3:00"\n', "either key or hash"),
        ('[[key]]\nname = "a"\nhash = "md5:00"\n', "64 hex digits"),
        ('[[key]]\nname = "a"\nkey = "x"\nmax_running = 0\n', "max_running"),
        ('[[key]]\nname = "a"\nkey = "x"\ncolour = 1\n', "colour"),
        ('[[key]]\nname = "a"\nkey = "x"\n[[key]]\nname = "a"\nkey = "y"\n', "twice"),
        ("[keys]\n", "keys"),
        ("not toml", "cannot be read"),
    ],
)
def test_bad_key_file_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_keys(path)


def test_key_is_found_under_both_names() -> None:
    assert key_of({b"authorization": b"Bearer sk-1"}) == key_of({b"authorization": b"bearer  sk-1 "}) == "sk-1"
    assert key_of({b"x-api-key": b"sk-2"}) == "sk-2"
    assert key_of({b"authorization": b"Basic abc"}) == key_of({}) == ""


def test_without_keys_only_this_machine_is_served() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_loopback(host)
    for host in ("0.0.0.0", "::", "10.0.0.7", "example.org"):
        with pytest.raises(ValueError, match="--open"):
            check_loopback(host)
