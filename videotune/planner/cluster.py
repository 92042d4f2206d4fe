"""The machines of a run: what its processes send within one, and what between them.

torchrun numbers processes machine by machine, and the trainer's mesh
(``memory/context_parallel.py``) makes groups of neighbours that share samples. So a group
stays within a machine if its size divides the machine's cards. Weights and gradients go
around one ring of all processes, which leaves each machine once. Libraries run several
rings at a time, each over another port of the network, with a part of the bytes; their sum
is the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from videotune.errors import VideotuneError
from videotune.planner.gpus import Card
from videotune.planner.traffic import Rounds, Traffic

LINK_REACHES = 0.75
"""Share of the rate of a link or a network that messages are assumed to reach; not
measured.
"""

LATENCY = 10e-6
"""Seconds that a message between machines is assumed to take beside its bytes; not
measured. Each round of a ring waits for it. Within a machine none is counted.
"""

GIGABIT = 1e9 / 8
"""Bytes a second of a Gbit/s."""


@dataclass(frozen=True)
class Network:
    """What connects a machine with the others."""

    name: str
    rate: float
    """Bytes a second that a machine sends, all its ports together."""


ETHERNET = Network("Ethernet", 100 * GIGABIT)
"""The network of machines whose cards have none in the table."""


@dataclass(frozen=True)
class Cluster:
    """Machines with the same number of cards, a process each."""

    machines: int
    gpus: int
    """Cards of a machine."""
    network: Network = ETHERNET

    @property
    def processes(self) -> int:
        """All processes of the run."""
        return self.machines * self.gpus

    def machine_of(self, rank: int) -> int:
        """Return the machine of a process, as torchrun numbers them."""
        return rank // self.gpus

    def holds_groups(self, parts: int) -> bool:
        """Whether each group of ``parts`` neighbours is within one machine."""
        return self.machines == 1 or self.gpus % parts == 0

    def most_pairs(self, parts: int) -> tuple[int, int]:
        """Return how the processes of a group of ``parts`` neighbours are spread: most
        others of its group in a process's own machine, and most pairs of a process of a
        machine with one of its group elsewhere.
        """
        within = 0
        leaving = [0] * self.machines
        for rank in range(self.processes):
            first = rank // parts * parts
            machine = self.machine_of(rank)
            group = range(first, first + parts)
            here = sum(self.machine_of(other) == machine for other in group)
            within = max(within, here - 1)
            leaving[machine] += parts - here
        return within, max(leaving)

    def most_rings(self, parts: int) -> int:
        """Return most rings of groups of ``parts`` neighbours that leave a machine."""
        leaving = [0] * self.machines
        for rank in range(self.processes):
            first = rank // parts * parts
            following = first + (rank + 1 - first) % parts
            if self.machine_of(following) != self.machine_of(rank):
                leaving[self.machine_of(rank)] += 1
        return max(leaving)


def cluster_of(
    card: Card | None, machines: int, gpus: int, gigabits: float | None = None
) -> Cluster:
    """Return a cluster of machines with these cards.

    Args:
        card: the cards, if they are known.
        machines: number of machines.
        gpus: cards of a machine.
        gigabits: Gbit/s of a machine's network. None: that of the card's usual machines.
    """
    if gigabits is not None:
        return Cluster(
            machines, gpus, Network("a network as given", gigabits * GIGABIT)
        )
    if card is None or not card.network:
        return Cluster(machines, gpus)
    return Cluster(machines, gpus, Network(card.network_name, gpus * card.network))


@dataclass(frozen=True)
class Ways:
    """Bytes of a step by the way that they take."""

    within: Traffic
    """What a process sends to others of its machine."""
    between: Traffic
    """What a machine sends to others."""

    def seconds(self, card: Card, cluster: Cluster, kind: str) -> float:
        """Return the seconds of a kind of messages: those of the slower way."""
        link = LINK_REACHES * card.peer_link
        network = LINK_REACHES * cluster.network.rate
        within: float = getattr(self.within, kind)
        between: float = getattr(self.between, kind)
        return max(within / link, between / network)


def ways_of(sent: Traffic, cluster: Cluster, parts: int) -> Ways:
    """Return which of a step's bytes stay within a machine.

    Args:
        sent: what a process sends.
        cluster: the machines.
        parts: processes that share a sample.
    """
    if cluster.machines == 1:
        return Ways(sent, Traffic())

    has_neighbours = cluster.gpus > 1
    within = Traffic(
        gradients=sent.gradients * has_neighbours, weights=sent.weights * has_neighbours
    )
    between = Traffic(gradients=sent.gradients, weights=sent.weights)
    if parts == 1:
        return Ways(within, between)

    others_here, pairs = cluster.most_pairs(parts)
    to_each_other = sent.attention / (parts - 1)
    within = Traffic(
        attention=others_here * to_each_other,
        prediction=sent.prediction * (others_here > 0),
        gradients=within.gradients,
        weights=within.weights,
    )
    between = Traffic(
        attention=pairs * to_each_other,
        prediction=cluster.most_rings(parts) * sent.prediction,
        gradients=between.gradients,
        weights=between.weights,
    )
    return Ways(within, between)


@dataclass(frozen=True)
class MessageSeconds:
    """Seconds of a step's messages."""

    waiting: float
    """Of those that the step waits for."""
    beside: float
    """Of those that are sent while blocks compute."""


def message_seconds(
    sent: Traffic, rounds: Rounds, card: Card, cluster: Cluster, parts: int
) -> MessageSeconds:
    """Return how long a step's messages take.

    Args:
        sent: what a process sends.
        rounds: of the rings of all processes.
        card: the cards.
        cluster: the machines.
        parts: processes that share a sample.
    """
    ways = ways_of(sent, cluster, parts)
    latency = LATENCY if cluster.machines > 1 else 0.0
    waiting = latency * rounds.gradients
    for kind in ("attention", "prediction", "gradients"):
        waiting += ways.seconds(card, cluster, kind)
    beside = latency * rounds.weights + ways.seconds(card, cluster, "weights")
    return MessageSeconds(waiting, beside)


def machines_json(sent: Traffic, cluster: Cluster, parts: int) -> dict[str, object]:
    """Return the machines as a part of ``plan.json``, with what they send."""
    ways = ways_of(sent, cluster, parts)
    return {
        "count": cluster.machines,
        "gpus": cluster.gpus,
        "network": cluster.network.name,
        "network_bytes_a_second": round(cluster.network.rate),
        "groups_within": cluster.holds_groups(parts),
        "sent_bytes": {
            "within": rounded_bytes(ways.within),
            "between": rounded_bytes(ways.between),
        },
    }


def rounded_bytes(sent: Traffic) -> dict[str, int]:
    """Return the bytes of each kind of messages."""
    return {kind: round(count) for kind, count in asdict(sent).items()}


def refuse_unused_network(machines: int, gigabits: float | None) -> None:
    """Raise VideotuneError for a network that nothing is sent over."""
    if machines == 1 and gigabits is not None:
        raise VideotuneError(
            "--network: a run on one machine sends nothing over it. Add --nodes N"
        )
