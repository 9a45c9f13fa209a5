"""Process workers: what a row kills is its worker and nothing else; innocent rows are never judged; nothing is left."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import overlord as ol
from overlord.core.messages import Media, RunFunction, SharedRows
from overlord.core.ragged import Ragged, RowBatch, Scattered, num_rows, slice_rows
from overlord.core.samples import META
from overlord.roles.source_loader import Chunk, gather
from overlord.runtimes.supervision.process_workers import ProcessWorkers, _run_into_places
from overlord.runtimes.transport.codec import PREFIX
from overlord.runtimes.transport.role_codec import RowMemory, copied_bytes, receive_rows, rows_from, send_rows
from overlord.runtimes.transport.shared_memory import HEAP_LEAST, SharedHeap
from overlord.transforms.samples.per_sample import run_rows

SEGFAULT, EXIT, SLEEP, SPIN, SYS_EXIT = 1000, 1001, 1002, 1003, 1004

# As the functions of a script travel: by value. A fresh worker would else import this file, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def behave(rows: RowBatch) -> RowBatch:
    """Double the numbers and turn the words; some numbers are deadly."""
    for number in np.asarray(rows["n"]).tolist():
        if number == SEGFAULT:
            ctypes.string_at(0)
        elif number == EXIT:
            os._exit(3)
        elif number == SLEEP:
            time.sleep(1000)
        elif number == SPIN:
            while True:
                pass
        elif number == SYS_EXIT:
            sys.exit(5)
    words = rows["word"]
    turned = [bytes(words[row])[::-1] for row in range(num_rows(rows))]
    return {"n": np.asarray(rows["n"]) * 2, "word": Ragged.from_rows(turned)}


def rows_of(numbers) -> RowBatch:
    return {"n": np.array(numbers, np.int64), "word": Ragged.from_rows([b"w%d" % n for n in numbers])}


def plain(rows: RowBatch) -> list[tuple[int, bytes]]:
    return [(int(n), bytes(rows["word"][row])) for row, n in enumerate(np.asarray(rows["n"]))]


def is_up(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def pool():
    with ProcessWorkers(2) as workers:
        yield workers


@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 64, 200])
def test_rows_come_back_in_order(pool, count):
    rows = slice_rows(rows_of(range(count + 5)), 3, 3 + count)  # as readers give them: a window of larger columns
    made, killed = pool.isolate(behave, name="behave")(rows)
    assert plain(made) == plain(behave(rows))
    assert [column.dtype if isinstance(column, np.ndarray) else column.values.dtype for column in made.values()] == [
        np.int64,
        np.uint8,
    ]
    assert killed == []


def test_columns_without_values_stand_beside_others(pool):
    """They have no place of their own in shared memory."""

    class Same:
        only_reads = True

        def __call__(self, rows):
            return {name: rows[name] for name in ("empty", "word", "n")}

    rows = {"empty": Ragged.from_rows([b"", b"", b""]), **rows_of([1, 2, 3])}
    made, killed = pool.isolate(Same(), name="same")(rows)
    assert killed == [] and plain(made) == plain(rows) and made["empty"].lengths.tolist() == [0, 0, 0]


def test_idle_threads_and_workers_hold_no_rows():
    class Held:
        pass

    with ProcessWorkers(1) as one:
        item, held = Held(), []
        one.each(lambda it: held.append(weakref.ref(it)), [item], 0.0)
        del item
        gc.collect()
        until = time.monotonic() + 5
        while held[0]() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert held[0]() is None


def test_callers_take_turns():
    """A caller with a few rows does not wait for all rows of one that came before it."""
    done: list[str] = []
    begun = threading.Event()

    def slow(_):
        begun.set()
        time.sleep(0.02)
        done.append("slow")

    with ProcessWorkers(1) as one:
        first = threading.Thread(target=lambda: one.each(slow, range(30), 0.02))
        first.start()
        begun.wait()
        one.each(lambda _: done.append("quick"), range(3), 0.001)
        assert done.count("quick") == 3 and done.count("slow") < 10
        first.join()
    assert done.count("slow") == 30


def test_calls_of_one_owner_are_done_as_they_came():
    """The stretch of rows that is due first is there first."""
    done: list[int] = []
    begun, owner = threading.Event(), object()

    def work(call):
        begun.set()
        time.sleep(0.01)
        done.append(call)

    with ProcessWorkers(1) as one:
        first = threading.Thread(target=lambda: one.each(work, [0] * 10, 0.01, owner))
        first.start()
        begun.wait()
        one.each(work, [1] * 10, 0.01, owner)
        first.join()
    threads = 2
    assert sorted(done[: 10 + threads]) == [0] * 10 + [1] * threads or done == [0] * 10 + [1] * 10


def test_the_first_error_ends_a_call_and_no_other(pool):
    ran: list[int] = []

    def fail(number):
        ran.append(number)
        if number == 1:
            raise ValueError("one")
        time.sleep(0.01)

    with pytest.raises(ValueError, match="one"):
        pool.each(fail, range(100), 0.0)
    assert len(ran) < 10
    assert pool.each(lambda number: number, range(3), 0.0) == [0, 1, 2]
    assert pool.each(lambda number: number, range(0), 0.0) == []


@pytest.mark.parametrize(
    ("at", "deadly", "reason"),
    [
        (0, SEGFAULT, "killed its worker twice: signal 11 (SIGSEGV)"),
        (57, SEGFAULT, "killed its worker twice: signal 11 (SIGSEGV)"),
        (69, EXIT, "killed its worker twice: exit code 3"),
        (33, SYS_EXIT, "killed its worker twice: exit code 5"),
        (0, SLEEP, "killed its worker twice: no answer within 0.4 s"),
        (69, SPIN, "killed its worker twice: no answer within 0.4 s"),
    ],
)
def test_the_row_that_kills_is_found_and_no_other(pool, at, deadly, reason):
    numbers = list(range(70))
    numbers[at] = deadly
    made, killed = pool.isolate(behave, name="behave", deadline=0.4)(rows_of(numbers))
    assert killed == [(at, reason)]
    assert plain(made) == plain(behave(rows_of(numbers[:at] + numbers[at + 1 :])))


def test_several_deadly_rows(pool):
    numbers = list(range(70))
    numbers[3] = numbers[4] = numbers[50] = EXIT
    made, killed = pool.isolate(behave, name="behave")(rows_of(numbers))
    assert [row for row, _ in killed] == [3, 4, 50]
    assert plain(made) == plain(behave(rows_of([n for n in numbers if n != EXIT])))


def test_nothing_but_deadly_rows(pool):
    made, killed = pool.isolate(behave, name="behave")(rows_of([EXIT] * 3))
    assert [row for row, _ in killed] == [0, 1, 2]
    assert plain(made) == [] and set(made) == {"n", "word"}
    filled, _ = run_rows(behave, pool.isolate(behave, name="behave"), rows_of([EXIT] * 3), rows_of([-1]))
    assert plain(filled) == [(-1, b"w-1")] * 3


def test_a_function_that_hangs_on_every_row_stops_the_source(pool):
    """Every row would be tried twice at the time limit, and there may be millions."""
    run = pool.isolate(behave, "behave", deadline=0.5)
    began = time.monotonic()
    with pytest.raises(ol.ToleranceError, match=r"'behave' hangs: 3 rows .* limit of 0\.5 s.* raise the deadline="):
        run(rows_of([SLEEP] * 40))
    waited = time.monotonic() - began
    with pytest.raises(ol.ToleranceError, match="hangs"):  # a caller that asks again does not wait again
        run(rows_of([1, 2]))
    assert time.monotonic() - began - waited < 0.5 * waited


def test_rows_that_hang_among_others_are_judged_one_by_one(pool):
    run = pool.isolate(behave, "behave", deadline=0.5)
    found, judged = run(rows_of([SLEEP, 1, SLEEP, 2, SLEEP, 3, SLEEP, 4]))
    assert [n for n, _ in plain(found)] == [2, 4, 6, 8]
    assert [row for row, _ in judged] == [0, 2, 4, 6]


def test_stand_ins_take_the_places_of_killed_rows(pool):
    filled, killed = run_rows(
        behave, pool.isolate(behave, name="behave"), rows_of([EXIT, 1, 2, EXIT, 3]), rows_of([-1])
    )
    assert [n for n, _ in plain(filled)] == [-1, 2, 4, -1, 6]
    assert [row for row, _ in killed] == [0, 3]


def test_a_row_that_kills_one_worker_alone_is_innocent(pool, tmp_path):
    """As the out-of-memory killer does: the run of rows dies, then the row alone, and then it lives."""
    scores = tmp_path / "kills"
    scores.write_text("")

    def unlucky(rows):
        if 7 in rows["n"].tolist() and len(scores.read_text()) < 2:
            scores.write_text(scores.read_text() + "x")
            os.kill(os.getpid(), signal.SIGKILL)
        return {"n": np.asarray(rows["n"])}

    made, killed = pool.isolate(unlucky, name="unlucky")({"n": np.arange(20)})
    assert killed == [] and made["n"].tolist() == list(range(20))
    assert scores.read_text() == "xx"


def test_the_second_try_has_a_worker_of_its_own(tmp_path):
    """A row that poisons its worker makes a later one crash there; the later one is innocent."""
    poisoned: list[int] = []

    def poison(rows):
        for number in rows["n"].tolist():
            if poisoned and number != poisoned[0]:
                os._exit(9)
            if number == 3:
                poisoned.append(number)
        return {"n": np.asarray(rows["n"])}

    with ProcessWorkers(1) as pool:
        made, killed = pool.isolate(poison, name="poison")({"n": np.arange(10)})
    assert killed == []
    assert made["n"].tolist() == list(range(10))


@pytest.mark.parametrize("seed", range(2))
def test_workers_killed_at_rest_or_at_work_change_nothing(pool, seed):
    isolated = pool.isolate(lambda rows: (time.sleep(0.02), behave(rows))[1], name="slow")
    rows = rows_of(range(300))
    isolated(rows)
    over, killed_pids = threading.Event(), []

    def murder() -> None:  # no number of kills from outside makes a row guilty
        for pause in np.random.default_rng(seed).uniform(0, 0.1, 1000).tolist():
            if over.wait(pause):
                return
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # it was replaced just now
                worker = psutil.Process(pool._server.pid).children()[0]
                worker.kill()
                killed_pids.append(worker.pid)

    killer = threading.Thread(target=murder)
    killer.start()
    while len(killed_pids) < 20:
        made, killed = isolated(rows)
    over.set()
    killer.join()
    assert killed == [] and plain(made) == plain(behave(rows))
    assert plain(isolated(rows)[0]) == plain(behave(rows)), "a worker that died at rest is replaced"


def test_the_fork_server_is_killed_and_another_takes_its_place(pool):
    isolated = pool.isolate(behave, name="behave")
    isolated(rows_of(range(40)))
    first = psutil.Process(pool._server.pid)
    workers = first.children()
    first.kill()
    numbers = [*range(40), EXIT, *range(40)]  # how the first worker died, nobody is left to say
    made, killed = isolated(rows_of(numbers))
    assert killed == [(40, "killed its worker twice: exit code 3")]
    assert plain(made) == plain(behave(rows_of(numbers[:40] * 2)))
    assert pool._server.pid != first.pid
    _, alive = psutil.wait_procs(workers, 5)
    assert not alive, "the workers of a lost fork server are ended too"


def test_many_threads_and_functions_share_the_workers(pool):
    def times(factor):
        return pool.isolate(lambda rows: {"n": np.asarray(rows["n"]) * factor}, name=f"times {factor}")

    functions = [times(factor) for factor in range(6)]

    def use(number):
        made, killed = functions[number % 6]({"n": np.arange(100) + number})
        return not killed and made["n"].tolist() == [(n + number) * (number % 6) for n in range(100)]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(60)))
    assert len(psutil.Process(pool._server.pid).children()) <= pool.count


def test_the_next_run_stands_in_line_and_one_runs_at_a_time(tmp_path):
    """A function without a time limit: its next run is sent while another one runs, to the same process."""

    def note(rows):
        number = int(rows["n"][0])
        with (tmp_path / f"{number}").open("w") as file:
            file.write(f"{os.getpid()} {time.monotonic()} ")
            while not (tmp_path / f"go {number // 2}").exists():
                time.sleep(0.005)
            file.write(f"{time.monotonic()}")
        return {"n": np.asarray(rows["n"])}

    def both(function, numbers, waits):
        calls = [threads.submit(function, {"n": np.array([number])}) for number in numbers]
        until = time.monotonic() + 20
        while not waits() and time.monotonic() < until:
            time.sleep(0.005)
        assert waits()
        (tmp_path / f"go {numbers[0] // 2}").touch()
        assert [call.result()[0]["n"].tolist() for call in calls] == [[number] for number in numbers]

    with ProcessWorkers(1) as one, ThreadPoolExecutor(2) as threads:
        both(one.isolate(note, name="note", deadline=None), [0, 1], lambda: one._workers and one._workers[0].using == 2)
        timed = one.isolate(note, name="timed", deadline=60.0)
        both(timed, [2, 3], lambda: one._workers[0].using == 2 and len(one._queue) == 1)
        assert len(one._workers) == 1
    files = [file for file in tmp_path.iterdir() if file.stat().st_size]
    noted = sorted((file.read_text().split() for file in files), key=lambda one: float(one[1]))
    assert len(noted) == 4 and len({pid for pid, _, _ in noted}) == 1
    assert all(float(end) <= float(begin) for (_, _, end), (_, begin, _) in itertools.pairwise(noted))


@pytest.mark.parametrize("seed", range(2))
def test_what_stands_in_line_behind_a_deadly_row_is_innocent(monkeypatch, seed):
    """Many callers, every worker looked at before it is used; some rows kill what stands in both lines."""
    monkeypatch.setattr("overlord.runtimes.supervision.process_workers.LOOK_AFTER_S", 0.0)
    random = np.random.default_rng(seed)
    deadly = [set(random.choice(120, 3, replace=False).tolist()) if call % 4 == 0 else set() for call in range(24)]

    with ProcessWorkers(2) as pool, ThreadPoolExecutor(6) as threads:
        run = pool.isolate(behave, name="behave", deadline=None)

        def use(call):
            numbers = [EXIT if row in deadly[call] else row for row in range(120)]
            made, killed = run(rows_of(numbers))
            assert [row for row, _ in killed] == sorted(deadly[call])
            assert plain(made) == plain(behave(rows_of([n for n in numbers if n != EXIT])))

        list(threads.map(use, range(24)))
        assert len(pool._workers) <= pool.count
        assert not any(worker.using for worker in pool._workers)
        assert all(len(worker.lines) == 2 for worker in pool._workers)


def test_a_pause_of_the_host_is_not_taken_for_a_hang(pool):
    """Service and workers stop for longer than the deadline, as when a host is suspended."""
    script = (
        "import time, numpy as np\n"
        "from overlord.runtimes.supervision.process_workers import ProcessWorkers\n"
        "def slow(rows):\n    time.sleep(0.4)\n    return {'n': np.asarray(rows['n'])}\n"
        "with ProcessWorkers(1) as pool:\n"
        "    isolated = pool.isolate(slow, name='slow', deadline=1.2)\n"
        "    isolated({'n': np.arange(1)})\n"
        "    print(pool._server.pid, flush=True)\n"
        "    print(isolated({'n': np.arange(1)})[1], flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as service:
        server = int(service.stdout.readline())
        time.sleep(0.1)
        for stopped in (service.pid, *(child.pid for child in psutil.Process(server).children())):
            os.kill(stopped, signal.SIGSTOP)
        time.sleep(1.5)
        for child in psutil.Process(server).children():
            os.kill(child.pid, signal.SIGCONT)
        os.kill(service.pid, signal.SIGCONT)
        printed, logged = service.communicate(timeout=20)
    assert printed == "[]\n"
    assert "was lost" not in logged


def test_what_the_function_itself_raises_is_an_error(pool):
    with pytest.raises(ol.OverlordError, match=r"bad: the function failed as a whole.*ZeroDivisionError"):
        pool.isolate(lambda rows: {"n": 1 // 0}, name="bad")({"n": np.arange(3)})
    with pytest.raises(ol.OverlordError, match=r"bad: the function made \{'n': 1\} rows of 2"):
        pool.isolate(lambda rows: {"n": np.arange(1)}, name="bad")({"n": np.arange(4)})
    with pytest.raises(ol.OverlordError, match="holds Python objects"):
        pool.isolate(lambda rows: {"n": np.array([object()] * len(rows["n"]))}, name="bad")({"n": np.arange(3)})
    made, _ = pool.isolate(behave, name="behave")(rows_of([1]))  # and the workers are as good as before
    assert plain(made) == [(2, b"1w")]


def test_a_function_that_cannot_travel_is_refused(pool):
    lock = threading.Lock()
    with pytest.raises(ol.SpecError, match=r"held: the function cannot be sent to a worker process.*process=False"):
        pool.isolate(lambda rows: (lock, rows)[1], name="held")


class _Unloadable:
    def __reduce__(self):
        return (__import__, ("there_is_no_such_module",))


class _Deadly:
    def __reduce__(self):
        return (os._exit, (4,))


def test_a_function_that_cannot_be_loaded_is_no_fault_of_a_row(pool):
    missing, deadly = _Unloadable(), _Deadly()
    with pytest.raises(ol.SpecError, match=r"no: a worker process cannot load the function \(ModuleNotFoundError"):
        pool.isolate(lambda rows: (missing, rows)[1], name="no")({"n": np.arange(3)})
    with pytest.raises(ol.OverlordError, match=r"no: 3 worker processes were lost before they ran a row.*exit code 4"):
        pool.isolate(lambda rows: (deadly, rows)[1], name="no")({"n": np.arange(3)})


def test_printing_goes_to_the_log_and_standard_input_is_empty(capfd):
    def talk(rows):
        print("said aloud")
        os.write(1, b"written\n")
        print("complained", file=sys.stderr)
        return {"n": np.asarray(rows["n"]) + len(sys.stdin.read())}

    with ProcessWorkers(1) as pool:
        made, _ = pool.isolate(talk, name="talk")({"n": np.arange(2)})
        pool.isolate(lambda rows: (sys.stdout.flush(), rows)[1], name="flush")({"n": np.arange(1)})
    assert made["n"].tolist() == [0, 1]
    out, err = capfd.readouterr()
    assert out == ""
    assert "said aloud" in err and "written" in err and "complained" in err


def test_workers_start_late_share_memory_and_are_few():
    before = set(psutil.Process().children())
    with ProcessWorkers(64) as pool:
        assert pool.count == len(os.sched_getaffinity(0))
        isolated = pool.isolate(behave, name="behave")
        assert set(psutil.Process().children()) == before
        isolated(rows_of(range(200)))
        (server,) = set(psutil.Process().children()) - before
        workers = server.children()
        assert 1 <= len(workers) <= pool.count
        assert all(worker.memory_full_info().uss < 16 << 20 for worker in workers)
        assert server.num_threads() == 1, "a process with threads must not fork"


@pytest.mark.parametrize("doing", ["nothing", "sleeping", "spinning"])
def test_closing_is_quick_and_leaves_nothing(doing):
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    before = set(psutil.Process().children(recursive=True))
    pool = ProcessWorkers(2)
    isolated = pool.isolate(behave, name="behave")
    isolated(rows_of(range(100)))
    family = set(psutil.Process().children(recursive=True)) - before
    assert len(family) >= 2
    errors: list[BaseException] = []

    def use(numbers):
        try:
            isolated(rows_of(numbers))
        except ol.ClosedError as error:
            errors.append(error)

    deadly = {"sleeping": SLEEP, "spinning": SPIN}.get(doing)
    users = [threading.Thread(target=use, args=([deadly] * 70,)) for _ in range(3)] if deadly else []
    for user in users:
        user.start()
    time.sleep(0.2 if users else 0)
    begin = time.monotonic()
    pool.close()
    for user in users:
        user.join()
    assert time.monotonic() - begin < 20  # the rows would take 1000 s
    assert len(errors) == len(users), "who was waiting is told, and no row is judged"
    assert not [process for process in family if is_up(process)]
    assert set(psutil.Process().children(recursive=True)) <= before, "not even a zombie"
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(ol.ClosedError):
        isolated(rows_of(range(3)))
    pool.close()


_SERVICE = """
import sys, threading, time
import numpy as np, psutil
from overlord.runtimes.supervision.process_workers import ProcessWorkers
def deadly(rows):
    if sys.argv[1] == "spin" and len(rows["n"]) > 1:
        while True:
            pass
    return {"n": np.asarray(rows["n"])}
