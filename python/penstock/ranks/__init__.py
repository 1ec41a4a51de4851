# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job: their shares of an order, their agreements, and common batches."""
