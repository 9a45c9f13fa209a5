"""A mixture that follows repetitions: the counts of the formula, and a pure function of job and step."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from tests.conftest import write_ids
from tests.counted_loaders import CountedLoaders, drawer_of, job_of, steps_of

import overlord as ol
from overlord.core.states import StreamState
from overlord.testing import assert_resumes_anywhere, stream_digests

ROWS = {"a": 4001, "b": 700, "c": 90, "d": 12}
WEIGHTS = {"a": 5.0, "b": 3.0, "c": 2.0, "d": 0.5}
DECAY = 3.0


def formula(counts: np.ndarray, prior: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the shares by the formula alone, from the samples drawn so far."""
    repeated = np.maximum(counts / rows - 1, 0)
    weights = prior * np.exp(-(repeated - repeated.min()) / DECAY)
    return weights / weights.sum()


@pytest.mark.parametrize(("granularity", "steps"), [("step", 10_000), ("substep", 800)])
def test_realised_counts_are_those_of_the_formula_to_one_sample(granularity, steps, tmp_path):
    batch, rows, prior = 16, np.array(list(ROWS.values())), np.array(list(WEIGHTS.values()))
    mixture = ol.Mixture(WEIGHTS, learn=ol.Learn("repetition", decay_epochs=DECAY), granularity=granularity)
    drawer = drawer_of(job_of(list(ROWS), mixture, ol.Batch(64, global_samples=batch)), CountedLoaders(rows), tmp_path)
    counts, owed, worst, parts = np.zeros(4), np.zeros(4), 0.0, 1 if granularity == "step" else 16
    for number, step in enumerate(steps_of(drawer, steps)):
        for source in np.split(step.draw.source, parts):
            owed += formula(counts, prior, rows) * len(source)
            counts += np.bincount(source, minlength=4)
            worst = max(worst, float(np.abs(counts - owed).max()))
        assert step.draw.step == number
    assert worst <= 1.0
    assert counts.sum() == batch * steps and counts.tolist() == drawer.state.samples.tolist()
    assert drawer.state.mixer is None, "the counts of the stream are all that it needs"
    epochs = counts / rows
    assert epochs[3] > epochs[2] > epochs[1] > epochs[0]
    if steps == 10_000:  # by the prior alone, d would have been read 635 times and a 19 times
        assert epochs[3] < 50 and epochs[0] > 24


def test_it_is_the_prior_until_a_source_is_repeated(tmp_path):
    even = {"a": 8, "b": 4, "c": 3, "d": 1}  # shares that floating point holds exactly
    drawers = [
        drawer_of(job_of(list(ROWS), mixture, ol.Batch(64, global_samples=8)), CountedLoaders([10**6] * 4), tmp_path)
        for mixture in (ol.Mixture(even), ol.Mixture(even, learn="repetition"))
    ]
    for step, other in zip(*(steps_of(drawer, 300) for drawer in drawers), strict=True):
        assert step.draw.source.tolist() == other.draw.source.tolist()


def test_the_draw_depends_neither_on_buffers_nor_on_where_it_is_resumed(tmp_path):
    mixture = ol.Mixture(WEIGHTS, learn=ol.Learn("repetition", decay_epochs=DECAY), level="token")
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 60, rows) for rows in ROWS.values()]
    job = job_of(list(ROWS), mixture, ol.Batch(64, global_tokens=512), overlength="split")

    def drawer(chunk: int, state: StreamState | None = None):
        loaders = CountedLoaders(list(ROWS.values()), chunk=chunk, lengths=lengths, skips={1: 5, 3: 4})
        return drawer_of(job, loaders, tmp_path, state)

    whole = [(step.draw.digest, step.draw.weights, step.after) for step in steps_of(drawer(1 << 20), 500)]
    assert whole[0][1] != whole[-1][1]
    for chunk in (1, 7):
        assert [(step.draw.digest, step.draw.weights) for step in steps_of(drawer(chunk), 500)] == [
            (digest, weights) for digest, weights, _ in whole
        ]
    for at in (1, 50, 333, 499):
        rest = [step.draw.digest for step in steps_of(drawer(13, whole[at - 1][2]), 500 - at)]
        assert rest == [digest for digest, _, _ in whole[at:]]


# ---- the whole system


