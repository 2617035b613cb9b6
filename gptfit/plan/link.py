"""What several GPUs send each other: bytes per step, the links they go over, and what is not hidden behind compute."""

from __future__ import annotations

from dataclasses import dataclass

from gptfit.gpus import GPU
from gptfit.plan.holding import GRADIENT_BYTES, WEIGHT_BYTES, unit_sizes
from gptfit.plan.matmul_rate import is_hbm
from gptfit.plan.setting import Setting

UPDATE_BYTES = 2  # Muon's finished updates
BACKWARD_SHARE = 2 / 3  # of a micro-step: backward does twice the work of forward


@dataclass(frozen=True)
class LinkConstants:
    """GB/s that a ring of cards of one kind reaches in training; the first and third fitted by bench/fit_speed.py."""

    geforce_gbs: float = 1.12  # through the host's memory: GeForce cards have no peer-to-peer copies
    pcie_gbs: float = 8.0  # peer to peer; no published row of several workstation cards
    nvlink_gbs: float = 115.0
    # Between machines, per machine: what is usual where such cards are rented or built in. Data sheets, no rows.
    ethernet_gbs: float = 1.25  # 10 Gbit/s
    infiniband_a100_gbs: float = 100.0  # 8 x 100 Gbit/s of the usual instance
    infiniband_gbs: float = 400.0  # 8 x 400 Gbit/s beside H100 and later


FITTED = LinkConstants()


@dataclass(frozen=True)
class Traffic:
    """One step's exchange as one process sees it."""

    bytes_sent: float
    link_gbs: float  # the slowest link on the way
    seconds: float  # on the link
    exposed_seconds: float  # of these, what the step is longer for

    @property
    def hidden_share(self) -> float:
        return 1 - self.exposed_seconds / self.seconds if self.seconds else 0.0


def traffic(setting: Setting, gpu: GPU, micro_step_s: float, constants: LinkConstants = FITTED) -> Traffic:
    """What one step sends, and how much of it compute hides; `micro_step_s` is one micro-step without it."""
    if setting.processes == 1:
        return Traffic(0.0, 0.0, 0.0, 0.0)
    gbs = slowest_gbs(setting, gpu, constants)
    of_optimizer = _muon_bytes(setting)
    of_model = exchanged_bytes(setting)
    seconds = of_model / (gbs * 1e9)
    # A gradient can be sent once its layer's backward is done. The embedding's is the last: no compute hides it.
    compute = micro_step_s * (setting.accumulation if setting.is_sharded else BACKWARD_SHARE)
    exposed = max(seconds - compute, _last_bytes(setting) / (gbs * 1e9))
    after = of_optimizer / (gbs * 1e9)
    return Traffic(of_model + of_optimizer, gbs, seconds + after, exposed + after)


def exchanged_bytes(setting: Setting) -> float:
    """Sent by each process per step for gradients and weights: rings, so (n-1)/n of the data each way."""
    per_way = (setting.processes - 1) / setting.processes * setting.shape.n_weights
    if not setting.is_sharded:
        return 2 * per_way * GRADIENT_BYTES  # an all-reduce is a reduce-scatter and an all-gather
    # Every micro-step gathers the blocks twice, in the format they compute in, and the rest once, in float32.
    in_units = sum(unit_sizes(setting)) / setting.shape.n_weights
    gathered = 2 * setting.element_bytes * in_units + WEIGHT_BYTES * (1 - in_units)
    sums = 1 if setting.sums_late else setting.accumulation
    return per_way * (gathered * setting.accumulation + GRADIENT_BYTES * sums)


def slowest_gbs(setting: Setting, gpu: GPU, constants: LinkConstants = FITTED) -> float:
    """A ring is as fast as its slowest link; between machines all cards of one share its network."""
    inside = _inside_gbs(gpu, constants)
    if setting.nodes == 1:
        return inside
    between = setting.network_gbs or _between_gbs(gpu, constants)
    return between if setting.processes == setting.nodes else min(inside, between)


def _inside_gbs(gpu: GPU, constants: LinkConstants) -> float:
    if gpu.is_geforce:
        return constants.geforce_gbs
    return constants.nvlink_gbs if _has_nvlink(gpu) else constants.pcie_gbs


def _between_gbs(gpu: GPU, constants: LinkConstants) -> float:
    if not _has_nvlink(gpu):
        return constants.ethernet_gbs
    return constants.infiniband_a100_gbs if gpu.compute_capability == "8.0" else constants.infiniband_gbs


def _has_nvlink(gpu: GPU) -> bool:
    return is_hbm(gpu) and "PCIe" not in gpu.name.replace("SXM/PCIe", "SXM")


def _last_bytes(setting: Setting) -> float:
    """What nothing is left to hide: gradients that exist only when backward is over, weights that forward begins with."""
    per_way, weights = (setting.processes - 1) / setting.processes, setting.shape.weights()
    if setting.is_sharded:
        outside = setting.shape.n_weights - sum(unit_sizes(setting))
        return per_way * outside * (WEIGHT_BYTES + GRADIENT_BYTES)
    last = sum(weight.size for weight in weights if weight.kind in ("embedding", "position"))
    return 2 * per_way * last * GRADIENT_BYTES


def _muon_bytes(setting: Setting) -> float:
    """Each process makes its part of the matrices orthogonal and hands it to all others; nothing hides that."""
    if setting.optimizer != "muon":
        return 0.0
    matrices = setting.shape.sizes["matrix"]
    per_way = (setting.processes - 1) / setting.processes
    if setting.is_sharded:  # rows go to the one that does their matrix, and come home
        return per_way * (GRADIENT_BYTES + UPDATE_BYTES) * matrices / setting.processes
    return per_way * UPDATE_BYTES * matrices
