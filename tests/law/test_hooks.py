"""Hooks: a user's code replaces what loaders and constructors do with their parts of a plan, under the same law."""

from __future__ import annotations

import itertools
import json
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from examples.demo.demo_data import demo_job
from examples.pair_hooks import MIN_CROP, pair_column, two_crops
from tests.conftest import write_ids

import overlord as ol
from overlord.core.ragged import Ragged
from overlord.core.states import sealed
from overlord.job_files import LaunchOptions, dump_job_yaml, load_job_file
from overlord.testing import FaultScript, launch_for_faults
from overlord.testing.digests import digest_service

MESH = ol.ClientPlaceTree(dp=2, cp=2)
PAIRS = {"loader_do_plan": two_crops, "constructor_do_plan": pair_column}
STEPS = 6


def from_neighbours(part):
    """Mixes each sample with the one before it in its group, by the seeds: a loader's part must not depend on scale."""
    firsts = part.tokens.values[part.tokens.offsets[:-1]]
    shift = np.repeat((np.roll(firsts, 1) + part.seeds % np.uint64(97)).astype(np.int64), part.tokens.lengths)
    return {"tokens": part.tokens.values + shift, "loss": (np.arange(len(shift)) + part.step) % 3 > 0}


class Lengths:
    """Adds a column of lengths, and changes tokens by their place: the object is made where it runs."""

    version = 3

    def __init__(self):
        self.made = True

    def __call__(self, part):
        assert self.made
        changed = part.tokens.values + np.arange(len(part.tokens.values)) % 7
        return {"tokens": changed, "lengths": part.tokens.lengths.astype(np.int32)}


from_neighbours.version = "1"
BOTH = {"loader_do_plan": from_neighbours, "constructor_do_plan": Lengths}


def digests(job, cache, **options):
    with ol.launch(job, cache=cache, mesh=MESH, **options) as service:
        return digest_service(service, steps=STEPS)


def text_of(error) -> str:
    return " ".join(str(error.value).split())


@pytest.fixture(scope="module")
def whole_job(ids_job):
    """Samples in one piece each, a few in a microbatch."""
    batch = ol.Batch(96, global_samples=12, microbatch_tokens=384)
    return ids_job.replace(overlength="truncate", batch=batch)


@pytest.fixture(scope="module")
def steady(whole_job, cache):
    """The digests of both hooks on one thread."""
    return digests(whole_job, cache, runtime="inline", **BOTH)


# -- what hooks change, on every runtime -------------------------------------------------------------------------------


@pytest.mark.slow_on_ray
@pytest.mark.slow_but_inline
def test_what_a_batch_holds_is_what_the_hooks_made(whole_job, cache, where):
    with ol.launch(whole_job, cache=cache, **where, **PAIRS) as service:
        step = next(service.client())
        batches = list(step.microbatches)
    with ol.launch(whole_job, cache=cache, runtime="inline") as service:
        plain = next(service.client())
        plain_batches = list(plain.microbatches)
    assert (step.order_digest, step.plan_digest) == (plain.order_digest, plain.plan_digest)
    labels = 0
    for batch, as_read in zip(batches, plain_batches, strict=True):
        pairs, tokens = batch["pair_ids"][0], batch["input_ids"][0]
        assert pairs.shape == tokens.shape and "pair_ids" not in as_read
        bounds = batch.meta.cu_seqlens.tolist()
        for segment, (low, high) in enumerate(itertools.pairwise(bounds)):
            half = (high - low) // 2 if high - low >= 2 * MIN_CROP else 0
            expected = [2 * segment] * half + [2 * segment + 1] * half
            assert pairs[low:high].tolist() == expected + [-1] * (high - low - len(expected))
            assert set(tokens[low:high]) <= set(as_read["input_ids"][0, low:high])
            assert ((batch["labels"][0, low:high] >= 0) == (pairs[low:high] >= 0))[1:].all()
        labels += int((batch["labels"] >= 0).sum())
    assert step.global_loss_tokens == labels < plain.global_loss_tokens


