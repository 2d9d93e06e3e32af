"""API keys: whose request it is comes from the key, and what a key may have is bounded."""
import os, sys, threading
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cluster"))
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
from client import grpc, pb, request
from lab import make_key

LONG = list(range(1, 130))


class Caller:
    def __init__(self, address, key=None):
        self.address = address
        self.metadata = [("authorization", "Bearer " + key)] if key else []

    def call(self, method, message, response, kind="unary_unary"):
        """(name of the code, answer or details)"""
        channel = grpc.insecure_channel(self.address)
        call = getattr(channel, kind)("/tandem.v1.Tandem/" + method, response_deserializer=response.FromString,
                                      request_serializer=lambda m: m.SerializeToString())
        try:
            got = call(message, timeout=30 * SLOW, metadata=self.metadata)
            return "OK", got if kind == "unary_unary" else list(got)[-1].end
        except grpc.RpcError as e:
            return e.code().name, e.details()

    def generate(self, ids=LONG, max_tokens=2, **kw):
        return self.call("Generate", request(ids=ids, max_tokens=max_tokens, **kw), pb.GenerateResponse, "unary_stream")


def cached(end):
    c = end.usage.cached_tokens
    return c.worker + c.peer + c.dram + c.ssd


@test
def test_the_tenant_is_the_keys_and_nobody_elses_cache_can_be_asked_for():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "keys.json")
        hospital, bank = make_key(path, "hospital"), make_key(path, "bank", loras=["poet"])
        with Cluster(plan="split", router_args=["--api-keys", path]) as c:
            nobody = Caller(c.router.address)
            for caller in (nobody, Caller(c.router.address, "td-x"), Caller(c.router.address, hospital[:-1] + "x")):
                prefix = request(ids=LONG)
                for method, message, response in (
                        ("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse),
                        ("Tokenize", pb.TokenizeRequest(text=b"a"), pb.TokenizeResponse),
                        ("Detokenize", pb.DetokenizeRequest(ids=[1]), pb.DetokenizeResponse),
                        ("Pin", pb.PinRequest(prefix=prefix), pb.PinResponse),
                        ("Flush", pb.FlushRequest(prefix=prefix), pb.FlushResponse)):
                    assert caller.call(method, message, response)[0] == "UNAUTHENTICATED", method
                assert caller.generate()[0] == "UNAUTHENTICATED"
            one, other = Caller(c.router.address, hospital), Caller(c.router.address, bank)
            third_key = make_key(path, "other-model", models=["another"])
            third = Caller(c.router.address, third_key)
            wait_until(lambda: third.generate()[0] == "PERMISSION_DENIED", 10, "the file is read again")
            for method, message, response in (("Tokenize", pb.TokenizeRequest(text=b"a"), pb.TokenizeResponse),
                                              ("Detokenize", pb.DetokenizeRequest(ids=[1]), pb.DetokenizeResponse)):
                code, why = third.call(method, message, response)
                assert code == "PERMISSION_DENIED" and why.startswith("model: "), (method, code, why)
                assert other.call(method, message, response)[0] == "OK", method  # loras do not matter here
            code, models = third.call("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse)
            assert code == "OK" and not models.models, models
            assert one.generate()[0] == "OK"
            code, end = one.generate(tenant=b"hospital")
            assert code == "OK" and cached(end) >= 112, end
            code, why = other.generate()
            assert code == "PERMISSION_DENIED" and "lora" in why, why
            code, why = other.generate(tenant=b"hospital")
            assert code == "PERMISSION_DENIED" and why.startswith("tenant: "), (code, why)
            with open(path) as f:
                keys = json.load(f)
            del keys["keys"][1]["loras"]
            with open(path, "w") as f:
                json.dump(keys, f)
            wait_until(lambda: other.generate(ids=[1, 2, 3])[0] == "OK", 10, "the file is read again")
            code, end = other.generate()
            assert code == "OK" and cached(end) == 0, end  # the same prompt, of another tenant
            # commands bring the key, too
            env = dict(os.environ, TANDEM_API_KEY=hospital)
            run = lambda words: subprocess.run(words, env=env, capture_output=True, text=True, timeout=60 * SLOW)
            for words in (["generate", "--max-tokens", "2", "x"], ["tokenize", "x"],
                          ["cache", "pin", "many words " * 20]):
                words = [TANDEM, *words, "--router", c.router.address]
                out = run(words)
                assert out.returncode == 0, (words, out)
                out = run([*words, "--api-key", "td-no"])
                assert out.returncode == 1 and "UNAUTHENTICATED" in out.stderr, (words, out)
                if words[1] != "tokenize":
                    out = run([*words, "--api-key", third_key])
                    assert out.returncode == 1 and "PERMISSION_DENIED" in out.stderr, (words, out)
            keys["keys"].pop(0)
            with open(path, "w") as f:
                json.dump(keys, f)
            wait_until(lambda: one.generate()[0] == "UNAUTHENTICATED", 10, "the key is gone")
            assert other.generate()[0] == "OK"
            c.audit()


@test
def test_rates_concurrency_and_pins_of_one_key_cost_others_nothing():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "keys.json")
        few = Caller("", make_key(path, "few", requests_per_minute=5))
        words = Caller("", make_key(path, "words", output_tokens_per_minute=30))
        pins = Caller("", make_key(path, "pins", pin_blocks=8))
        free = Caller("", make_key(path, "free"))
        eight = Caller("", make_key(path, "eight", concurrency=8))
        with Cluster(plan="split", router_args=["--api-keys", path]) as c:
            for caller in (few, words, pins, free, eight):
                caller.address = c.router.address
            codes = [few.generate(ids=[i + 1, 2, 3]) for i in range(8)]
            assert [code for code, _ in codes] == ["OK"] * 5 + ["RESOURCE_EXHAUSTED"] * 3, codes
            assert "requests_per_minute" in codes[-1][1], codes[-1]
            assert words.generate(max_tokens=40, stopping__ignore_eos=True)[0] == "OK"
            code, why = words.generate()
            assert code == "RESOURCE_EXHAUSTED" and "output_tokens_per_minute" in why, (code, why)

            def pin(caller, first):
                asked = pb.PinRequest(prefix=request(ids=[first] * 100), ttl_ms=60000)
                return caller.call("Pin", asked, pb.PinResponse)
            assert pin(pins, 1)[0] == "OK"  # 6 blocks of 16 tokens
            code, why = pin(pins, 2)
            assert code == "RESOURCE_EXHAUSTED" and "tenant has pinned 6 of at most 8" in why, (code, why)
            for i in range(10):
                assert free.generate(ids=[i + 1, 5, 6])[0] == "OK" and pin(free, 10 + i)[0] == "OK"
            # all answers of a request count from the moment it is taken, and until they have ended
            got = {}

            def several(first, n):
                got[first] = n, eight.generate(ids=[first] + [7] * 1500, max_tokens=600, sampling__n=n, greedy=False,
                                               stopping__ignore_eos=True)
            threads = [threading.Thread(target=several, args=(20 + i, n)) for i, n in enumerate((5, 5, 4, 4, 3))]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            taken = [n for n, (code, _) in got.values() if code == "OK"]
            refused = [why for _, (code, why) in got.values() if code == "RESOURCE_EXHAUSTED"]
            assert 1 <= len(taken) <= 2 and sum(taken) <= 8 and len(refused) == 5 - len(taken), got
            assert all("requests of the key are open, of 8" in why for why in refused), refused
            assert eight.generate(sampling__n=8)[0] == "OK"
            c.audit()


@test
def test_a_tenant_leaves_room_for_another_however_many_keys_and_connections_it_has():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "keys.json")
        greedy = [make_key(path, "greedy") for _ in range(3)]
        other = make_key(path, "other", texts_per_minute=3)
        with Cluster(plan="split", router_args=["--api-keys", path, "--max-calls", "16"]) as c:
            open_calls = []
            for i in range(12):
                channel = grpc.insecure_channel(c.router.address)
                start = channel.unary_stream("/tandem.v1.Tandem/Generate",
                                             request_serializer=lambda m: m.SerializeToString(),
                                             response_deserializer=pb.GenerateResponse.FromString)
                asked = request(ids=[i + 1, 2, 3], max_tokens=400, stopping__ignore_eos=True)
                bearer = [("authorization", "Bearer " + greedy[i % 3])]
                open_calls.append(start(asked, timeout=60 * SLOW, metadata=bearer))
            # the first message of each: tokens, or the end
            refused = []
            for call in open_calls:
                try:
                    next(call)
                except grpc.RpcError as e:
                    refused.append(e)
            assert len(refused) == 4 and all(e.code() == grpc.StatusCode.RESOURCE_EXHAUSTED for e in refused), refused
            assert all("requests of the tenant are open, of 8" in e.details() for e in refused), refused[0].details()
            caller = Caller(c.router.address, other)
            assert caller.generate()[0] == "OK"
            texts = [caller.call("Tokenize", pb.TokenizeRequest(text=b"a"), pb.TokenizeResponse) for _ in range(5)]
            assert [code for code, _ in texts] == ["OK"] * 3 + ["RESOURCE_EXHAUSTED"] * 2, texts
            assert "texts_per_minute" in texts[-1][1]
            for call in open_calls:
                call.cancel()
            again = Caller(c.router.address, greedy[0])
            wait_until(lambda: again.generate()[0] == "OK", 10, "the streams have ended")
            c.audit()


if __name__ == "__main__":
    main()
