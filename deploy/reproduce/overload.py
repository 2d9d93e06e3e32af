#!/usr/bin/env python3
"""A live cluster at twice what it bears: what it still gets done, whom it refuses, how fast, and whether who
comes back is taken.

    overload.py [--build DIR] [--trace FILE] [--prefill 8] [--decode 8] [--rounds 3] [--requests 4000]
                [--rate X] [--times 2] [--against least-loaded] [--retry-share 0.1] [--slow 3] [--json]

Real processes with simulated compute: the steps of one H200 with an 8B model and 10 % log-normal noise; the
router's cost model begins twice as high. The trace is Mooncake's conversation trace with prompts of an eighth
and tokens of KV that take eight times as long, so that a request takes as long as there; all of it, limits
too, takes --slow times as long, so that two cores bear seventeen processes.

First the highest rate at which 90 % of the requests meet TTFT 1 s and TPOT 30 ms of those that do so in an
idle cluster (some prompts are too long for it), by bisection of tandem simulate with the same cluster
(--rate: it is known); then --times that rate, live, tandem and the other policy in turns.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PARSER = argparse.ArgumentParser()
PARSER.add_argument("--build", default=os.environ.get("TANDEM_BUILD_ROOT", os.path.join(ROOT, "build")))
PARSER.add_argument("--trace", default=os.path.join(ROOT, "../shared/traces/mooncake_conversation.jsonl"))
PARSER.add_argument("--prefill", type=int, default=8)
PARSER.add_argument("--decode", type=int, default=8)
PARSER.add_argument("--rounds", type=int, default=3)
PARSER.add_argument("--requests", type=int, default=4000)
PARSER.add_argument("--rate", type=float, default=0)
PARSER.add_argument("--times", type=float, default=2, help="the highest rate")
PARSER.add_argument("--against", default="least-loaded")
PARSER.add_argument("--retry-share", default="0.1")
PARSER.add_argument("--slow", type=float, default=3)
PARSER.add_argument("--json", action="store_true")
ARGS = PARSER.parse_args()
os.environ["TANDEM_BUILD_ROOT"], os.environ["TANDEM_SOURCE_ROOT"] = ARGS.build, ROOT
sys.path.insert(0, os.path.join(ROOT, "tests/cluster"))
from harness import Cluster, TANDEM  # noqa: E402

DIMS = "layers=1,kv_heads=1,heads=1,head_dim=8,hidden=8,ffn=8,vocab=1536,positions=40000"
SHAPE = ["--pages", "60000", "--max-batch", "256", "--max-rows", "768", "--chunk-tokens", "512"]
WORKER = ["--engine", "sim", "--numerics", "bf16", "--pool-bytes", "1G", "--sim-noise", "0.1", *SHAPE]
PREFILL, DECODE = (3526, 148, 0.03424), (5228, 0.2344, 8.088)


def times(coefficients, factor):
    return ",".join(f"{c * factor * ARGS.slow:.6g}" for c in coefficients)


def load(rate):
    return ["--ttft-ms", str(1000 * ARGS.slow), "--tpot-ms", str(30 * ARGS.slow), "--rate", str(rate / ARGS.slow),
            "--retry-share", ARGS.retry_share, "--json"]


def tandem(*args):
    out = subprocess.run([TANDEM, *args], capture_output=True, text=True)
    if out.returncode not in (0, 1):
        sys.exit(f"tandem {' '.join(args)}: {out.stderr}")
    return out.stdout


def simulated(trace, rate):
    return json.loads(tandem("simulate", trace, "--prefill", str(ARGS.prefill), "--decode", str(ARGS.decode),
                             "--profile", times(PREFILL, 1) + ":" + times(DECODE, 1), "--profile-error", "2",
                             "--noise", "0.1", *SHAPE, "--kv-bytes", "16", "--port-gb-s", "0", "--link-ms", "1.5",
                             "--rpc-ms", "0.5", *load(rate)))


def live(trace, policy, rate):
    steps = ["--sim-prefill", times(PREFILL, 1), "--sim-decode", times(DECODE, 1)]
    twice = times(PREFILL, 2) + ":" + times(DECODE, 2)
    with Cluster(dummy=DIMS, prefill=ARGS.prefill, decode=ARGS.decode, worker_args=[*WORKER, *steps],
                 router_args=["--profile", twice, "--policy", policy]) as c:
        return json.loads(tandem("replay", trace, "--router", c.router.address, "--no-progress", *load(rate)))


def most(trace):
    low, high = 0.1, 64
    enough = 0.9 * simulated(trace, low)["attainment"]
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if simulated(trace, middle)["attainment"] >= enough else (low, middle)
    return low


def row(r):
    return {"goodput": r["goodput"]["at_rate"], "attainment_admitted": r["attainment_admitted"],
            "refused": r["refused"], "refused_p50_ms": r["refused_after_ms"]["p50"],
            "refused_p99_ms": r["refused_after_ms"]["p99"],
            "came_back": r["came_back"], "admitted_then": r["admitted_then"], "ttft_error_p50": r["ttft_error"]["p50"],
            "ttft_error_p90": r["ttft_error"]["p90"], "sent_late_p99_ms": r["sent_late_ms"]["p99"], "valid": r["valid"]}


def main():
    with tempfile.TemporaryDirectory() as d:
        trace = os.path.join(d, "trace.jsonl")
        tandem("trace", "slice", ARGS.trace, "--count", str(ARGS.requests), "--length-scale", "0.125", "--output-scale",
               "8", "--output", trace)
        rate = ARGS.rate or most(trace)
        at_most = simulated(trace, rate)["goodput"]["at_rate"]
        rows = {"simulated": [row(simulated(trace, ARGS.times * rate))], "tandem": [], ARGS.against: []}
        for _ in range(ARGS.rounds):
            for policy in ("tandem", ARGS.against):
                rows[policy].append(row(live(trace, policy, ARGS.times * rate)))
    if ARGS.json:
        print(json.dumps({"rate": rate, "goodput": at_most, "rows": rows}))
        return
    print(f"{at_most:.2f} requests/s meet both limits at {rate:.3g} times the trace; at {ARGS.times:g} times that:")
    for policy, runs in rows.items():
        for key in runs[0]:
            values = [r[key] for r in runs if r[key] is not None]
            middle = f"{statistics.median(values):12.4g}" if values else f"{'-':>12}"
            print(f"{policy:14}{key:22}{middle}   " + " ".join(f"{v:.4g}" for v in values))


main()
