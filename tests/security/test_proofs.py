"""Who is let in: operators, processes of the cluster, and nobody else, whoever they say they are."""
import os, pwd, stat, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
sys.path.insert(0, os.path.dirname(__file__))
from concurrent import futures
from harness import *
from client import Client, Router, admin_pb, grpc, request, worker_pb as wp

ASKED = {"prompt_ids": list(range(1, 80)), "max_tokens": 4, "greedy": True, "ignore_eos": True}
ATTACH, JOIN = "/tandem.worker.v1.Worker/Attach", "/tandem.worker.v1.Registry/Join"


def code_of(address, path, message, kind="unary_unary", **kw):
    """Name of the code with which a call ends; "OK"."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = getattr(channel, kind)(path, request_serializer=lambda m: m.SerializeToString(),
                                      response_deserializer=bytes)
        try:
            got = call(message if kind == "unary_unary" else iter([message]), timeout=10 * SLOW, **kw)
            if kind != "unary_unary":
                list(got)
            return "OK"
        except grpc.RpcError as e:
            return e.code().name


def admin_socket(c):
    return os.path.join(RUNTIME, "tandem", c.router.address.split(":")[1] + ".admin")


def tandem(*args, **kw):
    return subprocess.run([TANDEM, *args], capture_output=True, text=True, timeout=60 * SLOW, **kw)


def worker_like(address, attach):
    """A server at the address of a worker that has left; attach(messages, context) gives its answers."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(
        "tandem.worker.v1.Worker", {"Attach": grpc.stream_stream_rpc_method_handler(
            attach, wp.RouterMessage.FromString, lambda m: m.SerializeToString())})])
    server.add_insecure_port(address)
    server.start()
    return server


@test
def test_clients_reach_neither_the_admin_api_nor_the_cluster():
    with Cluster() as c:
        for path, message in (("Admin/Status", admin_pb.StatusRequest()), ("Admin/Flush", admin_pb.FlushRequest()),
                              ("Admin/Drain", admin_pb.DrainRequest(name=b"decode-0", limit_ms=1)),
                              ("Admin/Audit", admin_pb.AuditRequest()), ("Admin/Explain", admin_pb.ExplainRequest())):
            assert code_of(c.router.address, "/tandem.admin.v1." + path, message) == "UNIMPLEMENTED", path
        assert code_of(c.router.address, JOIN, wp.JoinRequest(address=b"127.0.0.1:1")) == "UNIMPLEMENTED"
        drain = admin_pb.DrainRequest(name=b"decode-0")
        assert code_of(c.router.joins, "/tandem.admin.v1.Admin/Drain", drain) == "UNIMPLEMENTED"
        assert code_of(c.router.joins, "/tandem.v1.Tandem/ListModels", admin_pb.StatusRequest()) == "UNIMPLEMENTED"
        assert "error" not in c.generate([dict(ASKED, id="a")])["a"]
        c.audit()


@test
def test_the_admin_socket_is_its_users_alone():
    with Cluster() as c:
        path = admin_socket(c)
        mode = lambda of: stat.S_IMODE(os.stat(of).st_mode)
        assert mode(path) == 0o600 and mode(os.path.dirname(path)) == 0o700
        assert code_of("unix:" + path, "/tandem.admin.v1.Admin/Status", admin_pb.StatusRequest()) == "OK"
        assert tandem("drain", "nobody", "--router", c.router.address).returncode == 1
        wait_until(lambda: re.search(r"admin action=drain of='nobody' who='uid=\d+ pid=\d+'", c.log("router")), 5,
                   lambda: "who drained: " + c.log("router"))
        # a second router of the same address does not take the socket away from the first
        other = subprocess.run([os.path.join(BUILD, "router", "tandem-router"), "--model", DEMO, "--workers",
                                "127.0.0.1:1", "--listen", "127.0.0.1:0", "--admin-listen", "unix:" + path],
                               capture_output=True, text=True, timeout=30 * SLOW)
        assert other.returncode and "another process listens there" in other.stderr, other
        assert c.status()["workers"]
        if os.geteuid():
            raise Skip("only root can become another user")
        os.chmod(os.path.dirname(path), 0o777)  # anybody could put a socket of his own there
        out = tandem("status", "--router", c.router.address)
        assert out.returncode == 1 and "others may write into it" in out.stderr, out
        os.chmod(RUNTIME, 0o755)
        os.chmod(os.path.dirname(path), 0o755)  # so that the socket's own mode decides
        nobody = pwd.getpwnam("nobody").pw_uid
        probe = f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})"
        out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, user=nobody, cwd="/")
        assert "PermissionError" in out.stderr, out