pool = ProcessWorkers(2)
isolated = pool.isolate(deadly, name="deadly")
isolated({"n": np.arange(2)}) if sys.argv[1] == "rest" else isolated({"n": np.arange(1)})
threading.Thread(target=isolated, args=({"n": np.arange(100)},), daemon=True).start()
time.sleep(0.3)
print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("doing", ["rest", "spin"])
def test_workers_die_with_the_service(doing):
    with subprocess.Popen([sys.executable, "-c", _SERVICE, doing], stdout=subprocess.PIPE, text=True) as service:
        family = [psutil.Process(int(pid)) for pid in service.stdout.readline().split()]
        assert len(family) >= 2
        service.kill()
        service.communicate()
    deadline = time.monotonic() + 5
    while any(is_up(process) for process in family) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [process for process in family if is_up(process)]


COLUMN = hnp.arrays(
    st.sampled_from([np.uint8, np.int32, np.int64, np.float32, np.bool_, np.uint64]), st.integers(0, 40)
)


@given(st.lists(COLUMN, min_size=1, max_size=4), st.data())
@settings(max_examples=60)
def test_rows_survive_the_wire(columns, data):
    rows: RowBatch = {}
    for number, values in enumerate(columns):
        cuts = data.draw(st.lists(st.integers(0, len(values)), min_size=3, max_size=3))
        rows[f"ragged {number}"] = Ragged(values, np.array(sorted(cuts)[:3], np.int64))
        rows[f"numbers {number}"] = np.resize(values, (2, 3)) if len(values) else np.zeros((2, 0), values.dtype)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_rows(ours, RunFunction("f"), rows)
        head, found = receive_rows(theirs)
    assert head == RunFunction("f") and list(found) == list(rows)
    for name, column in rows.items():
        back = found[name]
        if isinstance(column, Ragged):
            assert [back[row].tobytes() for row in range(2)] == [column[row].tobytes() for row in range(2)]
            assert back.values.dtype == column.values.dtype
        else:
            assert back.dtype == column.dtype and back.tobytes() == column.tobytes() and back.shape == column.shape


