"""The gateway in front of a real cluster: OpenAI's chat completions and completions, tokenize and detokenize,
models, health, errors, keys, TLS, clients that leave, routers that are killed.

Default: 48 answers under way when routers die. TANDEM_LONG=streams: 200.
"""
import concurrent.futures, http.client, json, os, signal, socket, ssl, sys, threading, time
sys.path[:0] = [os.path.join(os.path.dirname(__file__), "..", d) for d in ("cluster", "security")]
from harness import *
from lab import authorities, make_key
from client import Client, request
from streams import ids

MODEL = "tandem-demo"
EACH = 25 if os.environ.get("TANDEM_LONG") in ("streams", "all") else 6  # answers of a kind, in eight kinds
DIMS = "layers=2,kv_heads=1,heads=1,head_dim=64,hidden=64,ffn=64,vocab=1536,positions=8192"
SIM = ["--engine", "sim", "--numerics", "bf16", "--pages", "3000", "--max-context", "8192", "--sim-decode", "200,0,0"]
HELLO = [{"role": "user", "content": "Hello"}]


class Gateway:
    """A gateway of a cluster. Answers of ask() are (status, headers, body), body as JSON if it is JSON."""

    def __init__(self, cluster, *args, routers=None, name="gateway"):
        self.tls = None
        self.proc = Proc(cluster, "gateway", name, ["--routers", ",".join(routers or cluster.addresses), *args])
        self.proc.start()
        wait_until(lambda: self.ask("GET", "/health")[0] == 200, 30, "the gateway finds a router")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.proc.stop()

    def connect(self, timeout=60):
        host, port = self.proc.address.rsplit(":", 1)
        if self.tls:
            return http.client.HTTPSConnection(host, int(port), timeout=timeout, context=self.tls)
        return http.client.HTTPConnection(host, int(port), timeout=timeout)

    def start(self, method, path, body=None, headers={}, conn=None):
        conn = conn or self.connect()
        conn.request(method, path, json.dumps(body) if isinstance(body, (dict, list)) else body, headers)
        return conn, conn.getresponse()

    def ask(self, method, path, body=None, headers={}, conn=None):
        try:
            conn, r = self.start(method, path, body, headers, conn)
        except OSError as e:
            return 0, {}, str(e)
        got = r.read()
        if (r.getheader("content-type") or "").startswith("application/json"):
            got = json.loads(got)
        return r.status, {k.lower(): v for k, v in r.getheaders()}, got

    def post(self, path, **body):
        status, headers, got = self.ask("POST", path, {"model": MODEL, **body})
        assert status == 200, (status, got)
        return got

    def events(self, path, headers={}, **body):
        """The events of a stream, as text without "data: "."""
        conn, r = self.start("POST", path, {"model": MODEL, "stream": True, **body}, headers)
        assert r.status == 200 and r.getheader("content-type").startswith("text/event-stream"), (r.status, r.read())
        blocks = r.read().decode().split("\n\n")
        conn.close()
        assert blocks.pop() == "" and all(b.startswith(("data: ", ": ")) for b in blocks), blocks
        return [b[6:] for b in blocks if b.startswith("data: ")]

    def refused(self, path, body, status, *words, **kw):
        got_status, _, got = self.ask("POST", path, body, **kw)
        assert got_status == status and set(got["error"]) == {"message", "type", "param", "code"}, (got_status, got)
        assert all(w in got["error"]["message"] for w in words), got
        return got["error"]


def tandem(*args):
    done = subprocess.run([TANDEM, *args], capture_output=True, text=True, timeout=120 * SLOW)
    assert done.returncode == 0, done
    return done.stdout


def text_of(events):
    assert events[-1] == "[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    return "".join(c["choices"][0].get("text") or c["choices"][0].get("delta", {}).get("content") or ""
                   for c in chunks if c["choices"]), chunks


@test
def test_chat_is_the_same_whole_streamed_and_by_grpc():
    with Cluster(plan="split") as c, Gateway(c) as g:
        asked = dict(messages=HELLO, max_tokens=24, temperature=0)
        whole = g.post("/v1/chat/completions", **asked)
        choice = whole["choices"][0]
        assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-") and whole["model"] == MODEL, whole
        assert abs(whole["created"] - time.time()) < 60 * SLOW and choice["message"]["role"] == "assistant", whole
        streamed, chunks = text_of(g.events("/v1/chat/completions", **asked, stream_options={"include_usage": True}))
        assert streamed == choice["message"]["content"] and streamed, (streamed, whole)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}, chunks[0]
        assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"] in ("stop", "length"), chunks
        usage = dict(whole["usage"], prompt_tokens_details=None)  # the second one may find its prompt cached
        assert dict(chunks[-1]["usage"], prompt_tokens_details=None) == usage and chunks[-1]["choices"] == [], chunks[-1]
        assert len({(x["id"], x["created"]) for x in chunks}) == 1 and chunks[0]["object"] == "chat.completion.chunk", chunks
        text, _, end = Client(c.router.address).all(request(chat=[(b"user", b"Hello")], max_tokens=24))
        assert text.decode() == streamed and end.usage.prompt_tokens == usage["prompt_tokens"], (text, end)
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        assert g.post("/v1/chat/completions", **{**asked, "messages": parts})["choices"] == whole["choices"]


