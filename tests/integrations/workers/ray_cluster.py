"""A Ray cluster on this machine: a head with what Ray is told is a GPU, and a node without.

Prints its address. ``remove`` on a line of its standard input kills the node, ``end`` the head; it
ends with that input.
"""

import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

#: A node that is gone is missed within a second, not half a minute.
ALERT = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 3,
}


def main():
    head = {"num_cpus": 2, "num_gpus": 1, "include_dashboard": False, "_system_config": ALERT}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {"end": cluster.head_node, "remove": cluster.add_node(num_cpus=1)}
    print(cluster.address, flush=True)
    for line in sys.stdin:
        cluster.remove_node(nodes[line.strip()], allow_graceful=False)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
