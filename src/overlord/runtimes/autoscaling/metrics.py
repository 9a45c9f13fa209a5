"""What a service tells Prometheus: its status as metrics, where a scraper may ask for them.

Rules of this file:
1. Every figure comes from `service.status()`, so metrics and status cannot differ. Nothing is counted here.
2. Labels are sources, roles and names of reports (a bounded number), never ranks or samples: thousands of ranks make
   no more series than one.
3. The launching process answers, so that there is an answer also while the service is being started again.
4. Only this host is answered, unless an address says otherwise. Every process of it may ask, and the launching process
   often trains: connections are few and end in time, and however many ask, the service is asked a few times a second.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from socketserver import ThreadingMixIn
from types import MappingProxyType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from overlord.errors import OverlordError, SpecError

LOOPBACK = "127.0.0.1"
MOST_PORT = 65535
MOST_CONNECTIONS = 16
"""Further ones are closed at once."""
REQUEST_S = 30.0
"""How long a connection may last, with its answer."""
ASK_EVERY_S = 0.2
"""How old a status may be that is told again."""

_OF_A_SOURCE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "planned_share": ("planned_share", "Share of the source in the newest plan."),
        "realised_share": ("realised_share", "Share of the source in all that was drawn so far."),
        "epoch": ("epoch", "Epoch that the source is in."),
        "epochs": ("epochs", "Passes over the source; completed ones, until the first has ended."),
        "effective_epochs": ("effective_epochs", "What they are worth, in passes over new data."),
        "buffer_bytes": ("buffer_bytes", "Bytes of the source that are read ahead."),
        "workers": ("workers", "Workers that the source has."),
        "samples": ("samples_total", "Samples drawn."),
        "tokens": ("tokens_total", "Tokens drawn."),
        "skipped": ("skipped_total", "Rows passed over: empty, filtered out, or too long."),
        "bad": ("bad_total", "Samples that a stand-in took the place of."),
        "wrong_length": ("wrong_length_total", "Samples that were cut or padded to their planned length."),
        "samples_prepared": ("prepared_total", "Rows that its workers have read and measured."),
        "busy_s": ("busy_seconds_total", "Seconds that its workers computed or waited for storage, not for a core."),
        "cpu_s": ("cpu_seconds_total", "Of them, seconds of a processor."),
        "waited_s": ("waited_seconds_total", "Seconds that planner and constructors waited for the source."),
    }
)
"""Figures of a source in a status: their name as a metric, and what they say."""


_MEASURED: Mapping[str, str] = MappingProxyType(
    {
        "steps_per_s": "Steps planned a second, lately.",
        "wait_s": "Seconds that trainers waited for batches, a step, lately.",
        "balance": "Tokens of the busiest rank over the mean, in the newest step.",
    }
)
"""What a service measures of itself."""


def metrics_of(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield a status as metrics.

    Example:
        >>> from overlord.runtimes.autoscaling.metrics import metrics_of
        >>> lost = {"service": {"state": "starting again", "restarts": 2}}
        >>> [(sample.name, sample.value) for metric in metrics_of(lost) for sample in metric.samples]
        [('overlord_up', 0.0), ('overlord_service_restarts_total', 2.0)]
    """
    service = status.get("service") or {}
    up = service.get("state", "up") == "up" and not status.get("failed")
    yield _gauge("up", "Whether the service process is up, and not being started again.", up)
    yield _counter("service_restarts_total", "Times that the service process was started again.",
                   service.get("restarts", 0))  # fmt: skip
    if "planner" not in status:
        return
    yield _gauge("next_step", "The next step to be planned.", status["planner"]["next_step"])
    steps = list(status["clients"].values())
    yield _gauge("clients", "Ranks that are attached.", len(steps))
    if steps:
        yield _gauge("client_step_min", "Step of the rank that is furthest behind.", min(steps))
        yield _gauge("client_step_max", "Step of the rank that is furthest ahead.", max(steps))
    yield _counter("trainers_waited_seconds_total", "Seconds that the trainers of a host waited for a batch, at most.",
                   status.get("waited_s", 0.0))  # fmt: skip
    yield _gauge("memory_budget_bytes", "Bytes that a host may hold ahead of its trainers.",
                 status["memory"]["budget_bytes"])  # fmt: skip
    held = GaugeMetricFamily("overlord_memory_bytes", "Bytes held ahead of the trainers.", labels=["holder"])
    for holder, nbytes in status["memory"]["held"].items():
        held.add_metric([holder], nbytes)
    yield held
    yield _gauge("store_bytes", "Bytes of the journal and the snapshots.", status["store"]["bytes"])
    yield _gauge("store_failing", "Whether the store fails, so that planning pauses.", bool(status["store"]["error"]))
    yield from _remote_metrics(status.get("remote") or {})
    yield from _role_metrics(status.get("hosts") or ())
    yield from _source_metrics(status["sources"])
    yield from _report_metrics(status.get("reports") or {})
    for name, says in _MEASURED.items():
        if name in status.get("measured", {}):
            yield _gauge(name, says, status["measured"][name])
    scaling = status.get("scaling") or {}
    yield _gauge("wanted_samples_per_second", "Samples a second that the trainers would take.",
                 scaling.get("wanted_samples_per_s", 0.0))  # fmt: skip
    needs = GaugeMetricFamily(
        "overlord_bottleneck_workers_needed",
        "Of the source that holds up the trainers, workers it needs; none where no source does.",
        labels=["source"],
    )
    for name, workers in (scaling.get("needs") or {}).items():
        needs.add_metric([name], workers)
    yield needs


