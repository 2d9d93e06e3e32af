"""tandem replay: every request of a trace is sent when it is due, equal block ids are equal tokens, and the
report adds up."""
import contextlib, gzip, os, re, shutil, signal, socket, subprocess, tempfile, urllib.request
from harness import *

DIMS = "layers=2,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536,positions=8192"
SIM = ["--engine", "sim", "--numerics", "bf16", "--pages", "3000", "--sim-prefill", "1000,10,0", "--sim-decode", "2000,0,20"]


def write_trace(path, n, gap_ms, n_output=6, head=None, **more):
    """Writes requests with two blocks of 512 tokens that four requests share, and one block of their own."""
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "wt") as f:
        if head:
            f.write(json.dumps(head) + "\n")
        for i in range(n):
            ids = [i // 4 * 10, i // 4 * 10 + 1, 1000 + i]
            line = {"timestamp": i * gap_ms, "input_length": 1200, "output_length": n_output, "hash_ids": ids}
            f.write(json.dumps({**line, **{k: v(i) for k, v in more.items() if v(i) is not None}}) + "\n")


def tandem(*args, timeout=60, code=0, env=None, input=None):
    out = subprocess.run([TANDEM, *args], capture_output=True, text=True, timeout=timeout * SLOW, env=env, input=input)
    assert out.returncode == code, (out.returncode, out.stdout[-2000:], out.stderr[-2000:])
    return out


def replay(address, path, *args, timeout=60):
    return json.loads(tandem("replay", path, "--router", address, "--json", *args, timeout=timeout).stdout)


@test
def test_replay_sends_all_and_reports_what_came():
    with tempfile.TemporaryDirectory() as d, Cluster(dummy=DIMS, prefill=1, decode=1, worker_args=SIM) as c:
        path = os.path.join(d, "trace.jsonl")
        write_trace(path, 40, 50)
        r = replay(c.router.address, path)
        assert (r["sent"], r["answered"], r["refused"], r["failed"], r["met"]) == (40, 40, 0, 0, 40), r
        assert 1.94 < r["arrivals_ms"] / 1e3 < 2.1 and r["ttft_ms"]["p50"] > 0 and r["tpot_ms"]["mean"] > 0, r
        assert r["completed"] == 40 and r["total_output_tokens"] == 240 and r["itl_ms"]["n"] == 200, r
        assert 0.4 < r["cached_share"] <= 3 / 4 * 1024 / 1200, r  # three of four requests find two blocks
        assert [w["name"] for w in r["workers"]] == ["prefill-0", "decode-0"], r["workers"]
        r = replay(c.router.address, path, "--ttft-ms", "0.3", "--retry-share", "1")
        assert r["refused"] == 40 and r["answered"] == 0 and r["attainment"] == 0, r
        assert r["reasons"] == [{"reason": "slo.ttft_ms can't be met", "refused": 40, "failed": 0,
                                 "prompt_tokens": 40 * 1200}], r["reasons"]
        assert r["offered"]["refused_token_share"] == 1 and r["by_prompt_length"][0]["requests"] == 40, r["offered"]
        r = replay(c.router.address, path, "--ttft-ms", "0.2", "--requests", "10")  # limits may be fractions
        assert (r["ttft_slo_ms"], r["settings"]["ttft_ms"], r["refused"]) == (0.2, 0.2, 10), r
        limits = {"short": 0.4, "long": 60000.5, "negative": -1, "tiny": 1e-4, "text": "x"}
        lines = [{"id": k, "prompt_ids": [1] * 300, "max_tokens": 4, "ttft_ms": ms} for k, ms in limits.items()]
        out = tandem("generate", "--router", c.router.address, "--jsonl", code=1, input="\n".join(json.dumps(o) for o in lines)).stdout
        errors = {o["id"]: o.get("error", {"code": "OK", "message": "ttft_ms"}) for o in map(json.loads, out.splitlines())}
        assert all("ttft_ms" in e["message"] for e in errors.values()), errors
        assert {k: e["code"] for k, e in errors.items()} == {"short": "RESOURCE_EXHAUSTED", "long": "OK", "negative": "INVALID_ARGUMENT",
                                                             "tiny": "INVALID_ARGUMENT", "text": "INVALID_ARGUMENT"}, errors
        assert "--tpot-ms" in tandem("generate", "--tpot-ms", "nan", "x", code=2).stderr
        r = replay(c.router.address, path, "--length-scale", "0.1", "--rate", "10", "--requests", "10")
        assert r["answered"] == 10 and r["arrivals_ms"] < 100, r
        c.audit()


@test
def test_replay_that_is_interrupted_reports_what_ran():
    with tempfile.TemporaryDirectory() as d, Cluster(dummy=DIMS, prefill=0, decode=1, worker_args=SIM) as c:
        path = os.path.join(d, "trace.jsonl")
        write_trace(path, 100, 200)
        p = subprocess.Popen([TANDEM, "replay", path, "--router", c.router.address, "--json", "--processes", "2"],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: c.status()["finished"] >= 2, 10, "some are answered")
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=20 * SLOW)
        r = json.loads(out)
        assert p.returncode == 0 and 2 <= r["sent"] < 100 and r["answered"] == r["sent"], (r, err)
        assert "in flight" in err or r["sent"] < 10, err
        write_trace(path, 3, 1, n_output=6000)  # 2 ms a token
        p = subprocess.Popen([TANDEM, "replay", path, "--router", c.router.address, "--json"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
        wait_until(lambda: c.status()["running"] == 3, 10, "all are under way")
        p.send_signal(signal.SIGINT)
        p.send_signal(signal.SIGINT)
        while p.poll() is None:  # two signals at once may count as one
            p.send_signal(signal.SIGINT)
            time.sleep(0.1)
        r = json.loads(p.communicate()[0])
        assert (r["sent"], r["answered"], r["cut_short"] + r["failed"]) == (3, 0, 3) and r["duration"] < 8 * SLOW, r
        tandem("replay", "/nonexistent", "--router", c.router.address, code=1)
        bad = os.path.join(d, "bad.jsonl")
        with open(bad, "w") as f:
            f.write('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}\n{"timestamp": "x"}\n')
        assert "bad.jsonl: line 2: timestamp" in tandem("replay", bad, "--router", c.router.address, code=1).stderr


@test
def test_replay_with_a_dead_sender_is_no_valid_run():
    """A crash stays a crash: nothing catches the signal."""
    with tempfile.TemporaryDirectory() as d, Cluster(dummy=DIMS, prefill=0, decode=1, worker_args=SIM) as c:
        path = os.path.join(d, "trace.jsonl")
        write_trace(path, 100, 50)
        p = subprocess.Popen([TANDEM, "replay", path, "--router", c.router.address, "--json", "--processes", "2"],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: c.status()["finished"] >= 2, 10, "some are answered")
        children = open(f"/proc/{p.pid}/task/{p.pid}/children").read().split()
        os.kill(int(children[-1]), signal.SIGSEGV)
        out, err = p.communicate(timeout=60 * SLOW)
        r = json.loads(out)
        assert p.returncode == 1 and not r["valid"], (p.returncode, r["valid"])
        assert r["why_invalid"] == "1 of the senders ended early", r["why_invalid"]
        assert "Caught signal" not in err and r["answered"] < 100, err


@test
def test_replay_with_several_processes_is_one_run():
    with tempfile.TemporaryDirectory() as d, Cluster(dummy=DIMS, prefill=1, decode=2, worker_args=SIM) as c:
        path, out, page = (os.path.join(d, n) for n in ("trace.jsonl.gz", "out.json", "out.html"))
        write_trace(path, 60, 20, n_output=8)
        r = replay(c.router.address, path, "--processes", "3", "--output", out, "--html", page, "--poisson", "40")
        assert (r["sent"], r["answered"], r["itl_ms"]["n"]) == (60, 60, 60 * 7), r
        assert 25 < r["offered_rate"] < 60, r["offered_rate"]
        with open(out) as f:
            full = json.load(f)
        q = full["requests"]
        assert q["n"] == 60 and len(q["token_ms"]) == 60 and all(len(t) == 8 for t in q["token_ms"]), q.keys()
        assert q["arrived_ms"] == sorted(q["arrived_ms"]) and full["settings"]["poisson"] == 40
        for i, times in enumerate(q["token_ms"]):
            assert times == sorted(times) and abs(times[0] - q["ttft_ms"][i]) < 0.01 and abs(times[-1] - q["e2e_ms"][i]) < 0.01
            assert abs(q["ttft_ms"][i] + 7 * q["tpot_ms"][i] - q["e2e_ms"][i]) < 0.001
        names = [w["name"] for w in full["workers"]]
        decoders = q["decode"] if isinstance(q["decode"], list) else [q["decode"]] * 60
        assert {names[k] for k in decoders} <= {"decode-0", "decode-1", "prefill-0"}, decoders
        with open(page) as f:
            text = f.read()
        assert text.lower().startswith("<!doctype html>") and "http" + "://" not in text.replace("http://www.w3.org/", "")
        c.audit()


@test
def test_replay_in_closed_loop_keeps_so_many_under_way():
    with tempfile.TemporaryDirectory() as d, Cluster(dummy=DIMS, prefill=1, decode=1, worker_args=SIM) as c:
        path, out = os.path.join(d, "trace.jsonl"), os.path.join(d, "out.json")
        write_trace(path, 30, 100000)  # a trace whose own times would take an hour
        r = replay(c.router.address, path, "--concurrency", "4", "--processes", "2", "--output", out)
        assert (r["sent"], r["answered"]) == (30, 30) and r["duration"] < 60, r
        with open(out) as f:
            q = json.load(f)["requests"]
        edges = sorted([(a, 1) for a in q["arrived_ms"]] + [(a + e, -1) for a, e in zip(q["arrived_ms"], q["e2e_ms"])])
        n = most = 0
        for _, step in edges:
            n += step
            most = max(most, n)
        assert 3 <= most <= 5, most  # a stream ends shortly after its last token


@test
def test_replay_sends_a_step_when_the_one_before_has_ended():
    head = {"tandem_trace": 1, "block_tokens": 512}
    with tempfile.TemporaryDirectory() as d, Cluster(dummy=DIMS, prefill=1, decode=1, worker_args=SIM) as c:
        path, out = os.path.join(d, "trace.jsonl"), os.path.join(d, "out.json")
        write_trace(path, 8, 1, head=head, id=lambda i: f"r{i}", follows=lambda i: f"r{i - 1}" if i % 4 else None,
                    delay_ms=lambda i: 30, tenant=lambda i: "ab"[i % 2], session=lambda i: f"s{i // 4}",
                    ttft_ms=lambda i: 60000)
        r = replay(c.router.address, path, "--processes", "2", "--output", out)
        assert (r["answered"], r["tenants"]) == (8, ["", "a", "b"]), r
        with open(out) as f:
            q = json.load(f)["requests"]
        for i in (1, 2, 3, 5, 6, 7):
            gap = q["arrived_ms"][i] - q["arrived_ms"][i - 1] - q["e2e_ms"][i - 1]
            assert gap >= 29.9, (i, gap, q)
        assert q["tenant"] == [1, 2] * 4 and q["ttft_slo_ms"] == 60000, q


@test
def test_compare_tells_a_slower_cluster_from_the_same_one():
    with tempfile.TemporaryDirectory() as d:
        path, a, b, slow, page = (os.path.join(d, n) for n in ("t.jsonl", "a.json", "b.json", "slow.json", "page.html"))
        write_trace(path, 60, 40)
        for attempt in range(3):  # other programs may take a core for a while
            for out, prefill in ((a, "1000,10,0"), (b, "1000,10,0"), (slow, "1000,150,0")):
                with Cluster(dummy=DIMS, prefill=1, decode=1,
                             worker_args=[*SIM[:-4], "--sim-prefill", prefill, *SIM[-2:]]) as c:
                    replay(c.router.address, path, "--output", out, "--label", os.path.basename(out), "--ttft-ms", "60000")
            r = json.loads(tandem("compare", a, slow, "--json", "--html", page).stdout)
            rows = {row["name"]: row for row in r["rows"]}
            if rows["TTFT p50"]["verdict"] == "worse":
                break
        assert r["paired"] and (r["a"], r["b"]) == (["a.json"], ["slow.json"]), r
        assert rows["TTFT p50"]["verdict"] == "worse" and rows["TTFT p50"]["low"] > 0, rows["TTFT p50"]
        assert "slow.json" in open(page).read()
        r = json.loads(tandem("compare", a, b, "vs", slow, "--json").stdout)
        assert len(r["a"]) == 2 and not r["paired"], r
        assert "one run a side" in tandem("compare", a, b).stdout
        tandem("compare", a, code=2)
        with open(a) as f:
            report = json.load(f)
        report["requests"]["outcome"] = 7
        with open(b, "w") as f:
            json.dump(report, f)
        assert "b.json: requests.outcome[0]" in tandem("compare", a, b, code=1).stderr


@test
def test_trace_command_makes_cuts_and_describes():
    with tempfile.TemporaryDirectory() as d:
        made, cut, fitted, azure = (os.path.join(d, n) for n in ("made.jsonl", "cut.jsonl", "fitted.jsonl", "azure.csv"))
        said = tandem("trace", "synth", "--requests", "3000", "--rate", "5", "--turns", "3", "--system", "2", "--block-tokens", "64",
                      "--tenants", "2", "--output", made).stderr
        s = json.loads(tandem("trace", "stat", made, "--json", "--capacity", "100,100000").stdout)
        assert f"made: 3000 requests in {s['span_s']:.1f} s, {s['rate']:.3f}/s" in said, said
        assert (s["format"], s["requests"], s["tenants"], s["block_tokens"]) == ("tandem", 3000, 2, 64), s
        assert 4.5 < s["rate"] < 5.5 and 0 < s["hits"][0]["full_blocks_only"]["lru"] < s["hits"][1]["full_blocks_only"]["lru"], s
        assert abs(s["hits"][1]["with_partial_last_blocks"]["lru"] - s["ceiling_with_partial_last_blocks"]["block_share"]) < 1e-9
        assert "tandem, 3000 requests" in tandem("trace", "stat", made).stdout
        tandem("trace", "slice", made, "--from", "100", "--to", "200", "--tenant", "t1", "--rate", "2", "--output", cut)
        c = json.loads(tandem("trace", "stat", cut, "--json").stdout)
        assert 100 < c["requests"] < 400 and c["span_s"] < 50, c
        tandem("trace", "synth", "--fit", made, "--requests", "3000", "--output", fitted)
        f = json.loads(tandem("trace", "stat", fitted, "--json").stdout)
        assert abs(f["prompt"]["p50"] / s["prompt"]["p50"] - 1) < 0.15 and abs(f["rate"] / s["rate"] - 1) < 0.25, (f, s)
        tandem("trace", "convert", made, "--format", "azure", "--output", azure)
        a = json.loads(tandem("trace", "stat", azure, "--json").stdout)
        assert (a["format"], a["requests"], a["blocks"], a["input_tokens"]) == ("azure", 3000, 0, s["input_tokens"]), a
        tandem("trace", "slice", made, "--from", "1000000", code=1)
        tandem("trace", code=2)
        tandem("trace", "stat", made, "--capacity", "x", code=2)


@test
def test_replay_finds_the_highest_rate():
    with tempfile.TemporaryDirectory() as d, Cluster(dummy=DIMS, prefill=1, decode=1, worker_args=SIM) as c:
        path = os.path.join(d, "trace.jsonl")
        # A prefill takes about 5 to 13 ms, so more than a hundred a second is impossible.
        write_trace(path, 60, 50)
        r = replay(c.router.address, path, "--find-max", "--ttft-ms", "200", "--tpot-ms", "200", "--find-rounds", "8", "--rate", "2", timeout=120)
        points = r["points"]
        assert 3 <= len(points) <= 9 and [p["rate"] for p in points] == sorted(p["rate"] for p in points), points
        best = r["goodput"]["distserve"]
        assert best is not None and 10 < 2 * best < 1500, r["goodput"]
        assert any(p["met_share"] < 0.9 for p in points), points
        assert r["goodput"]["distserve_under"] > best, r["goodput"]
        out = tandem("replay", path, "--router", c.router.address, "--find-max", "--ttft-ms", "10s", "--find-rounds", "2").stdout
        assert "distserve at least" in out and "the limit was not reached" in out, out
        tandem("replay", path, "--router", c.router.address, "--find-max", code=2)


@test
def test_replay_breaks_the_cluster_on_schedule():
    run = tempfile.mkdtemp(prefix="tandem-up-")
    try:
        tandem("up", "--run-dir", run, "--model", DEMO, "--listen", "127.0.0.1:0", "--detach", "--decode", "2", "--pool-bytes",
               "8M", "--no-store", "--silence-ms", str(1000 * SLOW))
        with open(os.path.join(run, "router.address")) as f:
            router = f.read().strip()
        path, out = os.path.join(run, "trace.jsonl"), os.path.join(run, "out.json")
        write_trace(path, 40, 100, n_output=20)

        def pid_of(name):
            with open(os.path.join(run, "cluster.json")) as f:
                return next((p["pid"] for p in json.load(f)["processes"] if p["name"] == name), 0)

        def names():
            with open(os.path.join(run, "cluster.json")) as f:
                return [p["name"] for p in json.load(f)["processes"]]
        before = pid_of("decode-1")
        bad = tandem("replay", path, "--router", router, "--run-dir", run, "--at", "1s:kill:decode-7", code=2)
        assert "no process 'decode-7'" in bad.stderr, bad.stderr
        bad = tandem("replay", path, "--router", router, "--run-dir", run, "--at", "1s:faults:decode-1/wire.payload:fail", code=2)
        assert "tandem up --faults" in bad.stderr, bad.stderr
        for wrong in ("kill:decode-1", "1s:burn:decode-1", "1s:kill", "1s:slow:decode-1/1", "1s:kill:decode-1/3"):
            assert "--at" in tandem("replay", path, "--at", wrong, code=2).stderr
        r = replay(router, path, "--length-scale", "0.1", "--run-dir", run, "--output", out, "--at",
                   "1s:kill:decode-1,500ms:slow:prefill-0/3,2s:cont:prefill-0")
        assert r["sent"] == 40 and r["answered"] + r["refused"] + r["failed"] + r["cut_short"] == 40, r
        assert r["answered"] >= 35, r  # a request that lost its worker is planned anew
        assert [f["action"] for f in r["settings"]["faults"]] == ["slow", "kill", "cont"], r["settings"]
        wait_until(lambda: pid_of("decode-1") not in (0, before), 20, "decode-1 is started again")
        out = tandem("replay", path, "--router", router, "--length-scale", "0.1", "--run-dir", run, "--json", "--at",
                     "100ms:scale:decode=3,300ms:stop:decode-1,1500ms:cont:decode-1,9m:kill:router")
        r = json.loads(out.stdout)
        assert r["sent"] == 40 and r["answered"] >= 35 and "over before kill router" in out.stderr, (r, out.stderr)
        wait_until(lambda: pid_of("decode-2") > 0, 20, "a third decode worker is there")
        r = replay(router, path, "--length-scale", "0.1", "--run-dir", run, "--at", "500ms:drain:decode-2")
        assert r["answered"] >= 35, r
        wait_until(lambda: "decode-2" not in names() or not pid_of("decode-2"), 20, "decode-2 has ended")
        state = open(f"/proc/{pid_of('prefill-0')}/stat").read().rsplit(")", 1)[1].split()[0]
        assert state != "T", "prefill-0 goes on"
    finally:
        with contextlib.suppress(Exception):
            tandem("down", "--run-dir", run)
        shutil.rmtree(run, ignore_errors=True)


class FaultyCluster:
    """tandem up --faults with a store, and the faults that its processes report."""

    def __init__(self):
        self.run, self.metrics = tempfile.mkdtemp(prefix="tandem-up-"), []
        env = dict(os.environ)
        for part in ("PREFILL", "DECODE", "KVSTORE"):
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                self.metrics.append(f"127.0.0.1:{s.getsockname()[1]}")
            env[f"TANDEM_{part}_METRICS_LISTEN"] = self.metrics[-1]
        tandem("up", "--run-dir", self.run, "--model", DEMO, "--listen", "127.0.0.1:0", "--detach", "--faults", "--plan", "split",
               "--pool-bytes", "8M", "--store-dram", "8M", "--store-ssd", "256M", "--silence-ms", str(1000 * SLOW), env=env)
        self.router = self.file("router.address").strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            tandem("down", "--run-dir", self.run)
        shutil.rmtree(self.run, ignore_errors=True)

    def file(self, name):
        with open(os.path.join(self.run, name), errors="replace") as f:
            return f.read()

    def faults(self):
        """Faults made so far, by (site, kind)."""
        counts = {}
        for address in self.metrics:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                for site, kind, n in re.findall(r'^tandem_faults_total{site="([^"]+)",kind="([^"]+)"} (\d+)', answer.read().decode(), re.M):
                    counts[site, kind] = counts.get((site, kind), 0) + int(n)
        return {what: n for what, n in counts.items() if n}

    def is_over(self, name):
        """Whether the process reported no faults at its start, and has reported so again."""
        return self.file(f"logs/{name}.log").count("no faults are made on purpose") > 1

    def answers(self):
        ask = [{"id": str(i), "prompt_ids": list(range(i, i + 200)), "max_tokens": 12, "greedy": True, "ignore_eos": True}
               for i in range(4)]
        lines = tandem("generate", "--jsonl", "--router", self.router, input="\n".join(map(json.dumps, ask))).stdout.splitlines()
        return {r["id"]: r["token_ids"] for r in map(json.loads, lines)}

    def start(self, path, at):
        return subprocess.Popen([TANDEM, "replay", path, "--router", self.router, "--length-scale", "0.1", "--json", "--run-dir",
                                 self.run, "--at", at], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@test
def test_replay_makes_wire_and_disk_fail_for_a_while():
    with FaultyCluster() as c:
        path = os.path.join(c.run, "trace.jsonl")
        write_trace(path, 40, 75, n_output=8)
        for wrong, why in (("store-0/disk.put:burn", "'disk.put:burn'"), ("store-0", "the script is missing"),
                           ("store-0/@x", "not the name of a file"),
                           ("store-9/disk.put:fail", "no process 'store-9'"), ("router/rpc.message:drop", "of the router")):
            bad = tandem("replay", path, "--router", c.router, "--run-dir", c.run, "--at", "1s:faults:" + wrong, code=2)
            assert "--at" in bad.stderr and why in bad.stderr, (wrong, bad.stderr)
        assert os.stat(os.path.join(c.run, "faults")).st_mode & 0o777 == 0o700
        want = c.answers()
        assert len(want) == 4 and c.faults() == {}, (want, c.faults())
        p = c.start(path, "200ms:faults:prefill-0/seed=2 wire.payload:delay=0.5/5ms,200ms:faults:store-0/disk.put:fail,"
                    "1800ms:faults:prefill-0/,1800ms:faults:store-0/")
        expected = {("wire.payload", "delay"), ("disk.put", "fail")}
        wait_until(lambda: set(c.faults()) == expected, 10, lambda: f"wire and disk fail: {c.faults()}")
        assert c.answers() == want
        wait_until(lambda: c.is_over("prefill-0") and c.is_over("store-0"), 10, "faults are over")
        made = c.faults()
        r = json.loads(p.communicate(timeout=60 * SLOW)[0])
        assert (r["sent"], r["answered"]) == (40, 40), r
        assert [(f["target"], f["script"]) for f in r["settings"]["faults"]] == [
            ("prefill-0", "seed=2 wire.payload:delay=0.5/5ms"), ("store-0", "disk.put:fail"), ("prefill-0", ""), ("store-0", "")], r
        assert c.answers() == want and c.faults() == made, (c.faults(), made)
        tandem("audit", "--router", c.router)


@test
def test_faults_that_a_replay_sets_end_with_it():
    slow = "wire.message:delay=0.1/2ms"
    with FaultyCluster() as c:
        path = os.path.join(c.run, "trace.jsonl")
        write_trace(path, 200, 50, n_output=4)
        p = c.start(path, f"0s:faults:store-0/{slow},0s:faults:decode-0/{slow},300ms:kill:decode-0")
        log = lambda: c.file("logs/decode-0.log")
        wait_until(lambda: log().count(f"script='{slow}'") == 2, 20, "decode-0 was started again, with its faults")
        p.send_signal(signal.SIGINT)
        r = json.loads(p.communicate(timeout=60 * SLOW)[0])
        assert 0 < r["sent"] < 200, r
        for name in ("store-0", "decode-0"):
            assert c.file("faults/" + name) == ""
            wait_until(lambda: c.is_over(name), 10, name + " makes no faults any more")
        made = c.faults()
        c.answers()
        assert c.faults() == made, (made, c.faults())


@test
def test_simulate_takes_the_step_times_that_bench_measured():
    with tempfile.TemporaryDirectory() as d:
        profile, trace = os.path.join(d, "profile.json"), os.path.join(d, "trace.jsonl")
        dims = "layers=2,kv_heads=1,heads=2,head_dim=32,hidden=64,ffn=128,vocab=1536,positions=700"
        measured = tandem("bench", "--profile", profile, "--dummy", dims, "--seconds", "0.01", "--json")
        rows = [json.loads(x) for x in measured.stdout.splitlines()]
        # It prints its progress.
        done, total = re.findall(r"profile: (\d+) of (\d+) rows", measured.stderr)[-1]
        assert done == total and int(total) > 10, measured.stderr
        times = [r["value"] for r in rows if r["unit"] == "ms"]
        with open(profile) as f:
            p, = json.load(f)["profiles"]
        measured = [r["ms"] for name in ("prefill", "prefill_prefix", "decode", "mixed") for r in p[name]]
        assert len(measured) == len(times) and all(0 < ms < 1000 for ms in times), (rows, p)
        assert {r["isl"] for r in p["prefill"]} == {16, 32, 64, 128, 256, 512} and {r["batch"] for r in p["decode"]} == {1, 2, 4, 8, 16}
        # Two layers, keys and values, one head of 32 numbers, f32.
        assert p["kv_bytes_per_token"] == 2 * 2 * 32 * 4, p
        write_trace(trace, 8, 50)
        r = json.loads(tandem("simulate", trace, "--prefill", "1", "--decode", "1", "--pages", "3000", "--profile", profile, "--json").stdout)
        assert r["answered"] == 8 and r["ttft_ms"]["p50"] > 0 and r["tpot_ms"]["p50"] > 0, r
        out = tandem("bench", "--profile", os.path.join(d, "no/such"), "--dummy", dims, "--seconds", "0.01", code=1)
        assert "--profile" in out.stderr and "No such file" in out.stderr, out.stderr


@test
def test_simulate_reports_its_power_budget():
    with tempfile.TemporaryDirectory() as d:
        trace = os.path.join(d, "trace.jsonl")
        write_trace(trace, 8, 50)
        some = ["simulate", trace, "--prefill", "1", "--decode", "2", "--pages", "3000"]
        power = json.loads(tandem(*some, "--power-budget", "2100", "--json").stdout)["settings"]["power"]
        assert power["budget_w"] == 2100 and power["first"] == 2 and power["control"] == "polca" and len(power["level_s"]) == 5, power
        assert "power" not in json.loads(tandem(*some, "--json").stdout)["settings"]
        assert " % of 2.1 kW, 0 brakes" in tandem(*some, "--power-budget", "2100").stdout
        for wrong, named in ((["--profile", "1,1,1:1,1,1", "--kv-bytes", "131072"], "--power-budget"), (["--power-first", "4"], "--power-first")):
            assert named in tandem(*some, "--power-budget", "2100", *wrong, code=2).stderr


main()
