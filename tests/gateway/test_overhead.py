"""What the gateway adds: processor time for each token, and time to the first one.

TTFT is what a client sees, less the router's own time (arrival to first token): over gRPC and over HTTP on a
connection that is kept, as the pools of OpenAI's clients do, and on one that is made for each request. All
clients are in Python, so Python is in all figures.
Default: 64 streams, and bounds that hold on a busy machine. TANDEM_LONG=streams: 512, and narrower ones.
"""
import json, os, selectors, socket, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
from harness import *
from client import Client, request

LONG = os.environ.get("TANDEM_LONG") in ("streams", "all")
STREAMS, TOKENS, ALONE = (512, 500, 400) if LONG else (64, 100, 60)
DIMS = "layers=2,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536,positions=8192"
SIM = ["--engine", "sim", "--pages", "60000", "--max-rows", "1100", "--max-batch", "512", "--sim-prefill", "1000,1,0", "--sim-decode", "20000,0,0"]


def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as f:
        words = f.read().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def connect(address):
    host, port = address.rsplit(":", 1)
    s = socket.create_connection((host, int(port)), timeout=60)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def post(s, connection="close", **body):
    """Asks for a stream on a connection, which is returned."""
    text = json.dumps({"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0, **body})
    s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
    return s


def until(s, got, is_enough):
    while not is_enough(got):
        more = s.recv(1 << 16)
        assert more, got[-500:]
        got += more
    return got


def drain(sockets):
    """Reads all streams to their ends. Tokens in all, as their last events say. Values: what came before."""
    watched, ends = selectors.DefaultSelector(), dict(sockets)
    for s in ends:
        watched.register(s, selectors.EVENT_READ)
    while watched.get_map():
        for key, _ in watched.select(60):
            got = key.fileobj.recv(1 << 18)
            ends[key.fileobj] = (ends[key.fileobj] + got)[-4096:]
            if not got:
                watched.unregister(key.fileobj)
                key.fileobj.close()
    counts = [re.findall(rb'"completion_tokens":(\d+)', end) for end in ends.values()]
    assert all(counts), [end for end in ends.values() if b"completion_tokens" not in end][:1]
    return sum(int(c[-1]) for c in counts)


@test
def test_what_the_gateway_costs():
    metrics = f"127.0.0.1:{free_port()}"
    with Cluster(dummy=DIMS, prefill=1, decode=1, plan="split", worker_args=SIM,
                 router_args=["--metrics-listen", metrics, "--queue-requests", "4096"]) as c:
        gateway = Proc(c, "gateway", "gateway", ["--routers", c.router.address, "--max-requests", "2000"]).start()
        c.workers.append(gateway)  # is stopped with the cluster, whatever happens
        drain({post(connect(gateway.address), prompt=[1, 2, 3], max_tokens=2): b""})

        before, began = cpu_s(gateway.pid), time.monotonic()
        router_before = cpu_s(c.router.pid)
        n = drain({post(connect(gateway.address), prompt=[i % 1000, 2, 3], max_tokens=TOKENS): b"" for i in range(STREAMS)})
        took, used, router = time.monotonic() - began, cpu_s(gateway.pid) - before, cpu_s(c.router.pid) - router_before
        assert n == STREAMS * TOKENS, n
        cores = used / n * 50000
        print(f"# {STREAMS} streams, {n / took:.0f} tokens/s; for 50,000 tokens a second the gateway needs {cores:.2f} cores, the router "
              f"{router / n * 50000:.2f}")

        grpc = Client(c.router.address)

        def over_grpc(i):
            began = time.monotonic()
            call = grpc.generate(request(ids=[i, 7, 8], max_tokens=2))
            next(call)
            took = time.monotonic() - began
            list(call)
            return took

        def first_event(s):
            return until(s, b"", lambda got: b"data: " in got)

        def over_http(i):
            began = time.monotonic()
            s = post(connect(gateway.address), prompt=[i, 5, 6], max_tokens=2)
            head = first_event(s)
            took = time.monotonic() - began
            drain({s: head})
            return took

        def over_kept(i):
            began = time.monotonic()
            got = first_event(post(kept, "keep-alive", prompt=[i, 9, 9], max_tokens=2))
            took = time.monotonic() - began
            until(kept, got, lambda got: got.endswith(b"\r\n0\r\n\r\n"))
            return took

        def added(ask):
            """Mean of the client's TTFT less the router's, in milliseconds."""
            seen = [metric(metrics, f"tandem_time_to_first_token_seconds_{what}{{}}") for what in ("sum", "count")]
            took = sum(ask(i) for i in range(ALONE)) / ALONE
            now = [metric(metrics, f"tandem_time_to_first_token_seconds_{what}{{}}") for what in ("sum", "count")]
            return 1000 * (took - (now[0] - seen[0]) / (now[1] - seen[1]))
        fresh, direct = added(over_http), added(over_grpc)
        kept = connect(gateway.address)  # not before: without a request it would be closed after five seconds
        http = added(over_kept)
        kept.close()
        print(f"# {ALONE} streams alone: over HTTP {http:.2f} ms come to the router's TTFT, with a connection for each {fresh:.2f} ms, over gRPC "
              f"{direct:.2f} ms")
        added_ms = http - direct, fresh - direct
        assert cores < (2 if LONG else 8) * SLOW and max(added_ms) < (2 if LONG else 30) * SLOW, (cores, added_ms)


if __name__ == "__main__":
    main()