@test
def test_events_tell_the_tokens_so_far_and_who_answers():
    with Cluster() as c, Gateway(c) as g:
        for path, prompt in (("/v1/completions", dict(prompt=[ids(20, 1), ids(30, 2)])), ("/v1/chat/completions", dict(messages=HELLO))):
            asked = dict(prompt, model=None, n=2, max_tokens=9, ignore_eos=True, seed=4)
            each = {"include_usage": True, "continuous_usage_stats": True}
            *events, last, done = g.events(path, stream_options=each, **asked)
            chunks, total = [json.loads(e) for e in events], json.loads(last)["usage"]
            so_far, prompts = {}, {}
            for chunk in chunks:
                [choice], usage = chunk["choices"], chunk["usage"]
                assert so_far.get(choice["index"], 0) <= usage["completion_tokens"] <= 9, chunk
                assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], chunk
                so_far[choice["index"]], prompts[choice["index"]] = usage["completion_tokens"], usage["prompt_tokens"]
            n = len(so_far)
            assert so_far == dict.fromkeys(range(n), 9) and total["completion_tokens"] == 9 * n, (so_far, total)
            assert sum(prompts.values()) == 2 * total["prompt_tokens"], (prompts, total)
            if "prompt" in prompt:
                assert prompts == {0: 20, 1: 20, 2: 30, 3: 30}, prompts
            # Nobody named the model.
            assert {x["model"] for x in chunks} == {g.post(path, **asked)["model"]} == {MODEL}, chunks[0]
            one = json.loads(g.events(path, stream_options={"continuous_usage_stats": False}, **asked)[0])
            assert "usage" not in one, one


@test
def test_completions_take_texts_ids_and_lists_of_them():
    with Cluster() as c, Gateway(c) as g:
        asked = dict(max_tokens=6, temperature=0)
        one = g.post("/v1/completions", prompt="Once upon a time", **asked)
        assert one["object"] == "text_completion" and len(one["choices"]) == 1, one
        encoded = g.post("/tokenize", prompt="Once upon a time")
        assert encoded["count"] == len(encoded["tokens"]) == one["usage"]["prompt_tokens"], encoded
        text = g.ask("POST", "/detokenize", {"tokens": encoded["tokens"], "skip_special_tokens": True})[2]["prompt"]
        assert text.strip() == "Once upon a time", text
        by_ids = g.post("/v1/completions", prompt=encoded["tokens"], **asked)
        assert by_ids["choices"] == one["choices"], by_ids
        many = g.post("/v1/completions", prompt=["The cat", "Once upon a time"], **asked)
        assert [x["index"] for x in many["choices"]] == [0, 1] and many["choices"][1]["text"] == one["choices"][0]["text"], many
        assert many["usage"]["completion_tokens"] == 12, many
        lists = g.post("/v1/completions", prompt=[encoded["tokens"], encoded["tokens"]], n=2, **asked)
        assert [x["text"] for x in lists["choices"]] == [one["choices"][0]["text"]] * 4, lists
        streamed, chunks = text_of(g.events("/v1/completions", prompt="Once upon a time", **asked))
        assert streamed == one["choices"][0]["text"], streamed
        echoed = g.post("/v1/completions", prompt="Once upon a time", echo=True, **asked)["choices"][0]["text"]
        assert echoed == "Once upon a time" + streamed, echoed
        assert g.post("/v1/completions", prompt="Once upon a time", temperature=0, ignore_eos=True)["usage"]["completion_tokens"] == 16
        seeded = [g.post("/v1/completions", prompt="A", max_tokens=12, temperature=1, seed=s)["choices"] for s in (5, 5, -5, -5)]
        assert seeded[0] == seeded[1] and seeded[2] == seeded[3] != seeded[0], seeded
        chunks = [json.loads(e) for e in g.events("/v1/completions", prompt=["The cat", "Once upon a time"], n=2, **asked)[:-1]]
        ends = sorted(x["choices"][0]["index"] for x in chunks if x["choices"][0]["finish_reason"])
        assert ends == [0, 1, 2, 3], ends


