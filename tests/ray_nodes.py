"""A Ray cluster of three nodes on this machine, for the tests: lives as long as the process that wants it.

    python tests/ray_nodes.py PID FILE [NODES]

writes its address to FILE, has the options of each node from NODES (a JSON list) if that is given, and takes the node
away whose id is written to FILE.gone. In a process of its own, since Ray's imports warn, and warnings fail our tests.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - other tests run at the same time
# New files of logs are looked for twice in a second, as where there are very many of them. Ten times in a second takes
# half a minute of a core in the quarter of an hour that the tests run.
os.environ["RAY_LOG_MONITOR_MANY_FILES_THRESHOLD"] = "0"

NODES = 3
CPUS = 64
"""Of each node: they only count what was reserved, and several tests may run at once."""


def main() -> None:
    from ray.cluster_utils import Cluster

    watched, file = int(sys.argv[1]), Path(sys.argv[2])
    folder = tempfile.mkdtemp(prefix="ovltest-", dir="/tmp")  # a test may have a TMPDIR of its own, which goes with it
    # Cluster writes the address of the newest cluster below Ray's default folder, whatever temp_dir says, and expects
    # that folder: /tmp/ray is there only where Ray ran before. This also keeps `ray.init("auto")` of others off ours.
    os.environ["RAY_TMPDIR"] = folder
    (Path(folder) / "ray").mkdir()
    common = {"num_cpus": CPUS, "object_store_memory": 200 << 20, "include_dashboard": False}
    given = json.loads(sys.argv[3]) if len(sys.argv) > 3 else [{}] * NODES
    cluster = Cluster(initialize_head=True, head_node_args={**common, **given[0], "temp_dir": folder})
    nodes = [cluster.add_node(**{**common, **one}) for one in given[1:]]
    file.with_suffix(".tmp").write_text(cluster.address)
    file.with_suffix(".tmp").rename(file)
    try:
        gone = file.with_suffix(".gone")
        while alive(watched):
            time.sleep(0.5)
            if gone.exists():
                wanted = gone.read_text()
                cluster.remove_node(next(node for node in nodes if node.node_id == wanted), allow_graceful=False)
                gone.unlink()
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        failed = Path(sys.argv[2]).with_suffix(".failed")  # told at once: a wait for a cluster that never comes is long
        failed.with_suffix(".tmp2").write_text(traceback.format_exc())
        failed.with_suffix(".tmp2").rename(failed)
        raise
