"""Requests by which a stranger would take memory: compressed, unfinished, half open, reset, endless or never
read. While they go on others are served, and afterwards the memory is back.

Default: attacks of a second. TANDEM_LONG=security: longer ones, and on more connections.
"""
import os, sys, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
sys.path.insert(0, os.path.dirname(__file__))
import attacks
from harness import *
from client import Client, grpc, request
from lab import LEFT, LONG, MIB, memory

SECONDS, CONNECTIONS = (4, 36) if LONG else (1, 12)
MOST = 256 * MIB  # what one attack may take while it lasts


def ask(c):
    """Seconds until a call is answered; refused ones come back, as clients do. A worker may be believed lost
    for a moment where other programs take every core."""
    begin = time.monotonic()
    asked = request(ids=list(range(1, 40)), max_tokens=4, stopping__ignore_eos=True)
    while True:
        try:
            assert len(Client(c.router.address).all(asked, timeout=20)[1]) == 4
            return time.monotonic() - begin
        except grpc.RpcError as e:
            comes_back = e.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
            if not comes_back or time.monotonic() > begin + 10:
                raise
            time.sleep(0.05)


class Watch(threading.Thread):
    """The most memory that a process takes."""

    def __init__(self, process):
        super().__init__(daemon=True)
        self.process, self.most, self.is_over = process, 0, False
        self.start()

    def run(self):
        while not self.is_over:
            self.most = max(self.most, memory(self.process))
            time.sleep(0.02)


def attacked(attack, at="router", most=MOST):
    with Cluster() as c:
        process = c.router if at == "router" else c.workers[0]
        ask(c)
        before, watch, end = memory(process), Watch(process), time.monotonic() + SECONDS
        times, stop = [], threading.Event()

        def others():
            while not stop.is_set():
                times.append(ask(c))
        asking = threading.Thread(target=others)
        asking.start()
        held = attack(process.address, lambda: time.monotonic() > end, attacks.At(many=CONNECTIONS))
        time.sleep(1)
        stop.set()
        asking.join()
        for h in held:
            h.close()
        assert process.child.poll() is None
        ask(c)
        if SLOW == 1:  # sanitizers keep what was freed
            wait_until(lambda: memory(process) < before + LEFT, 15,
                       lambda: f"{(memory(process) - before) >> 20} MiB are left of {(watch.most - before) >> 20}")
        watch.is_over = True
        print(f"# most {(watch.most - before) >> 20} MiB, left {(memory(process) - before) >> 20} MiB; "
              f"other calls: {len(times)}, longest {max(times):.3f} s", flush=True)
        assert SLOW > 1 or watch.most < before + most, f"{(watch.most - before) >> 20} MiB"
        assert max(times) < 20 * SLOW, max(times)
        c.audit()


@test
def test_compressed_messages_are_refused():
    attacked(attacks.compressed_messages)


@test
def test_unfinished_messages_are_bounded():
    attacked(attacks.unfinished_messages)


@test
def test_half_open_calls_are_bounded():
    attacked(attacks.half_open_calls)


@test
def test_rapid_resets_are_bounded():
    attacked(attacks.rapid_resets)


@test
def test_endless_headers_are_bounded():
    attacked(attacks.endless_headers)


@test
def test_floods_of_pings_and_settings_are_bounded():
    # gRPC keeps up to 4 MiB of answers for a connection that does not read
    attacked(attacks.pings_and_settings_that_are_not_read, most=2 * MOST)


@test
def test_readers_without_a_window_are_bounded():
    attacked(attacks.readers_without_a_window)


@test
def test_wrong_hellos_are_bounded():
    attacked(attacks.wrong_hellos, at="worker")


@test
def test_long_messages_before_the_hello_are_bounded():
    attacked(attacks.long_messages_before_the_hello, at="worker")


@test
def test_headers_that_end_old_releases_of_grpc_end_nothing():
    attacked(attacks.headers_that_end_old_releases)


@test
def test_strings_and_numbers_without_end_in_headers_are_bounded():
    attacked(attacks.strings_and_numbers_without_end)


if __name__ == "__main__":
    sys.exit(main())
