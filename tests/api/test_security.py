"""Who may speak to the server: keys, Host, Origin, Content-Type, and the id on every response."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message

from api.security import ContentCheck, HostCheck, KeyCheck, OriginCheck, RequestId, is_loopback, read_api_keys

INSIDE: ASGIApp = PlainTextResponse("inside")
TCP = ("127.0.0.1", 8321)
UNIX = ("/run/paceline.sock", None)


class Answer:
    """What an application answered."""

    def __init__(self, messages: list[Message]) -> None:
        self.status: int = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in messages[1:])


def request(
    app: ASGIApp,
    method: str = "GET",
    path: str = "/v1/models",
    server: tuple[str, int | None] = TCP,
    **headers: str,
) -> Answer:
    """One request, without a socket; `_` in a header's name stands for `-`."""
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "server": server, "headers": raw}
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        messages.append(message)

    async def main() -> None:
        await app(scope, receive, send)

    asyncio.run(main())
    return Answer(messages)


# ---- keys


@pytest.fixture
def locked() -> ASGIApp:
    return KeyCheck(INSIDE, ["first-key", "second-key"])


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_any_key_opens_as_bearer_or_as_x_api_key(locked: ASGIApp, key: str) -> None:
    assert request(locked, authorization=f"Bearer {key}").body == b"inside"
    assert request(locked, authorization=f"bearer  {key} ").body == b"inside"
    assert request(locked, x_api_key=key).body == b"inside"


@pytest.mark.parametrize("given", ["", "first-ke", "first-keyx", "FIRST-KEY", "first-key second-key", "\xff", "é"])
def test_anything_else_does_not(locked: ASGIApp, given: str) -> None:
    for answer in (request(locked, authorization=f"Bearer {given}"), request(locked, x_api_key=given)):
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert b"invalid_api_key" in answer.body


def test_a_key_under_another_scheme_does_not_open(locked: ASGIApp) -> None:
    assert request(locked, authorization="Basic first-key").status == 401
    assert request(locked, authorization="first-key").status == 401


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/", "/v1/chat/completions", "/health/", "/healthz", "/Health"]
)
def test_keys_guard_every_path_but_health(locked: ASGIApp, path: str) -> None:
    assert request(locked, path=path).status == 401
    assert request(locked, path="/health").status == 200


def test_without_keys_everything_is_open() -> None:
    assert request(KeyCheck(INSIDE, [])).status == 200


def test_a_key_file_has_a_key_per_line_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the editors\n\n  one \ntwo\n#three\n")
    assert read_api_keys(path) == ("one", "two")


@pytest.mark.parametrize("text", ["", "\n# only words\n", "two words", "schlüssel", "tab\there"])
def test_a_key_file_without_usable_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="key"):
        read_api_keys(path)


# ---- Host


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8321",
        "LOCALHOST",
        "app.localhost",
        "127.0.0.1:1",
        "127.9.9.9",
        "[::1]:8321",
        "localhost.",
    ],
)
def test_loopback_names_are_ours(host: str) -> None:
    assert request(HostCheck(INSIDE, [], any_address=False), host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8321",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "notlocalhost",
        "192.168.1.5",
        "[fe80::1]",
        "",
        ":8321",
        "user@localhost",
        "localhost/x",
        "[::1",
        "0x7f.1",
        "2130706433",
        "\xff",
    ],
)
def test_other_names_are_refused_on_tcp_and_right_on_a_unix_socket(host: str) -> None:
    app = HostCheck(INSIDE, [], any_address=False)
    assert request(app, host=host).status == 403
    assert request(app, host=host, server=UNIX).status == 200


def test_a_request_without_a_host_is_refused() -> None:
    assert request(HostCheck(INSIDE, [], any_address=False)).status == 403


def test_the_bound_name_is_ours() -> None:
    app = HostCheck(INSIDE, ["Models.lan", "192.168.1.5"], any_address=False)
    assert request(app, host="models.LAN:8321").status == 200
    assert request(app, host="192.168.1.5").status == 200
    assert request(app, host="192.168.1.6").status == 403


