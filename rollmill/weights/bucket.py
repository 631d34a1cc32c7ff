"""Objects in a bucket of S3, Google Cloud Storage, Azure or anything that speaks their protocol.

A write is reported lost only after a look at what lies there, since a retried conditional write meets its own object; every request
has a deadline. Knows nothing of weights; credentials come from the environment variables of the provider and are never printed.

    s3://bucket/prefix?region=eu-west-1
    s3://bucket/prefix?endpoint=http://127.0.0.1:9000     an own server; plain http only when written like this
    gs://bucket/prefix
    az://container/prefix?account=name
"""

from __future__ import annotations

import errno
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl, urlsplit

from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, S3Store

from rollmill.weights.errors import CorruptSnapshot
from rollmill.weights.objects import ObjectMissing, ReadOnly, StoreUnavailable, SwapLost, plain_folder, plain_key

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, RetryConfig

    Store = S3Store | GCSStore | AzureStore

_PART_BYTES = 8 << 20
"""Of one request, up or down. S3 takes 10,000 parts, so an object has at most 84 GB."""
_IN_FLIGHT = 8
_GAP_BYTES = 1 << 20
"""Reading this much for nothing costs about as much as one more request."""
_MARK = "rollmillwrite"
"""Name of the metadata field that tells our write from an equal one; Azure wants an identifier."""
_ATTEMPTS = 4
_SETTINGS = {"s3": ("endpoint", "region"), "gs": ("endpoint",), "az": ("endpoint", "account")}


def open_bucket(url: str) -> Bucket:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ValueError("a bucket URL holds no credentials; put them into the environment variables of the provider")
    where = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
    prefix = plain_folder(parts.path.strip("/"))
    if not parts.netloc:
        raise ValueError(f"{where!r} names no bucket; write {parts.scheme}://bucket/prefix")
    known = (*_SETTINGS[parts.scheme], "give_up_after_s")
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := [name for name in settings if name not in known]:
        raise ValueError(f"{where} does not take {unknown[0]!r}; it takes {', '.join(known)}")
    endpoint = settings.get("endpoint", "")
    if "endpoint" in settings and not re.fullmatch(r"https?://[^/?#@]+(/[^?#@]*)?", endpoint):
        raise ValueError(f"endpoint {endpoint.split('@')[-1]!r} of {where} is no address; write http://host:port or https://host")
    patience_s = _seconds(settings.get("give_up_after_s", "60"))
    patience = timedelta(seconds=patience_s)
    client: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": min(patience, timedelta(seconds=5)),
        "timeout": patience,
        "user_agent": "rollmill",
    }
    retry: RetryConfig = {
        "max_retries": 10,
        "retry_timeout": patience,
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
    }
    config: dict[str, Any] = {}
    if endpoint:
        # The S3 one stands above every environment variable: what is written in the URL counts.
        config[{"s3": "aws_endpoint_url_s3", "gs": "base_url", "az": "endpoint"}[parts.scheme]] = endpoint
    if parts.scheme == "s3" and "region" in settings:
        config["region"] = settings["region"]
    if parts.scheme == "az" and "account" in settings:
        config["account_name"] = settings["account"]
    kind: type[Store] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[parts.scheme]
    try:
        store = kind(parts.netloc, prefix=prefix or None, config=config, client_options=client, retry_config=retry)  # type: ignore[arg-type]
    except BaseError as error:
        raise ValueError(f"cannot open {where}: {_short(error)}") from None
    return Bucket(store, name=f"{where} at {endpoint}" if endpoint else where, tag_field="version" if parts.scheme == "gs" else "e_tag")


