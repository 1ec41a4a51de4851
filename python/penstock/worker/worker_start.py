# SPDX-License-Identifier: Apache-2.0
"""Start worker processes: take turns with their imports, pickle their arguments once for all, and
delay Ctrl-C around a fork.

**Turns.** Importing torch keeps a core busy for more than a second. If all workers in new
interpreters import it at the same time, all are ready at the same late time; if they take turns,
the first ones make batches while the others start, and the last one is ready no later. Worker k
waits for worker k - core_count: for the end of file of a pipe whose other end only that worker
holds, and closes when its imports are done or when it dies. The trainer is not involved.

**Arguments.** ``Process.start()`` pickles its arguments into the new process's pipe, and waits
there until that process has imported the modules that it needs to read them, one worker after the
other. Here, the pipe carries a few descriptors, and the pickle is in memory that every process
maps. Reductions that need the process being started (locks, queues, connections, shared tensors)
pass descriptors through it. These are recorded while the pickle is made, and passed to every
process in the same order. Objects that may be consumed only once, or that count their holders, are
still pickled for each process: CUDA tensors, and storages under the sharing strategy
``file_system``.

**Ctrl-C.** Python runs hooks around a fork and discards their exceptions. An interrupt during a
hook is lost: by a child, which then serves a trainer that has given up, or by the trainer, which
continues training. An interrupt between the fork and the registration of the child at the trainer
leaves a child that is never ended. ``spawn`` and a fork server have no such hooks, and their
children end by themselves if they are not sent their work.
"""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection, context, popen_forkserver, popen_spawn_posix, reduction
from operator import itemgetter, methodcaller
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import get_sharing_strategy

# Importing a worker's main module may run any code, which may even wait for another worker.
_PERMIT_WAIT_S_MAX = 10.0
_MAPPED_BYTES_MIN = 64 << 10  # a smaller array is as fast in the pickle
_ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_held: list[DeferredInterrupt] = []  # at most the context in which this process was forked


