# SPDX-License-Identifier: Apache-2.0
"""Compile one prefix with AOTInductor: a program that runs alongside the training.

    python -m penstock.cut.prefix_compiler JOB LIBRARY

JOB and LIBRARY are descriptors of unnamed files: a pickled `CompileJob` is read from one and the
shared library is written to the other. Temporary files of the compilers are in a folder of this
process, which is removed at its exit; the process ends when its parent does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.compat.dynamo import compile_ahead

PARENT_CHECK_S = 0.2
NICENESS = 10  # the training and its workers have priority
CALL_BY_NAME = "aoti_torch_proxy_executor_call_function("


@dataclass(frozen=True)
class CompileJob:
    """A graph for calls of one kind. An input without a value is not read."""

    graph: Any  # fx.GraphModule
    inputs: list[Any]  # by placeholder: tensors that do not change, numbers, or None
    leaves: list[tuple[int, torch.Tensor]]  # placeholder, and the batch's tensor, without values


class LeafModule(nn.Module):
    """Calls a captured graph with the batch's tensors and the other inputs of its capture."""

    def __init__(self, job: CompileJob) -> None:
        super().__init__()
        self.graph = job.graph
        self._inputs: list[Any] = []
        for index, value in enumerate(job.inputs):
            if isinstance(value, torch.Tensor):
                self.register_buffer(f"input_{index}", value.detach())
            self._inputs.append(None if isinstance(value, torch.Tensor) else value)
        self._tensors = [i for i, value in enumerate(job.inputs) if isinstance(value, torch.Tensor)]
        self._leaves = [index for index, _ in job.leaves]

    def forward(self, *leaves: torch.Tensor) -> Any:
        inputs = list(self._inputs)
        for index in self._tensors:
            # `get_buffer` takes as long as a small operator, which benches would attribute to
            # eager.
            inputs[index] = self._buffers[f"input_{index}"]
        for index, leaf in zip(self._leaves, leaves, strict=True):
            inputs[index] = leaf
        return self.graph(*inputs)


def compile_job(job: CompileJob, folder: str) -> bytes:
    """Return the shared library of a job, for calls from one thread.

    Raises the compilers' exceptions, and RuntimeError if the library would need operators that it
    can only call by name.
    """
    examples = tuple(
        torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()
        for _, leaf in job.leaves
    )
    torch.set_num_threads(1)  # this is compiled into the code
    with torch.no_grad():
        exported = torch.export.export(LeafModule(job), examples, strict=False)
        path = compile_ahead(exported.module(), examples, folder + "/prefix.so")
    for source in Path(folder).rglob("*.cpp"):
        if CALL_BY_NAME in source.read_text():
            raise RuntimeError("AOTInductor has no direct call for one of its operators")
    with open(path, "rb") as library:
        return library.read()


@contextlib.contextmanager
def own_folder() -> Iterator[str]:
    """Yield a folder for all output, removed at the end of this process or of its parent."""
    folder = tempfile.mkdtemp(prefix="penstock-compiler-")
    parent = os.getppid()

    def end(*_: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_S)
        end()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=watch, daemon=True).start()
    # Read when Inductor is imported. Processes for parallel compilation would have to be stopped
    # here.
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(job_fd: int, library_fd: int) -> None:
    os.nice(NICENESS)
    with own_folder() as folder:
        with open(job_fd, "rb") as file:
            job: CompileJob = torch.load(file, weights_only=False)
        library = compile_job(job, folder)
        with open(library_fd, "wb") as file:
            file.write(library)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except Exception:
        # The last line of the output is the reason. Modules may write more when the interpreter
        # exits.
        traceback.print_exc()
        status = 1
    else:
        status = 0
    sys.stderr.flush()
    os._exit(status)
