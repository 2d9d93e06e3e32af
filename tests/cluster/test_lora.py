"""Requests with adapters: by name, together, split, aggregated and kept, from stores, after a loss; and
refusals."""
import array, os, struct, sys
sys.path.insert(0, os.path.dirname(__file__))
from families import *
from client import Client, request

NAME = "mistral"


def write_adapter(seed, rank, modules):
    """Writes an adapter of random numbers, as PEFT saves one."""
    path = tempfile.mkdtemp(prefix="tandem-lora-")
    atexit.register(shutil.rmtree, path, True)
    config = json.load(open(os.path.join(GOLDEN, NAME, "config.json")))
    hidden, rnd, header, data = config["hidden_size"], random.Random(seed), {}, b""
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"self_attn.q_proj": (q, hidden), "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
              "mlp.up_proj": (config["intermediate_size"], hidden), "mlp.down_proj": (hidden, config["intermediate_size"])}
    for layer in range(config["num_hidden_layers"]):
        for module in modules:
            rows, cols = shapes[module]
            for half, shape in (("A", (rank, cols)), ("B", (rows, rank))):
                numbers = array.array("f", (rnd.uniform(-0.2, 0.2) for _ in range(shape[0] * shape[1]))).tobytes()
                header[f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"] = {
                    "dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(numbers)]}
                data += numbers
    text = json.dumps(header).encode()
    with open(os.path.join(path, "adapter_model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)
    with open(os.path.join(path, "adapter_config.json"), "w") as f:
        json.dump({"peft_type": "LORA", "lora_alpha": 2 * rank, "bias": "none"}, f)
    return path


A = write_adapter(1, 4, ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"])
B = write_adapter(2, 2, ["self_attn.o_proj", "mlp.up_proj"])
SERVED = ["--lora", f"a={A},b={B}"]


def requests(loras=("", "a", "b")):
    return [{**r, "id": f"{r['id']}-{lora}", **({"lora": lora} if lora else {})}
            for r in own_requests(n=6, max_tokens=24) for lora in loras]


@test
def test_answers_are_the_same_however_requests_with_adapters_are_served():
    with Cluster(model=model(NAME), prefill=0, decode=1, worker_args=SERVED) as c:
        want = tokens(c.generate(requests(), ["--concurrency", "1"]))
    plain = alone(NAME, own_requests(n=6, max_tokens=24))
    for key, value in plain.items():
        assert value == want[f"{key}-"], "who asks for none is changed"
        assert len({json.dumps(want[f"{key}-{lora}"]) for lora in ("", "a", "b")}) == 3, "adapters change nothing"
    for plan in ("split", "aggregated", "kept", "auto"):
        with Cluster(model=model(NAME), prefill=1, decode=2, store=True, plan=plan, worker_args=SERVED) as c:
            first = c.generate(requests(), ["--concurrency", "9"])
            assert tokens(first) == want, plan
            again = c.generate(requests(), ["--concurrency", "9"])
            assert tokens(again) == want, f"{plan}, from caches"
            c.audit()


@test
def test_blocks_of_one_adapter_are_not_found_by_another():
    ids = list(range(2, 102))
    request = lambda lora: {"id": lora or "none", "prompt_ids": ids, "max_tokens": 2, "ignore_eos": True,
                            **({"lora": lora} if lora else {})}
    with Cluster(model=model(NAME), prefill=0, decode=1, worker_args=SERVED) as c:
        cached = [r["usage"]["cached_tokens"]["worker"]
                  for lora in ("", "a", "b", "a", "") for r in c.generate([request(lora)]).values()]
        assert cached[:3] == [0, 0, 0] and cached[3] > 0 and cached[4] > 0, cached


def lose_a_worker(want):
    """Re-plans that the loss of one of two decode workers cost."""
    with Cluster(model=model(NAME), prefill=1, decode=2, plan="split", worker_args=SERVED) as c:
        many = [{**r, "id": f"{r['id']}/{i}"} for i in range(20) for r in requests(("a", "b"))]
        p = subprocess.Popen([TANDEM, "generate", "--jsonl", "--concurrency", "8", "--router", c.router.address],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=lambda: (p.stdin.write("".join(json.dumps(r) + "\n" for r in many)), p.stdin.close())).start()
        results = [json.loads(p.stdout.readline()) for _ in range(3)]
        c["decode-0"].kill()
        results += map(json.loads, p.stdout)
        assert p.wait(60 * SLOW) == 0 and len(results) == len(many)
        for r in results:
            assert (r["token_ids"], r["logprobs"]) == want[r["id"].split("/")[0]], r["id"]
    return sum(r.get("replans", 0) for r in results)


@test
def test_requests_with_adapters_go_on_after_their_worker_is_lost():
    with Cluster(model=model(NAME), prefill=0, decode=1, worker_args=SERVED) as c:
        want = tokens(c.generate(requests(("a", "b")), ["--concurrency", "1"]))
    # The worker may have had nothing to do just then.
    assert any(lose_a_worker(want) for _ in range(3))


@test
def test_an_adapter_is_a_model_too():
    with Cluster(model=model(NAME), prefill=1, decode=1, worker_args=SERVED) as c:
        asked = requests(("a", "b"))
        by_model = [{**{k: v for k, v in r.items() if k != "lora"}, "model": r["lora"]} for r in asked]
        both = [{**r, "model": r["lora"]} for r in asked]
        want = {i: r["token_ids"] for i, r in c.generate(asked).items()}
        for way in (by_model, both):
            assert {i: r["token_ids"] for i, r in c.generate(way).items()} == want
        code, text = Client(c.router.address).error(request(ids=[1, 2], max_tokens=1, model="a", lora="b"))
        assert code == "INVALID_ARGUMENT" and text.startswith("lora: "), (code, text)


@test
def test_what_is_not_served_is_refused_by_name():
    with Cluster(model=model(NAME), prefill=0, decode=1, worker_args=SERVED) as c:
        out = subprocess.run([TANDEM, "generate", "--router", c.router.address, "--lora", "c", "x"], capture_output=True, text=True)
        assert out.returncode and "NOT_FOUND" in out.stderr and "a, b" in out.stderr, out.stderr
    for option, word in ((f"a={A},a={B}", "twice"), ("a", "NAME=DIR"), ("a=/none", "adapter_config.json")):
        out = subprocess.run([os.path.join(BUILD, "decode/tandem-decode"), "--model", model(NAME), "--listen", "127.0.0.1:0",
                              "--lora", option], capture_output=True, text=True, timeout=30 * SLOW)
        assert out.returncode and word in out.stderr, out.stderr


@test
def test_a_worker_with_other_adapters_is_refused():
    with Cluster(model=model(NAME), prefill=0, decode=1, worker_args=SERVED) as c:
        other = Proc(c, "decode", "other", ["--model", model(NAME), "--threads", "1", "--pool-bytes", "64M",
                                            "--routers", c.router.joins, "--lora", f"a={B},b={A}"]).start()
        try:
            wait_until(lambda: "adapters differ" in c.log("router") + c.log("other"), 20, "it is refused")
            assert all(w["name"] != "other" or w["state"] != "ready" for w in c.status()["workers"])
        finally:
            other.stop()


main()
