"""What people do with the openai package: openai_cases.py BASE_URL MODEL. Each function is a case."""
import asyncio, json, sys

import openai
from openai import AsyncOpenAI, OpenAI

URL, MODEL = sys.argv[1:3]
HELLO = [{"role": "user", "content": "Hello"}]
client = OpenAI(base_url=URL, api_key="any", max_retries=0)


def models():
    assert [m.id for m in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL


def chat():
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, temperature=0)
    assert whole.choices[0].message.role == "assistant" and whole.usage.completion_tokens == 6, whole
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 6 and whole.object == "chat.completion", whole
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=6, temperature=0, stream=True,
                                                 stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content, chunks
    assert chunks[-1].usage.completion_tokens == 6 and not chunks[-1].choices, chunks[-1]


def chat_stream_helper():
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=40, temperature=0)
    with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=40, temperature=0, logprobs=True) as stream:
        deltas = [e.delta for e in stream if e.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content, (deltas, final)
    assert len(final.choices[0].logprobs.content) == whole.usage.completion_tokens and final.choices[0].finish_reason == "stop", final


def chat_with_system_parts_and_choices():
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    got = client.chat.completions.create(model=MODEL, messages=messages, n=3, temperature=1, seed=4, max_tokens=8, user="me",
                                         metadata={"a": "b"}, logit_bias={"5": -100}, top_p=0.9, stop=["zz"], store=False)
    assert [c.index for c in got.choices] == [0, 1, 2] and len({c.message.content for c in got.choices}) > 1, got


def log_probabilities():
    got = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=2, temperature=0)
    assert all(t.top_logprobs[0].logprob >= t.logprob and len(t.top_logprobs) == 2 for t in got.choices[0].logprobs.content), got
    old = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=5, logprobs=2, echo=True, temperature=0)
    assert old.choices[0].logprobs.token_logprobs[0] is None and len(old.choices[0].logprobs.tokens) == old.usage.total_tokens, old


def completions():
    got = client.completions.create(model=MODEL, prompt=["Once upon a time", "The"], max_tokens=5, temperature=0)
    text = "".join(c.choices[0].text for c in client.completions.create(model=MODEL, prompt="The", max_tokens=5, temperature=0, stream=True))
    assert [c.index for c in got.choices] == [0, 1] and got.choices[1].text == text, (got, text)


def responses():
    whole = client.responses.create(model=MODEL, input="Hello", instructions="Be brief.", temperature=0, max_output_tokens=40)
    assert whole.status == "completed" and whole.output_text and whole.usage.output_tokens < 40, whole
    events = list(client.responses.create(model=MODEL, input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
                                          instructions="Be brief.", temperature=0, max_output_tokens=40, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events))), events
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text == events[-1].response.output_text
    assert events[0].type == "response.created" and events[-1].type == "response.completed" and events[-1].response.usage == whole.usage, events[-1]
    with client.responses.stream(model=MODEL, input="Hello", temperature=0, max_output_tokens=2) as stream:
        assert [e for e in stream][-1].response.status == "incomplete"
    cut = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens", cut
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    for param, bad in (("previous_response_id", dict(previous_response_id="resp_1")), ("background", dict(background=True)),
                       ("text.format.type", dict(text={"format": {"type": "xml"}})), ("input[0].content[0]", dict(input=image)),
                       ("input[0].type", dict(input=[{"type": "item_reference", "id": "x"}]))):
        try:
            client.responses.create(**{"model": MODEL, "input": "Hello", **bad})
        except openai.BadRequestError as e:
            assert e.param == param, (bad, e)
        else:
            raise AssertionError(bad)


COLOR = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"], "additionalProperties": False}


