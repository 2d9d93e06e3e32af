"""The client API through grpcio: streaming, stop strings, cancel, deadlines, SLOs, reflection, health."""
import json, os, re, signal, subprocess, sys, threading, time
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import Client, google_pb, grpc, pb, request

GOLDEN = golden(os.path.join(DEMO, "golden.json"))
STORY = [(b"user", b"Tell me a story about a fox and a lantern.")]


def cluster(**kw):
    kw.setdefault("plan", "split")
    return Cluster(**kw)


@test
def test_streams_whole_characters_and_ends_with_usage_and_timing():
    with cluster() as c:
        client = Client(c.router.address)
        messages = list(client.generate(request(chat=STORY, max_tokens=100), timeout=30))
        assert len(messages) > 10
        for m in messages:
            assert isinstance(m.text, str)
        end = messages[-1].end
        assert end.finish_reason in ("stop", "length") and end.usage.completion_tokens == sum(len(m.tokens) for m in messages)
        t = end.timing
        parts = t.tokenize + t.queue + t.prefix_load + t.prefill + t.exposed_transfer + t.decode_wait + t.decode + t.stalled + t.residual
        assert abs(parts - t.total) < 0.01 * t.total + 0.01 and 0 < t.ttft <= t.total
        assert end.placement.plan == "split" and end.placement.prefill != end.placement.decode


@test
def test_health_reflection_and_models():
    with cluster() as c:
        client = Client(c.router.address)
        wait_until(lambda: client.health() == 1 and client.health("tandem.v1.Tandem") == 1, 5, "SERVING")
        services = client.services()
        assert sorted(services) == ["grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
                                    "grpc.reflection.v1alpha.ServerReflection", "tandem.v1.Tandem"], services
        assert sorted(client.services("v1")) == sorted(services)
        m = client.list_models().models[0]
        assert m.name == "tandem-demo" and m.max_context_tokens == 8192 and m.chat and len(m.fingerprint) == 32


@test
def test_status_says_in_googles_form_which_field_is_wrong_and_when_to_come_back():
    with cluster(router_args=["--queue-requests", "1"]) as c:
        client = Client(c.router.address)
        def details(asked):
            try:
                client.all(asked)
            except grpc.RpcError as e:
                trailing = dict(e.trailing_metadata())
                status = google_pb.Status.FromString(trailing["grpc-status-details-bin"])
                assert (status.code, status.message) == (e.code().value[0], e.details()), status
                return {d.type_url: d.value for d in status.details}, trailing
            raise AssertionError("it was served")
        said, _ = details(request(text=b"a", sampling__presence_penalty=3))
        violation = google_pb.BadRequest.FromString(said.pop("type.googleapis.com/google.rpc.BadRequest")).field_violations[0]
        assert violation.field == "sampling.presence_penalty" and violation.description.startswith("3 is not in") and not said, violation
        said, _ = details(request(text=b"a", model=b"x"))
        assert google_pb.BadRequest.FromString(said["type.googleapis.com/google.rpc.BadRequest"]).field_violations[0].field == "model"
        for w in c.workers:
            w.kill(signal.SIGSTOP)
        try:
            waits = client.generate(request(ids=[1, 2, 3], max_tokens=2))
            wait_until(lambda: c.status()["queued"] + c.status()["running"] == 1, 20, lambda: str(c.status()))
            c.router.kill(signal.SIGTERM)  # it drains: new requests are told when to come back
            wait_until(lambda: client.error(request(ids=[1]))[0] == "UNAVAILABLE", 20, "it drains")
            said, trailing = details(request(ids=[1]))
            delay = google_pb.RetryInfo.FromString(said["type.googleapis.com/google.rpc.RetryInfo"]).retry_delay
            assert delay.seconds * 1000 + delay.nanos // 1000000 == int(trailing["retry-after-ms"]) == 1000, (delay, trailing)
        finally:
            for w in c.workers:
                w.kill(signal.SIGCONT)
            del waits


@test
def test_tokenize_and_back():
    with cluster() as c:
        client = Client(c.router.address)
        for text in ("Hello, world! ", "\0 and \u00e9\u4e2d\U0001f600", ""):
            ids = client.tokenize(pb.TokenizeRequest(text=text.encode())).ids
            assert client.detokenize(pb.DetokenizeRequest(ids=ids)).text == text


