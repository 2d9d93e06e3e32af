"""Messages only grow. tests/wire/schema.txt lists what the .proto files say of services, fields and values;
each line of it must stay true. `test_schema.py --write` adds the lines that are new, and refuses if one has
gone."""
import os, subprocess, sys, tempfile

try:
    from google.protobuf import descriptor_pb2
except ImportError:
    print("1..0 # SKIP python3-protobuf is not installed")
    sys.exit(0)

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.environ.get("TANDEM_SOURCE_ROOT", os.path.join(HERE, "..", ".."))
LIST = os.path.join(ROOT, "tests", "wire", "schema.txt")
FILES = ["tandem.proto", "admin.proto", "worker.proto"]
FIELD = descriptor_pb2.FieldDescriptorProto


def of_message(prefix, m):
    name = f"{prefix}.{m.name}"
    for f in m.field:
        kind = f.type_name.lstrip(".") or FIELD.Type.Name(f.type)[5:].lower()
        one_of = " in " + m.oneof_decl[f.oneof_index].name if f.HasField("oneof_index") else ""
        repeated = "repeated " if f.label == FIELD.LABEL_REPEATED else ""
        yield f"{name} {f.number} {repeated}{kind} {f.name}{one_of}"
    for inner in m.nested_type:
        yield from of_message(name, inner)
    for e in m.enum_type:
        yield from of_enum(name, e)


def of_enum(prefix, e):
    for v in e.value:
        yield f"{prefix}.{e.name} value {v.number} {v.name}"


def of_file(f):
    for s in f.service:
        for m in s.method:
            ends = [("stream " if streams else "") + kind.lstrip(".") for streams, kind in
                    ((m.client_streaming, m.input_type), (m.server_streaming, m.output_type))]
            yield " ".join([f"{f.package}.{s.name}/{m.name}", *ends])
    for m in f.message_type:
        yield from of_message(f.package, m)
    for e in f.enum_type:
        yield from of_enum(f.package, e)


def now():
    with tempfile.TemporaryDirectory() as d:
        out = os.path.join(d, "set")
        subprocess.run(["protoc", "--proto_path=" + os.path.join(ROOT, "proto"),
                        "--descriptor_set_out=" + out, *FILES], check=True)
        with open(out, "rb") as f:
            files = descriptor_pb2.FileDescriptorSet.FromString(f.read())
    return [line for f in files.file for line in of_file(f)]


def main():
    is_now = now()
    with open(LIST) as f:
        was = f.read().splitlines()
    gone, new = [x for x in was if x not in is_now], [x for x in is_now if x not in was]
    if "--write" in sys.argv and not gone:
        with open(LIST, "w") as f:
            f.write("\n".join(is_now) + "\n")
        return
    print("1..2")
    cases = (("test_schema_keeps_what_was_there", gone, "gone, or changed"),
             ("test_schema_lists_what_is_new", new, "not listed yet: test_schema.py --write"))
    for i, (name, lines, what) in enumerate(cases, 1):
        for line in lines:
            print(f"# {what}: {line}")
        print(("not " if lines else "") + f"ok {i} - {name}")
    sys.exit(bool(gone or new))


main()
