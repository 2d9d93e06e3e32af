"""What TLS and API keys cost a router, in paired runs of the same requests at 70 % of the cluster's capacity.

Ways: plain; keys with every limit; TLS of clients, and mTLS between the processes. Each round sends the
trace in every way, each time in another order; what counts is the median over the rounds of the ratio to
plain in the same round. Asked: processor time of the router for each token at most 1.02 times with keys,
1.10 times with TLS; median TTFT less than 1 ms more. Connections are warm: a replay opens its own before
the first request.

Only with TANDEM_LONG=security, on cores that nothing else uses.
"""
import os, statistics, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from lab import LONG, authorities, make_key, words

N, ROUNDS = 400, 12
LIMITS = dict(weight=2, requests_per_minute=1000000, prompt_tokens_per_minute=1000000000,
              output_tokens_per_minute=1000000000, concurrency=1000, texts_per_minute=1000000)


def used_ns(process):
    """Processor time of all threads of a process (the clock of another process: clock_getcpuclockid(3))."""
    return time.clock_gettime_ns((~process.pid << 3) | 2)


def replay(trace, way, *args):
    out = subprocess.run([TANDEM, "replay", trace, "--router", way["router"].address, "--no-progress", "--json", *args],
                         capture_output=True, text=True, timeout=300, env=dict(os.environ, **way["env"]))
    assert out.stdout, out.stderr
    report = json.loads(out.stdout)
    assert report["completed"] == N, report
    return report


@test
def test_a_router_pays_little_for_tls_and_keys():
    if not LONG:
        raise Skip("TANDEM_LONG=security: needs quiet cores")
    with authorities() as (ours, _), contextlib.ExitStack() as stack:
        keys = os.path.join(ours.dir, "keys.json")
        key = make_key(keys, "acme", **LIMITS)
        sure = words(ours.sign("process"), ours.pem)
        plain = stack.enter_context(Cluster(plan="split"))
        tls = stack.enter_context(Cluster(plan="split", worker_args=sure, router_args=sure))
        ways = {"plain": dict(router=plain.router, env={}),
                "keys": dict(router=plain.add_router("--api-keys", keys), env={"TANDEM_API_KEY": key}),
                "tls": dict(router=tls.router, env={"TANDEM_TLS_CA": ours.pem})}
        trace = os.path.join(ours.dir, "trace.jsonl")
        subprocess.run([TANDEM, "trace", "synth", "--requests", str(N), "--prompt", "64", "--output-tokens", "64",
                        "--rate", "10", "--arrivals", "even", "--output", trace], check=True, capture_output=True)
        for way in ways.values():  # the routers learn
            most = replay(trace, way, "--concurrency", "16")["request_throughput"]
        speed = str(0.7 * most / 10)
        rows = {name: [] for name in ways}
        for i in range(ROUNDS):
            for name in sorted(ways, key=lambda name: (list(ways).index(name) + i) % 3):
                before = used_ns(ways[name]["router"])
                report = replay(trace, ways[name], "--rate", speed, "--max-lag", "10s")
                used = used_ns(ways[name]["router"]) - before
                rows[name].append((used / report["total_output_tokens"], report["median_ttft_ms"]))
        found = {}
        for name in ways:
            cost = statistics.median(a[0] / b[0] for a, b in zip(rows[name], rows["plain"]))
            later = statistics.median(a[1] - b[1] for a, b in zip(rows[name], rows["plain"]))
            found[name] = cost, later
            used_us = statistics.median(r[0] for r in rows[name]) / 1000
            print(f"# {name}: {used_us:.2f} us of the router for each token, {cost:.3f} of plain; TTFT "
                  f"{statistics.median(r[1] for r in rows[name]):.2f} ms, {later:+.2f} ms; "
                  f"{0.7 * most:.0f} requests/s, {ROUNDS} rounds", flush=True)
        assert found["keys"][0] <= 1.02 and found["tls"][0] <= 1.10, found
        assert found["keys"][1] < 1 and found["tls"][1] < 1, found


if __name__ == "__main__":
    sys.exit(main())
