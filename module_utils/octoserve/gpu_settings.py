"""How the cards are set, and whether they reach each other's memory, through NVML. Beside nvml.py's facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import nvml

try:
    import pynvml
except ImportError:  # said by nvml.opened()
    pynvml = None

# nvml.h, nvmlGpuP2PCapsIndex_t. As numbers: nvidia-ml-py 13.590 has the tuple (0,) as NVML_P2P_CAPS_INDEX_READ.
P2P_READ, P2P_WRITE = 0, 1
P2P_OK = 0
# nvml.h, nvmlGpuP2PStatus_t.
P2P_STATUS = {
    P2P_OK: "OK",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "no route through the host bridges",
    4: "switched off in the driver",
    5: "not supported",
    6: "unknown",
}


@dataclass(frozen=True)
class Settings:
    """One card. None where the card or the driver does not say; power in watts."""

    index: int
    compute_capability: tuple[int, int] | None
    ecc: bool | None
    ecc_after_reboot: bool | None
    uncorrected_errors: int | None
    """Since the driver was loaded."""
    persistence: bool | None
    power_limit: float | None
    default_power_limit: float | None


@dataclass(frozen=True)
class Pair:
    """What one card can do with the memory of another; keys of P2P_STATUS, None where NVML does not say."""

    source: int
    target: int
    read: int | None
    write: int | None


@dataclass(frozen=True)
class Details:
    """All cards, and all ordered pairs of them."""

    cards: tuple[Settings, ...]
    pairs: tuple[Pair, ...]


def read(count: int) -> Details:
    """Read where NVML is open. Raises GpuError (LOST_CARD) where a card does not answer."""
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        return Details(
            cards=tuple(_settings(index, handle) for index, handle in enumerate(handles)),
            pairs=tuple(
                Pair(i, k, _p2p(source, target, P2P_READ), _p2p(source, target, P2P_WRITE))
                for i, source in enumerate(handles)
                for k, target in enumerate(handles)
                if i != k
            ),
        )
    except pynvml.NVMLError as error:
        raise nvml.GpuError(
            nvml.LOST_CARD,
            f"a card does not answer: {error} (NVML code {error.value})",
            "every card that the driver counts to answer",
            "read the Xid in `journalctl -k --grep Xid`, then reboot the host",
        ) from error


def _settings(index: int, handle: Any) -> Settings:
    ecc = nvml.offered(pynvml.nvmlDeviceGetEccMode, handle)
    limit = nvml.offered(pynvml.nvmlDeviceGetPowerManagementLimit, handle)
    default = nvml.offered(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    persistence = nvml.offered(pynvml.nvmlDeviceGetPersistenceMode, handle)
    return Settings(
        index=index,
        compute_capability=nvml.offered(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        ecc=None if ecc is None else bool(ecc[0]),
        ecc_after_reboot=None if ecc is None else bool(ecc[1]),
        uncorrected_errors=nvml.offered(
            lambda card: pynvml.nvmlDeviceGetTotalEccErrors(
                card, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            ),
            handle,
        ),
        persistence=None if persistence is None else bool(persistence),
        power_limit=None if limit is None else limit / 1000,
        default_power_limit=None if default is None else default / 1000,
    )


def _p2p(source: Any, target: Any, index: int) -> int | None:
    status: int | None = nvml.offered(lambda card: pynvml.nvmlDeviceGetP2PStatus(card, target, index), source)
    return status
