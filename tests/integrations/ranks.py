"""Real processes that train together: each a rank of one gloo group."""

from __future__ import annotations

import datetime
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

PATIENCE = datetime.timedelta(seconds=60)
# All ranks of all tests are forked from one process that has torch already.
multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed", "torch.distributed.fsdp", "overlord.integrations.torch_hdp", "ranks"]
)


def run_ranks(work: Callable[..., Any], world: int, folder: Path, *args: Any) -> list[Any]:
    """Run `work(rank, *args)` on ranks 0 to world - 1 of a process group; return what each returned."""
    folder.mkdir(parents=True, exist_ok=True)
    started = processes.start_processes(
        _one_rank, (work, world, str(folder), args), world, join=False, start_method="forkserver"
    )
    while not started.join(timeout=1):
        pass  # raises what a rank raised
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _one_rank(rank: int, work: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", PATIENCE, world, rank)
    torch.save(work(rank, *args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
