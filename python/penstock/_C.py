# SPDX-License-Identifier: Apache-2.0
"""Stands in for the native module `penstock._C`: there may be one for each minor version of torch.

The one for the torch that is installed takes this module's place while it is imported.
"""

from __future__ import annotations

import sys

from penstock._native import load

sys.modules[__name__] = load(__name__)
