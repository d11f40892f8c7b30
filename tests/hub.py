"""A server on this machine that answers as the Hugging Face hub does, to reads and to writes."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

FIRST = "1" * 40
LARGE = (".safetensors", ".mp4")
"""Files that the hub stores apart from a commit, after which a commit names them."""


def blob(text: bytes) -> str:
    """Return git's checksum of a file."""
    return hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """The hub's answers; ``owner/gated`` is gated, and nobody may write to ``other/...``. ``state`` is shared with the
    test: ``repos`` by name, each with ``commits`` (files by commit), ``branches`` and whether it is ``private``."""

    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def tell(self, value, code=200):
        self.answer(code, json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self):
        state, parts = self.server.state, unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
        if name == "owner/gated":
            return self.answer(403, X_Error_Code="GatedRepo")
        if (repo := state.repos.get(name)) is None:
            return self.answer(404, X_Error_Code="RepoNotFound")
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repo.branches.get(revision, revision)
        if (files := repo.commits.get(commit)) is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if api and rest[:1] in ([], ["revision"]):
            siblings = [self.sibling(path, text) for path, text in files.items()]
            return self.tell({"id": name, "sha": commit, "private": repo.private, "siblings": siblings})
        if api:
            tree = [
                {"type": "file", "path": path, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
                for path, text in files.items()
            ]
            return self.tell(tree)
        path = "/".join(rest[2:])
        if path == state.broken:
            return self.answer(403)
        if self.command == "GET":
            state.sent.append(path)
        tag = hashlib.sha1(files[path]).hexdigest()
        return self.answer(200, files[path], ETag=f'"{tag}"', X_Repo_Commit=commit)

    do_HEAD = do_GET

    def sibling(self, path, text):
        large = {"sha256": hashlib.sha256(text).hexdigest(), "size": len(text), "pointerSize": 1}
        return {"rfilename": path, "size": len(text), "blobId": blob(text)} | (
            {"lfs": large} if path.endswith(LARGE) else {}
        )

    def do_PUT(self):
        """Take a large file, unless the connection breaks."""
        state, data = self.server.state, self.rfile.read(int(self.headers["Content-Length"]))
        if state.uploads == state.breaks_after:
            return self.connection.close()
        state.uploads += 1
        state.large[self.path.rpartition("/")[2]] = data
        return self.answer(200)

    def do_POST(self):
        state, parts = self.server.state, unquote(urlsplit(self.path).path).strip("/").split("/")
        text = self.rfile.read(int(self.headers["Content-Length"]))
        if parts[-1] == "validate-yaml":
            return self.tell({"errors": [], "warnings": []})
        if parts[-2:] == ["repos", "create"]:
            asked = json.loads(text)
            name = f"{asked['organization']}/{asked['name']}"
            if name.startswith("other/"):
                return self.answer(403)
            state.repos[name] = repository_of({".gitattributes": b""}, private=asked.get("visibility") == "private")
            return self.tell({"url": f"{constants.ENDPOINT}/{name}"})
        if parts[-1] == "batch":
            objects = json.loads(text)["objects"]
            for wanted in objects:
                if wanted["oid"] not in state.large:
                    wanted["actions"] = {"upload": {"href": f"{constants.ENDPOINT}/upload/{wanted['oid']}"}}
            return self.tell({"transfer": "basic", "objects": objects})
        name, what = "/".join(parts[2:4]), parts[4]
        if name.startswith("other/"):
            return self.answer(403)
        if what == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(text)["files"]
            ]
            return self.tell({"files": modes})
        return self.commit(state.repos[name], [json.loads(line) for line in text.splitlines()])

    def commit(self, repo, lines):
        state, head = self.server.state, repo.branches["main"]
        if state.is_raced:
            head = repo.branches["main"] = "a" * 40
            repo.commits[head] = {}
        files = dict(repo.commits[head])
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header" if value.get("parentCommit", head) != head:
                    return self.answer(412)
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = state.large[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        oid = hashlib.sha1(text := json.dumps(lines).encode()).hexdigest()
        assert text
        repo.commits[oid], repo.branches["main"] = files, oid
        return self.tell({"commitUrl": f"{constants.ENDPOINT}/x/y/commit/{oid}", "commitOid": oid})

    def log_message(self, *_):
        pass


def repository_of(files, *, private=False, commit=FIRST):
    """Return a repository with one commit."""
    return SimpleNamespace(commits={commit: files}, branches={"main": commit}, private=private)


def serve(monkeypatch, cache):
    """Start the server, point huggingface_hub at it, and return its state; ``close`` ends it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.state = state = SimpleNamespace(
        repos={}, broken="", sent=[], large={}, uploads=0, breaks_after=None, is_raced=False
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name, value in (
        ("ENDPOINT", address),
        ("HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_CACHE", str(cache)),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DISABLE_XET", True),
    ):
        monkeypatch.setattr(constants, name, value)
    state.close = lambda: (server.shutdown(), server.server_close())
    return state
