"""Prompts that are pinned outlive others, those that are flushed are gone: on workers and stores, for their tenant alone."""
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
from client import *
from harness import *

TOKENS, WHOLE = 320, 304  # of a prompt; that can come from a cache: the last block is computed, for the first token


def prompt(n):
    rnd = random.Random(n)
    return [rnd.randrange(1500) for _ in range(TOKENS)]


def line(n, **kw):
    return {"id": str(n), "prompt_ids": prompt(n), "max_tokens": 2, "greedy": True, "ignore_eos": True, **kw}


def cached(cluster, n, **kw):
    r = cluster.generate([line(n, **kw)])[str(n)]
    assert "error" not in r, r
    return r["usage"]["cached_tokens"]


def cache(cluster, action, n=None, *args):
    request = [] if n is None else ["--request", json.dumps(line(n))]
    out = subprocess.run([TANDEM, "cache", action, "--json", "--router", cluster.router.address, *request, *args],
                         capture_output=True, text=True, timeout=60 * SLOW)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def flood(cluster, first):
    results = cluster.generate([line(i) for i in range(first, first + 12)], ["--concurrency", "2"])
    assert all("error" not in r for r in results.values()), results


def small():
    """One worker, whose pool holds four such prompts."""
    return Cluster(prefill=0, worker_args=["--pages", "96", "--max-context", "512"], router_args=["--pin-blocks", "30"])


@test
def test_pinned_prompt_stays_until_it_is_released():
    with small() as c:
        assert cached(c, 1)["worker"] == 0 and cached(c, 2)["worker"] == 0
        assert cache(c, "pin", 1) == {"prefix_tokens": TOKENS, "cached_tokens": TOKENS, "told": 1}
        flood(c, 100)
        assert cached(c, 1)["worker"] == WHOLE
        assert cached(c, 2)["worker"] == 0
        cache(c, "release", 1)
        flood(c, 200)
        assert cached(c, 1)["worker"] == 0
        assert cache(c, "pin", 3, "--ttl", "200ms")["cached_tokens"] == 0  # before it is there
        cached(c, 3)
        time.sleep(0.3)
        flood(c, 300)
        assert cached(c, 3)["worker"] == 0  # the time is over
        c.audit()


@test
def test_worker_that_returns_hears_of_pins():
    with small() as c:
        cache(c, "pin", 1)
        worker = c["decode-0"]
        worker.kill()
        worker.child.wait()
        worker.start()
        c.wait_ready()
        cached(c, 1)
        flood(c, 100)
        assert cached(c, 1)["worker"] == WHOLE
        c.audit()


@test
def test_flushed_prompt_is_gone_from_workers_and_stores_for_its_tenant_alone():
    with Cluster(store=True, plan="split", router_args=["--prefix", "load"]) as c:
        for tenant in ("a", "b"):
            cached(c, 1, tenant=tenant)
            assert sum(cached(c, 1, tenant=tenant).values()) == WHOLE
        # the store asks for what it is offered: until it has all, a flush would find half of it
        wait_until(lambda: next(w for w in c.status()["workers"] if w["role"] == "store")["store"]["blocks_ssd"] == 40, 10,
                   "both prompts in the store")
        assert cache(c, "flush", 1, "--tenant", "a") == {"prefix_tokens": TOKENS, "told": 3, "away": 0}
        assert sum(cached(c, 1, tenant="a").values()) == 0
        assert sum(cached(c, 1, tenant="b").values()) == WHOLE
        assert sum(cached(c, 1, tenant="a").values()) == WHOLE
        assert cache(c, "flush", None, "--all")["told"] == 3
        for tenant in ("a", "b"):
            assert sum(cached(c, 1, tenant=tenant).values()) == 0
        c["store-0"].stop()
        wait_until(lambda: cache(c, "flush", 1)["away"] == 1, 10, "the store is away")


@test
def test_what_can_not_be_pinned_is_refused():
    with small() as c:
        client = Client(c.router.address)
        whole = request(prompt(1))
        for what, code, ttl_ms, prefix in (("more than a day", "INVALID_ARGUMENT", 86400001, whole),
                                           ("prefix: missing", "INVALID_ARGUMENT", 1000, None),
                                           ("bypass_cache", "INVALID_ARGUMENT", 1000, request(prompt(1), bypass_cache=True)),
                                           ("vocabulary", "INVALID_ARGUMENT", 1000, request([1 << 30] * 20)),
                                           ("--pin-blocks", "RESOURCE_EXHAUSTED", 1000, request(prompt(1) + prompt(2)[:180]))):
            try:
                client.pin(pb.PinRequest(prefix=prefix, ttl_ms=ttl_ms))
                assert False, what
            except grpc.RpcError as e:
                assert e.code().name == code and what in e.details(), (what, e.code(), e.details())
        assert client.pin(pb.PinRequest(prefix=whole, ttl_ms=1000)).prefix_tokens == TOKENS
        assert client.pin(pb.PinRequest(prefix=request(prompt(2)[:160]), ttl_ms=1000)).told == 1
        assert client.pin(pb.PinRequest(prefix=whole, ttl_ms=2000)).told == 1  # the same again takes no more room
        assert client.pin(pb.PinRequest(prefix=request([1, 2, 3]), ttl_ms=1000)).prefix_tokens == 0
        assert client.flush(pb.FlushRequest(prefix=whole)).told == 1


main()
