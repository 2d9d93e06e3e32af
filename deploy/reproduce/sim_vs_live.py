#!/usr/bin/env python3
"""What tandem simulate predicts beside what the same cluster does: real processes, real messages, steps that
take the time that the cost model says (--engine sim).

    sim_vs_live.py [--build DIR] [--trace FILE] [--runs 5] [--requests 400] [--rate 4]
    sim_vs_live.py --engine cpu ...

The trace is Mooncake's conversation trace with lengths of an eighth, so that pages stay small. Prints mean,
p50, p90 and p99 of TTFT and TPOT of the simulation, of each live run, and of the live runs' medians; exit
code 1: mean, p50 or p90 differ by more than 5 %, or p99 by more than 10 %.

--engine cpu: workers compute, one thread each, a made-up model of 29 million parameters; the simulation has
the profile that tandem bench measured before, beside a second copy of itself, as workers of one machine share
its memory (--profile FILE: it was measured). 1 + 1 workers, prompts of a thirty-second, answers of a quarter,
the trace's own rate, 15 % for all figures.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PARSER = argparse.ArgumentParser()
PARSER.add_argument("--build", default=os.environ.get("TANDEM_BUILD_ROOT", os.path.join(ROOT, "build")))
PARSER.add_argument("--trace", default=os.path.join(ROOT, "../shared/traces/mooncake_conversation.jsonl"))
PARSER.add_argument("--runs", type=int, default=5)
PARSER.add_argument("--requests", type=int, default=400)
PARSER.add_argument("--rate")
PARSER.add_argument("--prefill", type=int)
PARSER.add_argument("--decode", type=int)
PARSER.add_argument("--engine", choices=("sim", "cpu"), default="sim")
PARSER.add_argument("--profile")
PARSER.add_argument("--plan", default="auto")
PARSER.add_argument("--limits", default="0,0", help="TTFT,TPOT in ms")
PARSER.add_argument("--link-ms", default="1.5", help="a hand-over on this machine, beyond its bytes")
PARSER.add_argument("--rpc-ms", default="0.5", help="a message between two processes on this machine")
ARGS = PARSER.parse_args()
os.environ["TANDEM_BUILD_ROOT"], os.environ["TANDEM_SOURCE_ROOT"] = ARGS.build, ROOT
sys.path.insert(0, os.path.join(ROOT, "tests/cluster"))
from harness import Cluster, TANDEM  # noqa: E402

SHAPE = ["--pages", "8000", "--chunk-tokens", "1024", "--max-rows", "1088", "--max-batch", "64"]
PREFILL, DECODE = "4000,40,0.001", "8000,0.05,100"
if ARGS.engine == "sim":
    DIMS = "layers=2,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536,positions=32768"
    LIVE, KV_BYTES = ["--engine", "sim", "--numerics", "bf16", "--sim-prefill", PREFILL, "--sim-decode", DECODE,
                      *SHAPE], "512"
    SCALE, ANSWERS, RATE, WORKERS, CLOSE, CLOSE_P99 = "0.125", [], "4", 2, 0.05, 0.10
else:
    DIMS = "layers=8,kv_heads=4,heads=8,head_dim=64,hidden=512,ffn=1536,vocab=1536,positions=8192"
    SHAPE = ["--pages", "4000", "--chunk-tokens", "512", "--max-rows", "576", "--max-batch", "64"]
    LIVE, KV_BYTES = ["--numerics", "bf16", "--pool-bytes", "1G", *SHAPE], "8192"
    SCALE, ANSWERS, RATE, WORKERS, CLOSE, CLOSE_P99 = "0.03125", ["--output-scale", "8"], "1", 1, 0.15, 0.15
RATE, N_PREFILL, N_DECODE = ARGS.rate or RATE, ARGS.prefill or WORKERS, ARGS.decode or WORKERS
TTFT, TPOT = ARGS.limits.split(",")


def tandem(*args):
    out = subprocess.run([TANDEM, *args], capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"tandem {' '.join(args)}: {out.stderr}{out.stdout}")
    return out.stdout


def figures(report):
    return {(m, s): report[m + "_ms"][s] for m in ("ttft", "tpot") for s in ("mean", "p50", "p90", "p99")}


def profile(d):
    if ARGS.engine == "sim":
        return PREFILL + ":" + DECODE
    path = ARGS.profile or os.path.join(d, "profile.json")
    if not ARGS.profile:
        bench = ["bench", "profile", "--dummy", DIMS, "--numerics", "bf16", "--threads", "1"]
        beside = subprocess.Popen([TANDEM, *bench], stdout=subprocess.DEVNULL)
        print(tandem(*bench, "--profile", path))
        beside.terminate()
        beside.wait()
    return path


def main():
    with tempfile.TemporaryDirectory() as d:
        trace = os.path.join(d, "trace.jsonl")
        tandem("trace", "slice", ARGS.trace, "--count", str(ARGS.requests), "--length-scale", SCALE, *ANSWERS,
               "--output", trace)
        limits = ["--ttft-ms", TTFT, "--tpot-ms", TPOT]
        sim = json.loads(tandem("simulate", trace, "--json", "--prefill", str(N_PREFILL), "--decode", str(N_DECODE),
                                "--profile",
                                profile(d), *SHAPE, "--kv-bytes", KV_BYTES, "--port-gb-s", "0", "--plan", ARGS.plan,
                                "--rate", RATE, "--link-ms", ARGS.link_ms, "--rpc-ms", ARGS.rpc_ms, *limits))
        live = []
        for _ in range(ARGS.runs):
            with Cluster(dummy=DIMS, prefill=N_PREFILL, decode=N_DECODE, plan=ARGS.plan, worker_args=LIVE) as c:
                live.append(json.loads(tandem("replay", trace, "--router", c.router.address, "--json", "--no-progress",
                                              "--rate", RATE, *limits)))
    show(sim, live)


def show(sim, live):
    predicted, seen, ok = figures(sim), [figures(r) for r in live], True
    print(f"{'':12}{'simulated':>10}" + "".join(f"{'live ' + str(i + 1):>10}" for i in range(len(live)))
          + f"{'median':>10}{'off by':>9}")
    for key, value in predicted.items():
        median = statistics.median(f[key] for f in seen)
        off = value / median - 1
        good = abs(off) <= (CLOSE_P99 if key[1] == "p99" else CLOSE)
        ok &= good
        print(f"{key[0].upper() + ' ' + key[1]:12}{value:10.2f}" + "".join(f"{f[key]:10.2f}" for f in seen) +
              f"{median:10.2f}{100 * off:8.1f}%{'' if good else '  <--'}")
    for name in ("answered", "refused", "cached_share"):
        print(f"{name:12}{sim[name]:10.6g}" + "".join(f"{r[name]:10.6g}" for r in live))
    print("all live runs sent in time" if all(r["valid"] for r in live) else "NOT VALID: a live run was sent late")
    sys.exit(0 if ok else 1)


main()
