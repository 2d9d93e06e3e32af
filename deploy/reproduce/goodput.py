#!/usr/bin/env python3
"""Goodput against load, on every bed of docs/reproductions.md: tandem, the others, and what must hold between
them.

    goodput.py [--beds NAME,...] [--rates 0.5,0.75,1,1.5,2,3,4] [--seeds 5] [--quick] [--json] [--svg DIR]
    [--from FILE]

A bed is a profile, two pools, two limits and a trace. For each bed the script finds the maximum-goodput rate:
the highest rate at which 90 % of the requests meet both limits under tandem (where prompts are too long for
the limits even on idle workers: 90 % of those that meet them there). Then it runs each policy at --rates
times that rate, with lengths of answers known and not known, step times with 5 % noise, and takes the median
of --seeds seeds. Two simulations run at a time. Goodput is counted over the time in which requests arrive:
how long the last answers take after that says nothing about the load.

What must hold (each violation is named, and the exit code is then 1):

    best      at every load, tandem's goodput is at least 0.99 of the best of mooncake, all split and all
              aggregated on the same pools
    ahead     on every curve, there is a load at which tandem is ahead of all three
    both      on the beds of "Split or aggregated", it is at least 0.98 of as many workers that all do both
              phases
    falls     goodput never falls by more than 5 % below what it was at a lower load
    admitted  of the admitted requests 97 % meet both limits (lengths not known: 95 %)

--quick: the first 3,000 requests of each trace, four loads, one seed. --from FILE (may be repeated): shows
and draws what an earlier --json printed, and runs nothing. TANDEM, TRACE and AZURE name the binary and the
two public traces, as for the scripts beside this one.
"""
import argparse, concurrent.futures, json, os, statistics, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TANDEM = os.environ.get("TANDEM", os.path.join(ROOT, "build/cli/tandem"))
TRACE = os.environ.get("TRACE", os.path.join(ROOT, "../shared/traces/mooncake_conversation.jsonl"))
AZURE = os.environ.get("AZURE", os.path.join(ROOT, "../shared/traces/azure_2023_conv.csv"))

LOADS, SEEDS = "0.5,0.75,1,1.5,2,3,4", 5
QUICK_LOADS, QUICK_SEEDS, QUICK_REQUESTS = "0.5,1,2,4", 1, 3000
SHARE = 0.9            # of requests within limits, at maximum goodput
FOUND = 1.03           # the rate is known to within this factor
MAX_TOKENS = 2048      # that requests ask for where lengths are not known
LEAST = {"best": 0.99, "both": 0.98, "falls": 0.95, "admitted": {"known": 0.97, "unknown": 0.95}}
LENGTHS = ("known", "unknown")
OTHERS = ("mooncake", "split", "aggregated")  # on the same pools
POLICIES = {"tandem": [], "mooncake": ["--policy", "mooncake"], "split": ["--plan", "split"],
            "aggregated": ["--plan", "aggregated"], "both": []}
NAMES = {"tandem": "tandem", "mooncake": "mooncake", "split": "all split", "aggregated": "all aggregated",
         "both": "all do both"}


def mooncake_node(mfu):  # as mooncake_node in common.sh
    peak = 8 * 312e12 * mfu
    return f"0,{80 * 22 * 8192**2 / peak * 1e6:.6g},{80 * 4 * 8192 / peak * 1e6:.6g}:17000,0.0402,0"


NODE = ["--profile", mooncake_node(0.6), "--kv-bytes", "327680", "--pool-bytes", "418G", "--port-gb-s", "100"]
H100, A100 = ["--profile", "dgx-h100-70b"], ["--profile", "dgx-a100-70b"]
AZURE_BED = ["--block-tokens", "512", "--port-gb-s", "25"]
# Traces that are made: the lengths of Mooncake's Fig. 15; and long answers, under a TPOT limit at which some
# fifty sequences fill a worker, so that the trace fills the cluster many times over.
MADE = {"fig15": ["--requests", "3000", "--prompt", "11975", "--prompt-sigma", "0.7", "--output-tokens", "117",
                  "--arrivals", "poisson"],
        "answers": ["--requests", "6000", "--prompt", "2000", "--output-tokens", "500", "--arrivals", "poisson"]}


