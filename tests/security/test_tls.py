"""TLS on the listeners of gRPC, and mTLS between the processes of a cluster, with certificates by openssl."""
import concurrent.futures, os, ssl, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
sys.path.insert(0, os.path.dirname(__file__))
import h2
from harness import *
from client import Client, grpc, pb, request
from lab import LONG, authorities, make_key, memory, words

ASKED = request(ids=list(range(1, 40)), max_tokens=16, stopping__ignore_eos=True)


def read(path):
    with open(path, "rb") as f:
        return f.read()


def stub(address, ca, pair=(None, None)):
    """A client of grpcio that speaks TLS."""
    given = [read(p) if p else None for p in (pair[1], pair[0])]
    client = Client(address)
    client.channel.close()
    client.channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(read(ca), *given))
    return client


def refused(call):
    try:
        call()
    except grpc.RpcError as e:
        return e.code() == grpc.StatusCode.UNAVAILABLE and e.details()
    return False


def resumes(address, version, ca, pair=None):
    """Whether a second connection may go on with the session of the first."""
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    if pair:
        context.load_cert_chain(*pair)
    host, port = address.rsplit(":", 1)
    session = None
    for _ in range(2):
        s = socket.create_connection((host, int(port)), timeout=5 * SLOW)
        with context.wrap_socket(s, server_hostname=host, session=session) as s:
            s.sendall(h2.PREFACE + h2.frame(h2.SETTINGS))
            assert s.recv(100)  # the server's settings, and tickets before them
            session, is_reused = s.session, s.session_reused
    return is_reused


def shake(address, ca=None, version=None, takes_bytes=0):
    """A handshake by hand; returns the socket, whose kernel takes no more than these bytes unread."""
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    if version:
        context.minimum_version = context.maximum_version = version
        context.set_ciphers("ALL:@SECLEVEL=0")
    host, port = address.rsplit(":", 1)
    s = socket.socket()
    s.settimeout(5 * SLOW)
    if takes_bytes:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes_bytes)
    s.connect((host, int(port)))
    return context.wrap_socket(s, server_hostname=host)


def commands(address, **env):
    env = dict(os.environ, **{"TANDEM_TLS_" + k.upper(): v for k, v in env.items()})

    def run(*words):
        return subprocess.run([TANDEM, *words, "--router", address], env=env, capture_output=True, text=True,
                              timeout=60 * SLOW)
    return run


@test
def test_clients_get_the_same_tokens_by_tls_and_others_are_refused():
    with authorities() as (ours, theirs):
        pair = ours.sign("router")
        with Cluster(plan="split", router_args=words(pair)) as plain:
            want = stub(plain.router.address, ours.pem).all(ASKED)[1]
            assert len(want) == 16
            big = request(ids=[i % 250 + 1 for i in range(2000)], max_tokens=1000, stopping__ignore_eos=True)
            assert len(stub(plain.router.address, ours.pem).all(big)[1]) == 1000
            run = commands(plain.router.address, ca=ours.pem)
            out = run("generate", "--max-tokens", "8", "Hello")
            assert out.returncode == 0 and out.stdout, out.stderr
            health = subprocess.run([TANDEM, "health", plain.router.address], capture_output=True, text=True,
                                    env=dict(os.environ, TANDEM_TLS_CA=ours.pem), timeout=30 * SLOW)
            assert health.returncode == 0, health.stdout
            # others' CA, plain text, another name
            assert refused(lambda: stub(plain.router.address, theirs.pem).all(ASKED, timeout=5 * SLOW))
            assert refused(lambda: Client(plain.router.address).all(ASKED, timeout=5 * SLOW))
            at_once = ("generate", "--wait-ms", "10", "x")
            for env, said in (({"ca": theirs.pem}, "certificate verify failed"), ({}, "TANDEM_TLS_CA"),
                              ({"ca": ours.pem, "name": "elsewhere"}, "Hostname Verification")):
                out = commands(plain.router.address, **env)(*at_once)
                assert out.returncode == 1 and said in out.stderr, (env, out.stderr)
            assert commands(plain.router.address, ca=ours.pem, name="localhost")(*at_once).returncode == 0
            with contextlib.suppress(ConnectionError):
                with socket.create_connection(plain.router.address.rsplit(":", 1), timeout=5 * SLOW) as s:
                    s.sendall(h2.PREFACE + h2.frame(h2.SETTINGS))
                    while s.recv(100):  # an alert at most
                        pass
            for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
                try:
                    shake(plain.router.address, ours.pem, version)
                    raise AssertionError(version)
                except (ssl.SSLError, ConnectionError):
                    pass
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                with shake(plain.router.address, ours.pem, version) as s:
                    assert s.selected_alpn_protocol() == "h2" and s.version() == version.name.replace("_", ".")
                assert resumes(plain.router.address, version, ours.pem)
            with shake(plain.router.address, ours.pem) as s:  # TLS, and then another protocol
                s.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    assert s.recv(100) == b""
            assert stub(plain.router.address, ours.pem).all(ASKED)[1] == want
            plain.audit()


