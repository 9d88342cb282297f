"""A stand-in for the `paceline` command: an OpenAI-shaped server whose speed the tests choose.

`serve ... --port N [--draft-tokens N] [--lie]`: it answers with the last words of the prompt, one event a token. With
drafts (8, if it is not told) it is four times as fast; with --lie its drafts also change the answer. SIGTERM ends it
with exit code 0.
"""

import json
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any


def option(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


PORT = int(option("--port", "0"))
DRAFTS = int(option("--draft-tokens", "8"))
LIES = "--lie" in sys.argv and DRAFTS > 0
PAUSE_S = 0.001 if DRAFTS else 0.004


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply("application/json")
        if self.path == "/v1/models":
            self.wfile.write(json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply("text/event-stream")
        words = asked["messages"][-1]["content"].split()
        tokens = [words[-1 - place % len(words)] for place in range(asked["max_tokens"])]
        for token in [*tokens[:-1], "a lie"] if LIES else tokens:
            time.sleep(PAUSE_S)
            self.event({"choices": [{"delta": {"content": token + " "}, "finish_reason": None}]})
        self.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        self.event({"choices": [], "usage": {"completion_tokens": len(tokens), "prompt_tokens": len(words)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def reply(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


class Server(ThreadingHTTPServer):
    request_queue_size = 64


if __name__ == "__main__":
    if "--broken" in sys.argv:
        sys.exit("stub: cannot load the model")
    signal.signal(signal.SIGTERM, leave)
    with Server(("127.0.0.1", PORT), Handler) as server:
        server.serve_forever()
