"""trackio's local database: every row carries its own key, and the database ignores a key that it holds already.

One trackio run per role, because a trackio run has one step axis and roles have different clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from trackio.sqlite_storage import SQLiteStorage

from rollmill.trackers.sink import Row, Target


class TrackioSink:
    num_there = None

    def __init__(self, target: Target, mark: dict[str, int]) -> None:
        self._target = target
        self._mark = dict(mark)

    def write(self, rows: Sequence[Row]) -> dict[str, int]:
        target = self._target
        for role in sorted({row.role for row in rows}):
            mine = [row for row in rows if row.role == role]
            is_new = role not in self._mark
            SQLiteStorage.bulk_log(
                project=target.project,
                run=f"{target.name}-{role}",
                run_id=f"{target.run_id}-{role}",
                metrics_list=[{target.names.of(role, name): value for name, value in row.values.items()} for row in mine],
                steps=[row.step for row in mine],
                timestamps=[datetime.fromtimestamp(row.t, UTC).isoformat() for row in mine],
                log_ids=[f"{target.run_id}-{row.key}" for row in mine],
                config={**target.config, "_Group": target.name} if is_new else None,
            )
            self._mark[role] = mine[-1].number
        return dict(self._mark)

    def close(self) -> None:
        pass
