"""Public test tools: the digests of a stream, resume at every step, faults at chosen steps, and readers of formats.

The law says that the digests of a stream are the same at every scale, on every runtime, under every fault; these tools
let users check their own jobs against it.
"""

from overlord.testing.digests import StreamDigests, delivered_pieces, digest_service, stream_digests
from overlord.testing.fault_engine import FakeClock
from overlord.testing.fault_script import Fault, FaultScript
from overlord.testing.reader_checks import check_reader
from overlord.testing.runs import assert_resumes_anywhere, launch_for_faults, run_with_faults

__all__ = [
    "FakeClock",
    "Fault",
    "FaultScript",
    "StreamDigests",
    "assert_resumes_anywhere",
    "check_reader",
    "delivered_pieces",
    "digest_service",
    "launch_for_faults",
    "run_with_faults",
    "stream_digests",
]
