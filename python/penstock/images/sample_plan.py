# SPDX-License-Identifier: Apache-2.0
"""`explain_sample`: which steps of making a sample are native, and their times.

One sample is fetched as a worker would fetch it, under a profile function that sees each call into
the libraries of images and sound.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from penstock.images import VARIABLE, native_images
from penstock.stream.batch_seeds import AllGeneratorsKept

# Whose calls are steps, by the first part of a module's name.
_LIBRARIES = frozenset(
    "PIL torchvision torchaudio soundfile librosa cv2 albumentations skimage imageio av kornia "
    "pyarrow h5py".split()
)
# Whose callers in these modules, or with these classes, are not steps: they only call others.
_DATASETS = "torchvision.datasets"
_CONTAINERS = frozenset("Compose RandomApply RandomChoice RandomOrder Sequential".split())
_IMAGE_MODULES = ("PIL.", "torchvision.io")
_WRAPPERS_MAX = 8  # datasets around one another, such as Subset
_LAZY = "penstock.images.lazy_images"
# The functions of library_calls that are steps, and the modules whose functions they replace.
_CALLS = "penstock.images.library_calls"
_CALL_NAMES = {
    "enhance": "ImageEnhance.enhance",
    "expand": "ImageOps.expand",
    "exif_transpose": "ImageOps.exif_transpose",
    "adjust_hue": "functional.adjust_hue",
    "to_grayscale": "functional.to_grayscale",
}
_TIMED = 5  # samples, of which the median is shown
_STEPS_MAX = 100  # of one sample
_SHORT_S = 20e-6  # calls without an image that take less are no steps


@dataclass(frozen=True, slots=True)
class SampleStep:
    """One call into a library while a sample is made.

    Attributes:
        name (str): The transform's class or the function, such as ``RandomResizedCrop``.
        is_native (bool): Whether penstock's kernels make its result.
        detail (str): The native work, or why the step is the library's.
        line (str): File and line of the program's call; empty if a dataset of a library made it.
        seconds (float): Time in the call, with the overhead of watching.
    """

    name: str
    is_native: bool
    detail: str
    line: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How one sample of a dataset is made. ``str()`` shows it as a table.

    Attributes:
        dataset (str): Class of the dataset.
        steps (tuple[SampleStep, ...]): The calls in their order; at most 100.
        seconds (float): Median time of the sample in a worker of penstock.
        seconds_before (float): The same without native images.
        refused (str): Why this process has no native images; empty if it has.
    """

    dataset: str
    steps: tuple[SampleStep, ...]
    seconds: float
    seconds_before: float
    refused: str = ""

    def __str__(self) -> str:
        native = sum(step.is_native for step in self.steps)
        lines = [
            f"A sample of {self.dataset}: {native} of {len(self.steps)} steps are native; "
            f"{1e3 * self.seconds:.2f} ms, {1e3 * self.seconds_before:.2f} ms without"
        ]
        if self.refused:
            lines.append(f"No step can be native: {self.refused}")
        width = max((len(step.name) for step in self.steps), default=0)
        for step in self.steps:
            line = f"  {step.name:<{width}}  {'native' if step.is_native else 'Python'}"
            line += f"  {1e3 * step.seconds:6.2f} ms  {step.detail}"
            lines.append(line + (f"  ({step.line})" if step.line else ""))
        return "\n".join(lines)