@test
def test_processes_of_a_cluster_show_certificates_to_each_other():
    with authorities() as (ours, theirs):
        args = {role: words(ours.sign(role), ours.pem) for role in ("prefill", "decode", "store", "router")}
        client = ours.sign("client")
        roles = {"prefill": args["prefill"], "decode": args["decode"]}
        with Cluster(plan="split", store=True, roles_args=roles, store_args=args["store"],
                     router_args=[*args["router"], "--tls-client-ca", ours.pem]) as c:
            good = stub(c.router.address, ours.pem, client)
            assert len(good.all(ASKED)[1]) == 16
            run = commands(c.router.address, ca=ours.pem, cert=client[0], key=client[1])
            assert run("generate", "--max-tokens", "4", "x").returncode == 0
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):  # else an expired one stays good
                assert not resumes(c.router.address, version, ours.pem, client), version
            # without a certificate, or with one of others
            assert refused(lambda: stub(c.router.address, ours.pem).all(ASKED, timeout=5 * SLOW))
            for pair in (theirs.sign("stranger"), ours.sign("late", days="-1")):
                assert refused(lambda: stub(c.router.address, ours.pem, pair).all(ASKED, timeout=5 * SLOW)), pair
            for p in c.workers:
                host, port = p.address.rsplit(":", 1)
                conn = h2.Connection(p.address)
                conn.open("/tandem.worker.v1.Worker/Attach")
                wait_until(lambda: conn.is_over, 5, "plain text is refused")
            # a router with the secret but without a certificate of ours reaches no worker
            other = Proc(c, "router", "router-2", ["--model", DEMO, "--workers", c.workers[0].address,
                                                   "--tls-ca", ours.pem, "--name", "router-2"])
            other.start()
            time.sleep(1.5)
            assert [w["state"] for w in c.status(other)["workers"]] != ["ready"], c.status(other)
            other.stop()
            c.audit()


@test
def test_a_new_certificate_is_used_without_a_restart():
    with authorities() as (ours, theirs):
        pair = ours.sign("router")
        with Cluster(plan="split", router_args=words(pair)) as c:
            standing = stub(c.router.address, ours.pem)
            long = standing.generate(request(ids=[1, 2, 3], max_tokens=3000, stopping__ignore_eos=True), timeout=60)
            next(long)
            before = shake(c.router.address, ours.pem).getpeercert()["serialNumber"]
            with open(pair[1], "w") as f:  # it does not fit: the old ones stay
                f.write("no key\n")
            wait_until(lambda: "the certificates stay as they were" in c.log("router"), 10, "a line of the log")
            assert shake(c.router.address, ours.pem).getpeercert()["serialNumber"] == before
            ours.sign("router")
            wait_until(lambda: shake(c.router.address, ours.pem).getpeercert()["serialNumber"] != before, 10,
                       "the new certificate")
            assert sum(len(m.tokens) for m in long) > 2900  # a stream that stands goes on


