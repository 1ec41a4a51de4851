# SPDX-License-Identifier: Apache-2.0
"""The tools that show where the time of a loader's steps is spent, to people and to their tools."""
