"""Several hosts on one machine: network namespaces on a bridge, whose links can be cut and
made slow.

They live in namespaces of a process of their own, so nothing of them is seen outside, no
right of an administrator is needed, and the kernel removes them when the process ends.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

NETWORK = "10.77.0"
TOOLS = ("unshare", "nsenter", "ip", "tc")

NEEDED = (
    "no network namespaces, so runs that lose a host are NOT TESTED here: they need Linux with user namespaces and "
    "unshare, nsenter, ip and tc (apt-get install util-linux iproute2; on Ubuntu also "
    "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0)"
)


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface, eth0."""

    network: "Network"
    number: int

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def start(
        self, command: Sequence[str], log: Path, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host. Its output goes into a file."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [*self.network.inside, "ip", "netns", "exec", self.name, *command],
                env=os.environ | {"GLOO_SOCKET_IFNAME": "eth0", **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def name(self) -> str:
        return f"host{self.number}"

    def kill(self) -> None:
        """Kill every process of the host at once, launcher and all."""
        listed = self.network.run("ip", "netns", "pids", self.name)
        for process in listed.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def cut(self) -> None:
        """Cut the cable: no message arrives, and no connection is closed."""
        self.network.run("ip", "link", "set", f"cable{self.number}", "down")

    def mend(self) -> None:
        self.network.run("ip", "link", "set", f"cable{self.number}", "up")

    def slow_down(self, rate: str) -> None:
        """Let this many bits a second pass to the host and from it, and no more."""
        limit = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "2s")
        self.network.run("tc", "qdisc", "add", "dev", f"cable{self.number}", *limit)
        inside = ("ip", "netns", "exec", self.name)
        self.network.run(*inside, "tc", "qdisc", "add", "dev", "eth0", *limit)


class Network:
    """A bridge in namespaces that one process holds open."""

    def __init__(self, holder: int) -> None:
        self.inside = (
            "nsenter",
            "--preserve-credentials",
            f"--target={holder}",
            "--user",
            "--net",
            "--mount",
        )

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [*self.inside, *command], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def add_host(self, number: int) -> Host:
        """Make a host with the address that ends with this number."""
        host = Host(self, number)
        cable = f"cable{number}"
        in_host = ("ip", "netns", "exec", host.name, "ip")
        self.run("ip", "netns", "add", host.name)
        self.run(
            *("ip", "link", "add", cable, "type", "veth"),
            *("peer", "name", "eth0", "netns", host.name),
        )
        self.run("ip", "link", "set", cable, "master", "bridge", "up")
        self.run(*in_host, "address", "add", f"{host.address}/24", "dev", "eth0")
        self.run(*in_host, "link", "set", "eth0", "up")
        self.run(*in_host, "link", "set", "lo", "up")
        return host


@contextmanager
def network() -> Iterator[Network]:
    """A network for the length of a block.

    Where the system has no namespaces the test is skipped, or fails where
    VIDEOTUNE_NETWORKS says that they are required.
    """
    holding = "mount -t tmpfs none /run && mkdir /run/netns && echo ready && exec cat"
    command = ["unshare", "--map-root-user", "--net", "--mount", "sh", "-c", holding]
    reason = "" if all(map(shutil.which, TOOLS)) else "a tool is missing"
    if reason:
        _refuse(reason)
    holder = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        answer = holder.stdout.readline()
        if answer != "ready\n":
            _refuse(answer)
        made = Network(holder.pid)
        made.run("ip", "link", "add", "bridge", "type", "bridge")
        made.run("ip", "link", "set", "bridge", "up")
        yield made
    finally:
        holder.stdin.close()
        holder.wait(30)


def _refuse(reason: str) -> None:
    if os.environ.get("VIDEOTUNE_NETWORKS") == "required":
        pytest.fail(f"{NEEDED} ({reason})")
    pytest.skip(f"{NEEDED} ({reason})")
