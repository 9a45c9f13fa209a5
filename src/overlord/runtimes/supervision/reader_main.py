"""A reader process: opens untrusted files with native code, and hands their rows to the service that started it.

Rules of this file:
1. What a file does to this process costs the service nothing but a retry: the service never opens such a file itself.
2. Answers are JSON and raw columns, never pickles: a process that a file has taken over must not reach the service.
3. Many callers wait for storage at the same time: each has a connection, and a thread here.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from overlord.core.ragged import RowBatch
from overlord.errors import ReaderError, ServiceLost, SourceError
from overlord.readers.parquet_footer import warm_footer
from overlord.readers.reader import reason_of
from overlord.readers.source_files import FORMATS
from overlord.runtimes.supervision.worker_main import run_nursery
from overlord.runtimes.transport.frames import receive_rows, send_rows
from overlord.runtimes.transport.wire import receive

INDEX_COLUMNS = ("rows", "bytes", "start", "stop", "first_row")
"""The arrays of an index, as they travel."""

Streams = dict[int, Iterator[RowBatch]]
Answer = tuple[dict[str, Any], RowBatch]


def serve(control: socket.socket) -> None:
    """Serve every connection that is handed over, until the service closes the first one."""
    with contextlib.suppress(OSError):  # a host without it has no say in what the kernel ends when memory runs out
        Path("/proc/self/oom_score_adj").write_text("500")
    streams: Streams = {}
    while True:
        try:
            _, fds = receive(control)
        except ServiceLost:
            return
        caller = socket.socket(fileno=fds[0])
        threading.Thread(target=_serve_caller, args=(caller, streams), daemon=True).start()


def _serve_caller(caller: socket.socket, streams: Streams) -> None:
    with caller:
        while True:
            try:
                head, rows = receive_rows(caller)
                for stream in head["dropped"]:
                    streams.pop(stream, None)
                send_rows(caller, *_answer(head, rows, streams))
            except ServiceLost:
                return


def _answer(head: dict[str, Any], rows: RowBatch, streams: Streams) -> Answer:
    try:
        return _next(head["stream"], streams) if head["op"] == "next" else _open(head, rows, streams)
    except (SourceError, ReaderError) as error:
        return {"failed": type(error).__name__, "reason": str(error)}, {}
    except Exception as error:  # whatever pyarrow or a parser makes of bytes that are not what they should be
        if not isinstance(error, OSError):
            sys.stderr.write(traceback.format_exc())  # in one piece: other threads write to the same log
        return {"failed": "read", "reason": reason_of(error)}, {}


def _open(head: dict[str, Any], rows: RowBatch, streams: Streams) -> Answer:
    # From the service that started this process: the file with its filesystem, and the index of its blocks.
    file, index = cloudpickle.loads(np.asarray(rows["given"]).tobytes())
    reader, columns = FORMATS[head["format"]], head["wanted"]
    if head["op"] == "columns":
        return {"names": reader.columns(file)}, {}
    if head["op"] == "kinds":
        return {"kinds": reader.kinds(file, columns)}, {}
    if head["op"] == "index":
        found = reader.index(file, columns)
        return {}, {name: getattr(found, name) for name in INDEX_COLUMNS}
    streams[head["stream"]] = reader.stream(
        file,
        index,
        head["block"],
        columns=columns,
        skip=head["skip"],
        batch_rows=head["batch_rows"],
        scratch=Path(head["scratch"]) if head["scratch"] else None,
    )
    return _next(head["stream"], streams)


def _next(number: int, streams: Streams) -> Answer:
    try:
        return {}, next(streams[number])
    except BaseException as error:
        del streams[number]
        if isinstance(error, StopIteration):
            return {"end": True}, {}
        raise


if __name__ == "__main__":
    warm_footer()
    run_nursery(serve)
