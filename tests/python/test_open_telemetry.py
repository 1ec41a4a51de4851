# SPDX-License-Identifier: Apache-2.0
"""`penstock.to_opentelemetry()`, with the SDK's exporters and an endpoint of OTLP."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import penstock
from penstock import DataLoader
from penstock.loader.step_times import PARTS

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)

pytestmark = pytest.mark.slow

HANG_NS_MAX = 3600 * 10**9


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


def make_loader() -> DataLoader[torch.Tensor]:
    return DataLoader(Rows(), batch_size=4, num_workers=1)


@pytest.fixture
def spans() -> tuple[TracerProvider, InMemorySpanExporter]:
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


@pytest.fixture
def metrics() -> Iterator[tuple[MeterProvider, InMemoryMetricReader]]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    yield provider, reader
    provider.shutdown()


def points(reader: InMemoryMetricReader) -> dict[str, dict[Any, float]]:
    """By the metric's name and the part, if it has one."""
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[str, dict[Any, float]] = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            assert point.attributes["penstock.loader"] == "Rows"
            part = point.attributes.get("penstock.part")
            found.setdefault(metric.name, {})[part] = point.value
    return found


def test_metrics_match_the_step_time_breakdown(
    spans: tuple[TracerProvider, InMemorySpanExporter],
    metrics: tuple[MeterProvider, InMemoryMetricReader],
) -> None:
    loader = make_loader()
    with penstock.to_opentelemetry(spans[0], metrics[0], spans=False):
        for _ in loader:
            pass
    found = points(metrics[1])
    times = loader.stats().ledger
    assert found["penstock.batches"] == {None: 10}
    assert found["penstock.batch.io"][None] == loader.stats().batch_bytes > 0
    assert found["penstock.batches.ready"][None] == 0
    seconds = found["penstock.step.time"]
    assert set(seconds) == {name.removesuffix("_s") for name in PARTS}
    for part, taken_s in seconds.items():
        # The ends of a wait count as loader time on one side, and as a wait on the other. A window
        # extends from the first call to the last.
        here_s = getattr(times, f"{part}_s")
        assert taken_s <= here_s + times.loader_s
        assert part in ("compute", "loader") or here_s <= taken_s + times.loader_s
    assert seconds["compute"] <= times.compute_s
    assert spans[1].get_finished_spans() == ()
    for _ in loader:  # which is not reported
        pass
    assert points(metrics[1])["penstock.batches"] == {None: 10}


def by_loader(reader: InMemoryMetricReader, metric_name: str) -> dict[str, float]:
    data = reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics if data.resource_metrics else ()
    return {
        str(point.attributes["penstock.loader"]): point.value
        for metric in metrics
        if metric.name == metric_name
        for point in metric.data.data_points
    }


def test_loaders_of_one_dataset_class_are_separate_series(
    metrics: tuple[MeterProvider, InMemoryMetricReader],
) -> None:
    train, validation = make_loader(), make_loader()
    with penstock.to_opentelemetry(meter_provider=metrics[0], spans=False):
        list(train), next(iter(validation)), list(train)
    assert by_loader(metrics[1], "penstock.batches") == {"Rows": 20, "Rows 2": 1}


def test_deleted_loader_is_reported_once_more(
    metrics: tuple[MeterProvider, InMemoryMetricReader],
) -> None:
    train = make_loader()
    with penstock.to_opentelemetry(meter_provider=metrics[0], spans=False):
        list(train)
        for _ in range(2):  # the second continues with the name of the first
            other = make_loader()
            next(iter(other))
            del other
            gc.collect()
    assert by_loader(metrics[1], "penstock.batches") == {"Rows": 10, "Rows 2": 2}
    assert by_loader(metrics[1], "penstock.batches") == {"Rows": 10}


