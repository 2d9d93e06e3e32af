#!/usr/bin/python3
"""A foreign gRPC client against our server: python_client.py ECHO_TOOL PROTO_DIR RPC_PROTO_DIR. Exits 77
without grpcio."""
import os
import subprocess
import sys
import tempfile
import time

try:
    import grpc
    import google.protobuf  # noqa: F401
except ImportError:
    sys.exit(77)

tool, echo_dir, rpc_dir = sys.argv[1:4]
work = tempfile.TemporaryDirectory()
subprocess.run(["protoc", f"--proto_path={echo_dir}", f"--proto_path={rpc_dir}", f"--python_out={work.name}",
                "echo.proto", "grpc_health.proto", "grpc_reflection.proto"], check=True)
sys.path.insert(0, work.name)
import echo_pb2 as echo  # noqa: E402
import grpc_health_pb2 as health  # noqa: E402
import grpc_reflection_pb2 as reflection  # noqa: E402
from google.protobuf import descriptor_pb2  # noqa: E402


def unary(channel, path, reply):
    return channel.unary_unary(path, lambda m: m.SerializeToString(), reply.FromString)


def server_stream(channel, path, reply):
    return channel.unary_stream(path, lambda m: m.SerializeToString(), reply.FromString)


def bidi(channel, path, reply):
    return channel.stream_stream(path, lambda m: m.SerializeToString(), reply.FromString)


def expect(code, call):
    try:
        call()
    except grpc.RpcError as e:
        assert e.code() == code, (e.code(), e.details())
        return e
    raise AssertionError(f"expected {code}")


def check_echo(channel):
    call = unary(channel, "/tandem.test.Echo/Echo", echo.EchoResponse)
    answer = call(echo.EchoRequest(text=b"hello \x00 there"), timeout=20, metadata=[("x-test", "tenant")])
    assert answer.text == b"hello \x00 there" and answer.header == "tenant" and 0 < answer.remaining_ms <= 20000
    expect(grpc.StatusCode.UNIMPLEMENTED, lambda: call(  # a megabyte may hold a gigabyte
        echo.EchoRequest(text=b"a" * 50000), timeout=20, compression=grpc.Compression.Gzip))
    error = expect(grpc.StatusCode.RESOURCE_EXHAUSTED, lambda: call(
        echo.EchoRequest(text="später".encode(), fail_code=8, retry_after_ms=250), timeout=20))
    assert error.details() == "später", error.details()
    assert dict(error.trailing_metadata())["retry-after-ms"] == "250"
    expect(grpc.StatusCode.RESOURCE_EXHAUSTED, lambda: call(echo.EchoRequest(text=b"a" * (5 << 20)), timeout=20))
    raw = channel.unary_unary("/tandem.test.Echo/Echo")
    error = expect(grpc.StatusCode.INVALID_ARGUMENT, lambda: raw(b"\xff\xff\xff", timeout=20))
    assert error.details() == "tandem.test.EchoRequest: not parseable"
    expect(grpc.StatusCode.UNIMPLEMENTED,
           lambda: unary(channel, "/tandem.test.Echo/Nothing", echo.EchoResponse)(echo.EchoRequest(), timeout=20))


def check_streams(channel):
    count = server_stream(channel, "/tandem.test.Echo/Count", echo.CountResponse)
    got = [m.index for m in count(echo.CountRequest(n=2000, payload_bytes=10), timeout=30)]
    assert got == list(range(2000))
    chat = bidi(channel, "/tandem.test.Echo/Chat", echo.EchoResponse)
    texts = [str(i).encode() for i in range(200)]
    assert [m.text for m in chat((echo.EchoRequest(text=t) for t in texts), timeout=30)] == texts
    endless = count(echo.CountRequest(payload_bytes=10))
    for _ in range(100):
        next(endless)
    endless.cancel()
    expect(grpc.StatusCode.CANCELLED, lambda: list(endless))


def check_deadline(channel):
    call = unary(channel, "/tandem.test.Echo/Echo", echo.EchoResponse)
    start = time.monotonic()
    expect(grpc.StatusCode.DEADLINE_EXCEEDED, lambda: call(echo.EchoRequest(hang=True), timeout=0.3))
    assert 0.25 < time.monotonic() - start < 5


def check_health(channel):
    call = unary(channel, "/grpc.health.v1.Health/Check", health.HealthCheckResponse)
    assert call(health.HealthCheckRequest(), timeout=20).status == health.HealthCheckResponse.SERVING
    expect(grpc.StatusCode.NOT_FOUND, lambda: call(health.HealthCheckRequest(service="none"), timeout=20))


def check_reflection(channel):
    info = bidi(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                reflection.ServerReflectionResponse)
    ask = reflection.ServerReflectionRequest
    listed, found = info(iter([ask(list_services="*"), ask(file_containing_symbol="tandem.test.Echo")]), timeout=20)
    names = {s.name for s in listed.list_services_response.service}
    assert names == {"tandem.test.Echo", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
                     "grpc.reflection.v1.ServerReflection"}, names
    file = descriptor_pb2.FileDescriptorProto.FromString(found.file_descriptor_response.file_descriptor_proto[0])
    assert [m.name for m in file.service[0].method] == ["Echo", "Count", "Chat"]


def main():
    server = subprocess.Popen([tool, "server", "127.0.0.1:0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().strip()
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            for check in (check_echo, check_streams, check_deadline, check_health, check_reflection):
                check(channel)
                print(check.__name__, "ok", file=sys.stderr)
        server.stdin.close()
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
        server.wait()


os.environ.pop("http_proxy", None)
main()
