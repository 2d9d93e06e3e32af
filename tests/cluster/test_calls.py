"""Calls of functions and reasoning, in each convention that a template may have: fields of their own over
gRPC and HTTP, the same in pieces and after a router was lost. A grammar makes the model say what a test
wants."""
import http.client, json, os, sys, tempfile
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import Client, pb, request

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}}}}, {"type": "function", "function": {"name": "time"}}]
# what the template has: what the model says, text, reasoning, calls
CONVENTIONS = {
    '<tool_call>{"name": <function-name>} </think>': [
        ('<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź", "days": 2}}\n</tool_call>',
         "Let me see.", "Hm.", [("weather", {"city": "Łódź", "days": 2})]),
        ('<tool_call>{"name": "time", "arguments": {}}</tool_call><tool_call>{"name": "time"}</tool_call>', "", "", [("time", {}), ("time", {})]),
        ('<tool_call>{"name": "tea", "arguments": {}}</tool_call>', '<tool_call>{"name": "tea", "arguments": {}}</tool_call>', "", []),
        ('<tool_call>{"name": "time", "arguments": {', '<tool_call>{"name": "time", "arguments": {', "", []),
        ("Only text. ", "Only text. ", "", [])],
    "<tool_call><function=name>": [("<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>", "", "",
                                    [("weather", {"city": "Rome"})])],
    "<tool_call>name<arg_key>": [("<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", "", "",
                                  [("weather", {"days": 3})])],
    "<|tool_call|>": [('<|tool_call|>[{"name": "time", "arguments": {}}]', "", "", [("time", {})])],
    "[TOOL_CALLS]": [('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bonn"}}]', "", "", [("weather", {"city": "Bonn"})])],
    "[TOOL_CALLS]name[ARGS]": [("Well.[TOOL_CALLS]time[ARGS]{}", "Well.", "", [("time", {})])],
    'format {"name": f, "parameters": p}<|eot_id|>': [('{"name": "weather", "parameters": {"days": 1}}', "", "", [("weather", {"days": 1})])],
    "[func_name1(params_name1=params_value1)]": [("[weather(city='Oslo', days=2), time()]", "", "",
                                                  [("weather", {"city": "Oslo", "days": 2}), ("time", {})])],
    "<｜tool▁sep｜>": [("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", "", [("time", {})])],
    "<｜tool▁sep｜>```json": [("Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜>", "Ok.", "",
                            [("time", {})])],
    "<|channel|><|message|>": [
        ('<|channel|>analysis<|message|>Why.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>'
         '{"city": "SF"}<|call|>', "", "Why.", [("weather", {"city": "SF"})]),
        ("<|channel|>final<|message|>Hello.", "Hello.", "", [])],
}


