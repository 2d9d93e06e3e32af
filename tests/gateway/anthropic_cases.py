"""What people do with the anthropic package: anthropic_cases.py BASE_URL MODEL. Each function is a case."""
import json, sys

import anthropic

URL, MODEL = sys.argv[1:3]
GREEDY = {"temperature": 0}
HELLO = [{"role": "user", "content": "Hello"}]
client = anthropic.Anthropic(base_url=URL, api_key="any", max_retries=0)


def messages():
    whole = client.messages.create(model=MODEL, max_tokens=40, messages=HELLO, extra_body=GREEDY)
    assert whole.type == "message" and whole.role == "assistant" and whole.content[0].text and whole.stop_reason == "end_turn", whole
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens > 0 and 0 < whole.usage.output_tokens < 40, whole
    cut = client.messages.create(model=MODEL, max_tokens=2, system="Be brief.", messages=HELLO, extra_body=GREEDY, metadata={"user_id": "me"})
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2, cut
    word = whole.content[0].text.split()[2]
    ended = client.messages.create(model=MODEL, max_tokens=40, messages=HELLO, extra_body=GREEDY, stop_sequences=["zzz", word])
    assert ended.stop_reason == "stop_sequence" and ended.stop_sequence == word, ended
    assert ended.content[0].text == whole.content[0].text.split(word)[0], ended


def stream():
    whole = client.messages.create(model=MODEL, max_tokens=40, messages=HELLO, extra_body=GREEDY)
    with client.messages.stream(model=MODEL, max_tokens=40, messages=HELLO, extra_body=GREEDY) as s:
        text = "".join(s.text_stream)
        final = s.get_final_message()
    assert text == whole.content[0].text == final.content[0].text and final.stop_reason == "end_turn", (text, final)
    assert final.usage.output_tokens == whole.usage.output_tokens, (final, whole)
    events = list(client.messages.create(model=MODEL, max_tokens=4, messages=HELLO, stream=True))
    kinds, begin = [e.type for e in events], events[0].message
    assert begin.usage.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens and begin.model == MODEL, begin
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds


def conversation():
    talk = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]},
            {"role": "user", "content": [{"type": "text", "text": "Who", "cache_control": {"type": "ephemeral"}},
                                         {"type": "text", "text": "are you?"}]}]
    system = [{"type": "text", "text": "Be brief."}]
    n = client.messages.count_tokens(model=MODEL, messages=talk, system=system).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=4, messages=talk, system=system).usage
    assert n == usage.input_tokens + usage.cache_read_input_tokens > client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens


COLOR = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"], "additionalProperties": False}
TOOLS = [{"name": "paint", "description": "Paints the door.", "input_schema": COLOR}]


def calls_of_functions():
    kw = dict(model=MODEL, max_tokens=400, tools=TOOLS, extra_body=GREEDY)
    whole = client.messages.create(messages=HELLO, tool_choice={"type": "tool", "name": "paint"}, **kw)
    call, = whole.content
    assert whole.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "paint" and call.input["color"] in ("red", "blue"), whole
    with client.messages.stream(messages=HELLO, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **kw) as s:
        pieces = [e.partial_json for e in s if e.type == "input_json"]
        final = s.get_final_message()
    assert json.loads("".join(pieces)) == final.content[0].input == call.input and final.stop_reason == "tool_use", (pieces, final)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "It is painted."}]}
    talk = [*HELLO, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}]
    for choice in ("auto", "none"):
        after = client.messages.create(messages=talk, tool_choice={"type": choice}, **{**kw, "max_tokens": 8})
        assert after.content[0].type == "text" and after.content[0].text, after
    counts = [client.messages.count_tokens(model=MODEL, **kw).input_tokens
              for kw in (dict(messages=HELLO), dict(messages=talk), dict(messages=talk, tools=TOOLS))]
    assert counts == sorted(set(counts)), counts


def errors():
    for kind, word, bad in ((anthropic.NotFoundError, "model", dict(model="x")),
                            (anthropic.BadRequestError, "temperature", dict(extra_body={"temperature": 500})),
                            (anthropic.BadRequestError, "tools", dict(tools=[{"type": "bash_20250124", "name": "bash"}])),
                            (anthropic.BadRequestError, "messages", dict(messages=[*HELLO, {"role": "assistant", "content": "I"}])),
                            (anthropic.RateLimitError, "TTFT", dict(extra_body={"tandem": {"ttft_ms": 0.001}}))):
        try:
            client.messages.create(**{"model": MODEL, "max_tokens": 4, "messages": HELLO, **bad})
        except kind as e:
            assert e.body["type"] == "error" and word in e.body["error"]["message"], (bad, e.body)
        else:
            raise AssertionError(bad)


for case in (messages, stream, conversation, calls_of_functions, errors):
    case()
    print("# anthropic", anthropic.__version__, case.__name__, "OK", flush=True)
