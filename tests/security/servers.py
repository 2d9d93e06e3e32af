"""Servers that a cluster's processes dial and that flood them: who has taken a worker's or a router's port.

SERVERS: name -> function(socket), which sends after the first call has come, until the socket is closed.
"""
import itertools, socket, struct, threading
import h2
from lab import MIB

HEAD = h2.field(b":status", b"200") + h2.field(b"content-type", b"application/grpc")
SERVERS = {}


def server(act):
    SERVERS[act.__name__] = act
    return act


def again(s, frames):
    while True:
        s.sendall(frames)


def answers(s, flags=h2.END_HEADERS, head=HEAD):
    s.sendall(h2.frame(h2.HEADERS, flags, 1, head))


@server
def pings(s):
    again(s, h2.frame(h2.PING, payload=bytes(8)) * 1000)


@server
def settings(s):
    again(s, h2.frame(h2.SETTINGS, payload=struct.pack(">HIHI", 4, 65535, 4, 1)) * 500)


@server
def a_long_message(s):
    answers(s)
    s.sendall(h2.frame(h2.DATA, 0, 1, struct.pack(">BI", 0, 60 * MIB)))
    again(s, h2.frame(h2.DATA, 0, 1, bytes(16384)))


@server
def empty_messages(s):
    answers(s)
    again(s, h2.frame(h2.DATA, 0, 1, struct.pack(">BI", 0, 0) * 1000))


@server
def endless_headers(s):
    answers(s, 0)
    for i in itertools.count():
        s.sendall(h2.frame(h2.CONTINUATION, 0, 1, h2.field(b"x%d" % i, b"y" * 16000)))


@server
def many_headers(s):
    answers(s, 0)
    again(s, h2.frame(h2.CONTINUATION, 0, 1, h2.field(b"x", b"") * 2000))


@server
def empty_continuations(s):
    answers(s, 0, b"")
    again(s, h2.frame(h2.CONTINUATION, 0, 1) * 1000)


@server
def empty_data(s):
    answers(s)
    again(s, h2.frame(h2.DATA, 0, 1) * 1000)


@server
def window_updates(s):
    again(s, h2.frame(h2.WINDOW_UPDATE, payload=struct.pack(">I", 1)) * 1000)


@server
def priorities(s):
    again(s, h2.frame(2, 0, 1, bytes(5)) * 1000)


@server
def unknown_frames(s):
    again(s, h2.frame(99, 0, 0, bytes(100)) * 200)


@server
def farewells(s):
    again(s, h2.frame(h2.GOAWAY, 0, 0, struct.pack(">II", 1, 0) + bytes(100)) * 200)


@server
def answers_to_other_calls(s):
    again(s, h2.frame(h2.HEADERS, h2.END_HEADERS, 3, HEAD) * 200)


@server
def pushed_streams(s):
    again(s, h2.frame(5, h2.END_HEADERS, 1, struct.pack(">I", 2) + HEAD) * 200)


class Server:
    """Listens at the address and acts on each connection."""

    def __init__(self, address, act):
        host, port = address.rsplit(":", 1)
        self.act, self.n, self.sockets = act, 0, []
        self.listener = socket.create_server((host, int(port)))
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                s, _ = self.listener.accept()
            except OSError:
                return
            self.n += 1
            self.sockets.append(s)
            threading.Thread(target=self.serve, args=(s,), daemon=True).start()

    def serve(self, s):
        try:
            s.settimeout(20)
            s.sendall(h2.frame(h2.SETTINGS) + h2.frame(h2.SETTINGS, h2.ACK))
            got = b""
            while len(got) < 200:  # preface, settings, and the headers of a call
                more = s.recv(65536)
                if not more:
                    return
                got += more
            self.act(s)
        except OSError:
            pass
        finally:
            s.close()

    def close(self):
        for s in (self.listener, *self.sockets):
            try:
                s.shutdown(socket.SHUT_RDWR)  # the thread that uses it holds on to it
            except OSError:
                pass
            s.close()
