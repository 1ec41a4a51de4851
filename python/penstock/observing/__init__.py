# SPDX-License-Identifier: Apache-2.0
"""What shows people, and the tools that they have, where the time of a loader's steps goes."""
