"""Requests by which a stranger would take memory: compressed, unfinished, half open, reset, endless or never
read. While they go on others are served, and afterwards the memory is back.

Default: attacks of a second. TANDEM_LONG=security: longer ones, and on more connections.
"""
import contextlib, os, signal, sys, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
sys.path.insert(0, os.path.dirname(__file__))
import attacks, h2, servers
from concurrent import futures
from harness import *
from client import Client, grpc, request, worker_pb
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


def attacked(attack, at="router", most=MOST, longest=20):
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
            wait_until(lambda: memory(process) < before + LEFT, 30,
                       lambda: f"{(memory(process) - before) >> 20} MiB are left of {(watch.most - before) >> 20}")
        watch.is_over = True
        print(f"# most {(watch.most - before) >> 20} MiB, left {(memory(process) - before) >> 20} MiB; "
              f"other calls: {len(times)}, longest {max(times):.3f} s", flush=True)
        assert SLOW > 1 or watch.most < before + most, f"{(watch.most - before) >> 20} MiB"
        assert max(times) < longest * SLOW, max(times)
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
def test_resets_on_connections_made_before_are_bounded():
    # now and then gRPC has read 100,000 of these calls when the first connection is closed
    for at in ("router", "worker"):
        attacked(attacks.resets_with_requests_on_connections_made_before, at=at, most=4 * MOST)


@test
def test_endless_headers_are_bounded():
    attacked(attacks.endless_headers)


@test
def test_floods_of_pings_and_settings_are_bounded():
    attacked(attacks.pings_and_settings_that_are_not_read, longest=4)


@test
def test_frames_that_belong_to_no_call_are_bounded():
    # read without a pause, they keep a thread of gRPC from all others
    for attack in (attacks.empty_continuations, attacks.window_updates, attacks.empty_data_frames,
                   attacks.pings_that_are_read):
        attacked(attack, longest=4)


@test
def test_a_client_that_gives_up_long_messages_keeps_its_connection():
    with Cluster() as c:
        conn = h2.Connection(c.router.address)
        for _ in range(3):
            given_up = conn.open(attacks.GENERATE)
            for part in (h2.message(bytes(3 * MIB))[:-1][i:i + 16000] for i in range(0, 2 * MIB, 16000)):
                assert conn.send(h2.frame(h2.DATA, 0, given_up, part))
                time.sleep(0.001)  # as a client does that keeps to its window
            conn.send(h2.frame(h2.RST_STREAM, 0, given_up, b"\0\0\0\x08"))
            time.sleep(1)
        answered = conn.came.get(h2.DATA, 0)
        asked = request(ids=list(range(1, 40)), max_tokens=4, stopping__ignore_eos=True)
        conn.write(conn.open(attacks.GENERATE), h2.message(asked.SerializeToString()), end=True)
        wait_until(lambda: conn.came.get(h2.DATA, 0) > answered, 10, "an answer on the same connection")
        assert not conn.is_over
        conn.close()


@test
def test_readers_without_a_window_are_bounded():
    attacked(attacks.readers_without_a_window)


@test
def test_calls_that_anybody_may_make_take_no_place_of_others():
    """Watching health and reflection need no key and no proof, and end when the client likes."""
    watch, reflect = "/grpc.health.v1.Health/Watch", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    with Cluster(plan="split", router_args=["--max-calls", "200"]) as c:
        ask(c)
        held = []
        for address in (c.router.address, c.router.joins, c["decode-0"].address, c["prefill-0"].address):
            for path in (watch, reflect):
                held.append(h2.Connection(address))
                for _ in range(400):
                    held[-1].write(held[-1].open(path), h2.message(b""), end=path == watch)
            held.append(h2.Connection(address))
            for _ in range(400):
                held[-1].write(held[-1].open("/nothing"), h2.message(b""), end=True)
        time.sleep(1)
        assert ask(c) < 10 * SLOW
        c["decode-0"].kill(signal.SIGSTOP)  # its stream is made anew
        time.sleep(1.5 * SLOW)
        c["decode-0"].kill(signal.SIGCONT)
        c.wait_ready()
        c.add_router()
        with grpc.insecure_channel(c.router.joins) as channel:
            join = channel.unary_unary("/tandem.worker.v1.Registry/Join", response_deserializer=bytes,
                                       request_serializer=lambda m: m.SerializeToString())
            join(worker_pb.JoinRequest(address=b"127.0.0.1:1", incarnation=5, nonce=bytes(16)), timeout=10 * SLOW)
        for p in (c.router, c["decode-0"]):
            with grpc.insecure_channel(p.address) as channel:
                check = channel.unary_unary("/grpc.health.v1.Health/Check", response_deserializer=bytes)
                check(b"", timeout=10 * SLOW)
        for h in held:
            h.close()
        c.audit()


@test
def test_wrong_hellos_are_bounded():
    attacked(attacks.wrong_hellos, at="worker")


@test
def test_long_messages_before_the_hello_are_bounded():
    attacked(attacks.long_messages_before_the_hello, at="worker")


@contextlib.contextmanager
def stranger_at(worker, message, compression=None):
    """Who answers a router's calls at the port of a worker, which is back at the end."""
    def answer(messages, context):
        next(messages)
        yield message
    worker.kill()
    worker.child.wait()
    server = grpc.server(futures.ThreadPoolExecutor(8), compression=compression)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(
        "tandem.worker.v1.Worker", {"Attach": grpc.stream_stream_rpc_method_handler(answer)})])
    server.add_insecure_port(worker.address)
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()
    worker.start()


