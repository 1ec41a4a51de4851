# SPDX-License-Identifier: Apache-2.0
"""The compared systems, one class for each, used as their documentation recommends.

Packages are imported within the classes, because each is installed in one environment only. Batches
are mappings of arrays or tensors. A class raises `Missing` where its system has no interface.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from loaders import (
    Collate,
    FromColumns,
    GrainLoader,
    GrainMake,
    Job,
    Loader,
    Missing,
    RayLoader,
    RayMake,
    SpdlLoader,
    Stored,
    TfLoader,
    TorchDataset,
    TorchLoader,
    WithNumber,
    as_tensors,
    torch_collate,
)
from samples import IMAGE_SIZE, ROW_LENGTH, Samples

OPEN_BINS = 8


class System:
    title: str
    packages: tuple[str, ...]  # whose versions are shown
    configuration: str
    drop_in = ""  # the import in place of torch's
    workers_are = "processes"
    buffers_are_unbounded = False  # whether a rate needs a new iterator

    def convert(self, job: Job) -> bool:
        """Write the samples in the format of the system. Returns whether it defines one."""
        return False

    def open(self, job: Job, collate: Collate | None = None) -> Loader:
        raise NotImplementedError

    def pack(self, job: Job) -> Loader:
        raise Missing("no packing of documents into rows")

    def serve(self, folder: Path) -> str:
        """Start workers outside of any trainer, from this process; return their address."""
        raise Missing("no workers outside of the trainer's processes")


class Torch(System):
    title = "torch DataLoader"
    packages = ("torch",)
    configuration = "`DataLoader(shuffle=True, generator=...)`"
    drop_in = "from torch.utils.data import DataLoader"

    def loader_class(self) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader

    def options(self, job: Job) -> dict[str, Any]:
        return {}

    def rank_sampler(self, dataset: Any, job: Job) -> Any:
        from torch.utils.data import DistributedSampler

        return DistributedSampler(dataset, job.ranks, job.rank, seed=job.seed)

    def open(self, job: Job, collate: Collate | None = None) -> Loader:
        dataset = TorchDataset(job.samples)
        arguments = {
            "batch_size": job.samples.batch_size,
            "num_workers": job.workers,
            "collate_fn": collate or torch_collate(job.samples),
            "drop_last": job.is_endless,
            "persistent_workers": job.is_endless,
            **self.order(dataset, job),
            **self.options(job),
        }
        return TorchLoader(self.loader_class()(dataset, **arguments))

    def order(self, dataset: Any, job: Job) -> dict[str, Any]:
        import torch

        if job.by_rank:
            return {"sampler": self.rank_sampler(dataset, job)}
        torch.manual_seed(job.seed)
        return {"shuffle": True, "generator": torch.Generator().manual_seed(job.seed)}


class Penstock(Torch):
    title = "penstock"
    packages = ("penstock", "torch")
    configuration = (
        '`DataLoader(..., seeding="batch")`; ranks with `ranks=Ranks(global_batch_size=...)`, '
        "packing with `Packer`, remote workers with `pool=`"
    )
    drop_in = "from penstock import DataLoader"

    def loader_class(self) -> Any:
        from penstock import DataLoader

        return DataLoader

    def order(self, dataset: Any, job: Job) -> dict[str, Any]:
        import torch

        import penstock

        torch.manual_seed(job.seed)
        generator = torch.Generator().manual_seed(job.seed)
        order: dict[str, Any] = {"shuffle": True, "generator": generator}
        if job.by_rank:
            ranks = penstock.Ranks(
                rank=job.rank, world_size=job.ranks, global_batch_size=2 * job.samples.batch_size
            )
            order |= {"ranks": ranks, "batch_size": 1}
        return order

    def options(self, job: Job) -> dict[str, Any]:
        import penstock

        if job.by_rank:
            return {}
        options: dict[str, Any] = {"seeding": "batch"}
        if job.service:
            here = str(Path(__file__).resolve().parent)
            pool = penstock.Pool(job.service, keys=f"{job.folder}/keys", code_paths=[here])
            options |= {"pool": pool, "num_workers": 0}
        return options

    def pack(self, job: Job) -> Loader:
        import torch

        from penstock import DataLoader, Packer

        loader = DataLoader(
            TorchDataset(job.samples),
            batch_size=16,
            collate_fn=list,
            shuffle=True,
            generator=torch.Generator().manual_seed(job.seed),
            num_workers=job.workers,
            seeding="batch",
        )
        return TorchLoader(Packer(loader, ROW_LENGTH, padding={"tokens": 0}, open_bins=OPEN_BINS))

    def serve(self, folder: Path) -> str:
        import sys

        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from pool_host import PoolHost

        host = PoolHost(folder)
        host.__enter__()  # ends with this process
        host.start_command(2)
        return host.endpoint


class Stateful(Torch):
    title = "torchdata StatefulDataLoader"
    packages = ("torchdata", "torch")
    configuration = "`StatefulDataLoader`; ranks with `StatefulDistributedSampler`"
    drop_in = "from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader"

    def loader_class(self) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader

    def rank_sampler(self, dataset: Any, job: Job) -> Any:
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        return StatefulDistributedSampler(dataset, job.ranks, job.rank, seed=job.seed)


class Grain(System):
    title = "Grain"
    packages = ("grain",)
    configuration = (
        "`MapDataset.source().seed().shuffle().random_map().batch()` and `mp_prefetch`; ranks with "
        "`ElasticIterator`, packing with `FirstFitPackIterDataset`; for the rates "
        "`ReadOptions(prefetch_buffer_size=16)`"
    )
    drop_in = "from grain import DataLoader"

    def open(self, job: Job, collate: Collate | None = None) -> Loader:
        import grain
        import grain.experimental

        samples = job.samples
        processes = grain.MultiprocessingOptions(job.workers, per_worker_buffer_size=2)
        dataset = grain.MapDataset.source(Stored(samples)).seed(job.seed).shuffle()
        if job.is_endless:
            dataset = dataset.repeat()
        dataset = dataset.random_map(GrainMake(samples))
        if job.by_rank:
            return GrainLoader(
                grain.experimental.ElasticIterator(
                    dataset,
                    2 * samples.batch_size,
                    grain.sharding.ShardOptions(job.rank, job.ranks),
                    multiprocessing_options=processes,
                )
            )
        batches = dataset.batch(
            samples.batch_size,
            drop_remainder=job.is_endless,
            batch_fn=collate or type(samples).collate,
        )
        # Of batches here. The default of 500 filled 12 GB before the first one of photographs.
        ahead = grain.ReadOptions(num_threads=16, prefetch_buffer_size=16)
        return GrainLoader(
            batches.to_iter_dataset(ahead if job.is_endless else None).mp_prefetch(processes)
        )

    def pack(self, job: Job) -> Loader:
        import grain
        import grain.experimental

        documents = grain.MapDataset.source(Stored(job.samples)).seed(job.seed).shuffle()
        packed = grain.experimental.FirstFitPackIterDataset(
            documents.to_iter_dataset(),
            length_struct={"tokens": ROW_LENGTH},
            num_packing_bins=OPEN_BINS,
        )
        processes = grain.MultiprocessingOptions(job.workers)
        return GrainLoader(packed.mp_prefetch(processes))


class Spdl(System):
    title = "SPDL"
    packages = ("spdl_core",)
    configuration = (
        "`get_pytorch_dataloader(in_order=True)` for the promises, "
        "`PipelineBuilder` with threads for the rates"
    )
    drop_in = "from spdl.dataloader import get_pytorch_dataloader as DataLoader"

    def open(self, job: Job, collate: Collate | None = None) -> Loader:
        import torch
        from spdl.dataloader import get_pytorch_dataloader
        from spdl.source import DistributedRandomSampler

        samples = job.samples
        dataset = TorchDataset(samples)
        batch = collate or torch_collate(samples)
        if job.is_endless:
            sampler = DistributedRandomSampler(len(dataset), rank=0, world_size=1, seed=job.seed)
            return SpdlLoader(sampler, dataset, batch, samples.batch_size, job.workers)
        order: dict[str, Any] = {"shuffle": True}
        if job.by_rank:
            order = {
                "sampler": DistributedRandomSampler(
                    len(dataset), rank=job.rank, world_size=job.ranks, seed=job.seed
                )
            }
        return TorchLoader(
            get_pytorch_dataloader(
                dataset,
                batch_size=samples.batch_size,
                num_workers=job.workers,
                collate_fn=batch,
                generator=torch.Generator().manual_seed(job.seed),
                in_order=True,
                **order,
            )
        )


class RayData(System):
    title = "Ray Data"
    packages = ("ray",)
    configuration = (
        "`ray.data.range().random_shuffle(seed=...).map(compute=TaskPoolStrategy(...))` and "
        "`iter_torch_batches`; `preserve_order` for the promises"
    )
    buffers_are_unbounded = True

    def open(self, job: Job, collate: Collate | None = None) -> Loader:
        import ray
        from ray.data import DataContext, TaskPoolStrategy

        if not ray.is_initialized():
            if job.service:
                ray.init(address=job.service, log_to_driver=False, runtime_env=_ray_code())
            else:
                ray.init(
                    address="local",
                    num_cpus=job.workers,
                    include_dashboard=False,
                    log_to_driver=False,
                    object_store_memory=2 << 30,
                    runtime_env=_ray_code(),
                )
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = not job.is_endless
        samples = job.samples
        if job.kind == "pixels":
            size = (IMAGE_SIZE, IMAGE_SIZE)
            paths = [str(path) for path in samples.paths]  # type: ignore[attr-defined]
            dataset = ray.data.read_images(paths, size=size, mode="RGB", include_paths=True)
            number = {path: index for index, path in enumerate(paths)}
            return RayLoader(dataset.map(WithNumber(number)), samples.batch_size, None, job)
        dataset = ray.data.range(len(samples)).random_shuffle(seed=job.seed)
        dataset = dataset.map(RayMake(samples), compute=TaskPoolStrategy(size=job.workers))
        batch = None if collate is None else FromColumns(collate)
        if batch is None and samples.collate is not None:
            batch = FromColumns(type(samples).collate)  # type: ignore[arg-type]
        return RayLoader(dataset, samples.batch_size, batch, job)

    def serve(self, folder: Path) -> str:
        import sys

        from ray.cluster_utils import Cluster

        memory = 512 << 20
        sys.stdout = sys.stderr
        node = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": memory}
        self._cluster = Cluster(initialize_head=True, head_node_args=node)
        return str(self._cluster.address)


class TfData(System):
    title = "tf.data"
    packages = ("tensorflow_cpu",)
    configuration = "`shuffle(seed=...).map(num_parallel_calls=...).batch().prefetch()`"
    workers_are = "threads"
    is_distributed = False

    def _own_service(self, folder: Path) -> str:
        raise NotImplementedError

    def open(self, job: Job, collate: Collate | None = None) -> Loader:
        import tensorflow as tf

        tf.random.set_seed(job.seed)
        samples = job.samples
        count, paths = len(samples), [str(path) for path in getattr(samples, "paths", ())]
        numbers = tf.data.Dataset.range(count)
        numbers = numbers.shuffle(count, job.seed, reshuffle_each_iteration=job.is_endless)
        if job.is_endless:
            numbers = numbers.repeat()
        if job.by_rank:
            numbers = numbers.shard(job.ranks, job.rank)

        def drawn(index: Any) -> Any:
            return {
                "id": index,
                "draw": tf.random.stateless_uniform([], [job.seed, index]),
                "pid": tf.constant(-1),
            }

        def pixels(index: Any) -> Any:
            image = tf.io.decode_jpeg(tf.io.read_file(tf.constant(paths)[index]), 3)
            size = (IMAGE_SIZE, IMAGE_SIZE)
            image = tf.image.resize(image, size, method="bilinear", antialias=True)
            return {"id": index, "image": tf.cast(tf.round(image), tf.uint8)}

        def photograph(index: Any) -> Any:
            file = tf.io.read_file(tf.constant(paths)[index % len(paths)])
            box = tf.image.sample_distorted_bounding_box(
                tf.image.extract_jpeg_shape(file),
                tf.zeros([0, 0, 4]),
                aspect_ratio_range=(3 / 4, 4 / 3),
                area_range=(0.08, 1.0),
                use_image_if_no_bounding_boxes=True,
            )
            (top, left, _), (height, width, _) = tf.unstack(box[0]), tf.unstack(box[1])
            window = tf.stack([top, left, height, width])
            image = tf.image.decode_and_crop_jpeg(file, window, channels=3)
            image = tf.image.resize(image, (224, 224), antialias=True) / 255.0
            return {"image": tf.image.random_flip_left_right(image), "label": index % 10}

        def row(index: Any) -> Any:
            return {"row": values[index], "label": index % 10}

        def text(index: Any) -> Any:
            return {"tokens": vocabulary.lookup(tf.strings.split(sentences[index]))}

        def heavy(index: Any) -> Any:
            (made,) = tf.numpy_function(_heavy_row(samples), [index], [tf.float32])
            return {"row": tf.ensure_shape(made, (1000,))}

        if job.kind == "rows":
            values = tf.constant(samples.values)  # type: ignore[attr-defined]
        if job.kind == "texts":
            sentences = tf.constant(samples.sentences)  # type: ignore[attr-defined]
            words = samples.vocabulary  # type: ignore[attr-defined]
            pairs = tf.lookup.KeyValueTensorInitializer(
                list(words), list(words.values()), tf.string, tf.int64
            )
            vocabulary = tf.lookup.StaticHashTable(pairs, 0)
        make = {"numbered": drawn, "pixels": pixels, "rows": row, "photographs": photograph,
                "texts": text, "heavy": heavy}[job.kind]  # fmt: skip
        made = numbers.map(make, num_parallel_calls=job.workers)
        size = samples.batch_size
        if job.kind == "texts":
            made = made.padded_batch(size, drop_remainder=job.is_endless)
        else:
            made = made.batch(size, drop_remainder=job.is_endless)
        if collate is not None:
            contain = collate
            made = made.map(lambda batch: contain([{"id": batch["id"], "draw": batch["draw"]}]))
        if self.is_distributed:
            made = made.apply(
                tf.data.experimental.service.distribute(
                    processing_mode=tf.data.experimental.service.ShardingPolicy.DYNAMIC,
                    service=job.service or self._own_service(Path(job.folder)),
                )
            )
        return TfLoader(made.prefetch(2))


class TfService(TfData):
    title = "tf.data service"
    configuration = (
        "the same, and `distribute(ShardingPolicy.DYNAMIC)` to a dispatcher and two worker servers"
    )
    is_distributed = True
    workers_are = "servers"
    _address = ""

    def _own_service(self, folder: Path) -> str:
        if not self._address:
            self._address = self.serve(folder)
        return self._address

    def serve(self, folder: Path) -> str:
        """Start the dispatcher here, and each of two worker servers in a process."""
        import subprocess
        import sys

        import tensorflow as tf

        self._dispatcher = tf.data.experimental.service.DispatchServer()
        address = str(self._dispatcher.target)
        program = (
            "import sys, tensorflow as tf\n"
            "service = tf.data.experimental.service\n"
            "address = sys.argv[1].partition('://')[2]\n"
            "server = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))\n"
            "print('ready', flush=True)\n"
            "server.join()"
        )
        self.servers = [
            subprocess.Popen(
                [sys.executable, "-c", program, address], stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for server in self.servers:
            assert server.stdout is not None
            server.stdout.readline()
        return address


class LitData(Torch):
    title = "LitData"
    packages = ("litdata", "torch")
    configuration = "`optimize()`, a subclass of `StreamingDataset`, `StreamingDataLoader`"
    drop_in = "from litdata import StreamingDataLoader as DataLoader"

    def convert(self, job: Job) -> bool:
        from litdata import optimize

        samples = job.samples
        optimize(
            fn=samples.stored,
            inputs=list(range(len(samples))),
            output_dir=f"{job.folder}/litdata-{job.kind}",
            chunk_bytes={"numbered": "1KB", "heavy": "8KB"}.get(job.kind, "1MB"),
            num_workers=1,
        )
        return True

    def open(self, job: Job, collate: Collate | None = None) -> Loader:
        import litdata

        samples = job.samples
        _join_ranks(job)
        dataset = _stream_class(litdata.StreamingDataset, samples)(
            f"{job.folder}/litdata-{job.kind}", shuffle=True, seed=job.seed
        )
        loader = litdata.StreamingDataLoader(
            dataset,
            batch_size=samples.batch_size,
            num_workers=job.workers,
            collate_fn=collate or torch_collate(samples),
            drop_last=job.is_endless,
            persistent_workers=job.is_endless,
        )
        return TorchLoader(loader)


class Mosaic(Torch):
    title = "MosaicML Streaming"
    packages = ("mosaicml-streaming", "torch")
    configuration = "`MDSWriter`, a subclass of `StreamingDataset`, `StreamingDataLoader`"
    drop_in = "from streaming import StreamingDataLoader as DataLoader"

    def convert(self, job: Job) -> bool:
        from streaming import MDSWriter

        samples = job.samples
        kinds = {int: "int", bytes: "bytes", str: "str", np.ndarray: "ndarray"}
        columns = {name: kinds[type(value)] for name, value in samples.stored(0).items()}
        out = f"{job.folder}/mosaic-{job.kind}"
        with MDSWriter(out=out, columns=columns) as writer:
            for index in range(len(samples)):
                writer.write(samples.stored(index))
        return True

    def open(self, job: Job, collate: Collate | None = None) -> Loader:
        import streaming

        samples = job.samples
        _join_ranks(job)
        dataset = _stream_class(streaming.StreamingDataset, samples)(
            local=f"{job.folder}/mosaic-{job.kind}",
            shuffle=True,
            shuffle_seed=job.seed,
            batch_size=samples.batch_size,
        )
        loader = streaming.StreamingDataLoader(
            dataset,
            batch_size=samples.batch_size,
            num_workers=job.workers,
            collate_fn=collate or torch_collate(samples),
            drop_last=job.is_endless,
            persistent_workers=job.is_endless,
        )
        return TorchLoader(loader)


SYSTEMS: dict[str, type[System]] = {
    "penstock": Penstock,
    "torch": Torch,
    "stateful": Stateful,
    "grain": Grain,
    "spdl": Spdl,
    "ray": RayData,
    "tfdata": TfData,
    "tfservice": TfService,
    "litdata": LitData,
    "mosaic": Mosaic,
}


def _heavy_row(samples: Samples) -> Callable[[Any], Any]:
    return lambda index: samples[int(index)]["row"]


def _stream_class(stream: Any, samples: Any) -> Any:
    """A streaming dataset, such as `stream`, whose samples are made from the stored ones."""

    class Stream(stream):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return as_tensors(samples.make(super().__getitem__(index)))

    return Stream


def _join_ranks(job: Job) -> None:
    """Join the other ranks, for systems that ask the process group for theirs."""
    import torch

    if job.by_rank and job.ranks > 1:
        torch.distributed.init_process_group("gloo")


def _ray_code() -> dict[str, Any]:
    return {"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parent)}}
