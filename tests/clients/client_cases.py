"""The Python client from its wheel: client_cases.py basics|survive ADDRESS... Each function is a case."""
import asyncio, sys, threading

import tandem_client
from tandem_client import AsyncClient, Client, TandemError

ADDRESSES = sys.argv[2:]
HELLO = [{"role": "user", "content": "Hello"}]


def refused(call, code, field):
    try:
        call()
    except TandemError as e:
        assert e.code == code and e.field == field, (e.code, e.field, e)
        return e
    raise AssertionError("it was served")


def basics():
    with Client(ADDRESSES) as client:
        whole = client.generate(HELLO, max_tokens=20, temperature=0)
        pieces = list(client.stream(HELLO, max_tokens=20, temperature=0))
        assert whole.text and "".join(p.text for p in pieces) == whole.text and sum((p.ids for p in pieces), []) == whole.ids, (whole, pieces)
        assert pieces[-1].finish_reason == whole.finish_reason == "stop" and whole.end.usage.completion_tokens == len(whole.ids), whole
        ids = client.tokenize("Once upon a time")
        assert client.detokenize(ids).endswith("Once upon a time") and client.models()[0].name == "tandem-demo"
        assert client.generate(ids, max_tokens=6, temperature=0).text == client.generate("Once upon a time", max_tokens=6, temperature=0).text
        drawn = dict(n=3, seed=5, temperature=1, max_tokens=12, stop="zzz", logit_bias={7: -100}, top_k=50)
        three = client.choices("The", **drawn)
        assert len({a.text for a in three}) > 1 and all(a.finish_reason for a in three), three
        assert [a.ids for a in three] == [a.ids for a in client.choices("The", **drawn)]
        assert "\0" in client.detokenize(client.tokenize("a\0b")) and client.generate("a\0b", max_tokens=2).end
        refused(lambda: client.generate("a", temperature=500), "INVALID_ARGUMENT", "sampling.temperature")
        refused(lambda: client.generate("a", model="x"), "NOT_FOUND", "model")
        assert refused(lambda: client.generate("a", max_tokens=2, ttft_ms=0.001), "RESOURCE_EXHAUSTED", "").retry_after_s is None
        for options in ({"no_such": 1}, {"want_ids": False}, {"tools": []}):
            try:
                client.generate("a", **options)
            except TypeError as e:
                assert next(iter(options)) in str(e)
                continue
            raise AssertionError(f"{options} passed")
        for _ in zip(range(3), client.stream("The", max_tokens=2000, ignore_eos=True)):
            pass  # leaving the loop cancels


def basics_async():
    async def run():
        async with AsyncClient(ADDRESSES) as client:
            whole = await client.generate(HELLO, max_tokens=20, temperature=0)
            text = ""
            async for piece in client.stream(HELLO, max_tokens=20, temperature=0):
                text += piece.text
            assert text == whole.text
            many = await asyncio.gather(*(client.generate("Once", max_tokens=20, temperature=0) for _ in range(50)))
            assert len({a.text for a in many}) == 1
            assert await client.detokenize(await client.tokenize("fox")) == "fox"
            try:
                await client.generate("a", top_p=7)
            except TandemError as e:
                assert e.field == "sampling.top_p", e
    asyncio.run(run())


def deadlines():
    """What is asked for again gets what is left of the deadline."""
    from tandem_client._request import Progress, make_request
    progress = Progress(make_request([7], deadline_ms=1000))
    assert [m.slo.deadline_ms for m in progress.requests()] == [1000]
    progress.began -= 0.4
    assert 500 < progress.requests()[0].slo.deadline_ms <= 600
    progress.began -= 3
    assert progress.requests()[0].slo.deadline_ms == 1 and progress.request.slo.deadline_ms == 1000


def survive():
    """200 streams, undisturbed; then again, while the test kills a router as soon as all of them run."""
    n, lock = 200, threading.Lock()

    def all_of_them(tell):
        begun, result = [], {}

        def one(i):
            choices = 1 + (i % 20 == 0)
            answers = [tandem_client.Answer() for _ in range(choices)]
            for k, piece in enumerate(client.stream([7, 8, 9, i], max_tokens=300, temperature=1, seed=i, ignore_eos=True, n=choices)):
                answers[piece.choice].add(piece)
                if k == 2:
                    with lock:
                        begun.append(i)
                        if len(begun) == n and tell:
                            print("all run", flush=True)
            result[i] = [(a.ids, a.text, a.finish_reason) for a in answers]
        threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return result
    with Client(ADDRESSES) as client:
        want, got = all_of_them(False), all_of_them(True)
    assert len(want) == len(got) == n and all(len(ids) == 300 for r in want.values() for ids, _, _ in r), (len(want), len(got))
    assert got == want, [i for i in want if got[i] != want[i]]


for case in {"basics": (basics, basics_async, deadlines), "survive": (survive,)}[sys.argv[1]]:
    case()
    print("# tandem_client", case.__name__, "OK", flush=True)
