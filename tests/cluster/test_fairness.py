"""Tenants that want more than the cluster can do: each gets its share of the work in every window, and a
tenant within its share is not refused because of another tenant's requests.

Work is prompt and answer tokens, counted in the window of the first token. Default: 20 s of each case,
windows of 10 s, shares within 8 percentage points of the weights. TANDEM_LONG=fairness: 10 minutes of each
case, windows of 60 s, within 5 percentage points.

Simulated steps are long (a prompt takes about 110 ms, a decode step 10 ms), so the workers' steps are the
limit, not this machine's cores. Another program may still take a core for a while, so a short case gets three
attempts. A long one gets one.
"""
import math, os, subprocess, sys, tempfile
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

LONG = os.environ.get("TANDEM_LONG") in ("fairness", "all")
FLOOD_S, WINDOW_S, BOUND, ATTEMPTS = (600, 60, 0.05, 1) if LONG else (20, 10, 0.08, 3)
DIMS = "layers=4,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536,positions=8192"
STEP = "4000,100,0:10000,0,200"
SHAPE = ["--engine", "sim", "--numerics", "bf16", "--pages", "8000", "--max-context", "8192", "--chunk-tokens", "1024", "--max-rows",
         "1152", "--sim-prefill", STEP.split(":")[0], "--sim-decode", STEP.split(":")[1], "--sim-noise", "0.03"]
WEIGHTS = {"light": 1, "heavy": 3}
OUTCOMES = ("answered", "refused", "failed", "cut short")
LIMITS = ["--ttft-ms", "2000", "--tpot-ms", "50"]
# The most tokens per second of these requests that two prefill and two decode workers serve; measured.
# Without limits they serve 36000 while the queue is short, and 20000 while it is long, because decode workers
# then compute no prompts.
CAPACITY = 36000
MAX_WAIT_MS = 2000  # the router's option in the last test


def share(tenant):
    return WEIGHTS[tenant] / sum(WEIGHTS.values())


def write_flood(path, wanted, seconds, seed):
    """Writes requests of each tenant for `wanted` times its share: prompts of 200 to 3200 tokens, answers of
    5 to 40, no common prefix.

    Arrivals are independent of each other. Those of a tenant that wants less than its share are nearly even,
    because in a burst it would want more than its share.
    """
    rnd, rows = random.Random(seed), []
    mean_tokens = 3000 / math.log(16) + 22.5
    for tenant, times in wanted.items():
        gap_ms, at = 1e3 * mean_tokens / (CAPACITY * share(tenant) * times), 0.0
        gap = (lambda: gap_ms * rnd.uniform(0.5, 1.5)) if times < 1 else (lambda: rnd.expovariate(1 / gap_ms))
        while (at := at + gap()) < seconds * 1e3:
            rows.append({"timestamp": int(at), "input_length": int(200 * 16 ** rnd.random()), "output_length": rnd.randrange(5, 41),
                         "hash_ids": [10000000 * seed + len(rows)], "tenant": tenant})
    with open(path, "w") as f:
        f.write('{"tandem_trace": 1, "block_tokens": 4096}\n')
        f.writelines(json.dumps(r) + "\n" for r in sorted(rows, key=lambda r: r["timestamp"]))


def send(c, wanted, seconds, seed, args):
    """Sends one flood. Returns the outcome of each request, with "tenant" and, if it was answered, "first_ms"
    of its first token."""
    with tempfile.TemporaryDirectory() as d:
        path, report = os.path.join(d, "trace.jsonl"), os.path.join(d, "report.json")
        write_flood(path, wanted, seconds, seed)
        out = subprocess.run([TANDEM, "replay", path, "--router", c.router.address, "--output", report, "--json", *args],
                             capture_output=True, text=True, timeout=(seconds + 120) * SLOW)
        assert out.returncode == 0, out.stderr
        with open(report) as f:
            r = json.load(f)
    columns, n, rows = r["requests"], r["requests"]["n"], []
    cell = lambda name, i: columns[name][i] if isinstance(columns[name], list) else columns[name]
    names = ("outcome", "tenant", "prompt_tokens", "output_tokens", "arrived_ms", "ttft_ms", "tpot_ms", "queue_ms", "came_back",
             "refused_after_ms", "retry_after_ms")
    for i in range(n):
        q = {name: cell(name, i) for name in names}
        q["tenant"] = r["tenants"][q["tenant"]]
        q["outcome"] = OUTCOMES[q["outcome"]]
        if q["outcome"] == "answered":
            q["first_ms"] = q["arrived_ms"] + q["ttft_ms"] + (q["refused_after_ms"] + q["retry_after_ms"] if q["came_back"] else 0)
        rows.append(q)
    return rows, r


