#!/usr/bin/python
"""Ansible module: merge the splits of a GGUF model into one verified file."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gguf_merge
short_description: Merge GGUF splits and verify the result, as a job that outlives the controller
description:
  - Runs C(llama-gguf-split --merge) from the first split into a temporary file, compares every tensor with its split
    byte by byte as it is written, waits for the disk, and renames the file.
  - Before, it checks that the splits belong together and that there is room for the merged file.
  - A receipt says which splits the file was made from, so that a later run needs neither the splits nor a hash.
  - A file that is there without a receipt is never overwritten. It is adopted where its digest is O(sha256), or
    where it holds what the splits hold; else the module fails. The splits need not be on the host for that where
    O(sources) says which hub they are on; a few megabytes of headers are fetched then.
  - The work is the systemd unit C(octoserve-job-merge-<name>.service). When the controller is lost, it goes on, and
    the next run attaches to it.
options:
  name:
    description: Name of the model; names the job.
    type: str
    required: true
  splits:
    description: All splits in order.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Path of the split.
        type: path
        required: true
      sha256:
        description:
          - Its digest, for which there must be a receipt in O(receipt_dir), as M(hub_fetch) writes it.
          - If not given, the one in the receipt, if there is one.
        type: str
  output:
    description: Path of the merged file.
    type: path
    required: true
  receipt_dir:
    description: Folder of the receipt; the folder of O(output) if not given.
    type: path
  tool:
    description: Path of C(llama-gguf-split); needed where splits are merged, not where a file is there already.
    type: path
  sha256:
    description: Digest that the merged file must have, where it is known.
    type: str
  sources:
    description: Where the splits come from, as in M(hub_fetch); files that are no splits are ignored.
    type: list
    elements: dict
    default: []
  token:
    description: Token for the hub of O(sources).
    type: str
  proxy:
    description: Proxy for http and https; C(http_proxy) and the like in the task's environment count otherwise.
    type: str
  remove_splits:
    description: Remove the splits once the merged file is verified.
    type: bool
    default: false
  timeout:
    description: Seconds after which the job is ended.
    type: int
    default: 86400
attributes:
  check_mode:
    description: Says what would be done; splits need not be there yet.
    support: full
  diff_mode:
    description: Shows the digest of the merged file and the splits that are there, before and after.
    support: full
author:
  - The Octoserve authors
"""

EXAMPLES = r"""
- name: Merge two splits
  gguf_merge:
    name: tiny
    splits:
      - path: /var/lib/octoserve/models/tiny/tiny-00001-of-00002.gguf
      - path: /var/lib/octoserve/models/tiny/tiny-00002-of-00002.gguf
    output: /var/lib/octoserve/models/tiny/tiny.gguf
    tool: /opt/octoserve/llama.cpp/b9999/bin/llama-gguf-split
"""

RETURN = r"""
path:
  description: Path of the merged file.
  returned: success
  type: str
size:
  description: Its bytes.
  returned: when it is there
  type: int
sha256:
  description: Its digest.
  returned: when it is there
  type: str
adopted:
  description: Whether the file was there and was only verified.
  returned: after a job ran
  type: bool
needs_splits:
  description: Whether the splits must be on the host before the module can do its work.
  returned: in check mode, and when nothing was to be done
  type: bool
needs_room:
  description: Whether the module will write the merged file, for which there must be room.
  returned: in check mode, and when nothing was to be done
  type: bool
finished:
  description: Whether the job has ended.
  returned: always
  type: bool
progress:
  description: Phase, C(done) of C(total), rate and time left of the job, and all of it as C(text).
  returned: while and after a job ran
  type: dict
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.octoserve.fetch import FetchError, check_space, environment, to_spec, wanted_files
from ansible.module_utils.octoserve.gguf import GgufError
from ansible.module_utils.octoserve.job import ARGUMENTS, Job, JobError, follow
from ansible.module_utils.octoserve.merge import expected_layout, identities, is_current
from ansible.module_utils.octoserve.receipt import Entry, Receipt, receipt_name
from ansible.module_utils.octoserve.splits import read_set

SPLIT = {"path": {"type": "path", "required": True}, "sha256": {"type": "str"}}


def main() -> None:
    """Say what is there, or follow the job until the merged file is."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "splits": {"type": "list", "elements": "dict", "required": True, "options": SPLIT},
            "output": {"type": "path", "required": True},
            "receipt_dir": {"type": "path"},
            "tool": {"type": "path"},
            "sha256": {"type": "str"},
            "sources": {"type": "list", "elements": "dict", "default": []},
            "token": {"type": "str", "no_log": True},
            "proxy": {"type": "str"},
            "remove_splits": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 86400},
            **ARGUMENTS,
        },
        supports_check_mode=True,
    )
    try:
        Merge(module).run()
    except (GgufError, FetchError, JobError) as error:
        module.fail_json(msg=str(error))


