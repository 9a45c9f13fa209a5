"""Kernels from numba's cache are those of the files as they are now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CALLED = """
from overlord.core.kernels import kernel


@kernel
def called(x):
    return x + {added}
"""
CALLER = """
from called import called
from overlord.core.kernels import kernel


@kernel
def caller(x):
    return called(x)
"""

INSTRUCTIONS = """
from llvmlite import ir
from overlord.core.kernels import instructions


@instructions
def called(builder, address):
    number = ir.IntType(64)
    place = builder.inttoptr(address, number.as_pointer())
    builder.store(builder.add(builder.load(place), number({added})), place)
"""
CALLER_OF_INSTRUCTIONS = """
import numpy as np
from called import called
from overlord.core.kernels import kernel


@kernel
def caller(x):
    found = np.full(1, x)
    called(np.intp(found.ctypes.data))
    return found[0]
"""


@pytest.mark.parametrize(
    ("called", "caller"), [(CALLED, CALLER), pytest.param(INSTRUCTIONS, CALLER_OF_INSTRUCTIONS, marks=pytest.mark.slow)]
)
def test_a_change_in_a_file_reaches_kernels_of_others_that_call_it(tmp_path: Path, called: str, caller: str) -> None:
    (tmp_path / "caller.py").write_text(caller, encoding="utf-8")
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    look = "import caller; first = caller.caller(1); print(first, sum(caller.caller.stats.cache_hits.values()))"
    found = []
    for added in (1, 1, 20):
        if not found or added != 1:
            (tmp_path / "called.py").write_text(called.format(added=added), encoding="utf-8")
        found.append(subprocess.check_output([sys.executable, "-c", look], cwd=tmp_path, env=env, text=True).split())
    assert found == [["2", "0"], ["2", "1"], ["21", "0"]]


OUTSIDE = """
import numpy as np
from overlord.core.kernels import kernel


@kernel
def outside(values, at):
    return values[at]


print(outside(np.zeros(3), 1))
outside(np.zeros(3), 5)
"""


@pytest.mark.skipif(os.environ.get("NUMBA_BOUNDSCHECK") != "1", reason="only `make test-bounds` checks bounds")
def test_the_nightly_run_of_kernels_checks_their_bounds(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(OUTSIDE, encoding="utf-8")
    done = subprocess.run([sys.executable, "outside.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "0.0\n" and "IndexError" in done.stderr
