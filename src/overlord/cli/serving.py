"""Keeps a service up for trainers in other processes, and shows what a running service is doing."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from overlord.cli.options import layout_words, resumed_words
from overlord.cli.output import Screen, labelled
from overlord.errors import ServiceLost, SpecError
from overlord.launch_spec import Launch
from overlord.reports.live import Mood, remote_words, sentence_of
from overlord.reports.pages import Row, terminal_table
from overlord.reports.passes import epochs_words
from overlord.reports.run_report import media_tables
from overlord.reports.summary import count, media_of, number, share, size
from overlord.runtimes.client_feed import status_of
from overlord.runtimes.launching.cluster_placement import TRAINER
from overlord.session import Service
from overlord.storage import replacing

_LOOK_EVERY_S = 1.0
COLOURS: Mapping[Mood, str] = {"well": "green", "waiting": "yellow", "failing": "bold red"}
SHOWN_FAULTS = 8
"""The newest ones."""


def serve_until_stopped(
    service: Service, screen: Screen, address_file: Path | None, announce: Callable[[], None]
) -> None:
    """Announce a service, and wait until SIGTERM; Ctrl-C comes as KeyboardInterrupt.

    Raises:
        ServiceLost: The service process is gone.
    """
    with _on_sigterm() as stopped_within:  # a reader of the announcement may end it at once
        try:
            if address_file is not None:
                _write_whole(address_file, f"{service.address}\n")
            announce()
            with _live_line(screen) as line:
                looking = _look_aside(service)
                while not stopped_within(_LOOK_EVERY_S):
                    if looking.done():
                        line(_one_line(looking.result()))
                        looking = _look_aside(service)
        finally:
            # Another service may have written its own by now.
            if address_file is not None and _holds(address_file, f"{service.address}\n"):
                address_file.unlink(missing_ok=True)


def find_status(address: str) -> dict[str, Any]:
    """Return the status of the service at an address, or at the address that a file holds.

    Raises:
        SpecError: No service answers there.
    """
    try:
        return status_of(address)
    except ServiceLost as error:
        raise SpecError(str(error)) from error


def announcement(
    job: str,
    options: Launch,
    address: str,
    status: Mapping[str, Any],
    metrics: str | None = None,
    dashboard: str | None = None,
) -> list[RenderableType]:
    """Return what trainers must know of a service that has just begun."""
    ranks, layout = number(options.mesh.world_size, "rank"), layout_words(options.layout)
    lines: list[RenderableType] = [
        labelled("serving  ", f"{job}, mesh {options.mesh} ({ranks}), layout {layout}"),
        Text.assemble(("address  ", "dim"), (address, "bold")),
    ]
    if options.state is not None:
        lines.append(labelled("resumed  ", resumed_words(status["planner"]["first_step"])))
    if metrics is not None:
        lines.append(labelled("metrics  ", metrics))
    if dashboard is not None:
        lines.append(labelled("page     ", dashboard))
    every = "every trainer"
    if "ray" in status:
        hosts = [f"{one['ranks']} on {one['host']}" for one in trainer_hosts(status)]
        lines += [labelled("cluster  ", cluster_line(status["ray"])), labelled("ranks    ", ", ".join(hosts))]
        every = "every trainer, on the host of its rank (the address is the same on all hosts; no Ray is needed there),"
    return [
        *lines,
        f"\nAttach {every} with\n\n    import overlord as ol\n"
        f'    client = ol.connect("{address}", rank=RANK)\n\nCtrl-C ends the service.',
    ]


def trainer_hosts(status: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return which ranks attach on which host of a cluster."""
    return [{"host": one["host"], "ranks": one["ranks"]} for one in status["ray"]["placement"] if "ranks" in one]


