# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster on this machine: a head without workers, and two nodes of two workers each.

Prints the cluster's address. Lines on standard input are commands: "node" kills a node, "actor
NAME" an actor of penstock, "drain NAME SECONDS" takes that actor's node away with notice, "fill"
makes actors of another program wait for each place that becomes free, and "requested" prints the
last request to the autoscaler. The answer to each is "done". The end of standard input ends the
cluster.
"""

from __future__ import annotations

import subprocess
import sys

import ray
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.cluster_utils import Cluster
from ray.experimental.internal_kv import _internal_kv_get

WORKERS_OF_NODE = 2
NODES = 2


@ray.remote(num_cpus=0, resources={"dataworker": 1})
class Filler:
    def stay(self) -> None:
        pass


def connect(cluster: Cluster) -> None:
    if not ray.is_initialized():
        ray.init(address=cluster.address, log_to_driver=False)


def drain(cluster: Cluster, name: str, seconds: str) -> None:
    """Drain a node, as a cloud does when it takes the node back from Ray."""
    connect(cluster)
    node = ray.get(ray.get_actor(name, namespace="penstock").node.remote())
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--address", cluster.address, "--node-id", node),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "preempted"),
            *("--deadline-remaining-seconds", seconds),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def main() -> None:
    memory = 100 << 20
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": memory}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [
        cluster.add_node(
            num_cpus=WORKERS_OF_NODE,
            object_store_memory=memory,
            resources={"dataworker": WORKERS_OF_NODE},
        )
        for _ in range(NODES)
    ]
    print(f"address {cluster.address}", flush=True)
    for line in sys.stdin:
        what, _, name = line.strip().partition(" ")
        if what == "node":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        elif what == "actor":
            connect(cluster)
            ray.kill(ray.get_actor(name, namespace="penstock"), no_restart=True)
        elif what == "drain":
            drain(cluster, *name.split())
        elif what == "requested":
            connect(cluster)
            found = _internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL)
            print(f"requested {(found or b'[]').decode()}", flush=True)
        elif what == "fill":
            connect(cluster)
            fillers = [Filler.remote() for _ in range(2 * WORKERS_OF_NODE)]
            ray.wait([fillers[0].stay.remote()], timeout=30)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