def test_bound_to_all_interfaces_any_address_is_ours_but_not_any_name() -> None:
    app = HostCheck(INSIDE, ["models"], any_address=True)
    assert [request(app, host=host).status for host in ("10.1.2.3:1", "[2001:db8::1]", "models", "evil.example")] == [
        200,
        200,
        200,
        403,
    ]


@given(st.text(alphabet=st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=20))
def test_no_host_at_all_is_a_fault_of_ours(host: str) -> None:
    assert request(HostCheck(INSIDE, [], any_address=True), host=host).status in (200, 403)


@pytest.mark.parametrize(
    ("host", "own"), [("127.0.0.1", True), ("::1", True), ("192.168.1.5", False), ("::", False), ("", False)]
)
def test_what_the_loopback_is(host: str, own: bool) -> None:
    assert is_loopback(host) is own


# ---- Origin


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173", "http://app.localhost"]
)
def test_pages_of_this_machine_may_read_the_answers(origin: str) -> None:
    answer = request(OriginCheck(INSIDE), origin=origin, host="localhost:8321")
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["vary"] == "origin"


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "file://",
        "chrome-extension://abc",
        "ftp://localhost",
        "file://localhost",
        "http://",
        "",
        "http://user@localhost",
        "http://evil.example/localhost",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_others_are_refused_preflight_or_not(origin: str, method: str) -> None:
    answer = request(
        OriginCheck(INSIDE), method, origin=origin, host="localhost:8321", access_control_request_method="POST"
    )
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_of_the_server_itself_is_no_foreign_one() -> None:
    assert request(OriginCheck(INSIDE), origin="http://10.0.0.5:8321", host="10.0.0.5:8321").status == 200
    assert request(OriginCheck(INSIDE), origin="http://10.0.0.5:80", host="10.0.0.5:8321").status == 403


def test_without_an_origin_there_is_nothing_to_say() -> None:
    assert "access-control-allow-origin" not in request(OriginCheck(INSIDE)).headers


def test_a_preflight_is_answered_before_a_key_is_asked_for() -> None:
    app = OriginCheck(KeyCheck(INSIDE, ["key"]))
    answer = request(
        app,
        "OPTIONS",
        origin="http://localhost:3000",
        access_control_request_method="POST",
        access_control_request_headers="authorization, content-type",
        access_control_request_private_network="true",
    )
    assert answer.status == 204
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert request(app, "GET", origin="http://localhost:3000").status == 401


def test_a_refusal_can_be_read_by_a_page_of_this_machine() -> None:
    answer = request(OriginCheck(KeyCheck(INSIDE, ["key"])), origin="http://localhost:3000")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, "http://localhost:3000")


# ---- Content-Type


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"]
)
def test_json_is_taken(kind: str) -> None:
    assert request(ContentCheck(INSIDE), "POST", content_type=kind).status == 200


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "text/json", "application/jsonx"],
)
def test_other_bodies_are_a_415(kind: str) -> None:
    assert request(ContentCheck(INSIDE), "POST", content_type=kind).status == 415
    assert request(ContentCheck(INSIDE), "GET", content_type=kind).status == 200


def test_a_body_of_no_declared_kind_is_a_415() -> None:
    assert request(ContentCheck(INSIDE), "POST").status == 415


def test_a_compressed_body_is_a_415() -> None:
    assert request(ContentCheck(INSIDE), "POST", content_type="application/json", content_encoding="gzip").status == 415


# ---- x-request-id


def test_every_response_carries_an_id_and_no_two_the_same() -> None:
    app = RequestId(INSIDE)
    ids = [request(app).headers["x-request-id"] for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(one.startswith("req_") for one in ids)


def test_a_decent_id_of_the_clients_is_kept() -> None:
    assert request(RequestId(INSIDE), x_request_id="trace-1.a_B").headers["x-request-id"] == "trace-1.a_B"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", '"'])
def test_another_is_replaced(given: str) -> None:
    assert request(RequestId(INSIDE), x_request_id=given).headers["x-request-id"].startswith("req_")


def test_refusals_carry_one_too() -> None:
    assert "x-request-id" in request(RequestId(KeyCheck(INSIDE, ["key"]))).headers