_OF_REMOTE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "requests": ("requests_total", "Requests to object stores."),
        "bytes": ("bytes_total", "Bytes that came from object stores."),
        "retries": ("retries_total", "Requests that failed and were repeated."),
        "hedges": ("hedges_total", "Requests that were late and sent a second time."),
        "refreshed": ("credentials_refreshed_total", "Times that credentials were refused and looked up again."),
        "hits": ("cache_hits_total", "Reads of remote files that the cache on disk answered."),
        "hit_bytes": ("cache_hit_bytes_total", "Bytes of them."),
        "damaged": ("cache_damaged_total", "Entries of the cache that were damaged, and fetched again."),
        "p50_s": ("latency_p50_seconds", "Seconds that half of the requests took at most."),
        "p99_s": ("latency_p99_seconds", "Seconds that 99 % of the requests took at most."),
    }
)
"""Figures of remote files in a status: their name as a metric, and what they say."""


def _remote_metrics(remote: Mapping[str, float]) -> Iterator[Metric]:
    for key, (name, says) in _OF_REMOTE.items():
        if key in remote:
            kind = _counter if name.endswith("_total") else _gauge
            yield kind(f"remote_{name}", says, remote[key])


def _report_metrics(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    value = GaugeMetricFamily("overlord_report", "Newest value that trainers reported of a metric.", labels=["name"])
    step = GaugeMetricFamily("overlord_report_step", "Step of that value.", labels=["name"])
    for name, newest in reports.items():
        value.add_metric([name], newest["value"])
        step.add_metric([name], newest["step"])
    yield value
    yield step


def _source_metrics(sources: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    for key, (name, says) in _OF_A_SOURCE.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"overlord_source_{name}", says, labels=["source"])
        for source, figures in sources.items():
            family.add_metric([source], figures[key])
        yield family
    parked = GaugeMetricFamily("overlord_source_parked", "Whether nothing is drawn for now.", labels=["source"])
    for source, figures in sources.items():
        parked.add_metric([source], float(figures["parked"] is not None))
    yield parked


def _role_metrics(hosts: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    up = GaugeMetricFamily("overlord_role_up", "Whether a role's process is up.", labels=["role", "host"])
    restarts = CounterMetricFamily(
        "overlord_role_restarts_total", "Times that a role was replaced.", labels=["role", "host"]
    )
    for one in hosts:
        up.add_metric([one["role"], one["host"]], float(one["up"]))
        restarts.add_metric([one["role"], one["host"]], one["restarts"])
    yield up
    yield restarts


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(f"overlord_{name}", says, value=float(value))


def _counter(name: str, says: str, value: float) -> Metric:
    return CounterMetricFamily(f"overlord_{name}", says, value=float(value))


class _Service(Collector):
    """Asks for the status whenever metrics are asked for."""

    def __init__(self) -> None:
        self.status: Callable[[], Mapping[str, Any]] | None = None
        self._lock = threading.Lock()
        self._asked: tuple[float, Callable[[], Mapping[str, Any]], Mapping[str, Any]] | None = None

    def describe(self) -> Iterable[Metric]:
        """Say nothing ahead: there may be no service yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield what there is to tell."""
        yield from metrics_of(self._found())

    def _found(self) -> Mapping[str, Any]:
        lost: dict[str, Any] = {"service": {"state": "lost"}}
        with self._lock:
            status = self.status
            if status is None:
                return lost
            if self._asked is None or self._asked[1] != status or time.monotonic() - self._asked[0] > ASK_EVERY_S:
                try:
                    found = status()
                except OverlordError:
                    found = lost  # a service that is gone is reported as such: alerts look at `overlord_up`
                self._asked = time.monotonic(), status, found
            return self._asked[2]


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # the name is that of the class above
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """One thread for each of a few connections, which are ended when they take too long."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._open: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a connection, unless there are many."""
        if len(self._open) >= MOST_CONNECTIONS:
            return False
        self._open[request] = time.monotonic() + REQUEST_S
        return True

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End what takes too long; called twice a second, and with every connection."""
        now = time.monotonic()
        for request in [one for one, until in list(self._open.items()) if until < now]:
            try:
                request.shutdown(socket.SHUT_RDWR)  # its thread then finds the end
            except OSError:
                pass  # it has just ended

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the other side is gone, or sent no request."""


class MetricsServer:
    """Answers Prometheus.

    Args:
        address: A port of this host, or "HOST:PORT"; port 0 takes a free one.

    Raises:
        SpecError: No server can listen there.

    Example:
        >>> door = MetricsServer(0)
        >>> door.url.startswith("http://127.0.0.1:")
        True
        >>> door.close()
    """

    def __init__(self, address: int | str) -> None:
        host, port = host_and_port(address)
        self._service = _Service()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._service)
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise SpecError(
                f"launch: metrics is {address!r}, where no server can listen ({error.strerror or error}); no figures "
                "could be asked for. Give another port, or 0 for a free one."
            ) from error
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="overlord-metrics", daemon=True)
        self._thread.start()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"
        """Where Prometheus asks."""

    def tell(self, status: Callable[[], Mapping[str, Any]]) -> None:
        """Answer with what this returns from now on."""
        self._service.status = status

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def host_and_port(address: object) -> tuple[str, int]:
    """Return where to listen.

    Raises:
        SpecError: It is no address.

    Example:
        >>> host_and_port(9400), host_and_port("0.0.0.0:9400"), host_and_port("[::]:9400")
        (('127.0.0.1', 9400), ('0.0.0.0', 9400), ('::', 9400))
    """
    host, _, port = str(address).rpartition(":")
    number = int(port) if port.isascii() and port.isdecimal() else -1
    if isinstance(address, bool) or not isinstance(address, (int, str)) or not 0 <= number <= MOST_PORT:
        raise SpecError(
            f"launch: metrics is {address!r:.80}; no server can listen there. Give a port such as 9400, or 'HOST:PORT'."
        )
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, number
