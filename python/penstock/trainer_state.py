# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Hugging Face's Trainer that hold the state of its training loader.

The Trainer saves no loader. When it resumes in the middle of an epoch, it calls accelerate's
`skip_first_batches`, which makes another loader that leaves out indices, or reads an iterable
dataset again. Here a callback saves and loads the loader's state, and `skip_first_batches` returns
a loader that is already at its place.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.drop_in import rebind
from penstock.loader.dataloader import DataLoader
from penstock.loader.loader_run import innermost_loader

_logger = logging.getLogger(__name__)


def checkpoint_loader(trainer: Any, resume_from: str | Path | None = None) -> None:
    """Save the training loader with each checkpoint of a Trainer, and resume from its state.

    Call it once, before ``trainer.train()``. Each rank saves ``loader_state_<rank>.json`` in the
    folder of the checkpoint. A run that resumes in the middle of an epoch continues the stream of
    the loader at that place, without reading samples or dataset items again. A run that resumes
    between two epochs needs no state. If a checkpoint has no state of the loader, a warning is
    logged, and the Trainer skips batches as it does without this call.

    Needs ``seeding="batch"`` for the same random numbers in workers, as passed to
    :func:`penstock.install`.

    Args:
        trainer (transformers.Trainer): The Trainer, or an instance of a class derived from it. Its
            training loader must be penstock's, by :func:`penstock.install` or from its method
            ``get_train_dataloader``.
        resume_from (str | Path | None): The folder passed to ``trainer.train(
            resume_from_checkpoint=...)``. Default: None, which means the Trainer's own
            ``checkpoint-<step>`` in its ``output_dir``.

    Raises:
        TypeError: If ``trainer`` is not a Trainer, or its training loader is not penstock's; the
            latter is raised by ``trainer.train()``.
        ValueError: If the state is from another batch than the checkpoint; raised by
            ``trainer.train()``.

    See Also:
        :func:`penstock.install`, :meth:`penstock.DataLoader.state_dict`

    Example::

        penstock.install(seeding="batch")
        trainer = Trainer(model, arguments, train_dataset=dataset)
        penstock.checkpoint_loader(trainer)
        trainer.train(resume_from_checkpoint=True)
    """
    from accelerate.data_loader import skip_first_batches
    from transformers import Trainer, TrainerCallback

    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"trainer must be a transformers.Trainer, got {type(trainer).__name__}; pass the "
            f"Trainer itself"
        )
    if not isinstance(skip_first_batches, _SkipOnce):
        rebind(skip_first_batches, _SkipOnce(skip_first_batches))

    class LoaderStates(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(
            self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any
        ) -> None:
            _own(train_dataloader)
            if state.global_step > 0:
                folder = resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}"
                _load(train_dataloader, _file(folder, args))

        def on_save(
            self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any
        ) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            _file(folder, args).write_text(json.dumps(train_dataloader.state_dict()))

    trainer.add_callback(LoaderStates())


class _SkipOnce:
    """accelerate's `skip_first_batches`, which leaves a loader that has loaded a state as it is."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        functools.update_wrapper(self, original)

    def __call__(self, dataloader: Any, num_batches: int = 0) -> Any:
        base = innermost_loader(dataloader)
        if not isinstance(base, DataLoader) or base._run.loaded_state is None:
            return self.original(dataloader, num_batches)
        count = base.state_dict()["_sampler_iter_yielded"]
        if count != num_batches:
            raise ValueError(
                f"the loader's state must be from batch {num_batches} of the epoch, as the "
                f"checkpoint is, got batch {count}; load the state saved with this checkpoint"
            )
        return dataloader


def _own(loader: Any) -> DataLoader[Any]:
    base = innermost_loader(loader)
    if not isinstance(base, DataLoader):
        raise TypeError(
            f"the Trainer's training loader must be penstock's, got {type(base).__module__}."
            f"{type(base).__qualname__}; call penstock.install() before trainer.train()"
        )
    return base


def _file(folder: str | Path, args: Any) -> Path:
    return Path(folder) / f"loader_state_{args.process_index}.json"


def _load(loader: Any, file: Path) -> None:
    if not file.exists():
        _logger.warning(
            "%s does not exist, so the Trainer skips batches to resume; pass the checkpoint's "
            "folder to penstock.checkpoint_loader(trainer, resume_from=...)",
            file,
        )
        return
    state = json.loads(file.read_text())
    if not state["_iterator_finished"]:  # else the Trainer restores the generators by itself
        loader.load_state_dict(state)