@test
def test_operators_elsewhere_bring_the_admin_key():
    admin = f"127.0.0.1:{free_port()}"
    os.environ["TANDEM_ROUTER_ADMIN_KEY"] = "key of the operators"
    try:
        with Cluster(router_args=["--admin-listen", admin]) as c:
            raise AssertionError("its own commands have the key")
    except RuntimeError:
        pass
    finally:
        del os.environ["TANDEM_ROUTER_ADMIN_KEY"]
    with Cluster(router_args=["--metrics-listen", f"127.0.0.1:{free_port()}"]) as c:
        key = ["--admin-listen", admin, "--admin-key", "key of the operators", "--listen", f"127.0.0.1:{free_port()}"]
        other = Proc(c, "router", "other", [*c.router.args[:6], *key])
        other.address = key[-1]
        other.args = other.args[:-2]
        other.start()
        try:
            for said, returns in (([], 1), (["--admin-key", "key"], 1), (["--admin-key", "key of the operators"], 0)):
                out = tandem("status", "--admin", admin, *said)
                assert out.returncode == returns, (said, out)
                assert returns == 0 or "UNAUTHENTICATED" in out.stderr, out
            out = tandem("status", "--admin", admin, env=dict(os.environ, TANDEM_ADMIN_KEY="key of the operators"))
            assert out.returncode == 0, out
        finally:
            other.stop()


@test
def test_routers_without_the_secret_are_refused():
    with Cluster(plan="split") as c:
        for first in (wp.RouterMessage(hello=wp.RouterHello(protocol=9, incarnation=5)), wp.RouterMessage(),
                      wp.RouterMessage(hello=wp.RouterHello(protocol=3, incarnation=5)),
                      wp.RouterMessage(proof=wp.Proof(proof=b"x" * 32)), wp.RouterMessage(forget=wp.Forget())):
            code = code_of(c["decode-0"].address, ATTACH, first, "stream_stream")
            assert code in ("FAILED_PRECONDITION", "INVALID_ARGUMENT"), (code, first)
        known = Router(c["decode-0"].address, SECRET)
        assert next(known.call).HasField("hello")
        # what that router has said, once more: the worker's nonce is another one
        hello = wp.RouterMessage(hello=wp.RouterHello(protocol=3, incarnation=77, nonce=bytes(16)), number=1)
        proof = wp.RouterMessage(proof=known.proof.proof, number=2)
        with grpc.insecure_channel(c["decode-0"].address) as channel:
            attach = channel.stream_stream(ATTACH, request_serializer=lambda m: m.SerializeToString(),
                                           response_deserializer=wp.WorkerMessage.FromString)
            call = attach(iter([hello, proof]), timeout=10 * SLOW)
            try:
                heard = list(call)
                raise AssertionError(heard)
            except grpc.RpcError as e:
                assert e.code().name == "UNAUTHENTICATED", e
            unsound = wp.RouterMessage(proof=wp.Proof(), number=9)
            for _ in range(30):  # the log stays readable
                try:
                    raise AssertionError(list(attach(iter([hello, unsound]), timeout=10 * SLOW)))
                except grpc.RpcError as e:
                    assert e.code().name == "DATA_LOSS", e
        with open(os.path.join(c.dir, "decode-0.log")) as f:
            assert 1 <= f.read().count("stream is unsound") <= 10
        known.close()
        assert "error" not in c.generate([dict(ASKED, id="a")])["a"]
        c.audit()


