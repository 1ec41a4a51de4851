# SPDX-License-Identifier: Apache-2.0
"""The version of penstock, and the minor versions of torch that it supports.

They are defined only here: setup.py, CMake, the tests and the scripts of the Makefile read this
file. It has no imports, so that they can.
"""

from __future__ import annotations

__version__ = "0.1.0"

# Oldest first. A missing version between the ends would be refused.
TORCH_MINORS = ("2.11", "2.12", "2.13", "2.14", "2.15")
