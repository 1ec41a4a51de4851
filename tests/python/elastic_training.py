# SPDX-License-Identifier: Apache-2.0
"""A training in a separate process: elastic_training.py POOL COUNT. Prints a line for each batch of
`elastic_pools.Slow`, and "done"."""

from __future__ import annotations

import json
import sys

from elastic_pools import loader


def main() -> None:
    for batch in loader(sys.argv[1], int(sys.argv[2])):
        print(json.dumps(batch.tolist()), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
