"""The two clients. Each has a channel to every router; a request goes to one, then on to the next."""
import asyncio, itertools, time
from typing import AsyncIterator, Iterator, List, Optional, Sequence, Union

import grpc

from . import tandem_pb2 as pb
from ._request import Answer, Patience, Piece, Progress, TandemError, error_of, make_request

PATH = "/tandem.v1.Tandem/"
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1),
           ("grpc.keepalive_time_ms", 20000), ("grpc.keepalive_timeout_ms", 5000)]


class _Common:
    def __init__(self, addresses, api_key, retries, channel):
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        if not self._addresses:
            raise ValueError("addresses: at least one router is needed")
        self._channels = [channel(a) for a in self._addresses]
        self._metadata = (("authorization", "Bearer " + api_key),) if api_key else ()
        self._retries, self._turn = retries, itertools.count()

    def _patience(self):
        return Patience(len(self._channels), self._retries, next(self._turn) % len(self._channels))

    def _stream(self, at, request, timeout):
        method = self._channels[at].unary_stream(PATH + "Generate",
                                                 request_serializer=pb.GenerateRequest.SerializeToString,
                                                 response_deserializer=pb.GenerateResponse.FromString)
        return method(request, timeout=timeout, metadata=self._metadata)

    def _unary(self, at, name, request, response, timeout):
        method = self._channels[at].unary_unary(PATH + name,
                                                request_serializer=type(request).SerializeToString,
                                                response_deserializer=response.FromString)
        return method(request, timeout=timeout, metadata=self._metadata)


def _left(deadline):
    return None if deadline is None else max(0.001, deadline - time.monotonic())


def _answers(n) -> List[Answer]:
    return [Answer() for _ in range(n)]


class Client(_Common):
    """addresses: HOST:PORT of one or several routers of the same cluster. credentials: of
    grpc.ssl_channel_credentials(); None: no TLS. retries: how often a refused call comes back at the time
    that the refusal names. Threads may share a client."""

    def __init__(self, addresses: Union[str, Sequence[str]], api_key: Optional[str] = None,
                 credentials: Optional[grpc.ChannelCredentials] = None, retries: int = 3):
        super().__init__(addresses, api_key, retries,
                         lambda a: grpc.secure_channel(a, credentials, OPTIONS) if credentials else
                         grpc.insecure_channel(a, OPTIONS))

    def stream(self, prompt, timeout: Optional[float] = None, **options) -> Iterator[Piece]:
        """Pieces of the answer, as they come. Leaving the loop cancels the request. timeout: seconds, with
        all retries. Raises TandemError, and TypeError for an option that there is not."""
        progress, patience = Progress(make_request(prompt, **options)), self._patience()
        deadline = None if timeout is None else time.monotonic() + timeout
        while progress.open:
            before, calls = progress.n_bytes.copy(), []
            try:
                calls = [self._stream(patience.at, r, _left(deadline)) for r in progress.requests()]
                for call in calls:
                    for m in call:
                        yield progress.take(m)
                return
            except grpc.RpcError as e:
                error = error_of(e)
                wait = patience.after(error, progress.n_bytes != before)
                if wait is None or (deadline and time.monotonic() + wait > deadline):
                    raise error from None
                time.sleep(wait)
            finally:
                for call in calls:
                    call.cancel()

    def choices(self, prompt, timeout: Optional[float] = None, **options) -> List[Answer]:
        """All choices (option n), whole."""
        answers = _answers(options.get("n") or 1)
        for piece in self.stream(prompt, timeout, **options):
            answers[piece.choice].add(piece)
        return answers

    def generate(self, prompt, timeout: Optional[float] = None, **options) -> Answer:
        """The whole answer."""
        return self.choices(prompt, timeout, **options)[0]

    def _ask(self, name, request, response, timeout):
        patience = self._patience()
        while True:
            try:
                return self._unary(patience.at, name, request, response, timeout)
            except grpc.RpcError as e:
                error = error_of(e)
                wait = patience.after(error, False)
                if wait is None:
                    raise error from None
                time.sleep(wait)

    def tokenize(self, text: str, timeout: float = 30) -> List[int]:
        request = pb.TokenizeRequest(text=text)
        return list(self._ask("Tokenize", request, pb.TokenizeResponse, timeout).ids)

    def detokenize(self, ids: Sequence[int], timeout: float = 30) -> str:
        request = pb.DetokenizeRequest(ids=ids)
        return self._ask("Detokenize", request, pb.DetokenizeResponse, timeout).text

    def models(self, timeout: float = 30):
        """Messages ModelInfo: name, max_context_tokens, loras, ..."""
        return list(self._ask("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse, timeout).models)

    def close(self):
        for channel in self._channels:
            channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class AsyncClient(_Common):
    """As Client, for asyncio."""

    def __init__(self, addresses: Union[str, Sequence[str]], api_key: Optional[str] = None,
                 credentials: Optional[grpc.ChannelCredentials] = None, retries: int = 3):
        super().__init__(addresses, api_key, retries,
                         lambda a: grpc.aio.secure_channel(a, credentials, OPTIONS) if credentials else
                         grpc.aio.insecure_channel(a, OPTIONS))

    async def stream(self, prompt, timeout: Optional[float] = None, **options) -> AsyncIterator[Piece]:
        progress, patience = Progress(make_request(prompt, **options)), self._patience()
        deadline = None if timeout is None else time.monotonic() + timeout
        while progress.open:
            before, calls = progress.n_bytes.copy(), []
            try:
                calls = [self._stream(patience.at, r, _left(deadline)) for r in progress.requests()]
                for call in calls:
                    async for m in call:
                        yield progress.take(m)
                return
            except grpc.RpcError as e:
                error = error_of(e)
                wait = patience.after(error, progress.n_bytes != before)
                if wait is None or (deadline and time.monotonic() + wait > deadline):
                    raise error from None
                await asyncio.sleep(wait)
            finally:
                for call in calls:
                    call.cancel()

    async def choices(self, prompt, timeout: Optional[float] = None, **options) -> List[Answer]:
        answers = _answers(options.get("n") or 1)
        async for piece in self.stream(prompt, timeout, **options):
            answers[piece.choice].add(piece)
        return answers

    async def generate(self, prompt, timeout: Optional[float] = None, **options) -> Answer:
        return (await self.choices(prompt, timeout, **options))[0]

    async def _ask(self, name, request, response, timeout):
        patience = self._patience()
        while True:
            try:
                return await self._unary(patience.at, name, request, response, timeout)
            except grpc.RpcError as e:
                error = error_of(e)
                wait = patience.after(error, False)
                if wait is None:
                    raise error from None
                await asyncio.sleep(wait)

    async def tokenize(self, text: str, timeout: float = 30) -> List[int]:
        request = pb.TokenizeRequest(text=text)
        return list((await self._ask("Tokenize", request, pb.TokenizeResponse, timeout)).ids)

    async def detokenize(self, ids: Sequence[int], timeout: float = 30) -> str:
        request = pb.DetokenizeRequest(ids=ids)
        return (await self._ask("Detokenize", request, pb.DetokenizeResponse, timeout)).text

    async def models(self, timeout: float = 30):
        request = pb.ListModelsRequest()
        return list((await self._ask("ListModels", request, pb.ListModelsResponse, timeout)).models)

    async def close(self):
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.close()
