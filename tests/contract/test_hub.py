"""A worker whose model is a hub id, and families besides Llama, behind the real frontend."""

import json
from pathlib import Path

from tests.contract.conftest import tiny_flags
from tests.contract.test_start import assert_refused, run_worker
from tests.fake_hub import REPO, FakeHub, files_of, serve
from tests.models import tiny_model
from tests.stack import QUICK_STOP, Stack, client


async def test_a_model_from_a_hub_is_listed_under_its_id_and_answers_also_offline(tmp_path: Path) -> None:
    hub = FakeHub(files_of(tiny_model(tmp_path / "qwen2", "qwen2")), token="secret")
    flags = tiny_flags(Path(REPO), context_limit=256, revision="main")
    with serve(hub) as url:
        home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": url}
        with Stack(*flags, environment=QUICK_STOP | home | {"HF_TOKEN": "secret"}) as stack:
            assert stack.model == REPO
            async with client(stack) as api:
                first = await api.chat("Where is the fox?", max_tokens=8)
            assert first.status == 200
            assert "secret" not in "\n".join(stack.log)
        asked = len(hub.requests)
        offline = {"HF_HUB_OFFLINE": "1", "HF_TOKEN": "secret"}
        with Stack(*flags, environment=QUICK_STOP | home | offline) as stack:
            async with client(stack) as api:
                again = await api.chat("Where is the fox?", max_tokens=8)
        assert (again.text, again.usage["prompt_tokens"]) == (first.text, first.usage["prompt_tokens"])
        assert len(hub.requests) == asked


def test_a_hub_model_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    with serve(FakeHub(files_of(tiny_model(tmp_path / "m")), token="secret")) as url:
        result = run_worker(tmp_path, "--model", REPO, HF_ENDPOINT=url, HF_HOME=str(tmp_path), HF_TOKEN="")
        assert_refused(tmp_path, result, 1, REPO, "HF_TOKEN", "no such path here")
    result = run_worker(tmp_path, "--model", REPO, HF_ENDPOINT=url, HF_HOME=str(tmp_path))
    assert_refused(tmp_path, result, 1, REPO, "cannot be reached", "HF_HUB_OFFLINE=1", "no such path here")


def test_a_template_that_the_frontend_could_not_compile_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{% for m in messages %}"}))
    result = run_worker(tmp_path, "--model", str(model))
    assert_refused(tmp_path, result, 1, "tokenizer_config.json: chat_template", "line 1")
