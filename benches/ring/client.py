"""Writes 4 KiB pages to a peer, by the plain call and through a thread and a queue. Run by `cargo xtask bench`."""

import ctypes
import queue
import sys
import threading
import time

from mooncake.engine import TransferEngine

segment, remote = sys.argv[1], int(sys.argv[2])
BYTES = 4096
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = ctypes.create_string_buffer(2 * BYTES)
local = (ctypes.addressof(memory) + BYTES - 1) // BYTES * BYTES
assert engine.register_memory(local, BYTES) == 0


def write():
    assert engine.transfer_sync_write(segment, local, remote, BYTES) == 0


requests, results = queue.Queue(), queue.Queue()


def serve():
    while True:
        requests.get()
        write()
        results.put(True)


threading.Thread(target=serve, daemon=True).start()


def write_by_thread():
    requests.put(True)
    results.get()


def times(call, count):
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        yield (time.perf_counter_ns() - start) / 1e3


CALLS = {"sync": write, "thread": write_by_thread}
print("client: ready", flush=True)
for line in sys.stdin:
    how, count = line.split()
    print("client:", *times(CALLS[how], int(count)), flush=True)
