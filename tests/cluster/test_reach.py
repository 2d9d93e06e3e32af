"""Where processes listen and which addresses they announce: addresses that are not one loopback address for
all."""
import contextlib
import os
import subprocess
import sys
import time

from harness import (BUILD, DEMO, Cluster, Proc, Skip, free_port, main, metric, network, replans_by_reason, test,
                     wait_until)

ASKED = {"prompt_ids": [i % 1000 for i in range(300)], "max_tokens": 4, "greedy": True}


def started(c, role, name, *args):
    w = Proc(c, role, name, [*(["--dir", os.path.join(c.dir, name), "--dram-bytes", "64M"] if role == "store" else
                               ["--pool-bytes", "64M", "--threads", "1"]),
                             "--model", DEMO, "--routers", c.router.joins, *args])
    c.workers.append(w)
    return w.start()


def cluster(plan="split", wrap=()):
    c = Cluster(prefill=0, decode=0, plan=plan, wrap=wrap)
    c.metrics = f"127.0.0.1:{free_port()}"
    c.router = Proc(c, "router", "router", ["--model", DEMO, "--plan", plan, "--metrics-listen", c.metrics, *c.router_args])
    c.router.start()
    return c


def states(c):
    return {w["name"]: w["state"] for w in c.status()["workers"]}


@test
def test_every_address_and_what_is_advertised():
    c = cluster()
    try:
        started(c, "prefill", "prefill-0", "--listen", "0.0.0.0:0", "--advertise", "127.0.0.1")
        started(c, "decode", "decode-0", "--listen", "0.0.0.0:0", "--advertise", "127.0.0.1")
        started(c, "store", "store-0", "--listen", "0.0.0.0:0", "--advertise", "127.0.0.1")
        wait_until(lambda: list(states(c).values()) == ["ready"] * 3, 15, lambda: str(states(c)))
        r = c.generate([dict(ASKED, id="a")])["a"]
        assert "error" not in r, r
        wait_until(lambda: next(w for w in c.status()["workers"] if w["role"] == "store")["pages"]["cached"] >= 18, 10,
                   lambda: "the store has the prompt: " + str(c.status()["workers"]))
        assert all(w["address"].startswith("127.0.0.1:") for w in c.status()["workers"]), c.status()["workers"]
    finally:
        c.close()


@test
def test_transfers_listen_where_the_service_does():
    c = cluster()
    try:
        started(c, "prefill", "prefill-0", "--listen", "127.0.0.2:0")
        started(c, "decode", "decode-0", "--listen", "127.0.0.3:0")
        wait_until(lambda: list(states(c).values()) == ["ready"] * 2, 15, lambda: str(states(c)))
        assert "xfer=127.0.0.2:" in c.log("prefill-0") and "xfer=127.0.0.3:" in c.log("decode-0")
    finally:
        c.close()


@test
def test_every_address_alone_is_refused():
    for role, args in (("prefill", ["--dummy", "layers=1"]), ("kvstore", ["--dummy", "layers=1"])):
        for listen in ("0.0.0.0:0", "[::]:0", ":0"):
            out = subprocess.run([os.path.join(BUILD, role, "tandem-" + role), *args, "--listen", listen], capture_output=True,
                                 text=True, timeout=30)
            assert out.returncode and "--advertise" in out.stderr and listen in out.stderr, (role, listen, out)


@test
def test_a_pair_that_can_not_connect_is_found_before_it_is_used():
    with network() as wrap:
        subprocess.run([*wrap, "ip", "address", "add", "192.0.2.7/32", "dev", "lo"], check=True)
        c = cluster("split", wrap)
        try:
            # the router can place requests on it, but nobody can read from it: its transfers listen on an
            # address that is removed
            started(c, "prefill", "prefill-0", "--xfer-listen", "192.0.2.7:0")
            subprocess.run([*wrap, "ip", "address", "del", "192.0.2.7/32", "dev", "lo"], check=True)
            started(c, "prefill", "prefill-1")
            started(c, "decode", "decode-0")
            wait_until(lambda: list(states(c).values()) == ["ready"] * 3, 15, lambda: str(states(c)))
            ready = time.monotonic()
            wait_until(lambda: {w["name"]: w["unreached"] for w in c.status()["workers"]} ==
                       {"prefill-0": [], "prefill-1": ["prefill-0"], "decode-0": ["prefill-0"]}, 5, lambda: str(c.status()))
            print(f"# found {time.monotonic() - ready:.2f} s after the workers were ready")
            assert "address=192.0.2.7:" in c.log("decode-0") and "can't be connected to" in c.log("decode-0")
            assert "reader=decode-0 holder=prefill-0" in c.log("router")
            results = c.generate([dict(ASKED, id=str(i), prompt_ids=[(i * 37 + j) % 1000 for j in range(200)]) for i in range(12)])
            assert not any("error" in r or r["usage"].get("replans") for r in results.values()), results
            assert c.status()["replans"] == 0 and c.status()["plans"]["split"] == 12, c.status()
            assert metric(c.metrics, 'tandem_worker_peers_unreached{place="2"}', wrap) == 1
        finally:
            c.close()


