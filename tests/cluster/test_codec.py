"""Codecs of the SSD tier in a whole cluster: zstd changes no token. With a lossy codec blocks have names of
their own, and answers say so."""
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

MODEL = {"plan": "split", "router_args": ["--prefix", "load", "--silence-ms", str(5000 * SLOW)]}
PATIENT = ["--read-deadline-ms", "10000"]  # the test asks whether blocks come from disk, not how fast


def requests(n=4, tokens=600):
    rnd = random.Random(17)
    return [{"id": str(i), "prompt_ids": [rnd.randrange(1500) for _ in range(tokens)], "max_tokens": 8, "greedy": True,
             "ignore_eos": True} for i in range(n)]


def ask(c):
    results = c.generate(requests())
    assert all("error" not in r for r in results.values()), results
    return results


def tokens(results):
    return {k: r["token_ids"] for k, r in results.items()}


def cached(results, where):
    return sum(r["usage"]["cached_tokens"][where] for r in results.values())


def with_codec(c, codec, store="store-0"):
    args = c[store].args
    at = args.index("--codec")
    args[at + 1] = codec


def restart(c):
    """Restarts everything: only what is on disk remains."""
    for p in [c.router, *c.workers]:
        p.stop()
    for p in [*c.workers, c.router]:
        p.start()
    c.wait_ready()


def stat(c):
    d = c["store-0"].args[c["store-0"].args.index("--dir") + 1]
    out = subprocess.run([TANDEM, "store", "verify", d, "--quiet"], capture_output=True, text=True, timeout=60 * SLOW)
    assert out.returncode == 0, out.stderr
    return json.loads(subprocess.run([TANDEM, "store", "stat", d, "--json"], capture_output=True, text=True,
                                     timeout=60 * SLOW, check=True).stdout)


@test
def test_tokens_with_zstd_are_those_without_a_store():
    with Cluster(plan="split") as plain:
        expected = tokens(ask(plain))
    with Cluster(store=1, store_args=["--codec", "zstd", *PATIENT], **MODEL) as c:
        assert tokens(ask(c)) == expected
        c["store-0"].stop()
        s = stat(c)
        assert s["codecs"] == {"zstd": s["blocks"]} and s["blocks"] > 100, s
        assert s["stored_bytes"] < 0.95 * s["payload_bytes"], s
        restart(c)
        again = ask(c)
        assert cached(again, "ssd") >= 4 * 500, again
        assert tokens(again) == expected
        assert not any("kv_codec" in r for r in again.values()), again
        with_codec(c, "none")  # the codec changes: existing blocks are still read
        restart(c)
        again = ask(c)
        assert cached(again, "ssd") >= 4 * 500 and tokens(again) == expected, again
        c.audit()


@test
def test_answers_from_a_lossy_store_are_marked_and_its_blocks_are_found_by_no_other():
    for codec in ("int8", "fp8"):
        with Cluster(store=1, store_args=["--codec", codec, *PATIENT], **MODEL) as c:
            first = ask(c)
            assert not any("kv_codec" in r for r in first.values()), first  # everything was computed
            restart(c)
            again = ask(c)
            assert cached(again, "ssd") >= 4 * 500, again
            assert all(r["kv_codec"] == codec for r in again.values()), again
            again = ask(c)  # the worker's own blocks were computed from those of the store
            assert cached(again, "worker") >= 4 * 500 and all(r["kv_codec"] == codec for r in again.values()), again
            c["store-0"].stop()
            s = stat(c)
            assert s["codecs"] == {codec: s["blocks"]} and s["stored_bytes"] < 0.3 * s["payload_bytes"], s
            with_codec(c, "none")
            restart(c)
            exact = ask(c)
            assert not any(cached(exact, where) for where in ("worker", "dram", "ssd")), exact
            assert tokens(exact) == tokens(first) and not any("kv_codec" in r for r in exact.values()), exact
            c.audit()


@test
def test_exact_and_lossy_stores_are_not_mixed():
    c = Cluster(store=2, store_args=["--codec", "none"], **MODEL)
    with_codec(c, "int8", "store-1")
    c.wait_ready = lambda: wait_until(
        lambda: sorted(w["state"].split(":")[0] for w in c.status()["workers"]) == ["ready"] * 3 + ["refused"], 20,
        lambda: f"one is refused: {c.status()}")
    with c:
        assert not any("error" in r for r in ask(c).values())
        assert "kv_codec differs" in c.log("router"), c.log("router")


@test
def test_namespace_follows_the_store_that_came_last():
    with Cluster(store=1, store_args=["--codec", "none"], **MODEL) as c:
        first = ask(c)
        c["store-0"].stop()
        wait_until(lambda: not any(w["role"] == "store" and w["state"] == "ready" for w in c.status()["workers"]), 20, "the store is gone")
        again = ask(c)
        assert cached(again, "worker") >= 4 * 500 and not any("kv_codec" in r for r in again.values()), again
        with_codec(c, "int8")
        c["store-0"].start()
        c.wait_ready()
        lossy = ask(c)  # other names: nothing is found in the workers or in the directory
        assert not any(cached(lossy, where) for where in ("worker", "dram", "ssd")), lossy
        assert tokens(lossy) == tokens(first)
        c["store-0"].stop()
        wait_until(lambda: not any(w["role"] == "store" and w["state"] == "ready" for w in c.status()["workers"]), 20, "the store is gone")
        marked = ask(c)
        assert cached(marked, "worker") >= 4 * 500 and all(r["kv_codec"] == "int8" for r in marked.values()), marked


@test
def test_blocks_on_disk_say_whose_they_are():
    with Cluster(store=1, store_args=["--tenant-quota", "0.5", "--tenant-quotas", "acme=0.25"], **MODEL) as c:
        for tenant in ("acme", "", "emca"):
            results = c.generate([dict(r, tenant=tenant) for r in requests(2)])
            assert all("error" not in r for r in results.values()), results
        c["store-0"].stop()
        s = json.loads(subprocess.run([TANDEM, "store", "stat", c["store-0"].args[c["store-0"].args.index("--dir") + 1],
                                       "--json"], capture_output=True, text=True, timeout=60 * SLOW, check=True).stdout)
        assert len(s["tenants"]) == 3 and len(set(s["tenants"].values())) == 1 and "default" in s["tenants"], s


main()
