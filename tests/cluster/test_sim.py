"""Workers with simulated compute: real processes, RPC and transfers; tokens depend on the KV, and time is
that of the model."""
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

DIMS = "layers=8,kv_heads=2,heads=2,head_dim=64,hidden=128,ffn=128,vocab=1536"
SIM = ["--engine", "sim", "--numerics", "bf16", "--max-rows", "1024", "--chunk-tokens", "512"]


def prompts(tag):
    rnd = random.Random(7)
    shared = [rnd.randrange(1500) for _ in range(640)]
    return [{"id": f"{tag}{i}", "prompt_ids": shared[:rnd.choice((0, 320, 640))] + [rnd.randrange(1500) for _ in range(n)],
             "max_tokens": 40, "greedy": True, "ignore_eos": True} for i, n in enumerate((1, 17, 300, 1500, 40, 900, 16, 2222))]


@test
def test_sim_tokens_do_not_depend_on_where_they_are_made():
    with Cluster(dummy=DIMS, plan="aggregated", worker_args=SIM) as c:
        want = {k[1:]: r["token_ids"] for k, r in c.generate(prompts("a")).items()}
    assert len({tuple(v) for v in want.values()}) == len(want)
    with Cluster(dummy=DIMS, prefill=2, decode=2, store=True, plan="split", worker_args=SIM, store_args=["--numerics", "bf16"]) as c:
        for tag in "bc":  # the second time prompts come from caches
            got = c.generate(prompts(tag))
            assert {k[1:]: r["token_ids"] for k, r in got.items()} == want
            assert all(r["placement"]["plan"] == "split" for r in got.values())
        assert any(r["usage"]["cached_tokens"]["worker"] for r in got.values())
        c.audit()


@test
def test_sim_time_is_the_cost_models():
    cost = ["--sim-prefill", "20000,100,0", "--sim-decode", "30000,0,0"]
    with Cluster(dummy=DIMS, plan="split", worker_args=[*SIM, *cost]) as c:
        c.generate([{"id": "w", "prompt_ids": [3] * 20, "max_tokens": 2, "greedy": True}])
        for i in range(8):  # never faster; slower only while other programs keep the workers from running
            asked = {"id": "x", "prompt_ids": [5 + i] * 1000, "max_tokens": 11, "greedy": True, "ignore_eos": True}
            t = c.generate([asked])["x"]["timing"]
            assert t["prefill"] >= 140 and t["tpot"] >= 30, t  # 2 chunks: 2 * 20 + 1000 * 0.1
            if t["prefill"] < 140 + 100 * SLOW and t["tpot"] < 30 + 20 * SLOW:
                return
        raise AssertionError(t)


@test
def test_sim_first_gaps_are_predicted():
    """The router learns of live hand-overs: a gap is a step of 20 ms, and the rest of the running step."""
    cost, metrics = ["--sim-prefill", "2000,10,0", "--sim-decode", "20000,0,0"], f"127.0.0.1:{free_port()}"
    with Cluster(dummy=DIMS, plan="split", worker_args=[*SIM, *cost], router_args=["--metrics-listen", metrics]) as c:
        for i in range(40):
            c.generate([{"id": f"g{i}", "prompt_ids": [i % 7] * 400, "max_tokens": 3, "greedy": True, "ignore_eos": True}])
        error = lambda name: metric(metrics, rf'tandem_worker_{name}_error_ratio{{place="1"}}')
        wait_until(lambda: 0 < error("first_gap") < 0.4 * SLOW and error("transfer") > 0, 10,
                   lambda: f'{error("first_gap")} {error("transfer")}')


@test
def test_sim_and_real_workers_do_not_mix():
    with Cluster(plan="split") as c:
        stranger = Proc(c, "decode", "decode-9", ["--engine", "sim", "--model", DEMO, "--pool-bytes", "16M"])
        c.workers.append(stranger)
        stranger.start()
        router = Proc(c, "router", "router-2", ["--model", DEMO, "--workers", ",".join(w.address for w in c.workers),
                                                "--listen", "127.0.0.1:0"]).start()
        try:
            wait_until(lambda: "numerics differ" in c.log("router-2"), 10, lambda: c.log("router-2"))
        finally:
            router.stop()


@test
def test_what_simulated_compute_does_not_have_is_refused():
    for args, why in ((["--tensor-parallel", "2"], "simulated compute has one rank"),
                      (["--pipeline-parallel", "2"], "simulated compute has one rank"),
                      (["--lora", "a=/nowhere"], "simulated compute has no adapters")):
        out = subprocess.run([os.path.join(BUILD, "decode", "tandem-decode"), "--dummy", DIMS, *SIM, *args],
                             capture_output=True, text=True, timeout=30 * SLOW)
        assert out.returncode == 2 and why in out.stderr, out.stderr


@test
def test_the_exposed_tail_of_a_transfer_does_not_grow_with_the_prompt():
    """The time from the end of the prefill until all pages have arrived: at 1k, 4k, 16k and 31k tokens within
    20 % of each other."""
    if os.environ.get("TANDEM_LONG") not in ("overlap", "all"):
        raise Skip("--long overlap: more than a minute")
    for _ in range(5):  # other programs may take a core for a while
        out = subprocess.run([TANDEM, "bench", "overlap", "--model", DEMO, "--json"], capture_output=True, text=True, timeout=100 * SLOW)
        assert out.returncode == 0, out.stderr
        rows = {r["name"]: r["value"] for r in map(json.loads, out.stdout.splitlines())}
        tails = {name.split()[3]: ms for name, ms in rows.items() if name.endswith("simulated engine")}
        print(f"# ms by tokens: {tails}", flush=True)
        assert list(tails) == ["1024", "4096", "16384", "31744"], rows
        if max(tails.values()) <= 1.2 * min(tails.values()):
            return
    raise AssertionError(tails)



main()
