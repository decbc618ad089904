"""One end of a link that is measured: ``link_end.py <payload bytes>``, as rank 0 or 1, prints its figures as JSON.

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


def measure(node: int, ports: list[int], payload_bytes: int) -> dict[str, Any]:
    """Exchange the payload with the other end; beside it one byte goes back and forth."""
    bulk, ping = (_connect(node, port) for port in ports)
    over, trips_s = threading.Event(), list[float]()
    pinger = threading.Thread(target=_ask if node == 0 else _answer, args=(ping, over, trips_s))
    pinger.start()
    time.sleep(0.5)
    idle = len(trips_s)
    sender = threading.Thread(target=_send, args=(bulk, payload_bytes))
    began_s = time.monotonic()
    sender.start()
    _receive(bulk, payload_bytes)
    sender.join()
    goodput_mbit = payload_bytes * 8 / (time.monotonic() - began_s) / 1e6
    over.set()
    pinger.join()
    return {
        "goodput_mbit": goodput_mbit,
        "idle_ms": _in_ms(trips_s[:idle]),
        "loaded_ms": _in_ms(trips_s[idle:]),
    }


def _send(bulk: socket.socket, left: int) -> None:
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    while left:
        left -= bulk.send(chunk[: min(left, _CHUNK_BYTES)])


def _receive(bulk: socket.socket, left: int) -> None:
    chunk = bytearray(_CHUNK_BYTES)
    while left:
        received = bulk.recv_into(chunk, min(left, _CHUNK_BYTES))
        if not received:
            raise ConnectionError("the other end has gone")
        left -= received


def _ask(ping: socket.socket, over: threading.Event, trips_s: list[float]) -> None:
    while not over.wait(_PING_EVERY_S):
        began_s = time.monotonic()
        ping.sendall(b"?")
        ping.recv(1)
        trips_s.append(time.monotonic() - began_s)
    ping.close()


def _answer(ping: socket.socket, over: threading.Event, trips_s: list[float]) -> None:
    while ping.recv(1):
        ping.sendall(b"!")


def _connect(node: int, port: int) -> socket.socket:
    address, deadline_s = (os.environ["MASTER_ADDR"], port), time.monotonic() + _TIMEOUT_S
    if node == 0:
        with socket.create_server(address) as server:
            server.settimeout(_TIMEOUT_S)
            connection, _ = server.accept()
    while node != 0:
        try:
            connection = socket.create_connection(address, timeout=_TIMEOUT_S)
            break
        except ConnectionRefusedError:  # node 0 does not listen yet
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
    connection.settimeout(_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _in_ms(lengths_s: list[float]) -> dict[str, float] | None:
    if not lengths_s:
        return None
    return {"median": median(lengths_s) * 1e3, "max": max(lengths_s) * 1e3, "count": len(lengths_s)}


if __name__ == "__main__":
    _rank, _port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    if _rank < 2:
        print(json.dumps(measure(_rank, [_port, _port + 1], int(sys.argv[1]))))
