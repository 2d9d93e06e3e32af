"""A cluster under load for a long time: memory, descriptors and connections stay flat, tokens stay right.

Default: 20 s. TANDEM_LONG=soak: an hour; TANDEM_SOAK_S=N: N seconds. A line of figures every minute.
"""
import os, re, sys, threading
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../cluster"))
from harness import *
from client import Client, grpc, request

DIMS = "layers=4,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536"
SECONDS = int(os.environ.get("TANDEM_SOAK_S", 3600 if os.environ.get("TANDEM_LONG") in ("soak", "all") else 20))
WORKER = ["--engine", "sim", "--numerics", "bf16", "--pages", "3000", "--chunk-tokens", "512", "--max-rows", "512",
          "--sim-prefill", "2000,10,0", "--sim-decode", "4000,0,20", "--lease-ms", "3000"]


class Clients:
    """Clients with random prompts after shared prefixes. A third of the calls leave early. Some prompts are
    sent again and again, and must give the same answer."""

    def __init__(self, address, n):
        self.address, self.stop = address, threading.Event()
        self.lock, self.known, self.wrong, self.n_done, self.n_left, self.n_failed = threading.Lock(), {}, [], 0, 0, 0
        rnd = random.Random(1)
        self.shared = [[rnd.randrange(1500) for _ in range(rnd.choice((160, 800, 1600)))] for _ in range(40)]
        self.threads = [threading.Thread(target=self.run, args=(i,), daemon=True) for i in range(n)]
        for t in self.threads:
            t.start()

    def run(self, i):
        client, rnd = Client(self.address), random.Random(i)
        while not self.stop.is_set():
            golden = rnd.random() < 0.1
            key = rnd.randrange(12)
            tail = random.Random(key) if golden else rnd
            head = self.shared[key % 40 if golden else rnd.randrange(40)]
            prompt = head + [tail.randrange(1500) for _ in range(tail.choice((1, 60, 300)))]
            stream = client.generate(request(ids=prompt, max_tokens=12, stopping__ignore_eos=True), timeout=60)
            leave = rnd.random() < 0.3 and not golden
            out = []
            try:
                for m in stream:
                    out += [t.id for t in m.tokens]
                    if leave and len(out) > rnd.randrange(12):
                        stream.cancel()
            except grpc.RpcError as e:
                if e.code().name != "CANCELLED":
                    self.n_failed += 1
                    self.wrong.append((e.code().name, e.details()))
                    continue
            with self.lock:
                self.n_done += 1
                self.n_left += len(out) < 12
                if golden and self.known.setdefault(key, out) != out:
                    self.wrong.append((key, out, self.known[key]))

    def finish(self):
        self.stop.set()
        for t in self.threads:
            t.join(60)


def sizes(c):
    out = {}
    for p in [c.router, *c.workers]:
        with open(f"/proc/{p.pid}/status") as f:
            rss = int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1)) / 1024
        out[p.name] = rss, len(os.listdir(f"/proc/{p.pid}/fd"))
    return out


def slope_per_hour(samples):
    """Slope of (seconds, value) by least squares."""
    n = len(samples)
    mx, my = sum(x for x, _ in samples) / n, sum(y for _, y in samples) / n
    den = sum((x - mx) ** 2 for x, _ in samples)
    return 3600 * sum((x - mx) * (y - my) for x, y in samples) / den if den else 0


def account(c):
    """Runs the audit. On a busy machine a process may not answer in time, but not three times in a row."""
    for attempt in range(3):
        try:
            report = c.account()[1]
        except AssertionError:
            if attempt == 2:
                raise
            continue
        problems = {w["name"]: w["problems"] for w in report["workers"] if w["problems"]}
        late = all(p == ["it does not answer"] for p in problems.values())
        if report["ok"] or not late:
            break
    assert report["ok"], problems


@test
def test_soak_stays_flat_and_right():
    with Cluster(dummy=DIMS, prefill=2, decode=2, store=True, plan="split", worker_args=WORKER,
                 # Eight clients in one process: one may be kept from reading.
                 router_args=["--stall-ms", "10000"],
                 store_args=["--numerics", "bf16", "--dram-bytes", "4M", "--ssd-bytes", "64M"]) as c:
        clients = Clients(c.router.address, 8)
        started, series, shown = time.monotonic(), {}, 0
        while (now := time.monotonic() - started) < SECONDS:
            time.sleep(min(2, SECONDS / 10))
            assert not clients.wrong, clients.wrong[:2]
            for name, size in sizes(c).items():
                series.setdefault(name, []).append((now, *size))
            if now >= shown + 60:
                shown = now
                print(f"# {now:.0f} s, {clients.n_done} requests: " +
                      ", ".join(f"{n} {s[-1][1]:.0f} MiB {s[-1][2]}" for n, s in series.items()), flush=True)
            account(c)
        clients.finish()
        c.wait_ready()
        c.audit(10)
        report = []
        for name, all_samples in series.items():
            samples = [s for s in all_samples if s[0] > SECONDS * 0.3]  # the first third fills pools and caches
            rss = slope_per_hour([(t, r) for t, r, _ in samples])
            fds = slope_per_hour([(t, f) for t, _, f in samples])
            report.append(f"{name} {rss:+.1f} MiB/h {fds:+.1f} descriptors/h "
                          f"at {samples[-1][1]:.0f} MiB {samples[-1][2]}")
            if SECONDS >= 600:
                assert rss < 0.05 * samples[-1][1] + 4, report
                assert fds < 4, report
        print(f"# {SECONDS} s, {clients.n_done} requests, {clients.n_left} left early, {clients.n_failed} failed: "
              + "; ".join(report))
        assert not clients.wrong and not clients.n_failed, (clients.wrong[:2], clients.n_failed)
        assert clients.n_done > SECONDS


main()
