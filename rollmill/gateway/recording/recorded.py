"""Reads `calls.db`: calls of an episode or of all, episodes that were open, an episode as it stood, and what may be thrown away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rollmill.gateway.call import ChatCall, TextCall
from rollmill.gateway.recording.call_rows import Base, CallRecord, EpisodeRecord, Row, decode_row
from rollmill.gateway.recording.record import connect_calls
from rollmill.gateway.sessions.placement import Placement, Sampling

if TYPE_CHECKING:
    from rollmill.gateway.gateway import Gateway
    from rollmill.gateway.sessions.episode import Episode

STATUS_CLIENT_GONE = 499


def read_calls(path: Path, episode: str | None = None) -> Iterator[CallRecord]:
    """Calls in the order they ended, episode by episode; of one episode when it is named (`""`: calls of none)."""
    if not path.is_file():
        raise ValueError(f"{path} is not there")
    db = connect_calls(path)
    try:
        where, given = ("", ()) if episode is None else ("WHERE episode = ?", (episode,))
        held: dict[int, Base] = {}
        current: str | None = None
        for columns in db.execute(f"SELECT * FROM calls {where} ORDER BY episode, number", given):
            row = Row(*columns)
            if row.episode != current:
                # Rows lean on rows of their own episode alone.
                held, current = {}, row.episode
            record, base = decode_row(row, held)
            if row.episode:
                held[row.number] = base
            yield record
    finally:
        db.close()


def open_episodes(path: Path) -> list[EpisodeRecord]:
    """Those that were opened and not closed, oldest first: what a gateway that starts again goes on with."""
    db = connect_calls(path)
    try:
        found = db.execute("SELECT key, opened, options FROM episodes WHERE closed IS NULL ORDER BY opened, key").fetchall()
    finally:
        db.close()
    return [EpisodeRecord(key=key, at=at, is_open=True, options=msgspec.json.decode(options)) for key, at, options in found]


def rebuild(episode: Episode, calls: Iterable[CallRecord]) -> int:
    """Replays recorded calls into a fresh episode, and says how many answers it got.

    ValueError when a request is placed on other tokens than it was then: the model's files or the template are not the same.
    """
    num = 0
    # As they came: a call is placed on its arrival, and may end after one that came later.
    for record in sorted(calls, key=lambda r: r.at):
        if record.call is None or not record.prompts:
            continue
        for _ in range(len(record.prompts) * record.call.num_choices):
            episode.next_seed()
        is_left = record.status == STATUS_CLIENT_GONE and not record.choices
        for i, prompt_ids in enumerate(record.prompts if record.choices or is_left else ()):
            placement = _place(episode, record.call, i)
            if placement.prompt_ids != prompt_ids:
                raise ValueError(
                    f"call {record.id} of episode {record.episode} was sampled after {len(prompt_ids)} tokens that this model would not "
                    f"render the same; give the gateway the model that recorded it, or start without the record"
                )
            for choice in record.choices:
                if choice.prompt == i:
                    episode.add(placement, choice.reply, choice.message, num_used=choice.num_used)
                    num += 1
            if is_left and i == 0:
                episode.abandon(placement, record.num_abandoned)
    return num


def restore_episodes(gateway: Gateway, path: Path) -> int:
    """Opens the episodes that were open when the record ended, each as it stood, and says how many. For a gateway that starts again."""
    found = open_episodes(path) if path.is_file() else []
    for record in found:
        options = dict(record.options)
        if options.get("sampling") is not None:
            options["sampling"] = msgspec.convert(options["sampling"], Sampling)
        rebuild(gateway.episodes.open(record.key, **options), read_calls(path, record.key))
    return len(found)


def prune(path: Path, before: float) -> int:
    """Throw away episodes whose last call, and single calls that, came before this Unix time; says how many calls went.

    Whole episodes only: their rows lean on one another. Episodes that are still open stay.
    """
    db = connect_calls(path)
    try:
        with db:
            db.execute("BEGIN IMMEDIATE")
            old = (
                "SELECT episode FROM calls WHERE episode != '' AND episode NOT IN (SELECT key FROM episodes WHERE closed IS NULL) "
                "GROUP BY episode HAVING max(at) < ?"
            )
            gone = db.execute(f"DELETE FROM calls WHERE episode IN ({old})", (before,)).rowcount
            gone += db.execute("DELETE FROM calls WHERE episode = '' AND at < ?", (before,)).rowcount
            db.execute("DELETE FROM episodes WHERE closed < ? AND key NOT IN (SELECT episode FROM calls)", (before,))
        db.execute("PRAGMA incremental_vacuum").fetchall()
    finally:
        db.close()
    return gone


def _place(episode: Episode, call: ChatCall | TextCall, index: int) -> Placement:
    if isinstance(call, ChatCall):
        return episode.place(call.messages, call.tools)
    prompt = call.prompts[index]
    return episode.place_text(prompt) if isinstance(prompt, str) else episode.place_ids(prompt)
