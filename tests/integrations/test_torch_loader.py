"""The torch face: tensors, state, and several trainer processes that share one service."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE, run_ranks
from tests.conftest import slice_indices

import overlord as ol
from overlord.errors import SourceError
from overlord.integrations.torch_loader import DataLoader
from overlord.job_files import LaunchOptions, dump_job_yaml
from overlord.launch_spec import CLUSTER_KEYS


def _tokens(loader, steps):
    return [
        (step.index, [batch["input_ids"].tolist() for batch in step.microbatches])
        for _, step in zip(range(steps), loader, strict=False)
    ]


def test_batches_are_tensors_that_own_their_memory(ids_job, cache):
    with DataLoader(ids_job, cache=cache) as loader:
        step = next(iter(loader))
        batch = step.microbatches[0]
        assert isinstance(batch["input_ids"], torch.Tensor)
        assert batch["input_ids"].dtype == torch.int64
        batch["input_ids"].zero_()  # must not warn, must not reach shared memory
        assert isinstance(batch["max_length_q"], int)
        assert len(batch.meta.sample_ids) == len(batch["cu_seq_lens_q"]) - 1


@pytest.mark.parametrize("slicing", ["zigzag", "contiguous"])
@pytest.mark.parametrize("runtime", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_blocks_of_three_ranks_share_their_sequences(ids_job, cache, slicing, runtime):
    """Hybrid data parallelism over 6 ranks: what the loaders of all ranks give makes every sample, once."""
    job = ids_job.replace(batch=ol.Batch(36, global_samples=40))
    options = {"strategy": ol.strategies.hdp(equal_counts=True, blocks="any"), "layout": ol.Layout(slicing=slicing)}
    mesh, found, sizes = ol.ClientPlaceTree(dp=2, cp=3), {}, set()
    with ol.launch(job, mesh=mesh, runtime=runtime, cache=cache, **options) as service:
        plan = service.plan_raw(0)
        for rank in range(mesh.world_size):
            if runtime == "local":
                loader = DataLoader(service.address, rank=rank)
            else:
                loader = DataLoader(job, mesh=mesh, rank=rank, runtime=runtime, cache=cache, **options)
            with loader:
                batches = next(iter(loader)).microbatches
                assert len(batches) == plan.num_microbatches
                for number, batch in enumerate(batches):
                    of, cu = batch.meta.local_cp_size, batch["cu_seq_lens_q"].numpy()
                    sizes.add(of)
                    chosen = plan.bin_range(rank, number)
                    first = int(plan.first_ranks[chosen.start]) if chosen.stop > chosen.start else rank
                    where = slice_indices(cu, of, rank - first, slicing) if of > 1 else np.arange(int(cu[-1]))
                    segment = np.searchsorted(cu, where, side="right") - 1
                    places = where - cu[segment]
                    assert batch["position_ids"][0].tolist() == places.tolist()
                    for one, place, token in zip(segment, places, batch["input_ids"][0].tolist(), strict=True):
                        if place < batch.meta.segment_lengths[one]:
                            sample, begin = batch.meta.sample_ids[one], int(batch.meta.segment_offsets[one])
                            assert found.setdefault((sample, begin + int(place)), (rank, token)) == (rank, token)
    assert 3 in sizes and len(found) == plan.total_tokens
    with DataLoader(job, runtime="inline", cache=cache) as loader:
        whole = {}
        for batch in next(iter(loader)).microbatches:
            ids, cu = batch["input_ids"][0].tolist(), batch["cu_seq_lens_q"].tolist()
            for one, sample in enumerate(batch.meta.sample_ids):
                for place in range(int(batch.meta.segment_lengths[one])):
                    whole[sample, int(batch.meta.segment_offsets[one]) + place] = ids[cu[one] + place]
    assert {key: token for key, (_, token) in found.items()} == whole


def test_state_dict_round_trip(ids_job, cache):
    with DataLoader(ids_job, cache=cache, runtime="inline") as loader:
        _tokens(loader, 3)
        state = loader.state_dict()
        expected = _tokens(loader, 3)
    with DataLoader(ids_job, cache=cache, runtime="inline") as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert _tokens(loader, 3) == expected


@pytest.mark.slow
def test_a_state_is_loaded_under_a_running_service(ids_job, cache):
    """What a trainer does that crashed: it comes back to the service with its checkpoint."""
    with ol.launch(ids_job, cache=cache) as service:
        with DataLoader(service.address) as loader:
            _tokens(loader, 2)
            state = loader.state_dict()
            expected = _tokens(loader, 3)
        with DataLoader(service.address) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            assert _tokens(loader, 3) == expected
            loader.load_state_dict(loader.state_dict())  # where it is already
            assert _tokens(loader, 1)[0][0] == 5
            loader.load_state_dict(state)  # and back once more, in the same loader
            assert _tokens(loader, 3) == expected


@pytest.mark.slow
def test_a_state_of_another_stream_is_refused_by_a_running_service(ids_job, cache):
    states = []
    for job in (ids_job, ids_job.replace(seed=4), ids_job.replace(sources=ids_job.sources[:2])):
        with DataLoader(job, cache=cache, runtime="inline") as loader:
            _tokens(loader, 2)
            states.append(loader.state_dict())
    with ol.launch(ids_job, cache=cache) as service, DataLoader(service.address) as loader:
        _tokens(loader, 3)
        with pytest.raises(ol.StateError, match=r"another stream than the service's: seed was 4, is now 3.*state="):
            loader.load_state_dict(states[1])
        with pytest.raises(ol.StateError, match=r"another stream than the service's"):
            loader.load_state_dict(states[2])
        forged = json.loads(states[0]["stream"])
        forged["sources"]["a"][2] += 1
        with pytest.raises(ol.StateError, match=r"the state of step 2 is not the one that this service had"):
            loader.load_state_dict({"stream": json.dumps(forged)})
        assert _tokens(loader, 1)[0][0] == 3, "nothing has moved"
        loader.load_state_dict(states[0])
        assert _tokens(loader, 1)[0][0] == 2


class _Wrapped(torch.utils.data.IterableDataset):
    """What people write around a loader to hand it to torch's own."""

    def __init__(self, make):
        self._make = make

    def __iter__(self):
        for step in self._make():
            yield step.index


