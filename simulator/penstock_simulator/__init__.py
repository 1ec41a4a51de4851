# SPDX-License-Identifier: Apache-2.0
"""The command ``penstock simulate``, with its tables."""
