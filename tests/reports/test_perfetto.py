"""Traces: the bytes are Perfetto's TrackEvent format, slices never overlap, waits sum up to what status counts."""

from __future__ import annotations

import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.reports.perfetto import Trace, trace_of


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Read a protobuf message: (field, number or bytes) in order."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 1:
            yield key >> 3, struct.unpack("<d", data[at : at + 8])[0]
            at += 8
        else:
            assert key & 7 == 2
            length = varint()
            yield key >> 3, data[at : at + length]
            at += length


def read(data: bytes) -> tuple[dict[int, str], dict[int, list[tuple[str, int, int]]]]:
    """Return the names of all tracks, and the closed slices (name, begin, end) of each; slices must not overlap."""
    names: dict[int, str] = {}
    open_now: dict[int, tuple[str, int]] = {}
    slices: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    newest = 0
    for field, packet in fields(data):
        assert field == 1
        content = dict(fields(packet))
        assert content[10] == 1
        if 60 in content:
            about = dict(fields(content[60]))
            names[about[1]] = about[2].decode() if 2 in about else dict(fields(about[3]))[6].decode()
            assert 5 not in about or about[5] in names, "a group comes before its tracks"
            continue
        at, event = content[8], dict(fields(content[11]))
        assert at >= newest and event[11] in names
        newest = at
        if event[9] == 1:
            assert event[11] not in open_now, "slices overlap"
            open_now[event[11]] = (event[23].decode(), at)
        elif event[9] == 2:
            name, begin = open_now.pop(event[11])
            slices[event[11]].append((name, begin, at))
    assert not open_now
    return names, slices


def check_by_its_schema(data: bytes) -> dict[str, int]:
    """Parse a trace with Perfetto's own classes, refuse what they do not know, and return the events of each kind.

    Perfetto's trace_processor reads the same schema; its binary is not in the package, and is fetched from a server.
    """
    trace = perfetto_trace_pb2.Trace.FromString(data)
    assert len(trace.SerializeToString()) == len(data), "nothing is left out by the schema"
    tracks: dict[int, Any] = {}
    depth: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    newest: dict[int, int] = {}
    for packet in trace.packet:
        assert not len(UnknownFieldSet(packet)) and packet.trusted_packet_sequence_id == 1
        if packet.HasField("track_descriptor"):
            about = packet.track_descriptor
            assert not len(UnknownFieldSet(about)) and about.uuid not in tracks, "a track is described once"
            assert about.HasField("parent_uuid") != about.HasField("process"), "a track is a process, or inside of one"
            if about.HasField("process"):
                assert about.process.pid > 0 and about.process.process_name
            else:
                assert about.name and tracks[about.parent_uuid].HasField("process")
            tracks[about.uuid] = about
            continue
        event, kind = packet.track_event, packet.track_event.Type.Name(packet.track_event.type)
        assert packet.HasField("track_event") and packet.HasField("timestamp") and not len(UnknownFieldSet(event))
        track = tracks[event.track_uuid]
        assert track.HasField("counter") == (kind == "TYPE_COUNTER") == event.HasField("double_counter_value")
        assert packet.timestamp >= newest.get(event.track_uuid, 0), "the events of a track are in order"
        newest[event.track_uuid] = packet.timestamp
        depth[event.track_uuid] += {"TYPE_SLICE_BEGIN": 1, "TYPE_SLICE_END": -1}.get(kind, 0)
        assert 0 <= depth[event.track_uuid] <= 1, "every slice ends before the next one of its track begins"
        assert event.name or kind in ("TYPE_SLICE_END", "TYPE_COUNTER")
        assert all(note.name and note.string_value for note in event.debug_annotations)
        kinds[kind] += 1
    assert not any(depth.values()), "every slice ends"
    return kinds


def status(
    step: int, waited: float, source: float, clients: dict[str, int], report: int | None = None
) -> dict[str, Any]:
    planner = {"next_step": step + 2, "waits_for_report": report}
    return {"planner": planner, "waited_s": waited, "clients": clients, "sources": {"web": {"waited_s": source}}}


@given(st.lists(st.tuples(st.integers(1, 10**8), st.floats(0, 0.3), st.booleans()), min_size=1, max_size=40))
def test_waits_sum_up_and_never_overlap(looks):
    at, waited, step, seen = 10**18, 5.0, 0, []
    for passed, more, moves in looks:
        at, waited, step = at + passed, waited + more, step + moves
        seen.append((at, status(step, waited, waited / 2, {"0": step})))
    trace, told = trace_of(seen)
    names, slices = read(trace.to_bytes())
    drawn = {names[track]: sum(end - begin for _, begin, end in of) for track, of in slices.items()}
    assert told["waited_s"]["trainers"] == pytest.approx(waited - 5.0 - looks[0][1], abs=1e-6)
    assert drawn.get("wait for batches", 0) / 1e9 == pytest.approx(told["drawn_s"]["trainers"], abs=1e-9)
    assert told["drawn_s"]["web"] <= told["waited_s"]["web"] + 1e-9
    steps = [name for track, of in slices.items() if names[track] == "rank 0" for name, *_ in of]
    assert len(steps) == len(set(steps))


def test_reports_faults_and_counters_have_tracks():
    looks = [(10**9 * n, status(n, 0.0, 0.0, {}, report=4 if n in (2, 3) else None)) for n in range(6)]
    looks[-1][1]["faults"] = [
        {"role": "planner host", "why": "hangs", "at": 3.0, "took_s": 1.0},
        {"role": "planner host", "why": "was killed", "at": 4.5},
        {"role": "loader host 0", "why": "long ago", "at": -3.0},
    ]
    trace, told = trace_of(looks)
    names, slices = read(trace.to_bytes())
    found = {names[track]: of for track, of in slices.items()}
    assert found["wait for reports"] == [("report of step 4", 2 * 10**9, 4 * 10**9)]
    assert found["planner host"] == [("replaced", 3 * 10**9, 4 * 10**9)]
    assert (told["faults"], told["steps"]) == (2, 5)
    assert Trace().to_bytes() == b""
    kinds = check_by_its_schema(trace.to_bytes())
    assert kinds["TYPE_SLICE_BEGIN"] == kinds["TYPE_SLICE_END"] == 2 and kinds["TYPE_INSTANT"] and kinds["TYPE_COUNTER"]


def test_a_running_service_is_recorded(ids_job, cache, tmp_path):
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        next(client)
        out = tmp_path / "new" / "run.pftrace"
        command = ["trace", str(service.address), "--seconds", "0.5", "--interval", "0.05", "-o", str(out), "--json"]
        outcome = CliRunner().invoke(app, command)
        assert outcome.exit_code == 0, outcome.stderr
        told = json.loads(outcome.stdout)
    names, slices = read(out.read_bytes())
    assert {"trainers", "planner", "sources", "rank 0", "a is waited for"} <= set(names.values())
    assert check_by_its_schema(out.read_bytes())["TYPE_COUNTER"] == told["looks"]
    assert [name for track, of in slices.items() if names[track] == "rank 0" for name, *_ in of] == ["step 0"]
    assert told["ranks"] == 1 and told["looks"] >= 2 and set(told["waited_s"]) == {"trainers", "a", "b", "c"}
    gone = CliRunner().invoke(app, ["trace", "unix:///nowhere/at/all", "-o", str(out)])
    assert gone.exit_code == 2 and "/nowhere/at/all" in gone.stderr
