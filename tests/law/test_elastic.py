"""Another mesh while the stream runs: ranks come and go, the order stays, every sample is delivered exactly once."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.core.place_tree import ranks_of_host
from overlord.core.plan import plan_from_bytes, plan_to_bytes
from overlord.roles.changes import Change, InputLog, changes_from_json
from overlord.roles.planner import Meshes
from overlord.runtimes.hosts.step_server import AttachedClients
from overlord.stores.journal import Journal
from overlord.stores.places import open_place

Tree = ol.ClientPlaceTree


class Trainers:
    """All ranks of a run: each step is taken by the ranks of its mesh, new ranks attach when they are needed."""

    def __init__(self, service, ranks):
        self.service = service
        self.clients = {rank: service.client(rank) for rank in range(ranks)}
        self.order, self.plans, self.meshes, self.ended = {}, {}, {}, {}
        self.pieces = defaultdict(list)
        self.content = defaultdict(list)

    def attach(self, ranks):
        """Attach some ranks; several at once, as trainers do."""
        for rank in ranks:
            self.clients[rank] = self.service.client(rank)

    def take(self, upto):
        """Train up to a step, all ranks side by side; return whether the stream goes on."""
        while self.clients and min(client.next_step for client in self.clients.values()) < upto:
            now = min(client.next_step for client in self.clients.values())
            for rank, client in sorted(self.clients.items()):
                if client.next_step == now:
                    step = next(client, None)
                    if step is None:
                        self.ended[rank] = now
                        client.close()
                        del self.clients[rank]
                    else:
                        self._note(rank, step)
        return bool(self.clients)

    def _note(self, rank, step):
        for known, found in ((self.order, step.order_digest), (self.plans, step.plan_digest), (self.meshes, step.mesh)):
            assert known.setdefault(step.index, found) == found, "ranks disagree"
        at = step.mesh.coords(rank)
        for batch in step.microbatches:
            self.content[step.index].append((rank, batch.digest()))
            if (at.pp, at.tp, at.cp) == (0, 0, 0):
                meta = batch.meta
                columns = (meta.segment_offsets.tolist(), meta.segment_lengths.tolist())
                for sample, offset, length in zip(meta.sample_ids, *columns, strict=True):
                    if sample.source:
                        self.pieces[step.index, sample].append((offset, length))
        if step.encoder is not None:
            self.content[step.index].append((rank, step.encoder.digest()))


def straight(job, mesh, cache, steps, **options):
    """The same stream without any change."""
    with ol.launch(job, mesh=mesh, runtime="inline", cache=cache, **options) as service:
        trainers = Trainers(service, mesh.world_size)
        trainers.take(steps)
        return trainers


def sorted_pieces(trainers):
    return {key: sorted(pieces) for key, pieces in trainers.pieces.items()}


@pytest.mark.slow_on_ray
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("dp=4 dp=2 dp=8", marks=pytest.mark.slow_but_inline),
        pytest.param("dp=2,cp=1 dp=2,cp=2 cp=4", marks=pytest.mark.slow_but_inline),
        "tp=2,dp=2 pp=2,dp=2,tp=2 pp=2",
    ],
)
def test_ranks_come_and_go_and_nothing_else_changes(ids_job, cache, where, way):
    first, second, third = (Tree.parse(text) for text in way.split())
    expected = straight(ids_job, Tree(), cache, 14)
    with ol.launch(ids_job, mesh=first, cache=cache, prefetch=1, **where) as service:
        trainers = Trainers(service, first.world_size)
        trainers.take(2)
        one = service.reshard(second)
        assert 2 <= one <= 5 and service.mesh == second
        if second.world_size > first.world_size:
            trainers.attach(range(first.world_size, second.world_size))
        trainers.take(one + 2)
        two = service.reshard(third, at_step=10)
        assert two == 10 and service.mesh == third
        if third.world_size > second.world_size:
            trainers.attach(range(second.world_size, third.world_size))  # before the boundary
        assert trainers.take(14)
        status = service.status()
        assert status["mesh"] == str(third) and status["next_mesh"] is None
    assert [trainers.meshes[step] for step in (one - 1, one, two - 1, two)] == [first, second, second, third]
    ends = dict.fromkeys(range(second.world_size, first.world_size), one)
    ends |= dict.fromkeys(range(third.world_size, second.world_size), two)
    assert trainers.ended == ends, "a rank that is not in the mesh of a step ends before it"
    assert trainers.order == expected.order
    assert sorted_pieces(trainers) == sorted_pieces(expected), "every sample once, in its step"


@pytest.mark.parametrize("where", ["inline", pytest.param("local", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [
        (ol.strategies.vlm_hybrid(split=True), "dp=2", "dp=2,cp=2"),
        (ol.strategies.vlm_hybrid(), "dp=4,tp=1", "pp=2,dp=1,tp=1"),
        pytest.param(ol.strategies.packed(), "dp=1,cp=2", "dp=3", marks=pytest.mark.slow),
    ],
)
def test_from_the_boundary_on_it_is_a_run_launched_there(mixed_job, cache, where, strategy, before, after):
    """Live, and by a state: the same plans, the same bytes on every rank."""
    old, new = Tree.parse(before), Tree.parse(after)
    with ol.launch(mixed_job, mesh=old, strategy=strategy, cache=cache, **where) as service:
        trainers = Trainers(service, old.world_size)
        trainers.take(1)
        at = service.reshard(new, at_step=5)
        trainers.attach(range(old.world_size, new.world_size))
        trainers.take(8)
        states = [service.client(0), service.client(1)]
        for client in states:
            while client.next_step < at:
                next(client)
        state, same = (client.state_dict() for client in states)
    assert state == same and all(change["kind"] != "mesh" for change in state["changes"])
    resumed = straight(mixed_job, new, cache, 8, state=state, strategy=strategy)
    for step in range(at, 8):
        assert trainers.plans[step] == resumed.plans[step] and trainers.order[step] == resumed.order[step]
        assert sorted(trainers.content[step]) == sorted(resumed.content[step])
    whole = straight(mixed_job, old, cache, at, strategy=strategy)
    for step in range(at):
        assert trainers.plans[step] == whole.plans[step]
        assert sorted(trainers.content[step]) == sorted(whole.content[step])


sizes = st.builds(Tree, dp=st.integers(1, 4), cp=st.sampled_from([1, 2]), tp=st.integers(1, 2), pp=st.integers(1, 2))


@pytest.fixture(scope="module")
def whole_epoch(ids_job, cache):
    return straight(ids_job.evaluation(), Tree(), cache, 99)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=sizes, changes=st.lists(st.tuples(st.integers(0, 3), sizes), max_size=4))
def test_any_meshes_at_any_steps(ids_job, cache, whole_epoch, first, changes):
    with ol.launch(ids_job.evaluation(), mesh=first, runtime="inline", cache=cache) as service:
        trainers, step = Trainers(service, first.world_size), 0
        for ahead, tree in changes:
            trainers.take(step)
            at = service.reshard(tree, at_step=max(step, service.status()["planner"]["next_step"]) + ahead)
            trainers.take(at)
            trainers.take(at + 1 if not trainers.clients else at)
            trainers.attach(range(len(trainers.clients), tree.world_size))
            step = at + 1
        trainers.take(99)
    assert trainers.order == whole_epoch.order and len(trainers.order) > 10
    assert sorted_pieces(trainers) == sorted_pieces(whole_epoch)


def test_a_new_rank_waits_for_the_others(ids_job, cache):
    """It attaches long before its first step, and nothing is planned ahead for it."""
    with ol.launch(ids_job, mesh=Tree(), cache=cache, prefetch=1) as service:
        assert service.reshard(Tree(dp=2), at_step=9) == 9
        newcomer, found = service.client(1), []
        thread = threading.Thread(target=lambda: found.append(next(newcomer)))
        thread.start()
        assert newcomer.next_step == 9 and newcomer.mesh == Tree(dp=2)
        first = service.client(0)
        for _ in range(6):
            step = next(first)
            assert step.mesh == Tree()
        assert service.status()["planner"]["next_step"] <= 8 and not found
        assert service.status()["next_mesh"] == {"step": 9, "mesh": str(Tree(dp=2))}
        assert service.set_mixture({"a": 1}) <= 8, "steps that no rank is near can still change"
        for _ in range(4):
            step = next(first)
        thread.join(30)
        assert [one.index for one in found] == [9] and found[0].mesh == step.mesh == Tree(dp=2)
        assert found[0].plan_digest == step.plan_digest


@pytest.mark.slow_on_ray
def test_a_client_knows_its_mesh_and_a_late_rank_begins_at_its_boundary(ids_job, cache, where):
    with ol.launch(ids_job, mesh=Tree(dp=2), cache=cache, prefetch=2, **where) as service:
        first, second = service.client(0), service.client(1)
        at = service.reshard(Tree(cp=2, dp=2), at_step=4)
        for _ in range(7):
            assert {next(first).mesh, next(second).mesh} == {Tree(dp=2) if first.next_step <= at else Tree(dp=2, cp=2)}
        assert first.mesh == Tree(dp=2, cp=2)
        late = service.client(3)
        assert late.next_step == at and next(late).index == at
        with pytest.raises(ol.SpecError, match=r"rank 4 is not in the mesh of 4 ranks.*reshard"):
            service.client(4)


def test_a_rank_that_came_again_begins_where_it_came_again(ids_job, cache):
    with ol.launch(ids_job, mesh=Tree(dp=4), runtime="inline", cache=cache) as service:
        service.reshard(Tree(dp=2), at_step=3)
        left = service.client(3)
        assert [step.index for step in left] == [0, 1, 2] and next(left, None) is None
        service.reshard(Tree(dp=8), at_step=6)
        assert [service.client(rank).next_step for rank in (0, 1, 3, 7)] == [0, 0, 6, 6]


def test_ranks_that_left_do_not_hold_the_snapshots(ids_job, cache, tmp_path):
    with ol.launch(ids_job, mesh=Tree(dp=2), cache=cache, store=tmp_path / "store") as service:
        stays, leaves = service.client(0), service.client(1)
        at = service.reshard(Tree(), at_step=4)
        assert [step.index for step in leaves] == list(range(at))
        for _ in range(40):
            next(stays)
    with ol.launch(ids_job, runtime="inline", cache=cache, store=tmp_path / "store", state="latest") as service:
        assert service.client(0).next_step == 39 and service.mesh == Tree()


# -- what is refused, and what comes twice ---------------------------------------------------------


@pytest.mark.parametrize("where", ["inline", "local"], indirect=True)
@pytest.mark.slow_but_inline
def test_what_is_wrong_is_refused_and_nothing_changes(ids_job, cache, where):
    def stubborn(buffer, tree):
        if tree.dp == 3:
            raise ValueError("three is too many")
        return ol.strategies.backbone_balance()(buffer, tree)

    with ol.launch(ids_job, mesh=Tree(dp=2), strategy=stubborn, cache=cache, **where) as service:
        client = service.client(0)
        for _ in range(3):
            next(client)
        with pytest.raises(ol.SpecError, match=r"reshard: tree is 'dp=4', not a mesh"):
            service.reshard("dp=4")
        with pytest.raises(ol.SpecError, match=r"reshard: step 1 is already planned.*at_step="):
            service.reshard(Tree(dp=4), at_step=1)
        with pytest.raises(ol.SpecError, match=r"reshard: -1 is not a number of steps"):
            service.reshard(Tree(dp=4), at_step=-1)
        with pytest.raises(ol.SpecError, match=r"does not fit this job.*context_length is 32.*multiple of 12"):
            service.reshard(Tree(cp=6))
        with pytest.raises(ol.SpecError, match=r"does not fit this job.*stubborn failed.*three is too many"):
            service.reshard(Tree(dp=3))
        assert service.mesh == Tree(dp=2) and service.status()["next_mesh"] is None
        for _ in range(5):
            assert next(client).mesh == Tree(dp=2)


def test_what_is_asked_twice_is_done_once(ids_job, cache):
    with ol.launch(ids_job, runtime="inline", cache=cache) as service:
        planner, client = service._runtime.role("planner").host.planner, service.client(0)
        asked = {
            "mesh": lambda: planner.reshard(Tree(dp=2), change_id="m"),
            "skip": lambda: planner.skip_steps(3, change_id="s"),
            "mixture": lambda: planner.set_mixture(ol.Mixture({"a": 1}), change_id="x"),
        }
        made = {name: ask() for name, ask in asked.items()}
        for _ in range(3):
            next(client)
        assert {name: ask() for name, ask in asked.items()} == made
        assert len(planner.inputs.changes) == 3
        assert planner.skip_steps(3, change_id="other") > made["skip"]


@pytest.fixture
def journal(tmp_path):
    """A journal that is closed behind the test."""
    opened = Journal(open_place(str(tmp_path)), lambda: None)
    opened.begin("lineage-0001", owner=1)
    yield opened
    opened.close()


def test_a_journaled_mesh_is_repeated_and_a_state_has_none(ids_job, journal):
    log, modules = InputLog(ids_job, journal, {}, []), {"encoder": Tree(dp=4)}
    trees = [Tree(dp=2), Tree(dp=2, pp=2, vpp=2, order="dp-pp-cp-tp", modules=modules), Tree(dp=3), Tree(tp=4)]
    for number, (at, tree) in enumerate(zip((4, 9, 9, 6), trees, strict=True)):
        log.add_change(Change("mesh", at, mesh=tree, id=f"id-{number}"))
    log.add_change(Change("skip", 5, count=1, id="skip"))
    records = [record for record in journal.records() if record["kind"].startswith("change.")]
    for record in records:
        record["kind"] = record["kind"].removeprefix("change.")
    again = InputLog(ids_job, journal, {}, changes_from_json(records, ids_job))
    for one in (log, again):
        found = [one.mesh_at(step) for step in (3, 4, 5, 6, 8, 9, 100)]
        assert found == [None, trees[0], trees[0], trees[3], trees[3], trees[2], trees[2]], "the last word of a step"
        assert one.step_of("id-1") == 9 and one.step_of("") is None and one.step_of("new") is None
    assert log.changes_from(5) == [{"kind": "skip", "at": 5, "count": 1}]
    whole = InputLog(ids_job, journal, {}, changes_from_json(log.changes_from(7, whole=True), ids_job))
    assert [whole.mesh_at(step) for step in (7, 9)] == [trees[3], trees[2]]


# -- the rules by themselves ---------------------------------------------------------------------


def meshes_of(job, journal, first, *changes):
    log = InputLog(job, journal, {}, [Change("mesh", at, mesh=Tree(dp=dp)) for at, dp in changes])
    return Meshes(Tree(dp=4), first, log)


def test_what_all_ranks_have_passed(ids_job, journal):
    meshes = meshes_of(ids_job, journal, 0, (10, 2), (20, 8))
    assert meshes.passed({}, ()) == 0
    assert meshes.passed({0: 7, 3: 5}, (0, 3)) == 5
    assert meshes.passed({0: 14, 3: 10}, (0, 3)) == 14, "rank 3 is done"
    assert meshes.passed({0: 14, 3: 9}, (0, 3)) == 9
    assert meshes.passed({0: 14, 3: 9}, (0,)) == 14, "it went without a word, and the others went on"
    assert meshes.passed({0: 10, 3: 9}, (0,)) == 9, "not before they have"
    assert meshes.passed({7: 20}, (7,)) == 0, "a rank that waits has passed nothing"
    assert meshes.passed({0: 15, 7: 20}, (0, 7)) == 15
    assert meshes.passed({0: 33, 3: 10, 7: 25}, (0, 7)) == 25
    assert [meshes.begin_of(rank) for rank in (-1, 0, 1, 2, 3, 7, 8)] == [None, 0, 0, 20, 20, 20, None]
    assert meshes_of(ids_job, journal, 12, (10, 2), (20, 8)).eras()[0] == (12, Tree(dp=2))


@given(st.integers(1, 9), st.integers(1, 64))
def test_every_rank_has_one_host(hosts, world):
    dealt = [rank for number in range(hosts) for rank in ranks_of_host(number, hosts, world)]
    assert dealt == list(range(world))


@given(st.integers(0, 3), st.integers(1, 30), st.integers(0, 40))
def test_a_newcomer_wants_its_first_step_when_the_others_are_near(prefetch, begin, at):
    seats = AttachedClients(prefetch=prefetch, first_step=0)
    seats.take(1, begin)
    assert seats.wanted() == {begin: {1}} and seats.only_new(begin) and not seats.came_to(begin)
    seat = seats.take(0, 0)
    seats.move(seat, at)
    assert (1 in seats.wanted().get(begin, ())) == (begin <= at + prefetch), "near, or late"
    assert seats.only_new(begin) != (at <= begin <= at + prefetch)
    seats.end(seat)
    assert seats.wanted() == {begin: {1}}
    back = seats.take(2, begin, at=begin + 1)
    assert seats.wanted()[begin + 1] >= {2} and not seats.only_new(begin + 1), "it was there before"
    seats.free(back)


@given(sizes)
def test_a_plan_carries_its_mesh(tree):
    buffer = ol.summary_buffer({"a": [3, 5, 7]}, context_length=16)
    plan = ol.strategies.backbone_balance()(buffer, tree).on(tree)
    read = plan_from_bytes(plan_to_bytes(plan))
    assert read.mesh == tree and read.digest == plan.digest == ol.strategies.backbone_balance()(buffer, tree).digest
