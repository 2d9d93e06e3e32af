"""Connections that say nothing, or too little, keep nobody out: neither while they are held nor later."""
import os, resource, socket, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import Client, request
from ports import listeners

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
CROWD = 1300  # more than the processes have descriptors
FEW_FILES = ["prlimit", "--nofile=1024:1024"]


def crowd(address, said):
    host, port = address.rsplit(":", 1)
    held = []
    for _ in range(CROWD):
        s = socket.socket()
        s.settimeout(2)
        try:
            s.connect((host, int(port)))
            if said:
                s.sendall(said)
            held.append(s)
        except OSError:
            s.close()
    return held


def answers(c, n=5):
    """Times of calls on connections of their own."""
    times = []
    for _ in range(n):
        begin = time.monotonic()
        asked = request(ids=list(range(1, 40)), max_tokens=4, stopping__ignore_eos=True)
        ids = Client(c.router.address).all(asked, timeout=20)[1]
        times.append(time.monotonic() - begin)
        assert len(ids) == 4, ids
    return times


def held_out(said, at):
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    with Cluster(wrap=FEW_FILES) as c:
        before = answers(c)
        held = crowd(at(c), said)
        print(f"# {len(held)} connections held")
        during = answers(c)
        for s in held:
            s.close()
        after = answers(c)
        print(f"# seconds before {max(before):.3f}, during {max(during):.3f}, after {max(after):.3f}")
        assert max(during) < max(1, 5 * max(before)) * SLOW, (before, during)
        c.audit()


@test
def test_silent_connections_keep_no_client_out():
    held_out(b"", lambda c: c.router.address)


@test
def test_connections_without_calls_keep_no_client_out():
    held_out(PREFACE + SETTINGS, lambda c: c.router.address)


@test
def test_half_a_preface_keeps_no_client_out():
    held_out(PREFACE[:7], lambda c: c.router.address)


@test
def test_silent_connections_keep_no_router_from_a_worker():
    with Cluster(wrap=FEW_FILES) as c:
        held = crowd(c.workers[0].address, b"")
        c.router.kill()
        c.router.child.wait()
        c.router.start()
        c.wait_ready()
        answers(c)
        for s in held:
            s.close()


@test
def test_silent_connections_stop_no_transfer():
    """On the ports for KV, which are those of a process that are not its gRPC port."""
    with Cluster(plan="split", wrap=FEW_FILES) as c:
        answers(c)
        held = []
        for w in c.workers:
            for host, port in listeners(w.child.pid):
                if f"{host}:{port}" != w.address:
                    held += crowd(f"{host}:{port}", b"")
        print(f"# {len(held)} connections held")
        answers(c)
        for w in c.workers:  # a new process must come in, too
            w.kill()
            w.child.wait()
            w.start()
        c.wait_ready()
        answers(c)
        for s in held:
            s.close()
        c.audit()


@test
def test_a_stranger_that_speaks_another_protocol_is_dropped_at_once():
    with Cluster() as c:
        host, port = c.router.address.rsplit(":", 1)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\0\x01", b"\0" * 64):
            with socket.create_connection((host, int(port)), timeout=2 * SLOW) as s:
                s.sendall(said)
                try:
                    assert s.recv(100) == b""
                except ConnectionResetError:
                    pass


if __name__ == "__main__":
    sys.exit(main())
