"""Workers whose heartbeats go on while they make no progress: their requests go elsewhere, and they come back
when they go on."""
import os, signal, sys, time
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import Client, request
from streams import Answer, Flight, ids, story


def worker(c, name):
    return next(w for w in c.status()["workers"] if w["name"] == name)


def warm(c, n=12):
    """Runs steps of each kind, so that workers know how long they take."""
    for _ in range(3):
        assert all(a.code == "OK" for a in Flight(c.router.address, [story(50 + i, 20) for i in range(n)]).join())


@test
def test_a_worker_whose_step_never_ends_is_left_out_until_it_gets_on():
    metrics = f"127.0.0.1:{free_port()}"
    with Cluster(plan="split", scripts=True, prefill=2, decode=2, router_args=["--metrics-listen", metrics]) as c:
        asked = [story(i, 1200) for i in range(12)]
        want = [a.stream() for a in Flight(c.router.address, asked).join()]
        warm(c)
        for victim in ("decode-0", "prefill-0"):
            for _ in range(3):  # on a busy machine the script may be read when everything is over
                flight = Flight(c.router.address, asked)
                if victim.startswith("decode"):
                    wait_until(lambda: sum(flight.tokens) > 300, 30, "they stream")
                c[victim].misbehave("step:stall")
                more = Flight(c.router.address, [request(ids=ids(400, 300 + i), max_tokens=20, stopping__ignore_eos=True)
                                                 for i in range(12)])
                began = time.monotonic()
                got, later = flight.join(), more.join()
                took = time.monotonic() - began
                assert [a.code for a in got + later] == ["OK"] * 24, [(a.code, a.why) for a in got + later]
                assert [a.stream() for a in got] == want
                n = sum(a.end.replans > 0 for a in got + later)
                print(f"# {victim}: {n} of 24 went elsewhere, all over after {took:.1f} s", flush=True)
                if n:
                    break
                c[victim].misbehave("")
            assert n and took < within(30), (n, took)
            w = worker(c, victim)
            assert w["state"] == "stalled" and w["breaker"] == "open", w
            counts = replans_by_reason(metrics)  # beside other programs, not only the stall's
            assert counts["stalled"] > 0 and sum(counts.values()) >= n, (n, counts)
            c[victim].misbehave("")
            wait_until(lambda: worker(c, victim)["state"] == "ready", 10, "it gets on")

            def tried():
                warm(c)
                return worker(c, victim)["breaker"] == "closed"
            wait_until(tried, 30, "it is tried again")
        c.audit(20)


@test
def test_a_leg_that_a_worker_forgets_goes_elsewhere():
    with Cluster(plan="split", scripts=True, prefill=2, decode=2) as c:
        # Else each request goes where it was before.
        asked = [story(i, 20, bypass_cache=True) for i in range(8)]
        want = [a.stream() for a in Flight(c.router.address, asked).join()]
        for victim in ("prefill-0", "decode-1"):
            c[victim].misbehave("leg:drop=0.5")
            began, again, rounds, longest = time.monotonic(), 0, 0, 0
            # All requests may go to the other worker, for seconds even, while the victim is believed slow.
            while rounds < 3 or not again and time.monotonic() - began < 60 * SLOW:
                rounds, sent = rounds + 1, time.monotonic()
                got = Flight(c.router.address, asked).join()
                longest = max(longest, time.monotonic() - sent)
                assert [a.code for a in got] == ["OK"] * 8, [(a.code, a.why) for a in got]
                assert [a.stream() for a in got] == want
                again += sum(a.end.replans for a in got)
            print(f"# {victim}: {again} went elsewhere in {rounds} rounds of at most {longest:.1f} s", flush=True)
            assert again and longest < 5 * SLOW, (again, rounds, longest)
            c[victim].misbehave("")
        c.wait_ready()
        c.audit(20)


@test
def test_a_step_that_is_slow_and_known_to_be_is_waited_for():
    slow = ["--engine", "sim", "--sim-prefill", "4500000,0,0", "--sim-decode", "1000,0,0"]
    with Cluster(prefill=2, decode=1, plan="split", worker_args=slow) as c:
        a = Answer(Client(c.router.address), story(1, 5))
        assert a.code == "OK" and not a.end.replans, (a.code, a.why, a.end)
        assert all(w["state"] == "ready" for w in c.status()["workers"])


main()
