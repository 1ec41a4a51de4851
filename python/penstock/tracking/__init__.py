# SPDX-License-Identifier: Apache-2.0
"""Which tensor came from which batch, and tensors whose values wait until they are asked for."""
