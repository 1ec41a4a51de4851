# SPDX-License-Identifier: Apache-2.0
"""Measures a running loader, and asks what follows from that: how many workers, which prices."""