class Bed:
    def __init__(self, title, trace, prefill, decode, ttft_s, tpot_ms, options, is_coupled_bed=False):
        self.title, self.trace, self.prefill, self.decode, self.options = title, trace, prefill, decode, options
        self.limits = ["--ttft-ms", str(1000 * ttft_s), "--tpot-ms", str(tpot_ms)]
        self.limits_text = f"TTFT {ttft_s} s, TPOT {tpot_ms} ms"
        self.is_coupled_bed = is_coupled_bed  # "Split or aggregated": held against workers that do both phases

    def pools(self, policy):
        both = policy == "both"
        return ["--prefill", str(0 if both else self.prefill), "--decode",
                str(self.decode + (self.prefill if both else 0))]


def beds():
    b8, b70 = ["--profile", "h200-8b"], ["--profile", "h200-70b"]
    table = {"8b-8+8-30": Bed("8B, 8 + 8 H200", "mooncake", 8, 8, 2, 30, b8),
             "8b-4+4-30": Bed("8B, 4 + 4 H200", "mooncake", 4, 4, 2, 30, b8, True),
             "8b-4+4-100": Bed("8B, 4 + 4 H200", "mooncake", 4, 4, 2, 100, b8, True),
             "70b-4+4-60": Bed("70B, 4 + 4 x 4 H200", "mooncake", 4, 4, 5, 60, b70, True),
             "70b-4+4-200": Bed("70B, 4 + 4 x 4 H200", "mooncake", 4, 4, 5, 200, b70, True),
             "70b-8+8-60": Bed("70B, 8 + 8 x 4 H200", "mooncake", 8, 8, 5, 60, b70)}
    for tpot in (100, 200, 300):
        table[f"node-8+8-{tpot}"] = Bed("Mooncake's node, 8 + 8", "mooncake", 8, 8, 30, tpot, NODE)
    table["node-8+1-100"] = Bed("Mooncake's node, 8 + 1", "mooncake", 8, 1, 30, 100, NODE + ["--max-batch", "2048"])
    for p in range(5, 12):
        table[f"node-{p}+{16 - p}-fig15"] = Bed(f"Mooncake's node, {p} + {16 - p}, lengths of Fig. 15", "fig15", p,
                                                16 - p, 10, 100, NODE)
    table["azure-hh-5+3"] = Bed("Azure's trace, 5 + 3 H100", "azure", 5, 3, 1, 60, H100 + AZURE_BED)
    table["azure-aa-9+5"] = Bed("Azure's trace, 9 + 5 A100", "azure", 9, 5, 1, 60, A100 + AZURE_BED)
    table["azure-ha-5+5"] = Bed("Azure's trace, 5 H100 + 5 A100", "azure", 5, 5, 1, 60,
                                H100 + ["--decode-profile", "dgx-a100-70b"] + AZURE_BED)
    table["answers-8+4"] = Bed("8B, 8 + 4 H200, long answers", "answers", 8, 4, 2, 12, b8)
    table["answers-4+4"] = Bed("8B, 4 + 4 H200, long answers", "answers", 4, 4, 2, 12, b8)
    return table


# ---------------------------------------------------------------- running