@test
def test_log_probabilities_are_those_of_grpc():
    near = lambda x, y: (x is None) == (y is None) and (x is None or abs(x - y) < 1e-5)
    with Cluster(plan="split") as c, Gateway(c) as g:
        asked = dict(messages=HELLO, max_tokens=7, temperature=0, logprobs=True, top_logprobs=3)
        whole = g.post("/v1/chat/completions", **asked)["choices"][0]
        content = whole["logprobs"]["content"]
        assert len(content) == 7 and bytes(sum((t["bytes"] for t in content), [])).decode() == whole["message"]["content"], whole
        events = [json.loads(e) for e in g.events("/v1/chat/completions", **asked)[:-1]]
        streamed = sum((x["choices"][0]["logprobs"]["content"] for x in events if x["choices"][0]["logprobs"]), [])
        assert streamed == content, (streamed, content)
        r = request(chat=[(b"user", b"Hello")], max_tokens=7, want_logprobs=True, top_logprobs=3, want_pieces=True)
        tokens = [t for m in Client(c.router.address).generate(r) for t in m.tokens]
        for token, t in zip(content, tokens, strict=True):
            assert near(token["logprob"], t.logprob) and bytes(token["bytes"]) == t.piece, (token, t)
            assert [bytes(x["bytes"]) for x in token["top_logprobs"]] == list(t.top_pieces), (token, t)
            assert all(near(x["logprob"], y) for x, y in zip(token["top_logprobs"], t.top_logprobs, strict=True)), (token, t)
        bare = g.post("/v1/chat/completions", messages=HELLO, max_tokens=2, logprobs=True)["choices"][0]["logprobs"]
        assert [t["top_logprobs"] for t in bare["content"]] == [[], []], bare

        # A completion with echo scores its prompt, as evaluation harnesses ask; nothing need be generated.
        prompt = g.post("/tokenize", prompt="Once upon a time there was")["tokens"]
        for most in (0, 3):
            scored = g.post("/v1/completions", prompt=[prompt, prompt[:4]], echo=True, max_tokens=most, logprobs=2, temperature=0)
            r = request(ids=prompt, max_tokens=most, want_prompt_logprobs=True, top_logprobs=2, want_logprobs=True, want_pieces=True)
            end = Client(c.router.address).all(r)[2]
            got, text = scored["choices"][0]["logprobs"], scored["choices"][0]["text"]
            assert {len(v) for v in got.values()} == {len(prompt) + most} and len(scored["choices"][1]["logprobs"]["tokens"]) == 4 + most
            assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None, got
            assert all(near(x, y) for x, y in zip(got["token_logprobs"][1:], list(end.prompt_logprobs)[1:])), (got, end)
            for tops, token, score in zip(got["top_logprobs"][1:], got["tokens"][1:], got["token_logprobs"][1:]):
                assert tops[token] == score and len(tops) in (2, 3), (tops, token)
            assert [t.encode() for t in got["tokens"][:len(prompt)]] == list(end.prompt_pieces), (got, end)
            assert got["text_offset"] == [len("".join(got["tokens"][:i])) for i in range(len(got["tokens"]))], got
            assert "".join(got["tokens"]).endswith(text), (got, text)
        plain = g.post("/v1/completions", prompt=prompt, max_tokens=3, logprobs=0, temperature=0)["choices"][0]["logprobs"]
        assert plain["top_logprobs"] == [None] * 3 and plain["text_offset"][0] == 0, plain
        for body, param in ((dict(prompt=prompt, logprobs=21), "logprobs"), (dict(prompt=prompt, logprobs=1, echo=True, stream=True), "logprobs")):
            assert g.refused("/v1/completions", body, 400)["param"] == param
        assert g.refused("/v1/chat/completions", dict(messages=HELLO, top_logprobs=1), 400, "logprobs must be true")["param"] == "top_logprobs"


