"""How threads that share a product wait for each other. Nothing here imports torch, which reads it once."""

from __future__ import annotations

import os

POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
# Times a waiting thread looks before it sleeps; GNU OpenMP's own are thirty times as many. Two threads beside two busy
# programs: 6 x 256 took 645 ms per step instead of 3,500, and with 3,000 looks 490, which cost a small model alone up to 5 %;
# these cost none (4 x 128: 23 ms per step either way).
LOOKS = "10000"
ASLEEP = {POLICY: "PASSIVE", SPINS: "0"}  # for several programs at a time that are all ours


def wait_a_moment_only() -> None:
    """Where another program has the core of the thread that is waited for, waiting awake keeps it from its own work."""
    if POLICY not in os.environ:
        os.environ.setdefault(SPINS, LOOKS)