class Template:
    """A chat template in a file, which has the words that tell the convention."""

    def __enter__(self):
        self.dir = tempfile.mkdtemp(prefix="tandem-test-")
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.dir, ignore_errors=True)

    def write(self, words, end="assistant:"):
        path = os.path.join(self.dir, "chat.jinja")
        with open(path, "w") as f:
            f.write("{# tools: " + words + " #}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + end)
        return path


def asks(answer, tools=True, **kw):
    r = request(chat=[("user", "Hello")], max_tokens=600, sampling__seed=5, **kw)
    r.structured.choice = json.dumps([answer])
    if tools:
        r.chat.tools = json.dumps(TOOLS)
    return r


class Told:
    """What came of a call over gRPC."""

    def __init__(self):
        self.text, self.reasoning, self.calls, self.ids, self.n_deltas, self.end = "", "", [], [], 0, None

    def take(self, m):
        self.text, self.reasoning, self.n_deltas = self.text + m.text, self.reasoning + m.reasoning, self.n_deltas + 1
        self.ids += [t.id for t in m.tokens]
        for c in m.tool_calls:
            if c.index == len(self.calls):
                assert len(c.id) == 9 and c.id.isalnum() and c.name, c
                self.calls.append([c.id, c.name, ""])
            self.calls[c.index][2] += c.arguments
        self.end = m.end if m.HasField("end") else self.end

    @property
    def n_bytes(self):
        return len((self.text + self.reasoning + "".join(name + arguments for _, name, arguments in self.calls)).encode())

    def check(self, text, reasoning, calls):
        assert (self.text, self.reasoning) == (text, reasoning), (self.text, self.reasoning)
        assert [(name, json.loads(arguments)) for _, name, arguments in self.calls] == calls, self.calls
        assert self.end.finish_reason == ("tool_calls" if calls else "stop"), self.end


def told(client, r):
    t = Told()
    for m in client.generate(r, timeout=60):
        t.take(m)
    return t


@test
def test_each_convention_over_grpc():
    n = 0
    with Template() as template:
        for words, cases in CONVENTIONS.items():
            with Cluster(router_args=["--chat-template", template.write(words)]) as c:
                client = Client(c.router.address)
                for answer, *parts in cases:
                    told(client, asks(answer)).check(*parts)
                    raw = told(client, asks(answer, raw_answer=True))
                    assert (raw.text, raw.reasoning, raw.calls, raw.end.finish_reason) == (answer, "", [], "stop"), raw.text
                    n += 1
    print(f"# {n} answers, {len(CONVENTIONS)} conventions")


@test
def test_a_prompt_may_end_within_reasoning():
    with Template() as template:
        with Cluster(router_args=["--chat-template", template.write("</think>", "assistant:<think>\n")]) as c:
            got = told(Client(c.router.address), asks("So.\n</think>\n\nYes.", tools=False))
            assert (got.reasoning, got.text, got.end.finish_reason) == ("So.", "Yes.", "stop"), (got.reasoning, got.text)


@test
def test_a_stop_string_and_choices_within_calls():
    words, cases = next(iter(CONVENTIONS.items()))
    with Template() as template:
        with Cluster(router_args=["--chat-template", template.write(words)]) as c:
            client, (answer, *parts) = Client(c.router.address), cases[0]
            several = [Told() for _ in range(3)]
            for m in client.generate(asks(answer, sampling__n=3), timeout=60):
                several[m.choice].take(m)
            for t in several:
                t.check(*parts)
            assert len({t.calls[0][0] for t in several}) == 3
            stopped = told(client, asks(answer, stopping__stop=["see"]))
            assert (stopped.text, stopped.reasoning, stopped.calls, stopped.end.finish_reason) == ("Let me ", "Hm.", [], "stop"), stopped.text
            cut = asks(answer)
            cut.stopping.max_tokens = 30
            assert told(client, cut).end.finish_reason == "length"


@test
def test_another_router_goes_on_within_any_part():
    words, cases = next(iter(CONVENTIONS.items()))
    with Template() as template:
        with Cluster(router_args=["--chat-template", template.write(words)]) as c:
            client, n = Client(c.router.address), 0
            for answer, *parts in cases:
                whole = told(client, asks(answer))
                for cut in range(1, whole.n_deltas, 3):
                    t = Told()
                    call = client.generate(asks(answer), timeout=60)
                    for _, m in zip(range(cut), call):
                        t.take(m)
                    call.cancel()
                    if t.end:
                        continue
                    rest = asks(answer)
                    rest.resume.ids.extend(t.ids)
                    rest.resume.text_bytes = t.n_bytes
                    for m in client.generate(rest, timeout=60):
                        t.take(m)
                    t.check(*parts)
                    assert t.ids == whole.ids and t.calls == whole.calls, (cut, t.calls, whole.calls)
                    n += 1
    print(f"# {n} answers continued")
    assert n >= 20


SHORT = [{"type": "function", "function": {"name": "paint", "parameters": {"type": "object", "required": ["color"], "additionalProperties": False,
          "properties": {"color": {"type": "string", "enum": ["red", "blue"]}, "coats": {"type": "integer", "minimum": 1, "maximum": 3}}}}},
         {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}]


@test
def test_calls_that_must_be_made_are_made_in_each_convention():
    """A model that knows nothing of functions calls one, with arguments of its schema."""
    n = 0
    with Template() as template:
        for words in CONVENTIONS:
            with Cluster(router_args=["--chat-template", template.write(words)]) as c:
                client = Client(c.router.address)
                for seed in range(4):
                    r = request(chat=[("user", "Paint it")], max_tokens=400, greedy=False, sampling__temperature=1, sampling__seed=seed)
                    r.chat.tools, r.chat.must_call, r.chat.one_call = json.dumps(SHORT), seed < 2, seed != 1
                    r.chat.function = "paint" if seed >= 2 else ""
                    if "func_name1" in words:
                        code, text = client.error(r)
                        assert code == "INVALID_ARGUMENT" and "llama-python" in text, (code, text)
                        continue
                    t = told(client, r)
                    if t.end.finish_reason == "length":
                        continue
                    assert t.end.finish_reason == "tool_calls" and t.calls and not t.text, (words, t.text, t.calls, t.end)
                    assert seed == 1 or len(t.calls) == 1, t.calls
                    for _, name, arguments in t.calls:
                        v = json.loads(arguments)
                        assert name == "paint" if seed >= 2 else name in ("paint", "stop"), t.calls
                        assert v == {} if name == "stop" else v["color"] in ("red", "blue") and v.get("coats", 1) in (1, 2, 3), v
                    n += 1
                for change, words_of_error in ((dict(function="x"), "not in tools"), (dict(tools="[]", must_call=True), "needs tools")):
                    bad = asks("a")
                    bad.ClearField("structured")
                    for k, v in change.items():
                        setattr(bad.chat, k, v)
                    code, text = client.error(bad)
                    assert code == "INVALID_ARGUMENT" and words_of_error in text, (code, text)
    print(f"# {n} answers that called functions")
    assert n > 20


@test
def test_each_convention_over_http():
    with Template() as template:
        for words, cases in CONVENTIONS.items():
            with Cluster(router_args=["--chat-template", template.write(words)]) as c:
                gateway = Proc(c, "gateway", "gateway", ["--routers", c.router.address]).start()
                c.workers.append(gateway)  # is stopped with the cluster
                for answer, text, reasoning, calls in cases:
                    body = {"model": "tandem-demo", "messages": [{"role": "user", "content": "Hello"}], "tools": TOOLS, "max_tokens": 600,
                            "structured_outputs": {"choice": [answer]}, "temperature": 0}
                    status, whole = post(gateway, body)
                    assert status == 200, whole
                    choice = json.loads(whole)["choices"][0]
                    m = choice["message"]
                    assert (m["content"] or "", m.get("reasoning_content", "")) == (text, reasoning) and (m["content"] is None) == (
                        not text and bool(calls)), m
                    assert [(k["function"]["name"], json.loads(k["function"]["arguments"])) for k in m.get("tool_calls", [])] == calls, m
                    assert choice["finish_reason"] == ("tool_calls" if calls else "stop"), choice
                    _, events = post(gateway, {**body, "stream": True})
                    got, names = {"content": "", "reasoning_content": ""}, []
                    for e in events.decode().split("\n\n"):
                        if e.startswith("data: {"):
                            delta = json.loads(e[6:])["choices"][0]["delta"]
                            for k in got:
                                got[k] += delta.get(k) or ""
                            for k in delta.get("tool_calls", []):
                                if "id" in k:
                                    assert k["index"] == len(names) and k["type"] == "function", k
                                    names.append([k["function"]["name"], ""])
                                names[k["index"]][1] += k["function"]["arguments"]
                    assert (got["content"], got["reasoning_content"]) == (text, reasoning), got
                    assert [(name, json.loads(a)) for name, a in names] == calls, names
                none = {**body, "tool_choice": "none"}
                _, whole = post(gateway, none)
                assert "tool_calls" not in json.loads(whole)["choices"][0]["message"], whole


EFFORT = """{% if enable_thinking and thinking %}one two three four five {% endif %}
{%- if reasoning_effort == 'high' %}a b c d e f g h i j k {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"""


@test
def test_how_much_to_reason_reaches_the_template():
    off, on, high = "Hello", "one two three four five Hello", "one two three four five a b c d e f g h i j k Hello"
    hello = [{"role": "user", "content": "Hello"}]
    chat, responses, messages = "/v1/chat/completions", "/v1/responses", "/v1/messages"
    cases = [(chat, {}, off), (chat, {"reasoning_effort": "none"}, off), (chat, {"reasoning_effort": "low"}, on),
             (chat, {"reasoning_effort": "high"}, high), (chat, {"reasoning_effort": None}, off),
             (chat, {"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, "a b c d e f g h i j k Hello"),
             (chat, {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, on),
             (responses, {"reasoning": {"effort": "high", "summary": "auto"}}, high), (responses, {"reasoning": {}}, off),
             (messages, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, on), (messages, {"thinking": {"type": "disabled"}}, off)]
    with Template() as template:
        path = template.write("")
        with open(path, "w") as f:
            f.write(EFFORT)
        with Cluster(router_args=["--chat-template", path]) as c:
            client = Client(c.router.address)
            gateway = Proc(c, "gateway", "gateway", ["--routers", c.router.address]).start()
            c.workers.append(gateway)  # is stopped with the cluster
            for where, members, prompt in cases:
                body = {"model": "tandem-demo", **({"input": hello, "max_output_tokens": 2} if where == responses else
                                                   {"messages": hello, "max_tokens": 2}), **members}
                status, got = post(gateway, body, where)
                assert status == 200, (members, got)
                usage = json.loads(got)["usage"]
                n = usage["prompt_tokens"] if where == chat else usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
                want = len(client.tokenize(pb.TokenizeRequest(text=prompt, add_special_tokens=False)).ids)
                assert n == want, (where, members, n, want)
            status, got = post(gateway, {"model": "tandem-demo", "messages": hello, "reasoning_effort": 5})
            assert status == 400 and json.loads(got)["error"]["param"] == "reasoning_effort", got


def post(gateway, body, path="/v1/chat/completions"):
    host, port = gateway.address.rsplit(":", 1)
    conn = http.client.HTTPConnection(host, int(port), timeout=60)
    conn.request("POST", path, json.dumps(body))
    r = conn.getresponse()
    return r.status, r.read()


if __name__ == "__main__":
    main()