@pytest.mark.parametrize(
    "what",
    [
        "loader",
        *(
            pytest.param(w, marks=pytest.mark.slow)
            for w in ("forked client", "client", "launch", "forked inline client")
        ),
    ],
)
def test_workers_of_a_torch_loader_that_would_repeat_every_sample_are_refused(ids_job, cache, what):
    job = ids_job.replace(max_steps=3)
    inline = what == "forked inline client"
    with ol.launch(job, cache=cache, runtime="inline" if inline else "local") as service:
        held = service.client() if what.startswith("forked") else None
        wrapped = {
            "loader": lambda: DataLoader(job, cache=cache, runtime="inline"),
            "client": lambda: ol.connect(service.address, 0),
            "launch": lambda: ol.launch(job, cache=cache, runtime="inline").client(),
        }.get(what, lambda: held)
        loader = torch.utils.data.DataLoader(
            _Wrapped(wrapped), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
            with pytest.raises(ol.SpecError, match="num_workers=0"):
                list(loader)
        if held is not None:
            assert next(held).index == 0, "the process that it belongs to goes on"


_TRAINER = """
    import json, sys
    import torch.distributed as dist
    import overlord as ol
    from overlord.integrations.torch_loader import DataLoader
    dist.init_process_group("gloo")
    job = ol.Job.from_mapping(json.loads(sys.argv[1]))
    with DataLoader(job, mesh=sys.argv[3], cache=sys.argv[2]) as loader:
        seen = []
        for step, _ in zip(loader, range(4)):
            seen += [sum(batch["input_ids"].flatten().tolist()) for batch in step.microbatches]
        dist.barrier()
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, seen)
    if dist.get_rank() == 0:
        print("RESULT", out)
    dist.destroy_process_group()
"""


# Each rank is a process that imports torch: two CPU seconds.
@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("dp=2,cp=2", marks=pytest.mark.slow)])
def test_torchrun_ranks_share_one_service(ids_job, cache, tmp_path, mesh):
    tree = ol.ClientPlaceTree.parse(mesh)
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(_TRAINER))
    job = ids_job.model_dump_json(by_alias=True)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={tree.world_size}", "--standalone"]
    done = subprocess.run([*command, str(script), job, cache, mesh], capture_output=True, text=True, timeout=100)
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    expected = []
    with ol.launch(ids_job, mesh=tree, runtime="inline", cache=cache) as service:
        for rank in range(tree.world_size):
            client = service.client(rank=rank)
            steps = [next(client) for _ in range(4)]
            expected.append([int(b["input_ids"].sum()) for step in steps for b in step.microbatches])
    assert str(expected) in done.stdout


