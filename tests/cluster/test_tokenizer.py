"""Token ids, decoding and streaming are those of the Hugging Face tokenizers library, by the cases in
shared/golden."""
import os, subprocess, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *


def check(name):
    folder = os.path.join(SHARED, "golden/tokenizers", name)
    if not os.path.exists(folder):
        raise Skip("shared/golden is absent")
    out = subprocess.run([sys.executable, os.path.join(SHARED, "golden/check_tokens.py"), os.path.join(folder, "cases.json"),
                          "--stream", "--cmd", TANDEM + " tokenize --jsonl --tokenizer {dir}"], capture_output=True,
                         text=True, timeout=300)
    assert out.returncode == 0, out.stdout[-2000:]


@test
def test_qwen():
    check("qwen")


@test
def test_llama3():
    check("llama3")


@test
def test_llama2():
    check("llama2")


@test
def test_mistral():
    check("mistral")


@test
def test_tinystories():
    check("tinystories")


main()
