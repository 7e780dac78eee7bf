"""Takes a model from a hub into the local cache: safetensors and JSON, nothing that could be run. No torch.

The cache is huggingface_hub's own, with its layout, its variables (HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE) and its locks; that package is imported when a hub id is resolved, and only then. A connection that
breaks is taken up where it broke; a download that was killed keeps the files that are complete.
"""

import contextlib
import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.files import MIB, SIZE_LIMITS, ModelError
from engine.models.progress import Progress
from engine.models.shapes import INDEX_FILE, SINGLE_FILE

DEFAULT_REVISION = "main"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE = re.compile(r"\w[\w.-]*", re.ASCII)
_LONGEST = 96
_AT_ONCE = 4
_TEXT_FILES = tuple(name for name in SIZE_LIMITS if name != INDEX_FILE)
# Mistral's own format beside Hugging Face's: the same weights once more.
_SECOND_COPY = "consolidated"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".nemo")

STALE_S = 600.0
"""After so many seconds without a byte, a partial file belongs to a download that was killed: each wait for the network
is shorter by far, and no later download could go on with it."""


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository on a hub, and which of its commits: a branch, a tag or a hash."""

    repo: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return self.repo if self.revision == DEFAULT_REVISION else f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class HubConfig:
    """Where the hub and its cache are. `timeout_s` bounds each wait for an answer, in seconds."""

    endpoint: str
    cache: Path
    token: str | None = None
    offline: bool = False
    timeout_s: float = 10.0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "HubConfig":
        """As `environ` says, or as huggingface_hub has it by default."""
        from huggingface_hub import constants, get_token

        home = environ.get("HF_HOME")
        cache = environ.get("HF_HUB_CACHE") or (os.path.join(home, "hub") if home else constants.HF_HUB_CACHE)
        offline = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
        return cls(
            endpoint=(environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/"),
            cache=Path(os.path.expandvars(cache)).expanduser(),
            token=environ.get("HF_TOKEN") or get_token(),
            offline=offline.upper() in {"1", "ON", "YES", "TRUE"},
        )


def parse_hub_id(model: str, revision: str | None = None) -> HubId | None:
    """`model` as `org/name` or `org/name@revision`, or None if it does not look like one.

    Raises `ModelError` for a revision that no repository can have, and for two that differ.
    """
    repo, at, named = model.partition("@")
    if not _ID.fullmatch(repo) or any(len(part) > _LONGEST for part in repo.split("/")):
        return None
    if ".." in repo or "--" in repo or repo.endswith((".git", ".gguf", ".safetensors", ".json", ".", "-")):
        return None
    if at and revision is not None and named != revision:
        raise ModelError(f"model is {model!r} and revision is {revision!r}; keep one of the two revisions")
    wanted = named if at else revision if revision is not None else DEFAULT_REVISION
    # It becomes a path in the cache.
    if not _REVISION.fullmatch(wanted) or ".." in wanted or len(wanted) > 2 * _LONGEST:
        raise ModelError(f"the revision of {repo} is {wanted!r}, but must be a branch, a tag or a commit hash")
    return HubId(repo, wanted)


def download(
    hub_id: HubId,
    config: HubConfig,
    weights: bool = True,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
) -> Path:
    """The folder of the cache that holds `hub_id`, complete; what is missing of it is downloaded first.

    Without `weights` only configuration and tokenizer are. Where no hub can be reached, a complete folder of the cache
    serves as well. Raises `ModelError` with the reason and the ways out.
    """
    one = _Download(hub_id, config)
    one.sweep(clock())
    return one.run(weights, progress)


class _Unreachable(Exception):
    """No hub answers, or none that works."""


class _Download:
    """One download: its names stand in every message."""

    def __init__(self, hub_id: HubId, config: HubConfig) -> None:
        self._id = hub_id
        self._config = config

    def run(self, weights: bool, progress: Progress | None) -> Path:
        if self._config.offline:
            return self._cached(weights, "HF_HUB_OFFLINE is set")
        try:
            sizes, commit = self._listing()
        except _Unreachable as error:
            return self._cached(weights, f"the hub at {self._config.endpoint} cannot be reached ({error})")
        names = self._select(sizes, weights)
        self._check_sizes(names, sizes)
        folder = self._folder(commit)
        lacking = [name for name in names if not (folder / name).exists()]
        if not lacking and self._cached_commit() == commit:
            return folder  # also where the cache is read-only
        missing = sum(sizes[name] for name in lacking)
        self._check_disk(missing)
        self._fetch(lacking, commit, _bar(missing, progress))
        if progress is not None and lacking:
            progress(missing, missing)
        return folder

    def sweep(self, now: float) -> None:
        """Remove what killed downloads have left: a worker that is started again and again would fill the disk."""
        for partial in (self._folder("").parent / "blobs").glob("*.????????.incomplete"):
            with contextlib.suppress(OSError):
                if now - partial.stat().st_mtime > STALE_S:
                    partial.unlink()

    def _listing(self) -> tuple[dict[str, int], str]:
        """Sizes in bytes of the repository's files by their names, and the commit."""
        from huggingface_hub import HfApi, errors

        api = HfApi(endpoint=self._config.endpoint, token=self._config.token or False)
        try:
            info = api.model_info(
                self._id.repo, revision=self._id.revision, files_metadata=True, timeout=self._config.timeout_s
            )
        except errors.GatedRepoError:
            raise self._refused("is gated") from None
        except errors.RevisionNotFoundError:
            raise ModelError(
                f"{self._id}: the repository has no revision {self._id.revision!r} at {self._config.endpoint}; "
                "name a branch, a tag or a commit hash of it"
            ) from None
        except errors.RepositoryNotFoundError:
            raise self._refused("is not there, or is private") from None
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise self._refused(f"is not yours to read (status {status})") from None
            if status == 404:
                raise self._refused("is not there, or is private") from None
            raise _Unreachable(f"status {status}") from None
        except Exception as error:  # its HTTP library's own kinds, which differ between its versions
            raise _Unreachable(_said(error)) from None
        if not _COMMIT.fullmatch(str(info.sha)):  # it becomes a path in the cache
            raise _Unreachable(f"it names {info.sha!r} as the commit")
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}, str(info.sha)

    def _refused(self, what: str) -> ModelError:
        token = (
            "see whether HF_TOKEN is right and its account has been given access on the model's page"
            if self._config.token
            else "a gated or private one needs HF_TOKEN in the environment"
        )
        return ModelError(
            f"{self._no_path()}, and the repository of this name {what} at {self._config.endpoint}; correct the name, "
            f"or {token}"
        )

    def _no_path(self) -> str:
        return f"{self._id}: there is no such path here ({Path(self._id.repo).absolute()})"

    def _select(self, sizes: Mapping[str, int], weights: bool) -> list[str]:
        names = [name for name in _TEXT_FILES if name in sizes]
        if not weights:
            return names
        found = [
            name
            for name in sizes
            if name.endswith(".safetensors") and _FILE.fullmatch(name) and not name.startswith(_SECOND_COPY)
        ]
        if SINGLE_FILE in found:
            return [*names, SINGLE_FILE]
        if INDEX_FILE in sizes and found:
            return [*names, INDEX_FILE, *found]
        raise ModelError(
            f"{self._id}: the repository has no {SINGLE_FILE} and no shards with {INDEX_FILE}, but {_formats(sizes)}; "
            "take one with safetensors, or download a .gguf file yourself and give its path"
        )

    def _check_sizes(self, names: list[str], sizes: Mapping[str, int]) -> None:
        for name in names:
            limit = SIZE_LIMITS.get(name)
            if limit is not None and sizes[name] > limit:
                raise ModelError(f"{self._id}: {name} has {sizes[name]} bytes, but at most {limit} are read")

    def _folder(self, commit: str) -> Path:
        return self._config.cache / f"models--{self._id.repo.replace('/', '--')}" / "snapshots" / commit

    def _check_disk(self, needed: int) -> None:
        """Before the first byte, rather than after an hour."""
        there = next(path for path in (self._config.cache, *self._config.cache.parents) if path.exists())
        free = shutil.disk_usage(there).free
        if needed > free:
            raise self._disk_full(f"{needed // MIB} MiB are missing, but only {free // MIB} MiB are free")

    def _disk_full(self, what: str) -> ModelError:
        return ModelError(
            f"{self._id}: {what} in {self._config.cache}; make room, or set HF_HOME to a folder on a larger disk"
        )

    def _fetch(self, names: list[str], commit: str, bar: Any) -> None:
        """Download files one by one, a few at a time.

        Not by snapshot_download, which lists the repository once more, and without bounds: a hub that never answers
        would be waited for without end.
        """
        from huggingface_hub import hf_hub_download

        def fetch(name: str) -> None:
            hf_hub_download(
                self._id.repo,
                name,
                revision=commit,
                cache_dir=self._config.cache,
                endpoint=self._config.endpoint,
                token=self._config.token or False,
                etag_timeout=self._config.timeout_s,
                tqdm_class=bar,
            )

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            futures = [pool.submit(fetch, name) for name in names]
            try:
                for future in futures:
                    future.result()
                self._write_ref(commit)
            except Exception as error:
                raise self._stopped(error) from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _stopped(self, error: Exception) -> ModelError:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._disk_full("the disk is full")
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            return ModelError(
                f"{self._config.cache}: cannot be written: {error.strerror}; set HF_HOME to another folder"
            )
        return ModelError(
            f"{self._id}: the download from {self._config.endpoint} stopped: {_said(error)}; start again, "
            "files that are complete are kept"
        )

    def _write_ref(self, commit: str) -> None:
        """Note which commit the revision is, once all of it is there: offline it leads to the files."""
        if self._id.revision == commit:
            return
        ref = self._ref()
        ref.parent.mkdir(parents=True, exist_ok=True)
        partial = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        partial.write_text(commit, encoding="ascii")
        partial.replace(ref)

    def _ref(self) -> Path:
        return self._folder("").parent / "refs" / self._id.revision

    def _cached_commit(self) -> str:
        """The commit that the cache has for the revision, or else the revision, which may be a commit itself."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self._ref().read_text(encoding="ascii").strip()
        return self._id.revision

    def _cached(self, weights: bool, why: str) -> Path:
        """The folder of an earlier download, with what a model needs."""
        commit = self._cached_commit()
        folder = self._folder(commit)
        if commit and Path(commit).name == commit and (folder / "config.json").is_file():
            if not weights or (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
                return folder
            why += ", and the download in the cache is not complete"
        else:
            why += ", and the cache does not have it"
        raise ModelError(
            f"{self._no_path()}, and as a hub id it cannot be had: {why} ({self._config.cache}). Give a local "
            "directory, download once where a hub can be reached and copy the cache (HF_HOME, then HF_HUB_OFFLINE=1), "
            "or name a hub that can be reached in HF_ENDPOINT"
        )


def _formats(sizes: Mapping[str, int]) -> str:
    """Which formats of weights are there, in words."""
    kinds = sorted({ending for name in sizes for ending in _OTHER_FORMATS if name.endswith(ending)})
    elsewhere = any(name.endswith(".safetensors") for name in sizes)
    words = [f"weights as {', '.join(kinds)}"] if kinds else []
    words += ["safetensors under other names or in folders"] if elsewhere else []
    return " and ".join(words) or "no weights at all"


def _said(error: BaseException) -> str:
    """The first line of what a library says, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _bar(total: int, progress: Progress | None) -> type:
    """A class that huggingface_hub takes for a progress bar, one for each file; together they tell `progress`.

    It has what huggingface_hub's own stand-in for several bars has: received bytes are told apart from written ones.
    """
    lock = threading.Lock()
    written = 0

    class Bar:
        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            self.update(initial)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None: ...
        def update_transfer(self, count: float | None = 1) -> None: ...
        def set_postfix_str(self, text: str, refresh: bool = False) -> None: ...
        def set_transfer_postfix_str(self, text: str, refresh: bool = False) -> None: ...

        def update(self, count: float | None = 1) -> None:
            nonlocal written
            with lock:
                written += int(count or 0)
                if progress is not None and count:
                    progress(min(written, total), total)

    return Bar
