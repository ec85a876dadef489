"""The GPUs that would serve: those of this machine, of a machine file, or those that a user names."""

import os
from dataclasses import dataclass
from pathlib import Path

from fcsd.advise import sums
from fcsd.advise.cards import NAMES, Card, card_of
from fcsd.errors import ConfigError
from fcsd.parallel.machine import read_machine

_USUALLY_WITH_PEERS = ("H100", "H200", "H20", "B200", "A100")  # sold on boards with NVLink, but for the PCIe cards


@dataclass(frozen=True)
class Host:
    """GPUs of one host.

    Attributes:
        card: each of them.
        gpus: how many.
        peers: whether they can access each other's memory.
        sums: the times of all-reduces.
        here: whether this is the machine on which the command runs.
    """

    card: Card
    gpus: int
    peers: bool
    sums: sums.Sums
    here: bool

    @property
    def described(self) -> str:
        """One line: ``2 x RTX 4090, 24 GB, without peer access (this machine)``."""
        access = "with" if self.peers else "without"
        place = "this machine" if self.here else "as you said"
        unknown = "" if self.card.known else "; not in the table of cards, so its rates are an H100's"
        return f"{self.gpus} x {self.card.name}, {self.card.memory_gb:.0f} GB, {access} peer access ({place}{unknown})"


def host_of(gpus: int | None, gpu: str | None, machine: Path | None) -> Host:
    """The host that is meant: a machine file's, the one that is named, or this one.

    Raises:
        ConfigError: there is no GPU here and none is named, or the machine file cannot be read.
    """
    if machine is not None and gpu is not None:
        raise ConfigError("--gpu and --machine both say which GPUs", "Leave one of them out.")
    if machine is not None:
        read = read_machine(machine)
        card = card_of(read.gpu)
        table = sums.of_machine(read, str(machine))
        return Host(card, gpus or read.gpus_per_node, _peers(card.name), table, False)
    if gpu is not None:
        card = card_of(gpu)
        if not card.known:
            known = f"Known are {', '.join(NAMES)}. Measure another one: fcsd bench links --out FILE"
            raise ConfigError(f"--gpu {gpu}: fcsd does not know this GPU", known)
        peers = _peers(gpu)
        return Host(card, gpus or 2, peers, sums.elsewhere(peers, card.pcie_gb_per_s), False)
    return _here(gpus)


def _here(gpus: int | None) -> Host:
    import torch

    found = torch.cuda.device_count()
    if not found:
        raise ConfigError(
            "this machine has no GPU that torch can use",
            "Name those that will serve: --gpu 'RTX 4090' --gpus 2, or --machine FILE of fcsd bench links",
        )
    if gpus is not None and gpus > found:
        raise ConfigError(f"--gpus {gpus}: this machine has {found}", "For another machine, name its GPUs with --gpu.")
    count = gpus or found
    facts = torch.cuda.get_device_properties(0)
    off = os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0")
    peers = not off and all(
        torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b
    )
    card = card_of(facts.name, facts.total_memory / 1e9)
    return Host(card, count, peers, sums.elsewhere(peers, card.pcie_gb_per_s), True)


def _peers(name: str) -> bool:
    return "PCIe" not in name and any(known in name.upper() for known in _USUALLY_WITH_PEERS)
