"""The chunks that Dynamo's frontend gets."""

import json
import math
from array import array

import pytest
from dynamo.common.backend.logprobs import extract_from_completion_output

from engine.messages import Finished, Logprobs
from worker.chunks import LEAST_LOGPROB, final_chunk, prompt_logprobs, token_chunk


def logprobs(own: list[float], top: list[list[tuple[int, float]]] | None = None) -> Logprobs:
    flat = [pair for row in top or [] for pair in row]
    return Logprobs(
        array("f", own).tobytes(),
        array("i", [token for token, _ in flat]).tobytes(),
        array("f", [value for _, value in flat]).tobytes(),
    )


def entry(rank: int, token: int, value: float) -> dict[str, object]:
    return {"rank": rank, "token_id": token, "token": None, "logprob": value}


def test_a_token_chunk_has_tokens_and_index():
    assert token_chunk([4, 5]) == {"token_ids": [4, 5], "index": 0}


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_the_final_chunk_says_why_and_what_was_used(reason):
    assert final_chunk([9], Finished(7, reason, 10, 3, 8)) == {
        "token_ids": [9],
        "index": 0,
        "finish_reason": reason,
        "completion_usage": {
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 8},
        },
    }


def test_log_probabilities_lie_beside_their_tokens():
    chunk = token_chunk([4, 5], logprobs([-0.5, -2.0], [[(4, -0.5), (9, -1.5)], [(7, -0.25), (4, -3.0)]]))
    assert chunk["log_probs"] == [-0.5, -2.0]
    assert chunk["top_logprobs"] == [[entry(1, 4, -0.5), entry(2, 9, -1.5)], [entry(1, 7, -0.25), entry(2, 4, -3.0)]]


def test_the_entries_are_those_that_dynamos_own_backends_send():
    class Info:
        rank, logprob, decoded_token = 1, -0.5, None

    class Output:
        logprobs, token_ids = [{4: Info}], [4]

    assert extract_from_completion_output(Output, 0) == ([-0.5], [[entry(1, 4, -0.5)]])


def test_without_likeliest_ones_each_token_has_an_empty_list():
    chunk = token_chunk([4, 5], logprobs([-0.5, -2.0]))
    assert (chunk["log_probs"], chunk["top_logprobs"]) == ([-0.5, -2.0], [[], []])


def test_a_probability_of_zero_stays_json():
    chunk = token_chunk([4], logprobs([-math.inf], [[(7, -math.inf)]]))
    assert chunk["log_probs"] == [LEAST_LOGPROB]
    assert chunk["top_logprobs"] == [[entry(1, 7, LEAST_LOGPROB)]]
    json.dumps(chunk, allow_nan=False)


def test_prompt_log_probabilities_are_maps_that_begin_with_none():
    prompt = array("i", [3, 4, 5]).tobytes()
    scored = logprobs([-0.5, -2.0], [[(4, -0.5)], [(7, -0.25)]])
    assert prompt_logprobs(prompt, scored) == [
        None,
        {"4": {"logprob": -0.5, "rank": 1}},
        {"5": {"logprob": -2.0}, "7": {"logprob": -0.25, "rank": 1}},
    ]
    assert prompt_logprobs(array("i", [3]).tobytes(), Logprobs(b"")) == [None]


def test_the_final_chunk_carries_those_of_its_own_tokens():
    chunk = final_chunk([9], Finished(7, "stop", 2, 1, 0), logprobs([-1.0]))
    assert (chunk["log_probs"], chunk["finish_reason"]) == ([-1.0], "stop")
