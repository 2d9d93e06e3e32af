"""The API as a Python grpcio client sees it, generated from proto/ when a test starts."""
import hmac, os, struct, subprocess, sys, tempfile

try:
    import grpc
except ImportError:
    print("1..0 # SKIP python3-grpcio is not installed")
    sys.exit(0)

SOURCE = os.environ["TANDEM_SOURCE_ROOT"]
SLOW = 6 if os.environ.get("TANDEM_SANITIZE") else 1  # under sanitizers everything takes longer
with tempfile.TemporaryDirectory(prefix="tandem-pb-") as _dir:
    for path in ("proto", "proto/rpc"):
        full = os.path.join(SOURCE, path)
        files = [f for f in os.listdir(full) if f in ("tandem.proto", "admin.proto", "worker.proto", "grpc_health.proto",
                                                      "grpc_reflection.proto", "google_rpc.proto")]
        subprocess.run(["protoc", "--proto_path=" + full, "--python_out=" + _dir, *files], check=True)
    sys.path.insert(0, _dir)
    import tandem_pb2 as pb, admin_pb2 as admin_pb, worker_pb2 as worker_pb, grpc_health_pb2 as health_pb, grpc_reflection_pb2 as reflection_pb
    import google_rpc_pb2 as google_pb
    sys.path.remove(_dir)


class Router:
    """A stream to a worker, as a router has it: iterating gives the worker's messages, its hello first."""

    def __init__(self, address, secret, incarnation=77):
        import queue
        self.queue, self.n, self.incarnation = queue.Queue(), 0, incarnation
        nonce = os.urandom(16)
        self.call = grpc.insecure_channel(address).stream_stream(
            "/tandem.worker.v1.Worker/Attach", request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=worker_pb.WorkerMessage.FromString)(iter(self.queue.get, None), timeout=30 * SLOW)
        self.say(worker_pb.RouterMessage(hello=worker_pb.RouterHello(protocol=3, incarnation=incarnation, nonce=nonce)))
        challenge = next(self.call).challenge
        said = struct.pack("<Q", incarnation) + nonce + challenge.nonce
        where = challenge.address + b"\0" + challenge.local
        assert challenge.proof == hmac.digest(secret.encode(), b"tandem-attach-worker\0" + said + where, "sha256")
        self.proof = worker_pb.RouterMessage(proof=worker_pb.Proof(proof=hmac.digest(
            secret.encode(), b"tandem-attach-router\0" + said, "sha256")))
        self.say(self.proof)

    def say(self, message):
        self.n += 1
        message.number = self.n
        self.queue.put(message)

    def __iter__(self):
        return self.call

    def close(self):
        self.queue.put(None)
        self.call.cancel()


class Client:
    def __init__(self, address):
        self.channel = grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])

    def _call(self, kind, path, response):
        return getattr(self.channel, kind)(path, request_serializer=lambda m: m if isinstance(m, bytes) else
                                           m.SerializeToString(), response_deserializer=response.FromString)

    def generate(self, request, **kw):
        if kw.get("timeout", 0) >= 30:  # such a long timeout is only a limit, and not tested
            kw["timeout"] *= SLOW
        return self._call("unary_stream", "/tandem.v1.Tandem/Generate", pb.GenerateResponse)(request, **kw)

    def tokenize(self, request, **kw):
        return self._call("unary_unary", "/tandem.v1.Tandem/Tokenize", pb.TokenizeResponse)(request, **kw)

    def detokenize(self, request, **kw):
        return self._call("unary_unary", "/tandem.v1.Tandem/Detokenize", pb.DetokenizeResponse)(request, **kw)

    def pin(self, request):
        return self._call("unary_unary", "/tandem.v1.Tandem/Pin", pb.PinResponse)(request, timeout=10 * SLOW)

    def flush(self, request):
        return self._call("unary_unary", "/tandem.v1.Tandem/Flush", pb.FlushResponse)(request, timeout=10 * SLOW)

    def list_models(self):
        return self._call("unary_unary", "/tandem.v1.Tandem/ListModels", pb.ListModelsResponse)(pb.ListModelsRequest(),
                                                                                            timeout=10)

    def health(self, service=""):
        return self._call("unary_unary", "/grpc.health.v1.Health/Check", health_pb.HealthCheckResponse)(
            health_pb.HealthCheckRequest(service=service), timeout=10).status

    def services(self, version="v1alpha"):
        call = self._call("stream_stream", f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                          reflection_pb.ServerReflectionResponse)
        answers = call(iter([reflection_pb.ServerReflectionRequest(list_services="")]), timeout=10)
        return [s.name for s in next(answers).list_services_response.service]

    def all(self, request, **kw):
        """Returns (text, ids, end)."""
        text, ids, end = b"", [], None
        for m in self.generate(request, timeout=kw.pop("timeout", 60), **kw):
            text += m.text.encode()
            ids += [t.id for t in m.tokens]
            end = m.end if m.HasField("end") else end
        return text, ids, end

    def error(self, request, timeout=30):
        """(code name, details) of a request that must fail; ("OK", "") if it succeeded."""
        try:
            self.all(request, timeout=timeout)
            return "OK", ""
        except grpc.RpcError as e:
            return e.code().name, e.details()


def raw(r, bad):
    """The bytes of a request in which a field of as many "\1" has these bytes, which no message of Python's
    can have."""
    mark, packed = b"\1" * len(bad), r.SerializeToString()
    assert packed.count(mark) == 1, packed
    return packed.replace(mark, bad)


def request(ids=None, text=None, chat=None, max_tokens=None, greedy=True, **kw):
    r = pb.GenerateRequest(want_ids=True)
    if ids is not None:
        r.tokens.ids.extend(ids)
        r.tokens.SetInParent()
    if text is not None:
        r.text = text
    for role, content in chat or []:
        r.chat.messages.add(role=role, content=content)
    if max_tokens is not None:
        r.stopping.max_tokens = max_tokens
    if greedy:
        r.sampling.temperature = 0
    for path, value in kw.items():
        *parents, last = path.split("__")
        at = r
        for p in parents:
            at = getattr(at, p)
        if isinstance(value, list):
            getattr(at, last).extend(value)
        else:
            setattr(at, last, value)
    return r