def tally(rows, seconds):
    """For each window: the light tenant's share of the work, and the tokens per second of both tenants."""
    n = int(seconds // WINDOW_S)
    work = [dict.fromkeys(WEIGHTS, 0) for _ in range(n)]
    for q in rows:
        if "first_ms" in q and q["first_ms"] < n * WINDOW_S * 1e3:
            work[int(q["first_ms"] / (WINDOW_S * 1e3))][q["tenant"]] += q["prompt_tokens"] + q["output_tokens"]
    return [(w["light"] / sum(w.values()), sum(w.values()) / WINDOW_S) for w in work]


def count(rows, tenant, outcome):
    return sum(q["tenant"] == tenant and q["outcome"] == outcome for q in rows)


def flooded(*args):
    """A cluster whose router knows the tenants' weights and the times of the workers' steps."""
    if SLOW > 1:
        raise Skip("with sanitizers the cores limit, and not the workers' steps")
    tenants = ",".join(f"{name}={weight}" for name, weight in WEIGHTS.items())
    return Cluster(dummy=DIMS, prefill=2, decode=2, worker_args=SHAPE,
                   router_args=["--profile", STEP, "--tenants", tenants, *args])


def check_shares(name, router_args, replay_args):
    with flooded(*router_args) as c:
        send(c, {"light": 0.5, "heavy": 0.5}, 3, 1, replay_args)
        for attempt in range(ATTEMPTS):
            rows, r = send(c, {"light": 5, "heavy": 1.5}, FLOOD_S, 2 + attempt, replay_args)
            windows = tally(rows, FLOOD_S)
            worst = max(abs(got - share("light")) for got, _ in windows)
            late = r["sent_late_ms"]["p99"]
            print(f"# {name}: the light tenant's share {' '.join(f'{got:.3f}' for got, _ in windows)}, of "
                  f"{' '.join(f'{rate:.0f}' for _, rate in windows)} tokens/s; worst {worst:.3f}; "
                  + "; ".join(f"{t}: {count(rows, t, 'answered')} answered, {count(rows, t, 'refused')} refused" for t in WEIGHTS)
                  + f"; came back {sum(bool(q['came_back']) for q in rows)}; met {r['met']}; sent late p99 {late:.1f} ms", flush=True)
            assert not any(count(rows, t, "failed") + count(rows, t, "cut short") for t in WEIGHTS), r["reasons"]
            if worst <= BOUND:
                break
        assert worst <= BOUND, worst
        c.audit()
        return rows


@test
def test_tenants_get_their_shares_under_limits():
    check_shares("limits", [], LIMITS)


@test
def test_tenants_get_their_shares_where_refused_clients_come_back():
    rows = check_shares("clients that come back", [], [*LIMITS, "--retry-share", "1"])
    assert sum(bool(q["came_back"]) for q in rows) > 0


@test
def test_tenants_get_their_shares_of_a_bounded_queue():
    check_shares("bounded queue", ["--queue-requests", "200"], [])


@test
def test_a_tenant_within_its_share_is_not_refused_because_another_tenant_fills_the_queue():
    """The tenant wants 0.3 of its share of CAPACITY, and waits at most --max-wait-ms."""
    for name, replay_args in (("bounded queue", []), ("bounded queue and limits", LIMITS)):
        with flooded("--queue-requests", "60", "--max-wait-ms", str(MAX_WAIT_MS)) as c:
            send(c, {"light": 0.5, "heavy": 0.5}, 3, 1, replay_args)
            for attempt in range(ATTEMPTS):
                rows, r = send(c, {"light": 5, "heavy": 0.3}, FLOOD_S, 12 + attempt, replay_args)
                waits = {t: sorted(q["queue_ms"] for q in rows if q["tenant"] == t and q["outcome"] == "answered") for t in WEIGHTS}
                refused, of = count(rows, "heavy", "refused"), sum(q["tenant"] == "heavy" for q in rows)
                print(f"# {name}: {refused} of the heavy tenant's {of} requests refused, {count(rows, 'light', 'refused')} of the light "
                      f"one's {len(rows) - of}; waited at most {waits['heavy'][-1]:.0f} ms (light: {waits['light'][-1]:.0f} ms); sent "
                      f"late p99 {r['sent_late_ms']['p99']:.1f} ms", flush=True)
                assert len(waits["heavy"]) + refused == of and count(rows, "light", "refused") > 0.15 * (len(rows) - of), r["reasons"]
                if not refused and waits["heavy"][-1] <= MAX_WAIT_MS:
                    break
            assert not refused and waits["heavy"][-1] <= MAX_WAIT_MS, (refused, waits["heavy"][-5:])
            c.audit()


main()
