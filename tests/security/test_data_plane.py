"""The data plane takes bytes from strangers as bytes: whatever is sent to any port on which a worker or store
listens, the process goes on, and serves."""
import os, socket, struct, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from ports import listeners

UCX_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
FRAME_MAGIC = 0x314D4454  # transfer/wire_tcp.c


def frame(header, payload_len=0):
    return struct.pack("<IHHQ", FRAME_MAGIC, len(header), 0, payload_len) + header


STRANGE = {
    "ucx magic and a put": UCX_MAGIC + struct.pack("<BIQQ", 3, 24, 0x404000, 8) + b"\xee" * 64,
    "ucx magic and noise": UCX_MAGIC + bytes(range(256)) * 16,
    "ucx magic alone": UCX_MAGIC,
    "noise": os.urandom(4096),
    "zeros": bytes(65536),
    "frame with a payload": frame(bytes(8), 1 << 40) + bytes(64),
    "frame with a long header": frame(bytes(65535)),
    "messages of the ucx layer": b"".join(
        frame(struct.pack("<HHI", kind, 3, 0) + bytes(36)) for kind in (0x5501, 0x5502, 0x5503)),
    "messages of the mapped arena": b"".join(
        frame(struct.pack("<HHI", kind, 0, 1) + bytes(60)) for kind in (0x4D01, 0x4D02, 0x4D03, 0x4D04)),
}


def send_strange(address, data):
    """Sends it on three connections, and keeps one half sent."""
    for _ in range(3):
        with socket.create_connection(address, timeout=5) as s:
            s.settimeout(5)
            try:
                s.sendall(data)
                s.shutdown(socket.SHUT_WR)
                while s.recv(4096):
                    pass
            except OSError:
                pass  # closed by the other side: it has read enough
    with socket.create_connection(address, timeout=5) as s:
        try:
            s.sendall(data[:-1])
        except OSError:
            pass


def attacked(transports):
    asked = {"id": "1", "prompt_ids": list(range(1, 200)), "max_tokens": 16, "temperature": 0}
    args = ["--transports", transports]
    with Cluster(plan="split", store=True, worker_args=args, store_args=args) as c:
        before = c.generate([asked])["1"]
        assert "error" not in before, before
        for p in c.workers:
            doors = listeners(p.child.pid)
            assert len(doors) == 2, (p.name, doors)  # for routers and for transfers: UCX has none of its own
            for door in doors:
                for data in STRANGE.values():
                    send_strange(door, data)
        for p in c.workers:
            assert p.child.poll() is None, p.name
        after = c.generate([asked])["1"]
        assert after["token_ids"] == before["token_ids"], (before, after)
        c.audit()


@test
def test_bytes_of_strangers_end_nothing():
    attacked("auto")


@test
def test_bytes_of_strangers_end_nothing_where_ucx_is_asked_for():
    attacked("ucx")


def transferred(secret_args=(), **kw):
    """(tokens, name of the transport) of a request whose pages go from the prefill to the decode worker."""
    asked = {"id": "1", "prompt_ids": list(range(1, 200)), "max_tokens": 16, "temperature": 0}
    with Cluster(plan="split", worker_args=["--transports", "tcp", *secret_args], **kw) as c:
        answer = c.generate([asked])["1"]
        assert "error" not in answer, answer
        c.audit()
        return answer["token_ids"], {w["transport"] for w in c.status()["workers"]}


@test
def test_encrypted_pages_give_the_same_tokens():
    plain, transport = transferred()
    assert transport == {"tcp"}, transport
    encrypted, transport = transferred(["--kv-encrypt"])
    assert transport == {"tcp+tls"} and encrypted == plain, (transport, encrypted, plain)


@test
def test_who_encrypts_and_who_does_not_find_out_at_once_and_say_so():
    for role in ("prefill", "decode"):
        with Cluster(plan="auto", worker_args=["--transports", "tcp"], roles_args={role: ["--kv-encrypt"]}) as c:
            def logs():
                return "".join(c.log(w.name) for w in c.workers)
            wait_until(lambda: logs().count("--kv-encrypt") >= 2, 5, logs)
            assert "a peer encrypts its transfers (--kv-encrypt), this process does not" in logs() or \
                "both sides need --kv-encrypt, and the same secret" in logs()
            wait_until(lambda: any(w["unreached"] for w in c.status()["workers"]), 5, c.status)
            answer = c.generate([{"id": "1", "prompt_ids": [1, 2, 3], "max_tokens": 4}])["1"]  # in one worker
            assert "error" not in answer, answer
    for words, said in ((["--kv-encrypt"], "needs the cluster secret"),
                        (["--kv-encrypt", "--secret", "a", "--transports", "rc,tcp", "--trusted-network"],
                         "does not encrypt")):
        program = [os.path.join(BUILD, "decode", "tandem-decode"), "--model", DEMO, "--listen", "127.0.0.1:0"]
        out = subprocess.run([*program, *words], capture_output=True, text=True, timeout=60 * SLOW)
        assert out.returncode == 2 and said in out.stderr, out


if __name__ == "__main__":
    sys.exit(main())
