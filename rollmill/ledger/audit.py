"""The invariants of a ledger, each one a query that finds what violates it; reads only, and trusts no counter or guard."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import msgspec

from rollmill.ledger.blobs import BlobStore, CorruptBlob
from rollmill.records import BlobRef


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """An invariant; each row `sql` returns is a violation, told with `words`."""

    words: str
    sql: str


_ENDS = "('episode.graded', 'episode.failed', 'episode.cancelled')"
_SLOTS = "(SELECT seq, slot, COUNT(*) AS n, MIN(attempt) AS lo, MAX(attempt) AS hi FROM episodes GROUP BY seq, slot)"

RULES = (
    Rule(
        words="group numbers have gaps: {0} groups, numbered {1} to {2}",
        sql="SELECT COUNT(*), MIN(seq), MAX(seq) FROM groups HAVING COUNT(*) > 0 AND (MIN(seq) <> 0 OR MAX(seq) + 1 <> COUNT(*))",
    ),
    Rule(
        words="group id {1} does not belong to seq {0}",
        sql="SELECT seq, group_id FROM groups WHERE group_id <> printf('g%06d', seq)",
    ),
    Rule(
        words="episode {0} does not belong to group {1}, slot {2}, attempt {3}",
        sql="SELECT e.episode_id, e.group_id, e.slot, e.attempt FROM episodes e LEFT JOIN groups g USING (group_id)"
        " WHERE g.seq IS NOT e.seq OR e.episode_id <> printf('%s.%d.%d', e.group_id, e.slot, e.attempt)",
    ),
    Rule(
        words="group {0} has {2} slots, not {1}",
        sql="SELECT g.group_id, g.group_size, COUNT(DISTINCT e.slot) FROM groups g LEFT JOIN episodes e USING (seq) GROUP BY g.seq"
        " HAVING COUNT(DISTINCT e.slot) <> g.group_size OR MIN(e.slot) <> 0 OR MAX(e.slot) <> g.group_size - 1",
    ),
    Rule(
        words="slot {1} of group {0} has {2} attempts, numbered {3} to {4}",
        sql=f"SELECT g.group_id, s.slot, s.n, s.lo, s.hi FROM {_SLOTS} s JOIN groups g USING (seq) WHERE s.lo <> 0 OR s.hi + 1 <> s.n",
    ),
    Rule(
        words="slot {1} of group {0} has {2} graded attempts",
        sql="SELECT group_id, slot, COUNT(*) FROM episodes WHERE state = 'graded' GROUP BY seq, slot HAVING COUNT(*) > 1",
    ),
    Rule(
        words="episode {0} is {1} although a later attempt exists",
        sql=f"SELECT e.episode_id, e.state FROM episodes e JOIN {_SLOTS} s ON s.seq = e.seq AND s.slot = e.slot"
        " WHERE e.attempt < s.hi AND e.state NOT IN ('failed', 'cancelled')",
    ),
    Rule(
        words="episode {0} is {1} but ended {2} times in the history",
        sql="SELECT e.episode_id, e.state, COUNT(v.event_id) FROM episodes e LEFT JOIN events v"
        f" ON v.subject = e.episode_id AND v.kind IN {_ENDS} GROUP BY e.episode_id"
        " HAVING COUNT(v.event_id) <> (e.state NOT IN ('queued', 'running'))",
    ),
    Rule(
        words="episode {0} is {1} but its history says {2}",
        sql=f"SELECT v.subject, COALESCE(e.state, 'gone'), v.kind FROM events v LEFT JOIN episodes e ON e.episode_id = v.subject"
        f" WHERE v.kind IN {_ENDS} AND v.kind IS NOT 'episode.' || e.state",
    ),
    Rule(
        words="graded episode {0} has lost its grade, stop reason, versions or blob",
        sql="SELECT episode_id FROM episodes WHERE state = 'graded' AND (grade IS NULL OR reward IS NULL OR success IS NULL OR stop IS NULL"
        " OR blob_digest IS NULL OR blob_bytes IS NULL OR min_version IS NULL OR max_version < min_version)",
    ),
    Rule(
        words="{1} group {0} still has {2} live episodes",
        sql="SELECT g.group_id, g.state, COUNT(*) FROM groups g JOIN episodes e USING (seq)"
        " WHERE g.state <> 'open' AND e.state IN ('queued', 'running') GROUP BY g.seq",
    ),
    Rule(
        words="{1} group {0} counts {2} graded episodes, {4} successes, oldest version {5}; its episodes say {6}, {8}, {9}"
        " (reward sums {3} and {7})",
        sql="SELECT g.group_id, g.state, g.num_graded, g.reward_sum, g.num_success, g.min_version, COALESCE(e.n, 0),"
        " COALESCE(e.r, 0), COALESCE(e.s, 0), e.v"
        " FROM groups g LEFT JOIN (SELECT seq, COUNT(*) AS n, SUM(reward) AS r, SUM(success) AS s,"
        " MIN(CASE WHEN min_version >= 0 THEN min_version END) AS v, SUM(ABS(reward)) AS size FROM episodes WHERE"
        " state = 'graded' GROUP BY seq) e USING (seq)"
        # Both sums add the same few doubles in other orders: they differ by less than n * 2**-53 of the sum of magnitudes.
        " WHERE g.num_graded <> COALESCE(e.n, 0) OR g.num_success <> COALESCE(e.s, 0) OR g.min_version IS NOT e.v"
        " OR ABS(g.reward_sum - COALESCE(e.r, 0)) > 1e-12 * COALESCE(e.n * e.size, 0)",
    ),
    Rule(
        words="{1} group {0} has only {2} graded of {3} slots",
        sql="SELECT group_id, state, num_graded, group_size FROM groups WHERE state IN ('ready', 'admitted', 'trained')"
        " AND num_graded * 2 <= group_size",
    ),
    Rule(
        words="group {0} is {1} but was {3} {2} times in the history",
        sql="SELECT g.group_id, g.state, COUNT(v.event_id), w.state FROM groups g"
        " JOIN (SELECT 'admitted' AS state UNION SELECT 'trained' UNION SELECT 'dropped') w"
        " LEFT JOIN events v ON v.subject = g.group_id AND v.kind = 'group.' || w.state GROUP BY g.seq, w.state"
        " HAVING COUNT(v.event_id) <> CASE w.state WHEN 'admitted' THEN g.step IS NOT NULL ELSE g.state = w.state END",
    ),
    Rule(
        words="group {0} was trained in batch {1} but no checkpoint contains it",
        sql="SELECT group_id, step FROM groups WHERE state = 'trained' AND (step IS NULL OR step > COALESCE((SELECT"
        " MAX(step) FROM checkpoints), step - 1))",
    ),
    Rule(
        words="group {0} is still admitted to batch {1} although checkpoint {2} contains it",
        sql="SELECT g.group_id, g.step, c.head FROM groups g, (SELECT MAX(step) AS head FROM checkpoints) c WHERE g.state"
        " = 'admitted' AND g.step <= c.head",
    ),
    Rule(
        words="batches have gaps: {0} batches, numbered {1} to {2}",
        sql="SELECT COUNT(*), MIN(step), MAX(step) FROM batches HAVING COUNT(*) > 0 AND MAX(step) - MIN(step) + 1 <> COUNT(*)",
    ),
    Rule(
        words="batch {0} was cut with {1} groups but {2} belong to it",
        sql="SELECT b.step, b.num_groups, COUNT(g.seq) FROM batches b LEFT JOIN groups g USING (step) GROUP BY b.step"
        " HAVING COUNT(g.seq) <> b.num_groups",
    ),
    Rule(
        words="group {0} was admitted at version {1} with oldest version {2} but staleness {3}",
        sql="SELECT group_id, version, min_version, staleness FROM groups WHERE step IS NOT NULL AND"
        " (staleness IS NOT version - min_version OR staleness < 0 OR version IS NOT (SELECT b.version FROM batches b"
        " WHERE b.step = groups.step))",
    ),
    Rule(
        words="live group {0} was overtaken {2} times but says {1}",
        sql="SELECT group_id, num_overtaken, (SELECT COUNT(*) FROM groups b WHERE b.step IS NOT NULL AND b.seq >"
        " groups.seq) AS k FROM groups"
        " WHERE state IN ('open', 'ready') AND num_overtaken <> k",
    ),
    Rule(
        words="checkpoint {0} holds version {1}, older than the one before it",
        sql="SELECT step, version FROM checkpoints c WHERE version < (SELECT MAX(p.version) FROM checkpoints p WHERE p.step < c.step)",
    ),
    Rule(
        words="version {0} was published {1} times in the history",
        sql="SELECT v.version, COUNT(e.event_id) FROM versions v LEFT JOIN events e ON e.subject = CAST(v.version AS TEXT)"
        " AND e.kind = 'version.published'"
        " GROUP BY v.version HAVING COUNT(e.event_id) <> 1",
    ),
    Rule(
        words="version {0} was published after version {1}",
        sql="SELECT v, prev FROM (SELECT CAST(subject AS INTEGER) AS v, LAG(CAST(subject AS INTEGER)) OVER (ORDER BY"
        " event_id) AS prev FROM events"
        " WHERE kind = 'version.published') WHERE v <= prev",
    ),
    Rule(
        words="counter {0} is {1} but the rows say {2}",
        sql="WITH recount AS (SELECT 'group.' || state AS name, COUNT(*) AS n FROM groups GROUP BY state"
        " UNION ALL SELECT 'episode.' || state, COUNT(*) FROM episodes GROUP BY state"
        " UNION ALL SELECT 'drop.' || drop_reason, COUNT(*) FROM groups WHERE state = 'dropped' GROUP BY drop_reason"
        " UNION ALL SELECT 'fail.' || boundary, COUNT(*) FROM episodes WHERE state = 'failed' GROUP BY boundary"
        " UNION ALL SELECT 'cancel.' || cancel_reason, COUNT(*) FROM episodes WHERE state = 'cancelled' GROUP BY cancel_reason"
        " UNION ALL SELECT 'dropped_from.admitted', COUNT(*) FROM groups WHERE state = 'dropped' AND step IS NOT NULL"
        " UNION ALL SELECT 'outcome.trained.num_graded', SUM(num_graded) FROM groups WHERE state = 'trained'"
        " UNION ALL SELECT 'outcome.trained.num_success', SUM(num_success) FROM groups WHERE state = 'trained'"
        " UNION ALL SELECT 'outcome.dropped.' || drop_reason || '.num_graded', SUM(num_graded) FROM groups WHERE state"
        " = 'dropped' GROUP BY drop_reason"
        " UNION ALL SELECT 'outcome.dropped.' || drop_reason || '.num_success', SUM(num_success) FROM groups WHERE"
        " state = 'dropped' GROUP BY drop_reason)"
        " SELECT name, COALESCE(c.value, 0), COALESCE(r.n, 0) FROM recount r LEFT JOIN counters c USING (name) WHERE"
        " COALESCE(r.n, 0) <> COALESCE(c.value, 0)"
        " UNION ALL SELECT c.name, c.value, 0 FROM counters c LEFT JOIN recount r USING (name) WHERE r.name IS NULL AND c.value <> 0"
        " AND c.name NOT LIKE '%.reward_sum' AND c.name NOT IN ('dropped_from.open', 'dropped_from.ready')",
    ),
)


def audit(conn: sqlite3.Connection, blobs: BlobStore) -> list[str]:
    """Every violated invariant in plain words."""
    found: list[str] = []
    try:
        found += [f"the file itself is damaged: {row[0]}" for row in conn.execute("PRAGMA quick_check") if row[0] != "ok"]
        found += [f"{row[0]} row {row[1]} points at a missing row of {row[2]}" for row in conn.execute("PRAGMA foreign_key_check")]
        for rule in RULES:
            found += [rule.words.format(*row) for row in conn.execute(rule.sql)]
        found += _blob_damage(conn, blobs)
    except sqlite3.DatabaseError as error:
        # Unreadable pages end the audit, but what was found before is still worth telling.
        found.append(f"the file itself is damaged: {error}")
    return found


def _blob_damage(conn: sqlite3.Connection, blobs: BlobStore) -> Iterator[str]:
    rows = conn.execute(
        "SELECT e.episode_id, e.blob_digest, e.blob_bytes FROM groups g JOIN episodes e USING (seq)"
        " WHERE g.state IN ('open', 'ready', 'admitted') AND e.state = 'graded' AND e.blob_digest IS NOT NULL"
    )
    for episode_id, digest, num_bytes in rows:
        try:
            blobs.get(BlobRef(digest=digest, num_bytes=num_bytes))
        except CorruptBlob as error:
            yield f"episode {episode_id}: {error}"