def explain_sample(dataset: Any, index: Any = 0) -> SamplePlan:
    """Return how a worker makes ``dataset[index]``: which steps are native, and their times.

    The sample is fetched several times in this process, with one thread of torch as in a worker,
    and the random generators of torch, NumPy and Python are restored. A dataset or transform with
    a state changes as by any other fetch.

    Args:
        dataset (torch.utils.data.Dataset): A map-style dataset.
        index (Any): Index or key of the sample. Default: 0.

    Returns:
        SamplePlan: The steps, in seconds.

    Raises:
        TypeError: If ``dataset`` is iterable-style or has no ``__getitem__``.

    Example:
        >>> print(explain_sample(ImageFolder("photographs", transform)))  # doctest: +SKIP

    See also:
        :func:`penstock.explain`: the calls of a model that workers can make.
    """
    if isinstance(dataset, torch.utils.data.IterableDataset):  # which inherits a __getitem__
        raise TypeError(
            f"dataset must be map-style, got the iterable-style {type(dataset).__name__}; explain "
            "the map-style dataset that it reads"
        )
    if not hasattr(type(dataset), "__getitem__"):
        raise TypeError(
            f"dataset must be map-style, with __getitem__, got {type(dataset).__name__}; explain "
            "the dataset that its samples are from"
        )

    def fetch() -> None:
        with AllGeneratorsKept():
            dataset[index]

    watch = _Watch()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        fetch()  # imports modules
        before = _median_seconds(fetch)
        with _native_images(watch.note) as refused:
            fetch()  # tests the functions of the libraries
            with AllGeneratorsKept():
                watch.run(lambda: dataset[index])
            seconds = before if refused else _median_seconds(fetch)
    finally:
        torch.set_num_threads(threads)
    return SamplePlan(type(dataset).__name__, tuple(watch.steps), seconds, before, refused)


def reads_images(dataset: Any) -> bool:
    """Return whether the samples of a map-style dataset seem to be images, without fetching one.

    They are if its class, or the one that it selects from, is one of torchvision's, or is defined
    in a module that refers to Pillow or torchvision's reading functions.
    """
    for _ in range(_WRAPPERS_MAX):
        if isinstance(dataset, torch.utils.data.IterableDataset):
            return False
        for cls in type(dataset).__mro__:
            module = sys.modules.get(cls.__module__)
            names = vars(module) if module is not None else {}
            if cls.__module__.startswith(_DATASETS) or any(map(_makes_images, [*names.values()])):
                return True
        inner = vars(dataset) if hasattr(dataset, "__dict__") else {}
        parts = inner.get("datasets") or [inner.get("dataset")]
        if not isinstance(parts, list) or parts[0] is None:
            return False
        dataset = parts[0]
    return False


def _makes_images(value: Any) -> bool:
    if isinstance(value, ModuleType):
        name = value.__name__
    elif isinstance(value, (type, FunctionType)):
        name = value.__module__ or ""
    else:
        return False
    return name == "PIL" or name.startswith(_IMAGE_MODULES)


def sample_text(dataset: Any) -> str:
    """Return the text of a dataset's sample plan, or why there is none; "" if it reads no
    images."""
    if not reads_images(dataset):
        return ""
    try:
        return str(explain_sample(dataset))
    except Exception as error:
        text = str(error).partition("\n")[0]
        return f"Its first sample could not be explained: {type(error).__name__}: {text}"


def _median_seconds(fetch: Callable[[], None]) -> float:
    def timed() -> float:
        began = time.perf_counter()
        fetch()
        return time.perf_counter() - began

    return statistics.median(timed() for _ in range(_TIMED))


class _native_images:  # noqa: N801
    """Context: this process makes images natively, and reports each call to ``note``."""

    def __init__(self, note: Callable[[str, bool], None]) -> None:
        self._note = note
        self._uninstall: Callable[[], None] | None = None

    def __enter__(self) -> str:
        if os.environ.get(VARIABLE, "1") == "0":
            return f"{VARIABLE}=0 is set"
        if "PIL.Image" not in sys.modules:
            return "the program has not imported Pillow"
        from penstock.images import lazy_images, library_calls

        self._uninstall = lazy_images.uninstall
        started = lazy_images.install() or lazy_images.start()
        if isinstance(started, str):
            return started
        # So that no image of the explanation is made twice.
        started.comparisons.skip_first()
        lazy_images.install_to_tensor()
        library_calls.install()
        native_images.set_note(self._note)
        return ""

    def __exit__(self, *_: object) -> None:
        native_images.set_note(None)
        if self._uninstall is not None:
            self._uninstall()


