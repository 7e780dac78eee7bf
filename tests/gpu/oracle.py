"""`transformers` on the same GPU: float32 is the reference, the lane's own type the yardstick for the lane's error."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

STEPS = 16
"""Teacher-forced tokens behind each prompt; every one of them is predicted, so are the logits after the prompt."""


class Case(NamedTuple):
    """A prompt and the tokens that are forced behind it."""

    prompt: list[int]
    forced: list[int]


def cases(vocab: int, lengths: Sequence[int], seed: int) -> list[Case]:
    """Random prompts of the given lengths, with random forced tokens: the logits must be right behind any text."""
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randint(10, vocab, (length + STEPS,), generator=generator).tolist() for length in lengths]
    return [Case(drawn[:-STEPS], drawn[-STEPS:]) for drawn in draws]


def text_cases(tokens: Sequence[int], lengths: Sequence[int], seed: int) -> list[Case]:
    """As `cases`, cut from a text: for weights that have learned some, random tokens are noise."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        begin = int(torch.randint(0, len(tokens) - length - STEPS, (1,), generator=generator))
        part = list(tokens[begin : begin + length + STEPS])
        made.append(Case(part[:length], part[length:]))
    return made


def load(directory: Path, weights: dict[str, Tensor]) -> Any:
    """The model of config.json in float32 on the GPU, with `weights`."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(directory)
    config._attn_implementation = "sdpa"
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cuda"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    finally:
        torch.set_default_dtype(previous)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise RuntimeError(f"state dict differs: missing {missing[:3]}, unexpected {unexpected[:3]}")
    model.tie_weights()
    return model.eval()


def halve(model: Any, dtype: torch.dtype) -> Any:
    """The same model in a type of two bytes, its RoPE frequencies still float32, as `from_pretrained` would have it."""
    rotary = model.model.rotary_emb
    kept = rotary.inv_freq.clone()
    model.to(dtype)
    rotary.inv_freq = kept
    return model


@torch.inference_mode()
def logprobs(model: Any, case: Case) -> Tensor:
    """float32 `[STEPS, vocab]`: what follows the prompt, and each forced token but the last."""
    ids = torch.tensor([[*case.prompt, *case.forced[:-1]]], device="cuda")
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, len(case.prompt) - 1 :]
    return model.lm_head(hidden).float().log_softmax(-1)


@torch.inference_mode()
def attention_entropy(model: Any, case: Case) -> float:
    """Mean entropy of the attention weights over layers, heads and queries with 32 keys and more, uniform = 1."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([case.prompt], device="cuda")
    output = model.model(input_ids=ids, output_attentions=True, use_cache=False)
    shares = []
    for weights in output.attentions:
        rows = weights[0, :, 32:]
        entropy = torch.special.entr(rows.float()).sum(-1)
        shares.append((entropy / torch.arange(33, ids.shape[1] + 1, device="cuda").log()).mean())
    model.set_attn_implementation("sdpa")
    return float(torch.stack(shares).mean())


class Error(NamedTuple):
    """Distance from the reference over all positions of all cases."""

    top8: float
    """Mean |difference| of the reference's top-8 logprobs, in nats."""
    regret: float
    """Largest loss of reference logprob by taking the other's best token, in nats."""


def error(reference: Sequence[Tensor], other: Sequence[Tensor]) -> Error:
    """Compare logprobs case by case."""
    sums, count, regret = 0.0, 0, 0.0
    for right, own in zip(reference, other, strict=True):
        best = right.topk(8, dim=-1)
        difference = (own.gather(1, best.indices) - best.values).abs()
        sums += float(difference.sum())
        count += difference.numel()
        chosen = right.gather(1, own.argmax(-1, keepdim=True))[:, 0]
        lost = float((best.values[:, 0] - chosen).max())
        regret = max(regret, lost)
        if not difference.isfinite().all():
            return Error(float("inf"), float("inf"))
    return Error(sums / count, regret)


def entropy(logprob: Tensor) -> float:
    """Mean entropy in nats."""
    return float(torch.special.entr(logprob.exp()).sum(-1).mean())
