# SPDX-License-Identifier: Apache-2.0
"""Runs a program repeatedly with other options of its loader, and reports its bottleneck."""
