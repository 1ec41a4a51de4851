# SPDX-License-Identifier: Apache-2.0
"""A cluster of Ray's on this machine: a head that runs nothing, and two nodes of two workers each.

Says the cluster's address. A line "kill" on standard input kills a node; its end ends the cluster.
"""

from __future__ import annotations

import sys


def main() -> None:
    from ray.cluster_utils import Cluster

    memory = 100 << 20
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": memory}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [
        cluster.add_node(num_cpus=2, object_store_memory=memory, resources={"dataworker": 2})
        for _ in range(2)
    ]
    print(f"address {cluster.address}", flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main()
