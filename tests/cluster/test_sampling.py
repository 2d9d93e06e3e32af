"""Parameters of a request for sampling, prompts and the cache, end to end."""
import json, math, os, subprocess, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import Client, pb, raw, request

GOLDEN = golden(os.path.join(DEMO, "golden.json"))
CASE = next(c for c in GOLDEN["cases"] if len(c["prompt_ids"]) > 40)


def ask(c, **kw):
    return c.generate([{"id": "x", "prompt_ids": CASE["prompt_ids"], "max_tokens": 12, "ignore_eos": True, "greedy": True, **kw}])["x"]


@test
def test_top_logprobs_come_with_every_token_whatever_the_plan():
    want = None
    for plan in ("split", "aggregated", "kept"):
        with Cluster(plan=plan) as c:
            for _ in range(5 if plan == "split" else 1):  # the first token of either worker may come first
                r = ask(c, top_logprobs=5, logprobs=True, bypass_cache=True)
                assert len(r["top_logprobs"]) == 12 and r["token_ids"] == CASE["greedy_ids"][:12]
                for token, logprob, top in zip(r["token_ids"], r["logprobs"], r["top_logprobs"]):
                    assert len(top) == 5 and top[0][0] == token and abs(top[0][1] - logprob) < 1e-6
                    assert top == sorted(top, key=lambda t: -t[1]) and sum(math.exp(t[1]) for t in top) <= 1.0001
                want = want or r["top_logprobs"]
                assert r["top_logprobs"] == want
            assert "top_logprobs" not in ask(c)
            c.audit()


@test
def test_prompt_tokens_come_with_rank_and_likeliest_whatever_the_plan():
    ids, greedy = CASE["prompt_ids"], CASE["greedy_ids"][:8]
    scored = dict(prompt_ids=ids + greedy, prompt_logprobs=True)
    want = None
    for plan in ("split", "aggregated", "kept"):
        with Cluster(plan=plan) as c:
            for n in (0, 1):
                r = ask(c, top_logprobs=4, max_tokens=n, **scored)
                lists = (r["prompt_logprobs"], r["prompt_ranks"], r["prompt_top_logprobs"])
                assert all(len(l) == len(ids) + 8 and l[0] is None for l in lists), r
                for token, logprob, rank, top in list(zip(scored["prompt_ids"], *lists))[1:]:
                    assert len(top) == 4 and top == sorted(top, key=lambda t: -t[1])
                    assert top[rank - 1] == [token, logprob] if rank <= 4 else token not in [t[0] for t in top]
                assert r["prompt_ranks"][-8:] == [1] * 8  # the answer was greedy
                want = want or lists
                assert lists == want
            plain = ask(c, max_tokens=1, **scored)
            assert plain["prompt_ranks"] == want[1] and "prompt_top_logprobs" not in plain
            c.audit()
    with Cluster(prefill=0, decode=1) as c:  # the scores of a long prompt fit into a message
        end = Client(c.router.address).all(request(ids=[1] * 8000, max_tokens=0, want_prompt_logprobs=True, top_logprobs=20))[2]
        assert len(end.prompt_top_ids) == len(end.prompt_top_logprobs) == 7999 * 20


@test
def test_allowed_ids_and_min_tokens_bound_what_is_drawn():
    with Cluster(plan="split") as c:
        r = ask(c, allowed_ids=[5, 9, 300], temperature=5.0, greedy=False, seed=3)
        assert set(r["token_ids"]) <= {5, 9, 300} and len(set(r["token_ids"])) > 1
        r = ask(c, allowed_ids=[5, 9], stop_ids=[5], min_tokens=4, ignore_eos=False)
        assert r["token_ids"][:3] == [9, 9, 9], r


@test
def test_generation_config_says_what_a_request_leaves_open():
    greedy = CASE["greedy_ids"]
    said = dict(do_sample=True, temperature=1.1, min_p=0.02, repetition_penalty=1.4, suppress_tokens=greedy[:2], max_new_tokens=9,
                num_beams=4, no_repeat_ngram_size=3)
    model = changed_model("generation_config.json", lambda b: json.dumps({**json.loads(b), **said}).encode())
    open_ended = {"id": "x", "prompt_ids": CASE["prompt_ids"], "seed": 5, "ignore_eos": True}
    with Cluster(model=model) as c:
        [r] = c.generate([open_ended]).values()
        assert len(r["token_ids"]) == 9 and r["finish_reason"] == "length", r
        assert not set(ask(c)["token_ids"]) & set(greedy[:2])
        assert len(ask(c, max_tokens=11)["token_ids"]) == 11
        plain = ask(c, repetition_penalty=1, logit_bias={greedy[0]: 100})
        warned = [l for l in c.log("router").splitlines() if "generation_config.json" in l]
        assert len(warned) == 1 and warned[0].endswith("fields=num_beams,no_repeat_ngram_size"), warned
    with Cluster() as c:
        bias = {i: -100 for i in said["suppress_tokens"]}
        [want] = c.generate([dict(open_ended, temperature=1.1, top_p=0.95, min_p=0.02, repetition_penalty=1.4, max_tokens=9,
                                  logit_bias=bias)]).values()
        assert r["token_ids"] == want["token_ids"]
        assert plain["token_ids"] == ask(c, logit_bias=bias)["token_ids"]
        assert not [l for l in c.log("router").splitlines() if "generation_config.json" in l]


