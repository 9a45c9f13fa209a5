"""The cluster runtime: the only file that knows Ray. Actors around the roles, their placement, their end.

Runs as the service process of a launcher, which needs no Ray itself and may use its own.

Rules of this file:
1. The supervisor decides which role is dead and replaces it; Ray restarts nothing by itself.
2. Everything of a service is in one namespace and one placement group, so services on one cluster do not meet.
3. When the launcher goes, by `close()` or by a SIGKILL, actors are asked to end, then killed; a cluster that was
   started here goes with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from overlord.errors import AnswerLost, ServiceLost, SpecError
from overlord.runtimes.hosts.peers import Blobs
from overlord.runtimes.launching.cluster_placement import (
    TRAINER,
    ClusterOptions,
    Node,
    Site,
    cpus_needed,
    next_trainer_host,
    place,
    room_for,
)
from overlord.runtimes.launching.deployment import check_decoding
from overlord.runtimes.launching.service_options import KeepOptions, Progress, ServiceOptions, pack
from overlord.runtimes.launching.tokenizer_trial import try_tokenizer
from overlord.runtimes.supervision.child import LIMITS, Limits
from overlord.runtimes.supervision.service_process import run_service
from overlord.runtimes.supervision.supervisor import supervised, unbundled
from overlord.runtimes.transport.codec import Frame
from overlord.runtimes.transport.engine import SERVICE, Membership, Peer, PeerGone, Pending, Sender
from overlord.runtimes.transport.role_codec import answer_from_frame, from_frame, to_frame
from overlord.runtimes.transport.role_endpoint import RoleEndpoint

STORE_BYTES = 256 << 20
"""What the object store of our own cluster has beside the payloads within the budget."""
ASIDE = ("beat", "verdict", "alive", "close")
"""Methods that have threads of their own: other calls may hold a lock and wait for their answers."""
ASIDE_THREADS = 8
HTTP2_OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What a client of gRPC says first (RFC 9113, 3.4, with empty settings); a server answers with settings of its own."""
ACCELERATORS = ("GPU", "TPU", "NPU", "HPU", "neuron_cores")

logger = logging.getLogger("overlord")


class RayPeer:
    """An actor of the service, as others ask it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def ask(self, method: str, message: Any, sender: Sender = SERVICE) -> RayAnswer:
        """Call a method of the actor's role."""
        frame, plan = to_frame(message)
        call = self.handle.ask_aside if method in ASIDE else self.handle.ask
        # Ray resolves what stands for the plan, as it is an argument of its own.
        return RayAnswer(call.remote(method, frame, plan, sender))


class RayAnswer:
    """A call under way."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def poll(self, timeout_s: float) -> Any:
        """Wait a while for the answer."""
        try:
            return answer_from_frame(ray.get(self.ref, timeout=timeout_s))
        except GetTimeoutError:
            return None
        except RayError as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            # The object behind an answer may be lost while the actor lives: it can be called again.
            raise (PeerGone if isinstance(error, RayActorError) else AnswerLost)(why) from error


class RayBlobs(Blobs):
    """Plans in Ray's object store: put once, read in place on every host."""

    def put(self, block: npt.NDArray[np.uint8]) -> Any:
        """Put a block."""
        return ray.put(block)

    def get(self, blob: Any) -> npt.NDArray[np.uint8]:
        """Return a block that another actor put."""
        try:
            return ray.get(blob, timeout=LIMITS.ray_plan)
        except RayError as error:
            raise PeerGone("a plan was lost with the planner that had made it") from error


class Host:
    """The actor around one role."""

    def __init__(self, bundle: bytes, paths: Sequence[str], folder: str, site: dict[str, Any]) -> None:
        self._host = RoleEndpoint(bundle, paths, folder, site, RayBlobs())

    @ray.method(concurrency_group="aside")
    def learn(self, frame: Frame, handles: dict[str, Any]) -> Frame:
        """Take a new membership of peers."""
        return self._host.learn(from_frame(frame), {name: RayPeer(handle) for name, handle in handles.items()})

    @ray.method(concurrency_group="aside")
    def ask_aside(self, method: str, frame: Frame, plan: Any = None, sender: Sender = SERVICE) -> Frame:
        """Call a method that must not wait for threads which may themselves wait for it."""
        return self._host.ask(method, frame, plan, sender)

    def ask(self, method: str, frame: Frame, plan: Any = None, sender: Sender = SERVICE) -> Frame:
        """Call a method of the role."""
        return self._host.ask(method, frame, plan, sender)


