# SPDX-License-Identifier: Apache-2.0
"""penstock.explain(): which calls of a model could move, and their costs, without moving any."""