def follows(job: ol.Job, decay: float = 0.5, **options) -> ol.Job:
    sources = [source.replace(weight=None) for source in job.sources]
    learn = ol.Learn("repetition", decay_epochs=decay)
    return job.replace(sources=sources, mixture=ol.Mixture({"a": 3, "b": 4, "c": 2}, learn=learn, **options))


GOLDEN = (
    "f899532f548e1b30688fa284f7211c53",
    "009f56a3a466ef64ff3b4a079d926656",
    "f037c8bcd615337f7faa3652b61de10d",
)
MESH = ol.ClientPlaceTree(dp=2, cp=2)


def test_golden_stream(cache, tmp_path):
    """The digests must be the same on every machine; see test_golden."""
    sample = ol.Text("ids", tokenized=True)
    files = {name: write_ids(tmp_path / f"{name}.jsonl", [1 + n % 60 for n in range(rows)]) for name, rows in SMALL}
    job = ol.Job(
        sources=[ol.Source(name, str(path), sample=sample) for name, path in files.items()],
        mixture=ol.Mixture({"few": 2, "many": 1}, learn=ol.Learn("repetition", decay_epochs=2.0)),
        batch=ol.Batch(64, global_samples=32),
    )
    digests = stream_digests(job, mesh=MESH, steps=20, cache=cache)
    assert (digests.order, digests.plan, digests.content) == GOLDEN


SMALL = (("few", 60), ("many", 500))


def test_no_report_is_needed_and_the_weights_move(ids_job, cache):
    with ol.launch(follows(ids_job), runtime="inline", cache=cache) as service:
        client = service.client()
        steps = [next(client) for _ in range(60)]
        sources = service.status()["sources"]
        assert service.status()["planner"]["waits_for_report"] is None
        client.report(steps[-1].index, {"loss": 1.0})  # for people to look at
    assert {step.mixture_version for step in steps} == {0}, "as with a schedule"
    shares = [step.weights[1] / sum(step.weights) for step in steps]
    first = next(n for n, share in enumerate(shares) if share != shares[0])
    assert shares[0] == pytest.approx(4 / 9) and min(shares[first:]) < 0.9 * shares[0]
    # b has 40 rows and 4/9 of 11 samples: its second epoch begins in the tenth step.
    assert first in (9, 10)
    for source in sources.values():
        assert source["epochs"] > 1 and source["effective_epochs"] == pytest.approx(
            1 + 15.39 * (1 - math.exp((1 - source["epochs"]) / 15.39))
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"granularity": "substep", "level": "token"}, {"max_repetition": 2}, {"stopping": "all_exhausted"}],
    ids=["plain", "substep", "max_repetition", "all_exhausted"],
)
def test_it_resumes_bit_exactly_at_any_step(options, ids_job, cache):
    assert_resumes_anywhere(follows(ids_job, **options), steps=16, cache=cache)


def test_it_resumes_from_json_in_the_middle_and_on_another_mesh(ids_job, cache):
    job = follows(ids_job)
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        whole = [next(client).order_digest for _ in range(20)]
        state = json.loads(json.dumps(client.state_dict()))
        whole += [next(client).order_digest for _ in range(20)]
    assert state["mixer"] is None
    with ol.launch(job, runtime="inline", cache=cache, state=state, mesh=ol.ClientPlaceTree(dp=4)) as service:
        client = service.client()
        assert [next(client).order_digest for _ in range(20)] == whole[20:]


@pytest.mark.parametrize(("prefetch", "loaders", "mesh"), [(4, 3, "dp=1"), (2, 1, "dp=3")])
def test_loaders_prefetch_runtime_and_mesh_change_nothing(prefetch, loaders, mesh, ids_job, cache):
    job = follows(ids_job)
    expected = stream_digests(job, steps=40, cache=cache)
    tree = ol.ClientPlaceTree(dp=int(mesh[-1]))
    digests = stream_digests(
        job, steps=40, cache=cache, mesh=tree, runtime="local", prefetch=prefetch, loaders_per_source=loaders
    )
    assert digests.order == expected.order


