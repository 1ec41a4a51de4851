# SPDX-License-Identifier: Apache-2.0
"""Jobs for a pool of workers on other machines: packing, unpacking, and the processes that serve
jobs.
"""
