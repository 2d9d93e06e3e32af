"""Many streams at once, one token a second each, through the gateway and over gRPC: none is lost, and what
each costs in memory is bounded, in every process. Then connections that only wait beside streams.

Default: 600 streams, 500 idle connections beside 100. TANDEM_LONG=streams: 10,000, 8,000 beside 1,000.
"""
import contextlib, json, os, sys, tempfile
sys.path[:0] = [os.path.join(os.path.dirname(__file__), "..", d) for d in ("cluster", "security")]
from harness import *
from lab import memory

LONG = os.environ.get("TANDEM_LONG") in ("streams", "all")
STREAMS, IDLE, BESIDE = (10000, 8000, 1000) if LONG else (600, 500, 100)
TOKENS = 60 if LONG else 16
DIMS = "layers=2,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536,positions=8192"
SIM = ["--engine", "sim", "--numerics", "bf16", "--pages", "24000", "--max-context", "8192", "--max-batch", "4096", "--max-rows", "4096",
       "--sim-prefill", "1000,1,0", "--sim-decode", "1000000,0,0"]
MOST = 64 << 10  # bytes of a stream


def cluster():
    return Cluster(decode=3, plan="split", dummy=DIMS, worker_args=SIM, router_args=["--max-calls", "32768", "--queue-requests", "16384"])


class Clients:
    """A process with n streams of the gateway (streams_client.py). Says when all have begun, and what came of
    them."""

    def __init__(self, gateway, n, tokens=TOKENS):
        args = [gateway.address, str(n), str(tokens)]
        self.child = subprocess.Popen([sys.executable, os.path.join(os.path.dirname(__file__), "streams_client.py"), *args],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begun(self):
        line = self.child.stdout.readline()
        assert line == "begun\n", line

    def result(self):
        got = json.loads(self.child.stdout.readline())
        self.child.wait()
        return got


def per_stream(before, processes, n):
    """Bytes that each process has grown by for each stream."""
    return {p.name: (memory(p) - before[p.name]) // n for p in processes}


@contextlib.contextmanager
def gateway_of(c):
    gateway = Proc(c, "gateway", "gateway", ["--routers", c.router.address, "--max-connections", "16000"]).start()
    try:
        yield gateway
    finally:
        gateway.stop()


def first_use(gateway):
    """So that what is allocated once is not counted as a stream's."""
    one = Clients(gateway, 10, 2)
    one.begun()
    assert one.result()["lost"] == 0


@test
def test_streams_of_the_gateway_cost_little_and_none_is_lost():
    with cluster() as c, gateway_of(c) as gateway:
        first_use(gateway)
        processes = [gateway, c.router, *c.workers]
        before = {p.name: memory(p) for p in processes}
        clients = [Clients(gateway, STREAMS // 2) for _ in range(2)]
        for k in clients:
            k.begun()
        assert c.status()["running"] > 0.9 * STREAMS, c.status()
        grown = per_stream(before, processes, STREAMS)
        results = [k.result() for k in clients]
    print(f"# {STREAMS} streams; bytes of each: {grown}; {results}")
    assert all((r["done"], r["lost"]) == (STREAMS // 2, 0) for r in results), results
    assert max(grown.values()) <= MOST, grown


@test
def test_streams_of_grpc_cost_little_and_none_is_lost():
    lines = "".join(json.dumps({"id": str(i), "prompt_ids": [7, 8, i % 1500], "max_tokens": TOKENS, "ignore_eos": True}) + "\n"
                    for i in range(STREAMS))
    with cluster() as c, tempfile.TemporaryDirectory() as d:
        assert len(c.generate([{"id": "a", "prompt_ids": [1], "max_tokens": 2, "ignore_eos": True}])) == 1
        processes = [c.router, *c.workers]
        before = {p.name: memory(p) for p in processes}
        with open(os.path.join(d, "in"), "w") as f:
            f.write(lines)
        with open(f.name) as source, open(os.path.join(d, "out"), "w") as out:
            client = subprocess.Popen([TANDEM, "generate", "--jsonl", "--router", c.router.address, "--concurrency", str(STREAMS)],
                                      stdin=source, stdout=out, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: c.status()["running"] > 0.99 * STREAMS, 60, lambda: f"all run: {c.status()['running']}")
        time.sleep(2)
        grown = per_stream(before, processes, STREAMS)
        _, errors = client.communicate(timeout=(TOKENS + 60) * SLOW)
        assert client.returncode == 0, errors
        with open(os.path.join(d, "out")) as f:
            answers = [json.loads(line) for line in f]
    print(f"# {STREAMS} streams; bytes of each: {grown}")
    assert {len(a["token_ids"]) for a in answers} == {TOKENS} and len(answers) == STREAMS, len(answers)
    assert max(grown.values()) <= MOST, grown


def ask_health(s):
    s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    got = s.recv(4096)
    while not got.endswith(b"}"):
        got += s.recv(4096)
    assert got.startswith(b"HTTP/1.1 200"), got


@test
def test_connections_that_wait_do_not_slow_streams():
    with cluster() as c, gateway_of(c) as gateway:
        first_use(gateway)
        results = []
        for n_idle in (0, IDLE):
            host, port = gateway.address.rsplit(":", 1)
            idle = []
            for _ in range(n_idle):
                idle.append(socket.create_connection((host, int(port))))
                ask_health(idle[-1])
            clients = Clients(gateway, BESIDE, 20 if LONG else 8)
            clients.begun()
            results.append(clients.result())
            assert results[-1]["lost"] == 0, results
            if idle:  # all are still there, and are served
                for s in idle[::97]:
                    ask_health(s)
            for s in idle:
                s.close()
    print(f"# gaps between tokens, alone and beside {IDLE} idle connections: {results}")
    most = 1.1 if LONG else 1.3  # other tests run beside the default
    assert results[1]["p99_ms"] <= most * results[0]["p99_ms"] or SLOW > 1, results


if __name__ == "__main__":
    main()
