"""Models from a hub: what is downloaded and what never is, offline, gated, interrupted; against a hub on loopback."""

import errno
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models import hub
from engine.models.files import ModelError
from engine.models.hub import HubConfig, HubId, download, parse_hub_id
from engine.models.progress import EVERY_S, Lines
from engine.models.resolve import resolve_model
from tests.fake_hub import COMMIT, REPO, FakeHub, files_of, serve
from tests.models import tiny_model
from worker.registration import served_name

ID = HubId(REPO)
CODE = {"model.bin": b"\x80\x04.", "modeling_tiny.py": b"raise SystemExit(9)", "weights.pt": b"\x80", "README.md": b"#"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(tiny_model(tmp_path_factory.mktemp("repo") / "tiny"))


@pytest.fixture
def fake(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    state = FakeHub(dict(files) | CODE)
    with serve(state) as state.url:
        yield state


@pytest.fixture
def config(fake: FakeHub, tmp_path: Path) -> HubConfig:
    return HubConfig(fake.url, tmp_path / "cache", timeout_s=5.0)


def nowhere() -> str:
    """The address of a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def other(config: HubConfig, **changes: object) -> HubConfig:
    names = ("endpoint", "cache", "token", "offline", "timeout_s")
    return HubConfig(**{name: getattr(config, name) for name in names} | changes)


# --- what is a hub id ---


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [
        ("org/name", None, HubId("org/name", "main")),
        ("org/name@v1.0", None, HubId("org/name", "v1.0")),
        ("Qwen/Qwen2.5-0.5B", "refs/pr/3", HubId("Qwen/Qwen2.5-0.5B", "refs/pr/3")),
        ("org/name@dev", "dev", HubId("org/name", "dev")),
    ],
)
def test_hub_ids_are_read(model, revision, expected):
    assert parse_hub_id(model, revision) == expected


@pytest.mark.parametrize(
    "model",
    [
        *("name", "/org/name", "./name", "../name", "~/name", "a/b/c", "org/name.gguf", "org/", "org/..", "a--b/c"),
        *("ö/x", "", "org/na me", "org/" + "x" * 97, "http://x/y", "org\\name", "org/name\n"),
    ],
)
def test_what_is_no_hub_id(model):
    assert parse_hub_id(model) is None


@pytest.mark.parametrize("revision", ["../../x", "", "a..b", "/etc", "a b", "x" * 300, "a//b", "-x", "a\0b", ".hidden"])
def test_a_revision_that_would_leave_the_cache_is_refused(revision):
    with pytest.raises(ModelError, match="must be a branch, a tag or a commit hash"):
        parse_hub_id("org/name", revision)
    if revision:
        with pytest.raises(ModelError, match="must be a branch, a tag or a commit hash"):
            parse_hub_id(f"org/name@{revision}")


@given(st.text(max_size=30) | st.from_regex(r"[\w.-]{1,9}/[\w.@/-]{1,30}"), st.none() | st.text(max_size=9))
def test_whatever_is_given_is_refused_or_stays_in_the_cache(model, revision):
    try:
        found = parse_hub_id(model, revision)
    except ModelError:
        return
    if found is not None:
        cache = Path("/cache")
        assert os.path.normpath(hub._Download(found, HubConfig("", cache))._folder("x")).startswith("/cache/models--")
        assert os.path.normpath(f"/cache/refs/{found.revision}").startswith("/cache/refs/")


@pytest.mark.parametrize("model", ["a\0b", "x" * 5000, "~nobody-here/x", "", "\x1b[31m", "/" * 5000 + "x", "a/" * 3000])
def test_no_text_is_too_strange_to_be_refused_in_one_line(model):
    with pytest.raises(ModelError) as caught:
        resolve_model(model)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000


def test_two_revisions_that_differ_are_refused():
    with pytest.raises(ModelError, match=r"model is 'org/name@a' and revision is 'b'; keep one"):
        parse_hub_id("org/name@a", "b")


def test_a_hub_model_is_served_under_its_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert served_name("org/name@v1") == "org/name"
    (tmp_path / "org/name").mkdir(parents=True)
    assert served_name("org/name") == "name"


# --- paths and hub ids ---


def test_a_path_that_is_there_is_never_taken_for_a_hub_id(tmp_path, monkeypatch, fake):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    tiny_model(tmp_path / REPO)
    assert resolve_model(REPO) == Path(REPO)
    with pytest.raises(ModelError, match=r"revision is 'main', but model .* is no hub id"):
        resolve_model(REPO, revision="main")
    assert fake.requests == []


def test_a_path_with_a_typo_is_not_looked_for_on_a_hub(tmp_path, monkeypatch, fake):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "tiny-org").mkdir()
    with pytest.raises(ModelError, match=rf"folder tiny-org here, but nothing named tiny-model .* say {REPO}@main"):
        resolve_model(REPO)
    assert fake.requests == []
    assert (resolve_model(f"{REPO}@main") / "config.json").is_file()


@pytest.mark.parametrize("model", ["/no/such", "./no", "no", "a/b/c", "x.gguf"])
def test_what_is_neither_says_both_readings(model):
    with pytest.raises(ModelError, match=r"no such path \(/.*\), and it is no hub id \(org/name or org/name@rev"):
        resolve_model(model)


def test_a_hub_id_is_resolved_from_end_to_end_and_says_so(tmp_path, monkeypatch, fake):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    said: list[str] = []
    folder = resolve_model(REPO, say=said.append)
    assert folder == tmp_path / f"home/hub/models--tiny-org--tiny-model/snapshots/{COMMIT}"
    assert said[0] == f"{REPO} is no path here, so it is a hub id: {REPO} at revision main"
    assert re.fullmatch(r"downloading the model: \d+ of \d+ MiB, 100 %, \d+ MiB/s", said[-1])


# --- what is downloaded ---


def test_safetensors_and_json_are_downloaded_and_nothing_else(fake, config, files):
    seen: list[tuple[int, int]] = []
    folder = download(ID, config, progress=lambda done, total: seen.append((done, total)))
    assert files_of(folder) == files
    assert fake.downloaded() == set(files)
    assert seen[-1] == (sum(map(len, files.values())),) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_what_is_in_the_cache_is_not_downloaded_again(fake, config, files):
    folder = download(ID, config)
    fake.requests.clear()
    seen: list[tuple[int, int]] = []
    assert download(ID, config, progress=lambda done, total: seen.append((done, total))) == folder
    assert fake.downloaded() == set()
    assert seen == []


def test_a_complete_cache_may_be_read_only(fake, config, monkeypatch):
    import huggingface_hub

    folder = download(ID, config)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: pytest.fail("nothing is to be written"))
    assert download(ID, config) == folder
    assert download(HubId(REPO, COMMIT), config) == folder


def test_without_weights_only_texts_are_downloaded(fake, config, files):
    download(ID, config, weights=False)
    assert fake.downloaded() == {name for name in files if not name.endswith(".safetensors")}


def test_a_second_copy_of_the_weights_is_left_out(fake, config):
    fake.files |= {"consolidated.safetensors": b"x", "original/model.safetensors": b"x", "onnx/config.json": b"x"}
    download(ID, config)
    assert not {"consolidated.safetensors", "original", "onnx"} & {path.name for path in config.cache.rglob("*")}


def test_shards_come_with_their_index(fake, config):
    weights = fake.files.pop("model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    fake.files |= dict.fromkeys(names, weights) | {"model.safetensors.index.json": b"{}"}
    folder = download(ID, config)
    assert {path.name for path in folder.iterdir()} >= {*names, "model.safetensors.index.json"}


def test_a_revision_is_taken_and_a_missing_one_named(fake, config):
    fake.branches["dev"] = COMMIT
    assert download(HubId(REPO, "dev"), config).name == COMMIT
    with pytest.raises(ModelError, match=rf"{REPO}@v9: the repository has no revision 'v9' at {fake.url}"):
        download(HubId(REPO, "v9"), config)


def test_a_repository_without_safetensors_says_what_it_has(fake, config):
    del fake.files["model.safetensors"]
    fake.files["x.gguf"] = b"GGUF"
    with pytest.raises(ModelError, match=r"has no model.safetensors .*but weights as \.bin, \.gguf, \.pt; take"):
        download(ID, config)
    assert fake.downloaded() == set()
    fake.files = {"config.json": b"{}", "unet/diffusion.safetensors": b""}
    with pytest.raises(ModelError, match="safetensors under other names or in folders"):
        download(ID, config)
    fake.files = {"config.json": b"{}"}
    with pytest.raises(ModelError, match="no weights at all"):
        download(ID, config)


def test_a_text_file_of_absurd_size_is_not_downloaded(fake, config):
    fake.files["config.json"] = b" " * (2 << 20)
    with pytest.raises(ModelError, match=r"config.json has 2097152 bytes, but at most 1048576 are read"):
        download(ID, config)
    assert fake.downloaded() == set()


# --- access ---


def test_a_gated_repository_names_the_token(fake, config):
    fake.token = "secret"
    with pytest.raises(ModelError, match=r"is gated at http.*needs HF_TOKEN in the environment") as caught:
        download(ID, config)
    assert f"there is no such path here ({Path(REPO).absolute()})" in str(caught.value)
    with pytest.raises(ModelError, match=r"see whether HF_TOKEN is right") as caught:
        download(ID, other(config, token="wrong"))
    assert "wrong" not in str(caught.value)
    assert download(ID, other(config, token="secret")).name == COMMIT


def test_a_repository_that_is_not_there_says_both_readings(fake, config):
    with pytest.raises(ModelError, match=r"no such path here \(/.*no/body\), and the repository .* is not there"):
        download(HubId("no/body"), config)


@pytest.mark.parametrize(("status", "text"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (404, "is not there")])
def test_a_bare_status_is_understood(fake, config, status, text):
    fake.status = status
    with pytest.raises(ModelError, match=text):
        download(ID, config)


def test_a_redirect_does_not_carry_the_token_to_another_host(fake, config, files):
    fake.token = "secret"
    with serve(fake, "storage") as fake.redirect:
        assert files_of(download(ID, other(config, token="secret"))) == files
    stored = [request for request in fake.requests if request.server == "storage"]
    assert len(stored) == len(files)
    assert all("authorization" not in request.headers for request in stored)
    assert all("secret" not in str(request) for request in stored)


# --- no hub, no disk, no luck ---


def test_where_no_hub_answers_the_message_names_the_ways_out(config):
    with pytest.raises(ModelError, match=r"cannot be reached .*cache does not have it") as caught:
        download(ID, other(config, endpoint=nowhere()))
    for word in ("local directory", "HF_HUB_OFFLINE=1", "HF_HOME", "HF_ENDPOINT", "no such path here"):
        assert word in str(caught.value)


def test_a_hub_that_is_broken_is_one_that_cannot_be_reached(fake, config):
    fake.status = 503
    with pytest.raises(ModelError, match=r"cannot be reached \(status 503\)"):
        download(ID, config)


@pytest.mark.parametrize("commit", ["../../x", "", "main", "0" * 39])
def test_a_hub_that_names_no_commit_is_broken_too(fake, config, commit):
    fake.branches["main"] = commit
    with pytest.raises(ModelError, match=r"cannot be reached \(it names '.*' as the commit\)"):
        download(ID, config)
    assert not config.cache.exists()


def test_a_hub_that_never_answers_is_given_up():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ModelError, match=r"cannot be reached \(\w*Timeout"):
            download(ID, HubConfig(url, Path("/nonexistent"), timeout_s=0.3))


@pytest.mark.parametrize("route", ["/api/", "/resolve/"])
def test_a_hub_that_stops_answering_is_not_waited_for_without_end(fake, config, monkeypatch, route):
    from huggingface_hub import file_download
    from huggingface_hub.utils import _http

    monkeypatch.setattr(file_download, "_ETAG_RETRY_TIMEOUT", 0.2)
    monkeypatch.setattr(_http, "time", SimpleNamespace(time=time.time, sleep=lambda seconds: None))
    fake.silent = route
    with pytest.raises(ModelError, match=r"Timeout|timed out|cannot be reached|stopped"):
        download(ID, other(config, timeout_s=0.2))


def test_a_cache_serves_where_no_hub_does(fake, config):
    folder = download(ID, config)
    fake.requests.clear()
    assert download(ID, other(config, offline=True)) == folder
    assert download(HubId(REPO, COMMIT), other(config, offline=True)) == folder
    assert fake.requests == []
    assert download(ID, other(config, endpoint=nowhere())) == folder


def test_offline_without_a_complete_cache_is_refused(fake, config):
    offline = other(config, offline=True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set, and the cache does not have it"):
        download(ID, offline)
    download(ID, config, weights=False)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set, and the download in the cache is not complete"):
        download(ID, offline)
    assert download(ID, offline, weights=False).name == COMMIT


def test_an_interrupted_download_goes_on_where_it_stopped(fake, config, files, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    size = len(files["model.safetensors"])
    fake.cut_after = size // 2
    assert files_of(download(ID, config)) == files
    ranges = [request.headers["range"] for request in fake.requests if "range" in request.headers]
    assert ranges
    assert all(0 < int(value.removeprefix("bytes=").split("-")[0]) <= size // 2 for value in ranges)


def test_a_killed_download_keeps_complete_files_and_its_leavings_are_swept(fake, config, files):
    download(ID, config, weights=False)
    blobs = config.cache / "models--tiny-org--tiny-model/blobs"
    dead, alive = blobs / "1.aaaaaaaa.incomplete", blobs / "2.bbbbbbbb.incomplete"
    for path, age in ((dead, 700), (alive, 500)):
        path.write_bytes(b"half")
        os.utime(path, (1e9 - age, 1e9 - age))
    fake.requests.clear()
    assert files_of(download(ID, config, clock=lambda: 1e9)) == files
    assert fake.downloaded() == {"model.safetensors"}
    assert (dead.exists(), alive.exists()) == (False, True)


def test_too_little_disk_is_said_before_the_first_byte(fake, config, monkeypatch):
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 10))
    with pytest.raises(ModelError, match=r"0 MiB are missing, but only 0 MiB are free in .*cache; .* HF_HOME"):
        download(ID, config)
    assert fake.downloaded() == set()


@pytest.mark.parametrize(
    ("number", "text"),
    [(errno.ENOSPC, "the disk is full in"), (errno.EACCES, "cannot be written"), (errno.EIO, "stopped: OSError")],
)
def test_what_fails_in_the_middle_is_one_line(fake, config, monkeypatch, number, text):
    import huggingface_hub

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ModelError, match=text):
        download(ID, config)


# --- around it ---


def test_progress_lines_come_at_a_bounded_rate():
    said: list[str] = []
    now = 0.0
    lines = Lines("downloading the model", said.append, lambda: now)
    for step in range(1001):
        now = step * 0.1
        lines(step << 20, 1000 << 20)
    lines(1000 << 20, 1000 << 20)
    assert 100 / EVERY_S <= len(said) <= 100 / EVERY_S + 2
    assert said[-1] == "downloading the model: 1000 of 1000 MiB, 100 %, 10 MiB/s"


def test_the_bar_takes_what_huggingface_hub_does_with_one():
    """Also for storage that the hub on loopback does not have, where received and written bytes are counted apart."""
    from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

    seen: list[tuple[int, int]] = []
    kind = hub._bar(100, lambda done, total: seen.append((done, total)))
    with XetDownloadProgressReporter(
        reconstruction_desc="x", transfer_desc="y", total=60, log_level=0, name="z", tqdm_class=kind
    ) as reporter:
        for received, written in ((30, 10), (60, 50), (60, 60)):
            reporter.update_progress(
                SimpleNamespace(
                    total_bytes=60,
                    total_bytes_completed=written,
                    total_transfer_bytes_completed=received,
                    total_bytes_completion_rate=1.0,
                    total_transfer_bytes_completion_rate=None,
                )
            )
    kind(total=40, initial=40, unit="B")
    assert seen == [(10, 100), (50, 100), (60, 100), (100, 100)]


def test_the_environment_is_read(tmp_path, monkeypatch):
    given = HubConfig.of(
        {"HF_ENDPOINT": "http://127.0.0.1:1/", "HF_HOME": "/cache", "HF_TOKEN": "t", "HF_HUB_OFFLINE": "1"}
    )
    assert given == HubConfig("http://127.0.0.1:1", Path("/cache/hub"), "t", offline=True)
    assert HubConfig.of({"HF_HUB_CACHE": "/elsewhere", "HF_HOME": "/cache", "HF_TOKEN": "t"}).cache == Path(
        "/elsewhere"
    )
    assert not HubConfig.of({"HF_HUB_OFFLINE": "0", "HF_TOKEN": "t"}).offline


def test_the_process_of_up_downloads_and_reports(fake, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": fake.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "worker.resolve", REPO, "auto", "main"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 %" in done.stdout
    fake.status = 404
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(f"pagelane: error: {REPO}: there is no such path here")
    assert done.stderr == ""
