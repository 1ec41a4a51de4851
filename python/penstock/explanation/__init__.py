# SPDX-License-Identifier: Apache-2.0
"""penstock.explain(): what of a model could move, and what it costs, without moving anything."""
