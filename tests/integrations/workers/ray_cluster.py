"""A Ray cluster on this machine: a head without a core, which nodes join later.

Prints its address. ``large`` on a line of its standard input lets a node join with two cores and
what Ray is told is a GPU, ``small`` one with a core; ``remove`` kills that, ``end`` the head. It
ends with that input.
"""

import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

#: A node that is gone is missed within a second, not half a minute; workers start when needed.
ALERT = {
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 3,
}


def main():
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": ALERT}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.strip():
            case "large":
                cluster.add_node(num_cpus=2, num_gpus=1)
            case "small":
                small = cluster.add_node(num_cpus=1)
            case "remove":
                cluster.remove_node(small, allow_graceful=False)
            case "end":
                cluster.remove_node(cluster.head_node, allow_graceful=False)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
