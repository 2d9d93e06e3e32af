"""Same tokens, always: golden ids from an independent reference, however a request runs."""
import json, os, subprocess, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

DEMO_GOLDEN = golden(os.path.join(DEMO, "golden.json"))


def shared_models():
    folder = os.path.join(SHARED, "golden/models")
    if not os.path.exists(folder):
        raise Skip("shared/golden is absent")
    return [os.path.join(SHARED, "golden/tinystories")] + [os.path.join(folder, n) for n in sorted(os.listdir(folder))]


def run_checker(c, model, *args):
    out = subprocess.run([sys.executable, os.path.join(SHARED, "golden/check_tokens.py"), os.path.join(model, "golden.json"),
                          *args, "--cmd", f"{TANDEM} generate --jsonl --router {c.router.address}"], capture_output=True, text=True)
    assert out.returncode == 0, out.stdout[-2000:]


def check_split(results):
    for r in results.values():
        assert r["placement"]["prefill"] != r["placement"]["decode"], r["placement"]


@test
def test_split_cluster_gives_golden_tokens():
    with Cluster(prefill=2, decode=2, store=True, plan="split") as c:
        results = c.generate(golden_requests(DEMO_GOLDEN))
        check_golden(DEMO_GOLDEN, results)
        check_split(results)
        decode = [w for w in c.status()["workers"] if w["role"] == "decode"]
        wait_until(lambda: sum(w["kv_bytes_in"] for w in c.status()["workers"] if w["role"] == "decode") > 0, 5, "KV moved")
        assert len(decode) == 2
        c.audit()


@test
def test_split_cluster_gives_golden_tokens_of_shared_models():
    for model in shared_models():
        g = golden(os.path.join(model, "golden.json"))
        with Cluster(model=model, prefill=2, decode=2, store=True, plan="split") as c:
            results = c.generate(golden_requests(g))
            check_golden(g, results)
            check_split(results)
            c.audit()


@test
def test_shared_checker_passes_with_scoring():
    for model in shared_models():
        with Cluster(model=model, prefill=2, decode=2, plan="split") as c:
            run_checker(c, model, "--scoring")


@test
def test_shared_checker_passes_in_bf16():
    for model in shared_models():
        with Cluster(model=model, prefill=2, decode=2, plan="split", worker_args=["--numerics", "bf16"]) as c:
            run_checker(c, model, "--mode", "bf16")


@test
def test_aggregated_cluster_gives_golden_tokens():
    with Cluster(prefill=0, decode=1) as c:
        check_golden(DEMO_GOLDEN, c.generate(golden_requests(DEMO_GOLDEN)))
        c.audit()


@test
def test_one_process_gives_golden_tokens():
    text = "".join(json.dumps(r) + "\n" for r in golden_requests(DEMO_GOLDEN))
    for plan in ("split", "aggregated", "kept"):
        out = subprocess.run([TANDEM, "generate", "--jsonl", "--local", "--model", DEMO, "--plan", plan, "--worker-options",
                              "--pool-bytes 64M"], input=text, capture_output=True, text=True, timeout=120 * SLOW)
        assert out.returncode == 0, out.stderr
        check_golden(DEMO_GOLDEN, {r["id"]: r for r in map(json.loads, out.stdout.splitlines())})


@test
def test_fewer_bits_give_the_same_tokens_wherever_they_run():
    """Weights and KV pages in fewer bits. Pages are pulled, stored and found again as they are."""
    for args, shared in ((["--weights", "int8"], ["--kv-dtype", "fp8"]), (["--weights", "int4"], ["--numerics", "bf16"])):
        runs = []
        for shape in ({"prefill": 2, "decode": 2, "store": True, "plan": "split"}, {"prefill": 0, "decode": 1}):
            with Cluster(worker_args=args + shared, store_args=shared, **shape) as c:
                results = c.generate(golden_requests(DEMO_GOLDEN))
                runs.append({k: (r["token_ids"], r.get("logprobs")) for k, r in results.items()})
                c.audit()
        assert runs[0] == runs[1]


@test
def test_chunk_sizes_change_nothing():
    for chunk in ("16", "64", "512"):
        with Cluster(plan="split", worker_args=["--chunk-tokens", chunk]) as c:
            check_golden(DEMO_GOLDEN, c.generate(golden_requests(DEMO_GOLDEN)))