@test
def test_members_of_vllm():
    near = lambda x, y: abs(x - y) < 1e-5
    with Cluster() as c, Gateway(c) as g:
        asked = dict(max_tokens=12, temperature=0)
        prompt = g.post("/tokenize", prompt="Once upon a time there was a small dog. It liked the sun.")["tokens"]
        want = g.post("/v1/completions", prompt=prompt[-5:], **asked)
        for p in (prompt, "Once upon a time there was a small dog. It liked the sun."):
            got = g.post("/v1/completions", prompt=p, truncate_prompt_tokens=5, **asked)
            assert got["choices"] == want["choices"] and got["usage"]["prompt_tokens"] == 5, (got, want)
        whole = g.post("/v1/completions", prompt=prompt, truncate_prompt_tokens=100, **asked)
        assert whole["usage"]["prompt_tokens"] == len(prompt), whole
        long = g.post("/v1/completions", prompt=prompt * 700, truncate_prompt_tokens=-1, max_tokens=3, ignore_eos=True)
        assert long["usage"]["prompt_tokens"] == 8192 - 3 and long["usage"]["completion_tokens"] == 3, long["usage"]
        echoed = g.post("/v1/completions", prompt=prompt, truncate_prompt_tokens=5, echo=True, **asked)["choices"][0]["text"]
        assert echoed.endswith(want["choices"][0]["text"]) and len(echoed) < 60 + len(want["choices"][0]["text"]), echoed
        assert g.refused("/v1/completions", dict(prompt="a", truncate_prompt_tokens=-2), 400)["param"] == "truncate_prompt_tokens"

        text = want["choices"][0]["text"]
        stop = text[4:7]
        for stream in (False, True):
            for include in (False, True):
                body = dict(prompt=prompt[-5:], stop=["zzzz", stop], include_stop_str_in_output=include, **asked)
                got = text_of(g.events("/v1/completions", **body))[0] if stream else g.post("/v1/completions", **body)["choices"][0]["text"]
                assert got == text[:text.index(stop)] + (stop if include else ""), (stream, include, got, text)

        words = text.split()
        for bad in ([words[1]], [words[0], words[2]], [" ".join(words[1:3])]):
            got = g.post("/v1/completions", prompt=prompt[-5:], bad_words=bad, **asked)["choices"][0]["text"]
            assert all(w in text and w not in got for w in bad), (bad, got, text)
        for bad in ([""], ["x" * 257], ["a"] * 65, 5):
            assert g.refused("/v1/completions", dict(prompt="a", bad_words=bad), 400)["param"].startswith("bad_words"), bad

        for n in (0, 2):
            body = dict(prompt_logprobs=n, **asked)
            end = Client(c.router.address).all(request(ids=prompt, max_tokens=2, want_prompt_logprobs=True, top_logprobs=n, want_pieces=True))[2]
            assert list(end.prompt_ids) == prompt, end.prompt_ids
            one = g.post("/v1/completions", prompt=prompt, logprobs=1, **body)["choices"][0]
            assert {len(t) for t in one["logprobs"]["top_logprobs"]} == {1}, one["logprobs"]
            listed = one["prompt_logprobs"]
            assert listed[0] is None and len(listed) == len(prompt), listed
            for i, place in enumerate(listed[1:], 1):
                own = place[str(prompt[i])]
                assert near(own["logprob"], end.prompt_logprobs[i]) and own["rank"] == end.prompt_ranks[i], (own, i)
                assert own["decoded_token"].encode() == end.prompt_pieces[i], own
                tops = sorted((v for v in place.values() if v["rank"] <= n), key=lambda v: v["rank"])
                assert [v["rank"] for v in tops] == list(range(1, n + 1)) and len(place) <= n + 1, place
                assert all(near(v["logprob"], x) for v, x in zip(tops, end.prompt_top_logprobs[(i - 1) * n:])), (place, i)
            chat = g.post("/v1/chat/completions", messages=HELLO, **body)
            assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and "prompt_logprobs" not in chat["choices"][0], chat
        for path, kw in (("/v1/completions", dict(prompt="a")), ("/v1/chat/completions", dict(messages=HELLO))):
            for bad in (dict(prompt_logprobs=-1), dict(prompt_logprobs=21), dict(prompt_logprobs=1, stream=True)):
                assert g.refused(path, {**kw, **bad}, 400)["param"] == "prompt_logprobs"


