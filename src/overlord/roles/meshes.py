"""Which mesh every step has: that of the launch, until a change of the running job gives another.

Rules of this file:
1. A mesh holds from a step that was not planned yet, so where a rank stands at a step never changes.
2. A rank that a mesh does not have is done at its first step; one that only a later mesh has begins there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from overlord.core.place_tree import ClientPlaceTree
from overlord.roles.inputs import InputLog


class Meshes:
    """The meshes of one stream, step by step.

    Example:
        Four ranks become two at step 10, and eight at step 20::

            meshes.at(9).dp, meshes.at(10).dp
            (4, 2)
            meshes.begin_of(1), meshes.begin_of(3), meshes.begin_of(8)
            (0, 20, None)
    """

    def __init__(self, launched: ClientPlaceTree, first_step: int, inputs: InputLog) -> None:
        self._launched = launched
        self._first_step = first_step
        self._inputs = inputs

    def at(self, step: int) -> ClientPlaceTree:
        """Return the mesh of a step."""
        return self._inputs.mesh_at(step) or self._launched

    @property
    def newest(self) -> ClientPlaceTree:
        """The mesh behind all changes so far."""
        return self.eras()[-1][1]

    def after(self, step: int) -> tuple[int, ClientPlaceTree] | None:
        """Return the next change behind a step: from where it holds, and the mesh; None if none is known."""
        return next(((begin, tree) for begin, tree in self.eras() if begin > step), None)

    def eras(self) -> list[tuple[int, ClientPlaceTree]]:
        """Return from which step on each mesh holds, in order; the first from the first step of the stream."""
        later = [(begin, tree) for begin, tree in self._inputs.meshes() if begin > self._first_step]
        return [(self._first_step, self.at(self._first_step)), *later]

    def begin_of(self, rank: int) -> int | None:
        """Return where a rank that attaches now begins; None for one that no mesh has.

        At the first step if it was always there; else at the step from which on it is there, for the last time if it
        came and went.
        """
        begin, there = None, False
        for step, tree in self.eras():
            if rank < tree.world_size and not there:
                begin = step
            there = rank < tree.world_size
        return begin if rank >= 0 else None

    def passed(self, reached: Mapping[int, int], attached: Collection[int]) -> int:
        """Return the step before which all ranks are done that ever attached, each where a mesh has it.

        Args:
            reached: For every rank that ever attached, the step before which it is done.
            attached: Those that are attached now.
        """
        done, eras = self._first_step, self.eras()
        for number, (begin, tree) in enumerate(eras):
            came = {rank: at for rank, at in reached.items() if rank < tree.world_size and (at >= begin or not number)}
            if not came:
                return done
            if number + 1 == len(eras):
                return max(done, min(came.values()))
            end, then = eras[number + 1]
            # Who left without a word when the others had gone on is done too, or nothing would ever be.
            staying = [at for rank, at in came.items() if rank < then.world_size]
            if staying and min(staying) > end:
                came = {rank: at for rank, at in came.items() if rank < then.world_size or rank in attached}
            if min(came.values()) < end:
                return max(done, min(came.values()))
            done = end
        return done