class Runner:
    """Traces, and at most two simulations at a time."""

    def __init__(self, directory, n_requests):
        self.directory, self.n_requests = directory, n_requests
        self.pool = concurrent.futures.ThreadPoolExecutor(2)

    def trace(self, name):
        if name not in MADE:
            return {"mooncake": TRACE, "azure": AZURE}[name]
        path = os.path.join(self.directory, name + ".jsonl")
        if not os.path.exists(path):
            subprocess.run([TANDEM, "trace", "synth", "--output", path, *MADE[name]], check=True,
                           stdout=subprocess.DEVNULL)
        return path

    def simulate(self, bed, policy, lengths, rate, seeds):
        """One report for each seed."""
        args = [TANDEM, "simulate", self.trace(bed.trace), *bed.pools(policy), *bed.limits, *bed.options,
                *POLICIES[policy],
                "--noise", "0.05", "--rate", f"{rate:.6g}", "--max-tokens",
                str(0 if lengths == "known" else MAX_TOKENS),
                "--requests", str(self.n_requests), "--sweep", "seed=" + "|".join(map(str, range(1, seeds + 1))),
                "--jobs", "1", "--json"]
        out = subprocess.run(args, capture_output=True, text=True)
        if out.returncode:
            raise RuntimeError(f"{' '.join(args)}: {out.stderr.strip()}")
        return [point["report"] for point in json.loads(out.stdout)["points"]]

    def attained(self, bed, rates):
        self.trace(bed.trace)
        runs = self.pool.map(lambda rate: self.simulate(bed, "tandem", "known", rate, 1)[0]["attainment"], rates)
        return list(runs)

    def find_rate(self, bed):
        """The highest rate, in multiples of the trace's, at which SHARE of the requests meet their limits."""
        low, high = 0.25, None
        idle = self.attained(bed, [0.01 if bed.trace in MADE else 0.25])[0]
        enough = SHARE if idle >= SHARE else SHARE * idle
        while high is None:
            rates = [2 * low, 4 * low]
            for rate, share in zip(rates, self.attained(bed, rates)):
                if share < enough:
                    high = rate
                    break
                low = rate
        while high / low > FOUND:
            step = (high / low) ** (1 / 3)
            rates = [low * step, low * step * step]
            for rate, share in zip(rates, self.attained(bed, rates)):
                if share < enough:
                    high = rate
                    break
                low = rate
        return low


def summary(reports):
    of = lambda key: statistics.median(key(r) for r in reports)
    return {"offered": of(lambda r: r["offered_rate"]), "goodput": of(lambda r: r["attainment"] * r["offered_rate"]),
            "attainment": of(lambda r: r["attainment"]), "admitted": of(lambda r: r["attainment_admitted"] or 0)}


def run_bed(runner, name, bed, loads, seeds):
    rate = runner.find_rate(bed)
    say(f"{name}: maximum goodput at {rate:.4g} times the trace's rate")
    policies = [p for p in POLICIES]
    tasks = {}
    for load in sorted(loads, reverse=True):  # the longest first
        for lengths in LENGTHS:
            for policy in policies:
                tasks[lengths, policy, load] = runner.pool.submit(runner.simulate, bed, policy, lengths, rate * load,
                                                                  seeds)
    curves = {lengths: {policy: [] for policy in policies} for lengths in LENGTHS}
    for done, ((lengths, policy, load), task) in enumerate(tasks.items(), 1):
        curves[lengths][policy].append({"load": load, **summary(task.result())})
        if sys.stderr.isatty():
            print(f"\r{name}: {done} of {len(tasks)}", end="\n" if done == len(tasks) else "", file=sys.stderr)
    for of in curves.values():
        for points in of.values():
            points.reverse()
    return {"title": bed.title, "limits": bed.limits_text, "rate": rate, "seeds": seeds,
            "is_coupled_bed": bed.is_coupled_bed, "curves": curves}


def say(text):
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------ requirements


def violations(name, result):
    out = []
    for lengths, curves in result["curves"].items():
        where, most, ahead = f"{name}, lengths {lengths}", 0, False
        for i, point in enumerate(curves["tandem"]):
            at, goodput = f"{where}, load {point['load']:g}", point["goodput"]
            best = max(OTHERS, key=lambda p: curves[p][i]["goodput"])
            bar = curves[best][i]["goodput"]
            ahead |= goodput > bar
            if goodput < LEAST["best"] * bar:
                out.append(f"best: {at}: {goodput:.4g}/s is {goodput / bar:.3f} of {NAMES[best]}'s {bar:.4g}/s")
            both = curves["both"][i]["goodput"]
            if result["is_coupled_bed"] and goodput < LEAST["both"] * both:
                out.append(f"both: {at}: {goodput:.4g}/s is {goodput / both:.3f} of {both:.4g}/s "
                           "with workers that do both phases")
            if goodput < LEAST["falls"] * most:
                out.append(f"falls: {at}: {goodput:.4g}/s after {most:.4g}/s at a lower load")
            if point["admitted"] < LEAST["admitted"][lengths]:
                out.append(f"admitted: {at}: {100 * point['admitted']:.1f} % of the admitted meet their limits")
            most = max(most, goodput)
        if not ahead:
            out.append(f"ahead: {where}: tandem is nowhere ahead")
    return out


