"""Decode workers pull the blocks of a prompt that they lack. Pinned prompts outlive others, and flushed
prompts are gone: on workers and stores, for their tenant alone."""
import os, signal, sys
sys.path.insert(0, os.path.dirname(__file__))
from client import *
from harness import *

# Tokens of a prompt; those that can come from a cache: the last block is computed, for the first token.
TOKENS, WHOLE = 320, 304


def prompt(n):
    rnd = random.Random(n)
    return [rnd.randrange(1500) for _ in range(TOKENS)]


def line(n, **kw):
    return {"id": str(n), "prompt_ids": prompt(n), "max_tokens": 2, "greedy": True, "ignore_eos": True, **kw}


def cached(cluster, n, **kw):
    r = cluster.generate([line(n, **kw)])[str(n)]
    assert "error" not in r, r
    return r["usage"]["cached_tokens"]


def cache(cluster, action, n=None, *args, router=None):
    request = [] if n is None else ["--request", json.dumps(line(n))]
    out = subprocess.run([TANDEM, "cache", action, "--json", "--router", (router or cluster.router).address, *request, *args],
                         capture_output=True, text=True, timeout=60 * SLOW)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def flood(cluster, first):
    """Sends prompts two at a time, and waits for the store: blocks that it has not taken yet hold pages, and
    a full pool takes pinned ones."""
    for i in range(first, first + 12, 2):
        results = cluster.generate([line(i), line(i + 1)], ["--concurrency", "1"])
        assert all("error" not in r for r in results.values()), results
        cluster.audit()


def small():
    """A cluster of one worker, whose pool holds four such prompts."""
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
        # Pinned before the prompt is cached.
        assert cache(c, "pin", 3, "--ttl", "200ms")["cached_tokens"] == 0
        cached(c, 3)
        time.sleep(0.3)
        flood(c, 300)
        assert cached(c, 3)["worker"] == 0  # the pin has ended
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


def restart(process):
    process.kill()
    process.child.wait()
    process.start()


def pin_is_refused(address, n):
    """Whether a second pin is refused: --pin-blocks is less than two prompts have."""
    try:
        Client(address).pin(pb.PinRequest(prefix=request(prompt(n)), ttl_ms=60000))
        return False
    except grpc.RpcError as e:
        assert e.code().name == "RESOURCE_EXHAUSTED" and "--pin-blocks" in e.details(), (e.code(), e.details())
        return True


def with_a_store(**kw):
    return Cluster(prefill=0, store=True, worker_args=["--pages", "96", "--max-context", "512"],
                   router_args=["--pin-blocks", "30", "--prefix", "compute"], **kw)


@test
def test_a_restarted_router_knows_what_is_pinned():
    with with_a_store() as c:
        cache(c, "pin", 1)
        restart(c.router)
        c.wait_ready()
        c.account()  # all workers answer this after their earlier messages
        assert pin_is_refused(c.router.address, 2)
        restart(c["decode-0"])  # it comes later and knows nothing of the pin
        c.wait_ready()
        cached(c, 1)
        flood(c, 100)
        assert cached(c, 1)["worker"] == WHOLE
        restart(c.router)
        c.wait_ready()
        c.account()
        cache(c, "release", 1)
        flood(c, 200)
        assert cached(c, 1)["worker"] == 0
        restart(c.router)
        c.wait_ready()
        c.account()
        assert not pin_is_refused(c.router.address, 2)  # nobody reports a pin that has ended
        c.audit()


@test
def test_a_pin_that_ended_while_a_store_was_away_does_not_come_back():
    with with_a_store() as c:
        cache(c, "pin", 1)
        c["store-0"].kill(signal.SIGSTOP)
        state = lambda: next(w for w in c.status()["workers"] if w["name"] == "store-0")["state"]
        wait_until(lambda: state() != "ready", 10, "the store is lost")
        cache(c, "release", 1)
        c["store-0"].kill(signal.SIGCONT)
        c.wait_ready()
        c.account()
        assert not pin_is_refused(c.router.address, 2)
        restart(c.router)
        c.wait_ready()
        c.account()
        assert pin_is_refused(c.router.address, 3)  # only the second pin is known
        cache(c, "release", 2)
        assert not pin_is_refused(c.router.address, 3)
        c.audit()


@test
def test_routers_know_of_each_others_pins():
    with with_a_store() as c:
        first, second = c.router, c.add_router()
        cache(c, "pin", 1, router=second)
        wait_until(lambda: pin_is_refused(first.address, 2) or Client(first.address).pin(
            pb.PinRequest(prefix=request(prompt(2)), ttl_ms=0)) and False, 5, "the first router knows")
        cache(c, "release", 1)
        c.account()
        wait_until(lambda: not pin_is_refused(second.address, 3), 5, "the second router knows that it is over")
        c.audit()