@given(st.lists(COLUMN, min_size=1, max_size=4))
@settings(max_examples=60)
def test_what_is_kept_of_an_answer_is_not_overwritten_by_the_next(columns):
    blocks = [np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8) for _ in range(2)]
    service, worker = RowMemory(*blocks), RowMemory(*blocks)
    asked: RowBatch = {"same": np.arange(40, dtype=np.uint8)}
    head, rows = worker.question_of(service.ask(RunFunction("f"), asked))
    rows |= {f"{n}": Ragged(one, np.array([0, len(one)], np.int64)) for n, one in enumerate(columns)}
    _, found = service.answer_of(worker.answer(head, rows))
    kept = service.kept(found)
    blocks[1][:] = 255
    for number, one in enumerate(columns):
        assert kept[f"{number}"].values.tobytes() == one.tobytes()
    assert kept["same"].base is asked["same"] or np.shares_memory(kept["same"], asked["same"])


def test_memory_of_a_heap_is_used_again_when_the_last_view_is_gone():
    heap = SharedHeap(8 << 20)
    first = heap.empty(1 << 20)
    place, view = first.__array_interface__["data"][0], first[5:9].view(np.int32)
    del first
    other = heap.empty(1 << 20)
    assert other.__array_interface__["data"][0] != place  # a view is left
    view[:] = 7
    del view
    again = heap.empty(1 << 20)
    assert again.__array_interface__["data"][0] == place and again[5] == 7
    small, large = heap.empty(100), heap.empty(16 << 20)  # in memory of the process alone
    assert heap.spanning([small]) is None and heap.spanning([again, large]) is None
    again[:3], other[:3] = 1, 2
    whole, begins = heap.spanning([again, other])
    del again, other
    heap.empty(1 << 20)[:] = 0  # not in the place of what the whole spans
    assert [whole[begin : begin + 3].tolist() for begin in begins] == [[1] * 3, [2] * 3]


