# SPDX-License-Identifier: Apache-2.0
# Written by the build.
TORCH_MINOR_VERSION: str
