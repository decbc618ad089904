"""The emulated cluster's network: a namespace per node, one shaped link each.

Two nodes are connected by a veth pair, three or four by a bridge. The bridge is in a namespace of
its own, so that no interface is added to the machine's own namespace. Each node's *egress* is
shaped with ``tc tbf``. [Note: the queue] explains how the queue in front of the link is kept short
without drops.

[Note: the queue]
A dropped packet costs a retransmission time-out of 200 ms and would spoil every figure, so the
limit of the shaper is generous. The queue is bounded at its source instead: a TCP socket passes no
further packet down while ``tcp_limit_output_bytes`` are under way. (The packet is cut to the MTU
later.) A small message then waits behind one or two packets of each bulk stream. Smaller packets
would shorten that wait, but cost processor time. A packet therefore has the size that passes in
2 ms, so that the packets per second, and with them the processor time, do not grow on slow links.

[Note: receive cost]
On a veth pair the receiver's TCP work runs on the sender's core. RPS moves it to the core of the
receiving node, so that core i bears the cost of node i's communication.
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NAMESPACE_DIRECTORY: Final = Path("/run/netns")
INTERFACE: Final = "eth0"
_PREFIX: Final = "crossover-lab"
_NAME: Final = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-(\d+)-(\d+)-(?:node\d+|switch)")
# A packet that TCP passes to the link (GSO): the limits of its size (two jumbo frames, and the
# kernel's own limit), and the time that it may take to pass.
_PACKET_BYTES: Final = (20 * 1024, 64 * 1024)
_PACKET_S: Final = 2e-3
_QUEUE_BYTES: Final = 32 * 1024
# For the headers of the wire packets that it is cut into.
_HEADROOM_BYTES: Final = 8 * 1024
# A timer of the kernel may be late by this.
_LATE_TIMER_S: Final = 1e-3
_LIMIT_BYTES: Final = 64 * 1024 * 1024
_SYSCTLS: Final[Mapping[str, str]] = {
    # The machine's default may be bbr, which probes for more bandwidth than the link has. Every
    # kernel allows reno in a namespace, and without drops its window only grows.
    "tcp_congestion_control": "reno",
    "tcp_limit_output_bytes": str(_QUEUE_BYTES),
    # Training pauses for longer than an RTO in every step: no slow start after each.
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
}


class LabError(RuntimeError):
    """The emulated cluster cannot be built or used. The message has the remedy."""


@dataclass(frozen=True)
class LabId:
    """Identifies a lab: the process that made it, and a serial number.

    The process is identified by its PID namespace, its id and its start time.
    """

    pid_namespace: int
    pid: int
    start_ticks: int
    serial: int

    @classmethod
    def of_this_process(cls, serial: int) -> "LabId":
        """Return the id of this process's lab with this serial number."""
        start_ticks = _start_ticks(os.getpid())
        assert start_ticks is not None, "a running process has a start time"
        return cls(_pid_namespace(), os.getpid(), start_ticks, serial)

    @classmethod
    def parse(cls, text: str) -> "LabId | None":
        """Return the id in a namespace's name or in ``CROSSOVER_LAB``. None for other texts."""
        match = _NAME.fullmatch(text) or _NAME.fullmatch(f"{text}-node0")
        return cls(*map(int, match.groups())) if match else None

    def __str__(self) -> str:
        return f"{_PREFIX}-{self.pid_namespace}-{self.pid}-{self.start_ticks}-{self.serial}"

    def alive(self) -> bool:
        """Return whether the process that made the lab still runs.

        A later process with the same id does not count. A process of another PID namespace, as in a
        container, is not visible and counts as running.
        """
        return self.pid_namespace != _pid_namespace() or _start_ticks(self.pid) == self.start_ticks


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in brackets may contain blanks and brackets: fields count from the last bracket on.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def why_not_shaped() -> str | None:
    """Return the reason why this process cannot emulate a network. None if it can."""
    missing = [tool for tool in ("ip", "tc") if _tool(tool) is None]
    if missing:
        commands = f"command{'s' * (len(missing) > 1)} {' and '.join(missing)}"
        return f"the {commands} (package iproute2) cannot be found"
    if not _has_network_admin():
        return (
            "network namespaces and traffic shaping need root (CAP_NET_ADMIN and CAP_SYS_ADMIN); "
            "run it as root, in a container started with --privileged, or, where unprivileged user "
            "namespaces are allowed, through: unshare --user --map-root-user --net --mount "
            "sh -c 'mount -t tmpfs tmpfs /run && exec python recipes/lab …'"
        )
    return None