class StartPermits:
    """The pipes between the workers of one pool. Confined to the thread that starts them.

    Call :meth:`close` when all workers are started, or when one could not be.
    """

    def __init__(self, worker_count: int, core_count: int) -> None:
        self._worker_count = worker_count
        self._core_count = core_count
        self._awaited: dict[int, int] = {}  # by the waiting worker
        self._held: int | None = None  # by the worker that is being started
        self._next_worker = 0

    def next_permit(self) -> StartPermit:
        """Return the turn of the next worker. The previous worker must have been started."""
        self._drop_held()
        worker_id, self._next_worker = self._next_worker, self._next_worker + 1
        if worker_id + self._core_count < self._worker_count:
            self._awaited[worker_id + self._core_count], self._held = os.pipe()
        return StartPermit(self._awaited.get(worker_id), self._held)

    def close(self) -> None:
        self._drop_held()
        while self._awaited:
            os.close(self._awaited.popitem()[1])

    def _drop_held(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            os.close(held)


class StartPermit:
    """One worker's turn, which must be the first of its arguments.

    It ends when it is unpickled: the worker's imports are done by then.
    """

    def __init__(self, awaited: int | None = None, held: int | None = None) -> None:
        self._awaited = awaited
        self._held = held

    def delay_start(self, process: Any) -> None:
        """Make ``process``, which is not started yet, wait for its turn."""
        if self._awaited is not None:
            process.name = _BlockingName.make(process.name, self._awaited)

    def __reduce__(self) -> Any:
        return _release_permit, (None if self._held is None else reduction.DupFd(self._held),)


def _release_permit(held: Any) -> StartPermit:
    if held is not None:
        os.close(held.detach())
    return StartPermit()


class _BlockingName(str):
    """The name of a process, which the process reads first, before its main module.

    It is pickled as calls that wait for the turn and then return the name. They call only functions
    of Python's standard library, since ours are not available without importing torch. A second
    pickle, in the process object, does not wait.
    """

    awaited: int | None

    @classmethod
    def make(cls, name: str, awaited: int) -> _BlockingName:
        made = cls(name)
        made.awaited = awaited
        return made

    def __reduce__(self) -> Any:
        if self.awaited is None:
            return str, (str(self),)
        fd = _Call(methodcaller("detach"), reduction.DupFd(self.awaited))
        self.awaited = None
        wait, close = _Call(connection.wait, [fd], _PERMIT_WAIT_S_MAX), _Call(os.close, fd)
        return itemgetter(2), ((wait, close, str(self)),)


class _Call:
    """The result of a function that is called on unpickling."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


class PickledOnce:
    """An argument for several processes, available as ``value`` here and in each of them.

    A forked process sees the trainer's object. Others get a copy that was pickled when the first of
    them started; start() then raises pickle's exceptions. Large arrays are mapped: a process has
    its own copy of the pages that it writes to, and shares the others. Call :meth:`close` when the
    last process has been started. Confined to the thread that starts them.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._pickle: _Pickle | None = None

    def __reduce__(self) -> Any:
        popen = context.get_spawning_popen()
        if self._pickle is None and _pickles_as_shipped(popen):
            self._pickle = _make_pickle(self.value, popen)
        if self._pickle is None:
            return PickledOnce, (self.value,)
        return _load, self._pickle.parts()

    def close(self) -> None:
        """Free the pickle, except memory that a process still maps."""
        if self._pickle is not None:
            self._pickle.close()
            self._pickle = None


def _pickles_as_shipped(popen: Any) -> bool:
    """Return whether Python's start methods use their original pickler, which ours extends."""
    if type(popen) not in (popen_spawn_posix.Popen, popen_forkserver.Popen):
        return False
    own = (reduction.dump, reduction.ForkingPickler)
    return sys.modules[type(popen).__module__].reduction is reduction and all(
        part.__module__ == reduction.__name__ for part in own
    )


class _Memory:
    """A memfd that is written sequentially and then sealed."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("worker-start", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.byte_count = 0
        self.error: OSError | None = None  # to distinguish it from errors of the user's reducers

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        try:
            while left:
                left = left[os.write(self.fd, left) :]
        except OSError as error:
            self.error = error
            raise
        byte_count = memoryview(data).nbytes
        self.byte_count += byte_count
        return byte_count

    def align(self) -> int:
        self.byte_count += -self.byte_count % _ALIGNMENT
        os.lseek(self.fd, self.byte_count, os.SEEK_SET)
        return self.byte_count

    def seal(self) -> None:
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def close(self) -> None:
        os.close(self.fd)


class _Pickle:
    """The pickle, and the handles that each process gets in addition to it."""

    def __init__(self) -> None:
        self.stream = _Memory()
        self.arrays = _Memory()
        self.recorder = _Recorder()
        self.singles: list[Any] = []  # pickled for each process
        self.pickler: _Pickler | None = None  # while its memo keeps the descriptors' owners alive

    def parts(self) -> tuple[Any, ...]:
        """Return the arguments of :func:`_load` for the process that is being started."""
        return (
            reduction.DupFd(self.stream.fd),
            reduction.DupFd(self.arrays.fd),
            [reduction.DupFd(fd) for fd in self.recorder.descriptors],
            self.singles,
        )

    def forget_objects(self) -> None:
        if self.pickler is not None:
            self.pickler.clear_memo()  # the pickler is part of a cycle
            self.pickler = None

    def close(self) -> None:
        self.forget_objects()
        self.stream.close()
        self.arrays.close()
        self.recorder.close()


def _make_pickle(value: Any, popen: Any) -> _Pickle | None:
    """Pickle for ``popen`` and later processes. Return None if there is no memory for that."""
    made = _Pickle()
    context.set_spawning_popen(made.recorder)  # type: ignore[arg-type]  # all that reductions use
    try:
        made.pickler = _Pickler(made)
        made.pickler.dump(value)
        made.stream.seal()
        made.arrays.seal()
    except BaseException as error:
        made.close()
        if error in (made.stream.error, made.arrays.error):
            return None
        raise
    finally:
        context.set_spawning_popen(popen)
    if not made.recorder.descriptors:
        made.forget_objects()
    return made


class _Recorder:
    """Replaces the process being started, and records the descriptors that reductions pass."""

    def __init__(self) -> None:
        self.descriptors: dict[int, int] = {}  # with the index of each among them
        self._own: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        if fd in self.descriptors:  # each recipient closes its descriptor
            fd = os.dup(fd)
            self._own.append(fd)
        self.descriptors[fd] = len(self.descriptors)
        return fd

    def DupFd(self, fd: int) -> _Descriptor:  # noqa: N802  # what multiprocessing calls it
        return _Descriptor(self.descriptors[fd])

    def close(self) -> None:
        while self._own:
            os.close(self._own.pop())


class _Descriptor:
    """Represents a descriptor in a pickle, by its index among the descriptors of each process."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __reduce__(self) -> Any:
        return _descriptor, (self._index,)


class _Pickler(reduction.ForkingPickler):
    """Writes large arrays next to the pickle. Reducers are by type: other objects cost no time."""

    def __init__(self, made: _Pickle) -> None:
        super().__init__(made.stream)
        self._made = made
        self._indices: dict[int, int] = {}
        table: dict[type, Callable[[Any], Any]] = self.dispatch_table
        table.setdefault(np.ndarray, self._reduce_array)
        if get_sharing_strategy() == "file_system":
            table[torch.UntypedStorage] = self._reduce_single
        for kind in (torch.Tensor, torch.nn.Parameter):
            table[kind] = self._reduce_tensor_with(table[kind])

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        is_plain = array.dtype.isnative and not array.dtype.hasobject
        if array.nbytes < _MAPPED_BYTES_MIN or not is_plain or not array.flags.forc:
            return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        order = "C" if array.flags.c_contiguous else "F"
        offset = self._made.arrays.align()
        self._made.arrays.write(array.ravel(order="K").view(np.uint8))
        # As in a plain pickle: protocol 5, Python 3.14's default, keeps an array read-only.
        is_writable = array.flags.writeable or pickle.DEFAULT_PROTOCOL < 5
        return _array, (array.shape, array.dtype, offset, order, is_writable)

    def _reduce_tensor_with(self, reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def reduce_tensor(tensor: torch.Tensor) -> Any:
            return reduce(tensor) if tensor.device.type == "cpu" else self._reduce_single(tensor)

        return reduce_tensor

    def _reduce_single(self, thing: Any) -> Any:
        index = self._indices.setdefault(id(thing), len(self._made.singles))
        if index == len(self._made.singles):
            self._made.singles.append(thing)
        return _single, (index,)


def _array(shape: tuple[int, ...], dtype: Any, offset: int, order: Any, is_writable: bool) -> Any:
    raise AssertionError("read by _Unpickler")


def _descriptor(index: int) -> Any:
    raise AssertionError("read by _Unpickler")


def _single(index: int) -> Any:
    raise AssertionError("read by _Unpickler")


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Any, arrays: Any, descriptors: list[Any], singles: list[Any]):
        super().__init__(stream)
        self._arrays = arrays
        self._own = {
            "_array": self._map_array,
            "_descriptor": descriptors.__getitem__,
            "_single": singles.__getitem__,
        }

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in self._own:
            return self._own[name]
        return super().find_class(module, name)

    def forget(self) -> None:
        """Remove this object from its cycle, so that its memo is freed, too."""
        self._own.clear()

    def _map_array(
        self, shape: tuple[int, ...], dtype: Any, offset: int, order: Any, is_writable: bool
    ) -> np.ndarray[Any, Any]:
        array = np.ndarray(shape, dtype, self._arrays, offset, order=order)
        array.flags.writeable = is_writable
        return array


def _load(stream: Any, arrays: Any, descriptors: list[Any], singles: list[Any]) -> PickledOnce:
    """Read the result of :func:`_make_pickle` in the new process."""
    with _map(stream, mmap.mmap, mmap.ACCESS_READ) as mapped, _NoCollections():
        private = _map(arrays, PrivateMap, mmap.ACCESS_COPY)
        unpickler = _Unpickler(mapped, private, descriptors, singles)
        value = unpickler.load()
        unpickler.forget()
    return PickledOnce(value)


class _NoCollections:
    """Disables the collector: millions of new objects would trigger it again and again."""

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *exception: object) -> None:
        if self._was_enabled:
            gc.enable()


class PrivateMap(mmap.mmap):
    """Memory whose changes only this process sees."""


def _map(descriptor: Any, kind: type[mmap.mmap], access: int) -> Any:
    fd = descriptor.detach()
    try:
        # Python refuses to map an empty file.
        return kind(fd, 0, access=access) if os.fstat(fd).st_size > 0 else None
    finally:
        os.close(fd)


class DeferredInterrupt:
    """A context that records SIGINT; the signal takes effect at the end of the context.

    A child that is forked in the context calls `release_in_child`. Only the main thread is
    interrupted, so in other threads this has no effect; nor if SIGINT is ignored or has the
    system's default action.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._frame: FrameType | None = None
        self._is_noted = False

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            _held.append(self)
            signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Restore SIGINT's handler, and call it if the signal was recorded, which may raise."""
        if self._handler is None:
            return
        handler, self._handler = self._handler, None
        _held.remove(self)
        signal.signal(signal.SIGINT, handler)
        if self._is_noted:
            handler(signal.SIGINT, self._frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_noted, self._frame = True, frame


def release_in_child() -> None:
    """End the context in which this process was forked; raise as its end does."""
    while _held:
        _held[-1].release()
