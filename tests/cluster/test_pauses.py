"""Processes that stand still: a router, or the whole machine, for up to ten seconds; a router's threads that
hear nothing. No stream ends, and no worker that runs is lost.

Default: 0.6, 1.6 and 5 s of the router, 1.6 and 5 s of all processes at once, under 12 streams.
TANDEM_LONG=pauses: 10 s, too, and 30 streams.
"""
import os, signal, sys, threading, time
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import request
from streams import Flight, ids

LONG = os.environ.get("TANDEM_LONG") in ("pauses", "all")
STREAMS = 30 if LONG else 12


def stories(n, max_tokens):
    return [request(ids=ids(300 if i % 2 else 30, i), max_tokens=max_tokens, stopping__ignore_eos=True) for i in range(n)]


def answers(flight):
    got = flight.join()
    return [a.ids for a in got], [(a.code, a.why) for a in got if a.code != "OK"], sum(a.end.replans for a in got if a.end)


def stand_still(processes, seconds):
    for p in processes:
        p.kill(signal.SIGSTOP)
    time.sleep(seconds)
    for p in processes:
        p.kill(signal.SIGCONT)


@test
def test_a_router_or_a_machine_that_stood_still_ends_no_stream():
    with Cluster(prefill=2, decode=2, store=True, plan="split") as c:
        asked = stories(STREAMS, 600)
        want, _, _ = answers(Flight(c.router.address, asked))
        assert all(len(w) == 600 for w in want)
        before = c.status()["replans"]  # the first transfers may have been slow on a busy machine
        longer = [10] if LONG else []
        for who, processes, pauses in (("router", [c.router], [0.6, 1.6, 5] + longer),
                                       ("all", [c.router, *c.workers], [1.6, 5] + longer)):
            for seconds in pauses:
                flight = Flight(c.router.address, asked)
                wait_until(lambda: sum(n > 2 for n in flight.tokens) > STREAMS // 2, 30, lambda: str(flight.tokens))
                stand_still(processes, seconds)
                got, errors, replans = answers(flight)
                print(f"# {who} {seconds} s: {len(errors)} errors, {replans} re-plans", flush=True)
                assert not errors, (who, seconds, errors[:3], c.log("router"))
                assert got == want and not replans, (who, seconds, replans, c.log("router"))
                assert all(w["state"] == "ready" for w in c.status()["workers"])
        assert c.status()["replans"] == before
        c.audit()


@contextlib.contextmanager
def starving(process, names):
    """Threads of these names run only when nobody else wants a core, and somebody does."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    task, threads = f"/proc/{process.child.pid}/task", []
    for tid in os.listdir(task):
        with open(f"{task}/{tid}/comm") as f:
            threads += [int(tid)] if f.read().strip() in names else []
    try:
        for tid in threads:
            os.sched_setscheduler(tid, os.SCHED_IDLE, os.sched_param(0))
        yield threads
    finally:
        for p in loops:
            p.kill()
            p.wait()
        with contextlib.suppress(PermissionError):  # only root may do this where RLIMIT_NICE is 0
            for tid in threads:
                os.sched_setscheduler(tid, os.SCHED_OTHER, os.sched_param(0))


@test
def test_workers_that_the_router_has_no_time_to_hear_are_not_lost():
    """What workers said lies unread: the threads that read it starve, and the thread that judges does not. A
    leg that these threads don't get to send goes elsewhere."""
    with Cluster(prefill=1, decode=2, plan="split") as c:
        asked = stories(STREAMS, 300)
        want, _, _ = answers(Flight(c.router.address, asked))
        flight = Flight(c.router.address, asked)
        with starving(c.router, ("rpc-client", "rpc-server")) as threads:
            assert len(threads) > 4, threads
            time.sleep(20 if LONG else 6)
        got, errors, replans = answers(flight)
        log = [line for line in c.log("router").splitlines() if " warn " in line]
        print(f"# {len(errors)} errors, {replans} re-plans; {len(log)} warnings")
        assert got == want and not errors and not any("worker lost" in line for line in log), (errors, replans, log)
        c.audit()


@test
def test_tandem_generate_waits_for_a_router_that_stands_still():
    with Cluster(prefill=1, decode=1, plan="split") as c:
        lines = [{"id": str(i), "prompt_ids": ids(30, i), "max_tokens": 1500, "greedy": True, "ignore_eos": True} for i in range(6)]
        got = {}
        asks = threading.Thread(target=lambda: got.update(c.generate(lines)))
        asks.start()
        wait_until(lambda: sum(w["running"] for w in c.status()["workers"]), 20, "they run")
        stand_still([c.router], 5)
        asks.join(100)
        assert len(got) == 6 and all(len(r.get("token_ids", [])) == 1500 for r in got.values()), [r.get("error") for r in got.values()]


@test
def test_a_worker_that_stands_still_alone_is_lost():
    # Both workers have streams.
    with Cluster(prefill=1, decode=2, plan="split", worker_args=["--max-batch", "6"]) as c:
        asked = stories(8, 1500)
        want, _, _ = answers(Flight(c.router.address, asked))
        flight = Flight(c.router.address, asked)
        flight.all_stream()
        c["decode-0"].kill(signal.SIGSTOP)
        wait_until(lambda: any(w["name"] == "decode-0" and w["state"] != "ready" for w in c.status()["workers"]), 5 * c.slow, "it is lost")
        got, errors, replans = answers(flight)
        c["decode-0"].kill(signal.SIGCONT)
        assert not errors and got == want and replans, (errors, replans)
        c.wait_ready()
        c.audit()


main()
