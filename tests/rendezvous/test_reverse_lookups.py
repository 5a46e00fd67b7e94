"""Stores make no DNS queries: a slow DNS server would delay every world."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import run_source

pytestmark = pytest.mark.slow

ASKED = """
import ctypes, os, socket, struct, sys, threading
from torch.distributed import TCPStore
from rendezvous.reverse_lookups import _Resolver, switch_off

is_off = os.fork() == 0  # by itself: torch asks no more once a lookup has failed
questions = []
dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
dns.bind(("127.0.0.1", 0))

def answer():
    while True:
        question, whom = dns.recvfrom(4096)
        questions.append(question)
        dns.sendto(question[:2] + bytes([0x81, 0x83]) + question[4:], whom)  # there is no such name

threading.Thread(target=answer, daemon=True).start()
if is_off:
    switch_off()
else:
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
libc = ctypes.CDLL(None)
libc.__res_init()
libc.__res_state.restype = ctypes.c_void_p
resolver = _Resolver.from_address(libc.__res_state())
port = struct.pack("!H", dns.getsockname()[1])
resolver.nscount = 1
resolver.nsaddr[:] = struct.pack("=H", socket.AF_INET) + port + socket.inet_aton("127.0.0.1") + bytes(8)
store = TCPStore("127.83.67.2", 0, is_master=True, wait_for_workers=False)
store.set("key", "value")
assert store.get("key") == b"value"
print("off:" if is_off else "on:", len(questions), flush=True)
if is_off:
    print("said until here", file=sys.stderr, flush=True)
"""


def test_stores_ask_dns_for_no_names_once_it_is_switched_off() -> None:
    """Before the switch they do; a failure to switch it off is not an error."""
    done = run_source(ASKED)
    assert done.returncode == 0, done.stderr
    off, on = done.stdout.splitlines()
    assert off == "off: 0" and on.startswith("on: ") and on != "on: 0"
    assert "hostname" not in done.stderr.partition("said until here")[0]


RESTORED = """
import ctypes, importlib, os
from rendezvous import reverse_lookups

libc = ctypes.CDLL(None)
libc.__res_init()
libc.__res_state.restype = ctypes.c_void_p
resolver = reverse_lookups._Resolver.from_address(libc.__res_state())
before = bytes(resolver)

def runs(thread):
    # Linux lists a thread for a moment after its join; one that is exiting in the kernel takes no lock any more.
    try:
        with open(f"/proc/self/task/{thread}/stat") as file:
            return not int(file.read().rpartition(")")[2].split()[6]) & 0x4  # PF_EXITING
    except (FileNotFoundError, ProcessLookupError):
        return False

for _ in range(1000):
    importlib.reload(reverse_lookups).switch_off()
    print(sum(map(runs, os.listdir("/proc/self/task"))))
print(bytes(resolver) == before)
"""


def test_the_resolver_asks_the_same_servers_as_before_and_no_thread_is_left() -> None:
    """A thread still exiting after its `join` could hold the resolver's lock while a worker is forked, which would then
    never start."""
    done = subprocess.run([sys.executable, "-c", RESTORED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*["1"] * 1000, "True"]
