"""Workers come and go while the cluster serves: no request fails, no token changes, and a new worker takes
its share.

TANDEM_LONG=pools: 100 workers come and go, else 6. TANDEM_ROUTERS=N: through N routers.
"""
import os, shutil, subprocess, sys, tempfile, threading, time
from harness import *
from load import Load

DIMS = "layers=4,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536,positions=8192"
SIM = ["--engine", "sim", "--numerics", "bf16", "--pages", "3000", "--max-context", "8192", "--chunk-tokens", "512",
       "--max-rows", "576", "--sim-prefill", "1000,50,0", "--sim-decode", "4000,0,20"]
ROUNDS = 100 if os.environ.get("TANDEM_LONG") in ("pools", "all") else 6


def states(c, router=None):
    return {w["name"]: w for w in c.status(router)["workers"]}


def join(c, role, name):
    """Starts a worker that no router was told of: it registers with the router itself."""
    w = Proc(c, role, name, ["--dummy", DIMS, "--threads", "1", "--silence-ms", str(1000 * SLOW), *SIM, "--routers",
                             ",".join(r.joins for r in c.routers)])
    w.start()
    c.workers.append(w)
    for r in c.routers:
        wait_until(lambda: states(c, r).get(name, {}).get("state") == "ready", 10, f"{r.name}: {name} is ready")
    return w


def drain(c, w, limit="30s"):
    out = subprocess.run([TANDEM, "drain", w.name, "--router", c.router.address, "--limit", limit], capture_output=True,
                         text=True, timeout=60 * SLOW)
    assert out.returncode == 0, out.stderr
    assert w.child.wait(20 * SLOW) == 0, c.log(w.name)
    c.workers.remove(w)


@test
def test_workers_come_and_go_and_no_request_fails():
    with Cluster(dummy=DIMS, prefill=1, decode=1, plan="split", worker_args=SIM, routers=ROUTERS) as c:
        load = Load(c.addresses, 6, cached=False)
        load.reference(c)
        load.start()
        shares = []
        for i in range(ROUNDS):
            role = ("prefill", "decode")[i % 2]
            w = join(c, role, f"{role}-new{i}")
            began = time.monotonic()
            moved = "kv_bytes_out" if role == "prefill" else "kv_bytes_in"
            wait_until(lambda: states(c)[w.name][moved] > 0, 10, w.name + " has work")
            shares.append(time.monotonic() - began)
            drain(c, w)
            load.check(30 * SLOW)
        load.finish()
        assert set(load.codes) == {"OK"}, (load.codes, load.texts)
        assert max(shares) < 5 * SLOW, shares
        print(f"# {ROUNDS} workers came and went, {load.codes['OK']} requests OK; the first work came within {max(shares):.2f} s")
        for r in c.routers:  # workers that registered by themselves are forgotten
            wait_until(lambda: set(states(c, r)) == {"prefill-0", "decode-0"}, 5, lambda: f"{r.name} forgets: {states(c, r).keys()}")
        c.audit()


@test
def test_what_a_drained_worker_cannot_finish_is_planned_anew():
    with Cluster(dummy=DIMS, prefill=1, decode=2, plan="split", worker_args=[*SIM[:-1], "60000,0,0"], routers=ROUTERS) as c:
        load = Load(c.addresses, 6)  # an answer takes 6 s
        load.reference(c)
        load.start()
        wait_until(lambda: states(c)["decode-1"]["running"], 10, "decode-1 works")
        began = time.monotonic()
        w = c["decode-1"]
        drain(c, w, "500ms")
        assert time.monotonic() - began < 6 * SLOW, "it was waited for"
        assert "decode-1" not in states(c) and "worker lost peer=decode-1" not in c.log("router"), c.log("router")
        load.finish()
        assert set(load.codes) == {"OK"}, (load.codes, load.texts)
        w.start()  # it is in the router's list, so the router connects again
        wait_until(lambda: states(c).get("decode-1", {}).get("state") == "ready", 10, "decode-1 is back")
        c.workers.append(w)


@test
def test_scale_starts_and_drains_workers_of_one_pool():
    with tempfile.TemporaryDirectory() as run_dir:
        def tandem(*args):
            out = subprocess.run([TANDEM, *args], capture_output=True, text=True, timeout=90 * SLOW)
            assert out.returncode == 0, out.stderr
            return out.stdout

        def pools():
            with open(os.path.join(run_dir, "cluster.json")) as f:
                return sorted(p["name"] for p in json.load(f)["processes"] if p["role"] in ("prefill", "decode"))
        tandem("up", "--model", DEMO, "--run-dir", run_dir, "--listen", "127.0.0.1:0", "--pool-bytes", "32M", "--no-store",
               "--threads", "1", "--detach")
        try:
            with open(os.path.join(run_dir, "router.address")) as f:
                router = f.read().strip()
            tandem("scale", "prefill=2", "decode=3", "--run-dir", run_dir)
            assert pools() == ["decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1"], pools()
            status = lambda: json.loads(tandem("status", "--json", "--router", router))["workers"]
            wait_until(lambda: sorted(w["name"] for w in status() if w["state"] == "ready") == pools(), 10, "all are known")
            tandem("scale", "decode=1", "--run-dir", run_dir)
            assert pools() == ["decode-0", "prefill-0", "prefill-1"], pools()
            wait_until(lambda: sorted(w["name"] for w in status()) == pools(), 10, lambda: f"the others are forgotten: {status()}")
            assert tandem("generate", "--router", router, "--max-tokens", "4", "Hello")
            bad = subprocess.run([TANDEM, "scale", "decode=0", "--run-dir", run_dir], capture_output=True, text=True)
            assert bad.returncode == 2 and "decode=0" in bad.stderr, bad.stderr
        finally:
            tandem("down", "--run-dir", run_dir)