@test
def test_handshakes_that_are_not_finished_are_ended_and_nothing_leaks():
    with authorities() as (ours, _):
        with Cluster(router_args=words(ours.sign("router"))) as c:
            answer = lambda: stub(c.router.address, ours.pem).all(ASKED)[1]
            answer()
            files = lambda: len(os.listdir(f"/proc/{c.router.pid}/fd"))
            before, rss = files(), memory(c.router)
            address = c.router.address.rsplit(":", 1)
            silent = [socket.create_connection(address) for _ in range(50)]
            halves = [socket.create_connection(address) for _ in range(50)]
            for s in halves:
                s.sendall(bytes.fromhex("160301020001"))
            for _ in range(500 if LONG else 200):
                shake(c.router.address, ours.pem).close()
            answer()
            begin = time.monotonic()
            for s in silent + halves:
                s.settimeout(15 * SLOW)
                with contextlib.suppress(ConnectionError):
                    assert s.recv(10) in (b"",) or True
            assert time.monotonic() - begin < within(10)
            held = [shake(c.router.address, ours.pem) for _ in range(20)]  # TLS, and no word of HTTP/2
            for s in held:
                s.settimeout(15 * SLOW)
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    s.recv(10)
            for s in silent + halves + held:
                s.close()
            wait_until(lambda: files() <= before + 4, 10, lambda: f"{files()} descriptors, {before} before")
            assert SLOW > 1 or memory(c.router) < rss + (32 << 20)
            answer()


@test
def test_a_connection_that_the_server_ends_is_closed_with_its_last_words():
    # gRPC's last words and its end can be there at once.
    with authorities() as (ours, _):
        with Cluster(router_args=words(ours.sign("router"))) as c:
            files = lambda: len(os.listdir(f"/proc/{c.router.pid}/fd"))
            before = files()
            wrong = h2.PREFACE + h2.frame(h2.SETTINGS) + h2.frame(h2.PING, 0, 0, b"1234567")  # one byte is missing
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                def asks(_):
                    with shake(c.router.address, ours.pem) as s:
                        s.sendall(wrong)
                        got = b""
                        while piece := s.recv(4096):
                            got += piece
                        return got
                all_got = list(pool.map(asks, range(64)))
            assert all(got[3] == h2.SETTINGS for got in all_got), all_got
            wait_until(lambda: files() <= before + 2, 10, lambda: f"{files()} descriptors, {before} before")


def prints(process, text):
    """Whether a process prints the text before it ends."""
    got = b""
    while text not in got:
        piece = os.read(process.stdout.fileno(), 4096)
        if not piece:
            return False
        got += piece
    return True


