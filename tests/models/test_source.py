"""Where a target comes from, checked without torch and without a network."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from mtp_research.models.loading.source import ModelSizes, check_source, read_sizes
from mtp_research.runtime.errors import ConfigError, IntegrityError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    """A hub on this machine that answers every question with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


def test_model_folder_gives_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert check_source(str(tmp_path)) == tmp_path / "config.json"


@pytest.mark.parametrize("path", ["absent", "a/b/c", "./a/b", "/absent/x", "~/x", "a/", ""])
def test_path_that_is_no_hub_id_must_exist(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a"):
        check_source(path)


def test_hub_id_is_left_to_the_loader_when_the_hub_answers(hub: HTTPServer) -> None:
    assert check_source("organisation/absent-model") is None


def test_hub_id_is_refused_when_nothing_answers(
    hub: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nobody listens there
    with pytest.raises(ConfigError, match=r"no local path .* offline or out of reach"):
        check_source("organisation/absent-model")


def test_offline_setting_is_kept(hub: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="offline"):
        check_source("organisation/absent-model")


def test_cached_hub_id_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "models--organisation--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    config = model / "snapshots" / "abc" / "config.json"
    config.write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert check_source("organisation/name") == config


def test_sizes_are_those_of_the_text_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "vocab_size": 99}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 1, "text_config": sizes}))
    assert read_sizes(path) == ModelSizes(hidden_size=8, vocab_size=99)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"hidden_size": "8", "vocab_size": 9}'])
def test_config_without_sizes_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(IntegrityError, match=r"set model\.path to a model folder"):
        read_sizes(tmp_path / "config.json")


def test_source_is_checked_without_importing_torch():
    code = "import sys; import mtp_research.models.loading.source; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
