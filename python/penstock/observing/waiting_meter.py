# SPDX-License-Identifier: Apache-2.0
"""How long a loader is waited for: numbers for a logger, a few words for a progress bar, and tqdm's
bar with these words."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock.loader.dataloader import DataLoader
from penstock.loader.loader_face import innermost_loader
from penstock.loader.step_times import PARTS, WAITING_PARTS, StepTimes

if TYPE_CHECKING:
    from tqdm.auto import tqdm


class WaitingMeter:
    """What a trainer waits for, of one loader, since the last time that it was asked.

    ``str()`` of a meter is a few words such as "waiting 12 % (the dataset)", of the steps of the
    last second or so. They stay the same until the next ones are made, so that a bar may ask as
    often as it likes. :meth:`scalars` are numbers for TensorBoard, Weights & Biases and the like.
    The two do not disturb each other, nor other meters of the loader. To be used by the training
    thread.

    loader: penstock's ``DataLoader``, or what accelerate's ``prepare()`` or Fabric's
    ``setup_dataloaders()`` made of one.
    every_s: the words are made anew after so many seconds.

    Raises ``TypeError`` for another loader, and ``ValueError`` where ``every_s`` is no number of
    seconds from 0 on.

    Example::

        meter = penstock.WaitingMeter(loader)
        for step, batch in enumerate(loader, 1):
            ...
            if step % 50 == 0:
                print(meter, meter.scalars())
    """

    def __init__(self, loader: torch.utils.data.DataLoader[Any], *, every_s: float = 1.0) -> None:
        if (
            isinstance(every_s, bool)
            or not isinstance(every_s, (int, float))
            or (not 0 <= every_s < math.inf)
        ):
            raise ValueError(f"every_s is {every_s!r}; seconds from 0 on are expected")
        self._loader = _own_loader(loader)
        self._every_s = every_s
        now = self._now()
        self._told = now  # the ledger at the last call of scalars()
        self._shown = now
        self._text = ""
        self._text_until = 0.0

    def scalars(self, prefix: str = "penstock/") -> dict[str, float]:
        """The means of a step since the last call, by name.

        ``waiting_share`` is the part of the time that was waiting, from 0 to 1, ``step_s`` the
        seconds of a step, and ``compute_s``, ``dataset_s`` and so on are its parts, in seconds, as
        ``loader.stats().ledger`` has them. Each name begins with ``prefix``. Empty where there was
        no step since the last call.
        """
        now = self._now()
        window, self._told = now - self._told, now
        if window.steps <= 0:
            return {}
        means = {name: getattr(window, name) / window.steps for name in PARTS}
        facts = {"waiting_share": window.waiting_share, "step_s": window.total_s / window.steps}
        return {f"{prefix}{name}": value for name, value in {**facts, **means}.items()}

    def __repr__(self) -> str:
        return f"WaitingMeter({self._loader!r}, every_s={self._every_s:g})"

    def __str__(self) -> str:
        clock = time.monotonic()
        if clock >= self._text_until:
            now = self._now()
            window = now - self._shown
            if window.steps > 0:
                self._text = waiting_text(window)
                self._shown = now
                self._text_until = clock + self._every_s
        return self._text

    def _now(self) -> StepTimes:
        return self._loader.stats().ledger


def waiting_text(times: StepTimes) -> str:
    """Return the waiting share of these steps, and the largest cause."""
    longest = max(WAITING_PARTS, key=lambda name: float(getattr(times, name)))
    percent = round(100 * times.waiting_share)
    return f"waiting {percent} %" + (f" ({PARTS[longest]})" if percent > 0 else "")


def _own_loader(loader: Any) -> DataLoader[Any]:
    found = innermost_loader(loader)
    if not isinstance(found, DataLoader):
        kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
        raise TypeError(
            f"a {kind} does not count what it is waited for; a penstock.DataLoader is expected: "
            f"import it in the place of torch's, or call penstock.install() before the loader is "
            f"made"
        )
    return found


def progress(loader: torch.utils.data.DataLoader[Any], **options: Any) -> tqdm[Any]:
    """tqdm's bar over the batches of a loader, with what the trainer waits for behind it.

    Behind the numbers stands "waiting 12 % (the dataset)", of the steps since the bar was drawn
    last, a second at least. A postfix of the program's stands before it.

    loader: penstock's ``DataLoader``, or what accelerate's ``prepare()`` made of one.
    options: those of ``tqdm.tqdm``: ``desc``, ``total``, ``disable`` and so on.

    Returns a ``tqdm.auto.tqdm``, to be iterated over, whose methods are the bar's.

    Raises ``ImportError`` without tqdm, and ``TypeError`` for another loader.

    Example::

        for images, labels in penstock.progress(loader, desc="epoch 1"):
            ...
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError(
            "penstock.progress() draws its bar by tqdm, which is not installed: pip install tqdm; "
            "penstock.WaitingMeter gives the same words for any other bar"
        ) from error
    meter = WaitingMeter(loader)

    class WaitingBar(tqdm):  # type: ignore[misc]
        @property
        def format_dict(self) -> dict[str, Any]:
            facts: dict[str, Any] = super().format_dict
            parts = [part for part in (facts.get("postfix"), str(meter)) if part]
            return {**facts, "postfix": ", ".join(parts)}

    return WaitingBar(loader, **options)
