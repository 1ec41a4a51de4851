# SPDX-License-Identifier: Apache-2.0
"""The stream of batches, as Python sees it: sampler and generators, seeds, indices, and the
progress of an epoch.
"""
