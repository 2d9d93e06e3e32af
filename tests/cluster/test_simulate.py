"""The command tandem simulate: refusals and reports. No cluster runs here."""
import json, os, subprocess, sys, tempfile
sys.path.insert(0, os.path.dirname(__file__))
from harness import *


def write_trace(path, times_ms, n_prompt=2000, n_output=100, **more):
    with open(path, "w") as f:
        f.write('{"tandem_trace": 1, "block_tokens": 512}\n')
        for i, at in enumerate(times_ms):
            prompt = n_prompt(i) if callable(n_prompt) else n_prompt
            f.write(json.dumps({"timestamp": at, "input_length": prompt, "output_length": n_output, **more}) + "\n")


def tandem(*args, code=0, timeout=60):
    out = subprocess.run([TANDEM, *args], capture_output=True, text=True, timeout=timeout * SLOW)
    assert out.returncode == code, (out.returncode, out.stdout[-2000:], out.stderr[-2000:])
    return out


def simulate(path, *args):
    return json.loads(tandem("simulate", path, "--json", *args).stdout)


@test
def test_a_burst_gives_a_short_report_whose_chart_lasts_as_long_as_the_run():
    with tempfile.TemporaryDirectory() as d:
        path, out = os.path.join(d, "trace.jsonl"), os.path.join(d, "report.json")
        write_trace(path, [0] * 300)
        tandem("simulate", path, "--prefill", "0", "--decode", "4", "--output", out)
        with open(out) as f:
            r = json.load(f)
        for w in r["workers"]:
            assert len(w["load"]) <= 240, len(w["load"])
            assert 0 <= len(w["load"]) * r["load_tick_ms"] - r["duration_ms"] <= r["load_tick_ms"], r["load_tick_ms"]
            assert abs(sum(w["load"]) * r["load_tick_ms"] / w["busy_ms"] - 1) < 1e-3, w


@test
def test_a_run_without_workers_of_a_role_ends_and_says_what_failed():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "trace.jsonl")
        write_trace(path, range(0, 20000, 200))
        r = simulate(path, "--prefill", "1", "--decode", "1", "--fail", "decode-1@4s", "--gone-ms", "3s")
        assert r["failed"] + r["cut_short"] >= 70 and r["answered"] + r["failed"] + r["cut_short"] == 100, r
        r = simulate(path, "--prefill", "1", "--decode", "1", "--fail", "prefill-1@4s", "--plan", "split")
        assert r["failed"] >= 70 and r["answered"] + r["failed"] + r["cut_short"] == 100, r
        err = tandem("simulate", path, "--fail", "decode-1@4s+10s,decode-1@9s", code=2).stderr
        assert "--fail" in err and "still dead" in err, err


@test
def test_refusals_are_counted_by_reason_and_by_length():
    with tempfile.TemporaryDirectory() as d:
        path, page = os.path.join(d, "trace.jsonl"), os.path.join(d, "page.html")
        write_trace(path, range(0, 20000, 200), lambda i: 1000 + 1000 * (i % 4) ** 3)
        limits = ["--prefill", "1", "--decode", "1", "--ttft-ms", "600", "--html", page]
        r = simulate(path, *limits)
        assert 20 <= r["refused"] < 50, r["refused"]
        assert sum(o["refused"] for o in r["reasons"]) == r["refused"] and not any(o["failed"] for o in r["reasons"]), r
        assert r["reasons"][0]["reason"] == "slo.ttft_ms can't be met", r["reasons"]
        quarters, offered = r["by_prompt_length"], r["offered"]
        assert [q["requests"] for q in quarters] == [25] * 4 and quarters[3]["most_tokens"] == 28000, quarters
        assert quarters[0]["refused_share"] < 0.2 and quarters[3]["refused_share"] > 0.8, quarters
        assert offered["refused_token_share"] > offered["refused_share"] == r["refused"] / 100, offered
        assert offered["prompt_tokens"] == sum(1000 + 1000 * (i % 4) ** 3 for i in range(100)), offered
        table = tandem("simulate", path, *limits).stdout
        assert "slo.ttft_ms can't be met" in table and "by length      to 1000 tokens: refused" in table, table
        r = simulate(path, "--prefill", "1", "--decode", "1", "--fail", "decode-1@4s")
        assert [(o["reason"], o["failed"]) for o in r["reasons"]] == \
            [("no decode worker is up", r["failed"] + r["cut_short"])], r["reasons"]


