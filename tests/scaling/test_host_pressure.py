"""What a host is short of: from counters to words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.scaling.pressure import HostCounters, Pressure, pressure_between, shortages

GB = 10**9


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"busy": 0.99, "load": 33.0}, "the CPUs of this host are full (2 CPUs, 99 % in use, load 33)"),
        ({"busy": 0.6, "load": 33.0, "cpu_stalled": 0.9}, None),  # idle CPUs are not full, whatever waits elsewhere
        ({"cpu_stalled": 0.8}, "the CPUs of this host are full (2 CPUs)"),
        ({"cpu_stalled": 0.2, "load": 9.0}, None),
        ({"load": 3.2}, "the CPUs of this host are full (2 CPUs, load 3.2)"),
        ({"load": 2.0}, None),
        ({"busy": 0.4, "throttled": 0.5}, "the CPU quota on this host is used up (2 CPUs; processes are stopped "
         "50 % of the time)"),
        ({"memory_bytes": 8 * GB, "memory_available": GB // 10},
         "the memory of this host is short (0.1 of 8 GB available)"),
        ({"memory_stalled": 0.3}, "the memory of this host is short (processes wait for it 30 % of the time)"),
        ({"oom_kills": 1}, "the memory of this host is short (1 process killed for want of it)"),
        ({"memory_bytes": 8 * GB, "memory_available": GB}, None),
        ({"io_stalled": 0.9}, "the disks of this host are busy (processes wait for them 90 % of the time)"),
        ({"io_stalled": 0.2}, None),
        ({"disks": {"/runs": 5 << 20}}, "the disk of /runs on this host is full (5 MB left)"),
        ({"disks": {"/runs": 5 * GB}}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_a_shortage_is_said_in_words_and_nothing_else_is(facts, words):
    assert [one.words for one in shortages(Pressure(cpus=2.0, **facts))] == ([] if words is None else [words])


def test_a_full_disk_and_short_memory_come_before_full_cpus():
    pressure = Pressure(cpus=4.0, busy=1.0, io_stalled=0.8, memory_stalled=0.5, disks={"/runs": 0})
    assert [one.resource for one in shortages(pressure)] == ["space", "memory", "cpu", "disk"]


def test_hosts_of_a_cluster_are_named():
    assert shortages(Pressure(cpus=4.0, busy=1.0), "host gpu-7")[0].words.startswith("the CPUs of host gpu-7 are full")


def test_cpus_that_are_full_leave_nothing_for_more_workers():
    assert Pressure(cpus=8.0, busy=0.25).spare_cpus == 6.0
    assert Pressure(cpus=8.0, busy=0.97).spare_cpus == Pressure(cpus=8.0, throttled=0.2).spare_cpus == 0.0
    assert Pressure(cpus=8.0).spare_cpus == 8.0


counters = st.builds(
    HostCounters,
    at=st.floats(0, 1e6),
    cpus=st.floats(0.1, 512),
    **{
        name: st.none() | st.floats(0, 1e7)
        for name in ("busy_s", "used_s", "throttled_s", "cpu_stalled_s", "memory_stalled_s", "io_stalled_s", "load")
    },
    oom_kills=st.none() | st.integers(0, 9),
)


@given(counters, counters)
def test_shares_are_shares_whatever_counters_do(before, now):
    found = pressure_between(before, now)
    for share in (found.busy, found.throttled, found.cpu_stalled, found.memory_stalled, found.io_stalled):
        assert share is None or 0 <= share <= 1
    assert 0 <= found.spare_cpus <= found.cpus and found.oom_kills >= 0
    assert all(one.words for one in shortages(found))
    assert (found.busy is None) == (
        None in (before.busy_s, now.busy_s) and None in (before.used_s, now.used_s)
    )  # what the kernel does not tell is not made up
