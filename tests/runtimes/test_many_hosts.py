"""Several constructor and loader hosts without an engine: every rank gets what it gets when one host has it all."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import overlord as ol
from overlord.core.client_messages import GetStatus, Reshard, Resharded
from overlord.core.messages import (
    BeginPlanning,
    Close,
    HandedOver,
    Media,
    MetaDelta,
    MetaDeltas,
    OpenedSources,
    Payload,
    Prepare,
)
from overlord.core.place_tree import ranks_of_host
from overlord.core.ragged import Ragged
from overlord.core.samples import META, Cursor
from overlord.roles.assignment import Assignment
from overlord.runtimes.client_feed import connect
from overlord.runtimes.hosts.constructor_host import ConstructorHost
from overlord.runtimes.hosts.loader_host import LoaderHost
from overlord.runtimes.hosts.planner_host import PlannerHost
from overlord.runtimes.launching.service_options import ServiceOptions, pack, unpack
from overlord.runtimes.supervision.cleanup import make_until_gone, remove_when_gone
from overlord.runtimes.transport.engine import SERVICE, Membership
from overlord.runtimes.transport.peer_client import PeerClient
from overlord.runtimes.transport.role_codec import (
    answer_from_frame,
    answer_to_frame,
    question_from_frame,
    to_frame,
    unwrap,
)
from overlord.runtimes.transport.role_endpoint import finished
from overlord.testing import StreamDigests, digest_service


class Here:
    """A role in this process, asked as if it were on another host: it gets and gives read-only copies."""

    def __init__(self, role, job, options, folder, blobs, number, **site):
        self.name = "planner" if role is PlannerHost else f"{role.__name__[:-4].lower()} host {number}"
        self.peer_client = PeerClient((self.name, 1))
        facts = {"number": number, "generation": 1, "ranks": [], "sources": [], "shadows": [], **site}
        self.role = role(job, options, folder, facts, self.peer_client, blobs)
        self.calls: list[tuple[str, int, int]] = []

    def ask(self, method, message, sender=SERVICE):
        frame, plan = to_frame(message)
        try:
            self.peer_client.check(sender)
            answer = finished(getattr(self.role, method)(question_from_frame(_carried(frame), plan)))
        except Exception as error:
            answer = error
        back = _carried(answer_to_frame(answer))
        asked, given = (sum(getattr(part, "nbytes", len(part)) for part in parts) for parts in (frame, back))
        self.calls.append((method, asked, given))
        return _Given(answer_from_frame(back))


class _Given:
    def __init__(self, answer):
        self.answer = answer

    def get(self):
        return unwrap(self.answer)

    def poll(self, timeout_s):
        return self.answer


def _carried(frame):
    out = [bytes(frame[0])]
    for array in frame[1:]:
        copy = np.array(array)
        copy.flags.writeable = False
        out.append(copy)
    return out


class Blocks:
    """Blobs that are passed as they are."""

    def put(self, block):
        copy = block.copy()
        copy.flags.writeable = False
        return copy

    def get(self, blob):
        return blob


@contextmanager
def hosts_of(job, tmp_path, cache, *, mesh, loader_hosts, ranks_per_host=1, hosts=None, split=False, **options):
    """Bring up a service of several hosts and give (service-like, planner peer, loader peers)."""
    given = ServiceOptions(mesh=mesh, cache=cache, **{"threads": 1, "budget_bytes": 64 << 20, **options})
    folder = str(tmp_path)
    count, blobs = hosts or mesh.world_size // ranks_per_host, Blocks()
    # Every other source is dealt to all hosts, group by group.
    dealt = tuple(
        tuple(range(loader_hosts)) if split and source % 2 == 0 else (source % loader_hosts,)
        for source in range(len(job.sources))
    )
    common = (*unpack(pack(job, given)), folder, blobs)
    planner = Here(PlannerHost, *common, 0, hosts=count)
    loaders = [
        Here(LoaderHost, *common, n, hosts=count, sources=[s for s, hosts in enumerate(dealt) if n in hosts])
        for n in range(loader_hosts)
    ]
    constructors = [
        Here(ConstructorHost, *common, n, hosts=count, ranks=list(ranks_of_host(n, count, mesh.world_size)))
        for n in range(count)
    ]
    everybody = {peer.name: peer for peer in (*loaders, planner, *constructors)}
    membership = Membership(1, dict.fromkeys(everybody, 1), everybody, Assignment(dealt, (-1,) * len(dealt)))
    with ExitStack() as ends:
        for peer in everybody.values():
            peer.peer_client.learn(membership)
            ends.callback(peer.role.close, Close())
        for peer in (planner, *constructors):
            peer.ask("prepare", Prepare()).get()
        facts = {}
        for peer in loaders:
            facts |= peer.ask("open", Prepare()).get().facts
        stands = planner.ask("open_store", OpenedSources(facts)).get()
        for peer in loaders:
            peer.ask("begin", stands).get()
        begun = planner.ask("begin", BeginPlanning()).get()
        for peer in constructors:
            peer.ask("begin", begun).get()
        yield Door(mesh, f"unix://{folder}"), planner, loaders


class Door:
    """As much of a service as the digests need."""

    def __init__(self, mesh, address):
        self.mesh = mesh
        self.address = address

    def client(self, rank):
        return connect(self.address, rank)


@pytest.fixture(scope="module")
def jobs(mixed_job, ids_job):
    return {"mixed": mixed_job, "ids": ids_job}


STRATEGIES = {
    "balance": None,
    "vlm": ol.strategies.vlm_hybrid(split=True),
    "hdp": ol.strategies.hdp(),
    "packed": ol.strategies.packed(),
}


@pytest.mark.parametrize(
    ("name", "mesh", "ranks_per_host", "loader_hosts", "strategy", "layout"),
    [
        pytest.param("mixed", "dp=2,cp=2", 2, 1, "balance", {}, marks=pytest.mark.slow),
        ("mixed", "cp=2,tp=2", 1, 3, "balance", {"keys": "megatron"}),  # one bucket on four hosts
        ("mixed", "dp=4", 1, 2, "vlm", {}),
        ("mixed", "dp=2,cp=2,tp=2", 4, 2, "vlm", {"positions": "mrope"}),
        pytest.param("mixed", "pp=2,dp=2", 2, 2, "vlm", {}, marks=pytest.mark.slow),
        ("ids", "dp=2,cp=2", 2, 3, "hdp", {}),
        ("ids", "dp=3,cp=2", 2, 2, "packed", {}),
        ("ids", "dp=8", 1, 1, "balance", {}),  # more hosts than microbatches with samples
    ],
)
def test_every_rank_gets_what_one_host_would_give_it(
    jobs, tmp_path, cache, name, mesh, ranks_per_host, loader_hosts, strategy, layout
):
    tree = ol.ClientPlaceTree.parse(mesh)
    groups, steps = {"shuffle_bytes": 2048}, 14 if name == "ids" else 5  # several of them, and into the second
    job = jobs[name].replace(sources=[source.replace(**groups) for source in jobs[name].sources])
    shape, chosen = ol.Layout(**layout), STRATEGIES[strategy]
    with ol.launch(job, mesh=tree, strategy=chosen, layout=shape, runtime="inline", cache=cache) as service:
        expected = digest_service(service, steps=steps)
    assert expected.steps == steps
    with hosts_of(job, tmp_path, cache, mesh=tree, ranks_per_host=ranks_per_host, loader_hosts=loader_hosts,
                  split=True, strategy=chosen, layout=shape) as (service, planner, loaders):  # fmt: skip
        found = digest_service(service, steps=steps)
        handed = [peer.role._fleet.status() for peer in loaders]
        by_host = [{s for s, one in host.items() if one["handed_over_bytes"]} for host in handed]
        shared = [s for s in by_host[0] if any(s in others for others in by_host[1:])]
        # A Parquet file of one row group is one group of the order, and cannot be dealt.
        assert shared or loader_hosts == 1 or name != "ids", "no source was dealt to several hosts"
        assert isinstance(found, StreamDigests) and found == expected
        assert {method for method, _, _ in planner.calls} <= {
            "prepare", "open_store", "begin", "plan", "ask", "tell", "verdict"
        }, "no payload ever comes to the planner"  # fmt: skip


def test_a_host_gets_its_part_and_nothing_else(jobs, tmp_path, cache):
    tree = ol.ClientPlaceTree(dp=4)
    with hosts_of(jobs["ids"], tmp_path, cache, mesh=tree, ranks_per_host=1, loader_hosts=1,
                  prefetch=1) as (service, planner, loaders):  # fmt: skip
        digest_service(service, steps=6)
        status = planner.role.ask(GetStatus()).content
        traffic = status["planner"]["traffic"]
        handed = [answer for method, _, answer in loaders[0].calls if method == "hand_over"]
    # Steps ahead of the trainers may still be under way.
    assert 4 * 6 <= len(handed) <= 4 * traffic["plans"], "one call a pair and step"
    assert traffic["metadata_bytes"] < traffic["plan_bytes"]
    assert traffic["other_bytes"] < 1024 * 5 * traffic["plans"]


@pytest.mark.parametrize(
    ("name", "before", "after", "hosts", "strategy"),
    [
        ("ids", "dp=2", "dp=2,cp=2", 2, "balance"),  # rank 1 goes on where it sits, ranks 2 and 3 share a host
        ("ids", "dp=4", "dp=3", 4, "packed"),  # a host has nobody any more
        ("mixed", "dp=2", "dp=4", 2, "vlm"),
        ("mixed", "dp=2,tp=2", "pp=2,dp=1", 2, "vlm"),
    ],
)
def test_another_mesh_reaches_every_host(jobs, tmp_path, cache, name, before, after, hosts, strategy):
    old, new, job = ol.ClientPlaceTree.parse(before), ol.ClientPlaceTree.parse(after), jobs[name]
    options = {"strategy": STRATEGIES[strategy], "prefetch": 1}
    with ol.launch(job, mesh=old, runtime="inline", cache=cache, **options) as service:
        service.reshard(new, at_step=4)
        expected = steps_by_rank(service, max(old.world_size, new.world_size))
    per_host = old.world_size // hosts
    with hosts_of(job, tmp_path, cache, mesh=old, ranks_per_host=per_host, loader_hosts=2, **options) as (
        service, planner, loaders,
    ):  # fmt: skip
        message = Reshard(new.sizes(), 4, "once")
        for _ in range(2):
            assert planner.ask("ask", message).get() == Resharded(4, new.sizes())
        assert steps_by_rank(service, max(old.world_size, new.world_size)) == expected
        behind = [step for loader in loaders for step, _ in loader.role._host._staged if 4 <= step < 6]
        # The last steps may be asked for once more while the clients go, one after the other.
        assert not behind, "every part of the new mesh was taken, and let go of"


def steps_by_rank(service, ranks):
    """Take seven steps with all ranks side by side: what each of them got of each step."""
    clients, found = [service.client(rank) for rank in range(ranks)], {}
    for index in range(7):
        for rank, client in enumerate(clients):
            step = next(client, None) if client.next_step == index else None
            if step is not None:
                digests = [batch.digest() for batch in (*step.microbatches, *filter(None, [step.encoder]))]
                found[rank, index] = (step.mesh, step.plan_digest, digests)
    for client in clients:
        client.close()
    return found


def digests_of(client):
    return [batch.digest() for _, step in zip(range(3), client, strict=False) for batch in step.microbatches]


def test_ranks_on_another_host_than_planned_are_served(jobs, tmp_path, cache, monkeypatch):
    """The order in which a launcher numbers its hosts need not be ours: one door on a machine takes who comes."""
    tree, job = ol.ClientPlaceTree(dp=4), jobs["ids"]
    with ol.launch(job, mesh=tree, runtime="inline", cache=cache) as service:
        expected = [
            batch.digest() for _, step in zip(range(3), service.client(3), strict=False) for batch in step.microbatches
        ]
    with hosts_of(job, tmp_path, cache, mesh=tree, ranks_per_host=2, loader_hosts=1) as (service, _, _):
        (tmp_path / "host-1-of-2").rename(tmp_path / "elsewhere")
        found = [
            batch.digest() for _, step in zip(range(3), service.client(3), strict=False) for batch in step.microbatches
        ]
        assert found == expected
        (tmp_path / "host-0-of-2").rename(tmp_path / "gone")
        monkeypatch.setattr("overlord.runtimes.client_feed.FIRST_ATTACH_S", 0.5)
        with pytest.raises(ol.ServiceLost, match=r"no constructor host of .* listens here.*rank 3"):
            service.client(3)


def test_a_snapshot_follows_the_slowest_rank_of_all_hosts(jobs, tmp_path, cache):
    tree, job = ol.ClientPlaceTree(dp=2), jobs["ids"].replace(lag=13)
    options = {"ranks_per_host": 1, "loader_hosts": 1, "prefetch": 12}
    with hosts_of(job, tmp_path, cache, mesh=tree, **options) as (service, planner, _):
        fast, slow = service.client(0), service.client(1)
        for _ in range(34):
            next(fast).microbatches[0]
        for _ in range(10):
            next(slow).microbatches[0]
        next(fast)
        assert planner.role._host._planner.checkpoints.passed <= 10
        assert newest_of(tmp_path) <= 10


def test_ranks_that_change_hosts_do_not_hold_the_snapshots(jobs, tmp_path, cache):
    """A launcher that starts again may number its hosts in another order."""
    tree, doors = ol.ClientPlaceTree(dp=2), [tmp_path / f"host-{rank}-of-2" for rank in range(2)]
    with hosts_of(jobs["ids"], tmp_path, cache, mesh=tree, ranks_per_host=1, loader_hosts=1) as (service, _, _):
        for rank in range(2):
            with service.client(rank) as client:
                for _ in range(3):
                    next(client)
        doors[0].rename(tmp_path / "x")
        doors[1].rename(doors[0])
        (tmp_path / "x").rename(doors[1])
        clients = [service.client(rank) for rank in range(2)]
        for _ in range(20):
            for client in clients:
                next(client).microbatches[0]
        limit = time.monotonic() + 10
        while newest_of(tmp_path) < 16:  # it is written in its own time
            assert time.monotonic() < limit
            time.sleep(0.01)


def newest_of(folder) -> int:
    found = [int(path.stem.removeprefix("snapshot-")) for path in (folder / "store").glob("lineage-*/snapshot-*.json")]
    return max(found, default=0)


def test_no_name_of_a_source_is_a_word_of_ours(jobs, tmp_path, cache):
    sources = [s.replace(name=name) for s, name in zip(jobs["ids"].sources, ("error", "!", "facts"), strict=True)]
    job = jobs["ids"].replace(sources=sources)
    with ol.launch(job, runtime="inline", cache=cache) as service:
        expected = digest_service(service, steps=3)
    tree = ol.ClientPlaceTree()
    with hosts_of(job, tmp_path, cache, mesh=tree, ranks_per_host=1, loader_hosts=2) as (service, _, _):
        assert digest_service(service, steps=3) == expected


@pytest.mark.parametrize("broadcast", [(), ("TP",)])
def test_nothing_stays_staged_that_everybody_has(jobs, tmp_path, cache, broadcast):
    tree, strategy = ol.ClientPlaceTree(tp=2), ol.strategies.backbone_balance(broadcast=broadcast)
    with hosts_of(jobs["ids"], tmp_path, cache, mesh=tree, ranks_per_host=1, loader_hosts=1, strategy=strategy) as (
        service, _, loaders,
    ):  # fmt: skip
        digest_service(service, steps=8)
        time.sleep(0.3)
        # Of what was prefetched when the clients went, one host may have asked and the other not.
        assert min((step for step, _ in loaders[0].role._host._staged), default=8) >= 8


def test_a_folder_of_somebody_else_is_not_trusted(jobs, tmp_path, cache):
    tmp_path.chmod(0o777)
    alone = hosts_of(jobs["ids"], tmp_path, cache, mesh=ol.ClientPlaceTree(), ranks_per_host=1, loader_hosts=1)
    with pytest.raises(ol.SpecError, match="others than this user can write to it"), alone:
        pass


KILLED = """
import sys, time
from pathlib import Path
import psutil
from overlord.runtimes.supervision.cleanup import make_until_gone
folder = Path(sys.argv[1])
kept = make_until_gone(folder)
(folder / "file").write_text("x")
for child in psutil.Process().children(recursive=True):
    child.kill()  # as Ray does with the children of an actor
