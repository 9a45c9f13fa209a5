"""The front door: `launch` a service for a job, or `connect` to one that runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.specs import Job
from overlord.errors import SpecError, StateError
from overlord.roles.client import Client, is_whole
from overlord.runtimes.deployment import LaunchOptions
from overlord.runtimes.inline import InlineService
from overlord.runtimes.local import LocalService, connect_local
from overlord.runtimes.opening import Progress
from overlord.stores.checkpoints import CheckpointFolder

DEFAULT_CACHE = "~/.cache/overlord"


class Service:
    """A running data service. Close it, or use it as a context manager."""

    def __init__(self, runtime: InlineService | LocalService, mesh: ClientPlaceTree) -> None:
        self._runtime = runtime
        self.mesh = mesh

    @property
    def address(self) -> str | None:
        """Where other processes of this host attach (`ol.connect`); None for the inline runtime."""
        return self._runtime.address

    def client(self, rank: int = 0) -> Client:
        """Return the stream of one rank."""
        return self._runtime.client(rank)

    def status(self) -> dict[str, Any]:
        """Return roles, positions, buffers, and the planned and realised mixture."""
        return self._runtime.status()

    def close(self) -> None:
        """End the service; nothing of it is left behind."""
        self._runtime.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def launch(
    job: Job,
    *,
    mesh: ClientPlaceTree | None = None,
    runtime: Literal["local", "inline"] = "local",
    layout: Literal["hf"] = "hf",
    prefetch: int = 2,
    loaders_per_source: int = 1,
    threads: int | None = None,
    budget: int = 512 << 20,
    store: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] = DEFAULT_CACHE,
    state: Mapping[str, Any] | Literal["latest"] | None = None,
    progress: Progress | None = None,
) -> Service:
    r"""Start a service for a job and return it; everything that can be checked is checked first.

    Args:
        job: What to read and how to mix it.
        mesh: The trainer's mesh (default: one rank).
        runtime: "local": one service process, trainers attach from any process of this host.
            "inline": everything in this process, single-threaded, for tests and debugging.
        layout: The keys of a batch: "hf", what Hugging Face models take.
        prefetch: Steps built ahead of each trainer.
        loaders_per_source: SourceLoaders that share the groups of each source.
        threads: Threads for decoding (default: one per core of this host).
        budget: Bytes of samples and views held ahead of the trainers.
        store: Folder for the journal and snapshots (default: a temporary one).
        cache: Folder for the indices of files.
        state: What `client.state_dict()` returned; "latest" takes the newest snapshot of the store.
        progress: Called with (what, done, of) while sources are opened.

    Raises:
        SpecError: for what the user got wrong; nothing has run.

    Example:
        >>> import tempfile, pathlib, json
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> rows = [json.dumps({"ids": list(range(1, n))}) for n in range(3, 30)]
        >>> _ = (folder / "a.jsonl").write_text("\n".join(rows))
        >>> from overlord import Batch, Job, Source, Text
        >>> job = Job(sources=[Source("a", str(folder / "a.jsonl"), sample=Text("ids", tokenized=True))],
        ...           batch=Batch(64, global_samples=8))
        >>> with launch(job, runtime="inline", cache=str(folder / "cache")) as service:
        ...     step = next(service.client(rank=0))
        >>> step.index, step.global_samples
        (0, 8)
    """
    if not isinstance(job, Job):
        raise SpecError(f"launch: job is a {type(job).__name__}, not an ol.Job; there is nothing to read. Build one.")
    if mesh is not None and not isinstance(mesh, ClientPlaceTree):
        raise SpecError(f"launch: mesh is {mesh!r:.80}, not a mesh. Write ol.ClientPlaceTree(dp=2, tp=4).")
    _check_numbers(prefetch=prefetch, loaders_per_source=loaders_per_source, threads=threads, budget=budget)
    _check_folders(store=store, cache=cache)
    if layout != "hf":
        raise SpecError(f"launch: layout is {layout!r}; batches would have unknown keys. Use 'hf'.")
    runtimes: dict[str, type[InlineService] | type[LocalService]] = {"local": LocalService, "inline": InlineService}
    if not isinstance(runtime, str) or runtime not in runtimes:
        raise SpecError(f"launch: runtime is {runtime!r}; nothing could run. Use {' or '.join(map(repr, runtimes))}.")
    tree = mesh or ClientPlaceTree()
    options = LaunchOptions(
        mesh=tree,
        prefetch=int(prefetch),
        loaders_per_source=int(loaders_per_source),
        threads=int(threads or os.cpu_count() or 1),
        budget_bytes=int(budget),
        store=None if store is None else str(Path(store).absolute()),
        cache=str(Path(cache).expanduser().absolute()),
        state=_resolve_state(state, store),
    )
    return Service(runtimes[runtime](job, options, progress), tree)


def connect(address: str, rank: int) -> Client:
    """Attach to a service of this host as one rank, from any process.

    Args:
        address: What `service.address` or `overlord serve` shows.
        rank: The trainer's global rank in the service's mesh.
    """
    return connect_local(address, rank)


def _check_numbers(**given: int | None) -> None:
    for name, value in given.items():
        if name == "threads" and value is None:
            continue
        if not is_whole(value) or int(value or 0) < 1:
            raise SpecError(
                f"launch: {name} is {value!r:.80}; nothing could run with it. Give a whole number of at least 1, or "
                "leave it out."
            )


def _check_folders(**given: str | os.PathLike[str] | None) -> None:
    for name, value in given.items():
        if not isinstance(value, (str, os.PathLike)) and not (name == "store" and value is None):
            raise SpecError(f"launch: {name} is {value!r:.80}, not a folder; nothing could be kept. Give a path.")


def _resolve_state(
    state: Mapping[str, Any] | Literal["latest"] | None, store: str | os.PathLike[str] | None
) -> Mapping[str, Any] | None:
    if state != "latest":
        if isinstance(state, str):
            raise StateError(f"state is {state!r}; pass what client.state_dict() returned, or 'latest' with store=.")
        return state
    newest = CheckpointFolder(Path(store)).newest() if store is not None else None
    if newest is None:
        raise StateError(
            f"state='latest', but the store {str(store)!r} holds no snapshot; there is nothing to resume. Launch "
            "without state to begin."
        )
    return newest
