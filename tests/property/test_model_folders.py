"""Model folders as an attacker would make them: each loads, or is refused in one line; none crashes, hangs or swells.

The table of `tests.broken_folders` holds what is known to be nasty, with what the message must name; the random part
changes a good folder in up to three places and checks only that nothing else than a refusal comes of it. The long form
runs with `make property`.
"""

import contextlib
import json
import os
import resource
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.memory import MemoryShortError
from engine.models.chat_template import check_templates, has_chat_template
from engine.models.config import load_model_config
from engine.models.files import ModelError
from engine.models.folder import check_directory, check_tokenizer
from engine.models.shapes import weight_shapes
from engine.plan import PlanError
from kv.budget import KvBudgetError
from tests import golden
from tests.broken_folders import EMBEDDING, NORM, REFUSED, SERVED, WEIGHTS, Change, field, tensor, without
from tests.models import tiny_model
from worker.config import ConfigError
from worker.model import generation_defaults, parsers

LONG = "PAGELANE_LONG_PROPERTY_TESTS" in os.environ
SECONDS = 20.0
"""Most time for one folder, on a machine that is busy with other things."""
MEMORY = 600 << 20
"""Most bytes that one folder may add to the process: far more than any of these needs."""
REFUSALS = (ModelError, ConfigError, KvBudgetError, PlanError, MemoryShortError)
"""What the operator is told in one line; anything else is a fault of ours."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("good") / "tiny", "qwen2", group=1, kv_heads=1, layers=1)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def load(folder: Path) -> None:
    """Everything that worker and core read of a model folder, in their order."""
    check_directory(folder)
    check_tokenizer(folder / "tokenizer.json")
    check_templates(folder)
    parsers(folder)
    has_chat_template(folder)
    generation_defaults(folder)
    golden.lane(folder, max_step_tokens=64, max_bucket=2, threads=1)


def refusal(folder: Path) -> str | None:
    """What `folder` is refused with, or None if it loads; within bounds of time and memory, and in one line."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = None
    try:
        load(folder)
    except REFUSALS as error:
        message = str(error)
    assert message is None or (message.isprintable() and len(message) < 3000)
    assert time.monotonic() - began < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MEMORY
    return message


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=lambda case: f"{case}-{REFUSED[case][1][:40]}")
@pytest.mark.timeout(60)
def test_what_is_wrong_is_named(folder: Path, case: int) -> None:
    change, expected = REFUSED[case]
    change(folder)
    with pytest.raises((ModelError, ConfigError), match=expected):
        load(folder)
    assert refusal(folder) is not None


@pytest.mark.parametrize("change", SERVED, ids=range(len(SERVED)))
def test_what_is_unusual_and_right_is_served(folder: Path, change: Change) -> None:
    change(folder)
    assert refusal(folder) is None


def test_a_folder_may_itself_be_a_link_and_a_hub_cache_links_to_its_blobs(good: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(good)
    assert refusal(tmp_path / "link") is None
    snapshot, blobs = tmp_path / "models--x/snapshots/abc", tmp_path / "models--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(good.iterdir()):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert refusal(snapshot) is None


# --- random changes ---

NUMBERS = [-1, 0, 1, 2, 7, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308]
SCALARS = [None, True, False, *NUMBERS, "", "x", "\x00", "1", "ü" * 999]
VALUES = st.sampled_from(SCALARS) | st.recursive(
    st.sampled_from(SCALARS), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)
CONFIG_KEYS = [
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
    "max_position_embeddings",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "eos_token_id",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "attention_bias",
    "mlp_bias",
    "pretraining_tp",
    "quantization_config",
]
ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast"]
GENERATION_KEYS = ["eos_token_id", "temperature", "top_k", "top_p", "min_p", "do_sample", "repetition_penalty"]
TEXT_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@st.composite
def changed_bytes(draw: st.DrawFn) -> Change:
    """Flip, cut or insert bytes somewhere in a file; of the weights mostly in the header."""
    file = draw(st.sampled_from([*TEXT_FILES, WEIGHTS]))
    place, kind = draw(st.floats(0, 1)), draw(st.sampled_from(["flip", "cut", "insert"]))
    noise = draw(st.binary(max_size=9))

    def change(folder: Path) -> None:
        content = (folder / file).read_bytes()
        at = int(place * (min(len(content), 1500) if file == WEIGHTS else len(content)))
        tail = {"flip": content[at + len(noise) :], "cut": b"", "insert": content[at:]}[kind]
        (folder / file).write_bytes(content[:at] + (b"" if kind == "cut" else noise) + tail)

    return change


SIZES = st.sampled_from([0, 1, 2, 48, 2**31, 2**62, 2**63, -1])
FACTS = {
    "dtype": st.sampled_from(["F64", "F32", "BF16", "F8_E4M3", "BOOL", "I64", "", "f32"]) | VALUES,
    "shape": st.lists(SIZES, max_size=4) | VALUES,
    "data_offsets": st.lists(st.integers(-1, 1 << 20), max_size=3) | VALUES,
}
HEADERS = st.builds(
    lambda name, facts: tensor(name, **facts),
    st.sampled_from([NORM, EMBEDDING, "lm_head.weight", "new", "__metadata__"]),
    st.fixed_dictionaries({}, optional=FACTS),
)
ROPES = st.dictionaries(st.sampled_from(ROPE_KEYS), VALUES, max_size=4)
CHANGES = st.one_of(
    st.builds(field, st.sampled_from(CONFIG_KEYS), VALUES),
    st.builds(without, st.sampled_from(CONFIG_KEYS)),
    st.builds(lambda rope: field("rope_parameters", rope), ROPES),
    st.builds(lambda key, value: field(key, value, "generation_config.json"), st.sampled_from(GENERATION_KEYS), VALUES),
    st.builds(
        lambda value: field("chat_template", value, "tokenizer_config.json"), VALUES | st.text("{%}# if", max_size=20)
    ),
    st.builds(lambda value: field("model", value, "tokenizer.json"), VALUES),
    HEADERS,
    changed_bytes(),
)


@settings(
    max_examples=3000 if LONG else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(changes=st.lists(CHANGES, min_size=1, max_size=3))
@pytest.mark.timeout(3600 if LONG else 180)
def test_any_change_is_served_or_refused_in_one_line(good: Path, tmp_path: Path, changes: list[Change]) -> None:
    folder = tmp_path / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    for change in changes:
        # An earlier change may have left nothing to change.
        with contextlib.suppress(ValueError, struct.error, TypeError, KeyError, AttributeError):
            change(folder)
    refusal(folder)


@settings(max_examples=2000 if LONG else 100, deadline=None)
@given(values=st.fixed_dictionaries({}, optional=dict.fromkeys(CONFIG_KEYS, VALUES)), complete=st.booleans())
def test_any_configuration_gives_shapes_or_a_refusal(good: Path, values: dict[str, Any], complete: bool) -> None:
    folder = good.parent / "any-config"
    folder.mkdir(exist_ok=True)
    base = json.loads((good / "config.json").read_text()) if complete else {}
    (folder / "config.json").write_text(json.dumps(base | values))
    with contextlib.suppress(ModelError):
        assert all(min(shape) > 0 for shape in weight_shapes(load_model_config(folder)).values())
