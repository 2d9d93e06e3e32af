"""Several stores: long prefixes are spread over them by rendezvous hashing, hot ones get a second copy, and a
lost store only causes misses."""
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

DIMS = "layers=4,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536"
SIM = ["--engine", "sim", "--numerics", "bf16", "--max-rows", "2048", "--chunk-tokens", "2048", "--sim-prefill", "1000,20,0"]


def ask(c, tag, prompts, max_tokens=8):
    return c.generate([{"id": f"{tag}{i}", "prompt_ids": p, "max_tokens": max_tokens, "greedy": True, "ignore_eos": True}
                       for i, p in enumerate(prompts)])


def stores(c):
    return {w["name"]: w["store"]["blocks_dram"] for w in c.status()["workers"] if w["role"] == "store"}


def three():
    return Cluster(dummy=DIMS, prefill=1, decode=1, store=3, plan="split", worker_args=SIM, router_args=["--prefix", "load"],
                   store_args=["--numerics", "bf16"])


def restart_workers(c):
    for w in c.workers:
        if w.role != "store":
            w.stop()
            w.start()
    c.wait_ready()


def tokens(results):
    return [results[k]["token_ids"] for k in sorted(results)]


@test
def test_prefixes_are_spread_over_stores_and_come_back_whole():
    rnd = random.Random(5)
    # 312 full blocks each, which are 5 segments.
    prompts = [[rnd.randrange(1500) for _ in range(5000)] for _ in range(6)]
    with three() as c:
        first = ask(c, "a", prompts)
        wait_until(lambda: sum(stores(c).values()) >= 6 * 312, 20, lambda: f"all blocks are stored: {stores(c)}")
        assert all(n > 100 for n in stores(c).values()), stores(c)
        assert sum(stores(c).values()) <= 6 * 313, stores(c)  # each block is stored once
        restart_workers(c)
        again = ask(c, "b", prompts)
        assert tokens(again) == tokens(first)
        for r in again.values():
            cached = r["usage"]["cached_tokens"]
            assert cached["dram"] == 312 * 16 and not cached["worker"], cached
        c.audit()


@test
def test_prefix_is_computed_where_that_is_faster_than_loading():
    rnd = random.Random(9)
    prompts = [[rnd.randrange(1500) for _ in range(2000)] for _ in range(3)]
    with Cluster(dummy=DIMS, prefill=1, decode=1, store=1, plan="split", store_args=["--numerics", "bf16"],
                 worker_args=[*SIM[:-1], "100,0,0"]) as c:  # a prompt takes 0.1 ms
        first = ask(c, "a", prompts)
        wait_until(lambda: sum(stores(c).values()) >= 3 * 125, 20, lambda: f"all blocks are stored: {stores(c)}")
        restart_workers(c)
        for i in range(6):  # the router learns the new worker's speed; one long step would not mislead it
            ask(c, f"w{i}", [[1 + i] * 1500])
        time.sleep(0.6)
        again = ask(c, "b", prompts)
        assert tokens(again) == tokens(first)
        assert all(not r["usage"]["cached_tokens"]["dram"] for r in again.values()), again


@test
def test_lost_store_costs_its_share_and_no_answer():
    rnd = random.Random(6)
    prompts = [[rnd.randrange(1500) for _ in range(1024 + 8)] for _ in range(30)]  # one segment each
    with three() as c:
        first = ask(c, "a", prompts)
        wait_until(lambda: sum(stores(c).values()) >= 30 * 64, 20, lambda: f"all blocks are stored: {stores(c)}")
        lost = stores(c)["store-1"]
        c["store-1"].kill()
        c["store-1"].child.wait()
        c.workers.remove(c["store-1"])
        wait_until(lambda: any(w["state"] != "ready" for w in c.status()["workers"]), 10, "the router knows")
        for w in c.workers:
            if w.role != "store":
                w.stop()
                w.start()
        wait_until(lambda: sum(w["state"] == "ready" for w in c.status()["workers"]) == 4, 20, "the others are back")
        again = ask(c, "b", prompts)
        assert tokens(again) == tokens(first)
        hits = sum(r["usage"]["cached_tokens"]["dram"] for r in again.values()) // 16
        assert 0 < lost < 30 * 64 and hits == 30 * 64 - lost, (hits, lost)
        # blocks of the lost store are written to the next one in line
        wait_until(lambda: sum(n for s, n in stores(c).items() if s != "store-1") >= 30 * 64, 20, lambda: str(stores(c)))


@test
def test_hot_prefix_gets_a_second_copy():
    rnd = random.Random(7)
    shared = [rnd.randrange(1500) for _ in range(64 * 16)]
    with three() as c:
        ask(c, "a", [shared + [9]])
        wait_until(lambda: sum(stores(c).values()) >= 64, 20, lambda: f"stored: {stores(c)}")
        assert sorted(stores(c).values()) == [0, 0, 64], stores(c)
        ask(c, "b", [shared + [i] * 20 for i in range(12)])
        wait_until(lambda: sum(n >= 64 for n in stores(c).values()) >= 2, 20, lambda: f"a second copy: {stores(c)}")
        assert sum(n >= 64 for n in stores(c).values()) == 2, stores(c)
        c.audit()


@test
def test_store_with_other_layout_is_refused_by_field_also_when_it_comes_before_the_workers():
    with Cluster(prefill=0, decode=0, store=True, store_args=["--block-tokens", "32"]) as c:
        for role in ("prefill", "decode"):
            c.workers.append(Proc(c, role, role, ["--model", DEMO, "--pool-bytes", "8M", "--threads", "1", "--routers",
                                                  c.router.joins]).start())
        wait_until(lambda: "refused: kv_layout.page_tokens differs: ours 16, theirs 32" in [
            w["state"] for w in c.status()["workers"] if w["name"] == "store-0"], 10, lambda: json.dumps(c.status()["workers"]))
        wait_until(lambda: "page_tokens" in c.log("store-0"), 10, lambda: "it says why: " + c.log("store-0"))
        result = c.generate([{"id": "a", "prompt_ids": [5] * 40, "max_tokens": 2}])["a"]
        assert "error" not in result, result


@test
def test_drain_ends_a_store_and_says_that_nothing_has_ended_which_stands_still():
    def drain(name):
        return subprocess.run([TANDEM, "drain", name, "--limit", "1s", "--router", c.router.address], capture_output=True, text=True,
                              timeout=60 * SLOW)
    with Cluster(store=True) as c:
        out = drain("store-0")
        assert out.returncode == 0 and c["store-0"].child.wait(20 * SLOW) == 0, (out.stderr, c.log("store-0"))
        decode = c["decode-0"]
        decode.kill(signal.SIGSTOP)
        out = drain("decode-0")
        assert out.returncode == 1 and "has not ended yet" in out.stderr and alive(decode.pid), out
        assert [w["state"] for w in c.status()["workers"] if w["name"] == "decode-0"] != ["ready"], c.status()["workers"]
        decode.kill(signal.SIGCONT)
        assert decode.child.wait(20 * SLOW) == 0, c.log("decode-0")
        wait_until(lambda: [w["name"] for w in c.status()["workers"]] == ["prefill-0"], 10, lambda: json.dumps(c.status()["workers"]))


main()
