# SPDX-License-Identifier: Apache-2.0
"""Engines, which start and stop a pool's workers, and the adapter that executes the controller's
orders with an engine."""
