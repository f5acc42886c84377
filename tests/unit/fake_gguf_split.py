"""Stands in for llama-gguf-split in unit tests, which must not need a build; the real tool is tested in molecule.

FAKE_GGUF_SPLIT names what goes wrong: nothing, flip (one bit of the last tensor), short (stops half way and ends 0,
as the real tool does on a full disk), die (ends 3 half way), late (ends 3 after all), extra (more bytes), order
(metadata in another order), silent (no output), pause (waits half way for the file FAKE_GGUF_SPLIT_GO).
"""

import os
import struct
import sys
import time
from pathlib import Path

from octoserve.gguf import read
from octoserve.merge import expected_layout
from octoserve.splits import split_paths


def main() -> int:
    """Merge into the output, in small steps."""
    fault = os.environ.get("FAKE_GGUF_SPLIT", "nothing")
    _, merge, first, output = sys.argv
    assert merge == "--merge"
    if fault == "silent":
        return 0
    parts = [read(path) for path in split_paths(Path(first))]
    layout = expected_layout(parts)
    with Path(output).open("xb", buffering=0) as out:
        out.write(bytes(len(layout.header)))
        for number, segment in enumerate(layout.segments):
            if number == len(layout.segments) // 2:
                if fault == "short":
                    return 0
                if fault == "die":
                    sys.stderr.write("\x1b[3Dgguf_merge: failed to load input GGUF\n")
                    return 3
                while fault == "pause" and not Path(os.environ["FAKE_GGUF_SPLIT_GO"]).exists():
                    time.sleep(0.01)
            data = bytearray(segment.source.read_bytes()[segment.source_offset :][: segment.nbytes])
            if fault == "flip" and number == len(layout.segments) - 1:
                data[-1] ^= 1
            out.write(bytes(data) + bytes(-len(data) % 32))
        out.seek(0)
        out.write(_reordered(layout.header) if fault == "order" else layout.header)
        if fault == "extra":
            out.seek(0, os.SEEK_END)
            out.write(bytes(32))
    return 3 if fault == "late" else 0


def _reordered(header: bytes) -> bytes:
    """Move `split.count`, the last pair, to the front, where a tool that changes it in place leaves it."""
    pair = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IH", 2, 0)
    start = 4 + 4 + 8 + 8
    at = header.index(pair)
    return header[:start] + pair + header[start:at] + header[at + len(pair) :]


if __name__ == "__main__":
    sys.exit(main())
