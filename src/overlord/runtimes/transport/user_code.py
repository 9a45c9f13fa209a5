"""How the user's functions travel from the launching process to the processes that run them: pickled by value."""

from __future__ import annotations

import io
import sys
from typing import Any

import cloudpickle

SPAWNED_MAIN = "__mp_main__"
"""What `multiprocessing` calls the script in a process that it spawned, as `torch.multiprocessing.spawn` does. The
module exists there only; cloudpickle knows that of `__main__` alone."""


def by_value(value: Any, pickler: type[Any] = cloudpickle.Pickler) -> bytes:
    """Return a value pickled; functions and classes of the running script go by value, wherever that script runs."""
    if SPAWNED_MAIN in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules[SPAWNED_MAIN])
    body = io.BytesIO()
    pickler(body).dump(value)
    return body.getvalue()
