# SPDX-License-Identifier: Apache-2.0
"""Caches that know the order: of samples, and of rows that are read again and again."""