@test
def test_a_full_token_pool_borrows_prompt_machines():
    with tempfile.TemporaryDirectory() as d:
        path, out = os.path.join(d, "trace.jsonl"), os.path.join(d, "report.json")
        write_trace(path, range(0, 12000, 20), 200, 800)  # more sequences than a worker's batch takes
        args = [path, "--prefill", "2", "--decode", "1", "--ttft-ms", "2000", "--tpot-ms", "20"]
        for policy in ("mixed-pool", "tandem"):
            lent = simulate(*args, "--policy", policy, "--output", out)
            split = simulate(*args, "--policy", policy, "--plan", "split")
            assert lent["plans"]["kept"] > 100 and lent["plans"]["split"] > 100, (policy, lent["plans"])
            assert split["plans"] == {"split": split["answered"], "aggregated": 0, "kept": 0}, split["plans"]
            assert lent["met"] > 1.2 * split["met"], (policy, lent["met"], split["met"])
            with open(out) as f:
                q = json.load(f)["requests"]
            assert [q["plan"].count(i) for i in range(4)] == [0, *lent["plans"].values()], (policy, lent["plans"])
            assert "kept" in tandem("simulate", *args, "--policy", policy).stdout
        r = simulate(*args, "--plan", "kept", "--policy", "least-loaded")
        assert r["plans"]["kept"] == 600, r["plans"]
        assert "--plan kept" in tandem("simulate", path, "--prefill", "0", "--plan", "kept", code=2).stderr


def rows_of(path):
    """The requests of a report, as one object each."""
    with open(path) as f:
        report = json.load(f)
    columns = {k: v for k, v in report["requests"].items() if k != "n"}
    return [{k: v[i] if isinstance(v, list) else v for k, v in columns.items()} for i in range(report["requests"]["n"])]


@test
def test_routers_share_the_workers_and_one_that_dies_takes_its_requests_along():
    with tempfile.TemporaryDirectory() as d:
        path, out = os.path.join(d, "trace.jsonl"), os.path.join(d, "report.json")
        write_trace(path, range(0, 40000, 20))
        args = [path, "--prefill", "2", "--decode", "2", "--ttft-ms", "2000", "--rpc-ms", "0.5", "--output", out]
        one = simulate(*args)
        assert one["settings"]["routers"] == 1 and {q["router"] for q in rows_of(out)} == {0}
        two = simulate(*args, "--routers", "2")
        routers = [q["router"] for q in rows_of(out)]
        assert two["settings"]["routers"] == 2 and two["met"] >= 0.93 * one["met"], (one["met"], two["met"])
        assert set(routers) == {1, 2} and 800 < routers.count(1) < 1200, routers.count(1)
        r = simulate(*args, "--routers", "2", "--fail", "router-2@20s,decode-1@30s+5s")
        lost = [q for q in rows_of(out) if q["router"] == 2]
        assert lost and all(q["arrived_ms"] <= 20000 for q in lost), max(q["arrived_ms"] for q in lost)
        assert r["settings"]["fail"] == "router-2@20s,decode-1@30s+5s" and 0 < r["failed"] + r["cut_short"] < 200, r["failed"]
        assert [o["reason"] for o in r["reasons"] if o["failed"]] == ["its router was lost"], r["reasons"]
        out = tandem("simulate", *args[:5], "--sweep", "routers=1..3", "--json").stdout
        assert [p["report"]["settings"]["routers"] for p in json.loads(out)["points"]] == [1, 2, 3]
        out = tandem("simulate", *args[:5], "--sweep", 'label=a"b|c\\d', "--json").stdout
        assert [p["point"] for p in json.loads(out)["points"]] == ['label=a"b', "label=c\\d"], out