class RayEngine:
    """Starts each role as an actor on its host."""

    def __init__(self, bundle: bytes, folder: Path, sites: Sequence[Site], limits: Limits) -> None:
        self.first_sign_s = limits.actor_first_sign
        self._folder = folder
        self._order = {site.name: number for number, site in enumerate(sites)}
        self._hosts = sum(site.role == "constructor" for site in sites)
        self._group = _reserve(sites, folder.name, limits.ray_reserve)
        self._limits = limits
        self._spares: dict[str, Any] = {}
        """Placement groups of hosts beyond those of the launch."""
        self._unused: set[str] = set()
        """Those of them that no actor has been started in."""
        self._actor, self._bundle = ray.remote(concurrency_groups={"aside": ASIDE_THREADS})(Host), ray.put(bundle)

    def start(self, site: Site, generation: int) -> Peer:
        """Start an actor: the first in the bundle that was reserved for it, its replacements wherever there is room."""
        reserved = generation == 1 or site.name in self._unused
        if site.name in self._unused:
            self._unused.remove(site.name)
            where: Any = PlacementGroupSchedulingStrategy(self._spares[site.name], placement_group_bundle_index=0)
        elif generation == 1:
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._order[site.name])
        else:  # nothing is reserved: the actor that it replaces may hang, and hold on to what was
            where = NodeAffinitySchedulingStrategy(site.node.id, soft=True)
        handle = self._actor.options(
            name=f"{self._folder.name}/{site.name}/{generation}",
            num_cpus=site.cpus if reserved else 0,
            memory=site.bytes if reserved else 0,
            max_restarts=0,
            max_concurrency=16 + 4 * self._hosts,
            scheduling_strategy=where,
        ).remote(self._bundle, sys.path, str(self._folder), self._facts(site) | {"generation": generation})
        return RayPeer(handle)

    def _facts(self, site: Site) -> dict[str, Any]:
        return site.facts(max(self._hosts, site.number + 1) if site.role == "constructor" else self._hosts)

    def introduce(self, peer: Peer, membership: Membership) -> Pending:
        """Send an actor the membership of peers."""
        assert isinstance(peer, RayPeer)
        handles = {name: one.handle for name, one in membership.peers.items() if isinstance(one, RayPeer)}
        return RayAnswer(peer.handle.learn.remote(to_frame(membership.head())[0], handles))

    def kill(self, peer: Peer, site: Site, pid: int) -> None:
        """Kill an actor; its process too, which Ray only asks to end."""
        assert isinstance(peer, RayPeer)
        ray.kill(peer.handle)
        if pid and site.node.name == socket.gethostname():
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already, or of another container
                os.kill(pid, signal.SIGKILL)

    def wait(self, pending: Sequence[Pending], timeout_s: float) -> None:
        """Wait until an answer is there, or for a while."""
        refs = [one.ref for one in pending if isinstance(one, RayAnswer)]
        if refs:
            ray.wait(refs, num_returns=1, timeout=timeout_s)
        else:
            time.sleep(timeout_s)

    def place_again(self, site: Site) -> Site:
        """Return the site, on another host if its own is gone: Ray itself takes long to notice."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if any(node["NodeID"] == site.node.id and _lives(node) for node in nodes):
            return site
        living = {node["NodeID"] for node in nodes if _lives(node)}
        others = sorted(
            (node for node in nodes_of_cluster() if node.id in living), key=lambda n: (not n.trainer, -n.cpus)
        )
        if not others:
            raise ServiceLost(f"no host of the cluster is left for the {site.name}; start some, they are taken up.")
        return dataclasses.replace(site, node=others[0])

    def reserve(self, site: Site, sidecars: Collection[str]) -> Site:
        """Reserve CPUs for a further host: loaders beside trainers or else elsewhere, a constructor beside trainers."""
        find = room_for if site.role == "loader" else next_trainer_host
        site = dataclasses.replace(site, node=find(site, nodes_of_cluster(), sidecars))
        self._spares[site.name] = _reserve([site], f"{self._folder.name}/{site.name}", self._limits.ray_reserve)
        self._unused.add(site.name)
        return site

    def release(self, site: Site) -> None:
        """Give back the CPUs of such a host."""
        self._unused.discard(site.name)
        group = self._spares.pop(site.name, None)
        if group is not None:
            remove_placement_group(group)

    def describe(self, sites: Sequence[tuple[Site, int]]) -> dict[str, Any]:
        """Return the cluster and where each role is on it."""
        nodes = [{"host": n["NodeManagerHostname"], "node": n["NodeID"], "resources": n["Resources"]}
                 for n in ray.nodes() if n["Alive"]]  # fmt: skip
        placement = [site.to_json() | {"pid": pid} for site, pid in sites]
        address = ray.get_runtime_context().gcs_address
        return {"ray": {"version": ray.__version__, "address": address, "nodes": nodes, "placement": placement}}

    def close(self) -> None:
        """Give back what was reserved."""
        for group in (self._group, *self._spares.values()):
            remove_placement_group(group)


def _lives(node: dict[str, Any]) -> bool:
    """Whether a host of the cluster answers at all."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=1.0).close()
    except OSError:
        return False
    return True


