# SPDX-License-Identifier: Apache-2.0
"""Measurement of a running loader, and its consequences: the number of workers, the prices."""