@test
def test_scale_says_at_once_why_a_process_cannot_start():
    with tempfile.TemporaryDirectory() as top:
        model, run_dir = os.path.join(top, "model"), os.path.join(top, "run")
        shutil.copytree(DEMO, model)
        up = [TANDEM, "up", "--model", model, "--run-dir", run_dir, "--listen", "127.0.0.1:0", "--pool-bytes", "32M", "--no-store",
              "--threads", "1", "--detach"]
        subprocess.run(up, check=True, capture_output=True, timeout=90 * SLOW)
        try:
            for file, who in (("config.json", ""), ("model.safetensors", "decode-1 ended before it was ready")):
                os.rename(os.path.join(model, file), os.path.join(model, "old"))
                began = time.monotonic()
                bad = subprocess.run([TANDEM, "scale", "decode=2", "--run-dir", run_dir], capture_output=True, text=True)
                assert bad.returncode == 1 and time.monotonic() - began < within(20), (bad, time.monotonic() - began)
                assert "decode=1" in bad.stderr and who in bad.stderr and file in bad.stderr, bad.stderr
                os.rename(os.path.join(model, "old"), os.path.join(model, file))
            subprocess.run([TANDEM, "scale", "decode=2", "--run-dir", run_dir], check=True, timeout=90 * SLOW)
        finally:
            subprocess.run([TANDEM, "down", "--run-dir", run_dir], check=True, timeout=90 * SLOW)


@test
def test_scale_starts_and_drains_stores():
    """Each segment belongs to one store: a new store gets its share of new segments, and a store that goes
    takes its segments along."""
    with tempfile.TemporaryDirectory() as run_dir:
        def tandem(*args, **more):
            out = subprocess.run([TANDEM, *args], capture_output=True, text=True, timeout=90 * SLOW, **more)
            assert out.returncode == 0, out.stderr
            return out.stdout

        def scale(n):
            tandem("scale", f"store={n}", "--run-dir", run_dir)
            wait_until(lambda: sorted(stores()) == [f"store-{i}" for i in range(n)], 10, lambda: f"{n} stores: {stores()}")

        def stores():
            workers = json.loads(tandem("status", "--json", "--router", router))["workers"]
            return {w["name"]: w["store"]["blocks_dram"] for w in workers if w["role"] == "store" and w["state"] == "ready"}

        def ask(first, n):
            lines = [{"id": str(i), "prompt_ids": [(i * 37 + j * j) % 1000 for j in range(64 * 16 + 4)], "max_tokens": 3, "greedy": True,
                      "ignore_eos": True} for i in range(first, first + n)]
            out = tandem("generate", "--jsonl", "--router", router, input="".join(json.dumps(x) + "\n" for x in lines))
            return {r["id"]: r["token_ids"] for r in map(json.loads, out.splitlines())}
        tandem("up", "--model", DEMO, "--run-dir", run_dir, "--listen", "127.0.0.1:0", "--pool-bytes", "16M", "--store-dram", "64M",
               "--threads", "1", "--detach")
        try:
            with open(os.path.join(run_dir, "router.address")) as f:
                router = f.read().strip()
            before = ask(0, 12)
            wait_until(lambda: stores() == {"store-0": 12 * 64}, 20, lambda: f"all is stored: {stores()}")
            scale(3)
            ask(12, 18)
            wait_until(lambda: sum(stores().values()) == 30 * 64, 20, lambda: f"all is stored: {stores()}")
            there = stores()
            assert there["store-0"] >= 12 * 64 and min(there.values()) >= 64, there
            assert ask(0, 12) == before
            assert stores() == there, (stores(), there)  # stored blocks stay where they are
            scale(2)
            assert stores() == {k: v for k, v in there.items() if k != "store-2"}, (stores(), there)
            wait_until(lambda: "lost" not in tandem("status", "--router", router), 5, "the one that went is no lost worker")
            assert ask(0, 30).items() >= before.items()
            scale(0)
            assert ask(0, 2).items() <= before.items()
            # Another process has that store's directory: the store can't start, and the others go on.
            read, write = os.pipe()
            other = subprocess.Popen([os.path.join(BUILD, "kvstore", "tandem-kvstore"), "--model", DEMO, "--dir", os.path.join(run_dir, "store-1")],
                                     env=dict(os.environ, TANDEM_READY_FD=str(write)), pass_fds=[write], stderr=subprocess.DEVNULL)
            os.close(write)
            with os.fdopen(read) as f:
                assert f.readline()
            bad = subprocess.run([TANDEM, "scale", "store=2", "--run-dir", run_dir, "--wait", "3"], capture_output=True, text=True)
            other.terminate()
            assert other.wait(20 * SLOW) == 0 and bad.returncode == 1 and "a store uses it" in bad.stderr, bad.stderr
            assert ask(0, 2).items() <= before.items()
            scale(1)
            disk = lambda: [w["store"]["blocks_ssd"] for w in json.loads(tandem("status", "--json", "--router", router))["workers"]
                            if w["role"] == "store"]
            wait_until(lambda: disk() and disk()[0] >= 12 * 64, 10, lambda: f"what its disk holds is back: {disk()}")
        finally:
            tandem("down", "--run-dir", run_dir)