_WRITES = """
import os, sys
import numpy as np
from overlord.runtimes.transport.shared_memory import SharedHeap, read_only_view
heap = SharedHeap(1 << 20)
row = heap.empty(1 << 17)
row[:] = 7
seen = read_only_view(os.dup(heap.fd), 1 << 20)
assert seen.flags.writeable and int(seen.sum()) == 7 << 17
row[0] = 8
assert seen.max() == 8
seen[0] = 9
"""


def test_a_worker_that_writes_into_the_heap_ends_and_harms_no_row():
    assert subprocess.run([sys.executable, "-c", _WRITES], check=False).returncode == -signal.SIGSEGV


_LITTLE_ADDRESS_SPACE = """
import resource
import numpy as np
from overlord.runtimes.transport.shared_memory import HEAP_BYTES, shared_heap
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
heap = shared_heap()
assert len(heap.memory) < HEAP_BYTES
assert heap.spanning([heap.empty(1 << 20)]) is not None
"""


def test_a_heap_is_small_where_the_address_space_is_limited():
    subprocess.run([sys.executable, "-c", _LITTLE_ADDRESS_SPACE], check=True)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(HEAP_LEAST, 40 * HEAP_LEAST)), max_size=40))
@settings(max_examples=60)
def test_arrays_of_a_heap_never_overlap(steps):
    heap, held = SharedHeap(64 * HEAP_LEAST), {}
    for number, (slot, size) in enumerate(steps):
        held.pop(slot, None)
        held[slot] = heap.empty(size), number % 251
        held[slot][0][:] = number % 251
        assert all((array == value).all() for array, value in held.values())
    held.clear()
    assert heap.spanning([heap.empty(64 * HEAP_LEAST)]) is not None  # all of it is free again, in one piece