@test
def test_who_takes_a_workers_port_gets_no_proof_and_no_work():
    """The worker has died, and somebody listens where it did; what he hears is of no use elsewhere."""
    with Cluster(plan="split", decode=2) as c:
        lost, heard = c["decode-1"], []
        lost.kill()
        lost.child.wait()
        silent = wp.WorkerMessage(challenge=wp.Challenge(nonce=bytes(16), proof=bytes(32)), number=1)
        hello = wp.WorkerMessage(hello=wp.WorkerHello(protocol=3, name=b"decode-1", role=b"decode"), number=1)

        def attach(messages, context):
            heard.append(next(messages))
            yield (silent, hello)[len(heard) % 2]
            heard.extend(messages)
        server = worker_like(lost.address, attach)
        try:
            wait_until(lambda: sum(m.HasField("hello") for m in heard) >= 2, 30, "the router comes back to the port")
            answers = c.generate([dict(ASKED, id=str(i)) for i in range(8)])
            assert not any("error" in a for a in answers.values()), answers
            kinds = {m.WhichOneof("kind") for m in heard}
            assert kinds <= {"hello", "refusal"}, kinds
            # the recorded hello opens nothing at another worker
            again = [m for m in heard if m.HasField("hello")][0]
            assert code_of(c["decode-0"].address, ATTACH, again, "stream_stream") in ("OK", "UNAUTHENTICATED")
        finally:
            server.stop(None).wait()
        lost.start()
        c.wait_ready(60)
        c.audit()


@test
def test_who_passes_a_stream_on_from_a_workers_port_is_refused():
    """He has no secret, and needs none if routers take the proof of a worker for his."""
    with Cluster(plan="split", decode=2) as c:
        lost, heard, channel = c["decode-1"], [], grpc.insecure_channel(c["decode-0"].address)
        lost.kill()
        lost.child.wait()
        onward = channel.stream_stream(ATTACH, request_serializer=lambda m: m.SerializeToString(),
                                       response_deserializer=wp.WorkerMessage.FromString)

        def attach(messages, context):
            def tapped():
                for m in messages:
                    heard.append(m)
                    yield m
            yield from onward(tapped())
        server = worker_like(lost.address, attach)
        try:
            wait_until(lambda: sum(m.HasField("hello") for m in heard) >= 2, 30, "the router comes back to the port")
            answers = c.generate([dict(ASKED, id=str(i)) for i in range(8)])
            assert not any("error" in a for a in answers.values()), answers
            kinds = {m.WhichOneof("kind") for m in heard}
            assert kinds <= {"hello", "refusal"}, kinds
            refused = f"worker refused peer=decode-1 why='address: somebody passes this stream on to the worker at "
            assert refused + c["decode-0"].address in c.log("router"), c.log("router")
        finally:
            server.stop(None).wait()
            channel.close()
        lost.start()
        c.wait_ready(60)
        c.audit()


@test
def test_registration_is_proved_by_both_sides():
    with Cluster() as c:
        before = len(c.status()["workers"])
        asked = dict(address=b"127.0.0.1:1", incarnation=5, nonce=bytes(16))
        for message in (wp.JoinRequest(**asked), wp.JoinRequest(**asked, router_nonce=bytes(16), proof=bytes(32))):
            assert code_of(c.router.joins, JOIN, message) == "OK"  # it gets a nonce, and has registered nothing
        with grpc.insecure_channel(c.router.joins) as channel:
            join = channel.unary_unary(JOIN, request_serializer=lambda m: m.SerializeToString(),
                                       response_deserializer=wp.JoinResponse.FromString)
            answer = join(wp.JoinRequest(**asked))
            assert len(answer.nonce) == 16 and len(answer.proof) == 32 and not answer.is_taken
            late = wp.JoinRequest(**asked, router_nonce=answer.nonce, proof=bytes(32))
            assert code_of(c.router.joins, JOIN, late) == "PERMISSION_DENIED"
        assert len(c.status()["workers"]) == before


