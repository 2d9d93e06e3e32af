#!/usr/bin/env python3
"""A live cluster at twice what it bears: what it still gets done, whom it refuses, how fast, and whether who comes back is taken.

    overload.py [--build DIR] [--trace FILE] [--prefill 8] [--decode 8] [--rounds 3] [--requests 8000] [--find-requests 2000]
                [--rate X] [--against least-loaded] [--retry-share 0.1] [--json]

Real processes with simulated compute: the steps of one H200 with an 8B model and 10 % log-normal noise; the router's cost model begins
twice as high. The trace is Mooncake's conversation trace with lengths of a quarter and tokens that take four times as long, so that a
request takes as long as there. First the highest rate at which 90 % of all requests meet TTFT 1 s and TPOT 30 ms (tandem replay
--find-max; --rate: it is known), then twice that rate, tandem and the other policy in turns.
"""
import argparse, json, os, statistics, subprocess, sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PARSER = argparse.ArgumentParser()
PARSER.add_argument("--build", default=os.environ.get("TANDEM_BUILD_ROOT", os.path.join(ROOT, "build")))
PARSER.add_argument("--trace", default=os.path.join(ROOT, "../shared/traces/mooncake_conversation.jsonl"))
PARSER.add_argument("--prefill", type=int, default=8)
PARSER.add_argument("--decode", type=int, default=8)
PARSER.add_argument("--rounds", type=int, default=3)
PARSER.add_argument("--requests", type=int, default=8000)
PARSER.add_argument("--find-requests", type=int, default=2000)
PARSER.add_argument("--rate", type=float, default=0)
PARSER.add_argument("--times", type=float, default=2, help="the highest rate")
PARSER.add_argument("--against", default="least-loaded")
PARSER.add_argument("--retry-share", default="0.1")
PARSER.add_argument("--json", action="store_true")
ARGS = PARSER.parse_args()
os.environ["TANDEM_BUILD_ROOT"], os.environ["TANDEM_SOURCE_ROOT"] = ARGS.build, ROOT
sys.path.insert(0, os.path.join(ROOT, "tests/cluster"))
from harness import Cluster, TANDEM  # noqa: E402

DIMS = "layers=1,kv_heads=1,heads=1,head_dim=8,hidden=8,ffn=8,vocab=1536,positions=40000"
WORKER = ["--engine", "sim", "--numerics", "bf16", "--pages", "60000", "--pool-bytes", "1G", "--max-batch", "256", "--max-rows", "1280",
          "--chunk-tokens", "1024", "--sim-prefill", "3526,74,0.00856", "--sim-decode", "5228,0.1172,8.088", "--sim-noise", "0.1"]
TWICE = "7052,148,0.01712:10456,0.2344,16.176"


def replay(policy, rate, *args):
    with Cluster(dummy=DIMS, prefill=ARGS.prefill, decode=ARGS.decode, worker_args=WORKER,
                 router_args=["--profile", TWICE, "--policy", policy]) as c:
        out = subprocess.run([TANDEM, "replay", ARGS.trace, "--router", c.router.address, "--length-scale", "0.25", "--ttft-ms", "1000",
                              "--tpot-ms", "30", "--rate", str(rate), "--no-progress", "--json", *args], capture_output=True, text=True)
        if out.returncode not in (0, 1):
            sys.exit(f"tandem replay: {out.stderr}")
        return json.loads(out.stdout)


def find_max():
    r = replay("tandem", 8, "--find-max", "--requests", str(ARGS.find_requests))
    best = max((p for p in r["points"] if p["met_share"] >= 0.9), key=lambda p: p["rate"])
    return best["rate"], best["goodput"]


def row(r):
    return {"goodput": r["goodput"]["at_rate"], "attainment_admitted": r["attainment_admitted"],
            "refused": r["refused"], "refused_p50_ms": r["refused_after_ms"]["p50"], "refused_p99_ms": r["refused_after_ms"]["p99"],
            "came_back": r["came_back"], "admitted_then": r["admitted_then"], "ttft_error_p50": r["ttft_error"]["p50"],
            "ttft_error_p90": r["ttft_error"]["p90"], "sent_late_p99_ms": r["sent_late_ms"]["p99"], "valid": r["valid"]}


def main():
    rate, most = (ARGS.rate, None) if ARGS.rate else find_max()
    rows = {"tandem": [], ARGS.against: []}
    for _ in range(ARGS.rounds):
        for policy in rows:
            rows[policy].append(row(replay(policy, rate * ARGS.times, "--requests", str(ARGS.requests), "--retry-share",
                                           ARGS.retry_share)))
    if ARGS.json:
        print(json.dumps({"rate": rate, "goodput": most, "rows": rows}))
        return
    print(f"most: {most} requests/s that meet both limits, at {rate:.3g} times the trace" if most else f"at {rate:.3g} times the trace")
    for policy, runs in rows.items():
        for key in runs[0]:
            values = [r[key] for r in runs]
            middle = statistics.median(v for v in values if v is not None) if any(v is not None for v in values) else float("nan")
            print(f"{policy:14}{key:22}{middle:12.4g}   " + " ".join("-" if v is None else f"{v:.4g}" for v in values))


main()
