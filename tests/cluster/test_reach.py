"""Where processes listen, and where they say that they are: addresses that are not one loopback address for all."""
import os
import subprocess
import sys

from harness import BUILD, DEMO, Cluster, Proc, main, test, wait_until

ASKED = {"prompt_ids": [i % 1000 for i in range(300)], "max_tokens": 4, "greedy": True}


def started(c, role, name, *args):
    w = Proc(c, role, name, [*(["--dir", os.path.join(c.dir, name), "--dram-bytes", "64M"] if role == "store" else
                               ["--pool-bytes", "64M", "--threads", "1"]),
                             "--model", DEMO, "--routers", c.router.address, *args])
    c.workers.append(w)
    return w.start()


def cluster(plan="split"):
    c = Cluster(prefill=0, decode=0, plan=plan)
    c.router = Proc(c, "router", "router", ["--model", DEMO, "--plan", plan, *c.router_args])
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


if __name__ == "__main__":
    sys.exit(main())