def _reserve(sites: Sequence[Site], name: str, limit_s: float) -> Any:
    """Reserve a bundle for every site, on the node it was placed on: all of them, or none."""
    group = placement_group(
        [{"CPU": site.cpus, "memory": site.bytes} if site.bytes else {"CPU": site.cpus} for site in sites],
        strategy="PACK",
        name=name,
        bundle_label_selector=[{"ray.io/node-id": site.node.id} for site in sites],
    )
    if not group.wait(limit_s):
        remove_placement_group(group)
        wanted = ", ".join(f"{site.name} {site.cpus:g} on {site.node.name}" for site in sites)
        raise SpecError(
            f"the cluster did not give the CPUs that the service needs within {limit_s:g} s ({wanted}); another job "
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
            bytes=idle.get(one["NodeID"], {}).get("memory", 0.0),
            accelerators=max((one["Resources"].get(kind, 0.0) for kind in ACCELERATORS), default=0.0),
            trainer=TRAINER in one["Resources"],
            here=one["NodeID"] == here,
        )
        for one in ray.nodes()
        if one["Alive"]
    ]


def _check_reachable(address: str) -> None:
    """Find out in seconds that nothing listens at an address: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address:
        raise ValueError("it is one of Ray Client, and roles must be placed from a host of the cluster")
    if host and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=LIMITS.ray_reach) as connection:
            connection.sendall(HTTP2_OPENING)
            if not connection.recv(1):
                raise OSError("what listens there is no Ray cluster")


@contextlib.contextmanager
def _attached(sources: int, options: ServiceOptions, folder: Path) -> Iterator[None]:
    """Attach to a cluster, or start one on this host that ends with the context."""
    cluster = options.cluster or ClusterOptions()
    common: dict[str, Any] = {"namespace": folder.name, "logging_level": logging.ERROR, "log_to_driver": True}
    try:
        if cluster.address is not None:
            _check_reachable(cluster.address)
            ray.init(cluster.address, **common)
        else:
            cpus = cpus_needed(cluster, num_sources=sources, loader_cpus=options.threads)
            if options.scaling is not None:  # hosts that are started later count theirs too
                each = max((options.threads, *(math.ceil(actor.cpus) for actor in cluster.actors)))
                cpus += each * math.ceil(options.worker_threads / options.workers_per_actor)
            ray.init(
                "local", num_cpus=cpus, num_gpus=0, include_dashboard=False, _temp_dir=str(folder / "ray"),
                object_store_memory=STORE_BYTES + math.ceil(1.5 * options.budget_bytes), **common,
            )  # fmt: skip
    except Exception as error:  # Ray raises a bare Exception where a node does not come up in time
        at = f"reached at {cluster.address!r}" if cluster.address else "started on this host"
        why = " ".join(str(error).split())[:300] or type(error).__name__
        remedy = (
            "Start one with `ray start --head`, use address='auto' on one of its hosts, or leave address out; where "
            "the cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as there"
            if cluster.address
            else "Launch again when the host is less busy, or use runtime='local', which needs no Ray"
        )
        raise SpecError(f"address: no Ray cluster could be {at} ({why}); nothing could run. {remedy}.") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def serving(bundle: bytes, folder: Path, progress: Progress, keep: KeepOptions) -> Iterator[str]:
    """Serve a job on a cluster."""
    job, options, names = unbundled(bundle, folder)
    assert options.cluster is not None, "a launch on Ray says how"
    try_tokenizer(job, options.cache, Limits(options.heartbeat_s))
    progress("starting Ray" if options.cluster.address is None else "attaching to Ray", 0, 1)
    with _attached(len(names), options, folder):
        sites = place(
            nodes_of_cluster(), options.cluster, world_size=options.mesh.world_size, names=names,
            loader_cpus=options.threads,
        )  # fmt: skip
        check_decoding(job, options, sum(site.role == "constructor" for site in sites))
        engine = RayEngine(pack(job, options), folder, sites, Limits(options.heartbeat_s))
        with supervised(engine, sites, options, folder, progress, keep) as address:
            yield address


if __name__ == "__main__":
    from overlord.runtimes.transport import ray_cluster  # by its name, by which actors find its classes

    run_service(ray_cluster.serving, LIMITS.closed_service)  # a Ray cluster of its own takes longer to end
