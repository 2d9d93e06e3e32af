"""Client of tandem.

    from tandem_client import Client

    with Client(["router-a:7000", "router-b:7000"], api_key="...") as client:
        print(client.generate("Once upon a time", max_tokens=20).text)
        for piece in client.stream([{"role": "user", "content": "Hello"}], max_tokens=200):
            print(piece.text, end="", flush=True)

AsyncClient has the same methods, to be awaited. A call that is refused with a time to come back is made again
then; a stream whose router is lost goes on at another router with the same tokens.
"""
from ._client import AsyncClient, Client
from ._request import Answer, Piece, TandemError, ToolCall

__all__ = ["Answer", "AsyncClient", "Client", "Piece", "TandemError", "ToolCall"]
