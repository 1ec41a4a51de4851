# SPDX-License-Identifier: Apache-2.0
"""Placeholder for the native module `penstock._C`. There may be one per minor version of torch.

The module for the installed torch replaces this one during its import.
"""

from __future__ import annotations

import sys

from penstock._native import load

sys.modules[__name__] = load(__name__)