class _Watch:
    """A profile function. Not reentrant; for the thread that calls `run`."""

    def __init__(self) -> None:
        self.steps: list[SampleStep] = []
        self._of_step: FrameType | None = None
        self._name = self._line = ""
        self._began = 0.0
        self._notes: list[tuple[str, bool]] = []

    def run(self, call: Callable[[], Any]) -> None:
        before = sys.getprofile()
        sys.setprofile(self._on_event)
        try:
            call()
        finally:
            sys.setprofile(before)

    def note(self, what: str, is_native: bool) -> None:
        """Take a report of a lazy image."""
        self._notes.append((what, is_native))

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self._of_step is None:
            name = _name_of(frame)
            if name and len(self.steps) < _STEPS_MAX:
                self._begin(name, frame, frame.f_back)
        elif event == "c_call" and self._of_step is None:
            module = getattr(argument, "__module__", None) or ""
            if module.partition(".")[0] in _LIBRARIES and len(self.steps) < _STEPS_MAX:
                self._begin(f"{module}.{argument.__name__}", frame, frame)
        elif event == "return" and frame is self._of_step:
            self._end(argument)
        elif event in ("c_return", "c_exception") and frame is self._of_step:
            # A Python frame that is a step also makes calls of C, which do not end it.
            if _name_of(frame) != self._name:
                self._end(None)

    def _begin(self, name: str, frame: FrameType, caller: FrameType | None) -> None:
        self._of_step, self._name, self._line = frame, name, _line_of(caller)
        self._notes.clear()
        self._began = time.perf_counter()

    def _end(self, result: Any) -> None:
        seconds = time.perf_counter() - self._began
        # Lazy images report only calls that they treat: a flip that is not drawn returns its input.
        is_lazy = getattr(type(result), "is_lazy_image", False)
        is_native = (bool(self._notes) or is_lazy) and all(one for _, one in self._notes)
        detail = "; ".join(dict.fromkeys(what for what, _ in self._notes))
        if not detail:
            detail = "changes nothing here" if is_lazy else _reason(result)
        if self._notes or seconds >= _SHORT_S or _is_image(result):
            self.steps.append(SampleStep(self._name, is_native, detail, self._line, seconds))
        self._of_step = None


def _is_image(value: Any) -> bool:
    is_of_pillow = hasattr(value, "mode") and hasattr(value, "size")
    return is_of_pillow or isinstance(value, (torch.Tensor, np.ndarray))


def _reason(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return "the library's: works on a tensor"
    format_name = getattr(result, "format", None)
    if isinstance(format_name, str) and hasattr(result, "mode"):
        return f"the library's: a {format_name} file of mode {result.mode}"
    return "the library's"


def _name_of(frame: FrameType) -> str:
    """Return the step's name of a Python call; empty if the call is none."""
    module = frame.f_globals.get("__name__") or ""
    function = frame.f_code.co_name
    owner = frame.f_locals.get("self")
    if module == _LAZY:
        if function == "to_tensor":
            return "functional.to_tensor"
        is_step = getattr(type(owner), "is_lazy_image", False) and not function.startswith("_")
        return f"{type(owner).__name__}.{function}" if is_step else ""
    if module == _CALLS:
        return _CALL_NAMES.get(function, "")
    if module.partition(".")[0] not in _LIBRARIES or module.startswith(_DATASETS):
        return ""
    if function.startswith(("<", "__")) and function != "__call__":
        return ""
    if owner is None:
        return f"{module.rpartition('.')[2]}.{function}"
    kind = type(owner).__name__
    if kind in _CONTAINERS:
        return ""
    return kind if function in ("__call__", "forward") else f"{kind}.{function}"


def _line_of(frame: FrameType | None) -> str:
    """Return the line of the program that leads to a call; empty if only libraries do."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        root = module.partition(".")[0]
        if root == "penstock" and module not in (_LAZY, _CALLS):
            return ""
        if root not in _LIBRARIES and root not in ("torch", "penstock"):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
