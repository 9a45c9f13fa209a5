"""The cluster runtime: the only file that knows Ray. Actors around the roles, their placement, their end.

Runs as the service process of a launcher, which needs no Ray itself and may use its own.

Rules of this file:
1. Actors live as long as the service: no call waits without a deadline, nothing is restarted behind our back.
2. Everything of a service is in one namespace and one placement group, so services on one cluster do not meet.
3. When the launcher goes, by `close()` or by a SIGKILL, actors are asked to end, then killed; a cluster that was
   started here goes with them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from overlord.core.specs import Job
from overlord.errors import ServiceLost, SpecError
from overlord.runtimes.cluster_placement import TRAINER, ClusterOptions, Node, Site, cpus_needed, place
from overlord.runtimes.cluster_roles import ROLES
from overlord.runtimes.deployment import LaunchOptions, canonical, check_launch
from overlord.runtimes.doors import CONTROL, answer_all, open_door
from overlord.runtimes.frames import Frame, error_frame, frame_of, open_frame
from overlord.runtimes.opening import Progress
from overlord.runtimes.service_main import run_service

OPEN_S = 1800.0
"""How long opening all sources may take: listings of object stores are slow, and progress is shown."""
REACH_S = 10.0
RESERVE_S = 60.0
"""How long a cluster may take to reserve what was idle a moment ago."""
CLOSE_S = 10.0
STORE_BYTES = 256 << 20
"""What the object store of our own cluster has beside the payloads within the budget."""
ASIDE = ("verdict", "pid", "progress", "close")
"""Methods that have threads of their own: others may hold a lock and wait for what comes of them."""
ACCELERATORS = ("GPU", "TPU", "NPU", "HPU", "neuron_cores")

logger = logging.getLogger("overlord")


class RayPeer:
    """An actor of the service, as others ask it."""

    def __init__(self, handle: Any, name: str, deadline_s: float) -> None:
        self._handle = handle
        self._name = name
        self._deadline_s = deadline_s

    def ask(self, method: str, frame: Frame, blob: Any = None) -> _Answer:
        """Call a method of the actor's role."""
        call = self._handle.ask_aside if method in ASIDE else self._handle.ask
        return _Answer(call.remote(method, frame, blob), self._name, method, self._deadline_s, self._handle)


class _Answer:
    """A call under way."""

    def __init__(self, ref: Any, name: str, method: str, deadline_s: float, handle: Any = None) -> None:
        self._ref = ref
        self._name = name
        self._method = method
        self._deadline_s = deadline_s
        self._handle = handle

    def get(self) -> Frame:
        """Wait for the answer: up to the deadline, and on as long as the actor is seen to live."""
        until = time.monotonic() + OPEN_S
        while True:
            try:
                return self._get()
            except GetTimeoutError as error:
                if time.monotonic() > until or not self._lives():
                    raise self._silent() from error
                logger.warning("the %s is still busy with %r after %g s", self._name, self._method, self._deadline_s)

    def _lives(self) -> bool:
        """Whether the actor answers at all: reading a large file may take longer than any call should."""
        if self._handle is None:
            return False
        try:
            ray.get(self._handle.ask_aside.remote("pid", frame_of({})), timeout=min(REACH_S, self._deadline_s))
        except RayError:
            return False
        return True

    def _silent(self) -> ServiceLost:
        return ServiceLost(
            f"the {self._name} did not answer {self._method!r} within {self._deadline_s:g} s; no data can come "
            "from it. Its host may be overloaded or cut off: see Ray's log of it, and launch again from the last state."
        )

    def _get(self) -> Frame:
        try:
            return ray.get(self._ref, timeout=self._deadline_s)
        except GetTimeoutError:
            raise
        except RayError as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ServiceLost(
                f"the {self._name} is gone ({why}); no data can come from it. Its last words are in Ray's log of it; "
                "launch again from the last state."
            ) from error


