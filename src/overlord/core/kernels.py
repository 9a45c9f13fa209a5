"""Kernels: functions that numba compiles, or loads from its cache, when the first of a module is called.

A process that only launches a service, or reads a job, calls none: numba takes it a third of a second and 30 MB.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any


class _Kernel:
    """A function that becomes numba's at its first call."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._compiled: Any = None
        self._ready: Any = None
        """The same once all names that it calls are numba's: another thread may call it while that is done."""

    def __call__(self, *arguments: Any) -> Any:
        return (self._ready or self.load())(*arguments)

    def load(self) -> Any:
        """Return numba's function. Kernels that a kernel may call are looked up in its module, so they come along."""
        import numba
        from numba.core.compiler_lock import global_compiler_lock

        with global_compiler_lock:
            if self._compiled is None:
                self._compiled = numba.njit(nogil=True, cache=True, **self._options)(self._function)
                names = self._function.__globals__
                for name, value in list(names.items()):
                    if isinstance(value, _Kernel):
                        names[name] = value.load()
                _stamp_cache(self._compiled)
                self._ready = self._compiled
            return self._compiled


class _Instructions(_Kernel):
    """A function that writes instructions into the kernels that call it, which numba is told at the first call."""

    def load(self) -> Any:
        """Return what kernels call."""
        from numba.core import types
        from numba.extending import intrinsic

        @functools.wraps(self._function)  # numba counts its parameters
        def typed(_: Any, *given: Any) -> Any:
            def write(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                self._function(builder, *values)
                return context.get_dummy_value()

            return types.void(*[types.intp] * len(given)), write

        if self._compiled is None:
            self._compiled = intrinsic(typed)
            self._compiled.py_func = self._function  # for `_stamp_cache`
        return self._compiled


def _stamp_cache(compiled: Any) -> None:
    """Have numba take nothing from its cache that was compiled with an earlier version of another file.

    numba looks at the file of a function only, and what the function calls is compiled into it: after an update of one
    of several files, two hosts could make different plans of the same draw.
    """
    cache_file = getattr(compiled._cache, "_cache_file", None)  # none where no folder can be written
    if cache_file is None:
        return
    stamps: dict[str, Any] = {}
    modules = [compiled.py_func.__globals__]
    while modules:
        names = modules.pop()
        if names["__file__"] not in stamps:
            stamps[names["__file__"]] = SourceFileLoader("", "").path_stats(names["__file__"])  # as of its bytecode
            found = (getattr(value, "py_func", getattr(value, "_function", None)) for value in list(names.values()))
            modules += [one.__globals__ for one in found if one is not None]
    cache_file._source_stamp = [stamps[file] for file in sorted(stamps)]


def kernel(function: Callable[..., Any], **options: Any) -> Any:
    """Mark a function as a kernel, which runs without the interpreter lock.

    Args:
        function: What numba can compile; kernels call each other by the global names of their modules.
        options: Further ones of `numba.njit`.
    """
    return _Kernel(function, options)


def instructions(function: Callable[..., None]) -> Any:
    """Mark a function that writes vector instructions where the compiler finds none by itself.

    Args:
        function: Is given llvmlite's builder and the values that a kernel calls it with: addresses and counts.
    """
    return _Instructions(function, {})
