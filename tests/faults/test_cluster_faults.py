"""A whole cluster whose wire, disk and streams go wrong by script, under load.

Whatever happens: no wrong token, no page lost, every call ends in time with OK or UNAVAILABLE, memory and
descriptors stay flat, and after the faults everything is as before. Default: some hundred faults.
TANDEM_LONG=chaos: 10,000; TANDEM_SEED=N: another run; TANDEM_ROUTERS=N: through N routers.
"""
import collections, os, re, sys, urllib.request
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../cluster"))
from harness import *
from load import Load
from client import Client, request

WANTED = 10000 if os.environ.get("TANDEM_LONG") in ("chaos", "all") else 300
SEED = int(os.environ.get("TANDEM_SEED", "1"))
WIRE = ("wire.connect:fail=0.05 wire.connect:delay=0.1/30ms wire.message:delay=0.003/20ms wire.message:drop=0.0002 "
        "wire.message:truncate=0.0002 wire.message:duplicate=0.0002 wire.message:reorder=0.0002 "
        "wire.message:corrupt=0.0002 wire.message:fail=0.0002 wire.payload:delay=0.01/20ms wire.payload:truncate=0.002 wire.payload:duplicate=0.002 "
        "wire.payload:reorder=0.01 wire.payload:corrupt=0.002 wire.payload:fail=0.001 wire.payload:lie=0.0005 ")
RPC = "rpc.message:drop=0.0002 rpc.message:duplicate=0.0002 rpc.message:reorder=0.0002 rpc.message:fail=0.0002 "
DISK = ("disk.put:delay=0.01/20ms disk.put:fail=0.01 disk.put:truncate=0.01 disk.put:duplicate=0.01 "
        "disk.put:corrupt=0.01 disk.put:lie=0.01 disk.read:delay=0.02/20ms disk.read:fail=0.01 disk.read:truncate=0.01 disk.read:corrupt=0.01 "
        "disk.read:lie=0.01 ")


class Watch:
    """Counts of faults, memory and descriptors of the cluster's processes."""

    def __init__(self, cluster):
        self.procs, self.metrics = [*cluster.workers, *cluster.routers], cluster.metrics

    def faults(self):
        counts = collections.Counter()
        for address in self.metrics:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                for site, kind, n in re.findall(r'^tandem_faults_total{site="([^"]+)",kind="([^"]+)"} (\d+)',
                                                answer.read().decode(), re.M):
                    counts[site, kind] += int(n)
        return counts

    def sizes(self):
        sizes = {}
        for p in self.procs:
            with open(f"/proc/{p.pid}/status") as f:
                rss = int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1)) // 1024
            sizes[p.name] = rss, len(os.listdir(f"/proc/{p.pid}/fd"))
        return sizes


def chaotic_cluster():
    seed = lambda i: f"seed={SEED * 100 + i} "
    worker = ["--chunk-tokens", "64", "--pages", "900", "--lease-ms", "3000"]
    metrics = [f"127.0.0.1:{free_port()}" for _ in range(5 + ROUTERS)]
    c = Cluster(prefill=2, decode=2, store=True, plan="split", worker_args=worker, store_args=["--dram-bytes", "8M"],
                router_args=["--prefix", "load", "--metrics-listen", metrics[5], "--faults", seed(99) + RPC])
    for i, p in enumerate(c.workers):
        p.args += ["--metrics-listen", metrics[i], "--faults",
                   seed(i) + (RPC + WIRE if p.role != "store" else WIRE + DISK)]
    c.metrics = metrics
    c.add_routers = lambda: [c.add_router("--metrics-listen", m, "--faults", seed(100 + i) + RPC)
                             for i, m in enumerate(metrics[6:])]
    return c


@test
def test_cluster_under_faults_gives_right_tokens_or_an_error():
    with chaotic_cluster() as c:
        c.add_routers()
        watch = Watch(c)
        load = Load(c.addresses, 10)
        with Cluster(worker_args=["--pages", "3000"]) as clean:
            load.reference(clean)
        load.start()
        early, in_flight, phases = None, [], collections.Counter()
        started = moved = time.monotonic()
        done, last = 0, 0
        while done < WANTED:
            time.sleep(0.2)
            counts = watch.faults()
            done = sum(counts.values())
            with load.lock:
                in_flight.append(len(load.flying))
                phases.update(v[1] for v in load.flying.values())
            load.check(50 * SLOW)  # on a slow machine a prompt takes seconds, and may be planned anew several times
            if done > last:
                last, moved = done, time.monotonic()
            assert time.monotonic() - moved < 30 * SLOW, f"nothing happens any more: {load.codes} {c.status()}"
            if not early and done > WANTED * 0.3:
                early = watch.sizes()
        late = watch.sizes()
        load.finish()
        by_site = collections.Counter()
        for (site, kind), n in sorted(counts.items()):
            by_site[site] += n
        print(f"# {done} faults in {time.monotonic() - started:.0f} s: " +
              ", ".join(f"{s} {k} {n}" for (s, k), n in sorted(counts.items())))
        print(f"# by place {dict(by_site)}; in flight {min(in_flight[5:] or [0])} to {max(in_flight)}, "
              f"before their first token {phases['prefill'] / phases.total():.0%}, after it {phases['decode'] / phases.total():.0%}; calls {dict(load.codes)}; "
              f"slowest call {load.slowest:.1f} s; early and late MiB, descriptors: " +
              ", ".join(f"{n} {early[n]} {late[n]}" for n in late))
        bad = set(load.codes) - {"OK", "UNAVAILABLE"}
        assert not bad, (load.codes, load.texts)
        # Most calls are planned anew.
        assert load.codes["OK"] > WANTED / 20 and load.codes["OK"] > load.codes["UNAVAILABLE"], load.codes
        assert min(in_flight[5:] or [1]) > 0, in_flight  # there are always requests to hit
        # a short run ends before pools and memtables are full and all pairs have connected
        warming, opening = (40, 40) if WANTED >= 10000 else (160, 120)
        for name in late:
            assert late[name][0] < early[name][0] * 1.2 + warming, f"{name} grows: {early[name]} {late[name]}"
            assert late[name][1] < early[name][1] + opening, f"{name} opens more and more: {early[name]} {late[name]}"
        c.wait_ready(20)
        c.audit(20)


main()
