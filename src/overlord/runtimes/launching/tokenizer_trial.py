"""A tokenizer and the chat templates of a job are tried in a process of its own before the service loads them.

Both come with models and datasets, and are programs in their own right: a template may loop for ever, a tokenizer may
expand a word to gigabytes, search with a pattern of exponential time, or abort the process it is loaded in. The process
that tries them has limits of CPU time and memory. What has passed is remembered in the cache folder, by the content of
all files, so that only the first launch with a tokenizer waits for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import resource
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import cloudpickle
import jinja2
import numpy as np
import tokenizers

from overlord.core.messages import RowsFailed, RowsMade, RunFunction, WorkerMessage
from overlord.core.ragged import RowBatch
from overlord.core.spec_errors import list_some
from overlord.errors import ServiceLost, SpecError
from overlord.job.specs import Chat, Job, Source
from overlord.runtimes.supervision.blame import Blame, CallLimits, ChildLost, Losses, TooManyLosses
from overlord.runtimes.supervision.child import LIMITS, Limits
from overlord.runtimes.supervision.fork_server import ForkServer
from overlord.runtimes.transport.role_codec import receive_rows, send_rows
from overlord.runtimes.transport.user_code import by_value
from overlord.storage import create_private, make_private
from overlord.transforms.samples.sample_kinds import make_transform
from overlord.transforms.samples.tokenize import TextTokenizer, tokenizer_texts
from overlord.version import VERSION

CPU_S = 10
"""CPU time of the trial; the largest tokenizers need about a second."""
MEMORY_BYTES = 2 << 30


def try_tokenizer(job: Job, cache: str, limits: Limits = LIMITS) -> None:
    """Try the tokenizer of a job, and the chat templates of its sources, unless they have passed before.

    Raises:
        SpecError: They crash, or take more time or memory than they may.
    """
    if job.tokenizer is None:
        return
    chats = [source for source in job.sources if isinstance(source.sample, Chat)]
    passed = Path(cache) / "tried" / _digest(job.tokenizer, chats)
    if passed.exists():
        return
    server = ForkServer(__name__, limits)
    try:
        answer = _ask(server, job.tokenizer, chats, limits)
    except ChildLost as loss:
        raise SpecError(_failed(job.tokenizer, chats, _how(loss))) from None
    except (ServiceLost, TooManyLosses) as error:
        raise SpecError(
            f"tokenizer: no process could be started to try {job.tokenizer!r} in ({error}); nothing has run. Free some "
            "memory or processes of this host."
        ) from error
    finally:
        server.close()
    if isinstance(answer, RowsFailed):
        raise SpecError(answer.reason)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs the next launch another trial
        make_private(passed.parent)  # what another user wrote there would pass untried
        os.close(create_private(passed))


def _ask(server: ForkServer, path: str, chats: Sequence[Source], limits: Limits) -> WorkerMessage:
    """Return the answer of a process that tries them; one that is killed from outside is replaced."""
    rows: RowBatch = {"given": np.frombuffer(by_value((path, chats)), np.uint8)}
    losses = Losses()
    while True:
        child = server.fork()
        try:
            call = CallLimits(elapsed_s=limits.load_function, stopped_s=limits.stopped_silence)
            return child.exchange(RunFunction("try"), rows, call, "tries the tokenizer", child.connection)[0]
        except ChildLost as loss:
            if loss.blame is Blame.ITSELF or loss.code == -signal.SIGXCPU:
                raise
            losses.add(loss)
        finally:
            child.close()


def _digest(path: str, chats: Sequence[Source]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    versions = f"{VERSION} {tokenizers.__version__} {jinja2.__version__}"
    for part in (
        versions.encode(),
        *tokenizer_texts(path),
        *(chat.sample.model_dump_json().encode() for chat in chats),
    ):
        digest.update(hashlib.blake2b(part, digest_size=16).digest())
    for template in (chat.sample.template for chat in chats if isinstance(chat.sample, Chat)):
        with contextlib.suppress(OSError, ValueError):
            if template is not None and Path(template).is_file():
                digest.update(Path(template).read_bytes())
    return digest.hexdigest()


def _failed(path: str, chats: Sequence[Source], how: str) -> str:
    named = f", or a chat template of source {list_some([chat.name for chat in chats], 4)}," if chats else ""
    return (
        f"tokenizer: {path!r}{named} {how} when it was loaded and tried on a short text; no text could be turned into "
        "tokens. Take another one, or save it again from a model that you trust."
    )


def _how(loss: ChildLost) -> str:
    if loss.late or loss.code == -signal.SIGXCPU:
        return f"did not end within {CPU_S} s of CPU time"
    if loss.code == -signal.SIGABRT:
        return f"crashed, or needed more than {MEMORY_BYTES >> 30} GiB of memory, ({loss})"
    return f"crashed ({loss})"


# --------------------------------------------------------------------------------------------------------------
# In the process that tries them.


def serve(connection: socket.socket) -> None:
    """Try one tokenizer, and answer what is wrong with it."""
    faulthandler.disable()  # its end is told in words
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_S, spent + CPU_S + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    _, rows = receive_rows(connection)
    path, chats = cloudpickle.loads(np.asarray(rows["given"]).tobytes())  # from the process that asked for this one
    answer: RowsMade | RowsFailed = RowsMade()
    try:
        tokenizer = TextTokenizer(path)
        tokenizer.check()
        tokenizer.reserve(())
        for source in chats:
            with contextlib.suppress(SpecError):  # the service says it with the name of the source
                make_transform(source, tokenizer)
    except SpecError as error:
        answer = RowsFailed("SpecError", str(error))
    except MemoryError:
        answer = RowsFailed("SpecError", _failed(path, chats, f"needed more than {MEMORY_BYTES >> 30} GiB of memory"))
    send_rows(connection, answer, {})
