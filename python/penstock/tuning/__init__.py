# SPDX-License-Identifier: Apache-2.0
"""Measures a running loader, and asks for the consequences: how many workers, which prices."""