# ------------------------------------------------------------------ output


def table(name, result):
    rows = [f"{name}: {result['title']}, {result['limits']}; load 1 is {result['rate']:.4g} "
            f"times the trace's rate; requests/s within "
            f"limits, median of {result['seeds']}"]
    for lengths, curves in result["curves"].items():
        rows.append(f"  {'lengths ' + lengths:18}{'offered':>9}" + "".join(f"{NAMES[p]:>16}" for p in POLICIES) +
                    f"{'over best':>11}{'over both':>11}{'admitted':>10}")
        for i, point in enumerate(curves["tandem"]):
            bar = max(curves[p][i]["goodput"] for p in OTHERS)
            over = [f"{point['goodput'] / b:11.3f}" if b > 0 else f"{'-':>11}"
                    for b in (bar, curves["both"][i]["goodput"])]
            rows.append(f"  {'load ' + format(point['load'], 'g'):18}{point['offered']:9.4g}" +
                        "".join(f"{curves[p][i]['goodput']:16.4g}" for p in POLICIES) + "".join(over)
                        + f"{100 * point['admitted']:8.1f} %")
    return "\n".join(rows)


COLOURS = {"tandem": "#d55e00", "mooncake": "#0072b2", "split": "#009e73", "aggregated": "#cc79a7", "both": "#777777"}
DASHES = {"tandem": "", "mooncake": "7 3", "split": "2 3", "aggregated": "9 3 2 3", "both": "4 4"}
WIDTH, HEIGHT, LEFT, TOP, PANEL, TALL, GAP = 760, 330, 58, 46, 320, 220, 52


def nice_step(most, n):
    raw = most / n
    scale = 10 ** len(str(int(raw))) / 10 if raw >= 1 else 10 ** -next(i for i in range(1, 9) if raw * 10**i >= 1)
    return next(scale * s for s in (1, 2, 2.5, 5, 10) if scale * s >= raw)


