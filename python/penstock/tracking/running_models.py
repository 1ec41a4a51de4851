# SPDX-License-Identifier: Apache-2.0
"""Whether an offloaded model is running or being captured, and Dynamo's messages meanwhile.

A program that offloads a model has asked for no compiler. Dynamo's advice on how to be captured in
fewer graphs is of no use to it: `loader.plan` has the result of the capture.
"""

from __future__ import annotations

import logging
import os
import threading

from penstock.seams.dynamo import ADVICE


class _Running(threading.local):
    depth = 0


_running = _Running()  # of each thread


def is_model_running() -> bool:
    return _running.depth > 0


def enter_model() -> None:
    """To be called when an offloaded model begins to run, and `leave_model` when it ends."""
    _running.depth += 1


def leave_model() -> None:
    _running.depth -= 1


def keep_advice_from_log() -> None:
    """Leaves Dynamo's advice about offloaded models out of the log. With TORCH_LOGS it is wanted,
    and stays."""
    if not os.environ.get("TORCH_LOGS"):
        for name in ADVICE:
            logging.getLogger(name).addFilter(_is_news)  # which adds the same one once


def _is_news(record: logging.LogRecord) -> bool:
    return not (is_model_running() and str(record.msg).lstrip().startswith(ADVICE[record.name]))