print("ready", flush=True)
time.sleep(60)
"""


def test_a_folder_goes_with_its_process_however_that_goes(tmp_path):
    folder = tmp_path / "of the process"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert (folder / "file").exists()
        process.kill()
    for _ in range(100):
        if not folder.exists():
            break
        time.sleep(0.1)
    assert not folder.exists()
    again = remove_when_gone(tmp_path / "gone already")
    again.close()


AGENT = """
import sys, time
from pathlib import Path
time.sleep(3)
Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
time.sleep(1)
"""


def test_a_folder_goes_though_a_process_of_its_service_makes_it_again(tmp_path):
    """Ray's agents live up to a minute longer than their cluster, and write into its folder before they end."""
    folder = tmp_path / "overlord-service"
    folder.mkdir()
    kept = remove_when_gone(folder)
    with subprocess.Popen([sys.executable, "-c", AGENT, str(folder / "ray" / "session")]) as agent:
        kept.close()
        agent.wait()
    for _ in range(100):
        if not folder.exists():
            break
        time.sleep(0.1)
    assert not folder.exists()


def test_a_folder_that_was_there_stays(tmp_path):
    assert make_until_gone(tmp_path) is None
    assert make_until_gone(tmp_path / "missing" / "folder") is None
    time.sleep(0.2)
    assert tmp_path.exists()


