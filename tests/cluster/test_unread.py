"""Clients that do not read are cut off and cost bounded memory; clients that read slowly get every token."""
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import Client, grpc, request

DIMS = "layers=4,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536,positions=8192"
SIM = ["--engine", "sim", "--numerics", "bf16", "--pages", "3000", "--max-context", "8192", "--chunk-tokens", "512", "--max-rows",
       "576", "--sim-prefill", "1000,10,0"]
# About 120 bytes a token.
LONG = dict(ids=[1, 2, 3], max_tokens=8000, stopping__ignore_eos=True, want_logprobs=True, top_logprobs=20)
SEND_BYTES, WINDOW_BYTES = 256 << 10, 64 << 10
FAST = ["--sim-decode", "500,0,0"]


def narrow(address):
    """A client whose window stays at HTTP/2's 64 KiB: the rest waits in the router."""
    client = Client(address)
    client.channel = grpc.insecure_channel(address, options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES)])
    return client


@test
def test_client_that_stops_reading_is_cut_off_within_a_second_of_a_full_queue():
    metrics = f"127.0.0.1:{free_port()}"
    with Cluster(dummy=DIMS, plan="split", worker_args=[*SIM, *FAST], router_args=["--metrics-listen", metrics]) as c:
        for attempt in range(3):  # beside other programs the metric is read late
            stream = narrow(c.router.address).generate(request(**LONG), timeout=120)
            n, size = len(next(stream).tokens), 0
            wait_until(lambda: metric(metrics, "tandem_clients_behind{}"), 20, "a full queue")
            full = time.monotonic()
            wait_until(lambda: metric(metrics, "tandem_clients_unread_total{}") > attempt, 5, "cut off")
            took = time.monotonic() - full
            c.audit(2)
            try:
                for m in stream:
                    n, size = n + len(m.tokens), size + m.ByteSize() + 5
                raise AssertionError("everything was kept for a client that does not read")
            except grpc.RpcError as e:
                assert e.code().name == "RESOURCE_EXHAUSTED" and "does not read" in e.details(), e
            print(f"# cut off {took * 1e3:.0f} ms after the queue was full; {n} tokens, {size} bytes had reached the client")
            if took < 1 * SLOW and size < 2 * WINDOW_BYTES:
                return
        raise AssertionError((took, size))


@test
def test_client_that_reads_slowly_gets_every_token():
    with Cluster(dummy=DIMS, plan="split", worker_args=[*SIM, *FAST], router_args=["--stall-ms", "2000"]) as c:
        want = Client(c.router.address).all(request(**LONG))[1]
        ids, started, generated = [], time.monotonic(), None
        for m in narrow(c.router.address).generate(request(**LONG), timeout=120):
            ids += [t.id for t in m.tokens]
            if not generated and not c.router.child.poll() and len(ids) % 500 == 0 and not c.status()["running"]:
                generated = time.monotonic() - started
            time.sleep(len(m.tokens) * 1.3e-3 * SLOW)
        took = time.monotonic() - started
        print(f"# generated in less than {generated or took:.1f} s, read in {took:.1f} s")
        assert ids == want and len(ids) == 8000
        c.audit()


def h2_frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def h2_generate(address, r):
    """A socket on which a Generate call was sent by hand: its windows are as wide as HTTP/2 allows, and it
    never reads."""
    host, port = address.rsplit(":", 1)
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    s.connect((host, int(port)))
    headers = b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in (
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/tandem.v1.Tandem/Generate"), (b":authority", b"x"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc")))
    body, most = r.SerializeToString(), 2 ** 31 - 1
    s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + h2_frame(4, 0, 0, b"\0\4" + most.to_bytes(4, "big")) +
              h2_frame(8, 0, 0, (most - 65535).to_bytes(4, "big")) + h2_frame(1, 4, 1, headers) +
              h2_frame(0, 1, 1, b"\0" + len(body).to_bytes(4, "big") + body))
    return s


@test
def test_kernel_keeps_little_for_a_client_that_opens_its_window_and_does_not_read():
    with Cluster(dummy=DIMS, plan="split", worker_args=[*SIM, *FAST]) as c:
        s = h2_generate(c.router.address, request(**LONG, sampling__n=8))
        wait_until(lambda: c.status()["running"], 10, "running")
        wait_until(lambda: not c.status()["running"], 20, "cut off")
        s.settimeout(1)
        size = 0
        try:
            while data := s.recv(1 << 16):
                size += len(data)
        except OSError:
            pass
        print(f"# {size} bytes had left the router, into its kernel's buffers and the client's")
        assert size < SEND_BYTES + 4 * WINDOW_BYTES
        c.audit(5)


main()
