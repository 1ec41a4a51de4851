# SPDX-License-Identifier: Apache-2.0
"""Turn a model's calls into a plan: capture, lowering to the IR, planning, and the suffix."""
