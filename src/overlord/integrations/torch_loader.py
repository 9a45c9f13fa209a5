"""Steps as torch tensors: `DataLoader`, with `state_dict` and `load_state_dict` as checkpointers expect them."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import is_whole, name_choices
from overlord.errors import ClosedError, PlanError, ServiceLost, SpecError, StateError
from overlord.integrations.metric_writers import StepLog
from overlord.integrations.torch_batches import (
    Ahead,
    Copies,
    FlatBatch,
    StepProgress,
    TorchBatch,
    TorchMeta,
    TorchMicrobatches,
    TorchStep,
    copies_to,
    device_of,
    exchange_images,
    normalize_pixels,
)
from overlord.integrations.torch_broadcast import Channel, FetchingRanks, Relay, Sharing, open_channel, share_outcome
from overlord.roles.client import Client, Step
from overlord.runtimes.client_feed import check_state_at, connect, refuse_torch_workers

if TYPE_CHECKING:  # a loader of a running service needs nothing of what launches one
    from overlord.job.layout_specs import Layout
    from overlord.job.specs import Job
    from overlord.job_files import JobFile
    from overlord.launch_spec import Launch
    from overlord.session import Service

__all__ = [
    "DataLoader",
    "TorchBatch",
    "TorchMeta",
    "TorchMicrobatches",
    "TorchStep",
    "exchange_images",
    "normalize_pixels",
]

logger = logging.getLogger("overlord")

MOST_AHEAD = 16
"""Steps that a trainer may fetch before it trains on them, at most."""


class DataLoader:
    """The stream of this rank as torch tensors.

    Give it a job or a job file, and the service is launched at the first step (by rank 0 of the process group, if there
    is one); or give it the address of a running service (`overlord serve`), which `torchrun` ranks share.

    Where a strategy broadcasts (`broadcast_at`), the loader does it: all ranks of a group get the microbatches that one
    of them fetches, along DP each rank its own. They must then take the same steps. On a CUDA device the next
    microbatch is fetched and copied while one is in use.

    It is a `Stateful` of torch.distributed.checkpoint: `dcp.save({"data": loader}, ...)`, and `dcp.load` into a new one
    on any number of ranks. Its state names the first step that was not trained on, also where the trainer fetches steps
    ahead: a step counts from its first microbatch on, or, once `done` is called, when it is done.

    Example:
        A training loop::

            loader = DataLoader(job, mesh=mesh)         # a ClientPlaceTree, or torch's DeviceMesh
            for step in loader:
                for batch in step.microbatches:
                    loss = model(**batch).loss
            dcp.save({"model": model.state_dict(), "data": loader}, checkpoint_id="checkpoint")
    """

    def __init__(
        self,
        job: Job | str | os.PathLike[str],
        *,
        mesh: ClientPlaceTree | Mapping[str, Any] | str | Any = None,
        rank: int | None = None,
        device: torch.device | str | None = None,
        group: Any = None,
        **options: Any,
    ) -> None:
        """Say what to read; nothing is started yet.

        Args:
            job: What to read and how to mix it: an `ol.Job`, or the path of a job file, with a `launch` section for
                the defaults of all options. Or the address of a service that runs, or the file that `overlord serve
                --address-file` wrote.
            mesh: The trainer's mesh: a ClientPlaceTree, text such as "dp=2,tp=2", or a DeviceMesh of all ranks with
                names (default: one rank, or the mesh of the service).
            rank: This process's rank in the mesh (default: its rank in the process group, which may be made after the
                loader, before its first step).
            device: Where batches go: "cpu" or a CUDA device. By default this process's CUDA device if the process group
                uses NCCL, else "cpu".
            group: The process group whose processes are the ranks of the mesh, where not all processes take batches;
                only those make a DataLoader then (default: all processes).
            **options: The arguments of `overlord.launch`: strategy, layout, runtime, prefetch, store, cache, shadows
                and so on. Several processes share a "local" or a "ray" service. With `state` the loader begins as
                `load_state_dict` would let it.

        Raises:
            SpecError: for a job file, mesh, rank, device or option that cannot be.
        """
        self._job = _job_or_address(job)
        plain = mesh is None or isinstance(mesh, (ClientPlaceTree, Mapping, str))
        self._device_mesh = None if plain else mesh
        tree = mesh if plain else ClientPlaceTree.from_device_mesh(mesh)
        self._launch_options: Launch | None = None
        if isinstance(self._job, str):
            _refuse_options(self._job, options)
            # The service's mesh, once attached, where none is given.
            self._mesh: ClientPlaceTree | None = None if tree is None else ClientPlaceTree.of(tree)
        else:
            self._launch_options = self._job.call(options | {"mesh": tree})
            self._mesh = self._launch_options.mesh
        self._inline = self._launch_options is not None and self._launch_options.runtime == "inline"
        given_state = None if self._launch_options is None else self._launch_options.state
        self._state_given = given_state is not None
        self.group = group
        """The process group of the ranks of the mesh; None for all processes."""
        self._given_rank, self._rank = rank, 0 if rank is None else rank
        self._given_device, self._device = device, device_of(device)
        self._world = 0
        """Processes that take batches, as the process group or torchrun tell it; 0 without."""
        self._grouped = self._shared = False
        """Whether this process is in a process group, and with others that share its service."""
        if self._mesh is not None:
            self._mesh.coords(self._rank)
        if group is not None or (dist.is_available() and dist.is_initialized()):
            self._find_rank()
        if self._launch_options is not None and not self._shared:  # ranks that share a service fail together, later
            from overlord.session import service_options

            service_options(cast("JobFile", self._job).job, self._launch_options.model_copy(update={"state": None}))
        self._state: Mapping[str, Any] | None = None
        self._step: int | None = None
        self._closed = False
        self._service: Service | None = None
        self._client: Client | None = None
        self._copies: Copies | None = None
        self._axes: tuple[str, ...] | None = None
        self._channel: Channel | None = None
        self._same: Any = None
        """The process group of the ranks that get the same microbatches by broadcast."""
        self._relay: Relay | None = None
        self._handed_out: deque[StepProgress] = deque(maxlen=MOST_AHEAD)
        self._done: int | None = None
        self._log: StepLog | None = None
        self._waited_s = 0.0
        if isinstance(given_state, Mapping):
            self.load_state_dict(given_state)

    def _find_rank(self) -> None:
        """Find out which rank this process is; at the latest when it attaches: trainers may make the group after it."""
        if self._grouped:
            return
        grouped = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size(self.group) if grouped else 0
        if world < 0 or (self.group is not None and not world):
            raise SpecError(
                "DataLoader: group does not contain this process, which would take the batches of another rank. Make a "
                "DataLoader on the processes of the group only."
            )
        rank = self._given_rank
        if rank is None:
            rank, world = (dist.get_rank(self.group), world) if world else self._place_of_environment()
        if self._mesh is not None:
            if world:
                self._mesh.check_world_size(world)
            self._mesh.coords(rank)
        if world > 1 and self._inline:
            raise SpecError(
                "DataLoader: runtime is 'inline', which lives in one process, but the process group has "
                f"{world}; they would each read a stream of their own. Use runtime='local' or 'ray'."
            )
        self._rank, self._world, self._grouped = rank, world, grouped
        self._shared = grouped and world > 1
        self._device = device_of(self._given_device)

    def _place_of_environment(self) -> tuple[int, int]:
        """Return rank and number of processes without a process group, as torchrun tells them; (0, 0) without it."""
        rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if not world.isdecimal() or int(world) < 2:
            return 0, 0
        if isinstance(self._job, str) and rank.isdecimal():
            return int(rank), int(world)
        raise SpecError(
            f"DataLoader: the environment says WORLD_SIZE={world} and RANK={rank}, but this process is in no process "
            "group, without which processes cannot share a service; each would take the batches of rank 0. Call "
            "torch.distributed.init_process_group(..) before the first step, or give the address of `overlord serve` "
            "and rank=; or rank=0 if only this process takes batches."
        )

    def __iter__(self) -> Iterator[TorchStep]:
        refuse_torch_workers("DataLoader")
        while True:
            with self._waiting("overlord.step"):
                step = self._next_step()
            if step is None:
                return
            self._handed_out.append(step.progress)
            step.take = self._timed(step.take)
            yield step
            if self._log is not None:
                self._log.write(step, self._waited_s)
            self._waited_s = 0.0

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Count the time as waiting for data, and name it in torch's profiler."""
        began = time.perf_counter()
        with torch.profiler.record_function(what):
            yield
        self._waited_s += time.perf_counter() - began

    def _timed(self, take: Callable[[int], TorchBatch]) -> Callable[[int], TorchBatch]:
        def timed(index: int) -> TorchBatch:
            with self._waiting("overlord.microbatch"):
                return take(index)

        return timed

    def log_to(self, writer: Any, *, every: int = 1, prefix: str = "data/") -> DataLoader:
        """Write figures of the data after every step: how long it was waited for, its size, the mixture as it changes.

        Call it on one rank. The waits are those of this rank; `service.history()` and `overlord top` have all.

        Args:
            writer: A W&B run (or the module), a TensorBoard SummaryWriter, anything with `log(figures, step)`, or such
                a function.
            every: Steps between two writes.
            prefix: In front of every name, such as "data/wait_s".

        Returns:
            This loader.

        Raises:
            SpecError: Nothing can be written with the writer.
        """
        self._log = StepLog(writer, every, prefix)
        return self

    @property
    def mesh(self) -> ClientPlaceTree:
        """The trainer's mesh; that of a running service is known once the loader has attached, which this does."""
        if self._mesh is None:
            self._attached()
        assert self._mesh is not None
        return self._mesh

    @property
    def rank(self) -> int:
        """The rank of this process in the mesh."""
        if self._client is None:
            self._find_rank()
        return self._rank

    @property
    def job(self) -> Job | None:
        """The job; None where the loader attaches to a service that runs."""
        return None if isinstance(self._job, str) else self._job.job

    @property
    def layout(self) -> Layout | None:
        """The layout of its batches; None where the loader attaches to a service that runs."""
        return None if self._launch_options is None else self._launch_options.layout

    @property
    def dashboard(self) -> str | None:
        """Where the live page is (`dashboard=PORT`), on the rank that launched the service, from the first step on."""
        return None if self._service is None else self._service.dashboard

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        if self._client is None:
            self._find_rank()
        return self._device

    def __len__(self) -> int:
        """Return the steps of the whole stream, where the job has `max_steps`.

        Raises:
            TypeError: The job has no `max_steps`, or belongs to a service that runs; as for other endless iterables.
        """
        most = None if self.job is None else self.job.max_steps
        if most is None:
            raise TypeError(
                "the length of this stream is not known: its job has no max_steps. Iterate over the loader itself; "
                "torch.utils.data.DataLoader cannot take it as a dataset"
            )
        return most

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the stream knows its epochs, and shuffles each of them anew. Trainers call this."""

    def flat(self, microbatches: int) -> FlatLoader:
        """Return this loader as an iterable of microbatches, for trainers that accumulate a fixed number of them.

        Args:
            microbatches: How many the trainer accumulates for an optimizer step; `batch.microbatches` of the job.

        Raises:
            SpecError: The job does not promise that number in every step.
        """
        if isinstance(self._job, str):
            raise SpecError(
                f"flat: microbatches is {microbatches!r:.80}, and {self._job} is a running service; whether its steps "
                "have that number is not known. Give the job or the job file to the DataLoader."
            )
        promised = self._job.job.batch.microbatches
        if promised != microbatches:
            found = "is not set, so the number may change from step to step" if promised is None else f"is {promised}"
            raise SpecError(
                f"flat: microbatches is {microbatches!r:.80}, and batch.microbatches of the job {found}; the trainer "
                f"would mix the microbatches of several steps. Set batch.microbatches to {microbatches!r:.80}."
            )
        return FlatLoader(self, microbatches)

    def done(self, step: int) -> None:
        """Say that a step was trained on; from now on the state names the step after the last one reported here.

        Only needed where a trainer fetches microbatches ahead and uses them before it trains on them, as a copy to the
        device does.

        Raises:
            SpecError: The step was not handed out.
        """
        last = self._handed_out[-1].index if self._handed_out else None
        if not is_whole(step, 0) or last is None or step > last:
            found = "none was" if last is None else f"the last one was {last}"
            raise SpecError(
                f"done: step {step!r:.80} was not handed out ({found}); a run that is resumed would lose steps. Give "
                "step.index of a step that was trained on."
            )
        self._done = step

    def state_dict(self) -> dict[str, Any]:
        """Return the state before the first step that was not trained on: one text, the same for any rank and mesh.

        Before the first step it is the state that was loaded, or that of a stream that has not begun; no service is
        launched for it.
        """
        if self._client is None:
            self._refuse_closed("state_dict")
        asked = self._state_given and self._step is None  # of the store, which knows it
        begun = self._client is not None or asked or (isinstance(self._job, str) and self._state is None)
        return {"stream": json.dumps(self._attached().state_dict(self._first_untrained()) if begun else self._state)}

    def _first_untrained(self) -> int | None:
        """Return the first step handed out that was not trained on; None if all were."""
        if self._done is not None:
            return self._done + 1
        ahead: int | None = None
        for one in reversed(self._handed_out):
            if one.used:
                return ahead
            ahead = one.index
        return None  # this rank takes no microbatches at all, as stages of a pipeline that need none

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: what `state_dict()` returned, or a client's; on every rank, before the next step.

        A loader of a running service goes to the state's step there, as `ol.connect(address, rank, step=..)` does: with
        its next step it waits until all ranks have asked for the same one.

        Raises:
            StateError: It is not a state of this stream; for a running service that is found out at once.
        """
        stream = _stream_of(state)
        if isinstance(self._job, str) and stream is not None:
            check_state_at(self._job, stream)
        self.close()
        self._handed_out.clear()
        self._done = None
        self._state, self._closed = stream, False
        self._step = 0 if stream is None else int(stream["step"])

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report metrics of a step; call it on one rank."""
        if self._client is None:
            self._refuse_closed("report")
            self._find_rank()
        if self._client is None and self._shared:
            raise SpecError(
                f"report: step {step!r:.80} is reported before this loader's first step; there is no service that "
                "could take it, and launching one needs all ranks. Report steps that were handed out."
            )
        self._attached().report(step, metrics)

    def close(self) -> None:
        """Detach, and end the service if this loader started it; it does not wait for other ranks."""
        copies, client, service = self._copies, self._client, self._service
        self._copies = self._client = self._service = None
        self._axes = self._channel = self._relay = self._same = None
        self._closed = True
        with ExitStack() as ends:  # each is closed even if another fails; the last one first
            for one in (service, client, copies):
                if one is not None:
                    ends.callback(one.close)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- attaching -----------------------------------------------------------------------------

    def _attached(self) -> Client:
        if self._client is None:
            self._refuse_closed("DataLoader")
            self._find_rank()
            self._client = self._attach()
            self._warn_of_ranks_without_process()
            # The inline runtime has one thread only: this one.
            self._copies = copies_to(self._device, ahead=not self._inline)
        return self._client

    def _attach(self) -> Client:
        if isinstance(self._job, str):
            return self._connect(self._job)
        if self._shared:
            launches = dist.get_rank(self.group) == 0
            return connect(share_outcome(self._launch if launches else None, self.group), self._rank)
        self._launch()
        assert self._service is not None
        return self._service.client(self._rank)

    def _launch(self) -> str:
        from overlord.session import launch

        job, given = cast("JobFile", self._job), cast("Launch", self._launch_options)
        options = {name: getattr(given, name) for name in given.known_keys()}
        if self._step is not None:  # a state was loaded
            options["state"] = self._state
        with job.located():
            self._service = launch(job.job, **options | {"mesh": self._mesh})
        return self._service.address or ""

    def _connect(self, address: str) -> Client:
        """Attach to a running service, and use its mesh."""
        client = connect(address, self._rank, self._step, self._state)
        self._step = self._state = None  # from now on the client knows
        try:
            found = client.mesh
            if self._mesh is not None and not _alike(self._mesh, found):
                raise SpecError(
                    f"DataLoader: mesh is {self._mesh}, but the service at {address} serves {found}; ranks would get "
                    "the data of others. Give the mesh that the service was launched with, or leave it out."
                )
            if self._world > 1:
                found.check_world_size(self._world)
            self._mesh = found
        except BaseException:
            client.close()
            raise
        return client

    def _warn_of_ranks_without_process(self) -> None:
        if self._given_rank is None and self._world < 2 and self.mesh.world_size > 1:
            logger.warning(
                "DataLoader: the mesh %s has %d ranks, and this is one process: it takes the "
                "batches of rank 0, and no process takes the others. Start a process for each rank (torchrun), or give "
                "rank=0 if that is meant.",
                self.mesh,
                self.mesh.world_size,
            )

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise ClosedError(
                f"{what}: this loader is closed, and its position in the stream is lost. Take the state before you "
                "close it, and load it into a loader to continue."
            )

    # -- steps ---------------------------------------------------------------------------------

    def _next_step(self) -> TorchStep | None:
        if self._relay is not None:
            self._relay.finish()
            self._relay = None
        step = next(self._attached(), None) if self._axes is not None else self._first_step()
        if step is None:
            return None
        assert self._copies is not None
        self._follow_mesh(step)
        if self._channel is not None or self._shared:
            self._check_fetches(step)
        names, copies = step.source_names, self._copies
        if self._channel is None and copies.stream is None:
            return TorchStep(step)

        def flat_encoder(which: int) -> FlatBatch | None:
            found = (step.encoder, step.audio_encoder)[which]
            return None if found is None else copies.send(found)

        def encode(which: int) -> TorchBatch | None:
            flat = encoded.take(which)
            return None if flat is None else flat.batch(names, step.place)

        encoded = Ahead(flat_encoder, 2, copies.pool)
        if self._channel is None:
            count = len(step.microbatches) if step.fetches else 0
            fetched = Ahead(lambda at: copies.send(step.microbatches.take(at)), count, copies.pool)
            return TorchStep(step, lambda at: fetched.take(at).batch(names, step.place), encode)
        sharing = Sharing.of(step)

        def flat_batch(number: int) -> FlatBatch:
            bucket, microbatch = sharing.order[number]
            return copies.send(step.fetched[bucket].take(microbatch))

        fetch = Ahead(flat_batch, len(sharing.order), copies.pool).take if step.fetches else None
        self._relay = relay = Relay(self._channel, copies, (step.index, sharing, names, step.place), fetch)
        return TorchStep(step, relay.take, encode, self._same)

    def _first_step(self) -> Step | None:
        """Take the first step, and agree with all ranks on which ranks fetch."""
        step, failure = None, None
        try:
            step = next(self._attached(), None)
        except Exception as error:  # raised after the other ranks know: they would wait for this one
            failure = error
        axes: tuple[str, ...] = ()
        if self._shared:  # all ranks gather: one that was refused must tell those that would wait for it
            fetching = FetchingRanks(self._mesh, self._rank, step, failed=failure is not None, group=self.group)
            if fetching.failed and failure is None:
                failure = ServiceLost(
                    f"rank {fetching.failed[0]} could not take the first step, so no step can be trained on. Its own "
                    "message says why."
                )
            axes = fetching.axes
            if axes and failure is None:
                stream = cast("Copies", self._copies).stream
                self._channel, self._same = open_channel(fetching, self._device_mesh, stream)
        if failure is not None:
            raise failure
        self._axes = axes
        return step

    def _follow_mesh(self, step: Step) -> None:
        """Continue with the mesh of a step; not possible while ranks broadcast in groups of an older one."""
        if self._mesh is None or step.mesh == self._mesh:
            return
        if self._channel is not None:
            raise PlanError(
                f"from step {step.index} on the mesh is {step.mesh}, and this loader broadcasts in the groups of "
                f"{self._mesh}; ranks would get the data of others. Close it before that step, and make another "
                "DataLoader on the process groups of the new mesh."
            )
        self._mesh = step.mesh

    def _check_fetches(self, step: Step) -> None:
        if self._mesh is not None and step.fetches != self._mesh.fetches(self._rank, self._axes or ()):
            first = f"along {', '.join(axis.upper() for axis in self._axes)}" if self._axes else "nowhere"
            raise PlanError(
                f"step {step.index} is broadcast along other axes than the first step, which was {first}; ranks would "
                "wait for each other. Let the strategy call broadcast_at alike in every step."
            )


class WrappedLoader:
    """A `DataLoader` whose steps are handed out in another form; length and state are those of the loader."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        """Return the steps of the whole stream, where the job has `max_steps`; else raise TypeError."""
        return len(self.loader)

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, as `DataLoader.set_epoch`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state before the first step that was not trained on, as `DataLoader.state_dict` does."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, as `DataLoader.load_state_dict` does."""
        self.loader.load_state_dict(state)


