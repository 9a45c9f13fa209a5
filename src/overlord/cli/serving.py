"""Keeps a service up for trainers in other processes, and shows what a running service is doing."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.markup import escape
from rich.table import Table

from overlord.cli.output import Screen
from overlord.cli.report import media_tables
from overlord.cli.summary import count, media_of, size
from overlord.errors import ServiceLost, SpecError
from overlord.runtimes.local import status_of
from overlord.session import Service

_LOOK_EVERY_S = 1.0


def serve_until_stopped(
    service: Service, screen: Screen, address_file: Path | None, announce: Callable[[], None]
) -> None:
    """Announce a service, and wait until SIGTERM; Ctrl-C comes as KeyboardInterrupt.

    Raises:
        ServiceLost: The service process is gone.
    """
    with _on_sigterm() as stopped_within:  # whoever reads the announcement may end it at once
        try:
            if address_file is not None:
                _write_whole(address_file, f"{service.address}\n")
            announce()
            with _live_line(screen) as line:
                while not stopped_within(_LOOK_EVERY_S):
                    line(_one_line(_status_or_lost(service)))
        finally:
            if address_file is not None:
                address_file.unlink(missing_ok=True)


def find_status(address: str) -> dict[str, Any]:
    """Return the status of the service at an address, or at the address that a file holds.

    Raises:
        SpecError: Nobody answers there.
    """
    try:
        if not address.startswith("unix://") and Path(address).is_file():
            address = Path(address).read_text(encoding="utf-8").strip()
        return status_of(address)
    except ServiceLost as error:
        raise SpecError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{address}: the address cannot be read from this file ({error}); nobody could be asked. Give the "
            "address that `overlord serve` shows."
        ) from error


def status_tables(status: dict[str, Any]) -> list[Table]:
    """Return the picture of a service for the terminal: its sources, their media, and its clients."""
    planner, buffers = status["planner"], status["buffers"]
    held = f"{size(buffers['read_bytes'])} read ahead, {size(buffers['views_bytes'])} of views"
    title = f"{status['runtime']} service, mesh {status['mesh']}, next plan: step {planner['next_step']}, {held}"
    sources = Table(title=title, title_justify="left")
    sources.add_column("source", style="bold")
    sources.add_column("format", style="dim")
    for name in ("planned", "realised", "samples", "tokens", "epoch", "buffer", "bad", "wrong length", "skipped"):
        sources.add_column(name, justify="right")
    for name, one in status["sources"].items():
        faults = [f"[red]{one[key]:,}[/red]" if one[key] else "0" for key in ("bad", "wrong_length")]
        sources.add_row(
            escape(name),
            escape(one["format"]),
            f"{100 * one['planned_share']:.2f}%",
            f"{100 * one['realised_share']:.2f}%",
            count(one["samples"]),
            count(one["tokens"]),
            f"{one['epoch']}{' (ended)' if one['finished'] else ''}",
            size(one["buffer_bytes"]),
            *faults,
            f"{one['skipped']:,}",
        )
    number = len(status["clients"])
    clients = Table(title=f"{number} client{'' if number == 1 else 's'} attached", title_justify="left")
    clients.add_column("at step", justify="right")
    clients.add_column("ranks")
    for step in sorted(set(status["clients"].values())):
        ranks = ", ".join(rank for rank, at in status["clients"].items() if at == step)
        clients.add_row(str(step), ranks)
    return [sources, *media_tables(media_of(status["sources"])), *([clients] if status["clients"] else [])]


def _status_or_lost(service: Service) -> dict[str, Any]:
    try:
        return service.status()
    except ServiceLost as error:
        raise ServiceLost(
            f"the service at {service.address} is gone; attached trainers get no more data. Its messages stand above; "
            "if it was killed, the host may be out of memory. Start it again, with --resume if it has a store."
        ) from error


def _one_line(status: dict[str, Any]) -> str:
    steps = list(status["clients"].values())
    where = f"at steps {min(steps)} to {max(steps)}" if steps else "none so far"
    held = sum(status["buffers"].values())
    bad = sum(one["bad"] for one in status["sources"].values())
    return f"clients: {len(steps)} ({where}) · planned to step {status['planner']['next_step'] - 1} · " + (
        f"{size(held)} held · {bad} bad samples"
    )


@contextmanager
def _on_sigterm() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for SIGTERM for so many seconds, and says whether it came."""
    # Not an Event: its lock may be held by the very thread that a signal interrupts, which would wait for itself.
    reader, writer = os.pipe()
    before = signal.signal(signal.SIGTERM, lambda *_: os.write(writer, b"!"))
    try:
        yield lambda seconds: bool(select.select([reader], [], [], seconds)[0])
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(reader)
        os.close(writer)


@contextmanager
def _live_line(screen: Screen) -> Iterator[Any]:
    if not screen.err.is_terminal:
        yield lambda _: None
        return
    with Live(console=screen.err, auto_refresh=False, transient=True) as live:
        yield lambda line: live.update(line, refresh=True)


def _write_whole(path: Path, text: str) -> None:
    """Write a file that another process may be waiting for: it appears whole or not at all."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise SpecError(
            f"--address-file {path}: it cannot be written ({error.strerror}); trainers would wait for it for ever. "
            "Name another file."
        ) from error
