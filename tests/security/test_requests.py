"""Requests by which a stranger would take memory: compressed, unfinished, half open, reset, endless or never
read. While they go on others are served, and afterwards the memory is back.

Default: attacks of a second. TANDEM_LONG=security: longer ones, and on more connections.
"""
import gzip, os, struct, sys, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
sys.path.insert(0, os.path.dirname(__file__))
import h2
from harness import *
from client import Client, grpc, request

GENERATE, ATTACH = "/tandem.v1.Tandem/Generate", "/tandem.worker.v1.Worker/Attach"
LONG = os.environ.get("TANDEM_LONG") in ("security", "all")
SECONDS, CONNECTIONS = (4, 36) if LONG else (1, 12)
MIB = 1 << 20
# What one attack may take while it lasts, and what may be left afterwards.
MOST, LEFT = 256 * MIB, 64 * MIB


def memory(process):
    try:
        with open(f"/proc/{process.child.pid}/status") as f:
            return int(re.search(r"VmRSS:\s+(\d+) kB", f.read()).group(1)) * 1024
    except (FileNotFoundError, AttributeError):  # it has ended
        return 0


def ask(c):
    """Seconds until a call is answered; refused ones come back, as clients do."""
    begin = time.monotonic()
    asked = request(ids=list(range(1, 40)), max_tokens=4, stopping__ignore_eos=True)
    while True:
        try:
            assert len(Client(c.router.address).all(asked, timeout=20)[1]) == 4
            return time.monotonic() - begin
        except grpc.RpcError as e:
            if e.code() != grpc.StatusCode.RESOURCE_EXHAUSTED or time.monotonic() > begin + 10:
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
    """attack(address, until): goes on until until() is true; returns connections to be closed."""
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
        held = attack(process.address, lambda: time.monotonic() > end)
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
        assert max(times) < 10 * SLOW, max(times)
        c.audit()


@test
def test_compressed_messages_are_refused():
    bomb = gzip.compress(bytes(1024 * MIB), 9)

    def attack(address, until):
        conn = h2.Connection(address)
        for _ in range(2):
            stream = conn.open(GENERATE, (b"grpc-encoding", b"gzip"))
            conn.write(stream, h2.message(bomb, True), end=True)
        return [conn]
    attacked(attack)


@test
def test_unfinished_messages_are_bounded():
    def attack(address, until):
        held = []
        for i in range(CONNECTIONS):
            conn = h2.Connection(address)
            held.append(conn)
            for _ in range(10):
                stream = conn.open(GENERATE)
                conn.write(stream, h2.message(bytes(4 * MIB - 64))[:-1000])
        return held
    attacked(attack)


@test
def test_half_open_calls_are_bounded():
    def attack(address, until):
        conn = h2.Connection(address)
        for _ in range(30000):
            conn.open(GENERATE)
        return [conn]
    attacked(attack)


@test
def test_rapid_resets_are_bounded():
    def attack(address, until):
        held = [h2.Connection(address)]
        while not until():
            if held[-1].is_over or held[-1].next > 1 << 24:
                held.append(h2.Connection(address))
            conn, out = held[-1], b""
            for _ in range(100):
                out += h2.frame(h2.HEADERS, h2.END_HEADERS, conn.next, h2.call_fields(GENERATE))
                out += h2.frame(h2.RST_STREAM, 0, conn.next, struct.pack(">I", 8))
                conn.next += 2
            conn.send(out)
        return held
    attacked(attack)


@test
def test_endless_headers_are_bounded():
    def attack(address, until):
        held = []
        while not until():
            conn = h2.Connection(address)
            held.append(conn)
            conn.send(h2.frame(h2.HEADERS, 0, 1, h2.call_fields(GENERATE)))
            for i in range(200):
                if until() or not conn.send(h2.frame(h2.CONTINUATION, 0, 1, h2.field(b"x%d" % i, b"y" * 16000))):
                    break
        return held
    attacked(attack)


@test
def test_floods_of_pings_and_settings_are_bounded():
    def attack(address, until):
        held = []
        while not until():
            conn = h2.Connection(address, reads=False)
            held.append(conn)
            conn.socket.settimeout(0.5)
            for one in (h2.frame(h2.PING, payload=bytes(8)), h2.frame(h2.SETTINGS)):
                while not until() and conn.send(one * 1000):
                    pass
        return held
    attacked(attack, most=2 * MOST)  # gRPC keeps up to 4 MiB of answers for a connection that does not read


@test
def test_readers_without_a_window_are_bounded():
    def attack(address, until):
        held = []
        ask_much = request(ids=list(range(1, 30)), max_tokens=60, stopping__ignore_eos=True).SerializeToString()
        for _ in range(20):
            conn = h2.Connection(address, settings=struct.pack(">HI", 4, 0))
            held.append(conn)
            for _ in range(10):
                conn.write(conn.open(GENERATE), h2.message(ask_much), end=True)
        return held
    attacked(attack)


@test
def test_wrong_hellos_are_bounded():
    def attack(address, until):
        held = [h2.Connection(address)]
        while not until():
            if held[-1].is_over or held[-1].next > 1 << 24:
                held.append(h2.Connection(address))
            for _ in range(100):
                if not held[-1].write(held[-1].open(ATTACH), h2.message(b"\x0a\x04\x0a\x02hi")):
                    break
        return held
    attacked(attack, at="worker")


@test
def test_long_messages_before_the_hello_are_bounded():
    def attack(address, until):
        held = []
        for _ in range(CONNECTIONS // 2):
            conn = h2.Connection(address)
            held.append(conn)
            conn.write(conn.open(ATTACH), h2.message(bytes(60 * MIB))[:-1000])
        return held
    attacked(attack, at="worker")


@test
def test_headers_that_end_old_releases_of_grpc_end_nothing():
    """CVE-2023-1428: one of these, and more than 8 KiB of headers after it."""
    def attack(address, until):
        held = []
        for odd in ((b"te", b"x"), (b":scheme", b"x"), (b"grpclb_client_stats", b"x"), (b"content-type", b"x"),
                    (b":status", b"x"), (b"grpc-timeout", b"x"), (b"grpc-encoding", b"x" * 300)):
            for size in (9000, 20000):
                conn = h2.Connection(address)
                held.append(conn)
                many = [(b"x%d" % i, b"y" * 900) for i in range(size // 900)]
                for without in ((), odd[:1]):  # beside the right one, or instead of it
                    conn.open(GENERATE, odd, (b"x", b"y" * size), without=without)
                    conn.open(GENERATE, odd, *many, without=without)
        return held
    attacked(attack)


@test
def test_strings_and_numbers_without_end_in_headers_are_bounded():
    """CVE-2023-33953: a header string is read whole before its length is looked at, and a number may have any
    number of leading zeros."""
    def attack(address, until):
        held = []
        for k in range(CONNECTIONS):
            conn = h2.Connection(address)
            held.append(conn)
            long = b"\0\x01x\x7f" + b"\xff\xff\xff\xff\x0e" if k % 2 else b"\0\x01x\x7f"
            conn.send(h2.frame(h2.HEADERS, 0, 1, h2.call_fields(GENERATE) + long))
            more = h2.frame(h2.CONTINUATION, 0, 1, (b"y" if k % 2 else b"\x80") * 16384)
            for _ in range(2000):  # 32 MiB
                if until() or not conn.send(more):
                    break
        return held
    attacked(attack)


if __name__ == "__main__":
    sys.exit(main())