class Bucket:
    """One prefix of one bucket."""

    def __init__(self, store: Store, *, name: str, tag_field: Literal["e_tag", "version"] = "e_tag") -> None:
        self._store = store
        self._name = name
        # Google compares generations, the others entity tags.
        self._tag_field = tag_field
        self._readers = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="bucket-read")

    def get(self, key: str) -> tuple[bytes, str]:
        plain_key(key)
        for _ in range(_ATTEMPTS):
            with self._answers(key):
                answer = self._store.get(key)
                size, tag = answer.meta["size"], self._tag(answer.meta)
                if size <= _PART_BYTES:
                    return bytes(answer.bytes()), tag
                whole = [(start, min(start + _PART_BYTES, size)) for start in range(0, size, _PART_BYTES)]
                try:
                    return b"".join(self._fetch(key, whole, if_match=answer.meta["e_tag"])), tag
                except PreconditionError:
                    continue  # replaced between two of its parts
        raise self._unavailable(f"{key} was replaced {_ATTEMPTS} times while it was read")

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        plain_key(key)
        pieces = plan_reads(ranges)
        try:
            with self._answers(key):
                if not pieces:
                    self._store.head(key)
                found = self._fetch(key, pieces)
        except StoreUnavailable:
            # A range that begins behind the end is an error of its own at every provider; the size tells.
            if pieces and self.size(key) < pieces[-1][1]:
                raise CorruptSnapshot(f"{key} in {self._name} ends before byte {pieces[-1][1]}") from None
            raise
        for data, (start, stop) in zip(found, pieces, strict=True):
            if len(data) != stop - start:
                raise CorruptSnapshot(f"{key} in {self._name} ends before byte {stop}")
        return cut_reads(ranges, pieces, found)

    def size(self, key: str) -> int:
        with self._answers(plain_key(key)):
            return int(self._store.head(key)["size"])

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        plain_key(key)
        source = _Source(chunks)
        head, num_bytes = [], 0
        for chunk in source:
            head.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > _PART_BYTES:
                break
        try:
            with self._answers(key, writing=True, absent="bucket"):
                if num_bytes <= _PART_BYTES:
                    self._store.put(key, b"".join(head), use_multipart=False)
                else:
                    self._store.put(key, chain(head, source), use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_IN_FLIGHT)
        except (StoreUnavailable, ReadOnly):
            if source.failure is not None:
                raise source.failure from None
            raise

    def create(self, key: str, data: bytes) -> bool:
        return self._write_if(key, data, expected=None) is not None

    def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        tag = self._write_if(key, data, expected=expected)
        if tag is None:
            wanted = "nothing was expected there" if expected is None else f"{expected} was expected"
            raise SwapLost(f"{key} in {self._name} was written by another process; {wanted}")
        return tag

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        folder = plain_folder(prefix)
        plain_folder(after)
        with self._answers(folder or "a listing", absent="bucket"):
            batches = self._store.list(folder or None, offset=list_offset(folder, after), chunk_size=1000)
            # Sorted here: directory buckets list in no order and some servers folder by folder.
            keys = sorted(entry["path"] for batch in batches for entry in batch if entry["path"] > after)
        return iter(keys)

    def delete(self, keys: Sequence[str]) -> None:
        names = [plain_key(key) for key in keys]
        try:
            with self._answers("objects", writing=True):
                self._store.delete(names)
        except ObjectMissing:
            # Some providers stop at the first that is missing.
            for name in names:
                try:
                    with self._answers(name, writing=True):
                        self._store.delete(name)
                except ObjectMissing:
                    continue

    def describe(self) -> str:
        return self._name

    def _write_if(self, key: str, data: bytes, *, expected: str | None) -> str | None:
        """The new tag, or None when something else lies there.

        The answer to a write that succeeded can be lost, and its repetition is then refused because of itself. So each write
        carries a mark of its own, and a refusal or silence is judged by the mark of what lies there. None is also the answer
        when our write was replaced before we looked.
        """
        plain_key(key)
        mark = secrets.token_hex(16)
        mode: Any = "create" if expected is None else {self._tag_field: expected}
        for _ in range(_ATTEMPTS):
            silence: StoreUnavailable | None = None
            try:
                with self._answers(key, writing=True, absent="bucket" if expected is None else "object"):
                    return self._tag(self._store.put(key, data, attributes={_MARK: mark}, mode=mode, use_multipart=False))
            except (AlreadyExistsError, PreconditionError, ObjectMissing):
                pass
            except StoreUnavailable as error:
                silence = error
            held_mark, held = self._held(key)
            if held is not None and held_mark == mark:
                return held
            if held != expected:
                return None
            if silence is not None:
                raise silence
            # Refused although the condition holds now: two writers met, and the provider turned both away.
        raise self._unavailable(
            f"{key} was refused {_ATTEMPTS} times although it is as expected; does this provider support conditional writes?"
        )

    def _held(self, key: str) -> tuple[str | None, str | None]:
        """The mark and the tag of what lies there."""
        try:
            with self._answers(key):
                answer = self._store.get(key, options={"head": True})
                return answer.attributes.get(_MARK), self._tag(answer.meta)
        except ObjectMissing:
            return None, None

    def _fetch(self, key: str, pieces: Sequence[tuple[int, int]], *, if_match: str | None = None) -> Sequence[bytes]:
        def fetch(piece: tuple[int, int]) -> bytes:
            options: GetOptions = {"range": piece} if if_match is None else {"range": piece, "if_match": if_match}
            return bytes(self._store.get(key, options=options).bytes())

        if len(pieces) == 1:
            return [fetch(pieces[0])]
        return [*self._readers.map(fetch, pieces)]

    def _tag(self, answer: Any) -> str:
        tag = answer[self._tag_field]
        if tag is None:
            raise self._unavailable(f"answers carry no {self._tag_field}, so nothing can be swapped here; use another provider")
        return str(tag)

    @contextmanager
    def _answers(self, key: str, *, writing: bool = False, absent: Literal["object", "bucket"] = "object") -> Iterator[None]:
        """Errors of obstore in our words, where `absent` is what a plain "not found" means; those of conditions pass.

        The originals are not chained: their text repeats request addresses, which can carry a signature.
        """
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except FileNotFoundError as error:
            if absent == "bucket" or "NoSuchBucket" in str(error):
                raise self._unavailable("the bucket does not exist; create it or correct its name") from None
            raise ObjectMissing(f"{key} is not in {self._name}") from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            if writing:
                raise ReadOnly(errno.EACCES, f"{self._name} refuses to write {key}; check the credentials: {_short(error)}") from None
            raise self._unavailable(f"refuses to read {key}; check the credentials: {_short(error)}") from None
        except BaseError as error:
            raise self._unavailable(f"no good answer for {key}; check the endpoint and the network: {_short(error)}") from None

    def _unavailable(self, text: str) -> StoreUnavailable:
        return StoreUnavailable(errno.EIO, f"{self._name}: {text}")


