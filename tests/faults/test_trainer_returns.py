"""A trainer that dies and comes back to a running service goes on at the step of its checkpoint, to the sample."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import overlord as ol
from overlord.core.client_messages import Beginning, Join, RanksMissing
from overlord.core.messages import HostNews
from overlord.errors import Rewound
from overlord.runtimes import client_feed as local
from tests.stores.test_down import Host as PlannerInProcess

TRAINER = """
import sys, json
import overlord as ol

address, rank, steps, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
client = ol.connect(address, rank, step=step)
for _ in range(steps):
    step = next(client)
    digests = [batch.digest() for batch in step.microbatches]
    print(json.dumps([step.index, step.plan_digest, digests]), flush=True)
    if "report" in sys.argv[5:]:
        client.report(step.index, {"loss/a": 1.0 + step.index % 3, "loss/b": 2.0, "loss/c": 0.5})
print("done", flush=True)
sys.stdin.read()
"""


class Trainer:
    """A trainer process that takes some steps, and then waits to be killed."""

    def __init__(self, address: str, rank: int, steps: int, step: int | None = None, *words: str) -> None:
        arguments = [address, str(rank), str(steps), json.dumps(step), *words]
        self._process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def finish(self) -> list[Any]:
        assert self._process.stdout is not None
        found: list[Any] = []
        while (line := self._process.stdout.readline()) not in (b"done\n", b""):
            found.append(json.loads(line))
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def seen(client: ol.Client, steps: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(steps):
        step = next(client)
        found.append([step.index, step.plan_digest, [batch.digest() for batch in step.microbatches]])
    return found


def train_and_die(address: str, ranks: int, steps: int, step: int | None = None, *words: str) -> list[list[Any]]:
    """Train on all ranks, and kill all of them."""
    trainers = [Trainer(address, rank, steps, step, *words) for rank in range(ranks)]
    try:
        return [trainer.finish() for trainer in trainers]
    finally:
        for trainer in trainers:
            trainer.kill()


def attach_all(service: ol.Service, ranks: int, step: int) -> list[ol.Client]:
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: service.client(rank, step=step), range(ranks)))


@pytest.mark.parametrize(
    ("ranks", "steps", "back_to", "how"),
    [
        (1, 6, 3, {}),
        pytest.param(2, 300, 280, {}, marks=pytest.mark.slow),
        pytest.param(1, 300, 60, {}, marks=pytest.mark.slow),
        pytest.param(2, 6, 0, {}, marks=pytest.mark.slow),
        pytest.param(2, 30, 11, {"loader_hosts": 2}, marks=pytest.mark.slow),
        pytest.param(2, 8, 5, {"runtime": "ray"}, marks=[pytest.mark.slow, pytest.mark.ray]),
    ],
)
@pytest.mark.timeout(600)
def test_samples_go_on_exactly(ids_job, cache, request, ranks, steps, back_to, how):
    if how.get("runtime") == "ray":
        how = {**how, "address": request.getfixturevalue("ray_address")}
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=ranks), cache=cache, **how) as service:
        before = train_and_die(service.address, ranks, steps)
        assert [index for index, *_ in before[0]] == list(range(steps))
        again = train_and_die(service.address, ranks, steps - back_to + 4, back_to)
        for rank in range(ranks):
            assert again[rank][: steps - back_to] == before[rank][back_to:]
            assert [index for index, *_ in again[rank]] == list(range(back_to, steps + 4))
        clients = attach_all(service, ranks, steps + 2)  # a second time, now in the lineage that was begun
        for rank, client in enumerate(clients):
            assert seen(client, 2) == again[rank][-2:]
            client.close()


def learning_job(ids_job: ol.Job) -> ol.Job:
    """A job whose mixture follows the reports: a report that does not belong to a lineage shows in its samples."""
    sources = [source.replace(weight=None) for source in ids_job.sources]
    return ids_job.replace(sources=sources, mixture=ol.Mixture({"a": 3, "b": 1, "c": 2}, learn="odm"), lag=4)


def reported(client: ol.Client, steps: int, loss: float) -> list[Any]:
    found: list[Any] = []
    for _ in range(steps):
        found += seen(client, 1)
        metrics = {f"loss/{name}": loss + (found[-1][0] * 7 + n) % 5 for n, name in enumerate("abc")}
        client.report(found[-1][0], metrics)
    return found


@pytest.mark.parametrize(
    "how",
    [
        {"runtime": "inline"},
        pytest.param({"runtime": "local"}, marks=pytest.mark.slow),
        pytest.param({"runtime": "local", "loader_hosts": 2}, marks=pytest.mark.slow),
    ],
    ids=["inline", "local", "processes"],
)
def test_it_equals_a_launch_from_that_step(ids_job, cache, tmp_path, how):
    """Reports and changes of steps that are trained again are left with the old lineage."""
    job, back_to, steps = learning_job(ids_job), 20, 40

    def train(service: ol.Service) -> None:
        with service.client() as client:
            reported(client, 10, 2.0)
            service.set_mixture({"a": 1, "b": 1, "c": 1}, at_step=15)
            reported(client, 20, 2.0)
            service.set_mixture({"a": 1, "b": 5, "c": 1}, at_step=35)
            reported(client, 6, 2.0)

    with ol.launch(job, runtime="inline", cache=cache, store=tmp_path / "fresh") as service:
        train(service)
    with ol.launch(job, runtime="inline", cache=cache, store=tmp_path / "fresh", state=back_to) as service:
        expected = reported(service.client(), steps - back_to, 9.0)
    with ol.launch(job, cache=cache, store=tmp_path / "running", **how) as service:
        train(service)
        with service.client(step=back_to) as client:
            assert reported(client, steps - back_to, 9.0) == expected
        assert service.status()["store"]["lineage"] == 2
    with ol.launch(job, runtime="inline", cache=cache, store=tmp_path / "running", state=back_to + 3) as service:
        assert reported(service.client(), 5, 9.0) == expected[3:8], "the new lineage is the one that is resumed"


def kill_planner(service: ol.Service) -> None:
    """Kill the process that plans: the service itself, or the host of the planner where it is another process."""
    hosts = {host["role"]: host["pid"] for host in service.status()["hosts"]}
    os.kill(hosts.get("planner", service.pid), signal.SIGKILL)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(1, {"loader_hosts": 2}, marks=pytest.mark.slow),
    ],
    ids=["local", "two trainers", "processes"],
)
def test_trainers_and_service_that_die_together_go_on_at_the_checkpoint(ids_job, cache, ranks, how):
    """The newest snapshot is older than the checkpoint, and the last records of plans may be lost."""
    mesh = ol.ClientPlaceTree(dp=ranks)
    with ol.launch(ids_job, mesh=mesh, runtime="inline", cache=cache) as service:
        expected = [seen(service.client(rank), 20) for rank in range(ranks)]
    with ol.launch(ids_job, mesh=mesh, cache=cache, **how) as service:
        trainers = [Trainer(service.address, rank, 13) for rank in range(ranks)]
        before = [trainer.finish() for trainer in trainers]
        assert before == [steps[:13] for steps in expected]
        kill_planner(service)
        for trainer in trainers:
            trainer.kill()
        again = train_and_die(service.address, ranks, 7, 13)
        assert again == [steps[13:] for steps in expected]
        kill_planner(service)
        with pytest.raises(ol.StateError, match=r"step 900 was asked for.*Give a step from 0 to \d\d,"):
            service.client(0, step=900)


@pytest.mark.slow
def test_a_step_that_was_never_handed_out_is_refused_after_a_crash(ids_job, cache):
    """It is before the horizon, but needs a report that is not in the journal."""
    with ol.launch(learning_job(ids_job), cache=cache) as service:
        with service.client() as client:
            reported(client, 6, 2.0)
        kill_planner(service)
        with pytest.raises(ol.StateError, match=r"step 14 was asked for.*step 10 needs the report of step 6"):
            service.client(step=14)
        with service.client(step=6) as client:
            assert next(client).index == 6


def test_a_launch_after_a_crash_goes_on_at_the_checkpoint(ids_job, cache, tmp_path):
    """As above, where the launcher is lost too: the last records of plans are not in the store."""
    with ol.launch(ids_job, runtime="inline", cache=cache) as service:
        expected = seen(service.client(), 20)
    store, crashed = tmp_path / "store", tmp_path / "crashed"
    with ol.launch(ids_job, runtime="inline", cache=cache, store=store) as service, service.client() as client:
        seen(client, 13)
        shutil.copytree(store, crashed, ignore=shutil.ignore_patterns("owner-*", "held-*", "alive"))
    with ol.launch(ids_job, runtime="inline", cache=cache, store=crashed, state=13) as service:
        assert seen(service.client(), 7) == expected[13:]
    with pytest.raises(ol.StateError, match=r"step 30 was asked for.* keeps the steps 0 to 1\d;"):
        ol.launch(ids_job, runtime="inline", cache=cache, store=store, state=30)  # it was closed: nothing is missing


def test_a_rank_that_died_alone_goes_on_alone(ids_job, cache):
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=2), cache=cache) as service:
        with service.client(0) as other, service.client(1) as client:
            expected = seen(client, 8)
            seen(other, 6)
            for step in range(6):
                other.report(step, {"loss": 1.0})
        trainer = Trainer(service.address, 1, 3, 8)
        with service.client(0, step=6) as other:
            assert [index for index, *_ in trainer.finish()] == [8, 9, 10]
            trainer.kill()
            with service.client(1, step=10) as client:
                assert next(client).index == 10
            assert seen(other, 2)[0][0] == 6
        assert service.status()["restarts"] == 0
    assert len(expected) == 8


@pytest.mark.slow
def test_a_rank_that_was_a_step_behind_when_all_died_goes_back_with_the_others(ids_job, cache):
    """It could go on at once, and would then hold a step of the lineage that the others leave."""
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=2), cache=cache) as service:
        with service.client(0) as ahead, service.client(1) as late:
            expected = [seen(ahead, 8), seen(late, 6)]
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(service.client, 1, 6)
            time.sleep(1.0)
            assert not first.done(), "rank 0, which was further, may go back to the same step"
            with service.client(0, step=6) as ahead, first.result(60) as late:
                assert seen(ahead, 2) == expected[0][6:]
                assert [index for index, *_ in seen(late, 3)] == [6, 7, 8]


def test_a_new_planner_hears_of_all_ranks_before_one_goes_on(ids_job, cache, tmp_path, monkeypatch):
    """It does not know how far any rank was; a constructor host of another machine tells it within moments."""
    mesh = ol.ClientPlaceTree(dp=2)
    first = PlannerInProcess(ids_job, tmp_path, cache, mesh=mesh)
    for step in range(19):
        first.host.plan(step, HostNews({0: step, 1: 5}, {0: step, 1: 5}))
    with PlannerInProcess(ids_job, tmp_path, cache, mesh=mesh, recover=True) as host:
        assert host.host.ask(Join(1, 15)) == RanksMissing([(0, None)])
        host.host.tell(HostNews({0: 19}, {0: 19}))
        assert isinstance(host.host.ask(Join(1, 15)), Beginning), "rank 0 trains, and rank 1 died alone"
    with PlannerInProcess(ids_job, tmp_path, cache, mesh=mesh, recover=True) as host:
        assert host.host.ask(Join(1, 15)) == RanksMissing([(0, None)])
        monkeypatch.setattr("overlord.runtimes.hosts.shared_planner.UNHEARD_S", 0.0)
        assert isinstance(host.host.ask(Join(1, 15)), Beginning), "no host knows of rank 0"
    first.service.close()


def test_a_rank_that_was_further_goes_on_where_the_others_have_begun_again(ids_job, cache, tmp_path):
    """They were let go on by a planner that did not know it yet; a way back would leave them in the old lineage."""
    mesh = ol.ClientPlaceTree(dp=2)
    first = PlannerInProcess(ids_job, tmp_path, cache, mesh=mesh)
    for step in range(19):
        first.host.plan(step, HostNews({0: step, 1: 5}, {0: step, 1: 5}))
    with PlannerInProcess(ids_job, tmp_path, cache, mesh=mesh, recover=True) as host:
        assert host.host.ask(Join(1, 15)) == RanksMissing([(0, None)])
        assert isinstance(host.host.ask(Join(0, 15)), Beginning), "both ask, and neither is known"
        host.host.tell(HostNews({1: 19}, {}), 1)  # of a constructor host that is gone, and comes late
        host.host.tell(HostNews({0: 15}, {0: 15}))
        assert isinstance(host.host.ask(Join(1, 15)), Beginning), "rank 0 stands there in this lineage"
        host.host.tell(HostNews({0: 15, 1: 15}, {0: 15, 1: 15}))
        assert host.host.planner.checkpoints.passed <= 15
    first.service.close()


def test_a_host_that_a_rank_has_left_does_not_tell_how_far_it_is(ids_job, cache, tmp_path):
    """Its word is old: the rank went on from an earlier step on another host, and died alone there."""
    with PlannerInProcess(ids_job, tmp_path, cache, mesh=ol.ClientPlaceTree(dp=2)) as host:
        for step in range(20):
            host.host.plan(step, HostNews({0: step, 1: 15}, {0: step, 1: 15}))
        host.host.tell(HostNews({0: 19, 1: 15}, {1: 15}))
        assert isinstance(host.host.ask(Join(0, 15)), Beginning), "rank 1 stands there"
        host.host.tell(HostNews({0: 15}, {0: 15}), 1)
        host.host.tell(HostNews({0: 19, 1: 17}, {1: 17}))
        host.host.tell(HostNews({0: 17}, {0: 17}), 1)
        host.host.tell(HostNews({0: 19, 1: 18}, {1: 18}))
        host.host.tell(HostNews({0: 17}, {}), 1)
        assert isinstance(host.host.ask(Join(0, 17)), Beginning)


def test_ranks_begin_together_or_go_back_together(ids_job, cache, tmp_path):
    """One that was let go on cannot follow the others into another lineage: it may have the step behind it already."""
    mesh = ol.ClientPlaceTree(dp=2)
    reached = {0: 15, 1: 19}
    for first, stores in ((0, tmp_path / "a"), (1, tmp_path / "b")):
        with PlannerInProcess(ids_job, stores, cache, mesh=mesh) as host:
            for step in range(20):
                host.host.plan(step, HostNews(reached, reached))
            if first == 0:
                host.host.tell(HostNews(reached, {1: 19}))
                assert isinstance(host.host.ask(Join(0, 15)), Beginning), "it died alone"
                host.host.tell(HostNews(reached, {}))  # rank 1 is gone, and rank 0 not attached yet
                assert isinstance(host.host.ask(Join(1, 15)), Beginning)
            else:
                host.host.tell(HostNews(reached, {}))
                assert host.host.ask(Join(1, 15)) == RanksMissing([(0, None)])
                with pytest.raises(Rewound):
                    host.host.ask(Join(0, 15))  # it could go on, and rank 1 waits for it to go back


def test_ranks_that_disagree_are_told(ids_job, cache, monkeypatch):
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=2), cache=cache) as service:
        for rank in range(2):
            with service.client(rank) as client:
                seen(client, 8)
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(service.client, rank, 3 + rank) for rank in range(2)]
            for future in futures:
                with pytest.raises(
                    ol.StateError, match=r"rank 0 asks for step 3, rank 1 asks for step 4.*same checkpoint"
                ):
                    future.result(60)
        monkeypatch.setattr(local, "JOIN_S", 1.0)
        with service.client(1, step=8) as other:
            assert next(other).index == 8
            next(other)
            with pytest.raises(ol.StateError, match=r"rank 1 is attached at step 9.*Start all trainers again"):
                service.client(0, step=3)
        with pytest.raises(ol.StateError, match="rank 1 is not attached"):
            service.client(0, step=3)
        assert service.status()["restarts"] == 0, "nothing has moved"


@pytest.mark.parametrize("runtime", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_a_step_that_the_store_does_not_keep_is_refused(ids_job, cache, runtime):
    with ol.launch(ids_job, cache=cache, keep=16, runtime=runtime) as service:
        with service.client() as client:
            seen(client, 60)
        with pytest.raises(ol.StateError, match=r"step 3 was asked for.* keeps the steps \d\d to \d\d; .*larger keep"):
            service.client(step=3)
        with pytest.raises(ol.StateError, match=r"step 900 was asked for, and this service has come to step 6\d"):
            service.client(step=900)
        with pytest.raises(ol.SpecError, match=r"step is -1"):
            service.client(step=-1)
        with service.client(step=55) as client:
            assert next(client).index == 55


def test_who_comes_back_without_a_step_is_told_which_there_are(ids_job, cache, caplog):
    with ol.launch(ids_job, cache=cache, keep=16) as service:
        with service.client() as client:
            seen(client, 3)
        with service.client() as client:
            assert "was at step 3 before, and begins again at step 0" in caplog.text
            assert "ol.connect(address, rank, step=..), which may be 0 to" in caplog.text
            seen(client, 60)
        with service.client() as client, pytest.raises(ol.SpecError, match=r"step 0 is not kept.*step=\.\."):
            next(client)


@pytest.mark.slow
def test_the_trainer_of_a_lineage_that_was_left_is_refused(ids_job, cache):
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=2), cache=cache) as service:
        stays, died = service.client(1), service.client(0)
        seen(died, 9)
        died.close()
        seen(stays, 6)
        stays._feed._drop_connection()  # it lives, and its connection broke: another process takes its rank
        clients = attach_all(service, 2, 4)
        seen(clients[0], 3)
        clients[1].close()
        with pytest.raises(ol.StateError, match=r"step 6, where rank 1 is, is of a run that was left.*step 4"):
            next(stays)
        with pytest.raises(ol.StateError, match="report of step 5 is of a run that was left"):
            stays.report(5, {"loss": 1.0})


@pytest.mark.slow
def test_a_service_that_is_killed_while_it_goes_back(ids_job, cache):
    """The rewind is on disk before the service ends: whoever starts it goes back."""
    with ol.launch(ids_job, cache=cache, heartbeat=0.5) as service:
        with service.client() as client:
            expected = seen(client, 20)
        pid = service.pid
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(service.client, 0, 7)
            until = time.monotonic() + 60
            while service.pid == pid and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(service.pid, signal.SIGKILL)
            with future.result(60) as client:
                assert seen(client, 13) == expected[7:]


@pytest.mark.slow
def test_the_mesh_that_trains_now_goes_back(ids_job, cache):
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=1), cache=cache) as service:
        with service.client(0) as client:
            seen(client, 4)
            at = service.reshard(ol.ClientPlaceTree(dp=2))
            with service.client(1) as other:
                seen(client, at - 4 + 3)
                seen(other, 3)
        clients = attach_all(service, 2, 2)
        assert [next(client).mesh.dp for client in clients] == [2, 2]
        for client in clients:
            client.close()
        os.kill(service.pid, signal.SIGKILL)  # and a recovery of the new lineage has that mesh too
        clients = attach_all(service, 2, 3)
        assert [next(client).mesh.dp for client in clients] == [2, 2]


def test_an_inline_service_that_goes_back_forgets_what_it_knew_of_later_steps(ids_job, cache):
    """A change of a later step stays in the lineage that is left: the step has other samples, and other labels."""
    with ol.launch(ids_job, runtime="inline", cache=cache) as service:
        service.set_mixture({"b": 1}, at_step=5)
        lost = service.client()  # a loop that raised, and closed nothing
        before = [next(lost).global_loss_tokens for _ in range(6)]
        with service.client(step=4) as client:
            for number, step in zip((4, 5), client, strict=False):
                labels = sum(int((np.asarray(batch["labels"]) >= 0).sum()) for batch in step.microbatches)
                assert (step.index, step.global_loss_tokens) == (number, labels)
        assert step.global_loss_tokens != before[5]
