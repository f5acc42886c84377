"""Findings about the cards: that they are the right ones, how they are set, and whether they reach each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import gpu_settings, nvml
from .finding import CANNOT_SEE, ERROR, GIB, OK, WARNING, Finding, cards, silent
from .gpu_settings import Details, Pair, Settings

MAX_PAIRS = 4  # of a kind in a message; 8 cards have 56


@dataclass(frozen=True)
class WantedGpus:
    """`name` is a regular expression that every card's name must match; None where any will do."""

    count: int
    name: str | None
    utilization: float


def findings(gpus: nvml.Gpus, details: Details, wanted: WantedGpus, model_bytes: int | None) -> list[Finding]:
    """All findings about the cards."""
    return [
        count(gpus, wanted.count),
        names(gpus, wanted.name),
        memory(gpus, wanted.utilization, model_bytes),
        ecc(details.cards),
        persistence(details.cards),
        power_limit(details.cards),
        p2p(details.pairs, len(gpus.cards)),
    ]


def not_visible(error: nvml.GpuError) -> list[Finding]:
    """The findings where NVML gives no cards.

    An error also inside a container: the server would run in it and see no more than this.
    """
    wanted = "readable through NVML"
    return [
        Finding("GPUs", ERROR, error.found, error.wanted, error.action),
        *(
            Finding(name, CANNOT_SEE, "NVML gives no cards", wanted, "mend GPUs first")
            for name in ("GPU memory", "ECC", "persistence mode", "power limit", "P2P")
        ),
    ]


def count(gpus: nvml.Gpus, wanted: int) -> Finding:
    """The number of cards."""
    found = f"{len(gpus.cards)} card{'' if len(gpus.cards) == 1 else 's'} in NVML"
    try:
        nvml.check_count(gpus, wanted)
    except nvml.GpuError as error:
        return Finding("GPU count", ERROR, error.found, error.wanted, error.action)
    return Finding("GPU count", OK, found, f"{wanted}")


def names(gpus: nvml.Gpus, wanted: str | None) -> Finding:
    """What the cards are."""
    kinds = Counter(card.name for card in gpus.cards)
    found = ", ".join(f"{number} x {name}" for name, number in sorted(kinds.items())) or "none"
    if wanted is not None:
        others = [card for card in gpus.cards if not re.search(wanted, card.name)]
        if others:
            named = ", ".join(sorted({card.name for card in others}))
            found = f"{cards(card.index for card in others)}: {named}"
            return Finding("GPU names", ERROR, found, f"each matches {wanted}", "choose a profile for these cards")
    elif len(kinds) > 1:
        mend = "use cards of one kind: the slowest sets the pace"
        return Finding("GPU names", WARNING, found, "cards of one kind", mend)
    return Finding("GPU names", OK, found, f"each matches {wanted}" if wanted is not None else "cards of one kind")


def memory(gpus: nvml.Gpus, utilization: float, model_bytes: int | None) -> Finding:
    """The cards' memory against the model's file. What is free now says nothing: the old service may hold it."""
    if not gpus.cards:
        return Finding("GPU memory", CANNOT_SEE, "no card", "cards with memory", "mend GPU count first")
    totals = Counter(card.memory_total for card in gpus.cards)
    found = ", ".join(f"{number} x {total / GIB:.2f} GiB" for total, number in sorted(totals.items()))
    if len(totals) > 1:
        mend = "use cards of one size: tensor parallelism takes as much of each as the smallest has"
        return Finding("GPU memory", WARNING, found, "the same on each card", mend)
    if model_bytes is None:
        return Finding("GPU memory", OK, found, "the same on each card (the model's size is not known yet)")
    usable = len(gpus.cards) * min(totals) * utilization
    wanted = f"together at least {model_bytes / GIB:.2f} GiB, the model's file, within {utilization:g} of it"
    if model_bytes > usable:
        mend = "take a smaller quantization or more cards, unless the profile offloads weights (cpu-offload-gb)"
        return Finding("GPU memory", WARNING, f"{found}, {usable / GIB:.2f} GiB to use", wanted, mend)
    return Finding("GPU memory", OK, found, wanted)


