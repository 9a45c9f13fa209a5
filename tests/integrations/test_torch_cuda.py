"""On a CUDA device: what arrives by the side stream is what the host has, also by broadcast and for slow readers."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import overlord as ol
from overlord.integrations.torch_batches import DeviceCopies
from overlord.integrations.torch_broadcast import Channel, Relay, Sharing
from overlord.integrations.torch_loader import DataLoader, exchange_images
from overlord.roles.client import Batch, RankView

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(240),
]

STEPS = 3


def facts_of(batch: Any, device: str) -> dict[str, Any]:
    """All tensors of a batch, by their values; on the device they should be on."""
    host = ("send_splits", "recv_splits")
    found = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    assert all(value.device.type == ("cpu" if key in host else device) for key, value in found.items())
    assert batch.meta.image_rows.device.type == batch.meta.image_positions.device.type == device
    found |= {"rows": batch.meta.image_rows, "positions": batch.meta.image_positions}
    listed = {key: (str(value.dtype), value.tolist()) for key, value in found.items()}
    return listed | {"samples": [str(sample) for sample in batch.meta.sample_ids]}


def steps_of(job: ol.Job, device: str, **options: Any) -> list[Any]:
    found = []
    with DataLoader(job, device=device, **options) as loader:
        for _, step in zip(range(STEPS), loader, strict=False):
            encoder = None if step.encoder is None else facts_of(step.encoder, device)
            found.append((encoder, [facts_of(batch, device) for batch in step.microbatches]))
    return found


@pytest.mark.parametrize("runtime", ["local", "inline"])
@pytest.mark.parametrize("strategy", ["backbone_balance", "vlm_hybrid"])
def test_the_device_gets_what_the_host_has(runtime, strategy, mixed_job, cache):
    options = {"cache": cache, "runtime": runtime, "strategy": getattr(ol.strategies, strategy)()}
    expected = steps_of(mixed_job, "cpu", **options)
    assert steps_of(mixed_job, "cuda", **options) == expected
    assert any("pixel_values" in (encoder or batches[0]) for encoder, batches in expected)


def test_any_order_and_a_closed_loader(mixed_job, cache):
    loader = DataLoader(mixed_job, device="cuda", cache=cache)
    steps = iter(loader)
    step = next(steps)
    count = len(step.microbatches)
    forth = [facts_of(batch, "cuda") for batch in step.microbatches]
    back = [facts_of(step.microbatches[at], "cuda") for at in reversed(range(count))]
    assert back == forth[::-1]
    batch, state = next(steps).microbatches[0], loader.state_dict()
    loader.close()
    loader.close()
    assert facts_of(batch, "cuda")  # the batch is the trainer's own
    with DataLoader(mixed_job, device="cuda", cache=cache) as other:
        other.load_state_dict(state)
        assert next(iter(other)).index == 2


def test_a_slow_reader_finds_what_it_took():
    """Kernels that run long after the batch is dropped must not see the next ones in its memory."""
    copies, size = DeviceCopies(torch.device("cuda", 0), ahead=True), 1 << 20
    own, sums = torch.cuda.Stream(), []
    with torch.cuda.stream(own):
        for number in range(30):
            arrays = {"input_ids": np.full(size, number), "meta.origin": np.zeros((5, 1), np.int64)}
            batch = copies.send(Batch(RankView(arrays, {}), ("a",))).batch(("a",))
            torch.cuda._sleep(2_000_000)
            sums.append(batch["input_ids"].sum())
            del batch
    torch.cuda.synchronize()
    assert [int(one) for one in sums] == [number * size for number in range(30)]
    copies.close()


@pytest.fixture
def nccl(tmp_path):
    where = f"file://{tmp_path}/ranks"
    dist.init_process_group("nccl", init_method=where, rank=0, world_size=1, timeout=datetime.timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_by_nccl_buffers_go_by_the_device(mixed_job, cache):
    copies = DeviceCopies(torch.device("cuda", 0), ahead=False)
    channel = Channel(None, 0, copies.stream)
    assert channel.is_on_device(copies.device) and not channel.is_on_device(torch.device("cpu"))
    assert channel.broadcast_message(b"x" * 100_000) == b"x" * 100_000
    arrays = {"input_ids": np.arange(9), "meta.origin": np.zeros((5, 1), np.int64)}

    def fetch(number: int) -> Any:
        return copies.send(Batch(RankView(arrays, {"number": number}), ("a",)))

    relay = Relay(channel, copies, (0, Sharing({0: 3}, 0), ("a",), None), fetch)
    assert relay.take(1)["number"] == 1 and relay.take(0)["input_ids"].tolist() == list(range(9))
    relay.finish()
    with DataLoader(mixed_job, strategy=ol.strategies.vlm_hybrid(), cache=cache) as loader:  # the group says: CUDA
        step = next(iter(loader))
        assert step.microbatches[0]["input_ids"].device == torch.device("cuda", torch.cuda.current_device())
        rows = torch.randn(int(step.encoder["image_grid_thw"].prod(1).sum()), 4, device="cuda", requires_grad=True)
        exchange_images(rows, step.encoder).sum().backward()
        assert rows.grad is not None


def rank_main(rank: int, folder: str, job: ol.Job, cache: str) -> None:
    where = f"file://{folder}/ranks"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    strategy = ol.strategies.backbone_balance(broadcast=["TP"])
    found = []
    with DataLoader(job, mesh=ol.ClientPlaceTree(tp=2), strategy=strategy, device="cuda:0", cache=cache) as loader:
        for _, step in zip(range(STEPS), loader, strict=False):
            found.append((None, [facts_of(batch, "cuda") for batch in step.microbatches]))
        dist.barrier()
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def test_two_ranks_of_one_device_share_by_the_host(mixed_job, cache, tmp_path):
    processes.spawn(rank_main, (str(tmp_path), mixed_job, cache), nprocs=2)
    strategy = ol.strategies.backbone_balance(broadcast=["TP"])
    expected = steps_of(mixed_job, "cpu", mesh=ol.ClientPlaceTree(tp=2), rank=0, strategy=strategy, cache=cache)
    for rank in range(2):
        assert pickle.loads((tmp_path / f"{rank}.pkl").read_bytes()) == expected
