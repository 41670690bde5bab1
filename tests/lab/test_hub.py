"""Names of the Hugging Face Hub: what is taken for one, and its libraries against a server of our own."""

import json
import re
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pandas as pd
import pytest
from lab_helpers import python, save_for_bytes, small_model

from common import UserError
from data import open_corpus
from lab.common import locate

COMMIT = 40 * "a"


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does, of the files in models/ and datasets/ of the current folder."""

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(/tree/.*|/revision/.*)?", path):
            files = [self.about(file) for file in sorted(Path(*found.groups()[:2]).rglob("*.*"))]
            about = {"id": found[2], "sha": COMMIT, "siblings": [{"rfilename": x["path"]} for x in files]}
            return self.answer(files if "/tree/" in path else about, 200 if files else 404)
        if found := re.fullmatch(rf"(/datasets|)/([^/]+/[^/]+)/resolve/(?:main|{COMMIT})/(.+)", path):
            file = Path(found[1].strip("/") or "models", found[2], found[3])
            if file.is_file():
                return self.answer(file.read_bytes(), etag=self.about(file)["oid"])
        self.answer({"error": "not found"}, 404, x_error_code="EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self):
        *_, kind, user, name, _, _ = self.path.split("/")
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["paths"]
        files = [Path(kind, user, name, path) for path in asked]
        self.answer([self.about(file) for file in files if file.is_file()])

    def about(self, file):
        content, place = file.read_bytes(), Path(*file.parts[3:])  # behind models/USER/NAME
        return {"type": "file", "path": str(place), "size": len(content), "oid": sha1(content).hexdigest()}

    def answer(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if part and status == 200:
            first, last = int(part[1]), min(int(part[2]), len(body) - 1)
            headers["content_range"] = f"bytes {first}-{last}/{len(body)}"
            status, body = 206, body[first : last + 1]
        self.send_response(status)
        for name, value in {"x_repo_commit": COMMIT, "content_length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    """A function that runs a command of the lab beside this server -> what it prints."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": "home"}
    yield lambda *flags: python("-m", "lab", *flags, cwd=Path(), **where)
    server.shutdown()


@pytest.mark.slow
def test_names(hub):
    """Catches a model or data set that is not found by its name, code that is fetched, a lost row, an error
    without its name."""
    save_for_bytes(small_model(vocab_size=257), Path("models/someone/a-model"))
    Path("models/someone/a-model/code.py").write_text("raise SystemExit")
    assert "ponderlm3, K = 3" in hub("convert", "someone/a-model").stdout
    assert not [*Path("home").rglob("code.py")] and [*Path("home").rglob("model.safetensors")]
    rows = [f"text {i}" for i in range(300)]
    Path("datasets/someone/texts").mkdir(parents=True)
    for i in range(3):
        pd.DataFrame({"body": rows[i::3]}).to_parquet(f"datasets/someone/texts/{i}.parquet")
    done = hub("corpus", "prepare", "someone/texts", "--field", "body", "--to", "new")
    assert not done.returncode, done.stderr
    corpus = open_corpus("new")
    ids = np.concatenate([corpus.train, corpus.val])
    found = bytes(np.where(ids == 256, 0, ids).astype(np.uint8)).decode().split("\0")
    assert sorted(found) == sorted(["", *rows])  # each ends with one
    for flags in (("convert", "someone/none"), ("corpus", "prepare", "someone/none", "--to", "other")):
        assert "error: someone/none" in hub(*flags).stderr


def test_what_is_a_name(monkeypatch):
    """Catches a path that is taken for a name of the Hub, and a download that fails without a word."""

    def fetch(name, allow_patterns):
        raise ConnectionError("401")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(UserError, match=r"someone/private .* \(401\): check the name"):
        locate("someone/private")
    Path("out").mkdir()
    for path in ("out/typo", "typo", "a/b/c", "/no/where"):
        with pytest.raises(UserError, match=f"^{path} does not exist: "):
            locate(path)
    assert locate("out") == Path("out")