@test
def test_special_tokens_are_added_to_texts_unless_a_request_says_no():
    model = os.path.join(SHARED, "golden/models/llama2")
    if not os.path.exists(model):
        raise Skip("shared/golden is absent")
    with cluster(model=model) as c:
        client = Client(c.router.address)

        def ids(**kw):
            return list(client.tokenize(pb.TokenizeRequest(text=b"hello", **kw)).ids)

        def prompt_tokens(**kw):
            return client.all(request(text=b"hello", max_tokens=1, **kw))[2].usage.prompt_tokens

        def local(*args, line=None):
            out = subprocess.run([TANDEM, "tokenize", "--json", *args], input=line, capture_output=True, text=True, timeout=60)
            assert out.returncode == 0, out.stderr
            return json.loads(out.stdout)["ids"]
        plain, whole = ids(add_special_tokens=False), ids(add_special_tokens=True)
        assert whole == [1] + plain and ids() == whole
        assert prompt_tokens() == len(whole) == prompt_tokens(add_special_tokens=True) == 1 + prompt_tokens(add_special_tokens=False)
        [r] = c.generate([{"id": "x", "prompt": "hello", "max_tokens": 1}]).values()
        assert r["usage"]["prompt_tokens"] == len(whole)
        for where in (["--router", c.router.address], ["--tokenizer", model]):
            assert local(*where, "hello") == whole and local(*where, "--no-add-special-tokens", "hello") == plain
        assert local("--jsonl", "--tokenizer", model, line='{"id": 1, "text": "hello"}\n') == whole
        assert local("--jsonl", "--tokenizer", model, "--no-add-special-tokens", line='{"id": 1, "text": "hello"}\n') == plain
        for wrong in (request(ids=[1, 2], max_tokens=1, add_special_tokens=True), request(chat=STORY, max_tokens=1, add_special_tokens=True)):
            code, text = client.error(wrong)
            assert code == "INVALID_ARGUMENT" and text.startswith("add_special_tokens: "), (code, text)
        assert client.error(request(ids=[1, 2], max_tokens=1, add_special_tokens=False)) == ("OK", "")


@test
def test_stop_string_is_neither_shown_nor_billed():
    with cluster() as c:
        client = Client(c.router.address)
        whole, ids, _ = client.all(request(chat=STORY, max_tokens=120))
        for stop in (b"lantern", b" named", b"fox called Mar", b"."):
            at = whole.find(stop)
            if at < 0:
                continue
            text, got, end = client.all(request(chat=STORY, max_tokens=120, stopping__stop=[stop]))
            assert text == whole[:at] and end.finish_reason == "stop", (stop, text)
            assert got == ids[:len(got)] and end.usage.completion_tokens == len(got) < len(ids)
        c.audit()


@test
def test_deadline_is_kept_by_field_and_by_grpc():
    with cluster(worker_args=["--isa", "plain"]) as c:
        client = Client(c.router.address)
        long = request(ids=[1, 2, 3], max_tokens=8000, stopping__ignore_eos=True)
        started = time.monotonic()
        assert client.error(long, timeout=0.5)[0] == "DEADLINE_EXCEEDED"
        long.slo.deadline_ms = 500
        assert client.error(long, timeout=30)[0] == "DEADLINE_EXCEEDED"
        assert time.monotonic() - started < within(4)
        c.audit(2)


@test
def test_cancel_frees_both_legs_within_a_second():
    with cluster(worker_args=["--isa", "plain"]) as c:
        client = Client(c.router.address)
        for n in (0, 1, 5):
            stream = client.generate(request(ids=list(range(500)), max_tokens=5000, stopping__ignore_eos=True), timeout=60)
            for _ in range(n):
                next(stream)
            stream.cancel()
            c.audit(1.5)


@test
def test_client_that_was_idle_is_not_cut_off():
    with cluster() as c:
        client = Client(c.router.address)
        for _ in range(4):
            client.all(request(ids=[1, 2, 3], max_tokens=4))
            time.sleep(2.6)  # longer than it takes to notice a client that froze within a call