class _Source:
    """Chunks on their way up, and the error of their maker, which must not pass for one of the bucket."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks = iter(chunks)
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[memoryview]:
        return self

    def __next__(self) -> memoryview:
        try:
            return memoryview(next(self._chunks)).cast("B")
        except StopIteration:
            raise
        except BaseException as error:
            self.failure = error
            raise


def plan_reads(ranges: Sequence[tuple[int, int]], *, part_bytes: int = _PART_BYTES, gap_bytes: int = _GAP_BYTES) -> list[tuple[int, int]]:
    """The requests that cover all ranges: neighbours together, none longer than a part, ascending."""
    runs: list[list[int]] = []
    for start, stop in sorted(ranges):
        assert 0 <= start <= stop, f"range {start}..{stop}"
        if start == stop:
            continue
        if runs and start - runs[-1][1] <= gap_bytes:
            runs[-1][1] = max(runs[-1][1], stop)
        else:
            runs.append([start, stop])
    return [(cut, min(cut + part_bytes, stop)) for start, stop in runs for cut in range(start, stop, part_bytes)]


def cut_reads(ranges: Sequence[tuple[int, int]], pieces: Sequence[tuple[int, int]], found: Sequence[bytes]) -> list[bytes]:
    """The bytes of each range out of those of the pieces that `plan_reads` gave."""
    starts = [start for start, _ in pieces]
    cut = []
    for start, stop in ranges:
        parts, at = [], start
        index = bisect_right(starts, start) - 1
        while at < stop:
            first, last = pieces[index]
            parts.append(memoryview(found[index])[at - first : stop - first])
            at, index = min(stop, last), index + 1
        cut.append(b"".join(parts))
    return cut


def list_offset(folder: str, after: str) -> str | None:
    """Where a server is told to begin so that it leaves out no key greater than `after`, however it orders.

    Some servers order folder by folder, so that `a/z` comes before `a.b`, and skip a whole folder whose name they are told to begin
    after. Beginning a little earlier, one character before the first '-' or '.' (the two that sort before '/'), is right for both
    and costs a few keys.
    """
    below = f"{folder}/" if folder else ""
    if not after.startswith(below):
        # Outside the folder, so all of it comes after or none does; what comes back is compared with `after` anyway.
        return None
    start = re.split("[-.]", after[len(below) :], maxsplit=1)[0].rstrip("/")[:-1]
    if start.endswith("/"):
        start = start[:-2]
    return below + start if start else None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise ValueError(f"give_up_after_s={text!r} is no time between 0.1 and 3600 seconds")
    return seconds


def _short(error: BaseException) -> str:
    """The first line without queries: what follows is a dump, and a query can hold a signature."""
    return re.sub(r"\?\S*", "", str(error).split("\n", 1)[0])[:300]
