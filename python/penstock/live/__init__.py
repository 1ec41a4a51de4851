# SPDX-License-Identifier: Apache-2.0
"""What shows a running pool: penstock top, the dashboard of a controller, and its metrics."""
