"""Families beyond Llama, through a cluster: experts, sliding windows, latent KV. Tokens and log-probabilities
are those of the reference (tests/model/golden/make.py), and the same alone, batched, chunked, handed over,
from caches and stores, after a loss."""
import json, os, subprocess, sys, threading
sys.path.insert(0, os.path.dirname(__file__))
from families import *

KINDS = ("mixtral", "mistral", "deepseek_v2")  # experts; every page behind a window is released; latent pages
OTHERS = ("gemma3", "gpt_oss", "phi3")  # mixed windows; sinks; two sets of frequencies


@test
def test_behind_a_window_a_decode_worker_pulls_what_it_lacks():
    metrics = f"127.0.0.1:{free_port()}"
    with Cluster(model=model("mistral"), plan="split", roles_args={"decode": ["--metrics-listen", metrics]}) as c:
        # A window of 24 sees blocks 4 and 5, and 4 tokens of block 6.
        ids = [2 + i * 7 % 120 for i in range(100)]
        one, two = (c.generate([{"id": "x", "prompt_ids": ids, "max_tokens": 60, "greedy": True, "logprobs": True}])["x"]
                    for _ in range(2))
        assert (one["token_ids"], one["logprobs"]) == (two["token_ids"], two["logprobs"])
        assert metric(metrics, "tandem_worker_decode_cached_tokens_total{}") == 32
        c.audit()


@test
def test_split_gives_golden_tokens_of_every_family():
    for name in (*KINDS, *OTHERS):
        with Cluster(model=model(name), prefill=2, decode=2, store=True, plan="split") as c:
            results = c.generate(golden_requests(reference(name)))
            check_golden(reference(name), results)
            assert all(r["placement"]["prefill"] != r["placement"]["decode"] for r in results.values())
            c.audit()


@test
def test_workers_of_any_number_of_ranks_exchange_pages():
    several = (["--tensor-parallel", "2"], ["--tensor-parallel", "2", "--pipeline-parallel", "2"])
    for name, (prefill, decode) in (("mixtral", (several[0], [])), ("deepseek_v2", ([], several[1])), ("gpt_oss", several)):
        with Cluster(model=model(name), plan="split", worker_args=["--rank-devices", "same"],
                     roles_args={"prefill": prefill, "decode": decode}) as c:
            check_golden(reference(name), c.generate(golden_requests(reference(name))))
            c.audit()


@test
def test_batch_chunks_split_and_cache_change_nothing():
    for name in KINDS:
        want = alone(name, own_requests())
        for args in (["--chunk-tokens", "16", "--max-batch", "3"], ["--chunk-tokens", "48"]):
            with Cluster(model=model(name), prefill=2, decode=2, plan="split", worker_args=args) as c:
                assert tokens(c.generate(own_requests())) == want, (name, args)
                again = c.generate(own_requests())
                assert tokens(again) == want, (name, args, "from the workers' caches")
                assert sum(r["usage"]["cached_tokens"]["worker"] for r in again.values()) > 0
                check_golden(reference(name), c.generate([*own_requests(), *golden_requests(reference(name))]))
                c.audit()


@test
def test_prefix_from_a_store_changes_nothing():
    for name in KINDS:
        want = alone(name, own_requests())
        with Cluster(model=model(name), store=True, plan="split", router_args=["--prefix", "load"]) as c:
            assert tokens(c.generate(own_requests())) == want, name
            blocks = lambda: next(w for w in c.status()["workers"] if w["role"] == "store")["store"]["blocks_dram"]
            wait_still(blocks, 20, "the store has taken what it was offered")
            for w in c.workers:
                if w.role != "store":
                    w.stop()
            for w in c.workers:
                if w.role != "store":
                    w.start(wait=False)
                    w.wait()
            c.wait_ready()
            results = c.generate(own_requests(), ["--concurrency", "1"])
            assert tokens(results) == want, name
            cached = [r["usage"]["cached_tokens"] for r in results.values()]
            assert sum(u["dram"] + u["ssd"] for u in cached) > 0, cached
            c.audit()


@test
def test_loss_of_a_decode_worker_changes_nothing():
    for name in KINDS:
        requests = own_requests(24, 90)
        requests = [r for r in requests if len(r["prompt_ids"]) + 90 <= 256]
        want = alone(name, requests)
        with Cluster(model=model(name), prefill=1, decode=2, plan="split", scripts=True) as c:
            # What runs there when the test looks still runs when it kills.
            c["decode-0"].misbehave("step:delay/10ms")
            with open(os.path.join(c.dir, "requests"), "w", encoding="utf-8") as f:
                f.writelines(json.dumps({**r, "id": f"{r['id']}/{k}"}) + "\n" for k in range(40) for r in requests)
            with open(f.name, encoding="utf-8") as f:
                p = subprocess.Popen([TANDEM, "generate", "--jsonl", "--concurrency", "8", "--router", c.router.address], stdin=f,
                                     stdout=subprocess.PIPE, text=True)
            results = []  # read while waiting: a client whose output nobody reads asks for nothing more
            reader = threading.Thread(target=lambda: results.extend(map(json.loads, p.stdout)), daemon=True)
            reader.start()
            runs = lambda: next(w for w in c.status()["workers"] if w["name"] == "decode-0")["running"]
            wait_until(lambda: len(results) > 2 and runs(), 20, "decode-0 works")
            c["decode-0"].kill()
            reader.join()
            assert p.wait(60 * SLOW) == 0
            assert len(results) == 40 * len(requests)
            for r in results:
                assert (r["token_ids"], r["logprobs"]) == want[r["id"].split("/")[0]], (name, r["id"])
            assert sum(r.get("replans", 0) for r in results) > 0, list(results[-1])


main()