@test
def test_what_is_wrong_is_named():
    with Cluster() as c, Gateway(c, "--max-prompts", "4", "--max-body-bytes", "4K") as g:
        chat, text = "/v1/chat/completions", "/v1/completions"
        for path, body, status, param, *words in (
                (chat, "{", 400, "body", "not JSON"), (chat, "[]", 400, "body", "object"), (chat, {}, 400, "messages", "missing"),
                (chat, {"messages": []}, 400, "messages"), (chat, {"messages": [{"content": "x"}]}, 400, "messages[0].role"),
                (chat, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
                (chat, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]", "text"),
                (chat, {"messages": HELLO, "temperature": 101}, 400, "temperature", "100"),
                (chat, {"messages": HELLO, "no_such": 1}, 400, None, "no_such"), (chat, {"messages": HELLO, "n": 0}, 400, "n"),
                (chat, {"messages": HELLO, "stream": "yes"}, 400, "stream"), (chat, {"messages": HELLO, "model": "x"}, 404, "model"),
                (chat, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, 400, "max_completion_tokens", "differ"),
                (chat, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "can't offer"),
                (chat, {"messages": HELLO, "tools": 5}, 400, "tools"), (chat, {"messages": HELLO, "tool_choice": "x"}, 400, "tool_choice"),
                (chat, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice", "together with tools"),
                ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "a b"}]}, 400, "tools", "can't offer"),
                ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
                (chat, {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format.type"),
                (chat, {"messages": HELLO, "tandem": {"ttft_ms": -1}}, 400, "tandem.ttft_ms"),
                (chat, {"messages": HELLO, "tandem": {"nothing": 1}}, 400, "tandem.nothing"),
                (text, {}, 400, "prompt", "missing"), (text, {"prompt": []}, 400, "prompt", "empty"), (text, {"prompt": 5}, 400, "prompt"),
                (text, {"prompt": ["a"] * 5}, 400, "prompt", "max-prompts"), (text, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
                (text, {"prompt": [1, "a"]}, 400, "prompt_ids"), (text, {"prompt": "a", "best_of": 2}, 400, "best_of"),
                (text, {"prompt": "a" * 5000}, 413, None, "max-body-bytes"), ("/detokenize", {}, 400, "tokens", "missing")):
            error = g.refused(path, body, status, *words)
            assert param is None or error["param"] == param, (path, body, error)
        assert g.ask("GET", chat)[0] == 405 and g.ask("GET", chat)[1]["allow"] == "POST"
        assert g.ask("GET", "/v1/nothing")[0] == 404 and g.ask("GET", "/v1/models/x")[0] == 404
        nulls = g.post(chat, messages=HELLO, max_tokens=1, n=None, stop=None, tools=None, user="me", metadata={"a": "b"}, store=False)
        assert len(nulls["choices"]) == 1, nulls
        assert g.ask("GET", "/health")[2]["status"] == "ok"


@test
def test_limits_and_ids_travel():
    with Cluster() as c, Gateway(c, "--cors", "https://example.org") as g:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
        status, headers, got = g.ask("POST", "/v1/chat/completions", body, {"x-request-id": "mine-1"})
        assert headers["x-request-id"] == "mine-1" and got["id"] == "chatcmpl-mine-1", (headers, got)
        assert headers["access-control-allow-origin"] == "https://example.org"
        assert len(g.ask("GET", "/health", headers={"x-request-id": "with space"})[1]["x-request-id"]) == 24
        for headers in ({"x-tandem-ttft-ms": "0.001"}, {"x-slo-ttft-ms": "0.001"}):
            status, got_headers, got = g.ask("POST", "/v1/chat/completions", body, headers)
            assert status == 429 and got["error"]["type"] == "rate_limit_error" and "TTFT" in got["error"]["message"], (status, got)
        assert g.ask("POST", "/v1/chat/completions", dict(body, tandem={"ttft_ms": 0.001}))[0] == 429
        assert g.ask("POST", "/v1/chat/completions", body, {"x-tandem-priority": "99"})[2]["error"]["param"] == "x-tandem-priority"
        status, headers, _ = g.ask("OPTIONS", "/v1/chat/completions")
        assert status == 204 and "POST" in headers["access-control-allow-methods"], headers
        models = g.ask("GET", "/v1/models")[2]["data"]
        assert [m["id"] for m in models] == [MODEL] and g.ask("GET", "/v1/models/" + MODEL)[2]["id"] == MODEL, models


def open_to_all(cluster, args, starts, router, *words):
    """Whether a gateway starts that the network can reach; if not, what it says."""
    p = Proc(cluster, "gateway", f"open-{free_port()}", ["--routers", router, *args])
    p.address = "0.0.0.0:0"
    try:
        p.start()
        started = True
    except RuntimeError as e:
        started, said = False, str(e)
        assert p.await_end() == 2 and all(w in said for w in ("--listen", "--insecure", *words) if w != "--insecure" or "asked" not in said), said
    assert started == starts, (args, router)
    p.stop()


@test
def test_keys_are_the_routers():
    with authorities() as (ca, _), tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "keys.json")
        key = make_key(path, "anna", requests_per_minute=2)
        with Cluster(router_args=["--api-keys", path]) as c:
            pair = ca.sign("gateway")
            g = Gateway.__new__(Gateway)
            g.tls = ssl.create_default_context(cafile=ca.pem)
            g.proc = Proc(c, "gateway", "gateway", ["--routers", c.router.address, "--tls-cert", pair[0], "--tls-key", pair[1]]).start()
            wait_until(lambda: g.ask("GET", "/health")[0] == 200, 30, "the gateway finds its router")
            body = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
            for headers in ({}, {"authorization": "Bearer nonsense"}, {"authorization": "Basic x"}):
                status, _, got = g.ask("POST", "/v1/chat/completions", body, headers)
                assert status == 401 and got["error"]["code"] == "invalid_api_key", (status, got)
                assert g.ask("GET", "/v1/models", headers=headers)[0] == 401
            assert g.ask("POST", "/v1/chat/completions", body, {"authorization": "Bearer " + key})[0] == 200
            assert g.ask("POST", "/v1/chat/completions", body, {"x-api-key": key})[0] == 200
            status, headers, got = g.ask("POST", "/v1/chat/completions", body, {"authorization": "Bearer " + key})
            assert status == 429 and int(headers["retry-after"]) >= 1 and int(headers["retry-after-ms"]) > 0, (status, headers, got)
            g.proc.stop()
            for more, start in (([], False), (["--tls-cert", pair[0], "--tls-key", pair[1]], True), (["--insecure"], True)):
                open_to_all(c, more, start, c.router.address)
        with Cluster() as c:  # asks for no keys
            open_to_all(c, ["--tls-cert", pair[0], "--tls-key", pair[1]], False, c.router.address, "asks for no API keys")
            open_to_all(c, ["--tls-cert", pair[0], "--tls-key", pair[1]], False, "127.0.0.1:1", "can't be asked")
            open_to_all(c, ["--insecure"], True, c.router.address)


@test
def test_a_client_that_leaves_is_noticed_within_a_second():
    with Cluster(worker_args=["--faults", "step:delay/50ms"]) as c, Gateway(c) as g:
        for stream in (False, True):
            conns = []
            for i in range(8):
                conn = g.connect()
                conn.request("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": ids(40, i), "max_tokens": 2000,
                                                                    "ignore_eos": True, "stream": stream}))
                conns.append(conn)
            wait_until(lambda: c.status()["running"] == 8, 30, lambda: str(c.status()))
            for conn in conns:
                conn.sock.close()
            began = time.monotonic()
            wait_until(lambda: c.status()["running"] == 0, 30, lambda: str(c.status()))
            assert time.monotonic() - began < within(1), time.monotonic() - began
        c.audit(20)


