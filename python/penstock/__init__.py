# SPDX-License-Identifier: Apache-2.0
"""penstock feeds GPUs: a DataLoader that replaces torch's by changing the import.

The import alone loads no torch. Each public name is loaded when it is first used: the cut imports
Dynamo, which takes as long as torch itself, and the commands of a pool need neither.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock._version import __version__ as __version__
from penstock.errors import (
    ClosedError,
    FallbackError,
    MissingTorchNameError,
    PenstockError,
    PoolWarning,
    RankError,
    SharedMemoryError,
    StateUnsupportedError,
    UnsentBatchError,
    UnsupportedError,
    WorkerError,
)

# Not in __all__, where it would hide the builtin from `import *`.
from penstock.errors import TimeoutError as TimeoutError

if TYPE_CHECKING:
    from penstock._C import WorkerChoice
    from penstock.caching.belady import BeladyCache, BeladyStep
    from penstock.caching.cached_dataset import CachedDataset, cached
    from penstock.cut.embedding_ids import embedding_ids
    from penstock.cut.offloading import detach, offload
    from penstock.drop_in import install, uninstall
    from penstock.explanation.explanation import explain
    from penstock.filtering import filtered
    from penstock.graph.operators import stateless
    from penstock.graph.plan import Plan
    from penstock.images.sample_plan import SamplePlan, SampleStep, explain_sample
    from penstock.loader.cache_stats import CacheStats
    from penstock.loader.dataloader import DataLoader
    from penstock.loader.grouped_arguments import Pool, Ranks
    from penstock.loader.rank_states import merge_states
    from penstock.loader.skipped_samples import SkippedSample
    from penstock.loader.stats import LoaderReport, LoaderStats
    from penstock.loader.step_times import SlowSample, StepTimes, WorkerTimes
    from penstock.loader.variable_pool import announce_pool
    from penstock.observing.open_telemetry import Telemetry, to_opentelemetry
    from penstock.observing.step_trace import StepTrace, trace
    from penstock.observing.trace_file import merge_traces
    from penstock.observing.waiting_meter import WaitingMeter, progress
    from penstock.ranks.steps import EpochEnd
    from penstock.sampling.chunk_sampler import ChunkRandomness, ChunkSampler
    from penstock.sampling.cost_batch_sampler import CostBatchSampler
    from penstock.sampling.mixture_sampler import MixtureSampler
    from penstock.sampling.packer import Packer, PackerStats
    from penstock.stream.batch_types import register_batch_type
    from penstock.stream.commits import BatchId
    from penstock.trainer_state import checkpoint_loader
    from penstock.worker.chunked_dataset import ChunkedDataset
    from penstock.worker.shared_list import SharedList

__all__ = [
    "BatchId",
    "BeladyCache",
    "BeladyStep",
    "CacheStats",
    "CachedDataset",
    "ClosedError",
    "ChunkRandomness",
    "ChunkSampler",
    "ChunkedDataset",
    "CostBatchSampler",
    "DataLoader",
    "EpochEnd",
    "FallbackError",
    "LoaderReport",
    "LoaderStats",
    "MissingTorchNameError",
    "MixtureSampler",
    "Packer",
    "PackerStats",
    "PenstockError",
    "Plan",
    "Pool",
    "PoolWarning",
    "RankError",
    "Ranks",
    "SamplePlan",
    "SampleStep",
    "SharedList",
    "SharedMemoryError",
    "SkippedSample",
    "SlowSample",
    "StateUnsupportedError",
    "StepTimes",
    "StepTrace",
    "Telemetry",
    "UnsentBatchError",
    "UnsupportedError",
    "WaitingMeter",
    "WorkerChoice",
    "WorkerError",
    "WorkerTimes",
    "announce_pool",
    "cached",
    "checkpoint_loader",
    "detach",
    "embedding_ids",
    "explain",
    "explain_sample",
    "filtered",
    "install",
    "merge_states",
    "merge_traces",
    "offload",
    "progress",
    "register_batch_type",
    "stateless",
    "to_opentelemetry",
    "trace",
    "uninstall",
]
_HOMES = {
    "BatchId": "penstock.stream.commits",
    "BeladyCache": "penstock.caching.belady",
    "BeladyStep": "penstock.caching.belady",
    "CacheStats": "penstock.loader.cache_stats",
    "CachedDataset": "penstock.caching.cached_dataset",
    "ChunkRandomness": "penstock.sampling.chunk_sampler",
    "ChunkSampler": "penstock.sampling.chunk_sampler",
    "ChunkedDataset": "penstock.worker.chunked_dataset",
    "CostBatchSampler": "penstock.sampling.cost_batch_sampler",
    "DataLoader": "penstock.loader.dataloader",
    "EpochEnd": "penstock.ranks.steps",
    "LoaderReport": "penstock.loader.stats",
    "LoaderStats": "penstock.loader.stats",
    "MixtureSampler": "penstock.sampling.mixture_sampler",
    "Packer": "penstock.sampling.packer",
    "PackerStats": "penstock.sampling.packer",
    "Plan": "penstock.graph.plan",
    "Pool": "penstock.loader.grouped_arguments",
    "Ranks": "penstock.loader.grouped_arguments",
    "SamplePlan": "penstock.images.sample_plan",
    "SampleStep": "penstock.images.sample_plan",
    "SharedList": "penstock.worker.shared_list",
    "SkippedSample": "penstock.loader.skipped_samples",
    "SlowSample": "penstock.loader.step_times",
    "StepTimes": "penstock.loader.step_times",
    "StepTrace": "penstock.observing.step_trace",
    "Telemetry": "penstock.observing.open_telemetry",
    "WaitingMeter": "penstock.observing.waiting_meter",
    "WorkerChoice": "penstock._C",
    "WorkerTimes": "penstock.loader.step_times",
    "announce_pool": "penstock.loader.variable_pool",
    "cached": "penstock.caching.cached_dataset",
    "checkpoint_loader": "penstock.trainer_state",
    "detach": "penstock.cut.offloading",
    "embedding_ids": "penstock.cut.embedding_ids",
    "explain": "penstock.explanation.explanation",
    "explain_sample": "penstock.images.sample_plan",
    "filtered": "penstock.filtering",
    "install": "penstock.drop_in",
    "merge_states": "penstock.loader.rank_states",
    "merge_traces": "penstock.observing.trace_file",
    "offload": "penstock.cut.offloading",
    "progress": "penstock.observing.waiting_meter",
    "register_batch_type": "penstock.stream.batch_types",
    "stateless": "penstock.graph.operators",
    "to_opentelemetry": "penstock.observing.open_telemetry",
    "trace": "penstock.observing.step_trace",
    "uninstall": "penstock.drop_in",
}


if not TYPE_CHECKING:  # which takes every name to be there where there is this function

    def __getattr__(name: str) -> Any:
        if name == "_pool":
            # Looked for here, because Python's error for a missing module would not help the user.
            if spec := find_spec("penstock._pool"):
                return import_module(spec.name)
            raise ImportError(import_module("penstock._native").refusal_without_parts())
        if name not in _HOMES and name != "_C":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # First torch and the native part, which may be missing or for another torch: everything
        # else would fail with less helpful errors.
        import_module("penstock._native").import_torch()
        native = import_module("penstock._C")
        if name == "_C":
            return native
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
