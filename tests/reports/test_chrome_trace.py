"""Traces: Chrome's trace event format, slices never overlap, waits sum up to what status counts."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.reports.chrome_trace import Trace, trace_of

Slices = dict[str, list[tuple[str, float, float]]]


def read(text: str) -> tuple[Slices, Counter[str]]:
    """Return the slices (name, begin, end) of every track, in order, and the events of each kind.

    Checked are the rules of the format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    trace = json.loads(text)
    groups: set[int] = set()
    tracks: dict[tuple[int, int], str] = {}
    slices: Slices = defaultdict(list)
    kinds: Counter[str] = Counter()
    newest = 0.0
    for event in trace["traceEvents"]:
        kinds[event["ph"]] += 1
        place = (event["pid"], event.get("tid", 0))
        if event["ph"] == "M" and event["name"] == "process_name":
            assert event["pid"] not in groups and event["args"]["name"]
            groups.add(event["pid"])
        elif event["ph"] == "M":
            assert event["name"] == "thread_name" and event["pid"] in groups, "a group comes before its tracks"
            assert place not in tracks and place[1] > 0
            tracks[place] = event["args"]["name"]
            slices[tracks[place]] = []
        else:
            assert event["ts"] >= newest and event["name"]
            newest = event["ts"]
            if event["ph"] == "X":
                before = slices[tracks[place]]
                # A nanosecond is 0.001: floats of microseconds may round the begin and the length apart.
                assert not before or event["ts"] >= before[-1][2] - 0.001, "slices overlap"
                assert event["dur"] > 0
                before.append((event["name"], event["ts"], event["ts"] + event["dur"]))
            elif event["ph"] == "i":
                assert place in tracks and event["s"] == "t"
            else:
                assert event["ph"] == "C" and place[0] in groups
                assert all(isinstance(value, (int, float)) for value in event["args"].values())
    return slices, kinds


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
    slices, _ = read(trace.to_json())
    drawn = {track: sum(end - begin for _, begin, end in of) for track, of in slices.items()}
    assert told["waited_s"]["trainers"] == pytest.approx(waited - 5.0 - looks[0][1], abs=1e-6)
    assert drawn["wait for batches"] / 1e6 == pytest.approx(told["drawn_s"]["trainers"], abs=1e-9)
    assert told["drawn_s"]["web"] <= told["waited_s"]["web"] + 1e-9
    steps = [name for name, *_ in slices.get("rank 0", [])]
    assert len(steps) == len(set(steps))


def test_reports_faults_and_counters_have_tracks():
    looks = [(10**9 * n, status(n, 0.0, 0.0, {}, report=4 if n in (2, 3) else None)) for n in range(6)]
    looks[-1][1]["faults"] = [
        {"role": "planner host", "why": "hangs", "at": 3.0, "took_s": 1.0},
        {"role": "planner host", "why": "was killed", "at": 4.5},
        {"role": "loader host 0", "why": "long ago", "at": -3.0},
    ]
    trace, told = trace_of(looks)
    slices, kinds = read(trace.to_json())
    assert slices["wait for reports"] == [("report of step 4", 2e6, 4e6)]
    assert slices["planner host"] == [("replaced", 3e6, 4e6)]
    assert (told["faults"], told["steps"]) == (2, 5)
    assert (kinds["X"], kinds["i"], kinds["C"]) == (2, 1, len(looks))
    assert read(Trace(0).to_json()) == ({}, {})


def test_a_running_service_is_recorded(ids_job, cache, tmp_path):
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        next(client)
        out = tmp_path / "new" / "run.json"
        command = ["trace", str(service.address), "--seconds", "0.5", "--interval", "0.05", "-o", str(out), "--json"]
        outcome = CliRunner().invoke(app, command)
        assert outcome.exit_code == 0, outcome.stderr
        told = json.loads(outcome.stdout)
    slices, kinds = read(out.read_text())
    assert {"wait for batches", "wait for reports", "rank 0", "a is waited for"} <= set(slices)
    assert kinds["C"] == told["snapshots"]
    assert [name for name, *_ in slices["rank 0"]] == ["step 0"]
    assert told["ranks"] == 1 and told["snapshots"] >= 2 and set(told["waited_s"]) == {"trainers", "a", "b", "c"}
    gone = CliRunner().invoke(app, ["trace", "unix:///nowhere/at/all", "-o", str(out)])
    assert gone.exit_code == 2 and "/nowhere/at/all" in gone.stderr
