"""A lossy or slow network: two TUN interfaces, and a thread that forwards packets between them.

Some kernels have netem for this (`tc qdisc add … netem loss 20% delay 50ms`); TUN is available wherever containers are.
TCP retransmits lost packets with exponential backoff, so programs see only delays. Packets of one direction keep their
order. The kernel hands over up to 64 KB of a stream at once, with a header that says so, and takes them back, so the
relay carries gigabits per second; a loss is one of these.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import sys
import threading
import time
from dataclasses import dataclass, field

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_INFO, _HEADER = 0x0001, 0x1000, 0x4000
_WHOLE_STREAMS = 1 | 2 | 4
"""Checksums and segmentation (IPv4, IPv6) are left to the reader of the interface."""
_NUM_HEADER_BYTES, _LONGEST_PACKET = 10, 1 << 17
_SWITCH_S = 1e-4
"""Seconds after which another thread yields the interpreter to the relay; Python's default of 5 ms is a long delay."""
MOST_HELD = 10_000
"""Limit on packets in flight, both directions together; 1 Gbit/s over 60 ms fills half. More packets are dropped."""


@dataclass(frozen=True, slots=True)
class Impairment:
    """Loss, delay and bandwidth, the same in both directions.

    `loss` is the fraction of dropped packets, 0 to 1. Each packet is delayed by `delay_s` plus a random part of
    `jitter_s`.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = float("inf")


@dataclass
class Relay:
    """Forwards packets between the interfaces `ends` in both directions; set `impairment` from any thread."""

    ends: tuple[str, str]
    impairment: Impairment = Impairment()
    num_passed: int = 0
    num_lost: int = 0
    num_held: int = 0
    """Number of packets in flight."""
    _devices: list[int] = field(default_factory=list)
    _is_over: int = field(default_factory=lambda: os.eventfd(0))
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Create the interfaces in this network namespace; raises OSError if not permitted."""
        try:
            for name in self.ends:
                self._devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
                fcntl.ioctl(
                    self._devices[-1], _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN | _NO_INFO | _HEADER)
                )
                fcntl.ioctl(self._devices[-1], _TUNSETOFFLOAD, _WHOLE_STREAMS)
        except OSError:
            self.close()
            raise
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        self._thread = threading.Thread(target=self._pass, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; closing their descriptors removes the interfaces."""
        os.eventfd_write(self._is_over, 1)
        if self._thread is not None:
            self._thread.join(5.0)
        for device in (*self._devices, self._is_over):
            os.close(device)

    def _pass(self) -> None:
        draws, count = random.Random(), itertools.count()
        a, b = self._devices
        other = {a: b, b: a}
        sent_at, due_at = dict.fromkeys(other, 0.0), dict.fromkeys(other, 0.0)  # of the last packet from a device
        held: list[tuple[float, int, int, bytes]] = []
        while True:
            wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
            readable = select.select([a, b, self._is_over], [], [], wait_s)[0]
            if self._is_over in readable:
                return
            for device in readable:
                packet, now, bad = os.read(device, _LONGEST_PACKET), time.monotonic(), self.impairment
                if draws.random() < bad.loss or len(held) >= MOST_HELD:
                    self.num_lost += 1
                    continue
                sent_at[device] = max(now, sent_at[device]) + (len(packet) - _NUM_HEADER_BYTES) / bad.bytes_per_s
                late_s = bad.delay_s + bad.jitter_s * draws.random()
                due_at[device] = max(due_at[device], sent_at[device] + late_s)
                heapq.heappush(held, (due_at[device], next(count), other[device], packet))
            while held and held[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(held)
                with contextlib.suppress(OSError):  # the interface is down: nothing listens
                    os.write(device, packet)
                    self.num_passed += 1
            self.num_held = len(held)
