# SPDX-License-Identifier: Apache-2.0
"""Apply plans to running models: offload() and detach(), the cuts in use, and repricing."""
