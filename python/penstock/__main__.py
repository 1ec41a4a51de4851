# SPDX-License-Identifier: Apache-2.0
"""python -m penstock: the same as the command penstock."""

from __future__ import annotations

import sys

from penstock.cli.command_line import main

sys.exit(main())
