"""Who may talk to the studio, and what it gives out."""

import asyncio
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.browser import Studio
from videotune.errors import VideotuneError
from videotune.studio import projects, security

LOGIN = {"username": "studio", "password": "long enough"}


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_another_host_without_a_password_is_refused_with_that_word(host: str) -> None:
    with pytest.raises(VideotuneError, match="password"):
        security.check_host(host, None)
    with pytest.raises(VideotuneError, match="at least 8"):
        security.check_host(host, "short")
    security.check_host(host, "long enough")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_this_computer_needs_none(host: str) -> None:
    security.check_host(host, None)


def refused(method: str = "GET", host: str = "127.0.0.1", **headers: str) -> str | None:
    """Why a request with these headers is refused; ``host``: where the studio listens."""
    own = {"host": "127.0.0.1:7860"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return security.refusal(method, own, host)


def test_requests_by_other_sites_are_refused() -> None:
    assert refused() is None
    assert (
        refused("POST", origin="http://127.0.0.1:7860", sec_fetch_site="same-origin")
        is None
    )
    assert refused(sec_fetch_site="cross-site", sec_fetch_mode="navigate") is None, (
        "a link to the studio"
    )
    for bad in (
        refused("POST", origin="http://evil.org"),
        refused("POST", origin="null"),
        refused("POST", origin="http://127.0.0.1:9999"),
        refused("POST", sec_fetch_site="cross-site", sec_fetch_mode="navigate"),
        refused("POST", sec_fetch_site="same-site", sec_fetch_mode="cors"),
        refused(sec_fetch_site="same-site", sec_fetch_mode="no-cors"),
        refused(sec_fetch_site="cross-site", sec_fetch_mode="no-cors"),
    ):
        assert "other sites" in str(bad)
    own = {"host": "evil.org"}
    assert "only this computer" in str(security.refusal("GET", own, "127.0.0.1")), (
        "a name made to mean us"
    )
    assert security.refusal("GET", {"host": "my.server:7860"}, "0.0.0.0") is None


HOSTS = {
    "127.0.0.1:7860": True,
    "localhost": True,
    "LOCALHOST:1": True,
    "[::1]:7860": True,
    "127.0.0.1:7860, evil.com": False,
    "127.0.0.1,evil.com": False,
    "evil.com, 127.0.0.1": False,
    "evil.com@127.0.0.1": False,
    "127.0.0.1:7860/x": False,
    "127.0.0.1:7860 ": False,
    "127.0.0.1:": False,
    "127.0.0.1:7860:7860": False,
    "[::1": False,
    "::1": False,
    "127.0.0.1?x": False,
    "127.0.0.1#x": False,
    "": False,
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_matches_as_a_whole(host: str) -> None:
    reason = security.refusal("GET", {"host": host}, "127.0.0.1")
    assert (reason is None) == HOSTS[host]


def test_two_hosts_are_refused(clients: Any) -> None:
    _, client, _ = clients
    headers = [("host", "127.0.0.1:7860"), ("host", "evil.com")]
    assert client.get("/", headers=headers).status_code == 400
    assert client.get("/", headers={"origin": "http://["}).status_code == 403


def test_the_studio_starts_without_torch() -> None:
    code = (
        "import sys, json; import videotune.studio.app as a, pathlib, tempfile; "
        "a.make_app(pathlib.Path(tempfile.mkdtemp()), '127.0.0.1', None); "
        "print(json.dumps([n for n in ('torch', 'diffusers', 'transformers', 'peft') if n in sys.modules]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(out.splitlines()[-1]) == []


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The root, a client of a studio without a password, and one of a studio with one."""
    from starlette.testclient import TestClient

    from videotune.studio.app import make_app

    root = tmp_path_factory.mktemp("root")
    projects.create(root, "<b>One</b> & 'all'")
    home: Any = {"base_url": "http://127.0.0.1:7860", "headers": {"HX-Request": "true"}}
    with (
        TestClient(make_app(root, "127.0.0.1", None), **home) as free,
        TestClient(make_app(root, "0.0.0.0", "long enough"), **home) as locked,
    ):
        yield root, free, locked


ONE = "/p/b-one-b-all"
PAGE = {"Accept": "text/html"}


def test_nothing_is_told_before_the_login(clients: Any) -> None:
    _, free, locked = clients
    secret = (
        "/",
        f"{ONE}/data",
        "/queue",
        f"{ONE}/file?path=y",
        "/live?page=projects",
        "/design",
        "/openapi.json",
    )
    for path in secret:
        assert locked.get(path).status_code == 401, path
        assert locked.get(path, headers=PAGE).url.path == "/login"
    for path in (
        "/create",
        "/import?name=x.zip",
        f"{ONE}/data/upload?name=a.mp4",
        "/bin/destroy",
        "/logout",
    ):
        assert locked.post(path, data={"title": "x"}).status_code == 401, path
    assert locked.get("/static/studio.css").status_code == 200
    assert locked.post("/login", data=LOGIN | {"password": "wrong"}).status_code == 400
    answer = locked.post("/login", data=LOGIN, follow_redirects=False)
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie, "no script reads it"
    assert "samesite=strict" in cookie, "no other site sends it"
    assert locked.post("/login", data=LOGIN).status_code == 200
    assert locked.get("/").status_code == 200
    assert locked.post("/logout").headers["hx-redirect"] == "/login"
    assert locked.get("/").status_code == 401
    assert free.get("/").status_code == 200
    assert free.get("/openapi.json").status_code == 404


def test_a_minute_later_passwords_are_looked_at_again() -> None:
    now = [0.0]
    wrong = security.LoginLimiter(lambda: now[0])
    assert [wrong.begin("one") for _ in range(security.MAX_ATTEMPTS + 1)] == [
        True
    ] * security.MAX_ATTEMPTS + [False]
    assert wrong.begin("two")
    now[0] = security.ATTEMPT_WINDOW + 1
    assert wrong.begin("one")


def test_neither_a_header_nor_many_guesses_at_once_get_round_the_limit_of_passwords(
    tmp_path: Path,
) -> None:
    """The limit counts by the connection's own address, and each guess before its
    answer.
    """
    studio = Studio(tmp_path / "root", "long enough")

    async def guess() -> list[int]:
        async with httpx2.AsyncClient(base_url=studio.address) as client:
            words = [
                (LOGIN | {"password": f"wrong {n}"}, {"X-Forwarded-For": f"10.9.8.{n}"})
                for n in range(40)
            ]
            tries = (
                client.post("/login", data=data, headers=headers)
                for data, headers in words
            )
            return [answer.status_code for answer in await asyncio.gather(*tries)]

    try:
        assert sorted(asyncio.run(guess())) == [400] * security.MAX_ATTEMPTS + [429] * (
            40 - security.MAX_ATTEMPTS
        )
        right = httpx2.post(f"{studio.address}/login", data=LOGIN).status_code
        assert right == 429, "even the right one waits a minute"
    finally:
        studio.end()


def test_a_sent_file_goes_into_its_project_alone(clients: Any) -> None:
    root, free, _ = clients
    content = b"\0\0\0\x18ftypmp42" + b"x" * 300_000

    def send(name: str, project: str = "b-one-b-all", **headers: str) -> Any:
        return free.post(
            f"/p/{project}/data/upload",
            params={"name": name},
            content=content,
            headers=headers or None,
        )

    assert send("../../over.mp4").json() == [
        {"name": "over.mp4", "taken": True, "reason": "added", "files": 1}
    ]
    assert (root / "b-one-b-all" / "clips" / "over.mp4").read_bytes() == content
    assert send("a.mp4", "%2e%2e").status_code in (404, 422)
    assert send("..").status_code == 422
    assert send("a.mp4", Origin="http://evil.org").status_code == 403
    assert not send("program.exe").json()[0]["taken"]
    assert list((root / ".uploads").iterdir()) == [], "what was not taken is gone"


def test_values_that_no_file_system_takes_are_bad_requests(clients: Any) -> None:
    _, free, _ = clients
    assert free.get(f"/p/{'x' * 5000}/data").status_code == 422
    assert (
        free.get(
            f"/p/{'x' * 5000}/data", headers={"HX-Request": "", "Accept": "text/html"}
        ).status_code
        == 404
    )
    assert free.post("/create", content=b"title=%ED%A0%80").status_code == 204, (
        "half a character is replaced"
    )
    for path, data in (
        (f"/p/{'x' * 5000}/rename", {"title": "y"}),
        (f"{ONE}/rename", {"title": "  "}),
        ("/create", {}),
    ):
        answer = free.post(path, data=data)
        assert answer.status_code == 422
        assert json.loads(answer.headers["hx-trigger"])["toast"]["bad"] is True
    for path in ("%00", "%ED%A0%80", "x" * 5000, "..", ""):
        for part in ("captions?word=x&path", "clip?path", "sound?path", "tiles?q"):
            code = free.get(f"{ONE}/data/{part}={path}").status_code
            assert code in (200, 400, 404, 422)
    assert free.post("/create", content=b"x" * 5_000_000).status_code == 413
    assert (
        free.post(
            "/create", content="&".join(f"a{n}=1" for n in range(30_000))
        ).status_code
        == 422
    )


def test_names_and_captions_are_escaped(clients: Any) -> None:
    _root, free, _ = clients
    assert (
        free.post("/create", data={"title": "<script>alert(1)</script>"}).headers[
            "hx-redirect"
        ]
        == "/p/script-alert-1-script/data"
    )
    shown = free.get("/").text
    assert "<b>One" not in shown
    assert "&lt;b&gt;One&lt;/b&gt;" in shown
    assert "<script>alert" not in shown


def test_files_are_given_out_of_the_project_alone(clients: Any) -> None:
    root, free, _ = clients
    folder = root / "b-one-b-all"
    (root / "secret.mp4").write_bytes(b"secret")
    (folder / "clips" / "a.mp4").write_bytes(b"clip")
    (folder / "clips" / "a.svg").write_text("<svg/>")
    (folder / "jobs" / "log.json").write_text("{}")
    (folder / "clips" / "link.mp4").symlink_to(root / "secret.mp4")

    def get(path: str, project: str = "b-one-b-all") -> int:
        return int(free.get(f"/p/{project}/file", params={"path": path}).status_code)

    assert get("clips/a.mp4") == 200
    outside = (
        "../secret.mp4",
        "clips/../../secret.mp4",
        "clips/link.mp4",
        "/etc/passwd",
    )
    for path in (*outside, "clips/a.svg", "jobs/log.json", "project.json"):
        assert get(path) == 404, path
    assert get("secret.mp4", "%2e%2e") in (404, 422)
    assert free.get(f"{ONE}/poster?path=../secret.mp4").status_code in (404, 422)
    (folder / "sheet").mkdir()
    (folder / "sheet" / "index.html").write_text("<script>alert(1)</script>")
    page = free.get(f"{ONE}/file/sheet/index.html")
    assert page.headers["content-security-policy"].startswith("sandbox"), (
        "no script of a page runs"
    )
    assert "allow-scripts" not in page.headers["content-security-policy"]


def test_a_form_of_another_site_changes_nothing(clients: Any) -> None:
    root, free, _ = clients
    form = free.post("/create", data={"title": "by a form"}, headers={"HX-Request": ""})
    other = free.post(
        "/create", data={"title": "by a page"}, headers={"Origin": "http://evil.org"}
    )
    assert form.status_code == 415
    assert other.status_code == 403
    assert "other sites" in other.text
    assert free.get("/", headers={"Host": "evil.org"}).status_code == 403
    headers = free.get("/").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors" in headers["content-security-policy"]
    assert (
        "unsafe-inline"
        not in headers["content-security-policy"].partition("style-src")[0]
    )
    assert not [
        one for one in projects.list_projects(root) if one.title.startswith("by ")
    ]


def test_no_password_and_no_token_is_kept(
    clients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, free, _ = clients
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    free.get(f"{ONE}/setup")
    kept = [
        path
        for path in Path(root).rglob("*")
        if path.is_file() and b"hf_secret" in path.read_bytes()
    ]
    assert kept == []
    assert "long enough" not in "".join(
        p.read_text(errors="ignore") for p in Path(root).rglob("*.json")
    )


def test_an_exported_model_is_downloaded_whole_and_no_other_folder_is(
    clients: Any,
) -> None:
    root, free, locked = clients
    run = root / "b-one-b-all" / "runs" / "first"
    model, content = run / "export" / "first-step-5", {}
    for name, size in (
        ("model_index.json", 40),
        ("transformer/weights.safetensors", (2 << 20) + 7),
        ("empty.txt", 0),
    ):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        content[f"b-one-b-all-first-step-5/{name}"] = bytes(
            index * 7 % 251 for index in range(size)
        )
        (model / name).write_bytes(content[f"b-one-b-all-first-step-5/{name}"])
    (model / "link.mp4").symlink_to(root / "b-one-b-all" / "project.json")
    (run / "checkpoints" / "step-5").mkdir(parents=True)

    def get(path: str, client: Any = free) -> Any:
        return client.get(f"{ONE}/folder", params={"path": path})

    answer = get("runs/first/export/first-step-5")
    assert answer.headers["content-disposition"].endswith("first-step-5.zip")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == content
    assert get("runs/first/checkpoints/step-5").status_code == 200
    for path in ("export", "", "../../clips", "../../../x", "export/no"):
        assert get(f"runs/first/{path}").status_code == 404, path
    assert get("clips").status_code == 404
    locked.cookies.clear()
    assert get("runs/first/export/first-step-5", locked).status_code == 401
