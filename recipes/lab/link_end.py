"""One end of a link that is measured: ``link_end.py <node> <ports> <payload bytes>`` prints its figures as JSON.

It imports nothing of the lab, so that it starts fast and runs as a plain script.
"""

import json
import os
import socket
import sys
import threading
import time
from statistics import median
from typing import Any, Final

_CHUNK_BYTES: Final = 1 << 20
_PING_EVERY_S: Final = 0.01
_TIMEOUT_S: Final = 30.0


class _End:
    """One end of the link."""

    def __init__(self, node: int, ports: list[int]) -> None:
        self.node = node
        self.bulk, self.ping = (_connect(node, port) for port in ports)
        self._stop = threading.Event()
        self.round_trips_s: list[float] = []

    def measure(self, payload_bytes: int) -> dict[str, Any]:
        pinger = threading.Thread(target=self._ping if self.node == 0 else self._pong)
        pinger.start()
        time.sleep(0.5)
        idle_s, self.round_trips_s = self.round_trips_s, []
        result = self._exchange(payload_bytes)
        self._stop.set()
        pinger.join()
        loaded_s = self.round_trips_s
        return {**result, "idle_ms": _in_ms(idle_s), "loaded_ms": _in_ms(loaded_s)}

    def _exchange(self, payload_bytes: int) -> dict[str, Any]:
        sender = threading.Thread(target=self._send, args=(payload_bytes,))
        began_s = time.monotonic()
        sender.start()
        self._receive(payload_bytes)
        sender.join()
        return {"goodput_mbit": payload_bytes * 8 / (time.monotonic() - began_s) / 1e6}

    def _send(self, left: int) -> None:
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        while left:
            left -= self.bulk.send(chunk[: min(left, _CHUNK_BYTES)])

    def _receive(self, left: int) -> None:
        chunk = bytearray(_CHUNK_BYTES)
        while left:
            received = self.bulk.recv_into(chunk, min(left, _CHUNK_BYTES))
            if not received:
                raise ConnectionError("the other end has gone")
            left -= received

    def _ping(self) -> None:
        while not self._stop.wait(_PING_EVERY_S):
            began_s = time.monotonic()
            self.ping.sendall(b"?")
            self.ping.recv(1)
            self.round_trips_s.append(time.monotonic() - began_s)
        self.ping.close()

    def _pong(self) -> None:
        while self.ping.recv(1):
            self.ping.sendall(b"!")


def _connect(node: int, port: int) -> socket.socket:
    address = (os.environ["MASTER_ADDR"], port)
    if node == 0:
        with socket.create_server(address) as server:
            server.settimeout(_TIMEOUT_S)
            connection, _ = server.accept()
    else:
        connection = _patient_connection(address)
    connection.settimeout(_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _patient_connection(address: tuple[str, int]) -> socket.socket:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return socket.create_connection(address, timeout=_TIMEOUT_S)
        except ConnectionRefusedError:  # node 0 does not listen yet
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def _in_ms(lengths_s: list[float]) -> dict[str, float] | None:
    if not lengths_s:
        return None
    return {"median": median(lengths_s) * 1e3, "max": max(lengths_s) * 1e3, "count": len(lengths_s)}


if __name__ == "__main__":
    _node, _ports, _payload_bytes = sys.argv[1:]
    _end = _End(int(_node), [int(port) for port in _ports.split(",")])
    print(json.dumps(_end.measure(int(_payload_bytes))))
