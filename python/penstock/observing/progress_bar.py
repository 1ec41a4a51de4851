# SPDX-License-Identifier: Apache-2.0
"""``penstock.progress()``: tqdm's bar, which says how much the loader is waited for."""

from __future__ import annotations

from typing import Any

from penstock.observing.waiting_meter import WaitingMeter


def progress(loader: Any, **options: Any) -> Any:
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