@test
def test_keys_that_change_without_content_end_the_connection():
    """Such records can be made beforehand, and cost the server more than the client. What openssl reads at
    once is one command, or else content."""
    hello = h2.PREFACE + h2.frame(h2.SETTINGS)
    settings = bytes([h2.SETTINGS, 0, 0, 0, 0, 0])  # of the server
    with authorities() as (ours, _):
        with Cluster(router_args=words(ours.sign("router"))) as c:
            for first in (b"", hello):
                p = subprocess.Popen(["openssl", "s_client", "-connect", c.router.address, "-alpn", "h2", "-tls1_3"],
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                try:
                    assert prints(p, b"Verify return code")
                    os.write(p.stdin.fileno(), first)
                    assert not first or prints(p, settings)
                    for i in range(200):  # its command for a change of keys
                        os.write(p.stdin.fileno(), b"k\n")
                        if not prints(p, b"KEYUPDATE"):
                            break
                        if i == 40:
                            time.sleep(0.2)
                            assert p.poll() is None  # some are fine
                    wait_until(lambda: p.poll() is not None, 20, f"the connection is closed, after {len(first)} bytes")
                except BrokenPipeError:
                    pass
                finally:
                    p.kill()
                    p.wait()
            assert len(stub(c.router.address, ours.pem).all(ASKED)[1]) == 16


@test
def test_a_client_that_reads_nothing_is_cut_off_by_tls_too():
    with authorities() as (ours, _):
        metrics = f"127.0.0.1:{free_port()}"
        slow = ["--send-bytes", "16K", "--stall-ms", "500", "--metrics-listen", metrics]
        with Cluster(plan="auto", router_args=[*words(ours.sign("router")), *slow]) as c:
            asked = request(ids=[1, 2, 3], max_tokens=4000, stopping__ignore_eos=True).SerializeToString()
            s = shake(c.router.address, ours.pem, takes_bytes=4096)
            settings = h2.frame(h2.SETTINGS, payload=(4).to_bytes(2, "big") + (1 << 30).to_bytes(4, "big"))
            window = h2.frame(h2.WINDOW_UPDATE, payload=(1 << 30).to_bytes(4, "big"))
            s.sendall(h2.PREFACE + settings + window)
            for stream in (1, 3, 5, 7):
                call = h2.frame(h2.HEADERS, h2.END_HEADERS, stream, h2.call_fields("/tandem.v1.Tandem/Generate"))
                s.sendall(call + h2.frame(h2.DATA, h2.END_STREAM, stream, h2.message(asked)))
            wait_until(lambda: metric(metrics, "tandem_clients_unread_total{}") == 4, 30,
                       lambda: f"all are cut off: {metric(metrics, 'tandem_clients_unread_total{}')}")
            wait_until(lambda: c.status()["running"] == 0, 10, "nothing runs")
            s.close()
            c.audit()


@test
def test_listeners_and_files_are_checked_at_the_start():
    with authorities() as (ours, theirs), tempfile.TemporaryDirectory() as d:
        pair, other = ours.sign("router"), theirs.sign("other")
        keys = os.path.join(d, "keys.json")
        make_key(keys, "a")
        router = [os.path.join(BUILD, "router", "tandem-router"), "--model", DEMO, "--workers", "127.0.0.1:1"]

        def start(*args):
            out = subprocess.run([*router, *args], capture_output=True, text=True, timeout=20 * SLOW)
            return out.returncode, out.stderr.strip().splitlines()[-1]
        local, open_to_all = ["--listen", "127.0.0.1:0"], ["--listen", "0.0.0.0:0"]
        for args, said in (([*local, "--tls-cert", pair[0]], "--tls-key: is missing"),
                           ([*local, "--tls-key", pair[1]], "--tls-cert: is missing"),
                           ([*local, "--tls-cert", pair[0], "--tls-key", other[1]], "key values mismatch"),
                           ([*local, "--tls-cert", d + "/none", "--tls-key", pair[1]], "--tls-cert"),
                           ([*local, *words(pair), "--tls-ca", pair[1]], "--tls-ca"),
                           ([*local, "--tls-client-ca", ours.pem], "--tls-cert: is missing"),
                           ([*open_to_all, *words(pair)], "nothing proves who connects"),
                           ([*local, "--admin-listen", "127.0.0.1:0", "--tls-ca", ours.pem], "--admin-key"),
                           ([*open_to_all, "--api-keys", keys], "nothing proves who connects")):
            code, line = start(*args)
            assert code == 2 and said in line, (args, code, line)
        for more in (["--api-keys", keys], ["--tls-client-ca", ours.pem]):
            args = [*open_to_all, *words(pair), *more]
            child = subprocess.Popen([*router, *args], stderr=subprocess.PIPE)
            time.sleep(1)
            assert child.poll() is None, child.stderr.read()
            child.terminate()
            child.wait(10 * SLOW)
        worker = subprocess.run([os.path.join(BUILD, "decode", "tandem-decode"), "--model", DEMO, *local, *words(pair)],
                                capture_output=True, text=True, timeout=20 * SLOW)
        assert worker.returncode == 2 and "--tls-ca: is missing" in worker.stderr, worker.stderr


if __name__ == "__main__":
    sys.exit(main())