@test
def test_listeners_that_the_network_reaches_ask_for_a_proof():
    env = {k: v for k, v in os.environ.items() if not k.endswith("_SECRET")}
    worker, router = ["--dummy", "layers=1", "--advertise", "127.0.0.1"], ["--model", DEMO, "--listen", "127.0.0.1:0"]
    for role, args, option in (
            ("prefill", [*worker, "--listen", "0.0.0.0:0"], "--listen"),
            ("decode", [*worker, "--listen", "127.0.0.1:0", "--xfer-listen", "0.0.0.0:0"], "--xfer-listen"),
            ("kvstore", [*worker, "--listen", "[::]:0"], "--listen"),
            ("router", [*router[:3], "0.0.0.0:0", "--workers", "127.0.0.1:1"], "--listen"),
            ("router", [*router, "--cluster-listen", "0.0.0.0:0"], "--cluster-listen"),
            ("router", [*router, "--workers", "127.0.0.1:1", "--admin-listen", "0.0.0.0:0"], "--admin-listen")):
        out = subprocess.run([os.path.join(BUILD, role, "tandem-" + role), *args], env=env, capture_output=True,
                             text=True, timeout=30 * SLOW)
        assert out.returncode == 2 and option in out.stderr, (role, args, out)


@test
def test_the_secret_is_changed_while_the_cluster_serves():
    """Step by step, as base/secret.h says: added, then used, then the old one removed. New processes join at
    each step; one with the removed secret does not."""
    with tempfile.TemporaryDirectory() as d:
        def write(name, *secrets):
            path = os.path.join(d, name)
            with open(path + ".new", "w", opener=lambda p, flags: os.open(p, flags, 0o600)) as f:
                f.write("".join(s + "\n" for s in secrets))
            os.rename(path + ".new", path)
            return path
        unset = ["env", *(f"-uTANDEM_{p}_SECRET" for p in ("PREFILL", "DECODE", "KVSTORE", "ROUTER"))]
        both = ["--secret-file", write("all", "old")]
        worker = ["--model", DEMO, "--pool-bytes", "16M", "--threads", "1", "--routers"]
        with Cluster(plan="split", wrap=unset, worker_args=both, router_args=both) as c:
            for number, secrets in enumerate((("old", "new"), ("new", "old"), ("new",))):
                write("all", *secrets)
                for name in ("decode-0", "prefill-0"):  # all connections are made anew
                    c[name].stop()
                    c[name].start()
                    c.wait_ready()
                a = c.generate([dict(ASKED, id="a")])["a"]
                assert "error" not in a, (secrets, a)
                known = write(f"n{number}", "new" if number else "old")
                joined = Proc(c, "decode", f"decode-new{number}", [*worker, c.router.joins, "--secret-file", known])
                c.workers.append(joined)
                joined.start()
                c.wait_ready()
            known = write("late", "old")
            late = Proc(c, "decode", "decode-late", [*worker, c.router.joins, "--secret-file", known]).start()
            wait_until(lambda: "router does not take us" in c.log("decode-late"), 20, "it is refused")
            assert "decode-late" not in {w["name"] for w in c.status()["workers"]}
            late.stop()
            os.chmod(os.path.join(d, "all"), 0o644)  # a file that others may read is not taken; what was there stays
            write("n", "new")
            a = c.generate([dict(ASKED, id="b")])["b"]
            assert "error" not in a, a
            c.audit()


if __name__ == "__main__":
    main()
