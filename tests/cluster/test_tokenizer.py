"""Token ids, decoding and streaming as the Hugging Face tokenizers library has them, by the cases in shared/golden."""
import os, re, subprocess, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *


def check(name, only=None):
    folder = os.path.join(SHARED, "golden/tokenizers", name)
    if not os.path.exists(folder):
        raise Skip("shared/golden is absent")
    args = ["--only", only] if only else []
    out = subprocess.run([sys.executable, os.path.join(SHARED, "golden/check_tokens.py"), os.path.join(folder, "cases.json"),
                          "--stream", *args, "--cmd", TANDEM + " tokenize --jsonl --tokenizer {dir}"], capture_output=True,
                         text=True, timeout=300)
    assert out.returncode == 0, out.stdout[-2000:]


@test
def test_qwen_with_chat():
    check("qwen")


@test
def test_llama3():
    check("llama3", "^(?!chat)")


@test
def test_llama2():
    check("llama2", "^(?!chat)")


@test
def test_mistral():
    check("mistral", "^(?!chat)")


@test
def test_tinystories():
    check("tinystories")


@test
def test_other_chat_templates_are_refused_by_name():
    folder = os.path.join(SHARED, "golden/tokenizers/llama3")
    if not os.path.exists(folder):
        raise Skip("shared/golden is absent")
    line = json.dumps({"id": "x", "messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True})
    out = subprocess.run([TANDEM, "tokenize", "--jsonl", "--tokenizer", folder], input=line, capture_output=True, text=True)
    assert "not ChatML" in json.loads(out.stdout)["error"], out


main()
