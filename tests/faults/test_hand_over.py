"""Groups of sources change hands while hosts are killed and stopped: the trainers get the very same stream."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import overlord as ol
from overlord.testing import Fault, FaultScript, StreamDigests, digest_service, launch_for_faults, stream_digests
from tests.conftest import write_ids

pytestmark = pytest.mark.usefixtures("quiet")

MESH = ol.ClientPlaceTree(dp=2)
STEPS = 10
WORKERS = 32
"""Of two loader hosts that are up at first, and two that sleep."""
SPLIT = {2: [12, 1, 8], 3: [3, 1, 20], 4: [20, 0, 8], 5: [1, 1, 1], 7: [8, 8, 12], 8: [1, 12, 1]}
"""Workers at some steps: sources are split over hosts and moved, hosts are woken and put to sleep."""


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> ol.Job:
    """Three small sources; each of two has a group a file."""
    folder = tmp_path_factory.mktemp("groups")
    rng = np.random.default_rng(0)
    for source, rows, files in (("a", 20, 5), ("b", 9, 1), ("c", 24, 8)):
        for number in range(files):
            write_ids(folder / source / f"{number}.jsonl", 1 + rng.integers(0, 40, rows // files), number * 1000)
    sample = ol.Text("ids", tokenized=True)
    return ol.Job(
        sources=[
            ol.Source(name, str(folder / name), sample=sample, weight=weight, shuffle_bytes=shuffle)
            for name, weight, shuffle in (("a", 3, 0), ("b", 1, 1 << 20), ("c", 3, 0))
        ],
        batch=ol.Batch(32, global_samples=6),
        overlength="split",
        seed=3,
    )


@pytest.fixture(scope="module")
def expected(job, cache) -> StreamDigests:
    return stream_digests(job, mesh=MESH, steps=STEPS, cache=cache)


def run_handing_over(job, cache, script=None, sizes=SPLIT, *, later=False, shadows=False, seen=None) -> StreamDigests:
    """Run a job whose workers are dealt anew at some steps, while a script lets things go wrong."""
    with launch_for_faults(
        job, script, mesh=MESH, shadows=shadows, most_workers=WORKERS, cache=cache
    ) as (service, storm):  # fmt: skip

        def before(service, step):
            storm.reach(step)
            if step in sizes:
                storm.resize(sizes[step], later=later)
            storm.wait(0.5)
            if seen is not None:
                supervisor = storm.cluster.supervisor
                up = [name for name, one in supervisor.table.roles.items() if one.peer is not None and "loader" in name]
                sizes_of = [supervisor.hosts.sizes_of(host).values() for host in range(4)]
                seen.append(
                    (supervisor.table.assignment.primary, up, [[count for count, _ in one] for one in sizes_of])
                )

        return digest_service(service, steps=STEPS, before=before)


def test_sources_are_split_and_moved_and_hosts_come_and_go(job, cache, expected):
    """Else all of these tests would pass for nothing."""
    seen: list = []
    assert run_handing_over(job, cache, seen=seen) == expected
    assert max(len(hosts) for primary, _, _ in seen for hosts in primary) >= 3
    assert len({primary for primary, _, _ in seen}) >= 4
    counts = [len(up) for _, up, _ in seen]
    assert (counts[0], max(counts), min(counts[counts.index(4) :])) == (2, 4, 2)
    for _, _, dealt in seen:
        assert max(sum(workers) for workers in dealt) <= WORKERS // 4, "no host has more than it has room for"


WINDOWS = {
    "who gains, when it opens": FaultScript().kill("loader host 2", 2, on="take_sources"),
    "who gains, when it has opened": FaultScript().kill("loader host 1", 2, on="take_sources", after=True),
    "who was woken, while it comes up": FaultScript()
    .kill("loader host 2", 3, on="begin").kill("loader host 3", 3, on="open"),
    "who was woken, before the new book": FaultScript().kill("loader host 2", 3, on="take_sources", after=True),
    "who learns of the new book": FaultScript().kill("loader host 0", 3, on="learn", after=True),
    "the planner with the new book": FaultScript()
    .kill("planner", 3, on="learn").kill("planner", 5, on="learn", after=True),
    "the constructor with the new book": FaultScript().kill("constructor host 0", 3, on="learn", after=True),
    "who loses, before it is told": FaultScript()
    .kill("loader host 0", 3, on="resize").kill("loader host 1", 5, on="resize"),
    "who loses, when it was told": FaultScript().kill("loader host 2", 5, on="resize", after=True),
    "the planner, when somebody goes on": FaultScript()
    .kill("loader host 0", 3, on="take_sources").kill("planner", 3, on="where"),
    "all loaders": FaultScript()
    .kill("loader host 0", 4).kill("loader host 1", 4).kill("loader host 2", 4).kill("loader host 3", 4),
    "the service, before the new book": FaultScript().kill("service", 3, on="take_sources", after=True),
    "the service, after it": FaultScript()
    .kill("service", 3, on="resize").kill("service", 5, on="resize", after=True),
    "a host that hangs and comes back": FaultScript()
    .stop("loader host 2", 4, for_s=20.0).stop("loader host 0", 7, for_s=9.0),
    "messages that are lost": FaultScript()
    .drop("loader host 0", "resize", 3).drop("loader host 2", "take_sources", 3, answers=True)
    .drop("loader host 1", "resize", 5),
    "messages that come twice, and late": FaultScript()
    .duplicate("loader host 0", "resize", 3, late_s=20.0).duplicate("loader host 2", "take_sources", 2, late_s=9.0),
    "a book that comes late": FaultScript()
    .delay("planner", 3, 8.0, method="learn").delay("constructor host 0", 5, 8.0, method="learn"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("later", "shadows"),
    [(False, False), pytest.param(True, ["b"], marks=pytest.mark.slow)],
    ids=["", "in between, one shadow"],
)
@pytest.mark.parametrize("window", WINDOWS)
def test_killed_in_a_known_window(job, cache, expected, window, later, shadows):
    assert run_handing_over(job, cache, WINDOWS[window], later=later, shadows=shadows) == expected


LOADER_MESSAGES = ("summary_buffer", "hand_over", "learn", "take_sources", "resize", "begin", "open")
PLANNER_MESSAGES = ("plan", "ask", "tell", "where")


def random_script(luck: random.Random) -> FaultScript:
    faults = []
    for _ in range(luck.randint(1, 6)):
        role = luck.choice(["planner", "constructor host 0", *(f"loader host {n}" for n in range(4))])
        messages = {"p": PLANNER_MESSAGES, "l": LOADER_MESSAGES, "c": ("learn",)}[role[0]]
        kind, about = luck.choice(["kill", "kill", "kill", "stop", "drop", "duplicate", "delay", "partition"]), {}
        if kind in ("drop", "duplicate", "delay") or (kind == "kill" and luck.random() < 0.6):
            about = {"method": luck.choice(messages)}
        if kind in ("kill", "drop"):
            about["after"] = luck.random() < 0.5
        else:
            about["seconds"] = luck.choice([1.0, 4.0, 7.0, 20.0])
        if kind == "partition":
            about["other"] = luck.choice(["service", "planner", "loader host 0"])
        faults.append(Fault(kind=kind, at_step=luck.randrange(STEPS), role=role, **about))
    return FaultScript(tuple(sorted(faults, key=lambda fault: fault.at_step)))


def run_random(job, cache, expected, seeds):
    for seed in seeds:
        luck = random.Random(seed)
        script, shadows, later = random_script(luck), luck.choice([False, False, ["b"]]), luck.random() < 0.5
        sizes = {step: [luck.choice([0, 1, 1, 3, 8, 12, 20]) for _ in range(3)] for step in range(STEPS)}
        found = run_handing_over(job, cache, script, sizes, later=later, shadows=shadows)
        assert found == expected, f"seed {seed}: {script}"


@pytest.mark.slow
def test_random_hand_overs(job, cache, expected):
    run_random(job, cache, expected, range(8))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_very_many_random_hand_overs(job, cache, expected):
    run_random(job, cache, expected, range(1000, 1500))


# -- what once went wrong -------------------------------------------------------------------------------


def test_a_host_that_is_lost_when_it_is_end_spare_stays_asleep(job, cache, monkeypatch):
    with launch_for_faults(job, mesh=MESH, shadows=False, most_workers=WORKERS, cache=cache) as (service, storm):
        supervisor = storm.cluster.supervisor
        storm.resize([20, 1, 8])
        one = supervisor.table.roles["loader host 2"]
        assert not one.asleep
        end_spare = supervisor.hosts._end_spare

        def lost_just_then(host):
            storm.happen(Fault(kind="kill", at_step=0, role=f"loader host {host}"))
            supervisor.tick()
            end_spare(host)

        monkeypatch.setattr(supervisor.hosts, "_end_spare", lost_just_then)
        storm.resize([1, 1, 1])
        storm.wait(30.0)
        assert one.asleep and one.peer is None and storm.engine.newest("loader host 2") is None
        digest_service(service, steps=2)


def test_a_source_that_comes_can_go_to_a_host_that_was_woken(job, cache, tmp_path):
    rows = write_ids(tmp_path / "new" / "0.jsonl", [7] * 20)
    newcomer = ol.Source("new", str(rows), sample=ol.Text("ids", tokenized=True), shuffle_bytes=0)

    def add(service, step):
        if step == 2:
            service.add_source(newcomer, weight=5.0, at_step=5)

    with launch_for_faults(job, mesh=MESH, shadows=False, most_workers=WORKERS, cache=cache) as (service, storm):
        seen = set()

        def before(service, step):
            if step == 1:
                storm.resize([20, 1, 8])
            add(service, step)
            if step >= 3:
                storm.resize([1, 1, 1, 20] if step % 2 else [8, 1, 1, 20])
            seen.update(storm.cluster.supervisor.table.assignment.primary[3:])

        found = digest_service(service, steps=STEPS, before=before)
        assert any(host >= 2 for hosts in seen for host in hosts)
    with ol.launch(job, mesh=MESH, runtime="inline", cache=cache) as service:
        assert found == digest_service(service, steps=STEPS, before=add)


def test_a_promotion_is_not_undone_by_a_deal(job, cache, monkeypatch):
    """A shadow that is promoted while sources are opened elsewhere stays what it is."""
    with launch_for_faults(job, mesh=MESH, shadows=["b"], most_workers=WORKERS, cache=cache) as (service, storm):
        supervisor = storm.cluster.supervisor
        (host,) = supervisor.table.assignment.primary[1]
        ask = supervisor.hosts._ask

        def lost_just_then(to, method, message):
            if method == "take_sources" and supervisor.table.assignment.primary[1] == (host,):
                storm.happen(Fault(kind="kill", at_step=0, role=f"loader host {host}"))
                supervisor.tick()
            return ask(to, method, message)

        monkeypatch.setattr(supervisor.hosts, "_ask", lost_just_then)
        storm.resize([20, 1, 8])
        assert supervisor.table.assignment.primary[1] != (host,) and supervisor.table.assignment.shadow[1] == host
        monkeypatch.undo()
        storm.resize([20, 1, 8])
        assert len(supervisor.table.assignment.primary[0]) > 1, "the next interval takes it up"
        digest_service(service, steps=2)


def test_nobody_is_woken_for_sources_that_stay_where_they_are(job, cache):
    with launch_for_faults(job, mesh=MESH, shadows=True, most_workers=WORKERS, cache=cache) as (_, storm):
        storm.resize([20, 20, 20])
        assert [one.asleep for one in storm.cluster.supervisor.table.roles.values()].count(True) == 2
        assert all(
            sum(count for count, _ in storm.cluster.supervisor.hosts.sizes_of(host).values()) <= 8 + 1
            for host in range(2)
        )


def test_what_is_bad_is_counted_wherever_its_source_goes(tmp_path, cache):
    """Its tolerance is judged by all that was met, not by what the newest host has met."""
    rows = [json.dumps({"ids": [5] * 4 if at % 4 < 3 else "none"}) for at in range(48)]
    for number in range(6):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(rows[8 * number : 8 * number + 8]) + "\n")
    sample = ol.Text("ids", tokenized=True)
    job = ol.Job(
        sources=[
            ol.Source(name, str(tmp_path), sample=sample, shuffle_bytes=0, tolerance=1.0, weight=1) for name in "abc"
        ],
        batch=ol.Batch(16, global_samples=9),
    )
    found = []
    for moves in ({}, {2: [12, 1, 1], 4: [20, 1, 8], 6: [1, 1, 1], 8: [3, 1, 20]}):
        with launch_for_faults(job, mesh=MESH, shadows=False, most_workers=WORKERS, cache=cache) as (service, storm):

            def before(service, step, storm=storm, moves=moves):
                if step in moves:
                    storm.resize(moves[step])

            digest_service(service, steps=12, before=before)
            found.append([source["bad"] for source in service.status()["sources"].values()])
    stayed, moved = found
    assert min(stayed) > 8
    # Nothing is forgotten; what two hosts had prepared ahead both of them have met.
    assert all(one <= other <= one + 4 for one, other in zip(stayed, moved, strict=True)), found


# -- processes ------------------------------------------------------------------------------------------

FAR = 70
SCALED = {"scaling": ol.Scaling(interval_s=0.1, patience=2, window=2), "budget": ol.Budget(cpus=24)}


def waving(folder: Path, seconds: float) -> ol.Job:
    """A mixture that goes from text to photos and back, again and again: there is always somebody who moves."""

    def source(name, wait_s):
        def slowly(row, wait_s=wait_s):
            time.sleep(wait_s)
            return {"tokens": row["ids"]}

        for number in range(0 if (folder / name).exists() else 10):
            write_ids(folder / name / f"{number}.jsonl", [5 + at % 9 for at in range(30)], 1000 * number)
        sample = ol.Custom(slowly, columns=["ids"], process=False, name=name, code_digest=name)
        return ol.Source(name, str(folder / name), sample=sample, shuffle_bytes=0)

    cheap, dear = {"text": 0.97, "photos": 0.03}, {"text": 0.4, "photos": 0.6}
    return ol.Job(
        sources=[source("text", 0.0), source("photos", seconds)],
        mixture=ol.Mixture.stages([(0, cheap), (8, dear), (24, cheap), (40, dear), (56, cheap)]),
        batch=ol.Batch(64, global_samples=16),
        seed=5,
        lag=8,
    )


@pytest.fixture(scope="module")
def wave(tmp_path_factory, cache) -> tuple[ol.Job, StreamDigests]:
    folder = tmp_path_factory.mktemp("wave")
    return waving(folder, 0.03), stream_digests(waving(folder, 0.0), mesh=MESH, steps=FAR, cache=cache)


class Hunter:
    """Kills or stops somebody whenever a hand-over is under way, and at random moments after the first."""

    def __init__(self, service, luck: random.Random, roles: tuple[str, ...], signum: int, most: int) -> None:
        self._service, self._luck, self._roles, self._signum, self._most = service, luck, roles, signum, most
        self.struck: list[str] = []
        self.deals: set[tuple] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hunt, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _hunt(self) -> None:
        while not self._ended.wait(0.02):
            hosts = self._service.status()["hosts"]
            deal = tuple((host["role"], host["sources"]) for host in hosts if host["role"].startswith("loader"))
            moved = deal not in self.deals and len(self.deals) > 0
            again = len(self.deals) > 1  # one that is lost before puts off the first hand-over
            self.deals.add(deal)
            prey = [host for host in hosts if host["up"] and host["role"].startswith(self._roles)]
            if prey and len(self.struck) < self._most and (moved or (again and self._luck.random() < 0.01)):
                self._ended.wait(self._luck.uniform(0.0, 0.15))
                one = self._luck.choice(prey)
                try:
                    os.kill(one["pid"], self._signum)
                    self.struck.append(one["role"])
                except ProcessLookupError:
                    pass  # it was put to sleep just now


def hunt(wave, cache, roles, signum, *, seed=0, most=3, hosts=1, **where) -> Hunter:
    job, expected = wave
    pause_s = 0.0 if where.get("runtime") == "ray" else 0.03  # actors start slowly: the need must last until they run
    with ol.launch(
        job, mesh=MESH, loader_hosts=hosts, heartbeat=1.0, cache=cache, **where, **SCALED
    ) as service:  # fmt: skip
        with Hunter(service, random.Random(seed), roles, signum, most) as hunter:
            found = digest_service(service, steps=FAR, before=lambda service, step: time.sleep(pause_s))
        pids = {host["pid"] for host in service.status()["hosts"]}
    assert found == expected
    assert hunter.struck and len(hunter.deals) > 1, (hunter.struck, hunter.deals)
    if where.get("runtime") != "ray":
        assert not psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 10)[1]
    return hunter


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_loader_hosts_are_lost_while_groups_change_hands(wave, cache, signum):
    hunt(wave, cache, ("loader",), signum)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "roles", [("loader host 1", "loader host 2"), ("loader host 0",), ("planner",), ("",)], ids=str
)
def test_anybody_is_lost_while_groups_change_hands(wave, cache, roles, seed):
    hunt(wave, cache, roles, signal.SIGKILL, seed=seed, most=5, hosts=1 + seed % 2)


@pytest.mark.ray
@pytest.mark.slow
def test_actors_are_lost_while_groups_change_hands(wave, cache, ray_address):
    hunt(wave, cache, ("loader",), signal.SIGKILL, runtime="ray", address=ray_address)


def test_a_cluster_without_room_is_gone_on_with_and_what_is_reserved_is_given_back(job, cache, expected, monkeypatch):
    """Room is found before a host starts, and no other one is started when there is none."""
    held, refused = set(), []
    with launch_for_faults(job, mesh=MESH, shadows=False, most_workers=WORKERS, cache=cache) as (service, storm):
        supervisor, engine = storm.cluster.supervisor, storm.engine

        def reserve(site, sidecars):
            assert sidecars == {supervisor.table.roles["constructor host 0"].site.node.id}
            if len(refused) < 2:
                refused.append(site.name)
                raise ol.SpecError("no host of the cluster has room")
            held.add(site.name)
            return site

        monkeypatch.setattr(engine, "reserve", reserve)
        monkeypatch.setattr(engine, "release", lambda site: held.discard(site.name))

        def before(service, step):
            storm.reach(step)
            if step in SPLIT:
                storm.resize(SPLIT[step], later=False)
            storm.wait(0.5)
            up = {name for name, one in supervisor.table.roles.items() if one.peer is not None and "loader" in name}
            assert up - {"loader host 0", "loader host 1"} == held

        assert digest_service(service, steps=STEPS, before=before) == expected
        assert refused == ["loader host 2"] * 2 and held
        storm.resize([1, 1, 1])
        assert not held
