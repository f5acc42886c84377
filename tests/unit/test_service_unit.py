"""What the unit of the service forbids and keeps. What systemd makes of it: tests/molecule/fake_engine/verify.yml."""

from __future__ import annotations

import os
from pathlib import Path

import jinja2
import pytest

ROOT = Path(__file__).parents[2]
DIRECTIVES = {
    "CapabilityBoundingSet": "",
    "LockPersonality": "yes",
    "NoNewPrivileges": "yes",
    "PrivateTmp": "yes",
    "ProtectControlGroups": "yes",
    "ProtectHome": "yes",
    "ProtectHostname": "yes",
    "ProtectKernelLogs": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectSystem": "strict",
    "RestrictNamespaces": "yes",
    "RestrictRealtime": "yes",
    "RestrictSUIDSGID": "yes",
    "SystemCallArchitectures": "native",
    "SystemCallFilter": "~@clock @cpu-emulation @module @mount @obsolete @raw-io @reboot @swap",
    "UMask": "0077",
    "User": "octoserve",
    # Every cache in a folder of its release, which is all that it may write.
    "CacheDirectory": "octoserve/vllm-1",
    "WorkingDirectory": "/var/cache/octoserve/vllm-1",
    # A crash, and an engine that ends with status 0, start it again; processes of the engine end with the server.
    "Restart": "always",
    "KillMode": "control-group",
}


@pytest.fixture
def unit() -> str:
    """The unit as Ansible renders it, of a service without cards."""
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.ChainableUndefined)
    environment.filters.update(basename=os.path.basename, dirname=os.path.dirname, systemd_quote=str)
    values = {"user": "octoserve", "group": "octoserve", "release": "/opt/octoserve/releases/vllm-1"}
    values |= {"home": "/opt/octoserve", "state_dir": "/var/lib/octoserve", "config_dir": "/etc/octoserve"}
    values |= {"model": "/srv/model.gguf", "memlock": "infinity"}
    numbers = {"start_timeout": 600, "stop_timeout": 60, "start_attempts": 3, "restart_delay": 30, "nofile": 1024}
    named = {f"vllm_service_{name}": value for name, value in {**values, **numbers}.items()}
    template = environment.from_string((ROOT / "templates/vllm.service.j2").read_text())
    return template.render({**named, "_vllm_service_attempt": 700, "_vllm_service_words": ["--port=8000"]})


def test_what_the_server_may_not_do_and_where_it_writes(unit: str) -> None:
    lines = [line.partition("=") for line in unit.splitlines() if not line.startswith("#")]
    found = {name: value for name, _, value in lines if name in DIRECTIVES}
    assert found == DIRECTIVES


@pytest.mark.parametrize("name", ["DeviceAllow", "DevicePolicy", "PrivateDevices", "ProtectClock"])
def test_every_device_is_left_to_it(unit: str, name: str) -> None:
    """Each of these closes /dev/nvidia*; ProtectClock by the DeviceAllow=char-rtc that it implies (systemd.exec(5))."""
    assert f"\n{name}=" not in unit
