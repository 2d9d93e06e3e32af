"""What people do with the anthropic package: anthropic_cases.py BASE_URL MODEL. Each function is a case."""
import sys

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
    kinds = [e.type for e in client.messages.create(model=MODEL, max_tokens=4, messages=HELLO, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds


def conversation():
    talk = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]},
            {"role": "user", "content": [{"type": "text", "text": "Who", "cache_control": {"type": "ephemeral"}},
                                         {"type": "text", "text": "are you?"}]}]
    system = [{"type": "text", "text": "Be brief."}]
    n = client.messages.count_tokens(model=MODEL, messages=talk, system=system).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=4, messages=talk, system=system).usage
    assert n == usage.input_tokens + usage.cache_read_input_tokens > client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens


def errors():
    for kind, word, bad in ((anthropic.NotFoundError, "model", dict(model="x")),
                            (anthropic.BadRequestError, "temperature", dict(extra_body={"temperature": 500})),
                            (anthropic.BadRequestError, "tools", dict(tools=[{"name": "f", "input_schema": {"type": "object"}}])),
                            (anthropic.BadRequestError, "messages", dict(messages=[*HELLO, {"role": "assistant", "content": "I"}])),
                            (anthropic.RateLimitError, "TTFT", dict(extra_body={"tandem": {"ttft_ms": 0.001}}))):
        try:
            client.messages.create(**{"model": MODEL, "max_tokens": 4, "messages": HELLO, **bad})
        except kind as e:
            assert e.body["type"] == "error" and word in e.body["error"]["message"], (bad, e.body)
        else:
            raise AssertionError(bad)


for case in (messages, stream, conversation, errors):
    case()
    print("# anthropic", anthropic.__version__, case.__name__, "OK", flush=True)
