"""Known failures of systems like this one between a request's arrival and its end. Each test is named after
what it proves."""
import itertools, os, sys, threading
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../cluster"))
from harness import *
from client import Client, grpc, request

DIMS = "layers=4,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536"  # a token has 1 KiB of KV
SIM = ["--engine", "sim", "--numerics", "bf16"]
LONG = os.environ.get("TANDEM_LONG") in ("faults", "all")


def ids(n, seed):
    rnd = random.Random(seed)
    return [rnd.randrange(1500) for _ in range(n)]


@test
def test_client_that_leaves_at_any_moment_leaves_nothing_behind():
    rounds = 1000 if LONG else 120
    with Cluster(dummy=DIMS, prefill=2, decode=2, store=True, plan="split", store_args=["--numerics", "bf16"],
                 worker_args=[*SIM, "--chunk-tokens", "128", "--max-rows", "512", "--pages", "600", "--sim-prefill",
                              "2000,20,0", "--sim-decode", "3000,0,0"]) as c:
        client = Client(c.router.address)
        rnd = random.Random(4)
        seen = set()
        for i in range(rounds):  # prefill takes about 45 ms, decode about 60 ms
            stream = client.generate(request(ids=ids(1500, rnd.randrange(9)), max_tokens=20, stopping__ignore_eos=True),
                                     timeout=30)
            timer = threading.Timer(rnd.random() * 0.12, stream.cancel)
            timer.start()
            n = 0
            try:
                for m in stream:
                    n += len(m.tokens)
            except grpc.RpcError as e:
                assert e.code().name == "CANCELLED", e
            timer.cancel()
            seen.add(n)
            if i % 10 == 0:
                code, report = c.account()
                assert code == 0, report
        c.audit(3)
        assert {0, 20} <= seen and len(seen) > 6, seen  # before the first token, in between, after the last
        assert client.all(request(ids=ids(1500, 77), max_tokens=20,
                                  stopping__ignore_eos=True))[2].usage.completion_tokens == 20


@test
def test_requests_that_together_fill_the_pools_all_get_on():
    rnd = random.Random(8)
    requests = [{"id": str(i), "prompt_ids": ids(rnd.choice((16, 200, 700, 900)), i),
                 "max_tokens": rnd.choice((1, 30, 90)), "greedy": True, "ignore_eos": True} for i in range(80)]
    want = {}
    # 64 pages: one more than the largest request needs.
    for plan, pages in (("split", 2000), ("split", 64), ("aggregated", 64), ("kept", 64)):
        with Cluster(dummy=DIMS, plan=plan, worker_args=[*SIM, "--pages", str(pages), "--chunk-tokens", "128",
                                                         "--max-rows",
                     "256", "--sim-prefill", "300,2,0", "--sim-decode", "500,0,0", "--max-context", "1008"]) as c:
            got = {k: r.get("token_ids") for k, r in c.generate(requests, timeout=60).items()}
            assert all(got.values()), [k for k, v in got.items() if not v][:5]
            want = want or got
            assert got == want
            c.audit(5)


@test
def test_processes_may_start_in_any_order():
    with Cluster(dummy=DIMS, prefill=1, decode=1, store=True, plan="split", worker_args=SIM,
                 store_args=["--numerics", "bf16"]) as c:
        procs = [c.router, *c.workers]
        orders = list(itertools.permutations(range(4)))
        for order in orders if LONG else orders[::5]:
            for p in procs:
                p.stop()
            for i in order:  # each on the address that it had
                procs[i].start()
            c.wait_ready(10)
            r = c.generate([{"id": "x", "prompt_ids": ids(100, 1), "max_tokens": 5, "greedy": True,
                             "ignore_eos": True}])["x"]
            assert len(r["token_ids"]) == 5, (order, r)


