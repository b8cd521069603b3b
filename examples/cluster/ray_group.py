"""Ray actors that form a group: `python examples/cluster/ray_group.py [RANKS]`, here or in a Ray cluster.

Ray decides where the actors run; this program then gives each of them the variables of torchrun, by which they meet.
"""

import os
import secrets
import socket
import sys
from pathlib import Path

import ray
from exchange import exchange

import crossrail


@ray.remote(num_cpus=1)
class Rank:
    """One rank of the group, in a process of its own."""

    def home(self):
        """The address of this actor's node, and a port that is free there."""
        with socket.create_server(("", 0)) as free:
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, variables):
        """Joins the group and exchanges tokens with the other ranks."""
        os.environ.update(variables)
        with crossrail.Group() as group:
            said = exchange(group)
            group.barrier("done")
        return said


def main(size):
    """Starts the actors, and prints what each of them has to say."""
    ray.init(runtime_env={"working_dir": str(Path(__file__).resolve().parent)})
    ranks = [Rank.remote() for _ in range(size)]
    homes = ray.get([one.home.remote() for one in ranks])
    nodes = [node for node, _ in homes]
    node, port = homes[0]
    shared = {
        "WORLD_SIZE": size,
        "MASTER_ADDR": node,
        "MASTER_PORT": port - 1,
        "CROSSRAIL_SECRET": secrets.token_hex(32),
    }
    running = []
    for number, one in enumerate(ranks):
        own = {"RANK": number, "LOCAL_RANK": nodes[:number].count(nodes[number])}
        running.append(one.run.remote({name: str(value) for name, value in {**shared, **own}.items()}))
    for said in ray.get(running):
        print(said)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