class FlatLoader(WrappedLoader):
    """The microbatches of a `DataLoader`, one after the other: for trainers without a notion of steps.

    A step counts as trained on from the first value that is taken out of one of its microbatches: microbatches that the
    trainer fetched ahead do not count.
    """

    def __init__(self, loader: DataLoader, microbatches: int) -> None:
        super().__init__(loader)
        self.microbatches = microbatches
        """Of every step."""

    def __iter__(self) -> Iterator[TorchBatch]:
        for step in self.loader:
            for number in range(self.microbatches):
                batch = step.take(number)
                batch.step, batch.on_use = step, step.progress.use
                yield batch

    def __len__(self) -> int:
        """Return the microbatches of the whole stream, where the job has `max_steps`; else raise TypeError."""
        return self.microbatches * len(self.loader)


def loader_with_layout(
    what: str, job: Job | str | os.PathLike[str], needed: Mapping[str, Any], **options: Any
) -> DataLoader:
    """Return a loader whose layout has what a trainer needs; its other fields are those of the job file or the call.

    Args:
        what: The trainer, for messages.
        job: As `DataLoader` takes it; a service that runs already has its layout.
        needed: Fields of the layout.
        **options: Of the loader.

    Raises:
        SpecError: A field was set to something else, which the trainer could not take.
    """
    found = DataLoader(job, **options).layout
    if found is None:
        raise SpecError(
            f"{what}: {job} is a running service, whose layout and microbatches are not known here; batches might not "
            "have the shape that the trainer takes. Give the job or the job file."
        )
    usual = type(found)()
    for name, value in needed.items():
        given = getattr(found, name)
        if given not in (getattr(usual, name), value):
            raise SpecError(
                f"{what}: layout.{name} is {given!r}, and this trainer takes {value!r}; it would misread the batches. "
                f"Leave layout.{name} out."
            )
    return DataLoader(job, **options | {"layout": found.replace(**needed)})