@pytest.mark.slow_but_inline
def test_the_stream_is_the_same_on_every_runtime_and_after_a_resume(whole_job, cache, where, steady, tmp_path):
    bare = digests(whole_job, cache, runtime="inline")
    assert (bare.order, bare.plan) == (steady.order, steady.plan) and bare.content != steady.content
    assert digests(whole_job, cache, **where, **BOTH) == steady

    def contents(service, steps):
        clients = [service.client(rank) for rank in range(MESH.world_size)]
        found = [[batch.digest() for batch in next(client).microbatches] for _ in range(steps) for client in clients]
        state = clients[0].state_dict()
        for client in clients:
            client.close()
        return found, state

    options = {"cache": cache, "mesh": MESH, **BOTH}
    with ol.launch(whole_job, runtime="inline", **options) as service:
        through, _ = contents(service, STEPS)
    with ol.launch(whole_job, store=tmp_path / "store", **where, **options) as service:
        before, state = contents(service, STEPS // 2)
    assert state["fingerprint"]["hooks"] == {
        "loader_do_plan": {"name": "from_neighbours", "version": "1", "module": __name__},
        "constructor_do_plan": {"name": "Lengths", "version": "3", "module": __name__},
    }
    for given in ({"state": json.loads(json.dumps(state))}, {"state": "latest", "store": tmp_path / "store"}):
        with ol.launch(whole_job, **where, **options, **given) as service:
            assert before + contents(service, STEPS - STEPS // 2)[0] == through


@pytest.mark.parametrize(
    "how",
    [
        {"loader_hosts": 2},
        pytest.param({"loaders_per_source": 3}, marks=pytest.mark.slow),
        pytest.param({"threads": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_neither_processes_nor_workers_change_what_a_hook_makes(whole_job, cache, steady, how):
    assert digests(whole_job, cache, runtime="local", **how, **BOTH) == steady


def test_a_source_that_several_hosts_share_gives_the_same_parts(tmp_path, cache):
    """A step has samples of several groups, which belong to several hosts: a hook sees group by group on each.

    Hosts are killed meanwhile, and their successors pass the same samples through the hooks again.
    """
    for name, files in (("a", 9), ("b", 7)):
        for number in range(files):
            write_ids(tmp_path / name / f"{number}.jsonl", range(2, 5), 100 * number)
    sample = ol.Text("ids", tokenized=True)
    sources = [ol.Source(name, str(tmp_path / name), sample=sample, shuffle_bytes=0) for name in "ab"]
    job = ol.Job(sources, batch=ol.Batch(32, global_samples=12))
    alone = digests(job, cache, runtime="inline", **BOTH)
    hosts = set()

    def resize(service, step):
        storm.reach(step)
        storm.resize([20, 8] if step % 2 else [12, 20])
        storm.wait(0.5)
        hosts.update(len(storm.cluster.supervisor.table.assignment.parts_of(source)) for source in range(2))

    script = FaultScript().kill("loader host 0", 2).kill("constructor host 0", 3).kill("loader host 1", 4)
    options = {"most_workers": 32, "cache": cache, "mesh": MESH, "shadows": False}
    with launch_for_faults(job, script, **options, **BOTH) as (service, storm):
        assert digest_service(service, steps=STEPS, before=resize) == alone
    assert max(hosts) > 1, "else it would pass for nothing"


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [("megatron", "packed"), ("hf", "hdp"), ("torchtitan", "vanilla"), (ol.Layout(rows="padded"), "packed")],
    ids=str,
)
def test_a_hook_that_returns_what_it_got_changes_nothing(whole_job, cache, layout, strategy):
    """Cut for context-parallel ranks, shared by blocks of ranks, padded: replaced tokens go where the others went."""

    def same(part):
        return {"tokens": part.tokens}

    same.version = "1"
    options = {"runtime": "inline", "layout": layout, "strategy": strategy}
    bare = digests(whole_job, cache, **options)
    assert digests(whole_job, cache, **options, loader_do_plan=same, constructor_do_plan=same) == bare


def test_a_hook_sees_what_a_step_has_of_a_split_sample(ids_job, cache):
    starts = []

    def same(part):
        starts.append(int(part.starts.max(initial=0)))
        return {"tokens": part.tokens}

    same.version = "1"
    job = ids_job.replace(batch=ol.Batch(32, global_tokens=256))
    bare = digests(job, cache, runtime="inline")
    assert digests(job, cache, runtime="inline", loader_do_plan=same) == bare
    assert max(starts) > 0, "an earlier step has the beginning"
    assert digests(job, cache, runtime="inline", constructor_do_plan=same) == bare


def test_media_keep_their_placeholders_wherever_they_are_decoded(mixed_job, cache):
    def louder(part):
        tokens = np.array(part.tokens.values)
        tokens[~part.placeholders] += 1
        return {"tokens": tokens}

    def over_images(part):
        return {"tokens": part.tokens.values + 1}

    louder.version = over_images.version = "1"
    options = {"runtime": "inline", "cache": cache}
    found = [
        digests(mixed_job, **options, placement=placement, loader_do_plan=louder, constructor_do_plan=louder)
        for placement in ("loader", "constructor")
    ]
    assert found[0] == found[1] != digests(mixed_job, **options)
    for kind in PAIRS:
        with pytest.raises(ol.HookError, match="changed placeholders of images, clips or sounds"):
            digests(mixed_job, **options, **{kind: over_images})


def test_a_stage_in_the_middle_gets_the_columns_of_a_hook(whole_job, cache):
    mesh = ol.ClientPlaceTree(pp=3, vpp=2)
    with ol.launch(whole_job, mesh=mesh, runtime="inline", cache=cache, constructor_do_plan=Lengths) as service:
        batch = next(service.client(rank=1)).microbatches[0]
        assert set(batch) & {"input_ids", "labels", "lengths"} == {"lengths"}
        assert batch["lengths"].tolist() == batch.meta.segment_lengths.tolist() and "lengths" in batch.chunk(1)


def test_stand_ins_stay_out_of_the_loss_whatever_a_hook_says(tmp_path, cache):
    rows = [json.dumps({"ids": [7] * 9}), '{"ids": "damaged"}'] * 8
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = ol.Source("a", str(tmp_path / "a.jsonl"), sample=ol.Text("ids", tokenized=True), tolerance=1.0)
    job = ol.Job([source], batch=ol.Batch(16, global_samples=8))
    seen = []

    def all_count(part):
        seen.append(part.bad.any())
        return {"loss": np.ones(len(part.tokens.values))}

    all_count.version = "1"
    options = {"runtime": "inline", "cache": cache}
    with ol.launch(job, **options) as service, ol.launch(job, loader_do_plan=all_count, **options) as hooked:
        for step, other, _ in zip(service.client(), hooked.client(), range(2), strict=False):
            assert step.global_loss_tokens == other.global_loss_tokens
    assert any(seen)


# -- what is refused ---------------------------------------------------------------------------------------------------


def shortened(part):
    return {"tokens": Ragged.from_rows([part.tokens[i][1:] for i in range(len(part))], np.int32)}


def moved(part):
    """As many tokens as planned, but not where they are planned."""
    lengths = np.roll(part.tokens.lengths, 1)
    return {"tokens": Ragged(part.tokens.values, np.concatenate([[0], np.cumsum(lengths)]))}


def fails(part):
    raise KeyError("no such sample")


def in_place(part):
    part.tokens.values[0] = 1


RANDOM = np.random.default_rng(0)


def by_chance(part):
    return {"tokens": RANDOM.integers(1, 1 << 30, len(part.tokens.values))}


WRONG = {
    "shorter rows": (shortened, "samples with other lengths than planned: .* a transform that changes them"),
    "moved rows": (moved, "with other lengths than planned"),
    "fewer rows": (lambda part: {"tokens": part.tokens.slice(0, 0)}, "returned 0 rows of tokens for"),
    "too many": (lambda part: {"tokens": np.zeros(1 + len(part.tokens.values), int)}, "tokens of shape .* are planned"),
    "fractions": (lambda part: {"tokens": part.tokens.values / 2}, "tokens of type float64"),
    "negative": (lambda part: {"tokens": part.tokens.values * 0 - 1}, "from -1 to -1"),
    "exception": (fails, r"raised KeyError: 'no such sample' \(test_hooks.py, line \d+\)"),
    "written to": (in_place, "read-only"),
    "chance": (by_chance, "when it was called again with the same arguments"),
    "no mapping": (lambda part: [1, 2], "returned a list"),
    "lists": (lambda part: {"tokens": [[1], [2, 3]]}, "that is no array"),
}
OF_LOADERS = {
    "column": (lambda part: {"pair_ids": np.zeros(3, int)}, "'pair_ids', .*constructor_do_plan adds columns"),
    "mask of another length": (lambda part: {"loss": np.ones(1)}, "loss of shape"),
}
OF_CONSTRUCTORS = {
    "loss": (lambda part: {"loss": part.loss}, "Labels are counted before"),
    "key of a batch": (lambda part: {"labels": np.zeros(3, int)}, "'labels', which is a key of batches already"),
    "key of images": (lambda part: {"pixel_values": np.zeros(3, int)}, "a key of batches already"),
    "type": (lambda part: {"pair": np.zeros(3)}, "type float64"),
    "name": (lambda part: {"meta.x": np.zeros(3, int)}, "a column named 'meta.x'"),
}
CASES = [
    pytest.param(kind, hook, words, id=f"{kind}-{name}")
    for kind, wrong in (("loader_do_plan", WRONG | OF_LOADERS), ("constructor_do_plan", WRONG | OF_CONSTRUCTORS))
    for name, (hook, words) in wrong.items()
]


@pytest.mark.parametrize(("kind", "hook", "words"), CASES)
def test_what_was_not_planned_is_refused_with_the_hook_and_the_samples(whole_job, cache, kind, hook, words):
    hook.version = "7"
    with (
        ol.launch(whole_job, runtime="inline", cache=cache, **{kind: hook}) as service,
        pytest.raises(ol.HookError, match=words) as error,
    ):
        for batch in next(service.client()).microbatches:
            batch.keys()
    said = text_of(error)
    assert said.startswith(f"the {kind} hook {hook.__qualname__!r} version '7' ") and "step 0" in said
    assert any(f"'{name}:" in said for name in whole_job.names), "the samples are named"


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("kind", PAIRS)
def test_an_error_in_a_hook_reaches_the_trainer_as_it_is(whole_job, cache, where, kind):
    def late(part):
        if part.step == 2:
            raise ValueError("step 2 is too much")

    late.version = "1"
    options = {"cache": cache, kind: late}
    with ol.launch(whole_job, **where, **options) as service:
        client = service.client()
        assert [next(client).microbatches[0] is not None for _ in range(2)] == [True, True]
        with pytest.raises(ol.HookError, match="raised ValueError: step 2 is too much"):
            len(next(client).microbatches[0])


class NeedsMore:
    version = "1"

    def __init__(self, size):
        self.size = size

    def __call__(self, part):
        return None


class NoCall:
    version = "1"


def unversioned(part):
    return None


def test_what_is_no_hook_is_refused_before_anything_runs(whole_job, cache, tmp_path):
    (tmp_path / "broken_hooks.py").write_text("1 / 0\n")
    wrong = {
        "no_such_module:two_crops": "there is no module 'no_such_module'",
        "examples.pair_hooks:two_crop": "has no 'two_crop'.* Did you mean 'two_crops'",
        "two_crops": "write module:name",
        unversioned: r"has no version .*unversioned\.version = '1'",
        NoCall: "objects that can be called",
        7: "must be a function",
    }
    for hook, words in wrong.items():
        for kind in PAIRS:
            with pytest.raises(ol.SpecError, match=f"{kind}.*{words}"):
                ol.launch(whole_job, runtime="inline", cache=cache, **{kind: hook})
    for kind in PAIRS:
        with pytest.raises(ol.HookError, match=r"'NeedsMore' version '1' could not be made: .*takes no arguments"):
            ol.launch(whole_job, runtime="inline", cache=cache, **{kind: NeedsMore})
    file = tmp_path / "job.yaml"
    text = dump_job_yaml(whole_job, LaunchOptions())
    file.write_text(text.replace("loader_do_plan: null", "loader_do_plan: broken_hooks:crops"))
    with pytest.raises(ol.SpecError, match=r"job.yaml:\d+: launch.*broken_hooks.*raised ZeroDivisionError"):
        load_job_file(file)


@pytest.mark.parametrize("reconcile", ["strict", "allow_add_remove"])
def test_a_resume_with_another_hook_is_refused(whole_job, cache, reconcile):
    options = {"runtime": "inline", "cache": cache}
    with ol.launch(whole_job, **options, **PAIRS) as service, service.client() as client:
        next(client)
        state = client.state_dict()
    with ol.launch(whole_job, **options) as service, service.client() as client:
        next(client)
        bare = client.state_dict()
    assert "hooks" not in bare["fingerprint"], "states of runs without hooks are as they were"

    def again(part):
        return two_crops(part)

    again.__qualname__, again.version = "two_crops", "2"
    given = {**options, "reconcile": reconcile}
    with pytest.raises(ol.StateError, match=r"hooks.loader_do_plan.version was '1', is now '2'"):
        ol.launch(whole_job, state=state, **given, **PAIRS | {"loader_do_plan": again})
    again.__qualname__, again.version = "other_crops", "1"
    with pytest.raises(ol.StateError, match=r"hooks.loader_do_plan.name was 'two_crops', is now 'other_crops'"):
        ol.launch(whole_job, state=state, **given, **PAIRS | {"loader_do_plan": again})
    again.__qualname__, again.__module__ = "two_crops", "other_hooks"
    with pytest.raises(ol.StateError, match=r"hooks.loader_do_plan.module was .*, is now 'other_hooks'"):
        ol.launch(whole_job, state=state, **given, **PAIRS | {"loader_do_plan": again})
    again.__module__ = "__main__"  # of a script: nothing tells it from another one of this name
    ol.launch(whole_job, state=state, **given, **PAIRS | {"loader_do_plan": again}).close()
    del state["fingerprint"]["hooks"]["loader_do_plan"]["module"]  # as older versions wrote it
    state = sealed(state)
    ol.launch(whole_job, state=state, **given, **PAIRS).close()
    with pytest.raises(ol.StateError, match=r"hooks.constructor_do_plan was .*pair_column.*, is now missing"):
        ol.launch(whole_job, state=state, **given, loader_do_plan=two_crops)
    with pytest.raises(ol.StateError, match=r"hooks was .*two_crops.*, is now missing"):
        ol.launch(whole_job, state=state, **given)
    with pytest.raises(ol.StateError, match="hooks is new"):
        ol.launch(whole_job, state=bare, **given, **PAIRS)
    ol.launch(whole_job, state=bare, **given).close()


# -- hooks in job files, stores and torch's loader ---------------------------------------------------------------------


HOOKS = """
    import numpy as np

    def plus_one(part):
        return {"tokens": part.tokens.values + 1}

    class Ones:
        version = "1"

        def __call__(self, part):
            return {"ones": np.ones(3, np.int64)}

    plus_one.version = "1"
"""


def test_a_job_file_names_hooks_that_lie_beside_it(whole_job, tmp_path, cache):
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "beside_the_job.py").write_text(textwrap.dedent(HOOKS))
    text = dump_job_yaml(whole_job)
    for kind, name in (("loader_do_plan", "plus_one"), ("constructor_do_plan", "Ones")):
        text = text.replace(f"  {kind}: null", f"  {kind}: beside_the_job:{name}")
    (folder / "job.yaml").write_text(text)
    loaded = load_job_file(folder / "job.yaml")
    assert "loader_do_plan: beside_the_job:plus_one" in dump_job_yaml(loaded.job, loaded.launch)
    store = tmp_path / "store"
    with ol.launch(folder / "job.yaml", runtime="local", store=store, cache=cache) as service:
        batch = next(service.client()).microbatches[0]
        digest = batch.digest()
        assert batch["ones"].tolist() == [1, 1, 1]
    with pytest.raises(ol.SpecError, match="code is not taken from a store"):
        ol.replay(store, 0, cache=cache)
    with ol.replay(store, 0, job=folder / "job.yaml", cache=cache) as service:
        assert next(service.client()).microbatches[0].digest() == digest
    with ol.launch(whole_job, runtime="inline", cache=cache) as service:
        assert ((batch["input_ids"] - next(service.client()).microbatches[0]["input_ids"]) == 1).all()


def test_a_python_job_file_holds_its_hooks(whole_job, tmp_path, cache):
    paths = {source.name: list(source.path) for source in whole_job.sources}
    code = f"""
        import overlord as ol
        sources = [ol.Source(name, path, sample=ol.Text("ids", tokenized=True)) for name, path in {paths!r}.items()]
        job = ol.Job(sources, batch=ol.Batch(96, global_samples=12))

        def loader_do_plan(part):
            return {{"tokens": part.tokens.values * 0 + 5}}

        loader_do_plan.version = "1"
    """
    (tmp_path / "job.py").write_text(textwrap.dedent(code))
    with ol.launch(tmp_path / "job.py", runtime="local", cache=cache, store=tmp_path / "store") as service:
        digest = next(service.client()).microbatches[0].digest()
    with pytest.raises(ol.SpecError, match="does not hold the job of its run, which has Python functions"):
        ol.replay(tmp_path / "store", 0, cache=cache)
    with ol.replay(tmp_path / "store", 0, tmp_path / "job.py", cache=cache) as service:
        batch = next(service.client()).microbatches[0]
        assert batch.digest() == digest and set(batch["input_ids"][0]) == {5}
    job = load_job_file(tmp_path / "job.py")
    with pytest.raises(ol.SpecError, match="cannot be imported as module:name"):
        dump_job_yaml(job.job, job.launch)


def test_torch_gets_the_columns_as_tensors(whole_job, cache):
    torch = pytest.importorskip("torch")
    from overlord.integrations.torch_loader import DataLoader

    with DataLoader(whole_job, runtime="inline", cache=cache, **PAIRS) as loader:
        batch = next(iter(loader)).microbatches[0]
        assert isinstance(batch["pair_ids"], torch.Tensor) and batch["pair_ids"].shape == batch["input_ids"].shape
        state = loader.state_dict()
    with DataLoader(whole_job, runtime="inline", cache=cache, loader_do_plan=two_crops) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ol.StateError, match="pair_column"):
            next(iter(loader))


@pytest.mark.slow
def test_the_example_learns_to_find_pairs(demo_files, cache):
    pytest.importorskip("torch")
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    try:
        from train_pairs import pairs_job, train
    finally:
        sys.path.pop(0)
    losses = train(pairs_job(demo_job(demo_files)), 16, runtime="inline", cache=cache)
    assert len(losses) == 16 and sum(losses[-4:]) < 0.6 * sum(losses[:4]), losses
