# SPDX-License-Identifier: Apache-2.0
"""Access to fake tensors and symbolic sizes: a model's computation without its values."""

from __future__ import annotations

from penstock.compat.require import require

require(
    "fake_tensors",
    (
        "torch._dynamo.source.ConstantSource",
        "torch._guards.TracingContext",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        "torch.utils._sympy.functions.CleanDiv",
        "torch.utils._sympy.functions.FloorDiv",
        "torch.utils._sympy.functions.Max",
        "torch.utils._sympy.functions.Min",
        "torch.utils._sympy.functions.Mod",
        "torch.utils._sympy.functions.PythonMod",
        "torch.utils._sympy.symbol.SymT",
        "torch.utils._sympy.symbol.symbol_is_type",
    ),
    needed_by="penstock.offload",
    without="penstock.DataLoader works without it.",
)

from torch._dynamo.source import ConstantSource as ConstantSource
from torch._guards import TracingContext as TracingContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._sympy.functions import CleanDiv as CleanDiv
from torch.utils._sympy.functions import FloorDiv as FloorDiv
from torch.utils._sympy.functions import Max as Max
from torch.utils._sympy.functions import Min as Min
from torch.utils._sympy.functions import Mod as Mod
from torch.utils._sympy.functions import PythonMod as PythonMod
from torch.utils._sympy.symbol import SymT as SymT
from torch.utils._sympy.symbol import symbol_is_type as symbol_is_type

# The logger of fake tensors' reports about operators that they cannot compute.
LOGGER = "torch._subclasses.fake_tensor"
