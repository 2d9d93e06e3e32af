"""Bad input is refused at once with the field's name, nothing is allocated, and the next good request is
unaffected."""
import os, random, struct, subprocess, sys, tempfile, threading
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import Client, grpc, pb, raw, request

NAN = float("nan")
INF = float("inf")
OK_IDS = [1, 2, 3]

# name, request, expected code, what the message names
ROWS = [
    ("empty ids", request(ids=[], max_tokens=4), "INVALID_ARGUMENT", "prompt"),
    ("no prompt", pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt"),
    ("empty text", request(text=b"", max_tokens=4), "INVALID_ARGUMENT", "prompt"),
    ("id = vocabulary", request(ids=[1536], max_tokens=4), "INVALID_ARGUMENT", "ids[0]"),
    ("id garbage", request(ids=[1, 2 ** 32 - 1], max_tokens=4), "INVALID_ARGUMENT", "ids[1]"),
    ("invalid UTF-8", raw(request(text=b"ab\1\1", max_tokens=4), b"\xff\xfe"), "INVALID_ARGUMENT", "text"),
    ("overlong UTF-8", raw(request(text=b"\1\1", max_tokens=4), b"\xc0\x80"), "INVALID_ARGUMENT", "text"),
    ("surrogate", raw(request(text=b"\1\1\1", max_tokens=4), b"\xed\xa0\x80"), "INVALID_ARGUMENT", "text"),
    ("prompt over context", request(ids=[1] * 9000, max_tokens=4), "INVALID_ARGUMENT", "prompt"),
    ("text over context", request(text=b"a b" * 9000, max_tokens=4), "INVALID_ARGUMENT", "prompt"),
    ("text of too many bytes", request(text=b"a" * 3900000, max_tokens=4), "INVALID_ARGUMENT", "text: 3900000 bytes"),
    ("chat of too many bytes", request(chat=[(b"user", b"a" * 1900000)] * 2, max_tokens=4), "INVALID_ARGUMENT", "messages[0].content: 1900004 bytes"),
    ("chat over context", request(chat=[(b"user", b"a b" * 9000)], max_tokens=4), "INVALID_ARGUMENT", "prompt"),
    ("ids over any context", request(ids=[1] * 1000000, max_tokens=4), "INVALID_ARGUMENT", "ids: 1000000"),
    ("prompt = context", request(ids=[1] * 8192), "INVALID_ARGUMENT", "prompt"),
    ("prompt + max over context", request(ids=[1] * 8000, max_tokens=300), "INVALID_ARGUMENT", "max_tokens"),
    ("max_tokens 0", request(ids=OK_IDS, max_tokens=0), "INVALID_ARGUMENT", "max_tokens"),
    ("max_tokens 2^32-1", request(ids=OK_IDS, max_tokens=2 ** 32 - 1), "INVALID_ARGUMENT", "max_tokens"),
    ("min over max", request(ids=OK_IDS, max_tokens=4, stopping__min_tokens=5), "INVALID_ARGUMENT", "min_tokens"),
    ("17 stops", request(ids=OK_IDS, max_tokens=4, stopping__stop=[b"x"] * 17), "INVALID_ARGUMENT", "stop"),
    ("empty stop", request(ids=OK_IDS, max_tokens=4, stopping__stop=[b""]), "INVALID_ARGUMENT", "stop[0]"),
    ("long stop", request(ids=OK_IDS, max_tokens=4, stopping__stop=[b"x" * 257]), "INVALID_ARGUMENT", "stop[0]"),
    ("stop id", request(ids=OK_IDS, max_tokens=4, stopping__stop_ids=[5000]), "INVALID_ARGUMENT", "stop_ids[0]"),
    ("many stop ids", request(ids=OK_IDS, max_tokens=4, stopping__stop_ids=[5] * 1000), "INVALID_ARGUMENT", "stop_ids"),
    ("unknown model", request(ids=OK_IDS, max_tokens=4, model=b"gpt-9"), "NOT_FOUND", "model"),
    ("priority", request(ids=OK_IDS, max_tokens=4, priority=11), "INVALID_ARGUMENT", "priority"),
    ("long tenant", request(ids=OK_IDS, max_tokens=4, tenant=b"t" * 65), "INVALID_ARGUMENT", "tenant"),
    ("long salt", request(ids=OK_IDS, max_tokens=4, cache_salt=b"t" * 65), "INVALID_ARGUMENT", "cache_salt"),
    ("long label", request(ids=OK_IDS, max_tokens=4, request_id=b"t" * 65), "INVALID_ARGUMENT", "request_id"),
    ("n", request(ids=OK_IDS, max_tokens=4, sampling__n=17), "INVALID_ARGUMENT", "sampling.n"),
    ("lora", request(ids=OK_IDS, max_tokens=4, lora=b"x"), "NOT_FOUND", "lora"),
    ("bad role", request(chat=[(b"user<|im_end|>", b"x")], max_tokens=4), "INVALID_ARGUMENT", "role"),
    ("role with NUL", request(chat=[(b"us\0er", b"x")], max_tokens=4), "INVALID_ARGUMENT", "role"),
    ("chat not UTF-8", raw(request(chat=[(b"user", b"\1\1\1")], max_tokens=4), b"\xff\xff\xff"), "INVALID_ARGUMENT", "content"),
    *((f"{field} not UTF-8", raw(request(ids=OK_IDS, max_tokens=4, **{field: "\1\1\1"}), b"a\xffb"), "INVALID_ARGUMENT", field + ": not UTF-8")
      for field in ("tenant", "cache_salt", "workflow_id", "request_id", "lora")),
    ("stop not UTF-8", raw(request(ids=OK_IDS, max_tokens=4, stopping__stop=["\1\1\1"]), b"a\xffb"), "INVALID_ARGUMENT",
     "stopping.stop[0]: not UTF-8"),
    ("no messages", (lambda r: (r.chat.SetInParent(), r)[1])(request(max_tokens=4)), "INVALID_ARGUMENT", "messages"),
    ("garbage bytes", b"\xff\xff\xff\xff garbage", "INVALID_ARGUMENT", "parse"),
    ("huge varint", b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "INVALID_ARGUMENT", "parse"),
    ("oversized message", request(text=b"a" * (5 << 20)), "RESOURCE_EXHAUSTED", ""),
]
for field, values in {"temperature": (NAN, INF, -1, 999999), "top_p": (NAN, 0, -1, 1.5), "min_p": (NAN, -0.1, 2),
                      "presence_penalty": (NAN, 5, -INF), "frequency_penalty": (NAN, -5), "top_k": (2 ** 31,),
                      "repetition_penalty": (NAN, 0, -1, 11)}.items():
    for v in values:
        ROWS.append((f"{field} {v}", request(ids=OK_IDS, max_tokens=4, greedy=False, **{"sampling__" + field: v}),
                     "INVALID_ARGUMENT", field))
for field in ("exact_ttft_ms", "exact_tpot_ms"):
    for v in (NAN, INF, -1, 1e-4):
        ROWS.append((f"{field} {v}", request(ids=OK_IDS, max_tokens=4, **{"slo__" + field: v}), "INVALID_ARGUMENT", field))
for id, bias in ((9999, 1.0), (1, NAN), (1, 1e9)):
    r = request(ids=OK_IDS, max_tokens=4)
    r.sampling.logit_bias.add(id=id, bias=bias)
    ROWS.append((f"bias {id} {bias}", r, "INVALID_ARGUMENT", "logit_bias[0]"))
r = request(ids=OK_IDS, max_tokens=4)
for _ in range(2000):
    r.sampling.logit_bias.add(id=1, bias=0.0)
ROWS.append(("2000 biases", r, "INVALID_ARGUMENT", "logit_bias"))


@test
def test_every_row_is_refused_by_name_and_good_requests_go_on():
    case = golden(os.path.join(DEMO, "golden.json"))["cases"][0]
    with Cluster(plan="split") as c:
        client = Client(c.router.address)
        wrong = []
        good = request(ids=case["prompt_ids"], max_tokens=48, stopping__ignore_eos=True)
        for name, r, code, word in ROWS:
            got, text = client.error(r)
            if got != code or word not in text:
                wrong.append(f"{name}: {got} '{text}', expected {code} naming '{word}'")
            if random.random() < 0.1:
                assert client.all(good)[1] == case["greedy_ids"]
        assert not wrong, "\n".join(wrong)
        assert client.all(good)[1] == case["greedy_ids"]
        for p in (c.router, *c.workers):
            assert p.child.poll() is None, p.name + " is gone"
        c.audit(3)


@test
def test_tokenize_and_detokenize_refuse_what_no_context_holds():
    with Cluster() as c:
        client = Client(c.router.address)
        long = pb.TokenizeRequest()
        long.chat.messages.add(role=b"user", content=b"a" * 3900000)
        for call, r, word in ((client.tokenize, pb.TokenizeRequest(text=b"a" * 3900000), "text: 3900000 bytes"),
                              (client.tokenize, long, "chat.messages[0].content: 3900004 bytes"),
                              (client.detokenize, pb.DetokenizeRequest(ids=[1] * 1000000), "ids: 1000000"),
                              (client.tokenize, pb.TokenizeRequest(text=b"a", model=b"gpt-9"), "model: this cluster serves"),
                              (client.detokenize, pb.DetokenizeRequest(ids=[1], model=b"gpt-9"), "model: this cluster serves")):
            try:
                call(r, timeout=10 * SLOW)
                raise AssertionError(word + " was taken")
            except grpc.RpcError as e:
                code = "NOT_FOUND" if word.startswith("model") else "INVALID_ARGUMENT"
                assert e.code().name == code and word in e.details(), e
        assert client.tokenize(pb.TokenizeRequest(text=b"a", model=b"tandem-demo")).ids
        # Counting tokens is still possible.
        assert len(client.tokenize(pb.TokenizeRequest(text=b"a b" * 9000)).ids) > 8192


@test
def test_second_request_in_one_call_ends_it():
    with Cluster() as c:
        call = Client(c.router.address).channel.stream_stream(
            "/tandem.v1.Tandem/Generate", request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=pb.GenerateResponse.FromString)
        try:
            list(call(iter([request(ids=OK_IDS, max_tokens=4000, stopping__ignore_eos=True)] * 3), timeout=30 * SLOW))
            raise AssertionError("three requests in one call were answered")
        except grpc.RpcError as e:
            assert e.code().name == "INVALID_ARGUMENT" and "second request" in e.details(), e
        c.audit()


@test
def test_workers_check_at_their_own_door():
    """A router that sends nonsense legs to a worker: each leg gets an end of its own, and the worker lives.
    """
    from client import Router, worker_pb as wp
    with Cluster(plan="split") as c:
        for worker in (c["prefill-0"], c["decode-0"]):
            router = Router(worker.address, SECRET)
            incarnation = router.incarnation

            def leg(counter, **kw):
                m = wp.RouterMessage()
                m.leg.id.incarnation, m.leg.id.counter = incarnation, counter
                m.leg.kind = kw.get("kind", wp.LEG_AGGREGATED)
                m.leg.ids.extend(kw.get("ids", [1, 2, 3]))
                m.leg.prefix_root = kw.get("root", bytes(16))
                s = m.leg.sampling
                s.top_p, s.repetition_penalty, s.max_tokens = 1, 1, kw.get("max_tokens", 4)
                s.n_prompt = kw.get("n_prompt", len(m.leg.ids))
                s.temperature = kw.get("temperature", 0)
                s.stop_ids.extend(kw.get("stop_ids", []))
                m.leg.tpot_ms = kw.get("tpot_ms", 0)
                return m
            bad = [leg(1, ids=[]), leg(2, ids=[9999]), leg(3, max_tokens=0), leg(4, max_tokens=2 ** 32 - 1),
                   leg(5, temperature=NAN), leg(6, root=b"short"), leg(7, kind=wp.LEG_DECODE), leg(8, n_prompt=50),
                   leg(9, stop_ids=[70000]), leg(10, ids=[1] * 8192), leg(11, tpot_ms=-1), leg(12, tpot_ms=NAN), leg(13, tpot_ms=INF)]
            for m in (*bad, leg(99)):
                router.say(m)
            ends = {}
            for m in router:
                if m.HasField("end"):
                    ends[m.end.id.counter] = (m.end.status, m.end.text)
                if 99 in ends:
                    break
            router.close()
            for i in range(1, 14):
                assert ends[i][0] == -1 and ends[i][1], (i, ends[i])
            assert all(ends[i][1].startswith(b"leg.tpot_ms: ") for i in (11, 12, 13)), ends
            assert ends[99][0] == 0, ends[99]
        c.audit(3)


@test
def test_worker_with_other_layout_is_refused_by_field():
    with Cluster(plan="split") as c:
        # registers by itself: the other workers must match the first one that the router meets
        odd = Proc(c, "decode", "odd", ["--model", DEMO, "--pool-bytes", "16M", "--threads", "1", "--kv-dtype", "bf16", "--routers",
                                        c.router.joins]).start()
        c.workers.append(odd)

        def refused():
            return [w["state"] for w in c.status()["workers"] if w["address"] == odd.address and "dtype" in w["state"]]
        wait_until(refused, 10, lambda: "refused by name: " + json.dumps(c.status()["workers"]))
        wait_until(lambda: "router refuses this worker" in c.log("odd") and "dtype" in c.log("odd"), 10, lambda: "it says why: " + c.log("odd"))


@test
def test_corrupt_model_files_give_one_line_and_exit_1():
    binary = os.path.join(BUILD, "decode/tandem-decode")
    router = os.path.join(BUILD, "router/tandem-router")
    changes = [
        (binary, "model.safetensors", lambda b: b[:len(b) // 2]),
        (binary, "model.safetensors", lambda b: b[:100]),
        (binary, "model.safetensors", lambda b: b""),
        (binary, "model.safetensors", lambda b: struct.pack("<Q", 2 ** 64 - 1) + b[8:]),
        (binary, "model.safetensors", lambda b: b.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1)),
        (binary, "model.safetensors", lambda b: b.replace(b"embed_tokens", b"embed_tokenz", 1)),
        (binary, "model.safetensors", lambda b: None),
        (binary, "config.json", lambda b: b[:50]),
        (binary, "config.json", lambda b: b.replace(b'"hidden_size": 256', b'"hidden_size": 255')),
        (binary, "config.json", lambda b: b.replace(b'"num_hidden_layers": 4', b'"num_hidden_layers": -4')),
        (binary, "config.json", lambda b: b.replace(b'"num_hidden_layers": 4', b'"num_hidden_layers": 3')),
        (binary, "config.json", lambda b: b.replace(b'"model_type": "llama"', b'"model_type": "mamba"')),
        (binary, "config.json", lambda b: b"[" * 100000),
        (router, "tokenizer.json", lambda b: b[:5000]),
        (router, "tokenizer.json", lambda b: b.replace(b'"NFC"', b'"NFKQ"')),
        (router, "tokenizer.json", lambda b: b"{}"),
        (router, "tokenizer.json", lambda b: None),
        (router, "tokenizer_config.json", lambda b: b"{"),
    ]
    for program, name, change in changes:
        d = changed_model(name, change)
        args = ["--workers", "127.0.0.1:1"] if program == router else ["--pool-bytes", "1M"]
        out = subprocess.run([program, "--model", d, "--listen", "127.0.0.1:0", *args], capture_output=True, text=True,
                             timeout=60)
        # on a busy machine the progress of loading is logged before the error
        lines = [l for l in out.stderr.splitlines() if l.strip() and " info loading " not in l]
        assert out.returncode == 1 and len(lines) == 1 and "tandem-" in lines[0], (name, out.returncode, out.stderr[-500:])


def with_nan(tensors):
    """Makes a model whose model.norm.weight begins with NaN."""
    n = struct.unpack("<Q", tensors[:8])[0]
    t = json.loads(tensors[8:8 + n])["model.norm.weight"]
    at, nan = 8 + n + t["data_offsets"][0], {"F32": b"\0\0\xc0\x7f", "F16": b"\0\x7e", "BF16": b"\xc0\x7f"}[t["dtype"]]
    return tensors[:at] + nan + tensors[at + len(nan):]


@test
def test_logits_that_are_not_finite_end_a_request_with_an_error():
    model = changed_model("model.safetensors", with_nan)
    metrics = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    listen = {role: ["--metrics-listen", m] for role, m in zip(("prefill", "decode"), metrics)}
    requests = [request(ids=OK_IDS, max_tokens=4), request(ids=OK_IDS, max_tokens=4, greedy=False, sampling__seed=1),
                request(ids=OK_IDS, max_tokens=4, greedy=False, sampling__n=3, sampling__seed=1),
                request(ids=OK_IDS, max_tokens=0, want_prompt_logprobs=True)]
    for plan in ("split", "aggregated"):
        with Cluster(model=model, plan=plan, roles_args=listen) as c:
            client = Client(c.router.address)
            for r in requests:
                code, text = client.error(r)
                assert code == "INTERNAL" and "logits are not finite" in text, (code, text)
            out = subprocess.run([TANDEM, "generate", "--router", c.router.address, "x"], capture_output=True, text=True, timeout=60)
            assert out.returncode == 1 and out.stdout == "" and "logits are not finite" in out.stderr, out
            assert sum(metric(m, "tandem_worker_nonfinite_logits_total{}") for m in metrics) >= len(requests) + 1
            c.audit()


@test
def test_bad_options_give_one_line_and_exit_2():
    for program, args in (("decode/tandem-decode", ["--model", DEMO, "--nonsense"]),
                          ("decode/tandem-decode", ["--model", DEMO, "--pages", "minus"]),
                          ("decode/tandem-decode", ["--model", DEMO, "--max-batch", "5000"]),
                          ("decode/tandem-decode", ["--model", DEMO, "--isa", "quantum"]),
                          ("decode/tandem-decode", []),
                          ("decode/tandem-decode", ["--model", DEMO, "--listen", "nonsense"]),
                          ("router/tandem-router", ["--model", DEMO, "--profile", "1,2"]),
                          ("router/tandem-router", ["--model", DEMO, "--tenants", "a=0"]),
                          ("decode/tandem-decode", ["--model", DEMO, "--routers", "nonsense"]),
                          ("router/tandem-router", ["--model", DEMO, "--workers", "nonsense"])):
        out = subprocess.run([os.path.join(BUILD, program), *args], capture_output=True, text=True, timeout=60)
        lines = [l for l in out.stderr.splitlines() if l.strip() and " info " not in l]
        assert out.returncode == 2 and len(lines) == 1, (args, out.returncode, out.stderr)
    out = subprocess.run([os.path.join(BUILD, "decode/tandem-decode"), "--model", "/nonexistent"], capture_output=True, text=True, timeout=60)
    assert out.returncode == 1 and "/nonexistent" in out.stderr, out


main()
