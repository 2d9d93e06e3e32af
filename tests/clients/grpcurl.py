"""grpcurl.py -plaintext -d JSON ADDRESS SERVICE/METHOD: as grpcurl, by the schema that the server shows."""
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
from client import grpc, reflection_pb
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

assert sys.argv[1] == "-plaintext" and sys.argv[2] == "-d" and len(sys.argv) == 6, __doc__
data, address, (service, method) = sys.argv[3], sys.argv[4], sys.argv[5].split("/")
channel = grpc.insecure_channel(address)
ask = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                            request_serializer=lambda m: m.SerializeToString(),
                            response_deserializer=reflection_pb.ServerReflectionResponse.FromString)
answer = next(ask(iter([reflection_pb.ServerReflectionRequest(file_containing_symbol=service)]), timeout=10))
files = [descriptor_pb2.FileDescriptorProto.FromString(f) for f in answer.file_descriptor_response.file_descriptor_proto]
pool = descriptor_pool.DescriptorPool()
for file in files:
    pool.Add(file)
call = next(m for f in files for s in f.service if f"{f.package}.{s.name}" == service for m in s.method if m.name == method)
request, response = (message_factory.MessageFactory(pool).GetPrototype(pool.FindMessageTypeByName(t.lstrip(".")))
                     for t in (call.input_type, call.output_type))
make = channel.unary_stream if call.server_streaming else channel.unary_unary
try:
    answers = make(f"/{service}/{method}", request_serializer=lambda m: m.SerializeToString(),
                   response_deserializer=response.FromString)(json_format.Parse(data, request()), timeout=30)
    for m in answers if call.server_streaming else [answers]:
        print(json_format.MessageToJson(m))
except grpc.RpcError as e:
    print("ERROR:\n  Code: " + "".join(w.title() for w in e.code().name.split("_")) + "\n  Message: " + e.details())
    sys.exit(64 + e.code().value[0])
