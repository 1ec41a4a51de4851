# SPDX-License-Identifier: Apache-2.0
"""What starts and stops a pool's workers, and the adapter that has it follow the controller."""
