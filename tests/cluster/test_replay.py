"""tandem replay: every request of a trace is sent when it is due, equal block ids are equal tokens, and the report adds up."""
import os, signal, subprocess, tempfile
from harness import *

DIMS = "layers=2,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536,positions=8192"
SIM = ["--engine", "sim", "--numerics", "bf16", "--pages", "3000", "--sim-prefill", "1000,10,0", "--sim-decode", "2000,0,20"]


def write_trace(path, n, gap_ms):
    with open(path, "w") as f:
        for i in range(n):  # two blocks of 512 that four share, then one of its own
            ids = [i // 4 * 10, i // 4 * 10 + 1, 1000 + i]
            f.write(json.dumps({"timestamp": i * gap_ms, "input_length": 1200, "output_length": 6, "hash_ids": ids}) + "\n")


def replay(c, path, *args):
    out = subprocess.run([TANDEM, "replay", path, "--router", c.router.address, "--json", *args], capture_output=True, text=True,
                         timeout=60 * SLOW)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@test
def test_replay_sends_all_and_reports_what_came():
    with tempfile.TemporaryDirectory() as d, Cluster(dummy=DIMS, prefill=1, decode=1, worker_args=SIM) as c:
        path = os.path.join(d, "trace.jsonl")
        write_trace(path, 40, 50)
        r = replay(c, path)
        assert (r["sent"], r["ok"], r["refused"], r["failed"], r["met"]) == (40, 40, 0, 0, 40), r
        assert 1.9 < r["duration_s"] < 2.0 and r["ttft_ms"]["p50"] > 0 and r["tpot_ms"]["mean"] > 0, r
        assert 0.4 < r["cached_share"] <= 3 / 4 * 1024 / 1200, r  # three of four find two blocks
        r = replay(c, path, "--ttft-ms", "1", "--retry-share", "1")
        assert r["refused"] == 40 and r["ok"] == 0 and r["attainment"] == 0, r
        r = replay(c, path, "--length-scale", "0.1", "--rate", "10", "--requests", "10")
        assert r["ok"] == 10 and r["duration_s"] < 0.1, r
        c.audit()


@test
def test_replay_that_is_interrupted_reports_what_ran():
    with tempfile.TemporaryDirectory() as d, Cluster(dummy=DIMS, prefill=0, decode=1, worker_args=SIM) as c:
        path = os.path.join(d, "trace.jsonl")
        write_trace(path, 100, 200)
        p = subprocess.Popen([TANDEM, "replay", path, "--router", c.router.address, "--json"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
        wait_until(lambda: c.status()["finished"] >= 2, 10, "some are answered")
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=20 * SLOW)
        r = json.loads(out)
        assert p.returncode == 0 and 2 <= r["sent"] < 100 and r["ok"] == r["sent"], (r, err)
        bad = subprocess.run([TANDEM, "replay", "/nonexistent", "--router", c.router.address], capture_output=True, text=True)
        assert bad.returncode == 1 and "/nonexistent" in bad.stderr, bad.stderr


main()