class RayBlobs:
    """Plans in Ray's object store: put once, read in place on every host."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def put(self, block: npt.NDArray[np.uint8]) -> Any:
        """Put a block."""
        return ray.put(block)

    def get(self, blob: Any) -> npt.NDArray[np.uint8]:
        """Return a block that somebody put."""
        return _Answer(blob, "planner", "plan", self._deadline_s).get()  # type: ignore[return-value]


class Host:
    """The actor around one role: frames in, frames out; an error is an answer."""

    def __init__(self, role: str, bundle: bytes, paths: Sequence[str], folder: str, site: dict[str, Any]) -> None:
        self._failed: Frame | None = None
        try:
            self._role = ROLES[role](bundle, paths, folder, site)
        except BaseException as error:  # told to whoever asks: an actor that fails to start tells less
            logger.exception("a %s did not start", role)
            self._failed = error_frame(error)

    def meet(self, planner: Any, loaders: Sequence[Any], deadline_s: float) -> None:
        """Learn whom to ask."""
        if self._failed is not None:
            return  # and say so when asked
        peers = [RayPeer(handle, f"loader host {number}", deadline_s) for number, handle in enumerate(loaders)]
        # A plan may have to wait for loaders that are as slow as they may be.
        self._role.meet(RayPeer(planner, "planner", 2 * deadline_s), peers, RayBlobs(deadline_s))

    @ray.method(concurrency_group="aside")
    def ask_aside(self, method: str, frame: Frame, blob: Any = None) -> Frame:
        """Call a method that must not wait for threads which may themselves wait for it."""
        return self.ask(method, frame, blob)

    def ask(self, method: str, frame: Frame, blob: Any = None) -> Frame:
        """Call a method of the role."""
        if self._failed is not None:
            return self._failed
        try:
            return getattr(self._role, method)(frame, *([] if blob is None else [blob]))
        except BaseException as error:  # the border of the actor: who asked must learn what became of it
            return error_frame(error)


class Cluster:
    """The actors of one service."""

    def __init__(self, job: Job, options: LaunchOptions, bundle: bytes, folder: Path, sites: Sequence[Site]) -> None:
        self._options = options
        self._sites = sites
        self._num_sources = len(job.sources)
        assert options.cluster is not None
        self._deadline_s = options.cluster.deadline_s
        self._group = _reserve(sites, folder.name)
        self._handles: dict[str, Any] = {}
        hosts = sum(site.role == "constructor" for site in sites)
        actor, bundled = ray.remote(concurrency_groups={"aside": len(ASIDE)})(Host), ray.put(bundle)
        for index, site in enumerate(sites):
            self._handles[site.name] = actor.options(
                name=f"{folder.name}/{site.name}",
                num_cpus=site.cpus,
                max_restarts=0,
                max_concurrency=16 + 4 * hosts,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            ).remote(site.role, bundled, sys.path, str(folder), _facts_of(site, hosts))

    def begin(self, progress: Progress) -> None:
        """Bring all hosts up, side by side; what is wrong with the job shows here."""
        planner, loaders = self._handles["planner"], [self._handles[s.name] for s in self._of("loader")]
        met = [handle.meet.remote(planner, loaders, self._deadline_s) for handle in self._handles.values()]
        # What takes time on each host goes on while the sources are opened.
        ready = [(s, self._handles[s.name].ask.remote("prepare", frame_of({}))) for s in self._sites if not s.sources]
        for site, ref in zip(self._sites, met, strict=True):
            self._wait_started(site, ref)
        facts = self._open_sources(progress)
        for site, ref in ready:
            open_frame(_Answer(ref, site.name, "prepare", OPEN_S).get())
        stands = self._ask("planner", "open_store", frame_of({"facts": facts}))
        progress("indexing files", 0, 1)
        self._ask_all("loader", "begin", frame_of(stands))
        host_of = [0] * self._num_sources
        for site in self._of("loader"):
            for source in site.sources:
                host_of[source] = site.number
        progress("planning the first step", 0, 1)
        begun = self._ask("planner", "begin", frame_of({"host_of": host_of, "cluster": self._describe()}))
        self._ask_all("constructor", "begin", frame_of({"host_of": host_of, **begun}))

    def answer(self, message: dict[str, Any]) -> tuple[dict[str, Any], Sequence[int]]:
        """Answer the owner of the service."""
        return self._ask("planner", "ask", frame_of(message), self._deadline_s)["answer"], []

    def close(self) -> None:
        """End the actors: constructors tell the planner how far they came, the planner may ask loaders once more."""
        for role in ("constructor", "planner", "loader"):
            asked = [self._handles[site.name].ask_aside.remote("close", frame_of({})) for site in self._of(role)]
            ray.wait(asked, num_returns=len(asked), timeout=CLOSE_S)  # who does not end is killed
        for handle in self._handles.values():
            ray.kill(handle)
        remove_placement_group(self._group)

    def _wait_started(self, site: Site, ref: Any) -> None:
        try:
            ray.get(ref, timeout=OPEN_S)
        except RayError as error:
            why = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise SpecError(
                f"the {site.name} did not start on {site.node.name} of the cluster at "
                f"{ray.get_runtime_context().gcs_address} ({why}); nothing could run. Is that the cluster you meant, "
                "and is the same version of overlord-data[ray] installed on all of its hosts?"
            ) from error

    def _open_sources(self, progress: Progress) -> dict[str, Any]:
        asked = [self._handles[site.name].ask.remote("open", frame_of({})) for site in self._of("loader")]
        until = time.monotonic() + OPEN_S
        waiting = asked
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)
            counts = self._ask_all("loader", "progress", frame_of({})) if waiting else []
            progress("opening sources", sum(one["done"] for one in counts) or 0, self._num_sources)
            if time.monotonic() > until:
                raise ServiceLost(f"the sources were not open after {OPEN_S:g} s; look at the storage they are on.")
        facts: dict[str, Any] = {}
        for site, ref in zip(self._of("loader"), asked, strict=True):
            facts |= open_frame(_Answer(ref, site.name, "open", self._deadline_s).get())[0]["facts"]
        progress("opening sources", self._num_sources, self._num_sources)
        return dict(sorted(facts.items()))

    def _of(self, role: str) -> list[Site]:
        return [site for site in self._sites if site.role == role]

    def _ask(self, name: str, method: str, frame: Frame, deadline_s: float = OPEN_S) -> Any:
        return open_frame(RayPeer(self._handles[name], name, deadline_s).ask(method, frame).get())[0]

    def _ask_all(self, role: str, method: str, frame: Frame) -> list[Any]:
        asked = [RayPeer(self._handles[s.name], s.name, OPEN_S).ask(method, frame) for s in self._of(role)]
        return [open_frame(one.get())[0] for one in asked]

    def _describe(self) -> dict[str, Any]:
        pids = [self._ask(site.name, "pid", frame_of({}))["pid"] for site in self._sites]
        nodes = [{"host": n["NodeManagerHostname"], "node": n["NodeID"], "resources": n["Resources"]}
                 for n in ray.nodes() if n["Alive"]]  # fmt: skip
        context = ray.get_runtime_context()
        return {
            "version": ray.__version__,
            "address": context.gcs_address,
            "nodes": nodes,
            "placement": [site.to_json() | {"pid": pid} for site, pid in zip(self._sites, pids, strict=True)],
        }


def _facts_of(site: Site, hosts: int) -> dict[str, Any]:
    return {"number": site.number, "ranks": list(site.ranks), "sources": list(site.sources), "hosts": hosts}


def _reserve(sites: Sequence[Site], name: str) -> Any:
    """Reserve a bundle for every site, on the node it was placed on: all of them, or none."""
    group = placement_group(
        [{"CPU": site.cpus} for site in sites],
        strategy="PACK",
        name=name,
        bundle_label_selector=[{"ray.io/node-id": site.node.id} for site in sites],
    )
    if not group.wait(RESERVE_S):
        remove_placement_group(group)
        wanted = ", ".join(f"{site.name} {site.cpus:g} on {site.node.name}" for site in sites)
        raise SpecError(
            f"the cluster did not give the CPUs that the service needs within {RESERVE_S:g} s ({wanted}); another job "
            "took them. Wait for it, add hosts, or lower threads= or loader_hosts=."
        )
    return group


def nodes_of_cluster() -> list[Node]:
    """Return the hosts of the cluster with what is idle on them."""
    here, idle = ray.get_runtime_context().get_node_id(), available_resources_per_node()
    return [
        Node(
            id=one["NodeID"],
            name=one["NodeManagerHostname"],
            cpus=idle.get(one["NodeID"], {}).get("CPU", 0.0),
            accelerators=max((one["Resources"].get(kind, 0.0) for kind in ACCELERATORS), default=0.0),
            trainer=TRAINER in one["Resources"],
            here=one["NodeID"] == here,
        )
        for one in ray.nodes()
        if one["Alive"]
    ]


def _check_reachable(address: str) -> None:
    """Find out in seconds that nobody listens at an address: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address:
        raise ValueError("it is one of Ray Client, and roles must be placed from a host of the cluster")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()