def test_rows_in_a_heap_are_not_copied():
    heap = SharedHeap(1 << 22)
    blocks = [np.frombuffer(mmap.mmap(-1, 1 << 12), np.uint8) for _ in range(2)]
    service = RowMemory(*blocks, heap.memory)
    worker = RowMemory(*blocks, np.frombuffer(mmap.mmap(heap.fd, len(heap.memory)), np.uint8))
    values = heap.empty(1 << 20)
    values[:] = np.arange(1 << 20) % 251
    rows = Ragged(values, np.array([100, 5000, 1 << 20]))
    scattered = Scattered(values, np.array([7, 3]), np.array([2, 100_000]), np.dtype(np.uint8))
    asked: RowBatch = {"rows": rows, "items": scattered, "n": np.arange(2)}
    assert copied_bytes(asked, heap.memory) < 200
    message = service.ask(RunFunction("f"), asked)
    assert isinstance(message, SharedRows)
    head, found = worker.question_of(message)
    for name in ("rows", "items"):
        assert [found[name][row].tobytes() for row in range(2)] == [asked[name][row].tobytes() for row in range(2)]
    _, kept = service.answer_of(worker.answer(head, {"kept": found["rows"].slice(1, 2)}))
    kept = service.kept(kept)
    assert np.shares_memory(kept["kept"].values, values) and kept["kept"][0].tobytes() == rows[1].tobytes()
    service.asked = service.asked[:8]  # too little for the rest: everything travels, in one piece
    _, found = rows_from(service.ask(RunFunction("f"), asked))
    assert [found["items"][row].tobytes() for row in range(2)] == [scattered[row].tobytes() for row in range(2)]