def _job_or_address(given: object) -> JobFile | str:
    """Return the job, or the address of a running service, by what is given: a job, a path, or an address.

    Raises:
        SpecError: It is neither.
    """
    if isinstance(given, str) and given.startswith("unix://"):
        return given
    path = Path(given) if isinstance(given, (str, os.PathLike)) else None
    if path is not None and path.is_file():
        with path.open("rb") as file:
            if file.read(7) == b"unix://":  # what `overlord serve --address-file` wrote
                return str(path)
    from overlord.job.specs import Job
    from overlord.job_files import SUFFIXES, JobFile, load_job_file

    if isinstance(given, Job):
        return JobFile(given)
    if path is not None and path.suffix in SUFFIXES:
        return load_job_file(path)
    remedy = f" Write 'unix://{path.absolute()}' if it is the folder of a service." if path and path.is_dir() else ""
    raise SpecError(
        f"DataLoader: {given!r:.200} is not an ol.Job, not a job file (its name ends in {name_choices(SUFFIXES)}), and "
        "not the address of a running service ('unix://..', or the file of `overlord serve --address-file`, which goes "
        f"when the service ends); there is nothing to read.{remedy}"
    )


def _refuse_options(address: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise SpecError(
                f"DataLoader: {name} is {value!r:.80}, and {address} is a service that runs already; it would have no "
                "effect. Give it where the service is launched (`overlord serve`, ol.launch), or leave it out."
            )


def _alike(one: ClientPlaceTree, other: ClientPlaceTree) -> bool:
    """Whether all ranks have the same places in two meshes."""
    return np.array_equal(one.grid(), other.grid())


def _stream_of(state: object) -> Mapping[str, Any] | None:
    """Return the stream's own state out of what `state_dict()` returned; None for a stream that has not begun."""
    found: Any = state
    if isinstance(state, Mapping) and set(state) == {"stream"}:
        try:
            found = json.loads(state["stream"])
        except (TypeError, ValueError):
            found = ()
        if found is None:
            return None
    if not isinstance(found, Mapping) or "version" not in found:
        raise StateError(
            f"load_state_dict: {state!r:.80} is not a state of overlord; resuming from it would start an unknown "
            "stream. Pass what state_dict() of a DataLoader or a client returned."
        )
    return found
