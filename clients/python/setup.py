"""Makes the messages out of tandem.proto, beside this file or in the source tree, when it is built."""
import os, shutil
from setuptools import setup
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))
HERE_PROTO = os.path.join(HERE, "tandem.proto")
TREE_PROTO = os.path.join(HERE, "..", "..", "proto", "tandem.proto")


class Build(build_py):
    def run(self):
        from grpc_tools import protoc
        super().run()
        proto = HERE_PROTO if os.path.exists(HERE_PROTO) else TREE_PROTO
        out = os.path.join(self.build_lib, "tandem_client")
        if protoc.main(["protoc", "--proto_path=" + os.path.dirname(proto), "--python_out=" + out,
                        "--pyi_out=" + out, proto]):
            raise SystemExit("tandem.proto can't be compiled")


setup(cmdclass={"build_py": Build})
