"""How threads that share a product wait for each other. Nothing here imports torch, which reads it once."""

from __future__ import annotations

import os

POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
# Times a waiting thread looks before it sleeps; GNU OpenMP's own are a hundred times as many. Two threads beside two busy
# programs: 6 x 256 took 520 ms per step instead of 3,500; alone 239 instead of 238. A third of these cost a 4 x 128 beside
# nothing 5 % instead of 2.
LOOKS = "3000"
ASLEEP = {POLICY: "PASSIVE", SPINS: "0"}  # for several programs at a time that are all ours


def wait_a_moment_only() -> None:
    """Where another program has the core of the thread that is waited for, waiting awake keeps it from its own work."""
    if POLICY not in os.environ:
        os.environ.setdefault(SPINS, LOOKS)