def test_changes_of_a_running_stream(ids_job, cache):
    """Set while the stream runs it counts from the beginning of the run; it ends, and sources come and go."""
    plain = follows(ids_job).replace(mixture=ol.Mixture({"a": 3, "b": 4, "c": 2}))
    rule = ol.Mixture({"a": 3, "b": 4, "c": 2}, learn=ol.Learn("repetition", decay_epochs=0.5))

    def change(service: ol.Service, step: int) -> None:
        if step == 12:
            service.set_mixture(rule, at_step=15)
        if step == 20:
            service.park_source("a", at_step=22)
        if step == 24:
            service.return_source("a", at_step=26)
            service.remove_source("c", at_step=28)
        if step == 30:
            service.set_mixture({"a": 1, "b": 1}, at_step=32)

    assert_resumes_anywhere(plain, steps=36, before=change, cache=cache)
    with ol.launch(plain, runtime="inline", cache=cache) as service:
        client = service.client()
        for _ in range(3):
            next(client)
        service.set_mixture(rule, at_step=15)
        steps = [next(client) for _ in range(14)]
    assert steps[11].weights == (3.0, 4.0, 2.0)
    # By then b was read twice, and a and c were not.
    a, b, c = steps[12].weights
    assert b / a < 4 / 3 * 0.5 and c / a == pytest.approx(2 / 3, rel=0.2)


def test_an_added_source_begins_with_its_whole_weight(ids_job, cache, tmp_path):
    path = write_ids(tmp_path / "new.jsonl", range(1, 50))
    with ol.launch(follows(ids_job), runtime="inline", cache=cache) as service:
        client = service.client()
        for _ in range(29):
            next(client)
        before = next(client).weights
        at = service.add_source(ol.Source("new", str(path), sample=ol.Text("ids", tokenized=True)), weight=4)
        after = [next(client).weights for _ in range(at - 30 + 1)][-1]
    assert len(after) == 4 and after[3] > after[1], "b has the same weight, and was repeated"
    assert after[1] / after[0] == pytest.approx(before[1] / before[0], rel=0.1)


# ---- what makes no sense is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stopping": "first_exhausted"}, "stopping='first_exhausted' never repeats a source"),
        ({"stopping": "all_exhausted_without_replacement"}, "never repeats a source"),
        ({"stopping": "all_exhausted_without_replacement", "order": "sequential"}, "never repeats a source"),
        ({"max_repetition": 1}, "max_repetition=1 never repeats a source"),
    ],
)
def test_a_mixture_that_repeats_nothing_is_refused(options, words):
    with pytest.raises(ol.SpecError, match=words) as error:
        ol.Mixture({"a": 1, "b": 1}, learn="repetition", **options)
    assert "learn" in str(error.value) and "would never change a weight" in str(error.value)
    ol.Mixture({"a": 1, "b": 1}, learn="repetition", max_repetition=2, stopping="all_exhausted")


@pytest.mark.parametrize(
    ("learn", "words"),
    [
        ({"method": "repetition", "every": 2}, "looks at no report"),
        ({"method": "repetition", "decay_epochs": 0}, "between 0.01 and"),
        ({"method": "repetition", "eta": 1.0}, "'repetition' does not use it"),
        ({"method": "odm", "decay_epochs": 2}, "'odm' does not use it"),
    ],
)
def test_options_that_would_do_nothing_are_refused(learn, words):
    with pytest.raises(ol.SpecError, match=words):
        ol.Mixture({"a": 1}, learn=learn)


def test_a_run_without_a_trainer_may_follow_repetitions(ids_job, cache, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from overlord.cli.main import app
    from overlord.job_files import dump_job_yaml

    monkeypatch.setenv("OVERLORD_CACHE", cache)
    (tmp_path / "job.yaml").write_text(dump_job_yaml(follows(ids_job)))
    command = ["run", str(tmp_path / "job.yaml"), "--runtime", "inline", "--steps", "40", "--json"]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.stderr
    assert all(source["epochs"] > 1 for source in json.loads(outcome.stdout)["sources"])


def test_states_of_other_rules_are_those_of_before():
    """The fingerprint of a job without the rule does not name its option, or saved states would be refused."""
    from overlord.job.specs import stream_parts

    job = job_of(["a", "b"], ol.Mixture({"a": 1, "b": 1}, learn="odm"), ol.Batch(64, global_samples=8))
    learn = stream_parts(job, tokenizer_digest="", listings=dict.fromkeys("ab", ""))["mixture"]["learn"]
    assert "decay_epochs" not in learn and learn["method"] == "odm"
    rule = ol.Mixture({"a": 1, "b": 1}, learn=ol.Learn("repetition", decay_epochs=2))
    learn = stream_parts(job.replace(mixture=rule), tokenizer_digest="", listings=dict.fromkeys("ab", ""))
    assert learn["mixture"]["learn"]["decay_epochs"] == 2