def panel(out, left, head, curves, most_load, most):
    x = lambda load: left + PANEL * load / most_load
    y = lambda goodput: TOP + TALL * (1 - goodput / most)
    out.append(f'<text x="{left}" y="{TOP - 8}" font-weight="bold">{head}</text>')
    step = nice_step(most, 6)
    for i in range(int(most / step) + 1):
        out.append(f'<path d="M{left} {y(i * step):.1f}h{PANEL}" stroke="#ddd"/>'
                   f'<text x="{left - 6}" y="{y(i * step) + 4:.1f}" '
                   f'text-anchor="end">{i * step:g}</text>')
    for load in range(int(most_load) + 1):
        out.append(f'<path d="M{x(load):.1f} {TOP + TALL}v4" stroke="#333"/>'
                   f'<text x="{x(load):.1f}" y="{TOP + TALL + 17}" '
                   f'text-anchor="middle">{load}</text>')
    out.append(f'<path d="M{left} {TOP}v{TALL}h{PANEL}" fill="none" stroke="#333"/>')
    offered = [(p["load"], p["offered"]) for p in curves["tandem"]]
    end = min(most_load, most * offered[0][0] / offered[0][1])
    out.append(f'<path d="M{left} {TOP + TALL}L{x(end):.1f} '
               f'{y(end * offered[0][1] / offered[0][0]):.1f}" stroke="#bbb" '
               'stroke-dasharray="1 3"/>')
    for policy in reversed(POLICIES):
        points = [(x(p["load"]), y(p["goodput"])) for p in curves[policy]]
        out.append(f'<path d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in points)}" fill="none" '
                   f'stroke="{COLOURS[policy]}" '
                   f'stroke-width="{2.4 if policy == "tandem" else 1.6}" stroke-dasharray="{DASHES[policy]}"/>')
        if policy == "tandem":
            out.extend(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{COLOURS[policy]}"/>' for a, b in points)


def svg(result):
    curves = result["curves"]
    points = [p for of in curves.values() for line in of.values() for p in line]
    most, most_load = 1.08 * max(p["goodput"] for p in points), max(p["load"] for p in points)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
           'font-family="sans-serif" font-size="11" fill="#222">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
           f'<text x="{LEFT}" y="18" font-size="13">{result["title"]}: goodput within {result["limits"]}</text>']
    for i, (lengths, of) in enumerate(curves.items()):
        panel(out, LEFT + i * (PANEL + GAP), "lengths of answers " + ("known" if lengths == "known" else "not known"),
              of, most_load, most)
    one = curves["known"]["tandem"][0]
    out.append(f'<text transform="translate(14 {TOP + TALL / 2}) rotate(-90)" text-anchor="middle">'
               'goodput, requests/s</text>')
    out.append(f'<text x="{LEFT + PANEL + GAP / 2}" y="{TOP + TALL + 34}" text-anchor="middle">'
               f'offered load, times the maximum-goodput rate '
               f'(1 is {one["offered"] / one["load"]:.3g} requests/s; dotted: all that is offered)</text>')
    for i, policy in enumerate(POLICIES):
        at = LEFT + i * 138
        out.append(f'<path d="M{at} {HEIGHT - 14}h26" stroke="{COLOURS[policy]}" stroke-width="2.4" '
                   f'stroke-dasharray="{DASHES[policy]}"/>'
                   f'<text x="{at + 32}" y="{HEIGHT - 10}">{NAMES[policy]}</text>')
    return "\n".join(out) + "\n</svg>\n"


def main():
    all_beds = beds()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beds", default="", help="default: all; of: " + ", ".join(all_beds))
    parser.add_argument("--rates", default="", help=f"times the maximum-goodput rate; default: {LOADS}")
    parser.add_argument("--seeds", type=int, default=0, help=f"default: {SEEDS}")
    parser.add_argument("--quick", action="store_true",
                        help=f"{QUICK_REQUESTS} requests, loads {QUICK_LOADS}, {QUICK_SEEDS} seed")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of tables")
    parser.add_argument("--svg", metavar="DIR", help="writes a plot for each bed there")
    parser.add_argument("--from", dest="files", action="append", default=[], metavar="FILE",
                        help="shows what --json printed into it")
    args = parser.parse_args()
    names = args.beds.split(",") if args.beds else list(all_beds)
    unknown = [n for n in names if n not in all_beds]
    if unknown:
        parser.error(f"--beds: there is no {', '.join(unknown)}")
    loads = sorted(float(x) for x in (args.rates or (QUICK_LOADS if args.quick else LOADS)).split(","))
    seeds = args.seeds or (QUICK_SEEDS if args.quick else SEEDS)
    results, found = {}, []
    for path in args.files:
        with open(path, encoding="utf-8") as f:
            results.update({n: r for n, r in json.load(f)["beds"].items() if n in names})
    for path in () if args.files else (TANDEM, TRACE, AZURE):
        if not os.access(path, os.R_OK):
            say(f"goodput.py: {path} is not there")
            sys.exit(77)
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(directory, QUICK_REQUESTS if args.quick else 0)
        for name in names:
            if not args.files:
                results[name] = run_bed(runner, name, all_beds[name], loads, seeds)
            if name not in results:
                continue
            found += violations(name, results[name])
            if not args.json:
                print(table(name, results[name]), flush=True)
            if args.svg:
                os.makedirs(args.svg, exist_ok=True)
                with open(os.path.join(args.svg, f"goodput-{name}.svg"), "w", encoding="utf-8") as f:
                    f.write(svg(results[name]))
    if args.json:
        print(json.dumps({"beds": results, "violations": found}))
    for v in found:
        say("VIOLATED " + v)
    say(f"{len(results)} beds, {len(found)} violations")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
