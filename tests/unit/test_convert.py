"""One test per rule of what Dynamo sends and what it must get back."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from dynamo.llm.exceptions import InvalidArgument
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Sampling, Submit
from engine.step import OPTIONAL_PARAMETERS
from worker.convert import ServedModel, to_submit, without_unhonoured
from worker.parameters import GROUPS, OUTPUT, REQUEST, ROUTING, Group

MODEL = ServedModel(
    vocab_size=100,
    servable_length=64,
    default_max_tokens=None,
    defaults=Sampling(),
    parameters=OPTIONAL_PARAMETERS,
)


def convert(model: ServedModel = MODEL, **fields: Any) -> Submit:
    return to_submit({"token_ids": [1, 2, 3], **fields}, 7, "request-1", model, lambda: 1234)


def refusal(model: ServedModel = MODEL, **fields: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        convert(model, **fields)
    return str(caught.value)


def test_identity_is_kept():
    submit = convert()
    assert (submit.key, submit.request_id, submit.block_hashes) == (7, "request-1", b"")


PACKED = np.array([1, 2, 99], dtype="<i4").tobytes()


@pytest.mark.parametrize("ids", [[1, 2, 99], (1, 2, 99), PACKED, bytearray(PACKED), memoryview(PACKED)])
def test_token_ids_are_a_list_or_packed_bytes(ids):
    assert convert(token_ids=ids).prompt == PACKED


@pytest.mark.parametrize("ids", [[], b"", None, ()])
def test_an_empty_prompt_is_refused(ids):
    assert "empty" in refusal(token_ids=ids)


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([1, 100], "100"),
        ([-1], "-1"),
        ([1 << 31], "2147483647"),
        ([1 << 80], "2147483647"),
        (np.array([-5], dtype="<i4").tobytes(), "-5"),
        (b"\1\0\0", "3 packed bytes"),
        ([1.0], "integer"),
        ([True], "integer"),
        (["1"], "integer"),
        ([[1]], "integer"),
        ("12", "str"),
        (5, "int"),
        ({"1": 1}, "dict"),
    ],
)
def test_token_ids_outside_the_vocabulary_or_of_a_wrong_type_are_refused(ids, named):
    assert named in refusal(token_ids=ids)


def test_the_longest_prompt_leaves_room_for_one_token():
    assert convert(token_ids=[1] * 63).max_tokens == 1


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_a_prompt_without_room_is_refused_with_both_numbers_and_the_way_out(length):
    text = refusal(token_ids=[1] * length)
    assert f"{length} tokens" in text
    assert "64 tokens" in text
    assert "at most 63" in text


def test_max_tokens_defaults_to_the_room_left():
    assert convert(stop_conditions={"max_tokens": None}).max_tokens == 61
    assert convert(stop_conditions=None).max_tokens == 61


def test_max_tokens_defaults_to_the_configured_number_within_the_room():
    for default, expected in ((5, 5), (500, 61)):
        assert convert(replace(MODEL, default_max_tokens=default)).max_tokens == expected


@pytest.mark.parametrize("value", [62, 4096, 1 << 70])
def test_a_huge_max_tokens_is_clamped_to_the_room_left(value):
    assert convert(stop_conditions={"max_tokens": value}).max_tokens == 61


@pytest.mark.parametrize("value", [0, -1, -(1 << 70), True, 2.0, "5", [1]])
def test_a_max_tokens_that_is_no_positive_number_is_refused(value):
    assert "max_tokens" in refusal(stop_conditions={"max_tokens": value})


def test_sampling_defaults_apply_field_by_field():
    defaults = Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    model = replace(MODEL, defaults=defaults)
    sampling = convert(model, sampling_options={"top_p": 0.5, "temperature": None}).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 0.5, 0.1)


def test_a_request_can_switch_the_defaults_off():
    model = replace(MODEL, defaults=Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1))
    off = {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0}
    sampling = convert(model, sampling_options=off).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(0, 0), (5, 5), (-1, 2**64 - 1), (2**64, 0), (2**200 + 3, 3), (None, 1234)],
)
def test_every_seed_is_mapped_to_64_bits_and_a_missing_one_is_random(seed, expected):
    assert convert(sampling_options={"seed": seed}).sampling.seed == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", False),
        ("seed", 1.5),
        ("seed", "x"),
        ("seed", True),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", 1e39),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", "0.5"),
        ("frequency_penalty", math.inf),
    ],
)
def test_a_sampling_value_out_of_range_is_refused_by_name(name, value):
    assert name in refusal(sampling_options={name: value})


def test_stop_tokens_are_the_union_of_all_lists():
    submit = convert(
        stop_conditions={"stop_token_ids": [9, 5], "stop_token_ids_hidden": [5, 6]},
        eos_token_ids=[2],
        sampling_options={},
    )
    assert submit.stop_token_ids == (2, 5, 6, 9)


def test_ignore_eos_leaves_only_the_clients_stop_tokens():
    stop = {"stop_token_ids": [9], "stop_token_ids_hidden": [6], "ignore_eos": True}
    assert convert(stop_conditions=stop, eos_token_ids=[2]).stop_token_ids == (9,)


@pytest.mark.parametrize("value", [5, "5", [1.0], [True], [-1], [1 << 31], {"a": 1}])
def test_bad_stop_tokens_are_refused(value):
    assert "stop_token_ids" in refusal(stop_conditions={"stop_token_ids": value})
    assert "eos_token_ids" in refusal(eos_token_ids=value)


def test_stop_strings_are_the_frontends_job():
    assert convert(stop_conditions={"stop": ["\n"]}).stop_token_ids == ()


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("sampling_options", "n", 2),
        ("sampling_options", "n", 0),
        ("sampling_options", "n", True),
        ("sampling_options", "best_of", 3),
        ("sampling_options", "use_beam_search", True),
        ("sampling_options", "length_penalty", 2.0),
        ("sampling_options", "skip_reading_prefix_cache", True),
        ("sampling_options", "allowed_token_ids", []),
        ("sampling_options", "bad_words_token_ids", [[1]]),
        ("sampling_options", "logprob_token_ids", [1]),
        ("sampling_options", "logit_bias", {"5": 1}),
        ("sampling_options", "guided_decoding", {"json": {}}),
        ("sampling_options", "a_new_option", 1),
        ("stop_conditions", "max_thinking_tokens", 100),
        ("stop_conditions", "a_new_condition", 1),
        ("output_options", "a_new_output", 1),
        ("routing", "lora_name", "adapter"),
        ("routing", "dp_rank", 1),
        ("routing", "dp_rank", False),
        ("routing", "a_new_hint", 0),
    ],
)
def test_what_is_not_served_is_refused_by_name(group, name, value):
    assert name in refusal(**{group: {name: value}})


def test_logits_processors_are_refused():
    assert "logits_processors" in refusal(logits_processors=[{"kind": "forced_sequence"}])
    assert convert(logits_processors=[]).max_tokens == 61


@pytest.mark.parametrize("name", ["multi_modal_data", "mm_processor_kwargs", "encoder_result", "prefill_result"])
def test_inputs_that_are_not_served_are_refused_by_name(name):
    assert name in refusal(**{name: {"image_url": ["x"]}})


OBJECTS = [group for group in GROUPS if group is not REQUEST]


@pytest.mark.parametrize("group", OBJECTS, ids=lambda group: group.name)
def test_null_and_values_that_change_nothing_are_accepted(group: Group):
    assert convert(**{group.name: {"a_new_key": None}}).max_tokens == 61
    for name, (neutral, _) in group.neutral.items():
        for value in (None, *neutral):
            assert convert(**{group.name: {name: value}}).max_tokens == 61


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_every_parameter_stands_in_one_table(group: Group):
    assert len(group.known) == len(group.honoured) + len(group.neutral) + len(group.elsewhere)


def test_what_router_and_frontend_have_done_already_is_no_reason_to_refuse():
    done = {
        "output_options": dict.fromkeys(OUTPUT.elsewhere, True),
        "routing": dict.fromkeys(ROUTING.elsewhere, 1),
        "sampling_options": {"include_stop_str_in_output": True},
    }
    assert convert(**done) == convert()


@pytest.mark.parametrize("name", ["allowed_token_ids", "bad_words_token_ids", "logprob_token_ids", "n"])
def test_what_the_frontend_sends_as_extra_arguments_is_refused_alike(name):
    assert name in refusal(extra_args={"sampling_options": {name: [[5]]}})
    assert "sampling_options" in refusal(extra_args={"sampling_options": 5})
    assert convert(extra_args={"nvext": {"cache_salt": "x"}, "sampling_options": {"detokenize": False}}) == convert()


def test_sampling_options_go_before_extra_arguments():
    extra = {"sampling_options": {"top_k": 5, "min_p": 0.5}}
    sampling = convert(extra_args=extra, sampling_options={"top_k": 7, "min_p": None}).sampling
    assert (sampling.top_k, sampling.min_p) == (7, 0.5)


PENALTIES = {"repetition_penalty": 1.25, "presence_penalty": -2, "frequency_penalty": 0.5}


def test_penalties_and_log_probabilities_reach_the_core():
    submit = convert(
        sampling_options=PENALTIES,
        stop_conditions={"min_tokens": 4},
        output_options={"logprobs": 0, "prompt_logprobs": 20},
    )
    asked = {name: getattr(submit.sampling, name) for name in OPTIONAL_PARAMETERS}
    assert asked == {**PENALTIES, "min_tokens": 4, "logprobs": 0, "prompt_logprobs": 20}
    plain = convert().sampling
    assert (plain.logprobs, plain.prompt_logprobs, plain.min_tokens, plain.penalizes) == (None, None, 0, False)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, 2**32 - 1, True, "1", 1.0, []])
def test_bad_counts_of_log_probabilities_are_refused_by_name(name, value):
    assert refusal(output_options={name: value}).startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        *(("sampling_options", name, value) for name, value in PENALTIES.items()),
        ("stop_conditions", "min_tokens", 1),
        ("output_options", "logprobs", 0),
        ("output_options", "prompt_logprobs", 3),
    ],
)
def test_what_the_device_does_not_honour_is_refused_by_name(group, name, value):
    lacking = replace(MODEL, parameters=OPTIONAL_PARAMETERS - {name})
    message = refusal(lacking, **{group: {name: value}})
    assert message.startswith(f"{name} is {value:g}, but this worker's device does not serve {name} yet")
    assert convert(lacking).max_tokens == 61


def test_a_default_that_the_device_does_not_honour_is_left_out_and_named():
    defaults = Sampling(temperature=0.6, repetition_penalty=1.1)
    assert without_unhonoured(defaults, OPTIONAL_PARAMETERS) == (defaults, ())
    assert without_unhonoured(defaults, frozenset()) == (Sampling(temperature=0.6), ("repetition_penalty",))


def test_the_models_repetition_penalty_is_the_default():
    model = replace(MODEL, defaults=Sampling(repetition_penalty=1.1))
    assert convert(model).sampling.repetition_penalty == 1.1
    assert convert(model, sampling_options={"repetition_penalty": 1}).sampling.repetition_penalty == 1.0


def test_a_least_length_beyond_what_can_be_generated_is_refused_with_both_numbers():
    assert convert(stop_conditions={"min_tokens": 5, "max_tokens": 5}).sampling.min_tokens == 5
    message = refusal(stop_conditions={"min_tokens": 6, "max_tokens": 5})
    assert message.startswith("min_tokens is 6, but at most 5 tokens can be generated")
    assert "at most 61 tokens" in refusal(stop_conditions={"min_tokens": 62, "max_tokens": 1000})


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", [3]])
def test_a_bad_least_length_is_refused(value):
    assert refusal(stop_conditions={"min_tokens": value}).startswith("min_tokens is ")


def test_a_least_length_leaves_a_token_to_sample():
    everything = {"stop_token_ids": list(range(100)), "min_tokens": 1}
    assert "whole vocabulary of 100" in refusal(stop_conditions=everything)
    assert convert(stop_conditions={**everything, "stop_token_ids": list(range(99))}).sampling.min_tokens == 1


def test_stop_tokens_that_the_model_does_not_have_end_nothing():
    assert convert(stop_conditions={"stop_token_ids": [99, 100, 2**31 - 1]}).stop_token_ids == (99,)


def test_visible_stop_tokens_end_the_text_like_any_other():
    stop = {"stop_token_ids_visible": [8], "stop_token_ids_hidden": [6], "ignore_eos": True}
    assert convert(stop_conditions=stop).stop_token_ids == (8,)
    assert convert(stop_conditions={**stop, "ignore_eos": False}).stop_token_ids == (6, 8)


def test_an_expected_length_never_exceeds_what_is_allowed():
    assert convert(routing={"expected_output_tokens": 10**30}).expected_output_tokens == 61
    stop = {"max_tokens": 7}
    assert convert(routing={"expected_output_tokens": 9}, stop_conditions=stop).expected_output_tokens == 7
    assert convert(routing={"expected_output_tokens": 0}).expected_output_tokens == 0
    assert convert().expected_output_tokens is None
    for bad in (-1, 1.5, "9", True):
        assert "expected_output_tokens" in refusal(routing={"expected_output_tokens": bad})


def test_a_cache_salt_that_would_swell_every_event_is_refused_with_both_numbers():
    assert convert(routing={"cache_salt": "x" * 1024}).cache_salt == "x" * 1024
    with pytest.raises(InvalidArgument, match=r"cache_salt has 1025 letters, but must have at most 1024"):
        convert(routing={"cache_salt": "x" * 1025})


def test_routing_gives_priority_and_cache_salt():
    submit = convert(routing={"priority": -3, "cache_salt": "tenant", "dp_rank": 0, "expected_output_tokens": 5})
    assert (submit.priority, submit.cache_salt) == (-3, "tenant")
    assert (convert().priority, convert().cache_salt) == (0, None)
    assert [convert(routing={"priority": end}).priority for end in (-(1 << 31), (1 << 31) - 1)] == [
        -(1 << 31),
        (1 << 31) - 1,
    ]


@pytest.mark.parametrize(
    "routing", [{"priority": 1 << 40}, {"priority": 1.5}, {"cache_salt": 5}, {"cache_salt": "\ud800"}, [1], "x"]
)
def test_bad_routing_is_refused(routing):
    refusal(routing=routing)


def test_a_number_of_thousands_of_digits_is_refused_without_being_printed():
    assert "bits" in refusal(stop_conditions={"max_tokens": -(10**6000)})


NASTY = [None, True, False, "", "x", [], [1], [True], {}, {"a": 1}, math.nan, math.inf, 10**400, -(10**5000), 0, 1, 1.0]
VALUE = st.sampled_from(NASTY) | st.integers() | st.floats()
NAMES = [*(name for group in GROUPS for name in sorted(group.known)), "unknown"]
GROUP = VALUE | st.dictionaries(st.sampled_from(NAMES), VALUE, max_size=2)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "token_ids": VALUE | st.binary(max_size=12) | st.lists(st.integers(), max_size=3),
            "sampling_options": GROUP,
            "stop_conditions": GROUP,
            "output_options": GROUP,
            "routing": GROUP,
            "eos_token_ids": VALUE,
            "extra_args": GROUP | st.fixed_dictionaries({"sampling_options": GROUP}),
        },
    )
)
def test_any_request_gives_a_submit_or_invalid_argument(request_fields):
    try:
        submit = convert(**request_fields)
    except InvalidArgument:
        return
    tokens = len(submit.prompt) // 4
    assert 1 <= tokens < 64
    assert 1 <= submit.max_tokens <= 64 - tokens
    assert 0 <= submit.sampling.seed < 2**64
    assert submit.sampling.temperature >= 0
    assert math.isfinite(submit.sampling.temperature)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=Submit) == submit