@test
def test_typical_p_and_top_p_are_the_same_everywhere():
    settings = dict(greedy=False, temperature=1.3, typical_p=0.7, top_k=300, min_p=0.001, seed=11, logprobs=True)
    results = []
    for args in ({"plan": "split"}, {"plan": "kept"}, {"prefill": 0, "decode": 1, "worker_args": ["--chunk-tokens", "16"]}):
        with Cluster(**args) as c:
            r = ask(c, **settings)
            results.append((r["token_ids"], r["logprobs"]))
    assert results[0] == results[1] == results[2]
    with Cluster(prefill=0, decode=1) as c:
        assert ask(c, **{**settings, "seed": 12})["token_ids"] != results[0][0]


@test
def test_choices_are_what_they_are_alone_and_share_the_prompt():
    settings = dict(greedy=False, temperature=1.1, seed=5, logprobs=True)
    for args in ({"plan": "split", "prefill": 1, "decode": 2}, {"prefill": 0, "decode": 1}, {"plan": "kept"}):
        with Cluster(**args) as c:
            client = Client(c.router.address)
            r = ask(c, n=4, **settings)
            all_of = [r, *r["choices"]]
            assert len(all_of) == 4 and len({tuple(x["token_ids"]) for x in all_of}) == 4
            assert all(x["seed"] == 5 and len(x["token_ids"]) == 12 and x["finish_reason"] == "length" for x in all_of)
            full = (len(CASE["prompt_ids"]) - 1) // 16 * 16
            cached = [x["usage"]["cached_tokens"] for x in all_of]
            first, *others = (sum(x.values()) for x in cached)
            assert others == [full] * 3 and (not first or r.get("replans")), (args, cached)  # planned anew: what is left
            one = ask(c, **settings)
            assert (one["token_ids"], one["logprobs"]) == (r["token_ids"], r["logprobs"])
            again = ask(c, n=3, **settings)  # a choice depends on its number, not on the number of choices
            assert [x["token_ids"] for x in again["choices"]] == [x["token_ids"] for x in r["choices"][:2]]
            first = ask(c, n=2, max_tokens=1, **settings)
            assert [len(x["token_ids"]) for x in (first, *first["choices"])] == [1, 1]
            code, text = client.error(request(ids=[1], max_tokens=2, sampling__n=17))
            assert code == "INVALID_ARGUMENT" and "sampling.n" in text
            stream = client.generate(request(ids=CASE["prompt_ids"], max_tokens=3000, greedy=False, sampling__n=8, stopping__ignore_eos=True),
                                     timeout=60)
            seen = set()
            while len(seen) < 4:
                seen.add(next(stream).choice)
            stream.cancel()
            c.audit(2)


