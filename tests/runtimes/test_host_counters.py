"""What the kernel tells of a host: with control groups of both versions, and with neither."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from overlord.runtimes.hosts.host_counters import read_host_counters
from overlord.scaling.pressure import pressure_between, shortages

TICKS = os.sysconf("SC_CLK_TCK")
CPU = min(os.sched_getaffinity(0))
STALL = "some avg10=1.00 avg60=0.00 avg300=0.00 total={some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={full}\n"


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_host_without_control_groups(tmp_path):
    root = host(tmp_path, {
        "proc/stat": f"cpu  1 1 1 1 1 1 1 1 7 7\ncpu{CPU} {300 * TICKS} 0 {100 * TICKS} {90 * TICKS} 5 0 0 0 9 9\n"
        "cpu9999 1 1 1 1 1 1 1 1 1 1\nintr 5\n",
        "proc/loadavg": "33.1 20.0 9.0 40/500 12345\n",
        "proc/pressure/cpu": STALL.format(some=7_000_000, full=0),
        "proc/pressure/memory": STALL.format(some=9, full=2_000_000),
        "proc/pressure/io": STALL.format(some=9, full=3_000_000),
        "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\n",
        "proc/vmstat": "oom_kill 2\n",
    })  # fmt: skip
    found = read_host_counters([tmp_path, tmp_path / "gone"], root)
    assert (found.busy_s, found.load, found.cpu_stalled_s) == (400.0, 33.1, 7.0)
    assert (found.memory_stalled_s, found.io_stalled_s, found.oom_kills) == (2.0, 3.0, 2)
    assert (found.memory_bytes, found.memory_available) == (1_024_000, 409_600)
    assert found.throttled_s is None and found.used_s is None
    assert list(found.disks) == [str(tmp_path)] and found.disks[str(tmp_path)] > 0


GROUPS = {
    "version 1": {
        "proc/self/cgroup": "5:memory:/pod\n4:cpu:/pod\n3:cpuacct:/pod\n0::/\n",
        "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/pod/cpu.stat": "nr_periods 9\nnr_throttled 5\nthrottled_time 4000000000\n",
        "sys/fs/cgroup/cpuacct/pod/cpuacct.usage": "12000000000\n",
        "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "500000\n",
        "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": "450000\n",
        "sys/fs/cgroup/memory/pod/memory.stat": "inactive_file 1\ntotal_inactive_file 30000\n",
        "sys/fs/cgroup/memory/pod/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    },
    "version 2": {
        "proc/self/cgroup": "0::/pod/task\n",
        "sys/fs/cgroup/pod/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/pod/task/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/task/cpu.stat": "usage_usec 12000000\nthrottled_usec 1000000\n",
        "sys/fs/cgroup/pod/cpu.stat": "usage_usec 99000000\nthrottled_usec 4000000\n",
        "sys/fs/cgroup/pod/task/cpu.pressure": STALL.format(some=6_000_000, full=1),
        "sys/fs/cgroup/pod/memory.max": "500000\n",
        "sys/fs/cgroup/pod/memory.current": "450000\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 30000\n",
        "sys/fs/cgroup/pod/memory.events": "low 0\noom 3\noom_kill 3\n",
    },
}


@pytest.mark.parametrize("version", GROUPS)
def test_a_container_is_judged_by_its_own_limits(tmp_path, version):
    common = {"proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 7000 kB\n", "proc/loadavg": "0.1 0 0 1/1 1\n"}
    found = read_host_counters([], host(tmp_path, common | GROUPS[version]))
    assert (found.cpus, found.throttled_s, found.oom_kills) == (0.5, 4.0, 3)
    assert found.used_s == (99.0 if version == "version 2" else 12.0)  # of the group that has the quota
    assert (found.memory_bytes, found.memory_available) == (500_000, 80_000)
    assert found.cpu_stalled_s == (6.0 if version == "version 2" else None)


def test_a_kernel_that_tells_nothing_is_short_of_nothing(tmp_path):
    files = {"proc/stat": f"cpu{CPU} 0 0 0 0 0 0 0 0\n", "proc/loadavg": "", "proc/pressure/cpu": "no such device"}
    first, second = (read_host_counters([], host(tmp_path, files)) for _ in range(2))
    assert first.busy_s is first.load is first.memory_bytes is first.cpu_stalled_s is None
    assert shortages(pressure_between(first, second)) == []


def test_this_host_tells_enough_to_be_judged():
    found = read_host_counters([Path.cwd()])
    assert found.cpus > 0 and found.busy_s and found.memory_available and found.disks