@test
def test_a_pin_may_be_asked_for_again_for_a_shorter_time_through_another_router():
    with with_a_store() as c:
        second = c.add_router()
        pin = lambda address, ttl_ms: Client(address).pin(pb.PinRequest(prefix=request(prompt(1)), ttl_ms=ttl_ms))
        pin(c.router.address, 3600000)
        wait_until(lambda: pin_is_refused(second.address, 2), 5, "the second router knows")
        pin(c.router.address, 0)
        time.sleep(0.3)  # longer than messages take
        pin(c.router.address, 60000)
        time.sleep(0.5)
        assert pin_is_refused(c.router.address, 2) and pin_is_refused(second.address, 2)


@test
def test_flushed_prompt_is_gone_from_workers_and_stores_for_its_tenant_alone():
    with Cluster(store=True, plan="split", router_args=["--prefix", "load"]) as c:
        for tenant in ("a", "b"):
            cached(c, 1, tenant=tenant)
            assert sum(cached(c, 1, tenant=tenant).values()) == WHOLE
        # a flush waits until the store has all offered blocks, else it would find half of them
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


class Pulls:
    """Counts what decode workers pulled, and what they had already."""

    def __init__(self, **kw):
        self.cluster = Cluster(plan="split", **kw)
        self.metrics = {}
        for p in self.cluster.workers:
            if p.role == "decode":
                self.metrics[p.name] = f"127.0.0.1:{free_port()}"
                p.args += ["--metrics-listen", self.metrics[p.name]]
        self.had, self.bytes = 0, 0

    def bytes_in(self):
        return sum(w["kv_bytes_in"] for w in self.cluster.status()["workers"] if w["role"] == "decode")

    def check(self, had, n_bytes):
        """Compares the changes since the last call: prompt tokens that they had, and bytes that came."""
        self.had += had
        self.bytes += n_bytes
        now = sum(metric(m, "tandem_worker_decode_cached_tokens_total{}") for m in self.metrics.values())
        assert now == self.had, (now, self.had)
        wait_until(lambda: self.bytes_in() >= self.bytes, 5, lambda: f"{self.bytes} bytes, not {self.bytes_in()}")
        assert self.bytes_in() == self.bytes, (self.bytes_in(), self.bytes)


def page_bytes(p, c):
    """Bytes of a page, measured with a new prompt that fills one page."""
    c.generate([{**line(0), "prompt_ids": prompt(0)[:16]}])
    wait_until(lambda: p.bytes_in(), 5, "a page")
    p.bytes = p.bytes_in()
    return p.bytes


@test
def test_decode_worker_pulls_what_its_cache_lacks():
    p = Pulls()
    with p.cluster as c:
        page = page_bytes(p, c)
        how = {"max_tokens": 24, "logprobs": True}
        for n, ids in ((1, prompt(1) + [7] * 9), (2, prompt(2))):  # a partial last block, then a full one
            pages = -(-len(ids) // 16)
            first, again = (c.generate([line(n, prompt_ids=ids, **how)])[str(n)] for _ in range(2))
            assert (first["token_ids"], first["logprobs"]) == (again["token_ids"], again["logprobs"])
            p.check(TOKENS, page * (pages + pages - TOKENS // 16))
            # a part of the prompt, and an answer that was generated here
            c.generate([line(n, prompt_ids=ids[:160] + [9] * 40, **how)])
            p.check(160, 3 * page)
            longer = ids + first["token_ids"] + [3] * 16
            c.generate([line(n, prompt_ids=longer, **how)])
            full = (len(ids) + 23) // 16  # the KV of the last token is not computed
            p.check(full * 16, (-(-len(longer) // 16) - full) * page)
        c.generate([line(1, tenant="b")])
        p.check(0, TOKENS // 16 * page)
        c.audit()


@test
def test_choices_of_a_split_plan_pull_their_prompt_once():
    p = Pulls(decode=2)
    with p.cluster as c:
        page = page_bytes(p, c)
        ids = prompt(1) + [7] * 9
        how = {"prompt_ids": ids, "max_tokens": 24, "greedy": False, "temperature": 1.1, "seed": 5, "logprobs": True}
        r = c.generate([{**line(1, **how), "n": 4}])["1"]
        all_of = [r, *r["choices"]]
        assert len({x["placement"]["decode"] for x in all_of}) == 1 and all(x["placement"]["plan"] == "split" for x in all_of)
        p.check(3 * TOKENS, (TOKENS // 16 + 4) * page)
        one = c.generate([line(1, bypass_cache=True, **how)])["1"]
        assert (one["token_ids"], one["logprobs"]) == (r["token_ids"], r["logprobs"])
        c.audit()


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
        # The same pin again takes no more room.
        assert client.pin(pb.PinRequest(prefix=whole, ttl_ms=2000)).told == 1
        assert client.pin(pb.PinRequest(prefix=request([1, 2, 3]), ttl_ms=1000)).prefix_tokens == 0
        out = subprocess.run([TANDEM, "cache", "pin", "--router", c.router.address, "--request", '{"prompt_ids": [1, 2, 3]}'], capture_output=True,
                             text=True)
        assert out.returncode == 1 and "nothing is pinned" in out.stderr, out
        assert client.flush(pb.FlushRequest(prefix=whole)).told == 1


main()
