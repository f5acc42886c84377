#!/usr/bin/python
"""Ansible module: fill a folder with verified model files."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: hub_fetch
short_description: Fetch model files and verify them, as a job that outlives the controller
description:
  - Fetches files from a Hugging Face style hub or from folders on the host into one folder, and verifies size and
    SHA-256 of each. A receipt in the folder keeps a later run from hashing again.
  - Downloads resume, within a run and in a later one. A file that is there already is verified in place.
  - A downloaded file with a wrong digest is kept as C(<name>.bad) and used when the wanted digest is corrected to
    its own. A good file of another revision stays until the new one is verified.
  - The work is the systemd unit C(octoserve-job-fetch-<name>.service). When the controller is lost, it goes on, and
    the next run attaches to it.
options:
  name:
    description: Name of the model; names the job.
    type: str
    required: true
  dest:
    description: Folder for the files; made where it is missing.
    type: path
    required: true
  sources:
    description: Where files come from.
    type: list
    elements: dict
    required: true
    suboptions:
      url:
        description:
          - C(https://host/organisation/repository/resolve/revision), a folder on the host, or a C(file://) URL of one.
        type: str
        required: true
      files:
        description: The files wanted from there.
        type: list
        elements: dict
        required: true
        suboptions:
          path:
            description: Path below O(sources[].url).
            type: str
            required: true
          name:
            description: Name below O(dest); the last part of the path if not given.
            type: str
          size:
            description: Bytes. If not given, the first fetch takes them from the hub and the receipt pins them.
            type: int
          sha256:
            description: Digest. If not given, as with the size.
            type: str
  token:
    description: Token for the hub. It is sent to the host of the URL only, never to one that it redirects to.
    type: str
  proxy:
    description: Proxy for http and https; C(http_proxy) and the like in the task's environment count otherwise.
    type: str
  skip:
    description: Names of files that are not needed now, such as splits that have been merged.
    type: list
    elements: str
    default: []
  merge_later:
    description:
      - Names of files that will be merged into one file beside them. There must be room for their bytes once more, or
        nothing is fetched.
    type: list
    elements: str
    default: []
  link:
    description: Make hard links to files in a folder of the same file system instead of copies.
    type: bool
    default: false
  timeout:
    description: Seconds after which the job is ended. What has arrived is kept.
    type: int
    default: 86400
attributes:
  check_mode:
    description: Says which files and how many bytes would be fetched.
    support: full
  diff_mode:
    description: Shows the digests of the files that are there and of those that will be.
    support: full
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Fetch a model in two splits
  hub_fetch:
    name: tiny
    dest: /var/lib/octoserve/models/tiny
    sources:
      - url: https://huggingface.co/example/tiny-GGUF/resolve/4f1c2d
        files:
          - path: Q4/tiny-00001-of-00002.gguf
            size: 18200000
            sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
          - path: Q4/tiny-00002-of-00002.gguf
"""

RETURN = r"""
files:
  description: Name below the folder, size and digest of each verified file.
  returned: success
  type: list
  elements: dict
  sample: [{name: tiny-00001-of-00002.gguf, size: 18200000, sha256: 9f86...}]
fetched:
  description: Names of the files that were fetched, or would be in check mode.
  returned: success
  type: list
  elements: str
adopted:
  description: Names of the files that were there and were verified, or would be in check mode.
  returned: success
  type: list
  elements: str
bytes_fetched:
  description: Bytes of the files fetched; in check mode what is to be fetched as far as sizes are known.
  returned: success
  type: int
finished:
  description: Whether the job has ended.
  returned: always
  type: bool
progress:
  description: Phase, C(done) of C(total), rate and time left of the job, and all of it as C(text).
  returned: while and after a job ran
  type: dict
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve.fetch import (
    FetchError,
    Plan,
    Wanted,
    check_space,
    environment,
    plan,
    room_for_merge,
    to_spec,
    verified,
    wanted_files,
)
from ansible.module_utils.octoserve.job import ARGUMENTS, Job, JobError, follow
from ansible.module_utils.octoserve.receipt import Receipt

FILE = {
    "path": {"type": "str", "required": True},
    "name": {"type": "str"},
    "size": {"type": "int"},
    "sha256": {"type": "str"},
}
SOURCE = {
    "url": {"type": "str", "required": True},
    "files": {"type": "list", "elements": "dict", "required": True, "options": FILE},
}


def main() -> None:
    """Say what is there, or follow the job until it has filled the folder."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "dest": {"type": "path", "required": True},
            "sources": {"type": "list", "elements": "dict", "required": True, "options": SOURCE},
            "token": {"type": "str", "no_log": True},
            "proxy": {"type": "str"},
            "skip": {"type": "list", "elements": "str", "default": []},
            "merge_later": {"type": "list", "elements": "str", "default": []},
            "link": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 86400},
            **ARGUMENTS,
        },
        supports_check_mode=True,
    )
    try:
        run(module)
    except (FetchError, JobError) as error:
        module.fail_json(msg=str(error))


