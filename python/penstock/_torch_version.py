# SPDX-License-Identifier: Apache-2.0
"""Refuses to load the native part beside a torch that it was not built for.

Torch's C++ interface is not stable. A mismatch would show as an undefined symbol or a crash.
"""

from __future__ import annotations

import torch

from penstock import _build_info

_RUNNING = ".".join(torch.__version__.split(".")[:2])

if _RUNNING != _build_info.TORCH_MINOR_VERSION:
    raise ImportError(
        f"penstock was built for torch {_build_info.TORCH_MINOR_VERSION} and this is torch "
        f"{torch.__version__}; build penstock again beside this torch "
        f"(pip install --no-build-isolation --force-reinstall .), "
        f"or install torch {_build_info.TORCH_MINOR_VERSION}"
    )
