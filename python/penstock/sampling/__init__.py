# SPDX-License-Identifier: Apache-2.0
"""Orders of a dataset's samples."""