def _has_network_admin() -> bool:
    status = Path("/proc/self/status").read_text()
    (mask,) = re.findall(r"^CapEff:\s*(\w+)", status, re.MULTILINE)
    effective = int(mask, 16)
    net_admin, sys_admin = 12, 21
    return bool(effective >> net_admin & 1 and effective >> sys_admin & 1)


def _tool(name: str) -> str | None:
    # An ordinary user's PATH often lacks sbin.
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _run(tool: str, *arguments: str) -> str:
    path = _tool(tool)
    if path is None:
        raise LabError(f"expected the command {tool}, found none; install iproute2")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise LabError(
            f"{tool} {' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


class Network:
    """The namespaces and links of one lab.

    Args:
        lab: the lab that the namespaces belong to.
        nodes: 2 to 4.
        rate_mbit: rate of each node's egress, in 10**6 bit/s of wire bytes.
        mtu: largest packet on the links, in bytes.
        cores: the core of each node, for its receive work. None: do not move that work.
    """

    def __init__(
        self, lab: LabId, *, nodes: int, rate_mbit: float, mtu: int, cores: Sequence[int | None]
    ) -> None:
        self.lab = lab
        self.nodes = nodes
        self._mtu = mtu
        self._made: list[str] = []
        try:
            self._build(cores)
            self.set_rate(rate_mbit)
        except BaseException:
            self.close()
            raise

    def namespace(self, node: int) -> str:
        """Return the name of a node's network namespace."""
        return f"{self.lab}-node{node}"

    def address(self, node: int) -> str:
        """Return the IPv4 address of a node."""
        return f"10.77.0.{node + 1}"

    def enter(self, node: int) -> list[str]:
        """Return the words that run a command on a node, if put before it."""
        path = _tool("ip")
        assert path is not None, "the network was built with it"
        return [path, "netns", "exec", self.namespace(node)]

    def set_rate(self, rate_mbit: float) -> None:
        """Change the rate of every node's egress, also while traffic flows."""
        if rate_mbit <= 0:
            raise ValueError(f"expected a rate > 0, got rate_mbit={rate_mbit}; give it in Mbit/s")
        rate = f"{round(rate_mbit * 1e6)}bit"
        packet = ["gso_max_size", str(packet_bytes(rate_mbit))]
        # The bucket must hold one packet, of the largest size, since a connection may be older than
        # a change of the rate. It must also hold the bytes that flow while a timer is late.
        burst = _PACKET_BYTES[1] + _HEADROOM_BYTES + round(rate_mbit * 1e6 / 8 * _LATE_TIMER_S)
        for node in range(self.nodes):
            _run("ip", "-n", self.namespace(node), "link", "set", INTERFACE, *packet)
            shape = ["tbf", "rate", rate, "burst", str(burst), "limit", str(_LIMIT_BYTES)]
            _run(
                "tc",
                "-n",
                self.namespace(node),
                "qdisc",
                "replace",
                "dev",
                INTERFACE,
                "root",
                *shape,
            )

    def sent_bytes(self, node: int) -> int:
        """Return the wire bytes that left a node since the network was built."""
        text = subprocess.run(
            [*self.enter(node), "cat", "/proc/net/dev"], capture_output=True, text=True, check=True
        ).stdout
        (line,) = (line for line in text.splitlines() if line.strip().startswith(f"{INTERFACE}:"))
        return int(line.split(":", 1)[1].split()[8])

    def dropped(self) -> int:
        """Return how many packets the shapers dropped since the network was built.

        More than 0 spoils timings.
        """
        text = "".join(
            _run("tc", "-n", self.namespace(n), "-s", "qdisc", "show") for n in range(self.nodes)
        )
        return sum(int(number) for number in re.findall(r"dropped (\d+)", text))

    def close(self) -> None:
        """Delete the namespaces, and the links with them. May be called again."""
        while self._made:
            with contextlib.suppress(LabError):
                delete_namespace(self._made[-1])
            self._made.pop()

    def _build(self, cores: Sequence[int | None]) -> None:
        for node in range(self.nodes):
            self._add_namespace(self.namespace(node))
        if self.nodes == 2:
            self._link(self.namespace(0), INTERFACE, self.namespace(1), INTERFACE)
        else:
            self._build_switch()
        for node, core in zip(range(self.nodes), cores, strict=True):
            self._configure(node, core)

    def _add_namespace(self, name: str) -> None:
        # Recorded first: an interrupt in between must not leave the namespace behind.
        self._made.append(name)
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _build_switch(self) -> None:
        switch = f"{self.lab}-switch"
        self._add_namespace(switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "mtu", str(self._mtu), "type", "bridge")
        for node in range(self.nodes):
            port = f"port{node}"
            self._link(self.namespace(node), INTERFACE, switch, port)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")

    def _link(self, here: str, device: str, there: str, peer: str) -> None:
        # One queue: a single RPS setting then moves all receive work.
        queue = ["mtu", str(self._mtu), "numtxqueues", "1", "numrxqueues", "1"]
        near = ["link", "add", device, "netns", here, *queue, "type", "veth"]
        _run("ip", *near, "peer", "name", peer, "netns", there, *queue)
        for namespace, name in ((here, device), (there, peer)):
            _run("ip", "-n", namespace, "link", "set", name, "addrgenmode", "none")

    def _configure(self, node: int, core: int | None) -> None:
        namespace = self.namespace(node)
        _run("ip", "-n", namespace, "addr", "add", f"{self.address(node)}/24", "dev", INTERFACE)
        _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
        writes = [f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in _SYSCTLS.items()]
        if core is not None:
            mask = _cpu_mask(core)
            # Forbidden in an unprivileged user namespace. Only the sum over cores is then right.
            writes.append(f"echo {mask} > /sys/class/net/{INTERFACE}/queues/rx-0/rps_cpus || :")
        _run("ip", "netns", "exec", namespace, "sh", "-e", "-c", "\n".join(writes))


def packet_bytes(rate_mbit: float) -> int:
    """Return the largest packet that TCP may pass to a link of this rate; see [Note: the queue]."""
    smallest, largest = _PACKET_BYTES
    return round(min(max(rate_mbit * 1e6 / 8 * _PACKET_S, smallest), largest))


def _cpu_mask(core: int) -> str:
    # The kernel reads groups of 32 bits, separated by commas.
    groups = [f"{1 << core >> shift & 0xFFFFFFFF:08x}" for shift in range(core // 32 * 32, -1, -32)]
    return ",".join(groups)


def delete_namespace(name: str) -> None:
    """Delete a namespace of a lab. ``ValueError`` for a name that does not belong to a lab."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"expected a lab's namespace, got name={name!r}; it is left alone")
    if (NAMESPACE_DIRECTORY / name).exists():
        _run("ip", "netns", "del", name)


def lab_namespaces() -> Iterator[tuple[LabId, str]]:
    """Yield every namespace of every lab on this machine."""
    names = sorted(os.listdir(NAMESPACE_DIRECTORY)) if NAMESPACE_DIRECTORY.is_dir() else []
    for name in names:
        if _NAME.fullmatch(name):
            lab = LabId.parse(name)
            assert lab is not None
            yield lab, name
