"""A slow or lossy link between two network namespaces: a process that passes on the packets of two TAP devices.

usage: slow_link.py NET NET DEVICE DELAY_S LOSS BITS_PER_S

The devices, named DEVICE, come to be in the namespaces of the two files NET. Packets wait DELAY_S on the way; a share
of LOSS is lost, which ones is the same each time; and BITS_PER_S (0: any number) go in each direction. It prints
"ready" when the devices are there.
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_SETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000  # of linux/if_tun.h
_CLONE_NEWNET = 0x40000000
_QUEUE_S = 0.1  # what waits for its turn longer is dropped, as in any switch
_PACKET_BYTES = 65536


def device_in(net: str, name: str) -> int:
    """A new device in a namespace, as a file descriptor: packets without a header."""
    with open(net) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {net}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    return device


class Direction:
    def __init__(self, source: int, target: int, delay_s: float, loss: float, bits_per_s: float):
        self._source, self._target = source, target
        self._delay_s, self._loss, self._bits_per_s = delay_s, loss, bits_per_s
        self._random = random.Random(source)
        self._on_the_way: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0  # when the wire has room for another packet

    def take(self) -> None:
        while True:
            try:
                packet = os.read(self._source, _PACKET_BYTES)
            except BlockingIOError:
                return
            now = time.monotonic()
            if self._random.random() < self._loss or self._free_at - now > _QUEUE_S:
                continue
            self._free_at = max(self._free_at, now)
            if self._bits_per_s:
                self._free_at += 8 * len(packet) / self._bits_per_s
            self._on_the_way.append((self._free_at + self._delay_s, packet))

    def deliver(self) -> float | None:
        """Deliver what is due. Returns when the next packet is; None: there is none."""
        while self._on_the_way:
            due, packet = self._on_the_way[0]
            if due > time.monotonic():
                return due
            self._on_the_way.popleft()
            try:
                os.write(self._target, packet)
            except OSError:
                pass  # The device is down, and what comes to it is lost.
        return None


def main() -> None:
    first, second, name, *weather = sys.argv[1:]
    devices = [device_in(net, name) for net in (first, second)]
    directions = [Direction(source, target, *map(float, weather)) for source, target in (devices, devices[::-1])]
    print("ready", flush=True)
    while True:
        due = [at for at in (direction.deliver() for direction in directions) if at is not None]
        select.select(devices, [], [], max(min(due) - time.monotonic(), 0.0) if due else None)
        for direction in directions:
            direction.take()


if __name__ == "__main__":
    main()
