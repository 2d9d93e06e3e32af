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


if __name__ == "__main__":
    sys.exit(main())