def own_address():
    """Of this host, but not loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))  # sends nothing
            return s.getsockname()[0]
        except OSError:
            raise Skip("this host has no address but loopback")


@test
def test_a_routers_trusted_proxy_answers_for_many_clients():
    """Clients of a gateway on another host ask and leave, more of them than one address may: the others are
    served, because the router was told of the gateway."""
    here = own_address()
    asked = json.dumps({"model": MODEL, "prompt": ids(20, 1), "max_tokens": 400, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

    with Cluster() as c:
        front = Proc(c, "router", "front", ["--model", DEMO, "--workers", ",".join(w.address for w in c.workers),
                                            "--insecure", "--trusted-proxies", "192.0.2.0/24," + here, *c.router_args])
        front.address = f"{here}:{free_port()}"
        front.start()
        try:
            with Gateway(c, routers=[front.address]) as g:
                host, port = g.proc.address.rsplit(":", 1)
                end, left = time.monotonic() + 4, [0]

                def leave():
                    while time.monotonic() < end:
                        conns = [socket.create_connection((host, int(port))) for _ in range(50)]
                        for s in conns:
                            s.sendall(head % len(asked) + asked)
                        time.sleep(0.02)
                        for s in conns:
                            s.close()
                        left[0] += len(conns)

                threads = [threading.Thread(target=leave) for _ in range(4)]
                for t in threads:
                    t.start()
                answers = []
                while time.monotonic() < end:
                    answers.append(g.ask("POST", "/v1/completions", {"model": MODEL, "prompt": ids(9, 7), "max_tokens": 2})[0])
                for t in threads:
                    t.join()
                print(f"# {left[0]} left, {len(answers)} answered")
                assert answers and set(answers) == {200}, answers
                assert "has to wait" not in c.log("front") and "connection closed" not in c.log("front"), c.log("front")
        finally:
            front.stop()


@test
def test_a_client_that_reads_slowly_gets_all_of_it():
    """Some MB at 4 MB/s, after nothing for a while: calls are held and go on again, and the router keeps what
    is not taken."""
    metrics = f"127.0.0.1:{free_port()}"
    with Cluster(dummy=DIMS, worker_args=SIM) as c, Gateway(c, "--metrics-listen", metrics) as g, socket.socket() as s:
        asked = json.dumps({"model": MODEL, "prompt": [ids(20, 1), ids(20, 2)], "n": 8, "max_tokens": 2000, "ignore_eos": True,
                            "stream": True, "stream_options": {"include_usage": True}})
        host, port = g.proc.address.rsplit(":", 1)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        s.connect((host, int(port)))
        s.sendall(f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(asked)}\r\nx-request-id: {'x' * 64}\r\n\r\n{asked}".encode())
        wait_until(lambda: metric(metrics, "tandem_gateway_held_total{}") > 0, 20, "calls are held")
        got = bytearray()
        while piece := s.recv(1 << 14):
            got += piece
            time.sleep(0.004)
        events = [b for b in got.decode().split("\r\n\r\n", 1)[1].split("\n\n") if b]
        assert events[-1] == "data: [DONE]" and len(got) > 1 << 20, (len(got), events[-1])
        assert json.loads(events[-2][6:])["usage"]["completion_tokens"] == 16 * 2000, events[-2]
        held = metric(metrics, "tandem_gateway_held_total{}")
        print(f"# {held:.0f} times a call waited for the client")


@test
def test_a_router_that_is_lost_before_the_first_token_is_replaced():
    with Cluster(routers=2, worker_args=["--faults", "step:delay/5ms"]) as c, Gateway(c) as g:
        want = g.post("/v1/completions", prompt=ids(60, 1), max_tokens=8, temperature=0)["choices"]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            for victim in (c.routers[0], c.routers[1]):
                victim.kill(signal.SIGSTOP)  # takes requests and answers none
                asked = [pool.submit(g.ask, "POST", "/v1/completions", {"model": MODEL, "prompt": ids(60, 1), "max_tokens": 8,
                                                                      "temperature": 0}) for _ in range(16)]
                time.sleep(0.3)
                victim.kill()
                got = [a.result() for a in asked]
                assert all(status == 200 and body["choices"] == want for status, _, body in got), got
                victim.child.wait()
                victim.start()
                c.wait_ready(router=victim)
                wait_until(lambda: g.ask("GET", "/health")[2].get("routers") == 2, 30, "both serve")
        for r in c.routers:
            r.kill()
        status, headers, got = g.ask("POST", "/v1/completions", {"model": MODEL, "prompt": "a"})
        assert status == 503 and got["error"]["type"] == "server_error", (status, got)
        wait_until(lambda: g.ask("GET", "/health")[0] == 503, 30, "it says that no router serves")


@test
def test_streams_whose_router_dies_go_on_at_another():
    """Chats and completions, drawn and greedy, with stop strings, several choices and prompts, streamed and
    whole: routers die one after the other, and clients get what they get of an undisturbed cluster."""
    long = dict(max_tokens=150, ignore_eos=True)
    kinds = [("/v1/completions", dict(prompt=ids(60, 1), temperature=0, **long)),
             ("/v1/completions", dict(prompt="Once upon a time", temperature=1, seed=11, echo=True, **long)),
             ("/v1/completions", dict(prompt=["The cat", ids(40, 3)], n=2, temperature=1, seed=12, stop=["zzz", "e s"], **long)),
             ("/v1/chat/completions", dict(messages=HELLO, temperature=0.7, seed=13, top_p=0.9, frequency_penalty=0.5, **long))]
    def text(g, path, asked, stream):
        if not stream:
            got = g.post(path, **asked)
            return ({x["index"]: (x.get("text") or x["message"]["content"], x["finish_reason"]) for x in got["choices"]},
                    got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"])
        parts, why, usage = {}, {}, None
        events = g.events(path, stream_options={"include_usage": True}, **asked)
        assert events[-1] == "[DONE]", events[-1]
        for chunk in map(json.loads, events[:-1]):
            usage = chunk.get("usage")
            for x in chunk["choices"]:
                piece = x.get("text", x.get("delta", {}).get("content", ""))
                parts[x["index"]] = parts.get(x["index"], "") + piece
                why[x["index"]] = x["finish_reason"] or why.get(x["index"])
        return {i: (parts[i], why[i]) for i in parts}, usage["prompt_tokens"], usage["completion_tokens"]
    metrics = f"127.0.0.1:{free_port()}"
    with Cluster(routers=3, worker_args=["--faults", "step:delay/10ms"]) as c, Gateway(c, "--metrics-listen", metrics) as g:
        want = [text(g, *kind, stream) for kind in kinds for stream in (False, True)]
        assert want[::2] == want[1::2], want
        with concurrent.futures.ThreadPoolExecutor(8 * EACH) as pool:
            asked = [pool.submit(text, g, *kind, stream) for _ in range(EACH) for kind in kinds for stream in (False, True)]
            for victim in c.routers[:2]:
                wait_until(lambda: c.status(victim)["running"] > 4, 30, lambda: str(c.status(victim)))
                time.sleep(0.3)
                victim.kill()
            got = [a.result() for a in asked]
        wrong = [(x, y) for x, y in zip(got, want * EACH) if x != y]
        assert not wrong, wrong[0]
        resumed = metric(metrics, "tandem_gateway_resumed_total{}")
        print(f"# {resumed:.0f} choices went on at another router")
        assert resumed > 2, resumed
        c.routers[2].kill()


@test
def test_a_deadline_goes_on_where_another_router_does():
    asked = dict(prompt=ids(40, 1), max_tokens=4000, ignore_eos=True, tandem={"deadline_ms": 4000 * SLOW})
    with Cluster(routers=2, worker_args=["--faults", "step:delay/20ms"]) as c, Gateway(c) as g:
        began = time.monotonic()
        conn, r = g.start("POST", "/v1/completions", {"model": MODEL, "stream": True, **asked})
        assert r.readline().startswith(b"data: ")
        time.sleep(2 * SLOW)
        serving = [x for x in c.routers if c.status(x)["running"]]
        serving[0].kill()
        last = [b for b in r.read().decode().split("\n\n") if b][-1]
        took = time.monotonic() - began
        assert json.loads(last[6:])["error"]["code"] == "deadline_exceeded", last
        assert 4 * SLOW <= took < 5.5 * SLOW, took
        serving[0].child.wait()


@test
def test_a_stream_whose_router_dies_ends_with_an_error():
    with Cluster(worker_args=["--faults", "step:delay/20ms"]) as c, Gateway(c) as g:
        conn, r = g.start("POST", "/v1/completions", {"model": MODEL, "prompt": ids(40, 1), "max_tokens": 2000, "ignore_eos": True,
                                                      "stream": True})
        first = r.readline()
        assert first.startswith(b"data: "), first
        c.router.kill()
        last = [b for b in r.read().decode().split("\n\n") if b][-1]
        assert json.loads(last[6:])["error"]["type"] == "server_error", last


@test
def test_a_gateway_that_ends_finishes_what_it_has():
    with Cluster(worker_args=["--faults", "step:delay/20ms"]) as c:
        g = Gateway(c)
        conn, r = g.start("POST", "/v1/completions", {"model": MODEL, "prompt": ids(40, 1), "max_tokens": 60, "ignore_eos": True,
                                                      "stream": True})
        r.readline()
        g.proc.kill(signal.SIGTERM)
        assert r.read().decode().rstrip().endswith("data: [DONE]")
        assert g.proc.await_end() == 0
        c.audit(20)


@test
def test_tandem_up_starts_a_gateway_and_starts_it_again():
    with tempfile.TemporaryDirectory() as d:
        run = os.path.join(d, "run")
        out = tandem("up", "--model", DEMO, "--run-dir", run, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--detach",
                     "--no-store", "--pool-bytes", "32M", "--deaf-ms", str(3000 * SLOW))
        try:
            g = Gateway.__new__(Gateway)
            g.tls, g.proc = None, type("Announced", (), {"address": re.search(r"http://(\S+?)/v1 ", out).group(1)})
            wait_until(lambda: g.ask("GET", "/health")[0] == 200, 30, "it serves")
            assert g.post("/v1/completions", prompt="a", max_tokens=2)["choices"], out
            def pid():
                with open(os.path.join(run, "cluster.json")) as f:
                    return next(p["pid"] for p in json.load(f)["processes"] if p["name"] == "gateway")
            for sig in (signal.SIGKILL, signal.SIGSTOP):  # stopped, it answers no health check
                was = pid()
                os.kill(was, sig)
                wait_until(lambda: not alive(was), 30, "it is gone")
                wait_until(lambda: g.ask("GET", "/health")[0] == 200, 30, "it serves again, at the same address")
            is_now = pid()
            time.sleep(5 * SLOW)  # longer than a process may be deaf: one that answers stays
            assert alive(is_now) and pid() == is_now != was
        finally:
            tandem("down", "--run-dir", run)
        assert g.ask("GET", "/health")[0] == 0


if __name__ == "__main__":
    main()