def test_a_planner_does_not_make_the_folder_of_a_service_that_has_ended(tmp_path):
    """Nothing would remove it any more."""
    gone = tmp_path / "gone"
    with pytest.raises(ol.StoreError, match="the service has ended"):
        PlannerHost._own_store(SimpleNamespace(_claim_folder=lambda: gone))
    assert not gone.exists()


def test_frames_carry_what_they_were_given():
    meta = np.zeros(3, META)
    meta["row"] = [5, 6, 7]
    items = np.arange(8, dtype=np.int32).reshape(2, 4)
    deltas = [MetaDelta(4, meta[:1], Cursor(0, 1, 2)), MetaDelta(2, meta[1:], Cursor(3, 4, 5), items)]
    back = answer_from_frame(_carried(answer_to_frame(MetaDeltas(deltas)))).deltas
    assert [(d.source, d.meta["row"].tolist(), d.next_cursor) for d in back] == [
        (4, [5], Cursor(0, 1, 2)), (2, [6, 7], Cursor(3, 4, 5))
    ]  # fmt: skip
    assert back[0].items is None and back[1].items.tolist() == items.tolist()
    assert answer_from_frame(answer_to_frame(MetaDeltas([]))).deltas == []
    media = Media(
        kind="image", rows=np.array([0, 1, 3]), start=np.arange(3, dtype=np.int32), length=np.ones(3, np.int32),
        grids=np.ones((3, 3), np.int32), seconds=np.zeros(3, np.float32), seeds=np.arange(3, dtype=np.uint64),
        bad=np.array([False, True, False]), values=np.arange(9, dtype=np.uint8), begin=np.array([0, 4, 6]),
        nbytes_of=np.array([4, 2, 3]), encoded=True,
    )  # fmt: skip
    tokens = Ragged(np.arange(10, dtype=np.int32), np.array([4, 6, 10]))  # a slice: only its own values travel
    payload = Payload(7, 1, tokens, Ragged(np.ones(6, np.uint8), np.array([0, 2, 6])), media)
    whole = _carried(answer_to_frame(HandedOver([payload], 3)))
    assert whole[1].tolist() == [4, 5, 6, 7, 8, 9]
    back = answer_from_frame(whole)
    (found,) = back.payloads
    assert back.buffer_bytes == 3
    assert [row.tolist() for row in (found.tokens[0], found.tokens[1])] == [[4, 5], [6, 7, 8, 9]]
    part = payload.take(np.array([1]), media=np.array([False, False]))
    assert part.media.nbytes == 0 and part.media.bad.tolist() == [True, False]
    part = payload.take(np.array([1, 0]))
    assert [bytes(part.media.data(n)) for n in range(3)] == [b"\x04\x05", b"\x06\x07\x08", b"\x00\x01\x02\x03"]
    (again,) = answer_from_frame(_carried(answer_to_frame(HandedOver([part], 0)))).payloads
    assert again.chosen.tolist() == [1, 0] and again.media.encoded


def test_an_error_is_raised_where_its_frame_is_opened():
    with pytest.raises(ol.ToleranceError, match="too many"):
        unwrap(answer_from_frame(answer_to_frame(ol.ToleranceError("too many"))))
    with pytest.raises(ol.OverlordError, match="KeyError: 'x'"):
        unwrap(answer_from_frame(answer_to_frame(KeyError("x"))))