def structured_output():
    named = {"type": "json_schema", "json_schema": {"name": "color", "strict": True, "schema": COLOR}}
    got = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=200, temperature=0, response_format=named)
    assert json.loads(got.choices[0].message.content)["color"] in ("red", "blue") and got.choices[0].finish_reason == "stop", got
    any_json = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=9, temperature=0, response_format={"type": "json_object"})
    assert any_json.choices[0].message.content.strip()[:1] in ("", "{"), any_json
    flat = {"format": {"type": "json_schema", "name": "color", "strict": True, "schema": COLOR}}
    got = client.responses.create(model=MODEL, input="Hello", max_output_tokens=200, temperature=0, text=flat)
    assert json.loads(got.output_text)["color"] in ("red", "blue"), got
    got = client.completions.create(model=MODEL, prompt="It is ", max_tokens=20, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert got.choices[0].text in ("yes", "no"), got
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    try:
        client.chat.completions.create(model=MODEL, messages=HELLO, response_format=bad)
    except openai.BadRequestError as e:
        assert "not is not supported" in str(e), e
    else:
        raise AssertionError(bad)


PAINT = {"name": "paint", "description": "Paints the door.", "parameters": COLOR}
STOP = {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": f} for f in (PAINT, STOP)]


def calls_of_functions():
    """As agents do: a call that must be made, as a whole and in pieces, its result, a plain answer."""
    kw = dict(model=MODEL, max_tokens=400, temperature=0, tools=TOOLS, parallel_tool_calls=False)
    chosen = {"type": "function", "function": {"name": "paint"}}
    whole = client.chat.completions.create(messages=HELLO, tool_choice=chosen, **kw).choices[0]
    call, = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None and call.function.name == "paint", whole
    assert json.loads(call.function.arguments)["color"] in ("red", "blue") and call.type == "function" and call.id, call
    with client.chat.completions.stream(messages=HELLO, tool_choice=chosen, **kw) as stream:
        pieces = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert "".join(pieces) == final.arguments == call.function.arguments, (pieces, final)
    any_of_them = client.chat.completions.create(messages=HELLO, tool_choice="required", **kw).choices[0]
    assert any_of_them.message.tool_calls[0].function.name in ("paint", "stop"), any_of_them
    talk = [*HELLO, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "It is painted."}]
    for choice in ("auto", "none"):
        after = client.chat.completions.create(messages=talk, tool_choice=choice, **{**kw, "max_tokens": 8}).choices[0]
        assert after.message.content and not after.message.tool_calls, after

    flat = [{"type": "function", "strict": True, **f} for f in (PAINT, STOP)]
    kw = dict(model=MODEL, input="Hello", max_output_tokens=400, temperature=0, tools=flat, tool_choice={"type": "function", "name": "paint"})
    got = client.responses.create(**kw)
    item, = got.output
    assert got.status == "completed" and item.type == "function_call" and item.name == "paint", got
    assert json.loads(item.arguments)["color"] in ("red", "blue"), item
    with client.responses.stream(**kw) as stream:
        pieces = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response().output[0]
    assert "".join(pieces) == final.arguments == item.arguments, (pieces, final)
    talk = [{"role": "user", "content": "Hello"}, item, {"type": "function_call_output", "call_id": item.call_id, "output": "It is painted."}]
    after = client.responses.create(**{**kw, "input": talk, "tool_choice": "auto", "max_output_tokens": 16})
    assert after.output[0].type == "message" and after.output_text, after


def errors():
    for kind, status, param, bad in ((openai.NotFoundError, 404, "model", dict(model="x")),
                                     (openai.BadRequestError, 400, "temperature", dict(model=MODEL, temperature=500)),
                                     (openai.BadRequestError, 400, "no_such", dict(model=MODEL, extra_body={"no_such": 1})),
                                     (openai.RateLimitError, 429, None, dict(model=MODEL, extra_body={"tandem": {"ttft_ms": 0.001}}))):
        try:
            client.chat.completions.create(messages=HELLO, **bad)
        except kind as e:
            assert e.status_code == status and e.param == param and e.request_id, (e, e.param)
        else:
            raise AssertionError(bad)


def many_at_once():
    async def ask():
        many = AsyncOpenAI(base_url=URL, api_key="any")
        return await asyncio.gather(*(many.completions.create(model=MODEL, prompt="Once upon", max_tokens=20, temperature=0) for _ in range(50)))
    assert len({g.choices[0].text for g in asyncio.run(ask())}) == 1


for case in (models, chat, chat_stream_helper, chat_with_system_parts_and_choices, log_probabilities, completions, responses, structured_output,
             calls_of_functions, errors, many_at_once):
    case()
    print("# openai", openai.__version__, case.__name__, "OK", flush=True)
