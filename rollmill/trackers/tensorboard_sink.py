"""TensorBoard event files: what was not acknowledged before a crash is cut off, so that a row written again is there once."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from rollmill.trackers.sink import Row, Target


class TensorboardSink:
    """One event file per process that wrote; `mark` is the size of each."""

    num_there = None

    def __init__(self, target: Target, mark: dict[str, int]) -> None:
        self._folder, self._names = target.out, target.names
        self._folder.mkdir(parents=True, exist_ok=True)
        self._mark = dict(mark)
        # Other people's files in the same folder carry another ending and are left alone.
        ours = sorted(self._folder.glob(f"events.out.tfevents.*.{target.run_id}.*"))
        for path in ours:
            if path.name not in mark:
                path.unlink()
            elif path.stat().st_size > mark[path.name]:
                os.truncate(path, mark[path.name])
        number = 1 + max((int(name.rpartition(".")[2]) for name in mark), default=-1)
        self._path = self._folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{target.run_id}.{number}"
        self._config = target.config
        self._file: BinaryIO | None = None

    def write(self, rows: Sequence[Row]) -> dict[str, int]:
        # Only now, so that a look that finds nothing new leaves no file behind.
        file = self._file or self._open()
        for row in rows:
            values = [Summary.Value(tag=self._names.of(row.role, name), simple_value=value) for name, value in row.values.items()]
            self._event(Event(wall_time=row.t, step=row.step, summary=Summary(value=values)))
        file.flush()
        os.fsync(file.fileno())
        self._mark[self._path.name] = file.tell()
        return dict(self._mark)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> BinaryIO:
        self._file = file = self._path.open("xb")
        self._writer = RecordWriter(file)
        self._event(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if not self._mark:
            self._text("run file", json.dumps(self._config, indent=2))
        return file

    def _text(self, tag: str, text: str) -> None:
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[f"```\n{text}\n```".encode()])
        self._event(Event(wall_time=time.time(), summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])))

    def _event(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
