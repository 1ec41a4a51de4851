# SPDX-License-Identifier: Apache-2.0
"""The DataLoader, its options, its state and its iterators."""
