# SPDX-License-Identifier: Apache-2.0
"""Track the batch of each tensor, and provide tensors whose values are computed on demand."""