@contextlib.contextmanager
def _attached(job: Job, options: LaunchOptions, folder: Path) -> Iterator[None]:
    """Attach to a cluster, or start one on this host that ends with the context."""
    cluster = options.cluster or ClusterOptions()
    common: dict[str, Any] = {"namespace": folder.name, "logging_level": logging.ERROR, "log_to_driver": True}
    try:
        if cluster.address is not None:
            _check_reachable(cluster.address)
            ray.init(cluster.address, **common)
        else:
            cpus = cpus_needed(cluster, num_sources=len(job.sources), loader_cpus=options.threads)
            ray.init(
                "local", num_cpus=cpus, num_gpus=0, include_dashboard=False, _temp_dir=str(folder / "ray"),
                object_store_memory=STORE_BYTES + math.ceil(1.5 * options.budget_bytes), **common,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        at = f"at {cluster.address!r}" if cluster.address else "on this host"
        raise SpecError(
            f"address: no Ray cluster could be reached or started {at} ({str(error).strip()[:300]}); nothing could "
            "run. Start one with `ray start --head`, use address='auto' on one of its hosts, or leave address out."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def serving(bundle: bytes, folder: Path, progress: Progress) -> Iterator[str]:
    """Serve a job on a cluster."""
    job, options = cloudpickle.loads(bundle)  # from the launching process to its own roles
    check_launch(canonical(job), options)
    progress("starting Ray" if options.cluster.address is None else "attaching to Ray", 0, 1)
    with _attached(job, options, folder):
        sites = place(
            nodes_of_cluster(), options.cluster, world_size=options.mesh.world_size, num_sources=len(job.sources),
            loader_cpus=options.threads,
        )  # fmt: skip
        cluster = Cluster(job, options, bundle, folder, sites)
        try:
            cluster.begin(progress)
            with open_door(folder / CONTROL, lambda connection: answer_all(connection, cluster.answer)):
                yield f"unix://{folder}"
        finally:
            cluster.close()


if __name__ == "__main__":
    from overlord.runtimes import ray_cluster  # by its name, by which actors find its classes

    run_service(ray_cluster.serving)
