"""Waiting for a role that comes up: for as long as it lives, and without any beat."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

import overlord as ol
from overlord.errors import ClosedError, ServiceLost
from overlord.runtimes.launching.cluster_placement import place_here
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.runtimes.supervision.child import Limits
from overlord.runtimes.supervision.supervisor import StartupLiveness, Supervisor
from overlord.runtimes.transport.engine import PeerGone

HEARTBEAT_S = 5.0
LIMITS = Limits(HEARTBEAT_S)


class Time:
    """Goes on while somebody polls."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Pending:
    def __init__(self, time, at):
        self._time, self._at = time, at

    def poll(self, timeout_s):
        self._time.now += timeout_s
        return {} if self._time.now >= self._at else None


class Peer:
    """Answers what it is asked at once, until it hangs."""

    def __init__(self, time, hangs_at=float("inf")):
        self._time, self._hangs_at = time, hangs_at
        self.asked = []

    def ask(self, method, message, sender=None):
        self.asked.append(method)
        return Pending(self._time, self._time.now if self._time.now < self._hangs_at else float("inf"))


def life_of(peer, time, closing=lambda: False):
    return StartupLiveness(peer, LIMITS, 60.0, time, closing)


def test_a_role_that_lives_is_waited_for_and_gets_no_beat():
    """A beat would begin its lease: it would end before the others are up, if that takes longer than the lease."""
    time = Time()
    peer = Peer(time)
    life_of(peer, time).answer(Pending(time, 200.0))
    assert 200 <= time.now < 210
    assert set(peer.asked) == {"alive"}


def test_one_that_hangs_is_given_up():
    time = Time()
    with pytest.raises(ServiceLost, match="nothing was heard of it for"):
        life_of(Peer(time, hangs_at=20.0), time).answer(Pending(time, 1e9))
    assert 20 < time.now < 20 + 4 * HEARTBEAT_S


def test_one_that_lives_for_ever_and_never_answers_is_given_up_too():
    time = Time()
    with pytest.raises(ServiceLost, match="did not come up within"):
        life_of(Peer(time), time).answer(Pending(time, 1e9))
    assert LIMITS.open_sources < time.now < LIMITS.open_sources + 10


def test_who_is_who_is_told_until_it_is_heard():
    time, told = Time(), []

    def introduce(peer):
        told.append(time.now)
        return Pending(time, time.now + 1.0 if len(told) == 3 else 1e9)  # the first two were lost

    life_of(Peer(time), time).introduce(introduce)
    assert len(told) == 3 and told[2] >= 2 * HEARTBEAT_S


def test_nobody_waits_in_a_service_that_closes():
    time = Time()
    with pytest.raises(ClosedError):
        life_of(Peer(time), time, closing=lambda: time.now > 3).answer(Pending(time, 1e9))


class Answered:
    def poll(self, timeout_s):
        """Whatever was asked: the fields of all answers."""
        return SimpleNamespace(
            pid=1,
            opened=0,
            version=99,
            busy_s=0.0,
            rewound=False,
            served=-1,
            facts={},
            step=0,
            hosts={},
            newest=None,
            missing={},
        )


class Living:
    def ask(self, method, message, sender=None):
        return Answered()


class Dead:
    """A role whose process was killed."""

    def ask(self, method, message, sender=None):
        raise PeerGone("it was killed")


class SlowEngine:
    """Takes a while to start a successor, as Ray does; notes what is asked of it after its end."""

    first_sign_s = 5.0

    def __init__(self):
        self.starting, self.closed, self.late = threading.Event(), False, []

    def start(self, site, generation):
        self._note("start")
        if generation > 1:
            self.starting.set()
            time.sleep(0.5)
        return Living()

    def introduce(self, peer, book):
        self._note("introduce")
        return Answered()

    def kill(self, peer, site, pid):
        self._note("kill")

    def wait(self, pending, timeout_s):
        time.sleep(timeout_s)

    def place_again(self, site):
        self._note("place_again")
        return site

    def close(self):
        self.closed = True

    def _note(self, what):
        if self.closed:
            self.late.append(what)


def test_the_end_of_a_service_waits_for_the_replacement_of_a_role():
    """What is under way when an engine ends would abort it, and Ray would start a cluster of its own for it."""
    sites = place_here(None, world_size=1, names=["a"], threads=1)
    engine = SlowEngine()
    supervisor = Supervisor(engine, sites, ServiceOptions(mesh=ol.ClientPlaceTree(), cache=""))
    supervisor.begin(lambda what, done, of: None)
    supervisor.table.roles["planner"].peer = Dead()
    supervisor.watch()
    assert engine.starting.wait(5)
    supervisor.close()
    time.sleep(1.0)
    assert engine.late == []
    assert not [thread for thread in threading.enumerate() if thread.name == "overlord-replace"]