def ecc(found: Sequence[Settings]) -> Finding:
    """Error correction of the cards' memory, and what it could not correct."""
    wanted = "on, and no uncorrected error since the driver was loaded"
    unknown = [card.index for card in found if card.ecc is None]
    broken = [card for card in found if card.uncorrected_errors]
    if broken:
        measured = ", ".join(f"card {card.index}: {card.uncorrected_errors} uncorrected errors" for card in broken)
        mend = "look for Xid 48, 63, 64 or 94 in `journalctl -k --grep Xid`, reset the card or reboot; replace it if"
        return Finding("ECC", WARNING, measured, wanted, f"{mend} they come back")
    off = [card.index for card in found if card.ecc is False]
    if off:
        pending = [card.index for card in found if card.ecc is False and card.ecc_after_reboot]
        measured = f"off on {cards(off)}" + (f", on after a reboot on {cards(pending)}" if pending else "")
        mend = "`nvidia-smi -e 1`, then reboot: a flipped bit in a weight gives wrong answers, and nothing says so"
        return Finding("ECC", WARNING, measured, wanted, mend)
    if unknown or not found:
        measured = silent(unknown)
        return Finding("ECC", CANNOT_SEE, measured, wanted, "`nvidia-smi -q -d ECC` shows what the card offers")
    return Finding("ECC", OK, "on, no uncorrected errors", wanted)


def persistence(found: Sequence[Settings]) -> Finding:
    """Whether the driver keeps the cards' state while nothing runs on them."""
    wanted = "on, or each start initializes every card again, which takes seconds"
    off = [card.index for card in found if card.persistence is False]
    if off:
        mend = "`systemctl enable --now nvidia-persistenced`, or `nvidia-smi -pm 1` until the next reboot"
        return Finding("persistence mode", WARNING, f"off on {cards(off)}", wanted, mend)
    unknown = [card.index for card in found if card.persistence is None]
    if unknown or not found:
        measured = silent(unknown)
        return Finding("persistence mode", CANNOT_SEE, measured, wanted, "`nvidia-smi -q` as root")
    return Finding("persistence mode", OK, "on", wanted)


def power_limit(found: Sequence[Settings]) -> Finding:
    """Whether someone set the cards slower than they are sold."""
    wanted = "the card's default"
    known = [
        (card.index, card.power_limit, card.default_power_limit)
        for card in found
        if card.power_limit is not None and card.default_power_limit is not None
    ]
    lower = [(index, limit, default) for index, limit, default in known if limit < default]
    if lower:
        measured = ", ".join(f"card {index}: {limit:g} W of {default:g} W" for index, limit, default in lower)
        mend = f"`nvidia-smi -pl {lower[0][2]:.0f}`, unless the power supply or the cooling needs the lower limit"
        return Finding("power limit", WARNING, measured, wanted, mend)
    if len(known) < len(found) or not found:
        missing = [card.index for card in found if card.index not in {index for index, _, _ in known}]
        measured = silent(missing)
        return Finding("power limit", CANNOT_SEE, measured, wanted, "`nvidia-smi -q -d POWER` as root")
    limits = ", ".join(f"{limit:g} W" for limit in sorted({limit for _, limit, _ in known}))
    return Finding("power limit", OK, limits, wanted)


def p2p(pairs: Sequence[Pair], number: int) -> Finding:
    """The matrix of who may read and write whose memory, as the driver sees it."""
    wanted = "every card reads and writes every other's memory"
    if number < 2:
        return Finding("P2P", OK, "one card: nothing to reach", wanted)
    bad: dict[str, list[str]] = {}
    for pair in pairs:
        for what, status in (("read", pair.read), ("write", pair.write)):
            if status not in (None, gpu_settings.P2P_OK):
                name = gpu_settings.P2P_STATUS.get(status or 0, f"status {status}")
                bad.setdefault(f"{what}: {name}", []).append(f"{pair.source}->{pair.target}")
    if bad:
        measured = "; ".join(f"{kind} ({_some(found)})" for kind, found in sorted(bad.items()))
        mend = (
            "look at `nvidia-smi topo -p2p r`; large BARs (Resizable BAR) in the firmware, IOMMU off or in passthrough "
            "and ACS off let cards reach each other. Without it NCCL goes through host memory"
        )
        return Finding("P2P", WARNING, measured, wanted, mend)
    unknown = [f"{pair.source}->{pair.target}" for pair in pairs if None in (pair.read, pair.write)]
    if unknown:
        return Finding("P2P", CANNOT_SEE, f"NVML does not say: {_some(unknown)}", wanted, "`nvidia-smi topo -p2p r`")
    # The driver's word only: no value is sent from card to card while the old service is at work there.
    return Finding("P2P", OK, f"OK between all {len(pairs)} ordered pairs, says the driver", wanted)


def _some(found: Iterable[str]) -> str:
    listed = list(found)
    more = f" and {len(listed) - MAX_PAIRS} more" if len(listed) > MAX_PAIRS else ""
    return ", ".join(listed[:MAX_PAIRS]) + more