@test
def test_messages_before_the_proof_are_short_on_both_sides():
    """A message of many empty parts takes sixteen times its size when it is unpacked."""
    def parts(field, part):
        n = len(part)
        return bytes([field, 128 + n % 128, 128 + (n >> 7) % 128, n >> 14]) + part
    leg, tokens = parts(0x12, b"\x42\0" * 20000), parts(0x1a, b"\x0a\0" * 100000)
    with Cluster(plan="split", decode=2, router_args=["--log-level", "debug"]) as c:
        with grpc.insecure_channel(c["decode-0"].address) as channel:
            attach = channel.stream_stream("/tandem.worker.v1.Worker/Attach")
            for sent, code in [(leg, "RESOURCE_EXHAUSTED")] * 20 + [(leg[:3000], "INVALID_ARGUMENT")]:
                time.sleep(0.02)  # connections with more than 16 MiB a second of what is not read are closed
                try:
                    raise AssertionError(list(attach(iter([sent]), timeout=10 * SLOW)))
                except grpc.RpcError as e:
                    assert e.code().name == code, e
        with stranger_at(c["decode-1"], tokens):
            why = r"side=client method=/tandem.worker.v1.Worker/Attach .*a message of over 4096 bytes before the proof"
            wait_until(lambda: re.search(why, c.log("router")), 20, lambda: c.log("router"))
        c.wait_ready(60)
        ask(c)
        c.audit()


@test
def test_compressed_messages_of_servers_are_refused():
    """Who takes a worker's port answers its router with what would become a hundred times longer."""
    bomb = bytes(96 * MIB)
    with Cluster(plan="split", decode=2, router_args=["--log-level", "debug"]) as c:
        before, watch = memory(c.router), Watch(c.router)
        with stranger_at(c["decode-1"], bomb, grpc.Compression.Gzip):
            why = r"side=client method=/tandem.worker.v1.Worker/Attach code=(UNIMPLEMENTED|INTERNAL|RESOURCE_EXHAUSTED)"
            wait_until(lambda: re.search(why, c.log("router")), 30, lambda: c.log("router"))
        watch.is_over = True
        print(f"# most {(watch.most - before) >> 20} MiB", flush=True)
        assert SLOW > 1 or watch.most < before + 32 * MIB, f"{(watch.most - before) >> 20} MiB"
        c.wait_ready(60)
        ask(c)
        c.audit()


@test
def test_servers_that_flood_are_left():
    """Who has taken a worker's port sends its router what belongs to no call."""
    names = servers.SERVERS if LONG else ("endless_headers", "empty_continuations", "empty_data")
    for name in names:
        with Cluster(plan="split", decode=2) as c:
            lost, before, watch, times = c["decode-1"], memory(c.router), Watch(c.router), []
            lost.kill()
            lost.child.wait()
            flood, end = servers.Server(lost.address, servers.SERVERS[name]), time.monotonic() + 2 * SECONDS
            while time.monotonic() < end:
                times.append(ask(c))
            n = flood.n
            flood.close()
            watch.is_over = True
            print(f"# {name}: {n} connections, most {(watch.most - before) >> 20} MiB; other calls: {len(times)}, "
                  f"longest {max(times):.3f} s", flush=True)
            assert n and max(times) < 1.5 * SLOW, (n, max(times))
            assert SLOW > 1 or watch.most < before + 64 * MIB, f"{(watch.most - before) >> 20} MiB"
            assert not re.search("worker lost peer=(decode-0|prefill)", c.log("router")), c.log("router")
            lost.start()
            c.wait_ready(100)  # until the router tries again
            ask(c)
            c.audit()


@test
def test_routers_that_flood_are_left():
    """The same, of who has taken the port at which workers register."""
    names = servers.SERVERS if LONG else ("endless_headers", "empty_continuations")
    for name in names:
        address = f"127.0.0.1:{free_port()}"
        flood = servers.Server(address, servers.SERVERS[name])
        with Cluster(plan="split", worker_args=["--routers", address]) as c:
            ask(c)
            before, watch, times = memory(c["decode-0"]), Watch(c["decode-0"]), []
            end = time.monotonic() + 2 * SECONDS
            while time.monotonic() < end:
                times.append(ask(c))
            watch.is_over = True
            most = (watch.most - before) >> 20
            print(f"# {name}: {flood.n} connections, most {most} MiB; other calls: {len(times)}, "
                  f"longest {max(times):.3f} s", flush=True)
            assert flood.n and max(times) < 1.5 * SLOW, (flood.n, max(times))
            assert SLOW > 1 or most < 128, most  # the pool's 64 MiB may be touched meanwhile
            assert "worker lost" not in c.log("router"), c.log("router")
            c.audit()
        flood.close()


@test
def test_headers_that_end_old_releases_of_grpc_end_nothing():
    attacked(attacks.headers_that_end_old_releases)


@test
def test_strings_and_numbers_without_end_in_headers_are_bounded():
    attacked(attacks.strings_and_numbers_without_end)


if __name__ == "__main__":
    sys.exit(main())
