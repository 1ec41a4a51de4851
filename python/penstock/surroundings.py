# SPDX-License-Identifier: Apache-2.0
"""Settings of the process that change what operators mean. Workers have the defaults."""

from __future__ import annotations

import torch

from penstock.sizes import Unlowerable


def refuse_by_surroundings() -> None:
    """Raises Unlowerable where the meaning of operators depends on more than their arguments."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Unlowerable("forward runs under autocast")
    if torch.get_default_dtype() is not torch.float32:
        raise Unlowerable(f"the default dtype is {torch.get_default_dtype()}, not torch.float32")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Unlowerable("forward runs under a torch.func transform")