@test
def test_a_new_router_waits_for_workers_that_register():
    c = Cluster(prefill=0, decode=0, plan="split")
    c.router = Proc(c, "router", "router", ["--model", DEMO, "--plan", "split", *c.router_args])
    c.router.start()
    try:
        for role, n in (("prefill", 4), ("decode", 1)):
            for i in range(n):
                w = Proc(c, role, f"{role}-{i}", ["--model", DEMO, "--pool-bytes", "64M", "--threads", "1", "--routers", c.router.joins])
                c.workers.append(w.start())
        wait_until(lambda: len(states(c)) == 5 and all(w["state"] == "ready" for w in states(c).values()), 15, "all are ready")
        asked = {"prompt_ids": [i % 1000 for i in range(640)], "max_tokens": 2, "greedy": True}
        c.generate([dict(asked, id="first")])
        for i in range(6):
            c.router.stop()
            time.sleep(i * 0.37)  # a random moment between two registrations
            c.router.start()
            r = c.generate([dict(asked, id="again")])["again"]
            # It waits half a second longer than they register; where threads wait for cores, one may be late.
            assert r["usage"]["cached_tokens"]["worker"] == 624 or crowded() > 1, (i, r)
        wait_until(lambda: len(states(c)) == 5, 10, "all are back")
    finally:
        c.close()


@test
def test_a_workflow_stands_in_the_logs():
    with Cluster(dummy=DIMS, prefill=1, decode=1, plan="split", worker_args=SIM, router_args=["--log-level", "debug"]) as c:
        r = c.generate([{"id": "late", "prompt_ids": [1, 2, 3], "max_tokens": 500, "ignore_eos": True, "deadline_ms": 300,
                         "workflow_id": "nightly\nforged line"}])
        assert "error" in r["late"], r
        assert "request failed req=late workflow=nightly" in c.log("router") and "\nforged" not in c.log("router"), c.log("router")


@test
def test_explain_says_what_was_weighed():
    with Cluster(dummy=DIMS, prefill=2, decode=1, plan="split", worker_args=SIM) as c:
        c.generate([{"id": f"e{i}", "prompt_ids": list(range(200)), "max_tokens": 4, "greedy": True} for i in range(3)])
        out = subprocess.run([TANDEM, "explain", "e1", "--json", "--router", c.router.address], capture_output=True, text=True)
        d = json.loads(out.stdout)["decisions"]
        assert len(d) == 1 and d[0]["request_id"] == "e1" and d[0]["verdict"] == "split" and d[0]["prompt_tokens"] == 200, d
        assert {(k["worker"], k["as"]) for k in d[0]["candidates"]} == {
            ("prefill-0", "prefill"), ("prefill-1", "prefill"), ("decode-0", "decode")}, d
        winner = min((k for k in d[0]["candidates"] if k["as"] == "prefill"), key=lambda k: k["cost"])
        assert winner["worker"] == d[0]["prefill"], d
        assert d[0]["workflow_id"] == ""
        c.generate([{"id": "step", "prompt_ids": [1, 2], "max_tokens": 2, "workflow_id": "nightly\u001b[2J"}])
        out = subprocess.run([TANDEM, "explain", "step", "--json", "--router", c.router.address], capture_output=True, text=True)
        assert json.loads(out.stdout)["decisions"][0]["workflow_id"] == "nightly\u001b[2J"
        out = subprocess.run([TANDEM, "explain", "step", "--router", c.router.address], capture_output=True, text=True)
        assert "request step of workflow nightly?[2J, 2 tokens" in out.stdout, out.stdout
        # A prompt that is completely cached; a prompt whose tokens are scored is computed all the same.
        for scored in (False, True):
            c.generate([{"id": f"scored-{scored}", "prompt_ids": list(range(200)), "max_tokens": 4, "prompt_logprobs": scored}])
            out = subprocess.run([TANDEM, "explain", f"scored-{scored}", "--json", "--router", c.router.address], capture_output=True, text=True)
            matched = max(k["matched_blocks"] for k in json.loads(out.stdout)["decisions"][0]["candidates"] if k["as"] == "prefill")
            assert (matched == 0) == scored, (scored, out.stdout)
        none = subprocess.run([TANDEM, "explain", "nobody", "--router", c.router.address], capture_output=True, text=True)
        assert none.returncode == 1 and "nobody" in none.stderr


main()
