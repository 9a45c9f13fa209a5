"""The sentence about a running service: from the facts of its status."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.reports.live import held_up_by, sentence_of

SLOW = "source 'aud_stamps' is the bottleneck: it has 1 worker and needs 10"
CPUS = {"resource": "cpu", "words": "the CPUs of this host are full (2 CPUs, 99 % in use, load 33)"}
SPACE = {"resource": "space", "words": "the disk of /runs on this host is full (5 MB left)"}
MEMORY = {"resource": "memory", "words": "the memory of this host is short (0.1 of 8 GB available)"}


def status_of(
    wait: float | None = 0.0, *, short_of=(), bottleneck=None, since_step_s=1.0, **more: Any
) -> dict[str, Any]:
    rates = None if wait is None else {"wait_share": wait, "since_step_s": since_step_s, "worker_cpus": 0.34}
    found = {
        "store": {"error": None},
        "planner": {"waits_for_report": None},
        "clients": {"0": 7},
        "rates": rates,
        "pressure": {"here": {"short_of": list(short_of)}},
        "scaling": {"bottleneck": bottleneck},
    }
    return found | more


@pytest.mark.parametrize(
    ("status", "mood", "words"),
    [
        (status_of(0.4, bottleneck=SLOW), "waiting", f"trainers wait 40\u202f% of the time: {SLOW}"),
        (status_of(0.4, short_of=[CPUS], bottleneck=SLOW), "waiting", f"trainers wait 40\u202f% of the time: "
         f"{CPUS['words']}; 0.3 of them are used by the workers of this service, and more workers would not help"),
        (status_of(0.9, short_of=[MEMORY], since_step_s=44.0), "waiting",
         f"trainers have waited 44 s for their next step: {MEMORY['words']}"),
        (status_of(0.4), "waiting", "trainers wait 40\u202f% of the time, and no source alone is the reason"),
        (status_of(0.03), "well", "training is not waiting for data (3.0\u202f% of the time)"),
        (status_of(0.0, short_of=[CPUS]), "well", "training is not waiting for data (0\u202f% of the time)"),
        (status_of(0.0, short_of=[CPUS, SPACE]), "waiting",
         f"training is not waiting for data (0\u202f% of the time), but {SPACE['words']}"),
        (status_of(None), "well", "trainers are attached, and it is not known yet how long they wait"),
        (status_of(0.9, short_of=[CPUS], clients={}), "waiting", "no trainer is attached"),
        (status_of(0.9, planner={"waits_for_report": 7}), "waiting", "the next step waits for the report of step 7, "
         "which the mixture or the strategy follows"),
        (status_of(0.9, store={"error": "full"}), "failing", "planning pauses, since the store fails: full"),
        (status_of(0.9, service={"state": "starting again", "doing": "opening sources, 120 of 306"}), "failing",
         "the service process is being started again (opening sources, 120 of 306); trainers go on with what they "
         "have"),
        (status_of(0.9, failed="no space"), "failing", "no space"),
    ],
)  # fmt: skip
def test_the_sentence_follows_from_the_facts(status, mood, words):
    assert sentence_of(status) == (words, mood)


shortages = st.lists(st.sampled_from([CPUS, SPACE, MEMORY]), unique_by=lambda one: one["resource"])


@given(st.floats(0, 1), shortages, st.sampled_from([None, SLOW]), st.floats(0, 1e4))
def test_no_source_is_named_on_a_host_that_is_short_of_something(wait, short, bottleneck, since):
    status = status_of(wait, short_of=short, bottleneck=bottleneck, since_step_s=since)
    words, mood = sentence_of(status)
    reason = held_up_by(status)
    if short:
        assert "aud_stamps" not in words and all(one["words"] in words for one in short if wait >= 0.02)
    if reason is not None:
        assert wait >= 0.02 and reason in words and mood == "waiting"
    assert words and "\n" not in words