def run(module: AnsibleModule) -> None:
    """Do what main says; a fault is a FetchError or JobError."""
    folder = Path(module.params["dest"])
    wanted = tuple(item for item in wanted_files(module.params["sources"]) if item.name not in module.params["skip"])
    before = {} if module.params["_job_run"] else first_look(module, folder, wanted)
    job = Job(
        f"fetch-{module.params['name']}",
        "fetch_worker",
        {
            "folder": str(folder),
            "files": to_spec(wanted),
            "link": module.params["link"],
            "merge_later": module.params["merge_later"],
        },
        {"token": module.params["token"], "environment": environment(module.params["proxy"])},
        timeout=module.params["timeout"],
    )
    outcome = follow(job, module.params["_job_run"], module.params["_job_wait"])
    module.exit_json(changed=True, **outcome.finish(module, **before), **before)


def first_look(module: AnsibleModule, folder: Path, wanted: tuple[Wanted, ...]) -> dict[str, Any]:
    """End the module where nothing is to be done, or nothing may be, or cannot; else return the diff."""
    now = plan(folder, wanted)
    merged = room_for_merge(folder, wanted, module.params["merge_later"])
    check_space(folder, merged + (0 if module.params["link"] else now.bytes_to_fetch))
    files = verified(Receipt(folder), wanted)
    if now.complete and not now.leftovers:
        module.exit_json(
            changed=False, finished=True, files=files, fetched=[], adopted=[], bytes_fetched=0, diff=diff(now)
        )
    if module.check_mode:
        module.exit_json(
            changed=True,
            finished=True,
            files=files,
            fetched=[item.name for item in now.missing],
            adopted=[item.name for item in now.unverified],
            bytes_fetched=now.bytes_to_fetch,
            msg=message(now),
            diff=diff(now),
        )
    return {"diff": diff(now)}


def message(now: Plan) -> str:
    """Say in words what would be done."""
    parts = []
    if now.missing:
        sizes = [f"{now.bytes_to_fetch / 1e9:.2f} GB"] if now.bytes_to_fetch else []
        sizes += [f"{now.unknown} of unknown size"] if now.unknown else []
        parts.append(", ".join([f"fetch {len(now.missing)} file(s)", *sizes]))
    if now.unverified:
        parts.append(f"verify {len(now.unverified)} file(s) that are there")
    if now.leftovers:
        parts.append(f"remove {len(now.leftovers)} leftover(s)")
    return "would " + ", ".join(parts)


def diff(now: Plan) -> dict[str, str]:
    """Show each wanted file with its digest, before and after."""

    def lines(items: tuple[Wanted, ...]) -> str:
        return "".join(f"{item.sha256 or 'digest to be pinned'}  {item.name}\n" for item in items)

    gone = "".join(f"leftover  {path.name}\n" for path in now.leftovers)
    return {"before": lines(now.present) + gone, "after": lines(now.present + now.unverified + now.missing)}


if __name__ == "__main__":
    main()