def exposed_transfers():
    """In ms: of the first request between two workers, and of four later ones."""
    c = cluster("split")
    try:
        started(c, "prefill", "prefill-0")
        started(c, "decode", "decode-0")
        wait_until(lambda: list(states(c).values()) == ["ready"] * 2, 15, lambda: str(states(c)))
        wait_until(lambda: states(c) and c.status()["workers"][1]["transport"], 5, lambda: "connected: " + str(c.status()))
        times = [c.generate([dict(ASKED, id="a", prompt_ids=[(i * 37 + j) % 1000 for j in range(300)])])["a"]["timing"]
                 for i in range(5)]
        return [t["exposed_transfer"] for t in times]
    finally:
        c.close()


@test
def test_a_first_request_does_not_pay_for_the_connection():
    for attempt in range(3):  # other programs may take a core for a while
        first, *later = exposed_transfers()
        print(f"# exposed transfer, ms: first {first:.2f}, then {later}")
        if first < 5 + 2 * max(later):
            return
    raise AssertionError("the first request paid for the connection, each time")


@contextlib.contextmanager
def small_shm(size):
    """Yields words for a command line: programs that run with them share a /dev/shm of that size, as in a
    container."""
    words = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && echo ready && exec sleep 600"
    holder = subprocess.Popen(["unshare", "-m", "sh", "-c", words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        if holder.stdout.readline() != b"ready\n":
            raise Skip("file systems can't be mounted here")
        yield ["nsenter", "-t", str(holder.pid), "-m"]
    finally:
        holder.kill()
        holder.wait()


def shm_used(wrap):
    out = subprocess.run([*wrap, "df", "-B1", "--output=used", "/dev/shm"], capture_output=True, text=True, check=True)
    return int(out.stdout.split()[-1])


@test
def test_a_small_dev_shm_is_as_good_as_a_large_one():
    """Only UCX takes room in /dev/shm. It reports once that there is too little, and uses TCP."""
    asked = [dict(ASKED, id=str(i), prompt_ids=[(i * 37 + j) % 1000 for j in range(300)]) for i in range(64)]
    for asked_for in ("auto", "ucx"):
        metrics = f"127.0.0.1:{free_port()}"
        with small_shm("64m") as wrap, Cluster(prefill=4, decode=4, store=asked_for == "auto", plan="split", wrap=wrap,
                                               worker_args=["--transports", asked_for],
                                               router_args=["--metrics-listen", metrics]) as c:
            results = c.generate(asked)
            assert not any("error" in r for r in results.values()), results
            counts = replans_by_reason(metrics)  # beside other programs, a worker may be heard late
            assert counts["transfer"] == counts["failed"] == counts["refused"] == 0, counts
            for w in c.workers:
                with open(os.path.join(c.dir, w.name + ".log")) as f:
                    said = [line for line in f if "/dev/shm has" in line]
                assert len(said) == (asked_for == "ucx") and all("of 64 MiB" in line for line in said), (w.name, said)
            transports = [w["transport"] for w in c.status()["workers"]]
            assert any(("mapped" if asked_for == "auto" else "tcp") in t for t in transports), transports
            used = shm_used(wrap)
            print(f"# {asked_for}: {used} bytes of /dev/shm in use")
            assert used < 64 << 10, used


@test
def test_a_transport_that_is_slower_than_asked_for_is_said_once():
    metrics = f"127.0.0.1:{free_port()}"
    with Cluster(prefill=2, decode=1, plan="split", worker_args=["--transports", "rc,tcp", "--trusted-network"],
                 roles_args={"decode": ["--metrics-listen", metrics]}) as c:
        if os.path.isdir("/sys/class/infiniband"):
            raise Skip("there is a card")
        wait_until(lambda: metric(metrics, "tandem_worker_slower_connections(?:{})?") >= 2, 5, "connections to both count")
        with open(os.path.join(c.dir, "decode-0.log")) as f:
            said = [line for line in f if "slower transport" in line]
        assert len(said) == 1 and "asked=rc,tcp" in said[0] and "tcp/lo" in said[0], said


if __name__ == "__main__":
    sys.exit(main())