def test_restarted_and_nested_exports_count_batches_once(
    metrics: tuple[MeterProvider, InMemoryMetricReader],
) -> None:
    """There were no metrics after the second call: a meter keeps the first one's callbacks."""
    loader = make_loader()
    for _ in range(2):
        with penstock.to_opentelemetry(meter_provider=metrics[0], spans=False):
            with penstock.to_opentelemetry(meter_provider=metrics[0], spans=False):
                list(loader)
    assert by_loader(metrics[1], "penstock.batches") == {"Rows": 20}


def test_ended_export_is_freed(metrics: tuple[MeterProvider, InMemoryMetricReader]) -> None:
    ended = penstock.to_opentelemetry(meter_provider=metrics[0], spans=False)
    ended.end()
    ended.end()
    gone = weakref.ref(ended)
    del ended
    gc.collect()
    assert gone() is None


def test_batch_spans_are_children_of_the_current_span(
    spans: tuple[TracerProvider, InMemorySpanExporter],
    metrics: tuple[MeterProvider, InMemoryMetricReader],
) -> None:
    provider, exporter = spans
    with (
        penstock.to_opentelemetry(provider, metrics[0]),
        provider.get_tracer("train").start_as_current_span("epoch") as epoch,
    ):
        before_ns = time.time_ns()
        assert len(list(make_loader())) == 10
    finished = exporter.get_finished_spans()
    batches = [span for span in finished if span.name == "penstock.batch"]
    assert [span.attributes["penstock.batch"] for span in batches] == list(range(10))
    for batch in batches:
        assert batch.parent.span_id == epoch.get_span_context().span_id
        assert batch.attributes["penstock.worker"] == "0"
        # On the wall clock: the loader's clock counts from the boot of the machine.
        assert abs(batch.start_time - before_ns) < HANG_NS_MAX
        assert batch.start_time <= batch.end_time
        inside = {
            span.name: span
            for span in finished
            if span.parent is not None and span.parent.span_id == batch.context.span_id
        }
        assert {"penstock.dataset", "penstock.collate", "penstock.next"} <= set(inside)
        assert inside["penstock.dataset"].end_time == inside["penstock.collate"].start_time
        assert inside["penstock.dataset"].start_time <= inside["penstock.dataset"].end_time


class Collector(BaseHTTPRequestHandler):
    """Receives the HTTP requests of an OTLP exporter, and parses them by OpenTelemetry's schema."""

    requests: list[Any]

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
            ExportMetricsServiceRequest,
        )
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        kinds = {
            "/v1/traces": ExportTraceServiceRequest,
            "/v1/metrics": ExportMetricsServiceRequest,
        }
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = kinds[self.path]()
        request.ParseFromString(body)
        self.server.requests.append(request)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_otlp_endpoint_receives_spans_and_metrics() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.requests = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        at = f"http://127.0.0.1:{server.server_port}/v1"
        tracing = TracerProvider(shutdown_on_exit=False)
        plain = Compression.NoCompression
        tracing.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(f"{at}/traces", compression=plain))
        )
        exporter = OTLPMetricExporter(f"{at}/metrics", compression=plain)
        metering = MeterProvider(
            [PeriodicExportingMetricReader(exporter, 3_600_000)], shutdown_on_exit=False
        )
        try:
            with penstock.to_opentelemetry(tracing, metering):
                assert len(list(make_loader())) == 10
            tracing.shutdown()
            metering.shutdown()
        finally:
            server.shutdown()
            thread.join()
        requests = server.requests  # type: ignore[attr-defined]
    sent = [
        span.name
        for request in requests
        for resource in getattr(request, "resource_spans", ())
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert sent.count("penstock.batch") == 10
    names = {
        metric.name
        for request in requests
        for resource in getattr(request, "resource_metrics", ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert names == {
        "penstock.batches",
        "penstock.batch.io",
        "penstock.batches.ready",
        "penstock.step.time",
    }


@pytest.mark.long
def test_missing_opentelemetry_error_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import penstock\n"
        "try: penstock.to_opentelemetry()\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'penstock[otel]'" in done.stdout, done.stderr
