"""HTTP/2 by hand (RFC 9113), for what no client library would send."""
import socket, struct, threading

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind, flags=0, stream=0, payload=b""):
    return struct.pack(">IBBI", len(payload), kind, flags, stream)[1:] + payload


def field(name, value):
    """A literal header field without indexing and without Huffman coding (RFC 7541, 6.2.2)."""
    def text(t):
        n = len(t)
        if n < 127:
            return bytes([n]) + t
        out, n = b"\x7f", n - 127
        while n >= 128:
            out, n = out + bytes([n % 128 + 128]), n // 128
        return out + bytes([n]) + t
    return b"\0" + text(name) + text(value)


def call_fields(path, *more, without=()):
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x"),
              (b"te", b"trailers"), (b"content-type", b"application/grpc")]
    return b"".join(field(n, v) for n, v in [f for f in fields if f[0] not in without] + list(more))


def message(data, compressed=False):
    return struct.pack(">BI", compressed, len(data)) + data


class Connection:
    """Sends what it is told, ignores the server's flow control, and drops what comes, but counts frames by
    kind."""

    def __init__(self, address, settings=b"", reads=True):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=5)
        self.socket.settimeout(1)  # a server under pressure stops reading
        self.came, self.next, self.is_over = {}, 1, False
        self.send(PREFACE + frame(SETTINGS, payload=settings))
        if reads:
            threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        data = b""
        try:
            while True:
                try:
                    got = self.socket.recv(65536)
                except TimeoutError:
                    continue
                if not got:
                    break
                data += got
                while len(data) >= 9:
                    n = int.from_bytes(data[:3], "big")
                    if len(data) < 9 + n:
                        break
                    self.came[data[3]] = self.came.get(data[3], 0) + 1
                    if data[3] == SETTINGS and not data[4] & ACK:
                        self.send(frame(SETTINGS, ACK))
                    if data[3] == PING and not data[4] & ACK:
                        self.send(frame(PING, ACK, payload=data[9:17]))
                    data = data[9 + n:]
        except OSError:
            pass
        self.is_over = True

    def send(self, data):
        """False: the server has closed the connection, or takes nothing."""
        try:
            self.socket.sendall(data)
            return True
        except OSError:
            self.is_over = True
            return False

    def open(self, path, *more, without=()):
        """Begins a call; returns its stream. Headers longer than a frame go on in further ones."""
        stream, self.next = self.next, self.next + 2
        block = call_fields(path, *more, without=without)
        pieces = [block[at:at + 16384] for at in range(0, len(block), 16384)]
        for i, piece in enumerate(pieces):
            last = END_HEADERS if i == len(pieces) - 1 else 0
            self.send(frame(CONTINUATION if i else HEADERS, last, stream, piece))
        return stream

    def write(self, stream, data, end=False):
        for at in range(0, max(len(data), 1), 16384):
            last = at + 16384 >= len(data)
            if not self.send(frame(DATA, END_STREAM if end and last else 0, stream, data[at:at + 16384])):
                return False
        return True

    def close(self):
        try:
            self.socket.shutdown(socket.SHUT_RDWR)  # the thread that reads holds on to it
        except OSError:
            pass
        self.socket.close()
        self.is_over = True
