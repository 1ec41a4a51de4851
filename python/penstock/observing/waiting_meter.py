# SPDX-License-Identifier: Apache-2.0
"""How long a loader is waited for: numbers for a logger, a few words for a progress bar, and tqdm's
bar with these words."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock.loader.dataloader import DataLoader
from penstock.loader.loader_run import innermost_loader
from penstock.loader.step_times import PARTS, WAITING_PARTS, StepTimes

if TYPE_CHECKING:
    from tqdm.auto import tqdm


class WaitingMeter:
    """Measure how long a trainer waits for a loader, and for what.

    ``str()`` of a meter is a short text such as "waiting 12 % (the dataset)" about the steps of the
    last ``every_s`` seconds or so. It stays the same until it is updated, so a progress bar may ask
    for it as often as needed. :meth:`scalars` returns numbers for TensorBoard, Weights & Biases and
    similar. The text, the numbers and further meters of the loader are independent of each other.
    Use it from the training thread.

    Args:
        loader (DataLoader): A ``penstock.DataLoader``, or the result of accelerate's ``prepare()``
            or Fabric's ``setup_dataloaders()`` for one.
        every_s (float): Seconds between updates of the text, 0 or more and finite. Default: 1.0.

    Raises:
        TypeError: If ``loader`` is another loader.
        ValueError: If ``every_s`` is not such a number of seconds.

    See Also:
        :func:`penstock.progress`: a tqdm bar that shows this text.

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
            raise ValueError(f"every_s must be a number of seconds >= 0, got {every_s!r}")
        self._loader = _own_loader(loader)
        self._every_s = every_s
        now = self._now()
        self._last_ledger = now  # the ledger at the last call of scalars()
        self._shown = now
        self._text = ""
        self._text_until = 0.0

    def scalars(self, prefix: str = "penstock/") -> dict[str, float]:
        """Return the means per step since the last call.

        Args:
            prefix (str): Prepended to each name. Default: ``"penstock/"``.

        Returns:
            dict[str, float]: ``waiting_share``, the waiting time as a share of the total from 0 to
            1; ``step_s``, the seconds per step; and the parts of it in seconds, ``compute_s``,
            ``dataset_s`` and so on, named as in ``loader.stats().ledger``. Empty if there was no
            step since the last call.
        """
        now = self._now()
        window, self._last_ledger = now - self._last_ledger, now
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
            f"a penstock.DataLoader is required, got a {kind}, which records no waiting times; "
            "import it instead of torch's, or call penstock.install() before creating the loader"
        )
    return found


def progress(loader: torch.utils.data.DataLoader[Any], **options: Any) -> tqdm[Any]:
    """Show a tqdm progress bar over the batches of a loader, with the trainer's waiting time.

    A text such as "waiting 12 % (the dataset)" after the numbers covers the steps since the bar was
    last updated, at least one second. A postfix set by the program is shown before it.

    Args:
        loader (DataLoader): A ``penstock.DataLoader``, or the result of accelerate's ``prepare()``
            or Fabric's ``setup_dataloaders()`` for one.
        **options (Any): Arguments of ``tqdm.tqdm``: ``desc``, ``total``, ``disable`` and so on.

    Returns:
        tqdm.auto.tqdm: The bar; iterate over it to read the batches.

    Raises:
        ImportError: If tqdm is not installed.
        TypeError: If ``loader`` is another loader.

    Example::

        for images, labels in penstock.progress(loader, desc="epoch 1"):
            ...
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError(
            "penstock.progress() requires tqdm, which is not installed: pip install tqdm; "
            "penstock.WaitingMeter provides the same text for any other progress bar"
        ) from error
    meter = WaitingMeter(loader)

    class WaitingBar(tqdm):  # type: ignore[misc]
        @property
        def format_dict(self) -> dict[str, Any]:
            facts: dict[str, Any] = super().format_dict
            parts = [part for part in (facts.get("postfix"), str(meter)) if part]
            return {**facts, "postfix": ", ".join(parts)}

    return WaitingBar(loader, **options)
