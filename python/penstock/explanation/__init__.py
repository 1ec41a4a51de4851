# SPDX-License-Identifier: Apache-2.0
"""penstock.explain(): the calls of a model that could move, and their costs, without moving any."""