@test
def test_worker_frozen_for_longer_than_its_leases_reads_nothing_stale():
    with Cluster(dummy=DIMS, prefill=1, decode=2, plan="split",
                 worker_args=[*SIM, "--lease-ms", "1000", "--chunk-tokens", "64", "--max-rows", "256", "--pages", "400",
                              "--sim-prefill", "1000,30,0", "--sim-decode", "2000,0,0"]) as c:
        requests = [{"id": str(i), "prompt_ids": ids(1000, i), "max_tokens": 30, "greedy": True, "ignore_eos": True}
                    for i in range(24)]
        want = {k: r["token_ids"] for k, r in c.generate(requests).items()}
        def ask_until(frozen):  # a busy machine may be late to see pages on their way
            while not frozen.is_set():
                for k, r in c.generate(requests).items():
                    results.append((k, r))

        for n in range(3):
            results, frozen = [], threading.Event()
            t = threading.Thread(target=ask_until, args=(frozen,))
            t.start()
            wait_until(lambda: sum(w["pages"]["leased"] for w in c.status()["workers"]) > 0, 10,
                       "pages are on their way")
            c["decode-0"].kill(signal.SIGSTOP)
            frozen.set()
            time.sleep(3)  # three times the lease
            c["decode-0"].kill(signal.SIGCONT)
            t.join()
            for k, r in results:
                assert "error" in r or r["token_ids"] == want[k], (k, r)
            assert any("error" not in r for _, r in results)
            c.wait_ready(10)
            c.audit(10)


@test
def test_prompt_of_the_whole_context_is_moved_in_pieces():
    n = 120000
    with Cluster(dummy=DIMS, plan="split", router_args=["--max-message-bytes", "8M"],
                 worker_args=[*SIM, "--pool-bytes", "140M", "--chunk-tokens", "4096", "--max-rows", "4096",
                              "--sim-prefill", "1000,5,0"]) as c:
        client = Client(c.router.address)
        prompt = ids(n, 3)
        _, first, end = client.all(request(ids=prompt, max_tokens=6, stopping__ignore_eos=True), timeout=60)
        assert end.usage.prompt_tokens == n and len(first) == 6
        wait_until(lambda: sum(w["kv_bytes_in"] for w in c.status()["workers"]) >= n * 1024, 3, "the bytes are counted")
        code, text = client.error(request(ids=prompt * 2, max_tokens=6))
        assert code == "INVALID_ARGUMENT", (code, text)  # it never fits, so it is refused before any work
        c.audit()
        assert client.all(request(ids=prompt, max_tokens=6, stopping__ignore_eos=True), timeout=60)[1] == first


@test
def test_orphaned_pages_come_back_by_themselves():
    with Cluster(dummy=DIMS, prefill=1, decode=1, plan="split",
                 worker_args=[*SIM, "--lease-ms", "1500", "--pages", "260", "--chunk-tokens", "256", "--max-rows",
                              "256", "--sim-prefill", "1000,2,0", "--sim-decode", "20000,0,0"],
                 router_args=["--gone-ms", "500"]) as c:
        client = Client(c.router.address)
        streams = [client.generate(request(ids=ids(1000, i), max_tokens=200, stopping__ignore_eos=True), timeout=60)
                   for i in range(8)]
        wait_until(lambda: sum(w["running"] for w in c.status()["workers"]) > 1, 10, "they run")
        c["decode-0"].kill()
        c["decode-0"].child.wait()
        for s in streams:
            try:
                list(s)
                raise AssertionError("answered by nobody")
            except grpc.RpcError as e:
                assert e.code().name in ("UNAVAILABLE", "CANCELLED"), e
        def prefill():
            return next(w for w in c.status()["workers"] if w["role"] == "prefill")["pages"]
        # No prefill was started.
        wait_until(lambda: prefill()["free"] + prefill()["cached"] == 260, 6, lambda: str(prefill()))
        c["decode-0"].start()
        c.wait_ready(10)
        assert len(client.all(request(ids=ids(1000, 1), max_tokens=3, stopping__ignore_eos=True))[1]) == 3


main()
