"""Loads and stores 64 KiB values of Mooncake's Store from a thread with a queue. Run by `cargo xtask bench`.

Two threads to choose from: one asks for each value by itself, the other for all that have gathered in its queue.
"""

import ctypes
import queue
import sys
import threading
import time

from mooncake.store import MooncakeDistributedStore

master, keys, in_flight = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
BYTES = 65536
MOST = 64
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
memory = ctypes.create_string_buffer((in_flight + 1) * BYTES)
local = (ctypes.addressof(memory) + 4095) // 4096 * 4096
assert store.register_buffer(local, in_flight * BYTES) == 0

GET, PUT = 0, 1
results = queue.Queue()


def serve_each(requests):
    while True:
        kind, key, page, pushed = requests.get()
        if kind == GET:
            result = store.get_into(key, page, BYTES) == BYTES
        else:
            result = store.put_from(key, page, BYTES) == 0
        results.put((page, pushed, result))


def serve_batches(requests):
    while True:
        batch = [requests.get()]
        try:
            while len(batch) < MOST:
                batch.append(requests.get_nowait())
        except queue.Empty:
            pass
        for kind, call, good in (GET, store.batch_get_into, BYTES), (PUT, store.batch_put_from, 0):
            some = [request for request in batch if request[0] == kind]
            if some:
                answers = call([r[1] for r in some], [r[2] for r in some], [BYTES] * len(some))
                for (_, _, page, pushed), answer in zip(some, answers):
                    results.put((page, pushed, answer == good))


threads = {"each": (queue.Queue(), serve_each), "batches": (queue.Queue(), serve_batches)}
for requests, serve in threads.values():
    threading.Thread(target=serve, args=(requests,), daemon=True).start()
blocks = 0


def block(requests, mixed, count):
    """Operations per second, and the time of each in microseconds."""
    global blocks
    blocks += 1
    now = time.perf_counter_ns
    times, made = [], []

    def push(number, page):
        if mixed and number % 2:
            key = f"python/{blocks}/{number}"
            made.append(key)
            requests.put((PUT, key, page, now()))
        else:
            requests.put((GET, f"value/{number % keys}", page, now()))

    start = now()
    for number in range(in_flight):
        push(number, local + number * BYTES)
    for number in range(in_flight, count + in_flight):
        page, pushed, good = results.get()
        times.append((now() - pushed) / 1e3)
        assert good
        if number < count:
            push(number, page)
    wall = (now() - start) / 1e9
    for key in made:
        assert store.remove(key) == 0
    return [count / wall, *times]


print("client: ready", flush=True)
for line in sys.stdin:
    how, mixed, count = line.split()
    print("client:", *block(threads[how][0], mixed == "mixed", int(count)), flush=True)
