# SPDX-License-Identifier: Apache-2.0
"""Jobs for a pool of workers on other machines: packing and unpacking them, and the processes that
serve them.
"""