@test
def test_client_that_does_not_read_is_cut_off():
    with cluster(router_args=["--stall-ms", "300"]) as c:
        client = Client(c.router.address)
        stream = client.generate(request(ids=[1, 2, 3], max_tokens=8000 // SLOW, stopping__ignore_eos=True, want_logprobs=True),
                                 timeout=120)
        next(stream)
        # The answer was generated into the flow-control window, or cut off; either way nothing is held.
        c.audit(60)
        good, _, end = client.all(request(chat=STORY, max_tokens=10))
        assert end.usage.completion_tokens == 10


@test
def test_slo_that_cannot_be_met_is_refused_before_any_work():
    with cluster() as c:
        client = Client(c.router.address)
        for _ in range(3):  # the router learns the workers' speed
            client.all(request(ids=list(range(1000)), max_tokens=4))
        wait_until(lambda: client.error(request(ids=list(range(1000, 1500)) * 4, max_tokens=4, slo__ttft_ms=1))[0] ==
                   "RESOURCE_EXHAUSTED", 5, "a refusal")
        c.audit()

        def moved():
            return [w["kv_bytes_out"] for w in c.status()["workers"]]
        before = None
        while before != moved():  # until the requests admitted above have been reported
            before = moved()
            time.sleep(0.6)
        code, text = client.error(request(ids=list(range(1000, 1500)) * 4, max_tokens=4, slo__ttft_ms=1))
        assert code == "RESOURCE_EXHAUSTED" and "ttft" in text, (code, text)
        call = client.generate(request(ids=list(range(1000, 1500)) * 4, max_tokens=4, slo__ttft_ms=1), timeout=10)
        try:
            list(call)
        except grpc.RpcError:
            trailing = dict(call.trailing_metadata())
            # Coming back would not help, so there is no time to do so.
            assert "retry-after-ms" not in trailing and "idle" in call.details()
        time.sleep(0.6)
        assert moved() == before


@test
def test_first_token_that_ends_it_needs_no_decode():
    with cluster() as c:
        client = Client(c.router.address)
        ids = GOLDEN["cases"][0]["prompt_ids"]
        first = GOLDEN["cases"][0]["greedy_ids"][0]
        text, got, end = client.all(request(ids=ids, max_tokens=1))
        assert got == [first] and end.finish_reason == "length"
        text, got, end = client.all(request(ids=ids, max_tokens=50, stopping__stop_ids=[first]))
        assert got == [first] and end.finish_reason == "stop"
        c.audit()


@test
def test_first_token_that_ends_it_is_no_lost_handover():
    """The decode worker's message that its pages were taken back may overtake the prefill worker's end."""
    prompts = [[(i * 37 + j) % 1000 for j in range(64)] for i in range(16)]
    asked = [dict(id=str(i), prompt_ids=p, max_tokens=1, temperature=0) for i, p in enumerate(prompts)]
    metrics = f"127.0.0.1:{free_port()}"
    with Cluster(prefill=2, decode=2, plan="split", router_args=["--metrics-listen", metrics]) as c:
        results = c.generate(asked)
        first = [results[str(i)]["token_ids"][0] for i in range(16)]
        asked = [dict(id=str(i), prompt_ids=prompts[i % 16], max_tokens=20, temperature=0, stop_ids=[first[i % 16]],
                      cache_salt=str(i)) for i in range(200)]
        results = c.generate(asked)
        for i in range(200):
            r = results[str(i)]
            assert "error" not in r and r["token_ids"] == [first[i % 16]] and r["finish_reason"] == "stop", r
        counts = replans_by_reason(metrics)
        assert counts["transfer"] == 0 or counts["lost"] > 0, counts  # beside other programs a worker may seem lost
        named = '{model_name="tandem-demo"}'
        for theirs, ours in (("generation_tokens_total", "generation_tokens_total"), ("prompt_tokens_total", "prompt_tokens_total"),
                             ("request_success_total", "requests_finished_total"),
                             ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count")):
            wait_until(lambda: metric(metrics, f"vllm:{theirs}{named}") == metric(metrics, f"tandem_{ours}{{}}") >= 216, 10,
                       f"{theirs} is {ours}")
        wait_until(lambda: metric(metrics, f"vllm:num_requests_running{named}") == 0, 10, "the gauge is of this second")
        assert 0 <= metric(metrics, f"vllm:kv_cache_usage_perc{named}") <= 1
        c.audit()


@test
def test_cache_salt_and_tenant_keep_caches_apart():
    with cluster() as c:
        client = Client(c.router.address)
        ids = list(range(100))

        def cached(**kw):
            return client.all(request(ids=ids, max_tokens=4, **kw))[2].usage.cached_tokens.worker
        assert cached() == 0 and cached() == 96
        assert cached(cache_salt=b"a") == 0 and cached(cache_salt=b"a") == 96 and cached(cache_salt=b"b") == 0
        assert cached(tenant=b"other") == 0 and cached(tenant=b"other") == 96


@test
def test_same_label_a_hundred_times_at_once():
    with cluster() as c:
        client = Client(c.router.address)
        case = GOLDEN["cases"][1]
        results = []

        def one():
            results.append(client.all(request(ids=case["prompt_ids"], max_tokens=48, request_id=b"same",
                                              stopping__ignore_eos=True))[1])
        threads = [threading.Thread(target=one) for _ in range(100)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert results == [case["greedy_ids"]] * 100
        c.audit()


@test
def test_one_grep_follows_a_request_through_all_logs():
    debug = ["--log-level", "debug"]
    with Cluster(plan="split", store=True, worker_args=debug, store_args=debug, router_args=debug) as c:
        client = Client(c.router.address)
        odd = b"my id=\"7\"\n\xc3\xbf"
        for given, word in ((b"abc-7", "abc-7"), (odd, "my\\x20id\\x3d\\x227\\x22\\x0a\\xc3\\xbf"), (b"", None)):
            trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            end = client.all(request(ids=[5] * 200, max_tokens=4, stopping__ignore_eos=True, request_id=given,
                                     cache_salt=given or b"none"), metadata=[("traceparent", trace)])[2]
            word = word or end.request_id
            assert end.request_id == (given.decode() or word) and (given or re.fullmatch("[0-9a-f]{16}", word)), end.request_id

            def lines(name):
                return [line.split(" ", 3)[3] for line in c.log(name).splitlines() if f" req={word} " in line + " "]
            steps = {"router": ["request received", "request placed", "request accepted", "first token", "request finished"],
                     "prefill-0": ["leg received", "first token", "handed over", "leg finished"],
                     "decode-0": ["leg received", "leg accepted", "handover arrived", "leg finished"]}
            for name, want in steps.items():
                wait_until(lambda: sorted(line.split(" req=")[0] for line in lines(name)) == sorted(want), 5,
                           lambda: f"{name} tells {want}: {lines(name)}")
                assert any(f"trace={trace}" in line for line in lines(name) if "received" in line), lines(name)
            xfer = re.search(r"xfer=(\S+)", next(line for line in lines("router") if "placed" in line)).group(1)
            for name in ("prefill-0", "decode-0"):  # that id also finds the log lines of the transfer
                assert any(f"xfer={xfer}" in line and "leg received" in line for line in lines(name)), lines(name)
                wait_until(lambda: f"ended xfer={xfer} " in c.log(name), 5, f"{name}: the transfer's end")


@test
def test_one_grep_says_why_a_request_was_refused_wherever_it_was():
    with Cluster(router_args=["--log-level", "debug", "--queue-requests", "1", "--gone-ms", "10m"]) as c:
        client = Client(c.router.address)

        def refused(word, **kw):
            code, text = client.error(request(request_id=word.encode(), **kw), timeout=5 * SLOW)
            log = [line for line in c.log("router").splitlines() if f" req={word} " in line]
            assert code != "OK" and any(f" code={code} text='{text}'" in line for line in log), (code, text, log)
        refused("too-long", ids=[1] * 100000)
        refused("no-id-of-this-model", ids=[999999])
        refused("hot", ids=[1], sampling__temperature=-1)
        c["decode-0"].kill()
        wait_until(lambda: "decode-0" not in {w["name"] for w in c.status()["workers"] if w["state"] == "ready"}, 10,
                   "the router knows that the decode worker is lost")
        waits = client.generate(request(ids=[1], request_id=b"waits"), timeout=60)
        wait_until(lambda: " req=waits " in c.log("router"), 5, "a request that waits")
        refused("beyond-the-queue", ids=[1])
        waits.cancel()


main()