@test
def test_a_cluster_that_is_wanted_too_much_is_shared_by_the_tenants_weights():
    with tempfile.TemporaryDirectory() as d:
        path, more, out = (os.path.join(d, n) for n in ("trace.jsonl", "more.jsonl", "report.json"))
        write_trace(path, range(0, 20000, 5), tenant="light")
        write_trace(more, range(0, 20000, 10), tenant="heavy")
        with open(path, "a") as f, open(more) as g:
            f.writelines(g.readlines()[1:])
        args = [path, "--prefill", "1", "--decode", "1", "--ttft-ms", "1000", "--output", out]
        shares = {}
        for tenants in ("light=1,heavy=3", "light=1,heavy=1", "heavy=3"):
            r = simulate(*args, "--tenants", tenants)
            assert r["settings"]["tenants"] == tenants
            answered = [r["tenants"][q["tenant"]] for q in rows_of(out) if q["outcome"] == 0]
            shares[tenants] = answered.count("light") / len(answered)
        print(f"# the light tenant's share: {shares}")
        assert abs(shares["light=1,heavy=3"] - 0.25) < 0.05 and abs(shares["light=1,heavy=1"] - 0.5) < 0.05, shares
        assert shares["heavy=3"] == shares["light=1,heavy=3"], shares


@test
def test_queues_are_bounded_when_that_is_asked_for():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "trace.jsonl")
        write_trace(path, [0] * 300)
        args = [path, "--prefill", "1", "--decode", "1"]
        r = simulate(*args)
        assert r["answered"] == 300, r["answered"]
        s = r["settings"]
        assert (s["queue_requests"], s["queue_tokens"], s["max_wait_ms"]) == (0, 0, 120000) and "tenants" not in s, s
        by_requests, by_tokens = simulate(*args, "--queue-requests", "50"), simulate(*args, "--queue-tokens", "100000")
        for r in by_requests, by_tokens:  # prompts have 2000 tokens
            assert 200 < r["refused"] <= 250, r["refused"]
        two = simulate(*args, "--queue-requests", "50", "--routers", "2")
        assert two["refused"] < by_requests["refused"] - 30, (two["refused"], by_requests["refused"])
        s = simulate(*args, "--max-wait-ms", "2s", "--queue-tokens", "5000")["settings"]
        assert (s["queue_tokens"], s["max_wait_ms"]) == (5000, 2000), s


@test
def test_bad_values_of_routers_tenants_and_queues_are_refused_by_name():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "trace.jsonl")
        write_trace(path, [0])
        for args, said in ((["--routers", "0"], "--routers"), (["--routers", "17"], "--routers"),
                           (["--tenants", "a"], "'a' is not NAME=WEIGHT"), (["--tenants", "a=1,a=2"], "'a' comes twice"),
                           (["--tenants", "a=0"], "--tenants"), (["--queue-requests", "-1"], "--queue-requests"),
                           (["--queue-tokens", "many"], "--queue-tokens"), (["--max-wait-ms", "0"], "--max-wait-ms"),
                           (["--fail", "router-1@4s"], "no router would be left"), (["--fail", "router-2@4s"], "with N from 1"),
                           (["--routers", "2", "--fail", "router-2@4s+5s"], "expected router-N@TIME"),
                           (["--routers", "3", "--fail", "router-2@4s,router-2@5s"], "is dead already"),
                           (["--routers", "2", "--fail", "router-2@4s,router-1@5s"], "no router would be left"),
                           (["--routers", "2", "--fail", "router-0@4s"], "--fail"), (["--fail", "store-1@4s"], "--fail"),
                           (["--sweep", "tenants=a=1|a=x"], "'a=x' is not NAME=WEIGHT")):
            err = tandem("simulate", path, *args, code=2).stderr
            assert said in err, (args, err)


def write_profiles(path):
    prefill = [{"batch": 1, "isl": n, "ms": 3 + 0.02 * n + 1e-6 * n * n + n % 3} for n in (128, 512, 2048, 8192, 32768)]
    decode = [{"batch": b, "context": c, "ms": 5 + 4e-5 * b * c + 0.01 * b} for b in (1, 4, 16, 64) for c in (512, 4096, 32768)]
    of = lambda model, tp: {"gpu": "h200_sxm", "model": model, "backend": "b", "tp": tp, "precision": "bf16", "prefill": prefill,
                            "decode": decode}
    with open(path, "w") as f:
        json.dump({"profiles": [of("meta-llama/Meta-Llama-3.1-8B", 1), of("meta-llama/Meta-Llama-3.1-70B", 4),
                                of("meta-llama/Meta-Llama-3.1-70B", 8), of("who/Else-8B", 1)]}, f)