@test
def test_strangers_in_the_batch_change_nothing():
    strangers = [{"id": f"s{i}", "prompt_ids": [(i * 7 + j * 13) % 1500 for j in range(20 + i)], "max_tokens": 60, "seed": i,
                  "temperature": 1.0, "ignore_eos": True} for i in range(32)]
    with Cluster(prefill=2, decode=1, plan="split") as c:
        check_golden(DEMO_GOLDEN, c.generate([*strangers, *golden_requests(DEMO_GOLDEN)], ["--concurrency", "64"]))
        c.audit()


@test
def test_prefix_in_the_workers_cache_changes_nothing():
    with Cluster(plan="split") as c:
        check_golden(DEMO_GOLDEN, c.generate(golden_requests(DEMO_GOLDEN)))
        again = c.generate(golden_requests(DEMO_GOLDEN))
        check_golden(DEMO_GOLDEN, again)
        for case in DEMO_GOLDEN["cases"]:
            cached = again[case["name"]]["usage"]["cached_tokens"]["worker"]
            assert cached == (len(case["prompt_ids"]) - 1) // 16 * 16, (case["name"], cached)


def long_requests():
    """Requests with prompts of several pages, greedy and seeded."""
    prompt = [c["prompt_ids"] for c in DEMO_GOLDEN["cases"]]
    joined = [sum(prompt[i:] + prompt[:i], [])[:200] for i in range(4)]
    return [{"id": f"{kind}{i}", "prompt_ids": ids, "max_tokens": 40, "ignore_eos": True, **how}
            for i, ids in enumerate(joined)
            for kind, how in (("greedy", {"greedy": True}), ("seeded", {"temperature": 1.1, "top_p": 0.9, "seed": 7 + i}))]


def tokens(results):
    return {k: (r["token_ids"], r["logprobs"]) for k, r in results.items()}


@test
def test_prefix_from_ssd_after_restart_changes_nothing():
    with Cluster(store=True, plan="split", router_args=["--prefix", "load"]) as c:
        want = tokens(c.generate(long_requests()))
        n_blocks = 4 * (200 // 16)
        wait_until(lambda: c["store-0"] and next(w for w in c.status()["workers"] if w["role"] == "store")["store"]["blocks_ssd"]
                   >= n_blocks, 20, "blocks on SSD")
        for w in c.workers:  # all memory is lost, the disk stays
            w.stop()
        for w in c.workers:
            w.start(wait=False)
        for w in c.workers:
            w.wait()
        c.wait_ready()
        wait_until(lambda: c.status()["index_blocks"] >= n_blocks, 20, "the index knows the store's blocks")
        one_each = [r for r in long_requests() if r["id"].startswith("greedy")]
        results = c.generate(one_each, ["--concurrency", "1"])
        for r in one_each:
            assert tokens(results)[r["id"]] == want[r["id"]], r["id"]
            cached = results[r["id"]]["usage"]["cached_tokens"]
            assert cached["ssd"] >= (200 // 16 - 1) * 16 and cached["worker"] == cached["dram"] == 0, cached
        assert tokens(c.generate(long_requests())) == want
        c.audit()


@test
def test_seeded_sampling_is_the_same_everywhere():
    wanted = None
    for args in ({"prefill": 0, "decode": 1}, {"plan": "split", "prefill": 2, "decode": 2},
                 {"plan": "split", "worker_args": ["--chunk-tokens", "16", "--max-batch", "3"]}):
        with Cluster(**args) as c:
            got = tokens(c.generate(long_requests()))
            wanted = wanted or got
            assert got == wanted, args
    assert len({tuple(t) for t, _ in wanted.values()}) > 4


@test
def test_preempted_and_resumed_requests_give_the_same_tokens():
    # answers longer than what the router reserves for them
    requests = [{"id": f"r{i}", "prompt_ids": [(i * 31 + j * 7) % 1500 for j in range(40)], "max_tokens": 600, "seed": i,
                 "temperature": 0.8 if i % 2 else 0, "ignore_eos": True} for i in range(8)]
    with Cluster(prefill=0, decode=1) as c:
        want = tokens(c.generate(requests))
    with Cluster(prefill=0, decode=1, worker_args=["--pages", "60", "--log-level", "debug"]) as c:
        assert tokens(c.generate(requests)) == want
        assert "sequence preempted" in open(os.path.join(c.dir, "decode-0.log")).read()
        c.audit()


main()