def test_media_of_several_chunks_stay_where_they_are_and_travel_in_one_piece():
    heap, rng = SharedHeap(1 << 22), np.random.default_rng(0)
    chunks = []
    for group in range(2):
        values = heap.empty(HEAP_LEAST)
        values[:] = rng.integers(0, 256, HEAP_LEAST)
        media = Ragged(values, np.array([0, 1000, 1000, HEAP_LEAST]))
        meta = np.zeros(3, META)
        chunks.append(Chunk(0, group, 0, meta, {"media": media, "n": np.arange(3) + 10 * group}))
    picks = [(chunks[0], np.array([0, 2])), (chunks[1], np.array([2]))]
    copied, found = gather(picks, None), gather(picks, heap)
    assert found["n"].tolist() == copied["n"].tolist() == [0, 2, 12]
    assert [found["media"][row].tobytes() for row in range(3)] == [copied["media"][row].tobytes() for row in range(3)]
    assert np.shares_memory(found["media"].memory, heap.memory) and not np.shares_memory(copied["media"].values, values)
    some = np.zeros(3, np.int32)
    columns = dict.fromkeys(("start", "length", "seconds", "seeds", "bad"), some) | {"grids": np.zeros((3, 3))}
    place = {"values": found["media"].memory, "begin": found["media"].begin, "nbytes_of": found["media"].sizes}
    media = Media(kind="image", rows=np.arange(4), encoded=True, **columns, **place)
    for one in (media.compact(), Media.concat([media, media])):
        assert len(one.values) == one.nbytes
        assert [one.data(row).tobytes() for row in range(3)] == [media.data(row).tobytes() for row in range(3)]