def cluster_line(cluster: Mapping[str, Any]) -> str:
    """Return a cluster in one line: Ray's version, the address, and what its hosts have.

    Example:
        >>> node = {"resources": {"CPU": 96.0, "GPU": 8.0, "object_store_memory": 4e11, "node:10.0.0.1": 1.0}}
        >>> cluster_line({"version": "2.60.0", "address": "10.0.0.1:6379", "nodes": [node, node]})
        'Ray 2.60.0 at 10.0.0.1:6379: 2 hosts, 192 CPUs, 800\u202fGB object store, 16 GPU'
    """
    have: dict[str, float] = {}
    for node in cluster["nodes"]:
        for name, value in node["resources"].items():
            have[name] = have.get(name, 0) + value
    trainers = sum(TRAINER in node["resources"] for node in cluster["nodes"])
    marked = f" ({trainers} marked {TRAINER})" if trainers else ""
    # Ray counts its own things (memory, node:ADDRESS, accelerator_type:X) beside accelerators.
    others = [n for n in sorted(have) if ":" not in n and n not in ("CPU", "memory", "object_store_memory", TRAINER)]
    shown = ", ".join(f"{have[name]:g} {name}" for name in others) or "no accelerators"
    return (
        f"Ray {cluster['version']} at {cluster['address']}: {number(len(cluster['nodes']), 'host')}{marked}, "
        f"{have.get('CPU', 0):g} CPUs, {size(have.get('object_store_memory', 0))} object store, {shown}"
    )


def _cluster_parts(status: Mapping[str, Any]) -> list[RenderableType]:
    """Return the cluster, where every role of its service runs, and what its planner sends."""
    rows: list[Row] = []
    for one in status["ray"]["placement"]:
        ranks, sources = one.get("ranks"), one.get("sources")
        serves = f"ranks {ranks}" if ranks else number(sources, "source") if sources else ""
        rows.append(Row(one["role"], (escape(one["host"]), str(one["pid"]), f"{one['cpus']:g}", serves)))
    table = terminal_table(None, ("role", "host", "pid", "CPUs", "serves"), rows, left=("host", "serves"))
    # As text, not as the title of the table: that would be cut to its width.
    return [f"\n{escape(cluster_line(status['ray']))}", table, _traffic(status["planner"])]


def _role_parts(status: Mapping[str, Any]) -> list[RenderableType]:
    """Return the processes of all roles, the newest faults, and why a service cannot continue."""
    parts: list[RenderableType] = []
    if status.get("hosts"):
        rows: list[Row] = []
        for one in status["hosts"]:
            up = "yes" if one["up"] else "[red]no[/red]"
            rows.append(Row(one["role"], (str(one["pid"]), up, str(one["generation"]), str(one["restarts"]))))
        table = terminal_table("roles", ("role", "pid", "up", "generation", "restarts"), rows)
        parts.append(table)
    for fault in list(status.get("faults", ()))[-SHOWN_FAULTS:]:
        then = f"back after {fault['took_s']:.2f} s" if "took_s" in fault else "being replaced"
        at = time.strftime("%H:%M:%S", time.localtime(fault["at"]))
        parts.append(f"{at} the {fault['role']} {escape(fault['why'])}; {then}")
    parts += [f"[yellow]{escape(wait)}[/yellow]" for wait in status.get("waits", ())]
    if status.get("failed"):
        parts.append(f"[red]{escape(status['failed'])}[/red]")
    return parts


def _scaling_parts(scaling: Mapping[str, Any]) -> list[RenderableType]:
    """Return the newest changes of workers."""
    parts: list[RenderableType] = []
    for event in list(scaling.get("events", ()))[-SHOWN_FAULTS:]:
        change = f"{event['before']} -> {event['after']} workers"
        parts.append(f"step {event['step']}: {escape(event['source'])} {change}: {escape(event['why'])}")
    return parts


def _traffic(planner: Mapping[str, Any]) -> str:
    traffic, steps = planner["traffic"], planner["next_step"] - planner["first_step"]
    sent = f"a plan of {size(traffic['plan_bytes'] / traffic['plans'])}" if traffic["plans"] else "no plan sent so far"
    return f"planner, per step: {sent}, {size(traffic['metadata_bytes'] / max(steps, 1))} of metadata"