@test
def test_limits_keep_fractions_of_a_millisecond():
    with tempfile.TemporaryDirectory() as d:
        path, out, again = (os.path.join(d, n) for n in ("trace.jsonl", "report.json", "again.jsonl"))
        write_trace(path, range(0, 2000, 200))
        args = ["--prefill", "1", "--decode", "1", "--policy", "least-loaded"]
        tpot = simulate(path, *args)["tpot_ms"]
        for limit, met in ((round(tpot["max"] + 0.05, 3), 10), (2.9, 0)):
            r = simulate(path, *args, "--tpot-ms", str(limit))
            assert (r["tpot_slo_ms"], r["met"]) == (limit, met), (tpot, r["tpot_slo_ms"], r["met"])
        assert simulate(path, *args, "--tpot-ms", "0.4")["met"] == 0
        write_trace(path, range(0, 2000, 200), tpot_ms=0.4, ttft_ms=9000.25)
        tandem("trace", "slice", path, "--count", "5", "--output", again)
        tandem("simulate", again, *args, "--output", out)
        with open(out) as f:
            r = json.load(f)
        assert r["requests"]["tpot_slo_ms"] == 0.4 and r["requests"]["ttft_slo_ms"] == 9000.25 and r["met"] == 0, r["met"]
        for bad in ("nan", "-1", "0.0001"):
            for option in ("--ttft-ms", "--tpot-ms"):
                for command in ("simulate", "replay"):
                    assert option in tandem(command, path, option, bad, code=2).stderr
        assert "--silence-ms" in tandem("simulate", path, "--silence-ms", "0.4", code=2).stderr
        write_trace(path, [0], tpot_ms=-1)
        assert "line 2: tpot_ms" in tandem("simulate", path, code=1).stderr


@test
def test_each_role_has_the_memory_of_its_profile_and_none_is_guessed():
    with tempfile.TemporaryDirectory() as d:
        path, table = os.path.join(d, "trace.jsonl"), os.path.join(d, "table.json")
        write_trace(path, range(0, 2000, 200))
        write_profiles(table)
        s = simulate(path, "--profile", table + ":70B,tp4")["settings"]
        assert s["kv_bytes_per_token"] == 327680 and abs(s["pages"] * 16 * 327680 / 380e9 - 1) < 0.01, s
        assert 0 < s["fit_error"] < 0.1 and "decode_fit_error" not in s, s
        s = simulate(path, "--profile", table + ":70B,tp4", "--decode-profile", table + ":70B,tp8")["settings"]
        assert s["decode_pages"] > 2 * s["pages"] and s["decode_fit_error"] > 0, s
        s = simulate(path, "--profile", "h200-8b", "--decode-profile", table + ":8B")["settings"]
        assert s["fit_error"] is None and s["decode_fit_error"] > 0, s
        out = tandem("simulate", path, "--profile", table + ":8B").stdout
        assert "fitted within" in out and "131072 bytes of KV a token" in out and "by the names of model and GPU" in out, out
        assert "fitted within" not in tandem("simulate", path).stdout
        some = ["simulate", path, "--profile"]
        for args, named in (([table + ":who"], "--kv-bytes"), ([table + ":who", "--kv-bytes", "131072"], "--pool-bytes"),
                            (["1,1,1:1,1,1"], "--kv-bytes"), (["1,1,1:1,1,1", "--kv-bytes", "1"], "--pages"),
                            (["h200-8b", "--decode-profile", "h200-70b"], "--decode-profile"),
                            (["h200-8b", "--decode-profile", "1,1,1:1,1,1"], "--pool-bytes")):
            err = tandem(*some, *args, code=2).stderr
            assert named in err, (args, err)
        tandem(*some, table + ":who", "--kv-bytes", "131072", "--pages", "3000")
        tandem(*some, "h200-8b", "--decode-profile", "h200-70b", "--kv-bytes", "131072")


main()
