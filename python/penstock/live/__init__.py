# SPDX-License-Identifier: Apache-2.0
"""The views of a running pool: `penstock top`, the controller's dashboard, and metrics."""
