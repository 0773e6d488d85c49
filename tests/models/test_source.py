"""Where a target comes from, checked without torch and without a network."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from mtp_research.models.loading.source import ModelSizes, check_source, read_sizes, source_facts
from mtp_research.models.target import load_target, load_tokenizer
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
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with two commits of lab_tiny's target; the older one has the tag `v1`."""
    model = tmp_path / "cache" / "models--organisation--name"
    (model / "refs").mkdir(parents=True)
    for name, commit in {"main": "b" * 40, "v1": "a" * 40}.items():
        (model / "refs" / name).write_text(commit)
        folder = model / "snapshots" / commit
        shutil.copytree("assets/lab_tiny/target", folder)
        config = json.loads((folder / "config.json").read_text())
        config["rms_norm_eps"] = 1e-5 if name == "main" else 1e-3
        (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return model / "snapshots"


@pytest.mark.parametrize(
    ("revision", "commit"), [("", "b" * 40), ("@v1", "a" * 40), ("@" + "a" * 40, "a" * 40)]
)
def test_cached_hub_id_needs_no_network(revision: str, commit: str, cache: Path) -> None:
    path = f"organisation/name{revision}"
    assert check_source(path) == cache / commit / "config.json"
    assert source_facts(path) == {"hub_id": path, "hub_commit": commit}


def test_pinned_revision_is_what_is_loaded(cache: Path) -> None:
    newest, pinned = (load_target(f"organisation/name{end}", device="cpu") for end in ("", "@v1"))
    assert (newest.config.rms_norm_eps, pinned.config.rms_norm_eps) == (1e-5, 1e-3)
    (cache / ("a" * 40) / "tokenizer_config.json").write_text("{")
    load_tokenizer("organisation/name")
    with pytest.raises((ConfigError, IntegrityError)):
        load_tokenizer("organisation/name@v1")


def test_revision_that_the_cache_lacks_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"'organisation/name@v2' .* is not in the hub cache"):
        check_source("organisation/name@v2")


def test_folder_with_an_at_sign_is_a_folder(tmp_path: Path) -> None:
    folder = shutil.copytree("assets/lab_tiny/target", tmp_path / "organisation" / "name@v1")
    assert check_source(str(folder)) == folder / "config.json"
    assert source_facts(str(folder)) == {}
    assert load_target(folder, device="cpu").config.vocab_size


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