def _make_before_the_group(rank, job, cache, folder):
    """Make the loader before the process group, as Lightning does; return the tokens of two steps."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    with DataLoader(job, mesh="dp=2", cache=cache) as loader:
        with pytest.raises(ol.SpecError, match=r"WORLD_SIZE=2 and RANK=., .*init_process_group"):
            next(iter(loader))
        dist.init_process_group("gloo", f"file://{folder}/again", PATIENCE, 2, rank)
        assert loader.rank == rank
        found = _flat(loader, 2)
        dist.barrier()  # the first rank ends the service
    return found


@pytest.mark.slow
def test_a_process_group_may_be_made_after_the_loader(ids_job, cache, tmp_path):
    first, second = run_ranks(_make_before_the_group, 2, tmp_path, ids_job, cache, str(tmp_path))
    with DataLoader(ids_job, cache=cache, runtime="inline") as loader:
        for step, whole in enumerate(_flat(loader, 2)):
            assert sorted(first[step] + second[step]) == sorted(whole)


def test_ranks_of_torchrun_without_a_process_group_do_not_all_read_as_rank_0(ids_job, cache, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    where = {"runtime": "inline", "cache": cache, "mesh": "dp=2"}
    refused = DataLoader(ids_job, **where)
    for use in (lambda: next(iter(refused)), lambda: refused.rank, lambda: refused.report(0, {"loss": 1.0})):
        with pytest.raises(ol.SpecError, match=r"WORLD_SIZE=2 and RANK=1, .*each would take the batches of rank 0"):
            use()
    with DataLoader(ids_job, rank=1, **where) as loader:
        expected = _tokens(loader, 1)
    with ol.launch(ids_job, mesh="dp=2", cache=cache) as service:
        with DataLoader(service.address) as loader:
            assert loader.rank == 1 and _tokens(loader, 1) == expected
        monkeypatch.setenv("WORLD_SIZE", "4")
        with pytest.raises(ol.SpecError, match="has 2 ranks but the world has 4"):
            next(iter(DataLoader(service.address)))
        monkeypatch.delenv("RANK")
        with pytest.raises(ol.SpecError, match="WORLD_SIZE=4 and RANK=,"):
            next(iter(DataLoader(service.address)))


def test_one_process_that_takes_a_part_of_a_mesh_is_warned(ids_job, cache, caplog):
    where = {"runtime": "inline", "cache": cache}
    for options in ({"mesh": "dp=1"}, {"mesh": "dp=2", "rank": 0}):
        with DataLoader(ids_job, **where, **options) as loader:
            next(iter(loader))
    assert not caplog.messages
    with DataLoader(ids_job, **where, mesh="dp=2") as loader:
        next(iter(loader))
    assert len(caplog.messages) == 1 and "no process takes the others" in caplog.messages[0]


def test_a_batch_of_tensors_has_what_a_batch_of_arrays_has(ids_job, cache):
    mesh = ol.ClientPlaceTree(pp=2, vpp=2)
    with DataLoader(ids_job, mesh=mesh, rank=0, layout="torchtitan", runtime="inline", cache=cache) as loader:
        batch = next(iter(loader)).microbatches[0]
        assert set(batch.chunk(0)) == {"input", "positions"} and set(batch.chunk(1)) == {"positions"}
        inputs, labels = batch.pair()
        assert set(inputs) == {"input", "positions"} and labels is None  # the first stage computes no loss
        assert repr(batch).startswith("TorchBatch(input[")
        assert batch.to("cpu") is batch
        assert "segments of" in repr(batch.meta) and batch.meta.sample_ids[0].source
        assert batch.meta.image_rows.dtype == torch.int64
        with pytest.raises(ol.SpecError, match="chunk: 2 is not one of the 2 model chunks"):
            batch.chunk(2)


@pytest.mark.parametrize("given", [{}, {"address": "auto", "ranks_per_host": 8, "loader_hosts": 2}])
def test_words_for_a_cluster_are_passed_on_only_where_given(given, ids_job, monkeypatch):
    def launch(job, **options):
        assert {name: options[name] for name in given} == given
        assert all(options[name] is None for name in CLUSTER_KEYS if name not in given)
        raise ol.SpecError(f"launched on {options['runtime']}")

    monkeypatch.setattr("overlord.session.launch", launch)
    with pytest.raises(ol.SpecError, match="launched on ray"):
        next(iter(DataLoader(ids_job, runtime="ray", **given)))


def test_every_option_of_launch_is_passed_on(ids_job, monkeypatch, tmp_path):
    parameters = set(inspect.signature(ol.launch).parameters)

    def launch(job, **options):
        assert {name: options[name] for name in given} == given
        assert set(options) | {"job"} == parameters
        raise ol.SpecError("launched")

    given = {
        "shadows": "auto",
        "heartbeat": 2.5,
        "keep": 7,
        "threads": 3,
        "budget": ol.Budget(cpus=2),
        "state": "latest",
    }
    given |= {
        "store": str(tmp_path),
        "state": "latest",
        "scaling": True,
        "on_source_failure": "park",
        "reconcile": "allow_add",
    }
    given |= {"loaders_per_source": {"a": 2}, "metrics": 0, "placement": "loader", "skip_steps": 2, "profile": "p.json"}
    monkeypatch.setattr("overlord.session.launch", launch)
    with pytest.raises(ol.SpecError, match="launched"):
        next(iter(DataLoader(ids_job, **given)))
    with pytest.raises(ol.SpecError, match=r"launch: prefech: unknown key; .* Did you mean 'prefetch'\?"):
        DataLoader(ids_job, prefech=2)


def test_a_state_that_is_given_is_where_it_goes_on(ids_job, cache, tmp_path):
    where = {"runtime": "inline", "cache": cache}
    with DataLoader(ids_job, store=tmp_path, **where) as loader:
        steps = [step.index for _, step in zip(range(3), loader, strict=False)]
        state = loader.state_dict()
    with DataLoader(ids_job, state=state, **where) as loader:
        assert loader.state_dict() == state
        assert next(iter(loader)).index == steps[-1] + 1
    with DataLoader(ids_job, state=2, store=tmp_path, **where) as loader:
        assert json.loads(loader.state_dict()["stream"])["step"] == 2
        assert next(iter(loader)).index == 2


def test_a_job_file_is_launched_with_its_launch_section(ids_job, cache, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(ids_job, LaunchOptions(mesh="dp=2", layout="torchtitan", runtime="inline")))
    with DataLoader(str(path), rank=1, cache=cache) as loader:
        assert "input" in next(iter(loader)).microbatches[0]
    with DataLoader(path, mesh="tp=2", layout="hf", rank=1, cache=cache) as loader:
        assert "input_ids" in next(iter(loader)).microbatches[0]


def test_a_job_file_is_told_from_an_address_by_what_it_is(ids_job, cache, tmp_path):
    file = tmp_path / "address.json"  # what it holds counts, not its name
    with ol.launch(ids_job, cache=cache) as service:
        file.write_text(f"{service.address}\n")
        with DataLoader(file) as loader:
            assert next(iter(loader)).index == 0
        with pytest.raises(ol.SpecError, match=r"layout is 'hf', and unix://.* is a service that runs already"):
            DataLoader(service.address, layout="hf")
    for wrong in ("job", tmp_path / "no-address", 7):
        with pytest.raises(ol.SpecError, match=r"is not an ol.Job, not a job file .* not the address of a running"):
            DataLoader(wrong)
    with pytest.raises(ol.SpecError, match=f"Write 'unix://{tmp_path}'"):
        DataLoader(tmp_path)
    with pytest.raises(ol.SpecError, match=r"none.yaml: there is no such file"):
        DataLoader(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"tokenizer": "none.json"}, {}, "tokenizer: '.*none.json' is neither a tokenizer.json nor a folder with one"),
        ({}, {"loaders_per_source": {"no": 2}}, "loaders_per_source names 'no', which is no source"),
        ({}, {"scaling": True, "runtime": "inline"}, "scaling is given and runtime is 'inline'"),
    ],
)
def test_what_no_launch_could_run_is_refused_before_the_first_step(ids_job, tmp_path, change, options, message):
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(ids_job.replace(**change)))
    with pytest.raises(ol.SpecError, match=message):
        DataLoader(path, mesh="dp=2", **options)


def test_a_mesh_or_rank_that_cannot_be(ids_job, cache):
    with pytest.raises(ol.SpecError, match="2 is not a DeviceMesh"):
        DataLoader(ids_job, mesh=2)
    with pytest.raises(ol.SpecError, match="launch: mesh: mesh 'dq=2': unknown axis"):
        DataLoader(ids_job, mesh="dq=2")
    with pytest.raises(ol.SpecError, match="rank 2 is not in the mesh"):
        DataLoader(ids_job, mesh=ol.ClientPlaceTree(dp=2), rank=2)
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=2), cache=cache) as service:
        with pytest.raises(ol.SpecError, match="rank 5 is not in the mesh"):
            next(iter(DataLoader(service.address, rank=5)))
        with pytest.raises(ol.SpecError, match=r"mesh is .*tp=2, but the service at unix://.* serves .*dp=2"):
            next(iter(DataLoader(service.address, mesh=ol.ClientPlaceTree(tp=2))))


def test_the_state_names_the_first_step_that_was_not_trained_on(ids_job, cache):
    with DataLoader(ids_job, cache=cache, runtime="inline") as loader:
        steps = iter(loader)
        for _ in range(2):
            next(steps).microbatches[0]
        trained = loader.state_dict()
        ahead = [next(steps), next(steps)]  # fetched ahead, as trainers do
        assert loader.state_dict() == trained
        expected = [batch["input_ids"].tolist() for batch in ahead[0].microbatches]
        assert json.loads(loader.state_dict()["stream"])["step"] == 3
    with DataLoader(ids_job, cache=cache, runtime="inline") as loader:
        loader.load_state_dict(trained)
        assert [batch["input_ids"].tolist() for batch in next(iter(loader)).microbatches] == expected


def test_done_decides_once_it_is_called(ids_job, cache):
    with DataLoader(ids_job, cache=cache, runtime="inline") as loader:
        with pytest.raises(ol.SpecError, match=r"step 0 was not handed out \(none was\)"):
            loader.done(0)
        for _, step in zip(range(4), loader, strict=False):
            _ = step.microbatches[0]
        loader.done(1)
        assert json.loads(loader.state_dict()["stream"])["step"] == 2
        with pytest.raises(ol.SpecError, match=r"step 4 was not handed out \(the last one was 3\)"):
            loader.done(4)


def test_a_rank_that_takes_no_microbatches_counts_steps_that_were_handed_out(ids_job, cache):
    with DataLoader(ids_job, cache=cache, runtime="inline") as loader:
        for _ in zip(range(3), loader, strict=False):
            pass
        assert json.loads(loader.state_dict()["stream"])["step"] == 3


def test_a_stream_has_a_length_where_it_is_known(ids_job, cache):
    endless = DataLoader(ids_job, cache=cache, runtime="inline")
    with pytest.raises(TypeError, match="has no max_steps"):
        len(endless)
    assert endless
    two = ids_job.replace(max_steps=5, batch=ol.Batch(32, global_samples=11, microbatches=2, microbatch_tokens=2048))
    with DataLoader(two, cache=cache, runtime="inline") as loader:
        loader.set_epoch(3)
        flat = loader.flat(2)
        assert (len(loader), len(flat)) == (5, 10)
        batches = iter(flat)
        for _ in range(4):
            next(batches)["input_ids"]
        assert json.loads(flat.state_dict()["stream"])["step"] == 2
        next(batches)  # fetched, not used
        assert json.loads(flat.state_dict()["stream"])["step"] == 2
        assert len(list(batches)) == 5


def _flat(loader, steps):
    return [[token for rows in ids for row in rows for token in row] for _, ids in _tokens(loader, steps)]


def _take_in_a_group(rank, job, cache):
    """Take steps on processes 0 and 2 of three; return the tokens, by data parallelism and by a broadcast."""
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ol.SpecError, match="group does not contain this process"):
            DataLoader(job, group=group)
        return None
    found = []
    for mesh, axes in (("dp=2", ()), ("tp=2", ("TP",))):
        strategy = ol.strategies.backbone_balance(broadcast=axes)
        with DataLoader(job, mesh=mesh, group=group, strategy=strategy, cache=cache) as loader:
            found.append(_flat(loader, 2))
            dist.barrier(group)  # the first rank ends the service
    return found


@pytest.mark.slow
def test_only_the_processes_of_a_group_take_batches(ids_job, cache, tmp_path):
    first, none, last = run_ranks(_take_in_a_group, 3, tmp_path, ids_job, cache)
    assert none is None
    with DataLoader(ids_job, cache=cache, runtime="inline") as loader:
        whole = [sorted(one) for one in _flat(loader, 2)]
    for step in range(2):
        assert sorted(first[0][step] + last[0][step]) == whole[step]
        assert first[1][step] == last[1][step] and sorted(first[1][step]) == whole[step]


def test_errors_of_a_launch_name_the_line_of_a_source(tmp_path, cache):
    file = tmp_path / "job.yaml"
    file.write_text(
        "sources:\n  - {name: web, path: web.jsonl, sample: {text: ids, tokenized: true}}\n"
        "batch: {context_length: 8, global_samples: 1}\n"
    )
    wanted = rf"^{file}:2: source 'web': .* matches no file"
    with pytest.raises(SourceError, match=wanted), DataLoader(file, cache=cache, runtime="inline") as loader:
        next(iter(loader))
