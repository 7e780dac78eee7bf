"""Cards that a lane can be planned for without being there."""

from typing import NamedTuple

from engine.cuda.sizing import Card
from engine.planning import TargetError

_GIB = 1 << 30


class KnownCard(NamedTuple):
    """A card by the name that `--card` takes."""

    card: Card
    measured: bool
    """Its memory is what a driver reported to this project. Else it is what drivers commonly report, a little low."""


def _about(name: str, sm_count: int, capability: tuple[int, int], gib: float) -> KnownCard:
    return KnownCard(Card(name, sm_count, capability, int(gib * _GIB)), measured=False)


KNOWN_CARDS = {
    "A100-40GB": _about("NVIDIA A100-SXM4-40GB", 108, (8, 0), 39.3),
    "A100-80GB": _about("NVIDIA A100-SXM4-80GB", 108, (8, 0), 79.1),
    "A10": _about("NVIDIA A10", 72, (8, 6), 21.9),
    "L4": _about("NVIDIA L4", 58, (8, 9), 21.9),
    "L40S": _about("NVIDIA L40S", 142, (8, 9), 44.3),
    "RTX-4090": _about("NVIDIA GeForce RTX 4090", 128, (8, 9), 23.5),
    "H100-PCIe": _about("NVIDIA H100 PCIe", 114, (9, 0), 79.1),
    "H100": _about("NVIDIA H100 80GB HBM3", 132, (9, 0), 79.1),
    # tests/gpu/results/smoke.jsonl.
    "H200": KnownCard(Card("NVIDIA H200", 132, (9, 0), 150_109_880_320), measured=True),
    "B200": _about("NVIDIA B200", 148, (10, 0), 178.3),
    "RTX-PRO-6000": _about("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, (12, 0), 94.9),
}


def known_card(name: str) -> KnownCard:
    """The card that `--card` names, by its short name or the driver's; case, blanks and hyphens do not matter.

    Raises `TargetError`, which lists the cards.
    """
    wanted = _plain(name)
    for short, known in KNOWN_CARDS.items():
        if wanted in (_plain(short), _plain(known.card.name)):
            return known
    raise TargetError(
        f"--card is {name[:60]!r}, but the cards that are known are {', '.join(KNOWN_CARDS)}: name one of them, or run "
        "where the card is"
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
