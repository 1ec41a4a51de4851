# SPDX-License-Identifier: Apache-2.0
"""Runs a program again and again with other options of its loader, and says what limits it."""