@test
def test_echo_begins_the_text_with_the_prompt():
    with Cluster(plan="split") as c:
        plain, echo = (c.generate([{"id": "x", "prompt": "Once upon a time", "max_tokens": 8, "greedy": True, "echo": e}])["x"]
                       for e in (False, True))
        assert echo["text"] == "Once upon a time" + plain["text"] and echo["token_ids"] == plain["token_ids"]
        assert echo["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        r = ask(c, echo=True, max_tokens=0, prompt_logprobs=True)
        text = Client(c.router.address).detokenize(pb.DetokenizeRequest(ids=CASE["prompt_ids"])).text
        assert r["text"] == text and len(r["prompt_logprobs"]) == len(CASE["prompt_ids"]) and r["token_ids"] == []


@test
def test_special_tokens_are_shown_where_a_request_asks_for_them():
    with Cluster() as c:
        client = Client(c.router.address)
        eos = client.tokenize(pb.TokenizeRequest(text=b"<|im_end|>")).ids
        assert len(eos) == 1, eos
        force = dict(logit_bias={eos[0]: 100}, ignore_eos=False, min_tokens=2)
        assert ask(c, **force)["token_ids"][2:] == list(eos) and "<|im_end|>" not in ask(c, **force)["text"]
        shown = ask(c, skip_special_tokens=False, **force)
        assert shown["text"].endswith("<|im_end|>") and ask(c, skip_special_tokens=True, **force)["text"] + "<|im_end|>" == shown["text"]
        args = ["--temperature", "0", "--json", "--no-skip-special-tokens", "What is 2 and 2?"]
        out = subprocess.run([TANDEM, "generate", "--router", c.router.address, *args], capture_output=True, text=True, timeout=60)
        r = json.loads(out.stdout)
        assert r["finish_reason"] == "stop" and r["text"].endswith("<|im_end|>"), r
        both = ask(c, skip_special_tokens=False, n=2, **force)
        assert both["choices"][0]["text"] == both["text"] == shown["text"], both


@test
def test_bypass_finds_nothing_and_leaves_nothing():
    with Cluster(plan="split", store=True) as c:
        def cached(**kw):
            return sum(ask(c, **kw)["usage"]["cached_tokens"].values())
        full = (len(CASE["prompt_ids"]) - 1) // 16 * 16
        assert cached(bypass_cache=True) == 0 and cached() == 0 and cached() == full
        assert cached(bypass_cache=True) == 0 and cached() == full
        assert ask(c, bypass_cache=True)["token_ids"] == CASE["greedy_ids"][:12]
        c.audit()


@test
def test_refusals_name_the_field():
    with Cluster(plan="split") as c:
        client = Client(c.router.address)
        vocab = client.list_models().models[0].vocab_size
        for kw, field in ((dict(sampling__typical_p=1.5), "sampling.typical_p"), (dict(sampling__typical_p=-1.0), "sampling.typical_p"),
                          (dict(sampling__allowed_ids=[vocab]), "sampling.allowed_ids[0]"),
                          (dict(sampling__allowed_ids=[1] * 5000), "sampling.allowed_ids"),
                          (dict(top_logprobs=21), "top_logprobs"), (dict(sampling__min_p=2.0), "sampling.min_p")):
            code, text = client.error(request(ids=[1, 2], max_tokens=2, greedy=False, **kw))
            assert code == "INVALID_ARGUMENT" and field in text, (code, text)
        nothing = dict(sampling__allowed_ids=[5, 9], stopping__stop_ids=[9, 5], max_tokens=4)
        code, text = client.error(request(ids=[1, 2], stopping__min_tokens=1, **nothing))
        assert code == "INVALID_ARGUMENT" and text.startswith("sampling.allowed_ids: "), (code, text)
        assert client.error(request(ids=[1, 2], **nothing)) == ("OK", "")
        for tools in (b"{}", b"[", b"[1"):
            r = request(chat=[(b"user", b"x")], max_tokens=2)
            r.chat.tools = tools
            code, text = client.error(r)
            assert code == "INVALID_ARGUMENT" and "chat.tools" in text, (code, text)
        r = request(chat=[(b"user", b"x"), (b"user", b"\1\1\1")], max_tokens=2)
        code, text = client.error(raw(r, b"\xff\xff\xff"))
        assert code == "INVALID_ARGUMENT" and "chat.messages[1].content" in text, (code, text)


def template(text):
    """A temporary file that is removed when it is not used any more."""
    f = tempfile.NamedTemporaryFile("w", suffix=".jinja")
    f.write(text)
    f.flush()
    return f


@test
def test_chat_takes_whole_messages_tools_and_another_template():
    f = template("{% for m in messages %}{{ m.role }}:{{ m.content or m.tool_calls | tojson }}\n{% endfor %}{{ tools | tojson }}{{ shout }}"
                 "{% if messages | length > 3 %}{{ raise_exception('too many') }}{% endif %}{% if add_generation_prompt %}>{% endif %}")
    with Cluster(plan="split", router_args=["--chat-template", f.name]) as c:
        client = Client(c.router.address)
        chat = pb.ChatPrompt(tools=b'[{"name": "f"}]', variables=b'{"shout": "!"}')
        chat.messages.add(role=b"user", content="h\u00e9".encode())
        chat.messages.add(json=b'{"role": "assistant", "content": null, "tool_calls": [{"a": 1}]}')
        got = client.tokenize(pb.TokenizeRequest(chat=chat)).text
        assert got == 'user:h\u00e9\nassistant:[{"a": 1}]\n[{"name": "f"}]!>', got
        chat.no_generation_prompt = True
        assert not client.tokenize(pb.TokenizeRequest(chat=chat)).text.endswith(">")
        answer = c.generate([{"id": "x", "messages": [{"role": "user", "content": [{"type": "text"}]}], "tools": [], "max_tokens": 3,
                              "greedy": True}])["x"]
        assert len(answer["token_ids"]) <= 3 and "text" in answer, answer
        for _ in range(2):
            chat.messages.add(role=b"user", content=b"x")
        r = pb.GenerateRequest(chat=chat)
        code, text = client.error(r)
        assert code == "INVALID_ARGUMENT" and "too many" in text, (code, text)


@test
def test_a_template_that_is_not_understood_is_refused_at_start():
    f = template("ok\n  {% include 'x' %}")
    out = subprocess.run([os.path.join(BUILD, "router/tandem-router"), "--model", DEMO, "--listen", "127.0.0.1:0", "--workers", "127.0.0.1:1",
                          "--chat-template", f.name], capture_output=True, text=True, timeout=30)
    assert out.returncode != 0 and "line 2, column 6" in out.stderr and "include" in out.stderr, out.stderr


main()
