"""Clients that drip their requests do not keep others from /metrics."""
import os, socket, sys, threading, time, urllib.request
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
from harness import *


def dripping(address, n):
    """n connections, of which each sends a byte now and then."""
    host, port = address.rsplit(":", 1)
    held, stop = [], threading.Event()

    def drip():
        while not stop.wait(0.2):
            for s in held:
                try:
                    s.send(b"x")
                except OSError:
                    pass
    for _ in range(n):
        s = socket.create_connection((host, int(port)), timeout=2)
        s.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: ")
        held.append(s)
    threading.Thread(target=drip, daemon=True).start()
    return held, stop


def attacked(n):
    address = f"127.0.0.1:{free_port()}"
    with Cluster(router_args=["--metrics-listen", address]) as c:
        held, stop = dripping(address, n)
        time.sleep(1)
        for _ in range(5):
            begin = time.monotonic()
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                assert b"tandem_requests_total" in answer.read()
            took = time.monotonic() - begin
            assert took < within(1), took
        stop.set()
        for s in held:
            s.close()
        c.audit()


@test
def test_sixteen_dripping_clients_keep_nobody_out():
    attacked(16)


@test
def test_three_hundred_dripping_clients_keep_nobody_out():
    attacked(300)


if __name__ == "__main__":
    sys.exit(main())