class Merge:
    """One call of the module."""

    def __init__(self, module: AnsibleModule) -> None:
        """Look at the parameters and the receipt."""
        self.module = module
        params = module.params
        self.splits = {Path(item["path"]): (item["sha256"] or "").lower() or None for item in params["splits"]}
        self.output = Path(params["output"])
        self.sha256 = (params["sha256"] or "").lower() or None
        self.receipt = Receipt(Path(params["receipt_dir"] or self.output.parent))
        self.made_from = identities(self.splits, self.receipt)
        named = {item.name: item for item in wanted_files(params["sources"])}
        self.sources = [named[path.name] for path in self.splits if path.name in named and not named[path.name].local]

    def run(self) -> None:
        """Decide, start, follow."""
        params = self.module.params
        before = {} if params["_job_run"] else self.first_look()
        job = Job(
            f"merge-{params['name']}",
            "merge_worker",
            {
                "tool": params["tool"],
                "splits": [str(path) for path in self.splits],
                "made_from": self.made_from,
                "output": str(self.output),
                "receipt_dir": str(self.receipt.folder),
                "sha256": self.sha256,
                "sources": to_spec(self.sources),
            },
            {"token": params["token"], "environment": environment(params["proxy"])},
            timeout=params["timeout"],
        )
        outcome = follow(job, params["_job_run"], params["_job_wait"])
        result = outcome.finish(self.module, **before)
        self.remove(self.removable())
        self.module.exit_json(changed=True, **result, **before)

    def first_look(self) -> dict[str, Any]:
        """End the module where no job is needed, or none may run, or none can; else return the diff."""
        entry = self.receipt.valid(receipt_name(self.output, self.receipt.folder))
        current = is_current(entry, self.made_from, self.sha256)
        adopt = self.output.exists() and not entry
        known = bool(self.sha256) or len(self.sources) == len(self.splits)
        needs_splits = not current and not (adopt and known)
        diff = self.diff(entry, current)
        if current and entry:
            self.finish_current(entry, diff)
        if self.module.check_mode:
            verb = "verify and adopt" if adopt else "merge the splits into"
            self.module.exit_json(
                changed=True,
                finished=True,
                path=str(self.output),
                needs_splits=needs_splits,
                needs_room=not adopt,
                msg=f"would {verb} {self.output}",
                diff=diff,
            )
        if needs_splits:
            self.check_splits(adopt)
        return {"diff": diff}

    def finish_current(self, entry: Entry, diff: dict[str, str]) -> None:
        """Nothing to merge; at most splits to remove."""
        removable = self.removable()
        if not self.module.check_mode:
            self.remove(removable)
        self.module.exit_json(
            changed=bool(removable),
            finished=True,
            path=str(self.output),
            size=entry.size,
            sha256=entry.sha256,
            needs_splits=False,
            needs_room=False,
            diff=diff,
        )

    def check_splits(self, adopt: bool) -> None:
        """Find in a second what would end the job after minutes."""
        parts = read_set(list(self.splits))
        for path, wanted in self.splits.items():
            self.check_digest(path, wanted)
        if adopt:
            return
        self.check_room(expected_layout(parts).size)
        tool = self.module.params["tool"]
        if not tool or not os.access(tool, os.X_OK):
            self.module.fail_json(msg=f"{tool or 'llama-gguf-split'}: is no program that can be run; build it first")

    def check_digest(self, path: Path, wanted: str | None) -> None:
        """A split of another quantization has the same header; what its digest is, the receipt knows."""
        entry = self.receipt.valid(receipt_name(path, self.receipt.folder))
        if wanted and entry is None:
            raise GgufError(f"{path}: has no valid receipt for sha256 {wanted}; let hub_fetch verify it")
        if wanted and entry and entry.sha256 != wanted:
            raise GgufError(f"{path}: sha256 is {entry.sha256}, wanted {wanted}; fetch it again")

    def check_room(self, size: int) -> None:
        """A merge needs room for the whole model once more."""
        try:
            check_space(self.output.parent, size)
        except FetchError as error:
            raise FetchError(f"{error}. Or serve the splits without merging, where the stack loads splits") from error

    def removable(self) -> list[Path]:
        """Return the splits that are there and no longer wanted."""
        return [path for path in self.splits if self.module.params["remove_splits"] and path.exists()]

    def remove(self, paths: list[Path]) -> None:
        """Remove splits; the receipt keeps what the merged file was made from."""
        for path in paths:
            path.unlink()
            Receipt(self.receipt.folder).forget(receipt_name(path, self.receipt.folder))

    def diff(self, entry: Entry | None, current: bool) -> dict[str, str]:
        """Show the merged file and the splits, before and after."""
        there = [path for path in self.splits if path.exists()]
        stays = [] if self.module.params["remove_splits"] else there
        found = f"{entry.sha256}  {self.output}" if entry else f"not verified  {self.output}"
        return {
            "before": _lines([found] if entry or self.output.exists() else [], there),
            "after": _lines([found if current else f"{self.sha256 or 'verified'}  {self.output}"], stays),
        }


def _lines(first: list[str], splits: list[Path]) -> str:
    return "".join(f"{line}\n" for line in [*first, *(f"split  {path}" for path in splits)])


if __name__ == "__main__":
    main()
