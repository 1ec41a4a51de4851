# SPDX-License-Identifier: Apache-2.0
"""From a model's calls to a plan: capture, recording, lowering to the IR, planning, and the suffix
that stays.
"""