def status_tables(status: dict[str, Any]) -> list[RenderableType]:
    """Return the status of a service for the terminal: its sources, their media, its hosts, and its clients."""
    planner = status["planner"]
    coming = status["next_mesh"]
    then = f" (from step {coming['step']} on {coming['mesh']})" if coming else ""
    title = f"{status['runtime']} service, mesh {status['mesh']}{then}, next plan: step {planner['next_step']}"
    heads = ["source", "format", "planned", "realised", "samples", "tokens", "epochs"]
    heads += ["bad", "wrong length", "dropped", "buffer"]
    rows: list[Row] = []
    for name, one in status["sources"].items():
        cells = (escape(one["format"]), share(one["planned_share"]), share(one["realised_share"]))
        counts = (count(one["samples"]), count(one["tokens"]), f"{epochs_words(one)}{where_it_is(one)}")
        faults = (f"[red]{one[key]:,}[/red]" if one[key] else "0" for key in ("bad", "wrong_length"))
        rows.append(Row(name, (*cells, *counts, *faults, f"{one['skipped']:,}", size(one["buffer_bytes"]))))
    clients = Table(title=f"{number(len(status['clients']), 'client')} attached", title_justify="left")
    clients.add_column("at step", justify="right")
    clients.add_column("ranks")
    for step in sorted(set(status["clients"].values())):
        ranks = ", ".join(rank for rank, at in status["clients"].items() if at == step)
        clients.add_row(str(step), ranks)
    hosts = _cluster_parts(status) if "ray" in status else []
    hosts += _role_parts(status) + _scaling_parts(status.get("scaling") or {})
    bad = [
        escape(f"{name}: bad samples {', '.join(one['bad_rows'][:3])}{', ..' if one['bad'] > 3 else ''}")
        for name, one in status["sources"].items()
        if one["bad"]
    ]
    sources = terminal_table(title, heads, rows)
    words, mood = sentence_of(status)
    remote = remote_words(status.get("remote") or {})
    return [
        f"[{COLOURS[mood]}]{escape(words)}[/{COLOURS[mood]}]",
        sources,
        _memory(status["memory"]),
        *([remote] if remote else []),
        *bad,
        *media_tables(media_of(status["sources"])),
        *hosts,
        *([clients] if status["clients"] else []),
    ]


def _memory(memory: Mapping[str, Any]) -> str:
    """Return how much is held ahead, and by what."""
    held = sorted(((nbytes, holder) for holder, nbytes in memory["held"].items() if nbytes), reverse=True)
    parts = ", ".join(f"{holder} {size(nbytes)}" for nbytes, holder in held)
    total = size(sum(nbytes for nbytes, _ in held))
    return f"memory: {total} held ahead{f': {parts}' if parts else ''} (budget {size(memory['budget_bytes'])} a host)"


def where_it_is(source: Mapping[str, Any]) -> str:
    """Return a word for a source that is not drawn from."""
    if source["removed"]:
        return " (removed)"
    if source["parked"]:
        return f" (parked since step {source['parked']['since']})"
    return " (ended)" if source["finished"] else ""


def _look_aside(service: Service) -> Future[dict[str, Any]]:
    """Ask for the status on a thread of its own: a slow answer must not keep a SIGTERM waiting."""
    answer: Future[dict[str, Any]] = Future()

    def ask() -> None:
        try:
            answer.set_result(_status_or_lost(service))
        except BaseException as error:  # told to the thread that waits for it
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer


def _status_or_lost(service: Service) -> dict[str, Any]:
    try:
        status = service.status()
        if status.get("failed"):
            raise ServiceLost(status["failed"])
        return status
    except ServiceLost as error:
        raise ServiceLost(
            f"the service at {service.address} is gone; attached trainers get no more data "
            f"({str(error).partition(';')[0]}). Its messages stand above; if it was killed, the host may be out of "
            "memory. Start it again, with --resume if it has a store."
        ) from error


def _one_line(status: dict[str, Any]) -> str:
    steps = list(status["clients"].values())
    where = f"at steps {min(steps)} to {max(steps)}" if steps else "none so far"
    held = sum(status["memory"]["held"].values())
    bad = sum(one["bad"] for one in status["sources"].values())
    return f"clients: {len(steps)} ({where}) · planned to step {status['planner']['next_step'] - 1} · " + (
        f"{size(held)} held · {bad} bad samples"
    )


@contextmanager
def _on_sigterm() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for SIGTERM for so many seconds, and says whether it came."""
    # Not an Event: its lock may be held by the very thread that a signal interrupts, which would wait for itself. Not a
    # write in a Python handler either: a signal that the kernel delivers to another thread does not end the select of
    # the main thread, and the handler would run after it. The wake-up descriptor is written by the signal itself.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    seen = bytearray()

    def stopped_within(seconds: float) -> bool:
        if signal.SIGTERM not in seen and select.select([reader], [], [], seconds)[0]:
            seen.extend(os.read(reader, 4096))
        return signal.SIGTERM in seen

    try:
        yield stopped_within
    finally:
        signal.set_wakeup_fd(woken)
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


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def _write_whole(path: Path, text: str) -> None:
    """Write a file that another process may be waiting for: it appears whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as scratch:
            scratch.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"--address-file {path}: it cannot be written ({error.strerror}); trainers would wait for it for ever. "
            "Name another file."
        ) from error