@given(st.binary(min_size=1, max_size=60), st.integers(0, 200))
def test_bytes_that_are_no_rows_are_refused(noise, at):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_rows(ours, RunFunction("f"), {"n": np.arange(9)})
        sent = theirs.recv(1 << 16)
        lead = PREFIX.size + at % (len(sent) - PREFIX.size)
        ours.sendall(sent[:lead] + noise + sent[lead + len(noise) :])
        ours.shutdown(socket.SHUT_WR)
        try:
            _, found = receive_rows(theirs)
        except ol.ServiceLost:
            return
    assert all(isinstance(column, (np.ndarray, Ragged)) for column in found.values())


@pytest.mark.skipif(not hasattr(mmap, "MAP_POPULATE"), reason="pages are mapped ahead on Linux")
@pytest.mark.parametrize("step", [4, 64])
def test_pages_of_dense_places_are_mapped_at_once_and_of_sparse_ones_as_they_are_written(step):
    pages, page = 1024, mmap.PAGESIZE
    segment = os.memfd_create("places")
    os.ftruncate(segment, pages * page)
    faults = []

    def fill(rows, places):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for place in places:
            place[:] = 7
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
        return rows

    begin = np.arange(0, pages, step) * page
    table = np.stack([begin, np.full(len(begin), 4 * page)], axis=1)
    _run_into_places(fill, RunFunction("", 0, pages * page), {"=places": table}, [os.dup(segment)])
    written = np.frombuffer(os.pread(segment, pages * page, 0), np.uint8)
    os.close(segment)
    assert (written == 7).sum() == table[:, 1].sum()
    assert (faults[0] > 8) == (step > 4)
