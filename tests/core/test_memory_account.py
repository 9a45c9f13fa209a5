"""The account of memory: what a holder may have follows from what the others hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import write_ids

import overlord as ol
from overlord.core.memory_account import HOLDERS, LEAST_SHARE, SHARES, MemoryAccount

BUDGET = 1 << 20


@given(st.dictionaries(st.sampled_from(HOLDERS), st.integers(0, 2 * BUDGET)))
def test_room_is_a_share_of_what_others_leave_and_never_nothing(held: dict):
    account = MemoryAccount(BUDGET)
    for holder, nbytes in held.items():
        account.add(holder, lambda nbytes=nbytes: nbytes)
    for holder in HOLDERS:
        room, others = account.room(holder), account.total - held.get(holder, 0)
        assert room >= LEAST_SHARE * BUDGET
        assert room <= max(SHARES.get(holder, 1) * BUDGET, LEAST_SHARE * BUDGET)
        assert room == int(LEAST_SHARE * BUDGET) or others + room <= BUDGET
    assert account.held() == held and account.held("views").keys() <= {"views"}


def test_a_role_that_is_replaced_is_counted_once():
    account = MemoryAccount(BUDGET)
    for role, nbytes in (("loaders 0", 5), ("loaders 1", 7), ("loaders 0", 11)):
        account.add("staged", lambda nbytes=nbytes: nbytes, role)
    assert account.held() == {"staged": 18} and "staged" in account and "views" not in account


def test_the_status_says_who_holds_what(tmp_path, cache):
    """Lines are read as groups that are held whole; what is held of them is in the account of the service."""
    path = write_ids(tmp_path / "ids.jsonl", [64] * 4096)
    source = ol.Source("ids", str(path), sample=ol.Text("ids", tokenized=True))
    job = ol.Job(sources=[source], batch=ol.Batch(64, global_samples=64))
    for runtime, arrays in (("local", "views"), ("inline", "microbatches")):
        with ol.launch(job, cache=cache, runtime=runtime) as service:
            client = service.client()
            for _ in range(4):  # constructors report what they hold with the request for a plan
                step = next(client)
                assert step.microbatches[0]["input_ids"].size
            memory = service.status()["memory"]
            assert memory["budget_bytes"] == 512 << 20 and set(memory["held"]) <= set(HOLDERS)
            assert arrays in memory["held"] and memory["held"]["shuffle groups"] > 4096 * 64 * 4
            assert runtime == "inline" or memory["held"][arrays] > 0  # an inline service forgets steps that are passed
            client.close()
